//! Experts on the device: the CPU's logits for every routing, equal bits wherever the other tokens go,
//! experts that nobody chose, and rows that fill a step up.

use half::bf16;
use keyway_kernels::matmul::{PackedMatrix, SmallFloats, WeightType};

use super::*;
use crate::model::weights::{ExpertsWeights, FeedForwardWeights};

/// What an expert's bias in the router is raised by.
type Lean = fn(usize) -> f32;

const EVEN: Lean = |_| 0.0;
const SKEWED: Lean = |expert| if expert == 1 { 4.0 } else { 0.0 };
/// To the last ones alone: no token is torn between two.
const LAST: Lean = |expert| 64.0 * expert as f32;
const NEVER_THE_FIRST: Lean = |expert| if expert == 0 { -128.0 } else { 0.0 };

/// Every token has one expert, or all there are.
const EXTREMES: [Variant; 2] = [
    Variant {
        name: "Qwen3MoeForCausalLM",
        more: r#""num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 64, "num_experts": 4,
            "num_experts_per_tok": 1, "moe_intermediate_size": 128"#,
    },
    Variant {
        name: "MixtralForCausalLM",
        more: r#""num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 64, "num_local_experts": 3,
            "num_experts_per_tok": 3"#,
    },
];

fn with_experts() -> impl Iterator<Item = &'static Variant> {
    MODELS.iter().filter(|variant| variant.has_experts())
}

fn experts_of(model: &mut LoadedModel) -> impl Iterator<Item = &mut ExpertsWeights> {
    model.weights.layers.iter_mut().filter_map(|layer| match &mut layer.feed_forward {
        FeedForwardWeights::Experts(experts) => Some(&mut **experts),
        FeedForwardWeights::Dense(_) => None,
    })
}

/// A model whose routers lean towards some experts.
fn leaning(variant: &Variant, lean: Lean) -> LoadedModel {
    leaning_of(load(variant), lean)
}

fn leaning_of(mut model: LoadedModel, lean: Lean) -> LoadedModel {
    for experts in experts_of(&mut model) {
        let own = experts.router.bias.take().unwrap_or_else(|| vec![0.0; experts.shape.count]);
        let bias = own.iter().enumerate().map(|(e, own)| bf16::from_f32(own + lean(e)).to_f32());
        experts.router.bias = Some(bias.collect());
        for (e, correction) in experts.correction_bias.iter_mut().flatten().enumerate() {
            *correction += lean(e);
        }
    }
    model
}

fn on_device(model: LoadedModel) -> Option<CudaBackend<Emulator>> {
    let emulator = Emulator::start(1)?;
    Some(model.onto(emulator, Quantize::None).unwrap().into_backend(LAYOUT).unwrap())
}

/// A piece, then single tokens.
fn pieces(len: usize) -> Vec<Range<usize>> {
    let singles = (len - 8..len).map(|at| at..at + 1);
    std::iter::once(0..len - 8).chain(singles).collect()
}

/// Three prompts side by side, in pieces and token by token.
fn together(backend: &mut CudaBackend<Emulator>, prompts: &[Vec<u32>]) -> Vec<Vec<u32>> {
    let cuts = [vec![130, 1, 1], vec![70], vec![1, 100, 1]];
    let mut pool = Pool::ascending(backend);
    side_by_side(backend, &mut pool, prompts, &cuts)
}

fn prompts() -> Vec<Vec<u32>> {
    [(150, 7), (140, 11), (90, 13)].map(|(len, step)| prompt_of(len, step)).into()
}

#[test]
fn logits_are_the_cpus_whatever_the_router_prefers() {
    let prompt = prompt_of(60, 11);
    let leans = [("skewed", SKEWED), ("the last", LAST), ("never the first", NEVER_THE_FIRST)];
    let some = with_experts().flat_map(|variant| leans.map(|lean| (variant, lean)));
    let extremes = EXTREMES.iter().flat_map(|variant| [("even", EVEN), leans[1]].map(|lean| (variant, lean)));
    for (variant, (name, lean)) in some.chain(extremes) {
        let Some(mut backend) = on_device(leaning(variant, lean)) else { return };
        let mut cpu = leaning(variant, lean).into_backend(LAYOUT).unwrap();
        let off = off(&mut backend, &mut cpu, &prompt, &pieces(prompt.len()));
        println!("{} {name}: {off:.4?}", variant.name);
        assert_near(&off, name != "the last", &format!("{} {name}", variant.name));
    }
}

