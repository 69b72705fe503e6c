//! Launches `sample.cu`: from logits to a token id.

use super::{Launch, Slice};

const THREADS: u32 = 512;
/// `struct Scratch`: bins, what is left, sums; then words.
const SCRATCH_BYTES: u32 = 8 * (256 + 1 + THREADS / 32) + 4 * (2 + 2 * (THREADS / 32));
/// Words of [`Parameters`].
pub const PARAMETER_WORDS: usize = 8;

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

/// Chooses a token for every row of `logits` `[rows, vocabulary]`; `logprobs` are the logarithms of the
/// chosen ones' probabilities in the logits given, at temperature 1. `parameters` are
/// [`Parameters::words`], one row's after another's. `None` if there are no rows.
///
/// # Panics
/// If shapes disagree.
pub fn launch(
    logits: Slice<f32>,
    vocabulary: usize,
    parameters: Slice<u32>,
    tokens: Slice<u32>,
    logprobs: Slice<f32>,
) -> Option<Launch> {
    let rows = tokens.len;
    assert!(
        vocabulary > 0
            && logits.len == rows * vocabulary
            && parameters.len == rows * PARAMETER_WORDS
            && logprobs.len == rows,
        "sample: shapes disagree"
    );
    (rows > 0).then(|| Launch {
        module: "sample",
        kernel: "sample".into(),
        grid: [rows as u32, 1, 1],
        threads: THREADS,
        shared_bytes: SCRATCH_BYTES,
        arguments: vec![logits.into(), parameters.into(), tokens.into(), logprobs.into(), vocabulary.into()],
    })
}
