//! Hazard: a request reaches a worker that does not serve its model. The gateway's list is the fleet's, and each
//! request goes where its model is.

use keyway_tests::openai::{CHAT, chat_for};
use keyway_tests::{Cluster, eventually, get, post};

async fn two_models() -> Cluster {
    Cluster::builder().fake_with(&["alpha", "common"]).fake_with(&["beta", "common"]).start().await
}

#[tokio::test]
async fn the_list_is_the_union_of_the_workers_lists() {
    let cluster = two_models().await;
    let list = get(cluster.addr(), "/v1/models").await.json();
    assert_eq!(list["object"], "list");
    let mut ids: Vec<&str> =
        list["data"].as_array().unwrap().iter().filter_map(|m| m["id"].as_str()).collect();
    ids.sort_unstable();
    assert_eq!(ids, ["alpha", "beta", "common"]);
    assert_eq!(list["data"][0]["owned_by"], "tests", "entries are as the worker gives them");
}

#[tokio::test]
async fn each_model_goes_to_a_worker_that_serves_it() {
    let cluster = two_models().await;
    for i in 0..6 {
        for (model, worker) in [("alpha", 0), ("beta", 1)] {
            let body = chat_for(model, &format!("prompt {i}"), false);
            let response = post(cluster.addr(), CHAT, &body).await;
            assert_eq!(cluster.served_by(&response), worker, "{model}");
        }
        assert_eq!(
            post(cluster.addr(), CHAT, &chat_for("common", &format!("{i}"), false)).await.status(),
            200
        );
    }
}

#[tokio::test]
async fn one_models_description_comes_from_a_worker_that_has_it() {
    let cluster = two_models().await;
    for (model, worker) in [("alpha", 0), ("beta", 1), ("alpha", 0), ("beta", 1)] {
        let response = get(cluster.addr(), &format!("/v1/models/{model}")).await;
        assert_eq!(cluster.served_by(&response), worker, "{model}");
    }
    assert_eq!(
        get(cluster.addr(), "/v1/models/org%2Fgamma").await.json()["error"]["code"],
        "model_not_found"
    );
}

#[tokio::test]
async fn an_unknown_model_is_refused_by_name_and_reaches_no_worker() {
    let cluster = two_models().await;
    let response = post(cluster.addr(), CHAT, &chat_for("gamma", "hi", true)).await;
    assert_eq!(response.status(), 404);
    let error = &response.json()["error"];
    assert_eq!(error["code"], "model_not_found");
    assert_eq!(error["param"], "model");
    assert!(error["message"].as_str().is_some_and(|m| m.contains("gamma")), "{error}");
    assert_eq!(cluster.fakes.iter().map(keyway_tests::FakeWorker::request_count).sum::<usize>(), 0);
}

#[tokio::test]
async fn a_model_whose_worker_is_gone_is_not_retried_on_workers_without_it() {
    let cluster = two_models().await;
    cluster.fakes[0].stop().await;
    let body = chat_for("alpha", "hi", false);
    eventually!(post(cluster.addr(), CHAT, &body).await.status() == 503, "alpha is unavailable, not unknown");
    assert_eq!(cluster.fakes[1].request_count(), 0);
    assert_eq!(post(cluster.addr(), CHAT, &chat_for("beta", "hi", false)).await.status(), 200);
}
