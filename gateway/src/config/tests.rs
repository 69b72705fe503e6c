//! What the configuration accepts, refuses and says about it.

use std::fs;

use super::*;

fn config(text: &str) -> Result<Config, ConfigError> {
    Config::try_from(File::parse(text)?)
}

#[test]
fn a_worker_is_a_url_or_a_table() {
    let urls = config(r#"worker = ["http://a:1", "http://b:2/base"]"#).unwrap();
    assert_eq!(urls.workers[1].name(), "b:2/base");
    let tables = config("[[worker]]\nurl = \"http://a:1\"\nmodel = \"m\"\nweight = 2.0").unwrap();
    assert_eq!(tables.workers[0].weight, 2.0);
}

#[test]
fn a_worker_s_events_are_named_behind_its_url_or_in_its_table() {
    let flag: WorkerConfig = "http://a:1;kv-events=tcp://a:2;kv-replay=tcp://[::1]:3".parse().unwrap();
    let table = "[[worker]]\nurl = \"http://a:1\"\nkv_events = \"tcp://a:2\"\nkv_replay = \"tcp://[::1]:3\"";
    assert_eq!(flag.kv_events, config(table).unwrap().workers[0].kv_events);
    assert_eq!(flag.kv_events.unwrap().replay.as_deref(), Some("tcp://[::1]:3"));
    assert_eq!((flag.url.host(), flag.block_size), (Some("a"), 16));
}

#[test]
fn a_worker_s_part_and_how_its_kv_is_moved_are_said_by_flag_and_by_table() {
    let flag: WorkerConfig =
        "http://a:1;role=decode;kv-transfer=mooncake;bootstrap-port=9000;kv-source-port=5710"
            .parse()
            .unwrap();
    let table = "[[worker]]\nurl = \"http://a:1\"\nrole = \"decode\"\nkv_transfer = \"mooncake\"\nbootstrap_port = 9000\nkv_source_port = 5710";
    assert_eq!(flag, WorkerConfig { finds_ranks: true, ..config(table).unwrap().workers[0].clone() });
    assert_eq!((flag.role, flag.kv_transfer), (Some(Role::Decode), Some(KvTransfer::Mooncake)));
    let nothing: WorkerConfig = "http://a:1".parse().unwrap();
    assert_eq!((nothing.role, nothing.kv_transfer, nothing.bootstrap_port), (None, None, None));
    let ports = |config: &WorkerConfig| config.split(3).unwrap().into_iter().map(|rank| rank.kv_source_port);
    assert_eq!(ports(&flag).map(|port| port.unwrap().get()).collect::<Vec<_>>(), [5710, 5711, 5712]);
    assert_eq!(ports(&nothing).flatten().count(), 0);
}

#[test]
fn the_example_file_is_valid_and_shows_every_key() {
    let example = include_str!("../../../deploy/keyway.toml");
    let config = config(example).unwrap();
    assert_eq!(config.workers.len(), 2);
    let schema = serde_json::to_value(schemars::schema_for!(File)).unwrap();
    let mut keys = Vec::new();
    collect_keys(&schema, &mut keys);
    assert!(keys.len() >= 15, "{keys:?}");
    for key in keys {
        assert!(example.contains(&key), "deploy/keyway.toml does not show {key}");
    }
}

fn collect_keys(value: &serde_json::Value, keys: &mut Vec<String>) {
    let serde_json::Value::Object(map) = value else { return };
    for (name, inner) in map {
        if let (true, Some(properties)) = (name == "properties", inner.as_object()) {
            keys.extend(properties.keys().cloned());
        }
        collect_keys(inner, keys);
    }
}

#[test]
fn what_is_wrong_is_named() {
    for (text, word) in [
        ("lisen = \"127.0.0.1:1\"", "lisen"),
        ("[[worker]]\nurl = \"http://a:1\"\nwait = 2", "wait"),
        ("[routing]\nblock_bytes = 0", "block_bytes"),
        ("policy = \"best\"", "best"),
        ("[traces]\notlp_endpoint = \"collector:4318\"", "http://"),
        ("[traces]\notlp_endpoint = \"http://c:1\"\nsample = 2.0", "traces.sample"),
        ("[traces]\notlp_endpoint = \"https://c\"\nca_file = \"/nowhere\"", "/nowhere"),
        ("worker = [\"a:1\"]", "http://"),
        ("worker = [\"ftp://a:1\"]", "https://"),
        ("[[worker]]\nurl = \"http://a:1\"\ntls = { ca_file = \"ca\" }", "https://"),
        ("[[worker]]\nurl = \"https://a\"\ntls = { ca_file = \"/nowhere\" }", "/nowhere"),
        ("[[worker]]\nurl = \"https://a\"\ntls = { cert_file = \"c\" }", "key_file"),
        ("[tls]\ncert_file = \"c\"", "key_file"),
        ("[limits]\nanswer_idle_ms = 0", "answer_idle_ms"),
        ("worker = [\"http://a:1\", \"http://a:1/\"]", "twice"),
        ("worker = [\"http://a:1/b/v1\", \"http://A:1/b\"]", "twice"),
        ("worker = [\"http://a:1/?b\"]", "query"),
        ("[[worker]]\nurl = \"http://u:p@a:1\"\napi_key_file = \"/nowhere\"", "exclude each other"),
        ("[[worker]]\nurl = \"http://a:1\"\nweight = 0.0", "weight"),
        ("[[worker]]\nurl = \"http://a:1\"\napi_key_file = \"/nowhere\"", "/nowhere"),
        ("[limits]\nmax_in_flight = 0", "max_in_flight"),
        ("[routing]\ndecision_log_share = 2.0", "decision_log_share"),
        ("[routing]\nfetch_tokens_per_second = -1", "fetch_tokens_per_second"),
        ("worker = [\"http://a:1;kv-event=tcp://a:2\"]", "kv-events="),
        ("worker = [\"http://a:1;role=decoder\"]", "role=prefill|decode|both"),
        ("worker = [\"http://a:1;role=prefill\"]", "no worker answers"),
        ("worker = [\"http://a:1;kv-transfer=ucx\"]", "kv-transfer=nixl|mooncake|sglang"),
        ("worker = [\"http://a:1;bootstrap-port=0\"]", "bootstrap-port=PORT"),
        ("worker = [\"http://a:1;kv-source-port=x\"]", "kv-source-port=PORT"),
        ("[routing]\npull = \"often\"", "always"),
        ("[[worker]]\nurl = \"http://a:1\"\nrole = \"first\"", "prefill"),
        ("worker = [\"http://a:1;kv-events=a:2\"]", "tcp://HOST:PORT"),
        ("worker = [\"http://a:1;kv-replay=tcp://a:2\"]", "kv_events"),
        ("[[worker]]\nurl = \"http://a:1\"\nkv_events = \"tcp://*:5557\"", "tcp://HOST:PORT"),
        ("[[worker]]\nurl = \"http://a:1\"\nblock_size = 0", "block_size"),
        (
            "[[model]]\nname = \"m\"\ntokenizer = \"a\"\n[[model]]\nname = \"m\"\ntokenizer = \"b\"",
            "two tables",
        ),
    ] {
        let error = config(text).unwrap_err().to_string();
        assert!(error.contains(word), "{text}: {error}");
    }
}

#[test]
fn routing_is_exposed_only_where_it_is_asked_for() {
    assert!(!config("").unwrap().routing.expose);
    assert!(!config("listen = \"127.0.0.1:80\"").unwrap().routing.expose);
    assert!(config("[routing]\nexpose = true").unwrap().routing.expose);
}

#[test]
fn a_workers_key_is_not_printable() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("key");
    fs::write(&path, "canary-key\n").unwrap();
    let text = format!("[[worker]]\nurl = \"http://a:1\"\napi_key_file = {path:?}");
    let config = config(&text).unwrap();
    assert_eq!(config.workers[0].api_key.as_ref().unwrap(), "Bearer canary-key");
    assert!(!format!("{config:?}").contains("canary-key"));
}

