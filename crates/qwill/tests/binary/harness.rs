//! Starting the binary, and talking to it.

use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

use serde_json::Value;

/// Longer than any start on a loaded machine.
pub(crate) const PATIENCE: Duration = Duration::from_mins(2);

/// Variables that a test run may set for the binary: where compiled kernels and their compiler are.
const PASSED_ON: [&str; 2] = ["QWILL_KERNEL_CACHE", "QWILL_NVRTC"];

/// The repository's root; `QWILL_REPOSITORY` says where it is on a machine other than the one that built this.
pub(crate) fn root() -> PathBuf {
    let built_in = || Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    std::env::var_os("QWILL_REPOSITORY").map_or_else(built_in, PathBuf::from)
}

/// The binary (on another machine, the one that `QWILL_BINARY` names), on the processor unless a test says otherwise,
/// without the variables of whoever runs the tests.
pub(crate) fn qwill(arguments: &[&str]) -> Command {
    let built_in = || env!("CARGO_BIN_EXE_qwill").into();
    let mut command = Command::new(std::env::var_os("QWILL_BINARY").unwrap_or_else(built_in));
    for (name, _) in std::env::vars_os() {
        let name = name.to_string_lossy();
        if name.starts_with("QWILL_") && !PASSED_ON.contains(&&*name) {
            command.env_remove(&*name);
        }
    }
    command.env("QWILL_DEVICE", "cpu").args(arguments).env("NO_COLOR", "1").stdin(Stdio::null());
    command
}

/// Runs a command to its end.
pub(crate) fn run(arguments: &[&str]) -> Output {
    qwill(arguments).output().unwrap()
}

/// Standard error as text, with `path` replaced by a word, for snapshots.
pub(crate) fn stderr(output: &Output, path: Option<&Path>) -> String {
    let text = String::from_utf8(output.stderr.clone()).unwrap();
    match path {
        Some(path) => text.replace(&path.display().to_string(), "[DIR]"),
        None => text,
    }
}

/// A server in a process of its own; killed when dropped.
pub(crate) struct Running {
    child: Child,
    stderr: Receiver<String>,
    /// Everything on standard output until it was ready.
    pub(crate) screen: String,
    /// `http://address:port`.
    pub(crate) url: String,
}

impl Running {
    /// Starts `qwill serve` on a free port, if none is named, with further arguments and waits until it is ready.
    pub(crate) fn start(arguments: &[&str]) -> Self {
        Self::start_with(arguments, &[])
    }

    /// The same, with variables.
    pub(crate) fn start_with(arguments: &[&str], variables: &[(&str, &str)]) -> Self {
        let mut child = qwill(&["serve", "--max-sequences", "4"])
            .args(arguments)
            .env("QWILL_PORT", "0")
            .envs(variables.iter().copied())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let stderr = collect(child.stderr.take().unwrap());
        let lines = lines(child.stdout.take().unwrap());
        let mut screen = String::new();
        let deadline = Instant::now() + PATIENCE;
        // The screen ends with an empty line after the command to copy.
        while !(screen.contains("\ncurl ") && screen.ends_with("}'\n\n")) {
            let left = deadline.saturating_duration_since(Instant::now());
            let Ok(line) = lines.recv_timeout(left) else {
                let _ = child.kill();
                panic!("not ready; screen:\n{screen}\nlog:\n{}", stderr.recv().unwrap_or_default());
            };
            screen.push_str(&line);
            screen.push('\n');
        }
        let url = screen.lines().find_map(|line| line.strip_prefix("metrics")).unwrap();
        let url = url.trim().strip_suffix("/metrics").unwrap().to_owned();
        Self { child, stderr, screen, url }
    }

    /// The process's id.
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends a signal by name.
    pub(crate) fn signal(&self, name: &str) {
        let kill = format!("kill -{name} {}", self.child.id());
        assert!(Command::new("sh").args(["-c", &kill]).status().unwrap().success());
    }

    /// Waits for the end: how it ended, and what was logged.
    pub(crate) fn wait(mut self) -> (ExitStatus, String) {
        let deadline = Instant::now() + PATIENCE;
        while Instant::now() < deadline {
            if let Some(status) = self.child.try_wait().unwrap() {
                return (status, self.stderr.recv_timeout(PATIENCE).unwrap());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        panic!("the process does not end");
    }

    /// Posts JSON; status and body.
    pub(crate) fn post(&self, path: &str, body: &Value) -> (u16, Value) {
        post(&format!("{}{path}", self.url), body)
    }

    /// Posts JSON and gives the data of every event as it comes.
    pub(crate) fn stream(&self, path: &str, body: &Value) -> impl Iterator<Item = String> + use<> {
        stream(&format!("{}{path}", self.url), body)
    }

    /// Gets a path; status and text.
    pub(crate) fn get(&self, path: &str) -> (u16, String) {
        let mut response = agent().get(format!("{}{path}", self.url)).call().unwrap();
        (response.status().as_u16(), response.body_mut().read_to_string().unwrap())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Posts JSON to any server; status and body.
pub(crate) fn post(url: &str, body: &Value) -> (u16, Value) {
    let mut response = agent().post(url).send_json(body).unwrap();
    let text = response.body_mut().read_to_string().unwrap();
    (response.status().as_u16(), serde_json::from_str(&text).unwrap_or(Value::String(text)))
}

/// Posts JSON to any server and gives the data of every event as it comes.
pub(crate) fn stream(url: &str, body: &Value) -> impl Iterator<Item = String> + use<> {
    let response = agent().post(url).send_json(body).unwrap();
    assert_eq!(response.status().as_u16(), 200);
    let reader = BufReader::new(response.into_body().into_reader());
    reader.lines().filter_map(|line| line.unwrap().strip_prefix("data: ").map(str::to_owned))
}

/// JSON from any server; `None` where there is none.
pub(crate) fn try_get(url: &str) -> Option<Value> {
    agent().get(url).call().ok()?.body_mut().read_json().ok()
}

fn agent() -> ureq::Agent {
    let config = ureq::Agent::config_builder().http_status_as_error(false);
    config.timeout_global(Some(PATIENCE)).build().into()
}

fn lines(source: impl Read + Send + 'static) -> Receiver<String> {
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || {
        for line in BufReader::new(source).lines().map_while(Result::ok) {
            if sender.send(line).is_err() {
                return;
            }
        }
    });
    receiver
}

/// Reads everything, so that the process never blocks on a full pipe; delivered at its end.
fn collect(mut source: impl Read + Send + 'static) -> Receiver<String> {
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || {
        let mut text = String::new();
        let _ = source.read_to_string(&mut text);
        let _ = sender.send(text);
    });
    receiver
}

/// The lines of a golden file.
pub(crate) fn golden(name: &str) -> Vec<Value> {
    let text = std::fs::read_to_string(root().join("golden").join(name)).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}
