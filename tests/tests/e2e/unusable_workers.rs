//! Hazard: a worker cannot be used and nobody is told why: nothing in the log, no reason in `/workers`, no
//! series to alert on. A URL that people write otherwise than the gateway reads it is one of the reasons. And
//! its reverse: a worker that could be used is not, or one whose port is closed is sent more.

use std::net::SocketAddr;

use keyway_tests::openai::{CHAT, FAKE_MODEL, chat, chat_for, model_list};
use keyway_tests::tls::{Authority, TlsFront};
use keyway_tests::{Cluster, FakeWorker, Gateway, canary, eventually, get, post};
use serde_json::Value;
use tokio::io::AsyncReadExt;
use tokio::net::TcpListener;

const JSON: &[(&str, &str)] = &[("content-type", "application/json")];

/// A worker in trouble: how the configuration names it, and what is to be said of it.
struct Case {
    table: String,
    name: String,
    cause: &'static str,
    /// Ends the URL that was asked.
    path: &'static str,
    /// Among what is said.
    says: &'static str,
    state: &'static str,
    /// Probes after which it is looked at: some are slow.
    probes: u64,
}

fn list(models: &[&str]) -> String {
    let models: Vec<String> = models.iter().map(|&model| model.to_owned()).collect();
    model_list(&models, &[]).to_string()
}

/// An answer: its path, status, headers and body.
type Answer<'a> = (&'a str, u16, &'a [(&'a str, &'a str)], &'a str);

