//! A server of known capacity, to check `search` with: one request at a time, in order, each for the same
//! time. Prints the rate at which it just keeps an objective, by queueing theory. Not an engine.
//!
//!     cargo run --release -p keyway-loadtest --example queue_server -- 127.0.0.1:9900 20 100 90
//!     keyway-loadtest search --url http://127.0.0.1:9900 --slo 'ttft.p90<100ms' --requests 2000 \
//!         --isl 16 --osl 1
//!
//! Arguments: address, milliseconds of work on a request, milliseconds that the objective allows, its
//! percentile.

#![allow(clippy::unwrap_used, missing_docs, reason = "an example that fails may panic")]

use std::{
    convert::Infallible,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use bytes::Bytes;
use http::{Method, Request, Response};
use http_body_util::{BodyExt as _, Full};
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::TcpListener;

/// When the one server will be free.
type Queue = Arc<Mutex<Instant>>;

#[tokio::main]
async fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [address, service, bound, percent] = args.as_slice() else {
        eprintln!("usage: queue_server ADDRESS SERVICE_MS BOUND_MS PERCENTILE");
        std::process::exit(2);
    };
    let number = |text: &String| text.parse::<f64>().unwrap();
    let (service_ms, bound_ms, share) = (number(service), number(bound), number(percent) / 100.0);
    let service = Duration::from_secs_f64(service_ms / 1e3);
    println!("exact knee: {:.3} requests/s", exact_knee(service_ms, bound_ms, share));
    let queue: Queue = Arc::new(Mutex::new(Instant::now()));
    let listener = TcpListener::bind(address).await.unwrap();
    loop {
        let (stream, _) = listener.accept().await.unwrap();
        stream.set_nodelay(true).unwrap();
        let queue = Arc::clone(&queue);
        let serve = service_fn(move |request| answer(request, Arc::clone(&queue), service));
        let connection =
            http1::Builder::new().timer(TokioTimer::new()).serve_connection(TokioIo::new(stream), serve);
        tokio::spawn(connection);
    }
}

async fn answer(
    request: Request<Incoming>,
    queue: Queue,
    service: Duration,
) -> Result<Response<Full<Bytes>>, Infallible> {
    if request.method() == Method::GET {
        return Ok(whole("application/json", r#"{"data":[{"id":"queue"}]}"#.into()));
    }
    let body = request.into_body().collect().await.unwrap().to_bytes();
    let body: serde_json::Value = serde_json::from_slice(&body).unwrap();
    let tokens = body["messages"][0]["content"].as_str().map_or(1, str::len);
    let usage = format!(
        r#""usage":{{"prompt_tokens":{tokens},"completion_tokens":1,"total_tokens":{}}}"#,
        tokens + 1
    );
    if body.get("stream").is_none() {
        return Ok(whole("application/json", format!(r#"{{"choices":[],{usage}}}"#)));
    }
    let end = {
        let mut free = queue.lock().unwrap();
        *free = (*free).max(Instant::now()) + service;
        *free
    };
    tokio::time::sleep_until(end.into()).await;
    let events = format!(
        "data: {{\"choices\":[{{\"delta\":{{\"content\":\"x\"}}}}]}}\n\ndata: {{\"choices\":[],{usage}}}\n\ndata: [DONE]\n\n"
    );
    Ok(whole("text/event-stream", events))
}

fn whole(kind: &str, body: String) -> Response<Full<Bytes>> {
    Response::builder().header("content-type", kind).body(Full::new(body.into())).unwrap()
}

/// The rate at which `share` of the requests of an M/D/1 queue end within `bound_ms`. Waiting times: A. K.
/// Erlang, "The theory of probabilities and telephone conversations", 1909.
fn exact_knee(service_ms: f64, bound_ms: f64, share: f64) -> f64 {
    let t = bound_ms / service_ms - 1.0;
    let kept = |load: f64| {
        let mut factorial = 1.0;
        let terms = (0..=t.floor() as i32).map(|k| {
            factorial *= f64::from(k.max(1));
            let x = load * (f64::from(k) - t);
            x.powi(k) / factorial * (-x).exp()
        });
        (1.0 - load) * terms.sum::<f64>()
    };
    let (mut low, mut high) = (0.0, 1.0);
    for _ in 0..60 {
        let middle = f64::midpoint(low, high);
        (low, high) = if kept(middle) >= share { (middle, high) } else { (low, middle) };
    }
    low * 1e3 / service_ms
}
