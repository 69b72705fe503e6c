//! Hazard: an example that does not work: a key of the configuration that is not known, a flag that no
//! program has, a page too long to be read by whoever wants to begin.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use keyway_tests::bins::{bin, workspace_root};
use keyway_tests::openai::{CHAT, chat};
use keyway_tests::{Client, Cluster, FakeWorker, Gateway, eventually, sources, tools};

use crate::manifests::said;

/// Words of an example's page, code and tables with it.
const WORDS_MAX: usize = 200;

fn examples() -> PathBuf {
    workspace_root().join("examples")
}

/// The examples' pages: the folder of each, and its text.
fn pages() -> Vec<(PathBuf, String)> {
    let texts = sources::texts(&["md"]).into_iter();
    let found: Vec<_> = texts
        .filter(|(path, _)| path.starts_with("examples/"))
        .map(|(path, text)| (workspace_root().join(path).parent().expect("a folder").to_owned(), text))
        .collect();
    assert!(found.len() > 3, "{}", found.len());
    found
}

/// The commands of a page that call one of the project's programs: its name, and the words behind it.
fn commands(page: &str) -> Vec<(String, Vec<String>)> {
    let mut is_shell = false;
    let mut found = Vec::new();
    for line in page.lines() {
        if line.starts_with("```") {
            is_shell = line == "```sh";
        } else if is_shell && line.starts_with("keyway") {
            let words = line.split_whitespace().take_while(|word| !matches!(*word, "&" | ">" | ">>" | "|"));
            let mut words = words.map(str::to_owned);
            found.push((words.next().expect("the program"), words.collect()));
        }
    }
    found
}

/// The flags of these words that the program does not have.
fn unknown_flags(program: &str, words: &[String]) -> Vec<String> {
    let subcommands: Vec<&String> = words.iter().take_while(|word| !word.starts_with('-')).collect();
    let help = Command::new(bin(program)).args(subcommands).arg("--help").output().expect("the program runs");
    let help = said(&help);
    let knows = |flag: &str| help.split([' ', '\n', ',', '=']).any(|word| word == flag);
    words.iter().filter(|word| word.starts_with("--") && !knows(word)).cloned().collect()
}

#[test]
fn pages_are_short_and_their_commands_are_known() {
    let mut seen = 0;
    for (folder, page) in pages() {
        let words = page.split_whitespace().count();
        assert!(words <= WORDS_MAX, "{}: {words} words", folder.display());
        for (program, words) in commands(&page) {
            let unknown = unknown_flags(&program, &words);
            assert!(unknown.is_empty(), "{}: {program} has no {unknown:?}", folder.display());
            let files =
                words.iter().filter(|word| Path::new(word).extension().is_some_and(|kind| kind == "toml"));
            let missing: Vec<&String> = files.filter(|file| !folder.join(file).is_file()).collect();
            assert!(missing.is_empty(), "{}: {missing:?}", folder.display());
            seen += 1;
        }
    }
    assert!(seen > 5, "{seen}");
    let none = ["run".to_owned(), "--urls".to_owned(), "--url".to_owned()];
    assert_eq!(unknown_flags("keyway-loadtest", &none), ["--urls"]);
}

#[test]
fn the_gateway_takes_every_configuration() {
    let mut seen = 0;
    for (folder, _) in pages() {
        if folder.join("keyway.toml").is_file() {
            let mut check = Command::new(bin("keyway"));
            check.args(["config", "check", "--config", "keyway.toml"]).current_dir(&folder);
            let output = check.output().expect("keyway runs");
            assert!(output.status.success(), "{}: {}", folder.display(), said(&output));
            seen += 1;
        }
    }
    assert!(seen >= 3, "{seen}");
}

#[tokio::test]
async fn the_tenants_of_the_example_come_in_and_nobody_else() {
    let folder = examples().join("tenants");
    let config = fs::read_to_string(folder.join("keyway.toml")).unwrap();
    let tenants = folder.join("tenants.toml");
    let config = config.replace("\"tenants.toml\"", &format!("{:?}", tenants.display().to_string()));
    let worker = FakeWorker::start().await;
    let gateway = Gateway::builder().config(&config).worker(worker.addr()).start().await;
    gateway.wait_ready(1).await;
    for (key, status) in
        [("example-key-research", 200), ("example-key-nightly", 200), ("example-key-other", 401)]
    {
        let mut client = Client::connect(gateway.addr).await;
        let bearer = format!("Bearer {key}");
        client.request("POST", CHAT, &[("authorization", &bearer)], &chat("hello from an example")).await;
        let answer = client.response().await;
        assert_eq!(answer.status(), status, "{key}: {}", answer.text());
        // Only nightly has limits.
        let is_limited = answer.header("x-ratelimit-remaining-tokens").is_some();
        assert_eq!(is_limited, key == "example-key-nightly", "{key}");
    }
}

#[tokio::test]
async fn the_agents_of_the_example_find_their_histories_cached() {
    let Some(python) = tools::python() else { return };
    let config = fs::read_to_string(examples().join("agents/keyway.toml")).unwrap();
    let cluster = Cluster::builder().workers(2).config(&config).start().await;
    let mut command = tokio::process::Command::new(python);
    command
        .arg(examples().join("agents/agents.py"))
        .arg("--url")
        .arg(format!("http://{}/v1", cluster.addr()));
    command.args(["--agents", "2", "--steps", "3"]).env("NO_PROXY", "*").kill_on_drop(true);
    let output = eventually::patient("the agents", command.output()).await.expect("Python runs");
    let told = said(&output);
    assert!(output.status.success(), "{told}");
    let share = told.rsplit("after the first steps: ").next().and_then(|rest| rest.split('%').next());
    let share: u32 = share.and_then(|share| share.parse().ok()).unwrap_or_else(|| panic!("{told}"));
    assert!(share > 50, "{told}");
    cluster.gateway.idle().await;
}