#[test]
fn two_paths_of_one_port_are_two_workers_and_so_are_their_ranks() {
    let paths = config("worker = [\"http://a:1/x\", \"http://a:1/y/v1\", \"http://a:1\"]").unwrap();
    let names: Vec<_> = paths.workers.iter().map(WorkerConfig::name).collect();
    assert_eq!(names, ["a:1/x", "a:1/y", "a:1"]);
    assert!(!paths.workers[0].had_v1 && paths.workers[1].had_v1);
    let ranks = config("[[worker]]\nurl = \"http://a:1/x\"\ndata_parallel_size = 2").unwrap();
    let names: Vec<_> = ranks.workers.iter().map(WorkerConfig::name).collect();
    assert_eq!(names, ["a:1/x@0", "a:1/x@1"]);
}

#[test]
fn no_error_and_no_printed_configuration_repeats_a_password() {
    let good = config("worker = [\"http://u:canary@a:1\"]\n[[discovery.dns]]\nurl = \"http://u:canary@b:1\"")
        .unwrap();
    assert_eq!(good.workers[0].name(), "a:1");
    assert!(!format!("{good:?}").contains("canary"));
    for text in [
        "worker = [\"ftp://u:canary@a:1\"]",
        "worker = [\"http://u:canary@a:x\"]",
        "worker = [\"http://u:canary@a:1;http3=true\"]",
        "worker = [\"http://u:c;canary@a:1\"]",
        "worker = [\"http://u:canary@a:1;http2=what\"]",
        "worker = [\"http://u:canary@a:1\", \"http://u:canary@a:1/\"]",
        "[[worker]]\nurl = \"http://u:canary@a:1\"\ndata_parallel_size = 0",
        "[[worker]]\nurl = \"http://u:canary@a:1\"\nweight = -1.0",
        "[[discovery.dns]]\nurl = \"http://u:canary@a\"",
    ] {
        let error = config(text).unwrap_err().to_string();
        assert!(!error.contains("canary"), "{text}: {error}");
    }
}

#[test]
fn what_is_shown_can_be_read_again_and_has_no_password() {
    let text = "listen = \"localhost:1\"\nworker = [\"http://u:secret@a:1\", \"http://b:2\"]\n\
        [limits]\nmax_in_flight = 7\n[routing]\nexpose = false\n[[discovery.dns]]\nurl = \"http://u:secret@c:1\"";
    let shown = File::parse(text).unwrap().shown().unwrap();
    assert!(!shown.contains("secret") && !shown.contains("expose"), "{shown}");
    let again = File::parse(&shown).unwrap();
    assert_eq!(again.listen.map(|address| address.to_string()).as_deref(), Some("127.0.0.1:1"));
    assert_eq!((again.limits.max_in_flight, again.worker.len()), (Some(7), 2));
    assert_eq!(File::default().shown().unwrap(), "");
    let much = File {
        routing: RoutingFile { index_bytes: Some(usize::MAX), ..RoutingFile::default() },
        ..File::default()
    };
    assert!(much.shown().is_err(), "what is left out silently would be taken for the default");
}
