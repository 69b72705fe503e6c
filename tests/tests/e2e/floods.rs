//! Hazard: frames that cost a client nothing and the gateway much (HTTP/2): streams opened to be reset, by
//! the client or by the gateway itself, heads and bodies that never end, frames that must be answered, heads
//! that unpack to many times their size, windows that never open. `python/h2_floods.py` sends them; others
//! are served meanwhile and afterwards.

use std::collections::BTreeMap;
use std::process::Stdio;

use keyway_tests::bins::workspace_root;
use keyway_tests::eventually::patient;
use keyway_tests::openai::{CHAT, chat_for};
use keyway_tests::{FakeWorker, Gateway, Resources, eventually, post, tools};
use serde::Deserialize;
use tokio::io::{AsyncBufReadExt, BufReader};

/// Model of the worker that is flooded.
const FLOODED: &str = "flooded-model";
/// Model of the one that is not.
const OTHER: &str = "other-model";
/// Streams that one connection may have open.
const MAX_STREAMS: u64 = 1_024;
/// What a flood may add to the gateway's memory; a thousand open requests take half of it.
const MEMORY_BYTES: u64 = 16 << 20;
/// What a frame may take of the gateway's time, as a part of a request's: one that is no request, and one
/// that is one, or a thousand header fields.
const NO_REQUEST: f64 = 0.2;
const REQUEST: f64 = 4.0;
/// Error codes of RFC 9113, section 7.
const REFUSED_STREAM: &str = "7";
const CANCEL: &str = "8";
const ENHANCE_YOUR_CALM: &str = "11";

/// A gateway in front of a worker that hangs and one that answers.
struct Site {
    gateway: Gateway,
    flooded: FakeWorker,
    _other: FakeWorker,
    /// CPU seconds of a plain request.
    plain: f64,
}

/// What the script says.
#[derive(Debug, Deserialize)]
struct Report {
    frames: u64,
    connections: u64,
    closed: u64,
    /// Connections by the code of their GOAWAY.
    goaways: BTreeMap<String, u64>,
    /// Streams by the code of their reset.
    resets: BTreeMap<String, u64>,
}

impl Report {
    /// Connections that were told that they flood.
    fn calmed(&self) -> u64 {
        self.goaways.get(ENHANCE_YOUR_CALM).copied().unwrap_or_default()
    }

    fn resets(&self, code: &str) -> u64 {
        self.resets.get(code).copied().unwrap_or_default()
    }
}

impl Site {
    /// `None` where the script cannot run.
    async fn start(limits: &str) -> Option<Self> {
        tools::python()?;
        let (flooded, other) =
            (FakeWorker::with_models(&[FLOODED]).await, FakeWorker::with_models(&[OTHER]).await);
        let workers = format!("worker = [\"http://{}\", \"http://{}\"]", flooded.addr(), other.addr());
        let config = format!("{workers}\n[limits]\n{limits}\n");
        // To log each frame would cost many times what the frame does.
        let gateway = Gateway::builder().config(&config).log("info,access=warn").start().await;
        gateway.wait_ready(2).await;
        flooded.hang();
        let mut site = Self { gateway, flooded, _other: other, plain: 0.0 };
        site.plain = site.plain_request().await;
        Some(site)
    }

    async fn others_are_served(&self) {
        let answer = post(self.gateway.addr, CHAT, &chat_for(OTHER, "not flooded", false)).await;
        assert_eq!(answer.status(), 200);
    }

    async fn plain_request(&self) -> f64 {
        const PLAIN: u32 = 1_000;
        let before = Resources::of(&self.gateway.process);
        for _ in 0..PLAIN {
            self.others_are_served().await;
        }
        let spent = Resources::of(&self.gateway.process).cpu_since(&before).as_secs_f64();
        assert!(spent > 0.0);
        spent / f64::from(PLAIN)
    }

    /// Sends a flood while others are served. Whatever it is, it costs the gateway little memory and `most`
    /// time for a frame; the worker sees no more at once than may be open, and in the end nothing is left of
    /// it.
    async fn flood(&self, attack: &str, count: u64, most: f64) -> Report {
        Resources::forget_peak(&self.gateway.process);
        let before = Resources::of(&self.gateway.process);
        let (report, served) = self.send(attack, count).await;
        let after = Resources::of(&self.gateway.process);
        let grown = after.peak_bytes.saturating_sub(before.peak_bytes);
        let spent = after.cpu_since(&before).as_secs_f64() - f64::from(served) * self.plain;
        let requests_per_frame = spent / self.plain / report.frames as f64;
        eprintln!(
            "{attack}: {report:?}; {served} others served; {grown} bytes; a frame is {requests_per_frame:.4} requests; worker: \
             {} begun, {} at once",
            self.flooded.request_count(),
            self.flooded.most_active()
        );
        assert!(served > 0 && report.frames >= count.min(100));
        assert!(grown < MEMORY_BYTES, "{attack}: {grown} bytes");
        assert!(requests_per_frame < most, "{attack}: a frame is {requests_per_frame} requests");
        assert!(self.flooded.most_active() as u64 <= MAX_STREAMS, "{}", self.flooded.most_active());
        self.gateway.idle().await;
        eventually!(self.flooded.active() == 0);
        self.others_are_served().await;
        report
    }

