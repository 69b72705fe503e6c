//! A child process whose log is captured line by line: wait for what it announces, show it when the test
//! fails, kill it whatever happens to the test. Knows nothing of gateways or workers.

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::watch;

use crate::canary;
use crate::eventually;
use crate::eventually::patient;

/// Lines kept of one process; the oldest are forgotten first.
const LOG_LINES_MAX: usize = 5_000;
/// How long the rest of a dead process's log is read.
const READ_TIMEOUT: Duration = Duration::from_secs(2);

/// A running (or ended) child. Dropping it kills it and, in a failing test, prints its log.
#[derive(Debug)]
pub struct Process {
    name: String,
    child: Child,
    log: watch::Receiver<Vec<String>>,
    /// Lines that hold what was sent and must not be logged.
    leaks: Arc<Mutex<Vec<String>>>,
    /// Closed when all that it wrote was read.
    read: mpsc::Receiver<()>,
}

impl Process {
    /// Starts `command`. Settings of the person's own environment (`KEYWAY_*`) do not reach it.
    pub fn spawn(name: &str, command: &mut Command) -> Self {
        let given: Vec<_> = command.get_envs().map(|(k, _)| k.to_owned()).collect();
        for (key, _) in std::env::vars_os() {
            if key.to_string_lossy().starts_with("KEYWAY_") && !given.contains(&key) {
                command.env_remove(&key);
            }
        }
        if !given.iter().any(|key| key == "RUST_LOG") {
            // Everything is logged, so that all of it is looked through for what must not be there.
            command.env("RUST_LOG", std::env::var("KEYWAY_TEST_LOG").unwrap_or_else(|_| "trace".to_owned()));
        }
        command.env("NO_COLOR", "1").stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap_or_else(|e| panic!("cannot start {name} ({command:?}): {e}"));
        let (lines, log) = watch::channel(Vec::new());
        let (lines, leaks) = (Arc::new(lines), Arc::default());
        let (reads, read) = mpsc::channel();
        capture(child.stdout.take().expect("piped"), lines.clone(), Arc::clone(&leaks), reads.clone());
        capture(child.stderr.take().expect("piped"), lines, Arc::clone(&leaks), reads);
        Self { name: name.to_owned(), child, log, leaks, read }
    }

    /// Waits for a line that contains `marker`; returns what follows it on that line up to a blank.
    ///
    /// # Panics
    /// When the process ends, or patience does, without one.
    pub async fn announced(&self, marker: &str) -> String {
        let mut log = self.log.clone();
        let find =
            |lines: &Vec<String>| lines.iter().find_map(|l| l.split_once(marker)).map(|(_, rest)| word(rest));
        let what = format!("{} to say {marker:?}", self.name);
        let Ok(lines) = patient(&what, log.wait_for(|lines| find(lines).is_some())).await else {
            panic!("{} ended without saying {marker:?}", self.name)
        };
        find(&lines).unwrap_or_default()
    }

    /// The captured lines so far, of stdout and stderr. Those below `INFO` are looked through and not kept,
    /// unless `KEYWAY_TEST_LOG` asks for them.
    pub fn log(&self) -> Vec<String> {
        self.log.borrow().clone()
    }

    /// Kills it without warning (SIGKILL) and waits until it is gone.
    pub fn kill(&mut self) {
        let _ = self.child.kill(); // gone already: fine
        let _ = self.child.wait();
    }

    /// Its number.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Asks it to end (SIGTERM).
    pub fn terminate(&self) {
        self.signal("TERM");
    }

    /// Sends it a signal by its name, such as `HUP`.
    ///
    /// # Panics
    /// When it is gone.
    pub fn signal(&self, name: &str) {
        let status = Command::new("sh").args(["-c", &format!("kill -{name} {}", self.child.id())]).status();
        assert!(status.is_ok_and(|s| s.success()), "cannot signal {}", self.name);
    }

    /// Waits for its end, with patience, and until all that it wrote is in the log.
    pub async fn ended(&mut self) -> ExitStatus {
        eventually!(self.child.try_wait().expect("wait").is_some(), "the end of {}", self.name);
        // Its own children may keep the pipes open.
        let _ = tokio::time::timeout(READ_TIMEOUT, async { while self.log.changed().await.is_ok() {} }).await;
        self.child.wait().expect("wait")
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
        if std::thread::panicking() {
            eprintln!("--- log of {} ---", self.name);
            for line in self.log.borrow().iter() {
                eprintln!("{line}");
            }
        } else {
            // A child of its own may hold the pipe open; what that says later is not waited for.
            let _ = self.read.recv_timeout(READ_TIMEOUT);
            let leaks = self.leaks.lock();
            assert!(leaks.is_empty(), "{} logs what it was sent: {leaks:?}", self.name);
        }
    }
}

