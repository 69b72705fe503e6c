//! The command over a stand-in for the CUDA driver: answers that a GPU computes, and what the worker says of
//! a GPU that cannot.

use std::net::SocketAddr;
use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::{Map, Value, json};
use tokio::io::{AsyncBufReadExt as _, BufReader, Lines};
use tokio::process::{Child, ChildStderr};

use self::stand_in::{Report, StandIn};
use crate::checkpoint::tokenizer;
use crate::client::{Answer, post, send};

#[path = "../../../kernels/tests/cuda/compile.rs"]
mod compile;
#[path = "../../../kernels/tests/driver/stand_in.rs"]
mod stand_in;

const SIZE: usize = 128;
const VOCAB: usize = 320;

/// A checkpoint of one layer, of a shape that a GPU computes, with experts or none: numbers around 0 but for
/// norms, which are 1.
fn checkpoint(experts: usize) -> tempfile::TempDir {
    let family = if experts == 0 { "LlamaForCausalLM" } else { "MixtralForCausalLM" };
    let mut config = json!({
        "architectures": [family], "vocab_size": VOCAB, "hidden_size": SIZE, "intermediate_size": SIZE,
        "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 256, "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0, "hidden_act": "silu", "num_key_value_heads": 2,
    });
    let layer = |name: &str| format!("model.layers.0.{name}.weight");
    let mut products: Vec<String> =
        ["q", "k", "v", "o"].map(|name| layer(&format!("self_attn.{name}_proj"))).into();
    let mut shapes: Vec<(String, Vec<usize>)> = Vec::new();
    if experts == 0 {
        products.extend(["gate", "up", "down"].map(|name| layer(&format!("mlp.{name}_proj"))));
    } else {
        config["num_local_experts"] = json!(experts);
        config["num_experts_per_tok"] = json!(2);
        shapes.push((layer("block_sparse_moe.gate"), vec![experts, SIZE]));
        let of = |expert| {
            ["w1", "w2", "w3"].map(|name| layer(&format!("block_sparse_moe.experts.{expert}.{name}")))
        };
        products.extend((0..experts).flat_map(of));
    }
    shapes.extend(products.into_iter().map(|name| (name, vec![SIZE, SIZE])));
    shapes.extend(["input_layernorm", "post_attention_layernorm"].map(|name| (layer(name), vec![SIZE])));
    written(&config, shapes)
}

/// The same with latent attention, whose kernels want more shared memory than small GPUs have.
fn latent_checkpoint() -> tempfile::TempDir {
    let config = json!({
        "architectures": ["DeepseekV2ForCausalLM"], "vocab_size": VOCAB, "hidden_size": SIZE,
        "intermediate_size": SIZE, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
        "max_position_embeddings": 256, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "hidden_act": "silu",
        "q_lora_rank": null, "kv_lora_rank": 512, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64,
        "v_head_dim": 64, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": SIZE,
        "n_shared_experts": 1, "first_k_dense_replace": 1,
    });
    let shapes = [
        ("self_attn.q_proj", vec![256, SIZE]),
        ("self_attn.kv_a_proj_with_mqa", vec![576, SIZE]),
        ("self_attn.kv_a_layernorm", vec![512]),
        ("self_attn.kv_b_proj", vec![256, 512]),
        ("self_attn.o_proj", vec![SIZE, 128]),
        ("mlp.gate_proj", vec![SIZE, SIZE]),
        ("mlp.up_proj", vec![SIZE, SIZE]),
        ("mlp.down_proj", vec![SIZE, SIZE]),
        ("input_layernorm", vec![SIZE]),
        ("post_attention_layernorm", vec![SIZE]),
    ];
    let shapes = shapes.map(|(name, shape)| (format!("model.layers.0.{name}.weight"), shape));
    written(&config, shapes.into())
}

/// A checkpoint of this configuration, with the layer's tensors and those around it.
fn written(config: &Value, mut shapes: Vec<(String, Vec<usize>)>) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    shapes.push(("model.norm.weight".into(), vec![SIZE]));
    shapes
        .extend(["model.embed_tokens.weight", "lm_head.weight"].map(|name| (name.into(), vec![VOCAB, SIZE])));
    let (mut header, mut data, mut random) = (Map::new(), Vec::new(), fastrand::Rng::with_seed(3));
    for (name, shape) in shapes {
        let begin = data.len();
        for _ in 0..shape.iter().product() {
            let value = if shape.len() == 1 { 1.0 } else { (random.f32() - 0.5) * 0.3 };
            data.extend(value.to_le_bytes());
        }
        header.insert(name, json!({"dtype": "F32", "shape": shape, "data_offsets": [begin, data.len()]}));
    }
    let header = Value::Object(header).to_string();
    let file = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &data].concat();
    std::fs::write(dir.path().join("model.safetensors"), file).unwrap();
    std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    std::fs::write(dir.path().join("tokenizer.json"), tokenizer().to_string()).unwrap();
    dir
}

