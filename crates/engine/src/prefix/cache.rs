//! The cache itself: finding, keeping, making room.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashSet};

use qwill_device::batch::PAGE_TOKENS;

use super::granules::GranulePool;
use super::miss::{Forgotten, Miss, path_hashes};
use super::pages::{CachedPages, Place};
use super::tree::{Node, NodeKey, Salt, Snapshot, Tree, Walk};
use crate::pages::PageAllocator;

/// Other salts that are looked at to explain a miss.
const EXPLAINED_SALTS: usize = 64;

/// A snapshot that a prompt can begin at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Hit {
    node: NodeKey,
    /// Tokens before it.
    pub(crate) position: usize,
}

/// What a prompt finds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Lookup {
    pub(crate) hit: Option<Hit>,
    /// How many of its first tokens lie on a known path.
    pub(crate) known_tokens: usize,
}

/// A copy of a page that is to be done, in the order given, before pages or granules are used in another way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PageCopy {
    /// To the host store.
    Store { page: u32, granule: u32 },
    /// From the host store.
    Load { granule: u32, page: u32 },
    /// On the device.
    Within { from: u32, to: u32 },
}

/// What a sequence begins with.
#[derive(Debug)]
pub(crate) struct Begun {
    pub(crate) pages: Vec<u32>,
    /// To be done first.
    pub(crate) copies: Vec<PageCopy>,
    /// Granules of the state at the hit, to be loaded then.
    pub(crate) state: Vec<u32>,
}

/// Where the pages of a path are, from its first token on.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Table<'a> {
    /// Pages of the device, which may be more than the path's.
    Device(&'a [u32]),
    /// Granules of the host store, as many as the path has pages. They become the cache's.
    Host(&'a [u32]),
}

impl Table<'_> {
    fn place(self, index: usize) -> Place {
        match self {
            Self::Device(pages) => Place::Device(pages[index]),
            Self::Host(granules) => Place::Host(granules[index]),
        }
    }
}

/// What the cache holds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct CacheUsage {
    /// Snapshots.
    pub(crate) snapshots: usize,
    /// Tokens on all paths, common beginnings once.
    pub(crate) tokens: usize,
    pub(crate) device_pages: usize,
    pub(crate) host_pages: usize,
    pub(crate) granules_used: usize,
    pub(crate) granules_total: usize,
    /// Snapshots that had to make room, ever.
    pub(crate) evictions: u64,
}

/// See the module's words.
#[derive(Debug)]
pub(crate) struct PrefixCache {
    tree: Tree,
    pages: CachedPages,
    granules: GranulePool,
    /// Granules of one state.
    state_granules: usize,
    /// Snapshots by when they were used last.
    by_use: BTreeMap<u64, NodeKey>,
    forgotten: Forgotten,
    clock: u64,
    evictions: u64,
}

impl PrefixCache {
    pub(crate) fn new(granules: usize, state_granules: usize) -> Self {
        Self {
            tree: Tree::default(),
            pages: CachedPages::default(),
            granules: GranulePool::new(granules),
            state_granules,
            by_use: BTreeMap::new(),
            forgotten: Forgotten::default(),
            clock: 0,
            evictions: 0,
        }
    }

    /// Whether any snapshot can be kept.
    pub(crate) fn is_on(&self) -> bool {
        (1..=self.granules.total()).contains(&self.state_granules)
    }

    // ---- finding ----

    /// What a prompt finds that has such chunk ends. At least its last token is left to compute.
    pub(crate) fn look_up(&self, salt: &Salt, tokens: &[u32], chunk_ends: &[usize]) -> Lookup {
        let Some(root) = self.tree.root(salt) else { return Lookup::default() };
        let Walk { path, matched, .. } = self.tree.walk(root, tokens);
        // A snapshot at a message start is none for a prompt that goes on there with another token.
        let fits = |end: usize| end < tokens.len() && chunk_ends.binary_search(&end).is_ok();
        let hits = path.into_iter().rev().map(|node| (node, self.tree.node(node)));
        let hit = hits
            .filter(|(_, node)| node.snapshot.is_some() && fits(node.end()))
            .map(|(key, node)| Hit { node: key, position: node.end() })
            .next();
        Lookup { hit, known_tokens: matched }
    }