fn word(rest: &str) -> String {
    rest.split_whitespace().next().unwrap_or_default().to_owned()
}

/// Copies a pipe's lines into the log until it closes.
fn capture(
    pipe: impl Read + Send + 'static,
    lines: Arc<watch::Sender<Vec<String>>>,
    leaks: Arc<Mutex<Vec<String>>>,
    reads: mpsc::Sender<()>,
) {
    let keeps_chatter = std::env::var_os("KEYWAY_TEST_LOG").is_some();
    std::thread::spawn(move || {
        for line in BufReader::new(pipe).split(b'\n').map_while(Result::ok) {
            let line = String::from_utf8_lossy(&line).into_owned();
            if keeps_chatter || !is_chatter(&line) {
                lines.send_modify(|log| {
                    if log.len() == LOG_LINES_MAX {
                        log.remove(0);
                    }
                    log.push(line.clone());
                });
            }
            // Behind the push: who waits for a line does not wait for this.
            if let Some(canary) = canary::found_in(&line) {
                leaks.lock().push(format!("{canary:?} in {line}"));
            }
        }
        drop(reads);
    });
}

/// Whether it is a line of a level below `INFO`, in either format.
fn is_chatter(line: &str) -> bool {
    let level = match line.split_once("\"level\":\"") {
        Some((_, rest)) => rest.split('"').next(),
        None => line.split_whitespace().nth(1),
    };
    matches!(level, Some("DEBUG" | "TRACE"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Process {
        Process::spawn("script", Command::new("sh").args(["-c", script]))
    }

    #[tokio::test]
    async fn an_announcement_is_found_on_either_pipe_and_the_process_dies_with_its_handle() {
        let process =
            shell("echo noise; echo 'INFO ready on http://127.0.0.1:7 model=x' >&2; exec sleep 1000");
        assert_eq!(process.announced("ready on http://").await, "127.0.0.1:7");
        let pid = process.child.id();
        drop(process);
        assert!(!std::path::Path::new(&format!("/proc/{pid}")).exists());
    }

    #[tokio::test]
    #[should_panic(expected = "ended without saying")]
    async fn an_early_end_is_told_at_once() {
        shell("echo no such flag >&2; exit 2").announced("ready on").await;
    }

    #[tokio::test]
    #[should_panic(expected = "logs what it was sent")]
    async fn what_a_test_sent_may_not_be_in_a_log() {
        canary::register("a prompt that nobody may log");
        let process = shell("echo 'got: a prompt that nobody may log'; echo said; exec sleep 1000");
        process.announced("said").await;
    }

    #[tokio::test]
    #[should_panic(expected = "logs what it was sent")]
    async fn what_is_not_kept_is_looked_through() {
        canary::register("a prompt that nobody may whisper");
        let mut process = shell("echo said; echo 'now TRACE x: a prompt that nobody may whisper'");
        process.ended().await;
        assert!(process.log().iter().all(|line| line == "said"), "{:?}", process.log());
    }

    #[test]
    fn chatter_is_told_by_its_level() {
        assert!(is_chatter("2026-11-21T09:00:00Z TRACE mio::poll: registering"));
        assert!(is_chatter("{\"timestamp\":\"now\",\"level\":\"DEBUG\",\"fields\":{}}"));
        assert!(!is_chatter("2026-11-21T09:00:00Z  INFO keyway: ready"));
        assert!(!is_chatter("{\"level\":\"INFO\",\"fields\":{\"message\":\"TRACE\"}}"));
        assert!(!is_chatter("thread 'main' panicked"), "what is no log line is kept");
    }

    #[tokio::test]
    async fn a_signalled_process_reports_its_exit_code() {
        let mut process = shell("trap 'exit 7' TERM; echo up; while :; do sleep 0.01; done");
        process.announced("up").await;
        process.terminate();
        assert_eq!(process.ended().await.code(), Some(7));
    }
}
