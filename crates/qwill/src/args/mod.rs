//! The command line as it is typed. Nothing here is checked against a model or a machine yet: `source` and
//! `launch` turn these plain values into things that exist, and say so when they do not.

mod api;
mod bench;
mod choices;
#[cfg(test)]
mod deploy;
mod device;
mod doctor;
mod health;
mod launch;
mod model;
mod serving;
mod speculation;
mod values;

use std::path::PathBuf;

use clap::{Args, CommandFactory, Parser, Subcommand};

pub(crate) use api::ApiArgs;
pub(crate) use bench::{BenchArgs, BenchCommand, BenchServeArgs, BenchStepsArgs};
pub(crate) use choices::{
    ActivationsChoice, EndpointChoice, KvChoice, LogFormat, ProtocolChoice, QuantizeChoice, SpecChoice,
    StateChoice, Switch, WeightsChoice,
};
pub(crate) use device::{DeviceArgs, DeviceChoice};
pub(crate) use doctor::DoctorArgs;
pub(crate) use health::HealthArgs;
pub(crate) use launch::LaunchArgs;
pub(crate) use model::{DiskCacheArgs, MemoryArgs, ModelArgs, NumericsArgs, RandomArgs};
pub(crate) use serving::{ListenArgs, LogArgs, SamplingArgs};
pub(crate) use speculation::SpeculationArgs;
pub(crate) use values::ByteCount;

use crate::env;
use crate::fault::Fault;
use crate::settings::Settings;

/// Serves Qwen3.5-family models through an OpenAI-compatible API, from one binary.
#[derive(Debug, Parser)]
#[command(name = "qwill", version = crate::VERSION, max_term_width = 100)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

impl Cli {
    /// The whole command line. Only `serve` reads its directory from the environment: elsewhere it would stand against
    /// flags such as `--url`.
    pub(crate) fn definition() -> clap::Command {
        Self::command().mut_subcommands(|command| match command.get_name() {
            "serve" => command.mut_arg("model_dir", |path| path.env(env::MODEL_DIR)),
            _ => command,
        })
    }

    /// Every command that can be typed, those of a group after it; each knows its whole name.
    pub(crate) fn commands() -> Vec<clap::Command> {
        fn collect(command: &clap::Command, found: &mut Vec<clap::Command>) {
            for below in command.get_subcommands().filter(|below| below.get_name() != "help") {
                found.push(below.clone());
                collect(below, found);
            }
        }
        let mut root = Self::definition();
        root.build();
        let mut found = Vec::new();
        collect(&root, &mut found);
        found
    }
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Serve a model over HTTP: OpenAI-compatible API and a chat page
    ///
    /// Without a model directory the small embedded model is served, so the command works on a bare machine.
    /// Everything that can be wrong (files, shapes, memory, the port) is checked before the port is opened.
    Serve(Box<ServeArgs>),
    /// Talk to a model in the terminal
    ///
    /// With --url it talks to a running server; otherwise it starts the model in this process.
    /// Ctrl-C stops the answer, not the program. `/help` lists the commands.
    Chat(Box<ChatArgs>),
    /// Print what a model would take, byte by byte, without loading it
    ///
    /// Works for a model directory or a named geometry, for this machine or any other memory size.
    Plan(Box<PlanArgs>),
    /// Measure speed
    Bench(BenchArgs),
    /// Look at this machine: what models can run on, what is wrong, what to do about it
    ///
    /// Driver, GPUs, memory and who holds it, kernels, processor, disk, and a self-test of two seconds. Ends with
    /// code 1 when there is a problem; warnings are none.
    Doctor(DoctorArgs),
    /// Set up a client for a running server: coding agents, editors and others
    ///
    /// Asks the server for its model and prints the client's settings with what to type. With --write they are written,
    /// with --run the client is started with them.
    Launch(LaunchArgs),
    /// Ask a server whether it takes requests: code 0 if it does, otherwise 1 and the reason
    Health(HealthArgs),
    /// Print what completes commands and flags in a shell
    ///
    /// bash: `qwill completions bash > ~/.local/share/bash-completion/completions/qwill`. zsh: into `_qwill` in a
    /// directory of `$fpath`. fish: into `~/.config/fish/completions/qwill.fish`.
    Completions(CompletionsArgs),
    /// Write docs/reference.md to standard output
    #[command(hide = true)]
    GenerateReference,
}