/// A fake worker that answers these paths so, and the table of it.
async fn scripted(answers: &[Answer<'_>]) -> (FakeWorker, String, String) {
    let worker = FakeWorker::start().await;
    for (path, status, headers, body) in answers {
        worker.answer_at(path, *status, headers, body);
    }
    let name = worker.addr().to_string();
    (worker, format!("[[worker]]\nurl = \"http://{name}\"\n"), name)
}

/// What `/workers` says of a worker.
async fn row(gateway: &Gateway, name: &str) -> Value {
    let workers = gateway.workers().await;
    let found = workers.as_array().unwrap().iter().find(|row| row["worker"] == name).cloned();
    found.unwrap_or_else(|| panic!("{name} is not in {workers}"))
}

/// Lines of a level about a worker.
fn lines(gateway: &Gateway, level: &str, name: &str) -> Vec<String> {
    let log = gateway.process.log();
    let of_it =
        |line: &&String| line.contains(&format!(" {level} ")) && line.contains(&format!("worker={name} "));
    log.iter().filter(of_it).cloned().collect()
}

fn config_of(cases: &[Case]) -> String {
    cases.iter().map(|case| case.table.as_str()).collect()
}

/// Waits until each case is told, and that it is told once however often it is found.
async fn told_once(gateway: &Gateway, cases: &[Case]) {
    for case in cases {
        let Case { name, cause, path, says, state, probes, .. } = case;
        eventually!(
            row(gateway, name).await["last_error"]["times"].as_u64() >= Some(*probes),
            "{cause}: {probes} probes; {}",
            row(gateway, name).await
        );
        let row = row(gateway, name).await;
        let error = &row["last_error"];
        assert_eq!((error["cause"].as_str(), row["state"].as_str()), (Some(*cause), Some(*state)), "{row}");
        let (url, text) = (error["url"].as_str().unwrap(), error["text"].as_str().unwrap());
        assert!(url.starts_with("http") && url.ends_with(path), "{cause}: {url}");
        assert!(text.contains(says), "{cause}: {text}");
        assert!(error["since"].as_f64() > Some(1e9), "{error}");
        eventually!(!lines(gateway, "WARN", name).is_empty(), "{cause} is told; {:?}", gateway.process.log());
        let lines = lines(gateway, "WARN", name);
        assert_eq!(lines.len(), 1, "{cause}: {lines:?}");
        let line = &lines[0];
        assert!(
            line.contains(&format!("cause=\"{cause}\"")) && line.contains(url) && line.contains(says),
            "{line}"
        );
        let labels = [("worker", name.as_str()), ("cause", *cause)];
        assert!(
            gateway.metrics().await.sum("keyway_probe_failures_total", &labels) >= *probes as f64,
            "{cause}"
        );
    }
}

#[tokio::test]
#[allow(clippy::too_many_lines, reason = "a table: a row for each cause")]
async fn a_worker_whose_answers_are_wrong_is_told_once_with_its_url_and_what_to_do() {
    let (html, text_html) = ("<html><body>Sign in</body></html>", &[("content-type", "text/html")][..]);
    let away = &[("location", "https://elsewhere.example/login?token=secret")][..];
    let long = format!("{{\"data\":[{{\"id\":\"{}\"}}]}}", "m".repeat(3 << 20));
    let mut workers = Vec::new();
    let mut cases = Vec::new();
    for (answers, cause, path, says, state) in [
        (vec![("/v1/models", 401, JSON, "{}")], "unauthorized", "/v1/models", "set api_key_file", "ready"),
        (vec![("/v1/models", 403, JSON, "{}")], "unauthorized", "/v1/models", "403 on /v1/models", "ready"),
        (vec![("/v1/models", 404, JSON, "{}")], "not_found", "/v1/models", "404 on /v1/models", "ready"),
        (
            vec![("/v1/models", 200, JSON, "{\"data\":[]}")],
            "no_models",
            "/v1/models",
            "lists no model",
            "ready",
        ),
        (
            vec![("/health", 404, JSON, "{}"), ("/v1/models", 404, JSON, "{}")],
            "not_found",
            "/v1/models",
            "before /v1",
            "joining",
        ),
        (
            vec![("/health", 401, JSON, "{}"), ("/v1/models", 401, JSON, "{}")],
            "unauthorized",
            "/v1/models",
            "set api_key_file",
            "joining",
        ),
        (
            vec![("/health", 200, text_html, html), ("/v1/models", 200, text_html, html)],
            "not_json",
            "/v1/models",
            "text/html",
            "joining",
        ),
        (
            vec![("/v1/models", 200, JSON, "{\"data\":7}")],
            "no_list",
            "/v1/models",
            "no list of models",
            "ready",
        ),
        (vec![("/v1/models", 502, JSON, "{}")], "server_error", "/v1/models", "502 on /v1/models", "joining"),
        (vec![("/health", 503, JSON, "{}")], "server_error", "/health", "503 on /health", "joining"),
        (
            vec![("/health", 301, away, ""), ("/v1/models", 301, away, "")],
            "redirect",
            "/v1/models",
            "https://elsewhere.example/login",
            "joining",
        ),
        (
            vec![("/health", 404, JSON, ""), ("/v1/models", 200, JSON, long.as_str())],
            "too_large",
            "/v1/models",
            "bytes",
            "joining",
        ),
    ] {
        let (worker, table, name) = scripted(&answers).await;
        workers.push(worker);
        cases.push(Case { table, name, cause, path, says, state, probes: 4 });
    }
    let gateway = Gateway::builder().config(&config_of(&cases)).start().await;
    told_once(&gateway, &cases).await;
    assert!(gateway.process.log().iter().all(|line| !line.contains("token=secret")));
    // A fault that is mended is over, in every place.
    for worker in &workers {
        worker.answer_as_ever("/health");
        worker.answer_as_ever("/v1/models");
    }
    for case in &cases {
        eventually!(row(&gateway, &case.name).await["last_error"].is_null(), "{}: it is well", case.cause);
        eventually!(row(&gateway, &case.name).await["state"] == "ready", "{}: it is ready", case.cause);
        let over = |line: &String| line.contains("worker's fault is over");
        eventually!(lines(&gateway, "INFO", &case.name).iter().any(over), "{}: it is told", case.cause);
    }
}

#[tokio::test]
async fn a_worker_that_cannot_be_reached_is_told_once_with_its_url_and_what_to_do() {
    let (own, stranger) = (Authority::new(), Authority::new());
    let backend = FakeWorker::start().await;
    let front = TlsFront::start(backend.addr(), &own.sign("worker"), None).await;
    let wanting = TlsFront::start(backend.addr(), &own.sign("worker"), Some(&own)).await;
    let plain = backend.addr();
    let closing = closing_server().await;
    let gone = FakeWorker::start().await;
    gone.stop().await;
    let table = |url: &str, tls: &str| format!("[[worker]]\nurl = \"{url}\"\n{tls}");
    let ca = |authority: &Authority| format!("tls = {{ ca_file = {:?} }}\n", authority.ca_file);
    let (front_port, wanting) = (front.addr.port(), wanting.addr);
    let case = |table: String, name: String, cause, says| Case {
        table,
        name,
        cause,
        path: "/health",
        says,
        state: "joining",
        probes: 2,
    };
    let cases = [
        case(
            table(&format!("http://{}", gone.addr()), ""),
            gone.addr().to_string(),
            "refused",
            "start the engine there",
        ),
        case(
            table("http://no-such-host.invalid:8000", ""),
            "no-such-host.invalid:8000".to_owned(),
            "dns",
            "no-such-host.invalid",
        ),
        case(table(&format!("http://{closing}"), ""), closing.to_string(), "reset", "closed the connection"),
        case(table(&format!("http://{}", front.addr), ""), front.addr.to_string(), "tls", "write https://"),
        case(table(&format!("https://{plain}"), &ca(&own)), plain.to_string(), "tls", "http://"),
        case(
            table(&format!("https://127.0.0.1:{front_port}/other"), &ca(&stranger)),
            format!("127.0.0.1:{front_port}/other"),
            "certificate",
            "ca_file",
        ),
        case(
            table(&format!("https://localhost:{front_port}"), &ca(&own)),
            format!("localhost:{front_port}"),
            "certificate",
            "another name",
        ),
        case(
            table(&format!("https://{wanting}"), &ca(&own)),
            wanting.to_string(),
            "certificate",
            "cert_file",
        ),
    ];
    let gateway = Gateway::builder().config(&config_of(&cases)).start().await;
    told_once(&gateway, &cases).await;
    gone.restart().await;
    let name = gone.addr().to_string();
    eventually!(row(&gateway, &name).await["state"] == "ready", "it is back");
    assert!(row(&gateway, &name).await["last_error"].is_null());
}

/// Closes each connection that says something.
async fn closing_server() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let _ = stream.read(&mut [0; 64]).await;
        }
    });
    addr
}

