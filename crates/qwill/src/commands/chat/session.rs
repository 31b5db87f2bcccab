//! The conversation: what is sent, what is remembered, what the commands change.

use serde_json::{Map, Value, json};

use crate::args::ChatArgs;

/// What a line of input means.
#[derive(Debug, PartialEq)]
pub(super) enum Input {
    /// An empty line.
    Nothing,
    /// To the model.
    Say(String),
    /// A command that changes the conversation.
    Change(Change),
    /// `/help`.
    Help,
    /// `/quit`.
    Quit,
    /// Anything else that begins with a slash.
    Unknown(String),
}

/// A change of the conversation.
#[derive(Debug, PartialEq)]
pub(super) enum Change {
    /// Forget it.
    Reset,
    /// Begin anew with this system prompt.
    System(Option<String>),
    /// Ask for thinking or not.
    Thinking(bool),
}

impl Input {
    /// Reads a line.
    pub(super) fn parse(line: &str) -> Self {
        let text = line.trim();
        if text.is_empty() {
            return Self::Nothing;
        }
        if !text.starts_with('/') {
            return Self::Say(line.to_owned());
        }
        let (command, rest) = text.split_once(char::is_whitespace).unwrap_or((text, ""));
        match (command, rest.trim()) {
            ("/quit" | "/exit", _) => Self::Quit,
            ("/help", _) => Self::Help,
            ("/reset", _) => Self::Change(Change::Reset),
            ("/system", "") => Self::Change(Change::System(None)),
            ("/system", prompt) => Self::Change(Change::System(Some(prompt.to_owned()))),
            ("/thinking", "on") => Self::Change(Change::Thinking(true)),
            ("/thinking", "off") => Self::Change(Change::Thinking(false)),
            _ => Self::Unknown(text.to_owned()),
        }
    }
}

/// A conversation with a model.
pub(super) struct Session {
    model: String,
    system: Option<String>,
    /// Questions and answers in turn.
    turns: Vec<(String, String)>,
    thinking: Option<bool>,
    temperature: Option<f32>,
    max_tokens: Option<usize>,
}

impl Session {
    /// An empty conversation.
    pub(super) fn new(model: String, arguments: &ChatArgs) -> Self {
        Self {
            model,
            system: arguments.system.clone(),
            turns: Vec::new(),
            thinking: arguments.thinking,
            temperature: arguments.temperature,
            max_tokens: arguments.max_tokens,
        }
    }

    /// Body of the request that asks `text` next.
    pub(super) fn request(&self, text: &str) -> Value {
        let system = self.system.iter().map(|text| json!({"role": "system", "content": text}));
        let past = self.turns.iter().flat_map(|(question, answer)| {
            [json!({"role": "user", "content": question}), json!({"role": "assistant", "content": answer})]
        });
        let messages: Vec<Value> =
            system.chain(past).chain([json!({"role": "user", "content": text})]).collect();
        let mut body = Map::new();
        body.insert("model".into(), json!(self.model));
        body.insert("messages".into(), Value::Array(messages));
        body.insert("stream".into(), json!(true));
        body.insert("stream_options".into(), json!({"include_usage": true}));
        if let Some(thinking) = self.thinking {
            body.insert("chat_template_kwargs".into(), json!({"enable_thinking": thinking}));
        }
        if let Some(temperature) = self.temperature {
            body.insert("temperature".into(), json!(temperature));
        }
        if let Some(max_tokens) = self.max_tokens {
            body.insert("max_tokens".into(), json!(max_tokens));
        }
        Value::Object(body)
    }

    /// Keeps a turn. Without an answer (stopped while thinking) there is nothing that a next turn could build
    /// on, so the question is dropped too.
    pub(super) fn remember(&mut self, question: String, answer: String) {
        if !answer.is_empty() {
            self.turns.push((question, answer));
        }
    }

    /// Carries out a command and says so.
    pub(super) fn apply(&mut self, change: Change) -> &'static str {
        match change {
            Change::Reset => {
                self.turns.clear();
                "The conversation is forgotten."
            }
            Change::System(prompt) => {
                self.turns.clear();
                self.system = prompt;
                if self.system.is_some() {
                    "New system prompt, new conversation."
                } else {
                    "No system prompt, new conversation."
                }
            }
            Change::Thinking(thinking) => {
                self.thinking = Some(thinking);
                if thinking {
                    "The model is asked to think first."
                } else {
                    "The model is asked to answer at once."
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn session() -> Session {
        Session {
            model: "m".into(),
            system: None,
            turns: Vec::new(),
            thinking: None,
            temperature: None,
            max_tokens: None,
        }
    }

    fn roles(body: &Value) -> Vec<&str> {
        body["messages"].as_array().unwrap().iter().map(|message| message["role"].as_str().unwrap()).collect()
    }

    #[test]
    fn lines_are_messages_unless_they_begin_with_a_slash() {
        assert_eq!(Input::parse("  "), Input::Nothing);
        assert_eq!(Input::parse(" a / b"), Input::Say(" a / b".into()));
        assert_eq!(
            Input::parse("/system  be brief "),
            Input::Change(Change::System(Some("be brief".into())))
        );
        assert_eq!(Input::parse("/system"), Input::Change(Change::System(None)));
        assert_eq!(Input::parse("/thinking on"), Input::Change(Change::Thinking(true)));
        assert_eq!(Input::parse("/thinking maybe"), Input::Unknown("/thinking maybe".into()));
        assert_eq!(Input::parse("/quit"), Input::Quit);
        assert_eq!(Input::parse("/what"), Input::Unknown("/what".into()));
    }

    #[test]
    fn a_request_holds_the_whole_conversation_in_order() {
        let mut session = session();
        session.apply(Change::System(Some("be brief".into())));
        session.remember("one".into(), "1".into());
        let body = session.request("two");
        assert_eq!(roles(&body), ["system", "user", "assistant", "user"]);
        assert_eq!(body["messages"][3]["content"], "two");
        assert!(body.get("temperature").is_none() && body.get("chat_template_kwargs").is_none());
    }

    #[test]
    fn forgetting_keeps_the_system_prompt_and_a_turn_without_answer_is_none() {
        let mut session = session();
        session.apply(Change::System(Some("s".into())));
        session.remember("one".into(), "1".into());
        session.remember("two".into(), String::new());
        assert_eq!(roles(&session.request("x")).len(), 4);
        session.apply(Change::Reset);
        assert_eq!(roles(&session.request("x")), ["system", "user"]);
        session.apply(Change::Thinking(false));
        assert_eq!(session.request("x")["chat_template_kwargs"]["enable_thinking"], false);
    }
}