    /// Why a prompt did not find more; `None` where it found all it could.
    pub(crate) fn explain(
        &self,
        found: &Lookup,
        salt: &Salt,
        tokens: &[u32],
        chunk_ends: &[usize],
    ) -> Option<Miss> {
        let position = found.hit.map_or(0, |hit| hit.position);
        let deeper: Vec<usize> =
            chunk_ends.iter().copied().filter(|end| *end > position && *end < tokens.len()).collect();
        let next = *deeper.first()?;
        let was_there = !self.forgotten.is_empty()
            && path_hashes(salt, tokens, &deeper).iter().any(|hash| self.forgotten.contains(*hash));
        if was_there {
            return Some(Miss::Evicted);
        }
        if found.known_tokens >= next {
            return Some(Miss::NoSnapshot);
        }
        let mut others = self.tree.salts().filter(|(other, _)| *other != salt).take(EXPLAINED_SALTS);
        if position == 0 && others.any(|(_, root)| self.tree.walk(root, tokens).matched >= next) {
            return Some(Miss::OtherSalt);
        }
        Some(Miss::Diverged { at: found.known_tokens })
    }

    /// Whether a snapshot is there after exactly these tokens.
    pub(crate) fn contains(&self, salt: &Salt, tokens: &[u32]) -> bool {
        self.snapshot_after(salt, tokens).is_some()
    }

    /// Where the state after exactly these tokens and the pages before it are, if it is there.
    pub(crate) fn places(&self, salt: &Salt, tokens: &[u32]) -> Option<(&[u32], Vec<Place>)> {
        let (key, snapshot) = self.snapshot_after(salt, tokens)?;
        let places = self.tree.page_table(key).into_iter().map(|page| self.pages.place(page));
        Some((&snapshot.granules, places.collect()))
    }

    /// The snapshot after exactly these tokens, and its node.
    fn snapshot_after(&self, salt: &Salt, tokens: &[u32]) -> Option<(NodeKey, &Snapshot)> {
        let Walk { path, matched, inside } = self.tree.walk(self.tree.root(salt)?, tokens);
        let key = path.last().copied().filter(|_| matched == tokens.len() && inside.is_none())?;
        Some((key, self.tree.node(key).snapshot.as_ref()?))
    }

    pub(crate) fn usage(&self) -> CacheUsage {
        let (device_pages, host_pages) = self.pages.counts();
        CacheUsage {
            snapshots: self.by_use.len(),
            tokens: self.tree.nodes().map(|(_, node)| node.edge.len()).sum(),
            device_pages,
            host_pages,
            granules_used: self.granules.used(),
            granules_total: self.granules.total(),
            evictions: self.evictions,
        }
    }

    /// Pages that making room would free.
    pub(crate) fn reclaimable_pages(&self, allocator: &PageAllocator) -> usize {
        self.pages.reclaimable(allocator)
    }

    /// How many of the pages nobody holds but one sequence, and the cache.
    pub(crate) fn held_beside(&self, pages: &[u32], allocator: &PageAllocator) -> usize {
        let by_others = |page: u32| allocator.references(page) - u32::from(self.pages.has_device(page));
        pages.iter().filter(|page| by_others(**page) == 1).count()
    }

    // ---- using ----

