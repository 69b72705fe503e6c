//! Hazard: what an engine keeps apart is taken for one cache: its LoRA adapters, its tiers, and the
//! data-parallel engines behind one address. The engines are scripted workers with a real publisher of KV
//! events.

use keyway_tests::{Cluster, FakeWorker, Gateway, eventually, ports, post};
use keyway_wire::kv_event::{BlockRemoved, BlockStored, EngineHash, EventBatch, KvEvent, WireFormat};
use serde_json::{Value, json};
use zeromq::{PubSocket, Socket as _, SocketSend as _, ZmqMessage};

const BASE: &str = "base";
const ADAPTER: &str = "adapter";

/// One engine's publisher, in vLLM's frames: topic, number, payload.
struct Publisher {
    socket: PubSocket,
    port: u16,
    seq: u64,
}

impl Publisher {
    async fn bind(port: u16) -> Option<Self> {
        let mut socket = PubSocket::new();
        let bound = socket.bind(&format!("tcp://127.0.0.1:{port}")).await.ok()?;
        let port = bound.to_string().rsplit_once(':')?.1.parse().ok()?;
        Some(Self { socket, port, seq: 0 })
    }

    /// Says that these blocks of one prompt were stored, in a form that an engine has used.
    async fn stored(&mut self, ids: &[u32], adapter: Option<&str>, format: WireFormat) {
        let whole = &ids[..ids.len() / 16 * 16];
        let names = whole.chunks(16).map(|block| EngineHash::Int(u64::from(block[0]) << 32 | 1));
        let stored = BlockStored {
            block_hashes: names.collect(),
            token_ids: whole.to_vec(),
            block_size: 16,
            lora_name: adapter.map(str::to_owned),
            lora_id: adapter.map(|_| 1),
            medium: Some("GPU".to_owned()),
            ..BlockStored::default()
        };
        self.publish(vec![KvEvent::BlockStored(stored)], format).await;
    }

    async fn publish(&mut self, events: Vec<KvEvent>, format: WireFormat) {
        let batch = EventBatch { ts: 1.0, events, data_parallel_rank: None };
        let frames = [Vec::new(), self.seq.to_be_bytes().to_vec(), batch.encode(format)];
        self.seq += 1;
        let frames: Vec<bytes::Bytes> = frames.into_iter().map(Into::into).collect();
        self.socket.send(ZmqMessage::try_from(frames).unwrap()).await.unwrap();
    }
}

/// Publishers at two neighbouring ports.
async fn neighbours() -> [Publisher; 2] {
    let first = ports::neighbours(2);
    [Publisher::bind(first).await.unwrap(), Publisher::bind(first + 1).await.unwrap()]
}

/// Four blocks and a token: the last token is computed anew, and with it the block that it stands in.
fn prompt(from: u32) -> Vec<u32> {
    (from..from + 65).collect()
}

fn completion(model: &str, ids: &[u32]) -> Vec<u8> {
    json!({ "model": model, "prompt": ids, "max_tokens": 1 }).to_string().into_bytes()
}

/// A gateway that knows the base model's tokenizer, in front of this worker.
async fn gateway(table: &str) -> Gateway {
    let toml = format!("[[model]]\nname = \"{BASE}\"\ntokenizer = \"random\"\n[[worker]]\n{table}\n");
    let gateway = Gateway::builder().config(&toml).start().await;
    eventually!(gateway.readyz().await == 200);
    gateway
}

/// Blocks that each worker is said to hold of a prompt, in the order of their names.
async fn held(gateway: &Gateway, model: &str, ids: &[u32]) -> Vec<u64> {
    let response = post(gateway.admin, "/explain?path=/v1/completions", &completion(model, ids)).await;
    assert_eq!(response.status(), 200, "{}", response.text());
    let explained: Value = response.json();
    assert_eq!(explained["keyed_by"], "tokens", "{explained}");
    let mut rows: Vec<(String, u64)> = explained["workers"]
        .as_array()
        .unwrap()
        .iter()
        .map(|row| (row["worker"].as_str().unwrap().to_owned(), row["matched_blocks"].as_u64().unwrap()))
        .collect();
    rows.sort();
    rows.into_iter().map(|(_, blocks)| blocks).collect()
}

