//! Which state slots are free.

/// Hands out slot numbers, the smallest free one first.
#[derive(Debug)]
pub(crate) struct SlotAllocator {
    taken: Vec<bool>,
}

impl SlotAllocator {
    pub(crate) fn new(slots: usize) -> Self {
        Self { taken: vec![false; slots] }
    }

    pub(crate) fn free(&self) -> usize {
        self.taken.iter().filter(|taken| !**taken).count()
    }

    pub(crate) fn used(&self) -> usize {
        self.taken.len() - self.free()
    }

    /// Takes `count` slots, or none at all.
    pub(crate) fn take(&mut self, count: usize) -> Option<Vec<usize>> {
        let slots: Vec<usize> = (0..self.taken.len()).filter(|slot| !self.taken[*slot]).take(count).collect();
        if slots.len() < count {
            return None;
        }
        for slot in &slots {
            self.taken[*slot] = true;
        }
        Some(slots)
    }

    pub(crate) fn release(&mut self, slot: usize) {
        debug_assert!(self.taken[slot], "slot {slot} is released while free");
        self.taken[slot] = false;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_given_whole_or_not_at_all() {
        let mut slots = SlotAllocator::new(3);
        assert_eq!(slots.take(2), Some(vec![0, 1]));
        assert_eq!(slots.take(2), None);
        assert_eq!(slots.used(), 2);
        slots.release(0);
        assert_eq!(slots.take(2), Some(vec![0, 2]));
        assert_eq!(slots.free(), 0);
    }
}
