//! One call at the fake worker, in the test's hands: each method is one step on the wire, so the test decides
//! what was sent when the next thing happens. Dropping a call breaks its connection.

use std::fmt::Write as _;
use std::io;

use serde_json::Value;
use tokio::sync::oneshot;

use super::{Recorded, Ticket};
use crate::eventually::patient;
use crate::http1::{Conn, LAST_CHUNK, chunk};
use crate::openai::{DONE, answer, delta, usage_chunk};

/// A request that waits for its answer.
#[derive(Debug)]
pub struct Call {
    /// What was asked.
    pub request: Recorded,
    conn: Conn,
    back: oneshot::Sender<Conn>,
    ticket: Option<Ticket>,
}

impl Call {
    pub(super) fn new(
        conn: Conn,
        request: Recorded,
        back: oneshot::Sender<Conn>,
        ticket: Option<Ticket>,
    ) -> Self {
        Self { request, conn, back, ticket }
    }

    /// Sends bytes as they are.
    pub async fn raw(&mut self, bytes: &[u8]) {
        patient("write to the caller", self.conn.write(bytes)).await.expect("the caller is there");
    }

    /// Sends bytes as they are; the caller may have gone away.
    pub async fn try_raw(&mut self, bytes: &[u8]) {
        let _ = self.conn.write(bytes).await;
    }

    /// Sends a response head; give `content-length` or `transfer-encoding` among the headers.
    pub async fn head(&mut self, status: u16, headers: &[(&str, &str)]) {
        let head = head(status, headers);
        self.raw(head.as_bytes()).await;
    }

    /// Sends a whole answer with its length and ends the call.
    pub async fn respond(self, status: u16, headers: &[(&str, &str)], body: &[u8]) {
        self.try_respond(status, headers, body).await.expect("the caller is there");
    }

    pub(super) async fn try_respond(
        mut self,
        status: u16,
        headers: &[(&str, &str)],
        body: &[u8],
    ) -> io::Result<()> {
        let length = body.len().to_string();
        let headers: Vec<_> = headers.iter().copied().chain([("content-length", length.as_str())]).collect();
        let mut bytes = head(status, &headers).into_bytes();
        bytes.extend_from_slice(body);
        self.conn.write(&bytes).await?;
        self.keep_alive();
        Ok(())
    }

    /// Sends a JSON answer and ends the call.
    pub async fn respond_json(self, status: u16, body: &Value) {
        self.respond(status, &[("content-type", "application/json")], body.to_string().as_bytes()).await;
    }

    /// Begins a chunked event stream.
    pub async fn begin_stream(&mut self) {
        let headers =
            [("content-type", "text/event-stream; charset=utf-8"), ("transfer-encoding", "chunked")];
        self.head(200, &headers).await;
    }

    /// Sends bytes as one chunk of the stream.
    pub async fn chunk(&mut self, bytes: &[u8]) {
        self.raw(&chunk(bytes)).await;
    }

    /// Sends one event.
    pub async fn event(&mut self, data: &str) {
        self.chunk(format!("data: {data}\n\n").as_bytes()).await;
    }

    /// Sends one event; false when the caller has gone away.
    pub async fn try_event(&mut self, data: &str) -> bool {
        self.conn.write(&chunk(format!("data: {data}\n\n").as_bytes())).await.is_ok()
    }

    /// Sends a chunk of text in OpenAI's shape.
    pub async fn say(&mut self, text: &str) {
        self.event(&delta(text).to_string()).await;
    }

    /// Ends the stream well: `[DONE]`, the last chunk.
    pub async fn done(mut self) {
        self.event(DONE).await;
        self.end().await;
    }

    /// Sends the last chunk and ends the call.
    pub async fn end(mut self) {
        self.raw(LAST_CHUNK).await;
        self.keep_alive();
    }

    /// Breaks the connection where it stands.
    pub fn cut(self) {}

    /// Waits until the caller has gone away, and counts that.
    pub async fn aborted(&mut self) {
        self.conn.closed_by_peer().await;
        if let Some(ticket) = &self.ticket {
            ticket.count_abort();
        }
    }

    /// Waits, with patience, until the caller has gone away.
    ///
    /// # Panics
    /// When it does not.
    pub async fn must_be_aborted(mut self) {
        patient("the gateway to abort the call", self.aborted()).await;
    }

    /// An error of this status.
    pub(super) async fn refuse(self, status: u16, retry_after: Option<&str>) -> io::Result<()> {
        let body = format!("{{\"error\": {{\"message\": \"refused with {status}\"}}}}");
        let headers = [("content-type", "application/json")].into_iter();
        let headers: Vec<_> = headers.chain(retry_after.map(|after| ("retry-after", after))).collect();
        self.try_respond(status, &headers, body.as_bytes()).await
    }

    /// Three words, streamed or whole as the request asks.
    pub(super) async fn default_answer(mut self, prompt_tokens: u64, cached_tokens: u64) -> io::Result<()> {
        let request: Value = serde_json::from_slice(&self.request.body).unwrap_or_default();
        if request["stream"] != true {
            let body = answer("one two three", prompt_tokens, cached_tokens).to_string();
            return self.try_respond(200, &[("content-type", "application/json")], body.as_bytes()).await;
        }
        let mut bytes = head(200, &[("content-type", "text/event-stream"), ("transfer-encoding", "chunked")]);
        let words = ["one", " two", " three"].map(|word| delta(word).to_string());
        let usage = usage_chunk(prompt_tokens, cached_tokens).to_string();
        for data in words.iter().map(String::as_str).chain([usage.as_str(), DONE]) {
            let event = format!("data: {data}\n\n");
            let _ = write!(bytes, "{:x}\r\n{event}\r\n", event.len());
        }
        self.conn.write(bytes.as_bytes()).await?;
        self.conn.write(LAST_CHUNK).await?;
        self.keep_alive();
        Ok(())
    }

    /// The call is over; its connection may carry another.
    fn keep_alive(self) {
        drop(self.ticket);
        let _ = self.back.send(self.conn); // nobody waits when the worker was stopped
    }
}

fn head(status: u16, headers: &[(&str, &str)]) -> String {
    let mut head = format!("HTTP/1.1 {status} Scripted\r\n");
    for (name, value) in headers {
        let _ = write!(head, "{name}: {value}\r\n");
    }
    head.push_str("\r\n");
    head
}
