//! Old and new spellings, and every refusal names its key.

use serde_json::{Value, json};

use super::*;

fn base() -> Value {
    json!({
        "architectures": ["LlamaForCausalLM"], "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "hidden_act": "silu", "eos_token_id": 7
    })
}

/// `base` with the keys of `changes` in place of its own.
fn parse(changes: Value) -> Result<Config, ModelError> {
    let mut config = base();
    for (key, value) in changes.as_object().unwrap() {
        config[key] = value.clone();
    }
    let raw: RawConfig = serde_json::from_value(config).unwrap();
    Config::from_raw(raw)
}

#[test]
fn defaults_are_those_of_the_family() {
    let config = parse(json!({"num_key_value_heads": null})).unwrap();
    assert_eq!((config.kv_heads, config.head_dim), (4, 16));
    assert_eq!((config.rope_theta, config.rope_scaling), (10_000.0, RopeScaling::None));
    assert_eq!((config.norm_eps, config.eos_token_ids), (1e-5, vec![7]));
    assert!(!config.qk_norm && !config.qkv_bias && !config.output_bias);
    let qwen2 = parse(json!({"architectures": ["Qwen2ForCausalLM"]})).unwrap();
    assert!(qwen2.qkv_bias && !qwen2.output_bias && !qwen2.qk_norm);
}

#[test]
fn both_spellings_of_rope_mean_the_same() {
    let llama3 = json!({
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192
    });
    let old = parse(json!({"rope_theta": 5e5, "rope_scaling": llama3})).unwrap();
    let mut parameters = llama3;
    parameters["rope_theta"] = json!(5e5);
    let new = parse(json!({"rope_parameters": parameters})).unwrap();
    assert_eq!((old.rope_theta, old.rope_scaling), (new.rope_theta, new.rope_scaling));
    assert!(matches!(new.rope_scaling, RopeScaling::Llama3 { original_max_position: 8192.0, .. }));
    let oldest = parse(json!({"rope_scaling": {"type": "linear", "factor": 2.0}})).unwrap();
    assert_eq!(oldest.rope_scaling, RopeScaling::Linear { factor: 2.0 });
}

#[test]
fn experts_are_where_the_configuration_puts_them() {
    let changes = json!({
        "architectures": ["Qwen3MoeForCausalLM"], "num_hidden_layers": 4, "num_experts": 8,
        "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": true,
        "decoder_sparse_step": 2, "mlp_only_layers": [3]
    });
    let config = parse(changes).unwrap();
    let sparse: Vec<bool> =
        config.layers.iter().map(|layer| matches!(layer, FeedForward::Experts { .. })).collect();
    assert_eq!(sparse, [false, true, false, false]);
    assert!(config.qk_norm);
}

#[test]
fn what_is_not_computed_is_refused_by_its_key() {
    let cases = [
        ("architectures", json!({"architectures": ["GptOssForCausalLM"]})),
        ("architectures", json!({"architectures": []})),
        ("vocab_size", json!({"vocab_size": null})),
        ("hidden_size", json!({"hidden_size": 0})),
        ("num_attention_heads", json!({"num_attention_heads": 99_999_999})),
        ("num_key_value_heads", json!({"num_key_value_heads": 3})),
        ("head_dim", json!({"head_dim": 20})),
        ("hidden_act", json!({"hidden_act": "gelu"})),
        ("mlp_bias", json!({"mlp_bias": true})),
        ("sliding_window", json!({"sliding_window": 4096})),
        ("sliding_window", json!({"layer_types": ["full_attention", "sliding_attention"]})),
        ("quantization_config", json!({"quantization_config": {"bits": 4}})),
        ("partial_rotary_factor", json!({"partial_rotary_factor": 0.5})),
        ("rope_theta", json!({"rope_theta": 0.0})),
        ("rope_parameters", json!({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}})),
        ("rope_parameters", json!({"rope_parameters": {"rope_type": "linear"}})),
        ("rope_parameters", json!({"rope_parameters": {"full_attention": {"rope_type": "default"}}})),
        ("num_experts", json!({"architectures": ["Qwen3MoeForCausalLM"]})),
    ];
    for (expected, changes) in cases {
        match parse(changes.clone()) {
            Err(ModelError::Config { key, .. }) => assert_eq!(key, expected, "{changes}"),
            other => panic!("{changes}: {other:?}"),
        }
    }
    let unsupported = parse(json!({"architectures": ["GptOssForCausalLM"]})).unwrap_err().to_string();
    assert!(unsupported.contains("GptOssForCausalLM") && unsupported.contains("Qwen3MoeForCausalLM"));
}

#[test]
fn an_unused_window_is_accepted() {
    assert!(parse(json!({"sliding_window": 4096, "use_sliding_window": false})).is_ok());
}