    /// The `count` pages of a sequence that begins at a hit, or at the first token, each held once more: whole pages of
    /// the hit are shared, a partly filled one is copied, the others are fresh. For them others may have to go. `None`,
    /// with nothing done, where pages are missing.
    pub(crate) fn begin(
        &mut self,
        hit: Option<Hit>,
        count: usize,
        allocator: &mut PageAllocator,
    ) -> Option<Begun> {
        let table = hit.map_or_else(Vec::new, |hit| self.tree.page_table(hit.node));
        let whole = hit.map_or(0, |hit| hit.position / PAGE_TOKENS);
        // Whole pages on the device stay where they are.
        let shared: Vec<u32> = table[..whole].iter().filter_map(|key| self.pages.device_page(*key)).collect();
        let missing = count - shared.len();
        allocator.share(&shared);
        let Some(mut copies) = self.make_room(missing, hit, allocator) else {
            allocator.release(&shared);
            return None;
        };
        let takes_over = allocator.free() < missing;
        let mut fresh = allocator.take(missing - usize::from(takes_over)).unwrap_or_default().into_iter();
        let mut pages = Vec::with_capacity(count);
        for (index, key) in table.into_iter().enumerate() {
            let place = self.pages.place(key);
            match place {
                Place::Device(page) if index < whole => pages.push(page),
                Place::Device(page) if takes_over => {
                    allocator.share(&[page]);
                    pages.push(page);
                }
                Place::Device(from) => {
                    pages.extend(fresh.next());
                    copies.extend(pages.last().map(|to| PageCopy::Within { from, to: *to }));
                }
                Place::Host(granule) => {
                    let Some(page) = fresh.next() else { continue };
                    pages.push(page);
                    copies.push(PageCopy::Load { granule, page });
                    if index < whole {
                        self.pages.move_to_device(key, page, allocator, &mut self.granules);
                    }
                }
            }
        }
        pages.extend(fresh);
        let state = hit.map_or_else(Vec::new, |hit| self.state(hit).to_vec());
        match hit {
            Some(hit) if takes_over => self.forget(hit.node, allocator),
            Some(hit) => self.touch(hit.node),
            None => {}
        }
        Some(Begun { pages, copies, state })
    }

    fn state(&self, hit: Hit) -> &[u32] {
        self.tree.node(hit.node).snapshot.as_ref().map_or(&[], |snapshot| &snapshot.granules)
    }

    // ---- keeping ----

    /// Granules for a state, for which older snapshots may have to go. `None` where the store is too small.
    pub(crate) fn take_state_granules(&mut self, allocator: &mut PageAllocator) -> Option<Vec<u32>> {
        if self.is_on() { self.take_granules(self.state_granules, allocator) } else { None }
    }

    /// As many granules as are asked for, likewise.
    pub(crate) fn take_granules(&mut self, count: usize, allocator: &mut PageAllocator) -> Option<Vec<u32>> {
        if count > self.granules.total() {
            return None;
        }
        while self.granules.free() < count {
            if !self.evict(None, allocator) {
                return None;
            }
        }
        self.granules.take(count)
    }

    /// Gives granules back that were taken.
    pub(crate) fn give_granules(&mut self, granules: &[u32]) {
        self.granules.give(granules);
    }

    /// Keeps the state after some tokens, which is in `granules`, and their pages.
    pub(crate) fn insert(
        &mut self,
        salt: &Salt,
        tokens: &[u32],
        table: Table<'_>,
        granules: Vec<u32>,
        allocator: &mut PageAllocator,
    ) {
        if self.contains(salt, tokens) {
            self.granules.give(&granules);
        } else {
            self.insert_new(salt, tokens, table, granules, allocator);
        }
        // What was not needed of a table of granules, because it was here already, is nobody's.
        if let Table::Host(pages) = table {
            let kept: HashSet<u32> = self.pages.host_granules().collect();
            let unused: Vec<u32> = pages.iter().copied().filter(|granule| !kept.contains(granule)).collect();
            self.granules.give(&unused);
        }
    }

