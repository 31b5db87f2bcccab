//! What goes wrong behind the API: full queues, engines that fail, shutdown.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use axum::http::StatusCode;
use qwill_contract::EngineState;
use qwill_server::ServerOptions;
use serde_json::json;

use crate::client::{Bench, CHAT, COMPLETIONS, byte_tokens, one_by_one, plain_chat, with};
use crate::engine::{self, Act};

fn failing(act: Act) -> Bench {
    let acts = vec![Act::Step(byte_tokens("ab")), act];
    Bench::new(Arc::new(move |_, _| acts.clone()))
}

#[tokio::test]
async fn an_error_in_mid_stream_is_an_event_and_the_stream_ends_in_order() {
    let bench = failing(Act::Fail("NaN in the logits"));
    for path in [CHAT, COMPLETIONS] {
        let base = if path == CHAT { plain_chat() } else { json!({"prompt": "x"}) };
        let reply = bench.post(path, with(base.clone(), json!({"stream": true}))).await;
        assert_eq!(reply.status, StatusCode::OK);
        let last = reply.events().pop().unwrap();
        assert_eq!(last["error"]["message"], "NaN in the logits");
        assert_eq!(last["error"]["type"], "server_error");
        assert_eq!(last["error"]["code"], "engine_error");
        let plain = bench.post(path, base).await;
        assert_eq!(plain.status, StatusCode::INTERNAL_SERVER_ERROR);
        assert_eq!(plain.error()["message"], "NaN in the logits");
    }
}

#[tokio::test]
async fn logits_that_are_not_numbers_are_an_error_of_their_own() {
    let bench = failing(Act::Unsound);
    let plain = bench.post(CHAT, plain_chat()).await;
    assert_eq!(plain.status, StatusCode::INTERNAL_SERVER_ERROR);
    assert_eq!(
        (plain.error()["code"].as_str(), plain.error()["message"].as_str()),
        (Some("logits_not_numbers"), Some("not numbers"))
    );
    let streamed = bench.post(CHAT, with(plain_chat(), json!({"stream": true}))).await;
    assert_eq!(streamed.events().pop().unwrap()["error"]["code"], "logits_not_numbers");
    let health = bench.get("/health").await;
    assert_eq!((health.status, &health.json()["unsound_logits"]), (StatusCode::OK, &json!(0)));
}

#[tokio::test]
async fn an_engine_that_vanishes_or_gives_up_is_an_error() {
    let vanished = failing(Act::Vanish).post(CHAT, plain_chat()).await;
    assert_eq!(vanished.status, StatusCode::INTERNAL_SERVER_ERROR);
    assert!(vanished.error()["message"].as_str().unwrap().contains("before the answer was complete"));
    let streamed = failing(Act::Vanish).post(CHAT, with(plain_chat(), json!({"stream": true}))).await;
    assert!(streamed.events().pop().unwrap()["error"].is_object());
    let given_up = failing(Act::GiveUp).post(CHAT, plain_chat()).await;
    assert_eq!(given_up.status, StatusCode::SERVICE_UNAVAILABLE);
}

#[tokio::test]
async fn one_failed_prompt_cancels_the_others() {
    let script = Arc::new(|request: &qwill_contract::Request, _: usize| match request.prompt[0] {
        2 => vec![Act::Fail("bad luck")],
        _ => vec![Act::Hold],
    });
    let bench = Bench::new(script);
    let reply = bench.post(COMPLETIONS, json!({"prompt": [[1], [2], [3]]})).await;
    assert_eq!(reply.error()["message"], "bad luck");
    bench.stage.wait_cancelled(2);
}

#[tokio::test]
async fn a_full_queue_is_a_429_and_leaves_nothing_behind() {
    let bench = Bench::saying("ok");
    bench.stage.pause();
    let prompts = json!({"prompt": [[1], [2], [3], [4], [5]]});
    let reply = bench.post(COMPLETIONS, prompts).await;
    assert_eq!(reply.status, StatusCode::TOO_MANY_REQUESTS, "{}", reply.body);
    assert_eq!(reply.header("retry-after"), Some("1"));
    assert_eq!(reply.error()["type"], "rate_limit_error");
    assert_eq!(reply.error()["code"], "queue_full");
    assert!(reply.error()["message"].as_str().unwrap().contains("the queue holds 4"));
    bench.stage.go_on();
    // The four that had a place in the queue are not run for nobody.
    bench.stage.wait_cancelled(4);
    bench.stage.wait("idle", |stage| stage.ended.load(Ordering::SeqCst) == 4);
    assert_eq!(bench.post(CHAT, plain_chat()).await.status, StatusCode::OK);
}

#[tokio::test]
async fn states_in_which_nothing_is_taken() {
    for (state, code, live) in [
        (EngineState::Starting, "model_loading", true),
        (EngineState::Draining, "shutting_down", true),
        (EngineState::Stopped, "shutting_down", true),
        (EngineState::Failed("device lost".into()), "engine_failed", false),
    ] {
        let bench = Bench::saying("ok");
        bench.engine.load().set_state(state.clone());
        for path in [CHAT, COMPLETIONS] {
            let base = if path == CHAT { plain_chat() } else { json!({"prompt": "x"}) };
            let reply = bench.post(path, base).await;
            assert_eq!(reply.status, StatusCode::SERVICE_UNAVAILABLE, "{state:?}");
            assert_eq!(reply.error()["code"], code);
            assert_eq!(reply.header("retry-after"), Some("1"));
        }
        let health = bench.get("/health").await;
        assert_eq!(health.status, StatusCode::SERVICE_UNAVAILABLE);
        assert_eq!(health.json()["live"], live);
        assert_eq!(health.json()["ready"], false);
        assert!(health.json()["reason"].is_string());
        assert_eq!(bench.get("/health/live").await.status == StatusCode::OK, live);
        assert_eq!(bench.get("/health/ready").await.status, StatusCode::SERVICE_UNAVAILABLE);
    }
}

