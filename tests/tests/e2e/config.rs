//! Hazard: a configuration mistake that goes unnoticed, or one that is not explained. Each gives one clear
//! line and a non-zero exit code.

use std::process::{Command, Output};

use keyway_tests::bins::bin;
use keyway_tests::cluster::config_file;
use keyway_tests::openai::{CHAT, chat};
use keyway_tests::{FakeWorker, Gateway, post};

fn keyway(args: &[&str]) -> Output {
    Command::new(bin("keyway"))
        .args(args)
        .env_remove("RUST_LOG")
        .env("NO_COLOR", "1")
        .output()
        .expect("keyway runs")
}

fn check(toml: &str) -> (Option<i32>, String) {
    let file = config_file(toml);
    let output = keyway(&["config", "check", "--config", file.path().to_str().unwrap()]);
    let said = [output.stdout, output.stderr].concat();
    (output.status.code(), String::from_utf8(said).unwrap())
}

#[test]
fn good_files_pass() {
    for toml in [
        "",
        "listen = \"127.0.0.1:0\"\npolicy = \"prefix\"\n",
        "policy = \"keyway\"\n",
        "[[worker]]\nurl = \"http://127.0.0.1:8000\"\n[[worker]]\nurl = \"http://127.0.0.1:8001\"\nweight = 2.0\n",
    ] {
        let (code, said) = check(toml);
        assert_eq!(code, Some(0), "{toml:?}: {said}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn workers_are_asked_where_that_is_wanted() {
    let worker = FakeWorker::with_models(&["m"]).await;
    let good = format!("http://{}", worker.addr());
    let probed = |workers: &[&str]| {
        let named = workers.iter().flat_map(|url| ["--worker", *url]);
        let args: Vec<&str> = ["config", "check", "--probe"].into_iter().chain(named).collect();
        let output = keyway(&args);
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    };
    assert_eq!(probed(&[&good]), (Some(0), format!("{}: serves m\n", worker.addr())));
    let (code, said) = probed(&[&good, "http://127.0.0.1:1"]);
    assert_eq!(code, Some(1), "{said}");
    let lines: Vec<&str> = said.lines().collect();
    assert_eq!(lines[0], format!("{}: serves m", worker.addr()));
    assert!(
        lines[1].starts_with("127.0.0.1:1: nobody listens") && lines[1].contains("http://127.0.0.1:1"),
        "{said}"
    );
    assert_eq!(lines[2], "keyway: 1 of 2 workers cannot be used");
}

#[test]
fn bad_files_are_refused_by_one_line_that_names_the_fault() {
    for (toml, names) in [
        ("polcy = \"prefix\"\n", "polcy"),
        ("policy = \"best\"\n", "best"),
        ("listen = \"nowhere\"\n", "nowhere"),
        ("listen = 8080\n", "listen"),
        ("[[worker]]\nurl = \"ftp://host\"\n", "ftp"),
        ("[[worker]]\nmodel = \"m\"\n", "url"),
        ("[[worker]]\nurl = \"http://h:1\"\ncolour = \"red\"\n", "colour"),
        ("[[worker]]\nurl = \"http://h:1\"\nweight = -1.0\n", "weight"),
        ("listen = \n", "1"),
        ("[cors]\nallow_origins = \"*\"\nallow_credentials = true\n", "allow_credentials"),
        ("[cors]\nallow_origins = [\"https://a.example/\"]\n", "https://a.example/"),
        ("[cors]\norigins = [\"https://a.example\"]\n", "origins"),
    ] {
        let (code, said) = check(toml);
        assert_eq!(code, Some(1), "{toml:?}: {said}");
        assert!(said.contains(names), "{toml:?} should name {names:?}: {said}");
        assert!(!said.contains("panicked"), "{said}");
        assert_eq!(said.trim_end().lines().count(), 1, "{toml:?}: {said}");
    }
}

#[test]
fn what_check_prints_is_a_file_of_all_that_is_not_the_default() {
    let file = config_file("[limits]\nmax_in_flight = 7\n");
    let path = file.path().to_str().unwrap();
    let flags = ["--listen", "localhost:8081", "--worker", "http://u:secret@h:1,http://i:1"];
    let output = keyway(&[&["config", "check", "--config", path][..], &flags].concat());
    let shown = String::from_utf8(output.stdout).unwrap();
    for part in [
        "# The configuration is valid.",
        "listen = \"127.0.0.1:8081\"",
        "max_in_flight = 7",
        "\"http://i:1\"",
    ] {
        assert!(shown.contains(part), "{part} in {shown}");
    }
    assert!(!shown.contains("secret") && !shown.contains("Some("), "{shown}");
    assert!(shown.contains("are left out"), "{shown}");
    let flags = ["--listen", "localhost:8081", "--worker", "http://i:1"];
    let plain = keyway(&[&["config", "check", "--config", path][..], &flags].concat());
    let plain = String::from_utf8(plain.stdout).unwrap();
    assert!(!plain.contains("are left out"), "{plain}");
    assert_eq!(check(&plain), (Some(0), plain));
}

#[test]
fn a_reader_that_has_seen_enough_is_no_error() {
    for args in [&["config", "schema"][..], &["completions", "bash"], &["config", "check"], &["new-key"]] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let output = Command::new(bin("keyway")).args(args).stdout(writer).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && !said.contains("panicked"), "{args:?}: {said}");
    }
}