#[tokio::test]
async fn a_worker_that_says_nothing_is_told_apart_from_one_that_is_not_there() {
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let name = silent.local_addr().unwrap().to_string();
    let held = tokio::spawn(async move {
        let mut held = Vec::new();
        while let Ok((stream, _)) = silent.accept().await {
            held.push(stream);
        }
    });
    let gateway = Gateway::builder().args(&["--worker", &format!("http://{name}")]).start().await;
    eventually!(!lines(&gateway, "WARN", &name).is_empty(), "it is told; {:?}", gateway.process.log());
    let error = row(&gateway, &name).await["last_error"].clone();
    assert_eq!(error["cause"], "timeout");
    assert!(error["text"].as_str().unwrap().contains("no answer to /health"), "{error}");
    held.abort();
    eventually!(row(&gateway, &name).await["last_error"]["cause"] == "refused", "now nobody is there");
}

#[tokio::test]
async fn a_worker_without_health_joins_by_its_list_of_models() {
    let models = list(&[FAKE_MODEL]);
    for status in [404, 405, 501, 401, 308] {
        let (worker, table, name) =
            scripted(&[("/health", status, JSON, "{}"), ("/v1/models", 200, JSON, models.as_str())]).await;
        let gateway = Gateway::builder().config(&table).start().await;
        gateway.wait_ready(1).await;
        assert_eq!(post(gateway.addr, CHAT, &chat("hi")).await.status(), 200, "{status}");
        assert!(row(&gateway, &name).await["last_error"].is_null(), "{status}: that is no fault");
        assert!(lines(&gateway, "WARN", &name).is_empty(), "{:?}", lines(&gateway, "WARN", &name));
        assert_eq!(worker.request_count(), 1);
    }
}

#[tokio::test]
async fn a_worker_that_wants_keys_serves_clients_that_bring_them() {
    // vLLM with --api-key leaves /health open; others protect all, and are trusted where their model is
    // configured.
    for (answers, model, ready) in [
        (vec![("/v1/models", 401, JSON, "{}")], "", true),
        (vec![("/health", 401, JSON, "{}"), ("/v1/models", 401, JSON, "{}")], "", false),
        (
            vec![("/health", 404, JSON, "{}"), ("/v1/models", 401, JSON, "{}")],
            "model = \"fake-model\"\n",
            true,
        ),
    ] {
        let (worker, table, name) = scripted(&answers).await;
        let gateway = Gateway::builder().config(&format!("{table}{model}")).start().await;
        eventually!(!lines(&gateway, "WARN", &name).is_empty(), "its key is missing");
        assert_eq!(row(&gateway, &name).await["last_error"]["cause"], "unauthorized");
        assert_eq!(gateway.ready_workers().await == 1, ready, "{answers:?} {model}");
        let answer = post(gateway.addr, CHAT, &chat("hi")).await;
        assert_eq!((answer.status(), worker.request_count()), if ready { (200, 1) } else { (503, 0) });
    }
}

