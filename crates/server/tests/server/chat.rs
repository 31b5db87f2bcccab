//! `/v1/chat/completions`.

use std::sync::Arc;

use axum::http::StatusCode;
use qwill_server::ServerOptions;
use serde_json::{Value, json};

use crate::client::{Bench, CHAT, byte_tokens, in_steps, one_by_one, plain_chat, tokens, with};
use crate::engine::{self, Act, END_OF_TURN};

/// A body with what changes from run to run replaced.
fn settled(mut value: Value) -> Value {
    assert!(value["id"].as_str().unwrap().starts_with("chatcmpl-"));
    let created = value["created"].as_u64().unwrap();
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs();
    assert!((now - 60..=now).contains(&created), "{created} are no seconds of today");
    value["id"] = "ID".into();
    value["created"] = 0.into();
    value
}

#[tokio::test]
async fn body_snapshot() {
    let bench = Bench::saying("Add them up.\n</think>\n\nIt is 4.");
    let body = json!({
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}],
        "logprobs": true, "top_logprobs": 1, "max_tokens": 4, "temperature": 0,
    });
    let reply = bench.post(CHAT, body).await;
    assert_eq!(reply.status, StatusCode::OK);
    insta::assert_snapshot!(serde_json::to_string_pretty(&settled(reply.json())).unwrap());
}

#[tokio::test]
async fn stream_snapshot() {
    let bench = Bench::new(in_steps(tokens("Add them up.\n</think>\n\nIt is 4."), 3));
    let body = json!({
        "messages": [{"role": "user", "content": "2+2?"}],
        "stream": true, "stream_options": {"include_usage": true},
    });
    let reply = bench.post(CHAT, body).await;
    let events: Vec<String> = reply.events().into_iter().map(|event| settled(event).to_string()).collect();
    insta::assert_snapshot!(events.join("\n"));
}

#[tokio::test]
async fn streamed_text_is_the_text_at_any_cut() {
    const REASONING: &str = "Ein Gedanke 🤔 über 日本語";
    const CONTENT: &str = "naïve 👩‍👩‍👧 family, 中文 q\u{301}";
    let text = format!("{REASONING}\n</think>\n\n{CONTENT}");
    for step_tokens in [1, 2, 3, 5, 100] {
        for ids in [tokens(&text), byte_tokens(&text)] {
            let bench = Bench::new(in_steps(ids, step_tokens));
            let body = json!({"messages": [{"role": "user", "content": "x"}], "max_tokens": 200});
            let (plain, streamed) = bench.both(CHAT, body).await;
            let message = &plain["choices"][0]["message"];
            assert_eq!(message["content"], CONTENT);
            assert_eq!(message["reasoning_content"], REASONING);
            assert_eq!(message["reasoning"], REASONING);
            assert_eq!(streamed.joined(0, "/delta/content"), CONTENT);
            assert_eq!(streamed.joined(0, "/delta/reasoning_content"), REASONING);
            assert_eq!(streamed.joined(0, "/delta/reasoning"), REASONING);
            assert!(!streamed.body.contains('\u{fffd}'));
        }
    }
}

#[tokio::test]
async fn chunks_come_in_the_documented_order() {
    let bench = Bench::saying("One two three.");
    let body = with(plain_chat(), json!({"stream": true, "stream_options": {"include_usage": true}}));
    let events = bench.post(CHAT, body).await.events();
    let (usage, chunks) = events.split_last().unwrap();
    assert_eq!(chunks[0]["choices"][0]["delta"], json!({"role": "assistant", "content": ""}));
    let (last, middle) = chunks.split_last().unwrap();
    for chunk in chunks {
        assert_eq!(chunk["object"], "chat.completion.chunk");
        assert_eq!(chunk["id"], chunks[0]["id"]);
        assert_eq!(chunk["usage"], Value::Null);
        assert_eq!(chunk["choices"].as_array().unwrap().len(), 1);
    }
    for chunk in &middle[1..] {
        assert_eq!(chunk["choices"][0]["finish_reason"], Value::Null);
        assert!(!chunk["choices"][0]["delta"]["content"].as_str().unwrap().is_empty());
    }
    assert_eq!(last["choices"][0]["delta"], json!({}));
    assert_eq!(last["choices"][0]["finish_reason"], "stop");
    assert_eq!(usage["choices"], json!([]));
    let words = tokens("One two three.").len();
    assert_eq!(usage["usage"]["completion_tokens"], words + 1, "the end-of-turn token counts");
    assert_eq!(usage["usage"]["prompt_tokens_details"]["cached_tokens"], engine::CACHED_TOKENS);
}

