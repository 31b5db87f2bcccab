//! One answer, whatever speculates: every request gives the tokens of its plain, lonely, cold run, with the same bits of
//! their log-probabilities, whoever drafts and how many, whatever runs beside it, and whatever the engine has seen before.
//!
//! Runs vary in who drafts, in the number of drafts, in company, in what was seen, in how tokens are drawn, and in
//! whether the pages that the prefix cache holds stay on the device or move to host memory and back. A short run covers every pair of levels of all factors but the number of drafts; `QWILL_EQUALITY_RUNS=2000` covers
//! every pair, and what is left of its runs is random.
#![allow(clippy::unwrap_used, reason = "a test may fail this way")]

#[allow(dead_code, reason = "every test binary uses a part of it")]
mod common;

use std::collections::{BTreeMap, BTreeSet};

use common::client::{Client, Outcome, assert_idle, request};
use common::company::{Dice, mate, submit, wait_for_steps};
use common::prompts::{Prompt, follow_up, prompts};
use common::{Setup, fast, gpu, greedy};
use qwill_contract::{EngineHandle, Request, SamplingParams};
use qwill_device::{Activations, Device, DeviceError, StateType};
use qwill_engine::EngineThread;
use qwill_engine::speculation::{MAX_DRAFTS, SpecMode};

/// Runs without `QWILL_EQUALITY_RUNS`.
const SHORT_RUNS: usize = 81;
/// Longest prompt of a short run.
const SHORT_PROMPT_TOKENS: usize = 120;
/// Tokens of every answer: enough for a fold of the ring and most of the next.
const ANSWER_TOKENS: usize = 48;
/// Pages of an engine in which the pages of earlier prompts have to make room: those of the longest request.
const TIGHT_PAGES: usize = 16;
/// Requests of a batch at most.
const MOST_COMPANY: usize = 16;

/// How an engine speculates, and with how much memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Way {
    spec: SpecMode,
    draft_len: usize,
    adaptive: bool,
    /// Whether it has so few pages that those of earlier prompts must make room.
    tight: bool,
}

/// All ways, in an order that begins with the most different ones: drafts as many as allowed, since a policy may have
/// none where they do not pay; and the two ways that people use.
fn ways() -> Vec<Way> {
    let drafting = [SpecMode::Mtp, SpecMode::Lookup, SpecMode::Auto];
    let used = |spec, tight| Way { spec, draft_len: MAX_DRAFTS, adaptive: true, tight };
    let order = [4, MAX_DRAFTS, 1, 8, 2, 11, 3, 14, 5, 13, 6, 12, 7, 10, 9];
    let fixed = order.into_iter().enumerate().flat_map(|(turn, draft_len)| {
        let tight = move |at: usize| (turn + at).is_multiple_of(2);
        let specs = drafting.into_iter().enumerate();
        specs.map(move |(at, spec)| Way { spec, draft_len, adaptive: false, tight: tight(at) })
    });
    let mut ways: Vec<Way> = fixed.collect();
    let used = [used(SpecMode::Auto, false), used(SpecMode::Off, true), used(SpecMode::Off, false)];
    ways.splice(drafting.len()..drafting.len(), used);
    ways
}

/// A level of a factor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Level {
    Spec(&'static str),
    DraftLen(usize),
    Alone,
    Crowded,
    New,
    Again,
    FollowUp,
    Greedy,
    Warm,
    Roomy,
    Tight,
}

/// What an engine has seen of a prompt when it comes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum History {
    New,
    Again,
    FollowUp,
}

/// Prompts, with the plain answers of those that were asked for.
struct Subjects {
    prompts: Vec<Prompt>,
    plain: EngineHandle,
    /// By prompt and whether draws are random.
    answers: BTreeMap<(usize, bool), Outcome>,
    follow_ups: BTreeMap<usize, usize>,
}

impl Subjects {
    fn request(&self, prompt: usize, warm: bool) -> Request {
        let sampling = if warm {
            let seed = 1000 + prompt as u64;
            SamplingParams { temperature: 1.0, top_k: 20, top_p: 0.95, seed, ..greedy(ANSWER_TOKENS) }
        } else {
            greedy(ANSWER_TOKENS)
        };
        request(&self.prompts[prompt].ids, sampling)
    }

    /// The plain answer.
    fn answer(&mut self, prompt: usize, warm: bool) -> &Outcome {
        if !self.answers.contains_key(&(prompt, warm)) {
            let outcome = submit(&self.plain, &self.request(prompt, warm)).wait();
            assert!(!outcome.failed(), "{outcome:?}");
            self.answers.insert((prompt, warm), outcome);
        }
        &self.answers[&(prompt, warm)]
    }

