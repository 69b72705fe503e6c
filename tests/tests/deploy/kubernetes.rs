//! Hazard: a pod that ends, or is not ready, gets requests; a rollout loses some; a watch that breaks or
//! expires misses who came and went; a pod at an old address is taken for the one that was there.

use std::net::SocketAddr;

use keyway_tests::openai::{CHAT, DONE, FAKE_MODEL, chat, chat_for, chat_stream, delta};
use keyway_tests::tls::Authority;
use keyway_tests::{Exchange, FakeWorker, Gateway, KubeApi, Protocol, eventually, post};
use serde_json::{Value, json};

/// A pod of a Service, and how its EndpointSlice shows it.
pub(super) struct Pod {
    pub(super) worker: FakeWorker,
    pub(super) uid: String,
    conditions: Value,
}

impl Pod {
    /// The next pod of a Service: the first one's port, an address of its own.
    async fn next_to(pods: &[Self], uid: &str) -> Self {
        let first = pods.first().map(|pod| pod.worker.addr());
        let worker = match first {
            None => FakeWorker::start().await,
            Some(first) => {
                let host = u8::try_from(pods.len()).unwrap() + 1;
                FakeWorker::at(SocketAddr::from(([127, 0, 0, host], first.port())), &[FAKE_MODEL]).await
            }
        };
        Self { worker, uid: uid.to_owned(), conditions: json!({ "ready": true }) }
    }

    fn ready(&mut self, ready: bool) {
        self.conditions = json!({ "ready": ready, "serving": ready, "terminating": false });
    }

    fn ends(&mut self) {
        self.conditions = json!({ "ready": false, "serving": true, "terminating": true });
    }

    fn name(&self) -> String {
        self.worker.addr().to_string()
    }

    fn endpoint(&self) -> Value {
        json!({ "addresses": [self.worker.addr().ip().to_string()], "conditions": self.conditions,
            "targetRef": { "kind": "Pod", "namespace": "models", "name": format!("pod-{}", self.uid), "uid": self.uid } })
    }
}

pub(super) async fn pods(n: usize) -> Vec<Pod> {
    let mut pods = Vec::new();
    for i in 0..n {
        pods.push(Pod::next_to(&pods, &format!("u{i}")).await);
    }
    pods
}

/// The EndpointSlice of a Service with these pods.
fn slice<'a>(service: &str, labels: &Value, pods: impl IntoIterator<Item = &'a Pod>) -> Value {
    let pods: Vec<&Pod> = pods.into_iter().collect();
    let port = pods
        .first()
        .map(|pod| json!({ "name": "http", "port": pod.worker.addr().port(), "protocol": "TCP" }));
    let endpoints: Vec<Value> = pods.iter().map(|pod| pod.endpoint()).collect();
    let mut labels = labels.clone();
    labels["kubernetes.io/service-name"] = json!(service);
    json!({ "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
        "metadata": { "name": format!("{service}-x7k2p"), "namespace": "models", "labels": labels },
        "ports": port.into_iter().collect::<Vec<_>>(), "endpoints": endpoints })
}

pub(super) fn workers<'a>(pods: impl IntoIterator<Item = &'a Pod>) -> Value {
    slice("workers", &json!({}), pods)
}

pub(super) async fn gateway(api: &KubeApi, fleets: &str) -> Gateway {
    let kubeconfig = api.kubeconfig().display().to_string();
    let config = format!("[discovery]\nkubeconfig = {kubeconfig:?}\n{fleets}");
    Gateway::builder().config(&config).start().await
}

const WORKERS: &str = "[[discovery.kubernetes]]\nservice = \"workers\"\n";

/// One field of a worker's row in `/workers`; null if it is not there.
pub(super) async fn row(gateway: &Gateway, pod: &Pod, field: &str) -> Value {
    let rows = gateway.workers().await;
    let row = rows.as_array().unwrap().iter().find(|row| row["worker"] == pod.name());
    row.map_or(Value::Null, |row| row[field].clone())
}

/// Sends `n` requests, each with a prompt of its own, and wants every one answered.
async fn ask(gateway: &Gateway, what: &str, n: usize) {
    for i in 0..n {
        let response = post(gateway.addr, CHAT, &chat(&format!("{what} {i}"))).await;
        assert_eq!(response.status(), 200, "{}", response.text());
    }
}

