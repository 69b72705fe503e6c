//! Who must say which model, and who need not.

use std::sync::Arc;

use http::Request;

use super::*;
use crate::{
    clock::Clock,
    config::WorkerConfig,
    fleet::{Model, ejection::Ejections},
    prompt::request::{KeyerConfig, read},
};

/// A fleet of workers that serve these.
fn fleet(models: &[&[&str]]) -> Fleet {
    let urls = (0..models.len()).map(|i| format!("http://w{i}:1").parse().unwrap());
    let workers: Vec<WorkerConfig> = urls.collect();
    let clock = Clock::start();
    let fleet = Fleet::new(&workers, clock.now(), &Ejections::new(clock, None));
    for (i, models) in models.iter().enumerate().filter(|(_, models)| !models.is_empty()) {
        let model = |id: &&str| {
            let json = serde_json::value::to_raw_value(id).unwrap();
            Model {
                id: (*id).to_owned(),
                parent: None,
                json,
                context: None,
                numerics_id: None,
                kv_source_port: None,
            }
        };
        let name = format!("w{i}:1");
        let all = fleet.all();
        let worker = all.iter().find(|worker| worker.name == name).map(Arc::clone).unwrap();
        worker.set_models(models.iter().map(model).collect());
    }
    fleet
}

fn parts(method: &str, target: &str) -> Parts {
    Request::builder().method(method).uri(target).body(()).unwrap().into_parts().0
}

fn check(fleet: &Fleet, parts: &Parts, body: &[u8], unread: Option<Unread>) -> Result<(), Error> {
    let keyer = KeyerConfig {
        key: keyway_wire::block_hash::HashKey::new(1),
        block_bytes: std::num::NonZeroUsize::new(16).unwrap(),
    };
    let mut info = read(body, keyer);
    info.model = info.model.or_else(|| model_in_target(fleet, parts));
    info.unread = unread.or(info.unread.filter(|_| !body.is_empty()));
    model_is_known_or_one(fleet, parts, &info)
}

#[test]
fn a_model_in_the_path_or_the_query_is_unescaped() {
    let two = fleet(&[&["org/m:8b x"], &["org/m"]]);
    for (method, target, model) in [
        ("GET", "/v1/models/org%2fm%3A8b%20x", Some("org/m:8b x")),
        ("DELETE", "/v1/models/org/m", Some("org/m")),
        ("GET", "/v1/realtime?a=b&model=org%2Fm", Some("org/m")),
        ("GET", "/v1/realtime?model=none", Some("none")),
        ("GET", "/v1/models/none", Some("none")),
        // Whoever knows what that means is a worker.
        ("DELETE", "/v1/models/none", None),
        ("GET", "/v1/files?model=none", None),
        ("GET", "/v1/files?model=org/m", Some("org/m")),
        ("GET", "/v1/models/", None),
        ("GET", "/v1/realtime?model=", None),
        ("POST", "/v1/chat/completions", None),
    ] {
        assert_eq!(model_in_target(&two, &parts(method, target)).as_deref(), model, "{method} {target}");
    }
}

#[test]
fn where_all_serve_the_same_nobody_has_to_say_what() {
    let chat = parts("POST", "/v1/chat/completions");
    for models in [&[&["m"][..]][..], &[&["m"], &["m"]], &[&["m", "a"], &["m", "a"]], &[&["m"], &[]], &[]] {
        for unread in [None, Some(Unread::Coding), Some(Unread::Damaged)] {
            assert_eq!(check(&fleet(models), &chat, b"{}", unread), Ok(()), "{models:?}");
        }
    }
}

#[test]
fn where_they_differ_the_refusal_says_why_and_what_there_is() {
    let two = fleet(&[&["whisper"], &["llm"]]);
    for target in
        ["/v1/chat/completions", "/v1/audio/transcriptions", "/v1/images/edits", "/tokenize", "/v1/realtime"]
    {
        for (body, unread, why) in [
            (&b"{\"messages\":[]}"[..], None, "names no model"),
            (b"{\"model\":null}", None, "names no model"),
            (b"{\"model\":\"\"}", None, "names no model"),
            (b"", None, "names no model"),
            (b"nonsense", None, "neither a JSON object nor a form"),
            (b"x", Some(Unread::Damaged), "not what its content-encoding says"),
        ] {
            let error = check(&two, &parts("POST", target), body, unread).unwrap_err();
            assert!(matches!(error, Error::ModelRequired { .. }), "{error:?}");
            let said = error.to_string();
            assert!(said.contains(why) && said.ends_with("llm, whisper"), "{said}");
        }
        let error = check(&two, &parts("POST", target), b"x", Some(Unread::Coding)).unwrap_err();
        assert!(error.to_string().contains("gzip"), "{error}");
        assert_eq!(error.to_response().headers()["accept-encoding"], "gzip, deflate, zstd");
    }
    assert_eq!(check(&two, &parts("POST", "/v1/chat/completions"), b"{\"model\":\"x\"}", None), Ok(()));
}

#[test]
fn what_is_for_no_model_needs_none() {
    let two = fleet(&[&["whisper"], &["llm"]]);
    for (method, target) in [
        ("GET", "/v1/responses/resp_1"),
        ("DELETE", "/v1/files/f"),
        ("POST", "/v1/files"),
        ("POST", "/v1/batches"),
        ("POST", "/v1/responses/resp_1/cancel"),
        ("GET", "/v1/chat/completions"),
        ("GET", "/v1/realtime?model=llm"),
        ("POST", "/v1/something/new"),
    ] {
        assert_eq!(check(&two, &parts(method, target), b"", None), Ok(()), "{method} {target}");
    }
}

#[test]
fn adapters_that_not_all_have_matter_to_who_may_have_named_one() {
    let adapters = fleet(&[&["base", "a"], &["base", "b"]]);
    let chat = parts("POST", "/v1/chat/completions");
    assert_eq!(check(&adapters, &chat, b"{}", None), Ok(()), "both mean base");
    assert!(check(&adapters, &chat, b"{}", Some(Unread::Damaged)).is_err());
    assert!(check(&adapters, &chat, b"{\"model\":", None).is_err());
}
