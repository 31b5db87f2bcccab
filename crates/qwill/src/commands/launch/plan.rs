//! A client's entry with everything filled in.

use std::fmt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::clients::{Client, Place};
use crate::args::LaunchArgs;
use crate::client::Client as Server;
use crate::failure::Hinted;

/// Clients want some key even where the server wants none.
const NO_KEY: &str = "none";
/// For a server that does not say how long its context is.
const USUAL_CONTEXT_TOKENS: u64 = 32_768;
/// Claude Code takes less than this for a mistake.
const LEAST_WINDOW_TOKENS: u64 = 100_000;
/// Most tokens that clients are told to ask for.
const MAX_OUTPUT_TOKENS: u64 = 32_768;

/// What is filled in.
#[derive(Debug, Clone)]
pub(super) struct Facts {
    pub(super) base: String,
    pub(super) key: String,
    pub(super) model: String,
    pub(super) context_tokens: u64,
}

impl Facts {
    /// Asks the server for its model.
    pub(super) fn of(server: &Server, arguments: &LaunchArgs) -> Result<Self> {
        let models = server.models()?;
        let wanted = |id: &str| arguments.model.as_deref().is_none_or(|wanted| wanted == id);
        let Some(model) = models.iter().find(|model| wanted(&model.id)) else {
            let names: Vec<&str> = models.iter().map(|model| model.id.as_str()).collect();
            let asked = arguments.model.as_deref().unwrap_or_default();
            return Err(Hinted::error(
                format!("the server has no model `{asked}`"),
                format!("it has {}", names.join(", ")),
            ));
        };
        Ok(Self {
            base: server.base().to_owned(),
            key: arguments.api_key.clone().unwrap_or_else(|| NO_KEY.to_owned()),
            model: model.id.clone(),
            context_tokens: model.context_tokens.unwrap_or(USUAL_CONTEXT_TOKENS),
        })
    }

    fn value(&self, word: &str, file: Option<&Path>) -> Option<String> {
        match word {
            "base" => Some(self.base.clone()),
            "url" => Some(format!("{}/v1", self.base)),
            "key" => Some(self.key.clone()),
            "model" => Some(self.model.clone()),
            "context" => Some(self.context_tokens.to_string()),
            "window" => Some(self.context_tokens.max(LEAST_WINDOW_TOKENS).to_string()),
            "output" => Some((self.context_tokens / 4).clamp(1, MAX_OUTPUT_TOKENS).to_string()),
            "file" => file.map(|path| path.display().to_string()),
            _ => None,
        }
    }

    /// Replaces every known word in braces; other braces stay.
    fn fill(&self, template: &str, file: Option<&Path>, escape: fn(&str) -> String) -> String {
        let (mut text, mut rest) = (String::new(), template);
        while let Some((before, from)) = rest.split_once('{') {
            text += before;
            let word = from.split_once('}').and_then(|(word, after)| Some((self.value(word, file)?, after)));
            if let Some((value, after)) = word {
                text += &escape(&value);
                rest = after;
            } else {
                text.push('{');
                rest = from;
            }
        }
        text + rest
    }
}

/// A file to be.
#[derive(Debug)]
pub(super) struct File {
    pub(super) path: PathBuf,
    pub(super) text: String,
    pub(super) is_shared: bool,
}

