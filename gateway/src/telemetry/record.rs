//! One record per request: each part fills in what it knows, and it is written once when the request is over.
//! It counts the request, then logs one line. It never holds prompt text or keys.

use std::{fmt, sync::Arc, time::Duration};

use http::{HeaderMap, HeaderValue, Method, Uri};
use keyway_wire::openai::Usage;
use parking_lot::Mutex;

use crate::{
    access::tenants::{Estimate, Used, Visit},
    clock::{self, Instant},
    error::Error,
    fleet::Worker,
    ledger::{BilledEnd, Ledger, Tokens},
    machine::panics,
    metrics::{COMPLETE, Metrics, MishapKind, ModelSeries},
    prompt::{drift::Diagnosis, request::Renamed},
    telemetry::{
        bill::{Bill, Spent},
        trace::{Ended, RequestTrace},
    },
    upstream::Outgoing,
};

/// What is known of a request so far; shared by the stack and the relay, written when the last of them drops
/// it.
pub struct Record {
    metrics: Arc<Metrics>,
    started: Instant,
    id: HeaderValue,
    method: Method,
    uri: Uri,
    /// Whether what it uses is entered in a ledger.
    is_billed: bool,
    line: Mutex<Line>,
}

#[derive(Default)]
struct Line {
    /// Counts as in flight as long as the record lives: until the answer's end. Also where it was refused.
    visit: Option<Arc<Visit>>,
    model: Option<Arc<ModelSeries>>,
    renamed: Option<Box<Renamed>>,
    bill: Option<Box<Bill>>,
    worker: Option<Arc<Worker>>,
    reason: &'static str,
    matched_tokens: u64,
    attempts: u32,
    status: u16,
    outcome: Option<&'static str>,
    ttft: Option<Duration>,
    /// The time to first token that the request wants, if it says so.
    objective: Option<Duration>,
    usage: Usage,
    trace: Option<Box<RequestTrace>>,
    /// Why the prediction of cached tokens failed, if it did.
    miss: Option<&'static str>,
    /// Where the prompt left its session's past: field and offset.
    drift: Option<String>,
    /// Whether it went to its worker as a chat, and is none.
    translated: bool,
    /// Who was asked last to compute the prompt for the worker that answers.
    prefill: Option<Arc<Worker>>,
    /// Of whose cache the worker that answers was to fetch a part of the prompt.
    pulled_from: Option<Arc<Worker>>,
}

impl Record {
    /// Opens the record of a request that has just come in.
    pub fn open(metrics: Arc<Metrics>, id: HeaderValue, method: Method, uri: Uri) -> Arc<Self> {
        Self::open_billed(metrics, id, (method, uri), None)
    }

    /// The same, where what it uses is entered in a ledger, if it may make a worker compute.
    pub fn open_billed(
        metrics: Arc<Metrics>,
        id: HeaderValue,
        (method, uri): (Method, Uri),
        ledger: Option<&Arc<Ledger>>,
    ) -> Arc<Self> {
        let bill = ledger.filter(|_| computes(&method)).map(|ledger| Box::new(Bill::new(Arc::clone(ledger))));
        let is_billed = bill.is_some();
        let line = Mutex::new(Line { bill, ..Line::default() });
        Arc::new(Self { metrics, started: Instant::now(), id, method, uri, is_billed, line })
    }

    /// The request's id: the client's own where that can be used, else one that the gateway has drawn.
    pub fn id(&self) -> &str {
        self.id.to_str().unwrap_or_default()
    }

    /// The request's id, as headers carry it.
    pub fn id_header(&self) -> &HeaderValue {
        &self.id
    }

    /// The path that is asked for.
    pub fn path(&self) -> &str {
        self.uri.path()
    }

    /// Whether it may make a worker compute: to read or to remove what is stored does not, whatever the
    /// answer repeats of it.
    pub fn computes(&self) -> bool {
        computes(&self.method)
    }

    /// When the request came in.
    pub fn started(&self) -> Instant {
        self.started
    }

    /// Notes whose request it is.
    pub fn tenant(&self, visit: Arc<Visit>) {
        self.line.lock().visit = Some(visit);
    }

    /// Whose request it is.
    pub fn visit(&self) -> Option<Arc<Visit>> {
        self.line.lock().visit.clone()
    }

    /// Whether what it uses is entered in a ledger.
    pub fn is_billed(&self) -> bool {
        self.is_billed
    }

