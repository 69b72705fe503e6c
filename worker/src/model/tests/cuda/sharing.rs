//! Experts that ranks share over the device: the bits of the same model without ranks, for every number of
//! them, for prompts in one round and in many, for recorded steps, and for ranks that have no token.

use super::*;

const LAYOUT: KvLayout = KvLayout { block_size: 16, num_blocks: 64 };
/// Tokens of a round: a step's all at once, or a few.
const WIDE: usize = 128;

pub(super) fn with_experts() -> impl Iterator<Item = &'static Variant> {
    MODELS.iter().filter(|variant| variant.has_experts())
}

/// The model on a device to itself, its experts shared by `ranks` ranks there, in rounds of `round` tokens.
fn shared(
    variant: &Variant,
    quantize: Quantize,
    ranks: usize,
    round: usize,
) -> Option<CudaBackend<Emulator>> {
    let model = load(variant).onto(Emulator::start(1)?, quantize).unwrap();
    Some(model.with_ranks_here(ranks, round).unwrap().into_backend(LAYOUT).unwrap())
}

fn alone(variant: &Variant, quantize: Quantize) -> Option<CudaBackend<Emulator>> {
    emulated_with(variant, quantize, LAYOUT)
}

/// Prompts whole, in pieces and side by side, then tokens of all of them in steps that are recorded: the
/// logits behind every prompt and token.
pub(super) fn generate(backend: &mut dyn Backend) -> Vec<Vec<u32>> {
    const DECODED: usize = 5;
    let prompts: Vec<Vec<u32>> = [(37, 7), (23, 11), (7, 13)].map(|(len, step)| prompt_of(len, step)).into();
    let mut pool = Pool::ascending(backend);
    let mut said = side_by_side(backend, &mut pool, &prompts, &[vec![30, 1], vec![17], vec![7]]);
    let mut pool = Pool::ascending(backend);
    let mut sequences = vec![Sequence::new(backend); prompts.len()];
    for (sequence, prompt) in sequences.iter_mut().zip(&prompts) {
        sequence.run(backend, &mut pool, &prompt[..prompt.len() - DECODED]);
    }
    for _ in 0..DECODED {
        for sequence in &mut sequences {
            sequence.grow(&mut pool, 1);
        }
        let tables: Vec<Vec<&[u32]>> = sequences.iter().map(Sequence::tables).collect();
        let chunk = |(i, tables): (usize, _)| {
            let start = sequences[i].len();
            Chunk { tokens: &prompts[i][start..=start], start, tables, wants_logits: true }
        };
        let chunks: Vec<Chunk<'_>> = tables.iter().map(Vec::as_slice).enumerate().map(chunk).collect();
        let mut logits = Vec::new();
        backend.step(&chunks, &mut logits).unwrap();
        said.extend(logits.chunks(backend.vocab_size()).map(bits));
        for sequence in &mut sequences {
            sequence.advance(1);
        }
    }
    said
}

#[test]
fn every_number_of_ranks_gives_the_same_bits_in_rounds_of_any_size() {
    for (i, variant) in with_experts().enumerate() {
        let Some(mut whole) = alone(variant, Quantize::None) else { return };
        let expected = generate(&mut whole);
        // Ranks without an equal share of the experts, an expert that serves all, and rounds of two tokens:
        // once.
        let more: &[(usize, usize)] = if i == 2 { &[(1, WIDE), (3, 2)] } else { &[] };
        for (ranks, round) in [(2, 16), (4, WIDE)].iter().chain(more).copied() {
            let mut backend = shared(variant, Quantize::None, ranks, round).unwrap();
            let said = generate(&mut backend);
            assert_eq!(said, expected, "{}: {ranks} ranks, {round} tokens a round", variant.name);
            assert!(backend.replayed > 2, "{}: {} steps were replayed", variant.name, backend.replayed);
        }
    }
}

#[test]
fn quantised_experts_are_shared_with_their_scales() {
    for quantize in [Quantize::Int8, Quantize::Int4] {
        // One with biases, one with another expert beside.
        for variant in [&MODELS[6], &MODELS[8]] {
            let Some(mut whole) = alone(variant, quantize) else { return };
            let expected = generate(&mut whole);
            let said = generate(&mut shared(variant, quantize, 4, 16).unwrap());
            assert_eq!(said, expected, "{} {quantize}", variant.name);
        }
    }
}

/// A chunk whose logits nobody wants ends before the last layer's experts, and one of some that do has few
/// rows there.
#[test]
fn a_step_without_wanted_rows_has_no_round_in_the_last_layer() {
    for variant in [&MODELS[4], &MODELS[5]] {
        let prompt = prompt_of(60, 7);
        let run = |backend: &mut dyn Backend| {
            let (mut pool, mut sequence) = (Pool::ascending(backend), Sequence::new(backend));
            sequence.grow(&mut pool, 60);
            let (tables, mut logits) = (sequence.tables(), Vec::new());
            for (piece, wants_logits) in [(0..20, false), (20..40, false), (40..60, true)] {
                let start = piece.start;
                let chunk = Chunk { tokens: &prompt[piece], start, tables: &tables, wants_logits };
                backend.step(&[chunk], &mut logits).unwrap();
            }
            bits(&logits)
        };
        let Some(mut whole) = alone(variant, Quantize::None) else { return };
        let expected = run(&mut whole);
        let said = run(&mut shared(variant, Quantize::None, 2, 16).unwrap());
        assert_eq!(said, expected, "{}", variant.name);
    }
}

/// Rounds are as small as memory asks for, and as large as a step.
#[test]
fn rounds_are_bounded_by_memory() {
    let plan = |config: &str, ranks, tokens| {
        crate::model::cuda::Plan::new(&config::Config::from_json(config).unwrap(), ranks, tokens)
    };
    let large = MODELS[8]
        .config()
        .replace(r#""hidden_size": 128"#, r#""hidden_size": 7168"#)
        .replace(r#""n_routed_experts": 8"#, r#""n_routed_experts": 256"#)
        .replace(r#""num_experts_per_tok": 3"#, r#""num_experts_per_tok": 8"#)
        .replace(r#""moe_intermediate_size": 128"#, r#""moe_intermediate_size": 2048"#);
    let small = MODELS[4].config();
    let tokens = |config: &str, ranks, tokens| plan(config, ranks, tokens).unwrap().layout.tokens;
    assert_eq!([tokens(&large, 8, 8192), tokens(&large, 2, 8192)], [256, 1024]);
    assert_eq!([tokens(&small, 2, 8192), tokens(&small, 2, 40)], [1024, 40]);
    let error = plan(&MODELS[0].config(), 2, 64).unwrap_err().to_string();
    assert!(error.contains("without experts"), "{error}");
}
