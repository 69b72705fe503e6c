//! Traces replayed live, as the built binary sends them: each turn behind the answers that it goes on from.

use std::{
    fs,
    process::{Command, Stdio},
};

use serde_json::Value;
use tempfile::TempDir;

use crate::support::{FakeServer, PAUSE, Script};

/// Two sub-agents start with the first answer; the next turn waits for both, and for its tools. By its own
/// times the whole trace would be over in 200 ms.
const SESSION: &str = r#"{"starts_with": [["system", 64]], "turns": [
    {"adds": 64, "generates": 3, "agents": [
        {"starts_with": [["system", 64]], "turns": [{"adds": 20, "generates": 1}, {"adds": 30, "generates": 1}]},
        {"begins_ms": 1, "turns": [{"adds": 70, "generates": 2}]}]},
    {"adds": 100, "generates": 2},
    {"adds": 70, "generates": 2, "forgets": true}]}"#;

/// The rows of `SESSION`, in order of the trace's times.
const FIRST: u64 = 0;
const SEARCH: u64 = 1;
const OTHER: u64 = 2;
const SEARCH_AGAIN: u64 = 3;
const JOIN: u64 = 4;
const AFRESH: u64 = 5;

struct Replay {
    report: Value,
    records: Vec<Value>,
    _dir: TempDir,
}

impl Replay {
    /// Replays `sessions` copies of the session.
    fn run(server: &FakeServer, sessions: usize, line: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let trace = dir.path().join("agents.jsonl");
        fs::write(&trace, format!("{}\n", SESSION.replace('\n', " ")).repeat(sessions)).unwrap();
        let output = Command::new(env!("CARGO_BIN_EXE_keyway-loadtest"))
            .args(["run", "--url", &server.url(), "--ui", "none", "--records", "--live", "--trace"])
            .arg(&trace)
            .arg("-o")
            .arg(dir.path())
            .args(line.split_whitespace())
            .stdin(Stdio::null())
            .output()
            .unwrap();
        assert!(matches!(output.status.code(), Some(0 | 3)), "{output:?}");
        let report = serde_json::from_slice(&fs::read(dir.path().join("run.json")).unwrap()).unwrap();
        let records = fs::read_to_string(dir.path().join("requests.jsonl")).unwrap();
        let records = records.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        Self { report, records, _dir: dir }
    }

    fn time(&self, row: u64, name: &str) -> f64 {
        self.records.iter().find(|record| record["row"] == row).unwrap()[name].as_f64().unwrap()
    }

    fn sent(&self, row: u64) -> f64 {
        self.time(row, "sent_ms")
    }

    fn ended(&self, row: u64) -> f64 {
        self.time(row, "end_ms")
    }

    fn due(&self, row: u64) -> f64 {
        self.time(row, "intended_ms")
    }
}

/// An answer that takes longer than the trace has it.
fn slow(_: usize) -> Script {
    Script::Said(&[
        "data: {\"choices\":[{\"delta\":{\"content\":\"x\"}}]}\n\n",
        PAUSE,
        "data: {\"choices\":[{\"delta\":{},\"finish_reason\":\"stop\"}],\"usage\":{\"prompt_tokens\":7,\"completion_tokens\":1}}\n\n",
        "data: [DONE]\n\n",
    ])
}

#[test]
fn a_sub_agent_s_turn_is_sent_after_the_answer_that_started_it() {
    let server = FakeServer::start(slow);
    let replay = Replay::run(&server, 1, "");
    assert_eq!(replay.report["requests"]["ok"], 6);
    assert!(replay.sent(SEARCH) >= replay.ended(FIRST));
    assert!(replay.sent(OTHER) >= replay.ended(FIRST));
    // Both run at once.
    assert!(replay.sent(OTHER) < replay.ended(SEARCH) && replay.sent(SEARCH) < replay.ended(OTHER));
    // Due counts from the answers' ends, so what an answer took is not the load tester's lateness.
    assert_eq!(replay.due(SEARCH), replay.ended(FIRST));
    assert!((replay.due(OTHER) - replay.ended(FIRST) - 1.0).abs() < 1e-6);
}

#[test]
fn a_turn_waits_for_the_last_of_its_sub_agents() {
    let server = FakeServer::start(slow);
    let replay = Replay::run(&server, 1, "");
    assert!(replay.sent(SEARCH_AGAIN) >= replay.ended(SEARCH));
    // The one with two turns ends after the one with one.
    assert!(replay.ended(SEARCH_AGAIN) > replay.ended(OTHER));
    assert_eq!(replay.due(JOIN), replay.ended(SEARCH_AGAIN));
    assert!(replay.sent(JOIN) >= replay.ended(SEARCH_AGAIN));
    assert!(replay.sent(AFRESH) >= replay.ended(JOIN));
}

#[test]
fn so_many_sessions_are_under_way_and_the_next_begins_when_one_has_ended() {
    let server = FakeServer::start(|_| Script::Good);
    let replay = Replay::run(&server, 3, "--concurrency 1 --time-scale 0.5");
    assert_eq!(replay.report["requests"]["ok"], 18);
    let mut begins: Vec<_> = replay.records.iter().collect();
    begins.sort_by(|a, b| a["sent_ms"].as_f64().unwrap().total_cmp(&b["sent_ms"].as_f64().unwrap()));
    let sessions: Vec<_> = begins.iter().map(|record| record["session"].as_u64().unwrap()).collect();
    assert!(sessions.is_sorted(), "{sessions:?}");
    // A sub-agent that begins 1 ms after the answer does so in twice the time.
    let of = |agent: u64, turn: u64, name: &str| {
        let found = replay
            .records
            .iter()
            .find(|record| record["session"] == 0 && record["agent"] == agent && record["turn"] == turn);
        found.unwrap()[name].as_f64().unwrap()
    };
    assert!((of(2, 0, "intended_ms") - of(0, 0, "end_ms") - 2.0).abs() < 1e-6);
    let rated = Replay::run(&server, 3, "--rate 500 --conversations 2");
    assert_eq!(
        (&rated.report["requests"]["ok"], &rated.report["requests"]["scheduled"]),
        (&12.into(), &12.into())
    );
}

