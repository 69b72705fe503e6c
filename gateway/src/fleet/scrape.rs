//! What a worker's own metrics say of its cache: how its blocks are cut and how many there are; and whether
//! it sleeps. Engines name the same thing differently, and rename it; the table of names is here. Asking is
//! `probe.rs`'s business.

use std::collections::BTreeSet;

/// A worker's cache, as far as its metrics say.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CacheConfig {
    /// Tokens in a block.
    pub block_size: Option<u32>,
    /// Blocks in all; several engines' are added up, unless one of them is meant.
    pub blocks: Option<u64>,
}

impl CacheConfig {
    /// Tokens that all blocks hold; `None` where either number is not known.
    pub fn tokens(&self) -> Option<u64> {
        Some(u64::from(self.block_size?) * self.blocks?)
    }
}

/// Series whose labels describe the cache: `vllm:cache_config_info`, `sglang:cache_config_info`,
/// `keyway_worker_cache_config_info`, the load tester's mock.
const CONFIG_SUFFIX: &str = "cache_config_info";
/// vLLM's own, where each data-parallel engine's line has the blocks of all of them, as their front end adds
/// them up. Beside another one it is a copy of that under vLLM's name (keyway-worker).
const ADDED_UP: &str = "vllm:cache_config_info";
/// Labels for the tokens of a block: vLLM and keyway-worker, SGLang.
const BLOCK_SIZE: [&str; 2] = ["block_size", "page_size"];
/// Labels for the number of blocks: vLLM, keyway-worker, SGLang.
const BLOCKS: [&str; 3] = ["num_gpu_blocks", "num_blocks", "num_pages"];
/// A gauge of tokens in all, where SGLang has no such labels (older releases).
const MAX_TOKENS: &str = "sglang:max_total_num_tokens";

/// Labels for the data-parallel rank that a line is of: vLLM, SGLang.
const RANK: [&str; 2] = ["engine", "dp_rank"];

/// What vLLM has a line of for each of its data-parallel engines behind an address; the last of them only
/// once it has had a request, where several API servers share a page.
const OF_EACH_ENGINE: [&str; 3] =
    ["vllm:cache_config_info", "vllm:engine_sleep_state", "vllm:num_requests_running"];

/// The data-parallel ranks whose figures a page of vLLM's has, in ascending order; empty where it names none.
pub fn ranks(page: &str) -> Vec<u32> {
    let cut = page.lines().filter_map(|line| Some(line.split_at(line.find('{')?)));
    let own = cut.filter(|(name, _)| OF_EACH_ENGINE.contains(name));
    let ranks: BTreeSet<u32> = own.filter_map(|(_, labels)| label(labels, RANK[0])?.parse().ok()).collect();
    ranks.into_iter().collect()
}

/// The label of an engine's lines on a page of all engines behind its address. They are counted from 0 in
/// requests, but by their ranks in the whole fleet on the page of a node that has some of them.
pub fn rank_on(page: &str, rank: u32) -> u32 {
    ranks(page).get(rank as usize).copied().unwrap_or(rank)
}

/// Reads a page in Prometheus' text format. Several caches (data-parallel ranks) are taken as one of their
/// sum, unless one of them is meant.
pub fn cache_config(page: &str, rank: Option<u32>) -> CacheConfig {
    let mut found = CacheConfig::default();
    let (mut tokens, mut added_up) = (None, 0);
    let has_own = |line: &str| {
        line.split(['{', ' ']).next().is_some_and(|name| name.ends_with(CONFIG_SUFFIX) && name != ADDED_UP)
    };
    let copied = page.lines().any(has_own);
    for line in page.lines().filter(|line| !line.starts_with('#')) {
        let (name, rest) = line.split_at(line.find(['{', ' ']).unwrap_or(line.len()));
        let of = RANK.iter().find_map(|name| label(rest, name)?.parse::<u32>().ok());
        added_up += u64::from(name == ADDED_UP && !copied);
        let of_another = rank.is_some() && of.is_some() && of != rank;
        if of_another || (copied && name == ADDED_UP) {
            continue;
        }
        if name.ends_with(CONFIG_SUFFIX) {
            let label = |names: &[&str]| names.iter().find_map(|name| label(rest, name)?.parse::<u64>().ok());
            found.block_size =
                label(&BLOCK_SIZE).and_then(|size| u32::try_from(size).ok()).filter(|size| *size > 0);
            if let Some(blocks) = label(&BLOCKS).filter(|blocks| *blocks > 0) {
                found.blocks = Some(found.blocks.unwrap_or(0) + blocks);
            }
        } else if name == MAX_TOKENS {
            let value = rest.rsplit(' ').next().and_then(|value| value.parse::<f64>().ok());
            tokens = value.filter(|value| *value >= 1.0).map(|value| value as u64).or(tokens);
        }
    }
    found.blocks = found.blocks.map(|blocks| blocks / added_up.max(1));
    if let (None, Some(tokens)) = (found.blocks, tokens) {
        // SGLang's pages are single tokens unless it says otherwise.
        found.block_size = found.block_size.or(Some(1));
        found.blocks = found.block_size.map(|size| tokens / u64::from(size));
    }
    found
}