#[tokio::test]
async fn what_is_known_of_a_worker_outlives_a_list_that_breaks() {
    let cluster = Cluster::of_fakes(1, "prefix").await;
    let (worker, gateway) = (&cluster.fakes[0], &cluster.gateway);
    let name = worker.addr().to_string();
    for (status, body, cause) in
        [(401, "{}", "unauthorized"), (200, "<html>", "not_json"), (500, "{}", "server_error")]
    {
        worker.answer_at("/v1/models", status, JSON, body);
        eventually!(row(gateway, &name).await["last_error"]["cause"] == cause, "{cause}");
        let row = row(gateway, &name).await;
        assert_eq!(
            (&row["state"], &row["models"][0]),
            (&Value::from("ready"), &Value::from(FAKE_MODEL)),
            "{row}"
        );
        cluster.chat("still there").await;
    }
}

#[tokio::test]
async fn a_url_is_understood_as_people_write_it_wherever_it_comes_from() {
    let worker = FakeWorker::start().await;
    let place = worker.addr().to_string();
    let file = keyway_tests::cluster::config_file(&format!("worker = [\"HTTP://{place}/v1//\"]\n"));
    let admin = format!("{{\"url\":\"http://{place}/v1/\"}}");
    let discovery = format!("[discovery]\nfile = {:?}\ninterval_seconds = 0.05\n", file.path());
    for (config, added) in [
        (format!("[[worker]]\nurl = \"http://{place}/v1\"\n"), None),
        (discovery, None),
        (format!("[[discovery.dns]]\nurl = \"http://localhost:{}/v1\"\n", worker.addr().port()), None),
        ("[discovery]\nadmin_allow = [\"127.0.0.1\"]\n".to_owned(), Some(&admin)),
    ] {
        let gateway = Gateway::builder().config(&config).start().await;
        if let Some(table) = added {
            let added = post(gateway.admin, "/workers", table.as_bytes()).await;
            assert_eq!(added.status(), 201, "{}", added.text());
        }
        eventually!(gateway.ready_workers().await >= 1, "{config}: {}", gateway.workers().await);
        worker.forget_requests();
        let answer = post(gateway.addr, CHAT, &chat("hi")).await;
        assert_eq!(
            (answer.status(), answer.header("x-keyway-worker")),
            (200, Some(place.as_str())),
            "{config}"
        );
        assert_eq!(worker.requests()[0].target(), ("POST", CHAT));
        gateway.process.announced("the /v1 of the worker's URL is left out").await;
    }
}

#[tokio::test]
async fn a_password_in_a_url_reaches_the_worker_and_nobody_else() {
    let worker = FakeWorker::start().await;
    canary::register("a-password-for-workers");
    canary::register("b3BlcmF0b3I6YS1wYXNzd29yZC1mb3Itd29ya2Vycw==");
    worker.answer_at("/v1/models", 200, JSON, &list(&[FAKE_MODEL]));
    let url = format!("http://operator:a-password-for-workers@{}/v1", worker.addr());
    let gateway = Gateway::builder().args(&["--worker", &url]).start().await;
    gateway.wait_ready(1).await;
    let answer = post(gateway.addr, CHAT, &chat("hi")).await;
    let name = worker.addr().to_string();
    assert_eq!((answer.status(), answer.header("x-keyway-worker")), (200, Some(name.as_str())));
    for asked in [&worker.answered()[0], &worker.requests()[0]] {
        assert_eq!(asked.head.header("host"), Some(name.as_str()));
        let basic = "Basic b3BlcmF0b3I6YS1wYXNzd29yZC1mb3Itd29ya2Vycw==";
        assert_eq!(asked.head.header_values("authorization"), [basic]);
    }
    // Wrong, it is said so, and not repeated. The canaries are looked for in all that the gateway shows.
    worker.answer_at("/v1/models", 401, JSON, "{}");
    eventually!(
        row(&gateway, &name).await["last_error"]["text"]
            .as_str()
            .is_some_and(|t| t.contains("does not take"))
    );
    get(gateway.admin, "/metrics").await;
}

