//! Prompts without answers: rendering, counting, and going on with the assistant's last message.

use axum::http::StatusCode;
use serde_json::{Value, json};

use crate::client::{Bench, CHAT, byte_tokens, in_steps, plain_chat, tokens, with};

#[tokio::test]
async fn a_rendered_chat_is_what_the_engine_gets() {
    let bench = Bench::saying("ok");
    for body in [
        plain_chat(),
        json!({"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "é <|im_end|> 🙂"}]}),
    ] {
        bench.post(CHAT, body.clone()).await;
        let ids = bench.stage.last_request().prompt.to_vec();
        let rendered = bench.post("/v1/chat/completions/render", body.clone()).await.json();
        assert_eq!(rendered["prompt_token_ids"], json!(ids));
        assert_eq!(rendered["count"], ids.len());
        assert_eq!(rendered["prompt"], bench.last_prompt());
        assert_eq!(rendered["opens_reasoning"], body.get("enable_thinking").is_none());
        let applied = bench.post("/apply-template", body.clone()).await.json();
        assert_eq!(applied, json!({"prompt": bench.last_prompt()}));
        let counted = bench.post("/v1/chat/completions/input_tokens", body).await.json();
        assert_eq!(counted, json!({"object": "response.input_tokens", "input_tokens": ids.len()}));
    }
    let reply = bench.post("/apply-template", json!({"messages": 7})).await;
    assert_eq!((reply.status, reply.error()["param"].clone()), (StatusCode::BAD_REQUEST, json!("messages")));
}

#[tokio::test]
async fn names_without_a_version_are_the_same_endpoints() {
    let bench = Bench::saying("ok");
    assert_eq!(bench.get("/models").await.json(), bench.get("/v1/models").await.json());
    let chat = bench.post("/chat/completions", plain_chat()).await.json();
    assert_eq!(chat["choices"][0]["message"]["content"], "ok");
    let completion = bench.post("/completions", json!({"prompt": "x"})).await.json();
    assert_eq!(completion["object"], "text_completion");
}

fn prefilled(last: &Value) -> Value {
    json!({"messages": [{"role": "user", "content": "2+2?"}, last]})
}

#[tokio::test]
async fn the_assistants_last_words_are_continued_to_the_letter() {
    let bench = Bench::new(in_steps(tokens("4."), 1));
    // The last one ends like what the template writes behind it, another one in white space that it would cut.
    for words in ["The answer is", "The answer is ", "The <|im_end|", "end"] {
        for more in [json!({}), json!({"continue_final_message": true, "add_generation_prompt": false})] {
            let body = prefilled(&json!({"role": "assistant", "content": words}));
            let reply = bench.post(CHAT, with(body, more)).await;
            assert_eq!(reply.status, StatusCode::OK, "{}", reply.body);
            let choice = reply.json()["choices"][0].clone();
            assert_eq!(choice["message"], json!({"role": "assistant", "content": "4."}));
            assert!(
                bench.last_prompt().ends_with(&format!("</think>\n\n{words}")),
                "{}",
                bench.last_prompt()
            );
        }
    }
}

#[tokio::test]
async fn thinking_that_was_begun_goes_on() {
    let bench = Bench::new(in_steps(byte_tokens("two</think>\n\n4."), 3));
    let last = json!({"role": "assistant", "content": "", "reasoning_content": "two and "});
    let (plain, streamed) = bench.both(CHAT, prefilled(&last)).await;
    assert!(bench.last_prompt().ends_with("<think>\ntwo and "), "{}", bench.last_prompt());
    assert_eq!(plain["choices"][0]["message"]["reasoning_content"], "two");
    assert_eq!(plain["choices"][0]["message"]["content"], "4.");
    assert_eq!(streamed.joined(0, "/delta/content"), "4.");
}

#[tokio::test]
async fn a_turn_of_its_own_where_asked_or_where_nothing_goes_on() {
    let bench = Bench::saying("ok");
    let call = json!({"function": {"name": "f", "arguments": "{}"}});
    for (last, more) in [
        (json!({"role": "assistant", "content": "done"}), json!({"add_generation_prompt": true})),
        (json!({"role": "assistant", "content": "done"}), json!({"continue_final_message": false})),
        (json!({"role": "assistant", "tool_calls": [call]}), json!({})),
        (json!({"role": "assistant", "content": ""}), json!({})),
    ] {
        let reply = bench.post(CHAT, with(prefilled(&last), more)).await;
        assert_eq!(reply.status, StatusCode::OK, "{}", reply.body);
        assert!(bench.last_prompt().ends_with("<|im_start|>assistant\n<think>\n"), "{}", bench.last_prompt());
    }
    for (last, more, param) in [
        (json!({"role": "user", "content": "x"}), json!({}), "continue_final_message"),
        (json!({"role": "assistant", "tool_calls": [call]}), json!({}), "continue_final_message"),
        (
            json!({"role": "assistant", "content": "x"}),
            json!({"add_generation_prompt": true}),
            "continue_final_message",
        ),
    ] {
        let body = with(prefilled(&last), with(json!({"continue_final_message": true}), more));
        let reply = bench.post(CHAT, body).await;
        assert_eq!((reply.status, reply.error()["param"].clone()), (StatusCode::BAD_REQUEST, json!(param)));
    }
}