/// A prompt of many blocks; the worker that answers, and the tokens that it was thought to hold.
async fn long_prompt(gateway: &Gateway) -> (String, u64) {
    let response = post(gateway.addr, CHAT, &chat(&"all that is known of pods ".repeat(40))).await;
    assert_eq!(response.status(), 200);
    let header = |name: &str| response.header(name).unwrap_or_default().to_owned();
    (header("x-keyway-worker"), header("x-keyway-matched-tokens").parse().unwrap_or(0))
}

#[tokio::test]
async fn a_pod_that_is_not_ready_gets_nothing_and_returns_with_its_cache() {
    let (api, mut pods) = (KubeApi::start().await, pods(2).await);
    api.apply(workers(&pods));
    let gateway = gateway(&api, WORKERS).await;
    gateway.wait_ready(2).await;
    let (warm, _) = long_prompt(&gateway).await;
    let known = pods.iter().position(|pod| pod.name() == warm).unwrap();
    assert!(long_prompt(&gateway).await.1 > 100);

    pods[known].ready(false);
    api.apply(workers(&pods));
    eventually!(row(&gateway, &pods[known], "state").await == "paused");
    let before = pods[known].worker.request_count();
    ask(&gateway, "elsewhere", 20).await;
    assert_eq!(pods[known].worker.request_count(), before);

    pods[known].ready(true);
    api.apply(workers(&pods));
    gateway.wait_ready(2).await;
    let (again, matched) = long_prompt(&gateway).await;
    assert!(again == warm && matched > 100, "{again} instead of {warm}, {matched} tokens");
}

#[tokio::test]
async fn a_pod_that_ends_finishes_what_it_has_and_is_forgotten() {
    let (api, mut pods) = (KubeApi::start().await, pods(2).await);
    api.apply(workers(&pods[..1]));
    let gateway = gateway(&api, WORKERS).await;
    gateway.wait_ready(1).await;
    pods[0].worker.manual();
    let mut open = Exchange::post(Protocol::Http1, gateway.addr, CHAT, &chat_stream("long")).await;
    let mut call = pods[0].worker.call().await;
    call.begin_stream().await;
    assert_eq!(open.status().await, 200);

    // The other one comes as this one ends, and may not have been probed yet: requests wait for that.
    pods[0].ends();
    api.apply(workers(&pods));
    eventually!(row(&gateway, &pods[0], "state").await == "draining");
    ask(&gateway, "to the other", 10).await;
    assert_eq!(pods[0].worker.request_count(), 1);
    call.say("still here").await;
    call.done().await;
    assert_eq!(open.next_event().await.event(), delta("still here").to_string());
    assert_eq!(open.next_event().await.event(), DONE);
    eventually!(row(&gateway, &pods[0], "state").await.is_null());
    eventually!(!gateway.metrics().await.text.contains(&pods[0].name()), "its series go with it");
    gateway.idle().await;
}

