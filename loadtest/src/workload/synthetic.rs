//! Requests drawn from distributions: random lengths, and prompts that share prefixes as the branches of a
//! tree do. Each request is a function of the seed and its number, so nothing is stored. Makes no text.

use crate::{
    limits,
    random::{Purpose, Rng},
    workload::{Ask, conversation, dist::Tokens, scale::Block, unshared_id},
};

/// Tokens of a block: vLLM's default KV block. It decides only where the reference caches cut prompts.
pub const BLOCK_TOKENS: u32 = 16;

/// Marks the ids of shared blocks, which no trace has.
const SHARED: u64 = 1 << 62;

/// Requests of drawn lengths, with or without prefixes that they share.
#[derive(Debug)]
pub struct Synthetic {
    /// Decides every length and the choice of prefix, with the request's number.
    pub seed: u64,
    /// Tokens of the part of a prompt that is the request's own.
    pub input: Tokens,
    /// Tokens to generate, drawn for each request.
    pub output: Tokens,
    /// What comes before it.
    pub prefix: Option<PrefixTree>,
}

/// Prefixes shared by groups of requests. The groups are the leaves of a tree of `depth` levels: groups of
/// one branch share the levels above it, as agents share a system prompt, then tools, then a document.
#[derive(Debug)]
pub struct PrefixTree {
    /// Tokens of each level; they sum to the prefix.
    level_tokens: Vec<u32>,
    /// Children of each inner node.
    branching: usize,
    /// Cumulative popularity of the groups, up to 1.
    cumulative: Vec<f64>,
}

/// Why there can be no such tree of prefixes.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum PrefixError {
    /// There is no group, or too many.
    #[error("--prefix-groups must be 1 to {most}", most = limits::PREFIX_GROUPS_MAX)]
    Groups,
    /// There is no level, or too many.
    #[error("--prefix-depth must be 1 to {most}", most = limits::PREFIX_DEPTH_MAX)]
    Depth,
    /// A level would be without a token.
    #[error("--prefix-len {tokens} is less than a token for each of {depth} levels")]
    Length {
        /// Tokens of a whole prefix.
        tokens: u32,
        /// Levels of the tree.
        depth: usize,
    },
}

// === impl Synthetic ===

impl Synthetic {
    /// Makes request number `row`: its shared prefix, if any, and blocks of its own.
    pub fn ask(&self, row: usize) -> Ask {
        self.make(row, true, |i| unshared_id(row, i))
    }

    /// What is new in the turn of request `row`: in a conversation's first, the shared prefix too.
    pub fn turn(&self, row: usize) -> Ask {
        self.make(row, conversation::split(row).1 == 0, |i| conversation::block_id(row, false, i))
    }

    fn make(&self, row: usize, with_prefix: bool, id: impl Fn(u32) -> u64) -> Ask {
        let draw = |purpose| Rng::at(self.seed, purpose, row as u64);
        let mut blocks = Vec::new();
        if let Some(prefix) = self.prefix.as_ref().filter(|_| with_prefix) {
            prefix.append(prefix.group(draw(Purpose::Group).unit()), &mut blocks);
        }
        append(self.input.draw(&mut draw(Purpose::PromptLength)), id, &mut blocks);
        let output_tokens = self.output.draw(&mut draw(Purpose::OutputLength)).into();
        Ask { blocks, output_tokens, said: None, begins_history: false }
    }
}

/// Cuts `tokens` into blocks.
pub fn append(tokens: u32, id: impl Fn(u32) -> u64, blocks: &mut Vec<Block>) {
    for i in 0..tokens.div_ceil(BLOCK_TOKENS) {
        blocks.push(Block { id: id(i), tokens: (tokens - i * BLOCK_TOKENS).min(BLOCK_TOKENS) });
    }
}

// === impl PrefixTree ===

impl PrefixTree {
    /// `groups` prefixes of `tokens`, in a tree of `depth` levels; the k-th most popular group is asked for
    /// with probability proportional to 1/k^zipf (0: all alike).
    pub fn new(groups: usize, tokens: u32, depth: usize, zipf: f64) -> Result<Self, PrefixError> {
        if groups == 0 || groups > limits::PREFIX_GROUPS_MAX {
            return Err(PrefixError::Groups);
        }
        if depth == 0 || depth > limits::PREFIX_DEPTH_MAX {
            return Err(PrefixError::Depth);
        }
        if (tokens as usize) < depth {
            return Err(PrefixError::Length { tokens, depth });
        }
        let levels = depth as u32;
        let level_tokens = (0..levels).map(|l| tokens * (l + 1) / levels - tokens * l / levels).collect();
        let branching = (1..=groups).find(|b| b.saturating_pow(levels) >= groups).unwrap_or(groups);
        let weight = |k: usize| (k as f64).powf(-zipf);
        let total: f64 = (1..=groups).map(weight).sum();
        let mut sum = 0.0;
        let cumulative = (1..=groups)
            .map(|k| {
                sum += weight(k) / total;
                sum
            })
            .collect();
        Ok(Self { level_tokens, branching, cumulative })
    }