#[test]
fn a_failed_turn_ends_what_is_left_of_its_session() {
    let server = FakeServer::start(|turn| if turn == 0 { Script::Status(500) } else { Script::Good });
    let replay = Replay::run(&server, 2, "--concurrency 1");
    let requests = &replay.report["requests"];
    assert_eq!((&requests["failed"], &requests["ok"], &requests["sent"]), (&1.into(), &6.into(), &7.into()));
    let sessions = &replay.report["sessions"];
    assert_eq!(
        (&sessions["begun"], &sessions["ended"], &sessions["failed"]),
        (&2.into(), &1.into(), &1.into())
    );
    assert_eq!((&sessions["turns"], &sessions["turns_not_sent"]), (&7.into(), &5.into()));
    assert_eq!((&sessions["completion"]["n"], &sessions["by_turn"][0]["ttft"]["n"]), (&1.into(), &3.into()));
}

/// The prompts of the requests by their session headers, in the order of the agent's turns.
fn prompts(server: &FakeServer, field: &str, agent: &str) -> Vec<Vec<(String, String)>> {
    let (bodies, sessions) = (server.bodies.lock().unwrap(), server.sessions.lock().unwrap());
    let of_agent = bodies.iter().zip(sessions.iter()).filter(|(_, name)| name.as_deref() == Some(agent));
    let message = |message: &Value| {
        let text = |name: &str| message[name].as_str().unwrap().to_owned();
        (text("role"), text("content"))
    };
    of_agent.map(|(body, _)| body[field].as_array().unwrap().iter().map(message).collect()).collect()
}

#[test]
fn the_server_s_own_answers_stand_in_the_history() {
    for (endpoint, field) in [("chat", "messages"), ("responses", "input"), ("messages", "messages")] {
        let server = FakeServer::start(|_| Script::Good);
        let line = format!(
            "--answers live --session-header x-session-id --text-seed 9 --endpoint {endpoint} --bytes-per-token 1"
        );
        let replay = Replay::run(&server, 1, &line);
        assert_eq!(replay.report["requests"]["ok"], 6, "{endpoint}");
        let turns = prompts(&server, field, "9-0");
        let roles: Vec<Vec<&str>> =
            turns.iter().map(|turn| turn.iter().map(|(role, _)| &**role).collect()).collect();
        assert_eq!(roles, [vec!["user"], vec!["user", "assistant", "user"], vec!["user"]], "{endpoint}");
        assert_eq!(turns[1][0], turns[0][0]);
        assert_eq!(turns[1][1].1, "xxx", "{endpoint}: three tokens were asked for");
        // The prompt is as long as in the trace, where the answer had three tokens, too.
        let lengths: Vec<usize> = turns[1].iter().map(|(_, text)| text.len()).collect();
        assert_eq!(lengths, [128, 3, 100]);
        // All of what was said before can be reused, answers among it.
        let possible = |row: u64| {
            replay.records.iter().find(|record| record["row"] == row).unwrap()["possible_tokens"].clone()
        };
        assert_eq!((possible(SEARCH_AGAIN), possible(JOIN)), (85.into(), 131.into()), "{endpoint}");
        // What was forgotten is gone, and the shared part is there still.
        assert_eq!((&turns[2][0].1[..64], turns[2][0].1.len()), (&turns[0][0].1[..64], 134));
        let other = prompts(&server, field, "9-0-1");
        assert_eq!(other[0][0].1[..64], turns[0][0].1[..64], "sub-agents have the system prompt too");
        assert_eq!(other[1].len(), 3);
    }
}

#[test]
fn recorded_answers_are_part_of_one_message() {
    let server = FakeServer::start(|_| Script::Good);
    Replay::run(&server, 1, "--session-header x-session-id --text-seed 9 --bytes-per-token 1");
    let turns = prompts(&server, "messages", "9-0");
    assert!(turns.iter().all(|turn| turn.len() == 1));
    assert_eq!(turns[0][0].1, turns[1][0].1[..128]);
    assert_eq!(turns[1][0].1.len(), 231);
}

#[test]
fn a_sub_agent_names_itself_and_who_started_it() {
    let server = FakeServer::start(|_| Script::Good);
    let line =
        "--session-header x-session-id --parent-header x-parent-session-id --text-seed 9 --conversations 1";
    Replay::run(&server, 2, line);
    let (sessions, parents) = (server.sessions.lock().unwrap(), server.parents.lock().unwrap());
    let mut names: Vec<_> = sessions
        .iter()
        .zip(parents.iter())
        .map(|(name, parent)| (name.as_deref(), parent.as_deref()))
        .collect();
    names.sort_unstable();
    let (own, search, other) =
        ((Some("9-0"), None), (Some("9-0-1"), Some("9-0")), (Some("9-0-2"), Some("9-0")));
    assert_eq!(names, [own, own, own, search, search, other]);
}
