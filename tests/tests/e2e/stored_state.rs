//! Hazard: what one worker stored is asked for at another one, which does not have it. And one tenant reads
//! what another one's request stored.

use std::collections::HashSet;
use std::sync::Arc;

use keyway_tests::cluster::config_file;
use keyway_tests::openai::{CHAT, FAKE_MODEL};
use keyway_tests::sse::Next;
use keyway_tests::{Call, Client, Cluster, FakeWorker, Gateway, Response, eventually};
use parking_lot::Mutex;
use serde_json::{Value, json};

use crate::tenants::sha256;

const RESPONSES: &str = "/v1/responses";

/// A worker that keeps what it is given under ids that say nothing of it, and knows no others.
#[derive(Debug, Clone)]
struct Store {
    worker: Arc<FakeWorker>,
    has: Arc<Mutex<HashSet<String>>>,
}

impl Store {
    async fn start() -> Self {
        let worker = Arc::new(FakeWorker::start().await);
        worker.manual();
        let store = Self { worker, has: Arc::default() };
        let serving = store.clone();
        tokio::spawn(async move {
            loop {
                let (call, store) = (serving.worker.call().await, serving.clone());
                tokio::spawn(async move { store.answer(call).await });
            }
        });
        store
    }

    fn new_id(&self, collection: &str) -> String {
        let id = format!("{collection}_{:016x}-{}", fastrand::u64(..), fastrand::alphanumeric());
        self.has.lock().insert(id.clone());
        id
    }

    /// The ids that a request names: in its path, and in its body.
    fn knows_all(&self, path: &[&str], body: &Value) -> bool {
        let fields = ["previous_response_id", "input_file_id", "conversation", "training_file"];
        let named = fields.iter().filter_map(|field| body[*field].as_str()).chain(path.get(1).copied());
        named.into_iter().all(|id| self.has.lock().contains(id))
    }

    async fn answer(&self, mut call: Call) {
        let (method, target) = call.request.target();
        let (method, target) = (method.to_owned(), target.trim_start_matches("/v1/").replace("%66", "f"));
        let chat = target == "chat/completions";
        if method == "GET" && target.starts_with("files?") {
            let (mut data, has) = (Vec::new(), self.has.lock().clone());
            data.extend(
                has.iter().filter(|id| id.starts_with("files")).map(|id| json!({"id": id, "created_at": 1})),
            );
            return call.respond_json(200, &json!({"object": "list", "data": data})).await;
        }
        let target = target.replace("chat/completions", "chat");
        let path: Vec<&str> = target.split('/').collect();
        let body: Value = serde_json::from_slice(&call.request.body).unwrap_or_default();
        if !self.knows_all(&path, &body) {
            let error = json!({"error": {"message": "not found", "type": "invalid_request_error"}});
            return call.respond_json(404, &error).await;
        }
        if method == "DELETE" {
            self.has.lock().remove(path[1]);
        }
        if method != "POST" || path.len() > 1 {
            let file = (path[0] == "batches").then(|| self.new_id("file"));
            return call.respond_json(200, &json!({"id": path[1], "output_file_id": file})).await;
        }
        let stored = if chat { body["store"] == true } else { body["store"] != false };
        let id = if stored { self.new_id(path[0]) } else { "none".to_owned() };
        if body["stream"] != true {
            return call.respond_json(200, &json!({"object": "x", "id": id, "output": ["text"]})).await;
        }
        call.begin_stream().await;
        let created = json!({"type": "response.created", "response": {"id": id, "output": []}});
        call.chunk(format!("event: response.created\ndata: {created}\n\n").as_bytes()).await;
        // It goes on until its client leaves.
        call.aborted().await;
    }
}

struct Fleet {
    gateway: Gateway,
    stores: Vec<Store>,
}

/// Each request goes to another worker than the one before, unless something says where.
async fn gateway_for(stores: &[Store], config: &str) -> Gateway {
    let gateway = Gateway::builder().args(&["--policy", "round-robin"]).config(config);
    let gateway = stores.iter().fold(gateway, |gateway, store| gateway.worker(store.worker.addr()));
    let gateway = gateway.log("info,keyway=trace").start().await;
    gateway.wait_ready(stores.len()).await;
    gateway
}