#[tokio::test]
async fn an_adapter_s_blocks_are_its_own() {
    let worker = FakeWorker::with_models(&[BASE]).await;
    worker.add_adapter(ADAPTER, BASE);
    let mut events = Publisher::bind(0).await.unwrap();
    let table =
        format!("url = \"http://{}\"\nkv_events = \"tcp://127.0.0.1:{}\"", worker.addr(), events.port);
    let gateway = gateway(&table).await;
    gateway.wait_trusted(1).await;
    let (of_base, of_adapter) = (prompt(10), prompt(110));
    // Subscribers hear what is said after they came, so it is said until it was heard.
    for (adapter, ids) in [(None, &of_base), (Some(ADAPTER), &of_adapter)] {
        let (own, other) = if adapter.is_some() { (ADAPTER, BASE) } else { (BASE, ADAPTER) };
        for format in [WireFormat::VllmMap, WireFormat::VllmArray] {
            eventually!({
                events.stored(ids, adapter, format).await;
                held(&gateway, own, ids).await == [4]
            });
        }
        assert_eq!(held(&gateway, other, ids).await, [0], "{own}'s blocks are not {other}'s");
    }
    let response = post(gateway.addr, "/v1/completions", &completion(ADAPTER, &of_adapter)).await;
    assert_eq!((response.status(), response.header("x-keyway-matched-tokens")), (200, Some("64")));
}

#[tokio::test]
async fn each_data_parallel_rank_is_followed_and_asked_by_itself() {
    let worker = FakeWorker::with_models(&[BASE]).await;
    let mut ranks = neighbours().await;
    let metrics = ["0\",num_gpu_blocks=\"100", "1\",num_gpu_blocks=\"200"]
        .map(|of| format!("vllm:cache_config_info{{block_size=\"16\",engine=\"{of}\"}} 1\n"));
    worker.set_metrics(&metrics.concat());
    let table = format!(
        "url = \"http://{}\"\ndata_parallel_size = 2\nkv_events = \"tcp://127.0.0.1:{}\"",
        worker.addr(),
        ranks[0].port
    );
    let gateway = gateway(&table).await;
    gateway.wait_trusted(2).await;
    let prompts = [prompt(1000), prompt(2000)];
    for (rank, ids) in prompts.iter().enumerate() {
        let mut want = [0, 0];
        want[rank] = 4;
        eventually!({
            ranks[rank].stored(ids, None, WireFormat::VllmMap).await;
            held(&gateway, BASE, ids).await == want
        });
    }
    for (rank, ids) in prompts.iter().enumerate().rev() {
        let response = post(gateway.addr, "/v1/completions", &completion(BASE, ids)).await;
        assert_eq!(response.status(), 200);
        let name = format!("{}@{rank}", worker.addr());
        assert_eq!(response.header("x-keyway-worker"), Some(name.as_str()));
        let asked = worker.requests().pop().unwrap();
        assert_eq!(asked.head.header_values("x-data-parallel-rank"), [rank.to_string()]);
    }
}

/// Workers that take requests, by their names.
async fn ready(gateway: &Gateway) -> Vec<String> {
    let rows = gateway.workers().await;
    let ready = rows.as_array().unwrap().iter().filter(|row| row["state"] == "ready");
    let mut names: Vec<_> = ready.map(|row| row["worker"].as_str().unwrap().to_owned()).collect();
    names.sort();
    names
}