/// Counters of prompt tokens found in the cache: vLLM's, SGLang's.
const HITS: [&str; 2] = ["vllm:prefix_cache_hits_total", "sglang:cached_tokens_total"];

/// Prompt tokens that an engine has found in its cache since it began, by its own counter.
pub fn cache_hits(page: &str, rank: Option<u32>) -> Option<u64> {
    let mut hits = None;
    for line in page.lines() {
        let Some((name, rest)) = line.split_once('{').filter(|(name, _)| HITS.contains(name)) else {
            continue;
        };
        let of =
            RANK.iter().find_map(|label_name| label(&line[name.len()..], label_name)?.parse::<u32>().ok());
        let value = rest.rsplit(' ').next().and_then(|value| value.parse::<f64>().ok());
        if let (true, Some(value)) = (rank.is_none() || of.is_none() || of == rank, value) {
            *hits.get_or_insert(0) += value.max(0.0) as u64;
        }
    }
    hits
}

/// What an engine says of itself, beside its health, which is good all the while.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sleep {
    /// It computes; of several engines, at least one does.
    Awake,
    /// It takes requests and computes nothing until it wakes (vLLM's level 0).
    Paused,
    /// The same, and what it had cached is gone (levels 1 and 2).
    Asleep,
}

/// The gauge of an engine's sleep, one line for each state (vLLM).
const SLEEP: &str = "vllm:engine_sleep_state";

/// Whether an engine sleeps; of several, whether all do.
pub fn sleep(page: &str, rank: Option<u32>) -> Option<Sleep> {
    let mut states = page.lines().filter_map(|line| {
        let labels = line.strip_prefix(SLEEP)?;
        let of = RANK.iter().find_map(|name| label(labels, name)?.parse::<u32>().ok());
        let is = labels.rsplit(' ').next()?.parse::<f64>().ok()? > 0.0;
        (rank.is_none() || of.is_none() || of == rank).then_some((label(labels, "sleep_state")?, is))
    });
    let first = states.next()?;
    let mut asleep = Sleep::Paused;
    for (state, _) in [first].into_iter().chain(states).filter(|(_, is)| *is) {
        match state {
            "awake" => return Some(Sleep::Awake),
            _ => asleep = Sleep::Asleep,
        }
    }
    Some(asleep)
}

