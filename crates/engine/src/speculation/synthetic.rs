use std::fmt;
use std::str::FromStr;

use thiserror::Error;

use super::MAX_DRAFTS;

/// Accepted lengths drawn from a table, for benchmarks with random weights: all the work of a round is done, only its
/// outcome is made up.
#[derive(Debug, Clone, PartialEq)]
pub struct SyntheticAcceptance {
    per_position: Vec<f32>,
}

/// What is wrong with a table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum SyntheticError {
    /// No entry, or more than a round can have drafts.
    #[error("expected 1 to {MAX_DRAFTS} shares separated by commas")]
    Length,
    /// Not a number, or not between 0 and 1.
    #[error("each share must be a number between 0 and 1")]
    Share,
    /// A draft counts only where all drafts before it do.
    #[error(
        "a share must not be larger than the one before it: a draft counts only where those before it do"
    )]
    Ascending,
}

impl SyntheticAcceptance {
    /// From the share of rounds in which the first, second, … draft is accepted, all before it included.
    pub fn new(per_position: Vec<f32>) -> Result<Self, SyntheticError> {
        if per_position.is_empty() || per_position.len() > MAX_DRAFTS {
            return Err(SyntheticError::Length);
        }
        if !per_position.iter().all(|share| (0.0..=1.0).contains(share)) {
            return Err(SyntheticError::Share);
        }
        if per_position.windows(2).any(|pair| pair[1] > pair[0]) {
            return Err(SyntheticError::Ascending);
        }
        Ok(Self { per_position })
    }

    /// How many of `drafts` drafts are accepted in the round whose first draft stands at `position`: a function of the
    /// arguments alone, distributed as the table says. Drafts beyond the table are not accepted.
    pub fn accepted(&self, seed: u64, position: u64, drafts: usize) -> usize {
        let uniform = (mix(seed ^ mix(position.wrapping_add(SALT))) >> 40) as f32 / (1 << 24) as f32;
        self.per_position.iter().take(drafts).take_while(|share| uniform < **share).count()
    }
}

/// Keeps these numbers apart from the sampler's, which have the same keys.
const SALT: u64 = 0x5e1f_acce_97ed_0001;

/// The finaliser of `SplitMix64` (Steele, Lea, Flood 2014).
fn mix(mut bits: u64) -> u64 {
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}

impl FromStr for SyntheticAcceptance {
    type Err = SyntheticError;

    fn from_str(text: &str) -> Result<Self, SyntheticError> {
        let shares = text.split(',').map(|share| share.trim().parse().map_err(|_| SyntheticError::Share));
        Self::new(shares.collect::<Result<_, _>>()?)
    }
}

impl fmt::Display for SyntheticAcceptance {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, share) in self.per_position.iter().enumerate() {
            write!(out, "{}{share}", if at == 0 { "" } else { "," })?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn accepted_lengths_follow_the_table() {
        let table: SyntheticAcceptance = "0.74,0.50,0.34,0.24".parse().unwrap();
        let rounds = 100_000;
        let mut reached = [0; 6];
        for position in 0..rounds {
            let accepted = table.accepted(position % 7, position, 5);
            reached[..=accepted].iter_mut().for_each(|count| *count += 1);
        }
        let shares = reached.map(|count| f64::from(count) / rounds as f64);
        for (found, expected) in shares.into_iter().zip([1.0, 0.74, 0.5, 0.34, 0.24, 0.0]) {
            // Four standard deviations of a share of 100,000.
            assert!((found - expected).abs() < 4.0 * 0.5 / (rounds as f64).sqrt(), "{shares:?}");
        }
    }

    #[test]
    fn a_table_is_read_checked_and_written() {
        let table: SyntheticAcceptance = "1, 0.5,0".parse().unwrap();
        assert_eq!(table.to_string(), "1,0.5,0");
        for (text, error) in [
            ("", SyntheticError::Share),
            ("0.5,x", SyntheticError::Share),
            ("1.5", SyntheticError::Share),
            ("NaN", SyntheticError::Share),
            ("0.5,0.6", SyntheticError::Ascending),
            ("1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1", SyntheticError::Length),
        ] {
            assert_eq!(text.parse::<SyntheticAcceptance>(), Err(error), "{text}");
        }
    }

    proptest! {
        #[test]
        fn more_drafts_never_change_what_fewer_would_have(
            seed in any::<u64>(),
            position in any::<u64>(),
            mut shares in prop::collection::vec(0.0f32..=1.0, 1..=MAX_DRAFTS),
        ) {
            shares.sort_by(|a, b| b.total_cmp(a));
            let table = SyntheticAcceptance::new(shares).unwrap();
            let all = table.accepted(seed, position, MAX_DRAFTS);
            for drafts in 0..MAX_DRAFTS {
                prop_assert_eq!(table.accepted(seed, position, drafts), all.min(drafts));
            }
        }
    }
}
