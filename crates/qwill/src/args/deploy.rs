//! What stands in `deploy/` is a command line as well, and wrong as easily.

use std::collections::BTreeSet;

use super::*;
use crate::settings;

const SERVICE: &str = include_str!("../../../../deploy/qwill.service");
const SETTINGS: &str = include_str!("../../../../deploy/qwill.toml");
const DOCKERFILE: &str = include_str!("../../../../deploy/Dockerfile");
const COMPOSE: &str = include_str!("../../../../deploy/compose.yaml");

/// What `words` mean, the program's name first.
fn parsed(words: &[&str]) -> Cli {
    let words: Vec<std::ffi::OsString> = words.iter().map(Into::into).collect();
    settings::parse(&words).unwrap_or_else(|error| panic!("{words:?}: {error}"))
}

/// The settings with every line that is commented out switched on.
fn all_settings() -> tempfile::NamedTempFile {
    let on = |line: &str| match line.strip_prefix('#') {
        Some(setting) if !setting.starts_with(' ') => format!("{setting}\n"),
        _ => format!("{line}\n"),
    };
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), SETTINGS.lines().map(on).collect::<String>()).unwrap();
    file
}

/// The words of a JSON list, as the Dockerfile and the compose file have them.
fn list(line: &str) -> Vec<String> {
    let list = &line[line.find('[').unwrap()..];
    serde_json::from_str(list).unwrap()
}

#[test]
fn the_units_command_and_the_settings_beside_it_are_understood() {
    let settings = all_settings();
    let path = settings.path().display().to_string();
    let command = SERVICE.lines().find_map(|line| line.strip_prefix("ExecStart=")).unwrap();
    let command = command.replace("%d/qwill.toml", &path);
    let words: Vec<&str> = command.split(' ').collect();
    assert!(words[0].ends_with("/qwill"));
    let Command::Serve(serve) = parsed(&words).command else { panic!("it does not serve") };
    assert_eq!(serve.log.log_format, LogFormat::Json);
    assert_eq!(serve.settings.file, Some(settings.path().to_owned()));
    let lines = SETTINGS.lines().filter(|line| line.contains(" = ")).count();
    let from_file = serve.settings.all.iter().filter(|one| matches!(one.origin, settings::Origin::File(_)));
    assert_eq!(from_file.count(), lines);
    assert!(SERVICE.contains("Type=notify"));
}

#[test]
fn the_images_commands_are_understood() {
    let line = |wanted: &str| {
        DOCKERFILE.lines().rev().find(|line| line.starts_with(wanted)).unwrap_or_else(|| panic!("{wanted}"))
    };
    let program = list(line("ENTRYPOINT"));
    let command = list(line("CMD"));
    let words: Vec<&str> = program.iter().chain(&command).map(String::as_str).collect();
    assert!(matches!(parsed(&words).command, Command::Serve(_)));
    let health = list(line("HEALTHCHECK"));
    let words: Vec<&str> = health.iter().map(String::as_str).collect();
    assert!(matches!(parsed(&words).command, Command::Health(_)));
    let command = list(COMPOSE.lines().find(|line| line.trim().starts_with("command:")).unwrap());
    let words: Vec<&str> = program.iter().chain(&command).map(String::as_str).collect();
    assert!(matches!(parsed(&words).command, Command::Serve(_)));
    assert!(line("USER").ends_with("qwill"), "not root");
}

#[test]
fn every_variable_that_is_set_exists() {
    let is_name = |c: char| c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_';
    let mut names = BTreeSet::new();
    for text in [SERVICE, DOCKERFILE, COMPOSE, SETTINGS] {
        names.extend(text.split(|c| !is_name(c)).filter(|word| word.starts_with("QWILL_")));
    }
    assert!(names.len() >= 4, "{names:?}");
    for name in names {
        assert!(env::ALL.contains(&name), "{name}");
    }
}