fn command(driver: &StandIn, model: &Path, device: &str, settings: &[(&str, &str)]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_keyway-worker"));
    command
        .args(["--device", device, "--listen", "127.0.0.1:0", "--num-kv-blocks", "64", "--model"])
        .arg(model);
    command.args(["--served-model-name", "tiny", "--threads", "1"]);
    driver.give_to(&mut command, settings);
    command
}

/// A worker's process that is ready.
struct Worker {
    child: Child,
    addr: SocketAddr,
    /// What it logged until then.
    log: Vec<String>,
    _rest: Lines<BufReader<ChildStderr>>,
}

impl Worker {
    async fn start(mut command: Command) -> Self {
        command.stderr(Stdio::piped());
        let mut child = tokio::process::Command::from(command).kill_on_drop(true).spawn().unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let mut log = Vec::new();
        let addr = loop {
            let line = lines.next_line().await.unwrap().unwrap_or_else(|| panic!("it ended: {log:?}"));
            log.push(line.clone());
            if let Some((_, rest)) = line.split_once("ready on http://") {
                break rest.split_whitespace().next().unwrap().parse().unwrap();
            }
        };
        Self { child, addr, log, _rest: lines }
    }

    async fn complete(&self) -> Answer {
        let body = json!({"model": "tiny", "prompt": "once upon a time", "temperature": 0, "max_tokens": 6,
            "ignore_eos": true, "logprobs": 1});
        post(self.addr, "/v1/completions", &body).await
    }

    async fn health(&self) -> Answer {
        send(self.addr, "GET", "/health", "").await
    }

    /// Ends it as an operator does, and has the driver's report.
    async fn end(mut self, driver: &StandIn) -> Report {
        let pid = self.child.id().unwrap().to_string();
        assert!(Command::new("kill").args(["-TERM", &pid]).status().unwrap().success());
        assert!(self.child.wait().await.unwrap().success());
        driver.report()
    }
}

#[tokio::test]
async fn a_gpu_answers_and_no_rule_of_the_driver_is_broken() {
    let dir = checkpoint(0);
    for (capability, name) in [("90", "cuda-sm_90-wgmma-bf16"), ("80", "cuda-sm_80-mma-bf16")] {
        let Some(driver) = StandIn::new() else { return };
        let settings = [("CAPABILITY", capability)];
        let worker = Worker::start(command(&driver, dir.path(), "auto", &settings)).await;
        assert!(worker.log.last().unwrap().contains(name), "{:?}", worker.log);
        let first = worker.complete().await;
        assert_eq!(first.status, 200, "{}", first.text);
        let said = |answer: &Answer| answer.json()["choices"][0]["text"].clone();
        let (second, third) = tokio::join!(worker.complete(), worker.complete());
        assert_eq!(said(&second), said(&first));
        assert_eq!(said(&third), said(&first));
        assert_eq!(worker.health().await.status, 200);
        let report = worker.end(&driver).await;
        assert!(report.refused.is_empty(), "{:?}", report.refused);
        assert!(report.kernels > 100 && report.replays > 3, "{report:?}");
    }
}

/// Two processes on one GPU, which map each other's mailboxes. The stand-in's clock counts how often a kernel
/// asks it.
#[tokio::test]
async fn ranks_on_one_gpu_say_what_a_gpu_says_alone() {
    let dir = checkpoint(4);
    let mut said = Vec::new();
    for ranks in ["1", "2"] {
        let Some(driver) = StandIn::new() else { return };
        let mut command = command(&driver, dir.path(), "cuda", &[]);
        command.args(["--expert-parallel-size", ranks, "--expert-parallel-deadline", "600"]);
        command.args(["--max-batched-tokens", "256", "--max-running", "16"]);
        let worker = Worker::start(command).await;
        let answer = worker.complete().await;
        assert_eq!(answer.status, 200, "{}", answer.text);
        said.push(answer.json()["choices"].clone());
        let report = worker.end(&driver).await;
        assert!(report.refused.is_empty() && report.replays > 3, "{report:?}");
    }
    assert_eq!(said[0], said[1]);
}

