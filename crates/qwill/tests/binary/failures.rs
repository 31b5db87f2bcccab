//! Everything that can be wrong before the port opens: code 1 (2 for usage), the reason, and what would help.

use std::net::TcpListener;
use std::path::Path;

use serde_json::Value;

use crate::harness::{root, run, stderr};

/// A copy of the embedded model's directory, to be damaged.
fn checkpoint() -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(root().join("models/tiny")).unwrap() {
        let path = entry.unwrap().path();
        if path.is_file() {
            std::fs::copy(&path, directory.path().join(path.file_name().unwrap())).unwrap();
        }
    }
    directory
}

/// Serves a directory that is expected to fail; the message with the directory's name taken out.
fn refusal(directory: &Path) -> String {
    let output = run(&["serve", "--port", "0", "--log-level", "off", &directory.display().to_string()]);
    let text = stderr(&output, Some(directory));
    assert_eq!(output.status.code(), Some(1), "{text}");
    let screen = String::from_utf8(output.stdout).unwrap();
    assert!(!screen.contains("ready"), "it listened:\n{screen}");
    text
}

fn edit_config(directory: &Path, edit: impl FnOnce(&mut Value)) {
    let path = directory.join("config.json");
    let mut config: Value = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
    edit(&mut config);
    std::fs::write(path, config.to_string()).unwrap();
}

#[test]
fn a_directory_that_does_not_exist() {
    insta::assert_snapshot!(refusal(Path::new("no-such-model")));
}

#[test]
fn a_directory_without_a_checkpoint() {
    let directory = tempfile::tempdir().unwrap();
    insta::assert_snapshot!(refusal(directory.path()));
}

#[test]
fn a_truncated_shard() {
    let directory = checkpoint();
    let shard = directory.path().join("model-00002-of-00002.safetensors");
    let bytes = std::fs::read(&shard).unwrap();
    std::fs::write(&shard, &bytes[..bytes.len() / 2]).unwrap();
    insta::assert_snapshot!(refusal(directory.path()));
}

#[test]
fn a_missing_shard() {
    let directory = checkpoint();
    std::fs::remove_file(directory.path().join("model-00001-of-00002.safetensors")).unwrap();
    insta::assert_snapshot!(refusal(directory.path()));
}

#[test]
fn a_tensor_of_another_shape_than_the_configuration_says() {
    let directory = checkpoint();
    edit_config(directory.path(), |config| config["text_config"]["intermediate_size"] = 640.into());
    insta::assert_snapshot!(refusal(directory.path()));
}

#[test]
fn a_model_of_another_architecture() {
    let directory = checkpoint();
    edit_config(directory.path(), |config| config["text_config"]["attention_bias"] = true.into());
    insta::assert_snapshot!(refusal(directory.path()));
}

#[test]
fn a_missing_tokenizer() {
    let directory = checkpoint();
    std::fs::remove_file(directory.path().join("tokenizer.json")).unwrap();
    insta::assert_snapshot!(refusal(directory.path()));
}

#[test]
fn a_template_that_is_no_template() {
    let directory = checkpoint();
    std::fs::write(directory.path().join("chat_template.jinja"), "{% if %}").unwrap();
    let text = refusal(directory.path());
    assert!(text.contains("the chat template cannot be used"), "{text}");
    assert!(text.contains("does not compile"), "{text}");
}

#[test]
fn a_plan_that_does_not_fit() {
    let output = run(&["serve", "--port", "0", "--log-level", "off", "--memory", "16MiB", "--threads", "2"]);
    assert_eq!(output.status.code(), Some(1));
    insta::assert_snapshot!(stderr(&output, None));
}

#[test]
fn a_port_in_use() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let output = run(&["serve", "--port", &port]);
    assert_eq!(output.status.code(), Some(1));
    insta::assert_snapshot!(stderr(&output, None).replace(&port, "[PORT]"));
}

#[test]
fn a_key_file_without_a_key() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let output = run(&["serve", "--port", "0", "--api-keys-file", &file.path().display().to_string()]);
    assert_eq!(output.status.code(), Some(1));
    insta::assert_snapshot!(stderr(&output, Some(file.path())));
}

#[test]
fn a_server_without_a_key_does_not_open_itself_to_a_network() {
    let output = run(&["serve", "--host", "0.0.0.0", "--port", "0"]);
    assert_eq!(output.status.code(), Some(1));
    insta::assert_snapshot!(stderr(&output, None));
}

#[test]
fn usage_errors_have_a_code_of_their_own_and_name_the_flag() {
    for (arguments, wanted) in [
        (&["serve", "--port", "70000"][..], "--port"),
        (&["serve", "--prot", "1"], "--port"),
        (&["serve", "--memory", "24G"], "unknown unit `G`"),
        (&["serve", "--threads", "0"], "must be at least 1"),
        (&["serve", "--temperature", "3"], "between 0 and 2"),
        (&["serve", "--quantize", "int3"], "int4"),
        (&["serve", "--device", "gpu"], "cuda:N"),
        (&["serve", "--weights", "random"], "--geometry"),
        (&["serve", "--geometry", "4b"], "--weights"),
        (&["serve", "--weights", "random", "--geometry", "5b"], "27b"),
        (&["serve", "--weights", "random", "--geometry", "4b", "dir"], "cannot be used with"),
        (&["chat", "--url", "http://h", "dir"], "cannot be used with"),
        (&["plan", "--geometry", "4b", "dir"], "cannot be used with"),
        (&["server"], "serve"),
        (&[], "Usage"),
    ] {
        let output = run(arguments);
        let text = stderr(&output, None);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {text}");
        assert!(text.contains(wanted), "{arguments:?}: {text}");
    }
}

#[test]
fn other_wrong_values_say_what_would_be_right() {
    for (arguments, wanted) in [
        (&["serve", "--log-level", "=x=", "--port", "0"][..], "--log-level"),
        (&["serve", "--prefill-slice", "8", "--port", "0"], "a prefill slice of 8 rows is too small"),
        (&["serve", "--max-context", "99999999", "--port", "0"], "longer than the model's 32768"),
        (&["serve", "--host", "192.0.2.1", "--port", "0"], "--host"),
        (&["serve", "--chat-template", "no/such/file", "--port", "0"], "no/such/file"),
        (&["chat", "--url", "https://example.org"], "http://"),
        (&["chat", "--url", "http://127.0.0.1:9"], "is the server running?"),
    ] {
        let output = run(arguments);
        let text = stderr(&output, None);
        assert_eq!(output.status.code(), Some(1), "{arguments:?}: {text}");
        assert!(text.contains(wanted), "{arguments:?}: {text}");
    }
}

#[test]
fn the_version_names_the_source() {
    let output = run(&["--version"]);
    assert!(output.status.success());
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.starts_with(concat!("qwill ", env!("CARGO_PKG_VERSION"))), "{text}");
}