#[tokio::test]
async fn stop_strings_cut_across_tokens_and_cancel() {
    let text = "alpha beta END gamma";
    for step_tokens in [1, 2, 7] {
        for ids in [byte_tokens(text), tokens(text)] {
            let acts = move |ids: Vec<u32>| {
                let mut acts: Vec<Act> =
                    ids.chunks(step_tokens).map(|step| Act::Step(step.to_vec())).collect();
                acts.push(Act::Hold);
                acts
            };
            let bench = Bench::new(Arc::new(move |_, _| acts(ids.clone())));
            let body = with(plain_chat(), json!({"stop": ["ENDLESS", "END"]}));
            let (plain, streamed) = bench.both(CHAT, body).await;
            assert_eq!(plain["choices"][0]["message"]["content"], "alpha beta ");
            assert_eq!(plain["choices"][0]["finish_reason"], "stop");
            assert_eq!(streamed.joined(0, "/delta/content"), "alpha beta ");
            bench.stage.wait_cancelled(2);
        }
    }
}

#[tokio::test]
async fn a_stop_string_ends_its_choice_alone() {
    // The first choice meets the stop string at once and would go on for long; the second one never does.
    let script = Arc::new(|_: &_, choice| {
        let text = if choice == 0 { "no END and on and on and on" } else { "yes, yes" };
        let mut acts: Vec<Act> = byte_tokens(text).into_iter().map(|id| Act::Step(vec![id])).collect();
        acts.insert("no END".len(), Act::Hold);
        acts
    });
    let bench = Bench::new(script);
    let body = with(plain_chat(), json!({"n": 2, "stop": "END", "stream": true}));
    let reply = {
        // The second choice waits until the first one is known to be cancelled.
        let gate = bench.stage.clone();
        let opener = tokio::task::spawn_blocking(move || {
            gate.wait("a cancelled choice", |stage| !stage.cancelled_choices.lock().unwrap().is_empty());
            gate.open_gate();
        });
        let reply = bench.post(CHAT, body).await;
        opener.await.unwrap();
        reply
    };
    assert_eq!(
        (reply.joined(0, "/delta/content"), reply.joined(1, "/delta/content")),
        ("no ".into(), "yes, yes".into())
    );
    assert_eq!(*bench.stage.cancelled_choices.lock().unwrap(), [(0, "no END".len())]);
}

#[tokio::test]
async fn stop_strings_count_tokens_up_to_the_match() {
    let bench = Bench::new(one_by_one(byte_tokens("ab|cd")));
    let body = with(plain_chat(), json!({"stop": "|"}));
    let reply = bench.post(CHAT, body.clone()).await.json();
    assert_eq!(reply["choices"][0]["message"]["content"], "ab");
    assert_eq!(reply["usage"]["completion_tokens"], 3);
    let shown = with(body, json!({"include_stop_str_in_output": true}));
    let reply = bench.post(CHAT, shown).await.json();
    assert_eq!(reply["choices"][0]["message"]["content"], "ab|");
}

