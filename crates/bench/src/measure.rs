//! From settings to a report: look at the server, compose prompts, warm up, run the rows.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use serde_json::Value;

use crate::BenchError;
use crate::calibrate::{Counter, Words};
use crate::client::Client;
use crate::date;
use crate::endpoint::Endpoint;
use crate::load::{self, Load, Question};
use crate::prompts;
use crate::protocol::{Overrides, Prompts, Protocol, Row};
use crate::report::{Conditions, Report, RowReport};
use crate::request::{Asking, Dialect};
use crate::sample::Sample;
use crate::server::{self, DraftCounters, ServerFacts};
use crate::talk::Talk;

/// Warming up, as the reference protocol does it: requests of 256 prompt and 256 generated tokens, eight at once.
const WARM_UP_TOKENS: usize = 256;
const WARM_UP_CONCURRENCY: usize = 8;

/// Words of a question that follows another one, or a long common text.
const FEW_WORDS: usize = 20;

/// Stream of draws for calibration; the rows' requests count up from 0.
const CALIBRATION_STREAM: u64 = u64::MAX;

/// What to measure.
#[derive(Debug, Clone)]
pub struct Options {
    /// The API's address.
    pub url: String,
    /// The server's key.
    pub key: Option<String>,
    /// The model; without, the first that the server lists.
    pub model: Option<String>,
    /// Chat or completions.
    pub dialect: Dialect,
    /// Which protocols, in order.
    pub protocols: Vec<Protocol>,
    /// Changes to their numbers.
    pub overrides: Overrides,
    /// Temperature of every request; without, the server's default.
    pub temperature: Option<f64>,
    /// Requests before the first row that are not counted.
    pub warm_up_requests: usize,
    /// Decides the random prompts. A server that remembers prompts must not see a seed twice.
    pub seed: u64,
    /// Longest time for one request.
    pub timeout: Duration,
    /// Name and version of who measures, for the report.
    pub client_version: String,
    /// The command line, for the report, without secrets.
    pub command: Vec<String>,
}

/// Hears how far a measurement has come. Called from several threads.
pub trait Observer: Send + Sync {
    /// Something before the rows begins, "warming up", with so many requests to come.
    fn stage(&self, what: &str, requests: usize);
    /// Row `at` of `of` begins, counted from 0.
    fn row_began(&self, row: &Row, at: usize, of: usize);
    /// A request of the row, or of the warm-up, has ended.
    fn request_ended(&self, sample: &Sample);
}

/// Measures. Requests that fail are counted in the report; an error means that there is nothing to report. Ctrl-C
/// ends it after the last complete row.
pub fn measure(options: &Options, observer: Arc<dyn Observer>) -> Result<Report, BenchError> {
    let endpoint = Endpoint::parse(&options.url)?;
    let rows = rows(options)?;
    let runtime =
        tokio::runtime::Builder::new_multi_thread().enable_all().build().map_err(BenchError::Runtime)?;
    runtime.block_on(async {
        let mut session = Session::open(options, endpoint, observer).await?;
        session.warm_up().await?;
        let mut reports = Vec::new();
        // What is done is reported, even when somebody loses patience with the rest.
        let interrupt = tokio::signal::ctrl_c();
        tokio::pin!(interrupt);
        for (at, row) in rows.iter().enumerate() {
            session.observer.row_began(row, at, rows.len());
            tokio::select! {
                report = session.row(row, at as u64) => reports.push(report?),
                _ = &mut interrupt => return Ok(Report::new(session.conditions, reports, true)),
            }
        }
        Ok(Report::new(session.conditions, reports, false))
    })
}

fn rows(options: &Options) -> Result<Vec<Row>, BenchError> {
    let mut rows = Vec::new();
    for protocol in &options.protocols {
        rows.extend(protocol.rows(&options.overrides)?);
    }
    if rows.is_empty() {
        return Err(BenchError::Settings("no protocol was chosen: there is nothing to measure".into()));
    }
    Ok(rows)
}