#[tokio::test]
async fn engines_that_no_operator_counted_are_workers_of_their_own() {
    let worker = FakeWorker::with_models(&[BASE]).await;
    let line =
        |engine: u32| format!("vllm:num_requests_running{{engine=\"{engine}\",model_name=\"{BASE}\"}} 0.0\n");
    worker.set_metrics(&[line(0), line(1)].concat());
    let gateway = gateway(&format!("url = \"http://{}\"", worker.addr())).await;
    let address = worker.addr().to_string();
    let ranks = [0, 1].map(|rank| format!("{address}@{rank}"));
    let ask = async || post(gateway.addr, "/v1/completions", &completion(BASE, &prompt(1))).await;
    // Whatever is there meanwhile, the fleet serves.
    eventually!({
        assert_eq!(ask().await.status(), 200);
        ready(&gateway).await == ranks
    });
    worker.forget_requests();
    let response = ask().await;
    let served = response.header("x-keyway-worker").unwrap();
    let rank = ranks.iter().position(|rank| rank == served).unwrap();
    assert_eq!(worker.requests()[0].head.header_values("x-data-parallel-rank"), [rank.to_string()]);
    // It was started again, as one.
    worker.set_metrics(&line(0));
    eventually!({
        assert_eq!(ask().await.status(), 200);
        ready(&gateway).await == [address.as_str()]
    });
    worker.forget_requests();
    assert_eq!(ask().await.status(), 200);
    assert_eq!(worker.requests()[0].head.header("x-data-parallel-rank"), None);
}

#[tokio::test]
async fn without_ranks_no_header_is_added() {
    let worker = FakeWorker::with_models(&[BASE]).await;
    let gateway = gateway(&format!("url = \"http://{}\"", worker.addr())).await;
    assert_eq!(post(gateway.addr, "/v1/completions", &completion(BASE, &prompt(1))).await.status(), 200);
    assert_eq!(worker.requests()[0].head.header("x-data-parallel-rank"), None);
}

/// What `/explain` says of the worker that is chosen.
async fn chosen(gateway: &Gateway, ids: &[u32]) -> Value {
    let body = completion(BASE, ids);
    let response = post(gateway.admin, "/explain?path=/v1/completions", &body).await;
    assert_eq!(response.status(), 200, "{}", response.text());
    let explained: Value = response.json();
    explained["workers"].as_array().unwrap().iter().find(|row| row["chosen"] == true).unwrap().clone()
}

#[tokio::test]
async fn a_prefix_in_the_host_s_memory_is_gone_to_unless_that_is_not_to_count() {
    for (setting, fetched) in [("", 64), ("[routing]\nfetch_tokens_per_second = 0", 0)] {
        let (worker, other) =
            (FakeWorker::with_models(&[BASE]).await, FakeWorker::with_models(&[BASE]).await);
        let (mut events, silent) = (Publisher::bind(0).await.unwrap(), Publisher::bind(0).await.unwrap());
        let table = |worker: &FakeWorker, events: &Publisher| {
            format!("url = \"http://{}\"\nkv_events = \"tcp://127.0.0.1:{}\"\n", worker.addr(), events.port)
        };
        let workers = format!("{}[[worker]]\n{}{setting}", table(&worker, &events), table(&other, &silent));
        let gateway = gateway(&workers).await;
        gateway.wait_trusted(2).await;
        let ids = prompt(10);
        eventually!({
            events.stored(&ids, None, WireFormat::VllmMap).await;
            chosen(&gateway, &ids).await["matched_blocks"] == 4
        });
        // Copied to the host's memory, as vLLM says it, and then dropped from the GPU's.
        let hashes: Vec<_> =
            ids.chunks_exact(16).map(|block| EngineHash::Int(u64::from(block[0]) << 32 | 1)).collect();
        let copied = BlockStored {
            block_hashes: hashes.clone(),
            medium: Some("CPU".to_owned()),
            ..BlockStored::default()
        };
        let dropped = BlockRemoved {
            block_hashes: hashes,
            remaining_copy_counts: Some(vec![0; 4]),
            ..BlockRemoved::default()
        };
        let moves = vec![KvEvent::BlockStored(copied), KvEvent::BlockRemoved(dropped)];
        events.publish(moves, WireFormat::VllmMap).await;
        eventually!(chosen(&gateway, &ids).await["matched_blocks"] == 0);
        let row = chosen(&gateway, &ids).await;
        assert_eq!(
            (row["matched_tokens"].as_u64(), row["fetched_tokens"].as_u64()),
            (Some(fetched), Some(fetched))
        );
        if fetched > 0 {
            assert_eq!(row["worker"].as_str(), Some(worker.addr().to_string().as_str()), "{row}");
            assert!(row["fetch_ms"].as_f64() > Some(0.6) && row["own_ms"].as_f64() < Some(1.0), "{row}");
        }
    }
}

