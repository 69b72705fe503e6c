//! An attempt at a worker that is to fetch a part of the prompt from another one's cache.

use std::{pin::pin, sync::Arc};

use bytes::Bytes;
use http::StatusCode;

use super::Attempts;
use crate::{
    fleet::Worker,
    proxy::{asked::Asked, kv_transfer::peer, resume::Sent, silence},
    routing::{Pull, Ticket},
    upstream::{Answer, SendError},
};

impl Asked {
    /// Has the request's worker fetch what another one has. Returns whether it is asked to.
    pub(in crate::proxy) fn asks_to_pull(&self, body: &mut Bytes, pull: &Pull) -> bool {
        let Some(asking) = peer::pulling_body(body, &pull.from) else { return false };
        *body = asking;
        self.record.pulled_from(&pull.from);
        true
    }
}

impl Attempts<'_> {
    /// Whether what a worker was asked to fetch may be what it refuses.
    pub(super) fn may_refuse_to_pull(&self, answer: &Result<http::Response<Answer>, SendError>) -> bool {
        let refuses = |status| matches!(status, StatusCode::BAD_REQUEST | StatusCode::UNPROCESSABLE_ENTITY);
        answer.as_ref().is_ok_and(|answer| refuses(answer.status())) && self.asked.may_repeat_unbegun()
    }

    /// Sends the client's own request once more. If the worker serves it, being told where to fetch was
    /// what it refused, and it is not told that any more for a while.
    pub(super) async fn without_pull(
        &mut self,
        worker: &Arc<Worker>,
        ticket: &mut Ticket,
        sent: &mut Sent,
    ) -> Result<http::Response<Answer>, SendError> {
        ticket.pulls_nothing();
        let (asking, _) = self.asking(worker);
        *sent = self.dispatch.resumer.sent(self.asked, asking, worker, self.seed);
        let outgoing = self.asked.outgoing(sent.body.clone(), worker);
        let sending = pin!(self.dispatch.upstream.send(worker.origin(), outgoing));
        let sending = pin!(silence::unless_lost(&self.dispatch.router, worker, ticket.sent(), sending));
        let answer = sending.await?;
        if answer.status().is_success() {
            let (router, metrics) = (&self.dispatch.router, &self.dispatch.metrics);
            metrics.pulls.pulls.with_label_values(&[worker.name.as_str(), "refused"]).inc();
            if worker.refuses_to_pull(router.now()) {
                tracing::warn!(
                    worker = %worker.name,
                    "it refuses to fetch what other workers have cached (remote_kv_source); it is asked again in ten minutes. vLLM \
                     does it with a tier of the type p2p, keyway-worker with --kv-transfer-listen"
                );
            }
        }
        Ok(answer)
    }
}
