//! A headless Chromium, driven through the pipe of its `DevTools` protocol: JSON messages that end in a zero byte.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

/// Longer than anything the page waits for.
const PATIENCE: Duration = Duration::from_mins(1);
/// The pipe's ends are file descriptors 3 and 4; the shell puts standard input and output there.
const THROUGH_PIPE: &str = r#"exec "$0" "$@" 3<&0 4>&1 </dev/null >/dev/null 2>&1"#;
const NAMES: [&str; 3] = ["chromium", "chromium-browser", "google-chrome"];

/// A browser with one tab.
pub(crate) struct Browser {
    child: Child,
    input: ChildStdin,
    messages: Receiver<Value>,
    session: Option<String>,
    next_id: u64,
    /// What the tab reported on its own: exceptions and log entries.
    pub(crate) complaints: Vec<Value>,
    _profile: tempfile::TempDir,
}

impl Browser {
    /// Starts one; `None` on a machine that has none.
    pub(crate) fn start() -> Option<Self> {
        let name = NAMES.into_iter().find(|name| Command::new(name).arg("--version").output().is_ok())?;
        let profile = tempfile::tempdir().unwrap();
        let mut child = Command::new("sh")
            .args(["-c", THROUGH_PIPE, name, "--headless=new", "--remote-debugging-pipe", "--no-first-run"])
            // Tests often run as root in a container, where the sandbox cannot start; the page is our own.
            .args(["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--window-size=1000,800"])
            .arg(format!("--user-data-dir={}", profile.path().display()))
            .arg("about:blank")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let input = child.stdin.take().unwrap();
        let (sender, messages) = mpsc::channel();
        let mut output = BufReader::new(child.stdout.take().unwrap());
        std::thread::spawn(move || {
            let mut message = Vec::new();
            while output.read_until(0, &mut message).is_ok_and(|bytes| bytes > 0) {
                message.pop();
                let Ok(value) = serde_json::from_slice(&message) else { return };
                if sender.send(value).is_err() {
                    return;
                }
                message.clear();
            }
        });
        let mut browser = Self {
            child,
            input,
            messages,
            session: None,
            next_id: 1,
            complaints: Vec::new(),
            _profile: profile,
        };
        browser.open_tab();
        Some(browser)
    }

    fn open_tab(&mut self) {
        let target = self.call("Target.createTarget", &json!({"url": "about:blank"}));
        let attach = json!({"targetId": target["targetId"], "flatten": true});
        let session = self.call("Target.attachToTarget", &attach);
        self.session = session["sessionId"].as_str().map(str::to_owned);
        for domain in ["Page", "Runtime", "Log"] {
            self.call(&format!("{domain}.enable"), &json!({}));
        }
        self.resize(1000, 800);
    }

    fn call(&mut self, method: &str, parameters: &Value) -> Value {
        let id = self.next_id;
        self.next_id += 1;
        let mut message = json!({"id": id, "method": method, "params": parameters});
        if let Some(session) = &self.session {
            message["sessionId"] = session.as_str().into();
        }
        self.input.write_all(format!("{message}\0").as_bytes()).unwrap();
        loop {
            let message =
                self.messages.recv_timeout(PATIENCE).unwrap_or_else(|_| panic!("no answer to {method}"));
            if message["id"] == id {
                assert!(message.get("error").is_none(), "{method}: {message}");
                return message["result"].clone();
            }
            if matches!(message["method"].as_str(), Some("Runtime.exceptionThrown" | "Log.entryAdded")) {
                self.complaints.push(message["params"].clone());
            }
        }
    }

    /// Opens an address.
    pub(crate) fn visit(&mut self, url: &str) {
        self.call("Page.navigate", &json!({"url": url}));
        self.wait_for("document.readyState === 'complete'");
    }

    /// The value of an expression.
    pub(crate) fn evaluate(&mut self, expression: &str) -> Value {
        let parameters = json!({"expression": expression, "returnByValue": true, "awaitPromise": true});
        let result = self.call("Runtime.evaluate", &parameters);
        assert!(result.get("exceptionDetails").is_none(), "{expression}: {result}");
        result["result"]["value"].clone()
    }

    /// Its text.
    pub(crate) fn text(&mut self, expression: &str) -> String {
        self.evaluate(expression).as_str().unwrap_or_default().to_owned()
    }

