//! Hazard: an answer sends its client to the worker's own address, past the gateway, its keys and its limits,
//! or into nowhere.

use keyway_tests::openai::chat;
use keyway_tests::{Client, Cluster, FakeWorker, Gateway, eventually};

/// The answer's links of each name, when the worker says these.
async fn links(gateway: &Gateway, worker: &FakeWorker, status: u16, said: &[(&str, &str)]) -> Vec<String> {
    let mut client = Client::connect(gateway.addr).await;
    client.post("/v1/chat/completions/", &chat("a slash too many")).await;
    worker.call().await.respond(status, said, b"").await;
    let answer = client.response().await;
    assert_eq!(answer.status(), status);
    let said = said.iter().map(|(name, _)| answer.header(name).unwrap_or_default().to_owned());
    said.collect()
}

#[tokio::test]
async fn a_redirect_to_the_worker_leads_through_the_gateway() {
    let cluster = Cluster::of_fakes(1, "prefix").await;
    let worker = &cluster.fakes[0];
    worker.manual();
    let (at, port) = (worker.addr().to_string(), worker.addr().port());
    for status in [301, 302, 303, 307, 308, 201] {
        let link = format!("http://{at}/v1/chat/completions?a=b");
        let led = links(&cluster.gateway, worker, status, &[("location", &link)]).await;
        assert_eq!(led, ["/v1/chat/completions?a=b"], "{status}");
    }
    for (link, want) in [
        (format!("HTTP://{at}/v1/x#y"), "/v1/x#y"),
        (format!("https://{at}/v1/x"), "/v1/x"),
        (format!("//{at}/v1/x"), "/v1/x"),
        (format!("http://user:word@{at}/v1/x"), "/v1/x"),
        (format!("http://{at}"), "/"),
        (format!("http://{at}//elsewhere.example/"), "/.//elsewhere.example/"),
        ("https://elsewhere.example/v1/x".to_owned(), "https://elsewhere.example/v1/x"),
        ("/v1/x".to_owned(), "/v1/x"),
        ("x?y".to_owned(), "x?y"),
    ] {
        assert_eq!(links(&cluster.gateway, worker, 307, &[("location", &link)]).await, [want], "{link}");
    }
    let other_port = format!("http://127.0.0.1:{}/v1/x", port ^ 1);
    assert_eq!(links(&cluster.gateway, worker, 307, &[("location", &other_port)]).await, [other_port]);
    let all = [
        ("content-location", format!("http://{at}/v1/files/f")),
        ("refresh", format!("1; url=http://{at}/v1/files/f")),
        ("link", format!("<http://{at}/v1/files?after=f>; rel=next, <https://e.example/>; rel=help")),
    ];
    let all: Vec<(&str, &str)> = all.iter().map(|(name, link)| (*name, link.as_str())).collect();
    let led = links(&cluster.gateway, worker, 200, &all).await;
    assert_eq!(led[..2], ["/v1/files/f", "1; url=/v1/files/f"]);
    assert_eq!(led[2], "</v1/files?after=f>; rel=next, <https://e.example/>; rel=help");
}

#[tokio::test]
async fn the_path_of_the_worker_s_url_is_no_part_of_it() {
    let worker = FakeWorker::start().await;
    let url = format!("http://{}/engines/a/", worker.addr());
    let gateway = Gateway::builder().args(&["--worker", &url]).start().await;
    worker.answer();
    // Its probes go behind that path too, and are answered as anything is.
    eventually!(gateway.ready_workers().await == 1, "{}", gateway.workers().await);
    worker.manual();
    let at = worker.addr();
    for (link, want) in [
        (format!("http://{at}/engines/a/v1/chat/completions"), "/v1/chat/completions"),
        (format!("http://{at}/v1/chat/completions"), "/v1/chat/completions"),
        ("/engines/a/v1/chat/completions".to_owned(), "/v1/chat/completions"),
        (format!("http://{at}/engines/abc/v1"), "/engines/abc/v1"),
        ("/v1/chat/completions".to_owned(), "/v1/chat/completions"),
    ] {
        let mut client = Client::connect(gateway.addr).await;
        client.post("/v1/chat/completions/", &chat("a slash too many")).await;
        loop {
            let call = worker.call().await;
            if call.request.target().1 == "/engines/a/v1/chat/completions/" {
                call.respond(307, &[("location", &link)], b"").await;
                break;
            }
            call.respond(200, &[], b"").await;
        }
        assert_eq!(client.response().await.header("location"), Some(want), "{link}");
    }
}

#[tokio::test]
async fn a_client_that_follows_arrives_at_the_gateway() {
    let cluster = Cluster::of_fakes(1, "prefix").await;
    let worker = &cluster.fakes[0];
    worker.manual();
    let link = format!("http://{}/v1/chat/completions", worker.addr());
    let led = links(&cluster.gateway, worker, 307, &[("location", &link)]).await.remove(0);
    assert!(led.starts_with('/'), "it names no host: {led}");
    worker.answer();
    let answer = keyway_tests::post(cluster.addr(), &led, &chat("followed")).await;
    assert_eq!((answer.status(), cluster.served_by(&answer)), (200, 0));
}