#[tokio::test]
async fn a_rollout_under_load_loses_nothing() {
    let (api, mut pods) = (KubeApi::start().await, pods(3).await);
    api.apply(workers(&pods));
    let gateway = gateway(&api, WORKERS).await;
    gateway.wait_ready(3).await;
    let (addr, (stop, stopped)) = (gateway.addr, tokio::sync::watch::channel(false));
    let clients: Vec<_> = (0..4)
        .map(|client| {
            let stopped = stopped.clone();
            tokio::spawn(async move {
                let mut answered = 0;
                while !*stopped.borrow() {
                    let response = post(addr, CHAT, &chat(&format!("client {client} asks {answered}"))).await;
                    assert_eq!(response.status(), 200, "{}", response.text());
                    answered += 1;
                }
                answered
            })
        })
        .collect();

    let mut gone = Vec::new();
    for old in 0..3 {
        // As a Deployment does: one more, then one less.
        let next = Pod::next_to(&pods, &format!("v{old}")).await;
        pods.push(next);
        api.apply(workers(&pods[old..]));
        gateway.wait_ready(4).await;
        pods[old].ends();
        api.apply(workers(&pods[old..]));
        let left = async || {
            ["draining", ""].contains(&row(&gateway, &pods[old], "state").await.as_str().unwrap_or(""))
        };
        eventually!(left().await);
        // From the event on nothing new goes there. What was sent there before, and may be on its way, is
        // answered, and then it is killed.
        let under_way = row(&gateway, &pods[old], "requests_in_flight").await.as_u64().unwrap_or(0) as usize;
        gone.push((old, pods[old].worker.request_count() + under_way));
        eventually!(row(&gateway, &pods[old], "state").await.is_null());
        pods[old].worker.stop().await;
        api.apply(workers(&pods[old + 1..]));
    }
    stop.send_replace(true);
    let mut answered = 0;
    for client in clients {
        answered += client.await.unwrap();
    }
    for (old, then) in gone {
        assert!(pods[old].worker.request_count() <= then, "pod {old} got requests after it left");
    }
    let received: usize = pods.iter().map(|pod| pod.worker.request_count()).sum();
    assert_eq!(received, answered, "each request reached one worker once");
    assert!(pods[3..].iter().all(|pod| pod.worker.request_count() > 0));
    let attempts = gateway.metrics().await.sum("keyway_retries_total", &[]);
    assert_eq!(attempts, 0.0, "nobody had to try elsewhere");
}

/// A way in which a watch can come to its end.
type Trouble = fn(&KubeApi);

#[tokio::test]
async fn a_watch_that_breaks_ends_or_expires_misses_nobody() {
    let (api, pods) = (KubeApi::start().await, pods(3).await);
    api.apply(workers(&pods[..1]));
    let gateway = gateway(&api, WORKERS).await;
    gateway.wait_ready(1).await;
    eventually!(api.watches() == 1);
    let troubles: [(&str, Trouble); 5] = [
        ("ends", KubeApi::end_watches),
        ("breaks within a line", KubeApi::cut_watches),
        ("expires, by an event", |api| {
            api.expire(false);
            api.cut_watches();
        }),
        ("expires, by a status", |api| {
            api.expire(true);
            api.end_watches();
        }),
        ("the server errs", |api| {
            api.refuse(500);
            api.cut_watches();
        }),
    ];
    for (turn, (name, trouble)) in troubles.into_iter().enumerate() {
        // What changes while nobody watches: one pod goes, another comes.
        let now = &pods[turn % 2 + 1];
        api.set_away(true);
        eventually!(api.watches() == 0, "{name}");
        api.apply(workers([now]));
        trouble(&api);
        api.set_away(false);
        eventually!(row(&gateway, now, "state").await == "ready", "{name}: {}", gateway.workers().await);
        eventually!(gateway.workers().await.as_array().map(Vec::len) == Some(1), "{name}");
        ask(&gateway, name, 3).await;
        // And while it is watched again.
        eventually!(api.watches() == 1, "{name}");
        api.apply(workers([&pods[0], now]));
        gateway.wait_ready(2).await;
        trouble(&api);
        eventually!(api.watches() == 1, "{name}");
        api.apply(workers([now]));
        eventually!(row(&gateway, &pods[0], "state").await.is_null(), "{name}");
    }
    let failed = [("source", "kubernetes"), ("outcome", "failed")];
    assert!(gateway.metrics().await.sum("keyway_discovery_updates_total", &failed) >= 2.0);
}

#[tokio::test]
async fn a_watch_goes_on_from_its_last_bookmark() {
    let (api, pods) = (KubeApi::start().await, pods(2).await);
    api.apply(workers(&pods[..1]));
    let gateway = gateway(&api, WORKERS).await;
    gateway.wait_ready(1).await;
    eventually!(api.watches() == 1);
    let lists = api.lists();
    api.something_else_changes();
    api.bookmark();
    api.expire_before_bookmark();
    api.end_watches();
    eventually!(api.watches() == 1);
    api.apply(workers(&pods));
    gateway.wait_ready(2).await;
    assert_eq!(api.lists(), lists, "the version of the bookmark is still known: nothing is listed anew");
}

