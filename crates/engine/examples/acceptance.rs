//! How often drafts are right on the tiny model, by kind of text, and how often rejection sampling would have taken them:
//! `cargo run --release -p qwill-engine --example acceptance -- [prompts of a kind] [tokens]`.
//!
//! A plain answer is generated; after each of its tokens the MTP module drafts a chain of four, with the noise of the
//! sampler's own draws, and the text so far is looked up. Then the rounds that would have produced the answer are
//! walked. `eq` is the share of drafts, after right ones, that are the token drawn; `ex` is its expectation for the
//! truncated distributions p and q of model and drafter, the sum over x of 1 / (sum over y of max(p(y)/p(x), q(y)/q(x)));
//! `rs` is what rejection sampling would have accepted at the same places, the sum of min(p, q).
#![allow(clippy::unwrap_used, reason = "a program for people who develop this one")]

#[path = "../tests/common/mod.rs"]
#[allow(dead_code, reason = "the tests use the rest of it")]
mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use common::prompts::{copying, prompts};
use common::{VOCAB, fast, golden, text};
use qwill_cpu::CpuDevice;
use qwill_device::batch::{prompt_batch, round_batch};
use qwill_device::{Activations, KvType, RING_TOKENS, SampleRow, StateType};
use qwill_engine::speculation::{LookupIndex, MAX_DRAFTS};
use qwill_model::{Model, ModelOptions, MtpHidden};
use qwill_weights::{Checkpoint, Quantize};

/// Length of the MTP chain.
const CHAIN: usize = 4;

/// Probabilities that are not zero, by id.
type Distribution = BTreeMap<u32, f64>;

/// How tokens are drawn.
#[derive(Debug, Clone, Copy)]
struct Draws {
    name: &'static str,
    temperature: f32,
    top_k: usize,
    top_p: f32,
}

const GREEDY: Draws = Draws { name: "greedy", temperature: 0.0, top_k: 0, top_p: 1.0 };
const WARM: Draws = Draws { name: "T=1", temperature: 1.0, top_k: 20, top_p: 0.95 };

impl Draws {
    fn row(self, seed: u64, position: usize) -> SampleRow<'static> {
        let Self { temperature, top_k, top_p, .. } = self;
        SampleRow {
            temperature,
            top_k,
            top_p,
            seed,
            position: position as u64,
            ..SampleRow::greedy(0, VOCAB)
        }
    }

    /// What is drawn from.
    fn distribution(self, logits: &[f32]) -> Distribution {
        let mut order: Vec<u32> = (0..VOCAB as u32).collect();
        order.sort_by(|a, b| logits[*b as usize].total_cmp(&logits[*a as usize]));
        order.truncate(if self.temperature == 0.0 { 1 } else { self.top_k });
        let largest = f64::from(logits[order[0] as usize]);
        let weight = |token: &u32| (f64::from(logits[*token as usize]) - largest).exp();
        let total: f64 = order.iter().map(weight).sum();
        let mut mass = 0.0;
        order.retain(|token| {
            let kept = mass < f64::from(self.top_p) * total;
            mass += weight(token);
            kept
        });
        let total: f64 = order.iter().map(weight).sum();
        order.iter().map(|token| (*token, weight(token) / total)).collect()
    }
}

/// Chance that rejection sampling takes a draft of the second from the first.
fn overlap(model: &Distribution, drafter: &Distribution) -> f64 {
    drafter.iter().map(|(token, share)| share.min(model.get(token).copied().unwrap_or_default())).sum()
}

/// Chance that two draws with the same noise are the same token.
fn coupled(model: &Distribution, drafter: &Distribution) -> f64 {
    let tokens: BTreeSet<u32> = model.keys().chain(drafter.keys()).copied().collect();
    let share = |of: &Distribution, token: &u32| of.get(token).copied().unwrap_or_default();
    let both = model.iter().filter_map(|(token, p)| Some((p, drafter.get(token)?)));
    let chance = |(p, q): (&f64, &f64)| {
        let rivals = tokens.iter().map(|other| (share(model, other) / p).max(share(drafter, other) / q));
        rivals.sum::<f64>().recip()
    };
    both.map(chance).sum()
}