    fn insert_new(
        &mut self,
        salt: &Salt,
        tokens: &[u32],
        table: Table<'_>,
        granules: Vec<u32>,
        allocator: &mut PageAllocator,
    ) {
        let root = self.tree.make_root(salt);
        let Walk { path, matched, inside } = self.tree.walk(root, tokens);
        let above = match inside {
            Some(node) => self.tree.split(node, matched),
            None => path.last().copied().unwrap_or(root),
        };
        let node = if matched < tokens.len() {
            let indices = matched / PAGE_TOKENS..tokens.len().div_ceil(PAGE_TOKENS);
            let pages = indices.map(|index| self.pages.keep_at(table.place(index), allocator)).collect();
            let edge = tokens[matched..].to_vec();
            self.tree.add(Node { parent: Some(above), start: matched, edge, pages, ..Node::default() })
        } else {
            self.keep_last_page(above, table, allocator);
            above
        };
        let path_hash = path_hashes(salt, tokens, &[tokens.len()])[0];
        self.tree.node_mut(node).snapshot = Some(Snapshot { granules, used: 0, path_hash });
        self.touch(node);
    }

    /// Keeps the partly filled page of a node that gets a snapshot: a child's, which begins with the same tokens, or
    /// else one of the table.
    fn keep_last_page(&mut self, node: NodeKey, table: Table<'_>, allocator: &mut PageAllocator) {
        if !self.tree.node(node).ends_within_a_page() {
            return;
        }
        let mut children = self.tree.node(node).children.values();
        let of_a_child = children.find_map(|child| self.tree.node(*child).pages.first().copied());
        let page = if let Some(page) = of_a_child {
            self.pages.keep(page);
            page
        } else {
            let index = self.tree.node(node).end() / PAGE_TOKENS;
            self.pages.keep_at(table.place(index), allocator)
        };
        self.tree.node_mut(node).pages.push(page);
    }

    /// Makes a snapshot, and the pages before it, the most recently used.
    fn touch(&mut self, key: NodeKey) {
        self.clock += 1;
        let path: Vec<NodeKey> = self.tree.upwards(key).collect();
        for node in path {
            self.tree.node_mut(node).touched = self.clock;
        }
        if let Some(snapshot) = &mut self.tree.node_mut(key).snapshot {
            self.by_use.remove(&snapshot.used);
            snapshot.used = self.clock;
            self.by_use.insert(self.clock, key);
        }
    }

    // ---- making room ----

    /// Makes `count` pages free, whatever that costs but `keep`, whose whole pages on the device the caller holds; one
    /// fewer where only the partly filled page of `keep` is left, and the host store has no room for it. `None`, with
    /// nothing done, where it cannot be.
    fn make_room(
        &mut self,
        count: usize,
        keep: Option<Hit>,
        allocator: &mut PageAllocator,
    ) -> Option<Vec<PageCopy>> {
        if allocator.free() + self.reclaimable_pages(allocator) < count {
            return None;
        }
        let mut moved = Vec::new();
        while allocator.free() < count {
            let more = self.demote(count - allocator.free(), allocator);
            if more.is_empty() && !self.evict(keep, allocator) {
                break;
            }
            moved.extend(more);
        }
        Some(moved)
    }

    /// Moves pages that only the cache holds from the device to the host store, those that were not used for longest
    /// first, and of a path the last ones first; as many as are asked for and as granules are free.
    fn demote(&mut self, count: usize, allocator: &mut PageAllocator) -> Vec<PageCopy> {
        let mut nodes: Vec<(u64, Reverse<usize>, NodeKey)> =
            self.tree.nodes().map(|(key, node)| (node.touched, Reverse(node.start), key)).collect();
        nodes.sort_unstable();
        let mut moved = Vec::new();
        for (_, _, key) in nodes {
            for page in self.tree.node(key).pages.iter().rev() {
                if moved.len() == count {
                    return moved;
                }
                if !self.pages.is_reclaimable(*page, allocator) {
                    continue;
                }
                let Some(granule) = self.granules.take(1).map(|granules| granules[0]) else { return moved };
                let page = self.pages.move_to_host(*page, granule, allocator);
                moved.extend(page.map(|page| PageCopy::Store { page, granule }));
            }
        }
        moved
    }

