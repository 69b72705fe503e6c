//! Conversations and prompts from files, as the built binary sends them.

use std::{
    fs,
    process::{Command, Output, Stdio},
};

use serde_json::{Value, json};

use crate::support::{FakeServer, Script};

fn run(server: &FakeServer, line: &str) -> (Output, Value) {
    let dir = tempfile::tempdir().unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_keyway-loadtest"))
        .args(["run", "--url", &server.url(), "--ui", "none", "-o"])
        .arg(dir.path())
        .args(line.split_whitespace())
        .stdin(Stdio::null())
        .output()
        .unwrap();
    assert!(matches!(output.status.code(), Some(0 | 3)), "{output:?}");
    let report = fs::read(dir.path().join("run.json")).unwrap();
    (output, serde_json::from_slice(&report).unwrap())
}

#[test]
fn each_turn_carries_what_was_said_before() {
    let server = FakeServer::start(|_| Script::Good);
    let line = "--workload multi-turn --turns 3 --isl 20 --osl uniform(2,6) --prefix-len 40 --prefix-groups 2 \
                --think-time 1ms --concurrency 2 --conversations 5";
    let (_, report) = run(&server, line);
    assert_eq!((&report["requests"]["ok"], &report["requests"]["scheduled"]), (&15.into(), &15.into()));
    // All but the first turn of each conversation can reuse what came before.
    assert!(report["cache"]["possible"].as_f64() > Some(0.5), "{}", report["cache"]);
    let bodies = server.bodies.lock().unwrap();
    for body in bodies.iter() {
        let messages = body["messages"].as_array().unwrap();
        let roles: Vec<_> = messages.iter().map(|message| message["role"].as_str().unwrap()).collect();
        assert!([1, 3, 5].contains(&roles.len()));
        assert!(
            roles
                .chunks(2)
                .all(|pair| pair[0] == "user" && pair.get(1).is_none_or(|role| *role == "assistant"))
        );
        assert_eq!(messages[0]["content"].as_str().unwrap().len(), 60);
        if let [before @ .., _, _] = messages.as_slice()
            && !before.is_empty()
        {
            // The very messages of an earlier request, and the answer that it got: as many x as it asked for.
            let earlier = bodies.iter().find(|earlier| earlier["messages"] == json!(before)).unwrap();
            let answer = messages[before.len()]["content"].as_str().unwrap();
            assert_eq!(answer, "x".repeat(earlier["max_tokens"].as_u64().unwrap() as usize));
        }
    }
}

#[test]
fn each_conversation_has_a_name_of_its_own_in_the_session_s_header() {
    let server = FakeServer::start(|_| Script::Good);
    let line = "--workload multi-turn --turns 3 --isl 20 --osl 2 --concurrency 2 --conversations 5";
    run(&server, line);
    run(&server, &format!("{line} --session-header X-Session-Id"));
    let (bodies, sessions) = (server.bodies.lock().unwrap(), server.sessions.lock().unwrap());
    assert!(sessions[..15].iter().all(Option::is_none), "none is sent unasked");
    let mut turns = std::collections::BTreeMap::<&str, Vec<&Value>>::new();
    for (session, body) in sessions.iter().zip(bodies.iter()).skip(15) {
        turns.entry(session.as_deref().unwrap()).or_default().push(&body["messages"][0]);
    }
    assert_eq!(turns.len(), 5);
    assert!(turns.values().all(|first| first.len() == 3 && first.iter().all(|text| *text == first[0])));
}

#[test]
fn a_failed_turn_ends_its_conversation() {
    let server = FakeServer::start(|turn| if turn == 0 { Script::Status(500) } else { Script::Good });
    let (_, report) =
        run(&server, "--workload multi-turn --turns 4 --isl 20 --osl 2 --concurrency 1 --conversations 3");
    assert_eq!((&report["requests"]["failed"], &report["requests"]["ok"]), (&1.into(), &8.into()));
}

#[test]
fn sharegpt_and_lines_of_one_s_own() {
    let server = FakeServer::start(|_| Script::Good);
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("share.json");
    let talk = json!([{"conversations": [
        {"from": "human", "value": "What is \"it\"?"}, {"from": "gpt", "value": "1234567"},
        {"from": "human", "value": "And then?"}, {"from": "gpt", "value": "12"},
    ]}]);
    fs::write(&path, talk.to_string()).unwrap();
    let file = path.to_str().unwrap();
    let (_, report) =
        run(&server, &format!("--workload sharegpt --file {file} --concurrency 1 --text-seed 0"));
    assert_eq!(report["requests"]["ok"], 2);
    run(&server, &format!("--workload sharegpt --file {file} --concurrency 1 --turns 1 --text-seed 0"));
    {
        let bodies = server.bodies.lock().unwrap();
        assert_eq!(bodies.len(), 3);
        // One token a byte on this server.
        assert_eq!((&bodies[0]["max_tokens"], &bodies[1]["max_tokens"]), (&7.into(), &2.into()));
        assert_eq!(bodies[0]["messages"], json!([{"role": "user", "content": "What is \"it\"?"}]));
        assert_eq!(bodies[1]["messages"][1], json!({"role": "assistant", "content": "xxxxxxx"}));
        assert_eq!(bodies[1]["messages"][2]["content"], "And then?");
        assert_eq!(bodies[2], bodies[0]);
    }

    let lines = "{\"messages\": [{\"role\": \"system\", \"content\": \"s\"}], \"max_tokens\": 3}\n{\"prompt\": \"p\"}\n";
    fs::write(&path, lines).unwrap();
    let (_, report) =
        run(&server, &format!("--workload custom --file {file} --rate 100 --osl 5 --text-seed 0"));
    assert_eq!(report["requests"]["ok"], 2);
    let bodies = server.bodies.lock().unwrap();
    let mut sent: Vec<_> = bodies[3..]
        .iter()
        .map(|b| (b["messages"][0]["content"].as_str().unwrap(), &b["max_tokens"]))
        .collect();
    sent.sort_by_key(|(content, _)| *content);
    assert_eq!(sent, [("p", &5.into()), ("s", &3.into())]);
}

#[test]
fn a_check_says_what_a_server_tells() {
    let check = |script: fn(usize) -> Script| {
        let server = FakeServer::start(script);
        let output = Command::new(env!("CARGO_BIN_EXE_keyway-loadtest"))
            .args(["check", "--url", &server.url(), "-H", "x-tenant: a"])
            .stdin(Stdio::null())
            .output()
            .unwrap();
        (output.status.code(), String::from_utf8(output.stdout).unwrap())
    };
    let (code, text) = check(|_| Script::Good);
    assert_eq!(code, Some(0), "{text}");
    for want in [
        "ok   model           fake",
        "1.000 bytes",
        "8 events with text",
        "8 generated as asked",
        "of 518 for a repeated",
    ] {
        assert!(text.contains(want), "{want}: {text}");
    }
    let (code, text) = check(|_| Script::Cut);
    assert!(code == Some(1) && text.contains("FAIL stream          cut"), "{text}");
}
