//! Hazard: a prompt, a key or an inner address in a log, a metric or an error. Canaries go through every
//! path, with the gateway's own log at its most talkative.

use keyway_tests::bins::bin;
use keyway_tests::cluster::config_file;
use keyway_tests::openai::{CHAT, FAKE_MODEL, chat, chat_for, chat_stream};
use keyway_tests::process::Process;
use keyway_tests::{Client, FakeWorker, Gateway, eventually, get, post};
use serde_json::Value;

const PROMPT: &str = "canary-prompt-7f3a";
const CLIENT_KEY: &str = "canary-client-key-51c2";
const WORKER_KEY: &str = "canary-worker-key-9e0b";

#[tokio::test]
async fn no_canary_comes_out_where_it_does_not_belong() {
    let (keyed, plain) = (FakeWorker::start().await, FakeWorker::start().await);
    // As if cached, or the truth loop takes the caches for empty.
    keyed.set_usage(100, 96);
    plain.set_usage(100, 96);
    let key_file = config_file(WORKER_KEY);
    let dir = tempfile::tempdir().unwrap();
    let (snapshot, decisions) = (dir.path().join("index.snapshot"), dir.path().join("decisions.jsonl"));
    let toml = format!(
        "worker = [{{ url = \"http://{}\", api_key_file = {:?} }}, \"http://{}\"]\npolicy = \"round-robin\"\n\
         [routing]\nsnapshot_file = {snapshot:?}\ndecision_log = {decisions:?}\n",
        keyed.addr(),
        key_file.path(),
        plain.addr(),
    );
    let mut gateway = Gateway::builder().config(&toml).start().await;
    gateway.wait_ready(2).await;

    let authorization = format!("Bearer {CLIENT_KEY}");
    // Longer than a block, so that the index holds something of it.
    let prompt = PROMPT.repeat(20);
    let bodies = [
        chat(&prompt),
        chat_stream(&prompt),
        chat_for("unknown", &prompt, false),
        prompt.as_bytes().to_vec(),
    ];
    let mut errors = String::new();
    for (path, body) in
        [CHAT, "/v1/elsewhere", "/outside"].iter().flat_map(|p| bodies.iter().map(move |b| (p, b)))
    {
        let mut client = Client::connect(gateway.addr).await;
        client.request("POST", path, &[("authorization", &authorization)], body).await;
        let response = client.response().await;
        if response.status() != 200 {
            errors.push_str(&response.text());
        }
    }
    let explained = post(gateway.admin, "/explain", &bodies[0]).await.text();
    // And with every worker gone; of a cache whose process is gone the snapshot has nothing, so elsewhere.
    let gone = FakeWorker::start().await;
    let forsaken = Gateway::builder().worker(gone.addr()).start().await;
    forsaken.wait_ready(1).await;
    gone.stop().await;
    let mut client = Client::connect(forsaken.addr).await;
    client.request("POST", CHAT, &[("authorization", &authorization)], &bodies[0]).await;
    errors.push_str(&client.response().await.text());
    gateway.idle().await;

    let metrics = gateway.metrics().await.text;
    let workers = get(gateway.admin, "/workers").await.text();
    gateway.process.terminate();
    assert_eq!(gateway.process.ended().await.code(), Some(0));
    let log = [gateway.process.log(), forsaken.process.log()].concat().join("\n");
    assert!(log.len() > 500, "there is a log to look at: {log}");
    let decisions = std::fs::read_to_string(decisions).unwrap();
    let snapshot = String::from_utf8_lossy(&std::fs::read(snapshot).unwrap()).into_owned();
    // Six requests were sent to a worker; what was decided last is in the file too.
    assert_eq!(decisions.lines().count(), 6, "{decisions}");
    assert!(log.contains("index.snapshot blocks=12"), "of the prompts: {log}");
    let places = [
        ("errors", &errors),
        ("metrics", &metrics),
        ("workers", &workers),
        ("log", &log),
        ("explanation", &explained),
        ("decision log", &decisions),
        ("snapshot", &snapshot),
    ];
    for canary in [PROMPT, CLIENT_KEY, WORKER_KEY] {
        for (place, text) in places {
            assert!(!text.contains(canary), "{canary} in {place}:\n{text}");
        }
    }
    assert!(!errors.contains("127.0.0.1"), "clients do not learn addresses: {errors}");
}

#[tokio::test]
async fn routing_is_shown_on_loopback_only_unless_the_operator_says_so() {
    let worker = FakeWorker::start().await;
    let shown = async |gateway: Gateway| {
        gateway.wait_ready(1).await;
        let response = post(gateway.addr, CHAT, &chat("hi")).await;
        assert_eq!(response.status(), 200);
        assert!(response.header("x-request-id").is_some(), "the request's id is always shown");
        let names = ["x-keyway-worker", "x-keyway-reason", "x-keyway-matched-tokens"];
        let shown = names.iter().filter(|n| response.header(n).is_some()).count();
        assert!(shown == 0 || shown == names.len());
        shown > 0
    };
    let gateway = || Gateway::builder().as_it_comes().worker(worker.addr());
    assert!(!shown(gateway().start().await).await);
    assert!(!shown(gateway().config("[routing]\nexpose = false\n").start().await).await);
    assert!(shown(gateway().config("[routing]\nexpose = true\n").start().await).await);
    assert!(shown(gateway().args(&["--expose"]).start().await).await);
}

#[tokio::test]
async fn each_request_is_one_line_of_json_that_says_much_and_no_text() {
    let worker = FakeWorker::start().await;
    worker.set_usage(40, 16);
    let any = "127.0.0.1:0";
    let mut command = std::process::Command::new(bin("keyway"));
    command.args(["--listen", any, "--admin-listen", any, "--log-format", "json"]);
    let gateway = Process::spawn("keyway", command.args(["--worker", &format!("http://{}", worker.addr())]));
    let address = async |marker| gateway.announced(marker).await.split('"').next().unwrap().parse().unwrap();
    let (addr, admin) = (address("listening on http://").await, address("admin on http://").await);
    eventually!(get(admin, "/readyz").await.status() == 200);
    let mut client = Client::connect(addr).await;
    let headers = [("x-request-id", "request-1"), ("authorization", CLIENT_KEY)];
    client.request("POST", &format!("{CHAT}?{PROMPT}"), &headers, &chat_stream(PROMPT)).await;
    assert_eq!(client.response().await.status(), 200);
    let lines = || -> Vec<Value> {
        let log = gateway.log();
        let lines = log.iter().map(|line| serde_json::from_str(line).expect("each line is JSON"));
        lines.filter(|line: &Value| line["target"] == "access").collect()
    };
    eventually!(!lines().is_empty());
    let [line] = &lines()[..] else { panic!("{:?}", lines()) };
    let fields = &line["fields"];
    for (key, value) in [
        ("id", "request-1".into()),
        ("path", CHAT.into()),
        ("model", FAKE_MODEL.into()),
        ("status", 200.into()),
        ("outcome", "complete".into()),
        ("worker", worker.addr().to_string().into()),
        ("prompt_tokens", 40.into()),
        ("cached_tokens", 16.into()),
    ] {
        assert_eq!(fields[key], Value::clone(&value), "{key} in {line}");
    }
    assert!(fields["ttft_ms"].as_f64() > Some(0.0) && fields["duration_ms"].as_f64() > Some(0.0), "{line}");
    let log = gateway.log().join("\n");
    assert!(!log.contains(PROMPT) && !log.contains(CLIENT_KEY), "{log}");
}
