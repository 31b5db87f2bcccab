//! Asking, reading, stopping, trying again, asking differently.

use std::time::{Duration, Instant};

use serde_json::json;

use super::*;

const CAPITAL: &str = "What is the capital of Denmark?";

#[test]
fn a_conversation_in_the_browser() {
    let Some(mut browser) = browser() else { return };
    let server = Running::start(&[]);
    open(&mut browser, &server);
    assert!(browser.text("document.getElementById('model-name').textContent").starts_with("tiny · "));
    browser.picture("welcome");

    ask(&mut browser, CAPITAL);
    assert_eq!(browser.text(CONTENT), "The capital of Denmark is Copenhagen.");
    assert_eq!(browser.text("document.querySelector('.user .body').textContent"), CAPITAL);
    let numbers = browser.text(NUMBERS);
    assert!(numbers.starts_with("12 tokens · "), "{numbers}");
    assert!(numbers.contains("tokens/s") && numbers.contains(" prompt tokens"), "{numbers}");
    assert_eq!(browser.text("document.activeElement.id"), "ask");
    assert!(browser.text("document.getElementById('said').textContent").contains("Copenhagen"));

    new_chat(&mut browser);
    ask(&mut browser, "Write a Python function that reverses a string.");
    let code = browser.text("document.querySelector('.assistant pre').textContent");
    assert_eq!(code, "def run(text):\n    return text[::-1]\n");
    assert_eq!(browser.text("document.querySelector('.assistant .code-word').textContent"), "def");
    browser.picture("code-light");
    browser.prefer("dark");
    browser.picture("code-dark");
    browser.prefer("light");

    // The second question of a conversation carries the first.
    ask(&mut browser, "Thank you.");
    assert_eq!(browser.evaluate(TURNS), 4);
    answer_with(&mut browser, &[json!({"content": "Yes."})], "stop");
    ask(&mut browser, "And?");
    let roles = browser.text("window.asked.messages.map((message) => message.role).join(' ')");
    assert_eq!(roles, "user assistant user assistant user");
    let numbers = browser.text(NUMBERS);
    assert!(numbers.contains("1,000 prompt tokens, 960 cached"), "{numbers}");
    assert!(numbers.contains("75% of drafts accepted"), "{numbers}");
    assert_eq!(browser.evaluate(CHATS), 2);
    check_conduct(&mut browser, &server);
}

#[test]
fn thinking_is_folded() {
    let Some(mut browser) = browser() else { return };
    let server = Running::start(&[]);
    open(&mut browser, &server);
    set(&mut browser, "thinking", "on");
    ask(&mut browser, "Please work out 310 + 661.");
    assert_eq!(browser.text(CONTENT), "310 + 661 = 971");
    let thinking = "document.querySelector('.assistant details.thinking')";
    assert_eq!(browser.evaluate(&format!("{thinking}.open")), false);
    assert_eq!(browser.evaluate(&format!("{thinking}.hidden")), false);
    assert!(browser.text(&format!("{thinking}.textContent")).contains("ones: 0 + 1 = 1."));
    let label = browser.text(&format!("{thinking}.querySelector('summary').textContent"));
    assert!(label.starts_with("Thought for ") && label.ends_with(" tokens"), "{label}");
    browser.picture("thinking-folded");
    browser.evaluate(&format!("{thinking}.querySelector('summary').click()"));
    assert_eq!(browser.evaluate(&format!("{thinking}.open")), true);
    browser.picture("thinking-open");
    check_conduct(&mut browser, &server);
}

#[test]
fn an_answer_can_be_stopped() {
    let Some(mut browser) = browser() else { return };
    let server = Running::start(&[]);
    open(&mut browser, &server);
    set(&mut browser, "thinking", "on");
    for stop in ["key", "button"] {
        new_chat(&mut browser);
        focus(&mut browser, "ask");
        // Counts on and on: it would run to the end of the context.
        browser.type_text("Sort these words alphabetically: stone, apple, river.");
        browser.press("Enter");
        browser.wait_for(BUSY);
        browser.wait_for("document.querySelector('.assistant .thinking .prose').textContent.length > 20");
        browser.picture("streaming");
        if stop == "key" {
            browser.press("Escape");
        } else {
            click(&mut browser, "#stop");
        }
        browser.wait_for(IDLE);
        assert!(browser.text(NUMBERS).ends_with("stopped"), "{}", browser.text(NUMBERS));
        let deadline = Instant::now() + Duration::from_secs(20);
        while !server.get("/health").1.contains("\"running\":0") {
            assert!(Instant::now() < deadline, "the server still generates: {}", server.get("/health").1);
        }
    }
    check_conduct(&mut browser, &server);
}

#[test]
fn another_chat_can_be_opened_while_an_answer_runs() {
    let Some(mut browser) = browser() else { return };
    let server = Running::start(&[]);
    open(&mut browser, &server);
    set(&mut browser, "thinking", "on");
    focus(&mut browser, "ask");
    browser.type_text("Sort these words alphabetically: stone, apple, river.");
    browser.press("Enter");
    browser.wait_for("document.querySelector('.assistant .thinking .prose')?.textContent.length > 20");
    new_chat(&mut browser);
    set(&mut browser, "thinking", "off");
    ask(&mut browser, CAPITAL);
    assert_eq!(browser.text(CONTENT), "The capital of Denmark is Copenhagen.");
    assert_eq!(browser.evaluate("document.querySelectorAll('#chats .dot').length"), 1);
    click(&mut browser, "#chats li:nth-child(2) .open-chat");
    browser.wait_for(BUSY);
    let length = "document.querySelector('.assistant .thinking .prose').textContent.length";
    let before = browser.evaluate(length);
    browser.wait_for(&format!("{length} > {before}"));
    browser.press("Escape");
    browser.wait_for(IDLE);
    assert!(browser.text(NUMBERS).ends_with("stopped"));
    check_conduct(&mut browser, &server);
}

