//! Which granules of the host store are free.

/// Hands out granules of the host store, each to one owner.
#[derive(Debug)]
pub(crate) struct GranulePool {
    free: Vec<u32>,
    total: usize,
}

impl GranulePool {
    pub(crate) fn new(total: usize) -> Self {
        Self { free: (0..total as u32).rev().collect(), total }
    }

    pub(crate) fn total(&self) -> usize {
        self.total
    }

    pub(crate) fn free(&self) -> usize {
        self.free.len()
    }

    pub(crate) fn used(&self) -> usize {
        self.total - self.free.len()
    }

    /// Takes `count` granules, or none at all.
    pub(crate) fn take(&mut self, count: usize) -> Option<Vec<u32>> {
        let rest = self.free.len().checked_sub(count)?;
        Some(self.free.split_off(rest))
    }

    pub(crate) fn give(&mut self, granules: &[u32]) {
        debug_assert!(granules.iter().all(|granule| !self.free.contains(granule)), "{granules:?} are free");
        self.free.extend_from_slice(granules);
    }
}
