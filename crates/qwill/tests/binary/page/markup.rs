//! Text stays text, and markdown becomes what it should.

use serde_json::json;

use super::*;

/// What would run, load or take over if it became markup.
const EVIL: [&str; 15] = [
    "<img src=x onerror=document.title='taken'>",
    "<script>document.title='taken'</script>",
    "<svg onload=document.title='taken'>",
    "<iframe srcdoc='<script>parent.document.title=1</script>'></iframe>",
    "[press](javascript:document.title='taken')",
    "[press](JaVaScRiPt:document.title='taken')",
    "[press](data:text/html,<script>1</script>)",
    "[press](vbscript:1) [file](file:///etc/passwd) [here](/v1/models) [rel](//elsewhere.example)",
    "![picture](https://elsewhere.example/track.png)",
    "<https://elsewhere.example/\" onmouseover=\"document.title='taken'>",
    "[a](https://elsewhere.example/\"onmouseover=document.title='taken')",
    "```html\n<script>document.title='taken'</script>\n```",
    "`<b onclick=1>` **<i>bold</i>** | <u> |",
    "<style>body{display:none}</style><base href=//elsewhere.example><form action=//elsewhere.example>",
    "# <a href=javascript:1>h</a>\n> <object data=x>\n- <embed src=x>\n\n|a|b|\n|-|-|\n|<input autofocus onfocus=1>|x|",
];

#[test]
fn nothing_that_anybody_writes_becomes_markup() {
    let Some(mut browser) = browser() else { return };
    let server = Running::start(&[]);
    open(&mut browser, &server);
    let evil = EVIL.join("\n\n");
    let call =
        json!({"tool_calls": [{"index": 0, "id": "c", "function": {"name": EVIL[0], "arguments": EVIL[1]}}]});
    let deltas = [json!({"reasoning_content": evil}), json!({"content": evil}), call];
    answer_with(&mut browser, &deltas, "tool_calls");
    ask(&mut browser, &EVIL.map(|text| text.replace('\n', " ")).join(" "));
    browser.wait_for("document.querySelector('.send-results')");
    browser.picture("evil");
    // The chat's name in the list comes from the question.
    assert_eq!(browser.evaluate("document.querySelectorAll('#chats img, #chats script').length"), 0);
    let elements = "#talk :is(img, script, svg, iframe, style, base, form, object, embed, input, u, i, b[onclick], [onerror], [onload], [onclick], [onmouseover], [onfocus])";
    assert_eq!(
        browser.text(&format!("[...document.querySelectorAll('{elements}')].map((n) => n.outerHTML).join()")),
        ""
    );
    let links = "[...document.querySelectorAll('#talk a')].every((link) => /^https?:$/.test(link.protocol) && \
                 link.rel.includes('noopener') && link.host === 'elsewhere.example')";
    assert_eq!(browser.evaluate(links), true);
    let shown = browser.text("document.querySelector('.assistant .body').textContent");
    for text in
        ["<img src=x onerror", "<svg onload", "[press](javascript:", "<embed src=x>", "[here](/v1/models)"]
    {
        assert!(shown.contains(text), "{text} is not shown in {shown}");
    }
    assert!(browser.text("document.querySelector('.prose').textContent").contains(EVIL[1]));
    assert!(browser.text("document.title").ends_with("Qwill"));
    // And the policy would have stopped what went wrong: no string becomes markup, not even on purpose.
    let forbidden = "(() => { try { document.body.innerHTML = '<p>x</p>'; return 'done'; } catch (error) { return error.name; } })()";
    assert_eq!(browser.text(forbidden), "TypeError");
    let complaints = std::mem::take(&mut browser.complaints);
    assert!(
        complaints.iter().all(|complaint| complaint["entry"]["source"] != "javascript"),
        "{complaints:?}"
    );
    check_conduct(&mut browser, &server);
}

/// What markdown becomes: the text, and a structure to look for.
const SAMPLE: &str = "# Heading\n\nSome *emphasis*, **strong `a**b`**, ~~gone~~ and `code`.\nSecond line. See https://example.org/a_(b). \
    [A link](https://example.org \"title\").\n\n1. one\n   - inner\n     more\n2. two\n\n   ```rust\n   fn main() {} // end\n   ```\n\n\
    - [x] done\n- [ ] to do\n\n> quoted\n> - list\n\n| a | b |\n|:--|--:|\n| 1 | `x\\|y` |\n\n---\n\nsnake_case_name 2 * 3 * 4\n\n```\nopen";

