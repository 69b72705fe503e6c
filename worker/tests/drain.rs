//! What signals do to the command while an answer is open: the first lets it end, the second does not.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a failed helper fails its test")]

use std::process::Stdio;

use serde_json::json;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader, Lines};
use tokio::net::TcpStream;
use tokio::process::{Child, ChildStderr, Command};

/// More events than the sockets' buffers hold, so that an answer nobody reads stays open.
const ENDLESS: usize = 30_000;
/// An answer that takes far longer than a signal, and far shorter than a drain may.
const LONG: usize = 2_000;

struct Worker {
    child: Child,
    log: Lines<BufReader<ChildStderr>>,
    /// An answer that has begun.
    stream: TcpStream,
}

impl Worker {
    /// A worker in the middle of an answer.
    async fn answering(tokens: usize) -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_keyway-worker"))
            .args(["--model", "random", "--listen", "127.0.0.1:0"])
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let mut log = BufReader::new(child.stderr.take().unwrap()).lines();
        let ready = log.next_line().await.unwrap().unwrap();
        let addr = ready.split("http://").nth(1).unwrap().split_whitespace().next().unwrap();
        let body = json!({
            "messages": [{"role": "user", "content": "go on"}],
            "max_tokens": tokens, "ignore_eos": true, "stream": true});
        let body = body.to_string();
        let head = format!(
            "POST /v1/chat/completions HTTP/1.1\r\nhost: w\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        let mut stream = TcpStream::connect(addr).await.unwrap();
        stream.write_all((head + &body).as_bytes()).await.unwrap();
        let mut first = [0; 512];
        stream.read_exact(&mut first).await.unwrap();
        assert!(first.starts_with(b"HTTP/1.1 200"));
        Self { child, log, stream }
    }

    /// Sends SIGTERM.
    async fn terminate(&self) {
        let pid = self.child.id().unwrap().to_string();
        assert!(Command::new("kill").args(["-TERM", &pid]).status().await.unwrap().success());
    }

    /// Waits until the log says that it drains.
    async fn draining(&mut self) {
        while !self.log.next_line().await.unwrap().expect("it says so").contains("draining") {}
    }

    /// The rest of the answer; whether it was all of it.
    async fn read_to_the_end(&mut self) -> bool {
        let mut rest = Vec::new();
        let complete = self.stream.read_to_end(&mut rest).await.is_ok();
        complete && String::from_utf8_lossy(&rest).contains("data: [DONE]")
    }
}

#[tokio::test]
async fn the_first_signal_lets_an_open_answer_end() {
    let mut worker = Worker::answering(LONG).await;
    worker.terminate().await;
    worker.draining().await;
    assert!(worker.read_to_the_end().await);
    assert!(worker.child.wait().await.unwrap().success());
}

#[tokio::test]
async fn the_second_signal_ends_it_at_once() {
    let mut worker = Worker::answering(ENDLESS).await;
    worker.terminate().await;
    worker.draining().await;
    worker.terminate().await;
    // The answer is not read before the process is gone, so nothing else can have ended it.
    assert!(worker.child.wait().await.unwrap().success());
    assert!(!worker.read_to_the_end().await);
}
