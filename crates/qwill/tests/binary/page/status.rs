//! The status page.

use serde_json::json;

use super::*;

fn visit_status(browser: &mut Browser, server: &Running) {
    browser.visit(&format!("{}/status", server.url));
}

#[test]
fn the_status_page_shows_what_runs() {
    let Some(mut browser) = browser() else { return };
    let server = Running::start(&[]);
    let (status, _) = server.post("/v1/chat/completions", &json!({"messages": [], "max_tokens": 3}));
    assert_eq!(status, 400);
    visit_status(&mut browser, &server);
    wait_until_ready(&mut browser);
    let requests = "document.getElementById('requests-now').textContent";
    assert!(browser.text(requests).starts_with("0 of 4 running"), "{}", browser.text(requests));
    let failed = browser.text("document.getElementById('errors').textContent");
    assert!(failed.contains("400") && failed.contains("messages"), "{failed}");
    let memory = browser.text("document.getElementById('memory').innerText");
    assert!(memory.contains("weights") && memory.contains("kv"), "{memory}");
    assert!(
        browser.text("document.getElementById('server').textContent").contains(env!("CARGO_PKG_VERSION"))
    );

    // It would count to the end of the context.
    let body = json!({"messages": [{"role": "user", "content": "Sort these words alphabetically: stone, apple, river."}],
        "chat_template_kwargs": {"enable_thinking": true}, "ignore_eos": true, "stream": true});
    let mut stream = server.stream("/v1/chat/completions", &body);
    stream.next().unwrap();
    browser.wait_for(&format!("{requests}.startsWith('1 of 4 running')"));
    browser.wait_for("parseInt(document.getElementById('generated-now').textContent) > 0");
    browser.wait_for("document.querySelector('#generated .line') && document.querySelector('#caches .bar rect').getAttribute('width') > 0");
    let slots = "document.getElementById('slots').textContent";
    browser.wait_for(&format!("{slots}.includes('generating')"));
    assert!(browser.text(slots).contains("/v1/chat/completions"), "{}", browser.text(slots));
    browser.picture("status");
    browser.prefer("dark");
    browser.picture("status-dark");
    browser.prefer("light");
    browser.resize(360, 640);
    check_width(&mut browser);
    browser.picture("status-narrow");
    drop(stream);
    browser.wait_for(&format!("{requests}.startsWith('0 of 4 running')"));

    // Nobody is asked for numbers that nobody can see.
    let polls = "performance.getEntriesByType('resource').filter((entry) => entry.name.endsWith('/v1/status')).length";
    browser.evaluate(
        "Object.defineProperty(document, 'visibilityState', { value: 'hidden', configurable: true }); \
         document.dispatchEvent(new Event('visibilitychange'))",
    );
    std::thread::sleep(std::time::Duration::from_millis(2500));
    let before = browser.evaluate(polls);
    std::thread::sleep(std::time::Duration::from_millis(4500));
    assert_eq!(browser.evaluate(polls), before);
    browser.evaluate(
        "Object.defineProperty(document, 'visibilityState', { value: 'visible', configurable: true }); \
         document.dispatchEvent(new Event('visibilitychange'))",
    );
    browser.wait_for(&format!("{polls} > {before}"));
    check_conduct(&mut browser, &server);
}

#[test]
fn the_status_page_asks_for_a_key_and_tells_when_the_server_is_gone() {
    let Some(mut browser) = browser() else { return };
    let server = Running::start(&["--api-key", "secret"]);
    visit_status(&mut browser, &server);
    browser.wait_for("document.activeElement.id === 'api-key'");
    browser.picture("status-key");
    browser.type_text("secret");
    browser.press("Enter");
    wait_until_ready(&mut browser);
    assert_eq!(browser.evaluate("document.getElementById('trouble').hidden"), true);
    // The chat page of the same tab has the key as well.
    open(&mut browser, &server);
    visit_status(&mut browser, &server);
    wait_until_ready(&mut browser);
    check_conduct(&mut browser, &server);
    server.signal("KILL");
    server.wait();
    browser.wait_for(
        "document.getElementById('trouble-text').textContent.startsWith('The server cannot be reached')",
    );
    browser.picture("status-gone");
}
