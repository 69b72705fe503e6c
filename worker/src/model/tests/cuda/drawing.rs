//! Tokens that the device draws: the same ids as the sampler's for the same logits, and an engine over them
//! says what one says that samples itself, whether or not steps run ahead.

use std::sync::Arc;

use keyway_kernels::cuda::sample;
use keyway_text::Tokenizer;

use super::generating::{Event, engine_over, heard};
use super::*;
use crate::engine::backend::{CacheGroup, Parameters, StepError};
use crate::engine::grammar::{Form, GrammarCompiler};
use crate::engine::sampler::{Sampler, Sampling};
use crate::engine::scheduler::StepLimits;
use crate::engine::sequence::GenerationRequest;
use crate::engine::token_rules::{Penalties, TokenRules};

/// Ties, both zeros, numbers next to each other, what never comes and what is no number.
fn logits(rows: usize, vocabulary: usize) -> Vec<f32> {
    let mut random = fastrand::Rng::with_seed(3);
    let mut logit = || match random.u8(0..40) {
        0 => f32::NEG_INFINITY,
        1 => f32::NAN,
        2 => 0.0,
        3 => -0.0,
        4 => 3.5,
        5 => f32::from_bits(3.5_f32.to_bits() - 1),
        6 => -90.0,
        _ => random.f32() * 9.0 - 5.0,
    };
    let mut logits: Vec<f32> = (0..rows * vocabulary).map(|_| logit()).collect();
    // Rows without any choice, or whose best is no finite number.
    logits[..vocabulary].fill(f32::NEG_INFINITY);
    logits[vocabulary..2 * vocabulary].fill(f32::NAN);
    logits[3 * vocabulary - 1] = f32::INFINITY;
    logits
}

fn draw(row: usize) -> Parameters {
    Parameters {
        temperature: [0.8, 0.0, 1.0, 0.3, 2.0][row % 5],
        top_p: [1.0, 0.9, 0.5, 1.0, 0.999, 1e-6, 0.0][row % 7],
        min_p: [0.0, 0.0, 0.1, 1.0][row % 4],
        top_k: [0, 0, 7, 1, 40, 5000][row % 6],
        seed: (row as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15),
        position: row as u64 * 977,
    }
}

/// Rows of both zeros, the first of which is to be taken.
fn zeros(rows: usize, vocabulary: usize) -> (Vec<f32>, Vec<Parameters>) {
    let mut random = fastrand::Rng::with_seed(5);
    let logits = (0..rows * vocabulary).map(|_| if random.bool() { 0.0 } else { -0.0 }).collect();
    (logits, (0..rows).map(draw).collect())
}

/// Rows of two, the second of which has just the share that `min_p` asks for: an exponential that is off by
/// its last bit cuts it off.
fn edges(rows: usize) -> (Vec<f32>, Vec<Parameters>) {
    let mut random = fastrand::Rng::with_seed(6);
    let row = |i: usize| {
        let (logit, temperature) = (-random.f32(), 0.5 + random.f32());
        let min_p = keyway_kernels::scalar::exp(logit / temperature);
        ([0.0, logit], Parameters { temperature, min_p, top_p: 1.0, top_k: 0, ..draw(i) })
    };
    let (logits, draws): (Vec<[f32; 2]>, Vec<Parameters>) = (0..rows).map(row).unzip();
    (logits.into_flattened(), draws)
}

/// Logits side by side, more of them than the device sorts at once.
fn narrow((mut logits, draws): (Vec<f32>, Vec<Parameters>)) -> (Vec<f32>, Vec<Parameters>) {
    for logit in &mut logits {
        *logit *= 1e-3;
    }
    (logits, draws)
}

#[test]
fn the_device_draws_what_the_sampler_draws() {
    let Some(mut emulator) = Emulator::start(4) else { return };
    let device: &mut dyn Device = &mut emulator;
    let mixed = |rows, vocabulary| (logits(rows, vocabulary), (0..rows).map(draw).collect());
    let cases = [
        (3, mixed(420, 3)),
        (130, mixed(420, 130)),
        (5000, mixed(12, 5000)),
        (5000, narrow(mixed(12, 5000))),
        (40, zeros(60, 40)),
        (2, edges(300)),
    ];
    for (vocabulary, (logits, draws)) in cases {
        let rows = draws.len();
        let words: Vec<u32> = draws.iter().flat_map(Parameters::words).collect();
        let (on_device, by) = (device.upload(&logits).unwrap(), device.upload(&words).unwrap());
        let (tokens, logprobs) = (device.slice(rows).unwrap(), device.slice(rows).unwrap());
        let work = device.slice(sample::work_words(rows, vocabulary)).unwrap();
        for launch in sample::launch(on_device, vocabulary, by, work, tokens, logprobs) {
            device.launch(&launch).unwrap();
        }
        let tokens = device.download(tokens).unwrap();
        let mut seconds = 0;
        for ((row, draw), token) in logits.chunks(vocabulary).zip(draws).zip(tokens) {
            let Parameters { temperature, top_p, min_p, top_k, seed, position } = draw;
            let sampling = Sampling { temperature, top_p, top_k: top_k as usize, min_p, seed };
            let expected = Sampler::default().sample(row, &sampling, position as usize);
            assert_eq!(token, expected, "{vocabulary} ids, {draw:?}");
            seconds += usize::from(token == 1);
        }
        assert!(vocabulary != 2 || seconds > 50, "{seconds} of the edges were taken: they test nothing");
    }
}

