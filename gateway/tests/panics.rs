//! Hazard: a bug that panics takes more with it than its own request: other requests, a lock, a worker's
//! load, the process. There is no switch for panics in the gateway. They come from what it logs: the
//! subscriber panics at one line, in the very place of the code that logs it. That what is shown then cannot
//! be told by clients is `src/panics.rs`' business.
#![allow(
    clippy::expect_used,
    clippy::panic,
    clippy::unwrap_used,
    reason = "helpers of tests fail the test by panicking"
)]

use std::{
    fmt,
    future::Future,
    net::SocketAddr,
    panic,
    sync::atomic::{AtomicUsize, Ordering},
    time::Duration,
};

use bytes::Bytes;
use clap::Parser;
use futures_util::{StreamExt, stream};
use http::{Request, Response, StatusCode, Version};
use http_body::Frame;
use http_body_util::{BodyExt, Full, StreamBody, combinators::BoxBody};
use hyper::{body::Incoming, service::service_fn};
use hyper_util::{
    client::legacy::{Client, connect::HttpConnector},
    rt::{TokioExecutor, TokioIo},
};
use keyway::{
    machine::{cores::Cores, panics},
    process::{
        args::Cli,
        run::{self, Gateway},
        sockets::Sockets,
    },
};
use parking_lot::Mutex;
use tokio::net::TcpListener;
use tracing::{
    Event, Metadata, Subscriber,
    field::{Field, Visit},
    span::{Attributes, Id, Record},
};

/// Requests of each round, one of which meets the bug.
const REQUESTS: usize = 1_000;
/// How many are under way at once.
const AT_ONCE: usize = 50;

/// How long what must happen is waited for.
const PATIENCE: Duration = Duration::from_secs(30);

/// What is asked of the worker beside an answer.
const NO_ANSWER: &str = "the worker hangs up";
const HALF_AN_ANSWER: &str = "the worker hangs up in the middle";

/// The line at which the next event panics.
static BUG: Mutex<Option<&str>> = Mutex::new(None);
/// What it says, as text of the source.
const BUG_TEXT: &str = "the bug of this round";
/// Lines that say that something panicked.
static TOLD: AtomicUsize = AtomicUsize::new(0);

/// Logs nothing, and is where the bugs come from.
struct Bugs;

/// An event's message.
#[derive(Default)]
struct Message(String);

impl Visit for Message {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        if field.name() == "message" {
            self.0 = format!("{value:?}");
        }
    }
}