    /// Forgets the snapshot that was not used for longest, `keep` aside, with the pages that only it needs. False where
    /// there is none.
    fn evict(&mut self, keep: Option<Hit>, allocator: &mut PageAllocator) -> bool {
        let keep = keep.map(|hit| hit.node);
        let Some(node) = self.by_use.values().copied().find(|node| Some(*node) != keep) else { return false };
        self.forget(node, allocator);
        self.evictions += 1;
        true
    }

    /// Forgets everything.
    pub(crate) fn clear(&mut self, allocator: &mut PageAllocator) {
        while let Some((_, node)) = self.by_use.first_key_value() {
            self.forget(*node, allocator);
        }
    }

    fn forget(&mut self, key: NodeKey, allocator: &mut PageAllocator) {
        let node = self.tree.node_mut(key);
        let own_page = if node.ends_within_a_page() { node.pages.pop() } else { None };
        if let Some(snapshot) = node.snapshot.take() {
            self.by_use.remove(&snapshot.used);
            self.granules.give(&snapshot.granules);
            self.forgotten.add(snapshot.path_hash);
        }
        if let Some(page) = own_page {
            self.pages.forget(page, allocator, &mut self.granules);
        }
        self.prune(key, allocator);
    }

    /// Removes a node that leads to no snapshot, and those above it of which that is then true.
    fn prune(&mut self, key: NodeKey, allocator: &mut PageAllocator) {
        let mut next = Some(key);
        while let Some(key) = next {
            let node = self.tree.node(key);
            if node.snapshot.is_some() || !node.children.is_empty() {
                return;
            }
            let Some(removed) = self.tree.remove(key) else { return };
            for page in removed.pages {
                self.pages.forget(page, allocator, &mut self.granules);
            }
            next = removed.parent;
        }
    }
}

#[cfg(test)]
impl PrefixCache {
    /// Paths of all snapshots, the least recently used first.
    pub(crate) fn snapshots(&self) -> Vec<(Salt, Vec<u32>)> {
        let path = |key: &NodeKey| {
            let mut nodes: Vec<NodeKey> = self.tree.upwards(*key).collect();
            nodes.reverse();
            let (salt, _) = self.tree.salts().find(|(_, root)| *root == nodes[0]).unwrap();
            let tokens = nodes.iter().flat_map(|key| self.tree.node(*key).edge.clone()).collect();
            (salt.clone(), tokens)
        };
        self.by_use.values().map(path).collect()
    }

    /// The structure's own promises.
    pub(crate) fn check(&self) {
        for (key, node) in self.tree.nodes() {
            let whole = node.end() / PAGE_TOKENS - node.start / PAGE_TOKENS;
            let own = usize::from(node.snapshot.is_some() && node.ends_within_a_page());
            assert_eq!(node.pages.len(), whole + own, "pages of node {key}");
            assert!(node.snapshot.is_some() || !node.children.is_empty(), "node {key} leads nowhere");
            assert_eq!(node.parent.is_none(), node.edge.is_empty());
            for (first, child) in &node.children {
                let child = self.tree.node(*child);
                assert_eq!((child.parent, child.start, child.edge[0]), (Some(key), node.end(), *first));
            }
            if let Some(snapshot) = &node.snapshot {
                assert_eq!(self.by_use[&snapshot.used], key);
                assert_eq!(snapshot.granules.len(), self.state_granules);
                assert_eq!(self.tree.page_table(key).len(), node.end().div_ceil(PAGE_TOKENS));
            }
        }
        let snapshots = self.tree.nodes().filter(|(_, node)| node.snapshot.is_some()).count();
        assert_eq!(snapshots, self.by_use.len());
        assert_eq!(
            self.granules.used(),
            snapshots * self.state_granules + self.pages.counts().1,
            "granules of states and pages"
        );
    }
}
