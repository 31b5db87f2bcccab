//! API keys as they are configured: flags, a variable, or a file with a line for each.

use std::fmt;

use thiserror::Error;

/// A key that opens the server, and what it may use of it.
#[derive(Clone, PartialEq, Eq)]
pub struct ApiKey {
    /// What logs and metrics call it; the key itself is nowhere in them. A key without a name gets a number.
    pub name: Option<String>,
    /// What clients send.
    pub secret: String,
    /// How much its holder may ask for.
    pub limits: RateLimits,
}

/// How much somebody may ask for; `None` is as much as they like.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RateLimits {
    /// Generating requests a minute.
    pub requests_per_minute: Option<u32>,
    /// Tokens of prompts and answers together, a minute.
    pub tokens_per_minute: Option<u32>,
}

/// A line of a key file that cannot be understood; the message does not quote it, for it may be a key.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("line {line}: {problem}")]
pub struct KeyFileError {
    /// From 1.
    pub line: usize,
    /// What is wrong with it.
    pub problem: String,
}

impl From<&str> for ApiKey {
    fn from(secret: &str) -> Self {
        Self { name: None, secret: secret.to_owned(), limits: RateLimits::default() }
    }
}

impl fmt::Debug for ApiKey {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("ApiKey")
            .field("name", &self.name)
            .field("limits", &self.limits)
            .finish_non_exhaustive()
    }
}

impl ApiKey {
    /// The keys of a file. A line is a key, or a name and a key, or those and limits:
    /// `alice sk-1234 requests/min=60 tokens/min=100000`. Empty lines, and what follows a `#`, are skipped.
    ///
    /// # Errors
    /// The first line that is none of these, or that repeats a name or a key.
    pub fn parse_file(text: &str) -> Result<Vec<Self>, KeyFileError> {
        let mut keys: Vec<Self> = Vec::new();
        for (index, line) in text.lines().enumerate() {
            let fail = |problem: &str| KeyFileError { line: index + 1, problem: problem.to_owned() };
            let Some(key) = Self::parse_line(line).map_err(|problem| fail(&problem))? else { continue };
            if keys.iter().any(|other| other.secret == key.secret) {
                return Err(fail("the key is there twice"));
            }
            if key.name.is_some() && keys.iter().any(|other| other.name == key.name) {
                return Err(fail("the name is there twice"));
            }
            keys.push(key);
        }
        Ok(keys)
    }

    fn parse_line(line: &str) -> Result<Option<Self>, String> {
        let words: Vec<&str> = line.split_whitespace().take_while(|word| !word.starts_with('#')).collect();
        let is_limit = |word: &&str| word.starts_with("requests/min=") || word.starts_with("tokens/min=");
        let limits_at = words.iter().position(is_limit).unwrap_or(words.len());
        let mut key = match words[..limits_at] {
            [] if words.is_empty() => return Ok(None),
            [secret] => Self::from(secret),
            [name, secret] => Self { name: Some(checked_name(name)?), ..Self::from(secret) },
            _ => return Err("expected a name, a key, and limits such as requests/min=60".to_owned()),
        };
        for word in &words[limits_at..] {
            let (what, number) = word.split_once('=').unwrap_or((word, ""));
            let number = number.parse().ok().filter(|number| *number > 0);
            let number = number.ok_or_else(|| format!("{what} must be a whole number, at least 1"))?;
            match what {
                "requests/min" => key.limits.requests_per_minute = Some(number),
                "tokens/min" => key.limits.tokens_per_minute = Some(number),
                _ => return Err("limits are requests/min=N and tokens/min=N".to_owned()),
            }
        }
        Ok(Some(key))
    }
}

/// A name goes into log lines and metric labels as it is.
fn checked_name(name: &str) -> Result<String, String> {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.@".contains(&byte);
    if name.len() > 64 || !name.bytes().all(plain) {
        return Err("a name has up to 64 letters, digits and -_.@".to_owned());
    }
    Ok(name.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_a_key_a_named_key_or_one_with_limits() {
        let text = "# team\n\n sk-1 # old\nalice sk-2\nbob sk-3 requests/min=60 tokens/min=1000\nsk-4 tokens/min=5\n";
        let keys = ApiKey::parse_file(text).unwrap();
        let seen: Vec<_> = keys
            .iter()
            .map(|key| {
                let RateLimits { requests_per_minute, tokens_per_minute } = key.limits;
                (key.name.as_deref(), key.secret.as_str(), requests_per_minute, tokens_per_minute)
            })
            .collect();
        assert_eq!(
            seen,
            [
                (None, "sk-1", None, None),
                (Some("alice"), "sk-2", None, None),
                (Some("bob"), "sk-3", Some(60), Some(1000)),
                (None, "sk-4", None, Some(5)),
            ]
        );
        assert_eq!(ApiKey::parse_file("").unwrap(), []);
    }

    #[test]
    fn wrong_lines_are_named_and_not_quoted() {
        for (text, line, fragment) in [
            ("a sk-1\nb sk-2 sk-secret", 2, "expected a name"),
            ("requests/min=5", 1, "expected a name"),
            ("sk-secret requests/min=0", 1, "requests/min must be"),
            ("sk-secret tokens/min=-5", 1, "tokens/min must be"),
            ("a sk-secret requests/min=5 other", 1, "other must be"),
            ("al=ice sk-secret", 1, "a name has"),
            ("sk-secret\n\nsk-secret", 3, "key is there twice"),
            ("a sk-1\na sk-secret", 2, "name is there twice"),
        ] {
            let error = ApiKey::parse_file(text).unwrap_err();
            assert_eq!(error.line, line, "{text}");
            assert!(error.to_string().contains(fragment), "{error}");
            assert!(!error.to_string().contains("sk-secret"), "{error}");
        }
    }

    #[test]
    fn debugging_shows_no_secret() {
        let shown = format!("{:?}", ApiKey::parse_file("alice sk-secret").unwrap());
        assert!(shown.contains("alice") && !shown.contains("sk-secret"), "{shown}");
    }
}