    /// The prompt that continues the conversation after the greedy answer.
    fn follow_up(&mut self, prompt: usize) -> usize {
        if let Some(next) = self.follow_ups.get(&prompt) {
            return *next;
        }
        let answer = self.answer(prompt, false).ids(0);
        let question = self.prompts[(prompt + 1) % 20].ids.clone();
        let ids = follow_up(&self.prompts[prompt].ids, &answer, &question[..question.len().min(12)]);
        let kind = format!("{}, a turn later", self.prompts[prompt].kind);
        self.prompts.push(Prompt { kind, ids });
        self.follow_ups.insert(prompt, self.prompts.len() - 1);
        self.prompts.len() - 1
    }
}

/// One engine that speculates in one way.
struct Trial {
    way: Way,
    handle: EngineHandle,
    seen: Vec<usize>,
}

struct Harness {
    subjects: Subjects,
    /// Prompts before follow-ups.
    originals: usize,
    dice: Dice,
    runs: usize,
    /// Runs that began at a snapshot.
    cached_runs: usize,
    pairs: BTreeSet<(Level, Level)>,
}

impl Harness {
    /// A prompt with some history in this engine.
    fn choose(&mut self, trial: &Trial, history: History) -> (usize, History) {
        let seen = trial.seen.get(self.dice.below(trial.seen.len().max(1))).copied();
        match (history, seen) {
            (History::Again, Some(prompt)) => (prompt, History::Again),
            (History::FollowUp, Some(prompt)) if self.subjects.prompts[prompt].ids.len() < 700 => {
                (self.subjects.follow_up(prompt), History::FollowUp)
            }
            _ => {
                let prompt = self.dice.below(self.originals);
                (prompt, if trial.seen.contains(&prompt) { History::Again } else { History::New })
            }
        }
    }

    fn alone(&mut self, trial: &mut Trial, history: History, warm: bool) {
        let (prompt, history) = self.choose(trial, history);
        let outcome = submit(&trial.handle, &self.subjects.request(prompt, warm)).wait();
        trial.seen.push(prompt);
        self.check(trial, (prompt, history, warm), Level::Alone, &outcome);
    }

    /// Several requests at random steps, some of them the same, and mates that are cancelled.
    fn crowded(&mut self, trial: &mut Trial, company: usize) {
        let mut clients: Vec<(usize, History, bool, Client)> = Vec::new();
        let mut mates = Vec::new();
        for member in 0..company {
            let history = [History::New, History::Again, History::FollowUp][self.dice.below(3)];
            let (prompt, history) = self.choose(trial, history);
            let warm = (self.dice.below(2) + member).is_multiple_of(2);
            clients.push((
                prompt,
                history,
                warm,
                submit(&trial.handle, &self.subjects.request(prompt, warm)),
            ));
            if self.dice.below(4) == 0 {
                mates.push(submit(&trial.handle, &mate(&mut self.dice)));
            }
            wait_for_steps(&trial.handle, self.dice.below(5));
        }
        for mate in &mates {
            mate.cancel.cancel();
        }
        let mut seen = Vec::new();
        for (prompt, history, warm, client) in clients {
            let outcome = client.wait();
            seen.push(prompt);
            self.check(trial, (prompt, history, warm), Level::Crowded, &outcome);
        }
        for mate in mates {
            mate.wait();
        }
        trial.seen.extend(seen);
    }

    fn check(&mut self, trial: &Trial, run: (usize, History, bool), company: Level, outcome: &Outcome) {
        let (prompt, history, warm) = run;
        let kind = self.subjects.prompts[prompt].kind.clone();
        let expected = self.subjects.answer(prompt, warm);
        assert!(
            outcome.same_answer(expected),
            "{:?}, {company:?}, {history:?}, warm {warm}, prompt {prompt} ({kind}):\n{outcome:?}\nplain:\n{expected:?}",
            trial.way
        );
        let history = match history {
            History::New => Level::New,
            History::Again => Level::Again,
            History::FollowUp => Level::FollowUp,
        };
        let draws = if warm { Level::Warm } else { Level::Greedy };
        let way = [Level::Spec(trial.way.spec.name()), Level::DraftLen(trial.way.draft_len)];
        let memory = if trial.way.tight { Level::Tight } else { Level::Roomy };
        let levels = [way[0], way[1], company, history, draws, memory];
        let pairs = levels.iter().flat_map(|a| levels.iter().map(move |b| (*a, *b)));
        self.pairs.extend(pairs.filter(|(a, b)| a < b));
        self.runs += 1;
        self.cached_runs += usize::from(outcome.cached_tokens > 0);
    }

