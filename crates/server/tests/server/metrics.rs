//! Metrics are true: every request counts once, sums are exact, and idle gauges are at rest.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use qwill_contract::EngineFacts;
use qwill_server::ServerOptions;
use serde_json::{Value, json};

use crate::client::{Bench, CHAT, COMPLETIONS, byte_tokens, plain_chat, with};
use crate::engine::{self, Act};
use crate::service::metric;
use crate::sockets::{connect, exchange, get, post};

/// What the engine does is in the length of the prompt: it ends, runs into its limit, fails, or waits to be cancelled.
fn mixed() -> Bench {
    let facts = EngineFacts { queue_capacity: 2048, ..engine::facts() };
    let script = Arc::new(|request: &qwill_contract::Request, _: usize| {
        let text = Act::Step(byte_tokens("abc"));
        match request.prompt.len() {
            3 => vec![text, Act::Fail("bad luck")],
            4 => vec![text, Act::Hold],
            _ => vec![text.clone(), text],
        }
    });
    Bench::with(ServerOptions::default(), facts, script)
}

fn of_kind(kind: usize, stream: bool) -> Value {
    let (prompt, max_tokens) = match kind {
        0 => (vec![5; 1], 100),
        1 => (vec![5; 2], 4),
        2 => (vec![5; 3], 100),
        _ => (vec![5; 4], 100),
    };
    json!({"prompt": prompt, "max_tokens": max_tokens, "stream": stream})
}

