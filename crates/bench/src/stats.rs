//! Percentiles and their like.

use serde::Serialize;

/// The distribution of one quantity.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Summary {
    /// How many values.
    pub count: usize,
    /// Arithmetic mean.
    pub mean: f64,
    /// Smallest.
    pub min: f64,
    /// Median.
    pub p50: f64,
    /// 90th percentile.
    pub p90: f64,
    /// 99th percentile.
    pub p99: f64,
    /// Largest.
    pub max: f64,
}

impl Summary {
    /// Of any number of finite values in any order; `None` of none.
    pub fn of(values: impl IntoIterator<Item = f64>) -> Option<Self> {
        let mut sorted: Vec<f64> = values.into_iter().collect();
        sorted.sort_by(f64::total_cmp);
        let (&min, &max) = (sorted.first()?, sorted.last()?);
        Some(Self {
            count: sorted.len(),
            mean: sorted.iter().sum::<f64>() / sorted.len() as f64,
            min,
            p50: percentile(&sorted, 0.5)?,
            p90: percentile(&sorted, 0.9)?,
            p99: percentile(&sorted, 0.99)?,
            max,
        })
    }
}

/// The value below which `fraction` of the sorted values lie, interpolated linearly between neighbours: of n
/// values it stands at rank `fraction * (n - 1)`, counted from 0. `None` without values.
pub fn percentile(sorted: &[f64], fraction: f64) -> Option<f64> {
    let last = sorted.len().checked_sub(1)?;
    let rank = fraction.clamp(0.0, 1.0) * last as f64;
    let below = rank.floor() as usize;
    let above = (below + 1).min(last);
    Some(sorted[below] + (sorted[above] - sorted[below]) * (rank - below as f64))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn percentiles_interpolate_between_neighbours() {
        let values = [1.0, 2.0, 3.0, 4.0];
        assert_eq!(percentile(&values, 0.5), Some(2.5));
        assert_eq!(percentile(&values, 0.0), Some(1.0));
        assert_eq!(percentile(&values, 1.0), Some(4.0));
        assert!((percentile(&values, 0.9).unwrap() - 3.7).abs() < 1e-12);
        assert_eq!(percentile(&[7.0], 0.99), Some(7.0));
        assert_eq!(percentile(&[], 0.5), None);
    }

    #[test]
    fn a_summary_does_not_need_order() {
        let summary = Summary::of([3.0, 1.0, 2.0]).unwrap();
        assert_eq!(
            (summary.count, summary.mean, summary.min, summary.p50, summary.max),
            (3, 2.0, 1.0, 2.0, 3.0)
        );
        assert_eq!(Summary::of([]), None);
    }

    proptest! {
        #[test]
        fn a_summary_is_in_order(values in prop::collection::vec(0.0..1e6f64, 1..200)) {
            let summary = Summary::of(values.iter().copied()).unwrap();
            prop_assert!(summary.min <= summary.p50 && summary.p50 <= summary.p90);
            prop_assert!(summary.p90 <= summary.p99 && summary.p99 <= summary.max);
            prop_assert!(summary.min <= summary.mean + 1e-6 && summary.mean <= summary.max + 1e-6);
            // At most half of the values lie strictly on either side of the median.
            let below = values.iter().filter(|value| **value < summary.p50).count();
            let above = values.iter().filter(|value| **value > summary.p50).count();
            prop_assert!(below * 2 <= values.len() && above * 2 <= values.len());
        }
    }
}