#[tokio::test]
async fn a_held_back_beginning_of_a_stop_string_is_not_lost() {
    let bench = Bench::new(one_by_one(byte_tokens("yes EN")));
    let (plain, streamed) = bench.both(CHAT, with(plain_chat(), json!({"stop": ["END"]}))).await;
    assert_eq!(plain["choices"][0]["message"]["content"], "yes EN");
    assert_eq!(streamed.joined(0, "/delta/content"), "yes EN");
}

#[tokio::test]
async fn stop_strings_do_not_look_into_thinking() {
    let bench = Bench::saying("The Question: is\n</think>\n\n9");
    let body = json!({"messages": [{"role": "user", "content": "x"}], "stop": ["Question:"]});
    let (plain, streamed) = bench.both(CHAT, body).await;
    assert_eq!(plain["choices"][0]["message"]["content"], "9");
    assert_eq!(plain["choices"][0]["message"]["reasoning_content"], "The Question: is");
    assert_eq!(streamed.joined(0, "/delta/content"), "9");
}

#[tokio::test]
async fn thinking_that_is_cut_short_is_the_same_streamed_or_not() {
    for (text, reasoning) in
        [("Hm,\nhm.\n", "Hm,\nhm."), ("Hm.\n\n", "Hm.\n"), ("Hm.\n</th", "Hm.\n</th"), ("\n", "")]
    {
        let ids = byte_tokens(text);
        let bench = Bench::new(one_by_one(ids.clone()));
        let body = json!({"messages": [{"role": "user", "content": "x"}], "max_tokens": ids.len()});
        let (plain, streamed) = bench.both(CHAT, body).await;
        let message = &plain["choices"][0]["message"];
        assert_eq!(message["reasoning_content"].as_str().unwrap_or_default(), reasoning);
        assert_eq!(message["content"], "");
        assert_eq!(streamed.joined(0, "/delta/reasoning_content"), reasoning);
        assert_eq!(streamed.joined(0, "/delta/content"), "");
        assert_eq!(plain["choices"][0]["finish_reason"], "length");
    }
}

#[tokio::test]
async fn thinking_tokens_are_counted() {
    let bench = Bench::saying("Hm.\n</think>\n\nYes.");
    let body = json!({"messages": [{"role": "user", "content": "x"}]});
    let usage = bench.post(CHAT, body).await.json()["usage"].clone();
    assert_eq!(usage["completion_tokens_details"]["reasoning_tokens"], tokens("Hm.\n</think>").len());
    let total = usage["prompt_tokens"].as_u64().unwrap() + usage["completion_tokens"].as_u64().unwrap();
    assert_eq!(usage["total_tokens"], total);
    let unfinished = Bench::saying("Hm, hm.");
    let body = json!({"messages": [{"role": "user", "content": "x"}], "max_tokens": 2});
    let reply = unfinished.post(CHAT, body).await.json();
    assert_eq!(reply["choices"][0]["message"]["content"], "");
    assert_eq!(reply["choices"][0]["finish_reason"], "length");
    assert_eq!(reply["usage"]["completion_tokens_details"]["reasoning_tokens"], 2);
}

#[tokio::test]
async fn an_answer_without_thinking_is_all_content() {
    let bench = Bench::saying("42");
    for more in [
        json!({"enable_thinking": false}),
        json!({"chat_template_kwargs": {"enable_thinking": false}}),
        json!({"reasoning_effort": "none"}),
    ] {
        let body = with(json!({"messages": [{"role": "user", "content": "x"}]}), more.clone());
        let message = bench.post(CHAT, body).await.json()["choices"][0]["message"].clone();
        assert_eq!(message, json!({"role": "assistant", "content": "42"}), "{more}");
    }
}

