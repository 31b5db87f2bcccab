//! What the sampler needs of one row, and what it returns.

/// How to draw one token. All filters work on `logits − penalties + bias`, in the order: mask, penalties and bias,
/// banned ids, temperature, min-p, top-k, top-p.
#[derive(Debug, Clone, PartialEq)]
pub struct SampleRow<'a> {
    /// Row of the logits buffer.
    pub logits_row: usize,
    /// The tokens there are for this draw: bit `id % 32` of word `id / 32`; ids behind its end are not. No other is ever
    /// drawn, even where all of these are banned or at −∞. `None`: all.
    pub mask: Option<&'a [u32]>,
    /// 0 means the largest logit (ties: the smallest id).
    pub temperature: f32,
    /// Keep the `top_k` most likely tokens; 0 keeps all.
    pub top_k: usize,
    /// Keep the smallest set of most likely tokens whose mass reaches `top_p`; 1 keeps all.
    pub top_p: f32,
    /// Drop tokens less likely than `min_p` times the most likely; 0 keeps all.
    pub min_p: f32,
    /// Subtracted once from tokens in the generated text.
    pub presence_penalty: f32,
    /// Subtracted per occurrence in the generated text.
    pub frequency_penalty: f32,
    /// Logits of tokens in prompt or generated text are divided (positive) or multiplied (negative) by it.
    pub repetition_penalty: f32,
    /// Tokens seen so far, each once: `(id, occurrences in the generated text)`; 0 for prompt-only tokens.
    pub seen: &'a [(u32, u32)],
    /// Added to logits; −100 or less bans in effect, as elsewhere.
    pub bias: &'a [(u32, f32)],
    /// Ids that must not be drawn (stop tokens before `min_tokens`).
    pub banned: &'a [u32],
    /// Ids from here on have no text and are never drawn.
    pub vocab_limit: usize,
    /// Key of the noise, with `position` and the token id.
    pub seed: u64,
    /// Absolute position of the token being drawn.
    pub position: u64,
    /// How many of the most likely tokens to report; `None`: no log-probabilities at all.
    pub top_logprobs: Option<usize>,
}

impl SampleRow<'_> {
    /// Whether the mask has the token.
    pub fn is_in_mask(&self, token: u32) -> bool {
        self.mask.is_none_or(|words| is_in_mask(words, token))
    }

    /// A greedy row without penalties, filters or log-probabilities.
    pub fn greedy(logits_row: usize, vocab_limit: usize) -> Self {
        Self {
            logits_row,
            mask: None,
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            repetition_penalty: 1.0,
            seen: &[],
            bias: &[],
            banned: &[],
            vocab_limit,
            seed: 0,
            position: 0,
            top_logprobs: None,
        }
    }
}

/// A drawn token. Log-probabilities are natural, of the model's own distribution over ids below the vocabulary
/// limit: before mask, penalties, bias, temperature and filters. [`Sampled::unsound`] where there is no distribution.
#[derive(Debug, Clone, PartialEq)]
pub struct Sampled {
    /// The token.
    pub token: u32,
    /// Its log-probability; NaN where none was asked for.
    pub logprob: f32,
    /// The most likely tokens, descending (ties: the smaller id first).
    pub top: Vec<(u32, f32)>,
}

impl Sampled {
    /// What a row gives whose logits below the vocabulary limit are no distribution: one of them is NaN or +∞, or none is a
    /// finite number. Nothing is drawn, whatever else was asked for, and no other row notices. Whoever scores tokens gets it
    /// as well.
    pub fn unsound() -> Self {
        Self { token: u32::MAX, logprob: f32::NAN, top: Vec::new() }
    }

    /// Whether it is a token of a distribution, and not [`Sampled::unsound`].
    pub fn is_sound(&self) -> bool {
        self.token != u32::MAX
    }
}

/// Whether these are the logits of a distribution; see [`Sampled::unsound`]. For devices that have nothing faster.
pub fn is_sound(logits: &[f32]) -> bool {
    let largest = logits.iter().fold(f32::NEG_INFINITY, |largest, logit| largest.max(*logit));
    largest.is_finite() && logits.iter().all(|logit| !logit.is_nan())
}

/// Whether a mask of tokens has one.
pub fn is_in_mask(words: &[u32], token: u32) -> bool {
    words.get(token as usize / 32).is_some_and(|word| word >> (token % 32) & 1 == 1)
}

/// A token whose log-probability is wanted, with the most likely ones at that row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ScoreRow {
    /// Row of the logits buffer.
    pub logits_row: usize,
    /// The token.
    pub token: u32,
    /// Ids from here on are left out of the distribution.
    pub vocab_limit: usize,
    /// How many of the most likely tokens to report.
    pub top_logprobs: usize,
}

/// Standard Gumbel noise for a token: a pure function of (seed, position, token), so that a draw does not
/// depend on the batch, the step or the drafter.
///
/// `SplitMix64`'s finaliser (Steele, Lea, Flood 2014) over the three keys, then `−ln(−ln u)` with `u` in
/// (0, 1) at 2^-24 steps. The logarithms are in f64 so that devices with another `logf` can match it.
pub fn gumbel(seed: u64, position: u64, token: u32) -> f32 {
    let mut key = mix(seed ^ 0x9e37_79b9_7f4a_7c15);
    key = mix(key ^ position.wrapping_mul(0xd1b5_4a32_d192_ed03));
    key = mix(key ^ u64::from(token).wrapping_mul(0x8cb9_2ba7_2f3d_8dd7));
    let uniform = ((key >> 40) as f64 + 0.5) / 16_777_216.0;
    (-(-uniform.ln()).ln()) as f32
}

fn mix(mut bits: u64) -> u64 {
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gumbel_noise_has_the_right_mean_and_variance() {
        let draws: Vec<f64> = (0..200_000).map(|i| f64::from(gumbel(7, i / 500, (i % 500) as u32))).collect();
        let mean = draws.iter().sum::<f64>() / draws.len() as f64;
        let variance = draws.iter().map(|d| (d - mean).powi(2)).sum::<f64>() / draws.len() as f64;
        assert!((mean - 0.577_215_66).abs() < 0.01, "mean {mean}");
        assert!((variance - std::f64::consts::PI.powi(2) / 6.0).abs() < 0.03, "variance {variance}");
    }
}