impl Fleet {
    async fn of(workers: usize) -> Self {
        let mut stores = Vec::new();
        for _ in 0..workers {
            stores.push(Store::start().await);
        }
        Self { gateway: gateway_for(&stores, "").await, stores }
    }

    async fn send(&self, method: &str, path: &str, body: &Value) -> Response {
        send(&self.gateway, None, method, path, body).await
    }

    /// Stores something, and returns its id.
    async fn store(&self, path: &str, body: &Value) -> String {
        id(&self.send("POST", path, body).await)
    }

    fn requests(&self) -> usize {
        self.stores.iter().map(|store| store.worker.request_count()).sum()
    }
}

async fn send(gateway: &Gateway, key: Option<&str>, method: &str, path: &str, body: &Value) -> Response {
    let mut client = Client::connect(gateway.addr).await;
    let bearer = key.map(|key| format!("Bearer {key}"));
    let headers: Vec<(&str, &str)> = bearer.iter().map(|value| ("authorization", value.as_str())).collect();
    let body = if body.is_null() { String::new() } else { body.to_string() };
    client.request(method, path, &headers, body.as_bytes()).await;
    client.response().await
}

#[track_caller]
fn id(response: &Response) -> String {
    assert_eq!(response.status(), 200, "{}", response.text());
    response.json()["id"].as_str().unwrap().to_owned()
}

fn ask(previous: Option<&str>) -> Value {
    json!({"model": FAKE_MODEL, "input": "hi", "previous_response_id": previous})
}

#[tokio::test]
async fn a_conversation_goes_on_at_the_worker_that_stores_it() {
    let fleet = Fleet::of(3).await;
    for _ in 0..6 {
        let mut last = fleet.store(RESPONSES, &ask(None)).await;
        for _ in 0..3 {
            last = fleet.store(RESPONSES, &ask(Some(&last))).await;
        }
    }
    // Nobody was asked in vain.
    assert_eq!(fleet.requests(), 24);
    assert!(fleet.stores.iter().all(|store| store.worker.request_count() > 0));
}

#[tokio::test]
async fn whatever_is_stored_is_found_by_its_id_in_a_path() {
    let fleet = Fleet::of(3).await;
    for _ in 0..4 {
        for collection in
            [RESPONSES, "/v1/files", "/v1/conversations", "/v1/vector_stores", "/v1/of_tomorrow"]
        {
            let id = fleet.store(collection, &json!({"purpose": "x"})).await;
            for (method, behind) in [("GET", ""), ("GET", "/content"), ("POST", "/cancel"), ("DELETE", "")] {
                let response = fleet.send(method, &format!("{collection}/{id}{behind}"), &Value::Null).await;
                assert_eq!(response.status(), 200, "{method} {collection} {behind}");
            }
            let gone = fleet.send("GET", &format!("{collection}/{id}"), &Value::Null).await;
            assert_eq!((gone.status(), gone.json()["error"]["message"].clone()), (404, json!("not found")));
        }
    }
}

/// A response in the background is asked for, listed and cancelled at the worker that makes it.
#[tokio::test]
async fn an_answer_that_nobody_waits_for_is_found_where_it_is_made() {
    let cluster = Cluster::builder().workers(3).start().await;
    let send = async |method: &str, path: &str, body: Value| {
        let mut client = Client::connect(cluster.addr()).await;
        let body = if body.is_null() { String::new() } else { body.to_string() };
        client.request(method, path, &[], body.as_bytes()).await;
        client.response().await.json()
    };
    let begin = async |max_tokens: usize| {
        let body = json!({"model": "keyway-random", "input": "hi", "background": true, "ignore_eos": true,
            "max_output_tokens": max_tokens});
        let begun = send("POST", RESPONSES, body).await;
        assert_eq!(begun["status"], "queued", "{begun}");
        format!("{RESPONSES}/{}", begun["id"].as_str().unwrap())
    };
    for _ in 0..4 {
        let path = begin(2).await;
        eventually!(send("GET", &path, Value::Null).await["status"] == "incomplete", "it ends");
        let items = send("GET", &format!("{path}/input_items"), Value::Null).await;
        assert_eq!(items["data"][0]["content"][0]["text"], "hi");
        let path = begin(30_000).await;
        let cancelled = send("POST", &format!("{path}/cancel"), Value::Null).await;
        assert_eq!(cancelled["status"], "cancelled", "{cancelled}");
        assert_eq!(send("GET", &path, Value::Null).await, cancelled);
        assert_eq!(send("DELETE", &path, Value::Null).await["deleted"], true);
    }
}

