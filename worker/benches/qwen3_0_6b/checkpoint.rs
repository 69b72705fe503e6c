//! A checkpoint of Qwen3-0.6B's exact shape with random weights in bf16.

use std::fs::File;
use std::io::{self, BufWriter, Write as _};
use std::path::Path;

const VOCAB: usize = 151_936;
const HIDDEN: usize = 1024;
const INNER: usize = 3072;
const LAYERS: usize = 28;
const HEADS: usize = 16;
const KV_HEADS: usize = 8;
const HEAD_DIM: usize = 128;

/// Weights that every token of a prompt is multiplied with: those of the layers.
pub(crate) const LAYER_WEIGHTS: usize =
    LAYERS * HIDDEN * (2 * HEADS * HEAD_DIM + 2 * KV_HEADS * HEAD_DIM + 3 * INNER);

/// Writes `config.json` and `model.safetensors`.
pub(crate) fn write(dir: &Path) -> io::Result<()> {
    std::fs::write(dir.join("config.json"), config().to_string())?;
    let tensors = tensors();
    let mut header = serde_json::Map::new();
    let mut end = 0;
    for (name, shape) in &tensors {
        let begin = end;
        end += 2 * shape.iter().product::<usize>();
        let entry = serde_json::json!({"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]});
        header.insert(name.clone(), entry);
    }
    let header = serde_json::Value::Object(header).to_string();
    let mut file = BufWriter::with_capacity(1 << 20, File::create(dir.join("model.safetensors"))?);
    file.write_all(&(header.len() as u64).to_le_bytes())?;
    file.write_all(header.as_bytes())?;
    let mut random = fastrand::Rng::with_seed(6);
    for (name, shape) in &tensors {
        write_tensor(&mut file, &mut random, shape.iter().product(), name.ends_with("norm.weight"))?;
    }
    file.flush()
}

/// Uniform within 0.03 around 0, or around 1 for a norm: products keep the size of their inputs.
fn write_tensor(
    file: &mut impl io::Write,
    random: &mut fastrand::Rng,
    elements: usize,
    norm: bool,
) -> io::Result<()> {
    for _ in 0..elements / 4 {
        let mut bytes = [0; 8];
        for (bytes, bits) in
            bytes.as_chunks_mut::<2>().0.iter_mut().zip(random.u64(..).to_le_bytes().as_chunks::<2>().0)
        {
            let value =
                f32::from(i16::from_le_bytes(*bits)) * (0.03 / 32768.0) + if norm { 1.0 } else { 0.0 };
            *bytes = half::bf16::from_f32(value).to_le_bytes();
        }
        file.write_all(&bytes)?;
    }
    Ok(())
}

fn tensors() -> Vec<(String, Vec<usize>)> {
    let mut tensors = vec![
        ("model.embed_tokens.weight".to_owned(), vec![VOCAB, HIDDEN]),
        ("model.norm.weight".to_owned(), vec![HIDDEN]),
    ];
    let (queries, keys) = (HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM);
    for layer in 0..LAYERS {
        for (part, shape) in [
            ("input_layernorm", vec![HIDDEN]),
            ("post_attention_layernorm", vec![HIDDEN]),
            ("self_attn.q_proj", vec![queries, HIDDEN]),
            ("self_attn.k_proj", vec![keys, HIDDEN]),
            ("self_attn.v_proj", vec![keys, HIDDEN]),
            ("self_attn.q_norm", vec![HEAD_DIM]),
            ("self_attn.k_norm", vec![HEAD_DIM]),
            ("self_attn.o_proj", vec![HIDDEN, queries]),
            ("mlp.gate_proj", vec![INNER, HIDDEN]),
            ("mlp.up_proj", vec![INNER, HIDDEN]),
            ("mlp.down_proj", vec![HIDDEN, INNER]),
        ] {
            tensors.push((format!("model.layers.{layer}.{part}.weight"), shape));
        }
    }
    tensors
}

fn config() -> serde_json::Value {
    serde_json::json!({
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": true,
        "hidden_act": "silu",
        "attention_bias": false,
        "torch_dtype": "bfloat16",
        "eos_token_id": 151_645
    })
}
