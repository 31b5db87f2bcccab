use std::sync::Arc;

use qwill_contract::{Allowed, Guide, GuideError};

/// Tokens that a text may have, and runs of tokens that it may not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenLimits {
    /// Bit `t % 32` of word `t / 32` for each token that there is; absent: all.
    among: Option<Vec<u32>>,
    /// No text has one of these in a row.
    banned: Vec<Vec<u32>>,
    mask_words: usize,
}

impl TokenLimits {
    /// `among`: the only tokens there are. `banned`: runs of tokens of which the last one is not drawn behind the others.
    pub fn new(vocab_size: usize, among: Option<&[u32]>, banned: Vec<Vec<u32>>) -> Self {
        let mask_words = vocab_size.div_ceil(32);
        let among = among.map(|tokens| {
            let mut words = vec![0; mask_words];
            for token in tokens {
                set(&mut words, *token, true);
            }
            words
        });
        Self { among, banned, mask_words }
    }

    /// The tokens that would complete a banned run behind a text.
    fn completing(&self, text: &[u32]) -> impl Iterator<Item = u32> {
        self.banned.iter().filter_map(|run| {
            let (last, before) = run.split_last()?;
            text.ends_with(before).then_some(*last)
        })
    }

    fn admits(&self, text: &[u32], token: u32) -> bool {
        self.among.as_ref().is_none_or(|among| is_set(among, token))
            && self.completing(text).all(|banned| banned != token)
    }
}

fn set(words: &mut [u32], token: u32, bit: bool) {
    if let Some(word) = words.get_mut(token as usize / 32) {
        *word = *word & !(1 << (token % 32)) | u32::from(bit) << (token % 32);
    }
}

fn is_set(words: &[u32], token: u32) -> bool {
    words.get(token as usize / 32).is_some_and(|word| word >> (token % 32) & 1 == 1)
}

/// A text under [`TokenLimits`], which another guide may shape besides.
///
/// Where not all of it can be had, the other guide counts most, then the tokens there are, then what is banned: there is
/// always a token to go on with.
#[derive(Debug, Clone)]
pub struct Limited {
    limits: Arc<TokenLimits>,
    shape: Option<Box<dyn Guide>>,
    text: Vec<u32>,
}

impl Limited {
    /// A text that has not begun.
    pub fn new(limits: Arc<TokenLimits>, shape: Option<Box<dyn Guide>>) -> Self {
        Self { limits, shape, text: Vec::new() }
    }

    /// Whether a token that the limits do not admit may come behind these, because nothing else could.
    fn is_needed(&mut self, before: &[u32], token: u32) -> Result<bool, GuideError> {
        for token in before {
            self.accept(*token)?;
        }
        let mut mask = vec![0; self.limits.mask_words];
        self.allowed(&mut mask)?;
        self.roll_back(before.len())?;
        Ok(is_set(&mask, token))
    }
}

impl Guide for Limited {
    fn allowed(&mut self, mask: &mut [u32]) -> Result<Allowed, GuideError> {
        let allowed = self.shape.as_mut().map_or(Ok(Allowed::All), |shape| shape.allowed(mask))?;
        let banned: Vec<u32> = self.limits.completing(&self.text).collect();
        if allowed == Allowed::All {
            if self.limits.among.is_none() && banned.is_empty() {
                return Ok(Allowed::All);
            }
            mask.fill(u32::MAX);
        }
        if let Some(among) = &self.limits.among
            && mask.iter().zip(among).any(|(word, among)| word & among != 0)
        {
            for (index, word) in mask.iter_mut().enumerate() {
                *word &= among.get(index).copied().unwrap_or(0);
            }
        }
        let banned: Vec<u32> = banned.into_iter().filter(|token| is_set(mask, *token)).collect();
        for token in &banned {
            set(mask, *token, false);
        }
        if mask.iter().all(|word| *word == 0) {
            for token in banned {
                set(mask, token, true);
            }
        }
        Ok(Allowed::Masked)
    }

    fn count_allowed(&mut self, tokens: &[u32]) -> Result<usize, GuideError> {
        let shaped = self.shape.as_mut().map_or(Ok(tokens.len()), |shape| shape.count_allowed(tokens))?;
        // No run reaches further back.
        let reach = self.limits.banned.iter().map(Vec::len).max().unwrap_or(0);
        let mut text = self.text[self.text.len().saturating_sub(reach)..].to_vec();
        for (index, token) in tokens[..shaped].iter().enumerate() {
            if !self.limits.admits(&text, *token) && !self.is_needed(&tokens[..index], *token)? {
                return Ok(index);
            }
            text.push(*token);
        }
        Ok(shaped)
    }

    fn accept(&mut self, token: u32) -> Result<(), GuideError> {
        if let Some(shape) = &mut self.shape {
            shape.accept(token)?;
        }
        self.text.push(token);
        Ok(())
    }

