/// Log-probability (natural) of a token, and the most likely ones at its position.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenLogprobs {
    /// Of the token itself.
    pub logprob: f32,
    /// Descending; as many as were asked for.
    pub top: Vec<(u32, f32)>,
}

/// A generated token.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenOut {
    /// The token.
    pub id: u32,
    /// Where the request asked for them.
    pub logprobs: Option<TokenLogprobs>,
}

/// A prompt token's log-probability given the tokens before it; `None` for the first.
pub type PromptToken = Option<TokenLogprobs>;

/// Why a choice ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FinishReason {
    /// A stop token was drawn: an end-of-turn token or one of `stop_token_ids`. It is the last token reported.
    Stop {
        /// The token.
        token: u32,
    },
    /// `max_tokens` or the context's end was reached.
    Length,
    /// The request, or this choice of it, was cancelled.
    Cancelled,
    /// The choice's guide could not go on; the message is for the client.
    Guide {
        /// What happened.
        message: String,
    },
    /// The model gave this choice logits that are no distribution: NaN, +∞ or no number at all. The message is for the
    /// client.
    Unsound {
        /// What happened.
        message: String,
    },
    /// The engine failed on this request; the message is for the client.
    Error {
        /// What happened.
        message: String,
    },
}

/// What the engine tells about a request.
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// Admitted: prompt processing begins.
    Started {
        /// Prompt tokens found in the prefix cache.
        cached_tokens: usize,
    },
    /// A prefill slice was done.
    Progress {
        /// Prompt tokens processed so far, cached ones included.
        processed_tokens: usize,
    },
    /// Log-probabilities of the whole prompt, once, before the first token.
    PromptLogprobs(Vec<PromptToken>),
    /// One or more tokens of one step.
    Tokens {
        /// Which choice.
        choice: usize,
        /// In order.
        tokens: Vec<TokenOut>,
    },
    /// The choice is finished; nothing more follows for it.
    End {
        /// Which choice.
        choice: usize,
        /// Why.
        reason: FinishReason,
    },
}

/// The receiving side is gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SinkClosed;

/// Where the engine puts a request's events. Never blocks: what a request can produce is bounded by its
/// `max_tokens`.
pub trait EventSink: Send {
    /// Delivers an event; an error cancels the request.
    fn send(&mut self, event: Event) -> Result<(), SinkClosed>;
}

impl<F: FnMut(Event) -> Result<(), SinkClosed> + Send> EventSink for F {
    fn send(&mut self, event: Event) -> Result<(), SinkClosed> {
        self(event)
    }
}
