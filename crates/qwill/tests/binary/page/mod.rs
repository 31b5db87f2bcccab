//! The chat page and the status page in a real browser against a real server.

mod kept;
mod keyboard;
mod markup;
mod status;
mod talk;
mod tools;

use serde_json::{Value, json};

use crate::browser::Browser;
use crate::harness::Running;

const CONTENT: &str = "([...document.querySelectorAll('.assistant .body')].at(-1)?.innerText ?? '')";
const NUMBERS: &str = "([...document.querySelectorAll('.assistant .numbers')].at(-1)?.textContent ?? '')";
const PROBLEM: &str = "([...document.querySelectorAll('.problem:not([hidden])')].at(-1)?.textContent ?? '')";
const IDLE: &str = "!document.getElementById('send').hidden";
const BUSY: &str = "document.getElementById('send').hidden";
const TURNS: &str = "document.querySelectorAll('.turn').length";
const CHATS: &str = "document.querySelectorAll('#chats li').length";

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
    wait_until_ready(browser);
}

fn wait_until_ready(browser: &mut Browser) {
    browser.wait_for("document.getElementById('health').className === 'ready'");
}

fn focus(browser: &mut Browser, id: &str) {
    browser.evaluate(&format!("document.getElementById('{id}').focus()"));
}

fn click(browser: &mut Browser, selector: &str) {
    browser.wait_for(&format!("document.querySelector('{selector}')"));
    browser.evaluate(&format!("document.querySelector('{selector}').click()"));
}

/// Presses the last button with this label.
fn press_button(browser: &mut Browser, label: &str) {
    let find =
        format!("[...document.querySelectorAll('button')].findLast((b) => b.textContent === '{label}')");
    browser.wait_for(&find);
    browser.evaluate(&format!("{find}.click()"));
}

/// Sends a message with the keyboard and waits for the end of the answer.
fn ask(browser: &mut Browser, text: &str) {
    focus(browser, "ask");
    browser.type_text(text);
    browser.press("Enter");
    browser.wait_for(IDLE);
}

fn new_chat(browser: &mut Browser) {
    click(browser, "#new");
    assert_eq!(browser.evaluate(TURNS), 0);
}

/// Changes a setting.
fn set(browser: &mut Browser, field: &str, value: &str) {
    let value = json!(value);
    browser.evaluate(&format!(
        "(() => {{ const field = document.getElementById('{field}'); field.value = {value}; \
         field.dispatchEvent(new Event('change')); }})()"
    ));
}

/// Lets the next answer be this one instead of the server's: pieces of text, and how it ends. What was asked is in
/// `window.asked` afterwards.
fn answer_with(browser: &mut Browser, deltas: &[Value], finish: &str) {
    let chunk = |delta: &Value| json!({"choices": [{"index": 0, "delta": delta, "finish_reason": null}]});
    let mut chunks: Vec<Value> = deltas.iter().map(chunk).collect();
    chunks.push(json!({"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]}));
    chunks.push(json!({
        "choices": [],
        "usage": {"prompt_tokens": 1000, "completion_tokens": 7, "total_tokens": 1007,
            "prompt_tokens_details": {"cached_tokens": 960}, "completion_tokens_details": {"reasoning_tokens": 0}},
        "timings": {"draft_n": 4, "draft_n_accepted": 3},
    }));
    let events: Vec<String> = chunks.iter().map(|chunk| format!("data: {chunk}\n\n")).collect();
    let events = json!(events.concat() + "data: [DONE]\n\n");
    browser.evaluate(&format!(
        "(() => {{ const real = window.fetch; window.fetch = (url, options) => {{ \
         if (!String(url).endsWith('chat/completions')) return real(url, options); \
         window.fetch = real; window.asked = JSON.parse(options.body); \
         return Promise.resolve(new Response({events})); }}; }})()"
    ));
}

/// Nothing is wider than the window.
fn check_width(browser: &mut Browser) {
    let wide = "[...document.querySelectorAll('body, main, header, footer, dialog[open], .card, .turn')] \
                .filter((node) => node.getBoundingClientRect().right > innerWidth + 0.5 || \
                (node.scrollWidth > node.clientWidth + 1 && node.clientWidth > 0)).map((node) => node.outerHTML.slice(0, 80)).join()";
    assert_eq!(browser.text(wide), "");
    assert_eq!(browser.evaluate("document.documentElement.scrollWidth <= innerWidth"), true);
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
