//! What an examination has found, and how it is told: `qwill doctor`, `qwill serve --check`.

use std::fmt;

use serde_json::{Value, json};

use crate::terminal;

/// Width of the columns before the text.
const LEVEL_COLUMNS: usize = 9;
const NAME_COLUMNS: usize = 19;

/// How bad it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Level {
    /// As it should be.
    Ok,
    /// Works, but slower or less than it could.
    Warning,
    /// Does not work, or cannot be trusted.
    Problem,
}

impl Level {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Warning => "warning",
            Self::Problem => "problem",
        }
    }

    fn painted(self) -> String {
        let text = format!("{:LEVEL_COLUMNS$}", self.name());
        match self {
            Self::Ok => terminal::dim(&text),
            Self::Warning => terminal::caution(&text),
            Self::Problem => terminal::bad(&text),
        }
    }
}

/// One line of the report.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Finding {
    pub(crate) name: &'static str,
    pub(crate) level: Level,
    /// What there is.
    pub(crate) found: String,
    /// What it means and what to do; empty where nothing is to be done.
    pub(crate) advice: String,
}

impl Finding {
    pub(crate) fn ok(name: &'static str, found: impl Into<String>) -> Self {
        Self { name, level: Level::Ok, found: found.into(), advice: String::new() }
    }
    pub(crate) fn warning(name: &'static str, found: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { name, level: Level::Warning, found: found.into(), advice: advice.into() }
    }
    pub(crate) fn problem(name: &'static str, found: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { name, level: Level::Problem, found: found.into(), advice: advice.into() }
    }
}

/// All findings, by section. Printed without a title and without the conclusion.
#[derive(Debug, Clone, Default)]
pub(crate) struct Report {
    sections: Vec<(String, Vec<Finding>)>,
}

impl Report {
    /// Adds findings to a section, which is made where it is new.
    pub(crate) fn section(&mut self, title: &str, findings: Vec<Finding>) {
        match self.sections.iter_mut().find(|(other, _)| other == title) {
            Some((_, there)) => there.extend(findings),
            None => self.sections.push((title.to_owned(), findings)),
        }
    }

    pub(crate) fn findings(&self) -> impl Iterator<Item = &Finding> {
        self.sections.iter().flat_map(|(_, findings)| findings)
    }

    pub(crate) fn count(&self, level: Level) -> usize {
        self.findings().filter(|finding| finding.level == level).count()
    }

    pub(crate) fn as_json(&self, conclusion: &str) -> Value {
        let finding = |section: &String, finding: &Finding| {
            let Finding { name, level, found, advice } = finding;
            json!({"section": section, "name": name, "level": level.name(), "found": found, "advice": advice})
        };
        let findings: Vec<Value> = self
            .sections
            .iter()
            .flat_map(|(title, findings)| findings.iter().map(move |one| finding(title, one)))
            .collect();
        json!({
            "version": crate::VERSION,
            "problems": self.count(Level::Problem),
            "warnings": self.count(Level::Warning),
            "conclusion": conclusion,
            "findings": findings,
        })
    }
}

impl fmt::Display for Report {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let before = LEVEL_COLUMNS + NAME_COLUMNS;
        let columns = terminal::width().saturating_sub(before).max(30);
        for (title, findings) in &self.sections {
            writeln!(out, "\n{}", terminal::bold(title))?;
            for Finding { name, level, found, advice } in findings {
                let mut head = format!("{}{name:NAME_COLUMNS$}", level.painted());
                let advice = terminal::wrap(advice, columns).into_iter().map(|line| terminal::dim(&line));
                for line in terminal::wrap(found, columns).into_iter().chain(advice) {
                    writeln!(out, "{head}{line}")?;
                    head = " ".repeat(before);
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report() -> Report {
        let mut report = Report::default();
        report.section("host", vec![Finding::ok("processor", "2 cores")]);
        report.section("gpu 0", vec![Finding::warning("power limit", "250 W of 350 W", "raise it")]);
        report.section("host", vec![Finding::problem("model", "no such directory", "give another")]);
        report
    }

    #[test]
    fn sections_stay_together_and_advice_stands_below_what_was_found() {
        let text = console::strip_ansi_codes(&report().to_string()).into_owned();
        assert_eq!(
            text,
            "\nhost\n\
             ok       processor          2 cores\n\
             problem  model              no such directory\n\
             \x20                           give another\n\
             \n\
             gpu 0\n\
             warning  power limit        250 W of 350 W\n\
             \x20                           raise it\n"
        );
    }

    #[test]
    fn the_json_has_every_finding_and_the_counts() {
        let json = report().as_json("");
        assert_eq!((&json["problems"], &json["warnings"]), (&json!(1), &json!(1)));
        assert_eq!(json["findings"].as_array().unwrap().len(), 3);
        let last = json!({
            "section": "gpu 0", "name": "power limit", "level": "warning", "found": "250 W of 350 W",
            "advice": "raise it",
        });
        assert_eq!(json["findings"][2], last);
    }
}