impl Subscriber for Bugs {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target().starts_with("keyway") || metadata.target() == "access"
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut message = Message::default();
        event.record(&mut message);
        if event.metadata().target() == "access" {
            "access".clone_into(&mut message.0);
        }
        if message.0 == "a panic, which is a bug" {
            TOLD.fetch_add(1, Ordering::SeqCst);
        }
        let bug = BUG.lock().take_if(|line| *line == message.0);
        assert!(bug.is_none(), "{}", BUG_TEXT);
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

/// As the process does; what fails the test is printed besides.
fn watch() {
    let prints = panic::take_hook();
    panics::watch();
    let watches = panic::take_hook();
    panic::set_hook(Box::new(move |panic| {
        watches(panic);
        if panic.payload().downcast_ref::<String>().is_none_or(|text| text != BUG_TEXT) {
            prints(panic);
        }
    }));
}

type Answer = Response<BoxBody<Bytes, std::io::Error>>;

fn whole(text: &'static str) -> BoxBody<Bytes, std::io::Error> {
    Full::new(Bytes::from_static(text.as_bytes())).map_err(|never| match never {}).boxed()
}

/// A worker that answers with a stream of two events, or does what the prompt says.
async fn answer(request: Request<Incoming>) -> Result<Answer, std::io::Error> {
    let path = request.uri().path().to_owned();
    let body = request.into_body().collect().await.expect("a request's body").to_bytes();
    let asks = |what: &str| memchr::memmem::find(&body, what.as_bytes()).is_some();
    let broken = || std::io::Error::other("as told");
    match path.as_str() {
        "/health" => return Ok(Response::new(whole("ok"))),
        "/v1/models" => {
            return Ok(Response::new(whole(r#"{"object":"list","data":[{"id":"m","object":"model"}]}"#)));
        }
        "/v1/chat/completions" if asks(HALF_AN_ANSWER) => {}
        "/v1/chat/completions" if asks(NO_ANSWER) => return Err(broken()),
        "/v1/chat/completions" => {}
        _ => {
            let mut missing = Response::new(whole(""));
            *missing.status_mut() = StatusCode::NOT_FOUND;
            return Ok(missing);
        }
    }
    let said = "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"hi\"}}]}\n\n";
    let end = "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":9,\"completion_tokens\":1,\
               \"prompt_tokens_details\":{\"cached_tokens\":0}}}\n\ndata: [DONE]\n\n";
    let rest = if asks(HALF_AN_ANSWER) {
        Err(broken())
    } else {
        Ok(Frame::data(Bytes::from_static(end.as_bytes())))
    };
    let rest = stream::once(async {
        // What came before is written when the body has nothing at hand.
        tokio::task::yield_now().await;
        rest
    });
    let frames = stream::iter([Ok(Frame::data(Bytes::from_static(said.as_bytes())))]).chain(rest);
    let mut response = Response::new(BodyExt::boxed(StreamBody::new(frames)));
    response.headers_mut().insert("content-type", "text/event-stream".parse().unwrap());
    Ok(response)
}

async fn worker() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            let served = hyper::server::conn::http1::Builder::new()
                .serve_connection(TokioIo::new(stream), service_fn(answer));
            tokio::spawn(served);
        }
    });
    addr
}

async fn gateway(worker: SocketAddr) -> Gateway {
    let worker = format!("http://{worker}");
    let cli = Cli::parse_from([
        "keyway",
        "--listen",
        "127.0.0.1:0",
        "--admin-listen",
        "127.0.0.1:0",
        "--worker",
        &worker,
    ]);
    let args = cli.serve;
    let config = args.clone().resolve().unwrap();
    let reader = Box::new(move || args.clone().resolve());
    let sockets = Sockets::open(&config).await.unwrap();
    let gateway = run::start(&config, sockets, reader, Vec::new(), Some(Cores::start(2).unwrap())).unwrap();
    gateway.open();
    assert!(gateway.ready(PATIENCE).await, "the worker is ready");
    gateway
}

type Clients = Client<HttpConnector, Full<Bytes>>;

fn clients(version: Version) -> Clients {
    Client::builder(TokioExecutor::new()).http2_only(version == Version::HTTP_2).build_http()
}

/// How an exchange ended.
#[derive(Debug, PartialEq, Eq)]
enum End {
    Whole,
    /// The head was an error.
    Status(u16),
    /// It was aborted.
    Cut,
}

async fn ask(clients: Clients, addr: SocketAddr, prompt: &str) -> End {
    let body = format!(
        r#"{{"model":"m","stream":true,"stream_options":{{"include_usage":true}},"messages":[{{"role":"user","content":"{prompt}"}}]}}"#
    );
    let request = Request::post(format!("http://{addr}/v1/chat/completions"))
        .header("content-type", "application/json")
        .body(Full::new(Bytes::from(body)))
        .unwrap();
    // The head may be waiting to be written together with what follows it.
    let Ok(response) = clients.request(request).await else { return End::Cut };
    if response.status() != StatusCode::OK {
        return End::Status(response.status().as_u16());
    }
    let body = response.into_body().collect().await;
    let whole = body.is_ok_and(|body| body.to_bytes().ends_with(b"data: [DONE]\n\n"));
    if whole { End::Whole } else { End::Cut }
}

/// All but one ask for nothing unusual; that one says `prompt`.
async fn round(addr: SocketAddr, version: Version, prompt: &'static str) -> Vec<End> {
    let clients = clients(version);
    let each = |i: usize| {
        let prompt = if i == REQUESTS / 2 { prompt } else { "hi" };
        let clients = clients.clone();
        // A task each, as clients are.
        tokio::spawn(async move { ask(clients, addr, prompt).await })
    };
    let ends = stream::iter((0..REQUESTS).map(each)).buffer_unordered(AT_ONCE);
    ends.map(|end| end.expect("no client panics")).collect().await
}

