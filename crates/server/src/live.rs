//! Requests in hand: whose they are and how far. For whoever looks, for whoever ends one, and for the log of a server that
//! is stuck.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use qwill_contract::Event;
use serde::Serialize;
use tokio::sync::Notify;

use crate::accounts::Account;
use crate::auth::Origin;
use crate::log::rounded;

/// All of them. Looked at when one begins or ends and when somebody asks, never in between.
#[derive(Default)]
pub(crate) struct LiveRequests {
    next_key: AtomicU64,
    requests: Mutex<BTreeMap<u64, Arc<LiveRequest>>>,
}

/// One HTTP request that generates.
pub(crate) struct LiveRequest {
    /// The answer's id.
    id: String,
    origin: Origin,
    endpoint: &'static str,
    stream: bool,
    priority: i32,
    prompts: Vec<Arc<LivePrompt>>,
    abort: Notify,
    /// Who wanted its end.
    aborted_by: OnceLock<String>,
}

/// How far a prompt and its answers are. Written as the engine tells its events, on the engine's thread and without a
/// lock; whoever reads may find it between two of them.
pub(crate) struct LivePrompt {
    pub(crate) prompt_tokens: usize,
    /// Of each choice.
    pub(crate) max_tokens: usize,
    pub(crate) choices: usize,
    pub(crate) arrived: Instant,
    cached_tokens: AtomicUsize,
    processed_tokens: AtomicUsize,
    generated_tokens: AtomicUsize,
    ended_choices: AtomicUsize,
    /// Microseconds after the arrival, and 1; 0 where it has not happened.
    began_us: AtomicU64,
    first_token_us: AtomicU64,
    last_event_us: AtomicU64,
}

/// A prompt as `/slots` shows it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Slot {
    /// The engine's name for it: the answer's id and the number of the prompt.
    pub(crate) id: String,
    pub(crate) request_id: String,
    /// The name of the key.
    pub(crate) key: String,
    pub(crate) endpoint: &'static str,
    /// `waiting`, `prompt`, `generating` or `ended`: read out, but not by its client yet.
    pub(crate) state: &'static str,
    pub(crate) is_processing: bool,
    pub(crate) stream: bool,
    pub(crate) priority: i32,
    pub(crate) choices: usize,
    pub(crate) prompt_tokens: usize,
    pub(crate) cached_tokens: usize,
    /// Of the prompt, cached ones included.
    pub(crate) processed_tokens: usize,
    /// Of all choices.
    pub(crate) generated_tokens: usize,
    /// Of each choice at most.
    pub(crate) max_tokens: usize,
    /// After the first token.
    pub(crate) tokens_per_s: Option<f64>,
    pub(crate) waited_s: f64,
    pub(crate) age_s: f64,
    /// Since the engine last told anything of it.
    pub(crate) silent_s: f64,
}

/// Keeps a request among those in hand until it is dropped.
pub(crate) struct Registration {
    requests: Arc<LiveRequests>,
    key: u64,
    request: Arc<LiveRequest>,
}

impl LivePrompt {
    pub(crate) fn new(
        prompt_tokens: usize,
        max_tokens: usize,
        choices: usize,
        arrived: Instant,
    ) -> Arc<Self> {
        Arc::new(Self {
            prompt_tokens,
            max_tokens,
            choices,
            arrived,
            cached_tokens: AtomicUsize::new(0),
            processed_tokens: AtomicUsize::new(0),
            generated_tokens: AtomicUsize::new(0),
            ended_choices: AtomicUsize::new(0),
            began_us: AtomicU64::new(0),
            first_token_us: AtomicU64::new(0),
            last_event_us: AtomicU64::new(0),
        })
    }

    /// Takes an event that happens now.
    pub(crate) fn note(&self, event: &Event) {
        let now_us = self.arrived.elapsed().as_micros() as u64 + 1;
        match event {
            Event::Started { cached_tokens } => {
                self.cached_tokens.store(*cached_tokens, Ordering::Relaxed);
                self.processed_tokens.store(*cached_tokens, Ordering::Relaxed);
                self.began_us.store(now_us, Ordering::Relaxed);
            }
            Event::Progress { processed_tokens } => {
                self.processed_tokens.store(*processed_tokens, Ordering::Relaxed);
            }
            Event::PromptLogprobs(_) => {}
            Event::Tokens { tokens, .. } => {
                if self.first_token_us.load(Ordering::Relaxed) == 0 {
                    self.first_token_us.store(now_us, Ordering::Relaxed);
                    self.processed_tokens.store(self.prompt_tokens, Ordering::Relaxed);
                }
                self.generated_tokens.fetch_add(tokens.len(), Ordering::Relaxed);
            }
            Event::End { .. } => {
                self.ended_choices.fetch_add(1, Ordering::Relaxed);
            }
        }
        self.last_event_us.store(now_us, Ordering::Relaxed);
    }