#[tokio::test]
async fn a_batch_goes_to_its_file_and_what_it_made_is_found_there() {
    let fleet = Fleet::of(3).await;
    for _ in 0..6 {
        let file = fleet.store("/v1/files", &json!({"purpose": "batch"})).await;
        let batch = fleet.store("/v1/batches", &json!({"input_file_id": file})).await;
        let done = fleet.send("GET", &format!("/v1/batches/{batch}"), &Value::Null).await.json();
        let made = done["output_file_id"].as_str().unwrap();
        let content = fleet.send("GET", &format!("/v1/files/{made}/content"), &Value::Null).await;
        assert_eq!(content.status(), 200);
    }
    assert_eq!(fleet.requests(), 24);
}

#[tokio::test]
async fn a_stream_s_id_is_known_while_it_streams() {
    let fleet = Fleet::of(3).await;
    for _ in 0..6 {
        let mut client = Client::connect(fleet.gateway.addr).await;
        let body = json!({"model": FAKE_MODEL, "input": "hi", "stream": true}).to_string();
        client.post(RESPONSES, body.as_bytes()).await;
        client.head().await;
        let Next::Event(event) = client.next_event().await else { panic!("no event") };
        let event: Value = serde_json::from_str(&event).unwrap();
        let id = event["response"]["id"].as_str().unwrap();
        let response = fleet.send("GET", &format!("{RESPONSES}/{id}"), &Value::Null).await;
        assert_eq!(response.status(), 200);
        fleet.store(RESPONSES, &ask(Some(id))).await;
    }
    assert_eq!(fleet.requests(), 18);
}

#[tokio::test]
async fn what_is_stored_through_another_gateway_or_before_a_restart_is_looked_for() {
    let fleet = Fleet::of(4).await;
    let other = gateway_for(&fleet.stores, "").await;
    for _ in 0..6 {
        let id = fleet.store(RESPONSES, &ask(None)).await;
        let file = fleet.store("/v1/files", &json!({})).await;
        for _ in 0..2 {
            assert_eq!(send(&other, None, "POST", RESPONSES, &ask(Some(&id))).await.status(), 200);
            assert_eq!(
                send(&other, None, "DELETE", &format!("/v1/files/{file}"), &Value::Null).await.status(),
                200
            );
            for store in &fleet.stores {
                store.has.lock().insert(file.clone());
            }
        }
    }
    let metrics = other.metrics().await;
    let counted = |outcome| metrics.sum("keyway_stored_state_requests_total", &[("outcome", outcome)]);
    assert_eq!((counted("found"), counted("known")), (12.0, 12.0));
}

#[tokio::test]
async fn what_nobody_has_is_the_engine_s_404_after_all_were_asked() {
    let fleet = Fleet::of(3).await;
    for (method, path, body) in [
        ("GET", "/v1/responses/resp_none", Value::Null),
        ("DELETE", "/v1/files/file-none", Value::Null),
        ("POST", RESPONSES, ask(Some("resp_none"))),
    ] {
        let before = fleet.requests();
        let response = fleet.send(method, path, &body).await;
        assert_eq!(
            (response.status(), response.json()["error"]["message"].clone()),
            (404, json!("not found"))
        );
        assert!(fleet.requests() - before >= 4, "each was asked, and one answered");
    }
}

