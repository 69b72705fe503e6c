//! Requests of all kinds at once, to a worker over the stand-in for a GPU's driver and to one over the
//! emulator: no rule of the driver is broken, and every answer is the same.

use std::net::SocketAddr;

use bytes::Bytes;
use http_body_util::{BodyExt as _, Full};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use keyway_kernels::cuda::Device;
use keyway_kernels::cuda::gpu::Gpu;
use keyway_text::TextModel;
use serde_json::{Value, json};
use tokio::task::JoinSet;

use super::{Bound, Computing, WorkerOptions, serve};
use crate::engine::generation_config::GenerationConfig;
use crate::model::tests::cuda::emulator::Emulator;
use crate::model::tests::cuda::stand_in::StandIn;
use crate::model::{KvLayout, LoadedModel, Quantize};

/// Requests that are sent together. The next ones come when all are answered, so that there are steps without
/// prompts, which are recorded.
const AT_ONCE: usize = 48;
const KV: KvLayout = KvLayout { block_size: 16, num_blocks: 1024 };
/// With experts, and keys and values in FP8; without either.
const CONFIGS: [&str; 2] = [
    r#"{"architectures": ["LlamaForCausalLM"], "vocab_size": 320, "hidden_size": 128, "intermediate_size": 128,
        "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64,
        "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "hidden_act": "silu"}"#,
    r#"{"architectures": ["MixtralForCausalLM"], "vocab_size": 320, "hidden_size": 128, "intermediate_size": 64,
        "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64,
        "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "hidden_act": "silu",
        "num_local_experts": 4, "num_experts_per_tok": 2}"#,
];

/// Where a request goes, and what it says. Some begin alike.
fn request(i: usize) -> (&'static str, Value) {
    let common = if i.is_multiple_of(5) { "once upon a time in a land far away " } else { "" };
    let prompt = format!("{common}{}", &"the keys of the way"[i % 13..]);
    let mut body =
        json!({"model": "m", "prompt": prompt, "max_tokens": 6, "temperature": 0, "ignore_eos": true});
    let more = match i % 8 {
        0 => json!({}),
        1 => json!({"temperature": 0.9, "top_k": 7, "top_p": 0.9, "min_p": 0.02, "seed": i}),
        2 => json!({"temperature": 1, "presence_penalty": 0.5, "frequency_penalty": 0.5,
            "repetition_penalty": 1.2, "logit_bias": {"97": 2}, "seed": i}),
        3 => json!({"logprobs": 3}),
        4 => json!({"temperature": 1, "n": 3, "seed": i}),
        5 => return ("/v1/embeddings", json!({"model": "m", "input": prompt})),
        6 => json!({"prompt_logprobs": 2}),
        _ => {
            let messages = json!([{"role": "user", "content": prompt}]);
            return (
                "/v1/chat/completions",
                json!({"model": "m", "messages": messages, "max_tokens": 6,
                "temperature": 0.7, "seed": i, "logprobs": true, "top_logprobs": 2, "ignore_eos": true}),
            );
        }
    };
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    ("/v1/completions", body)
}

/// A request's number, and what matters of its answer.
async fn answer(client: Client<HttpConnector, Full<Bytes>>, addr: SocketAddr, i: usize) -> (usize, String) {
    let (path, body) = request(i);
    let request =
        http::Request::post(format!("http://{addr}{path}")).header("content-type", "application/json");
    let answer = client.request(request.body(body.to_string().into()).unwrap()).await.unwrap();
    let status = answer.status();
    let text = answer.into_body().collect().await.unwrap().to_bytes();
    let answer: Value = serde_json::from_slice(&text).unwrap();
    assert_eq!(status, 200, "{body}: {answer}");
    // Not what was cached, which hangs on who came first.
    (i, [&answer["choices"], &answer["data"], &answer["prompt_logprobs"]].map(Value::to_string).concat())
}

/// What a worker over this device answers to so many requests, in their order.
async fn answers<D: Device + Send + 'static>(device: D, fp8: bool, count: usize) -> Vec<String> {
    let options = WorkerOptions {
        listen: ([127, 0, 0, 1], 0).into(),
        served_model_name: Some("m".into()),
        max_batched_tokens: Some(256),
        max_running: Some(64),
        ..WorkerOptions::default()
    };
    let limits = options.limits(true);
    let model = LoadedModel::synthetic(CONFIGS[usize::from(fp8)]).unwrap();
    let model = model.onto(device, Quantize::None).unwrap();
    let mut model = if fp8 { model.with_fp8_kv() } else { model };
    model.reserve_steps(limits.max_batched_tokens, limits.max_running).unwrap();
    let info = model.info.clone();
    let mut backend = model.into_backend(KV).unwrap();
    backend.try_out().unwrap();
    let defaults = GenerationConfig::random(info.vocab_size, &info.eos_token_ids);
    let backends = vec![Box::new(backend) as _];
    let computing = Computing { info, kv: KV, limits, max_model_len: 256, backends, experts: None };
    let bound = Bound::to(&options).await.unwrap();
    let worker = serve(options, bound, (computing, TextModel::builtin(), defaults)).unwrap();
    let client = Client::builder(TokioExecutor::new()).build_http::<Full<Bytes>>();
    let mut answers = Vec::new();
    for first in (0..count).step_by(AT_ONCE) {
        let mut asked = JoinSet::new();
        for i in first..count.min(first + AT_ONCE) {
            asked.spawn(answer(client.clone(), worker.addr(), i));
        }
        answers.extend(asked.join_all().await);
    }
    worker.shutdown().await;
    answers.sort_unstable();
    answers.into_iter().map(|(_, answer)| answer).collect()
}

async fn check(capability: &str, fp8: bool, count: usize) {
    let Some(emulator) = Emulator::start(1) else { return };
    let emulator = if capability == "90" { emulator } else { emulator.without_warpgroups() };
    let expected = answers(emulator, fp8, count).await;
    let Some(driver) = StandIn::new() else { return };
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("answers");
    let (fp8, count) = (u32::from(fp8).to_string(), count.to_string());
    let settings =
        [("CAPABILITY", capability), ("ANSWERS", file.to_str().unwrap()), ("FP8", &fp8), ("COUNT", &count)];
    let report = tokio::task::block_in_place(|| driver.run_test("worker::mixed::inside", &settings));
    assert!(report.refused.is_empty(), "{:?}", report.refused);
    assert!(report.replays > 5, "{report:?}");
    let found = std::fs::read_to_string(file).unwrap();
    let found: Vec<&str> = found.lines().collect();
    assert_eq!(found.len(), expected.len());
    for (i, (found, expected)) in found.into_iter().zip(&expected).enumerate() {
        assert_eq!(found, expected, "{capability}, FP8 {fp8}, {:?}", request(i));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn mixed_requests_have_the_emulators_answers() {
    check("90", false, 480).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn mixed_requests_over_experts_and_fp8_have_the_emulators_answers() {
    check("80", true, 480).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "two more of the same kernels"]
async fn mixed_requests_have_the_emulators_answers_the_other_way_round() {
    check("80", false, 480).await;
    check("90", true, 480).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "runs where the driver is the stand-in"]
async fn inside() {
    if !StandIn::is_here() {
        return;
    }
    let set = |name: &str| std::env::var(format!("STAND_IN_{name}")).unwrap();
    let (fp8, count) = (set("FP8") == "1", set("COUNT").parse().unwrap());
    let answers = answers(Gpu::new(0).unwrap(), fp8, count).await;
    std::fs::write(set("ANSWERS"), answers.join("\n")).unwrap();
}
