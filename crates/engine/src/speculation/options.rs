use super::{MAX_DRAFTS, SyntheticAcceptance};

/// Where drafts may come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum SpecMode {
    /// Nowhere: every sequence has one row a round.
    Off,
    /// From the model's own MTP module, if it has one.
    Mtp,
    /// From the sequence's own tokens.
    Lookup,
    /// From both, whichever promises more for the sequence at hand.
    #[default]
    Auto,
}

impl SpecMode {
    /// Name used in messages.
    pub fn name(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Mtp => "mtp",
            Self::Lookup => "lookup",
            Self::Auto => "auto",
        }
    }

    /// Whether anything drafts.
    pub fn drafts(self) -> bool {
        self != Self::Off
    }

    /// Whether the MTP module drafts.
    pub fn uses_mtp(self) -> bool {
        matches!(self, Self::Mtp | Self::Auto)
    }

    /// Whether the sequence's own tokens are looked up.
    pub fn uses_lookup(self) -> bool {
        matches!(self, Self::Lookup | Self::Auto)
    }
}

/// How an engine speculates. Nothing of it shows in a text, but for [`SpeculationOptions::synthetic`].
#[derive(Debug, Clone, PartialEq)]
pub struct SpeculationOptions {
    /// Where drafts come from.
    pub mode: SpecMode,
    /// Most drafts of one sequence in a round, at most [`MAX_DRAFTS`].
    pub max_draft_len: usize,
    /// Whether depths follow load and success. Otherwise every sequence drafts as much as it can: for tests and
    /// measurements.
    pub adaptive: bool,
    /// Accept drafts by this table instead of by the draws: for measuring speed with weights that mean nothing. The text
    /// is then no text of the model.
    pub synthetic: Option<SyntheticAcceptance>,
}

impl Default for SpeculationOptions {
    fn default() -> Self {
        Self { mode: SpecMode::default(), max_draft_len: MAX_DRAFTS, adaptive: true, synthetic: None }
    }
}
