//! Every model family in the test data: its ids do not depend on batch, cache, preemption, threads or a
//! broken stream. With windows, latents and raw bytes as tokens, unlike the random model.

use std::net::SocketAddr;
use std::path::Path;

use serde_json::{Value, json};
use tokio::task::JoinSet;

use crate::checkpoint::tokenizer;
use crate::client::{metric, options, post};
use crate::resume::cut_everywhere;
use keyway_worker::model::ModelSource;
use keyway_worker::{RunningWorker, WorkerOptions, start};

const COMPLETIONS: &str = "/v1/completions";

/// A checkpoint directory as a server needs it: the test data have no tokenizer.
fn checkpoint(data: &Path, root: &Path) -> ModelSource {
    let dir = root.join(data.file_name().unwrap());
    std::fs::create_dir(&dir).unwrap();
    for file in std::fs::read_dir(data).unwrap() {
        let file = file.unwrap();
        std::fs::copy(file.path(), dir.join(file.file_name())).unwrap();
    }
    std::fs::write(dir.join("tokenizer.json"), tokenizer().to_string()).unwrap();
    ModelSource::Dir(dir)
}

/// Requests that begin alike, some of them longer than the windows.
fn bodies(random: &mut fastrand::Rng) -> Vec<Value> {
    let shared: Vec<u32> = (0..90).map(|_| random.u32(0..256)).collect();
    let body = |i: usize| {
        let own = (0..random.usize(1..60)).map(|_| random.u32(0..256)).collect::<Vec<_>>();
        let prompt = if i.is_multiple_of(3) { own } else { [shared.clone(), own].concat() };
        let temperature = if i.is_multiple_of(2) { 0.0 } else { 1.0 };
        json!({"prompt": prompt, "max_tokens": 40, "temperature": temperature, "seed": i, "ignore_eos": true, "keyway": {}})
    };
    (0..8).map(body).collect()
}

/// The ids of one request.
async fn ids(addr: SocketAddr, body: Value) -> Value {
    let answer = post(addr, COMPLETIONS, &body).await;
    assert_eq!(answer.status, 200, "{}", answer.text);
    answer.json()["keyway"]["ids"].take()
}

/// The ids of all requests, sent at once.
async fn at_once(addr: SocketAddr, bodies: &[Value]) -> Vec<Value> {
    let mut running = JoinSet::new();
    for (i, body) in bodies.iter().cloned().enumerate() {
        running.spawn(async move { (i, ids(addr, body).await) });
    }
    let mut all = running.join_all().await;
    all.sort_by_key(|(i, _)| *i);
    all.into_iter().map(|(_, ids)| ids).collect()
}

async fn check(roomy: &RunningWorker, tight: &RunningWorker, bodies: &[Value]) {
    let name = roomy.model_name();
    let mut cold = Vec::new();
    for (i, body) in bodies.iter().enumerate() {
        let mut body = body.clone();
        body["cache_salt"] = json!(i.to_string());
        cold.push(ids(roomy.addr(), body).await);
    }
    for temperature in ["cold", "warm"] {
        assert_eq!(cold, at_once(roomy.addr(), bodies).await, "{name}, in a {temperature} batch");
    }
    for _ in 0..2 {
        assert_eq!(cold, at_once(tight.addr(), bodies).await, "{name}, in tight space");
    }
    assert!(
        metric(roomy.addr(), "keyway_worker_cached_tokens_total").await > 0.0,
        "{name}'s prefix was never cached"
    );
    for body in &bodies[1..3] {
        let mut body = body.clone();
        body.as_object_mut().unwrap().remove("keyway");
        cut_everywhere(roomy.addr(), tight.addr(), COMPLETIONS, &body).await;
    }
}

#[tokio::test]
async fn every_familys_ids_are_its_own() {
    let root = tempfile::tempdir().unwrap();
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data");
    let bodies = bodies(&mut fastrand::Rng::with_seed(3));
    let (mut families, mut preemptions) = (0, 0.0);
    for family in std::fs::read_dir(data).unwrap() {
        let model = checkpoint(&family.unwrap().path(), root.path());
        let roomy = WorkerOptions { model, num_kv_blocks: Some(512), ..options() };
        let tight = WorkerOptions {
            num_kv_blocks: Some(32),
            max_batched_tokens: Some(48),
            max_running: Some(8),
            threads: Some(3),
            ..roomy.clone()
        };
        let (roomy, tight) = (start(roomy).await.unwrap(), start(tight).await.unwrap());
        check(&roomy, &tight, &bodies).await;
        preemptions += metric(tight.addr(), "keyway_worker_preemptions_total").await;
        roomy.shutdown().await;
        tight.shutdown().await;
        families += 1;
    }
    assert!(families >= 8, "only {families} families are there");
    assert!(preemptions > families.into(), "the tight space was not tight: {preemptions} preemptions");
}