#[tokio::test]
async fn two_paths_of_one_port_are_two_workers() {
    let worker = FakeWorker::start().await;
    for (path, model) in [("/a", "alpha"), ("/b/c", "beta")] {
        worker.answer_at(&format!("{path}/health"), 200, JSON, "{}");
        worker.answer_at(&format!("{path}/v1/models"), 200, JSON, &list(&[model]));
    }
    let place = worker.addr();
    let toml = format!("worker = [\"http://{place}/a\"]\n[discovery]\nadmin_allow = [\"127.0.0.1\"]\n");
    let gateway = Gateway::builder().config(&toml).start().await;
    let table = format!("{{\"url\":\"http://{place}/b/c/\"}}");
    assert_eq!(post(gateway.admin, "/workers", table.as_bytes()).await.status(), 201);
    assert_eq!(post(gateway.admin, "/workers", table.as_bytes()).await.status(), 409);
    gateway.wait_ready(2).await;
    for (model, path) in [("alpha", "/a"), ("beta", "/b/c")] {
        worker.forget_requests();
        let answer = post(gateway.addr, CHAT, &chat_for(model, "hi", false)).await;
        let name = format!("{place}{path}");
        assert_eq!(
            (answer.status(), answer.header("x-keyway-worker")),
            (200, Some(name.as_str())),
            "{model}"
        );
        // Its metrics are asked for too.
        let asked = worker.requests();
        let posted: Vec<_> = asked
            .iter()
            .map(keyway_tests::fake_worker::Recorded::target)
            .filter(|(method, _)| *method == "POST")
            .collect();
        assert_eq!(posted, [("POST", format!("{path}{CHAT}").as_str())]);
        let picks = gateway.metrics().await.sum("keyway_picks_total", &[("worker", &name)]);
        assert_eq!(picks, 1.0, "{name}");
    }
    // Operators name them so.
    for (command, state) in [("drain", "draining"), ("undrain", "ready")] {
        let path = format!("/workers/{place}/a/{command}");
        assert_eq!(post(gateway.admin, &path, b"{}").await.status(), 202, "{command}");
        eventually!(row(&gateway, &format!("{place}/a")).await["state"] == state, "{command}");
    }
    let mut client = keyway_tests::Client::connect(gateway.admin).await;
    client.request("DELETE", &format!("/workers/{place}/b/c"), JSON, b"").await;
    assert_eq!(client.response().await.status(), 202);
    eventually!(gateway.workers().await.as_array().unwrap().len() == 1, "it is gone");
}

#[tokio::test]
async fn a_mistyped_model_is_refused_while_a_worker_joins_and_a_missing_one_s_is_not() {
    let (up, down) = (FakeWorker::with_models(&["alpha"]).await, FakeWorker::with_models(&["beta"]).await);
    let loading = FakeWorker::with_models(&["gamma"]).await;
    loading.set_health(503);
    let gateway =
        Gateway::builder().worker(up.addr()).worker(down.addr()).worker(loading.addr()).start().await;
    gateway.wait_ready(2).await;
    let ask = async |model: &str| post(gateway.addr, CHAT, &chat_for(model, "hi", false)).await;
    eventually!(ask("alhpa").await.status() == 404, "a mistyped name");
    let refused = ask("alhpa").await.json();
    assert_eq!(refused["error"]["code"], "model_not_found");
    assert!(refused["error"]["message"].as_str().unwrap().contains("alpha, beta"), "{refused}");
    assert_eq!(ask("alpha").await.status(), 200);
    down.stop().await;
    eventually!(gateway.ready_workers().await == 1, "one has gone");
    let missing = ask("beta").await;
    assert_eq!((missing.status(), missing.header("retry-after")), (503, Some("1")), "it was there");
    loading.set_health(200);
    gateway.wait_ready(2).await;
    assert_eq!(ask("gamma").await.status(), 200);
    // Where nobody has said anything yet, no name is wrong.
    let cold = FakeWorker::start().await;
    cold.set_health(503);
    let gateway = Gateway::builder().worker(cold.addr()).start().await;
    assert_eq!(post(gateway.addr, CHAT, &chat_for("alhpa", "hi", false)).await.status(), 503);
}

