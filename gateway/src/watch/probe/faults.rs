//! Names what is wrong with a worker, so that who reads it knows what to do. Where a connection fails the
//! cause is looked for once more, step by step: name, port, TLS; that costs a connection, and only of a
//! worker that does not work.

use std::io;

use http::{HeaderMap, HeaderValue, StatusCode, header};
use keyway_core::health::State;
use rustls::{AlertDescription, CertificateError};
use serde::de::IgnoredAny;

use crate::{
    fleet::{Cause, Fault, Worker},
    limits::{MAX_FAULT_TEXT_BYTES, PROBE_TIMEOUT},
    net::port::{self, Port, Unreached},
    shortage::Shortage,
    upstream::Upstream,
};

const NO_ENGINE: &str = "is an OpenAI-compatible engine there? The worker's URL is what stands before /v1";
const WRITE_HTTP: &str = "it speaks no TLS there: write http:// in the worker's URL";
const WRITE_HTTPS: &str = "it speaks TLS there: write https:// in the worker's URL";

/// What to do about what the gateway lacks.
const OWN_REMEDY: &str = "raise the gateway's limits (open files, ports); this says nothing of the worker";

fn fault(worker: &Worker, path: &str, cause: Cause, text: String, remedy: &'static str) -> Fault {
    Fault { cause, url: worker.url_of(path), text, remedy }
}

/// Its port could not be reached.
pub(super) fn unreached(worker: &Worker, error: &Unreached) -> Fault {
    let path = "/health";
    let (host, port) = (worker.origin().host(), worker.origin().port());
    let of = |cause, text, remedy| fault(worker, path, cause, text, remedy);
    match error {
        error if error.is_own() => {
            let (Unreached::Name(error) | Unreached::Connect(error)) = error else {
                return late(worker, path);
            };
            of(Cause::Own, format!("the gateway cannot open a connection: {error}"), OWN_REMEDY)
        }
        Unreached::Name(error) if is_temporary(error) => of(
            Cause::Dns,
            format!("{host} could not be looked up: {error}"),
            "the name server does not answer: look at the resolver of the gateway's machine",
        ),
        Unreached::Name(error) => of(
            Cause::Dns,
            format!("the name {host} has no address: {error}"),
            "mend the host in the worker's URL, or its DNS entry",
        ),
        Unreached::TimedOut => of(
            Cause::Timeout,
            format!("no connection to port {port} in time"),
            "is its host on, and does a firewall let the gateway reach that port?",
        ),
        Unreached::Connect(error) if error.kind() == io::ErrorKind::ConnectionRefused => of(
            Cause::Refused,
            format!("nobody listens at {host} port {port}"),
            "start the engine there, or mend the port in the worker's URL",
        ),
        Unreached::Connect(error) if error.kind() == io::ErrorKind::ConnectionReset => {
            of(Cause::Reset, format!("port {port} resets connections"), "look at what stands at that port")
        }
        Unreached::Connect(error) => of(
            Cause::Unreachable,
            format!("no way to {host}: {error}"),
            "is the address right, and has the gateway's machine a route to it?",
        ),
    }
}

/// Whether it is the name server that is in trouble; the standard library keeps of its code only the text.
fn is_temporary(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::TimedOut || error.to_string().contains("emporary")
}

/// The gateway itself could open no connection to it.
pub(super) fn own(worker: &Worker, path: &str, lacks: Shortage) -> Fault {
    let text = format!("the gateway itself lacks {lacks}");
    fault(worker, path, Cause::Own, text, OWN_REMEDY)
}

/// It takes connections and says nothing.
pub(super) fn late(worker: &Worker, path: &str) -> Fault {
    let text = format!("no answer to {path} within {} s", PROBE_TIMEOUT.as_secs());
    fault(worker, path, Cause::Timeout, text, "look at the engine: it hangs, or has too much to do")
}

/// Its answer ended before its end.
pub(super) fn broken_off(worker: &Worker, path: &str) -> Fault {
    let text = format!("its answer to {path} broke off");
    fault(worker, path, Cause::Reset, text, "look at the engine's log")
}

/// Its answer is longer than is read.
pub(super) fn too_large(worker: &Worker, path: &str, max_bytes: usize) -> Fault {
    let text = format!("its answer to {path} is longer than {max_bytes} bytes");
    fault(worker, path, Cause::TooLarge, text, NO_ENGINE)
}

/// What it says at `/v1/models` is no list. A page for people is no engine's; JSON may be that of one which
/// has its own way.
pub(super) fn no_list(worker: &Worker, kind: Option<&HeaderValue>, body: &[u8]) -> Fault {
    let kind = kind.and_then(|kind| kind.to_str().ok()).unwrap_or("none");
    let text = format!("/v1/models is no list of models (content-type: {})", shortened(kind));
    let (cause, remedy) = match serde_json::from_slice::<IgnoredAny>(body) {
        Ok(_) => (Cause::NoList, "its models are not known: name one as `model` of this worker"),
        Err(_) => (Cause::NotJson, NO_ENGINE),
    };
    fault(worker, "/v1/models", cause, text, remedy)
}

/// It lists no model that it may be asked for.
pub(super) fn nothing_served(worker: &Worker) -> Option<Fault> {
    let of = |text, remedy| fault(worker, "/v1/models", Cause::NoModels, text, remedy);
    let Some(configured) = &worker.config().model else {
        let nothing = worker.models().is_empty();
        return nothing.then(|| of("it lists no model".to_owned(), "load a model there: it gets no request"));
    };
    worker.models().is_empty().then(|| {
        let text = format!("it does not list the model {configured:?}");
        of(text, "load that model there, or mend `model` of this worker in the configuration")
    })
}

