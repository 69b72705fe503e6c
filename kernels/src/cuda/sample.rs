//! Launches `sample.cu`: penalties, and from logits to a token id.

use super::{Launch, Slice};

const THREADS: u32 = 512;
/// `struct Scratch`: bins, what is left, sums; then words.
const SCRATCH_BYTES: u32 = 8 * (256 + 1 + THREADS / 32) + 4 * (2 + 2 * (THREADS / 32));
/// Words of [`Parameters`].
pub const PARAMETER_WORDS: usize = 8;
/// Words of `struct Seen` and `struct Penalties`.
const SEEN_WORDS: usize = 3;
const PENALTY_WORDS: usize = 3;

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

/// A token that a row has seen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Seen {
    /// Which.
    pub id: u32,
    /// How often it was generated.
    pub generated: u32,
    /// Whether it stood in the prompt.
    pub in_prompt: bool,
}

impl Seen {
    /// As the kernel reads it.
    pub fn words(&self) -> [u32; SEEN_WORDS] {
        [self.id, self.generated, self.in_prompt.into()]
    }
}

/// Lowers the logits of tokens that were seen: row `r`'s are `seen[offsets[r]..offsets[r + 1]]`, each id
/// once, as [`Seen::words`]; `penalties` are each row's repetition, frequency and presence. `None` if there
/// are no rows.
///
/// # Panics
/// If shapes disagree.
pub fn penalize(
    logits: Slice<f32>,
    vocabulary: usize,
    offsets: Slice<u32>,
    seen: Slice<u32>,
    penalties: Slice<f32>,
) -> Option<Launch> {
    let rows = penalties.len / PENALTY_WORDS;
    assert!(
        logits.len == rows * vocabulary
            && penalties.len == rows * PENALTY_WORDS
            && offsets.len == rows + 1
            && seen.len.is_multiple_of(SEEN_WORDS),
        "penalize: shapes disagree"
    );
    (rows > 0).then(|| Launch {
        module: "sample",
        kernel: "penalize".into(),
        grid: [rows as u32, 1, 1],
        threads: 128,
        shared_bytes: 0,
        arguments: vec![logits.into(), offsets.into(), seen.into(), penalties.into(), vocabulary.into()],
    })
}
