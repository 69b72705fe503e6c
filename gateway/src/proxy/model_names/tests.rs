//! Which model a name leads to, and which models stand in for it.

use std::num::NonZeroUsize;

use serde_json::json;

use super::*;
use crate::{
    config::{Config, File, Translate},
    prompt::request::{self, KeyerConfig},
};

const KEY: HashKey = HashKey::new(7);

fn names(text: &str) -> ModelNames {
    ModelNames::new(&Config::try_from(File::parse(text).unwrap()).unwrap().models)
}

fn info(body: &str) -> RequestInfo {
    request::read(body.as_bytes(), KeyerConfig { key: KEY, block_bytes: NonZeroUsize::new(64).unwrap() })
}

/// Where a body's conversation lies, with a session's header if it has one.
fn place_of(body: &str, session: Option<&str>) -> f64 {
    let header = session.map(|id| (http::HeaderName::from_static("x-session-id"), id.parse().unwrap()));
    place("m", &header.into_iter().collect(), (&info(body), body.as_bytes()), KEY)
}

fn chat(messages: &[(&str, &str)]) -> String {
    let messages: Vec<_> =
        messages.iter().map(|(role, content)| json!({ "role": role, "content": content })).collect();
    json!({ "model": "m", "messages": messages }).to_string()
}

const TABLES: &str = "\
    [[model]]\nname = \"big\"\naliases = [\"default\"]\nfallbacks = [\"small\", \"big-b\", \"far\"]\n\
    split = { big-b = 0.25, big-c = 0.25 }\n\
    [[model]]\nname = \"big-c\"\nfallbacks = [\"far\"]\nsplit = { big-d = 0.5 }\n\
    [[model]]\nname = \"small\"\naliases = [\"tiny\"]\n";

#[test]
fn a_name_leads_to_its_model_and_shares_of_it_to_others() {
    let names = names(TABLES);
    let (alias, split) = (RenamedBy::Alias, RenamedBy::Split);
    for (asked, places, want) in [
        ("small", &[][..], None),
        ("unknown", &[], None),
        ("tiny", &[], Some(("small", alias))),
        ("big", &[0.0], Some(("big-b", split))),
        ("big", &[0.249], Some(("big-b", split))),
        ("big", &[0.25, 0.9], Some(("big-c", split))),
        ("big", &[0.49, 0.49], Some(("big-d", split))),
        ("big", &[0.5], None),
        ("big", &[0.999], None),
        ("default", &[0.9], Some(("big", alias))),
        ("default", &[0.1], Some(("big-b", split))),
        ("big-c", &[0.4], Some(("big-d", split))),
        ("big-c", &[0.5], None),
    ] {
        let mut places = places.iter();
        let found = names.resolve(asked, |_| *places.next().unwrap());
        assert_eq!(found, want, "{asked}");
        assert!(places.next().is_none(), "{asked}: one place for each split on the way");
    }
}

