//! Hazard: a pod gets requests that it is not for, because its label is not known yet, is wrong, or may not
//! be read.

use keyway_tests::openai::{CHAT, chat};
use keyway_tests::{Gateway, KubeApi, eventually, post};
use serde_json::json;

use super::kubernetes::{Pod, gateway, pods, row, workers};

const LABEL: &str = "llm-d.ai/role";
const BY_LABEL: &str = "[[discovery.kubernetes]]\nservice = \"workers\"\nrole_label = \"llm-d.ai/role\"\n";

/// The pod's own object, with this value of the label; without the label if it is empty.
fn label(api: &KubeApi, pod: &Pod, value: &str) {
    let labels = if value.is_empty() { json!({ "app": "vllm" }) } else { json!({ LABEL: value }) };
    let meta = json!({ "name": format!("pod-{}", pod.uid), "namespace": "models", "uid": pod.uid, "labels": labels });
    api.apply(json!({ "apiVersion": "v1", "kind": "Pod", "metadata": meta }));
}

/// Role and state of a worker.
async fn shown(gateway: &Gateway, pod: &Pod) -> (String, String) {
    let text = async |field| row(gateway, pod, field).await.as_str().unwrap_or_default().to_owned();
    (text("role").await, text("state").await)
}

fn are(role: &str, state: &str) -> (String, String) {
    (role.to_owned(), state.to_owned())
}

#[tokio::test]
async fn one_table_has_pods_for_prefill_and_for_decode_and_none_of_unknown_role_gets_a_request() {
    let (api, pods) = (KubeApi::start().await, pods(4).await);
    for (pod, value) in pods.iter().zip(["prefill", "prefill-decode", "prefil", ""]) {
        label(&api, pod, value);
    }
    api.apply(workers(&pods));
    let gateway = gateway(&api, BY_LABEL).await;
    gateway.wait_ready(2).await;
    eventually!(shown(&gateway, &pods[0]).await == are("prefill", "ready"));
    eventually!(shown(&gateway, &pods[1]).await == are("both", "ready"));
    for held in &pods[2..] {
        assert_eq!(shown(&gateway, held).await, are("", ""), "it is no worker yet");
    }
    for i in 0..20 {
        assert_eq!(post(gateway.addr, CHAT, &chat(&format!("question {i}"))).await.status(), 200);
    }
    let asked: Vec<usize> = pods.iter().map(|pod| pod.worker.request_count()).collect();
    assert_eq!(asked, [0, 20, 0, 0]);
    let log = || gateway.process.log().join("\n");
    eventually!(log().contains("whose label says no role") && log().contains("2 pods in all"), "{}", log());

    // What is mended on a pod that runs counts at once.
    label(&api, &pods[2], "decode");
    eventually!(shown(&gateway, &pods[2]).await == are("decode", "ready"));
    label(&api, &pods[3], "decode");
    eventually!(shown(&gateway, &pods[3]).await == are("decode", "ready"));
    gateway.wait_ready(4).await;
    // A watch that breaks and an API server that is away change nothing.
    api.set_away(true);
    assert_eq!(post(gateway.addr, CHAT, &chat("still there?")).await.status(), 200);
    api.set_away(false);
    label(&api, &pods[3], "both");
    eventually!(shown(&gateway, &pods[3]).await == are("both", "ready"));
    assert_eq!(shown(&gateway, &pods[0]).await, are("prefill", "ready"));
}

#[tokio::test]
async fn who_may_not_watch_pods_hears_it_and_has_no_worker_of_unknown_role() {
    let (api, pods) = (KubeApi::start().await, pods(1).await);
    label(&api, &pods[0], "prefill");
    api.apply(workers(&pods));
    api.forbid(Some("pods"));
    let gateway = gateway(&api, BY_LABEL).await;
    let log = || gateway.process.log().join("\n");
    eventually!(log().contains("role_label") && log().contains("needs a Role"), "{}", log());
    assert_eq!(gateway.workers().await, json!([]));
    api.forbid(None);
    eventually!(shown(&gateway, &pods[0]).await == are("prefill", "ready"));
}
