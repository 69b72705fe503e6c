//! What one core of `keyway-loadtest mock --profile instant` serves: requests and server-sent events for each
//! second of its CPU time, so that what else runs on the machine counts little. `cargo run --release -p
//! keyway-loadtest --example mock_speed -- target/release/keyway-loadtest`
#![allow(clippy::expect_used, clippy::panic, reason = "a measurement that cannot be made ends here")]

use std::{
    fs,
    io::{BufRead as _, BufReader, Read as _, Write as _},
    net::TcpStream,
    process::{Child, Command, Stdio},
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    thread,
    time::{Duration, Instant},
};

const CONNECTIONS: usize = 16;
const SECONDS: u64 = 5;
const STREAM_TOKENS: u64 = 1000;

struct Mock(Child, String);

impl Mock {
    fn start(program: &str) -> Self {
        let mut child = Command::new(program)
            .args(["mock", "--profile", "instant", "--base-port", "0", "--threads", "1"])
            .stdout(Stdio::piped())
            .spawn()
            .expect("the mock starts");
        let lines = BufReader::new(child.stdout.take().expect("piped")).lines();
        let line = lines.map_while(Result::ok).find(|line| line.contains("ready on")).expect("it says where");
        let addr = line.rsplit("http://").next().expect("a URL").to_owned();
        Self(child, addr)
    }

    /// CPU time of all its threads.
    fn cpu(&self) -> Duration {
        let tasks = fs::read_dir(format!("/proc/{}/task", self.0.id())).expect("Linux");
        let ns = tasks.flatten().filter_map(|task| {
            fs::read_to_string(task.path().join("schedstat")).ok()?.split(' ').next()?.parse::<u64>().ok()
        });
        Duration::from_nanos(ns.sum())
    }
}

impl Drop for Mock {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn main() {
    let program = std::env::args().nth(1).expect("usage: mock_speed PATH/keyway-loadtest");
    let mock = Mock::start(&program);
    let short = r#"{"model":"mock","messages":[{"role":"user","content":"What does one request cost?"}],"max_tokens":1}"#;
    let (rate, cpu) = measure(&mock, short, b"}}");
    println!("requests   {rate:>10.0}/s, {:>10.0} a second of the mock's CPU time", rate / cpu);
    let stream = format!(
        r#"{{"model":"mock","messages":[{{"role":"user","content":"Say much."}}],"max_tokens":{STREAM_TOKENS},"stream":true}}"#
    );
    let (rate, cpu) = measure(&mock, &stream, b"\r\n0\r\n\r\n");
    let events = rate * (STREAM_TOKENS + 2) as f64;
    println!("SSE events {events:>10.0}/s, {:>10.0} a second of the mock's CPU time", events / cpu);
}

/// Answers a second, and the mock's CPU seconds in each. An answer ends with `end`.
fn measure(mock: &Mock, body: &str, end: &[u8]) -> (f64, f64) {
    let request = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: mock\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    let (stop, answers) = (AtomicBool::new(false), AtomicU64::new(0));
    let (cpu, start) = (mock.cpu(), Instant::now());
    thread::scope(|scope| {
        for _ in 0..CONNECTIONS {
            scope.spawn(|| {
                let mut socket = TcpStream::connect(&mock.1).expect("it listens");
                let (mut buffer, mut tail) = (vec![0; 1 << 18], Vec::new());
                while !stop.load(Ordering::Relaxed) {
                    socket.write_all(request.as_bytes()).expect("it reads");
                    tail.clear();
                    while !tail.ends_with(end) {
                        let n = socket.read(&mut buffer).expect("it answers");
                        assert!(n > 0, "the mock closed the connection");
                        let from = n.saturating_sub(64);
                        tail.extend_from_slice(&buffer[from..n]);
                    }
                    answers.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        while start.elapsed() < Duration::from_secs(SECONDS) {
            thread::park_timeout(Duration::from_millis(50));
        }
        stop.store(true, Ordering::Relaxed);
    });
    let elapsed = start.elapsed().as_secs_f64();
    let cpu = mock.cpu().saturating_sub(cpu).as_secs_f64() / elapsed;
    (answers.load(Ordering::Relaxed) as f64 / elapsed, cpu)
}