#[test]
fn no_bit_depends_on_where_other_tokens_go() {
    for variant in with_experts().chain(&EXTREMES[..1]) {
        for lean in [EVEN, LAST] {
            let Some(mut backend) = on_device(leaning(variant, lean)) else { return };
            let beside = together(&mut backend, &prompts());
            for (prompt, beside) in prompts().iter().zip(beside) {
                let alone = whole(&mut on_device(leaning(variant, lean)).unwrap(), prompt);
                assert_eq!(beside, bits(&alone), "{}", variant.name);
            }
        }
    }
}

/// Their weights may be anything.
#[test]
fn experts_that_nobody_chose_are_not_multiplied() {
    for variant in with_experts() {
        let Some(mut backend) = on_device(leaning(variant, NEVER_THE_FIRST)) else { return };
        let expected = together(&mut backend, &prompts());
        let mut poisoned = leaning(variant, NEVER_THE_FIRST);
        for experts in experts_of(&mut poisoned) {
            let network = experts.experts.networks[0].as_mut().unwrap();
            for linear in [&mut network.gate_up, &mut network.down] {
                let (outputs, inputs) = (linear.weight.outputs(), linear.weight.inputs());
                linear.weight = match linear.weight.small_floats() {
                    Some(SmallFloats::Fp8 { block }) => {
                        PackedMatrix::pack_fp8(outputs, inputs, block, |_, _, scales| scales.fill(f32::NAN))
                    }
                    _ => PackedMatrix::pack(outputs, inputs, WeightType::Bf16, |_, row| row.fill(f32::NAN)),
                };
            }
        }
        assert_eq!(together(&mut on_device(poisoned).unwrap(), &prompts()), expected, "{}", variant.name);
    }
}

/// A step of three sequences is filled up to four rows: the fourth reads no expert's weights.
#[test]
fn rows_that_fill_a_step_up_choose_nobody() {
    for (variant, top) in [(&MODELS[4], 2), (&MODELS[5], 3)] {
        let Some(mut backend) = emulated(variant) else { return };
        let prompts: Vec<Vec<u32>> = [3, 5, 7].map(|step| prompt_of(20, step)).into();
        let mut pool = Pool::ascending(&backend);
        let cuts = [19; 3].map(|first| vec![first, 1]);
        side_by_side(&mut backend, &mut pool, &prompts, &cuts);
        let places = backend.places(4).unwrap();
        let (mut own, fillers) = (places[..3 * top].to_vec(), &places[3 * top..]);
        own.sort_unstable();
        assert_eq!(own, (0..3 * top as u32).collect::<Vec<_>>(), "{}", variant.name);
        assert_eq!(fillers, vec![u32::MAX; top], "{}", variant.name);
    }
}