/// The value of a label in `{a="1",b="2"} 3`; escapes do not occur in numbers.
fn label<'a>(labels: &'a str, name: &str) -> Option<&'a str> {
    let mut from = 0;
    while let Some(at) = labels[from..].find(name).map(|at| from + at) {
        let before = labels[..at].chars().next_back();
        let after = labels[at + name.len()..].strip_prefix("=\"");
        if let (Some('{' | ','), Some(value)) = (before, after) {
            return value.split('"').next();
        }
        from = at + name.len();
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(page: &str) -> (Option<u32>, Option<u64>) {
        let config = cache_config(page, None);
        (config.block_size, config.blocks)
    }

    #[test]
    fn each_engine_s_names_are_known() {
        let vllm = "# HELP vllm:cache_config_info x\nvllm:cache_config_info{block_size=\"16\",cache_dtype=\"auto\",\
                    engine=\"0\",gpu_memory_utilization=\"0.9\",num_gpu_blocks=\"27898\",num_gpu_blocks_override=\"None\"} 1.0\n";
        assert_eq!(config(vllm), (Some(16), Some(27_898)));
        assert_eq!(
            config("sglang:cache_config_info{page_size=\"64\",num_pages=\"100\"} 1"),
            (Some(64), Some(100))
        );
        assert_eq!(
            config("keyway_worker_cache_config_info{block_size=\"16\",num_blocks=\"512\"} 1"),
            (Some(16), Some(512))
        );
        let older = "sglang:max_total_num_tokens{model_name=\"m\"} 123456.0";
        assert_eq!(cache_config(older, None).tokens(), Some(123_456));
    }

    #[test]
    fn ranks_add_up_unless_one_is_meant() {
        let two = "sglang:cache_config_info{page_size=\"16\",dp_rank=\"0\",num_pages=\"10\"} 1\n\
                   sglang:cache_config_info{page_size=\"16\",dp_rank=\"1\",num_pages=\"12\"} 1\n";
        assert_eq!(config(two), (Some(16), Some(22)));
        assert_eq!(cache_config(two, Some(1)).blocks, Some(12));
        // vLLM 0.32 with two engines of 160 blocks.
        let of_all = "vllm:cache_config_info{block_size=\"32\",engine=\"0\",num_gpu_blocks=\"320\"} 1\n\
                      vllm:cache_config_info{block_size=\"32\",engine=\"1\",num_gpu_blocks=\"320\"} 1\n";
        assert_eq!(config(of_all), (Some(32), Some(320)));
        assert_eq!(cache_config(of_all, Some(1)).blocks, Some(160));
        // A copy under vLLM's name counts for nothing.
        let both = |engine: &str, blocks: u32| {
            format!(
                "keyway_worker_cache_config_info{{block_size=\"16\",engine=\"{engine}\",num_blocks=\"{blocks}\"}} 1\n\
                 vllm:cache_config_info{{block_size=\"16\",engine=\"{engine}\",num_gpu_blocks=\"{blocks}\"}} 1\n"
            )
        };
        let two = both("0", 10) + &both("1", 12);
        assert_eq!((config(&both("0", 10)), config(&two)), ((Some(16), Some(10)), (Some(16), Some(22))));
        assert_eq!(cache_config(&two, Some(1)).blocks, Some(12));
        let unnamed = "keyway_worker_cache_config_info{block_size=\"16\",num_blocks=\"9\"} 1";
        assert_eq!(cache_config(unnamed, Some(1)).blocks, Some(9));
    }

    #[test]
    fn engines_behind_an_address_are_counted_and_found() {
        let line =
            |rank: u32| format!("vllm:num_requests_running{{engine=\"{rank}\",model_name=\"m\"}} 3.0\n");
        let page = |ranks: &[u32]| ranks.iter().map(|rank| line(*rank)).collect::<String>();
        assert_eq!(ranks(&page(&[1, 0])), [0, 1]);
        // A node of a fleet with the third and fourth of its engines.
        let node = page(&[2, 3]);
        assert_eq!((ranks(&node).len(), rank_on(&node, 0), rank_on(&node, 1)), (2, 2, 3));
        assert_eq!((rank_on(&page(&[0, 1]), 1), rank_on("", 1)), (1, 1));
        // vLLM 0.32 with two API servers, before the first request.
        let idle = "vllm:engine_sleep_state{engine=\"0\",model_name=\"m\",sleep_state=\"awake\"} 1.0\n\
                    vllm:engine_sleep_state{engine=\"1\",model_name=\"m\",sleep_state=\"awake\"} 1.0\n";
        assert_eq!(ranks(idle), [0, 1]);
        for none in ["", "vllm:num_requests_running 3", "# vllm:num_requests_running{engine=\"0\"}"] {
            assert!(ranks(none).is_empty(), "{none}");
        }
        assert!(ranks("vllm:num_requests_running_x{engine=\"0\"} 3").is_empty());
    }

    #[test]
    fn hits_are_counted_over_ranks_and_sources() {
        let page = "# TYPE vllm:prefix_cache_hits_total counter\n\
                    vllm:prefix_cache_hits_total{engine=\"0\",model_name=\"m\"} 480.0\n\
                    vllm:prefix_cache_hits_total{engine=\"1\",model_name=\"m\"} 1.6e3\n\
                    vllm:prefix_cache_hits_created{engine=\"0\"} 1.7e9\n";
        assert_eq!((cache_hits(page, None), cache_hits(page, Some(1))), (Some(2_080), Some(1_600)));
        assert_eq!(cache_hits("sglang:cached_tokens_total{cache_source=\"total\"} 7", None), Some(7));
        assert_eq!(cache_hits("vllm:prefix_cache_queries_total{engine=\"0\"} 7", None), None);
    }

    #[test]
    fn an_engine_says_whether_it_sleeps() {
        let page = |engine: u32, [awake, offloaded, discarded]: [u8; 3]| {
            let line = |state: &str, is: u8| {
                format!(
                    "vllm:engine_sleep_state{{engine=\"{engine}\",model_name=\"m\",sleep_state=\"{state}\"}} {is}.0\n"
                )
            };
            [line("awake", awake), line("weights_offloaded", offloaded), line("discard_all", discarded)]
                .concat()
        };
        for (states, want) in [
            ([1, 0, 0], Sleep::Awake),
            ([0, 0, 0], Sleep::Paused),
            ([0, 1, 0], Sleep::Asleep),
            ([0, 0, 1], Sleep::Asleep),
        ] {
            assert_eq!(sleep(&page(0, states), None), Some(want), "{states:?}");
            // Of several engines one computes.
            let two = page(0, states) + &page(1, [1, 0, 0]);
            assert_eq!(
                (sleep(&two, None), sleep(&two, Some(0))),
                (Some(Sleep::Awake), Some(want)),
                "{states:?}"
            );
        }
        let help = "# HELP vllm:engine_sleep_state Engine sleep state; awake = 0 means engine is sleeping\n";
        for nothing in ["", help, "sglang:num_running_reqs 0"] {
            assert_eq!(sleep(nothing, None), None);
        }
    }

    #[test]
    fn what_is_not_said_is_not_made_up() {
        assert_eq!(config(""), (None, None));
        assert_eq!(
            config("vllm:cache_config_info{block_size=\"None\",num_gpu_blocks=\"0\"} 1"),
            (None, None)
        );
        assert_eq!(config("other{block_size=\"16\"} 1\ncache_config_info"), (None, None));
    }
}