#[test]
fn a_new_key_is_a_tenants_table_and_the_key_apart_from_it() {
    let output = keyway(&["new-key", "--name", "team \"a\""]);
    let (table, said) =
        (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap());
    let key = said.split_whitespace().find(|word| word.starts_with("kw-")).expect("a key");
    assert!(!table.contains(key), "{table}");
    let parsed: toml::Table = table.parse().unwrap();
    assert_eq!(parsed["tenant"][0]["name"].as_str(), Some("team \"a\""));
    let tenants = config_file(&table);
    let (code, said) = check(&format!("[auth]\ntenants_file = {:?}\n", tenants.path().to_str().unwrap()));
    assert_eq!(code, Some(0), "{said}");
}

#[test]
fn a_new_key_without_a_name_is_for_a_person_to_read_and_to_cut_from() {
    let output = keyway(&["new-key"]);
    let said = String::from_utf8(output.stdout).unwrap();
    let of = |name: &str| {
        let line = said.lines().find(|line| line.split_whitespace().next() == Some(name)).expect("a line");
        line.split_whitespace().nth(1).expect("its value").to_owned()
    };
    assert!(of("key").starts_with("kw-") && output.stderr.is_empty(), "{said}");
    let (_, table) = said.split_once("\n    [[tenant]]").expect("a table");
    let parsed: toml::Table = format!("[[tenant]]{table}").parse().unwrap();
    assert_eq!(parsed["tenant"][0]["key_sha256"][0].as_str(), Some(of("key_sha256").as_str()));
}

#[test]
fn wrong_usage_is_told_apart_from_a_wrong_file() {
    assert_eq!(keyway(&["--no-such-flag"]).status.code(), Some(2));
    assert_eq!(keyway(&["config", "chek"]).status.code(), Some(2));
    let missing = keyway(&["config", "check", "--config", "/nonexistent/keyway.toml"]);
    assert_eq!(missing.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&missing.stderr).contains("/nonexistent/keyway.toml"));
}

#[test]
fn every_binary_explains_itself() {
    for name in ["keyway", "keyway-worker", "keyway-loadtest"] {
        for args in [&["--help"][..], &["--version"], &["completions", "bash"]] {
            let output = Command::new(bin(name)).args(args).output().expect("it runs");
            assert_eq!(output.status.code(), Some(0), "{name} {args:?}");
            assert!(!output.stdout.is_empty(), "{name} {args:?}");
        }
    }
}

#[tokio::test]
async fn a_port_in_use_is_one_line_and_a_failure() {
    let worker = FakeWorker::start().await;
    let (url, taken) = (format!("http://{}", worker.addr()), worker.addr().to_string());
    for flag in ["--listen", "--admin-listen"] {
        let free = if flag == "--listen" { "--admin-listen" } else { "--listen" };
        let output = keyway(&["--worker", &url, flag, &taken, free, "127.0.0.1:0"]);
        assert_eq!(output.status.code(), Some(1), "{flag}");
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(said.contains(&taken) && !said.contains("panicked"), "{flag}: {said}");
    }
}

#[tokio::test]
async fn a_file_s_workers_are_served_and_flags_win_over_it() {
    let worker = FakeWorker::start().await;
    let toml = format!("policy = \"random\"\n[[worker]]\nurl = \"http://{}\"\n", worker.addr());
    let gateway = Gateway::builder().config(&toml).args(&["--policy", "round-robin"]).start().await;
    gateway.wait_ready(1).await;
    let response = post(gateway.addr, CHAT, &chat("hi")).await;
    assert_eq!(response.status(), 200);
    // A single candidate may be named `only`; a policy's name otherwise.
    let reason = response.header("x-keyway-reason").expect("on loopback").to_owned();
    assert_ne!(reason, "random");
}
