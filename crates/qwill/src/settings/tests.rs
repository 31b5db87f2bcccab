use std::io::Write;

use super::*;

/// The arguments of `serve`, with a file of these lines; or what was refused.
fn serve(lines: &str, typed: &[&str]) -> Result<args::ServeArgs, String> {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(lines.as_bytes()).unwrap();
    let path = file.path().display().to_string();
    let words = ["qwill", "serve", "--config", &path].into_iter().chain(typed.iter().copied());
    let words: Vec<OsString> = words.map(OsString::from).collect();
    match parse(&words) {
        Ok(Cli { command: args::Command::Serve(arguments) }) => Ok(*arguments),
        Ok(_) => unreachable!("the second word is serve"),
        Err(error) => Err(error.to_string().replace(&path, "FILE")),
    }
}

fn refusal(lines: &str, typed: &[&str]) -> String {
    serve(lines, typed).unwrap_err()
}

fn origin(arguments: &args::ServeArgs, key: &str) -> Origin {
    arguments.settings.all.iter().find(|setting| setting.key == key).unwrap().origin.clone()
}

#[test]
fn a_file_stands_below_flags_and_above_defaults() {
    let lines = "# a comment\nmax-context = 4096\nport = 4\nserved_name = [\"a\", \"b\"]\nstrict-params = true\n\
                 temperature = 0.5\nmodel-dir = \"models/x\"\nthinking = false\nmemory = \"1GiB\"\n";
    let found = serve(lines, &["--port", "5"]).unwrap();
    assert_eq!(found.memory.max_context, Some(4096));
    assert_eq!(found.listen.port, 5);
    assert_eq!(found.listen.served_name, ["a", "b"]);
    assert!(found.listen.strict_params);
    assert_eq!(found.sampling.temperature, Some(0.5));
    assert_eq!(found.model.model_dir, Some("models/x".into()));
    assert_eq!(found.listen.thinking, Some(false));
    assert_eq!(found.listen.queue, 128);
    assert_eq!(origin(&found, "port"), Origin::Flag);
    assert_eq!(origin(&found, "max-context"), Origin::File(2));
    assert_eq!(origin(&found, "model-dir"), Origin::File(7));
    assert_eq!(origin(&found, "queue"), Origin::Default);
}

#[test]
fn a_list_on_the_command_line_replaces_the_one_of_the_file() {
    let found = serve("api-key = [\"one\", \"two\"]", &["--api-key", "three"]).unwrap();
    assert_eq!(found.listen.api_key, ["three"]);
    assert!(serve("strict-params = false", &[]).is_ok_and(|found| !found.listen.strict_params));
}

#[test]
fn what_is_wrong_is_told_with_file_line_key_and_value() {
    for (lines, wanted) in [
        ("\nprot = 1", "FILE:2: there is no setting `prot`: did you mean `port`?"),
        ("model = \"x\"", "there is no setting `model`: did you mean `model-dir`?"),
        ("max_contxt = 1", "did you mean `max-context`?"),
        ("zzz = 1", "there is no setting `zzz`; keys are the flags"),
        ("check = true", "there is no setting `check`"),
        ("config = \"x\"", "there is no setting `config`"),
        ("fault = \"once:3\"", "there is no setting `fault`"),
        ("port = 70000", "FILE:1: port = 70000: 70000 is not in 0..=65535"),
        ("memory = \"24G\"", "FILE:1: memory = \"24G\": unknown unit `G`"),
        ("quantize = \"int3\"", "quantize = \"int3\": expected one of none, int8, int4"),
        ("port = [1, 2]", "port = [1, 2]: expected one value"),
        ("port = []", "port = []: expected one value"),
        ("port = { a = 1 }", "expected a text, a number, true or false"),
        ("strict-params = 1", "strict-params = 1: expected true or false"),
        ("[server]\nport = 1", "FILE:1: there is no setting `server`"),
        ("[memory]\nport = 1", "settings are not grouped"),
        ("max-context = 1\nmax_context = 2", "FILE:2: `max_context` stands here a second time"),
        ("port = 1\nport = 2", "FILE:2: "),
        ("port = ", "FILE:1: "),
    ] {
        let text = refusal(lines, &[]);
        assert!(text.contains(wanted), "{lines}: {text}");
        assert!(text.starts_with("error: FILE"), "{lines}: {text}");
    }
}

#[test]
fn a_wrong_line_is_refused_even_where_a_flag_wins() {
    assert!(refusal("port = 70000", &["--port", "1"]).contains("port = 70000"));
}

#[test]
fn settings_that_do_not_go_together_are_told_with_where_they_stand() {
    let text = refusal("geometry = \"4b\"", &[]);
    assert!(text.contains("--weights"), "{text}");
    assert!(text.contains("also set: FILE (geometry)"), "{text}");
    assert!(serve("geometry = \"4b\"", &["--weights", "random"]).is_ok());
    assert!(serve("", &["--geometry", "4b"]).is_err());
}

#[test]
fn a_secret_is_not_repeated() {
    let text = refusal("api-key = { secret-word = 1 }", &[]);
    assert!(text.contains("api-key = (hidden)") && !text.contains("secret-word"), "{text}");
    let found = serve("api-key = [\"secret-word\", \"b\"]", &[]).unwrap();
    let setting = found.settings.all.iter().find(|setting| setting.key == "api-key").unwrap();
    assert_eq!(setting.shown(), "(2 hidden)");
}

#[test]
fn a_file_that_is_not_there_is_named() {
    let words = ["qwill", "serve", "--config", "no/such.toml"].map(OsString::from);
    assert!(parse(&words).unwrap_err().to_string().contains("no/such.toml"));
}

#[test]
fn ranges_are_what_the_parsers_say() {
    let commands = Cli::commands();
    let serve = commands.iter().find(|command| has_settings(command)).unwrap();
    let of = |name: &str| range(serve.get_arguments().find(|argument| key(argument) == name).unwrap());
    assert_eq!(of("port"), "0 to 65535");
    assert_eq!(of("queue"), "a whole number, at least 1");
    assert_eq!(of("temperature"), "a number between 0 and 2");
    assert_eq!(of("strict-params"), "true, false");
    assert_eq!(of("quantize"), "none, int8, int4");
    assert_eq!(of("chat-template"), "");
}