/// Only what a backend does that gives logits and nothing else.
struct OnHost(CudaBackend<Emulator>);

impl Backend for OnHost {
    fn vocab_size(&self) -> usize {
        self.0.vocab_size()
    }

    fn block_size(&self) -> usize {
        self.0.block_size()
    }

    fn num_blocks(&self) -> usize {
        self.0.num_blocks()
    }

    fn cache_groups(&self) -> &[CacheGroup] {
        self.0.cache_groups()
    }

    fn step(&mut self, chunks: &[Chunk<'_>], logits: &mut Vec<f32>) -> Result<(), StepError> {
        self.0.step(chunks, logits)
    }

    fn hidden(&self) -> Option<&[f32]> {
        self.0.hidden()
    }
}

/// Plain ones, of all cuts; with `others` some of every rule, with a grammar, and one that the engine must
/// see the logits of.
fn requests(others: bool) -> Vec<GenerationRequest> {
    let shared = prompt_of(20, 7);
    let compiler = GrammarCompiler::new(Arc::new(Tokenizer::builtin()), VOCAB as usize, vec![VOCAB - 1]);
    let compile = |regex: &str| compiler.compile(Form::Regex(regex.to_owned())).unwrap();
    let request = |i: usize| {
        let prompt = [&shared[..i % 3 * 10], &[i as u32, 5][..]].concat();
        let Parameters { temperature, top_p, min_p, top_k, seed, .. } = draw(i);
        let mut request = GenerationRequest {
            prompt,
            max_tokens: 4 + i % 6,
            ignore_eos: i.is_multiple_of(2),
            sampling: Sampling { temperature, top_p, top_k: top_k as usize, min_p, seed },
            ..GenerationRequest::default()
        };
        // Of 120 ids these stop about one answer in three.
        request.rules.stop_token_ids = (0..8).map(|k| k * 15 + i as u32).collect();
        match i {
            1 if others => request.logprobs = Some(2),
            3 if others => request.rules.min_tokens = 3,
            4 if others => {
                let penalties = Penalties { presence: 0.5, frequency: 0.5, repetition: 1.2 };
                request.rules = TokenRules { penalties, ..request.rules };
            }
            5 if others => {
                let penalties = Penalties { presence: -0.25, frequency: 0.75, repetition: 1.0 };
                let logit_bias = (0..5).map(|id| (id * 4, id as f32 * 0.07)).collect();
                // So long that its list gets too short.
                let stop_token_ids = vec![5];
                request.rules = TokenRules { penalties, logit_bias, min_tokens: 2, stop_token_ids };
                request.max_tokens = 24;
            }
            2 if others => {
                // What may come is another kind after each token.
                request.grammar = Some(compile("([a-d][0-3]|[e-h][4-7]){4,}"));
                request.rules = TokenRules { stop_token_ids: Vec::new(), ..request.rules };
                request.max_tokens = 15;
            }
            6 if others => {
                request.grammar = Some(compile("[a-h]{2,}"));
                request.ignore_eos = false;
                // The form comes before what is forbidden: all of its letters are held back.
                request.rules.stop_token_ids = (97..105).collect();
                request.rules.min_tokens = 2;
                request.rules.penalties.repetition = 1.5;
            }
            _ => {}
        }
        request
    };
    (0..7).map(request).collect()
}

async fn say(
    backend: Box<dyn Backend>,
    limits: StepLimits,
    step_ahead: bool,
    others: bool,
) -> Vec<Vec<Event>> {
    let spawned = engine_over(backend, limits, step_ahead);
    let mut said = Vec::new();
    for generation in spawned.handle.submit(requests(others)).unwrap() {
        said.push(heard(generation).await);
    }
    drop(spawned.handle);
    spawned.thread.join().unwrap();
    said
}

#[tokio::test]
async fn an_engine_says_the_same_whoever_draws_and_however_far_ahead() {
    let roomy = StepLimits { max_batched_tokens: 512, max_running: 8 };
    let tight = StepLimits { max_batched_tokens: 11, max_running: 4 };
    let few = KvLayout { block_size: 8, num_blocks: 9 };
    for (variant, others) in [(&MODELS[3], false), (&MODELS[1], true)] {
        let Some(on_host) = emulated(variant) else { return };
        let expected = say(Box::new(OnHost(on_host)), roomy, false, others).await;
        for (layout, limits, step_ahead) in
            [(LAYOUT, roomy, false), (LAYOUT, roomy, true), (few, tight, true)]
        {
            let backend = emulated_with(variant, Quantize::None, layout).unwrap();
            let said = say(Box::new(backend), limits, step_ahead, others).await;
            assert_eq!(said, expected, "{} {layout:?}, ahead: {step_ahead}", variant.name);
        }
    }
}
