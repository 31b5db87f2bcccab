//! From numbers to places on an axis.

/// Round numbers from 0 to at least `max`, about `wanted` steps of 1, 2 or 5 times a power of ten.
pub(super) fn ticks(max: f64, wanted: usize) -> Vec<f64> {
    let max = if max.is_finite() && max > 0.0 { max } else { 1.0 };
    let rough = max / wanted.max(1) as f64;
    let magnitude = 10_f64.powf(rough.log10().floor());
    let factor = [1.0, 2.0, 5.0, 10.0].into_iter().find(|factor| factor * magnitude >= rough * 0.999);
    let step = magnitude * factor.unwrap_or(10.0);
    // A little tolerance keeps 0.30000000000000004 from asking for another step.
    let steps = (max / step - 1e-9).ceil() as usize;
    (0..=steps).map(|at| at as f64 * step).collect()
}

/// A tick's text: `0`, `0.25`, `1500`, `20k`, `3M`.
pub(super) fn tick_text(value: f64) -> String {
    let short = |value: f64| {
        let text = format!("{value:.3}");
        text.trim_end_matches('0').trim_end_matches('.').to_owned()
    };
    match value {
        10_000.0..1_000_000.0 => short(value / 1e3) + "k",
        1_000_000.0.. => short(value / 1e6) + "M",
        _ => short(value),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn ticks_are_round() {
        assert_eq!(ticks(97.0, 5), [0.0, 20.0, 40.0, 60.0, 80.0, 100.0]);
        assert_eq!(ticks(1.0, 4), [0.0, 0.5, 1.0]);
        assert_eq!(ticks(0.0, 2), [0.0, 0.5, 1.0]);
        assert_eq!(ticks(f64::NAN, 2), [0.0, 0.5, 1.0]);
        let texts: Vec<String> = ticks(42_000.0, 5).into_iter().map(tick_text).collect();
        assert_eq!(texts, ["0", "10k", "20k", "30k", "40k", "50k"]);
        assert_eq!(tick_text(0.25), "0.25");
        assert_eq!(tick_text(2_500_000.0), "2.5M");
        assert_eq!(tick_text(1024.0), "1024");
    }

    proptest! {
        #[test]
        fn ticks_cover_the_maximum_without_a_spare(max in 1e-6..1e12f64, wanted in 1..10usize) {
            let ticks = ticks(max, wanted);
            let last = ticks[ticks.len() - 1];
            prop_assert!(last >= max * (1.0 - 1e-6));
            prop_assert!(ticks.len() >= 2 && ticks.len() <= wanted + 2);
            prop_assert!(ticks[ticks.len() - 2] < max);
        }
    }
}
