//! Calls of tools, whose results a person types.

use serde_json::json;

use super::*;

#[test]
fn a_call_is_shown_and_its_result_typed() {
    let Some(mut browser) = browser() else { return };
    let server = Running::start(&[]);
    open(&mut browser, &server);
    let call = |index: u32, id: &str, name: &str, arguments: &str| json!({"tool_calls": [{"index": index, "id": id, "type": "function", "function": {"name": name, "arguments": arguments}}]});
    let more = |index: u32, arguments: &str| json!({"tool_calls": [{"index": index, "function": {"arguments": arguments}}]});
    let deltas = [
        json!({"content": "I look."}),
        call(0, "call-1", "weather", ""),
        more(0, "{\"city\": \"Par"),
        more(0, "is\", \"days\": 2}"),
        call(1, "call-2", "time", "{}"),
    ];
    answer_with(&mut browser, &deltas, "tool_calls");
    ask(&mut browser, "How is the weather?");
    browser.wait_for("document.querySelector('.send-results')");
    assert_eq!(
        browser.text("[...document.querySelectorAll('.call-head')].map((head) => head.textContent).join()"),
        "Calls weather,Calls time"
    );
    let arguments = browser.text("document.querySelector('.call pre').textContent");
    assert_eq!(arguments, "{\n  \"city\": \"Paris\",\n  \"days\": 2\n}");
    assert_eq!(browser.text("document.activeElement.className"), "result mono");
    browser.picture("tool-call");
    browser.reload();
    wait_until_ready(&mut browser);
    browser.evaluate("document.querySelectorAll('.result')[0].value = 'sunny'; document.querySelectorAll('.result')[1].focus()");
    browser.type_text("noon");
    answer_with(&mut browser, &[json!({"content": "Sunny at noon."})], "stop");
    browser.press("Enter");
    browser.wait_for(&format!("{IDLE} && {CONTENT} === 'Sunny at noon.'"));
    browser.picture("tool-result");
    let asked: Value = serde_json::from_str(&browser.text("JSON.stringify(window.asked.messages)")).unwrap();
    assert_eq!(
        asked,
        json!([
            {"role": "user", "content": "How is the weather?"},
            {"role": "assistant", "content": "I look.", "tool_calls": [
                {"id": "call-1", "type": "function", "function": {"name": "weather", "arguments": "{\"city\": \"Paris\", \"days\": 2}"}},
                {"id": "call-2", "type": "function", "function": {"name": "time", "arguments": "{}"}},
            ]},
            {"role": "tool", "tool_call_id": "call-1", "content": "sunny"},
            {"role": "tool", "tool_call_id": "call-2", "content": "noon"},
        ])
    );
    // The real server takes the conversation from here.
    ask(&mut browser, "Thank you.");
    assert_eq!(browser.text(PROBLEM), "");
    check_conduct(&mut browser, &server);
}
