//! Rank 0 on a device and further ranks as processes would be, each a thread with its own view of the device:
//! the bits of one rank, ranks that fail in any launch, and what is counted.

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use keyway_kernels::fabric::{Fabric, Local};

use super::generating::{Event, engine_over, heard};
use super::shared_device::{Fails, OPEN, SharedDevice};
use super::sharing::{generate, with_experts};
use super::*;
use crate::engine::sampler::Sampling;
use crate::engine::scheduler::StepLimits;
use crate::engine::sequence::GenerationRequest;
use crate::engine::token_rules::{Penalties, TokenRules};
use crate::metrics::ExpertMetrics;
use crate::model::cuda::{CudaRank, RankSettings};
use crate::model::experts::{ExpertGroup, GroupOptions, NoRanks, Store, Supervisor};
use crate::parallel::data_parallel;

const LAYOUT: KvLayout = KvLayout { block_size: 16, num_blocks: 64 };
/// For what must come.
const PATIENCE: Duration = Duration::from_secs(60);
/// Before a rank is missed: the emulator's clock counts questions, of which it is asked ten million a second.
const DEADLINE: Duration = Duration::from_millis(300);
/// Tokens of a round.
const ROUND: usize = 16;
/// Words of a note at most.
const NOTE_WORDS: usize = 256;

/// Ranks as threads of this process.
#[derive(Debug)]
struct Threads {
    config: String,
    quantize: Quantize,
    fp8_kv: bool,
    ranks: usize,
    device: SharedDevice,
    /// After how many launches of the exchange the last rank's device fails, of the first group.
    left: Option<(u64, Fails)>,
    starts: Arc<AtomicU64>,
}

impl Supervisor for Threads {
    fn start(&mut self) -> Result<Box<dyn Fabric>, NoRanks> {
        let first = self.starts.fetch_add(1, Ordering::SeqCst) == 0;
        let mut group = Local::group(self.ranks, NOTE_WORDS);
        for (i, fabric) in group.drain(1..).enumerate() {
            let rank = i + 1;
            let left = self.left.filter(|_| first && rank + 1 == self.ranks);
            let device = self.device.of_rank(rank, left);
            let store = Store::synthetic(&self.config).unwrap();
            let (quantize, fp8_kv, config) = (self.quantize, self.fp8_kv, self.config.clone());
            thread::spawn(move || {
                let whole = |ranks, rank| LoadedModel::synthetic_share(&config, ranks, rank);
                let by = RankSettings {
                    deadline: PATIENCE,
                    tokens_max: ROUND,
                    sequences_max: 4,
                    fp8_kv,
                    whole: &whole,
                };
                // It ends with the group.
                drop(CudaRank::serve(device, (store, quantize), Box::new(fabric), OPEN, &by));
            });
        }
        Ok(Box::new(group.pop().unwrap()))
    }
}

/// How a group is started, and what it tells.
struct Group {
    ranks: usize,
    quantize: Quantize,
    fp8_kv: bool,
    retries: usize,
    left: Option<(u64, Fails)>,
    /// Whether ranks run attention too.
    joint: bool,
    starts: Arc<AtomicU64>,
    metrics: Arc<ExpertMetrics>,
}

impl Group {
    fn of(ranks: usize) -> Self {
        let metrics = ExpertMetrics::new(ranks, 16).unwrap();
        let (quantize, starts) = (Quantize::None, Arc::default());
        Self { ranks, quantize, fp8_kv: false, retries: 2, left: None, joint: false, starts, metrics }
    }

    /// Rank 0's backend; `None` where there is no compiler.
    fn start(&self, variant: &Variant) -> Option<CudaBackend<SharedDevice>> {
        let Self { ranks, quantize, fp8_kv, retries, left, joint, .. } = *self;
        let device = SharedDevice::start(ranks)?;
        let (config, starts) = (variant.config(), Arc::clone(&self.starts));
        let store = Store::synthetic(&config).unwrap();
        let model = LoadedModel::synthetic_share(&config, ranks, 0).unwrap();
        let deadline = if left.is_some() { DEADLINE } else { PATIENCE };
        let options = GroupOptions {
            ranks,
            deadline,
            retries,
            redundant: 0,
            threads: NonZeroUsize::MIN,
            attention: joint.then(|| model.attention(LAYOUT)),
        };
        let of_ranks = device.of_rank(0, None);
        let supervisor =
            Box::new(Threads { config, quantize, fp8_kv, ranks, device: of_ranks, left, starts });
        let group = ExpertGroup::over(store, options, supervisor, Arc::clone(&self.metrics));
        let mut model = model.share_onto(device, quantize).unwrap();
        if fp8_kv {
            model = model.with_fp8_kv();
        }
        model.reserve_sharing(ranks, ROUND, deadline).unwrap();
        Some(model.into_backend(LAYOUT).unwrap().with_group(group, OPEN).unwrap())
    }