#[tokio::test]
async fn an_idle_worker_whose_port_closes_is_down_although_it_keeps_its_connections() {
    let cluster = Cluster::of_fakes(2, "round-robin").await;
    let (ending, gateway) = (&cluster.fakes[0], &cluster.gateway);
    let name = ending.addr().to_string();
    for turn in 0..4 {
        cluster.chat(&format!("warm {turn}")).await;
    }
    ending.close_port();
    eventually!(row(gateway, &name).await["state"] == "down", "{}", gateway.workers().await);
    // Kept connections still answer; they are no reason to take it back.
    eventually!(row(gateway, &name).await["last_error"]["times"].as_u64() >= Some(4), "it is looked at");
    let row = row(gateway, &name).await;
    assert_eq!((&row["state"], &row["last_error"]["cause"]), (&Value::from("down"), &Value::from("refused")));
    let before = ending.request_count();
    for turn in 0..4 {
        assert_eq!(cluster.served_by(&cluster.chat(&format!("after {turn}")).await), 1);
    }
    assert_eq!(ending.request_count(), before);
    eventually!(!lines(gateway, "WARN", &name).is_empty(), "it is told");
    let warned = lines(gateway, "WARN", &name);
    assert_eq!(warned.len(), 1, "{warned:?}");
    ending.stop().await;
    ending.restart().await;
    gateway.wait_ready(2).await;
}

#[tokio::test]
async fn a_killed_idle_worker_is_down_and_said_to_be() {
    let mut cluster = Cluster::builder().workers(2).start().await;
    let name = cluster.workers[0].addr().to_string();
    cluster.workers[0].process.kill();
    eventually!(row(&cluster.gateway, &name).await["state"] == "down");
    assert_eq!(row(&cluster.gateway, &name).await["last_error"]["cause"], "refused");
    let changed = |line: &String| line.contains("worker changed state") && line.contains("ready=false");
    eventually!(
        lines(&cluster.gateway, "INFO", &name).iter().any(changed),
        "{:?}",
        cluster.gateway.process.log()
    );
    assert_eq!(cluster.gateway.ready_workers().await, 1);
}

/// What vLLM's metrics say of its sleep, of which only they tell: its health is good all the while.
fn sleep_states(awake: u8, offloaded: u8) -> String {
    [("awake", awake), ("weights_offloaded", offloaded), ("discard_all", 0)]
        .map(|(state, is)| {
            format!("vllm:engine_sleep_state{{engine=\"0\",sleep_state=\"{state}\"}} {is}.0\n")
        })
        .concat()
}

#[tokio::test]
async fn an_engine_that_sleeps_gets_nothing_new_and_is_nobody_s_failure() {
    for (offloaded, forgets) in [(0, false), (1, true)] {
        let cluster = Cluster::of_fakes(2, "prefix").await;
        let prompt = "tell me about whales, at some length please. ".repeat(40);
        let home = cluster.served_by(&cluster.chat(&prompt).await);
        let sleeper = &cluster.fakes[home];
        sleeper.set_metrics(&sleep_states(0, offloaded));
        eventually!(cluster.gateway.ready_workers().await == 1);
        let workers = cluster.gateway.workers().await;
        let states: Vec<_> =
            workers.as_array().unwrap().iter().map(|worker| worker["state"].clone()).collect();
        assert!(states.contains(&"paused".into()), "{states:?}");
        let elsewhere = "tell me about something else, and quickly now. ".repeat(40);
        assert_eq!(cluster.served_by(&cluster.chat(&elsewhere).await), 1 - home);
        sleeper.set_metrics(&sleep_states(1, 0));
        eventually!(cluster.gateway.ready_workers().await == 2);
        let metrics = cluster.gateway.metrics().await;
        assert_eq!(metrics.sum("keyway_probe_failures_total", &[]), 0.0);
        // What it had cached is gone with its memory, and only then.
        let again = cluster.chat(&prompt).await;
        let matched: u64 = again.header("x-keyway-matched-tokens").unwrap().parse().unwrap();
        assert_eq!(matched == 0, forgets, "{matched} tokens counted on");
    }
}
