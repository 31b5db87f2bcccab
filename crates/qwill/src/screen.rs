//! What people see when a server starts: the model, where its memory goes, where to connect.
//!
//! Standard output, at most as wide as the terminal, without colour or control characters elsewhere.

use std::fmt::Write as _;
use std::net::SocketAddr;

use qwill_device::LayerKind;
use qwill_device::plan::MemoryPlan;
use qwill_engine::speculation::SpeculationOptions;

use crate::launch::Launch;
use crate::source::ModelSource;
use crate::{terminal, units};

/// Width of the column of labels.
const LABEL_COLUMNS: usize = 11;

/// Before loading: what will be served, and the memory plan.
pub(crate) fn opening(launch: &Launch) -> String {
    let mut text = format!("{}\n\n", terminal::bold(&format!("Qwill {}", crate::VERSION)));
    entry(&mut text, "model", &model(launch));
    entry(&mut text, "text", &tokens(launch));
    entry(&mut text, "numerics", &numerics(launch));
    entry(&mut text, "drafts", &drafts(launch));
    entry(&mut text, "device", &launch.chosen.name());
    for note in &launch.chosen.notes {
        entry(&mut text, "", note);
    }
    text.push('\n');
    memory(&mut text, &launch.planned.memory);
    text
}

/// The plan without its last digits; `qwill plan` prints those.
fn memory(text: &mut String, plan: &MemoryPlan) {
    let (mut label, mut section) = ("memory", "");
    for row in plan.rows() {
        let shown = if row.section.name() == section { "" } else { row.section.name() };
        section = row.section.name();
        let label_column = terminal::dim(&format!("{label:LABEL_COLUMNS$}"));
        let size = units::bytes(row.bytes);
        let line = format!("{shown:<10} {:<17} {size:>9}  {}", row.name, terminal::dim(&row.detail));
        let _ = writeln!(text, "{label_column}{}", line.trim_end());
        label = "";
    }
    let summary = format!(
        "{} of {}: {} sequences, {} KV tokens, context {} tokens",
        units::bytes(plan.total_bytes()),
        units::bytes(plan.budget_bytes),
        plan.slots,
        units::grouped(plan.kv_tokens()),
        units::grouped(plan.max_context_tokens),
    );
    entry(text, "in all", &summary);
    let host = plan.host.map_or_else(
        || "none: prompts are always computed from the start".to_owned(),
        |host| {
            format!("{}, up to {} snapshots", units::bytes(host.bytes()), units::grouped(host.most_states()))
        },
    );
    entry(text, "host cache", &host);
}

/// How a server is reached, and by whom.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Access {
    pub(crate) with_key: bool,
    pub(crate) with_tls: bool,
}

impl Access {
    pub(crate) fn scheme(self) -> &'static str {
        if self.with_tls { "https" } else { "http" }
    }
}

/// When requests are taken: how long it took, what the GPU gave, and what to do now.
pub(crate) fn ready(address: SocketAddr, elapsed_s: f64, taken_bytes: Option<u64>, access: Access) -> String {
    let base = format!("{}://{}", access.scheme(), reachable(address));
    let with_key = access.with_key;
    let access = match (with_key, address.ip().is_loopback()) {
        (true, _) => "key required",
        (false, true) => "no key, this machine only",
        (false, false) => "no key, open to the network",
    };
    let mut text = format!("\n{}\n", terminal::bold(&format!("ready in {elapsed_s:.2} s")));
    if let Some(taken_bytes) = taken_bytes {
        entry(&mut text, "taken", &format!("{} of the GPU", units::bytes(taken_bytes)));
    }
    entry(&mut text, "chat page", &terminal::link(&format!("{base}/")));
    entry(&mut text, "API", &format!("{} ({access})", terminal::link(&format!("{base}/v1"))));
    entry(&mut text, "metrics", &terminal::link(&format!("{base}/metrics")));
    let key = if with_key { "-H 'Authorization: Bearer YOUR_KEY' " } else { "" };
    let _ = writeln!(
        text,
        "\ncurl {base}/v1/chat/completions {key}-H 'Content-Type: application/json' \\\n  \
         -d '{{\"messages\": [{{\"role\": \"user\", \"content\": \"What is the capital of Denmark?\"}}]}}'\n"
    );
    text
}

/// The address that a client on this machine uses: an open one such as 0.0.0.0 is no destination.
pub(crate) fn reachable(address: SocketAddr) -> SocketAddr {
    let mut address = address;
    if address.ip().is_unspecified() {
        address.set_ip(match address {
            SocketAddr::V4(_) => std::net::Ipv4Addr::LOCALHOST.into(),
            SocketAddr::V6(_) => std::net::Ipv6Addr::LOCALHOST.into(),
        });
    }
    address
}

