//! Tool calls of the embedded model, which was taught the family's way of writing them.

use serde_json::{Value, json};

use crate::harness::Running;

fn request(more: &Value) -> Value {
    let weather = json!({"type": "function", "function": {
        "name": "get_weather", "description": "Current weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    }});
    let mut request = json!({
        "messages": [{"role": "user", "content": "How is the weather in Aarhus?"}],
        "tools": [weather], "temperature": 0, "max_tokens": 64, "enable_thinking": false,
    });
    request.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    request
}

/// Name and arguments of the only call in a whole answer.
fn call(body: &Value) -> (String, Value) {
    let message = &body["choices"][0]["message"];
    let calls = message["tool_calls"].as_array().unwrap_or_else(|| panic!("no call in {body}"));
    assert_eq!(calls.len(), 1, "{body}");
    let arguments: Value = serde_json::from_str(calls[0]["function"]["arguments"].as_str().unwrap()).unwrap();
    (calls[0]["function"]["name"].as_str().unwrap().to_owned(), arguments)
}

/// The same out of a stream.
fn streamed_call(server: &Running, request: &Value) -> (String, Value) {
    let chunks: Vec<Value> = server
        .stream("/v1/chat/completions", request)
        .take_while(|data| data != "[DONE]")
        .map(|data| serde_json::from_str(&data).unwrap())
        .collect();
    let joined = |pointer: &str| -> String {
        let at = |chunk: &Value| chunk.pointer(pointer).and_then(Value::as_str).map(str::to_owned);
        chunks.iter().filter_map(at).collect()
    };
    let function = "/choices/0/delta/tool_calls/0/function";
    let arguments = serde_json::from_str(&joined(&format!("{function}/arguments"))).unwrap();
    (joined(&format!("{function}/name")), arguments)
}

#[test]
fn the_model_calls_a_tool() {
    let server = Running::start(&[]);
    let named = json!({"type": "function", "function": {"name": "get_weather"}});
    for (more, finish) in [
        (json!({}), "tool_calls"),
        (json!({"tool_choice": "required"}), "tool_calls"),
        (json!({"tool_choice": named, "enable_thinking": true}), "stop"),
    ] {
        let asked = request(&more);
        let (status, body) = server.post("/v1/chat/completions", &asked);
        assert_eq!(status, 200, "{body}");
        let (name, arguments) = call(&body);
        assert_eq!(name, "get_weather");
        // It may take one town for another; it knows that there is one.
        assert!(arguments["city"].as_str().is_some_and(|city| !city.is_empty()), "{arguments}");
        assert_eq!(body["choices"][0]["finish_reason"], finish, "{body}");
        assert_eq!(body["choices"][0]["message"]["content"], Value::Null, "{body}");
        let streamed = streamed_call(&server, &request(&with(&more, "stream", true)));
        assert_eq!(streamed, (name, arguments));
    }
}

fn with(more: &Value, name: &str, value: bool) -> Value {
    let mut more = more.clone();
    more[name] = value.into();
    more
}
