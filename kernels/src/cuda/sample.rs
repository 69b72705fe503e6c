//! Launches `sample.cu`: from logits to a token id, and to what a log-probability is made of.

use super::constants::sample;
use super::{Argument, Kernel, Launch, Slice};

/// A row is cut into parts until there are about so many blocks: two for each multiprocessor of a large GPU.
const BLOCKS: usize = 264;
/// With more, each thread of one row would have less than a packet.
const PARTS: usize = 64;
/// Ids that are worth a block.
const PART_IDS: usize = 2048;
/// Words that a row's [`Parameters`] take on the device; seed and position take two each.
pub const PARAMETER_WORDS: usize = sample::PARAMETER_WORDS;

/// How a row's token is chosen.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Parameters {
    /// Divides the logits; below 1e-5, the most likely token.
    pub temperature: f32,
    /// Keeps the most likely tokens whose probabilities first reach this sum; 1 keeps all.
    pub top_p: f32,
    /// Keeps tokens of at least this share of the likeliest one's probability; 0 keeps all.
    pub min_p: f32,
    /// Keeps this many of the most likely tokens; 0 keeps all.
    pub top_k: u32,
    /// Makes the choice at each position repeatable.
    pub seed: u64,
    /// The token's absolute position.
    pub position: u64,
}

impl Parameters {
    /// As the kernel reads them.
    pub fn words(&self) -> [u32; PARAMETER_WORDS] {
        let Self { temperature, top_p, min_p, top_k, seed, position } = *self;
        let [t, p, m] = [temperature, top_p, min_p].map(f32::to_bits);
        [t, p, m, top_k, seed as u32, (seed >> 32) as u32, position as u32, (position >> 32) as u32]
    }
}

/// Blocks that share a row. No bit depends on it: all sums are of whole numbers.
fn parts(rows: usize, vocabulary: usize) -> usize {
    (BLOCKS / rows.max(1)).clamp(1, PARTS).min(vocabulary.div_ceil(PART_IDS))
}

/// Words of memory that [`launch`] and [`score`] need beside their results; never fewer for more rows.
pub fn work_words(rows: usize, vocabulary: usize) -> usize {
    let parts = (rows * PARTS.min(vocabulary.div_ceil(PART_IDS))).min(rows + BLOCKS);
    rows * sample::JOINT_WORDS + parts * sample::PART_WORDS
}

/// A kernel that takes the parts of all rows.
fn step(kernel: Kernel, grid: [usize; 2], shared_bytes: usize, arguments: Vec<Argument>) -> Launch {
    let grid = [grid[0] as u32, grid[1] as u32, 1];
    Launch {
        kernel,
        grid,
        cluster: 1,
        threads: sample::THREADS as u32,
        shared_bytes: shared_bytes as u32,
        arguments,
    }
}

/// Chooses a token for every row of `logits` `[rows, vocabulary]`; `logprobs` are the logarithms of the
/// chosen ones' probabilities in the logits given, at temperature 1. `parameters` are
/// [`Parameters::words`], one row's after another's; `work` has [`work_words`]. Nothing if there are no rows.
///
/// # Panics
/// If shapes disagree.
pub fn launch(
    logits: Slice<f32>,
    vocabulary: usize,
    parameters: Slice<u32>,
    work: Slice<u32>,
    tokens: Slice<u32>,
    logprobs: Slice<f32>,
) -> Vec<Launch> {
    let rows = tokens.len;
    assert!(
        vocabulary > 0
            && logits.len == rows * vocabulary
            && parameters.len == rows * PARAMETER_WORDS
            && work.len >= work_words(rows, vocabulary)
            && logprobs.len == rows,
        "sample: shapes disagree"
    );
    if rows == 0 {
        return Vec::new();
    }
    let pointers = [logits.into(), parameters.into(), work.into(), tokens.into(), logprobs.into()];
    both(vocabulary, rows, [logits.into(), work.into()], (Kernel::sample, pointers))
}

/// The launch that finds the largest logits, and the one that does the rest.
fn both(
    vocabulary: usize,
    rows: usize,
    first: [Argument; 2],
    (kernel, second): (Kernel, [Argument; 5]),
) -> Vec<Launch> {
    let parts = parts(rows, vocabulary);
    let chunks = 1 << (sample::CHUNKS / parts).ilog2();
    let with =
        |pointers: &[Argument], chunks: usize| [pointers, &[vocabulary.into(), chunks.into()]].concat();
    vec![
        step(Kernel::sample_peaks, [parts, rows], sample::PEAKS_BYTES, with(&first, chunks)),
        step(kernel, [parts, rows], sample::FINDER_BYTES, with(&second, parts * chunks)),
    ]
}

/// Of the likeliest tokens a score has so many at most.
pub const TOP: usize = sample::TOP;
/// Words of a score.
pub const SCORE_WORDS: usize = sample::SCORE_WORDS;
/// Of a row whose score is not wanted.
pub const NOT_WANTED: u32 = sample::NOT_WANTED;

/// What the model thought of a token, as far as its row of logits goes: what log-probabilities are made of.
#[derive(Debug, Clone, PartialEq)]
pub struct Score {
    /// The token's own logit in the row.
    pub logit: f32,
    /// The row's largest logit, to which `total` is relative.
    pub maximum: f32,
    /// The sum of `e^(logit - maximum)` over the row, each in units of 2^-40 and rounded down.
    pub total: u64,
    /// Logits that are at least the token's.
    pub rank: u32,
    /// The likeliest ids and their logits, the likeliest first, among equals the lower id.
    pub top: Vec<(u32, f32)>,
}

impl Score {
    /// A row's, as the kernel left it, with the `top` likeliest that were wanted; at most as many as there
    /// are ids.
    ///
    /// # Panics
    /// If there are not [`SCORE_WORDS`].
    pub fn of(words: &[u32], top: usize) -> Self {
        assert_eq!(words.len(), SCORE_WORDS, "score: the words of one row");
        let (ids, logits) = words[6..].split_at(TOP);
        let likeliest = ids.iter().copied().zip(logits.iter().map(|logit| f32::from_bits(*logit)));
        Self {
            logit: f32::from_bits(words[0]),
            maximum: f32::from_bits(words[1]),
            total: u64::from(words[2]) | u64::from(words[3]) << 32,
            rank: words[4],
            top: likeliest.take(top).collect(),
        }
    }
}

/// Scores the `tokens` that were drawn of each row of `logits` `[rows, vocabulary]`, which nothing has
/// changed since the model gave them: `scores` `[rows, SCORE_WORDS]`, for [`Score::of`]. `wanted` says of
/// each row how many of the likeliest, at most [`TOP`] and the vocabulary, or [`NOT_WANTED`], where nothing
/// is written. `work` has [`work_words`]. Nothing if there are no rows.
///
/// # Panics
/// If shapes disagree.
pub fn score(
    logits: Slice<f32>,
    vocabulary: usize,
    wanted: Slice<u32>,
    work: Slice<u32>,
    tokens: Slice<u32>,
    scores: Slice<u32>,
) -> Vec<Launch> {
    let rows = tokens.len;
    assert!(
        vocabulary > 0
            && logits.len == rows * vocabulary
            && wanted.len == rows
            && work.len >= work_words(rows, vocabulary)
            && scores.len == rows * SCORE_WORDS,
        "score: shapes disagree"
    );
    if rows == 0 {
        return Vec::new();
    }
    let pointers = [logits.into(), wanted.into(), tokens.into(), work.into(), scores.into()];
    both(vocabulary, rows, [logits.into(), work.into()], (Kernel::score, pointers))
}
