//! Responses that were asked to be kept, for a later request to go on from. Bounded by count and by bytes; what was not
//! used for longest goes first.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A response as it is kept. All of it is JSON text, so that its size is known.
#[derive(Debug)]
pub(crate) struct Stored {
    /// Whose it is: nobody else finds it.
    pub(super) owner: String,
    /// The response as it was answered.
    pub(super) body: String,
    /// The items that were sent to get it.
    pub(super) input: String,
    /// The conversation up to and with the response, as templates read it; instructions are not part of it.
    pub(super) history: String,
}

impl Stored {
    fn size_bytes(&self) -> usize {
        self.owner.len() + self.body.len() + self.input.len() + self.history.len()
    }
}

/// The responses by their ids.
pub(crate) struct ResponseStore {
    most: usize,
    most_bytes: usize,
    kept: Mutex<Kept>,
}

#[derive(Default)]
struct Kept {
    entries: HashMap<String, Entry>,
    /// Ids by the moment of their last use.
    by_use: BTreeMap<u64, String>,
    moment: u64,
    bytes: usize,
}

struct Entry {
    stored: Arc<Stored>,
    used: u64,
}

impl ResponseStore {
    pub(crate) fn new(most: usize, most_bytes: usize) -> Self {
        Self { most, most_bytes, kept: Mutex::default() }
    }

    /// Keeps a response, unless it alone is larger than everything may be.
    pub(super) fn keep(&self, id: String, stored: Stored) {
        let bytes = stored.size_bytes();
        if self.most == 0 || bytes > self.most_bytes {
            return;
        }
        let mut kept = self.kept();
        kept.remove(&id);
        while kept.entries.len() >= self.most || kept.bytes + bytes > self.most_bytes {
            let Some((_, oldest)) = kept.by_use.pop_first() else { break };
            kept.remove(&oldest);
        }
        kept.moment += 1;
        let used = kept.moment;
        kept.bytes += bytes;
        kept.by_use.insert(used, id.clone());
        kept.entries.insert(id, Entry { stored: Arc::new(stored), used });
    }

    /// Looks a response of `owner` up, which counts as a use.
    pub(super) fn find(&self, owner: &str, id: &str) -> Option<Arc<Stored>> {
        let mut kept = self.kept();
        kept.moment += 1;
        let now = kept.moment;
        let entry = kept.entries.get_mut(id).filter(|entry| entry.stored.owner == owner)?;
        let before = std::mem::replace(&mut entry.used, now);
        let stored = Arc::clone(&entry.stored);
        kept.by_use.remove(&before);
        kept.by_use.insert(now, id.to_owned());
        Some(stored)
    }

    /// Forgets a response; whether there was one.
    pub(super) fn remove(&self, id: &str) -> bool {
        self.kept().remove(id)
    }

    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Kept {
    fn remove(&mut self, id: &str) -> bool {
        let Some(entry) = self.entries.remove(id) else { return false };
        self.by_use.remove(&entry.used);
        self.bytes -= entry.stored.size_bytes();
        true
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn stored(bytes: usize) -> Stored {
        Stored { owner: String::new(), body: "x".repeat(bytes), input: String::new(), history: String::new() }
    }

    #[test]
    fn what_was_not_used_for_longest_goes() {
        let store = ResponseStore::new(2, 100);
        store.keep("a".into(), stored(10));
        store.keep("b".into(), stored(10));
        assert!(store.find("", "a").is_some());
        store.keep("c".into(), stored(10));
        assert!(
            store.find("", "b").is_none() && store.find("", "a").is_some() && store.find("", "c").is_some()
        );
        assert!(store.remove("a") && !store.remove("a"));
        store.keep("large".into(), stored(95));
        assert!(store.find("", "c").is_none() && store.find("", "large").is_some());
        store.keep("too large".into(), stored(101));
        assert!(store.find("", "too large").is_none() && store.find("", "large").is_some());
        assert!(store.find("somebody", "large").is_none());
        let none = ResponseStore::new(0, 100);
        none.keep("a".into(), stored(1));
        assert!(none.find("", "a").is_none());
    }

    proptest! {
        #[test]
        fn bounds_hold_and_the_last_one_is_there(
            steps in prop::collection::vec((0..12_u8, 0..60_usize, any::<bool>()), 1..60),
        ) {
            let store = ResponseStore::new(4, 100);
            for (id, bytes, look) in steps {
                let id = id.to_string();
                if look {
                    store.find("", &id);
                } else {
                    store.keep(id.clone(), stored(bytes));
                    prop_assert_eq!(store.find("", &id).map(|found| found.size_bytes()), Some(bytes));
                }
                let kept = store.kept();
                prop_assert!(kept.entries.len() <= 4 && kept.bytes <= 100);
                prop_assert_eq!(kept.entries.len(), kept.by_use.len());
                let sum: usize = kept.entries.values().map(|entry| entry.stored.size_bytes()).sum();
                prop_assert_eq!(sum, kept.bytes);
                for (used, id) in &kept.by_use {
                    prop_assert_eq!(kept.entries[id].used, *used);
                }
            }
        }
    }
}