#[tokio::test]
async fn several_choices_differ_and_all_end() {
    let script = Arc::new(|_: &_, choice: usize| {
        let text = ["red", "green apples", "blue"][choice];
        byte_tokens(text).into_iter().map(|id| Act::Step(vec![id])).collect()
    });
    let bench = Bench::new(script);
    let body =
        with(plain_chat(), json!({"n": 3, "seed": 7, "stop": " ap", "max_tokens": 20, "cache_salt": "team"}));
    let (plain, streamed) = bench.both(CHAT, body).await;
    for (index, text) in ["red", "green", "blue"].into_iter().enumerate() {
        assert_eq!(plain["choices"][index]["index"], index);
        assert_eq!(plain["choices"][index]["message"]["content"], text);
        assert_eq!(plain["choices"][index]["finish_reason"], "stop");
        assert_eq!(streamed.joined(index, "/delta/content"), text);
        assert_eq!(streamed.joined(index, "/finish_reason"), "stop");
        assert_eq!(streamed.joined(index, "/delta/role"), "assistant");
    }
    let request = bench.stage.last_request();
    assert_eq!((request.choices, request.sampling.seed), (3, 7));
    assert_eq!(request.cache_salt.as_deref(), Some("team"));
    // red and its end, "green ap" up to the match, blue and its end.
    assert_eq!(plain["usage"]["completion_tokens"], 4 + 8 + 5);
}

#[tokio::test]
async fn logprobs_are_bit_exact_and_one_for_each_token() {
    let ids = byte_tokens("né");
    let bench = Bench::new(in_steps(ids.clone(), 2));
    let body = with(plain_chat(), json!({"logprobs": true, "top_logprobs": 2, "return_token_ids": true}));
    let (plain, streamed) = bench.both(CHAT, body).await;
    let content = plain["choices"][0]["logprobs"]["content"].as_array().unwrap().clone();
    let mut expected = ids;
    expected.push(END_OF_TURN);
    assert_eq!(plain["choices"][0]["token_ids"], json!(expected));
    assert_eq!(content.len(), expected.len());
    for (entry, &id) in content.iter().zip(&expected) {
        let truth = engine::logprobs_of(id, 2);
        assert_eq!((entry["logprob"].as_f64().unwrap() as f32).to_bits(), truth.logprob.to_bits());
        assert_eq!(entry["logprob"].to_string(), truth.logprob.to_string(), "printed shortest");
        assert_eq!(entry["top_logprobs"].as_array().unwrap().len(), 2);
        assert_eq!(entry["top_logprobs"][0]["logprob"], entry["logprob"]);
    }
    assert_eq!(content[0]["token"], "n");
    assert_eq!(content[1]["token"], "bytes:\\xc3");
    assert_eq!(content[1]["bytes"], json!([0xc3]));
    let streamed_entries: Vec<Value> = streamed
        .events()
        .iter()
        .flat_map(|event| event["choices"][0]["logprobs"]["content"].as_array().cloned().unwrap_or_default())
        .collect();
    assert_eq!(streamed_entries, content);
    let prompt_ids = streamed.events()[0]["prompt_token_ids"].clone();
    assert_eq!(prompt_ids, plain["prompt_token_ids"]);
    assert_eq!(prompt_ids, json!(bench.stage.last_request().prompt.to_vec()));
}