    fn state(&self) -> &'static str {
        if self.ended_choices.load(Ordering::Relaxed) == self.choices {
            "ended"
        } else if self.began_us.load(Ordering::Relaxed) == 0 {
            "waiting"
        } else if self.first_token_us.load(Ordering::Relaxed) == 0 {
            "prompt"
        } else {
            "generating"
        }
    }
}

impl LiveRequest {
    pub(crate) fn new(
        id: &str,
        origin: &Origin,
        endpoint: &'static str,
        stream: bool,
        priority: i32,
        prompts: Vec<Arc<LivePrompt>>,
    ) -> Self {
        Self {
            id: id.to_owned(),
            origin: origin.clone(),
            endpoint,
            stream,
            priority,
            prompts,
            abort: Notify::new(),
            aborted_by: OnceLock::new(),
        }
    }

    /// Waits until somebody wants it to end, and says who.
    pub(crate) async fn aborted(&self) -> &str {
        loop {
            if let Some(by) = self.aborted_by.get() {
                return by;
            }
            self.abort.notified().await;
        }
    }

    fn slots(&self) -> impl Iterator<Item = Slot> + '_ {
        self.prompts.iter().enumerate().map(|(index, prompt)| self.slot(index, prompt))
    }

    fn slot(&self, index: usize, prompt: &LivePrompt) -> Slot {
        let age = prompt.arrived.elapsed();
        let at = |us: &AtomicU64| {
            let us = us.load(Ordering::Relaxed).checked_sub(1)?;
            Some(Duration::from_micros(us).min(age))
        };
        let (began, first, last) =
            (at(&prompt.began_us), at(&prompt.first_token_us), at(&prompt.last_event_us));
        let generated_tokens = prompt.generated_tokens.load(Ordering::Relaxed);
        let rate = |(first, last): (Duration, Duration)| {
            let seconds = last.saturating_sub(first).as_secs_f64();
            (seconds > 0.0).then(|| rounded(generated_tokens.saturating_sub(1) as f64 / seconds))
        };
        let state = prompt.state();
        Slot {
            id: format!("{}-{index}", self.id),
            request_id: self.origin.request_id.clone(),
            key: self.origin.caller.name.clone(),
            endpoint: self.endpoint,
            state,
            is_processing: matches!(state, "prompt" | "generating"),
            stream: self.stream,
            priority: self.priority,
            choices: prompt.choices,
            prompt_tokens: prompt.prompt_tokens,
            cached_tokens: prompt.cached_tokens.load(Ordering::Relaxed),
            processed_tokens: prompt.processed_tokens.load(Ordering::Relaxed),
            generated_tokens,
            max_tokens: prompt.max_tokens,
            tokens_per_s: first.zip(last).and_then(rate),
            waited_s: rounded(began.unwrap_or(age).as_secs_f64()),
            age_s: rounded(age.as_secs_f64()),
            silent_s: rounded(age.saturating_sub(last.unwrap_or_default()).as_secs_f64()),
        }
    }
}

impl LiveRequests {
    pub(crate) fn register(self: &Arc<Self>, request: LiveRequest) -> Registration {
        let (key, request) = (self.next_key.fetch_add(1, Ordering::Relaxed), Arc::new(request));
        self.lock().insert(key, Arc::clone(&request));
        Registration { requests: Arc::clone(self), key, request }
    }

    /// Everything in hand, oldest first.
    pub(crate) fn slots(&self) -> Vec<Slot> {
        self.snapshot().iter().flat_map(|request| request.slots()).collect()
    }

    /// Tokens of everything that the engine works on: in its caches, or to be.
    pub(crate) fn tokens_in_use(&self) -> usize {
        let working = self.slots().into_iter().filter(|slot| slot.is_processing);
        working.map(|slot| slot.processed_tokens + slot.generated_tokens).sum()
    }

    /// Tokens a second of all answers together.
    pub(crate) fn tokens_per_s(&self) -> f64 {
        let generating = self.slots().into_iter().filter(|slot| slot.state == "generating");
        rounded(generating.filter_map(|slot| slot.tokens_per_s).sum())
    }