#[tokio::test]
async fn what_a_worker_stores_that_is_down_is_said_to_be_there_and_the_others_go_on() {
    let fleet = Fleet::of(2).await;
    let ids = [fleet.store(RESPONSES, &ask(None)).await, fleet.store(RESPONSES, &ask(None)).await];
    let down = usize::from(fleet.stores[1].has.lock().contains(&ids[0]));
    fleet.stores[down].worker.stop().await;
    let path = format!("{RESPONSES}/{}", ids[0]);
    eventually!(fleet.send("GET", &path, &Value::Null).await.status() == 503);
    let refused = fleet.send("POST", RESPONSES, &ask(Some(&ids[0]))).await;
    assert_eq!((refused.status(), refused.header("retry-after")), (503, Some("1")));
    assert_eq!(refused.json()["error"]["code"], "state_not_ready");
    assert_eq!(fleet.send("POST", RESPONSES, &ask(Some(&ids[1]))).await.status(), 200);
    assert_eq!(fleet.send("POST", RESPONSES, &ask(None)).await.status(), 200);
    fleet.stores[down].worker.restart().await;
    eventually!(fleet.send("GET", &path, &Value::Null).await.status() == 200);
}

#[tokio::test]
async fn what_is_not_stored_is_not_remembered() {
    let fleet = Fleet::of(2).await;
    let known = || async { fleet.gateway.metrics().await.sum("keyway_stored_ids", &[]) };
    let chat = |store: Value| json!({"model": FAKE_MODEL, "messages": [], "store": store});
    for body in [chat(Value::Null), chat(json!(false))] {
        fleet.store(CHAT, &body).await;
    }
    fleet.store(RESPONSES, &json!({"model": FAKE_MODEL, "input": "x", "store": false})).await;
    fleet.send("POST", "/v1/completions", &json!({"model": FAKE_MODEL, "prompt": "x"})).await;
    fleet.gateway.idle().await;
    assert_eq!(known().await, 0.0);
    for _ in 0..4 {
        let id = fleet.store(CHAT, &chat(json!(true))).await;
        assert_eq!(fleet.send("GET", &format!("{CHAT}/{id}"), &Value::Null).await.status(), 200);
    }
    assert_eq!(known().await, 4.0);
}

fn tenant(name: &str, key: &str) -> String {
    let hash = sha256(key);
    format!("[[tenant]]\nname = {name:?}\nkey_sha256 = [\"{hash}\"]\n")
}

#[tokio::test]
async fn what_is_stored_for_a_tenant_is_not_there_for_another() {
    let tenants = config_file(&(tenant("alice", "key-a") + &tenant("bob", "key-b")));
    let stores = [Store::start().await, Store::start().await];
    for isolate in [true, false] {
        let config = format!("[auth]\ntenants_file = {:?}\nisolate = {isolate}\n", tenants.path());
        let gateway = gateway_for(&stores, &config).await;
        for _ in 0..3 {
            let asked = send(&gateway, Some("key-a"), "POST", RESPONSES, &ask(None)).await;
            let mine = id(&asked);
            let file = id(&send(&gateway, Some("key-a"), "POST", "/v1/files", &json!({})).await);
            let own = id(&send(&gateway, Some("key-b"), "POST", "/v1/files", &json!({})).await);
            let requests = || stores.iter().map(|store| store.worker.request_count()).sum::<usize>();
            let before = requests();
            for (method, path, body) in [
                ("GET", format!("/v1/responses/{mine}"), Value::Null),
                ("GET", format!("/v1/responses/{}", mine.replace('_', "%5F")), Value::Null),
                ("DELETE", format!("/v1/files/{file}"), Value::Null),
                ("GET", format!("/v1/vector_stores/x/files/{file}"), Value::Null),
                ("GET", format!("/v1/files/{own}/of/{file}"), Value::Null),
                (
                    "POST",
                    "/v1/batches".to_owned(),
                    json!({"input_file_id": own, "previous_response_id": mine}),
                ),
                ("POST", RESPONSES.to_owned(), ask(Some(&mine))),
                ("POST", "/v1/batches".to_owned(), json!({"input_file_id": file})),
                // What is not known to be anybody's is not this tenant's.
                ("GET", "/v1/files/file-unknown".to_owned(), Value::Null),
                ("POST", RESPONSES.to_owned(), ask(Some("resp_unknown"))),
            ] {
                let refused = send(&gateway, Some("key-b"), method, &path, &body).await;
                assert_eq!(refused.status(), 404, "{method} {path}");
                assert_eq!(refused.json()["error"]["code"], "state_not_found");
            }
            assert_eq!(requests(), before, "no worker has heard of it");
            assert_eq!(
                send(&gateway, Some("key-a"), "POST", RESPONSES, &ask(Some(&mine))).await.status(),
                200
            );
            assert_eq!(
                send(&gateway, Some("key-a"), "GET", &format!("/v1/files/{file}"), &Value::Null)
                    .await
                    .status(),
                200
            );
        }
    }
}

