//! The cache against a naive model: a list of snapshots, and the contents of every page and granule.

use std::collections::{HashMap, HashSet};

use proptest::prelude::*;
use qwill_device::batch::PAGE_TOKENS;

use super::cache::CacheUsage;
use super::*;
use crate::chunks::ChunkRule;
use crate::pages::PageAllocator;

const PAGES: usize = 24;
const BOUNDARY: u32 = 3;
const CHUNKS: ChunkRule = ChunkRule { boundary_token: Some(BOUNDARY), interval_tokens: 200 };
const SNAPSHOTS: SnapshotRule = SnapshotRule { boundary_token: Some(BOUNDARY), interval_tokens: 128 };

type Content = [Option<u32>; PAGE_TOKENS];

/// A prompt that is being processed, or has been.
struct Running {
    salt: Salt,
    tokens: Vec<u32>,
    pages: Vec<u32>,
    position: usize,
    stops: Vec<usize>,
}

#[derive(Debug, Clone)]
enum Act {
    /// A prompt: so many tokens of an earlier one, then these.
    Begin {
        salt: u8,
        like: usize,
        common: usize,
        rest: Vec<u32>,
    },
    /// To the next stop, or to the end.
    Advance(usize),
    End(usize),
    Clear,
}

fn act() -> impl Strategy<Value = Act> {
    // Runs of one token, so that prompts have much in common and message starts are rare.
    let run = (0u32..3, 1usize..70).prop_map(|(token, count)| vec![token; count]);
    let run = prop_oneof![4 => run, 1 => Just(vec![BOUNDARY]), 1 => prop::collection::vec(0u32..4, 1..6)];
    let rest = prop::collection::vec(run, 1..4).prop_map(|runs| runs.concat());
    let begin = (0u8..2, 0usize..1000, 0usize..300, rest).prop_map(|(salt, like, common, rest)| Act::Begin {
        salt,
        like,
        common,
        rest,
    });
    prop_oneof![
        20 => begin,
        30 => (0usize..1000).prop_map(Act::Advance),
        20 => (0usize..1000).prop_map(Act::End),
        1 => Just(Act::Clear),
    ]
}

struct World {
    cache: PrefixCache,
    allocator: PageAllocator,
    device: Vec<Content>,
    host_pages: HashMap<u32, Content>,
    host_states: HashMap<u32, (Salt, Vec<u32>)>,
    running: Vec<Running>,
    /// The naive model: snapshots, the least recently used first.
    snapshots: Vec<(Salt, Vec<u32>)>,
    prompts: Vec<Vec<u32>>,
}

impl World {
    fn new(granules: usize, state_granules: usize) -> Self {
        Self {
            cache: PrefixCache::new(granules, state_granules),
            allocator: PageAllocator::new(PAGES),
            device: vec![[Some(99); PAGE_TOKENS]; PAGES],
            host_pages: HashMap::new(),
            host_states: HashMap::new(),
            running: Vec::new(),
            snapshots: Vec::new(),
            prompts: vec![Vec::new()],
        }
    }

    fn act(&mut self, act: Act) {
        match act {
            Act::Begin { salt, like, common, rest } => {
                let mut tokens = self.prompts[like % self.prompts.len()].clone();
                tokens.truncate(common);
                tokens.extend(rest);
                self.begin((salt > 0).then(|| "b".into()), tokens);
            }
            Act::Advance(index) if !self.running.is_empty() => self.advance(index % self.running.len()),
            Act::End(index) if !self.running.is_empty() => {
                let ended = self.running.swap_remove(index % self.running.len());
                self.allocator.release(&ended.pages);
            }
            Act::Clear => {
                self.cache.clear(&mut self.allocator);
                self.snapshots.clear();
            }
            Act::Advance(_) | Act::End(_) => {}
        }
        self.check();
    }

