//! Which files there are, and which was not used for longest.

use std::collections::{BTreeMap, HashMap};

/// Files by name and by use, within a limit of bytes. Pure.
#[derive(Debug)]
pub(super) struct Index {
    files: HashMap<String, Entry>,
    by_use: BTreeMap<u64, String>,
    /// Of all files, and of what is reserved.
    total_bytes: u64,
    reserved_bytes: u64,
    limit_bytes: u64,
    clock: u64,
}

#[derive(Debug)]
struct Entry {
    bytes: u64,
    used: u64,
}

impl Index {
    pub(super) fn new(limit_bytes: u64) -> Self {
        Self {
            files: HashMap::new(),
            by_use: BTreeMap::new(),
            total_bytes: 0,
            reserved_bytes: 0,
            limit_bytes,
            clock: 0,
        }
    }

    pub(super) fn contains(&self, name: &str) -> bool {
        self.files.contains_key(name)
    }

    pub(super) fn files(&self) -> usize {
        self.files.len()
    }

    pub(super) fn total_bytes(&self) -> u64 {
        self.total_bytes
    }

    /// Adds a file, or sets its size, as the most recently used.
    pub(super) fn add(&mut self, name: String, bytes: u64) {
        self.remove(&name);
        self.clock += 1;
        self.total_bytes += bytes;
        self.by_use.insert(self.clock, name.clone());
        self.files.insert(name, Entry { bytes, used: self.clock });
    }

    pub(super) fn remove(&mut self, name: &str) {
        if let Some(entry) = self.files.remove(name) {
            self.by_use.remove(&entry.used);
            self.total_bytes -= entry.bytes;
        }
    }

    /// Makes a file the most recently used. False where it is not here.
    pub(super) fn touch(&mut self, name: &str) -> bool {
        let Some(entry) = self.files.get_mut(name) else { return false };
        self.clock += 1;
        if let Some(name) = self.by_use.remove(&entry.used) {
            self.by_use.insert(self.clock, name);
        }
        entry.used = self.clock;
        true
    }

    /// Takes room for so many bytes; returns the files that have to go for it. `None`, with nothing done, where there is
    /// not so much beside what is reserved.
    pub(super) fn reserve(&mut self, bytes: u64) -> Option<Vec<String>> {
        let free_of_reserved = self.limit_bytes.saturating_sub(self.reserved_bytes);
        if bytes > free_of_reserved {
            return None;
        }
        let gone = self.shrink_to(self.limit_bytes - bytes);
        self.total_bytes += bytes;
        self.reserved_bytes += bytes;
        Some(gone)
    }

    /// Gives reserved room back.
    pub(super) fn give_back(&mut self, bytes: u64) {
        self.total_bytes -= bytes;
        self.reserved_bytes -= bytes;
    }

    /// No more than there is now is kept from now on: the disk is full.
    pub(super) fn limit_to_now(&mut self) {
        self.limit_bytes = self.limit_bytes.min(self.total_bytes);
    }

    /// Forgets files until the limit holds; returns them.
    pub(super) fn shrink(&mut self) -> Vec<String> {
        self.shrink_to(self.limit_bytes)
    }

    fn shrink_to(&mut self, most_bytes: u64) -> Vec<String> {
        let mut gone = Vec::new();
        while self.total_bytes > most_bytes
            && let Some((_, name)) = self.by_use.pop_first()
        {
            if let Some(entry) = self.files.remove(&name) {
                self.total_bytes -= entry.bytes;
            }
            gone.push(name);
        }
        gone
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[derive(Debug, Clone)]
    enum Op {
        Write(u8, u64),
        Touch(u8),
        Remove(u8),
    }

    fn op() -> impl Strategy<Value = Op> {
        prop_oneof![
            (0u8..12, 0u64..40).prop_map(|(name, bytes)| Op::Write(name, bytes)),
            (0u8..12).prop_map(Op::Touch),
            (0u8..12).prop_map(Op::Remove),
        ]
    }

    proptest! {
        /// Against a list in the order of use.
        #[test]
        fn the_files_used_longest_ago_go_and_the_limit_holds(ops in prop::collection::vec(op(), 1..200)) {
            const LIMIT: u64 = 100;
            let mut index = Index::new(LIMIT);
            let mut naive: Vec<(String, u64)> = Vec::new();
            for op in ops {
                match op {
                    Op::Write(name, bytes) => {
                        let name = name.to_string();
                        let gone = index.reserve(bytes).unwrap();
                        index.give_back(bytes);
                        index.add(name.clone(), bytes);
                        let total = |naive: &[(String, u64)]| naive.iter().map(|file| file.1).sum::<u64>();
                        let mut expected = Vec::new();
                        while total(&naive) + bytes > LIMIT {
                            expected.push(naive.remove(0).0);
                        }
                        prop_assert_eq!(gone, expected);
                        naive.retain(|file| file.0 != name);
                        naive.push((name, bytes));
                    }
                    Op::Touch(name) => {
                        let name = name.to_string();
                        let at = naive.iter().position(|file| file.0 == name);
                        prop_assert_eq!(index.touch(&name), at.is_some());
                        if let Some(at) = at {
                            let file = naive.remove(at);
                            naive.push(file);
                        }
                    }
                    Op::Remove(name) => {
                        index.remove(&name.to_string());
                        naive.retain(|file| file.0 != name.to_string());
                    }
                }
                prop_assert_eq!(index.total_bytes(), naive.iter().map(|file| file.1).sum::<u64>());
                prop_assert!(index.total_bytes() <= LIMIT && index.files() == naive.len());
                prop_assert!(naive.iter().all(|file| index.contains(&file.0)));
            }
        }
    }

    #[test]
    fn what_is_larger_than_all_room_is_refused_without_harm() {
        let mut index = Index::new(10);
        index.add("a".into(), 9);
        assert_eq!(index.reserve(11), None);
        assert!(index.contains("a"));
        assert_eq!(index.reserve(1).unwrap(), [""; 0]);
        assert_eq!(index.reserve(10), None);
        assert!(index.contains("a"));
        assert_eq!(index.reserve(9).unwrap(), ["a"]);
    }

    #[test]
    fn on_a_full_disk_the_new_replaces_the_old() {
        let mut index = Index::new(1000);
        for name in ["a", "b", "c"] {
            index.add(name.into(), 10);
        }
        index.limit_to_now();
        assert_eq!(index.reserve(15).unwrap(), ["a", "b"]);
        assert_eq!(index.total_bytes(), 25);
    }
}
