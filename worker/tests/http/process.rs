//! The command: its exit status, its one line on stderr, its signals; and a worker that cannot start.

use std::process::{Command, Output};

use tokio::io::{AsyncBufReadExt as _, BufReader};

use crate::client::{options, send};
use keyway_worker::{StartError, WorkerOptions, start};

fn run(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_keyway-worker")).args(args).output().unwrap()
}

/// Exit status and the one line of stderr.
fn failure(args: &[&str]) -> (Option<i32>, String) {
    let output = run(args);
    let stderr = String::from_utf8(output.stderr).unwrap();
    let error: Vec<&str> = stderr.lines().collect();
    assert_eq!(error.len(), 1, "{stderr}");
    (output.status.code(), error[0].to_owned())
}

/// A shape that a GPU computes.
const COVERED: &str = r#"{"architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 128,
    "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 64}"#;

/// The same with experts.
const WITH_EXPERTS: &str = r#"{"architectures": ["MixtralForCausalLM"], "vocab_size": 64, "hidden_size": 128,
    "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 64,
    "num_local_experts": 4, "num_experts_per_tok": 2, "rms_norm_eps": 1e-6, "rope_theta": 10000.0}"#;

#[test]
fn what_gpus_do_not_share_is_one_line_and_exit_1() {
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().to_str().unwrap();
    let refused = |config: &str, more: &[&str]| {
        std::fs::write(dir.path().join("config.json"), config).unwrap();
        let (code, line) =
            failure(&[&["--device", "cuda", "--model", model, "--listen", "127.0.0.1:0"][..], more].concat());
        assert_eq!(code, Some(1));
        line
    };
    let spread = ["--expert-parallel-size", "2"];
    assert!(refused(COVERED, &spread).contains("without experts"));
    let line = refused(WITH_EXPERTS, &[&spread[..], &["--redundant-experts", "1"]].concat());
    assert!(line.contains("redundant-experts is computed on the CPU"), "{line}");
    let line = refused(WITH_EXPERTS, &["--expert-parallel-hosts", "127.0.0.1:1,127.0.0.1:2"]);
    assert!(line.contains("expert-parallel-hosts is computed on the CPU"), "{line}");
    // What GPUs share wants a driver, or weights that are not there.
    let line = refused(WITH_EXPERTS, &spread);
    assert!(line.contains("run with --device cpu") || line.contains("model.safetensors"), "{line}");
}

#[test]
fn bad_options_are_one_line_and_exit_1() {
    // What no kernel covers, and, of a model that kernels cover, a driver or weights that are not there.
    let (code, line) = failure(&["--device", "cuda", "--listen", "127.0.0.1:0"]);
    assert!(
        code == Some(1) && line.contains("`head_dim`") && line.contains("run with --device cpu"),
        "{line}"
    );
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("config.json"), COVERED).unwrap();
    let model = dir.path().to_str().unwrap();
    let (code, line) = failure(&["--device", "cuda:0", "--model", model, "--listen", "127.0.0.1:0"]);
    assert!(code == Some(1) && line.starts_with("error: "), "{line}");
    assert!(line.contains("run with --device cpu") || line.contains("model.safetensors"), "{line}");
    let (code, line) = failure(&["--model", "/nonexistent", "--listen", "127.0.0.1:0"]);
    assert!(code == Some(1) && line.starts_with("error: ") && line.contains("/nonexistent"), "{line}");
}

#[test]
fn a_port_in_use_is_one_line_and_exit_1() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = taken.local_addr().unwrap().to_string();
    let (code, line) = failure(&["--listen", &addr]);
    assert_eq!(code, Some(1));
    assert!(line.starts_with(&format!("error: cannot listen on {addr}: ")), "{line}");
}

#[test]
fn help_version_and_completions() {
    let stdout = |args: &[&str]| {
        let output = run(args);
        assert!(output.status.success());
        String::from_utf8(output.stdout).unwrap()
    };
    assert_eq!(stdout(&["--version"]), format!("keyway-worker {}\n", env!("CARGO_PKG_VERSION")));
    assert!(stdout(&["completions", "bash"]).contains("--num-kv-blocks"));
    let help = stdout(&["--help"]);
    for word in ["--model", "--listen", "KEYWAY_WORKER_MAX_RUNNING", "127.0.0.1:8000", "completions"] {
        assert!(help.contains(word), "{word} is not in the help");
    }
}

/// Ready line, service, SIGTERM, exit 0.
#[tokio::test]
async fn it_announces_itself_and_ends_on_sigterm() {
    let mut child = tokio::process::Command::new(env!("CARGO_BIN_EXE_keyway-worker"))
        .args(["--listen", "127.0.0.1:0", "--num-kv-blocks", "64", "--served-model-name", "tiny"])
        .stderr(std::process::Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
    let ready = lines.next_line().await.unwrap().unwrap();
    let (_, rest) = ready.split_once("ready on http://").expect(&ready);
    let addr = rest.split_whitespace().next().unwrap().parse().unwrap();
    assert!(ready.contains("tiny") && ready.contains("kv_blocks=64"), "{ready}");
    assert_eq!(send(addr, "GET", "/v1/models", "").await.json()["data"][0]["id"], "tiny");
    let pid = child.id().unwrap().to_string();
    assert!(Command::new("kill").args(["-TERM", &pid]).status().unwrap().success());
    assert!(child.wait().await.unwrap().success());
}

#[tokio::test]
async fn options_that_cannot_be_are_refused_with_what_to_do() {
    let refused = async |options: WorkerOptions| match start(options).await {
        Err(StartError::Options(error)) => error.to_string(),
        other => panic!("{other:?}"),
    };
    let message =
        refused(WorkerOptions { max_batched_tokens: Some(4), max_running: Some(8), ..options() }).await;
    assert!(message.contains("max-batched-tokens (4) must not be below max-running (8)"), "{message}");
    let message =
        refused(WorkerOptions { num_kv_blocks: Some(2), max_model_len: Some(100), ..options() }).await;
    assert!(message.contains("needs num-kv-blocks 7"), "{message}");
    let message = refused(WorkerOptions { max_model_len: Some(1 << 30), ..options() }).await;
    assert!(message.contains("keyway-random was made for"), "{message}");
    let message = refused(WorkerOptions { num_kv_blocks: Some(0), ..options() }).await;
    assert_eq!(message, "the number of KV blocks must be at least 1");
    let message = refused(WorkerOptions { threads: Some(0), ..options() }).await;
    assert_eq!(message, "the number of threads must be at least 1");
}
