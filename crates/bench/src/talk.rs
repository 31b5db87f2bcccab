//! Conversations: requests whose prompts hold what the server answered before.

use serde_json::{Value, json};
use tokio::sync::{Mutex, MutexGuard};

use crate::request::Dialect;

/// What is sent for an answer that had no text: servers refuse empty messages.
const NO_TEXT: &str = "-";

/// A conversation under way. Whoever holds it is the one who asks: turns follow each other.
#[derive(Debug, Default)]
pub(crate) struct Talk(Mutex<Vec<Said>>);

/// Something said in it.
#[derive(Debug)]
pub(crate) struct Said {
    role: &'static str,
    text: String,
}

impl Said {
    /// By the person who asks.
    pub(crate) fn by_user(text: &str) -> Self {
        Self { role: "user", text: text.to_owned() }
    }

    /// By the model.
    pub(crate) fn by_model(text: String) -> Self {
        let text = if text.trim().is_empty() { NO_TEXT.to_owned() } else { text };
        Self { role: "assistant", text }
    }
}

impl Talk {
    /// Waits for the turns before.
    pub(crate) async fn turn(&self) -> MutexGuard<'_, Vec<Said>> {
        self.0.lock().await
    }
}

/// The prompt's field, for what was said so far.
pub(crate) fn prompt(dialect: Dialect, said: &[Said]) -> (&'static str, Value) {
    match dialect {
        Dialect::Chat => {
            let message = |said: &Said| json!({"role": said.role, "content": said.text});
            ("messages", said.iter().map(message).collect())
        }
        Dialect::Completions => {
            let texts: Vec<&str> = said.iter().map(|said| said.text.as_str()).collect();
            ("prompt", texts.join("\n").into())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prompt_holds_the_whole_conversation() {
        let said = [Said::by_user("a"), Said::by_model(String::new()), Said::by_user("b")];
        let (field, messages) = prompt(Dialect::Chat, &said);
        let wanted = json!([
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "-"},
            {"role": "user", "content": "b"}
        ]);
        assert_eq!((field, messages), ("messages", wanted));
        assert_eq!(prompt(Dialect::Completions, &said), ("prompt", json!("a\n-\nb")));
    }
}
