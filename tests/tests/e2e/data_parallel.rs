//! Hazard: a worker's data-parallel engines are taken for one cache, or a request goes to another engine than
//! the one that has its prefix. The worker is a real one, with attention on each of its expert-parallel
//! processes.

use keyway_tests::{Gateway, RealWorker, eventually, get, ports, post};
use serde_json::{Value, json};

const MODEL: &str = "keyway-random";

/// A worker of two engines whose KV events come at a port and the next.
async fn worker() -> (RealWorker, u16) {
    let port = ports::neighbours(2);
    let events = format!("tcp://127.0.0.1:{port}");
    let mut worker = RealWorker::spawn(&[
        "--expert-parallel-size=2",
        "--data-parallel-attention",
        "--num-kv-blocks=256",
        "--kv-events",
        &events,
    ]);
    worker.ready().await;
    (worker, port)
}

fn completion(prompt: &[u32]) -> Vec<u8> {
    json!({ "model": MODEL, "prompt": prompt, "max_tokens": 8, "temperature": 0 }).to_string().into_bytes()
}

#[tokio::test]
async fn a_prompt_goes_back_to_the_engine_that_has_its_prefix() {
    let (worker, port) = worker().await;
    let toml = format!(
        "[[model]]\nname = \"{MODEL}\"\ntokenizer = \"random\"\n[[worker]]\nurl = \"http://{}\"\n\
         data_parallel_size = 2\nkv_events = \"tcp://127.0.0.1:{port}\"\n",
        worker.addr()
    );
    let gateway = Gateway::builder().config(&toml).start().await;
    eventually!(gateway.readyz().await == 200);
    gateway.wait_trusted(2).await;
    // Enough that chance, which decides between two that are alike, leaves neither of them without one.
    let prompts: Vec<Vec<u32>> = (0..24).map(|i| (0..96).map(|t| (t * 7 + 31 * i) % 256).collect()).collect();
    let mut served = Vec::new();
    for prompt in &prompts {
        let answer = post(gateway.addr, "/v1/completions", &completion(prompt)).await;
        assert_eq!(answer.status(), 200, "{}", answer.text());
        served.push((answer.header("x-keyway-worker").unwrap().to_owned(), text(&answer.json())));
    }
    let ranks = [0, 1].map(|rank| format!("{}@{rank}", worker.addr()));
    assert!(ranks.iter().all(|rank| served.iter().any(|(name, _)| name == rank)), "{served:?}");
    for (prompt, (name, first)) in prompts.iter().zip(&served) {
        // The engine's own word of what it stored takes its time.
        let mut texts = Vec::new();
        eventually!({
            let answer = post(gateway.addr, "/v1/completions", &completion(prompt)).await;
            let cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64();
            let known = answer.header("x-keyway-matched-tokens").is_some_and(|matched| matched != "0");
            texts.push((answer.header("x-keyway-worker").unwrap().to_owned(), text(&answer.json())));
            known && cached.is_some_and(|cached| cached >= 80)
        });
        assert_eq!(texts.last(), Some(&(name.clone(), first.clone())));
        assert!(texts.iter().all(|(_, text)| text == first));
    }
    let page = get(worker.addr(), "/metrics").await.text();
    for rank in 0..2 {
        let hits = format!("vllm:prefix_cache_hits_total{{engine=\"{rank}\",model_name=\"{MODEL}\"}} ");
        let line = page.lines().find_map(|line| line.strip_prefix(&hits)).unwrap();
        assert!(line.parse::<f64>().unwrap() > 0.0, "{page}");
    }
    gateway.idle().await;
}

#[tokio::test]
async fn an_address_is_enough() {
    let (worker, _) = worker().await;
    let toml = format!(
        "[[model]]\nname = \"{MODEL}\"\ntokenizer = \"random\"\n[[worker]]\nurl = \"http://{}\"\n",
        worker.addr()
    );
    let gateway = Gateway::builder().config(&toml).start().await;
    // Both engines are found, and the events of each.
    gateway.wait_trusted(2).await;
    let prompt: Vec<u32> = (0..96).collect();
    let mut served = Vec::new();
    eventually!({
        let answer = post(gateway.addr, "/v1/completions", &completion(&prompt)).await;
        assert_eq!(answer.status(), 200, "{}", answer.text());
        served.push(answer.header("x-keyway-worker").unwrap().to_owned());
        answer.header("x-keyway-matched-tokens").is_some_and(|matched| matched != "0")
    });
    let ranks = [0, 1].map(|rank| format!("{}@{rank}", worker.addr()));
    assert!(ranks.contains(served.last().unwrap()), "{served:?}");
    gateway.idle().await;
}

fn text(answer: &Value) -> String {
    answer["choices"][0]["text"].as_str().unwrap().to_owned()
}
