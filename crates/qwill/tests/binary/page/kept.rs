//! What the browser keeps: chats, settings, colours; and what it does not.

use serde_json::{Value, json};

use super::*;

const CAPITAL: &str = "What is the capital of Denmark?";
const TITLE: &str = "document.querySelector('#chats .open-chat').textContent";

#[test]
fn chats_are_kept_renamed_exported_imported_and_deleted() {
    let Some(mut browser) = browser() else { return };
    let server = Running::start(&[]);
    open(&mut browser, &server);
    ask(&mut browser, CAPITAL);
    browser.reload();
    assert_eq!(browser.text(CONTENT), "The capital of Denmark is Copenhagen.");
    assert_eq!(browser.text(TITLE), CAPITAL);
    assert!(browser.text(NUMBERS).starts_with("12 tokens · "));

    click(&mut browser, "#chats .more");
    browser.picture("chat-menu");
    press_button(&mut browser, "Rename");
    browser.evaluate("document.activeElement.select()");
    browser.type_text("Capitals");
    browser.press("Enter");
    assert_eq!(browser.text(TITLE), "Capitals");

    new_chat(&mut browser);
    ask(&mut browser, "Thank you.");
    assert_eq!(browser.evaluate(CHATS), 2);
    let folder = tempfile::tempdir().unwrap();
    browser.download_to(folder.path());
    click(&mut browser, "#export");
    let file = folder.path().join("qwill-chats.json");
    let deadline = std::time::Instant::now() + std::time::Duration::from_mins(1);
    while !file.exists() {
        assert!(std::time::Instant::now() < deadline, "nothing was downloaded");
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    let exported: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    assert_eq!(exported["chats"].as_array().unwrap().len(), 2);

    for left in [1, 0] {
        click(&mut browser, "#chats .more");
        press_button(&mut browser, "Delete");
        assert_eq!(browser.evaluate(CHATS), left + 1, "it takes two presses");
        press_button(&mut browser, "Really delete");
        assert_eq!(browser.evaluate(CHATS), left);
    }
    assert_eq!(browser.evaluate(TURNS), 0);
    browser.reload();
    assert_eq!(browser.evaluate(CHATS), 0);

    browser.choose_file("#import-file", &file);
    browser.wait_for(&format!("{CHATS} === 2"));
    assert_eq!(browser.text(TITLE), "Thank you.");
    click(&mut browser, "#chats li:nth-child(2) .open-chat");
    assert_eq!(browser.text(CONTENT), "The capital of Denmark is Copenhagen.");
    browser.reload();
    assert_eq!(browser.evaluate(CHATS), 2);

    let notice = "document.getElementById('notice').textContent";
    for (wrong, complaint) in [
        ("no json", "not JSON"),
        ("[]", "no exported chats"),
        (
            r#"{"format": "qwill-chats", "version": 1, "chats": [{"nodes": [{"parent": 0, "role": "user"}]}]}"#,
            "Chat 1",
        ),
        (
            r#"{"format": "qwill-chats", "version": 1, "chats": [{"nodes": [{"parent": -1, "role": "user", "content": {}}]}]}"#,
            "content is no text",
        ),
    ] {
        std::fs::write(&file, wrong).unwrap();
        browser.choose_file("#import-file", &file);
        browser.wait_for(&format!("{notice}.includes({})", json!(complaint)));
    }
    assert_eq!(browser.evaluate(CHATS), 2);
    check_conduct(&mut browser, &server);
}

#[test]
fn a_full_or_damaged_storage_is_told_and_harms_nothing() {
    let Some(mut browser) = browser() else { return };
    let server = Running::start(&[]);
    open(&mut browser, &server);
    // As much as browsers give to a site, under a name that is not ours.
    browser.evaluate(
        "(() => { let text = 'x'.repeat(1 << 20); for (let part = 0; text.length > 50;) { \
         try { localStorage.setItem('other.' + part, text); part += 1; } catch { text = text.slice(text.length / 2); } } })()",
    );
    ask(&mut browser, CAPITAL);
    let notice = "document.getElementById('notice').textContent";
    assert!(
        browser.text(notice).starts_with("There is no room for more in this browser"),
        "{}",
        browser.text(notice)
    );
    browser.picture("storage-full");
    assert_eq!(browser.text(CONTENT), "The capital of Denmark is Copenhagen.");
    browser.evaluate("for (const name of Object.keys(localStorage)) if (name.startsWith('other.')) localStorage.removeItem(name)");
    ask(&mut browser, "Thank you.");
    assert_eq!(browser.evaluate("document.getElementById('notice').hidden"), true);
    browser.evaluate("localStorage.setItem('qwill.chat.broken', '{\"nodes\": 1}')");
    browser.reload();
    assert_eq!(browser.evaluate(TURNS), 4);
    assert!(browser.text(notice).contains("cannot be read"));
    assert_eq!(browser.evaluate("localStorage.getItem('qwill.chat.broken') !== null"), true);
    check_conduct(&mut browser, &server);
}

#[test]
fn settings_and_colours_are_kept_and_the_key_is_not() {
    let Some(mut browser) = browser() else { return };
    let server = Running::start(&["--served-name", "one", "--served-name", "two"]);
    open(&mut browser, &server);
    let settings = [
        ("api-key", "sesame"),
        ("model", "two"),
        ("thinking", "off"),
        ("effort", "low"),
        ("thinking-budget", "64"),
        ("system", "Be brief."),
        ("temperature", "0.25"),
        ("top-p", "0.9"),
        ("top-k", "40"),
        ("min-p", "0.05"),
        ("presence-penalty", "0.5"),
        ("frequency-penalty", "-0.5"),
        ("repetition-penalty", "1.1"),
        ("max-tokens", "77"),
        ("seed", "5"),
        ("format", "json_schema"),
        ("schema", r#"{"type": "object"}"#),
        ("tools", r#"[{"name": "weather", "parameters": {"type": "object"}}]"#),
    ];
    for (field, value) in settings {
        set(&mut browser, field, value);
    }
    browser.reload();
    wait_until_ready(&mut browser);
    for (field, value) in settings {
        assert_eq!(browser.text(&format!("document.getElementById('{field}').value")), value, "{field}");
    }
    let kept = browser.text("Object.values(localStorage).join()");
    assert!(kept.contains("Be brief.") && !kept.contains("sesame"), "{kept}");
    answer_with(&mut browser, &[json!({"content": "{}"})], "stop");
    ask(&mut browser, "Hello");
    let asked: Value = serde_json::from_str(&browser.text("JSON.stringify(window.asked)")).unwrap();
    let expected = json!({
        "model": "two", "chat_template_kwargs": {"enable_thinking": false}, "reasoning_effort": "low", "thinking_budget": 64,
        "temperature": 0.25, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "presence_penalty": 0.5,
        "frequency_penalty": -0.5, "repetition_penalty": 1.1, "max_tokens": 77, "seed": 5,
        "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "strict": true, "schema": {"type": "object"}}},
        "tools": [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}],
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}],
        "stream": true, "stream_options": {"include_usage": true},
    });
    assert_eq!(asked, expected);
    click(&mut browser, "#settings-toggle");
    browser.picture("settings");
    browser.resize(360, 640);
    check_width(&mut browser);
    browser.picture("settings-narrow");
    browser.resize(1000, 800);
    // What is wrong with a setting is said before anything is sent, and once it is right the question is asked.
    set(&mut browser, "tools", "[{]");
    browser.wait_for("document.querySelector('.field-problem')?.textContent.includes('not JSON')");
    click(&mut browser, "#settings-close");
    ask(&mut browser, "Hello again");
    assert!(browser.text(PROBLEM).contains("not JSON"));
    assert_eq!(browser.text("document.activeElement.id"), "tools");
    click(&mut browser, "#settings-reset");
    click(&mut browser, "#settings-close");
    answer_with(&mut browser, &[json!({"content": "Hi."})], "stop");
    press_button(&mut browser, "Try again");
    browser.wait_for(&format!("{IDLE} && {CONTENT} === 'Hi.'"));
    let asked = browser.text("Object.keys(window.asked).sort().join()");
    assert_eq!(asked, "messages,stream,stream_options");

    let back = "getComputedStyle(document.body).backgroundColor";
    let system = browser.text(back);
    click(&mut browser, "#theme");
    click(&mut browser, "#theme");
    let dark = browser.text(back);
    assert_ne!(dark, system);
    browser.reload();
    assert_eq!(browser.text(back), dark);
    browser.picture("dark-chosen");
    click(&mut browser, "#theme");
    browser.prefer("dark");
    assert_eq!(browser.text(back), dark);
    browser.prefer("light");
    assert_eq!(browser.text(back), system);
    check_conduct(&mut browser, &server);
}
