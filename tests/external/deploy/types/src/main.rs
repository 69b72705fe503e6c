//! Reads objects (JSON, one a line) into the Rust types of their kinds, writes them again, and says what was
//! lost on the way or could not be read. Kinds of Kubernetes itself are none of its business:
//! `tests/python/manifests.py` has their schemas. Ends with 1 if anything was lost, or if there was no object
//! of such a kind.

use std::process::ExitCode;

use gateway_api::apis::standard::httproutes::HttpRoute;
use k8s_openapi_024 as _;
use k8s_openapi_028 as _;
use kube_custom_resources_rs::{
    keda_sh::v1alpha1::scaledobjects::ScaledObject,
    monitoring_coreos_com::v1::{
        podmonitors::PodMonitor, prometheusrules::PrometheusRule, servicemonitors::ServiceMonitor,
    },
};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::Value;

/// Fields that came after the types: KEDA 2.17 has it, the crate's types are of 2.15.
/// `tests/data/custom_resources.json` knows it.
const NEWER: [&str; 1] = [".spec.fallback.behavior"];

/// What the type makes of an object.
fn through<T: Serialize + DeserializeOwned>(object: &Value) -> Result<Value, String> {
    let typed: T = serde_json::from_value(object.clone()).map_err(|error| error.to_string())?;
    serde_json::to_value(typed).map_err(|error| error.to_string())
}

/// Where what was written differs from what was read; what the type adds is no loss.
fn losses(read: &Value, written: &Value, path: &str, lost: &mut Vec<String>) {
    match (read, written) {
        (Value::Object(read), Value::Object(written)) => {
            for (key, value) in read {
                let path = format!("{path}.{key}");
                match written.get(key) {
                    Some(other) => losses(value, other, &path, lost),
                    None => lost.push(path),
                }
            }
        }
        (Value::Array(read), Value::Array(written)) if read.len() == written.len() => {
            for (i, (value, other)) in read.iter().zip(written).enumerate() {
                losses(value, other, &format!("{path}.{i}"), lost);
            }
        }
        _ if read == written => {}
        _ => lost.push(format!("{path}: {read} became {written}")),
    }
}

fn main() -> ExitCode {
    let Ok(text) = std::io::read_to_string(std::io::stdin()) else { return ExitCode::FAILURE };
    let (mut good, mut bad) = (0, 0);
    for line in text.lines() {
        let object: Value = match serde_json::from_str(line) {
            Ok(object) => object,
            Err(error) => {
                println!("no JSON: {error}");
                return ExitCode::FAILURE;
            }
        };
        let field = |path: &str| object.pointer(path).and_then(Value::as_str).unwrap_or_default();
        let written = match (field("/apiVersion"), field("/kind")) {
            ("keda.sh/v1alpha1", "ScaledObject") => through::<ScaledObject>(&object),
            ("monitoring.coreos.com/v1", "PodMonitor") => through::<PodMonitor>(&object),
            ("monitoring.coreos.com/v1", "ServiceMonitor") => through::<ServiceMonitor>(&object),
            ("monitoring.coreos.com/v1", "PrometheusRule") => through::<PrometheusRule>(&object),
            ("gateway.networking.k8s.io/v1", "HTTPRoute") => through::<HttpRoute>(&object),
            (group, _) if !group.contains('.') || group.contains(".k8s.io/") => continue,
            (group, kind) => Err(format!("no type for {group} {kind}")),
        };
        let mut lost = Vec::new();
        match written {
            Ok(written) => losses(&object, &written, "", &mut lost),
            Err(error) => lost.push(error),
        }
        let newer = lost.iter().filter(|path| NEWER.contains(&path.as_str())).count();
        lost.retain(|path| !NEWER.contains(&path.as_str()));
        let name = format!("{} {}", field("/kind"), field("/metadata/name"));
        if lost.is_empty() {
            good += 1;
            let but = if newer > 0 { format!(", but for {newer} fields newer than it") } else { String::new() };
            println!("ok    {name}{but}");
        } else {
            bad += 1;
            println!("LOST  {name}: {}", lost.join("; "));
        }
    }
    println!("{good} objects came through their Rust types whole, {bad} did not");
    if good > 0 && bad == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