#[tokio::test]
async fn another_pod_at_the_same_address_is_another_worker() {
    let (api, mut pods) = (KubeApi::start().await, pods(1).await);
    api.apply(workers(&pods));
    let gateway = gateway(&api, WORKERS).await;
    gateway.wait_ready(1).await;
    long_prompt(&gateway).await;
    assert!(long_prompt(&gateway).await.1 > 100);
    pods[0].uid = "u-next".to_owned();
    api.apply(workers(&pods));
    eventually!(row(&gateway, &pods[0], "cached_tokens").await == 0);
    gateway.wait_ready(1).await;
    assert_eq!(long_prompt(&gateway).await.1, 0, "what the old pod held is not expected of the new one");
}

#[tokio::test]
async fn an_endpoint_that_moves_between_slices_keeps_its_cache() {
    let (api, pods) = (KubeApi::start().await, pods(1).await);
    api.apply(workers(&pods));
    let gateway = gateway(&api, WORKERS).await;
    gateway.wait_ready(1).await;
    long_prompt(&gateway).await;
    api.delete(&workers(&pods));
    // It is in no slice now. Requests that come before the other slice does find it all the same.
    ask(&gateway, "between", 5).await;
    let mut other = workers(&pods);
    other["metadata"]["name"] = json!("workers-other");
    api.apply(other);
    gateway.wait_ready(1).await;
    assert!(long_prompt(&gateway).await.1 > 100);
}

#[tokio::test]
async fn labels_tell_the_fleets_of_several_models_apart() {
    let api = KubeApi::start().await;
    let (mut a, mut b) = (pods(1).await, pods(1).await);
    // Both serve both: what goes where is the configuration's.
    for (pod, uid) in [(&mut a[0], "a"), (&mut b[0], "b")] {
        pod.worker = FakeWorker::with_models(&["model-a", "model-b"]).await;
        uid.clone_into(&mut pod.uid);
    }
    api.apply(slice("one", &json!({ "serves": "a" }), &a));
    api.apply(slice("two", &json!({ "serves": "b" }), &b));
    api.apply(slice("other", &json!({ "serves": "c" }), []));
    let fleets = "[[discovery.kubernetes]]\nselector = \"serves in (a, x)\"\nmodel = \"model-a\"\n\
                  [[discovery.kubernetes]]\nselector = \"serves=b\"\nmodel = \"model-b\"\nnamespace = \"models\"\n";
    let gateway = gateway(&api, fleets).await;
    gateway.wait_ready(2).await;
    for (model, pod) in [("model-a", &a[0]), ("model-b", &b[0]), ("model-a", &a[0])] {
        let response = post(gateway.addr, CHAT, &chat_for(model, "hi", false)).await;
        assert_eq!((response.status(), response.header("x-keyway-worker")), (200, Some(pod.name().as_str())));
    }
    // A Service that loses its label leaves the selection.
    api.apply(slice("two", &json!({ "serves": "none" }), &b));
    eventually!(row(&gateway, &b[0], "state").await.is_null());
}

#[tokio::test]
async fn many_slices_come_in_pages() {
    let (api, pods) = (KubeApi::start().await, pods(1).await);
    for i in 0..600 {
        let mut empty = workers([]);
        empty["metadata"]["name"] = json!(format!("workers-{i}"));
        api.apply(empty);
    }
    api.apply(workers(&pods));
    let gateway = gateway(&api, WORKERS).await;
    gateway.wait_ready(1).await;
    assert!(api.asked().iter().any(|asked| asked.target.contains("continue=")));
}

#[tokio::test]
async fn the_gateway_shows_its_token_over_tls_and_says_what_it_may_not() {
    let authority = Authority::new();
    let (api, pods) = (KubeApi::start_tls(&authority, "let me in").await, pods(1).await);
    api.refuse(403);
    api.apply(workers(&pods));
    let gateway = gateway(&api, WORKERS).await;
    gateway.wait_ready(1).await;
    let log = || gateway.process.log().join("\n");
    eventually!(
        log().contains("endpointslices.discovery.k8s.io is forbidden") && log().contains("needs a Role"),
        "{}",
        log()
    );
    assert!(!log().contains("let me in"));
}