    fn begin(&mut self, salt: Salt, tokens: Vec<u32>) {
        let ends = CHUNKS.chunk_ends(&tokens);
        let found = self.cache.look_up(&salt, &tokens, &ends);
        self.check_lookup(&found, &salt, &tokens, &ends);
        let position = found.hit.map_or(0, |hit| hit.position);
        let count = tokens.len().div_ceil(PAGE_TOKENS);
        let to_be_had = self.allocator.free() + self.cache.reclaimable_pages(&self.allocator);
        let Some(Begun { pages, copies, state }) = self.cache.begin(found.hit, count, &mut self.allocator)
        else {
            assert!(to_be_had < count, "what fits without a hit has to fit with one");
            return;
        };
        assert_eq!(pages.len(), count);
        for copy in copies {
            match copy {
                PageCopy::Store { page, granule } => {
                    self.host_pages.insert(granule, self.device[page as usize]);
                }
                PageCopy::Load { granule, page } => self.device[page as usize] = self.host_pages[&granule],
                PageCopy::Within { from, to } => self.device[to as usize] = self.device[from as usize],
            }
        }
        if position > 0 {
            let used = (salt.clone(), tokens[..position].to_vec());
            assert!(state.iter().all(|granule| self.host_states[granule] == used) && !state.is_empty());
            let at = self.snapshots.iter().position(|one| *one == used);
            self.snapshots.remove(at.unwrap());
            // Where its last page is taken over, it is gone.
            if self.cache.contains(&salt, &tokens[..position]) {
                self.snapshots.push(used);
            }
        }
        for (at, token) in tokens[..position].iter().enumerate() {
            let content = &self.device[pages[at / PAGE_TOKENS] as usize];
            assert_eq!(content[at % PAGE_TOKENS], Some(*token), "position {at} of {position}");
        }
        for page in &pages[position / PAGE_TOKENS..] {
            assert_eq!(self.allocator.references(*page), 1, "a page that will be written is shared");
        }
        let stops = SNAPSHOTS.stops(&tokens, &ends, position, found.known_tokens);
        assert!(stops.iter().all(|stop| *stop > position && ends.contains(stop) && *stop < tokens.len()));
        self.prompts.push(tokens.clone());
        self.running.push(Running { salt, tokens, pages, position, stops });
    }

    fn check_lookup(&self, found: &Lookup, salt: &Salt, tokens: &[u32], ends: &[usize]) {
        let fits = |path: &Vec<u32>| {
            tokens.starts_with(path) && path.len() < tokens.len() && ends.contains(&path.len())
        };
        let own = || self.snapshots.iter().filter(|(other, _)| other == salt).map(|(_, path)| path);
        let deepest = own().filter(|path| fits(path)).map(Vec::len).max();
        assert_eq!(found.hit.map(|hit| hit.position), deepest);
        let common = |path: &Vec<u32>| path.iter().zip(tokens).take_while(|(a, b)| a == b).count();
        assert_eq!(found.known_tokens, own().map(common).max().unwrap_or(0));
        let miss = self.cache.explain(found, salt, tokens, ends);
        let possible = ends.iter().rev().find(|end| **end < tokens.len());
        assert_eq!(miss.is_none(), possible.copied() <= deepest.or(Some(0)));
    }

    fn advance(&mut self, index: usize) {
        let running = &mut self.running[index];
        let stop = running.stops.first().copied();
        let end = stop.unwrap_or(running.tokens.len());
        for at in running.position..end {
            let content = &mut self.device[running.pages[at / PAGE_TOKENS] as usize];
            content[at % PAGE_TOKENS] = Some(running.tokens[at]);
        }
        running.position = end;
        if stop.is_none() {
            // Generation, in the same page.
            if let Some(last) = running.pages.last().filter(|_| !end.is_multiple_of(PAGE_TOKENS)) {
                self.device[*last as usize][end % PAGE_TOKENS..].fill(Some(77));
            }
            return;
        }
        running.stops.remove(0);
        let (salt, path) = (running.salt.clone(), running.tokens[..end].to_vec());
        if self.cache.contains(&salt, &path) {
            return;
        }
        let Some(granules) = self.cache.take_state_granules(&mut self.allocator) else { return };
        for granule in &granules {
            self.host_states.insert(*granule, (salt.clone(), path.clone()));
        }
        let running = &self.running[index];
        self.cache.insert(&salt, &path, Table::Device(&running.pages), granules, &mut self.allocator);
        self.snapshots.push((salt, path));
    }

