//! What an engine does for sequences, as little of it as a check needs: block tables that grow.

use keyway_worker::backend::{Backend, Chunk, Draw, StepOutput};

/// One sequence's place in the cache.
#[derive(Debug, Clone)]
pub(crate) struct Sequence {
    /// A block table for each of the backend's cache groups, longer as the sequence grows.
    tables: Vec<Vec<u32>>,
    /// Its tokens so far.
    pub(crate) len: usize,
}

/// A backend and its free blocks.
pub(crate) struct Driver<B> {
    pub(crate) backend: B,
    free: Vec<u32>,
}

impl<B: Backend> Driver<B> {
    /// Blocks are taken `stride` apart, so that two drivers number theirs differently; it must share no
    /// factor with their number.
    pub(crate) fn new(backend: B, stride: usize) -> Self {
        let blocks = backend.num_blocks();
        let free = (0..blocks).map(|i| (i * stride % blocks) as u32).collect();
        Self { backend, free }
    }

    pub(crate) fn sequence(&self) -> Sequence {
        Sequence { tables: vec![Vec::new(); self.backend.cache_groups().len()], len: 0 }
    }

    /// Gives a sequence blocks for `new` more tokens.
    fn grow(&mut self, sequence: &mut Sequence, new: usize) -> Result<(), String> {
        for table in &mut sequence.tables {
            while table.len() * self.backend.block_size() < sequence.len + new {
                table.push(self.free.pop().ok_or("the KV cache is too small for the check")?);
            }
        }
        Ok(())
    }

    /// Runs one step: some new tokens of each sequence. A row of logits for each.
    pub(crate) fn step(
        &mut self,
        sequences: &mut [Sequence],
        tokens: &[&[u32]],
    ) -> Result<Vec<Vec<f32>>, String> {
        let (mut logits, vocab) = (Vec::new(), self.backend.vocab_size());
        self.with_chunks(sequences, tokens, |backend, chunks| {
            backend.step(chunks, &mut logits).map_err(|e| e.to_string())
        })?;
        for (sequence, tokens) in sequences.iter_mut().zip(tokens) {
            sequence.len += tokens.len();
        }
        Ok(logits.chunks_exact(vocab).map(<[f32]>::to_vec).collect())
    }

    /// Starts a step whose tokens the backend draws.
    pub(crate) fn start(
        &mut self,
        sequences: &mut [Sequence],
        tokens: &[&[u32]],
        draws: &[Option<Draw<'_>>],
    ) -> Result<(), String> {
        self.with_chunks(sequences, tokens, |backend, chunks| {
            backend.start(chunks, draws).map_err(|e| e.to_string())
        })?;
        for (sequence, tokens) in sequences.iter_mut().zip(tokens) {
            sequence.len += tokens.len();
        }
        Ok(())
    }

    /// The tokens of the step that was started first.
    pub(crate) fn finish(&mut self) -> Result<Vec<u32>, String> {
        let mut output = StepOutput::default();
        self.backend.finish(&mut output).map_err(|e| e.to_string())?;
        Ok(output.tokens)
    }

    /// Calls `run` with the chunks of a step.
    pub(crate) fn with_chunks<T>(
        &mut self,
        sequences: &mut [Sequence],
        tokens: &[&[u32]],
        run: impl FnOnce(&mut B, &[Chunk<'_>]) -> Result<T, String>,
    ) -> Result<T, String> {
        for (sequence, tokens) in sequences.iter_mut().zip(tokens) {
            self.grow(sequence, tokens.len())?;
        }
        let tables: Vec<Vec<&[u32]>> =
            sequences.iter().map(|s| s.tables.iter().map(Vec::as_slice).collect()).collect();
        let chunks: Vec<Chunk<'_>> = sequences
            .iter()
            .zip(tokens)
            .zip(&tables)
            .map(|((s, tokens), tables)| Chunk { tokens, start: s.len, tables, wants_logits: true })
            .collect();
        run(&mut self.backend, &chunks)
    }
}
