//! What a setting takes, for the reference page: asked of the parser that will judge it.

use clap::{Arg, Command};

use super::{alone, error};

/// Nothing that a parser could mean, and a number that is too small for all that count.
const NONSENSE: [&str; 2] = ["?", "-99999999"];

/// In a few words; empty where every text is right.
pub(crate) fn range(argument: &Arg) -> String {
    if !argument.get_action().takes_values() {
        return "true, false".to_owned();
    }
    let alone = alone(argument.clone());
    let alone = if alone.is_positional() { alone.index(1).last(false) } else { alone };
    let asking = Command::new("ask").no_binary_name(true).arg(alone);
    let [words, number] = NONSENSE.map(|value| {
        let word = argument.get_long().map_or_else(|| value.to_owned(), |long| format!("--{long}={value}"));
        asking.clone().try_get_matches_from([word]).err().map(|refusal| error::reason(&refusal))
    });
    let bounds = number.as_deref().and_then(|reason| reason.split_once(" is not in "));
    match (words.as_deref(), bounds) {
        (None, _) => String::new(),
        (Some(_), Some((_, bounds))) => bounds.replace("..=", " to "),
        // The standard library does not say what it wants.
        (Some("invalid digit found in string"), None) => "a whole number".to_owned(),
        (Some("invalid IP address syntax"), None) => "an IP address".to_owned(),
        (Some(reason), None) => ["expected one of ", "expected ", "write "]
            .iter()
            .find_map(|prefix| reason.strip_prefix(prefix))
            .unwrap_or(reason)
            .to_owned(),
    }
}
