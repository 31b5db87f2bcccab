//! Prompts of an exact number of tokens, for a tokenizer that is only known by its counts.
//!
//! Words that cost one token each are looked for once. A text of n of them, in any order, then has n tokens more
//! than what surrounds it, and one or two counts find the n of a wanted length.

use crate::BenchError;
use crate::random::Random;

/// Every text begins with this, so that each word has its space before it, which is part of its token.
const BEGINNING: &str = "-";

/// So many words make the first few of any two texts differ: 48 to the fifth is 250 million.
const ENOUGH_WORDS: usize = 48;

/// Fewer would make texts repeat themselves.
const FEWEST_WORDS: usize = 12;

/// Candidates: frequent words, which most vocabularies hold as one token.
const CANDIDATES: &str = "the and of to in that it was he for on with his as her at be had she not you but all \
    from by this have they one so which there what when who we will would could more been some no out up into then \
    time man day hand house light water world year place work part little old good great new long side room door \
    eyes head voice face word name line code data file list table value number system state point order change";

/// Something that counts the tokens of a prompt.
pub(crate) trait Counter {
    /// Tokens of a prompt of this text, with whatever the server puts around it.
    fn count(&mut self, text: &str) -> impl Future<Output = Result<usize, BenchError>> + Send;
}

/// Words of one token each.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Words(Vec<&'static str>);

impl Words {
    /// Finds them. Groups are halved until all words of a group cost one token each, so a vocabulary that holds
    /// nearly all candidates takes only a few counts.
    pub(crate) async fn find(counter: &mut impl Counter) -> Result<Self, BenchError> {
        let surroundings = counter.count(BEGINNING).await?;
        let mut found = Vec::new();
        let candidates: Vec<&'static str> = CANDIDATES.split_whitespace().collect();
        let mut groups = vec![candidates];
        while let Some(mut group) = groups.pop().filter(|_| found.len() < ENOUGH_WORDS) {
            if counter.count(&text_of(&group)).await? == surroundings + group.len() {
                found.append(&mut group);
            } else if group.len() > 1 {
                groups.push(group.split_off(group.len() / 2));
                groups.push(group);
            }
        }
        if found.len() < FEWEST_WORDS {
            let reason = format!("only {} of the known words are one token here", found.len());
            return Err(BenchError::Prompt { tokens: surroundings, reason });
        }
        Ok(Self(found))
    }

    /// `count` words, the same for the same seed and stream.
    pub(crate) fn draw(&self, seed: u64, stream: u64, count: usize) -> String {
        let mut random = Random::new(seed, stream);
        let words: Vec<&str> = (0..count).filter_map(|_| random.choose(&self.0).copied()).collect();
        text_of(&words)
    }

    /// How many words make a prompt of `tokens` tokens. `stream` is drawn for trying.
    pub(crate) async fn count_for(
        &self,
        counter: &mut impl Counter,
        tokens: usize,
        seed: u64,
        stream: u64,
    ) -> Result<usize, BenchError> {
        let mut words = tokens;
        // The first count shows what surrounds the words, the second one confirms.
        for _ in 0..4 {
            let counted = counter.count(&self.draw(seed, stream, words)).await?;
            if counted == tokens {
                return Ok(words);
            }
            words = (words + tokens).checked_sub(counted).filter(|&words| words > 0).ok_or_else(|| {
                let reason =
                    format!("the server puts {} tokens around a text", counted.saturating_sub(words));
                BenchError::Prompt { tokens, reason }
            })?;
        }
        let reason = "the server's counts do not add up".to_owned();
        Err(BenchError::Prompt { tokens, reason })
    }
}

fn text_of(words: &[&str]) -> String {
    let mut text = BEGINNING.to_owned();
    for word in words {
        text.push(' ');
        text.push_str(word);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A tokenizer in which some words are one token and others as many as they have letters.
    struct Fake {
        around: usize,
        longest_word: usize,
        counts: usize,
    }

    impl Counter for Fake {
        async fn count(&mut self, text: &str) -> Result<usize, BenchError> {
            self.counts += 1;
            let tokens = |word: &str| if word.len() <= self.longest_word { 1 } else { word.len() };
            Ok(self.around + text.split_whitespace().map(tokens).sum::<usize>())
        }
    }

    fn wait<T>(work: impl Future<Output = T>) -> T {
        tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(work)
    }

    #[test]
    fn a_rich_vocabulary_takes_two_counts() {
        let mut counter = Fake { around: 9, longest_word: 20, counts: 0 };
        let words = wait(Words::find(&mut counter)).unwrap();
        assert_eq!(words.0.len(), CANDIDATES.split_whitespace().count());
        assert_eq!(counter.counts, 2);
    }

    #[test]
    fn a_poor_vocabulary_gives_the_words_that_it_has() {
        let mut counter = Fake { around: 0, longest_word: 3, counts: 0 };
        let words = wait(Words::find(&mut counter)).unwrap();
        assert!(words.0.iter().all(|word| word.len() <= 3), "{words:?}");
        let error = wait(Words::find(&mut Fake { around: 0, longest_word: 0, counts: 0 })).unwrap_err();
        assert!(error.to_string().contains("only 0 of the known words"), "{error}");
    }

    #[test]
    fn a_length_below_the_surroundings_is_refused() {
        let mut counter = Fake { around: 20, longest_word: 20, counts: 0 };
        let words = wait(Words::find(&mut counter)).unwrap();
        let error = wait(words.count_for(&mut counter, 20, 1, 0)).unwrap_err();
        assert_eq!(
            error.to_string(),
            "no prompt of exactly 20 tokens: the server puts 21 tokens around a text"
        );
    }

    #[test]
    fn texts_differ_from_the_first_words_on() {
        let words = wait(Words::find(&mut Fake { around: 0, longest_word: 20, counts: 0 })).unwrap();
        let mut beginnings: Vec<String> = (0..300).map(|stream| words.draw(1000, stream, 8)).collect();
        beginnings.sort();
        beginnings.dedup();
        assert_eq!(beginnings.len(), 300);
        assert_eq!(words.draw(1000, 5, 100), words.draw(1000, 5, 100));
    }

    proptest! {
        #[test]
        fn every_length_is_met_exactly(around in 0..40usize, wanted in 64..3000usize, longest_word in 3..12usize) {
            let mut counter = Fake { around, longest_word, counts: 0 };
            let words = wait(Words::find(&mut counter)).unwrap();
            let count = wait(words.count_for(&mut counter, wanted, 7, 0)).unwrap();
            for stream in 1..4 {
                prop_assert_eq!(wait(counter.count(&words.draw(7, stream, count))).unwrap(), wanted);
            }
        }
    }
}
