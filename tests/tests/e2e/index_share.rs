//! Hazard: a tenant makes the index forget what it knows of the others' prompts, by many prompts of its own,
//! or by requests that the worker refuses, which cost nothing. Partner: what a worker accepts does push out
//! what its cache has no room for.

use keyway_tests::fake_worker::Call;
use keyway_tests::openai::{CHAT, FAKE_MODEL, answer, chat};
use keyway_tests::{Client, eventually};
use serde_json::json;

use crate::tenants::{Setup, setup, table};

/// Two tenants before one worker, whose answers say how much of a prompt was known.
async fn two_tenants(more: &str) -> Setup {
    let tenants = table("left", "left", "") + &table("right", "right", "");
    let setup = setup(1, &tenants, &format!("[routing]\nexpose = true\n{more}")).await;
    // As if all was cached: no answer tells the gateway that the cache is smaller than it believes.
    setup.workers[0].set_usage(1_100, 1_100);
    setup
}

/// So many blocks of text, and a little more, like no other number's.
fn prompt(number: usize, blocks: usize) -> Vec<u8> {
    let line = format!("line of sheet {number}, as it stands there. ");
    chat(&line.repeat(blocks * 64 / line.len() + 1))
}

/// Asks, and says how many tokens of the prompt were known.
async fn known(setup: &Setup, key: &str, body: &[u8]) -> u64 {
    let answer = setup.ask(Some(key), body).await;
    assert_eq!(answer.status(), 200);
    answer.header("x-keyway-matched-tokens").expect("exposed").parse().expect("a number")
}

/// Sends all of these at once, and lets the worker do `answer` to each when it has all of them.
async fn at_once(setup: &Setup, key: &str, bodies: &[Vec<u8>], answer: impl AsyncFn(Call)) {
    let bearer = format!("Bearer {key}");
    let mut clients = Vec::new();
    for body in bodies {
        let mut client = Client::connect(setup.gateway.addr).await;
        client.request("POST", CHAT, &[("authorization", &bearer)], body).await;
        clients.push(client);
    }
    let worker = &setup.workers[0];
    let mut calls = Vec::new();
    for _ in bodies {
        calls.push(worker.call().await);
    }
    for call in calls {
        answer(call).await;
    }
    for mut client in clients {
        client.response().await;
    }
    setup.gateway.idle().await;
}

#[tokio::test]
async fn many_prompts_of_one_tenant_leave_what_is_known_of_another_s() {
    // Room for some 800 blocks: the other tenant sends five times as many.
    let setup = two_tenants("index_bytes = 20_000\n").await;
    let own = prompt(0, 64);
    assert!(known(&setup, "left", &own).await < 32);
    for number in 1..64 {
        known(&setup, "right", &prompt(number, 64)).await;
    }
    let blocks = setup.gateway.metrics().await.sum("keyway_index_blocks", &[]);
    assert!((600.0..=1_000.0).contains(&blocks), "the index was full: {blocks}");
    let matched = known(&setup, "left", &own).await;
    assert!(matched > 1_000, "{matched}");
    let last = known(&setup, "right", &prompt(63, 64)).await;
    assert!(last > 1_000, "it learns all the same: {last}");
    let first = known(&setup, "right", &prompt(1, 64)).await;
    assert!(first < 32, "and its own make room: {first}");
}

#[tokio::test]
async fn requests_that_a_worker_refuses_push_nothing_out_of_its_cache() {
    let setup = two_tenants("").await;
    let worker = &setup.workers[0];
    worker.set_metrics("vllm:cache_config_info{block_size=\"16\",num_gpu_blocks=\"100\"} 1\n");
    eventually!(setup.gateway.workers().await[0]["cache_capacity_tokens"] == 1_600);
    let own = prompt(0, 64);
    known(&setup, "left", &own).await;
    worker.manual();
    // Some of them alike, so that one is taken back while another one needs the same.
    let bodies: Vec<Vec<u8>> = (0..12).map(|number| prompt(1 + number / 3, 160)).collect();
    for status in [400, 422, 413] {
        let refuse = async |call: Call| call.respond_json(status, &json!({ "error": {} })).await;
        at_once(&setup, "right", &bodies, refuse).await;
        eventually!(setup.gateway.ready_workers().await == 1);
    }
    worker.answer();
    let matched = known(&setup, "left", &own).await;
    assert!(matched > 1_000, "{matched}");
    // What it accepts does.
    worker.manual();
    let serve = async |call: Call| call.respond_json(200, &answer(FAKE_MODEL, 2_560, 0)).await;
    at_once(&setup, "right", &bodies[..1], serve).await;
    worker.answer();
    let matched = known(&setup, "left", &own).await;
    assert!(matched < 200, "{matched}");
}
