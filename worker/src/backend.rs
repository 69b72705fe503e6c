//! The seam between the engine and the arithmetic: one call runs one step of a batch over a paged KV cache.
//! The scheduler never sees a tensor, the backend never sees a request.

/// One sequence's part of a step: its next tokens, and the blocks its KV lives in.
#[derive(Debug, Clone, Copy)]
pub struct Chunk<'a> {
    /// New token ids, at least one: a piece of the prompt, or the last sampled token.
    pub tokens: &'a [u32],
    /// Absolute position of `tokens[0]`; the KV of every position before it is already in `blocks`.
    pub start: usize,
    /// Block table: `blocks[i]` holds positions `i * block_size ..`; covers `start + tokens.len()` positions.
    pub blocks: &'a [u32],
    /// Whether the logits after this chunk's last token are wanted.
    pub wants_logits: bool,
}

/// Runs a model. A token's logits depend only on the tokens before it, bit for bit: never on the batch, the
/// chunking, the block numbers, or whether the KV of earlier positions came from this request or another.
pub trait Backend: Send {
    /// Width of a row of logits.
    fn vocab_size(&self) -> usize;

    /// Positions per KV block.
    fn block_size(&self) -> usize;

    /// Number of KV blocks; valid block numbers are `0..num_blocks`.
    fn num_blocks(&self) -> usize;

    /// Writes the KV of every chunk's tokens and appends to `logits` (cleared first) one row of
    /// `vocab_size` per chunk that wants it, in the chunks' order.
    fn step(&mut self, chunks: &[Chunk<'_>], logits: &mut Vec<f32>);
}
