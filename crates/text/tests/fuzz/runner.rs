//! Runs a check on random inputs: some hundred in a test run, or for as long as `QWILL_FUZZ_SECONDS` says.

use std::fmt::Debug;
use std::time::{Duration, Instant};

use proptest::strategy::Strategy;
use proptest::test_runner::{Config, RngAlgorithm, TestCaseError, TestRng, TestRunner};

const CASES_PER_ROUND: u32 = 256;

/// Tries rounds of inputs until `time` is over, at least one; the n-th round is always the same. The first input that
/// fails, made as small as it gets, is the error.
pub(crate) fn search<S: Strategy>(
    strategy: &S,
    time: Duration,
    check: impl Fn(S::Value) -> Result<(), TestCaseError>,
) -> Result<u64, String>
where
    S::Value: Debug,
{
    let started = Instant::now();
    let mut round = 0_u64;
    loop {
        let mut seed = [0; 32];
        seed[..8].copy_from_slice(&round.to_le_bytes());
        let random = TestRng::from_seed(RngAlgorithm::ChaCha, &seed);
        let config = Config { cases: CASES_PER_ROUND, failure_persistence: None, ..Config::default() };
        let result = TestRunner::new_with_rng(config, random).run(strategy, &check);
        result.map_err(|error| format!("round {round}: {error}"))?;
        round += 1;
        if started.elapsed() >= time {
            return Ok(round * u64::from(CASES_PER_ROUND));
        }
    }
}

/// Fails with the first input that does; tells how many were tried.
pub(crate) fn fuzz<S: Strategy>(
    name: &str,
    strategy: &S,
    check: impl Fn(S::Value) -> Result<(), TestCaseError>,
) where
    S::Value: Debug,
{
    let seconds = std::env::var("QWILL_FUZZ_SECONDS").ok().and_then(|text| text.parse().ok()).unwrap_or(0);
    match search(strategy, Duration::from_secs(seconds), check) {
        Ok(cases) => println!("{name}: {cases} inputs"),
        Err(finding) => panic!("{name}: {finding}"),
    }
}
