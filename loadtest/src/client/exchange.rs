//! One request: sends it, reads its answer, notes when what arrived and how it ended. Keeps no text, decides
//! no time of sending.

use std::time::{Duration, Instant};

use http::Method;
use tokio::sync::watch;

use crate::{
    client::{
        self, PreparedRequest, Server, Unanswered,
        connection::Answering,
        embeddings,
        event::{self, Bad},
        record::{Exchange, Failure, FailureClass, Outcome},
        sse,
    },
    limits,
    workload::body::Endpoint,
};

/// What the `content-type` of a stream begins with.
const EVENT_STREAM: &[u8] = b"text/event-stream";

/// The run's clock: nanoseconds after its zero.
#[derive(Debug, Clone, Copy)]
pub struct Clock {
    /// The moment that counts as 0; of a run it lies `limits::LEAD_MS` after the clock was made.
    pub zero: Instant,
}

impl Clock {
    /// Nanoseconds since the zero; 0 before it.
    pub fn now_ns(&self) -> u64 {
        self.zero.elapsed().as_nanos() as u64
    }

    /// Time left until the zero.
    pub fn until_zero(&self) -> Duration {
        self.zero.saturating_duration_since(Instant::now())
    }
}

/// What all requests of a run share.
#[derive(Debug, Clone)]
pub struct Session {
    /// The server under test, with the pool of connections that all requests share.
    pub server: Server,
    /// The API that every request is posted to: that of `--endpoint`.
    pub endpoint: Endpoint,
    /// Texts in each request of embeddings; 1 for every other API.
    pub texts: u32,
    /// Time from sending to the answer's last word.
    pub timeout: Duration,
    /// The clock that all times of an exchange are read from.
    pub clock: Clock,
    /// Whether the answers' text is kept, for conversations to go on from.
    pub keep_text: bool,
    /// Turns `true` when the run is interrupted.
    pub stop: watch::Receiver<bool>,
}

/// Sends the request and reads the answer to its end.
pub async fn exchange(session: &Session, request: PreparedRequest) -> Exchange {
    let (clock, timeout, mut stop) = (session.clock, session.timeout, session.stop.clone());
    let seen = Exchange::begun(clock.now_ns());
    let (events, keep_text) = (event::Reader::default(), session.keep_text);
    let mut watching = Watching { clock, keep_text, seen, events, finished: false, done_ns: None };
    let outcome = tokio::select! {
        result = tokio::time::timeout(timeout, watching.run(session, &request)) => match result {
            Ok(Ok(())) => Outcome::Ok,
            Ok(Err(failure)) => Outcome::Failed(failure),
            Err(_) => Outcome::Failed(failure(FailureClass::Timeout, format!("not done after {timeout:?}"))),
        },
        _ = stop.wait_for(|stop| *stop) => Outcome::Cancelled,
    };
    // After the last word only the connection is still of use; how it ends no longer matters.
    match watching.done_ns {
        Some(end_ns) => Exchange { outcome: Outcome::Ok, end_ns, ..watching.seen },
        None => Exchange { outcome, end_ns: clock.now_ns(), ..watching.seen },
    }
}

/// An exchange under way.
struct Watching {
    clock: Clock,
    keep_text: bool,
    seen: Exchange,
    events: event::Reader,
    /// The stream has said why its generating ended.
    finished: bool,
    /// When the stream's last word was here.
    done_ns: Option<u64>,
}

// === impl Exchange ===

impl Exchange {
    /// An exchange of which nothing has happened yet.
    pub fn begun(sent_ns: u64) -> Self {
        Self {
            sent_ns,
            head_ns: None,
            first_ns: None,
            last_ns: None,
            end_ns: sent_ns,
            text_events: 0,
            gaps_us: Vec::new(),
            usage: None,
            worker: None,
            text: String::new(),
            outcome: Outcome::Cancelled,
        }
    }
}

// === impl Watching ===