#[tokio::test]
async fn a_thousand_requests_are_counted_once_each_under_both_names() {
    const REQUESTS: usize = 1000;
    let bench = mixed();
    let listening = bench.listen(ServerOptions::default()).await;
    let address = listening.address;
    let (leave, leaving) = tokio::sync::watch::channel(false);
    let mut clients = Vec::new();
    for number in 0..REQUESTS {
        let (kind, stream) = (number % 4, number % 8 < 4);
        let request = post(COMPLETIONS, &of_kind(kind, stream).to_string());
        let mut leaving = leaving.clone();
        clients.push(tokio::spawn(async move {
            if kind < 3 {
                exchange(address, request).await;
                return;
            }
            let mut stream = connect(address).await;
            tokio::io::AsyncWriteExt::write_all(&mut stream, request.as_bytes()).await.unwrap();
            leaving.wait_for(|leave| *leave).await.unwrap();
        }));
    }
    // Who leaves does so when everybody has got something.
    let seen = async |what: &str| exchange(address, get("/metrics")).await.contains(what);
    let start = Instant::now();
    while !seen(&format!("qwill_time_to_first_token_seconds_count {REQUESTS}\n")).await {
        assert!(start.elapsed() < Duration::from_secs(20));
    }
    leave.send_replace(true);
    for client in clients {
        client.await.unwrap();
    }
    for _ in 0..7 {
        exchange(address, post(COMPLETIONS, r#"{"prompt":"x","n":0}"#)).await;
    }
    let stage = Arc::clone(&bench.stage);
    let all_ended = move |stage: &engine::Stage| stage.ended.load(Ordering::SeqCst) == REQUESTS;
    tokio::task::spawn_blocking(move || stage.wait("all to end", all_ended)).await.unwrap();
    // The last answers may be on their way while the engine is done.
    let start = Instant::now();
    let text = loop {
        let text = exchange(address, get("/metrics")).await;
        let cancelled = r#"qwill_requests_finished_total{endpoint="/v1/completions",reason="cancelled"}"#;
        if text.contains(&format!("{cancelled} {}\n", REQUESTS / 4)) {
            break text;
        }
        assert!(start.elapsed() < Duration::from_secs(20), "{text}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    };

    let each = (REQUESTS / 4) as f64;
    let labels = r#"model_name="tiny",engine="0""#;
    for (ours, theirs, count) in [
        ("stop", "stop", each),
        ("length", "length", each),
        ("error", "error", each),
        ("cancelled", "abort", each),
        ("refused", "", 7.0),
    ] {
        let name = format!("qwill_requests_finished_total{{endpoint=\"{COMPLETIONS}\",reason=\"{ours}\"}}");
        assert_eq!(metric(&text, &name), count, "{ours}");
        let reason = format!("finished_reason=\"{theirs}\"}}");
        let name = format!("vllm:request_success_total{{{labels},endpoint=\"{COMPLETIONS}\",{reason}");
        if !theirs.is_empty() {
            assert_eq!(metric(&text, &name), count, "{theirs}");
        }
    }
    assert_eq!(text.matches("vllm:request_success_total{").count(), 4);
    let prompt_tokens = each * (1.0 + 2.0 + 3.0 + 4.0);
    let cached = each * (0.0 + 1.0 + 2.0 + 2.0);
    let generated = bench.stage.tokens_sent.load(Ordering::SeqCst) as f64;
    assert_eq!(generated, each * (7.0 + 4.0 + 3.0 + 3.0));
    for (name, value) in [
        ("vllm:prompt_tokens_total", prompt_tokens),
        ("vllm:prefix_cache_queries_total", prompt_tokens),
        ("vllm:prefix_cache_hits_total", cached),
        ("vllm:generation_tokens_total", generated),
        ("vllm:time_to_first_token_seconds_count", REQUESTS as f64),
        ("vllm:request_queue_time_seconds_count", REQUESTS as f64),
        ("vllm:inter_token_latency_seconds_count", generated - each * 4.0 * 3.0),
        ("vllm:time_per_output_token_seconds_count", generated - each * 4.0 * 3.0),
        ("vllm:num_requests_running", 0.0),
        ("vllm:num_requests_waiting", 0.0),
        ("vllm:kv_cache_usage_perc", 0.0),
    ] {
        assert_eq!(metric(&text, &format!("{name}{{{labels}")), value, "{name}");
    }
    let ended = format!("vllm:e2e_request_latency_seconds_count{{{labels},endpoint=\"{COMPLETIONS}\"}}");
    assert_eq!(metric(&text, &ended), REQUESTS as f64);
    assert_eq!(metric(&text, r#"qwill_key_requests_total{key="anybody"}"#), REQUESTS as f64 + 7.0);
    assert_eq!(exchange(address, get("/slots")).await.rsplit("\r\n\r\n").next(), Some("[]"));
    let after = bench.post(CHAT, plain_chat()).await;
    assert_eq!(after.status, 200, "a request afterwards is answered");
}

#[tokio::test]
async fn drafts_are_summed_over_their_places() {
    let bench = Bench::saying("ok");
    let speculation = &bench.engine.load().speculation;
    for (drafted, accepted) in [(3, 3), (3, 1), (2, 0), (15, 15)] {
        speculation.record(drafted, accepted);
    }
    let text = bench.get("/metrics").await.body;
    let labels = r#"model_name="tiny",engine="0""#;
    for (name, value) in [
        ("num_drafts_total{L}", 4.0),
        ("num_draft_tokens_total{L}", 23.0),
        ("num_accepted_tokens_total{L}", 19.0),
        ("num_accepted_tokens_per_pos_total{L,position=\"0\"}", 3.0),
        ("num_accepted_tokens_per_pos_total{L,position=\"2\"}", 2.0),
        ("num_accepted_tokens_per_pos_total{L,position=\"14\"}", 1.0),
    ] {
        let name = format!("vllm:spec_decode_{}", name.replace('L', labels));
        assert_eq!(metric(&text, &name), value, "{name}");
    }
}

/// The text format's own rules, as `promtool check metrics` applies them.
#[tokio::test]
async fn the_text_keeps_the_formats_rules() {
    let bench = Bench::saying("one two three");
    bench.post(CHAT, with(plain_chat(), json!({"stream": true}))).await;
    bench.post(CHAT, with(plain_chat(), json!({"n": 0}))).await;
    let text = bench.get("/metrics").await.body;
    let mut seen: Vec<String> = Vec::new();
    let mut samples: Vec<&str> = Vec::new();
    for line in text.lines().filter(|line| !line.is_empty()) {
        let name = match line.strip_prefix("# TYPE ") {
            Some(rest) => rest.split(' ').next().unwrap().to_owned(),
            None if line.starts_with('#') => continue,
            None => {
                let (sample, value) = line.rsplit_once(' ').unwrap();
                assert!(value.parse::<f64>().is_ok(), "{line}");
                assert!(!samples.contains(&sample), "twice: {line}");
                samples.push(sample);
                let name = sample.split('{').next().unwrap();
                let family = seen.last().unwrap();
                let rest = name.strip_prefix(family.as_str());
                assert!(
                    matches!(rest, Some("" | "_bucket" | "_sum" | "_count")),
                    "{line} is not with its family, which is {family}"
                );
                continue;
            }
        };
        assert!(!seen.contains(&name), "{name} is there in two places");
        assert!(text.contains(&format!("# HELP {name} ")), "{name} has no help");
        seen.push(name);
    }
    assert!(
        seen.len() > 50 && seen.iter().any(|name| name == "vllm:e2e_request_latency_seconds"),
        "{seen:?}"
    );
}