#[tokio::test]
async fn draining_finishes_what_runs_and_refuses_what_comes() {
    let mut acts = vec![Act::Step(byte_tokens("be")), Act::Hold];
    acts.extend(byte_tokens("fore").into_iter().map(|id| Act::Step(vec![id])));
    let bench = Bench::new(Arc::new(move |_, _| acts.clone()));
    let listening = bench.listen(ServerOptions::default()).await;
    let address = listening.address;
    let body = with(plain_chat(), json!({"stream": true})).to_string();
    let running = tokio::spawn(crate::sockets::exchange(address, crate::sockets::post(CHAT, &body)));
    let stage = Arc::clone(&bench.stage);
    tokio::task::spawn_blocking(move || stage.wait_requests(1)).await.unwrap();

    listening.stop.send(()).unwrap();
    while !bench.engine.load().drain_requested() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let health = crate::sockets::exchange(address, crate::sockets::get("/health")).await;
    assert!(health.starts_with("HTTP/1.1 503"), "{health}");
    assert!(health.contains("\"state\":\"draining\"") && health.contains("\"ready\":false"), "{health}");
    let refused =
        crate::sockets::exchange(address, crate::sockets::post(CHAT, &plain_chat().to_string())).await;
    assert!(refused.starts_with("HTTP/1.1 503"), "{refused}");
    assert!(refused.to_lowercase().contains("retry-after: 1"), "{refused}");
    assert!(!listening.task.is_finished(), "a stream is running");

    bench.stage.open_gate();
    let answer = running.await.unwrap();
    assert!(answer.contains("\"finish_reason\":\"stop\"") && answer.contains("data: [DONE]"), "{answer}");
    listening.task.await.unwrap().unwrap();
    assert!(tokio::net::TcpStream::connect(address).await.is_err(), "nobody listens any more");
}

#[tokio::test]
async fn the_drain_time_is_a_limit() {
    let bench = Bench::new(Arc::new(|_, _| vec![Act::Step(byte_tokens("x")), Act::Hold]));
    let options = ServerOptions { drain_timeout: Duration::from_millis(100), ..Default::default() };
    let listening = bench.listen(options).await;
    let body = with(plain_chat(), json!({"stream": true})).to_string();
    let running =
        tokio::spawn(crate::sockets::exchange(listening.address, crate::sockets::post(CHAT, &body)));
    let stage = Arc::clone(&bench.stage);
    tokio::task::spawn_blocking(move || stage.wait_requests(1)).await.unwrap();
    listening.stop.send(()).unwrap();
    listening.task.await.unwrap().unwrap();
    let answer = running.await.unwrap();
    assert!(answer.contains("shutting_down") && answer.contains("data: [DONE]"), "{answer}");
    bench.stage.wait_cancelled(1);
}

#[tokio::test]
async fn an_idle_server_stops_at_once() {
    let bench = Bench::saying("ok");
    let listening = bench.listen(ServerOptions::default()).await;
    // An idle keep-alive connection does not hold it up.
    let mut idle = crate::sockets::connect(listening.address).await;
    let first = crate::sockets::round_trip(&mut idle, &crate::sockets::get_keeping("/health")).await;
    assert!(first.starts_with("HTTP/1.1 200"), "{first}");
    listening.stop.send(()).unwrap();
    tokio::time::timeout(Duration::from_secs(5), listening.task).await.unwrap().unwrap().unwrap();
}

#[tokio::test]
async fn bad_options_are_refused() {
    let text = crate::client::text_model();
    let (engine, _stage) = engine::start(engine::facts(), one_by_one(Vec::new()));
    let mut wrong = vec![
        ServerOptions { api_keys: vec![" ".into()], ..Default::default() },
        ServerOptions { admin_key: Some(String::new()), ..Default::default() },
        ServerOptions { bind: ([0, 0, 0, 0], 0).into(), ..Default::default() },
        ServerOptions { cors_origins: vec!["chat.example".into()], ..Default::default() },
        ServerOptions { body_limit_bytes: 0, ..Default::default() },
        ServerOptions { max_choices: 0, ..Default::default() },
        ServerOptions { keep_alive: Duration::ZERO, ..Default::default() },
    ];
    let mut options = ServerOptions::default();
    options.defaults.top_p = f32::NAN;
    wrong.push(options);
    for options in wrong {
        assert!(qwill_server::Server::router(options, engine.clone(), text.clone()).is_err());
    }
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let options = ServerOptions { bind: taken.local_addr().unwrap(), ..Default::default() };
    let error = qwill_server::Server::bind(options, engine, text).await.err().unwrap().to_string();
    assert!(error.contains("cannot listen on 127.0.0.1") && error.contains("--port"), "{error}");
}
