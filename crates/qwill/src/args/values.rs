//! Values with units or ranges, checked while the command line is read, so that a typing mistake is a usage
//! error and not a failure later.

use std::fmt;
use std::str::FromStr;

use clap::builder::PossibleValuesParser;
use qwill_device::{Geometry, MAX_ROUND_ROWS};
use qwill_engine::speculation::MAX_DRAFTS;
use qwill_weights::WeightCache;

/// A number of bytes: `24GiB`, `512MiB`, `1.5GB`, `1000000`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ByteCount(pub(crate) u64);

impl FromStr for ByteCount {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let text = text.trim();
        let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
        let (number, unit) = text.split_at(digits);
        if number.is_empty() {
            return Err("expected a number and a unit, such as 24GiB".to_owned());
        }
        let factor: u64 = match unit.trim() {
            "" | "B" => 1,
            "KB" | "kB" => 1000,
            "MB" => 1_000_000,
            "GB" => 1_000_000_000,
            "KiB" => 1 << 10,
            "MiB" => 1 << 20,
            "GiB" => 1 << 30,
            other => return Err(format!("unknown unit `{other}`: write B, KB, MB, GB, KiB, MiB or GiB")),
        };
        let number: f64 =
            number.parse().map_err(|_| "expected a number and a unit, such as 24GiB".to_owned())?;
        let bytes = number * factor as f64;
        if bytes < 1.0 || bytes >= u64::MAX as f64 {
            return Err("must be at least one byte and fit 64 bits".to_owned());
        }
        Ok(Self(bytes as u64))
    }
}

/// A number of bytes, or 0.
pub(super) fn bytes_or_none(text: &str) -> Result<ByteCount, String> {
    if text.trim() == "0" { Ok(ByteCount(0)) } else { text.parse() }
}

/// Geometries by name.
pub(super) fn geometry_names() -> PossibleValuesParser {
    PossibleValuesParser::new(Geometry::NAMES)
}

/// `off`, `auto` or a directory, which may be made later.
pub(super) fn weight_cache(text: &str) -> Result<WeightCache, String> {
    match text {
        "" => Err("expected off, auto or a directory".to_owned()),
        "off" => Ok(WeightCache::Off),
        "auto" => Ok(WeightCache::Beside),
        directory => Ok(WeightCache::In(directory.into())),
    }
}

/// At least 1.
pub(super) fn positive(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) => Err("must be at least 1".to_owned()),
        Ok(number) => Ok(number),
        Err(_) => Err("expected a whole number, at least 1".to_owned()),
    }
}

/// At least 1.
pub(super) fn seconds(text: &str) -> Result<u64, String> {
    positive(text).map(|seconds| seconds as u64)
}

/// Rows that one sequence may have in a round.
pub(super) fn round_rows(text: &str) -> Result<usize, String> {
    match positive(text)? {
        rows if rows <= MAX_ROUND_ROWS => Ok(rows),
        _ => Err(format!("a sequence has at most {MAX_ROUND_ROWS} rows in a round")),
    }
}

/// Drafts that one sequence may have in a round.
pub(super) fn drafts(text: &str) -> Result<usize, String> {
    match positive(text)? {
        drafts if drafts <= MAX_DRAFTS => Ok(drafts),
        _ => Err(format!("a sequence has at most {MAX_DRAFTS} drafts in a step")),
    }
}

fn in_range(
    text: &str,
    range: impl std::ops::RangeBounds<f32> + fmt::Debug,
    words: &str,
) -> Result<f32, String> {
    let number: f32 = text.parse().map_err(|_| format!("expected a number {words}"))?;
    if range.contains(&number) { Ok(number) } else { Err(format!("must be {words}")) }
}

/// [0, 2].
pub(super) fn temperature(text: &str) -> Result<f32, String> {
    in_range(text, 0.0..=2.0, "between 0 and 2")
}

/// (0, 1].
pub(super) fn top_p(text: &str) -> Result<f32, String> {
    in_range(text, f32::MIN_POSITIVE..=1.0, "above 0 and at most 1")
}

/// [0, 1].
pub(super) fn min_p(text: &str) -> Result<f32, String> {
    in_range(text, 0.0..=1.0, "between 0 and 1")
}

/// (0, 10].
pub(super) fn repetition_penalty(text: &str) -> Result<f32, String> {
    in_range(text, f32::MIN_POSITIVE..=10.0, "above 0 and at most 10")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn byte_counts_know_both_families_of_units() {
        for (text, bytes) in [
            ("24GiB", 24 << 30),
            ("24 GiB", 24 << 30),
            ("1.5GB", 1_500_000_000),
            ("512MiB", 512 << 20),
            ("7", 7),
            ("7B", 7),
            ("2kB", 2000),
        ] {
            assert_eq!(text.parse(), Ok(ByteCount(bytes)), "{text}");
        }
    }

    #[test]
    fn byte_counts_refuse_what_is_ambiguous_or_nothing() {
        for text in ["", "GiB", "24G", "24gb", "-1GiB", "0", "1e3", "1.2.3MB", "99999999999999999999GiB"] {
            assert!(text.parse::<ByteCount>().is_err(), "{text}");
        }
    }

    #[test]
    fn a_weight_cache_is_a_word_or_a_directory() {
        assert_eq!(weight_cache("off"), Ok(WeightCache::Off));
        assert_eq!(weight_cache("auto"), Ok(WeightCache::Beside));
        assert_eq!(weight_cache("./off"), Ok(WeightCache::In("./off".into())));
        assert!(weight_cache("").is_err());
    }

    #[test]
    fn ranges_include_their_ends_and_refuse_nan() {
        assert_eq!(temperature("2"), Ok(2.0));
        assert!(temperature("2.01").is_err());
        assert!(temperature("nan").is_err());
        assert!(top_p("0").is_err());
        assert_eq!(top_p("1"), Ok(1.0));
        assert!(positive("0").is_err());
        assert!(positive("-3").is_err());
        assert_eq!(round_rows("16"), Ok(16));
        assert!(round_rows("17").is_err());
        assert_eq!(drafts("15"), Ok(15));
        assert!(drafts("16").is_err() && drafts("0").is_err());
    }
}
