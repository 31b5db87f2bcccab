//! What the API and the engine agree on. No HTTP, no device.
//!
//! A [`Request`] goes to the engine with an [`EventSink`]; the engine answers with [`Event`]s, in this order for
//! each choice: `Started`, any number of `Tokens`, exactly one `End`. Cancelling is the only way back.

mod engine;
mod event;
mod guide;
mod request;

pub use engine::{
    CacheLoad, EngineFacts, EngineHandle, EngineInbox, EngineState, Load, LoadSnapshot, SpeculationLoad,
    StepInHand, StepKind, Submission, SubmitError, engine_channel,
};
pub use event::{Event, EventSink, FinishReason, PromptToken, SinkClosed, TokenLogprobs, TokenOut};
pub use guide::{Allowed, Guide, GuideError};
pub use request::{CancelFlag, Request, SamplingParams};
