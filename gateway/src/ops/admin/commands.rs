//! What an operator may change while the gateway runs: add a worker of an allowed host, take it out again,
//! drain one and take that back; read the configuration again; end the gateway. Every command is a POST or
//! DELETE with JSON as its content type, which a web page of another origin cannot send unasked.

use http::{Method, StatusCode, header};
use http_body_util::{BodyExt, Limited};
use serde_json::json;

use super::{Admin, json_answer};
use crate::{
    config::{WorkerConfig, WorkerTable},
    limits::MAX_COMMAND_BYTES,
    proxy::body::{Request, Response},
    watch::members::Source,
};

/// Why a command was not done.
type Refused = (StatusCode, String);

/// Does what a POST or DELETE under `/workers` asks.
pub(super) async fn command(request: Request, admin: &Admin) -> Response {
    let (status, text) = match run(request, admin).await {
        Ok((status, done)) => (status, json!({ "done": done })),
        Err((status, error)) => (status, json!({ "error": error })),
    };
    json_answer(status, &text)
}

async fn run(request: Request, admin: &Admin) -> Result<(StatusCode, String), Refused> {
    let kind = request.headers().get(header::CONTENT_TYPE).map(http::HeaderValue::as_bytes);
    if !kind.is_some_and(|kind| kind.starts_with(b"application/json")) {
        let why = "commands need the header content-type: application/json".to_owned();
        return Err((StatusCode::UNSUPPORTED_MEDIA_TYPE, why));
    }
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    match (&method, path.as_str()) {
        (&Method::POST, "/reload") => return reload(admin).await,
        (&Method::POST, "/drain") => {
            admin.leaving.ask();
            return Ok((StatusCode::ACCEPTED, "the gateway drains and ends".to_owned()));
        }
        _ => {}
    }
    // A name may have a path of its own.
    let path = path.replace("%2F", "/").replace("%2f", "/");
    let name = path.strip_prefix("/workers").unwrap_or_default().trim_start_matches('/');
    let done = |done: bool, what: &str, name: &str| {
        let missing = || (StatusCode::NOT_FOUND, format!("no worker {name:?} that could be {what}"));
        done.then(|| (StatusCode::ACCEPTED, format!("{name} {what}"))).ok_or_else(missing)
    };
    match (&method, name.rsplit_once('/')) {
        (&Method::POST, None) if name.is_empty() => add(request, admin).await,
        (&Method::POST, Some((name, "drain"))) => done(admin.members.drain(name), "drained", name),
        (&Method::POST, Some((name, "undrain"))) => done(admin.members.undrain(name), "undrained", name),
        (&Method::DELETE, _) => done(admin.members.remove(name), "removed", name),
        _ => Err((StatusCode::NOT_FOUND, format!("there is no {method} {path}"))),
    }
}

async fn reload(admin: &Admin) -> Result<(StatusCode, String), Refused> {
    match admin.reloader.reload().await {
        Ok(changes) => Ok((StatusCode::OK, changes.to_string())),
        Err(error) => {
            Err((StatusCode::UNPROCESSABLE_ENTITY, format!("{error}; the old configuration stays in force")))
        }
    }
}

async fn add(request: Request, admin: &Admin) -> Result<(StatusCode, String), Refused> {
    let wrong = |why: String| (StatusCode::BAD_REQUEST, why);
    let body = Limited::new(request.into_body(), MAX_COMMAND_BYTES).collect().await;
    let body = body.map_err(|error| wrong(error.to_string()))?.to_bytes();
    let table: WorkerTable = serde_json::from_slice(&body).map_err(|error| wrong(error.to_string()))?;
    if table.api_key_file.is_some() || table.tls.is_some() {
        return Err(wrong("api_key_file and tls can only be set in a file".to_owned()));
    }
    let ranks = WorkerConfig::all_of(&table).map_err(|error| wrong(error.0))?;
    for host in ranks.iter().flat_map(hosts) {
        if !admin.live.now().admin_allow.iter().any(|rule| rule.allows(&host)) {
            let why = format!("{host} is not among the hosts of discovery.admin_allow");
            return Err((StatusCode::FORBIDDEN, why));
        }
    }
    let mut names = Vec::new();
    for worker in &ranks {
        let name = worker.name();
        if !admin.members.join(worker, Source::Admin) {
            return Err((StatusCode::CONFLICT, format!("{name} is in the fleet already")));
        }
        names.push(name);
    }
    Ok((StatusCode::CREATED, format!("{} added", names.join(", "))))
}

/// Every host that the gateway would connect to for this worker.
fn hosts(worker: &WorkerConfig) -> Vec<String> {
    let mut hosts = vec![worker.url.host().unwrap_or_default().to_owned()];
    let events = worker.kv_events.iter().flat_map(|kv| [Some(&kv.events), kv.replay.as_ref()]).flatten();
    for address in events {
        let place = address.strip_prefix("tcp://").and_then(|place| place.rsplit_once(':'));
        hosts.push(place.map_or_else(String::new, |(host, _)| host.to_owned()));
    }
    hosts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hosts_of_its_events_count_too() {
        let worker: WorkerConfig =
            "http://10.0.0.1:1;kv-events=tcp://[::2]:3;kv-replay=tcp://evil.example:4".parse().unwrap();
        assert_eq!(hosts(&worker), ["10.0.0.1", "[::2]", "evil.example"]);
    }
}
