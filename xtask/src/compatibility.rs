//! `docs/compatibility.md` claims nothing that no test holds: every test that it names exists.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

use crate::{Violations, files_below};

/// The page, from the root.
const PAGE: &str = "docs/compatibility.md";

/// The column of its tables that names tests.
const COLUMN: &str = "test";

/// Looks for every test that the page names, and for rows that name none.
pub fn check(root: &Path) -> Result<Violations> {
    let page = fs::read_to_string(root.join(PAGE)).context(PAGE)?;
    Ok(compare(&page, &tests(root)?))
}

fn compare(page: &str, tests: &[String]) -> Violations {
    let mut violations = Violations::new();
    let mut in_table = false;
    for (at, line) in page.lines().enumerate() {
        let last_cell = line.strip_prefix('|').and_then(|row| row.trim_end_matches('|').rsplit('|').next());
        in_table = last_cell.is_some_and(|cell| in_table || cell.trim() == COLUMN);
        let is_rule = line.ends_with("--- |");
        let is_row = in_table && !is_rule && last_cell.is_some_and(|cell| cell.trim() != COLUMN);
        let claimed = if is_row { last_cell.unwrap_or_default() } else { line };
        let names: Vec<&str> =
            claimed.split('`').skip(1).step_by(2).filter(|name| is_row || name.contains("::")).collect();
        if is_row && names.is_empty() {
            violations.push(format!("{PAGE}:{}: a row without a test", at + 1));
        }
        for name in names.into_iter().filter(|name| !tests.iter().any(|test| is_named(test, name))) {
            violations.push(format!("{PAGE}:{}: no test is called `{name}`", at + 1));
        }
    }
    violations
}

/// Whether the page's name means the test: a file alone means every test in it, a `*` at the end all that begin so.
fn is_named(test: &str, name: &str) -> bool {
    let test = format!("::{test}");
    let path = module_path(name);
    match name.strip_suffix('*') {
        Some(_) => test.contains(&format!("::{}", path.trim_end_matches('*'))),
        None if is_source(name) => test.contains(&format!("::{path}::")),
        None => test.ends_with(&format!("::{path}")),
    }
}

fn is_source(name: &str) -> bool {
    Path::new(name).extension().is_some_and(|extension| extension == "rs" || extension == "py")
}

/// A file's path or a test's name as `module::module::test`, without what says only where a crate keeps its files.
fn module_path(name: &str) -> String {
    let path = name.replace(".rs", "").replace(".py", "").replace('/', "::");
    path.split("::").filter(|part| !["src", "tests", "mod"].contains(part)).collect::<Vec<_>>().join("::")
}

/// The module path of every test of the repository.
fn tests(root: &Path) -> Result<Vec<String>> {
    let mut found = Vec::new();
    for folder in ["crates", "xtask", "tests/clients"] {
        for file in files_below(&root.join(folder))?.iter().filter(|file| is_source(&file.to_string_lossy()))
        {
            let text = fs::read_to_string(file).with_context(|| file.display().to_string())?;
            let place = module_path(&file.strip_prefix(root).unwrap_or(file).to_string_lossy());
            found.extend(tests_of(&text).map(|test| format!("{place}::{test}")));
        }
    }
    Ok(found)
}

/// Names of the functions after `#[test]` or `#[tokio::test]`, and of Python's that begin with `test_`. What is ignored
/// holds nothing.
fn tests_of(text: &str) -> impl Iterator<Item = &str> {
    let mut marked = false;
    text.lines().map(str::trim_start).filter_map(move |line| {
        marked |= line.starts_with("#[test]") || line.starts_with("#[tokio::test");
        marked &= !line.starts_with("#[ignore");
        let (before, rest) = line.split_once("fn ").or_else(|| line.split_once("def "))?;
        let name = rest.split(['(', '<']).next()?;
        let is_python = line.contains("def ") && name.starts_with("test_");
        let is_function = before.is_empty() || before == "async ";
        (is_function && (std::mem::take(&mut marked) || is_python)).then_some(name)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_names_tests_that_exist() {
        assert_eq!(check(&crate::root()).unwrap(), Violations::new());
    }

    #[test]
    fn tests_are_found_in_both_languages() {
        let rust = "#[test]\nfn one() {}\nfn none() {}\n#[tokio::test(flavor = \"x\")]\nasync fn two() {}\n\
            #[test]\n#[ignore = \"slow\"]\nfn never() {}\n";
        assert_eq!(tests_of(rust).collect::<Vec<_>>(), ["one", "two"]);
        let python = "def test_one(client):\ndef none():\n    async def test_two():\n";
        assert_eq!(tests_of(python).collect::<Vec<_>>(), ["test_one", "test_two"]);
    }

    #[test]
    fn a_missing_test_and_a_row_without_one_are_named() {
        let tests: Vec<String> =
            ["crates::text::messages::order", "clients::test_server::test_r1_cut"].map(String::from).into();
        let page = "`text::gone` `qwill serve`\n\n| | test |\n| --- | --- |\n\
            | 1 | E `messages::tests::order`, `test_r1_*` |\n| 2 | C `test_server.py`, `crates/text/src/messages.rs` |\n\
            | 3 | `test_r2_*` |\n| 4 | later |\n| 5 | `essages::order` |\n\n| | else |\n| --- | --- |\n| 1 | none |\n";
        let expected = [
            "docs/compatibility.md:1: no test is called `text::gone`",
            "docs/compatibility.md:7: no test is called `test_r2_*`",
            "docs/compatibility.md:8: a row without a test",
            "docs/compatibility.md:9: no test is called `essages::order`",
        ];
        assert_eq!(compare(page, &tests), expected);
    }
}