    fn roll_back(&mut self, tokens: usize) -> Result<(), GuideError> {
        let left = self.text.len().checked_sub(tokens);
        let left = left.ok_or_else(|| GuideError(format!("{tokens} tokens are more than there were")))?;
        if let Some(shape) = &mut self.shape {
            shape.roll_back(tokens)?;
        }
        self.text.truncate(left);
        Ok(())
    }

    fn forced(&mut self) -> Vec<u32> {
        let mut forced = self.shape.as_mut().map(|shape| shape.forced()).unwrap_or_default();
        forced.truncate(self.count_allowed(&forced).unwrap_or(0));
        forced
    }

    fn boxed_clone(&self) -> Box<dyn Guide> {
        Box::new(self.clone())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::Shape;
    use crate::tests::walk::allowed;
    use crate::tests::{grammars, tokenizer};

    fn limited(among: Option<&[u32]>, banned: &[&[u32]], shape: Option<&Shape>) -> Limited {
        let banned = banned.iter().map(|run| run.to_vec()).collect();
        let limits = TokenLimits::new(tokenizer().vocab_size(), among, banned);
        Limited::new(Arc::new(limits), shape.map(|shape| grammars().compile(shape).unwrap().guide()))
    }

    #[test]
    fn there_are_no_tokens_but_those() {
        let mut guide = limited(Some(&[5, 70, 9]), &[], None);
        assert_eq!(allowed(&mut guide), [5, 9, 70]);
        assert_eq!(guide.count_allowed(&[70, 5, 6, 5]), Ok(2));
        guide.accept(5).unwrap();
        assert_eq!(allowed(&mut guide), [5, 9, 70]);
    }

    #[test]
    fn a_banned_run_is_never_completed() {
        let mut guide = limited(None, &[&[7], &[3, 4], &[4, 4, 5]], None);
        let all = tokenizer().vocab_size();
        assert_eq!(allowed(&mut guide).len(), all - 1);
        assert_eq!(guide.count_allowed(&[3, 3, 4]), Ok(2));
        assert_eq!(guide.count_allowed(&[4, 4, 4, 5]), Ok(3));
        for token in [4, 4] {
            guide.accept(token).unwrap();
        }
        let now = allowed(&mut guide);
        assert!(now.len() == all - 2 && !now.contains(&7) && !now.contains(&5));
        guide.roll_back(1).unwrap();
        assert_eq!(guide.count_allowed(&[5]), Ok(1));
        assert!(limited(None, &[&[3, 4]], None).allowed(&mut [0; 4]) == Ok(Allowed::All));
    }

    #[test]
    fn a_shape_counts_more_and_what_is_banned_less() {
        let yes_or_no = Shape::Choice(vec!["yes".to_owned(), "no".to_owned()]);
        let id = |text: &str| tokenizer().encode(text, qwill_text::Markers::None)[0];
        let (yes, no) = (id("yes"), id("no"));
        assert_eq!(allowed(&mut limited(Some(&[no, 5]), &[], Some(&yes_or_no))), [no]);
        let mut elsewhere = limited(Some(&[5]), &[], Some(&yes_or_no));
        let all = allowed(&mut elsewhere);
        assert!(all.contains(&yes) && all.contains(&no) && !all.contains(&5), "{all:?}");
        assert_eq!(elsewhere.count_allowed(&[yes]), Ok(1));
        assert_eq!(elsewhere.count_allowed(&[5]), Ok(0));
        let mut banned = limited(Some(&[5, 9]), &[&[5], &[5, 9]], None);
        assert_eq!(allowed(&mut banned), [9]);
        let mut nothing_left = limited(Some(&[5]), &[&[5]], None);
        assert_eq!((allowed(&mut nothing_left), nothing_left.count_allowed(&[5, 5, 6])), (vec![5], Ok(2)));
    }

    proptest! {
        /// What is counted along tokens is what the masks say, and nothing moves the guide.
        #[test]
        fn counting_agrees_with_the_masks(
            among in prop::option::of(prop::collection::vec(0u32..6, 1..6)),
            banned in prop::collection::vec(prop::collection::vec(0u32..6, 1..4), 0..5),
            tokens in prop::collection::vec(0u32..6, 0..12),
            shaped in any::<bool>(),
        ) {
            let shape = Shape::Regex("(?s:.*)".to_owned());
            let runs: Vec<&[u32]> = banned.iter().map(Vec::as_slice).collect();
            let mut guide = limited(among.as_deref(), &runs, shaped.then_some(&shape));
            let counted = guide.count_allowed(&tokens).unwrap();
            let mut walked = 0;
            for token in &tokens {
                let now = allowed(&mut guide);
                prop_assert!(!now.is_empty());
                if !now.contains(token) {
                    break;
                }
                guide.accept(*token).unwrap();
                walked += 1;
            }
            prop_assert_eq!(counted, walked);
            guide.roll_back(walked).unwrap();
            prop_assert_eq!(guide.count_allowed(&tokens), Ok(counted));
        }
    }
}