async fn metrics(admin: SocketAddr) -> String {
    let request = Request::get(format!("http://{admin}/metrics")).header("connection", "close");
    let response = clients(Version::HTTP_11).request(request.body(Full::default()).unwrap()).await.unwrap();
    String::from_utf8(response.into_body().collect().await.unwrap().to_bytes().to_vec()).unwrap()
}

/// The sum over a family's series with this in their labels.
fn sum(metrics: &str, family: &str, label: &str) -> f64 {
    let of_it = |line: &&str| line.starts_with(family) && !line.starts_with('#') && line.contains(label);
    metrics.lines().filter(of_it).filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum()
}

/// Polls until it is so.
async fn eventually<F: Future<Output = bool>>(what: &str, is: impl Fn() -> F) {
    let seen = tokio::time::timeout(PATIENCE, async {
        while !is().await {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    });
    assert!(seen.await.is_ok(), "{what}");
}

/// Of 1,000 requests one meets the bug at `line`, and ends as `expected`; nothing else is seen of it
/// afterwards.
async fn one_bug(
    gateway: &Gateway,
    version: Version,
    (line, prompt, expected): (&'static str, &'static str, End),
) {
    let before = metrics(gateway.admin_addr).await;
    let told = TOLD.load(Ordering::SeqCst);
    *BUG.lock() = Some(line);
    let context = format!("{line:?} over {version:?}");
    let Ok(ends) = tokio::time::timeout(PATIENCE, round(gateway.addr, version, prompt)).await else {
        panic!("somebody waits for ever: {context}");
    };
    let unusual: Vec<_> = ends.into_iter().filter(|end| *end != End::Whole).collect();
    // Whoever met the bug in its record's end has its answer already.
    let one = if expected == End::Whole { vec![] } else { vec![expected] };
    let outcomes = one.len() as f64;
    assert_eq!(unusual, one, "{context}");
    assert_eq!(*BUG.lock(), None, "it was met: {context}");
    let gauges = [
        "keyway_in_flight",
        "keyway_requests_in_flight",
        "keyway_waiting_prefill_tokens",
        "keyway_requests_waiting",
    ];
    eventually(&format!("nothing is held: {context}"), async || {
        let now = metrics(gateway.admin_addr).await;
        // Of connections the one that asks is left.
        gauges.iter().all(|gauge| sum(&now, gauge, "") == 0.0) && sum(&now, "keyway_connections", "") == 1.0
    })
    .await;
    let now = metrics(gateway.admin_addr).await;
    let more = |family: &str, label: &str| sum(&now, family, label) - sum(&before, family, label);
    assert_eq!(more("keyway_panics_total", ""), 1.0, "{context}");
    assert_eq!(TOLD.load(Ordering::SeqCst) - told, 1, "{context}");
    assert_eq!(more("keyway_requests_total", "internal_error"), outcomes, "{context}");
    assert_eq!(more("keyway_requests_total", ""), REQUESTS as f64, "{context}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_panic_in_any_layer_ends_one_request_and_nothing_else() {
    tracing::subscriber::set_global_default(Bugs).unwrap();
    watch();
    let gateway = gateway(worker().await).await;
    for version in [Version::HTTP_11, Version::HTTP_2] {
        for bug in [
            // Under the locks of the room and the index.
            ("a request begins", "hi", End::Status(500)),
            // Between two attempts.
            ("worker gave no answer", NO_ANSWER, End::Status(500)),
            // In the answer's body.
            ("the worker's answer broke off", HALF_AN_ANSWER, End::Cut),
            // In the truth loop, at the answer's end.
            ("cached tokens, as predicted and as reported", "hi", End::Cut),
            // In the end of the record.
            ("access", "hi", End::Whole),
        ] {
            one_bug(&gateway, version, bug).await;
        }
    }
    assert!(gateway.shutdown(false).await, "nothing is left to wait for");
}
