//! Hazard: what is said in confidence is read on the way, or told to somebody else. Clients by TLS, workers
//! by TLS, each side with a certificate where that is wanted; and certificates are replaced without a
//! restart.

use keyway_tests::openai::chat;
use keyway_tests::tls::{Authority, Identity, TlsFront, post_tls};
use keyway_tests::{Client, Cluster, End, FakeWorker, Gateway, eventually};

/// When certificates run out, in seconds since 1970.
const NEW_YEAR_2100: f64 = 4_102_444_800.0;
const NEW_YEAR_2099: f64 = 4_070_908_800.0;

/// What the answers of a fake worker hold.
const WORDS: &[u8] = b"one two three";

async fn gateway(worker: &str, identity: &Identity, more: &str) -> Gateway {
    let toml = format!(
        "worker = [{worker:?}]\n[tls]\ncert_file = {:?}\nkey_file = {:?}\n{more}",
        identity.cert_file, identity.key_file
    );
    let gateway = Gateway::builder().config(&toml).start().await;
    gateway.wait_ready(1).await;
    gateway
}

fn says(answer: &Result<(u16, bytes::Bytes), String>) -> bool {
    answer
        .as_ref()
        .is_ok_and(|(status, body)| *status == 200 && body.windows(WORDS.len()).any(|window| window == WORDS))
}

#[tokio::test]
async fn clients_speak_either_protocol_over_tls_and_nothing_in_plain() {
    let (worker, authority) = (FakeWorker::start().await, Authority::new());
    let gateway = gateway(&format!("http://{}", worker.addr()), &authority.sign("gateway"), "").await;
    for protocol in ["h2", "http/1.1"] {
        let answer = post_tls(gateway.addr, &authority, None, protocol, &chat("hi")).await;
        assert!(says(&answer), "{protocol}: {answer:?}");
    }
    // Who believes another authority does not talk to it.
    assert!(post_tls(gateway.addr, &Authority::new(), None, "h2", &chat("hi")).await.is_err());
    // Plain HTTP gets no HTTP answer.
    let before = worker.request_count();
    let mut plain = Client::connect(gateway.addr).await;
    plain.try_send(b"POST /v1/chat/completions HTTP/1.1\r\nhost: k\r\ncontent-length: 2\r\n\r\n{}").await;
    assert!(plain.try_head().await.is_none());
    assert_eq!(worker.request_count(), before);
    gateway.idle().await;
}

#[tokio::test]
async fn a_replaced_certificate_is_used_and_a_broken_one_is_not() {
    let (worker, old, new) = (FakeWorker::start().await, Authority::new(), Authority::new());
    let identity = old.sign("gateway");
    let gateway = gateway(&format!("http://{}", worker.addr()), &identity, "").await;
    assert!(says(&post_tls(gateway.addr, &old, None, "h2", &chat("hi")).await));
    new.sign_into(&identity);
    eventually!(
        says(&post_tls(gateway.addr, &new, None, "h2", &chat("hi")).await),
        "the new certificate is in use"
    );
    assert!(post_tls(gateway.addr, &old, None, "h2", &chat("hi")).await.is_err());
    let expiry = async || {
        let listener = [("certificate", "listener")];
        gateway.metrics().await.sum("keyway_certificate_expiry_timestamp_seconds", &listener)
    };
    assert_eq!(expiry().await, NEW_YEAR_2100);
    new.sign_until(&identity, 2_099);
    eventually!(expiry().await == NEW_YEAR_2099, "the metric says until when the one in use is good");
    std::fs::write(&identity.cert_file, "no certificate").unwrap();
    gateway.process.announced("the old certificate stays in use").await;
    assert!(says(&post_tls(gateway.addr, &new, None, "h2", &chat("hi")).await));
    assert_eq!(expiry().await, NEW_YEAR_2099);
}

#[tokio::test]
async fn what_the_gateway_shows_a_worker_and_whom_it_believes_are_replaced_without_a_restart() {
    let (worker, old, new) = (FakeWorker::start().await, Authority::new(), Authority::new());
    let own = old.sign("gateway");
    let front = TlsFront::start(worker.addr(), &old.sign("worker"), Some(&old)).await;
    let table = format!(
        "[[worker]]\nurl = \"https://{}\"\ntls = {{ ca_file = {:?}, cert_file = {:?}, key_file = {:?} }}\n",
        front.addr, old.ca_file, own.cert_file, own.key_file
    );
    let gateway = Gateway::builder().config(&table).start().await;
    gateway.wait_ready(1).await;
    let expiry = async || {
        let client = [("certificate", "client")];
        gateway.metrics().await.sum("keyway_certificate_expiry_timestamp_seconds", &client)
    };
    assert_eq!(expiry().await, NEW_YEAR_2100);

    // The worker is restarted with certificates of another authority, and believes only its clients.
    front.restart(&new.sign("worker"), Some(&new));
    new.sign_until(&own, 2_099);
    std::fs::copy(&new.ca_file, &old.ca_file).unwrap();
    eventually!(expiry().await == NEW_YEAR_2099);
    eventually!(
        keyway_tests::post(gateway.addr, keyway_tests::openai::CHAT, &chat("hi")).await.status() == 200
    );
}

#[tokio::test]
async fn with_a_client_ca_only_its_clients_come_in() {
    let (worker, authority, clients) = (FakeWorker::start().await, Authority::new(), Authority::new());
    let more = format!("client_ca_file = {:?}\n", clients.ca_file);
    let gateway = gateway(&format!("http://{}", worker.addr()), &authority.sign("gateway"), &more).await;
    let foreign = Authority::new();
    let (known, stranger) = (clients.sign("known"), foreign.sign("stranger"));
    for protocol in ["h2", "http/1.1"] {
        let ask = async |identity| post_tls(gateway.addr, &authority, identity, protocol, &chat("hi")).await;
        assert!(says(&ask(Some(&known)).await));
        assert!(ask(None).await.is_err());
        assert!(ask(Some(&stranger)).await.is_err());
    }
    assert_eq!(worker.request_count(), 2);
}

#[tokio::test]
async fn workers_are_reached_by_tls_and_believed_only_with_the_right_certificate() {
    let (worker, authority, other) = (FakeWorker::start().await, Authority::new(), Authority::new());
    let identity = authority.sign("worker");
    let front = TlsFront::start(worker.addr(), &identity, Some(&other)).await.addr;
    let own = other.sign("gateway");
    let table = |ca: &Authority, own: Option<&Identity>| {
        let own = own.map(|own| format!(", cert_file = {:?}, key_file = {:?}", own.cert_file, own.key_file));
        let own = own.unwrap_or_default();
        format!("[[worker]]\nurl = \"https://{front}\"\ntls = {{ ca_file = {:?}{own} }}\n", ca.ca_file)
    };
    let good = Gateway::builder().config(&table(&authority, Some(&own))).start().await;
    good.wait_ready(1).await;
    let cluster = Cluster { gateway: good, fakes: Vec::new(), workers: Vec::new(), proxies: Vec::new() };
    for _ in 0..3 {
        let answer = cluster.chat("hi").await;
        assert_eq!((answer.status(), answer.end), (200, End::Complete));
    }
    // A worker whose certificate is not believed, and one that does not believe ours, are never ready.
    for table in [table(&other, Some(&own)), table(&authority, None)] {
        let bad = Gateway::builder().config(&table).start().await;
        eventually!(
            bad.workers().await[0]["state"] == "joining" || bad.workers().await[0]["state"] == "down",
            "it is probed in vain"
        );
        assert_eq!(bad.readyz().await, 503);
    }
}
