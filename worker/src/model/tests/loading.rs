//! What `load` reports of a model, and how it refuses a broken checkpoint.

use std::collections::HashMap;
use std::fs;

use safetensors::SafeTensors;
use safetensors::tensor::TensorView;
use tempfile::TempDir;

use super::*;

/// A copy of the Llama checkpoint whose weights are cut into one file per group, by `group(name)`; `None`
/// drops the tensor.
fn copy(group: impl Fn(&str) -> Option<&'static str>) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    fs::copy(family_dir("llama").join("config.json"), dir.path().join("config.json")).unwrap();
    let bytes = fs::read(family_dir("llama").join("model.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let mut files: HashMap<&str, Vec<(String, TensorView<'_>)>> = HashMap::new();
    for (name, tensor) in tensors.tensors() {
        if let Some(file) = group(&name) {
            files.entry(file).or_default().push((name, tensor));
        }
    }
    for (file, tensors) in files {
        safetensors::serialize_to_file(tensors, None, &dir.path().join(file)).unwrap();
    }
    dir
}

fn load(dir: &Path) -> Result<LoadedModel, ModelError> {
    LoadedModel::load(&ModelSource::Dir(dir.into()))
}

fn refusal(dir: &Path) -> String {
    load(dir).unwrap_err().to_string()
}

#[test]
fn the_random_model_describes_itself() {
    let info = LoadedModel::load(&"random".parse().unwrap()).unwrap().info;
    assert_eq!((info.name.as_str(), info.vocab_size, info.max_model_len), ("keyway-random", 320, 32_768));
    assert_eq!((info.eos_token_ids, info.kv_bytes_per_block_position), (vec![256, 258], 2 * 2 * 4 * 2 * 16));
    assert_eq!(info.cache_groups, [CacheGroup::Full]);
    assert!(info.numerics_id.starts_with("cpu-f32-k"));
}

#[test]
fn what_a_family_keeps_is_known_before_its_backend_is() {
    let info = |family: &str| load(&family_dir(family)).unwrap().info;
    let window = |window| CacheGroup::SlidingWindow { window };
    let (kv_heads, head_dim) = (2, 16);
    let per_layer = 2 * kv_heads * head_dim * size_of::<f32>();
    let mistral = info("mistral");
    assert_eq!(
        (mistral.cache_groups, mistral.kv_bytes_per_block_position),
        (vec![window(41)], 2 * per_layer)
    );
    let gpt_oss = info("gpt_oss_mxfp4");
    assert_eq!(gpt_oss.cache_groups, [CacheGroup::Full, window(40), window(40)]);
    assert_eq!(gpt_oss.kv_bytes_per_block_position, 2 * per_layer);
    let deepseek = info("deepseek_v3");
    assert_eq!(deepseek.cache_groups, [CacheGroup::MlaLatent]);
    // A latent and a rotated key per layer, once for all heads.
    assert_eq!(deepseek.kv_bytes_per_block_position, 2 * (48 + 16) * size_of::<f32>());
}

#[test]
fn quantised_weights_need_a_configuration_that_names_them() {
    let without_quantisation = |family: &str| {
        let dir = tempfile::tempdir().unwrap();
        let config = fs::read_to_string(family_dir(family).join("config.json")).unwrap();
        let config = config.replace("quantization_config", "not_quantization_config");
        fs::write(dir.path().join("config.json"), config).unwrap();
        let weights = "model.safetensors";
        fs::copy(family_dir(family).join(weights), dir.path().join(weights)).unwrap();
        refusal(dir.path())
    };
    let message = without_quantisation("deepseek_v3_fp8");
    assert!(message.contains("q_a_proj.weight` has type F8E4M3"), "{message}");
    let message = without_quantisation("gpt_oss_mxfp4");
    assert!(message.contains("no tensor `model.layers.0.mlp.experts.gate_up_proj`"), "{message}");
}

#[test]
fn a_checkpoint_describes_itself() {
    let dir = copy(|_| Some("model.safetensors"));
    fs::write(dir.path().join("generation_config.json"), r#"{"eos_token_id": [5, 256, 3]}"#).unwrap();
    let info = load(dir.path()).unwrap().info;
    assert_eq!(info.name, dir.path().file_name().unwrap().to_str().unwrap());
    assert_eq!((info.max_model_len, info.eos_token_ids), (512, vec![3, 5, 256]));
}

#[test]
fn the_numerics_id_follows_configuration_and_weights() {
    let id = |dir: &Path| load(dir).unwrap().info.numerics_id;
    let original = id(&family_dir("llama"));
    let copied = copy(|_| Some("model.safetensors"));
    assert_eq!(id(copied.path()), original);
    let weights = copied.path().join("model.safetensors");
    let mut bytes = fs::read(&weights).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&weights, bytes).unwrap();
    assert_ne!(id(copied.path()), original);
    let reconfigured = copy(|_| Some("model.safetensors"));
    let config = reconfigured.path().join("config.json");
    let text = fs::read_to_string(&config).unwrap().replace("1e-06", "1e-05");
    fs::write(&config, text).unwrap();
    assert_ne!(id(reconfigured.path()), original);
}

#[test]
fn shards_are_one_checkpoint() {
    let shard = |name: &str| Some(if name.contains("layers.1") { "b.safetensors" } else { "a.safetensors" });
    let dir = copy(shard);
    let whole = load(&family_dir("llama")).unwrap().info.numerics_id;
    let index = r#"{"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}"#;
    fs::write(dir.path().join("model.safetensors.index.json"), index).unwrap();
    assert_eq!(load(dir.path()).unwrap().info.numerics_id, whole);

    fs::write(
        dir.path().join("model.safetensors.index.json"),
        r#"{"weight_map": {"x": "../a.safetensors"}}"#,
    )
    .unwrap();
    assert!(refusal(dir.path()).contains("`../a.safetensors` is not a file name"));
}

#[test]
fn a_refusal_names_what_is_at_fault() {
    let empty = tempfile::tempdir().unwrap();
    assert!(refusal(empty.path()).contains("config.json"));

    let without_weights = copy(|_| None);
    assert!(refusal(without_weights.path()).contains("neither model.safetensors nor"));

    let missing = copy(|name| (!name.ends_with("1.mlp.up_proj.weight")).then_some("model.safetensors"));
    let message = refusal(missing.path());
    assert!(message.contains("`model.layers.1.mlp.up_proj.weight`") && message.contains("[96, 64]"));

    let reshaped = copy(|_| Some("model.safetensors"));
    let config = reshaped.path().join("config.json");
    fs::write(&config, fs::read_to_string(&config).unwrap().replace("320", "321")).unwrap();
    let message = refusal(reshaped.path());
    assert!(message.contains("`model.embed_tokens.weight`") && message.contains("[320, 64]"));
    assert!(message.contains("[321, 64]"));

    let truncated = copy(|_| Some("model.safetensors"));
    let weights = truncated.path().join("model.safetensors");
    let bytes = fs::read(&weights).unwrap();
    fs::write(&weights, &bytes[..bytes.len() - 1]).unwrap();
    assert!(refusal(truncated.path()).contains("not a complete safetensors file"));

    fs::write(truncated.path().join("config.json"), "{").unwrap();
    assert!(refusal(truncated.path()).contains("config.json: EOF"));
}

#[test]
fn a_kv_cache_that_cannot_be_is_refused() {
    let refused = |block_size, num_blocks| {
        let model = LoadedModel::load(&ModelSource::Random).unwrap();
        model.into_backend(KvLayout { block_size, num_blocks }).unwrap_err().to_string()
    };
    assert!(refused(24, 1).contains("multiple of 16"));
    assert!(refused(0, 1).contains("multiple of 16"));
    assert!(refused(16, usize::MAX / 64).contains("ask for fewer"));
}