    /// Runs the script; one other request for each line that it says. How many those were.
    async fn send(&self, attack: &str, count: u64) -> (Report, u32) {
        let mut command = tokio::process::Command::new(tools::python().expect("it was there"));
        command.arg(workspace_root().join("tests/python/h2_floods.py"));
        command.args([attack, &self.gateway.addr.to_string(), &count.to_string(), FLOODED]);
        let mut child = command.stdout(Stdio::piped()).kill_on_drop(true).spawn().expect("Python runs");
        let mut lines = BufReader::new(child.stdout.take().expect("piped")).lines();
        let (mut report, mut served) = (None, 0);
        while let Some(line) = patient("a word of the flood", lines.next_line()).await.expect("a line") {
            report = serde_json::from_str::<Report>(&line).ok();
            self.others_are_served().await;
            served += 1;
        }
        (report.unwrap_or_else(|| panic!("{attack} has not come to its end")), served)
    }
}

/// CVE-2023-44487.
#[tokio::test]
async fn streams_reset_at_once_reach_no_worker_and_end_their_connection() {
    let Some(site) = Site::start("").await else { return };
    let resets = 100_000;
    let report = site.flood("rapid_reset", resets, NO_REQUEST).await;
    assert!(report.calmed() > 0 && report.closed >= report.connections - 1, "{report:?}");
    let begun = site.flooded.request_count() as u64;
    assert!(begun < resets / 20, "the worker was asked {begun} times");
}

/// Each of them costs the client the time until it is known to have come; a tenant's limits count it as a
/// request.
#[tokio::test]
async fn streams_reset_once_they_are_served_are_aborted_at_the_worker() {
    let Some(site) = Site::start("").await else { return };
    let report = site.flood("paced_reset", 10_000, REQUEST).await;
    assert!(report.frames >= 30_000, "{report:?}");
    eventually!(site.flooded.aborted() == site.flooded.request_count());
}

/// CVE-2025-8671.
#[tokio::test]
async fn streams_that_the_gateway_is_made_to_reset_are_counted() {
    let Some(site) = Site::start("").await else { return };
    let report = site.flood("made_you_reset", 6_000, REQUEST).await;
    assert!(report.calmed() >= 2, "{report:?}");
    // Beyond the bound by no more than a batch.
    let resets: u64 = report.resets.values().sum();
    assert!(resets <= report.connections * (MAX_STREAMS + 100), "{report:?}");
}

#[tokio::test]
async fn streams_beyond_those_that_may_be_open_are_refused() {
    let Some(site) = Site::start("").await else { return };
    let report = site.flood("too_many_streams", MAX_STREAMS + 300, REQUEST).await;
    assert_eq!((report.resets(REFUSED_STREAM), report.connections), (300, 1), "{report:?}");
}

#[tokio::test]
async fn heads_that_never_end_or_unpack_to_much_end_their_connection() {
    let Some(site) = Site::start("").await else { return };
    let floods = [
        ("continuation", 50_000, NO_REQUEST),
        ("empty_continuation", 50_000, NO_REQUEST),
        ("header_bomb", 500, REQUEST),
    ];
    for (attack, count, most) in floods {
        let report = site.flood(attack, count, most).await;
        assert!(report.calmed() > 0 && report.connections > 1, "{attack}: {report:?}");
        assert_eq!(report.closed, report.connections, "{attack}: {report:?}");
    }
    assert_eq!(site.flooded.request_count(), 0);
}

#[tokio::test]
async fn frames_that_ask_for_nothing_end_their_connection() {
    let Some(site) = Site::start("").await else { return };
    for attack in ["settings", "ping", "window_update", "priority", "unknown"] {
        let report = site.flood(attack, 100_000, NO_REQUEST).await;
        // The last one may have less to send than may come.
        assert!(report.closed + 1 >= report.connections && report.closed > 0, "{attack}: {report:?}");
        assert_eq!(report.goaways.get("0"), Some(&report.closed), "{attack}: {report:?}");
    }
    // Nor do they where what they are told is not read.
    for attack in ["settings_unread", "ping_unread"] {
        site.flood(attack, 100_000, NO_REQUEST).await;
    }
}

#[tokio::test]
async fn bodies_of_nothing_end_their_connection() {
    let Some(site) = Site::start("").await else { return };
    for attack in ["empty_data", "tiny_data"] {
        let report = site.flood(attack, 50_000, NO_REQUEST).await;
        assert!(report.calmed() > 0, "{attack}: {report:?}");
    }
    assert_eq!(site.flooded.request_count(), 0);
}

#[tokio::test]
async fn a_window_that_never_opens_is_given_up() {
    let Some(site) = Site::start("client_stall_ms = 1000").await else { return };
    site.flooded.answer();
    let streams = 500;
    let report = site.flood("zero_window", streams, REQUEST).await;
    assert_eq!((report.resets(CANCEL), report.closed), (streams, 0), "{report:?}");
}
