use std::fmt;

use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};

use crate::ServerError;
use crate::metrics::SHORT_BUCKETS;

/// Rows of a step, from one sequence to a long slice.
const ROW_BUCKETS: &[f64] =
    &[1.0, 2.0, 4.0, 8.0, 16.0, 24.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0];
/// Drafts of a sequence, and tokens of a round.
const ROUND_BUCKETS: &[f64] =
    &[0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0, 12.0, 13.0, 14.0, 15.0, 16.0];

/// What an engine counts through the `metrics` facade, for `/metrics`. The facade has one recorder for the process, so
/// this is for a process with one engine; what servers count stays with each of them.
#[derive(Clone)]
pub struct EngineMetrics {
    handle: PrometheusHandle,
}

impl EngineMetrics {
    /// Makes the process's recorder. Counts what happens from now on, so it comes before the engine.
    pub fn install() -> Result<Self, ServerError> {
        let suffix = |name: &str| Matcher::Suffix(name.to_owned());
        let recorder = PrometheusBuilder::new()
            .set_buckets_for_metric(suffix("_seconds"), SHORT_BUCKETS)?
            .set_buckets_for_metric(suffix("_step_rows"), ROW_BUCKETS)?
            .set_buckets_for_metric(suffix("_depth"), ROUND_BUCKETS)?
            .set_buckets_for_metric(suffix("_round_tokens"), ROUND_BUCKETS)?
            .build_recorder();
        let handle = recorder.handle();
        metrics::set_global_recorder(recorder).map_err(|_| ServerError::SecondRecorder)?;
        Ok(Self { handle })
    }

    pub(crate) fn render(&self) -> String {
        self.handle.render()
    }

    pub(crate) fn upkeep(&self) {
        self.handle.run_upkeep();
    }
}

impl fmt::Debug for EngineMetrics {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("EngineMetrics")
    }
}