/// What vLLM says of a publisher at this port.
fn source_at(port: u16) -> String {
    json!({ "0": {
        "enable_kv_cache_events": true, "publisher": "zmq", "endpoint": format!("tcp://*:{port}"), "replay_endpoint": null,
        "buffer_steps": 10_000, "hwm": 100_000, "max_queue_size": 100_000, "topic": "",
    } })
    .to_string()
}

#[tokio::test]
async fn a_worker_s_url_is_enough_where_it_says_where_its_events_are() {
    for is_vllm in [true, false] {
        let worker = FakeWorker::with_models(&[BASE]).await;
        let mut events = Publisher::bind(0).await.unwrap();
        if is_vllm {
            worker.answer_at("/kv_event_sources", 200, &[], &source_at(events.port));
        } else {
            let ports =
                json!({ "publisher": "zmq", "endpoint_host": "*", "endpoint_port_base": events.port });
            worker.answer_at("/server_info", 200, &[], &json!({ "kv_events": ports }).to_string());
        }
        let gateway = gateway(&format!("url = \"http://{}\"", worker.addr())).await;
        gateway.wait_trusted(1).await;
        let ids = prompt(10);
        eventually!({
            events.stored(&ids, None, WireFormat::VllmMap).await;
            held(&gateway, BASE, &ids).await == [4]
        });
        assert_eq!(gateway.workers().await[0]["cache_known_by"], "events");
        // It begins anew, and its events are elsewhere.
        drop(events);
        let mut moved = Publisher::bind(0).await.unwrap();
        if is_vllm {
            worker.answer_at("/kv_event_sources", 200, &[], &source_at(moved.port));
            let other = prompt(500);
            eventually!({
                moved.stored(&other, None, WireFormat::VllmMap).await;
                held(&gateway, BASE, &other).await == [4]
            });
        }
    }
}

#[tokio::test]
async fn without_a_tokenizer_events_are_looked_for_once_a_prompt_has_come_as_ids() {
    let worker = FakeWorker::with_models(&[BASE]).await;
    let mut events = Publisher::bind(0).await.unwrap();
    worker.answer_at("/kv_event_sources", 200, &[], &source_at(events.port));
    let gateway = Gateway::builder().worker(worker.addr()).start().await;
    gateway.wait_ready(1).await;
    let text = json!({ "model": BASE, "prompt": "some words", "max_tokens": 1 }).to_string();
    assert_eq!(post(gateway.addr, "/v1/completions", text.as_bytes()).await.status(), 200);
    // Its text matches no event.
    assert_eq!(gateway.workers().await[0]["cache_known_by"], "model");
    assert!(worker.answered().is_empty());
    let ids = prompt(10);
    assert_eq!(post(gateway.addr, "/v1/completions", &completion(BASE, &ids)).await.status(), 200);
    gateway.wait_trusted(1).await;
    let other = prompt(500);
    eventually!({
        events.stored(&other, None, WireFormat::VllmMap).await;
        held(&gateway, BASE, &other).await == [4]
    });
}

#[tokio::test]
async fn a_worker_that_says_so_is_not_asked_where_that_is_switched_off() {
    let worker = FakeWorker::with_models(&[BASE]).await;
    worker.answer_at("/kv_event_sources", 200, &[], &source_at(Publisher::bind(0).await.unwrap().port));
    let url = format!("url = \"http://{}\"\n[routing]\nfind_kv_events = false", worker.addr());
    let gateway = gateway(&url).await;
    for n in 0..3 {
        assert_eq!(post(gateway.addr, "/v1/completions", &completion(BASE, &prompt(n))).await.status(), 200);
    }
    assert_eq!(gateway.workers().await[0]["cache_known_by"], "model");
}

#[tokio::test]
async fn our_own_worker_says_where_its_events_are() {
    let any = "tcp://127.0.0.1:0";
    let cluster = Cluster::builder()
        .workers(1)
        .worker_args(&["--kv-events", any, "--kv-replay", any])
        .args(&["--tokenizer", "keyway-random=random"])
        .start()
        .await;
    cluster.gateway.wait_trusted(1).await;
}