    /// Everything in one way: alone with every history and draw, then in a crowd.
    fn trial<D: Device>(
        &mut self,
        way: Way,
        setup: Setup,
        device: impl FnOnce() -> Result<D, DeviceError> + Send + 'static,
        company: usize,
    ) {
        let Way { spec, draft_len, adaptive, tight } = way;
        let pages = if tight { TIGHT_PAGES } else { setup.pages };
        let (handle, thread) = Setup { pages, spec, draft_len, adaptive, ..setup }.start(device);
        let mut trial = Trial { way, handle, seen: Vec::new() };
        for history in [History::New, History::Again, History::FollowUp] {
            for warm in [false, true] {
                self.alone(&mut trial, history, warm);
            }
        }
        self.crowded(&mut trial, company);
        assert_idle(trial.handle.load());
        thread.stop().unwrap();
    }

    /// Pairs of levels that a full run has, with and without the number of drafts.
    fn missing_pairs(&self, with_drafts: bool) -> Vec<(Level, Level)> {
        let mut factors = vec![
            ["off", "mtp", "lookup", "auto"].map(Level::Spec).to_vec(),
            vec![Level::Alone, Level::Crowded],
            vec![Level::New, Level::Again, Level::FollowUp],
            vec![Level::Greedy, Level::Warm],
            vec![Level::Roomy, Level::Tight],
        ];
        if with_drafts {
            factors.push((1..=MAX_DRAFTS).map(Level::DraftLen).collect());
        }
        let mut missing = Vec::new();
        for (at, factor) in factors.iter().enumerate() {
            for other in &factors[at + 1..] {
                let pairs = factor.iter().flat_map(|a| other.iter().map(move |b| (*a.min(b), *a.max(b))));
                missing.extend(pairs.filter(|pair| !self.pairs.contains(pair)));
            }
        }
        // Without drafts there is no number of them.
        let off = Level::Spec("off");
        missing.retain(|(a, b)| *a != off || !matches!(b, Level::DraftLen(_)));
        missing
    }
}

fn plain_engine<D: Device>(
    setup: Setup,
    device: impl FnOnce() -> Result<D, DeviceError> + Send + 'static,
) -> (EngineHandle, EngineThread) {
    Setup { spec: SpecMode::Off, prefix_cache: false, ..setup }.start(device)
}

fn equal<D: Device>(setup: Setup, device: impl Fn() -> Result<D, DeviceError> + Clone + Send + 'static) {
    let asked = std::env::var("QWILL_EQUALITY_RUNS").ok().map(|runs| runs.parse().unwrap());
    let (plain, plain_thread) = plain_engine(setup, device.clone());
    let mut prompts = prompts();
    if asked.is_none() {
        prompts.retain(|prompt| prompt.ids.len() <= SHORT_PROMPT_TOKENS);
    }
    let originals = prompts.len();
    let (answers, follow_ups) = (BTreeMap::new(), BTreeMap::new());
    let subjects = Subjects { prompts, plain, answers, follow_ups };
    let mut harness =
        Harness { subjects, originals, dice: Dice(4), runs: 0, cached_runs: 0, pairs: BTreeSet::new() };
    for way in ways().into_iter().cycle() {
        if harness.runs >= asked.unwrap_or(SHORT_RUNS) {
            break;
        }
        let company = match asked {
            Some(_) => 2 + harness.dice.below(MOST_COMPANY - 1),
            None => 3,
        };
        harness.trial(way, setup, device.clone(), company);
    }
    let plain_runs = harness.subjects.answers.len();
    let Harness { runs, cached_runs, .. } = harness;
    println!(
        "{runs} runs equal to {plain_runs} plain ones, from {originals} prompts; {cached_runs} began in the prefix cache"
    );
    assert!(cached_runs * 8 > runs, "the prefix cache is hardly used");
    let missing = harness.missing_pairs(asked.is_some());
    assert!(asked.is_some_and(|runs| runs < 2000) || missing.is_empty(), "never together: {missing:?}");
    drop(harness);
    plain_thread.stop().unwrap();
}

#[test]
fn speculation_changes_no_answer() {
    equal(Setup { state_type: StateType::F16, ..Setup::int4() }, || fast(Activations::Int8));
}

#[test]
fn speculation_changes_no_answer_on_the_gpu() {
    if let Some(device) = gpu() {
        equal(Setup { state_type: StateType::F16, ..Setup::int4() }, device);
    }
}