    /// Ends what `caller` may end: everything, or what goes by `id`, which is the answer's id or the request's. Returns
    /// the ids of the answers.
    pub(crate) fn abort(&self, caller: &Arc<Account>, id: Option<&str>) -> Vec<String> {
        let may = |request: &LiveRequest| caller.admin || Arc::ptr_eq(caller, &request.origin.caller);
        let is_it = |request: &LiveRequest| {
            id.is_none_or(|id| {
                let of_prompt = request.slots().any(|slot| slot.id == id);
                id == request.id || id == request.origin.request_id || of_prompt
            })
        };
        let chosen = self.snapshot().into_iter().filter(|request| may(request) && is_it(request));
        let end = |request: Arc<LiveRequest>| {
            // Whoever was first is named.
            let _ = request.aborted_by.set(caller.name.clone());
            request.abort.notify_one();
            request.id.clone()
        };
        chosen.map(end).collect()
    }

    fn snapshot(&self) -> Vec<Arc<LiveRequest>> {
        self.lock().values().cloned().collect()
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<u64, Arc<LiveRequest>>> {
        self.requests.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Registration {
    pub(crate) fn request(&self) -> &LiveRequest {
        &self.request
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        self.requests.lock().remove(&self.key);
    }
}

#[cfg(test)]
mod tests {
    use qwill_contract::{FinishReason, TokenOut};

    use super::*;
    use crate::keys::RateLimits;

    fn account(name: &str, admin: bool) -> Arc<Account> {
        Arc::new(Account::new(name.into(), admin, RateLimits::default()))
    }

    fn request(id: &str, caller: &Arc<Account>, prompts: usize) -> LiveRequest {
        let origin = Origin { request_id: format!("req-{id}"), caller: Arc::clone(caller) };
        let prompts = (0..prompts).map(|_| LivePrompt::new(10, 5, 2, Instant::now())).collect();
        LiveRequest::new(id, &origin, "/v1/x", true, 3, prompts)
    }

    #[test]
    fn a_prompt_goes_through_its_states() {
        let requests = Arc::new(LiveRequests::default());
        let registration = requests.register(request("a", &account("bob", false), 1));
        let prompt = &registration.request().prompts[0];
        let tokens =
            |count| Event::Tokens { choice: 0, tokens: vec![TokenOut { id: 1, logprobs: None }; count] };
        let end = |choice| Event::End { choice, reason: FinishReason::Length };
        let seen = || {
            let slot = requests.slots().remove(0);
            (slot.state, slot.processed_tokens, slot.generated_tokens)
        };
        assert_eq!(seen(), ("waiting", 0, 0));
        prompt.note(&Event::Started { cached_tokens: 4 });
        assert_eq!(seen(), ("prompt", 4, 0));
        prompt.note(&Event::Progress { processed_tokens: 8 });
        assert_eq!(seen(), ("prompt", 8, 0));
        assert_eq!(requests.tokens_in_use(), 8);
        prompt.note(&tokens(2));
        prompt.note(&tokens(1));
        assert_eq!(seen(), ("generating", 10, 3));
        prompt.note(&end(0));
        assert_eq!(seen(), ("generating", 10, 3));
        prompt.note(&end(1));
        assert_eq!(seen(), ("ended", 10, 3));
        let slot = requests.slots().remove(0);
        assert_eq!((slot.id.as_str(), slot.request_id.as_str(), slot.key.as_str()), ("a-0", "req-a", "bob"));
        assert_eq!((slot.cached_tokens, slot.priority, slot.is_processing), (4, 3, false));
        drop(registration);
        assert_eq!((requests.slots(), requests.tokens_in_use()), (vec![], 0));
    }

    #[tokio::test]
    async fn everybody_ends_their_own_and_the_admin_all() {
        let (alice, bob, admin) = (account("alice", false), account("bob", false), account("admin", true));
        let requests = Arc::new(LiveRequests::default());
        let of_alice = requests.register(request("a", &alice, 2));
        let of_bob = requests.register(request("b", &bob, 1));
        assert_eq!(requests.slots().len(), 3);
        assert_eq!(requests.abort(&bob, Some("a")), [""; 0]);
        assert_eq!(requests.abort(&alice, Some("nothing")), [""; 0]);
        assert_eq!(requests.abort(&alice, Some("req-a")), ["a"]);
        assert_eq!(of_alice.request().aborted().await, "alice");
        assert_eq!(requests.abort(&admin, Some("a-1")), ["a"]);
        assert_eq!(of_alice.request().aborted().await, "alice", "the first is named");
        assert_eq!(requests.abort(&bob, None), ["b"]);
        assert_eq!(requests.abort(&admin, None), ["a", "b"]);
        assert_eq!(of_bob.request().aborted().await, "bob");
    }
}