/// Neither `/health` nor a list of models.
pub(super) fn nowhere(models: Fault, health: Fault) -> Fault {
    if health.cause != Cause::NotFound {
        return health;
    }
    Fault { text: format!("{}; {}", health.text, models.text), ..models }
}

/// A status that is no success.
pub(super) async fn of_status(worker: &Worker, path: &str, status: StatusCode, headers: &HeaderMap) -> Fault {
    let number = status.as_u16();
    let of = |cause, text, remedy| fault(worker, path, cause, text, remedy);
    let text = format!("{number} on {path}");
    match number {
        401 | 403 if worker.api_key().is_none() => of(
            Cause::Unauthorized,
            text,
            "set api_key_file of this worker to a key that it takes; without one its models are not known",
        ),
        401 | 403 => of(
            Cause::Unauthorized,
            text,
            "it does not take the key that is configured: mend api_key_file, or the user and password in the URL",
        ),
        404 | 405 | 501 => of(Cause::NotFound, text, NO_ENGINE),
        300..=399 => {
            let target = headers.get(header::LOCATION).and_then(|to| to.to_str().ok()).unwrap_or("nowhere");
            let target = target.split(['?', '#']).next().unwrap_or_default();
            let text = format!("{text}, to {}", shortened(target));
            of(Cause::Redirect, text, "redirects are not followed: write the URL of the engine itself")
        }
        // What servers of TLS say to who speaks none.
        400 if worker.origin().is_plain() && speaks_tls(worker).await => of(Cause::Tls, text, WRITE_HTTPS),
        500.. => of(Cause::ServerError, text, "the engine starts, or has failed: look at its log"),
        _ => of(Cause::Status, text, NO_ENGINE),
    }
}

/// No connection, or it was closed before an answer: why.
pub(super) async fn no_answer(worker: &Worker, upstream: &Upstream, path: &str) -> Fault {
    let origin = worker.origin();
    if let Err(error) = Port::default().look(origin.host(), origin.port(), PROBE_TIMEOUT).await {
        return unreached(worker, &error);
    }
    let closed = |remedy| {
        let text = format!("it closed the connection before it answered {path}, or answered no HTTP");
        fault(worker, path, Cause::Reset, text, remedy)
    };
    if origin.is_plain() {
        if speaks_tls(worker).await {
            let text = format!("no HTTP came back for {path}");
            return fault(worker, path, Cause::Tls, text, WRITE_HTTPS);
        }
        return closed(if worker.config().http2 {
            "look at the engine's log; does it take HTTP/2 (http2 = true), without TLS?"
        } else {
            "look at the engine's log; does it speak HTTP at that port?"
        });
    }
    match upstream.reach(origin).await {
        Ok(()) => closed("look at the engine's log; does it speak HTTP at that port?"),
        Err(error) => tls(worker, path, &error),
    }
}

/// Of one that has ever answered that is known.
async fn speaks_tls(worker: &Worker) -> bool {
    worker.state() == State::Joining
        && port::speaks_tls(worker.origin().host(), worker.origin().port(), PROBE_TIMEOUT).await
}

/// TLS could not be agreed upon.
fn tls(worker: &Worker, path: &str, error: &io::Error) -> Fault {
    let of = |cause, remedy| fault(worker, path, cause, format!("TLS: {error}"), remedy);
    let Some(tls) = error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>()) else {
        let remedy =
            "it ends or ignores the handshake: if it speaks no TLS there, write http:// in the worker's URL";
        return of(Cause::Tls, remedy);
    };
    match tls {
        rustls::Error::InvalidMessage(_) => of(Cause::Tls, WRITE_HTTP),
        rustls::Error::InvalidCertificate(why) => of(Cause::Certificate, of_certificate(why)),
        rustls::Error::AlertReceived(alert) => of_alert(*alert, of),
        _ => of(Cause::Tls, "look at the TLS versions and suites that the worker takes"),
    }
}

fn of_certificate(why: &CertificateError) -> &'static str {
    match why {
        // An authority that was made anew has its old name.
        CertificateError::UnknownIssuer | CertificateError::BadSignature => {
            "its authority is not believed: give it as ca_file in this worker's tls"
        }
        CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. } => {
            "the certificate is for another name: write a name that it has in the worker's URL"
        }
        CertificateError::Expired | CertificateError::ExpiredContext { .. } => "it has run out: renew it",
        CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => {
            "it is not good yet: look at the clocks"
        }
        _ => "the worker needs another certificate",
    }
}

fn of_alert(alert: AlertDescription, of: impl Fn(Cause, &'static str) -> Fault) -> Fault {
    use AlertDescription as Alert;
    match alert {
        Alert::CertificateRequired
        | Alert::BadCertificate
        | Alert::UnknownCA
        | Alert::CertificateUnknown
        | Alert::AccessDenied => of(
            Cause::Certificate,
            "it wants a certificate of the gateway's that it believes: cert_file and key_file in this worker's tls",
        ),
        Alert::UnrecognisedName => {
            of(Cause::Certificate, "it has no certificate for that name: write a name that it has")
        }
        _ => of(Cause::Tls, "look at the TLS versions and suites that the worker takes"),
    }
}

/// What a worker says, as long as it may be shown; whatever could break a line of the log is gone.
fn shortened(text: &str) -> String {
    let good = |c: &char| c.is_ascii_graphic() || *c == ' ';
    text.chars().filter(good).take(MAX_FAULT_TEXT_BYTES).collect()
}
