//! Old and new spellings, and every refusal names its key.

use keyway_kernels::rope::{Pairing, RopeScaling};
use serde_json::{Value, json};

use super::*;
use crate::model::config::{Attention, FeedForward, Grouped, Latent, Quantisation};

fn base() -> Value {
    json!({
        "architectures": ["LlamaForCausalLM"], "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "hidden_act": "silu", "eos_token_id": 7
    })
}

fn deepseek(changes: Value) -> Value {
    let mut config = json!({
        "architectures": ["DeepseekV3ForCausalLM"], "num_key_value_heads": 4, "q_lora_rank": null,
        "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16,
        "n_routed_experts": 8, "n_shared_experts": 1, "moe_intermediate_size": 32, "n_group": 4, "topk_group": 2,
        "num_experts_per_tok": 3, "first_k_dense_replace": 1
    });
    config.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
    config
}

fn gpt_oss(changes: Value) -> Value {
    let mut config = json!({
        "architectures": ["GptOssForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2,
        "sliding_window": 32
    });
    config.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
    config
}

/// `base` with the keys of `changes` in place of its own.
fn parse(changes: Value) -> Result<Config, ModelError> {
    let mut config = base();
    config.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
    let raw: RawConfig = serde_json::from_value(config).unwrap();
    super::config(&raw)
}

fn grouped(config: &Config) -> Grouped {
    match config.attention {
        Attention::Grouped(grouped) => grouped,
        Attention::Latent(_) => panic!("{config:?}"),
    }
}

fn latent(config: &Config) -> Latent {
    match config.attention {
        Attention::Latent(latent) => latent,
        Attention::Grouped(_) => panic!("{config:?}"),
    }
}

fn windows(changes: Value) -> Vec<Option<usize>> {
    parse(changes).unwrap().layers.iter().map(|layer| layer.window).collect()
}

#[test]
fn defaults_are_those_of_the_family() {
    let config = parse(json!({"num_key_value_heads": null})).unwrap();
    let attention = grouped(&config);
    assert_eq!((attention.kv_heads, attention.head_dim), (4, 16));
    assert_eq!((config.rope.theta, config.rope.scaling), (10_000.0, RopeScaling::None));
    assert_eq!((config.norm_eps, config.eos_token_ids), (1e-5, vec![7]));
    assert!(!attention.qk_norm && !attention.qkv_bias && !attention.output_bias && !attention.sinks);
    let qwen2 = grouped(&parse(json!({"architectures": ["Qwen2ForCausalLM"]})).unwrap());
    assert!(qwen2.qkv_bias && !qwen2.output_bias && !qwen2.qk_norm);
    let gpt_oss = parse(gpt_oss(json!({"rms_norm_eps": null}))).unwrap();
    assert_eq!((gpt_oss.rope.theta, gpt_oss.norm_eps), (150_000.0, 1e-5));
    assert!(grouped(&gpt_oss).qkv_bias && grouped(&gpt_oss).output_bias && grouped(&gpt_oss).sinks);
}

#[test]
fn both_spellings_of_rope_mean_the_same() {
    let llama3 = json!({
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192
    });
    let old = parse(json!({"rope_theta": 5e5, "rope_scaling": llama3})).unwrap().rope;
    let mut parameters = llama3;
    parameters["rope_theta"] = json!(5e5);
    let new = parse(json!({"rope_parameters": parameters})).unwrap().rope;
    assert_eq!((old.theta, old.scaling), (new.theta, new.scaling));
    assert!(matches!(new.scaling, RopeScaling::Llama3 { original_max_position: 8192.0, .. }));
    let oldest = parse(json!({"rope_scaling": {"type": "linear", "factor": 2.0}})).unwrap();
    assert_eq!(oldest.rope.scaling, RopeScaling::Linear { factor: 2.0 });
}

#[test]
fn yarn_takes_the_factor_it_is_given_or_derives_it() {
    let attention_factor = |extra: Value| {
        let mut rope = json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128});
        rope.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        match parse(json!({"rope_parameters": rope})).unwrap().rope.scaling {
            RopeScaling::Yarn { attention_factor, beta_fast: 32.0, truncate: true, .. } => attention_factor,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(attention_factor(json!({})), 0.1 * 4.0_f64.ln() + 1.0);
    assert_eq!(attention_factor(json!({"attention_factor": 1.25})), 1.25);
    assert_eq!(attention_factor(json!({"mscale": 1.0, "mscale_all_dim": 1.0})), 1.0);
}

#[test]
fn windows_are_where_each_family_has_them() {
    let mistral = |window: Value| {
        let mut changes = json!({"architectures": ["MistralForCausalLM"]});
        changes.as_object_mut().unwrap().extend(window.as_object().unwrap().clone());
        windows(changes)
    };
    assert_eq!(mistral(json!({})), [Some(4096); 2]);
    assert_eq!(mistral(json!({"sliding_window": null})), [None; 2]);
    assert_eq!(mistral(json!({"sliding_window": 41})), [Some(41); 2]);
    let qwen3 = json!({
        "architectures": ["Qwen3ForCausalLM"], "sliding_window": 64, "use_sliding_window": true,
        "max_window_layers": 1
    });
    assert_eq!(windows(qwen3.clone()), [None, Some(64)]);
    let mut by_type = qwen3.clone();
    by_type["layer_types"] = json!(["sliding_attention", "full_attention"]);
    assert_eq!(windows(by_type), [Some(64), None]);
    let mut unused = qwen3;
    unused["use_sliding_window"] = json!(false);
    assert_eq!(windows(unused), [None; 2]);
    assert_eq!(windows(gpt_oss(json!({}))), [Some(32), None]);
    let types = json!({"layer_types": ["full_attention", "sliding_attention"]});
    assert_eq!(windows(gpt_oss(types)), [None, Some(32)]);
}

#[test]
fn experts_are_where_the_configuration_puts_them() {
    let sparse = |changes: Value| -> Vec<bool> {
        let layers = parse(changes).unwrap().layers;
        layers.iter().map(|layer| matches!(layer.feed_forward, FeedForward::Experts(_))).collect()
    };
    let qwen3_moe = json!({
        "architectures": ["Qwen3MoeForCausalLM"], "num_hidden_layers": 4, "num_experts": 8,
        "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": true,
        "decoder_sparse_step": 2, "mlp_only_layers": [3]
    });
    assert_eq!(sparse(qwen3_moe), [false, true, false, false]);
    assert_eq!(sparse(deepseek(json!({}))), [false, true]);
    assert_eq!(sparse(gpt_oss(json!({}))), [true, true]);
}

/// DeepSeek-V2 stretches scores by the square of `0.1 mscale_all_dim ln(factor) + 1`.
#[test]
fn yarn_scales_latent_attention() {
    let plain = latent(&parse(deepseek(json!({}))).unwrap());
    assert_eq!(plain.scale, 1.0 / 32.0_f32.sqrt());
    let rope = json!({
        "type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, "mscale": 0.707,
        "mscale_all_dim": 0.707
    });
    let config = parse(deepseek(json!({"rope_scaling": rope}))).unwrap();
    let stretch = 0.1 * 0.707 * 40.0_f64.ln() + 1.0;
    assert_eq!(latent(&config).scale, (stretch * stretch / 32.0_f64.sqrt()) as f32);
    assert_eq!(config.rope.pairing, Pairing::Interleaved);
    let halves = parse(deepseek(json!({"rope_interleave": false}))).unwrap();
    assert_eq!(halves.rope.pairing, Pairing::Halves);
}

#[test]
fn quantisation_is_read_where_the_family_has_it() {
    let mxfp4 = gpt_oss(json!({"quantization_config": {"quant_method": "mxfp4"}}));
    assert_eq!(parse(mxfp4).unwrap().quantisation, Quantisation::Mxfp4Experts);
    let fp8 = json!({"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]});
    let qwen = json!({"architectures": ["Qwen3ForCausalLM"], "quantization_config": fp8});
    for fp8 in [qwen, deepseek(json!({"quantization_config": fp8}))] {
        assert_eq!(parse(fp8).unwrap().quantisation, Quantisation::Fp8Blocks);
    }
}

#[test]
fn what_is_not_computed_is_refused_by_its_key() {
    let v2 = |changes: Value| {
        let mut config = deepseek(changes);
        config["architectures"] = json!(["DeepseekV2ForCausalLM"]);
        config
    };
    let fp8 =
        |size: Value| json!({"quantization_config": {"quant_method": "fp8", "weight_block_size": size}});
    let linear = json!({"rope_scaling": {"type": "linear", "factor": 2.0}});
    let cases = [
        ("architectures", json!({"architectures": ["Gemma3ForCausalLM"]})),
        ("architectures", json!({"architectures": []})),
        ("vocab_size", json!({"vocab_size": null})),
        ("hidden_size", json!({"hidden_size": 0})),
        ("num_attention_heads", json!({"num_attention_heads": 99_999_999})),
        ("num_key_value_heads", json!({"num_key_value_heads": 3})),
        ("head_dim", json!({"head_dim": 20})),
        ("hidden_act", json!({"hidden_act": "gelu"})),
        ("mlp_bias", json!({"mlp_bias": true})),
        ("sliding_window", json!({"sliding_window": 4096})),
        ("sliding_window", json!({"architectures": ["MistralForCausalLM"], "sliding_window": 0})),
        ("sliding_window", gpt_oss(json!({"sliding_window": null}))),
        ("layer_types", json!({"layer_types": ["full_attention", "sliding_attention"]})),
        ("layer_types", json!({"layer_types": ["full_attention"]})),
        ("layer_types", gpt_oss(json!({"layer_types": ["chunked_attention", "full_attention"]}))),
        ("swiglu_limit", gpt_oss(json!({"swiglu_limit": 0.0}))),
        ("quantization_config", json!({"quantization_config": {"bits": 4}})),
        ("quantization_config", gpt_oss(json!({"quantization_config": {"quant_method": "awq"}}))),
        ("quantization_config", deepseek(fp8(json!([64, 64])))),
        ("quantization_config", deepseek(fp8(json!(null)))),
        ("partial_rotary_factor", json!({"partial_rotary_factor": 0.5})),
        ("rope_theta", json!({"rope_theta": 0.0})),
        ("rope_parameters", json!({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}})),
        ("rope_parameters", json!({"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}})),
        ("rope_parameters", json!({"rope_parameters": {"rope_type": "linear"}})),
        ("rope_parameters", json!({"rope_parameters": {"full_attention": {"rope_type": "default"}}})),
        ("rope_scaling", deepseek(linear)),
        ("num_experts", json!({"architectures": ["Qwen3MoeForCausalLM"]})),
        ("num_experts_per_tok", gpt_oss(json!({"num_experts_per_tok": 5}))),
        ("num_experts_per_tok", deepseek(json!({"n_group": 3}))),
        ("num_key_value_heads", deepseek(json!({"num_key_value_heads": 2}))),
        ("kv_lora_rank", deepseek(json!({"kv_lora_rank": 40}))),
        ("qk_rope_head_dim", deepseek(json!({"qk_rope_head_dim": null}))),
        ("moe_layer_freq", deepseek(json!({"moe_layer_freq": 2}))),
        ("scoring_func", deepseek(json!({"scoring_func": "softmax"}))),
        ("topk_method", deepseek(json!({"topk_method": "greedy"}))),
        ("topk_method", v2(json!({"topk_method": "noaux_tc"}))),
        ("norm_topk_prob", v2(json!({"norm_topk_prob": true}))),
    ];
    for (expected, changes) in cases {
        match parse(changes.clone()) {
            Err(ModelError::Config { key, .. }) => assert_eq!(key, expected, "{changes}"),
            other => panic!("{changes}: {other:?}"),
        }
    }
    let unsupported = parse(json!({"architectures": ["Gemma3ForCausalLM"]})).unwrap_err().to_string();
    assert!(unsupported.contains("Gemma3ForCausalLM") && unsupported.contains("Qwen3MoeForCausalLM"));
}