    fn check(&mut self) {
        self.cache.check();
        // What had to go is what was not used for longest.
        let left = self.cache.snapshots();
        let gone = self.snapshots.len() - left.len();
        assert!(left == self.snapshots[gone..], "an older one is left");
        self.snapshots = left;

        let whole: HashSet<(&Salt, &[u32])> = self
            .snapshots
            .iter()
            .flat_map(|(salt, path)| {
                path.chunks_exact(PAGE_TOKENS)
                    .enumerate()
                    .map(move |(page, _)| (salt, &path[..(page + 1) * PAGE_TOKENS]))
            })
            .collect();
        let partial =
            self.snapshots.iter().filter(|(_, path)| !path.len().is_multiple_of(PAGE_TOKENS)).count();
        let usage = self.cache.usage();
        let kept = usage.device_pages + usage.host_pages;
        assert!((whole.len()..=whole.len() + partial).contains(&kept), "{kept} pages for {}", whole.len());

        let held: HashSet<u32> = self.running.iter().flat_map(|one| one.pages.iter().copied()).collect();
        assert_eq!(self.allocator.used(), held.len() + self.cache.reclaimable_pages(&self.allocator));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(600))]

    #[test]
    fn the_cache_finds_what_a_list_of_snapshots_finds(
        acts in prop::collection::vec(act(), 1..300),
        granules in 0usize..30,
        state_granules in 1usize..4,
    ) {
        let mut world = World::new(granules, state_granules);
        for act in acts {
            world.act(act);
        }
        for ended in std::mem::take(&mut world.running) {
            world.allocator.release(&ended.pages);
        }
        let idle = world.cache.usage();
        prop_assert_eq!(world.allocator.used(), idle.device_pages);
        world.cache.clear(&mut world.allocator);
        prop_assert_eq!(world.allocator.free(), PAGES);
        let empty = CacheUsage { granules_total: granules, evictions: idle.evictions, ..CacheUsage::default() };
        prop_assert_eq!(world.cache.usage(), empty);
    }
}

fn miss(world: &World, salt: &Salt, tokens: &[u32]) -> Option<Miss> {
    let ends = CHUNKS.chunk_ends(tokens);
    world.cache.explain(&world.cache.look_up(salt, tokens, &ends), salt, tokens, &ends)
}

fn run(world: &mut World, salt: &Salt, tokens: &[u32]) {
    world.begin(salt.clone(), tokens.to_vec());
    let index = world.running.len() - 1;
    while world.running[index].position < tokens.len() {
        world.advance(index);
    }
    let ended = world.running.remove(index);
    world.allocator.release(&ended.pages);
    world.check();
}

#[test]
fn every_miss_has_its_reason() {
    let mut world = World::new(6, 2);
    let (a, b): (Salt, Salt) = (None, Some("b".into()));
    let text = |token: u32| [vec![0; 100], vec![token; 200]].concat();
    assert_eq!(miss(&world, &a, &[1; 30]), None, "nothing of it could be found");
    assert_eq!(miss(&world, &a, &text(1)), Some(Miss::Diverged { at: 0 }));
    run(&mut world, &a, &text(1));
    assert_eq!(miss(&world, &a, &text(1)), None);
    assert_eq!(miss(&world, &b, &text(1)), Some(Miss::OtherSalt));
    assert_eq!(miss(&world, &a, &text(2)), Some(Miss::NoSnapshot), "the first 64 tokens are known");
    assert_eq!(miss(&world, &a, &[vec![0; 30], vec![2; 90]].concat()), Some(Miss::Diverged { at: 30 }));
    // Takes the snapshot where the two part.
    run(&mut world, &a, &text(2));
    assert_eq!(miss(&world, &a, &[vec![0; 100], vec![0; 50]].concat()), Some(Miss::Diverged { at: 100 }));
    assert_eq!(miss(&world, &a, &text(1)), Some(Miss::Evicted));
}

#[test]
fn snapshots_are_taken_where_later_prompts_share() {
    let rule = SnapshotRule { boundary_token: Some(BOUNDARY), interval_tokens: 1000 };
    let chunks = ChunkRule { boundary_token: Some(BOUNDARY), interval_tokens: 1024 };
    let message = |tokens: usize| [vec![BOUNDARY], vec![1; tokens - 1]].concat();
    let chat = [message(500), message(70), message(70), message(70), message(90), message(10)].concat();
    let stops = |tokens: &[u32], from, known| rule.stops(tokens, &chunks.chunk_ends(tokens), from, known);
    assert_eq!(stops(&chat, 0, 0), [500, 710, 800]);
    assert_eq!(stops(&chat, 500, 645), [640, 710, 800], "and where it leaves what is known");
    assert_eq!(stops(&chat, 640, 640), [710, 800]);
    assert!(stops(&chat, 740, 740).is_empty(), "60 tokens are not worth one");
    assert_eq!(stops(&[1; 3000], 0, 0), [1024, 2048, 2944]);
    assert_eq!(stops(&[1; 3000], 0, 1500), [1024, 1472, 2048, 2944]);
    assert!(stops(&[1; 60], 0, 0).is_empty());
}