    fn starts(&self) -> u64 {
        self.starts.load(Ordering::SeqCst)
    }
}

#[test]
fn ranks_that_launch_for_themselves_give_the_same_bits() {
    for (variant, ranks) in with_experts().zip([2, 3, 4, 2, 3, 2]) {
        let Some(mut whole) = emulated_with(variant, Quantize::None, LAYOUT) else { return };
        let expected = generate(&mut whole);
        let group = Group::of(ranks);
        let mut backend = group.start(variant).unwrap();
        assert_eq!(generate(&mut backend), expected, "{}, {ranks} ranks", variant.name);
        assert!(backend.replayed > 2, "{} steps were replayed", backend.replayed);
        assert_eq!(group.starts(), 1);
    }
}

/// Codes and exponents of a rank's experts are those of the checkpoint.
#[test]
fn ranks_keep_experts_in_mxfp4_as_one_does() {
    let more = format!(r#"{}, "quantization_config": {{"quant_method": "mxfp4"}}"#, MODELS[6].more);
    let variant = &Variant { name: MODELS[6].name, more: more.leak() };
    let Some(mut whole) = emulated_with(variant, Quantize::Int8, LAYOUT) else { return };
    let expected = generate(&mut whole);
    let group = Group { quantize: Quantize::Int8, ..Group::of(2) };
    assert_eq!(generate(&mut group.start(variant).unwrap()), expected);
}

#[test]
fn ranks_quantise_their_experts_as_one_does() {
    let variant = &MODELS[8];
    let Some(mut whole) = emulated_with(variant, Quantize::Int4, LAYOUT) else { return };
    let expected = generate(&mut whole);
    let group = Group { quantize: Quantize::Int4, ..Group::of(2) };
    assert_eq!(generate(&mut group.start(variant).unwrap()), expected);
}

/// What is counted on the device is what the router chose: as many slots as tokens have, at the experts'
/// ranks.
#[test]
fn slots_are_counted_by_expert_and_rank_and_time_is_told() {
    // Mixtral: two layers of four experts, two a token; two ranks.
    let group = Group::of(2);
    let Some(mut backend) = group.start(&MODELS[4]) else { return };
    let prompt = prompt_of(40, 7);
    let (mut pool, mut sequence) = (Pool::ascending(&backend), Sequence::new(&backend));
    sequence.run(&mut backend, &mut pool, &prompt[..39]);
    sequence.run(&mut backend, &mut pool, &prompt[39..]);
    let text = group.metrics.text();
    let value = |name: &str| -> f64 {
        let of = |line: &str| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok();
        text.lines().find_map(of).unwrap_or_else(|| panic!("no {name} in {text}"))
    };
    // In the last layer only the rows behind which logits are wanted.
    let slots = f64::from((39 + 1) * 2 + 2 * 2);
    let by = |label: &str, name: &str, count: usize| -> Vec<f64> {
        (0..count).map(|i| value(&format!("keyway_worker_{name}_total{{{label}=\"{i}\"}}"))).collect()
    };
    let (experts, ranks) = (by("expert", "expert_tokens", 4), by("rank", "expert_rank_tokens", 2));
    assert_eq!(experts.iter().sum::<f64>(), slots, "{experts:?}");
    assert_eq!(ranks, [experts[0] + experts[1], experts[2] + experts[3]]);
    assert!(experts.iter().all(|slots| *slots > 0.0), "{experts:?}");
    for part in ["dispatch", "compute", "combine"] {
        // The first step begins the count.
        let count = value(&format!("keyway_worker_expert_layer_seconds_count{{part=\"{part}\"}}"));
        let sum = value(&format!("keyway_worker_expert_layer_seconds_sum{{part=\"{part}\"}}"));
        assert!(count == 2.0 && sum > 0.0, "{part}: {count}, {sum}");
    }
    assert_eq!(value("keyway_worker_expert_ranks_up"), 1.0);
}

/// Plain ones, one with scores, and one whose every token hangs on those before: biases make three tokens
/// likely, and each is less so from then on.
fn requests() -> Vec<GenerationRequest> {
    let request = |i: usize| GenerationRequest {
        prompt: prompt_of(9 + 8 * i as u32, 5 + i as u32),
        max_tokens: 5,
        ignore_eos: true,
        sampling: Sampling { temperature: (i % 2) as f32, seed: 5 + i as u64, ..Sampling::default() },
        ..GenerationRequest::default()
    };
    let mut requests: Vec<GenerationRequest> = (0..3).map(request).collect();
    requests[1].logprobs = Some(2);
    requests[2].rules = TokenRules {
        logit_bias: vec![(5, 9.0), (6, 9.0), (7, 9.0)],
        penalties: Penalties { presence: 0.0, frequency: 2.0, repetition: 1.0 },
        ..TokenRules::default()
    };
    requests
}

async fn say(backend: Box<dyn Backend>, step_ahead: bool) -> Vec<Vec<Event>> {
    let limits = StepLimits { max_batched_tokens: 24, max_running: 4 };
    let spawned = engine_over(backend, limits, step_ahead);
    let mut said = Vec::new();
    for generation in spawned.handle.submit(requests()).unwrap() {
        said.push(heard(generation).await);
    }
    drop(spawned.handle);
    spawned.thread.join().unwrap();
    said
}

/// In any launch, with the next step under way or not, with an error or without a word: the rank is named,
/// the group started again, and what was lost is computed again.
#[tokio::test]
async fn a_rank_that_fails_in_any_launch_changes_no_answer_and_is_named() {
    let variant = &MODELS[4];
    let Some(whole) = emulated_with(variant, Quantize::None, LAYOUT) else { return };
    let expected = say(Box::new(whole), true).await;
    assert!(expected[1].iter().all(|(.., score)| score.is_some()), "{:?}", expected[1]);
    let biased: Vec<u32> = expected[2].iter().map(|(token, ..)| *token).collect();
    assert!(biased.iter().all(|token| (5..8).contains(token)), "{biased:?}");
    assert!([5, 6, 7].iter().filter(|token| biased.contains(token)).count() > 1, "{biased:?}");
    // The first is the group's beginning; then come five for each round.
    let errs = [1, 2, 3, 4, 5, 6, 8, 33, 62, 75].map(|left| (left, Fails::Errs));
    let hangs = [2, 4, 40].map(|left| (left, Fails::Hangs));
    let ahead = errs.into_iter().chain(hangs).map(|left| (left, true));
    // Around the ends of steps, each of which is waited for.
    let waiting = [21, 31, 41, 51, 61].map(|left| ((left, Fails::Errs), false));
    for (left, step_ahead) in ahead.chain(waiting) {
        let group = Group { left: Some(left), ..Group::of(3) };
        let backend = group.start(variant).unwrap();
        assert_eq!(say(Box::new(backend), step_ahead).await, expected, "{left:?}");
        assert_eq!(group.starts(), 2, "{left:?}");
        let failures = |rank: &str| group.metrics.failures.with_label_values(&[rank]).get();
        assert_eq!(["0", "1", "2"].map(failures), [0, 0, 1], "{left:?}");
        assert_eq!(group.metrics.restarts.get(), 1);
    }
}

#[test]
fn without_retries_the_step_fails_with_the_ranks_name_and_the_next_one_works() {
    let (variant, prompt) = (&MODELS[4], prompt_of(20, 7));
    let Some(mut whole) = emulated_with(variant, Quantize::None, LAYOUT) else { return };
    let expected = bits(&super::whole(&mut whole, &prompt));
    let group = Group { left: Some((3, Fails::Errs)), retries: 0, ..Group::of(2) };
    let mut backend = group.start(variant).unwrap();
    let (mut pool, mut sequence) = (Pool::ascending(&backend), Sequence::new(&backend));
    sequence.grow(&mut pool, prompt.len());
    let tables = sequence.tables();
    let chunk = Chunk { tokens: &prompt, start: 0, tables: &tables, wants_logits: true };
    let mut logits = Vec::new();
    let reason = backend.step(&[chunk], &mut logits).unwrap_err().to_string();
    assert!(reason.contains("rank 1 failed") && reason.contains("of layer 0"), "{reason}");
    assert!(!backend.cache_was_lost());
    backend.step(&[chunk], &mut logits).unwrap();
    assert_eq!(bits(&logits), expected);
}

#[test]
fn an_idle_group_is_kept_alive_and_started_again() {
    let (variant, prompt) = (&MODELS[4], prompt_of(20, 7));
    let Some(mut whole) = emulated_with(variant, Quantize::None, LAYOUT) else { return };
    let expected = bits(&super::whole(&mut whole, &prompt));
    // It leaves in the second step, which rank 0 learns of by its next sign of life.
    let group = Group { left: Some((1, Fails::Errs)), ..Group::of(2) };
    let mut backend = group.start(variant).unwrap();
    assert!(backend.keep_alive_every().is_some_and(|every| every * 3 < DEADLINE));
    for _ in 0..3 {
        backend.keep_alive();
    }
    assert_eq!(group.starts(), 1);
    let (mut pool, mut sequence) = (Pool::ascending(&backend), Sequence::new(&backend));
    sequence.grow(&mut pool, prompt.len());
    let tables = sequence.tables();
    let chunk = Chunk { tokens: &prompt, start: 0, tables: &tables, wants_logits: true };
    let mut logits = Vec::new();
    backend.step(&[chunk], &mut logits).unwrap_err();
    assert!(backend.cache_was_lost() && !backend.cache_was_lost());
    backend.keep_alive();
    assert_eq!(group.starts(), 2);
    backend.step(&[chunk], &mut logits).unwrap();
    assert_eq!(bits(&logits), expected);
}

/// What was recorded names what the group before had; a rank fails once the same step was recorded and
/// replayed.
#[test]
fn recordings_end_with_their_group() {
    let (variant, prompt) = (&MODELS[4], prompt_of(10, 7));
    let Some(mut whole) = emulated_with(variant, Quantize::None, LAYOUT) else { return };
    let expected = bits(&super::whole(&mut whole, &prompt));
    // A launch begins the group, ten are a step.
    let group = Group { left: Some((45, Fails::Errs)), ..Group::of(2) };
    let mut backend = group.start(variant).unwrap();
    let (mut pool, mut sequence) = (Pool::ascending(&backend), Sequence::new(&backend));
    sequence.run(&mut backend, &mut pool, &prompt[..9]);
    sequence.grow(&mut pool, 1);
    let tables = sequence.tables();
    let chunk = Chunk { tokens: &prompt[9..], start: 9, tables: &tables, wants_logits: true };
    let mut logits = Vec::new();
    let mut failed = Vec::new();
    for step in 0..8 {
        match backend.step(&[chunk], &mut logits) {
            Ok(()) => assert_eq!(bits(&logits), expected, "step {step}"),
            Err(_) => failed.push((step, backend.replayed)),
        }
    }
    assert!(failed == [(3, 2)] && backend.replayed > 3, "{failed:?}, {}", backend.replayed);
}

/// What the engine of each rank hears that generates at the same time as the others, ranks of `busy` again
/// and again so long.
fn joint(group: &Group, variant: &Variant, busy: &[usize]) -> Option<Vec<Vec<Vec<u32>>>> {
    let backends = data_parallel::backends(group.start(variant)?, group.ranks, Arc::clone(&group.metrics));
    let generating: Vec<_> = backends
        .unwrap()
        .into_iter()
        .zip(busy.to_vec())
        .map(|(mut backend, times)| {
            thread::spawn(move || (0..times).flat_map(|_| generate(&mut backend)).collect::<Vec<_>>())
        })
        .collect();
    Some(generating.into_iter().map(|rank| rank.join().unwrap()).collect())
}

/// Slots that were counted, of all experts.
fn slots(group: &Group) -> f64 {
    let text = group.metrics.text();
    let counts = text.lines().filter(|line| line.starts_with("keyway_worker_expert_tokens_total{"));
    counts.map(|line| line.rsplit_once(' ').unwrap().1.parse::<f64>().unwrap()).sum()
}

/// Attention on every rank, over KV caches of their own: some ranks rest while others have tokens.
#[test]
fn ranks_that_run_attention_too_give_the_same_bits() {
    // Experts in all layers; a dense one, and a rank that rests; latents, and rank 0 that rests.
    let groups: [(&Variant, &[usize]); 3] =
        [(&MODELS[4], &[2, 1]), (&MODELS[5], &[1, 0, 1]), (&MODELS[8], &[0, 1])];
    for (variant, busy) in groups {
        let Some(mut whole) = emulated_with(variant, Quantize::None, LAYOUT) else { return };
        let expected = generate(&mut whole);
        let group = Group { joint: true, ..Group::of(busy.len()) };
        for (rank, said) in joint(&group, variant, busy).unwrap().into_iter().enumerate() {
            let expected: Vec<_> = (0..busy[rank]).flat_map(|_| expected.clone()).collect();
            assert_eq!(said, expected, "{}, rank {rank} of {busy:?}", variant.name);
        }
        assert_eq!(group.starts(), 1);
        // Counted as often as one rank's tokens are.
        let one = Group::of(2);
        generate(&mut one.start(variant).unwrap());
        assert_eq!(slots(&group), slots(&one) * busy.iter().sum::<usize>() as f64, "{}", variant.name);
    }
}

/// Every rank's KV cache has rank 0's number type.
#[test]
fn ranks_that_run_attention_too_keep_their_caches_in_fp8() {
    let variant = &MODELS[4];
    let Some(emulator) = Emulator::start(1) else { return };
    let model = load(variant).onto(emulator, Quantize::None).unwrap().with_fp8_kv();
    let expected = generate(&mut model.into_backend(LAYOUT).unwrap());
    assert_ne!(generate(&mut emulated_with(variant, Quantize::None, LAYOUT).unwrap()), expected);
    let group = Group { joint: true, fp8_kv: true, ..Group::of(2) };
    for (rank, said) in joint(&group, variant, &[1, 1]).unwrap().into_iter().enumerate() {
        assert_eq!(said, expected, "rank {rank}");
    }
}

/// In the last layer such a rank has no row: the others' still need its experts.
#[test]
fn a_rank_without_wanted_rows_serves_those_of_others_in_the_last_layer() {
    let (variant, prompt) = (&MODELS[4], prompt_of(20, 7));
    let Some(mut whole) = emulated_with(variant, Quantize::None, LAYOUT) else { return };
    let expected = bits(&super::whole(&mut whole, &prompt));
    let part = |wants_logits| {
        StepWords::write(&[Chunk { tokens: &prompt, start: 0, tables: &[&[3, 1]], wants_logits }])
    };
    let mut backend = Group { joint: true, ..Group::of(2) }.start(variant).unwrap();
    for (parts, wants) in [([part(false), part(true)], 1), ([part(true), part(false)], 0)] {
        let mut outputs = Vec::new();
        backend.joint_step(&parts, &mut outputs).unwrap();
        assert_eq!(bits(&outputs[wants].logits), expected, "rank {wants}");
        assert!(outputs[1 - wants].logits.is_empty());
    }
}

/// Of a joint step that fails all ranks' KV is lost, and the next one begins anew.
#[test]
fn a_rank_that_fails_in_a_joint_step_is_named_and_the_next_step_is_right() {
    let (variant, prompts) = (&MODELS[4], [prompt_of(20, 7), prompt_of(9, 11)]);
    let Some(mut whole) = emulated_with(variant, Quantize::None, LAYOUT) else { return };
    let expected = prompts.each_ref().map(|prompt| bits(&super::whole(&mut whole, prompt)));
    let part = |prompt: &Vec<u32>| {
        let chunk = Chunk { tokens: prompt, start: 0, tables: &[&[3, 1]], wants_logits: true };
        StepWords::write(&[chunk])
    };
    let parts = [part(&prompts[0]), StepWords::default(), part(&prompts[1])];
    for left in [1, 4, 9, 14] {
        let group = Group { joint: true, left: Some((left, Fails::Errs)), ..Group::of(3) };
        let mut backend = group.start(variant).unwrap();
        let (losses, mut outputs) = (backend.losses(), Vec::new());
        let lost = backend.joint_step(&parts, &mut outputs).unwrap_err();
        let JointError::Lost(reason) = lost else { panic!("{lost:?}") };
        assert!(reason.contains("rank 2 failed"), "after {left} launches: {reason}");
        backend.ensure_group().unwrap();
        assert!(backend.losses() > losses);
        backend.joint_step(&parts, &mut outputs).unwrap();
        let said: Vec<Vec<u32>> = outputs.iter().map(|output| bits(&output.logits)).collect();
        assert_eq!(said, [expected[0].clone(), Vec::new(), expected[1].clone()], "after {left} launches");
    }
}