#[derive(Debug, Args)]
pub(crate) struct ServeArgs {
    /// TOML file with settings: a flag's name without dashes before it, `=` and its value, one a line, such as
    /// `max-context = 65536`. Variables and flags win over it
    #[arg(long, value_name = "FILE", env = env::CONFIG, help_heading = "Configuration")]
    pub(crate) config: Option<PathBuf>,
    /// Print every setting and where it comes from, check model, template, memory plan, keys and port, and end: with
    /// code 0, or 1 when the server would not start. No weights are loaded
    #[arg(long, help_heading = "Configuration")]
    pub(crate) check: bool,
    /// With --check: print JSON
    #[arg(long, requires = "check", help_heading = "Configuration")]
    pub(crate) json: bool,
    /// What was set where.
    #[arg(skip)]
    pub(crate) settings: Settings,
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    #[command(flatten)]
    pub(crate) random: RandomArgs,
    #[command(flatten)]
    pub(crate) device: DeviceArgs,
    #[command(flatten)]
    pub(crate) numerics: NumericsArgs,
    #[command(flatten)]
    pub(crate) memory: MemoryArgs,
    #[command(flatten)]
    pub(crate) speculation: SpeculationArgs,
    #[command(flatten)]
    pub(crate) disk: DiskCacheArgs,
    #[command(flatten)]
    pub(crate) listen: ListenArgs,
    #[command(flatten)]
    pub(crate) api: ApiArgs,
    #[command(flatten)]
    pub(crate) sampling: SamplingArgs,
    #[command(flatten)]
    pub(crate) log: LogArgs,
    /// Let the device fail on purpose, for tests: once, lost, hang, panic or trap, a colon and the number of the step
    #[arg(long, hide = true, help_heading = "Tests")]
    pub(crate) fault: Option<Fault>,
}

#[derive(Debug, Args)]
pub(crate) struct CompletionsArgs {
    /// Which shell
    #[arg(value_name = "SHELL")]
    pub(crate) shell: clap_complete::Shell,
}

#[derive(Debug, Args)]
pub(crate) struct ChatArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    #[command(flatten)]
    pub(crate) device: DeviceArgs,
    #[command(flatten)]
    pub(crate) numerics: NumericsArgs,
    #[command(flatten)]
    pub(crate) memory: MemoryArgs,
    #[command(flatten)]
    pub(crate) speculation: SpeculationArgs,
    /// Talk to this server instead of starting a model, such as `http://127.0.0.1:18020`
    #[arg(long, help_heading = "Conversation", conflicts_with = "model_dir")]
    pub(crate) url: Option<String>,
    /// Key for that server
    #[arg(long, env = env::API_KEY, hide_env_values = true, help_heading = "Conversation")]
    pub(crate) api_key: Option<String>,
    /// Begin with this system prompt
    #[arg(long, help_heading = "Conversation")]
    pub(crate) system: Option<String>,
    /// Ask the model to think first, or not to; without this the model's own default holds
    #[arg(long, value_name = "BOOL", help_heading = "Conversation")]
    pub(crate) thinking: Option<bool>,
    /// Randomness of the answers, 0 to 2; 0 always takes the most likely token
    #[arg(long, value_parser = values::temperature, help_heading = "Conversation")]
    pub(crate) temperature: Option<f32>,
    /// Most tokens of one answer
    #[arg(long, help_heading = "Conversation")]
    pub(crate) max_tokens: Option<usize>,
}

#[derive(Debug, Args)]
pub(crate) struct PlanArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    /// Plan for this geometry instead of a checkpoint
    #[arg(long, value_name = "NAME", conflicts_with = "model_dir", help_heading = "Model")]
    #[arg(value_parser = values::geometry_names())]
    pub(crate) geometry: Option<String>,
    #[command(flatten)]
    pub(crate) device: DeviceArgs,
    #[command(flatten)]
    pub(crate) numerics: NumericsArgs,
    #[command(flatten)]
    pub(crate) memory: MemoryArgs,
    /// Plan for a GPU with this much memory instead of this machine, such as 24GiB; --gpu-memory can take less of it
    #[arg(long, value_name = "BYTES", help_heading = "Memory")]
    pub(crate) gpu: Option<ByteCount>,
    /// Print JSON
    #[arg(long, help_heading = "Output")]
    pub(crate) json: bool,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings;

    #[test]
    fn the_definitions_are_consistent() {
        Cli::definition().debug_assert();
    }

    #[test]
    fn every_environment_variable_belongs_to_a_flag() {
        let commands = Cli::commands();
        let mut used: Vec<String> = commands
            .iter()
            .flat_map(clap::Command::get_arguments)
            .filter_map(|argument| argument.get_env()?.to_str().map(str::to_owned))
            .collect();
        used.sort();
        used.dedup();
        let mut all: Vec<String> = env::ALL.iter().map(|name| (*name).to_owned()).collect();
        all.sort();
        assert_eq!(used, all);
    }

    #[test]
    fn every_setting_of_the_server_has_the_variable_of_its_name() {
        let commands = Cli::commands();
        let serve = commands.iter().find(|command| settings::has_settings(command)).unwrap();
        for argument in serve.get_arguments().filter(|argument| settings::is_setting(argument)) {
            let found = argument.get_env().and_then(|name| name.to_str());
            assert_eq!(found, Some(settings::variable(argument).as_str()), "{}", argument.get_id());
        }
    }

    #[test]
    fn every_flag_has_help_and_a_heading() {
        for command in Cli::commands().iter().filter(|command| !command.is_hide_set()) {
            let flags = command.get_arguments().filter(|argument| !argument.is_positional());
            for argument in flags.filter(|argument| argument.get_id() != "help") {
                let name = format!("{} --{}", command.get_name(), argument.get_id());
                assert!(argument.get_help().is_some(), "{name} has no help");
                assert!(argument.get_help_heading().is_some(), "{name} has no heading");
            }
        }
    }
}
