//! The binary with a GPU and without one. What needs a GPU skips itself where there is none, and fails then with
//! `QWILL_REQUIRE_GPU`.

use std::io::{BufRead, BufReader};
use std::process::Stdio;
use std::sync::{Mutex, MutexGuard, PoisonError};

use serde_json::{Value, json};

use crate::faults::ends_in_failure;
use crate::harness::{Running, qwill, root, run, stderr};

/// How far the memory taken of a GPU may be from the plan.
const PLAN_TOLERANCE_BYTES: u64 = 200 << 20;

/// Small tables that the plan does not name.
const ALLOCATION_TOLERANCE_BYTES: u64 = 4 << 20;

/// The GPU to one test alone, so that what it measures is its own; `None` where there is none.
fn gpu() -> Option<MutexGuard<'static, ()>> {
    static ALONE: Mutex<()> = Mutex::new(());
    let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let output = run(&["plan", "--device", "cuda", "--geometry", "tiny"]);
    if output.status.success() {
        return Some(alone);
    }
    let reason = stderr(&output, None);
    assert!(std::env::var_os("QWILL_REQUIRE_GPU").is_none(), "{reason}");
    println!("skipped: {reason}");
    None
}

/// The tiny model's directory: a binary for the GPU machine may have no model inside.
fn tiny() -> String {
    root().join("models/tiny").display().to_string()
}

#[test]
fn a_gpu_that_is_asked_for_must_be_there() {
    if gpu().is_some() {
        let output = run(&["serve", "--port", "0", "--log-level", "off", "--device", "cuda:99", &tiny()]);
        assert_eq!(output.status.code(), Some(1));
        assert!(stderr(&output, None).contains("there is no GPU 99"), "{}", stderr(&output, None));
        return;
    }
    for device in ["cuda", "cuda:1"] {
        let output = run(&["serve", "--port", "0", "--log-level", "off", "--device", device, &tiny()]);
        assert_eq!(output.status.code(), Some(1));
        assert!(!String::from_utf8_lossy(&output.stdout).contains("ready"));
        let text = stderr(&output, None);
        // A driver without a GPU has words of its own.
        if text.contains("libcuda") {
            insta::assert_snapshot!("no_driver", text);
        } else {
            assert!(text.contains("error: no GPU can be used") && text.contains("--device cpu"), "{text}");
        }
    }
}

#[test]
fn auto_takes_the_processor_where_there_is_no_gpu() {
    if gpu().is_some() {
        return;
    }
    let server = Running::start(&["--device", "auto", &tiny()]);
    assert!(server.screen.contains("\ndevice     cpu, "), "{}", server.screen);
    assert!(server.screen.contains(" cpu]"), "{}", server.screen);
    assert_eq!(server.get("/health").0, 200);
}

fn copenhagen(server: &Running) {
    let question = json!({
        "messages": [{"role": "user", "content": "What is the capital of Denmark?"}],
        "chat_template_kwargs": {"enable_thinking": false},
        "temperature": 0,
    });
    let (status, body) = server.post("/v1/chat/completions", &question);
    assert_eq!(status, 200, "{body}");
    assert_eq!(body["choices"][0]["message"]["content"], "The capital of Denmark is Copenhagen.");
}

#[test]
fn the_gpu_serves_when_it_is_asked_for_or_first() {
    let Some(_alone) = gpu() else { return };
    for arguments in [&["--device", "cuda"][..], &["--device", "auto", "--quantize", "int8"]] {
        let server = Running::start(&[arguments, &["--gpu-memory", "4GiB", &tiny()]].concat());
        assert!(server.screen.contains("driver, kernels"), "{}", server.screen);
        assert!(server.screen.contains(" of 4.29 GB: "), "{}", server.screen);
        copenhagen(&server);
        let metrics = server.get("/metrics").1;
        assert!(metrics.contains(" cuda sm_"), "{metrics}");
        server.signal("TERM");
        let (status, log) = server.wait();
        assert!(status.success(), "{log}");
    }
}

#[test]
fn memory_that_another_process_holds_is_seen_at_start() {
    let Some(_alone) = gpu() else { return };
    let arguments = ["--device", "cuda", "--gpu-memory", "4GiB", &tiny()];
    let holder = Running::start(&arguments);
    let server = Running::start(&arguments);
    assert!(server.screen.contains(", others hold "), "{}", server.screen);
    copenhagen(&server);
    copenhagen(&holder);
    let output = run(&["doctor"]);
    let text = String::from_utf8_lossy(&output.stdout);
    println!("{text}");
    assert!(text.contains("held by"), "{text}");
}

#[test]
fn a_gpu_too_small_for_the_plan_is_refused_with_the_numbers() {
    let Some(_alone) = gpu() else { return };
    let arguments =
        ["serve", "--port", "0", "--log-level", "off", "--device", "cuda", "--gpu-memory", "300MiB"];
    let output = qwill(&arguments).arg(tiny()).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let text = stderr(&output, None);
    assert!(text.contains("the budget is 314.6 MB (314572800 bytes)"), "{text}");
}

#[test]
fn what_is_taken_of_the_gpu_is_what_was_planned() {
    let Some(_alone) = gpu() else { return };
    let arguments =
        ["serve", "--port", "0", "--log-format", "json", "--device", "cuda", "--gpu-memory", "8GiB"];
    let mut command = qwill(&arguments);
    command.args(["--weights", "random", "--geometry", "0.8b", "--quantize", "int4"]);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut events: Vec<Value> = Vec::new();
    for line in BufReader::new(child.stderr.take().unwrap()).lines() {
        events.push(serde_json::from_str(&line.unwrap()).unwrap());
        if events.last().unwrap()["message"] == "ready" {
            break;
        }
    }
    child.kill().unwrap();
    child.wait().unwrap();
    let number = |name: &str| events.iter().find_map(|event| event[name].as_u64()).unwrap();
    let (planned, taken) = (number("plan_bytes"), number("taken_bytes"));
    let (driver, allocated) = (number("driver_bytes"), number("allocated_bytes"));
    println!("planned {planned}, taken {taken}; {driver} for the driver, {allocated} allocated");
    let difference = allocated.abs_diff(planned - driver);
    assert!(difference <= ALLOCATION_TOLERANCE_BYTES, "{difference} bytes are not in the plan");
    assert!(taken.abs_diff(planned) <= PLAN_TOLERANCE_BYTES, "planned {planned} bytes, taken {taken}");
}

#[test]
fn a_kernel_that_goes_wrong_makes_the_server_unhealthy_and_its_end_a_failure() {
    let Some(_alone) = gpu() else { return };
    let server = Running::start(&["--device", "cuda", "--gpu-memory", "4GiB", "--fault", "trap:20", &tiny()]);
    ends_in_failure(server, "CUDA_ERROR_ILLEGAL_ADDRESS");
}
