//! The engine over the CUDA backend: what it says does not depend on how its work is cut.

use std::future::poll_fn;
use std::sync::Arc;

use super::*;
use crate::engine::logprobs::TokenScore;
use crate::engine::sampler::Sampling;
use crate::engine::scheduler::StepLimits;
use crate::engine::sequence::{self, FinishReason, Generation, GenerationRequest};
use crate::engine::{self, EngineOptions, Spawned};
use crate::metrics::{Metrics, StaticInfo};

/// Prompts with a common beginning and without, greedy and drawn.
fn requests() -> Vec<GenerationRequest> {
    let shared = prompt_of(40, 7);
    let prompts =
        [prompt_of(9, 5), [&shared[..], &[1, 2]].concat(), [&shared[..], &[3]].concat(), prompt_of(70, 11)];
    let request = |(i, prompt): (usize, Vec<u32>)| GenerationRequest {
        prompt,
        max_tokens: 6,
        ignore_eos: true,
        sampling: Sampling { temperature: (i % 2) as f32, seed: 5 + i as u64, ..Sampling::default() },
        ..GenerationRequest::default()
    };
    prompts.into_iter().enumerate().map(request).collect()
}

/// A token, why it was the last, and what the model thought of it.
pub(super) type Event = (u32, Option<FinishReason>, Option<Box<TokenScore>>);

pub(super) async fn heard(mut generation: Generation) -> Vec<Event> {
    let mut heard = Vec::new();
    while let Some(event) = poll_fn(|context| generation.poll_next(context)).await {
        match event {
            sequence::Event::Token(event) => heard.push((event.token, event.finish, event.score)),
            sequence::Event::Prompt(_) | sequence::Event::Kept(_) => {}
            sequence::Event::Failed(reason) | sequence::Event::BrokenOff(reason) => panic!("{reason}"),
        }
    }
    heard
}

pub(super) fn engine_over(backend: Box<dyn Backend>, limits: StepLimits, step_ahead: bool) -> Spawned {
    let (eos_token_ids, suppress_token_ids) = (vec![VOCAB - 1], Vec::new());
    let options = EngineOptions { limits, eos_token_ids, suppress_token_ids, step_ahead };
    let (block_size, num_blocks) = (backend.block_size(), backend.num_blocks());
    let info = StaticInfo { model: "m", numerics_id: "n", block_size, num_blocks };
    engine::spawn(backend, options, Arc::new(Metrics::new(&info).unwrap())).unwrap()
}

/// What an engine says to all requests at once.
async fn generate(variant: &Variant, layout: KvLayout, limits: StepLimits) -> Option<Vec<Vec<u32>>> {
    Some(said_by(Box::new(emulated_with(variant, Quantize::None, layout)?), limits).await)
}

/// The same of an engine over this backend.
async fn said_by(backend: Box<dyn Backend>, limits: StepLimits) -> Vec<Vec<u32>> {
    said_to(backend, limits, [requests()]).await
}

/// What an engine over this backend says to groups of requests, one after another.
pub(super) async fn said_to(
    backend: Box<dyn Backend>,
    limits: StepLimits,
    groups: impl IntoIterator<Item = Vec<GenerationRequest>>,
) -> Vec<Vec<u32>> {
    let spawned = engine_over(backend, limits, true);
    let mut said = Vec::new();
    for requests in groups {
        for generation in spawned.handle.submit(requests).unwrap() {
            said.push(heard(generation).await.into_iter().map(|(token, ..)| token).collect());
        }
    }
    drop(spawned.handle);
    spawned.thread.join().unwrap();
    said
}

#[tokio::test]
async fn what_an_engine_says_does_not_depend_on_batches_budget_or_preemption() {
    for variant in [&MODELS[1], &MODELS[3], &MODELS[5]] {
        let roomy = StepLimits { max_batched_tokens: 512, max_running: 8 };
        let Some(expected) = generate(variant, LAYOUT, roomy).await else { return };
        assert!(expected.iter().all(|said| said.len() == 6), "{expected:?}");
        let tight = StepLimits { max_batched_tokens: 30, max_running: 3 };
        let few = KvLayout { block_size: 16, num_blocks: 8 };
        assert_eq!(generate(variant, few, tight).await, Some(expected.clone()), "{}", variant.name);
        // The greedy ones say what the backend alone finds likeliest.
        let alone = whole(&mut emulated(variant).unwrap(), &requests()[0].prompt);
        assert_eq!(expected[0][0] as usize, keyway_kernels::scalar::argmax(&alone));
    }
}
