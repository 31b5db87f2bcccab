//! The clients that `qwill launch` knows, as data.
//!
//! Words in braces are filled in: `{base}` the server's address, `{url}` the same with `/v1`, `{key}`, `{model}`,
//! `{context}`, `{window}` (the context, but at least what Claude Code accepts) and `{output}` in tokens, and `{file}` where
//! the settings file is.

/// A program that talks to the server.
#[derive(Debug)]
pub(crate) struct Client {
    /// As it is typed after `qwill launch`.
    pub(crate) name: &'static str,
    /// As its makers write it.
    pub(crate) title: &'static str,
    /// What is started; empty for what is no program.
    pub(super) program: &'static str,
    /// How it is installed.
    pub(super) install: &'static str,
    /// Its settings file.
    pub(super) file: Option<SettingsFile>,
    /// Its environment.
    pub(super) variables: &'static [(&'static str, &'static str)],
    /// Arguments with which it is run once, to take over the settings.
    pub(super) setup: &'static [&'static str],
    /// Arguments with which it is started.
    pub(super) arguments: &'static [&'static str],
    /// What else people should know.
    pub(super) note: &'static str,
}

/// Where a client keeps settings.
#[derive(Debug)]
pub(super) struct SettingsFile {
    /// The directory.
    pub(super) place: Place,
    /// Its name in there.
    pub(super) name: &'static str,
    /// What stands in it.
    pub(super) text: &'static str,
    /// It is the user's own, a JSON object into which ours is merged. Other files are there for Qwill alone.
    pub(super) is_shared: bool,
}