impl Watching {
    async fn run(&mut self, session: &Session, request: &PreparedRequest) -> Result<(), Failure> {
        let Session { server, endpoint, .. } = session;
        let mut answer = server.send(Method::POST, endpoint.path(), request).await.map_err(|error| {
            let class = match error {
                Unanswered::Unconnected(_) => FailureClass::Connect,
                Unanswered::Broken(_) => FailureClass::Cut,
            };
            failure(class, client::chain(&error))
        })?;
        self.seen.head_ns = Some(self.clock.now_ns());
        self.seen.worker = answer.head.worker.take();
        let status = answer.head.status;
        if status != 200 {
            let body = server.read(answer).await.unwrap_or_default();
            return Err(failure(FailureClass::Status(status), event::error_message(&body)));
        }
        if !endpoint.generates() {
            return self.embeddings(server, answer, session.texts).await;
        }
        let kind = answer.head.kind.get(..EVENT_STREAM.len());
        if !kind.is_some_and(|kind| kind.eq_ignore_ascii_case(EVENT_STREAM)) {
            let kind = answer.head.kind.escape_ascii().to_string();
            return Err(not_a_stream(&kind, &server.read(answer).await.unwrap_or_default()));
        }
        self.stream(&mut answer).await?;
        server.keep(answer);
        Ok(())
    }

    /// An answer without tokens: it has an end, and no time before it.
    async fn embeddings(&mut self, server: &Server, answer: Answering, texts: u32) -> Result<(), Failure> {
        let body = server.read_up_to(answer, limits::EMBEDDINGS_BYTES_MAX).await;
        let body = body.map_err(|error| failure(FailureClass::Cut, client::chain(&error)))?;
        let now_ns = self.clock.now_ns();
        self.seen.usage = embeddings::read(&body, texts)?;
        self.done_ns = Some(now_ns);
        Ok(())
    }

    async fn stream(&mut self, answer: &mut Answering) -> Result<(), Failure> {
        let mut parser = sse::Parser::new(limits::EVENT_BYTES_MAX);
        let mut more = true;
        while more {
            // All that is read at once came at one time.
            let (mut now_ns, mut result) = (None, Ok(()));
            let read = answer.more(|piece| {
                let now_ns = *now_ns.get_or_insert_with(|| self.clock.now_ns());
                let pushed = parser.push(piece, |event| {
                    if result.is_ok() && self.done_ns.is_none() {
                        result = self.event(event, now_ns);
                    }
                });
                if let (Ok(()), Err(error)) = (&result, pushed) {
                    result = Err(failure(FailureClass::Protocol, error.to_string()));
                }
            });
            let read = read.await.map_err(|error| failure(FailureClass::Cut, client::chain(&error)));
            result?;
            more = read?;
        }
        if self.done_ns.is_some() {
            Ok(())
        } else {
            Err(failure(FailureClass::Cut, "the stream ended without its last event".into()))
        }
    }

    fn event(&mut self, event: sse::Event<'_>, now_ns: u64) -> Result<(), Failure> {
        let said = self.events.read(event, self.seen.usage.as_ref()).map_err(Failure::from)?;
        self.finished |= said.finished;
        if said.generated {
            self.generated(now_ns);
            if self.keep_text {
                self.seen.text.push_str(&event::text(event.data));
            }
        }
        if said.generated || said.finished {
            self.seen.first_ns.get_or_insert(now_ns);
        }
        if said.usage.is_some() {
            self.seen.usage = said.usage;
        }
        if said.done && !self.finished {
            let message = "the stream ended without saying why generating did";
            return Err(failure(FailureClass::Unfinished, message.into()));
        }
        self.done_ns = said.done.then_some(now_ns);
        Ok(())
    }

    fn generated(&mut self, now_ns: u64) {
        if let Some(last_ns) = self.seen.last_ns.replace(now_ns) {
            self.seen.gaps_us.push(u32::try_from((now_ns - last_ns) / 1000).unwrap_or(u32::MAX));
        }
        self.seen.text_events += 1;
    }
}

/// What is wrong with an answer that came in one piece and with a good status.
fn not_a_stream(kind: &str, body: &[u8]) -> Failure {
    match event::error_of_body(body) {
        Some(message) => failure(FailureClass::ErrorBody, message),
        None => failure(FailureClass::Protocol, format!("the answer is `{kind}`, not an event stream")),
    }
}

impl From<Bad> for Failure {
    fn from(bad: Bad) -> Self {
        let class = match bad {
            Bad::Error(_) => FailureClass::ErrorEvent,
            Bad::Aborted(_) => FailureClass::Aborted,
            Bad::Unreadable(_) => FailureClass::Protocol,
        };
        failure(class, bad.to_string())
    }
}

pub(super) fn failure(class: FailureClass, message: String) -> Failure {
    Failure { class, message: message.chars().take(limits::ERROR_SAMPLE_CHARS_MAX).collect() }
}