/// A token of an answer, with what was drafted to follow it.
struct Step {
    token: u32,
    model: Distribution,
    drafts: Vec<(u32, Distribution)>,
}

/// Generates a plain answer, the MTP module drafting after each token.
fn generate(
    model: &mut Model<CpuDevice>,
    prompt: &[u32],
    tokens: usize,
    draws: Draws,
    seed: u64,
) -> Vec<Step> {
    let mut batch = prompt_batch(prompt.len());
    batch.tokens = prompt.to_vec();
    model.clear_slot(0).unwrap();
    model.forward(&batch, &[prompt.len() - 1]).unwrap();
    let mut source = prompt.len() - 1;
    let mut steps: Vec<Step> = Vec::new();
    for at in 0..tokens {
        // The trunk's last row stands before the token that comes now.
        let next = prompt.len() + at;
        let logits = model.read_logits(1).unwrap();
        let token = model.sample(&[draws.row(seed, next)]).unwrap()[0].token;
        if at == 0 {
            // Keys and values of the prompt, each row with the token after it.
            batch.tokens = prompt[1..].iter().copied().chain([token]).collect();
            let rows: Vec<usize> = (0..prompt.len()).collect();
            model.mtp(&batch, MtpHidden::Trunk(&rows), &[source]).unwrap();
        } else {
            let mut row = round_batch(1, 1, next - 1, 0);
            row.tokens = vec![token];
            model.mtp(&row, MtpHidden::Trunk(&[0]), &[0]).unwrap();
            source = 0;
        }
        let mut drafts: Vec<(u32, Distribution)> = Vec::new();
        for place in 0..CHAIN {
            if let Some((before, _)) = drafts.last() {
                let mut row = round_batch(1, 1, next - 1 + place, 0);
                row.tokens = vec![*before];
                model.mtp(&row, MtpHidden::Draft(&[source]), &[0]).unwrap();
                source = 0;
            }
            let distribution = draws.distribution(&model.read_logits(1).unwrap());
            drafts.push((model.sample(&[draws.row(seed, next + 1 + place)]).unwrap()[0].token, distribution));
        }
        steps.push(Step { token, model: draws.distribution(&logits), drafts });
        // Full after 32 tokens; the row that finds it so folds it.
        let ring_len = if at == 0 { 0 } else { (at - 1) % RING_TOKENS + 1 };
        let mut row = round_batch(1, 1, next, ring_len);
        row.tokens = vec![token];
        model.forward(&row, &[0]).unwrap();
    }
    steps
}

/// What the rounds of answers of one kind came to.
#[derive(Default)]
struct Tally {
    tokens: usize,
    mtp_rounds: usize,
    lookup_rounds: usize,
    tried: [usize; CHAIN],
    right: [usize; CHAIN],
    coupled: [f64; CHAIN],
    overlap: [f64; CHAIN],
}

impl Tally {
    fn add(&mut self, prompt: &[u32], steps: &[Step]) {
        self.tokens += steps.len();
        let mut at = 0;
        while at < steps.len() {
            self.mtp_rounds += 1;
            let drafts = &steps[at].drafts;
            let mut accepted = 0;
            while let (Some((draft, drafter)), Some(step)) =
                (drafts.get(accepted), steps.get(at + 1 + accepted))
            {
                self.tried[accepted] += 1;
                self.coupled[accepted] += coupled(&step.model, drafter);
                self.overlap[accepted] += overlap(&step.model, drafter);
                if *draft != step.token {
                    break;
                }
                self.right[accepted] += 1;
                accepted += 1;
            }
            at += 1 + accepted;
        }
        let text: Vec<u32> = steps.iter().map(|step| step.token).collect();
        self.look_up(prompt, &text);
    }

    /// Walks the rounds in which a text is drafted from itself and its prompt.
    fn look_up(&mut self, prompt: &[u32], text: &[u32]) {
        let mut index = LookupIndex::new(prompt);
        let mut done = 0;
        while done < text.len() {
            self.lookup_rounds += 1;
            index.push(text[done]);
            let draft = index.draft(MAX_DRAFTS).tokens;
            let accepted =
                draft.iter().zip(&text[done + 1..]).take_while(|(draft, token)| draft == token).count();
            index.extend(&text[done + 1..=done + accepted]);
            done += 1 + accepted;
        }
    }

