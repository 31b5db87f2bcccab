//! `qwill bench`: one struct per measurement.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::values::{self, ByteCount};
use super::{DeviceArgs, EndpointChoice, NumericsArgs, ProtocolChoice, QuantizeChoice};
use crate::env;

#[derive(Debug, Args)]
pub(crate) struct BenchArgs {
    #[command(subcommand)]
    pub(crate) command: BenchCommand,
}

#[derive(Debug, Subcommand)]
pub(crate) enum BenchCommand {
    /// Measure a running OpenAI-compatible server over HTTP
    ///
    /// Nothing but the API is used, so that different servers can be compared. docs/protocols.md explains every
    /// figure. The exit code is 1 when a request failed.
    Serve(Box<BenchServeArgs>),
    /// Measure single steps of a model: decode rounds, verify rounds, prompts
    ///
    /// Without engine and server: what the device does in each op, against what it could do at most. Rates of the
    /// device are measured in the same run; the floor of an op is the longer of moving its bytes and doing its
    /// operations at those rates. Random weights are as good as others here.
    Steps(Box<BenchStepsArgs>),
}

#[derive(Debug, Args)]
pub(crate) struct BenchServeArgs {
    /// The server's API, such as `http://127.0.0.1:18020/v1`
    #[arg(long, help_heading = "Server")]
    pub(crate) url: String,
    /// Model to measure [default: the first that the server lists]
    #[arg(long, help_heading = "Server")]
    pub(crate) model: Option<String>,
    /// Environment variable that holds the server's key
    #[arg(long, value_name = "NAME", default_value = env::API_KEY, help_heading = "Server")]
    pub(crate) api_key_env: String,
    /// Where requests go
    #[arg(long, value_enum, default_value = "chat", help_heading = "Server")]
    pub(crate) endpoint: EndpointChoice,
    /// Seconds that one request may take
    #[arg(long, value_name = "SECONDS", default_value_t = 600, value_parser = values::positive)]
    #[arg(help_heading = "Server")]
    pub(crate) timeout: usize,
    /// What is measured, separated by commas
    #[arg(long, value_enum, value_delimiter = ',', default_value = "cohort,batch,prefill")]
    #[arg(help_heading = "Protocol")]
    pub(crate) protocol: Vec<ProtocolChoice>,
    /// Requests at once, separated by commas [default: the protocol's]
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = values::positive)]
    #[arg(help_heading = "Protocol")]
    pub(crate) concurrency: Vec<usize>,
    /// Requests of each row [default: the protocol's]
    #[arg(long, value_name = "N", value_parser = values::positive, help_heading = "Protocol")]
    pub(crate) requests: Option<usize>,
    /// Prompt tokens of batch, prefill and long rows, separated by commas [default: the protocol's]
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = values::positive)]
    #[arg(help_heading = "Protocol")]
    pub(crate) prompt_tokens: Vec<usize>,
    /// Answer tokens of cohort (at most), batch and long rows (exactly) [default: the protocol's]
    #[arg(long, value_name = "TOKENS", value_parser = values::positive, help_heading = "Protocol")]
    pub(crate) output_tokens: Option<usize>,
    /// Temperature of every request, 0 to 2 [default: the server's]
    #[arg(long, value_parser = values::temperature, help_heading = "Protocol")]
    pub(crate) temperature: Option<f32>,
    /// Requests before the first row that do not count
    #[arg(long, value_name = "N", default_value_t = 16, help_heading = "Protocol")]
    pub(crate) warm_up: usize,
    /// Seed of the prompts; a server that keeps prompts in a cache must not see one twice [default: the clock]
    #[arg(long, help_heading = "Protocol")]
    pub(crate) seed: Option<u64>,
    /// Write every sample and the conditions as JSON; `-` is standard output, and the table goes to standard error
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    pub(crate) json: Option<PathBuf>,
    /// Draw throughput and time to the first token
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    pub(crate) svg: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct BenchStepsArgs {
    /// Directory of a Hugging Face checkpoint. Without it, random weights or the small embedded model
    #[arg(value_name = "MODEL_DIR", conflicts_with = "random")]
    pub(crate) model_dir: Option<PathBuf>,
    /// Random weights of this geometry
    #[arg(long, value_name = "NAME", value_parser = values::geometry_names(), help_heading = "Model")]
    pub(crate) random: Option<String>,
    /// Quantise 16-bit weights while loading [default: int4 with random weights, otherwise none]
    #[arg(long, value_enum, env = env::QUANTIZE, help_heading = "Model")]
    pub(crate) quantize: Option<QuantizeChoice>,
    #[command(flatten)]
    pub(crate) device: DeviceArgs,
    #[command(flatten)]
    pub(crate) numerics: NumericsArgs,
    /// On the processor: memory that everything may take together [default: four fifths of what is free]
    #[arg(long, value_name = "BYTES", env = env::MEMORY, help_heading = "Memory")]
    pub(crate) memory: Option<ByteCount>,
    /// Tokens that every sequence of a round has behind it
    #[arg(long, value_name = "TOKENS", default_value_t = 512, value_parser = values::positive)]
    #[arg(help_heading = "Steps")]
    pub(crate) context: usize,
    /// Sequences of the decode rounds, one row each
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "1,2,4,8,16,32,64")]
    #[arg(value_parser = values::positive, help_heading = "Steps")]
    pub(crate) sequences: Vec<usize>,
    /// Rows of the verify rounds of one sequence
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "2,4,8,16")]
    #[arg(value_parser = values::round_rows, help_heading = "Steps")]
    pub(crate) rows: Vec<usize>,
    /// Tokens of the prompts, each in one step
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "512,2048")]
    #[arg(value_parser = values::positive, help_heading = "Steps")]
    pub(crate) prefill: Vec<usize>,
    /// Steps of each kind, of which the best and the middle one are told
    #[arg(long, value_name = "N", default_value_t = 12, value_parser = values::positive, help_heading = "Steps")]
    pub(crate) repeat: usize,
    /// Write everything as JSON
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    pub(crate) json: Option<PathBuf>,
    /// Draw how much of its floor every step and op reaches
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    pub(crate) svg: Option<PathBuf>,
}