    /// Notes what it may use.
    pub fn estimate(&self, estimate: Estimate) {
        if self.is_billed {
            self.line.lock().bill.iter_mut().for_each(|bill| bill.estimate(estimate));
        }
    }

    /// Sets aside of its tenant's budgets what it may use, where they have anything left.
    pub fn hold(&self) -> Result<(), Error> {
        let line = &mut *self.line.lock();
        match (&mut line.bill, &line.visit, &line.model) {
            (Some(bill), Some(visit), Some(model)) => bill.hold(visit, model.label()),
            _ => Ok(()),
        }
    }

    /// A worker is asked: its tenant may have to pay for it.
    pub fn asks(&self) {
        let mut line = self.line.lock();
        line.bill.iter_mut().for_each(|bill| bill.asks());
        line.visit.iter().for_each(|visit| visit.asks());
    }

    /// Charges it to its tenant and enters it in the ledger, where there are such. The first word counts.
    pub fn settle(&self, used: Used) {
        let mut line = self.line.lock();
        line.bill.iter_mut().for_each(|bill| bill.settle(used));
        line.visit.iter().for_each(|visit| visit.settle(used));
    }

    /// The request is traced.
    pub fn traced(&self, trace: RequestTrace) {
        self.line.lock().trace = Some(Box::new(trace));
    }

    /// Puts the request's trace, if it has one, into the headers that its worker sees.
    pub fn tell_trace(&self, request: &mut Outgoing<'_>) {
        if let Some(trace) = &self.line.lock().trace {
            trace.tell(request);
        }
    }

    /// Notes the model that the body names.
    pub fn model(&self, model: Arc<ModelSeries>) {
        self.line.lock().model = Some(model);
    }

    /// Notes that it goes to its worker as a chat, and is none.
    pub fn translated(&self) {
        self.line.lock().translated = true;
    }

    /// Notes the name that the client sent, where the request goes to another model.
    pub fn renamed(&self, renamed: Option<&Renamed>) {
        self.line.lock().renamed = renamed.map(|renamed| Box::new(renamed.clone()));
    }

    /// Notes an attempt: the worker, why, and how many tokens it is expected to hold.
    pub fn picked(&self, worker: &Arc<Worker>, reason: &'static str, matched_tokens: u64) {
        let mut line = self.line.lock();
        line.worker = Some(Arc::clone(worker));
        line.reason = reason;
        line.matched_tokens = matched_tokens;
        line.attempts += 1;
        if let Some(trace) = &mut line.trace {
            trace.attempt(worker, reason, matched_tokens);
        }
    }

    /// Notes that a worker is asked to compute the prompt for the one that answers.
    pub fn prefilled_by(&self, worker: &Arc<Worker>) {
        self.line.lock().prefill = Some(Arc::clone(worker));
    }

    /// Notes of whose cache the worker that answers is to fetch a part of the prompt.
    pub fn pulled_from(&self, worker: &Arc<Worker>) {
        self.line.lock().pulled_from = Some(Arc::clone(worker));
    }

    /// Notes that the last attempt came to nothing: in a word, and its cause.
    pub fn attempt_failed(&self, why: &'static str, cause: &dyn fmt::Display) {
        if let Some(trace) = &mut self.line.lock().trace {
            trace.attempt_failed(why, cause.to_string());
        }
    }

    /// Notes where its prompt left its session's past, if it did.
    pub fn drift(&self, drift: Option<Diagnosis>) {
        self.line.lock().drift = drift.map(|found| format!("{}+{}", found.field, found.offset));
    }

    /// Notes the status that the client sees, and tells it how its tenant's limits stand, where it has any.
    pub fn answers(&self, status: http::StatusCode, headers: &mut HeaderMap) {
        let mut line = self.line.lock();
        line.status = status.as_u16();
        if let Some(visit) = &line.visit {
            visit.tenant().tell(self.uri.path(), headers);
        }
    }

    /// Notes the time to first token that the request wants, if it says so.
    pub fn wants(&self, objective: Option<Duration>) {
        if objective.is_some() {
            self.line.lock().objective = objective;
        }
    }

    /// Notes the time to the first token.
    pub fn first_token(&self, after: Duration) {
        self.line.lock().ttft = Some(after);
    }

    /// Notes the token counts, and why the prediction of the cached ones failed, if it did.
    pub fn usage(&self, usage: Usage, miss: Option<&'static str>) {
        let mut line = self.line.lock();
        if let Some(visit) = &line.visit {
            visit.owes(usage.prompt_tokens, usage.completion_tokens);
        }
        line.usage = usage;
        line.miss = miss;
    }