/// A server that has been looked at.
struct Session<'a> {
    options: &'a Options,
    client: Client,
    observer: Arc<dyn Observer>,
    asking: Asking,
    conditions: Conditions,
    /// Found when the first row needs them.
    words: Option<Words>,
    /// Requests drawn so far: no two share a stream of random words.
    drawn: u64,
}

impl<'a> Session<'a> {
    async fn open(
        options: &'a Options,
        endpoint: Endpoint,
        observer: Arc<dyn Observer>,
    ) -> Result<Self, BenchError> {
        observer.stage("looking at the server", 0);
        let url = endpoint.url();
        let client = Client::new(endpoint, options.key.as_deref(), options.timeout)?;
        let facts = server::look(&client, url, options.model.as_deref(), options.dialect).await?;
        let asking = Asking {
            dialect: options.dialect,
            model: facts.model.clone(),
            temperature: options.temperature,
            abilities: facts.abilities,
        };
        let conditions = conditions(options, facts);
        Ok(Self { options, client, observer, asking, conditions, words: None, drawn: 0 })
    }

    async fn warm_up(&mut self) -> Result<(), BenchError> {
        let requests = self.options.warm_up_requests;
        if requests == 0 {
            return Ok(());
        }
        let room = self.conditions.server.max_context_tokens.unwrap_or(u64::MAX) as usize / 2;
        let tokens = WARM_UP_TOKENS.min(room);
        let row = Row {
            protocol: Protocol::Batch,
            prompts: Prompts::RandomTokens(tokens),
            concurrency: WARM_UP_CONCURRENCY.min(requests),
            requests,
            output_tokens: tokens,
            exact_output: true,
        };
        let load = self.load(&row, u64::MAX).await?;
        self.observer.stage("warming up", requests);
        let outcome = load::run(&self.client, load, &self.observer).await?;
        self.conditions.warm_up_failed = outcome.samples.iter().filter(|sample| !sample.is_ok()).count();
        Ok(())
    }

    async fn row(&mut self, row: &Row, number: u64) -> Result<RowReport, BenchError> {
        let limit = self.conditions.server.max_context_tokens;
        if let (Some(needed), Some(limit)) = (row.context_tokens(), limit)
            && needed as u64 > limit
        {
            let reason = format!("{needed} tokens are more than the server's context of {limit}");
            return Ok(RowReport::skipped(row, reason));
        }
        let load = self.load(row, number).await?;
        let before = DraftCounters::read(&self.client).await;
        let outcome = load::run(&self.client, load, &self.observer).await?;
        let after = DraftCounters::read(&self.client).await;
        let drafts = after.zip(before).and_then(|(after, before)| after.tokens_per_round_since(before));
        let report = RowReport::new(row, outcome.wall_us, outcome.samples, self.asking.abilities);
        Ok(RowReport { tokens_per_round: drafts, ..report })
    }

    /// The row's requests. `number` marks chats, so that no row repeats another's.
    async fn load(&mut self, row: &Row, number: u64) -> Result<Load, BenchError> {
        let questions = match row.prompts {
            Prompts::Chats => {
                let text = |index| prompts::chat(self.options.seed, number, index);
                (0..row.requests).map(text).map(Question::alone).collect()
            }
            Prompts::RandomTokens(tokens) => {
                self.random_texts(row.requests, tokens).await?.into_iter().map(Question::alone).collect()
            }
            Prompts::SharedTokens(tokens) => self.sharing(row.requests, tokens).await?,
            Prompts::Talks { talks, tokens } => self.talks(row.requests, talks, tokens).await?,
        };
        Ok(Load {
            asking: self.asking.clone(),
            concurrency: row.concurrency,
            output_tokens: row.output_tokens,
            exact_output: row.exact_output,
            questions,
        })
    }

