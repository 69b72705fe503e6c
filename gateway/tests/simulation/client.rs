//! A client: one connection, one request, over HTTP/1.1 or HTTP/2, read event by event until its end, or
//! until the client has had enough and is gone with its connection. What it saw goes to the log; what it
//! should have seen is `properties.rs`' business.

use std::{cell::RefCell, pin::pin, time::Duration};

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::{BodyExt, Full};
use hyper::{body::Incoming, client::conn};
use hyper_util::rt::{TokioExecutor, TokioIo};
use serde_json::{Value, json};
use tokio::time::timeout;
use turmoil::net::TcpStream;

use crate::{
    log::{Event, Log, Seen},
    schedule::Plan,
};

/// Where the gateway listens for clients.
pub(crate) const PORT: u16 = 8080;
/// Where it listens for operators.
pub(crate) const ADMIN_PORT: u16 = 9090;

type Failure = Box<dyn std::error::Error>;

/// Sends a request at once, and leaves when the plan says so.
pub(crate) async fn ask(plan: Plan, log: Log) {
    log.note(Event::Asked { id: plan.id });
    let seen = RefCell::new(Seen::default());
    // A failure shows in what was seen.
    let answer = async { drop(exchange(&plan, &seen).await) };
    let stayed = if let Some(patience) = plan.patience {
        timeout(patience, answer).await.is_ok()
    } else {
        answer.await;
        true
    };
    let seen = seen.into_inner();
    log.note(if stayed { Event::Answered { id: plan.id, seen } } else { Event::Left { id: plan.id } });
}

/// The body of a page that the gateway shows to operators.
pub(crate) async fn page(path: &str) -> Result<String, Failure> {
    let stream = TcpStream::connect(("gateway", ADMIN_PORT)).await?;
    let (mut sender, connection) = conn::http1::handshake(TokioIo::new(stream)).await?;
    let request = Request::get(path).header("host", "gateway").body(Full::<Bytes>::default())?;
    let read = async {
        let body = sender.send_request(request).await?.into_body().collect().await?;
        Ok::<_, Failure>(String::from_utf8(body.to_bytes().to_vec())?)
    };
    beside(read, connection).await
}

async fn exchange(plan: &Plan, seen: &RefCell<Seen>) -> Result<(), Failure> {
    let stream = TokioIo::new(TcpStream::connect(("gateway", PORT)).await?);
    let request = request(plan)?;
    if plan.http2 {
        let (mut sender, connection) = conn::http2::handshake(TokioExecutor::new(), stream).await?;
        beside(async { read(sender.send_request(request).await?, plan, seen).await }, connection).await
    } else {
        let (mut sender, connection) = conn::http1::handshake(stream).await?;
        beside(async { read(sender.send_request(request).await?, plan, seen).await }, connection).await
    }
}

/// Drives a connection for as long as something is done over it, in this task, so that both are dropped
/// together.
async fn beside<T>(work: impl Future<Output = T>, connection: impl Future) -> T {
    let (mut work, mut connection) = (pin!(work), pin!(connection));
    tokio::select! {
        biased;
        done = &mut work => done,
        _ = &mut connection => work.await,
    }
}

fn request(plan: &Plan) -> Result<Request<Full<Bytes>>, Failure> {
    let Plan { id, tokens, pace, stream, .. } = plan;
    // All that a worker's answer follows from.
    let prompt = format!("{id} {tokens} {}", pace.as_millis());
    let body = json!({
        "model": "m", "stream": stream, "max_tokens": tokens, "messages": [{"role": "user", "content": prompt}],
    });
    let target = format!("http://gateway:{PORT}/v1/chat/completions");
    let target = if plan.http2 { target.as_str() } else { "/v1/chat/completions" };
    let mut request = Request::post(target).header("content-type", "application/json");
    if !plan.http2 {
        request = request.header("host", "gateway");
    }
    Ok(request.body(Full::from(body.to_string()))?)
}

async fn read(response: Response<Incoming>, plan: &Plan, seen: &RefCell<Seen>) -> Result<(), Failure> {
    let (head, mut body) = response.into_parts();
    {
        let mut seen = seen.borrow_mut();
        seen.status = head.status.as_u16();
        let worker = head.headers.get("x-keyway-worker");
        seen.worker = worker.and_then(|name| name.to_str().ok()).map(str::to_owned);
    }
    let (mut rest, streamed) = (Vec::new(), plan.stream && head.status.is_success());
    while let Some(frame) = body.frame().await {
        let Ok(data) = frame?.into_data() else { continue };
        // Lines may end in CRLF; no byte of an answer here is a CR of its own.
        rest.extend(data.iter().filter(|byte| **byte != b'\r'));
        while let (true, Some(end)) = (streamed, rest.windows(2).position(|two| two == b"\n\n")) {
            let event: Vec<u8> = rest.drain(..end + 2).collect();
            seen.borrow_mut().event(String::from_utf8_lossy(&event).trim_end());
        }
    }
    seen.borrow_mut().end(&rest, streamed);
    Ok(())
}

impl Seen {
    fn event(&mut self, event: &str) {
        let data = event.lines().find_map(|line| line.strip_prefix("data:")).map(str::trim);
        let Some(data) = data else {
            // A comment says nothing.
            self.nonsense.extend((!event.starts_with(':')).then(|| event.to_owned()));
            return;
        };
        if data == "[DONE]" && self.errors > 0 {
            // A worker's habit behind its own error.
            return;
        }
        if self.dones + self.errors > 0 {
            self.late += 1;
        }
        if data == "[DONE]" {
            self.dones += 1;
            return;
        }
        let chunk: Value = serde_json::from_str(data).unwrap_or_default();
        if chunk["error"]["message"].is_string() || chunk["error"].is_string() {
            self.errors += 1;
        } else if chunk["message"].is_string() {
            // A worker's own words, on which no client raises: an error must follow.
        } else if let Some(choices) = chunk["choices"].as_array() {
            let text = choices.first().and_then(|choice| choice["delta"]["content"].as_str());
            self.text.push_str(text.unwrap_or_default());
        } else {
            self.nonsense.push(event.to_owned());
        }
    }

    /// The body has ended, with this left of it.
    fn end(&mut self, rest: &[u8], streamed: bool) {
        self.whole = true;
        if streamed {
            if !rest.is_empty() {
                self.nonsense.push(String::from_utf8_lossy(rest).into_owned());
            }
            return;
        }
        let answer: Value = serde_json::from_slice(rest).unwrap_or_default();
        if answer["error"]["message"].is_string() {
            self.errors += 1;
        } else if let Some(text) = answer["choices"][0]["message"]["content"].as_str() {
            text.clone_into(&mut self.text);
        } else {
            self.nonsense.push(String::from_utf8_lossy(rest).into_owned());
        }
    }
}

/// Waits until this time after the run's beginning.
pub(crate) async fn until(at: Duration) {
    tokio::time::sleep(at.saturating_sub(turmoil::sim_elapsed().unwrap_or_default())).await;
}
