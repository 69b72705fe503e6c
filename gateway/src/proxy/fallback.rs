//! Models that stand in for one that cannot take a request ([`ModelNames::fallbacks`]), asked before anything
//! of an answer has gone out. What the first model's workers said is what the client sees if no other model
//! serves it.
//!
//! [`ModelNames::fallbacks`]: crate::proxy::model_names::ModelNames::fallbacks

use std::sync::Arc;

use crate::{
    client::Client,
    error::Error,
    prompt::request::{RenamedBy, RequestInfo},
    proxy::{asked::Asked, attempts::Attempts, body::Response, dispatch::Dispatch},
    telemetry::record::Record,
};

impl Dispatch {
    /// Whether other models stand in for the one that a request is for.
    pub(super) fn has_fallbacks(&self, info: &RequestInfo) -> bool {
        let names = &self.requests.bodies.names;
        !names.is_empty() && !names.fallbacks(info).is_empty()
    }

    /// Notes the name that the client sent, and counts what a split chose.
    pub(super) fn note_renamed(&self, info: &RequestInfo, record: &Record) {
        record.renamed(info.renamed.as_deref());
        if let (Some(renamed), Some(chosen)) = (&info.renamed, &info.model)
            && renamed.by == RenamedBy::Split
        {
            let model = self.requests.bodies.names.real(&renamed.asked);
            self.metrics.model_names.splits.with_label_values(&[model, chosen]).inc();
        }
    }

    /// Asks the models that stand in for the one whose attempts have come to nothing, one after the other.
    ///
    /// # Errors
    /// What the first model's attempts ended with, where no other model's workers answer.
    pub(super) async fn fall_back(
        &self,
        first: &mut Attempts<'_>,
        asked: &Arc<Asked>,
        client: &Arc<Client>,
    ) -> Result<Response, Error> {
        if first.may_fall_back() && self.has_fallbacks(&asked.info) {
            if let Some(response) = self.ask_others(first, asked, client).await {
                first.give_up();
                return Ok(response);
            }
            asked.record.model(Arc::clone(&asked.series));
            asked.record.renamed(asked.info.renamed.as_deref());
            if first.lacks_worker()
                && let Some(demand) = first.take_demand()
            {
                // With nobody else there, it waits as it would have without other models.
                let chosen = self.scale.choose(&self.router, &asked.info).await;
                if let Some(response) = first.run(chosen, demand).await {
                    return Ok(response);
                }
            }
        }
        first.last_word()
    }

    async fn ask_others(
        &self,
        first: &mut Attempts<'_>,
        asked: &Arc<Asked>,
        client: &Arc<Client>,
    ) -> Option<Response> {
        let model = asked.info.model.as_deref()?;
        let mut broken = asked.broken.so_far();
        let mut paid = !first.has_asked();
        for other in self.requests.bodies.names.fallbacks(&asked.info) {
            if !self.is_served(other) || self.has_other_apis(asked, other) {
                continue;
            }
            let Ok(Some((parts, content, info))) = self.requests.for_model(asked, (other, client)).await
            else {
                continue;
            };
            if self.requests.threaded.check(&parts.uri, &info).is_err() {
                continue;
            }
            let Ok(suspect) = self.retries.poisons.look(&content.text, self.router.now()) else { continue };
            let Ok(choice) = self.router.choose(&info, &[]).await else { continue };
            // A request that no worker was asked for yet is not sent again.
            if !std::mem::replace(&mut paid, false) && !self.retries.budget.lock().take(self.router.now()) {
                self.metrics.retries_refused.inc();
                return None;
            }
            let series = self.metrics.model(Some(other));
            let record = Arc::clone(&asked.record);
            record.model(Arc::clone(&series));
            record.renamed(info.renamed.as_deref());
            self.metrics.model_names.fallbacks.with_label_values(&[model, other]).inc();
            tracing::debug!(id = record.id(), model, other, "another model takes a request");
            let (body, came, info) = (content.text, content.came, Arc::new(info));
            let next = Arc::new(Asked { parts, body, came, info, series, record, broken });
            let demand = match first.take_demand() {
                Some(demand) => demand,
                None => self.scale.enter(&self.router, &next.info, self.router.now()),
            };
            let mut attempts = Attempts::new(self, &next, suspect).after(first);
            if let Some(response) = attempts.run(Ok(choice), demand).await {
                return Some(response);
            }
            if !attempts.may_fall_back() {
                return attempts.last_word().ok();
            }
            first.take_over(&mut attempts);
            broken = next.broken.so_far();
        }
        None
    }

    /// Whether a model's engines would get the request as a chat, which it is not.
    fn has_other_apis(&self, asked: &Asked, model: &str) -> bool {
        let (method, path) = (&asked.parts.method, asked.parts.uri.path());
        self.requests.as_chats.wish(method, path, Some(model), &asked.body).is_some()
    }

    /// Whether a worker that takes requests serves a model.
    fn is_served(&self, model: &str) -> bool {
        let workers = self.router.fleet().all();
        workers.iter().any(|worker| worker.routable() && worker.may_serve(Some(model)))
    }
}