#[tokio::test]
async fn sampling_reaches_the_engine() {
    let bench = Bench::saying("ok");
    let body = with(
        plain_chat(),
        json!({
            "model": "team/alias", "temperature": 0.5, "top_p": 0.9, "top_k": 20, "min_p": 0.1,
            "presence_penalty": 1.5, "frequency_penalty": -0.5, "repetition_penalty": 1.1,
            "logit_bias": {"7": 3, "5": -100}, "seed": -1, "min_tokens": 2, "max_completion_tokens": 9,
            "ignore_eos": true, "stop_token_ids": [11], "best_of": 1, "user": "me", "store": false,
            "metadata": {"a": "b"}, "parallel_tool_calls": true, "made_up": 1, "response_format": {"type": "text"},
            "tools": null, "top_logprobs": 0, "modalities": ["text"],
        }),
    );
    let reply = bench.post(CHAT, body).await;
    assert_eq!(reply.status, StatusCode::OK, "{}", reply.body);
    assert_eq!(reply.json()["model"], "team/alias");
    let sampling = bench.stage.last_request().sampling;
    assert_eq!(sampling.temperature, 0.5);
    assert_eq!(sampling.top_p, 0.9);
    assert_eq!(sampling.top_k, 20);
    assert_eq!(sampling.min_p, 0.1);
    assert_eq!(sampling.presence_penalty, 1.5);
    assert_eq!(sampling.frequency_penalty, -0.5);
    assert_eq!(sampling.repetition_penalty, 1.1);
    assert_eq!(sampling.logit_bias, [(5, -100.0), (7, 3.0)]);
    assert_eq!(sampling.seed, u64::MAX);
    assert_eq!((sampling.min_tokens, sampling.max_tokens), (2, 9));
    assert!(sampling.ignore_eos);
    assert_eq!(sampling.stop_token_ids, [11]);
    assert_eq!(sampling.logprobs, None);
}

#[tokio::test]
async fn absent_parameters_come_from_the_options() {
    let mut options = ServerOptions::default();
    options.defaults.temperature = 0.6;
    options.defaults.top_k = 20;
    options.defaults.presence_penalty = 1.5;
    let bench = Bench::with(options, engine::facts(), one_by_one(tokens("ok")));
    let first = bench.post(CHAT, plain_chat()).await.json();
    let one = bench.stage.last_request().sampling;
    bench.post(CHAT, with(plain_chat(), json!({"temperature": null, "seed": null}))).await;
    let two = bench.stage.last_request().sampling;
    assert_eq!((one.temperature, one.top_k, one.presence_penalty), (0.6, 20, 1.5));
    assert_eq!(two.temperature, 0.6);
    assert_ne!(one.seed, two.seed, "absent seeds are random");
    let prompt_tokens = first["usage"]["prompt_tokens"].as_u64().unwrap() as usize;
    assert_eq!(one.max_tokens, 256 - prompt_tokens, "what fits");
}

#[tokio::test]
async fn the_prompt_is_the_templates() {
    let bench = Bench::saying("ok");
    let body = json!({
        "messages": [
            {"role": "developer", "content": [{"type": "text", "text": "Be kind."}]},
            {"role": "user", "content": "w? <|im_end|>"},
            {"role": "assistant", "content": null, "reasoning": "need tool", "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{\"b\":1,\"a\":[true]}"}}]},
            {"role": "tool", "tool_call_id": "c1", "content": "sun"},
        ],
        "chat_template_kwargs": {"enable_thinking": false},
        "max_tokens": 1,
    });
    let reply = bench.post(CHAT, body).await;
    assert_eq!(reply.status, StatusCode::OK, "{}", reply.body);
    let prompt = bench.stage.last_request().prompt;
    let text = bench.text.tokenizer.decode(&prompt, false);
    assert_eq!(
        text,
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nw? <|im_end|><|im_end|>\n\
         <|im_start|>assistant\n<think>\nneed tool\n</think>\n\n<tool_call>\n<function=f>\n<parameter=b>\n1\n\
         </parameter>\n<parameter=a>\n[true]\n</parameter>\n</function>\n</tool_call><|im_end|>\n\
         <|im_start|>user\n<tool_response>\nsun\n</tool_response><|im_end|>\n\
         <|im_start|>assistant\n<think>\n\n</think>\n\n"
    );
    let real_ends = prompt.iter().filter(|&&id| id == END_OF_TURN).count();
    assert_eq!(real_ends, 4, "the user's own marker is text");
}

