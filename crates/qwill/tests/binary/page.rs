//! The chat page in a real browser against a real server.

use std::time::{Duration, Instant};

use crate::browser::Browser;
use crate::harness::Running;

const CONTENT: &str = "[...document.querySelectorAll('.assistant .body')].at(-1)?.innerText ?? ''";
const NUMBERS: &str = "[...document.querySelectorAll('.assistant .numbers')].at(-1)?.textContent ?? ''";
const PROBLEM: &str = "[...document.querySelectorAll('.problem')].at(-1)?.textContent ?? ''";
const IDLE: &str = "!document.getElementById('send').hidden";
const BUSY: &str = "document.getElementById('send').hidden";

/// A browser, or nothing with the reason printed.
fn browser() -> Option<Browser> {
    let browser = Browser::start();
    if browser.is_none() {
        println!("skipped: no chromium on this machine to open the page in");
    }
    browser
}

fn open(browser: &mut Browser, server: &Running) {
    browser.visit(&server.url);
    browser.wait_for("document.getElementById('health').className === 'ready'");
}

/// Sends a message with the keyboard and waits for the end of the answer.
fn ask(browser: &mut Browser, text: &str) {
    browser.evaluate("document.getElementById('ask').focus()");
    browser.type_text(text);
    browser.press("Enter", false);
    browser.wait_for(IDLE);
}

fn new_chat(browser: &mut Browser) {
    browser.evaluate("document.getElementById('new').click()");
    assert_eq!(browser.evaluate("document.querySelectorAll('.turn').length"), 0);
}

fn set(browser: &mut Browser, field: &str, value: &str) {
    browser.evaluate(&format!(
        "(() => {{ const field = document.getElementById('{field}'); field.value = '{value}'; \
         field.dispatchEvent(new Event('change')); }})()"
    ));
}

/// Nothing was thrown, nothing was blocked by the policy, nothing came from elsewhere.
fn check_conduct(browser: &mut Browser, server: &Running) {
    let foreign = format!(
        "performance.getEntriesByType('resource').map((entry) => entry.name).filter((name) => !name.startsWith('{}')).join(' ')",
        server.url
    );
    assert_eq!(browser.text(&foreign), "");
    // Refused requests are reported as network errors: those the test provokes. Verbose entries are style advice.
    let complaints: Vec<_> = browser
        .complaints
        .iter()
        .filter(|complaint| {
            complaint["entry"]["source"] != "network" && complaint["entry"]["level"] != "verbose"
        })
        .collect();
    assert!(complaints.is_empty(), "{complaints:?}");
}

#[test]
fn a_conversation_in_the_browser() {
    let Some(mut browser) = browser() else { return };
    let server = Running::start(&[]);
    open(&mut browser, &server);
    assert!(browser.text("document.getElementById('model-name').textContent").starts_with("tiny · "));
    browser.picture("welcome");

    ask(&mut browser, "What is the capital of Denmark?");
    assert_eq!(browser.text(CONTENT), "The capital of Denmark is Copenhagen.");
    assert_eq!(
        browser.text("document.querySelector('.user .body').textContent"),
        "What is the capital of Denmark?"
    );
    let numbers = browser.text(NUMBERS);
    assert!(numbers.starts_with("12 tokens · "), "{numbers}");
    assert!(numbers.contains("tokens/s"), "{numbers}");
    assert_eq!(browser.text("document.activeElement.id"), "ask");

    new_chat(&mut browser);
    ask(&mut browser, "Write a Python function that reverses a string.");
    let code = browser.text("document.querySelector('.assistant pre').textContent");
    assert_eq!(code, "def run(text):\n    return text[::-1]\n");
    browser.picture("code-light");
    browser.prefer("dark");
    browser.picture("code-dark");
    browser.prefer("light");

    // The second question of a conversation carries the first.
    ask(&mut browser, "Thank you.");
    assert_eq!(browser.evaluate("document.querySelectorAll('.turn').length"), 4);
    assert_eq!(browser.evaluate("history.length"), 4);
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
    assert!(
        browser.text(&format!("{thinking}.querySelector('summary').textContent")).starts_with("Thought for ")
    );
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
        browser.evaluate("document.getElementById('ask').focus()");
        // Counts on and on: it would run to the end of the context.
        browser.type_text("Sort these words alphabetically: stone, apple, river.");
        browser.press("Enter", false);
        browser.wait_for(BUSY);
        browser.wait_for("document.querySelector('.assistant .thinking .prose').textContent.length > 20");
        browser.picture("streaming");
        if stop == "key" {
            browser.press("Escape", false);
        } else {
            browser.evaluate("document.getElementById('stop').click()");
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
fn text_stays_text_and_shift_enter_starts_a_line() {
    let Some(mut browser) = browser() else { return };
    let server = Running::start(&["--max-tokens", "5"]);
    open(&mut browser, &server);
    browser.evaluate("document.getElementById('ask').focus()");
    browser.type_text("<img src=x onerror=document.title=1>");
    browser.press("Enter", true);
    browser.type_text("<b>two</b>");
    assert_eq!(browser.evaluate("document.querySelectorAll('.turn').length"), 0);
    browser.press("Enter", false);
    browser.wait_for(IDLE);
    let shown = browser.text("document.querySelector('.user .body').textContent");
    assert_eq!(shown, "<img src=x onerror=document.title=1>\n<b>two</b>");
    assert_eq!(browser.evaluate("document.querySelectorAll('#talk img, #talk b').length"), 0);
    assert!(browser.text(NUMBERS).contains("cut off"), "{}", browser.text(NUMBERS));
    check_conduct(&mut browser, &server);
}

#[test]
fn problems_are_shown_and_can_be_tried_again() {
    let Some(mut browser) = browser() else { return };
    let server = Running::start(&["--api-key", "secret"]);
    browser.visit(&server.url);
    browser.wait_for("document.getElementById('health').className === 'down'");
    assert_eq!(browser.evaluate("document.getElementById('settings').hidden"), false);
    browser.picture("key-missing");
    set(&mut browser, "api-key", "secret");
    browser.wait_for("document.getElementById('health').className === 'ready'");

    set(&mut browser, "max-tokens", "99999999");
    ask(&mut browser, "What is the capital of Denmark?");
    let problem = browser.text(PROBLEM);
    assert!(problem.contains("max_tokens"), "{problem}");
    browser.picture("problem");
    set(&mut browser, "max-tokens", "");
    browser.evaluate("[...document.querySelectorAll('.assistant button')].find((b) => b.textContent === 'Try again').click()");
    browser.wait_for(&format!("{IDLE} && !document.querySelector('.problem')"));
    assert_eq!(browser.text(CONTENT), "The capital of Denmark is Copenhagen.");
    check_conduct(&mut browser, &server);

    server.signal("TERM");
    server.wait();
    ask(&mut browser, "Is anybody there?");
    assert!(browser.text(PROBLEM).starts_with("The server cannot be reached"), "{}", browser.text(PROBLEM));
}