    fn print(&self, kind: &str, draws: Draws) {
        let share = |part: f64, whole: usize| 100.0 * part / whole.max(1) as f64;
        let mut by_rejection = 1.0;
        let mut all_right = 1.0;
        let mut places = String::new();
        for place in 0..CHAIN {
            let (right, overlap) = (self.right[place] as f64, self.overlap[place]);
            all_right *= overlap / self.tried[place].max(1) as f64;
            by_rejection += all_right;
            let tried = self.tried[place];
            let shares = [right, self.coupled[place], overlap].map(|part| share(part, tried));
            let [right, coupled, overlap] = shares;
            let _ = write!(places, "  {right:5.1} {coupled:5.1} {overlap:5.1}");
        }
        println!(
            "{kind:14} {:6} {:6}{places}   {:5.2} {by_rejection:5.2}   {:6.2}",
            draws.name,
            self.tokens,
            self.tokens as f64 / self.mtp_rounds as f64,
            self.tokens as f64 / self.lookup_rounds as f64
        );
    }
}

/// Prompts by kind.
fn kinds(of_a_kind: usize) -> Vec<(&'static str, Vec<Vec<u32>>)> {
    let all = prompts();
    let named = |part: &str, least: usize| -> Vec<Vec<u32>> {
        let wanted = all.iter().filter(|prompt| prompt.kind.contains(part) && prompt.ids.len() >= least);
        wanted.take(of_a_kind).map(|prompt| prompt.ids.clone()).collect()
    };
    vec![
        ("question", named("question", 1)),
        ("chat", named("chat", 12)),
        ("tools", named("tool", 60)),
        ("code", named("code", 60)),
        ("Danish", named("danish", 60)),
        ("novel", named("novel", 60)),
        ("encyclopedia", named("encyclopedia", 60)),
    ]
}

fn main() {
    let mut arguments = std::env::args().skip(1);
    let mut number = |default: usize| arguments.next().map_or(default, |text| text.parse().unwrap());
    let (of_a_kind, tokens) = (number(8), number(128));
    let options = ModelOptions {
        quantize: Quantize::None,
        kv_type: KvType::F32,
        state_type: StateType::F32,
        pages: 24,
        slots: 1,
        host_granules: 0,
        max_rows: 1024,
        max_logit_rows: 1,
    };
    let checkpoint = Checkpoint::open(&common::repository().join("models/tiny")).unwrap();
    let mut model = Model::load(fast(Activations::F32).unwrap(), &checkpoint, &options, &mut |_| {}).unwrap();
    println!(
        "per cent of drafts after right ones, by place in the chain; tokens a step with chains of {CHAIN}, and with"
    );
    println!("lookups of {MAX_DRAFTS}\n");
    let places = [0, 1, 2, 3].map(|place| format!("   eq {place}  ex {place}  rs {place}")).concat();
    println!("{:14} {:6} {:>6}{places}   mtp-eq mtp-rs lookup", "text", "draws", "tokens");
    for (kind, prompts) in kinds(of_a_kind) {
        for draws in [GREEDY, WARM] {
            let mut tally = Tally::default();
            for (seed, prompt) in (0..).zip(&prompts) {
                tally.add(prompt, &generate(&mut model, prompt, tokens, draws, seed));
            }
            tally.print(kind, draws);
        }
    }
    let (perplexity, mut copies) = (golden("perplexity.json"), Tally::default());
    for window in 0..30 {
        let passage = text(&perplexity, window, 400);
        copies.tokens += passage.len();
        copies.look_up(&copying(&passage, 0), &passage);
    }
    let tokens_a_step = copies.tokens as f64 / copies.lookup_rounds as f64;
    println!(
        "\n30 passages of about 400 tokens, copied from the prompt: {tokens_a_step:.2} tokens a step with lookups"
    );
}
