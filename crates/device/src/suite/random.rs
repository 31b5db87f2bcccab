//! A small deterministic generator: the suite needs the same numbers on every machine, not good ones.

/// `SplitMix64` (Steele, Lea, Flood 2014).
#[derive(Debug, Clone)]
pub struct Random {
    state: u64,
}

impl Random {
    /// A generator with its own stream per `(seed, name)`.
    pub fn new(seed: u64, name: &str) -> Self {
        let state = name.bytes().fold(seed ^ 0x51ed_270b_1f3a_9d4c, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3).rotate_left(17)
        });
        Self { state }
    }

    /// The next 64 bits.
    pub fn bits(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = self.state;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        bits ^ (bits >> 31)
    }

    /// A number below `end`; 0 when `end` is 0.
    pub fn below(&mut self, end: usize) -> usize {
        ((u128::from(self.bits()) * end as u128) >> 64) as usize
    }

    /// A number from `first` to `last`, both included.
    pub fn between(&mut self, first: usize, last: usize) -> usize {
        first + self.below(last.saturating_sub(first) + 1)
    }

    /// Uniform in `[low, high)`.
    pub fn uniform(&mut self, low: f32, high: f32) -> f32 {
        low + (high - low) * ((self.bits() >> 40) as f32 / 16_777_216.0)
    }

    /// Roughly normal with the given deviation: a centred sum of four uniforms, so never far out.
    pub fn normal(&mut self, deviation: f32) -> f32 {
        let bits = self.bits();
        let sum: u64 = (0..4).map(|part| (bits >> (16 * part)) & 0xffff).sum();
        (sum as f32 / 65_536.0 - 2.0) * deviation * 1.732_050_8
    }

    /// `count` values of [`Random::normal`].
    pub fn normals(&mut self, count: usize, deviation: f32) -> Vec<f32> {
        (0..count).map(|_| self.normal(deviation)).collect()
    }

    /// One of the items; `None` of nothing.
    pub fn pick<T: Copy>(&mut self, items: &[T]) -> Option<T> {
        items.get(self.below(items.len())).copied()
    }

    /// True with the given probability.
    pub fn chance(&mut self, probability: f32) -> bool {
        self.uniform(0.0, 1.0) < probability
    }

    /// Puts the items in random order.
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for end in (1..items.len()).rev() {
            items.swap(end, self.below(end + 1));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn streams_differ_by_name_and_repeat_by_seed() {
        let draw = |seed, name| Random::new(seed, name).bits();
        assert_eq!(draw(1, "linear"), draw(1, "linear"));
        assert_ne!(draw(1, "linear"), draw(2, "linear"));
        assert_ne!(draw(1, "linear"), draw(1, "head"));
    }

    #[test]
    fn ranges_are_reached_at_both_ends_and_never_left() {
        let mut random = Random::new(3, "ranges");
        let mut seen = [0; 5];
        for _ in 0..1000 {
            seen[random.between(3, 7) - 3] += 1;
        }
        assert!(seen.iter().all(|count| *count > 120), "{seen:?}");
        let normals = random.normals(20_000, 2.0);
        let variance = normals.iter().map(|x| x * x).sum::<f32>() / 20_000.0;
        assert!((variance - 4.0).abs() < 0.15, "{variance}");
    }

    #[test]
    fn a_shuffle_keeps_every_item() {
        let mut items: Vec<usize> = (0..50).collect();
        Random::new(9, "shuffle").shuffle(&mut items);
        assert_ne!(items, (0..50).collect::<Vec<_>>());
        items.sort_unstable();
        assert_eq!(items, (0..50).collect::<Vec<_>>());
    }
}