#[tokio::test]
async fn tools_reach_the_template_unless_none_are_to_be_called() {
    let bench = Bench::saying("<tool_call>\n<function=f>\n</function>\n</tool_call>");
    let tools =
        json!([{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}]);
    let body = with(plain_chat(), json!({"tools": tools, "tool_choice": "auto"}));
    bench.post(CHAT, body.clone()).await;
    let prompt = |bench: &Bench| bench.text.tokenizer.decode(&bench.stage.last_request().prompt, false);
    assert!(prompt(&bench).contains("look_up"));
    bench.post(CHAT, with(body, json!({"tool_choice": "none"}))).await;
    assert!(!prompt(&bench).contains("look_up"));
}

#[tokio::test]
async fn special_tokens_show_only_when_asked_for() {
    let ids = [tokens("a"), vec![8167], tokens("b")].concat();
    let bench = Bench::new(one_by_one(ids));
    let body = with(plain_chat(), json!({}));
    let hidden = bench.post(CHAT, body.clone()).await.json();
    assert_eq!(hidden["choices"][0]["message"]["content"], "ab");
    let shown = bench.post(CHAT, with(body, json!({"skip_special_tokens": false}))).await.json();
    assert_eq!(shown["choices"][0]["message"]["content"], "a<|im_start|>b");
}

#[tokio::test]
async fn a_cut_character_at_the_end_is_flushed() {
    let ids = byte_tokens("x🙂")[..3].to_vec();
    let bench = Bench::new(one_by_one(ids));
    let (plain, streamed) = bench.both(CHAT, plain_chat()).await;
    assert_eq!(plain["choices"][0]["message"]["content"], "x\u{fffd}");
    assert_eq!(streamed.joined(0, "/delta/content"), "x\u{fffd}");
}

/// A server with another template than the small model's, or none.
fn with_template(template: Option<&str>) -> Bench {
    let template = template.map(|source| Arc::new(qwill_text::ChatTemplate::new(source).unwrap()));
    let text = qwill_server::TextModel { template, ..crate::client::text_model() };
    Bench::with_text(text, ServerOptions::default(), engine::facts(), one_by_one(tokens("ok")))
}

#[tokio::test]
async fn late_system_messages_are_gathered_for_templates_that_allow_one_place() {
    let bench = with_template(Some(
        "{%- for m in messages -%}{%- if m.role == 'system' and not loop.first -%}\
         {{- raise_exception('System message must be first.') -}}{%- endif -%}\
         [{{ m.role }}: {{ m.content }}]{%- endfor -%}{%- if messages[-1].content == 'no' -%}\
         {{- raise_exception('Not today.') -}}{%- endif -%}",
    ));
    let body = json!({"messages": [
        {"role": "system", "content": "One."}, {"role": "user", "content": "Hi"},
        {"role": "developer", "content": "Two."}, {"role": "user", "content": "Go"}]});
    let reply = bench.post(CHAT, body).await;
    assert_eq!(reply.status, StatusCode::OK, "{}", reply.body);
    let text = bench.text.tokenizer.decode(&bench.stage.last_request().prompt, false);
    assert_eq!(text, "[system: One.\n\nTwo.][user: Hi][user: Go]");

    let refused = bench.post(CHAT, json!({"messages": [{"role": "user", "content": "no"}]})).await;
    assert_eq!(refused.status, StatusCode::BAD_REQUEST);
    assert_eq!(refused.error()["param"], "messages");
    assert_eq!(refused.error()["code"], "template_error");
    assert!(refused.error()["message"].as_str().unwrap().ends_with(": Not today."), "{}", refused.body);
}

#[tokio::test]
async fn without_a_template_there_are_completions_only() {
    let bench = with_template(None);
    let refused = bench.post(CHAT, plain_chat()).await;
    assert_eq!(refused.status, StatusCode::BAD_REQUEST);
    assert!(refused.error()["message"].as_str().unwrap().contains("/v1/completions"));
    let reply = bench.post(crate::client::COMPLETIONS, json!({"prompt": "x"})).await;
    assert_eq!(reply.status, StatusCode::OK);
}