    /// Questions with a long beginning in common, which nobody has asked before.
    async fn sharing(&mut self, requests: usize, tokens: usize) -> Result<Vec<Question>, BenchError> {
        let beginning = self.random_texts(1, tokens).await?.pop().unwrap_or_default();
        let ends = self.few_words(requests).await?;
        Ok(ends.into_iter().map(|end| Question::alone(format!("{beginning}\n{end}"))).collect())
    }

    /// Questions of conversations, all their first ones first.
    async fn talks(
        &mut self,
        requests: usize,
        talks: usize,
        tokens: usize,
    ) -> Result<Vec<Question>, BenchError> {
        let first = self.random_texts(talks, tokens).await?;
        let following = self.few_words(requests.saturating_sub(talks)).await?;
        let talks: Vec<Arc<Talk>> = first.iter().map(|_| Arc::default()).collect();
        let question = |(index, text): (usize, String)| Question {
            talk: Arc::clone(&talks[index % talks.len()]),
            turn: index / talks.len(),
            text,
        };
        Ok(first.into_iter().chain(following).take(requests).enumerate().map(question).collect())
    }

    async fn random_texts(&mut self, count: usize, tokens: usize) -> Result<Vec<String>, BenchError> {
        let words = self.find_words().await?;
        let mut counter = ServerCounter { client: &self.client, asking: &self.asking };
        let length = words.count_for(&mut counter, tokens, self.options.seed, CALIBRATION_STREAM).await?;
        Ok(self.draw(&words, count, length))
    }

    async fn few_words(&mut self, count: usize) -> Result<Vec<String>, BenchError> {
        let words = self.find_words().await?;
        Ok(self.draw(&words, count, FEW_WORDS))
    }

    fn draw(&mut self, words: &Words, count: usize, length: usize) -> Vec<String> {
        let first = self.drawn;
        self.drawn += count as u64;
        (first..self.drawn).map(|stream| words.draw(self.options.seed, stream, length)).collect()
    }

    async fn find_words(&mut self) -> Result<Words, BenchError> {
        if let Some(words) = &self.words {
            return Ok(words.clone());
        }
        self.observer.stage("composing prompts", 0);
        let mut counter = ServerCounter { client: &self.client, asking: &self.asking };
        Ok(self.words.insert(Words::find(&mut counter).await?).clone())
    }
}

/// Counts with the server's help.
struct ServerCounter<'a> {
    client: &'a Client,
    asking: &'a Asking,
}

impl Counter for ServerCounter<'_> {
    async fn count(&mut self, text: &str) -> Result<usize, BenchError> {
        let Asking { dialect, model, abilities, .. } = self.asking;
        server::count_tokens(self.client, model, *dialect, *abilities, text).await
    }
}

fn conditions(options: &Options, server: ServerFacts) -> Conditions {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    Conditions {
        server,
        client_version: options.client_version.clone(),
        command: options.command.clone(),
        client_host: host.trim().to_owned(),
        client_processors: std::thread::available_parallelism().map_or(0, usize::from),
        started_utc: date::utc(SystemTime::now()),
        dialect: options.dialect,
        temperature: options.temperature,
        warm_up_requests: options.warm_up_requests,
        warm_up_failed: 0,
        seed: options.seed,
        overrides: options.overrides.clone(),
    }
}

/// What a server says about itself, for a heading.
pub(crate) fn server_line(facts: &ServerFacts) -> String {
    let version = match &facts.version {
        Some(Value::Object(fields)) => {
            let part = |name: &str| fields.get(name).and_then(Value::as_str);
            [part("name"), part("version")].into_iter().flatten().collect::<Vec<&str>>().join(" ")
        }
        _ => facts.server_header.clone().unwrap_or_default(),
    };
    let parts = [facts.model.clone(), facts.numerics.clone().unwrap_or_default(), version];
    parts.into_iter().filter(|part| !part.is_empty()).collect::<Vec<String>>().join(", ")
}
