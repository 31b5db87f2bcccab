//! One answer, whatever speculates: every request gives the tokens of its plain, lonely, cold run, with the same bits of
//! their log-probabilities, whoever drafts and how many, whatever runs beside it, and whatever the engine has seen before.
//!
//! Runs vary in who drafts, in the number of drafts, in company, in what was seen, in how tokens are drawn, and in
//! whether what the prefix cache holds stays on the device, moves to host memory and back, or was read from disk by an
//! engine that was started anew. A short run covers every pair of levels of all factors but the number of drafts;
//! `QWILL_EQUALITY_RUNS=2000` covers every pair, and what is left of its runs is random.
#![allow(clippy::unwrap_used, reason = "a test may fail this way")]

#[allow(dead_code, reason = "every test binary uses a part of it")]
mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::Ordering;

use common::client::{Client, Outcome, assert_idle, request};
use common::company::{Dice, mate, submit, wait_for_steps};
use common::prompts::{Prompt, follow_up, prompts};
use common::{Setup, fast, gpu, greedy};
use qwill_contract::{EngineHandle, Request, SamplingParams};
use qwill_device::{Activations, Device, DeviceError, StateType};
use qwill_engine::speculation::{MAX_DRAFTS, SpecMode};
use qwill_engine::{DiskCacheOptions, EngineThread};
use tempfile::TempDir;

/// Runs without `QWILL_EQUALITY_RUNS`.
const SHORT_RUNS: usize = 108;
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
    memory: Memory,
}

/// Where what earlier prompts left is when the next one comes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Memory {
    /// Where it was computed.
    Roomy,
    /// There are so few pages that those of earlier prompts must make room.
    Tight,
    /// On disk: the engine has been stopped and started.
    Restarted,
}

impl Memory {
    const ALL: [Self; 3] = [Self::Roomy, Self::Tight, Self::Restarted];
}

/// All ways, in an order that begins with the most different ones: drafts as many as allowed, since a policy may have
/// none where they do not pay; and the two ways that people use.
fn ways() -> Vec<Way> {
    let drafting = [SpecMode::Mtp, SpecMode::Lookup, SpecMode::Auto];
    let used = |spec, memory| Way { spec, draft_len: MAX_DRAFTS, adaptive: true, memory };
    let order = [4, MAX_DRAFTS, 1, 8, 2, 11, 3, 14, 5, 13, 6, 12, 7, 10, 9];
    let fixed = order.into_iter().enumerate().flat_map(|(turn, draft_len)| {
        let memory = move |at: usize| Memory::ALL[(turn + at) % Memory::ALL.len()];
        let specs = drafting.into_iter().enumerate();
        specs.map(move |(at, spec)| Way { spec, draft_len, adaptive: false, memory: memory(at) })
    });
    let mut ways: Vec<Way> = fixed.collect();
    let without_drafts = Memory::ALL.map(|memory| used(SpecMode::Off, memory));
    let used = without_drafts.into_iter().chain([used(SpecMode::Auto, Memory::Roomy)]);
    // Behind the first turns, in which everybody who drafts has had every memory.
    let turns = drafting.len() * Memory::ALL.len();
    ways.splice(turns..turns, used);
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
    In(Memory),
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
    thread: EngineThread,
    seen: Vec<usize>,
}

/// Starts an engine again and again, with what the one before left on disk.
struct Starter<D, F: Fn() -> Result<D, DeviceError> + Clone + Send + 'static> {
    setup: Setup,
    device: F,
    directory: Option<TempDir>,
}

impl<D: Device, F: Fn() -> Result<D, DeviceError> + Clone + Send + 'static> Starter<D, F> {
    fn new(way: Way, setup: Setup, device: F) -> Self {
        let Way { spec, draft_len, adaptive, memory } = way;
        let pages = if memory == Memory::Tight { TIGHT_PAGES } else { setup.pages };
        let directory = (memory == Memory::Restarted).then(|| tempfile::tempdir().unwrap());
        Self { setup: Setup { pages, spec, draft_len, adaptive, ..setup }, device, directory }
    }

    fn start(&self) -> (EngineHandle, EngineThread) {
        let disk = self.directory.as_ref().map(|directory| DiskCacheOptions {
            directory: directory.path().to_owned(),
            limit_bytes: 1 << 30,
            identity: [7; 32],
        });
        self.setup.start_with_disk(disk, self.device.clone())
    }

    /// Where there is a disk.
    fn restart(&self, trial: Trial) -> Trial {
        assert_idle(trial.handle.load());
        if self.directory.is_none() {
            return trial;
        }
        trial.thread.stop().unwrap();
        let (handle, thread) = self.start();
        Trial { handle, thread, ..trial }
    }
}

struct Harness {
    subjects: Subjects,
    /// Prompts before follow-ups.
    originals: usize,
    dice: Dice,
    runs: usize,
    /// Runs that began at a snapshot.
    cached_runs: usize,
    /// Prompts of which something was read from disk.
    disk_loads: u64,
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
        let levels = [way[0], way[1], company, history, draws, Level::In(trial.way.memory)];
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
        device: impl Fn() -> Result<D, DeviceError> + Clone + Send + 'static,
        company: usize,
    ) {
        let starter = Starter::new(way, setup, device);
        let (handle, thread) = starter.start();
        let mut trial = Trial { way, handle, thread, seen: Vec::new() };
        for history in [History::New, History::Again, History::FollowUp] {
            for warm in [false, true] {
                self.alone(&mut trial, history, warm);
            }
            trial = starter.restart(trial);
        }
        self.crowded(&mut trial, company);
        assert_idle(trial.handle.load());
        self.disk_loads += trial.handle.load().cache.disk_loads.load(Ordering::Relaxed);
        trial.thread.stop().unwrap();
    }

    /// Pairs of levels that a full run has, with and without the number of drafts.
    fn missing_pairs(&self, with_drafts: bool) -> Vec<(Level, Level)> {
        let mut factors = vec![
            ["off", "mtp", "lookup", "auto"].map(Level::Spec).to_vec(),
            vec![Level::Alone, Level::Crowded],
            vec![Level::New, Level::Again, Level::FollowUp],
            vec![Level::Greedy, Level::Warm],
            Memory::ALL.map(Level::In).to_vec(),
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
    let mut harness = Harness {
        subjects,
        originals,
        dice: Dice(4),
        runs: 0,
        cached_runs: 0,
        disk_loads: 0,
        pairs: BTreeSet::new(),
    };
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
    let Harness { runs, cached_runs, disk_loads, .. } = harness;
    println!(
        "{runs} runs equal to {plain_runs} plain ones, from {originals} prompts; {cached_runs} began in the prefix \
         cache; crowds read {disk_loads} beginnings from disk"
    );
    assert!(cached_runs * 8 > runs, "the prefix cache is hardly used");
    assert!(disk_loads > 0, "nothing was read from disk");
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