    /// The group that a number in [0, 1) chooses.
    fn group(&self, unit: f64) -> usize {
        self.cumulative.partition_point(|&sum| sum <= unit).min(self.cumulative.len() - 1)
    }

    fn append(&self, group: usize, blocks: &mut Vec<Block>) {
        let depth = self.level_tokens.len();
        for (level, &tokens) in self.level_tokens.iter().enumerate() {
            // With one level there is one node a group; above the last level, one a branch.
            let node = group / self.branching.saturating_pow((depth - 1 - level) as u32);
            let base = SHARED | (level as u64) << 56 | (node as u64) << 24;
            append(tokens, |i| base | u64::from(i), blocks);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{HashMap, HashSet};

    use super::*;
    use crate::workload::is_unshared;

    fn synthetic(seed: u64, prefix: Option<PrefixTree>) -> Synthetic {
        Synthetic { seed, input: "uniform(1,100)".parse().unwrap(), output: "8".parse().unwrap(), prefix }
    }

    #[test]
    fn random_requests_share_nothing_and_depend_on_seed_and_number() {
        let (a, b) = (synthetic(1, None), synthetic(2, None));
        let mut ids = HashSet::new();
        for row in 0..200 {
            let ask = a.ask(row);
            assert_eq!(ask.blocks, a.ask(row).blocks);
            assert!((1..=100).contains(&ask.prompt_tokens()));
            assert_eq!(ask.output_tokens, 8);
            assert!(ask.blocks.iter().all(|block| is_unshared(block.id) && ids.insert(block.id)));
        }
        let lengths = |w: &Synthetic| (0..20).map(|row| w.ask(row).prompt_tokens()).collect::<Vec<_>>();
        assert_ne!(lengths(&a), lengths(&b));
    }

    /// Leading blocks of `a` and `b` that are equal, in tokens.
    fn common(a: &Ask, b: &Ask) -> u32 {
        a.blocks.iter().zip(&b.blocks).take_while(|(a, b)| a == b).map(|(a, _)| a.tokens).sum()
    }

    #[test]
    fn groups_share_as_branches_of_a_tree() {
        // 9 groups in two levels: three branches of three.
        let workload = synthetic(1, Some(PrefixTree::new(9, 100, 2, 0.0).unwrap()));
        let group = |row: usize| {
            let unit = Rng::at(1, Purpose::Group, row as u64).unit();
            workload.prefix.as_ref().unwrap().group(unit)
        };
        for a in 0..60 {
            for b in 0..a {
                let want = match (group(a), group(b)) {
                    (x, y) if x == y => 100,
                    (x, y) if x / 3 == y / 3 => 50,
                    _ => 0,
                };
                assert_eq!(common(&workload.ask(a), &workload.ask(b)), want);
            }
        }
    }

    #[test]
    fn popularity_follows_zipf() {
        let tree = PrefixTree::new(4, 16, 1, 1.0).unwrap();
        let mut counts: HashMap<usize, f64> = HashMap::new();
        for row in 0..50_000 {
            *counts.entry(tree.group(Rng::at(3, Purpose::Group, row).unit())).or_insert(0.0) +=
                1.0 / 50_000.0;
        }
        // 1 : 1/2 : 1/3 : 1/4
        for (group, want) in [(0, 0.48), (1, 0.24), (2, 0.16), (3, 0.12)] {
            assert!((counts[&group] - want).abs() < 0.01, "{counts:?}");
        }
    }

    #[test]
    fn bad_trees_are_refused() {
        for (groups, tokens, depth) in [(0, 10, 1), (5, 10, 0), (5, 1, 2), (usize::MAX, 10, 1), (5, 999, 99)]
        {
            assert!(PrefixTree::new(groups, tokens, depth, 1.0).is_err());
        }
        let deep = PrefixTree::new(1, 10, 3, 0.0).unwrap();
        assert_eq!(deep.level_tokens, [3, 3, 4]);
    }
}
