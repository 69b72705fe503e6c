//! The first leg of a request that goes to a worker for decode: another worker computes the prompt and keeps
//! its KV, which the one that answers fetches from there. What goes wrong on this leg costs the client its
//! time and no more: the worker that answers can compute any prompt itself.

use std::{pin::pin, sync::Arc, time::Duration};

use bytes::Bytes;
use http::{HeaderValue, header, uri::PathAndQuery};
use http_body_util::{BodyExt, Limited};
use keyway_core::breaker::Verdict;
use keyway_wire::openai::Usage;

use super::{
    as_chat::unread,
    asked::Asked,
    body::{Response, full},
    dispatch::Dispatch,
    kv_transfer::{FirstLeg, Prefilled, mooncake, nixl},
    poison::Suspect,
    silence,
};
use crate::{
    api::Api,
    clock::{self, Instant},
    error::Error,
    fleet::Worker,
    limits::{
        BOOTSTRAP_ANSWER_BYTES_MAX, MAX_PREFILL_LEGS, NO_KV_PAUSE, PREFILL_ANSWER_BYTES_MAX, PROBE_TIMEOUT,
        TRANSLATED_ANSWER_BYTES_MAX,
    },
    routing::{Accusation, Choice, refusal::Charge},
    upstream::{Outgoing, SendError},
    usage::cached,
};

/// Where a prompt's KV is, and how much of it was found there.
#[derive(Debug)]
pub(super) struct Handed {
    pub(super) params: Box<str>,
    pub(super) cached_tokens: u64,
}

/// Marks an answer whose prompt another worker computed.
#[derive(Debug, Clone, Copy)]
pub(super) struct FromTwo {
    /// Prompt tokens that were found cached there.
    pub(super) cached_tokens: u64,
}

impl FromTwo {
    /// The answer, which says how much was cached where its prompt was computed. A stream's events say it
    /// as they pass.
    pub(super) async fn told(self, response: Response) -> Result<Response, Error> {
        let kind = response.headers().get(header::CONTENT_TYPE).map_or(&b""[..], HeaderValue::as_bytes);
        if !kind.starts_with(b"application/json") || !response.status().is_success() {
            return Ok(response);
        }
        let (mut head, body) = response.into_parts();
        let answer =
            Limited::new(body, TRANSLATED_ANSWER_BYTES_MAX).collect().await.map_err(unread)?.to_bytes();
        let told =
            std::str::from_utf8(&answer).ok().and_then(|text| cached::in_json(text, self.cached_tokens));
        head.headers.remove(header::CONTENT_LENGTH);
        Ok(http::Response::from_parts(head, full(told.map_or(answer, Bytes::from))))
    }
}

/// Why a worker did not compute a prompt for another: for the metric, and what is held against it.
struct Broken {
    outcome: &'static str,
    accusation: Option<Accusation>,
    /// Whether its connection broke behind the request.
    broke: bool,
}

/// What came of the first leg.
#[derive(Debug)]
pub(super) struct Ran {
    /// Where the prompt's KV is; `None`: the worker that answers computes it.
    pub(super) handed: Option<Handed>,
    /// The body, if a worker broke behind it.
    pub(super) suspect: Option<Suspect>,
    /// Whether the request may be sent to one more worker: not where it has broken too many.
    pub(super) may_go_on: bool,
}

/// A request whose prompt another worker than the one that answers may compute.
#[derive(Debug, Clone, Copy)]
pub(super) struct PrefillLeg<'a> {
    pub(super) dispatch: &'a Dispatch,
    pub(super) asked: &'a Arc<Asked>,
}

