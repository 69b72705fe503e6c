//! Hazard: an HTTP/2 client splits its cookies into fields, and a worker sees the first alone (RFC 9113,
//! section 8.2.3).

use http::Request;
use keyway_tests::eventually::patient;
use keyway_tests::h2_worker::H2Worker;
use keyway_tests::{Client, Cluster, FakeWorker, Gateway};
use tokio::net::TcpStream;

const CRUMBS: [(&[&str], &str); 5] = [
    (&["a=1", "b=2", "c=3"], "a=1; b=2; c=3"),
    (&["a=1; b=2", "c=\"x; y\""], "a=1; b=2; c=\"x; y\""),
    (&["only=1"], "only=1"),
    (&["z=26", "a=1", "z=0"], "z=26; a=1; z=0"),
    (&["a=", "=b"], "a=; =b"),
];

/// Sends a request with these cookie fields over HTTP/2.
async fn send(gateway: &Gateway, crumbs: &[&str]) {
    let stream = patient("connection", TcpStream::connect(gateway.addr)).await.expect("connect");
    let (mut send, connection) = h2::client::handshake(stream).await.expect("handshake");
    let driver = tokio::spawn(connection);
    let mut request = Request::post(format!("http://{}/v1/files", gateway.addr));
    for crumb in crumbs {
        request = request.header("cookie", *crumb).header("x-between", "1");
    }
    let (answer, _) = send.send_request(request.body(()).expect("a request"), true).expect("a stream");
    assert_eq!(patient("answer", answer).await.expect("an answer").status(), 200);
    driver.abort();
}

fn cookies(worker: &FakeWorker) -> Vec<String> {
    let last = worker.requests().pop().expect("a request");
    last.head.header_values("cookie").into_iter().map(str::to_owned).collect()
}

#[tokio::test]
async fn the_crumbs_of_an_http2_client_are_one_cookie_for_a_worker() {
    let cluster = Cluster::of_fakes(1, "prefix").await;
    for (crumbs, whole) in CRUMBS {
        send(&cluster.gateway, crumbs).await;
        assert_eq!(cookies(&cluster.fakes[0]), [whole], "{crumbs:?}");
    }
    send(&cluster.gateway, &[]).await;
    assert!(cookies(&cluster.fakes[0]).is_empty());
}

#[tokio::test]
async fn they_are_one_field_for_a_worker_that_speaks_http2_too() {
    let worker = H2Worker::start(8).await;
    let gateway = Gateway::builder().args(&["--worker", &worker.url()]).start().await;
    gateway.wait_ready(1).await;
    let call = async {
        let call = worker.call().await;
        let cookies: Vec<_> = call.head.headers.get_all("cookie").iter().cloned().collect();
        call.respond("{}");
        cookies
    };
    let ((), cookies) = tokio::join!(send(&gateway, &["a=1", "b=2", "c=3"]), call);
    assert_eq!(cookies, ["a=1; b=2; c=3"]);
}

#[tokio::test]
async fn so_are_several_of_an_http1_client_unless_they_are_its_hop_s() {
    let cluster = Cluster::of_fakes(1, "prefix").await;
    let crumbs = [("cookie", "a=1"), ("x-between", "1"), ("cookie", "b=2")];
    for (connection, want) in [("keep-alive", vec!["a=1; b=2"]), ("keep-alive, cookie", vec![])] {
        let mut client = Client::connect(cluster.addr()).await;
        let headers: Vec<_> = crumbs.into_iter().chain([("connection", connection)]).collect();
        client.request("GET", "/v1/files", &headers, b"").await;
        assert_eq!(client.response().await.status(), 200);
        assert_eq!(cookies(&cluster.fakes[0]), want, "{connection}");
    }
}
