//! Hazard: operators who look at the fleet, all the time and from several places, hold requests up: a lock
//! that the router waits for while they wait for its own.

use keyway_tests::openai::{CHAT, chat};
use keyway_tests::{Cluster, get, post};

/// Requests of each client.
const ASKED: usize = 400;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_looks_holds_nobody_up() {
    let cluster = Cluster::of_fakes(4, "prefix").await;
    let (addr, admin) = (cluster.gateway.addr, cluster.gateway.admin);
    let (stop, stopped) = tokio::sync::watch::channel(false);
    let looking: Vec<_> = ["/workers", "/workers", "/metrics"]
        .into_iter()
        .map(|path| {
            let stopped = stopped.clone();
            tokio::spawn(async move {
                let mut looks = 0;
                while !*stopped.borrow() {
                    assert_eq!(get(admin, path).await.status(), 200);
                    looks += 1;
                }
                looks
            })
        })
        .collect();
    let asking: Vec<_> = (0..4)
        .map(|client| {
            tokio::spawn(async move {
                for turn in 0..ASKED {
                    let response = post(addr, CHAT, &chat(&format!("client {client} asks {turn}"))).await;
                    assert_eq!(response.status(), 200, "{}", response.text());
                }
            })
        })
        .collect();
    for client in asking {
        client.await.unwrap();
    }
    stop.send_replace(true);
    for operator in looking {
        assert!(operator.await.unwrap() > 0);
    }
}
