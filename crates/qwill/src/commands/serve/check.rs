//! `qwill serve --check`: every setting with its origin, and everything that a start would check before it loads weights.

use std::fmt::Write as _;
use std::io::Write as _;
use std::net::SocketAddr;

use anyhow::{Error, Result};
use serde_json::{Value, json};

use super::{keys, tls};
use crate::args::ServeArgs;
use crate::failure::{self, Hinted};
use crate::launch::{self, Launch};
use crate::report::{Finding, Level, Report};
use crate::settings::{self, Settings};
use crate::{logging, terminal, units};

/// Prints what was found; problems make it an error.
pub(super) fn run(arguments: &ServeArgs) -> Result<()> {
    let report = examine(arguments);
    let problems = report.count(Level::Problem);
    let conclusion = if problems == 0 { "The server would start." } else { "The server would not start." };
    let mut out = std::io::stdout().lock();
    if arguments.json {
        let mut json = report.as_json(conclusion);
        json["settings"] = as_json(&arguments.settings);
        writeln!(out, "{json:#}")?;
    } else {
        write!(out, "{}", table(&arguments.settings))?;
        writeln!(out, "{report}\n{conclusion}")?;
    }
    if problems == 0 {
        return Ok(());
    }
    Err(Hinted::error("the server would not start", "the lines marked `problem` say what to do"))
}

fn examine(arguments: &ServeArgs) -> Report {
    let mut findings = Vec::new();
    findings.extend(settings::unknown_variables().into_iter().map(|name| {
        Finding::warning(
            "environment",
            format!("{name} is set, but there is no such setting"),
            "is it misspelt?",
        )
    }));
    findings.push(match logging::filter(&arguments.log) {
        Ok(_) => Finding::ok("log", &arguments.log.log_level),
        Err(error) => problem("log", &error),
    });
    let bind = SocketAddr::new(arguments.listen.host, arguments.listen.port);
    findings.push(match launch::check_address(bind) {
        Ok(()) if bind.port() == 0 => Finding::ok("port", format!("any that is free, on {}", bind.ip())),
        Ok(()) => Finding::ok("port", format!("{bind} is free")),
        Err(error) => problem("port", &error),
    });
    findings.push(keys_of(arguments, bind));
    findings.push(match tls::of(&arguments.listen) {
        Ok(None) => Finding::ok("TLS", "none"),
        Ok(Some(_)) => Finding::ok("TLS", "certificate and key can be used"),
        Err(error) => problem("TLS", &error),
    });
    match super::prepare(arguments) {
        Ok(launch) => findings.extend(of_the_model(&launch)),
        Err(error) => findings.push(problem("model", &error)),
    }
    let mut report = Report::default();
    report.section("Checks", findings);
    report
}

fn keys_of(arguments: &ServeArgs, bind: SocketAddr) -> Finding {
    let listen = &arguments.listen;
    let checked =
        keys::of(listen).and_then(|found| keys::check_openness(bind, &found, listen).map(|()| found));
    match checked {
        Ok(found) if !found.is_empty() => Finding::ok("keys", format!("{} key(s)", found.len())),
        Ok(_) if listen.allow_no_key => {
            Finding::warning("keys", "none is needed", "--allow-no-key was asked for")
        }
        Ok(_) => Finding::ok("keys", "none: this machine only"),
        Err(error) => problem("keys", &error),
    }
}

fn of_the_model(launch: &Launch) -> Vec<Finding> {
    let (source, plan) = (&launch.source, &launch.planned.memory);
    let parameters = units::parameters(launch.planned.parameters());
    let model = format!(
        "{} ({}), {parameters} parameters [{}]",
        source.name,
        source.origin.describe(),
        launch.numerics()
    );
    let memory = format!(
        "{} of {}: {} sequences, {} KV tokens, context {} tokens",
        units::bytes(plan.total_bytes()),
        units::bytes(plan.budget_bytes),
        plan.slots,
        units::grouped(plan.kv_tokens()),
        units::grouped(plan.max_context_tokens)
    );
    let template = match source.text.template {
        Some(_) => Finding::ok("template", "there is one, and it compiles"),
        None => Finding::warning("template", "none: chat requests will be refused", "see --chat-template"),
    };
    vec![
        Finding::ok("model", model),
        template,
        Finding::ok("device", launch.chosen.name()),
        Finding::ok("memory", memory),
    ]
}

fn problem(name: &'static str, error: &Error) -> Finding {
    Finding::problem(name, format!("{error:#}"), failure::hint(error).unwrap_or_default())
}

/// Settings in groups, as the reference page has them.
fn table(settings: &Settings) -> String {
    let columns = |of: &dyn Fn(&settings::Setting) -> usize| settings.all.iter().map(of).max().unwrap_or(0);
    let key_columns = columns(&|setting| setting.key.len());
    let value_columns = columns(&|setting| setting.shown().len()).min(40);
    let mut text = format!("{}\n", terminal::bold(&format!("Qwill {}", crate::VERSION)));
    let mut heading = "";
    for setting in &settings.all {
        if setting.heading != heading {
            heading = &setting.heading;
            let _ = writeln!(text, "\n{}", terminal::bold(heading));
        }
        let (value, origin) = (setting.shown(), settings.origin(setting));
        let origin =
            if setting.origin == settings::Origin::Default { terminal::dim(&origin) } else { origin };
        let _ = writeln!(text, "{:key_columns$}  {value:value_columns$}  {origin}", setting.key);
    }
    text
}

fn as_json(settings: &Settings) -> Value {
    let all = settings.all.iter().map(|setting| {
        let values = (!setting.is_secret).then_some(&setting.values);
        json!({
            "key": setting.key,
            "values": values,
            "is_set": !setting.values.is_empty(),
            "origin": setting.origin.to_string(),
            "place": settings.origin(setting),
        })
    });
    all.collect()
}
