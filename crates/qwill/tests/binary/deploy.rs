//! What stands in `deploy/`, as the programs read it that it is for.

use std::process::Command;

use crate::harness::{qwill, root};

#[test]
fn systemd_understands_the_unit() {
    let text = std::fs::read_to_string(root().join("deploy/qwill.service")).unwrap();
    let binary = qwill(&[]).get_program().to_string_lossy().into_owned();
    let directory = tempfile::tempdir().unwrap();
    let unit = directory.path().join("qwill.service");
    std::fs::write(&unit, text.replace("/usr/local/bin/qwill", &binary)).unwrap();
    match Command::new("systemd-analyze").arg("verify").arg(&unit).output() {
        Err(_) => eprintln!("skipped: no systemd-analyze"),
        Ok(output) => {
            let said = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "{said}");
            assert!(!said.contains("qwill.service"), "a line that systemd ignores: {said}");
        }
    }
}
