//! The radix tree: which tokens lead where. Edges have any number of tokens; nodes are where a snapshot is or where
//! paths part.

use std::collections::BTreeMap;
use std::sync::Arc;

use qwill_device::batch::PAGE_TOKENS;

use super::pages::PageKey;

/// A node. Never given twice.
pub(crate) type NodeKey = u64;

/// Separates tenants: prompts with different salts never share anything.
pub(crate) type Salt = Option<Arc<str>>;

/// A stored state at its node's end.
#[derive(Debug)]
pub(crate) struct Snapshot {
    /// Where it is in the host store.
    pub(crate) granules: Vec<u32>,
    /// When it was made or hit last.
    pub(crate) used: u64,
    /// Of salt and path, for remembering that it was here.
    pub(crate) path_hash: u64,
}

#[derive(Debug, Default)]
pub(crate) struct Node {
    /// `None` for the root of a salt.
    pub(crate) parent: Option<NodeKey>,
    /// Position of the edge's first token: the parent's end.
    pub(crate) start: usize,
    /// Tokens between the parent's end and this node's.
    pub(crate) edge: Vec<u32>,
    /// Pages from the one with position `start` on: up to `end` where there is a snapshot, else the whole ones only.
    /// Where `start` is within a page, the parent's snapshot has a page of its own for the tokens before it.
    pub(crate) pages: Vec<PageKey>,
    /// By the first token of their edges.
    pub(crate) children: BTreeMap<u32, NodeKey>,
    pub(crate) snapshot: Option<Snapshot>,
    /// When a hit or a new snapshot last passed here.
    pub(crate) touched: u64,
}

impl Node {
    pub(crate) fn end(&self) -> usize {
        self.start + self.edge.len()
    }

    /// Whether a snapshot here needs a page that is not full.
    pub(crate) fn ends_within_a_page(&self) -> bool {
        !self.end().is_multiple_of(PAGE_TOKENS)
    }
}

/// Where tokens lead from a root.
#[derive(Debug)]
pub(crate) struct Walk {
    /// Nodes whose whole paths match, from the root.
    pub(crate) path: Vec<NodeKey>,
    /// Tokens that match.
    pub(crate) matched: usize,
    /// The node in whose edge the match ends.
    pub(crate) inside: Option<NodeKey>,
}

/// Nodes by salt and tokens.
#[derive(Debug, Default)]
pub(crate) struct Tree {
    roots: BTreeMap<Salt, NodeKey>,
    nodes: BTreeMap<NodeKey, Node>,
    next_key: NodeKey,
}

impl Tree {
    pub(crate) fn root(&self, salt: &Salt) -> Option<NodeKey> {
        self.roots.get(salt).copied()
    }

    /// The root of a salt, made where there is none.
    pub(crate) fn make_root(&mut self, salt: &Salt) -> NodeKey {
        self.root(salt).unwrap_or_else(|| {
            let root = self.add(Node::default());
            self.roots.insert(salt.clone(), root);
            root
        })
    }

    pub(crate) fn salts(&self) -> impl Iterator<Item = (&Salt, NodeKey)> {
        self.roots.iter().map(|(salt, root)| (salt, *root))
    }

    /// A node that has not been removed.
    pub(crate) fn node(&self, key: NodeKey) -> &Node {
        &self.nodes[&key]
    }

    /// See [`Tree::node`].
    pub(crate) fn node_mut(&mut self, key: NodeKey) -> &mut Node {
        self.nodes.get_mut(&key).expect("keys of removed nodes are not kept")
    }

    pub(crate) fn nodes(&self) -> impl Iterator<Item = (NodeKey, &Node)> {
        self.nodes.iter().map(|(key, node)| (*key, node))
    }

    /// Adds a node below its parent.
    pub(crate) fn add(&mut self, node: Node) -> NodeKey {
        let key = self.next_key;
        self.next_key += 1;
        if let (Some(parent), Some(first)) = (node.parent, node.edge.first()) {
            let first = *first;
            self.node_mut(parent).children.insert(first, key);
        }
        self.nodes.insert(key, node);
        key
    }

    /// Takes a node without children out.
    pub(crate) fn remove(&mut self, key: NodeKey) -> Option<Node> {
        let node = self.nodes.remove(&key)?;
        match (node.parent, node.edge.first()) {
            (Some(parent), Some(first)) => {
                self.node_mut(parent).children.remove(first);
            }
            _ => self.roots.retain(|_, root| *root != key),
        }
        Some(node)
    }

    pub(crate) fn walk(&self, root: NodeKey, tokens: &[u32]) -> Walk {
        let (mut path, mut last, mut matched) = (vec![root], root, 0);
        loop {
            let child = tokens.get(matched).and_then(|token| self.node(last).children.get(token));
            let Some(child) = child.copied() else { return Walk { path, matched, inside: None } };
            let edge = &self.node(child).edge;
            let common = edge.iter().zip(&tokens[matched..]).take_while(|(a, b)| a == b).count();
            matched += common;
            if common < edge.len() {
                return Walk { path, matched, inside: Some(child) };
            }
            path.push(child);
            last = child;
        }
    }

    /// Cuts a node's edge at a position within it. Returns the new, upper node; the lower one keeps its key.
    pub(crate) fn split(&mut self, key: NodeKey, at: usize) -> NodeKey {
        let lower = self.node_mut(key);
        let (parent, start, touched) = (lower.parent, lower.start, lower.touched);
        let edge = lower.edge.drain(..at - start).collect();
        let whole_pages = at / PAGE_TOKENS - start / PAGE_TOKENS;
        let pages = lower.pages.drain(..whole_pages).collect();
        lower.start = at;
        let below = lower.edge[0];
        let children = BTreeMap::from([(below, key)]);
        let upper = self.add(Node { parent, start, edge, pages, children, snapshot: None, touched });
        self.node_mut(key).parent = Some(upper);
        upper
    }

    /// A node and those above it, up to the root.
    pub(crate) fn upwards(&self, key: NodeKey) -> impl Iterator<Item = NodeKey> {
        std::iter::successors(Some(key), |key| self.node(*key).parent)
    }

    /// The pages of all tokens up to a node's end, in order; the node has a snapshot.
    pub(crate) fn page_table(&self, key: NodeKey) -> Vec<PageKey> {
        let path: Vec<NodeKey> = self.upwards(key).collect();
        let mut table = Vec::new();
        for node in path.iter().rev().map(|key| self.node(*key)) {
            // A page that an upper snapshot has for itself is not part of the longer path.
            table.truncate(node.start / PAGE_TOKENS);
            table.extend_from_slice(&node.pages);
        }
        table
    }
}