/// Directories of the user.
#[derive(Debug, Clone, Copy)]
pub(super) enum Place {
    /// This variable's value, or this directory in the home directory.
    Named(&'static str, &'static str),
    /// This directory among the user's configuration.
    Config(&'static str),
}

/// Files that are made for Qwill, and read because the client is told to.
const OURS: Place = Place::Config("qwill");

/// All of them.
pub(crate) const CLIENTS: &[Client] = &[
    Client {
        name: "codex",
        title: "Codex",
        program: "codex",
        install: "npm install -g @openai/codex",
        file: Some(SettingsFile {
            place: Place::Named("CODEX_HOME", ".codex"),
            name: "qwill.config.toml",
            text: include_str!("files/codex.toml"),
            is_shared: false,
        }),
        variables: &[("QWILL_API_KEY", "{key}")],
        setup: &[],
        arguments: &["--profile", "qwill"],
        note: "The file is a profile: without --profile qwill Codex is as it was. Needs Codex 0.134 or later.",
    },
    Client {
        name: "claude",
        title: "Claude Code",
        program: "claude",
        install: "npm install -g @anthropic-ai/claude-code",
        file: None,
        variables: &[
            ("ANTHROPIC_BASE_URL", "{base}"),
            ("ANTHROPIC_AUTH_TOKEN", "{key}"),
            // Any value would be asked about, and win over the token.
            ("ANTHROPIC_API_KEY", ""),
            ("ANTHROPIC_MODEL", "{model}"),
            ("ANTHROPIC_DEFAULT_OPUS_MODEL", "{model}"),
            ("ANTHROPIC_DEFAULT_SONNET_MODEL", "{model}"),
            ("ANTHROPIC_DEFAULT_HAIKU_MODEL", "{model}"),
            ("CLAUDE_CODE_SUBAGENT_MODEL", "{model}"),
            ("CLAUDE_CODE_MAX_CONTEXT_TOKENS", "{context}"),
            ("CLAUDE_CODE_AUTO_COMPACT_WINDOW", "{window}"),
            ("CLAUDE_CODE_MAX_OUTPUT_TOKENS", "{output}"),
            // A line that differs from request to request, at the very beginning of every prompt.
            ("CLAUDE_CODE_ATTRIBUTION_HEADER", "0"),
            ("CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC", "1"),
            ("API_TIMEOUT_MS", "3600000"),
        ],
        setup: &[],
        arguments: &[],
        note: "Its own instructions take tens of thousands of tokens: serve with --max-context 65536 or more.",
    },
    Client {
        name: "opencode",
        title: "OpenCode",
        program: "opencode",
        install: "npm install -g opencode-ai",
        file: Some(SettingsFile {
            place: OURS,
            name: "opencode.json",
            text: include_str!("files/opencode.json"),
            is_shared: false,
        }),
        variables: &[("OPENCODE_CONFIG", "{file}"), ("QWILL_API_KEY", "{key}")],
        setup: &[],
        arguments: &[],
        note: "OpenCode merges the file with its own settings while OPENCODE_CONFIG is set.",
    },
    Client {
        name: "qwen-code",
        title: "Qwen Code",
        program: "qwen",
        install: "npm install -g @qwen-code/qwen-code",
        file: None,
        variables: &[
            ("OPENAI_BASE_URL", "{url}"),
            ("OPENAI_API_KEY", "{key}"),
            ("OPENAI_MODEL", "{model}"),
            ("QWEN_CODE_MAX_OUTPUT_TOKENS", "{output}"),
        ],
        setup: &[],
        arguments: &["--auth-type", "openai", "--model", "{model}"],
        note: "",
    },
    Client {
        name: "cline",
        title: "Cline",
        program: "cline",
        install: "npm install -g cline",
        file: None,
        variables: &[],
        setup: &[
            "auth",
            "--provider",
            "openai-compatible",
            "--apikey",
            "{key}",
            "--modelid",
            "{model}",
            "--baseurl",
            "{url}",
        ],
        arguments: &[],
        note: "Cline keeps what `cline auth` says. In the editor: API provider `OpenAI Compatible`, with the same \
               address, key and model, and {context} as the context window.",
    },
    Client {
        name: "continue",
        title: "Continue",
        program: "cn",
        install: "npm install -g @continuedev/cli",
        file: Some(SettingsFile {
            place: OURS,
            name: "continue.yaml",
            text: include_str!("files/continue.yaml"),
            is_shared: false,
        }),
        variables: &[],
        setup: &[],
        arguments: &["--config", "{file}"],
        note: "In the editor: copy the entry under `models` into ~/.continue/config.yaml.",
    },
    Client {
        name: "aider",
        title: "Aider",
        program: "aider",
        install: "python -m pip install aider-install && aider-install",
        file: Some(SettingsFile {
            place: OURS,
            name: "aider-models.json",
            text: include_str!("files/aider-models.json"),
            is_shared: false,
        }),
        variables: &[("OPENAI_API_BASE", "{url}"), ("OPENAI_API_KEY", "{key}")],
        setup: &[],
        arguments: &["--model", "openai/{model}", "--model-metadata-file", "{file}"],
        note: "",
    },
    Client {
        name: "zed",
        title: "Zed",
        program: "zed",
        install: "see https://zed.dev/download",
        file: Some(SettingsFile {
            place: Place::Config("zed"),
            name: "settings.json",
            text: include_str!("files/zed.json"),
            is_shared: true,
        }),
        variables: &[("QWILL_API_KEY", "{key}")],
        setup: &[],
        arguments: &[],
        note: "Zed takes the key from its own dialogue or from QWILL_API_KEY, and has to be started with it.",
    },
    Client {
        name: "open-webui",
        title: "Open WebUI",
        program: "open-webui",
        install: "pip install open-webui",
        file: None,
        variables: &[
            ("OPENAI_API_BASE_URL", "{url}"),
            ("OPENAI_API_KEY", "{key}"),
            ("DEFAULT_MODELS", "{model}"),
            ("ENABLE_OLLAMA_API", "false"),
        ],
        setup: &[],
        arguments: &["serve"],
        note: "Read at its first start; later the settings of its administration page count.",
    },
    Client {
        name: "sdk",
        title: "The openai and anthropic packages",
        program: "",
        install: "",
        file: None,
        variables: &[
            ("OPENAI_BASE_URL", "{url}"),
            ("OPENAI_API_KEY", "{key}"),
            ("ANTHROPIC_BASE_URL", "{base}"),
            ("ANTHROPIC_AUTH_TOKEN", "{key}"),
        ],
        setup: &[],
        arguments: &[],
        note: "Both packages read these variables; the model's name is {model}.",
    },
];

/// The client of this name.
pub(super) fn named(name: &str) -> Option<&'static Client> {
    CLIENTS.iter().find(|client| client.name == name)
}