#[tokio::test]
async fn a_kubeconfig_that_cannot_be_read_is_said_at_once() {
    let mut command = std::process::Command::new(keyway_tests::bins::bin("keyway"));
    let file = keyway_tests::cluster::config_file(
        "[discovery]\nkubeconfig = \"/nonexistent/kubeconfig\"\n[[discovery.kubernetes]]\nservice = \"workers\"\n",
    );
    let output = command.args(["config", "check", "--config"]).arg(file.path()).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        !output.status.success() && said.contains("discovery.kubeconfig /nonexistent/kubeconfig"),
        "{said}"
    );
}

const COST: &str = "controller.kubernetes.io/pod-deletion-cost";

/// The pods' own objects, as a cluster has them beside the slices.
fn create_pods(api: &KubeApi, pods: &[Pod]) {
    for pod in pods {
        let meta = json!({ "name": format!("pod-{}", pod.uid), "namespace": "models", "uid": pod.uid });
        api.apply(json!({ "apiVersion": "v1", "kind": "Pod", "metadata": meta }));
    }
}

fn cost(api: &KubeApi, pod: &Pod) -> Value {
    let path = format!("/api/v1/namespaces/models/pods/pod-{}", pod.uid);
    api.object(&path).unwrap()["metadata"]["annotations"][COST].clone()
}

#[tokio::test]
async fn the_pod_that_is_worth_least_is_marked_by_one_gateway_for_all() {
    let (api, mut pods) = (KubeApi::start().await, pods(4).await);
    for (pod, cached) in pods.iter().zip([9_000, 5_000, 20, 0]) {
        pod.worker.set_usage(10_000, cached);
    }
    create_pods(&api, &pods);
    // The last one's cost is somebody else's business.
    let mut own = api.object("/api/v1/namespaces/models/pods/pod-u3").unwrap();
    own["metadata"]["annotations"] = json!({ COST: "7" });
    api.apply(own);
    api.apply(workers(&pods[..3]));
    let fleets = format!("{WORKERS}deletion_cost = true\n");
    let kubeconfig = api.kubeconfig().display().to_string();
    let config = format!("policy = \"round-robin\"\n[discovery]\nkubeconfig = {kubeconfig:?}\n{fleets}");
    let first = Gateway::builder().config(&config).start().await;
    first.wait_ready(3).await;
    ask(&first, "round", 6).await;
    eventually!(cost(&api, &pods[2]) == "-1000");
    assert!(cost(&api, &pods[0]).is_null() && cost(&api, &pods[1]).is_null());

    // Another gateway sees other requests; it leaves the mark alone while the first one lives, and after.
    let second = Gateway::builder().config(&config).start().await;
    second.wait_ready(3).await;
    pods[1].worker.set_usage(10_000, 30);
    pods[2].worker.set_usage(10_000, 9_000);
    ask(&second, "other round", 6).await;
    let writes = || api.asked().iter().filter(|asked| asked.method == "PATCH").count();
    assert_eq!(writes(), 1);
    let holder = || {
        let lease = api.objects().into_iter().find(|object| object["kind"] == "Lease").unwrap();
        lease["spec"]["holderIdentity"].clone()
    };
    let before = holder();
    drop(first);
    eventually!(holder() != before);
    assert_eq!(cost(&api, &pods[2]), "-1000");

    // What was marked is gone: the next one, by what this gateway knows.
    pods[2].ends();
    api.apply(workers(&pods[..3]));
    eventually!(cost(&api, &pods[1]) == "-1000");
    // Somebody else's cost stays, and then nobody is marked.
    pods[1].ends();
    api.apply(workers(&pods));
    second.wait_ready(2).await;
    let looks = || {
        api.asked()
            .iter()
            .filter(|asked| asked.method == "GET" && asked.target.contains("pods/pod-u3"))
            .count()
    };
    eventually!(looks() > 0, "the one without savings is considered");
    assert_eq!(cost(&api, &pods[3]), "7");
    assert!(cost(&api, &pods[0]).is_null());
}

#[tokio::test]
async fn without_the_right_to_mark_everything_else_works() {
    let (api, pods) = (KubeApi::start().await, pods(2).await);
    api.apply(workers(&pods));
    let gateway = gateway(&api, &format!("{WORKERS}deletion_cost = true\n")).await;
    gateway.wait_ready(2).await;
    api.refuse(403);
    eventually!(gateway.process.log().iter().any(|line| line.contains("no pod could be marked")));
    ask(&gateway, "works", 3).await;
}