/// What is wrong with a GPU, and how the worker says it.
const BROKEN: [(&[(&str, &str)], &str); 5] = [
    (&[("DRIVER_VERSION", "12040")], "take driver 580 or newer"),
    (&[("CAPABILITY", "75")], "has compute capability 7.5, and the kernels need 8.0"),
    (&[("FAILING_MODULES", "222")], "attention.fatbin cannot be loaded"),
    (&[("FAILING_LAUNCHES_FROM", "1")], "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"),
    // Found where it is waited for, and everything after it fails too.
    (&[("FAILING_LAUNCHES_FROM", "20"), ("LAUNCH_FAILURE", "719")], "CUDA_ERROR_LAUNCH_FAILED"),
];

#[tokio::test]
async fn a_gpu_that_cannot_compute_is_left_for_the_cpu_with_one_warning() {
    let dir = checkpoint(0);
    for (settings, cause) in BROKEN {
        let Some(driver) = StandIn::new() else { return };
        let worker = Worker::start(command(&driver, dir.path(), "auto", settings)).await;
        let warnings: Vec<&String> = worker.log.iter().filter(|line| line.contains("WARN")).collect();
        assert_eq!(warnings.len(), 1, "{:?}", worker.log);
        assert!(warnings[0].contains("the CPU computes") && warnings[0].contains(cause), "{warnings:?}");
        assert!(!worker.log.last().unwrap().contains("cuda-"), "{:?}", worker.log);
        assert_eq!(worker.complete().await.status, 200);
        assert!(worker.end(&driver).await.refused.is_empty());
    }
}

#[test]
fn a_gpu_that_cannot_compute_is_one_line_and_exit_1_where_it_must() {
    let dir = checkpoint(0);
    let none: (&[(&str, &str)], &str) = (&[("DEVICES", "0")], "no usable NVIDIA GPU 0");
    for (settings, cause) in BROKEN.into_iter().chain([none]) {
        let Some(driver) = StandIn::new() else { return };
        let output = command(&driver, dir.path(), "cuda", settings).output().unwrap();
        let text = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{text}");
        assert_eq!(text.lines().count(), 1, "{text}");
        assert!(text.starts_with("error: ") && text.contains(cause), "{text}");
        assert!(text.contains("run with --device cpu"), "{text}");
    }
}

/// 8.6, 8.9 and 12.0: the worker says so before it is ready, and with `auto` the CPU computes.
#[tokio::test]
async fn latents_on_a_gpu_of_little_shared_memory_are_left_for_the_cpu() {
    let dir = latent_checkpoint();
    let cause = "bytes of shared memory a block, and this GPU has 101376";
    for capability in ["86", "89", "120"] {
        let Some(driver) = StandIn::new() else { return };
        let settings = [("CAPABILITY", capability)];
        let output = command(&driver, dir.path(), "cuda", &settings).output().unwrap();
        let text = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{text}");
        assert!(text.contains("attention_latent_") && text.contains(cause), "{text}");
        assert!(text.lines().count() == 1 && text.contains("run with --device cpu"), "{text}");
    }
    let Some(driver) = StandIn::new() else { return };
    let worker = Worker::start(command(&driver, dir.path(), "auto", &[("CAPABILITY", "89")])).await;
    let warnings: Vec<&String> = worker.log.iter().filter(|line| line.contains("WARN")).collect();
    assert!(warnings.len() == 1 && warnings[0].contains(cause), "{:?}", worker.log);
    assert!(!worker.log.last().unwrap().contains("cuda-"), "{:?}", worker.log);
    assert_eq!(worker.complete().await.status, 200);
    assert!(worker.end(&driver).await.refused.is_empty());
}

#[tokio::test]
async fn a_gpu_that_fails_later_is_not_healthy_until_it_computes_again() {
    let dir = checkpoint(0);
    let Some(driver) = StandIn::new() else { return };
    let broken = dir.path().join("broken");
    let settings = [("FAILING_LAUNCHES_WHILE", broken.to_str().unwrap())];
    let worker = Worker::start(command(&driver, dir.path(), "cuda", &settings)).await;
    let before = worker.complete().await;
    assert_eq!(before.status, 200, "{}", before.text);
    std::fs::write(&broken, "").unwrap();
    for failed in 1..=3 {
        assert_eq!(worker.health().await.status, 200, "after {failed} requests");
        assert_eq!(worker.complete().await.status, 503);
    }
    let health = worker.health().await;
    assert_eq!(health.status, 503);
    assert!(health.text.contains("CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"), "{}", health.text);
    std::fs::remove_file(&broken).unwrap();
    let after = worker.complete().await;
    assert_eq!(after.json()["choices"][0]["text"], before.json()["choices"][0]["text"]);
    assert_eq!(worker.health().await.status, 200);
    assert!(worker.end(&driver).await.refused.is_empty());
}