#[test]
fn who_stands_in_is_in_order_once_and_a_split_comes_back_to_its_name() {
    let names = names(TABLES);
    let fallbacks = |model: &str, by: Option<(&str, RenamedBy)>| {
        let renamed = by.map(|(asked, by)| renamed(asked, by));
        let info = RequestInfo { model: Some(model.to_owned()), renamed, ..info("{}") };
        names.fallbacks(&info).into_iter().map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(fallbacks("big", None), ["small", "big-b", "far"]);
    assert_eq!(fallbacks("big", Some(("default", RenamedBy::Alias))), ["small", "big-b", "far"]);
    assert_eq!(fallbacks("big-b", Some(("default", RenamedBy::Split))), ["big", "small", "far"]);
    assert_eq!(fallbacks("big-c", Some(("big", RenamedBy::Split))), ["far", "big", "small", "big-b"]);
    assert_eq!(fallbacks("big-b", None), Vec::<String>::new());
    assert_eq!(fallbacks("unknown", None), Vec::<String>::new());
    assert!(names.fallbacks(&info("{}")).is_empty(), "no model, none in its place");
}

#[test]
fn a_gateway_without_names_looks_nothing_up() {
    let tokenizer = "[[model]]\nname = \"m\"\ntokenizer = \"t\"\n";
    let translated = "[[model]]\nname = \"m\"\ntranslate = true\n";
    assert!(ModelNames::default().is_empty() && names(tokenizer).is_empty());
    assert!(names(translated).is_empty());
    assert_eq!(names(translated).rules("m").unwrap().translate, Translate::Always);
    assert!(!names(TABLES).is_empty());
}

#[test]
fn turns_of_one_conversation_are_in_one_place() {
    let long = "A question that is long enough to be no other conversation's, with some words more.";
    for opening in ["Hi", long] {
        let first = [("system", "You help."), ("user", opening)];
        let later = [&first[..], &[("assistant", "Hello!"), ("user", "And then?")]].concat();
        assert_eq!(place_of(&chat(&first), None), place_of(&chat(&later), None), "{opening}");
        let other = [("system", "You help."), ("user", "Something else")];
        assert_ne!(place_of(&chat(&first), None), place_of(&chat(&other), None));
        // A session's name is more than what it asks.
        assert_eq!(place_of(&chat(&first), Some("s")), place_of(&chat(&other), Some("s")));
        assert_ne!(place_of(&chat(&first), Some("s")), place_of(&chat(&first), Some("t")));
    }
    let prompt = |more: &str| json!({ "prompt": format!("{}{more}", "word ".repeat(500)) }).to_string();
    assert_eq!(place_of(&prompt(""), None), place_of(&prompt("and on"), None));
    let ids = |last: u32| json!({ "prompt": (0..2_000).chain([last]).collect::<Vec<_>>() }).to_string();
    assert_eq!(place_of(&ids(1), None), place_of(&ids(2), None));
    let tenant = |salt: &str| json!({ "prompt": "a", "cache_salt": salt }).to_string();
    assert_ne!(place_of(&tenant("a"), None), place_of(&tenant("b"), None));
}

#[test]
fn shares_are_kept_over_many_sessions_and_are_others_for_another_name() {
    let of = |model: &str, session: &str| {
        let header = (http::HeaderName::from_static("x-session-id"), session.parse().unwrap());
        place(model, &[header].into_iter().collect(), (&info("{}"), b"{}"), KEY)
    };
    let sessions: Vec<String> = (0..20_000).map(|i| format!("session-{i}")).collect();
    for share in [0.05, 0.5] {
        let taken = sessions.iter().filter(|session| of("m", session) < share).count() as f64;
        // Four standard deviations.
        let wide = 4.0 * (20_000.0 * share * (1.0 - share)).sqrt();
        assert!((taken - 20_000.0 * share).abs() < wide, "{taken} of {share}");
    }
    // Else a split behind a split would take all or none of what came there.
    let both = sessions.iter().filter(|session| of("m", session) < 0.5 && of("n", session) < 0.5).count();
    assert!((4_700..5_300).contains(&both), "{both}");
}

#[test]
fn an_alias_in_a_path_becomes_its_model_and_other_paths_stay() {
    let names = names("[[model]]\nname = \"org/big\"\naliases = [\"gpt-4o\", \"other/one\"]");
    for (path, want) in [
        ("/v1/models/gpt-4o", "/v1/models/org/big"),
        ("/v1/models/other/one", "/v1/models/org/big"),
        ("/v1/models/other%2Fone", "/v1/models/org/big"),
        ("/v1/models/org/big", "/v1/models/org/big"),
        ("/v1/models/gpt-4", "/v1/models/gpt-4"),
        ("/v1/files/gpt-4o", "/v1/files/gpt-4o"),
    ] {
        let mut uri: Uri = path.parse().unwrap();
        names.in_path(&mut uri);
        assert_eq!(uri, want);
    }
    let mut whole: Uri = "http://host/v1/models/gpt-4o".parse().unwrap();
    names.in_path(&mut whole);
    assert_eq!(whole, "http://host/v1/models/org/big");
}