fn listed(response: &Response) -> HashSet<String> {
    assert_eq!(response.status(), 200, "{}", response.text());
    let list = response.json();
    list["data"].as_array().unwrap().iter().map(|item| item["id"].as_str().unwrap().to_owned()).collect()
}

#[tokio::test]
async fn a_list_is_all_workers_and_for_a_tenant_its_own() {
    let fleet = Fleet::of(3).await;
    let mut all = HashSet::new();
    for _ in 0..7 {
        all.insert(fleet.store("/v1/files", &json!({})).await);
    }
    assert_eq!(listed(&fleet.send("GET", "/v1/files?limit=100", &Value::Null).await), all);
    assert_eq!(listed(&fleet.send("GET", "/v1/files?limit=5", &Value::Null).await).len(), 5);
    let tenants = config_file(&(tenant("alice", "key-a") + &tenant("bob", "key-b")));
    let gateway = gateway_for(&fleet.stores, &format!("[auth]\ntenants_file = {:?}\n", tenants.path())).await;
    let mut own = HashSet::new();
    for _ in 0..4 {
        own.insert(id(&send(&gateway, Some("key-a"), "POST", "/v1/files", &json!({})).await));
        send(&gateway, Some("key-b"), "POST", "/v1/files", &json!({})).await;
    }
    assert_eq!(listed(&send(&gateway, Some("key-a"), "GET", "/v1/files?a", &Value::Null).await), own);
    assert_eq!(listed(&send(&gateway, Some("key-a"), "GET", "/v1/%66iles?a", &Value::Null).await), own);
}

#[tokio::test]
async fn tenants_find_what_is_theirs_through_every_gateway_and_after_a_restart() {
    let (tenants, key) = (config_file(&tenant("alice", "key-a")), config_file("a key that both have"));
    let snapshot = tempfile::tempdir().unwrap();
    let stores = [Store::start().await, Store::start().await];
    let config = |more: &str| {
        let (key, file) = (key.path(), snapshot.path().join("snapshot"));
        let routing = format!(
            "[routing]\nhash_key_file = {key:?}\n{}",
            if more.is_empty() { format!("snapshot_file = {file:?}\n") } else { String::new() }
        );
        format!("{routing}[auth]\ntenants_file = {:?}\n{more}", tenants.path())
    };
    let mut first = gateway_for(&stores, &config("")).await;
    let peer = format!("[peers]\nurls = [\"http://{}\"]\n", first.admin);
    let second = gateway_for(&stores, &config(&peer)).await;
    let mut ids = Vec::new();
    for _ in 0..4 {
        ids.push(id(&send(&first, Some("key-a"), "POST", RESPONSES, &ask(None)).await));
    }
    let found = async |gateway: &Gateway, id: &str| {
        send(gateway, Some("key-a"), "GET", &format!("{RESPONSES}/{id}"), &Value::Null).await.status() == 200
    };
    for id in &ids {
        eventually!(found(&second, id).await, "told by the other gateway");
    }
    first.process.terminate();
    first.process.ended().await;
    let third = gateway_for(&stores, &config("")).await;
    for id in &ids {
        assert!(found(&third, id).await, "known from the snapshot");
    }
}

#[tokio::test]
async fn switched_off_requests_go_anywhere() {
    let stores = [Store::start().await, Store::start().await];
    let gateway = gateway_for(&stores, "[stored_state]\nenabled = false\n").await;
    let mut lost = 0;
    for _ in 0..8 {
        let stored = id(&send(&gateway, None, "POST", RESPONSES, &ask(None)).await);
        lost += usize::from(
            send(&gateway, None, "GET", &format!("{RESPONSES}/{stored}"), &Value::Null).await.status() == 404,
        );
    }
    assert!(lost > 0);
}
