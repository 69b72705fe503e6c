//! The messages of KEDA's external scaler, with the field numbers of its `externalscaler.proto`.

use std::collections::HashMap;

use prost::Message;

/// `ScaledObjectRef`: which object asks, and the metadata of its trigger.
#[derive(Clone, PartialEq, Message)]
pub(super) struct ScaledObject {
    #[prost(string, tag = "1")]
    pub(super) name: String,
    #[prost(string, tag = "2")]
    pub(super) namespace: String,
    #[prost(map = "string, string", tag = "3")]
    pub(super) scaler_metadata: HashMap<String, String>,
}

/// `IsActiveResponse`: whether there are to be workers at all.
#[derive(Clone, Copy, PartialEq, Message)]
pub(super) struct Active {
    #[prost(bool, tag = "1")]
    pub(super) result: bool,
}

/// `GetMetricSpecResponse`: the metrics that KEDA is to ask for; here always one.
#[derive(Clone, PartialEq, Message)]
pub(super) struct MetricSpecs {
    #[prost(message, repeated, tag = "1")]
    pub(super) metric_specs: Vec<MetricSpec>,
}

/// A metric and what one worker bears of it; the whole number is for KEDA before 2.15, which reads no other.
#[derive(Clone, PartialEq, Message)]
pub(super) struct MetricSpec {
    #[prost(string, tag = "1")]
    pub(super) metric_name: String,
    #[prost(int64, tag = "2")]
    pub(super) target_size: i64,
    #[prost(double, tag = "3")]
    pub(super) target_size_float: f64,
}

/// `GetMetricsRequest`: which object asks, and for which metric.
#[derive(Clone, PartialEq, Message)]
pub(super) struct MetricsRequest {
    #[prost(message, optional, tag = "1")]
    pub(super) scaled_object_ref: Option<ScaledObject>,
    #[prost(string, tag = "2")]
    pub(super) metric_name: String,
}

/// `GetMetricsResponse`: the values of what was asked for; here always one.
#[derive(Clone, PartialEq, Message)]
pub(super) struct MetricValues {
    #[prost(message, repeated, tag = "1")]
    pub(super) metric_values: Vec<MetricValue>,
}

/// A metric's value, twice for the same reason.
#[derive(Clone, PartialEq, Message)]
pub(super) struct MetricValue {
    #[prost(string, tag = "1")]
    pub(super) name: String,
    #[prost(int64, tag = "2")]
    pub(super) value: i64,
    #[prost(double, tag = "3")]
    pub(super) value_float: f64,
}
