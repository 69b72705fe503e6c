//! KEDA's external scaler, served by the gateway: the workers that [`crate::scale::autoscale`] wants, asked
//! for over gRPC or pushed when a fleet is to leave nothing or to go to it (`external-push`), without
//! Prometheus between. It knows this gateway's requests alone: the sum of several gateways is Prometheus'
//! business. The service is KEDA's (`pkg/scalers/externalscaler/externalscaler.proto`); `StreamMetricSpec`,
//! which is optional there, is not offered.

mod grpc;
mod messages;

use std::sync::Arc;

use futures_util::stream;
use http::Request;
use hyper::body::Incoming;
use keyway_core::autoscale::scaler_value;
use prometheus::IntCounterVec;
use tokio::sync::watch;

use self::{
    grpc::{Answer, Code, Status},
    messages::{Active, MetricSpec, MetricSpecs, MetricValue, MetricValues, MetricsRequest, ScaledObject},
};
use crate::{
    config::Role,
    net::TcpListener,
    scale::autoscale::{Autoscale, ScaleRow},
};

const SERVICE: &str = "/externalscaler.ExternalScaler/";
/// Name of the one metric; its target is one worker for each that is wanted. A role's is named after it too.
const METRIC: &str = "keyway-desired-workers";

/// KEDA's service over this gateway's sums; each call is answered by a clone.
#[derive(Debug, Clone)]
pub struct ExternalScaler {
    /// Every model's last sum, and news of another number of workers.
    pub scale: Arc<Autoscale>,
    /// `keyway_external_scaler_calls_total{method,outcome}`; methods that are not offered count as `other`.
    pub calls: IntCounterVec,
}

impl ExternalScaler {
    /// Serves until it is dropped, and its open streams with it.
    pub async fn serve(self, listener: TcpListener) {
        grpc::serve(listener, move |request| {
            let scaler = self.clone();
            async move { scaler.answer(request).await }
        })
        .await;
    }

    async fn answer(&self, request: Request<Incoming>) -> Answer {
        let path = request.uri().path().to_owned();
        let method = path.strip_prefix(SERVICE).unwrap_or_default();
        let (method, answer) = match method {
            "IsActive" => ("is_active", self.is_active(request).await),
            "StreamIsActive" => ("stream_is_active", self.stream_is_active(request).await),
            "GetMetricSpec" => ("get_metric_spec", self.metric_spec(request).await),
            "GetMetrics" => ("get_metrics", self.metrics(request).await),
            _ => ("other", Err(Status::new(Code::Unimplemented, format!("no method {path}")))),
        };
        let outcome = if answer.is_ok() { "ok" } else { "failed" };
        self.calls.with_label_values(&[method, outcome]).inc();
        answer.unwrap_or_else(|status| grpc::failed(&status))
    }

    async fn is_active(&self, request: Request<Incoming>) -> Result<Answer, Status> {
        let row = wanted(&self.scale, &grpc::message(request).await?)?;
        Ok(grpc::unary(&active(&row)))
    }

    /// Says at once whether the model is to have workers, and again whenever that changes.
    async fn stream_is_active(&self, request: Request<Incoming>) -> Result<Answer, Status> {
        let object: ScaledObject = grpc::message(request).await?;
        let first = active(&wanted(&self.scale, &object)?);
        let follow =
            Follow { scale: Arc::clone(&self.scale), changes: self.scale.changes(), object, said: None };
        tracing::info!(object = follow.object.name, active = first.result, "KEDA follows a model's fleet");
        Ok(grpc::stream(stream::unfold(follow, Follow::next)))
    }

    async fn metric_spec(&self, request: Request<Incoming>) -> Result<Answer, Status> {
        let row = wanted(&self.scale, &grpc::message(request).await?)?;
        let metric_name =
            row.role.map_or_else(|| METRIC.to_owned(), |role| format!("{METRIC}-{}", role.as_str()));
        let spec = MetricSpec { metric_name, target_size: 1, target_size_float: 1.0 };
        Ok(grpc::unary(&MetricSpecs { metric_specs: vec![spec] }))
    }

    async fn metrics(&self, request: Request<Incoming>) -> Result<Answer, Status> {
        let asked: MetricsRequest = grpc::message(request).await?;
        let row = wanted(&self.scale, &asked.scaled_object_ref.unwrap_or_default())?;
        // KEDA takes the whole number only where the other one is absent.
        let value_float = scaler_value(row.desired, row.ready + row.starting);
        let value = MetricValue { name: asked.metric_name, value: row.desired.into(), value_float };
        Ok(grpc::unary(&MetricValues { metric_values: vec![value] }))
    }
}

/// One open `StreamIsActive`: says only what differs from `said`, and ends when the model is unknown.
struct Follow {
    scale: Arc<Autoscale>,
    changes: watch::Receiver<()>,
    object: ScaledObject,
    said: Option<bool>,
}

impl Follow {
    async fn next(mut self) -> Option<(Active, Self)> {
        loop {
            // Marked as seen before it is looked at: a change in between is not missed.
            self.changes.mark_unchanged();
            let now = active(&wanted(&self.scale, &self.object).ok()?);
            if self.said.replace(now.result) != Some(now.result) {
                return Some((now, self));
            }
            self.changes.changed().await.ok()?;
        }
    }
}

fn active(row: &ScaleRow) -> Active {
    Active { result: row.desired > 0 }
}

/// The sum that a trigger names in its metadata, by model and role. The model may be left out where there is
/// one, and the role where its workers have none, or are for both: what was meant before any had a role.
fn wanted(scale: &Autoscale, object: &ScaledObject) -> Result<ScaleRow, Status> {
    let mut rows = scale.rows();
    let unclear = |said: String| Err(Status::new(Code::InvalidArgument, said));
    if let Some(model) = object.scaler_metadata.get("model") {
        rows.retain(|row| row.model == *model);
        if rows.is_empty() {
            let said = format!("no model {model:?}: name it in [[scale.model]], or as GET /scale lists it");
            return Err(Status::new(Code::NotFound, said));
        }
    } else if rows.iter().any(|row| row.model != rows[0].model) || rows.is_empty() {
        let mut models: Vec<_> = rows.iter().map(|row| &row.model).collect();
        models.dedup();
        return unclear(format!("metadata.model must name one of the {} models of GET /scale", models.len()));
    }
    let asked = object.scaler_metadata.get("role").map(String::as_str);
    let is_asked = |row: &ScaleRow| match (asked, row.role) {
        (Some(asked), Some(role)) => role.as_str() == asked,
        (Some(asked), None) => asked == Role::Both.as_str(),
        (None, role) => role.is_none_or(|role| role == Role::Both),
    };
    match (rows.iter().position(is_asked), asked) {
        (Some(at), _) => Ok(rows.swap_remove(at)),
        (None, Some(asked)) => {
            let said = format!(
                "no workers of the role {asked:?}: GET /scale lists roles, [[scale.model]] may name some"
            );
            Err(Status::new(Code::NotFound, said))
        }
        (None, None) => unclear("metadata.role must name one of the roles of GET /scale".to_owned()),
    }
}
