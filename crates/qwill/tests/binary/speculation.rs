//! What the server tells of its drafts.

use std::thread;
use std::time::{Duration, Instant};

use serde_json::json;

use crate::harness::{PATIENCE, Running};

/// The value of a metric by its name and labels, as they are printed.
fn metric(text: &str, name: &str) -> Option<f64> {
    let line = text.lines().find(|line| line.starts_with(name) && line[name.len()..].starts_with(' '))?;
    line[name.len()..].trim().parse().ok()
}

/// The metrics once the last round is counted: its tokens, and with them the answer, come before.
fn metrics_after_the_last_step(server: &Running) -> String {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let text = server.get("/metrics").1;
        let counted = metric(&text, "qwill_engine_steps_total{kind=\"round\"}");
        if counted == metric(&text, "qwill_speculation_round_tokens_count") || Instant::now() > deadline {
            return text;
        }
        thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn metrics_tell_what_rounds_and_drafts_did() {
    let server = Running::start(&["--spec", "lookup", "--draft-len", "7"]);
    assert!(server.screen.contains("drafts     lookup, up to 7 a step\n"), "{}", server.screen);
    let prompt: Vec<u32> = (0..120).map(|at| 400 + at % 6).collect();
    let request = json!({"prompt": prompt, "max_tokens": 40, "temperature": 0, "ignore_eos": true});
    assert_eq!(server.post("/v1/completions", &request).0, 200);
    let text = metrics_after_the_last_step(&server);
    let rounds = metric(&text, "qwill_engine_steps_total{kind=\"round\"}").unwrap();
    let tokens = metric(&text, "qwill_speculation_round_tokens_sum").unwrap();
    assert_eq!(metric(&text, "qwill_speculation_round_tokens_count"), Some(rounds), "one sequence");
    assert_eq!(metric(&text, "qwill_speculation_depth_count"), Some(rounds));
    assert_eq!(tokens, 39.0, "the first token comes of the prompt");
    assert!(metric(&text, "qwill_speculation_depth_bucket{le=\"7\"}") == Some(rounds), "{text}");
    let names = text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next());
    let mut names: Vec<&str> = names.collect();
    names.sort_unstable();
    assert!(names.windows(2).all(|pair| pair[0] != pair[1]), "a metric twice: {names:?}");
}

#[test]
fn synthetic_acceptance_is_named_wherever_speed_is() {
    let random = ["--weights", "random", "--geometry", "tiny", "--synthetic-acceptance", "1,1,0.5"];
    let server = Running::start(&random);
    assert!(server.screen.contains("SYNTHETIC ACCEPTANCE 1,1,0.5"), "{}", server.screen);
    let text = server.get("/metrics").1;
    assert!(text.contains("synthetic-acceptance=1,1,0.5"), "{text}");
    let request = json!({"prompt": "The capital", "max_tokens": 30, "ignore_eos": true});
    let (status, body) = server.post("/v1/completions", &request);
    assert_eq!(status, 200, "{body}");
    assert_eq!(body["usage"]["completion_tokens"], 30, "{body}");
}