/// What a client needs, ready to be used.
#[derive(Debug)]
pub(super) struct Plan {
    pub(super) client: &'static Client,
    pub(super) file: Option<File>,
    /// The environment, to be read by a shell.
    pub(super) script: Option<File>,
    pub(super) variables: Vec<(&'static str, String)>,
    pub(super) setup: Vec<String>,
    pub(super) arguments: Vec<String>,
    note: String,
    heading: String,
}

impl Plan {
    pub(super) fn new(client: &'static Client, facts: &Facts) -> Result<Self> {
        let path = match &client.file {
            Some(file) => Some(directory(file.place)?.join(file.name)),
            None => None,
        };
        let plain = |text: &str| facts.fill(text, path.as_deref(), str::to_owned);
        let list = |words: &[&str]| words.iter().map(|word| plain(word)).collect::<Vec<_>>();
        let variables: Vec<(&'static str, String)> =
            client.variables.iter().map(|(name, value)| (*name, plain(value))).collect();
        let file = path.as_ref().zip(client.file.as_ref()).map(|(path, file)| File {
            path: path.clone(),
            text: facts.fill(file.text, Some(path), escaped),
            is_shared: file.is_shared,
        });
        let script = match variables.as_slice() {
            [] => None,
            variables => Some(File {
                path: directory(Place::Config("qwill"))?.join(format!("{}.sh", client.name)),
                text: exports(variables),
                is_shared: false,
            }),
        };
        let heading = format!(
            "{}: {} at {}/v1, {} tokens of context",
            client.title, facts.model, facts.base, facts.context_tokens
        );
        let (setup, arguments, note) = (list(client.setup), list(client.arguments), plain(client.note));
        Ok(Self { client, file, script, variables, setup, arguments, note, heading })
    }

    /// What to type once everything is written.
    pub(super) fn next_step(&self) -> String {
        let read =
            self.script.as_ref().map(|script| format!(". {}", quoted(&script.path.display().to_string())));
        let lines: Vec<String> = read.into_iter().chain(self.commands()).collect();
        lines.join("\n")
    }

    fn commands(&self) -> Vec<String> {
        let line = |arguments: &[String]| {
            let words = arguments.iter().map(|word| quoted(word));
            std::iter::once(self.client.program.to_owned()).chain(words).collect::<Vec<_>>().join(" ")
        };
        let mut lines = Vec::new();
        if !self.setup.is_empty() {
            lines.push(line(&self.setup));
        }
        if !self.client.program.is_empty() {
            lines.push(line(&self.arguments));
        }
        lines
    }
}

/// Settings as they are printed: what is not to be typed stands behind `#`.
impl fmt::Display for Plan {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(out, "# {}", self.heading)?;
        if let Some(file) = &self.file {
            let how = if file.is_shared { "add to it" } else { "--write makes it" };
            writeln!(out, "\n# {} ({how})\n{}", file.path.display(), file.text.trim_end())?;
        }
        writeln!(out)?;
        write!(out, "{}", exports(&self.variables))?;
        for line in self.commands() {
            writeln!(out, "{line}")?;
        }
        if !self.note.is_empty() {
            writeln!(out, "\n# {}", self.note)?;
        }
        Ok(())
    }
}

fn exports(variables: &[(&str, String)]) -> String {
    variables
        .iter()
        .fold(String::new(), |text, (name, value)| format!("{text}export {name}={}\n", quoted(value)))
}

/// A value inside double quotes of JSON, TOML or YAML, which agree on escapes.
fn escaped(value: &str) -> String {
    let quoted = serde_json::Value::from(value).to_string();
    quoted[1..quoted.len() - 1].to_owned()
}

/// A word as a shell reads it back.
fn quoted(word: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_./:=,+@%".contains(c);
    if !word.is_empty() && word.chars().all(is_plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', r"'\''"))
}

fn directory(place: Place) -> Result<PathBuf> {
    let variable = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let home = || variable("HOME").context("HOME is not set, so the client's settings cannot be found");
    match place {
        Place::Named(name, below) => variable(name).map_or_else(|| Ok(home()?.join(below)), Ok),
        Place::Config(below) => {
            let config = variable("XDG_CONFIG_HOME").map_or_else(|| Ok(home()?.join(".config")), Ok);
            config.map(|config: PathBuf| config.join(below))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::clients::{self, CLIENTS};
    use super::*;

    /// A model whose name would break any file that does not escape it.
    fn facts() -> Facts {
        Facts {
            base: "http://127.0.0.1:18020".to_owned(),
            key: "it's \"secret\"".to_owned(),
            model: "dir/a \"b\" \\c {key}".to_owned(),
            context_tokens: 262_144,
        }
    }

    fn plan(name: &str) -> Plan {
        Plan::new(clients::named(name).unwrap(), &facts()).unwrap()
    }

    fn json(name: &str) -> serde_json::Value {
        serde_json::from_str(&plan(name).file.unwrap().text).unwrap()
    }

    #[test]
    fn no_word_in_braces_is_left() {
        let plain = Facts { key: "k".into(), model: "m".into(), ..facts() };
        for client in CLIENTS {
            let plan = Plan::new(client, &plain).unwrap();
            let text = format!("{plan}\n{}", plan.next_step()).replace("{env:QWILL_API_KEY}", "");
            let lines = text.lines().filter(|line| line.contains('{') && line.contains('}'));
            for line in lines {
                assert!(line.contains("\"limit\": { "), "{}: {line}", client.name);
            }
        }
    }

    #[test]
    fn codex_gets_a_profile_of_the_responses_api() {
        let text = plan("codex").file.unwrap().text;
        let profile: toml_edit::DocumentMut = text.parse().unwrap();
        assert_eq!(profile["model"].as_str(), Some("dir/a \"b\" \\c {key}"));
        assert_eq!(profile["model_provider"].as_str(), Some("qwill"));
        assert_eq!(profile["model_context_window"].as_integer(), Some(262_144));
        let provider = &profile["model_providers"]["qwill"];
        assert_eq!(provider["base_url"].as_str(), Some("http://127.0.0.1:18020/v1"));
        assert_eq!(provider["wire_api"].as_str(), Some("responses"));
        assert_eq!(provider["env_key"].as_str(), Some("QWILL_API_KEY"));
        assert_eq!(plan("codex").arguments, ["--profile", "qwill"]);
    }

    #[test]
    fn json_files_hold_the_address_and_the_limits() {
        let model = "dir/a \"b\" \\c {key}";
        let opencode = json("opencode");
        let provider = &opencode["provider"]["qwill"];
        assert_eq!(opencode["model"], format!("qwill/{model}"));
        assert_eq!(provider["options"]["baseURL"], "http://127.0.0.1:18020/v1");
        assert_eq!(provider["options"]["apiKey"], "{env:QWILL_API_KEY}");
        assert_eq!(provider["models"][model]["limit"]["context"], 262_144);
        let zed = json("zed");
        let provider = &zed["language_models"]["openai_compatible"]["Qwill"];
        assert_eq!(provider["api_url"], "http://127.0.0.1:18020/v1");
        assert_eq!(provider["available_models"][0]["max_tokens"], 262_144);
        assert_eq!(json("aider")[format!("openai/{model}")]["max_output_tokens"], 32_768);
    }

    #[test]
    fn continues_file_escapes_what_it_is_given() {
        let text = plan("continue").file.unwrap().text;
        assert!(text.contains(r#"model: "dir/a \"b\" \\c {key}""#), "{text}");
        assert!(text.contains(r#"apiKey: "it's \"secret\"""#), "{text}");
        assert!(text.contains("contextLength: 262144\n"), "{text}");
    }

    #[test]
    fn a_shell_reads_back_what_was_meant() {
        let plan = plan("sdk");
        let script = format!(
            "{}printf '%s|%s' \"$OPENAI_API_KEY\" \"$ANTHROPIC_BASE_URL\"",
            plan.script.unwrap().text
        );
        let output = std::process::Command::new("sh").args(["-c", &script]).output().unwrap();
        assert_eq!(String::from_utf8(output.stdout).unwrap(), "it's \"secret\"|http://127.0.0.1:18020");
    }

    #[test]
    fn anthropics_address_has_no_version_and_every_tier_is_the_model() {
        let plan = plan("claude");
        let value = |wanted: &str| {
            plan.variables.iter().find(|(name, _)| *name == wanted).map(|(_, value)| value.clone()).unwrap()
        };
        assert_eq!(value("ANTHROPIC_BASE_URL"), "http://127.0.0.1:18020");
        for tier in ["OPUS", "SONNET", "HAIKU"] {
            assert_eq!(value(&format!("ANTHROPIC_DEFAULT_{tier}_MODEL")), facts().model);
        }
        assert_eq!(value("CLAUDE_CODE_ATTRIBUTION_HEADER"), "0");
    }

    #[test]
    fn names_are_different_and_every_file_is_told_to_its_client() {
        let mut names: Vec<&str> = CLIENTS.iter().map(|client| client.name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), CLIENTS.len());
        for client in CLIENTS.iter().filter(|client| client.program.is_empty()) {
            assert!(client.setup.is_empty() && client.arguments.is_empty(), "{}", client.name);
        }
    }
}