#[test]
fn asking_again_and_asking_differently_keep_what_was_there() {
    let Some(mut browser) = browser() else { return };
    let server = Running::start(&[]);
    open(&mut browser, &server);
    ask(&mut browser, CAPITAL);
    answer_with(&mut browser, &[json!({"content": "Another one."})], "stop");
    press_button(&mut browser, "Another answer");
    browser.wait_for(&format!("{IDLE} && {CONTENT} === 'Another one.'"));
    assert_eq!(browser.text("document.querySelector('.assistant .branches span').textContent"), "2/2");
    click(&mut browser, ".assistant .branches button");
    assert_eq!(browser.text(CONTENT), "The capital of Denmark is Copenhagen.");

    click(&mut browser, ".user .edit");
    assert_eq!(browser.text("document.activeElement.value"), CAPITAL);
    browser.picture("editing");
    browser.press("Escape");
    assert_eq!(browser.text("document.querySelector('.user .body').textContent"), CAPITAL);
    click(&mut browser, ".user .edit");
    browser.evaluate("document.activeElement.select()");
    answer_with(&mut browser, &[json!({"content": "It is Oslo."})], "stop");
    browser.type_text("And of Norway?");
    browser.press("Enter");
    browser.wait_for(&format!("{IDLE} && {CONTENT} === 'It is Oslo.'"));
    assert_eq!(
        browser.text("window.asked.messages.map((message) => message.content).join()"),
        "And of Norway?"
    );
    assert_eq!(browser.evaluate(TURNS), 2);
    browser.picture("branches");
    click(&mut browser, ".user .branches button");
    assert_eq!(browser.text("document.querySelector('.user .body').textContent"), CAPITAL);
    assert_eq!(browser.text(CONTENT), "Another one.");
    check_conduct(&mut browser, &server);
}

#[test]
fn an_answer_that_was_cut_off_goes_on() {
    let Some(mut browser) = browser() else { return };
    let server = Running::start(&[]);
    open(&mut browser, &server);
    answer_with(&mut browser, &[json!({"content": "Once upon"})], "length");
    ask(&mut browser, "Tell me.");
    answer_with(&mut browser, &[json!({"content": " a time."})], "stop");
    press_button(&mut browser, "Continue");
    browser.wait_for(&format!("{IDLE} && {CONTENT} === 'Once upon a time.'"));
    assert_eq!(browser.evaluate(TURNS), 2);
    let asked: Value = serde_json::from_str(&browser.text("JSON.stringify(window.asked)")).unwrap();
    assert_eq!(asked["continue_final_message"], true);
    assert_eq!(asked["messages"][1], json!({"role": "assistant", "content": "Once upon"}));
    assert!(browser.text(NUMBERS).starts_with("14 tokens"), "{}", browser.text(NUMBERS));
    assert_eq!(browser.evaluate("document.querySelectorAll('.go-on').length"), 0);
    check_conduct(&mut browser, &server);
}

#[test]
fn problems_are_shown_and_can_be_tried_again() {
    let Some(mut browser) = browser() else { return };
    let server = Running::start(&["--api-key", "secret"]);
    browser.visit(&server.url);
    browser.wait_for("document.getElementById('health').className === 'down'");
    browser.wait_for("document.activeElement.id === 'api-key'");
    browser.picture("key-missing");
    set(&mut browser, "api-key", "secret");
    wait_until_ready(&mut browser);
    browser.press("Escape");
    browser.wait_for("!document.getElementById('settings').open");
    assert_eq!(browser.text("document.activeElement.id"), "ask");

    set(&mut browser, "max-tokens", "99999999");
    ask(&mut browser, CAPITAL);
    let problem = browser.text(PROBLEM);
    assert!(problem.contains("max_tokens"), "{problem}");
    browser.picture("problem");
    press_button(&mut browser, "Change it in the settings");
    assert_eq!(browser.text("document.activeElement.id"), "max-tokens");
    set(&mut browser, "max-tokens", "-1");
    browser.wait_for("document.querySelector('.field-problem')?.textContent.includes('at least 1')");
    set(&mut browser, "max-tokens", "");
    click(&mut browser, "#settings-close");
    press_button(&mut browser, "Try again");
    browser.wait_for(&format!("{IDLE} && !document.querySelector('.problem:not([hidden])')"));
    assert_eq!(browser.text(CONTENT), "The capital of Denmark is Copenhagen.");
    assert_eq!(browser.evaluate("document.querySelectorAll('.branches').length"), 0);
    check_conduct(&mut browser, &server);

    server.signal("TERM");
    server.wait();
    ask(&mut browser, "Is anybody there?");
    assert!(browser.text(PROBLEM).starts_with("The server cannot be reached"), "{}", browser.text(PROBLEM));
    // The next question takes the place of the one that got no answer.
    answer_with(&mut browser, &[json!({"content": "Yes."})], "stop");
    ask(&mut browser, "And now?");
    let asked = browser.text("window.asked.messages.map((message) => message.content).join('|')");
    assert_eq!(asked, format!("{CAPITAL}|The capital of Denmark is Copenhagen.|And now?"));
}
