//! The sockets that KV events are published with, as libzmq meets them: other kinds of peers, names,
//! heartbeats, subscriptions that come and go.

use std::time::Duration;

use bytes::Bytes;
use keyway_tests::bins::workspace_root;
use keyway_tests::eventually::patient;
use keyway_tests::tools;
use keyway_zmq::{PubLimits, PubSocket, Replies, RouterLimits, RouterSocket};
use tokio::net::TcpListener;

const STALL: Duration = Duration::from_secs(30);

#[tokio::test]
async fn libzmq_s_sockets_find_what_they_expect() {
    let Some(python) = tools::python() else { return };
    let events = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let limits = PubLimits { connections: 8, kept_messages: 1000, kept_bytes: 1 << 20, stall: STALL };
    let events = PubSocket::new(events, limits).expect("a socket");
    let replay = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let twice = |question: Vec<Bytes>| -> Replies { Box::new([question.clone(), question].into_iter()) };
    let limits = RouterLimits { connections: 8, stall: STALL };
    let replay = RouterSocket::new(replay, limits, twice).expect("a socket");

    let mut command = tokio::process::Command::new(python);
    command
        .arg(workspace_root().join("tests/python/zmq_sockets.py"))
        .args([format!("tcp://{}", events.local_addr()), format!("tcp://{}", replay.local_addr())])
        .kill_on_drop(true);
    let publishing = async {
        for number in 0_u64.. {
            for topic in ["a", "b", "c"] {
                events.send(&[topic.into(), number.to_string().into()]);
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    let output = tokio::select! {
        output = patient("the Python client", command.output()) => output.expect("Python runs"),
        () = publishing => unreachable!("it publishes for ever"),
    };
    let said = String::from_utf8_lossy(&[&output.stdout[..], &output.stderr[..]].concat()).into_owned();
    assert!(output.status.success(), "{said}");
}
