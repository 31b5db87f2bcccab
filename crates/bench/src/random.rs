//! Reproducible draws for prompts.

/// `SplitMix64` (Steele, Lea, Flood 2014): 64 bits of state, enough to shuffle words.
#[derive(Debug, Clone)]
pub(crate) struct Random(u64);

impl Random {
    /// Each pair of seed and stream draws its own sequence.
    pub(crate) fn new(seed: u64, stream: u64) -> Self {
        let mut random = Self(seed);
        let offset = random.next();
        Self(offset ^ stream.wrapping_mul(0x9e37_79b9_7f4a_7c15))
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = self.0;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        bits ^ (bits >> 31)
    }

    /// One of `choices`; `None` of none.
    pub(crate) fn choose<'a, T>(&mut self, choices: &'a [T]) -> Option<&'a T> {
        // The bias of the multiplication is below 2^-50 for the few hundred words there are.
        let at = (u128::from(self.next()) * choices.len() as u128) >> 64;
        choices.get(at as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seeds_and_streams_differ_and_repeat() {
        let draw = |seed, stream| {
            let mut random = Random::new(seed, stream);
            (0..8).map(|_| *random.choose(&[0, 1, 2, 3, 4, 5, 6, 7, 8, 9]).unwrap()).collect::<Vec<i32>>()
        };
        assert_eq!(draw(1000, 3), draw(1000, 3));
        assert_ne!(draw(1000, 3), draw(1000, 4));
        assert_ne!(draw(1000, 3), draw(1001, 3));
        assert_eq!(Random::new(1, 1).choose::<u8>(&[]), None);
    }

    #[test]
    fn every_choice_comes_about_equally_often() {
        let mut random = Random::new(7, 0);
        let mut counts = [0; 5];
        for _ in 0..5_000 {
            counts[*random.choose(&[0_usize, 1, 2, 3, 4]).unwrap()] += 1;
        }
        // 1000 expected each, standard deviation 28.
        assert!(counts.iter().all(|count| (850..1150).contains(count)), "{counts:?}");
    }
}
