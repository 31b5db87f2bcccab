//! What coding agents send in the second request of a turn, after a tool has run. The bodies have the fields, types and
//! order of recorded ones; the words are ours.

use axum::http::StatusCode;
use qwill_contract::EngineFacts;
use qwill_server::ServerOptions;
use serde_json::Value;

use crate::client::{Bench, MESSAGES, RESPONSES, in_steps, tokens};
use crate::engine;

const CODEX: &str = include_str!("agents/codex.json");
const CLAUDE_CODE: &str = include_str!("agents/claude_code.json");

const ANSWER: &str = "It said hello.\n</think>\n\nDone.\n\n<tool_call>\n<function=NAME>\n<parameter=PARAMETER>\nls\n\
                      </parameter>\n</function>\n</tool_call>";

/// A server whose model calls the named tool once more.
fn calling(name: &str, parameter: &str) -> Bench {
    let answer = ANSWER.replace("NAME", name).replace("PARAMETER", parameter);
    let facts = EngineFacts { max_context_tokens: 65_536, kv_capacity_tokens: 65_536, ..engine::facts() };
    Bench::with(ServerOptions::default(), facts, in_steps(tokens(&answer), 3))
}

/// Whether the prompt has these in this order.
fn assert_order(prompt: &str, parts: &[&str]) {
    let mut rest = prompt;
    for part in parts {
        let (_, behind) = rest.split_once(part).unwrap_or_else(|| panic!("no {part:?} in\n{rest}"));
        rest = behind;
    }
}

#[tokio::test]
async fn codex_goes_on_after_a_command() {
    let bench = calling("exec_command", "cmd");
    let reply = bench.post(RESPONSES, serde_json::from_str(CODEX).unwrap()).await;
    assert_eq!(reply.status, StatusCode::OK, "{}", reply.body);
    let prompt = bench.last_prompt();
    let parts = [
        "\"name\": \"exec_command\"",
        "\"name\": \"multi_agent_v1__spawn_agent\"",
        "You are an agent.",
        "Only read.",
        "Say hello.",
        "<function=exec_command>\n<parameter=cmd>\necho hello\n</parameter>",
        "<tool_response>\nProcess exited with code 0\nOutput:\nhello",
    ];
    assert_order(&prompt, &parts);
    assert!(!prompt.contains("web_search"), "what cannot be done is not offered");
    let (name, last) = reply.named_events().pop().unwrap();
    assert_eq!(name, "response.completed");
    let output = last["response"]["output"].as_array().unwrap();
    let types: Vec<&str> = output.iter().map(|item| item["type"].as_str().unwrap()).collect();
    assert_eq!(types, ["reasoning", "message", "function_call"]);
    assert_eq!(output[2]["name"], "exec_command");
    assert_eq!(output[2]["arguments"], "{\"cmd\": \"ls\"}");
}

#[tokio::test]
async fn claude_code_goes_on_after_a_command() {
    let bench = calling("Bash", "command");
    let reply =
        bench.post(&format!("{MESSAGES}?beta=true"), serde_json::from_str(CLAUDE_CODE).unwrap()).await;
    assert_eq!(reply.status, StatusCode::OK, "{}", reply.body);
    let parts = [
        "\"name\": \"Bash\"",
        "You are an agent.",
        "Do what you are asked.",
        "Reminder 2.",
        "Say hello.",
        "A folder.",
        "<function=Bash>\n<parameter=command>\necho hello\n</parameter>",
        "<tool_response>\nhello\n</tool_response>",
    ];
    assert_order(&bench.last_prompt(), &parts);
    let events = reply.named_events();
    let started = events.iter().filter(|(name, _)| name == "content_block_start");
    let blocks: Vec<&str> =
        started.map(|(_, event)| event["content_block"]["type"].as_str().unwrap()).collect();
    assert_eq!(blocks, ["thinking", "text", "tool_use"]);
    let delta: &Value = &events.iter().find(|(name, _)| name == "message_delta").unwrap().1;
    assert_eq!(delta["delta"]["stop_reason"], "tool_use");
}