impl PrefillLeg<'_> {
    /// Has another worker compute the prompt for the one that was chosen, unless none can.
    pub(super) async fn run(self, choice: &mut Choice) -> Ran {
        let (Dispatch { router, retries, .. }, asked) = (self.dispatch, self.asked);
        let mut ran = Ran { handed: None, suspect: None, may_go_on: true };
        let now = router.now();
        let contract = choice.worker.kv_transfer();
        let api = Api::of(asked.parts.uri.path());
        let cannot = |worker: &&Arc<Worker>| worker.keeps_no_kv(api, now) || worker.kv_transfer() != contract;
        let mut tried: Vec<_> = router.fleet().all().iter().filter(cannot).map(|worker| worker.id).collect();
        let most = tried.len() + MAX_PREFILL_LEGS;
        if !router.has_prefill(&asked.info, &tried) {
            return self.in_one(choice, ran);
        }
        let Some(mut first) = FirstLeg::of(contract, api, &asked.body) else {
            return self.in_one(choice, ran);
        };
        let mut accusations: Vec<Accusation> = Vec::new();
        let mut refusals = 0;
        while tried.len() < most && router.has_prefill(&asked.info, &tried) {
            let is_first = tried.len() + MAX_PREFILL_LEGS == most;
            if !is_first && !retries.budget.lock().take(router.now()) {
                break;
            }
            let Ok(chosen) = router.choose_prefill(&asked.info, &tried).await else { break };
            let worker = Arc::clone(&chosen.worker);
            tried.push(worker.id);
            if !is_first && let Some(anew) = FirstLeg::of(contract, api, &asked.body) {
                // Under a name of its own.
                first = anew;
            }
            match self.computed_by(chosen, &first).await {
                Ok(handed) => {
                    accusations.drain(..).for_each(Accusation::upheld);
                    choice.ticket.hand_over(worker.id, handed.cached_tokens, router.now());
                    ran.handed = Some(handed);
                    return ran;
                }
                Err(broken) => {
                    refusals += usize::from(broken.outcome == "rejected");
                    accusations.extend(broken.accusation);
                    if broken.broke {
                        asked.broken.note();
                        ran.suspect = retries.poisons.broke(asked, worker.id, router.now());
                        ran.may_go_on = asked.broken.may_break_another();
                    }
                    if broken.outcome == "no_params" && worker.kept_no_kv(api, router.now()) {
                        tracing::warn!(
                            worker = %worker.name,
                            kv_transfer = contract.as_str(),
                            path = asked.parts.uri.path(),
                            "it computes prompts for others and says nothing of their KV: vLLM keeps it with --kv-transfer-config, \
                             and with Mooncake says at its bootstrap port who it is; it is asked again in {} s",
                            NO_KV_PAUSE.as_secs()
                        );
                    }
                    // Where its first token ends the answer, it does so everywhere.
                    if !ran.may_go_on || broken.outcome == "ended" {
                        break;
                    }
                }
            }
        }
        if refusals < 2 {
            accusations.drain(..).for_each(Accusation::undecided);
        }
        // What several refuse is the request's own fault: then the charges are dropped.
        self.in_one(choice, ran)
    }

    /// The worker that answers computes the prompt after all.
    fn in_one(self, choice: &mut Choice, ran: Ran) -> Ran {
        if ran.may_go_on {
            choice.ticket.computes_here(self.dispatch.router.now());
        }
        ran
    }

    /// One worker's try, counted.
    async fn computed_by(self, chosen: Choice, first: &FirstLeg) -> Result<Handed, Broken> {
        let (worker, began) = (Arc::clone(&chosen.worker), Instant::now());
        self.asked.record.prefilled_by(&worker);
        let done = self.compute(chosen, first).await;
        let legs = &self.dispatch.metrics.prefill_legs;
        legs.seconds.observe((Instant::now() - began).as_secs_f64());
        let outcome = done.as_ref().map_or_else(|broken| broken.outcome, |_| "done");
        legs.legs.with_label_values(&[worker.name.as_str(), outcome]).inc();
        tracing::debug!(worker = %worker.name, outcome, "a worker computes a prompt for another");
        done
    }

    /// One worker's try.
    async fn compute(self, choice: Choice, first: &FirstLeg) -> Result<Handed, Broken> {
        let Choice { worker, pick, mut ticket, .. } = choice;
        let router = &self.dispatch.router;
        let asking = self.ask_for_kv(&worker, first.body.clone(), ticket.sent());
        // While the prompt is computed that costs no time, and what it says is never old.
        let meeting = async { Ok(self.engine_id(&worker, first).await) };
        let (prefilled, engine_id) = match tokio::try_join!(asking, meeting) {
            Ok(both) => both,
            Err((outcome, charge)) => {
                let accusation = charge.map(|charge| ticket.accuse(charge, self.asked.parts.uri.path()));
                let broke = charge == Some(Charge::Lost);
                return Err(Broken { outcome, accusation, broke });
            }
        };
        let now = router.now();
        router.worker_answered(&worker, now);
        ticket.stream_began(now);
        ticket.judge_at(Verdict::Good, now);
        let cached_tokens = prefilled.usage.as_ref().and_then(Usage::cached_tokens);
        if let Some(usage) = &prefilled.usage {
            router.learn(&self.asked.info, &pick, usage, (&ticket, now));
        }
        let broken = |outcome| Broken { outcome, accusation: None, broke: false };
        let params = match (&first.transfer_id, engine_id) {
            (None, _) => nixl::place(&prefilled),
            (Some(_), _) if !mooncake::is_kept(&prefilled) => return Err(broken("ended")),
            (Some(id), engine_id) => {
                let at = (worker.url_host(), worker.bootstrap_port());
                engine_id.map(|engine_id| mooncake::place(id, &engine_id, at))
            }
        };
        let params = params.ok_or_else(|| broken("no_params"))?;
        Ok(Handed { params, cached_tokens: cached_tokens.unwrap_or(pick.matched_tokens) })
    }

    /// What a worker calls itself among those that fetch KV, where that must be told them.
    async fn engine_id(self, worker: &Worker, first: &FirstLeg) -> Option<String> {
        first.transfer_id.as_ref()?;
        let question = Outgoing::get(PathAndQuery::from_static(mooncake::QUERY));
        let asking = async {
            let answer = self.dispatch.upstream.send(worker.bootstrap(), question).await.ok()?;
            let body = answer.status().is_success().then(|| answer.into_body())?;
            Limited::new(body, BOOTSTRAP_ANSWER_BYTES_MAX).collect().await.ok()
        };
        let body = clock::timeout(PROBE_TIMEOUT, asking).await.ok()??.to_bytes();
        mooncake::engine_id(&body, worker.rank())
    }

    /// What a worker says of a prompt that it has computed; else why not, and what that is of the worker.
    async fn ask_for_kv(
        self,
        worker: &Worker,
        body: Bytes,
        sent: Duration,
    ) -> Result<Prefilled, (&'static str, Option<Charge>)> {
        let Dispatch { router, upstream, .. } = self.dispatch;
        let asked: &Asked = self.asked;
        let sending = pin!(upstream.send(worker.origin(), asked.outgoing(body, worker)));
        let sending = pin!(silence::unless_lost(router, worker, sent, sending));
        let answer = match sending.await {
            Ok(answer) => answer,
            Err(error) => return Err(self.not_computed(worker, &error)),
        };
        if let Some(charge) = Charge::of(answer.status(), answer.headers()) {
            return Err((charge.as_str(), Some(charge)));
        }
        let body = Limited::new(answer.into_body(), PREFILL_ANSWER_BYTES_MAX).collect().await;
        let body = body.map_err(|_| ("lost", Some(Charge::Lost)))?.to_bytes();
        Prefilled::read(&body).ok_or(("unreadable", None))
    }

    fn not_computed(self, worker: &Worker, error: &SendError) -> (&'static str, Option<Charge>) {
        if error.is_the_worker_s() {
            let id = self.asked.record.id();
            tracing::warn!(worker = %worker.name, id, cause = %error, "worker computes no prompt for another");
        }
        match error {
            SendError::Connect(_) => {
                self.dispatch.router.worker_failed(worker);
                ("lost", None)
            }
            SendError::Refused => ("busy", Some(Charge::Busy { retry_after: None })),
            SendError::Lost(_) => ("lost", Some(Charge::Lost)),
            SendError::Raced | SendError::Local(_) => ("lost", None),
        }
    }
}
