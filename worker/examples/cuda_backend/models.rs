//! Small dense models of several families whose sizes the CUDA kernels cover; shared with the backend's tests.

pub(crate) const VOCAB: u32 = 120;

/// A family, and what its `config.json` has beside the sizes that all have.
#[derive(Debug)]
pub(crate) struct Variant {
    pub(crate) name: &'static str,
    pub(crate) more: &'static str,
}

/// Head widths 64 and 128, grouped queries or none, windows in all layers or some, biases, tied heads, scaled angles.
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
];

impl Variant {
    /// Its `config.json`.
    pub(crate) fn config(&self) -> String {
        let Self { name, more } = self;
        format!(
            r#"{{"architectures": ["{name}"], "vocab_size": {VOCAB}, "hidden_size": 128,
                "intermediate_size": 128, "num_hidden_layers": 2, "max_position_embeddings": 2048,
                "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "hidden_act": "silu", {more}}}"#
        )
    }
}