/// A label and a text, continued under itself when it is too long.
fn entry(text: &mut String, label: &str, value: &str) {
    let lines = terminal::wrap(value, terminal::width().saturating_sub(LABEL_COLUMNS).max(20));
    for (at, line) in lines.iter().enumerate() {
        let label = if at == 0 { label } else { "" };
        let _ = writeln!(text, "{}{line}", terminal::dim(&format!("{label:LABEL_COLUMNS$}")));
    }
}

fn model(launch: &Launch) -> String {
    let geometry = &launch.source.checkpoint.config().geometry;
    let gdn = geometry.layers.iter().filter(|kind| **kind == LayerKind::Gdn).count();
    let mtp = if geometry.mtp_layers > 0 { ", MTP" } else { "" };
    format!(
        "{} ({}): {} parameters, {} layers ({gdn} GDN, {} attention){mtp}",
        launch.source.name,
        launch.source.origin.describe(),
        units::parameters(launch.planned.parameters()),
        geometry.layers.len(),
        geometry.layers.len() - gdn,
    )
}

fn tokens(launch: &Launch) -> String {
    let text = &launch.source.text;
    let ends: Vec<String> = launch
        .source
        .eos_token_ids
        .iter()
        .map(|id| {
            let bytes = text.tokenizer.token_bytes(*id).unwrap_or_default();
            if bytes.is_empty() { id.to_string() } else { String::from_utf8_lossy(bytes).into_owned() }
        })
        .collect();
    let borrowed = match launch.source.origin {
        ModelSource::Random { .. } => " of the embedded tokenizer",
        _ => "",
    };
    let template = if text.template.is_some() { "with chat template" } else { "no chat template" };
    let ends = if ends.is_empty() { "nothing".to_owned() } else { ends.join(" ") };
    format!("{} tokens{borrowed}, {template}, ends at {ends}", units::grouped(text.tokenizer.vocab_size()))
}

fn numerics(launch: &Launch) -> String {
    format!(
        "weights {}, activations {}, KV {}, state {} [{}]",
        launch.body_format().name(),
        launch.chosen.activations().name(),
        launch.chosen.kv_type.name(),
        launch.chosen.state_type.name(),
        launch.numerics(),
    )
}

fn drafts(launch: &Launch) -> String {
    let SpeculationOptions { mode, max_draft_len, synthetic, .. } = &launch.speculation;
    let with_mtp = launch.source.checkpoint.config().geometry.mtp_layers > 0 && mode.uses_mtp();
    let origins = match (with_mtp, mode.uses_lookup()) {
        (true, true) => "MTP module and lookup",
        (true, false) => "MTP module",
        (false, true) => "lookup",
        (false, false) => return "none".to_owned(),
    };
    match synthetic {
        Some(table) => format!(
            "{origins}, up to {max_draft_len} a step; SYNTHETIC ACCEPTANCE {table}: speeds mean something, answers nothing"
        ),
        None => format!("{origins}, up to {max_draft_len} a step"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OPEN: Access = Access { with_key: false, with_tls: false };

    #[test]
    fn the_last_part_names_every_address_and_a_whole_command() {
        let text = ready("127.0.0.1:18020".parse().unwrap(), 0.4321, None, OPEN);
        assert!(text.contains("ready in 0.43 s"));
        for wanted in [
            "http://127.0.0.1:18020/\n",
            "http://127.0.0.1:18020/v1 (no key, this machine only)",
            "/metrics\n",
        ] {
            assert!(text.contains(wanted), "{text}");
        }
        assert!(text.contains("curl http://127.0.0.1:18020/v1/chat/completions -H 'Content-Type: application/json' \\\n  -d '{\"messages\""));
    }

    #[test]
    fn the_readme_shows_what_is_printed() {
        let readme = include_str!("../../../README.md");
        let text = ready("127.0.0.1:18020".parse().unwrap(), 0.0, None, OPEN);
        let (_, below) = text.split_once("chat page").unwrap();
        assert!(readme.contains(below.trim_end()), "the README's first run differs from:\n{text}");
    }

    #[test]
    fn an_open_address_is_shown_as_one_that_can_be_reached() {
        let text = ready("0.0.0.0:80".parse().unwrap(), 1.0, None, OPEN);
        assert!(text.contains("http://127.0.0.1:80/v1 (no key, open to the network)"), "{text}");
        let text = ready(
            "[::]:80".parse().unwrap(),
            1.0,
            Some(25_000_000_000),
            Access { with_key: true, with_tls: true },
        );
        assert!(text.contains("https://[::1]:80/v1 (key required)"), "{text}");
        assert!(text.contains("-H 'Authorization: Bearer YOUR_KEY'"), "{text}");
        assert!(text.contains("taken      25.00 GB of the GPU"), "{text}");
    }
}
