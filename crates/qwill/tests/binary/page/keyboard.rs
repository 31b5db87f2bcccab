//! The page without a mouse, and on a narrow screen.

use serde_json::json;

use super::*;

#[test]
fn everything_can_be_done_with_the_keyboard() {
    let Some(mut browser) = browser() else { return };
    let server = Running::start(&[]);
    open(&mut browser, &server);
    assert_eq!(browser.text("document.activeElement.id"), "ask");
    answer_with(&mut browser, &[json!({"content": "First."})], "stop");
    browser.type_text("One?");
    browser.press("Enter");
    browser.wait_for(&format!("{IDLE} && {CONTENT} === 'First.'"));
    // The last question comes back to be changed.
    browser.press("ArrowUp");
    assert_eq!(browser.text("document.activeElement.value"), "One?");
    browser.press("Escape");
    assert_eq!(browser.text("document.activeElement.id"), "ask");
    browser.press("Control+k");
    assert_eq!(browser.evaluate(TURNS), 0);
    assert_eq!(browser.text("document.activeElement.id"), "ask");

    // Tab goes through everything, in the order on the screen, and shows where it is.
    click(&mut browser, "#chats .open-chat");
    let mut seen = Vec::new();
    for _ in 0..40 {
        browser.press("Tab");
        let now = browser.text(
            "document.activeElement === document.body ? 'BODY' : document.activeElement.id || document.activeElement.className || document.activeElement.tagName",
        );
        if now == "BODY" {
            continue;
        }
        let shown = browser.evaluate("getComputedStyle(document.activeElement).outlineStyle !== 'none' || document.activeElement.id === 'scroll'");
        assert_eq!(shown, true, "no focus is shown at {now}");
        let name = browser.evaluate(
            "Boolean(document.activeElement.ariaLabel || document.activeElement.textContent.trim() || document.activeElement.id === 'scroll')",
        );
        assert_eq!(name, true, "{now} has no name");
        if seen.first() == Some(&now) {
            break;
        }
        seen.push(now);
    }
    let place = |name: &str| {
        seen.iter().position(|id| id.contains(name)).unwrap_or_else(|| panic!("no {name} in {seen:?}"))
    };
    for name in [
        "to-status",
        "settings-toggle",
        "theme",
        "new",
        "open-chat",
        "export",
        "edit",
        "again",
        "ask",
        "send",
    ] {
        place(name);
    }
    assert!(place("theme") < place("new") && place("new") < place("edit"), "{seen:?}");

    // Settings open and close, and the focus comes back.
    focus(&mut browser, "settings-toggle");
    browser.press("Enter");
    browser.wait_for("document.getElementById('settings').open");
    browser.press("Escape");
    browser.wait_for("!document.getElementById('settings').open && document.activeElement.id === 'ask'");
    check_conduct(&mut browser, &server);
}

#[test]
fn a_narrow_screen_is_wide_enough() {
    let Some(mut browser) = browser() else { return };
    let server = Running::start(&[]);
    browser.resize(360, 640);
    open(&mut browser, &server);
    check_width(&mut browser);
    let wide = format!(
        "| {} | b |\n|---|---|\n| 1 | 2 |\n\n```\n{}\n```\n\n{}",
        "a ".repeat(80),
        "x".repeat(400),
        "w".repeat(400)
    );
    answer_with(
        &mut browser,
        &[json!({"reasoning_content": "r".repeat(400)}), json!({"content": wide})],
        "stop",
    );
    ask(&mut browser, &"long".repeat(100));
    check_width(&mut browser);
    browser.picture("narrow");
    assert_eq!(browser.evaluate("document.getElementById('new').checkVisibility()"), false);
    click(&mut browser, "#sidebar-toggle");
    assert_eq!(browser.evaluate("document.getElementById('new').checkVisibility()"), true);
    check_width(&mut browser);
    browser.picture("narrow-chats");
    browser.press("Escape");
    assert_eq!(browser.evaluate("document.getElementById('new').checkVisibility()"), false);
    assert_eq!(browser.text("document.activeElement.id"), "ask");
    check_conduct(&mut browser, &server);
}
