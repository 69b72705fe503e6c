//! Small models of several families whose sizes the CUDA kernels cover; shared with the backend's tests.

pub(crate) const VOCAB: u32 = 120;

/// A family, and what its `config.json` has beside the sizes that all have.
#[derive(Debug)]
pub(crate) struct Variant {
    pub(crate) name: &'static str,
    pub(crate) more: &'static str,
}

/// Head widths 64 and 128, grouped queries or none, windows in all layers or some, biases, tied heads, scaled
/// angles; then those with experts: weights renormalised or not, a dense layer among them, biases, sinks and
/// the clamped gate; latent attention with and without the queries' bottleneck, groups of experts and shared
/// ones; products in FP8.
pub(crate) const MODELS: &[Variant] = &[
    Variant {
        name: "LlamaForCausalLM",
        more: r#""num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
            "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 64}"#,
    },
    Variant {
        name: "MistralForCausalLM",
        more: r#""num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 64, "sliding_window": 41"#,
    },
    Variant {
        name: "Qwen2ForCausalLM",
        more: r#""num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64, "tie_word_embeddings": true,
            "use_sliding_window": true, "sliding_window": 70, "max_window_layers": 1"#,
    },
    Variant {
        name: "Qwen3ForCausalLM",
        more: r#""num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 128, "tie_word_embeddings": true"#,
    },
    Variant {
        name: "MixtralForCausalLM",
        more: r#""num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64, "num_local_experts": 4,
            "num_experts_per_tok": 2"#,
    },
    Variant {
        name: "Qwen3MoeForCausalLM",
        more: r#""num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 128, "num_experts": 9,
            "num_experts_per_tok": 3, "moe_intermediate_size": 128, "norm_topk_prob": false, "mlp_only_layers": [0]"#,
    },
    Variant {
        name: "GptOssForCausalLM",
        more: r#""num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "num_local_experts": 5,
            "num_experts_per_tok": 2, "sliding_window": 41,
            "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}"#,
    },
    Variant {
        name: "DeepseekV2ForCausalLM",
        more: r#""num_attention_heads": 2, "num_key_value_heads": 2, "kv_lora_rank": 512, "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 64, "v_head_dim": 64, "n_routed_experts": 4, "n_shared_experts": 2,
            "num_experts_per_tok": 2, "moe_intermediate_size": 128, "first_k_dense_replace": 1"#,
    },
    Variant {
        name: "DeepseekV3ForCausalLM",
        more: r#""num_attention_heads": 3, "num_key_value_heads": 3, "q_lora_rank": 128, "kv_lora_rank": 512,
            "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 8,
            "n_shared_experts": 1, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3,
            "moe_intermediate_size": 128, "first_k_dense_replace": 0,
            "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64,
                "mscale": 1.0, "mscale_all_dim": 1.0}"#,
    },
    Variant {
        name: "Qwen3MoeForCausalLM",
        more: r#""num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 128, "num_experts": 5,
            "num_experts_per_tok": 2, "moe_intermediate_size": 384, "mlp_only_layers": [0],
            "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}"#,
    },
];

impl Variant {
    /// Whether a router chooses who serves a token. Where it is torn, rounding decides, and logits may be any
    /// of two.
    pub(crate) fn has_experts(&self) -> bool {
        self.more.contains("experts_per_tok")
    }

    /// The `config.json` of a small model of this family: two layers, 128 wide.
    pub(crate) fn config(&self) -> String {
        let Self { name, more } = self;
        format!(
            r#"{{"architectures": ["{name}"], "vocab_size": {VOCAB}, "hidden_size": 128,
                "intermediate_size": 128, "num_hidden_layers": 2, "max_position_embeddings": 2048,
                "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "hidden_act": "silu", {more}}}"#
        )
    }
}