/// A router whose inputs are cut in two: the launch that chooses for few rows adds the parts and the bias
/// itself, and gives the bits of those that choose for many.
#[test]
fn a_wide_routers_parts_are_added() {
    let wide = MODELS[4].config().replace(r#""hidden_size": 128"#, r#""hidden_size": 1024"#);
    let model = || leaning_of(LoadedModel::synthetic(&wide).unwrap(), |expert| 2.0 * expert as f32);
    let prompt = prompt_of(40, 7);
    let Some(mut backend) = on_device(model()) else { return };
    let off = off(&mut backend, &mut model().into_backend(LAYOUT).unwrap(), &prompt, &pieces(prompt.len()));
    assert_near(&off, true, "a wide router");
    let (mut pool, mut sequence) = (Pool::ascending(&backend), Sequence::new(&backend));
    sequence.run(&mut backend, &mut pool, &prompt[..39]);
    let few = sequence.run(&mut backend, &mut pool, &prompt[39..]);
    assert_eq!(bits(&few), bits(&whole(&mut backend, &prompt)));
}

/// DeepSeek-V3 and Qwen3 as they are published in FP8: products of several blocks of scales either way,
/// dense, latent and of experts.
#[test]
fn products_in_fp8_are_those_of_the_cpu() {
    let prompt = prompt_of(60, 7);
    for variant in [&MODELS[3], &MODELS[5], &MODELS[8]] {
        let wide = variant.config().replace(r#""hidden_size": 128"#, r#""hidden_size": 384"#);
        let wide = wide.replace(r#""intermediate_size": 128"#, r#""intermediate_size": 256"#);
        let fp8 = wide.replace(r#""hidden_act""#, &format!("{FP8}, \"hidden_act\""));
        let [plain, fp8] = [wide, fp8].map(|config| move || LoadedModel::synthetic(&config).unwrap());
        let Some(mut backend) = on_device(fp8()) else { return };
        let mut cpu = fp8().into_backend(LAYOUT).unwrap();
        let off = off(&mut backend, &mut cpu, &prompt, &pieces(prompt.len()));
        println!("{}: {off:.4?}", variant.name);
        assert_near(&off, variant.has_experts(), variant.name);
        let other = whole(&mut on_device(plain()).unwrap(), &prompt);
        assert!(distance(&other, &whole(&mut backend, &prompt)) > 0.3, "the same weights");
        let (bytes, in_bf16) = (bytes_of(fp8()), bytes_of(plain()));
        assert!(bytes * 3 < in_bf16 * 2, "{bytes} bytes instead of {in_bf16} in bf16");
    }
}

fn bytes_of(model: LoadedModel) -> usize {
    model.onto(Emulator::start(1).unwrap(), Quantize::None).unwrap().info.weight_bytes
}

/// One launch of both products gives the bits of two, of every token alone and beside others; and it is that
/// one which is launched, where tokens are few.
#[test]
fn both_products_in_one_launch_give_the_bits_of_two() {
    let all = with_experts().map(|variant| (variant, Quantize::None));
    let mixtral = with_experts().find(|variant| variant.name.starts_with("Mixtral")).unwrap();
    let quantised = [Quantize::Int8, Quantize::Int4].map(|quantize| (mixtral, quantize));
    for ((variant, quantize), is_hopper) in
        all.chain(quantised).flat_map(|case| [(case, true), (case, false)])
    {
        let said = [false, true].map(|is_paired| {
            let emulator = Emulator::start(1)?;
            let emulator = if is_hopper { emulator } else { emulator.without_warpgroups() };
            let model = leaning(variant, SKEWED).onto(emulator, quantize).unwrap();
            let model = if is_paired { model.with_paired_experts() } else { model };
            let mut backend = model.into_backend(LAYOUT).unwrap();
            let said = together(&mut backend, &prompts());
            let kernels = backend.device().shared_in_vain().unwrap();
            let is_launched = kernels.iter().any(|(kernel, _)| kernel.contains("_pair"));
            assert_eq!(is_launched, is_paired, "{} {quantize}: {kernels:?}", variant.name);
            Some(said)
        });
        assert_eq!(said[0], said[1], "{} {quantize}, Hopper: {is_hopper}", variant.name);
    }
}

/// gpt-oss as it is published: experts in MXFP4, whose values bf16 has.
#[test]
fn experts_in_mxfp4_are_those_of_the_cpu() {
    let more = format!(r#"{}, "quantization_config": {{"quant_method": "mxfp4"}}"#, MODELS[6].more);
    let variant = Variant { name: MODELS[6].name, more: more.leak() };
    let prompt = prompt_of(60, 7);
    let Some(mut backend) = emulated(&variant) else { return };
    let mut cpu = load(&variant).into_backend(LAYOUT).unwrap();
    let off = off(&mut backend, &mut cpu, &prompt, &pieces(prompt.len()));
    assert_near(&off, true, "MXFP4");
    let plain = whole(&mut emulated(&MODELS[6]).unwrap(), &prompt);
    assert!(distance(&plain, &whole(&mut emulated(&variant).unwrap(), &prompt)) > 0.3, "the same weights");
    // Their codes stay what they are: less than a third of what they take in bf16, and --quantize changes
    // nothing of them.
    let experts = 2 * 5 * (256 * 128 + 128 * 128);
    let saved = bytes_of(load(&MODELS[6])) - bytes_of(load(&variant));
    assert_eq!(saved, experts * 2 - experts / 2 - experts / 32);
    let found = emulated_with(&variant, Quantize::Int8, LAYOUT).unwrap();
    let off = distance(&whole(&mut { found }, &prompt), &run_whole(&mut cpu, &prompt));
    assert!(off < 1.6 * 0.06, "with --quantize int8 off by {off}");
}