#[test]
fn markdown_becomes_nodes_however_it_arrives() {
    let Some(mut browser) = browser() else { return };
    let server = Running::start(&[]);
    open(&mut browser, &server);
    let sample = json!(SAMPLE);
    browser.evaluate(&format!(
        "import('/page/markdown.js').then((module) => {{ window.module = module; window.sample = {sample}; \
         window.html = (nodes) => {{ const box = document.createElement('div'); box.append(...nodes); return box.innerHTML; }}; }})"
    ));
    let html = browser.text("html(module.markdown(sample))");
    for part in [
        "<h3>Heading</h3>",
        "<em>emphasis</em>",
        "<strong>strong <code>a**b</code></strong>",
        "<del>gone</del>",
        "<br>Second line.",
        "href=\"https://example.org/a_(b)\"",
        "<ol><li><p>one</p><ul><li>inner<br>more</li></ul></li>",
        "<span class=\"code-word\">fn</span>",
        "<span class=\"code-comment\">// end</span>",
        "☑ done",
        "<blockquote><p>quoted</p><ul><li>list</li></ul></blockquote>",
        "<td class=\"right\"><code>x|y</code></td>",
        "<hr>",
        "<p>snake_case_name 2 * 3 * 4</p>",
        "open\n</code>",
    ] {
        assert!(html.contains(part), "{part}\nin\n{html}");
    }
    // Pieces of any size, of the sample and of texts made of marks, give the nodes of the whole text.
    let differing = browser.text(
        "(() => { let seed = 7; const random = (below) => (seed = (seed * 1103515245 + 12345) & 0x7fffffff, seed >> 8) % below; \
         const marks = ['# ', '- ', '1. ', '> ', '|', '---', '```', '\\n', '\\n\\n', 'a', 'b ', '*', '**', '_', '`', '[x](https://a.b)', '  ', '\\t', '|-|-|\\n', '| a | b |\\n', '~~', '\\\\']; \
         for (let round = 0; round < 3000; round++) { \
           const text = round < 100 ? sample : Array.from({ length: 1 + random(25) }, () => marks[random(marks.length)]).join(''); \
           const root = document.createElement('div'); const view = new module.MarkdownView(root); \
           for (let end = 0; end < text.length;) { end = Math.min(text.length, end + 1 + random(round < 100 ? 60 : 4)); view.update(text.slice(0, end)); } \
           view.update(text, true); \
           if (root.innerHTML !== html(module.markdown(text))) return text; } return ''; })()",
    );
    assert_eq!(differing, "");
    // Long runs of marks end, and lose nothing.
    let lost = browser.text(
        "['[', '*', '`', '[a](', '_a **b ~~c ', '`a``b', '<', '~~'].filter((mark) => { const text = 'x ' + mark.repeat(20000); \
         const box = document.createElement('div'); box.append(...module.markdown(text)); \
         const only = (all) => all.replace(/[^a-z[(<]/g, ''); return only(box.textContent) !== only(text); }).join()",
    );
    assert_eq!(lost, "");

    answer_with(&mut browser, &[json!({"content": SAMPLE})], "stop");
    ask(&mut browser, "Show me.");
    browser.picture("markdown");
    browser.prefer("dark");
    browser.picture("markdown-dark");
    browser.prefer("light");
    browser.resize(360, 640);
    check_width(&mut browser);
    browser.picture("markdown-narrow");

    browser.allow_clipboard();
    click(&mut browser, ".code .copy");
    browser.wait_for("document.querySelector('.code .copy').textContent === 'Copied'");
    assert_eq!(browser.text("navigator.clipboard.readText()"), "fn main() {} // end\n");
    check_conduct(&mut browser, &server);
}

#[test]
fn questions_are_shown_as_they_were_typed() {
    let Some(mut browser) = browser() else { return };
    let server = Running::start(&["--max-tokens", "5"]);
    open(&mut browser, &server);
    focus(&mut browser, "ask");
    browser.type_text("<img src=x onerror=document.title=1>");
    browser.press("Shift+Enter");
    browser.type_text("<b>two</b>");
    assert_eq!(browser.evaluate(TURNS), 0);
    browser.press("Enter");
    browser.wait_for(IDLE);
    let shown = browser.text("document.querySelector('.user .body').textContent");
    assert_eq!(shown, "<img src=x onerror=document.title=1>\n<b>two</b>");
    assert!(browser.text(NUMBERS).contains("cut off"), "{}", browser.text(NUMBERS));
    check_conduct(&mut browser, &server);
}
