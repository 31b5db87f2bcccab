//! Changing files that belong to other programs: never without showing what changes, never without a copy.

use std::fmt::Write as _;
use std::io::{ErrorKind, Write as _};
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde_json::Value;
use similar::TextDiff;

use crate::failure::Hinted;

/// Old versions that are kept of one file.
const MAX_COPIES: u32 = 999;
/// Keys may stand in these files.
const OWNER_ONLY: u32 = 0o600;

/// A file that is to be made or changed.
#[derive(Debug)]
pub(super) struct Change {
    path: PathBuf,
    before: Option<String>,
    after: String,
}

impl Change {
    /// The file will hold exactly this.
    pub(super) fn replacing(path: &Path, text: &str) -> Result<Self> {
        let path = resolved(path);
        let before = read(&path)?;
        Ok(Self { path, before, after: text.to_owned() })
    }

    /// The file, a JSON object, will hold this too.
    pub(super) fn merging(path: &Path, text: &str) -> Result<Self> {
        let path = resolved(path);
        let before = read(&path)?;
        let after = match before.as_deref().filter(|before| !before.trim().is_empty()) {
            None => text.to_owned(),
            Some(before) => merged(&path, before, text)?,
        };
        Ok(Self { path, before, after })
    }

    /// The difference, as programmers read it.
    pub(super) fn describe(&self) -> String {
        let name = self.path.display().to_string();
        let before = match &self.before {
            Some(before) if *before == self.after => return format!("{name}: nothing to change\n"),
            Some(before) => before.as_str(),
            None => "",
        };
        let old_name = if self.before.is_some() { name.as_str() } else { "/dev/null" };
        let diff = TextDiff::from_lines(before, &self.after);
        diff.unified_diff().context_radius(3).header(old_name, &name).to_string()
    }

    /// Writes the file; what stood there before is kept beside it. Says what was done.
    pub(super) fn apply(&self) -> Result<String> {
        if self.before.as_ref() == Some(&self.after) {
            return Ok(String::new());
        }
        let mut said = String::new();
        let directory = self.path.parent().context("a file without a directory")?;
        std::fs::create_dir_all(directory).with_context(|| format!("making {}", directory.display()))?;
        let mut mode = OWNER_ONLY;
        if self.before.is_some() {
            mode = std::fs::metadata(&self.path)
                .with_context(|| self.path.display().to_string())?
                .permissions()
                .mode();
            let copy = self.back_up()?;
            let _ = writeln!(said, "kept the old file as {}", copy.display());
        }
        self.replace(directory, mode).with_context(|| format!("writing {}", self.path.display()))?;
        let _ = writeln!(said, "wrote {}", self.path.display());
        Ok(said)
    }

    /// Copies the file to the first name that is free.
    fn back_up(&self) -> Result<PathBuf> {
        let name = |number: u32| PathBuf::from(format!("{}.qwill-{number}", self.path.display()));
        let free = (1..=MAX_COPIES)
            .map(name)
            .find(|copy| !copy.exists())
            .with_context(|| format!("{MAX_COPIES} old files are kept beside it: remove some"))?;
        std::fs::copy(&self.path, &free).with_context(|| format!("copying to {}", free.display()))?;
        Ok(free)
    }

    /// At once or not at all: whoever reads meanwhile finds the old file or the new one.
    fn replace(&self, directory: &Path, mode: u32) -> std::io::Result<()> {
        let temporary = directory.join(format!(".qwill-{}", std::process::id()));
        let mut options = std::fs::OpenOptions::new();
        let mut file = options.write(true).create_new(true).mode(mode).open(&temporary)?;
        let written = file
            .write_all(self.after.as_bytes())
            .and_then(|()| file.sync_all())
            .and_then(|()| std::fs::rename(&temporary, &self.path));
        if written.is_err() {
            let _ = std::fs::remove_file(&temporary);
        }
        written
    }
}

/// The file itself where the name is a link, so that the link stays.
fn resolved(path: &Path) -> PathBuf {
    path.canonicalize().unwrap_or_else(|_| path.to_owned())
}

fn read(path: &Path) -> Result<Option<String>> {
    match std::fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error).with_context(|| format!("reading {}", path.display())),
    }
}

fn merged(path: &Path, before: &str, ours: &str) -> Result<String> {
    let Ok(Value::Object(_)) = serde_json::from_str(before) else {
        return Err(Hinted::error(
            format!("{} is no plain JSON object: changing it would lose its comments", path.display()),
            "run the command without --write and add what it prints by hand",
        ));
    };
    let mut whole: Value = serde_json::from_str(before)?;
    merge(&mut whole, serde_json::from_str(ours)?);
    Ok(format!("{whole:#}\n"))
}

/// Objects are merged, everything else is replaced.
fn merge(into: &mut Value, from: Value) {
    match (into, from) {
        (Value::Object(into), Value::Object(from)) => {
            for (key, value) in from {
                merge(into.entry(key).or_insert(Value::Null), value);
            }
        }
        (into, from) => *into = from,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_new_file_is_the_owners_alone() {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("deep/er/file.toml");
        let change = Change::replacing(&path, "a = 1\n").unwrap();
        assert!(change.describe().contains("+a = 1"), "{}", change.describe());
        assert!(!path.exists(), "describing writes nothing");
        assert!(change.apply().unwrap().contains("wrote"));
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "a = 1\n");
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, OWNER_ONLY);
    }

    #[test]
    fn what_stood_there_is_kept_every_time() {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("file");
        for text in ["one\n", "two\n", "three\n", "three\n"] {
            Change::replacing(&path, text).unwrap().apply().unwrap();
        }
        let read = |name: &str| std::fs::read_to_string(home.path().join(name)).unwrap();
        assert_eq!(
            (read("file"), read("file.qwill-1"), read("file.qwill-2")),
            ("three\n".into(), "one\n".into(), "two\n".into())
        );
        assert!(!home.path().join("file.qwill-3").exists(), "nothing was to change");
    }

    #[test]
    fn a_link_stays_a_link() {
        let home = tempfile::tempdir().unwrap();
        let (target, link) = (home.path().join("target"), home.path().join("link"));
        std::fs::write(&target, "old\n").unwrap();
        std::os::unix::fs::symlink(&target, &link).unwrap();
        Change::replacing(&link, "new\n").unwrap().apply().unwrap();
        assert!(std::fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(std::fs::read_to_string(&target).unwrap(), "new\n");
    }

    #[test]
    fn merging_keeps_what_is_not_ours_and_its_order() {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("settings.json");
        std::fs::write(
            &path,
            r#"{"z": [1, 2], "language_models": {"ollama": {}, "x": {"q": 1}}, "a": null}"#,
        )
        .unwrap();
        let change = Change::merging(&path, r#"{"language_models": {"x": {"q": {"new": true}}}}"#).unwrap();
        change.apply().unwrap();
        let after: Value = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
        let wanted = r#"{"z":[1,2],"language_models":{"ollama":{},"x":{"q":{"new":true}}},"a":null}"#;
        assert_eq!(after.to_string(), wanted);
        assert!(Change::merging(&path, r#"{"a": null}"#).unwrap().describe().contains("nothing to change"));
    }

    #[test]
    fn a_file_with_comments_is_left_alone() {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("settings.json");
        std::fs::write(&path, "// mine\n{}\n").unwrap();
        let error = Change::merging(&path, "{}").unwrap_err();
        assert!(error.to_string().contains("would lose its comments"), "{error}");
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "// mine\n{}\n");
    }
}
