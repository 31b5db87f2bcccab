use std::collections::HashMap;

/// Things by key, of which those used last are kept, within a number of bytes.
#[derive(Debug)]
pub(crate) struct Cache<T> {
    entries: HashMap<String, Entry<T>>,
    capacity_bytes: usize,
    used_bytes: usize,
    uses: u64,
}

#[derive(Debug)]
struct Entry<T> {
    value: T,
    bytes: usize,
    last_use: u64,
}

impl<T: Clone> Cache<T> {
    pub(crate) fn new(capacity_bytes: usize) -> Self {
        Self { entries: HashMap::new(), capacity_bytes, used_bytes: 0, uses: 0 }
    }

    pub(crate) fn get(&mut self, key: &str) -> Option<T> {
        self.uses += 1;
        let entry = self.entries.get_mut(key)?;
        entry.last_use = self.uses;
        Some(entry.value.clone())
    }

    /// Keeps a thing of so many bytes, unless it is larger than all there is room for.
    pub(crate) fn put(&mut self, key: String, value: T, bytes: usize) {
        let bytes = bytes + key.len();
        self.remove(&key);
        if bytes > self.capacity_bytes {
            return;
        }
        while self.used_bytes + bytes > self.capacity_bytes {
            let Some(oldest) = self.entries.iter().min_by_key(|(_, entry)| entry.last_use) else { break };
            let oldest = oldest.0.clone();
            self.remove(&oldest);
        }
        self.uses += 1;
        self.used_bytes += bytes;
        self.entries.insert(key, Entry { value, bytes, last_use: self.uses });
    }

    fn remove(&mut self, key: &str) {
        if let Some(entry) = self.entries.remove(key) {
            self.used_bytes -= entry.bytes;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_not_used_for_longest_goes_first() {
        let mut cache = Cache::new(30);
        for key in ["a", "b", "c"] {
            cache.put(key.to_owned(), key.to_owned(), 9);
        }
        assert_eq!(cache.get("a").as_deref(), Some("a"));
        cache.put("d".to_owned(), "d".to_owned(), 9);
        let kept: Vec<bool> = ["a", "b", "c", "d"].map(|key| cache.get(key).is_some()).to_vec();
        assert_eq!(kept, [true, false, true, true]);
        cache.put("large".to_owned(), String::new(), 30);
        assert!(cache.get("large").is_none() && cache.used_bytes == 30);
        cache.put("d".to_owned(), "new".to_owned(), 1);
        assert_eq!((cache.get("d").as_deref(), cache.used_bytes), (Some("new"), 22));
    }
}
