//! Whom a request is for, where its body does not say: the model in its path or query, and the refusal of
//! what several workers would take for different models. Which of them answered would be a lottery.

use std::collections::BTreeSet;

use http::{Method, request::Parts};

use crate::{
    error::Error,
    fleet::Fleet,
    path::as_engines_read,
    prompt::{
        content::{Coding, Unread},
        request::RequestInfo,
    },
    proxy::engine_paths::ENGINE_PATHS,
};

/// Paths of the API's, where engines offer them, whose requests are for a model.
const OF_A_MODEL: [&str; 14] = [
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/embeddings",
    "/v1/moderations",
    "/v1/rerank",
    "/v1/score",
    "/v1/classify",
    "/v1/pooling",
    "/v1/tokenize",
    "/v1/detokenize",
    "/v1/realtime",
];

/// The same, with whatever follows.
const OF_A_MODEL_BELOW: [&str; 2] = ["/v1/audio/", "/v1/images/"];

/// The model in `/v1/models/{id}`, whose slashes may be written out, or in the query (`/v1/realtime?model=`).
/// Where a path or query may mean something else by it, only one that a worker may serve.
pub fn model_in_target(fleet: &Fleet, parts: &Parts) -> Option<String> {
    let path = as_engines_read(parts.uri.path());
    let served = |model: &String| fleet.all().iter().any(|worker| worker.may_serve(Some(model)));
    if let Some(model) = path.strip_prefix("/v1/models/").filter(|model| !model.is_empty()) {
        return Some(model.to_owned()).filter(|model| parts.method == Method::GET || served(model));
    }
    let mut pairs = form_urlencoded::parse(parts.uri.query()?.as_bytes());
    let model = pairs.find(|(name, _)| name == "model").map(|(_, model)| model.into_owned());
    model.filter(|model| !model.is_empty() && (path == "/v1/realtime" || served(model)))
}

/// Refuses a request that is for a model which is not known, where it matters.
pub fn model_is_known_or_one(fleet: &Fleet, parts: &Parts, info: &RequestInfo) -> Result<(), Error> {
    if info.model.is_some() {
        return Ok(());
    }
    let path = as_engines_read(parts.uri.path());
    let asks = is_of_a_model(&path) && (!parts.method.is_safe() || path == "/v1/realtime");
    if !asks || !differ(fleet, info.unread.is_some()) {
        return Ok(());
    }
    let why = match info.unread {
        Some(Unread::Coding) => return Err(Error::CodingUnsupported { accepted: Coding::NAMES }),
        Some(Unread::Damaged) => "the request body is not what its content-encoding says",
        Some(Unread::NoObject) => "the request body is neither a JSON object nor a form",
        None => "the request names no model",
    };
    Err(Error::ModelRequired { why, known: fleet.model_ids().join(", ") })
}

fn is_of_a_model(path: &str) -> bool {
    OF_A_MODEL.contains(&path)
        || ENGINE_PATHS.contains(&path)
        || OF_A_MODEL_BELOW.iter().any(|beginning| path.starts_with(beginning))
}

/// Whether workers are known to serve different models. Who names none means the one that stands for its
/// worker; of who may have named one it may be any.
fn differ(fleet: &Fleet, any: bool) -> bool {
    let workers = fleet.all();
    let mut served = workers.iter().filter_map(|worker| {
        let models: BTreeSet<String> = if any {
            let listed = worker.models().into_iter().map(|model| model.id);
            listed.chain(worker.config().model.clone()).collect()
        } else {
            worker.primary_model().into_iter().collect()
        };
        // What has not answered a probe may serve anything.
        (!models.is_empty()).then_some(models)
    });
    let Some(first) = served.next() else { return false };
    served.any(|models| models != first)
}

#[cfg(test)]
mod tests;
