//! The gateway's own `GET /v1/models`: the union of what the ready workers serve, under all names that
//! clients may use. In OpenAI's form; in Anthropic's for its clients, and then single models as well, which
//! engines that do not know these clients tell in the other form.

use std::collections::BTreeMap;

use http::{HeaderValue, Method, header};
use keyway_apis::models::{ListedModel, listed};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::{
    error::Error,
    fleet::Fleet,
    headers::of_anthropics_client,
    path::as_engines_read,
    proxy::{
        body::{Request, Response, full},
        model_names::ModelNames,
        named_body,
    },
};

const PATH: &str = "/v1/models";

#[derive(Serialize)]
struct List<'a> {
    object: &'static str,
    data: Vec<&'a RawValue>,
}

/// What of a model's description Anthropic's form has, too.
#[derive(Debug, Default, Deserialize)]
struct Described {
    #[serde(default)]
    created: Option<serde_json::Number>,
    #[serde(default)]
    max_model_len: Option<u64>,
}

/// Whether a request for models is the gateway's own to answer.
pub fn answers(request: &Request) -> bool {
    let path = request.uri().path();
    request.method() == Method::GET
        && (path == PATH || (name_in(path).is_some() && of_anthropics_client(request.headers())))
}

/// The answer to a request for models.
///
/// # Errors
/// [`Error::BadQuery`], and [`Error::ModelNotFound`] of a single one.
pub fn answer(fleet: &Fleet, names: &ModelNames, request: &Request) -> Result<Response, Error> {
    let models = merged(fleet, names);
    if !of_anthropics_client(request.headers()) {
        let list = List { object: "list", data: models.values().map(|json| &**json).collect() };
        return Ok(json_response(&list));
    }
    let path = as_engines_read(request.uri().path());
    if let Some(name) = name_in(&path) {
        let known = || models.keys().map(String::as_str).collect::<Vec<_>>().join(", ");
        let model = models.get(name).map(|json| described(name, json));
        let model = model.ok_or_else(|| Error::ModelNotFound { model: name.to_owned(), known: known() })?;
        return Ok(json_response(&model.told()));
    }
    let models: Vec<ListedModel> = models.iter().map(|(id, json)| described(id, json)).collect();
    let page = listed(&models, request.uri().query());
    let page = page.map_err(|refusal| Error::BadQuery { message: refusal.message, param: refusal.param })?;
    Ok(json_response(&page))
}

/// A model by what its worker says of it.
fn described(id: &str, json: &RawValue) -> ListedModel {
    let Described { created, max_model_len } = serde_json::from_str(json.get()).unwrap_or_default();
    let created = created.and_then(|created| created.as_f64()).map_or(0, |created| created as u64);
    ListedModel { id: id.to_owned(), created, max_input_tokens: max_model_len }
}

/// The model that a path names.
fn name_in(path: &str) -> Option<&str> {
    path.strip_prefix(PATH)?.strip_prefix('/').filter(|name| !name.is_empty())
}

/// Each model once, as its first worker describes it; an alias as its model, but for the id.
fn merged(fleet: &Fleet, names: &ModelNames) -> BTreeMap<String, Box<RawValue>> {
    let mut models = BTreeMap::new();
    for worker in fleet.all().iter().filter(|worker| worker.routable()) {
        for model in worker.models() {
            models.entry(model.id).or_insert(model.json);
        }
    }
    for (alias, model) in names.aliases() {
        let json = models.get(model).and_then(|json| named(json.get(), alias));
        if let Some(json) = json {
            models.insert(alias.to_owned(), json);
        }
    }
    models
}

fn json_response(json: &impl Serialize) -> Response {
    // Raw JSON that was parsed once always serialises, and so do plain values.
    let mut response = Response::new(full(serde_json::to_vec(json).unwrap_or_default()));
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

/// A model's description under another name.
fn named(json: &str, name: &str) -> Option<Box<RawValue>> {
    let text = named_body::with_string(json, "id", name)?;
    serde_json::from_slice(&text).ok()
}
