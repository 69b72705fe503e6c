//! What the GPU does not compute is refused with its key and what to do instead.

use super::*;

#[test]
fn a_refusal_names_the_key_and_offers_the_cpu() {
    for (family, key) in [
        ("llama", "head_dim"),
        ("qwen3_moe", "head_dim"),
        ("deepseek_v2", "kv_lora_rank"),
        ("deepseek_v3_fp8", "kv_lora_rank"),
    ] {
        let source = ModelSource::Dir(family_dir(family));
        let message = LoadedModel::check_gpu(&source, Quantize::None).unwrap_err().to_string();
        assert!(message.contains(&format!("`{key}`")) && message.contains("--device cpu"), "{message}");
        assert_eq!(message.lines().count(), 1);
    }
}

#[test]
fn sizes_that_no_kernel_has_are_refused_and_whole_numbers_want_larger_ones() {
    let key = |more: &str, quantize| {
        let text = format!(
            r#"{{"architectures": ["LlamaForCausalLM"], "vocab_size": 8, "num_hidden_layers": 1,
                "num_attention_heads": 2, "head_dim": 64, "max_position_embeddings": 64, {more}}}"#
        );
        let config = config::Config::from_json(&text).unwrap();
        match crate::model::cuda::check(&config, quantize) {
            Ok(()) => "",
            Err(ModelError::Config { key, .. }) => key,
            Err(error) => panic!("{error}"),
        }
    };
    let sizes = |hidden, inner| format!(r#""hidden_size": {hidden}, "intermediate_size": {inner}"#);
    assert_eq!(key(&sizes(192, 320), Quantize::None), "");
    assert_eq!(key(&sizes(192, 320), Quantize::Int8), "hidden_size");
    assert_eq!(key(&sizes(128, 320), Quantize::Int4), "intermediate_size");
    assert_eq!(key(&sizes(128, 96), Quantize::None), "intermediate_size");
}

#[test]
fn blocks_are_powers_of_two_on_a_gpu_and_steps_are_bounded() {
    let Some(emulator) = Emulator::start(1) else { return };
    let mut model = load(&MODELS[0]).onto(emulator, Quantize::None).unwrap();
    let message = model.reserve_steps(70_000, 1).unwrap_err().to_string();
    assert!(message.contains("max-batched-tokens 70000") && message.contains("65535"), "{message}");
    let mut latent = load(&MODELS[7]).onto(Emulator::start(1).unwrap(), Quantize::None).unwrap();
    let message = latent.reserve_steps(40_000, 1).unwrap_err().to_string();
    assert!(message.contains("max-batched-tokens 40000") && message.contains("32768"), "{message}");
    assert!(model.info.numerics_id.starts_with("cuda-emulated-wgmma-bf16-k"), "{}", model.info.numerics_id);
    assert_eq!(model.info.kv_bytes_per_block_position, 2 * 2 * 2 * 64 * 2);
    let message = model.into_backend(KvLayout { block_size: 48, num_blocks: 4 }).unwrap_err().to_string();
    assert!(message.contains("power of two"), "{message}");
}

#[test]
fn experts_that_no_kernel_takes_are_refused_by_their_key() {
    let text = |name: &str, more: &str| {
        Variant { name: name.to_owned().leak(), more: more.to_owned().leak() }.config()
    };
    let refused = |text: &str, quantize| {
        let config = config::Config::from_json(text).unwrap();
        match crate::model::cuda::check(&config, quantize) {
            Ok(()) => String::new(),
            Err(error) => error.to_string(),
        }
    };
    let qwen = |count, top, width| {
        let sizes = format!(
            r#""num_attention_heads": 2, "head_dim": 64, "num_experts": {count}, "num_experts_per_tok": {top},
                "moe_intermediate_size": {width}"#
        );
        text("Qwen3MoeForCausalLM", &sizes)
    };
    let gpt_oss = |more: &str| {
        let sizes = r#""num_attention_heads": 2, "head_dim": 64, "num_local_experts": 4, "num_experts_per_tok": 2,
            "sliding_window": 32"#;
        text("GptOssForCausalLM", &format!("{sizes} {more}"))
    };
    let narrow = gpt_oss("").replace(r#""intermediate_size": 128"#, r#""intermediate_size": 96"#);
    let mxfp4 = gpt_oss(r#", "quantization_config": {"quant_method": "mxfp4"}"#);
    let fp8 = |width| qwen(128, 8, width).replace(r#""num_experts":"#, &format!("{FP8}, \"num_experts\":"));
    assert_eq!(refused(&qwen(128, 8, 768), Quantize::Int4), "");
    assert_eq!(refused(&fp8(768), Quantize::None), "");
    assert_eq!(refused(&qwen(9, 3, 704), Quantize::None), "");
    for quantize in [Quantize::None, Quantize::Int8] {
        assert_eq!(refused(&mxfp4, quantize), "");
    }
    for (message, key) in [
        (refused(&qwen(9, 3, 704), Quantize::Int8), "moe_intermediate_size"),
        (refused(&qwen(1025, 3, 128), Quantize::None), "num_experts"),
        (refused(&qwen(40, 33, 128), Quantize::None), "num_experts_per_tok"),
        (refused(&narrow, Quantize::None), "intermediate_size"),
        (refused(&fp8(320), Quantize::None), "moe_intermediate_size"),
    ] {
        assert!(
            message.contains(&format!("`{key}`")) && message.contains("--device cpu"),
            "{key}: {message}"
        );
        assert_eq!(message.lines().count(), 1);
    }
}
