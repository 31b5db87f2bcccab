//! Pages that the prefix cache keeps: where each is, and how many nodes need it.

use std::collections::HashMap;

use super::granules::GranulePool;
use crate::pages::PageAllocator;

/// A kept page, wherever it is. Never given twice.
pub(crate) type PageKey = u64;

/// Where a kept page is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    /// The device's page; the cache has one reference to it.
    Device(u32),
    /// The host store's granule.
    Host(u32),
}

#[derive(Debug)]
struct CachedPage {
    place: Place,
    nodes: usize,
}

/// The kept pages. However many nodes need a page, it is kept once and holds one reference.
#[derive(Debug, Default)]
pub(crate) struct CachedPages {
    pages: HashMap<PageKey, CachedPage>,
    by_device: HashMap<u32, PageKey>,
    next_key: PageKey,
}

impl CachedPages {
    pub(crate) fn place(&self, key: PageKey) -> Place {
        self.pages[&key].place
    }

    /// The page of the device, if it is there.
    pub(crate) fn device_page(&self, key: PageKey) -> Option<u32> {
        match self.place(key) {
            Place::Device(page) => Some(page),
            Place::Host(_) => None,
        }
    }

    /// Whether a page of the device is kept.
    pub(crate) fn has_device(&self, page: u32) -> bool {
        self.by_device.contains_key(&page)
    }

    /// Keeps a page of the device for one more node.
    pub(crate) fn keep_device(&mut self, page: u32, allocator: &mut PageAllocator) -> PageKey {
        if let Some(key) = self.by_device.get(&page).copied() {
            self.keep(key);
            return key;
        }
        allocator.share(&[page]);
        let key = self.next_key;
        self.next_key += 1;
        self.pages.insert(key, CachedPage { place: Place::Device(page), nodes: 1 });
        self.by_device.insert(page, key);
        key
    }

    /// Keeps a page of the device for one more node, or a granule that nobody has kept.
    pub(crate) fn keep_at(&mut self, place: Place, allocator: &mut PageAllocator) -> PageKey {
        match place {
            Place::Device(page) => self.keep_device(page, allocator),
            Place::Host(granule) => {
                let key = self.next_key;
                self.next_key += 1;
                self.pages.insert(key, CachedPage { place: Place::Host(granule), nodes: 1 });
                key
            }
        }
    }

    /// The granules of kept pages.
    pub(crate) fn host_granules(&self) -> impl Iterator<Item = u32> {
        self.pages.values().filter_map(|page| match page.place {
            Place::Host(granule) => Some(granule),
            Place::Device(_) => None,
        })
    }

    /// Keeps a page for one more node.
    pub(crate) fn keep(&mut self, key: PageKey) {
        if let Some(page) = self.pages.get_mut(&key) {
            page.nodes += 1;
        }
    }

    /// A node does not need the page any more.
    pub(crate) fn forget(&mut self, key: PageKey, allocator: &mut PageAllocator, granules: &mut GranulePool) {
        let Some(page) = self.pages.get_mut(&key) else { return };
        page.nodes -= 1;
        if page.nodes > 0 {
            return;
        }
        match page.place {
            Place::Device(page) => {
                self.by_device.remove(&page);
                allocator.release(&[page]);
            }
            Place::Host(granule) => granules.give(&[granule]),
        }
        self.pages.remove(&key);
    }

    /// Notes that a page is in a granule now. Its device page is free, and returned.
    pub(crate) fn move_to_host(
        &mut self,
        key: PageKey,
        granule: u32,
        allocator: &mut PageAllocator,
    ) -> Option<u32> {
        let page = self.pages.get_mut(&key)?;
        let Place::Device(device) = page.place else { return None };
        page.place = Place::Host(granule);
        self.by_device.remove(&device);
        allocator.release(&[device]);
        Some(device)
    }

    /// Notes that a page is on the device now. Its granule is free.
    pub(crate) fn move_to_device(
        &mut self,
        key: PageKey,
        device: u32,
        allocator: &mut PageAllocator,
        granules: &mut GranulePool,
    ) {
        let Some(page) = self.pages.get_mut(&key) else { return };
        let Place::Host(granule) = page.place else { return };
        page.place = Place::Device(device);
        self.by_device.insert(device, key);
        allocator.share(&[device]);
        granules.give(&[granule]);
    }

    /// Whether the page is on the device and nobody but the cache holds it there.
    pub(crate) fn is_reclaimable(&self, key: PageKey, allocator: &PageAllocator) -> bool {
        self.device_page(key).is_some_and(|page| allocator.references(page) == 1)
    }

    /// Pages of the device that nobody but the cache holds.
    pub(crate) fn reclaimable(&self, allocator: &PageAllocator) -> usize {
        self.by_device.keys().filter(|page| allocator.references(**page) == 1).count()
    }

    /// Kept pages `(on the device, in the host store)`.
    pub(crate) fn counts(&self) -> (usize, usize) {
        (self.by_device.len(), self.pages.len() - self.by_device.len())
    }
}
