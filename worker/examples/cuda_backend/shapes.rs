//! The published shapes that are timed with random weights, and what a step of one cannot avoid: bytes that
//! it must read, operations that it must do.

use keyway_worker::model::Quantize;

/// Tokens that all of them know.
pub(crate) const VOCAB: u32 = 128_000;

/// A published model's sizes, of which a step's bytes and operations are counted.
#[derive(Debug)]
pub(crate) struct Shape {
    pub(crate) config: &'static str,
    layers: usize,
    /// Weights of a layer that every token is multiplied with, beside its gated networks.
    every_token: usize,
    /// Weights of one gated network, how many a layer has, and how many of them serve a token.
    network: usize,
    networks: usize,
    chosen: usize,
    /// Weights of the head, and as many of the embedding, of which a step looks single rows up.
    head: usize,
    /// Elements of a token's queries.
    queries: usize,
}

/// Llama 3.1 8B, a dense model: huggingface.co/meta-llama/Llama-3.1-8B, `config.json`.
pub(crate) const LLAMA_8B: Shape = Shape {
    config: r#"{"architectures": ["LlamaForCausalLM"], "vocab_size": 128256,
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
        "hidden_act": "silu"}"#,
    layers: 32,
    every_token: 4096 * (4096 + 2 * 1024 + 4096),
    network: 3 * 4096 * 14_336,
    networks: 1,
    chosen: 1,
    head: 4096 * 128_256,
    queries: 4096,
};

/// Qwen3 30B-A3B, a mixture of experts: huggingface.co/Qwen/Qwen3-30B-A3B, `config.json`.
pub(crate) const QWEN3_30B: Shape = Shape {
    config: r#"{"architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 151936,
        "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128,
        "num_experts_per_tok": 8, "norm_topk_prob": true, "num_hidden_layers": 48, "num_attention_heads": 32,
        "num_key_value_heads": 4, "head_dim": 128, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0, "hidden_act": "silu"}"#,
    layers: 48,
    every_token: 2048 * (4096 + 2 * 512 + 4096 + 128),
    network: 3 * 2048 * 768,
    networks: 128,
    chosen: 8,
    head: 2048 * 151_936,
    queries: 4096,
};

impl Shape {
    /// Bytes of the weights that a step of `tokens` tokens reads, of `all` that there are: where a router
    /// chooses, those of as many experts as even choices reach. For one token that is exact.
    pub(crate) fn weight_bytes(&self, all: usize, tokens: usize, quantize: Quantize) -> usize {
        let weight = match quantize {
            Quantize::None => 2.0,
            // A scale of four bytes for 128.
            Quantize::Int8 => 1.0 + 4.0 / 128.0,
            Quantize::Int4 => 0.5 + 4.0 / 128.0,
        };
        let networks = (self.layers * self.networks * self.network) as f64 * weight;
        let missed = (1.0 - self.chosen as f64 / self.networks as f64).powi(tokens as i32);
        all - self.head * 2 - (networks * missed) as usize
    }

    /// Operations of the products of a step of `tokens` tokens, `rows` of which go through the head.
    pub(crate) fn operations(&self, tokens: usize, rows: usize) -> usize {
        2 * (tokens * self.layers * (self.every_token + self.chosen * self.network) + rows * self.head)
    }

    /// Those of attention over a prompt of `tokens` tokens: scores and sums of what each sees, half of all
    /// pairs.
    pub(crate) fn attention_operations(&self, tokens: usize) -> usize {
        2 * 2 * (tokens * tokens / 2) * self.layers * self.queries
    }
}