    /// Waits until an expression is true.
    pub(crate) fn wait_for(&mut self, expression: &str) {
        let deadline = Instant::now() + PATIENCE;
        while self.evaluate(&format!("Boolean({expression})")) != true {
            if Instant::now() > deadline {
                let page = self.text("document.body.innerText");
                panic!("still not: {expression}\nthe page:\n{page}");
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Types into whatever has the focus.
    pub(crate) fn type_text(&mut self, text: &str) {
        self.call("Input.insertText", &json!({"text": text}));
    }

    /// Presses a key, as in `Enter`, `Shift+Enter` or `Control+k`.
    pub(crate) fn press(&mut self, keys: &str) {
        let (modifier, key) = keys.rsplit_once('+').unwrap_or(("", keys));
        let modifiers = match modifier {
            "" => 0,
            "Control" => 2,
            "Shift" => 8,
            other => panic!("no modifier {other}"),
        };
        let (code, text) = match key {
            "Enter" => (13, "\r"),
            "Escape" => (27, ""),
            "Tab" => (9, ""),
            "ArrowUp" => (38, ""),
            letter => (u32::from(letter.as_bytes()[0].to_ascii_uppercase()), ""),
        };
        let kind = if text.is_empty() { "rawKeyDown" } else { "keyDown" };
        let down = json!({"type": kind, "key": key, "code": key, "windowsVirtualKeyCode": code, "text": text,
            "modifiers": modifiers});
        self.call("Input.dispatchKeyEvent", &down);
        let up = json!({"type": "keyUp", "key": key, "code": key, "windowsVirtualKeyCode": code});
        self.call("Input.dispatchKeyEvent", &up);
    }

    /// Loads the page again.
    pub(crate) fn reload(&mut self) {
        // The old page is told from the new one by a mark that only the old one has.
        self.evaluate("window.isOld = true");
        self.call("Page.reload", &json!({}));
        self.wait_for("!window.isOld && document.readyState === 'complete'");
    }

    /// The size of the window, pixels.
    pub(crate) fn resize(&mut self, width: u32, height: u32) {
        let size = json!({"width": width, "height": height, "deviceScaleFactor": 1, "mobile": false});
        self.call("Emulation.setDeviceMetricsOverride", &size);
    }

    /// Lets the page read and write the clipboard, as a person would be asked.
    pub(crate) fn allow_clipboard(&mut self) {
        let session = self.session.take();
        let permissions = json!({"permissions": ["clipboardReadWrite", "clipboardSanitizedWrite"]});
        self.call("Browser.grantPermissions", &permissions);
        self.session = session;
    }

    /// Saves what the page offers for download in a folder.
    pub(crate) fn download_to(&mut self, folder: &std::path::Path) {
        let session = self.session.take();
        let behaviour = json!({"behavior": "allow", "downloadPath": folder});
        self.call("Browser.setDownloadBehavior", &behaviour);
        self.session = session;
    }

    /// Chooses a file in a file field.
    pub(crate) fn choose_file(&mut self, selector: &str, file: &std::path::Path) {
        let field = json!({"expression": format!("document.querySelector('{selector}')")});
        let field = self.call("Runtime.evaluate", &field);
        let files = json!({"files": [file], "objectId": field["result"]["objectId"]});
        self.call("DOM.setFileInputFiles", &files);
    }

    /// Light or dark, as the system would ask for.
    pub(crate) fn prefer(&mut self, scheme: &str) {
        let features = json!({"features": [{"name": "prefers-color-scheme", "value": scheme}]});
        self.call("Emulation.setEmulatedMedia", &features);
    }

    /// Saves a picture in the folder named by `PAGE_SCREENSHOTS`, for people to look at; nothing without it.
    pub(crate) fn picture(&mut self, name: &str) {
        let Some(folder) = std::env::var_os("PAGE_SCREENSHOTS") else { return };
        let shot = self.call("Page.captureScreenshot", &json!({"format": "png"}));
        let bytes = from_base64(shot["data"].as_str().unwrap());
        std::fs::write(std::path::Path::new(&folder).join(format!("{name}.png")), bytes).unwrap();
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn from_base64(text: &str) -> Vec<u8> {
    const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let (mut bits, mut count, mut bytes) = (0u32, 0, Vec::new());
    for symbol in text.bytes().filter(|symbol| *symbol != b'=') {
        bits = bits << 6 | ALPHABET.iter().position(|letter| *letter == symbol).unwrap() as u32;
        count += 6;
        if count >= 8 {
            count -= 8;
            bytes.push((bits >> count) as u8);
        }
    }
    bytes
}

#[test]
fn base64_is_decoded() {
    assert_eq!(from_base64("aGVsbG8="), b"hello");
    assert_eq!(from_base64("aGVsbG8h"), b"hello!");
}
