//! Which KV pages are free, and how many sequences share each of the others.

/// Hands out page ids. A page is shared by counting references; it is free again when the last one is gone.
#[derive(Debug)]
pub(crate) struct PageAllocator {
    free: Vec<u32>,
    references: Vec<u32>,
}

impl PageAllocator {
    pub(crate) fn new(pages: usize) -> Self {
        Self { free: (0..pages as u32).rev().collect(), references: vec![0; pages] }
    }

    pub(crate) fn total(&self) -> usize {
        self.references.len()
    }

    pub(crate) fn free(&self) -> usize {
        self.free.len()
    }

    pub(crate) fn used(&self) -> usize {
        self.total() - self.free()
    }

    /// How many hold the page.
    pub(crate) fn references(&self, page: u32) -> u32 {
        self.references[page as usize]
    }

    /// Takes `count` pages with one reference each, or none at all.
    pub(crate) fn take(&mut self, count: usize) -> Option<Vec<u32>> {
        let rest = self.free.len().checked_sub(count)?;
        let mut taken = self.free.split_off(rest);
        taken.reverse();
        for page in &taken {
            self.references[*page as usize] = 1;
        }
        Some(taken)
    }

    /// Adds a reference to each page.
    pub(crate) fn share(&mut self, pages: &[u32]) {
        for page in pages {
            debug_assert!(self.references[*page as usize] > 0, "page {page} is shared while free");
            self.references[*page as usize] += 1;
        }
    }

    /// Drops a reference to each page.
    pub(crate) fn release(&mut self, pages: &[u32]) {
        for page in pages {
            let references = &mut self.references[*page as usize];
            debug_assert!(*references > 0, "page {page} is released while free");
            *references = references.saturating_sub(1);
            if *references == 0 {
                self.free.push(*page);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    #[derive(Debug, Clone)]
    enum Act {
        Take(usize),
        ShareFrom(usize),
        Release(usize),
    }

    fn act() -> impl Strategy<Value = Act> {
        prop_oneof![
            (0usize..6).prop_map(Act::Take),
            (0usize..50).prop_map(Act::ShareFrom),
            (0usize..50).prop_map(Act::Release),
        ]
    }

    proptest! {
        /// Against a naive model: the lists of pages that are held.
        #[test]
        fn pages_are_used_exactly_while_somebody_holds_them(acts in prop::collection::vec(act(), 1..80)) {
            let mut allocator = PageAllocator::new(16);
            let mut held: Vec<Vec<u32>> = Vec::new();
            for act in acts {
                match act {
                    Act::Take(count) => {
                        let free = allocator.free();
                        match allocator.take(count) {
                            Some(pages) => {
                                prop_assert_eq!(pages.len(), count);
                                prop_assert!(pages.iter().all(|page| !held.iter().flatten().any(|other| other == page)));
                                held.push(pages);
                            }
                            None => prop_assert!(count > free),
                        }
                    }
                    Act::ShareFrom(index) if !held.is_empty() => {
                        let pages = held[index % held.len()].clone();
                        allocator.share(&pages);
                        held.push(pages);
                    }
                    Act::Release(index) if !held.is_empty() => {
                        let index = index % held.len();
                        allocator.release(&held.swap_remove(index));
                    }
                    Act::ShareFrom(_) | Act::Release(_) => {}
                }
                let mut counts: BTreeMap<u32, u32> = BTreeMap::new();
                for page in held.iter().flatten() {
                    *counts.entry(*page).or_default() += 1;
                }
                prop_assert_eq!(allocator.used(), counts.len());
                prop_assert_eq!(allocator.used() + allocator.free(), 16);
            }
        }
    }
}