    /// Notes how the request ended. The first word counts; without one the client left.
    pub fn outcome(&self, outcome: &'static str) {
        self.line.lock().outcome.get_or_insert(outcome);
    }

    /// Notes that a bug ended the answer, whatever was said of its end before: the client has not seen that.
    pub fn panicked(&self) {
        self.line.lock().outcome = Some(Error::Internal.code());
    }
}

impl Drop for Record {
    fn drop(&mut self) {
        // A panic while another one unwinds would end the process.
        panics::stopped(|| self.write());
    }
}

impl Record {
    fn write(&mut self) {
        let line = self.line.get_mut();
        let outcome = line.outcome.unwrap_or("client_gone");
        let model = line.model.take().unwrap_or_else(|| self.metrics.model(None));
        model.ended(outcome);
        if let (Some(objective), Some(ttft)) = (line.objective, line.ttft) {
            model.had_objective(ttft <= objective);
        }
        let visit = line.visit.as_deref();
        // Who shows no valid key is nobody.
        let bill = line.bill.take().filter(|_| outcome != Error::BadKey.code());
        let spent = match bill {
            Some(bill) => bill.enter(visit, model.label(), BilledEnd::of(outcome, line.status), line.ttft),
            None => Spent::reported(tokens_of(&line.usage)),
        };
        if let Some(visit) = visit {
            visit.tenant().used(spent.tokens());
        }
        if outcome != COMPLETE {
            let kind = MishapKind {
                outcome,
                status: line.status,
                model: model.label().to_owned(),
                tenant: line.visit.as_ref().map(|visit| visit.tenant().name().to_owned()),
                worker: line.worker.as_ref().map(|worker| worker.name.clone()).unwrap_or_default(),
            };
            let id = self.id.to_str().unwrap_or_default();
            self.metrics.mishaps.add(kind, self.uri.path(), id, clock::unix_seconds());
        }
        tracing::info!(
            target: "access",
            id = self.id.to_str().unwrap_or_default(),
            method = %self.method,
            path = self.uri.path(),
            tenant = line.visit.as_ref().map(|visit| visit.tenant().name()),
            model = model.label(),
            asked_model = line.renamed.as_ref().map(|renamed| renamed.asked.as_str()),
            model_by = line.renamed.as_ref().map(|renamed| renamed.by.as_str()),
            status = line.status,
            outcome,
            worker = line.worker.as_ref().map_or("", |worker| worker.name.as_str()),
            reason = line.reason,
            attempts = line.attempts,
            prompt_tokens = line.usage.prompt_tokens,
            cached_tokens = line.usage.cached_tokens().unwrap_or(0),
            matched_tokens = line.matched_tokens,
            miss = line.miss,
            drift = line.drift,
            translated = line.translated.then_some(true),
            prefill_worker = line.prefill.as_ref().map(|worker| worker.name.as_str()),
            pulled_from = line.pulled_from.as_ref().map(|worker| worker.name.as_str()),
            completion_tokens = line.usage.completion_tokens,
            ttft_ms = line.ttft.map(milliseconds),
            duration_ms = milliseconds(self.started.elapsed()),
        );
        if let Some(trace) = line.trace.take() {
            trace.end(&Ended {
                id: self.id.to_str().unwrap_or_default(),
                path: self.uri.path(),
                model: model.label(),
                tenant: line.visit.as_ref().map(|visit| visit.tenant().name()),
                status: line.status,
                outcome,
                usage: &line.usage,
                ttft: line.ttft,
            });
        }
    }
}

/// The tokens that a usage names. Who says only their sum has computed a prompt.
pub fn tokens_of(usage: &Usage) -> Tokens {
    let generated = usage.completion_tokens;
    let prompt = usage.prompt_tokens.max(usage.total_tokens.saturating_sub(generated));
    Tokens { prompt, cached: usage.cached_tokens().unwrap_or(0).min(prompt), generated }
}

/// Whether a request by this method may make a worker compute.
pub fn computes(method: &Method) -> bool {
    !method.is_safe() && *method != Method::DELETE
}

/// Milliseconds with microsecond digits.
fn milliseconds(time: Duration) -> f64 {
    (time.as_secs_f64() * 1e6).round() / 1e3
}

impl fmt::Debug for Record {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Record").field("id", &self.id()).finish_non_exhaustive()
    }
}
