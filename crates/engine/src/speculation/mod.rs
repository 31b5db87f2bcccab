//! What speculation knows and decides: where drafts come from, how often they were right, what rows cost, and how many
//! drafts each sequence gets in a round.
//!
//! Pure: no device, no clock, no shared stream of numbers. A draft is accepted exactly when it is the token that the
//! sequence draws anyway, so nothing here can change a text, only how many steps it takes.

mod acceptance;
mod drafter;
mod lookup;
pub mod metrics;
mod options;
mod policy;
#[cfg(test)]
mod simulation;
mod step_times;
mod synthetic;

pub use acceptance::{Acceptance, Source};
pub use drafter::{Drafter, Offer};
pub use lookup::{LookupDraft, LookupIndex};
pub use options::{SpecMode, SpeculationOptions};
pub use policy::{Candidate, DepthPolicy};
pub use step_times::StepTimes;
pub use synthetic::{SyntheticAcceptance, SyntheticError};

use qwill_device::MAX_ROUND_ROWS;

/// Most drafts of one sequence in a round: its rows but the first, which is no draft.
pub const MAX_DRAFTS: usize = MAX_ROUND_ROWS - 1;
