//! A sampled token is drawn with its own absolute position, which is what makes a resumed generation exact.

use super::*;

/// Finds every token equally likely, so that only the position decides.
struct Flat;

impl Backend for Flat {
    fn vocab_size(&self) -> usize {
        VOCAB
    }

    fn block_size(&self) -> usize {
        4
    }

    fn num_blocks(&self) -> usize {
        100
    }

    fn cache_groups(&self) -> &[CacheGroup] {
        FULL
    }

    fn step(&mut self, chunks: &[Chunk<'_>], logits: &mut Vec<f32>) -> Result<(), StepError> {
        logits.clear();
        logits.resize(chunks.iter().filter(|chunk| chunk.wants_logits).count() * VOCAB, 0.0);
        Ok(())
    }
}

#[test]
fn every_token_is_drawn_with_its_own_position() {
    let request = GenerationRequest { ignore_eos: true, ..request(&[7; 13], 30, 0.9) };
    let mut row = [0.0; VOCAB];
    row[SUPPRESSED as usize] = f32::NEG_INFINITY;
    let expected: Vec<u32> =
        (13..43).map(|at| Sampler::default().sample(&row, &request.sampling, at)).collect();
    let mut engine = engine_with(ROOMY, Box::new(Flat));
    let generation = add(&mut engine, request);
    assert_eq!(tokens(&finish(&mut engine, vec![generation])), [expected]);
}
