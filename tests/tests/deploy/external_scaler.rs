//! Hazard: KEDA is told something else than Prometheus, or is told late that somebody waits. A real gRPC
//! client speaks KEDA's protocol to the gateway.

use std::fs;
use std::process::Command;

use keyway_tests::bins::workspace_root;
use keyway_tests::openai::{CHAT, FAKE_MODEL, chat};
use keyway_tests::process::Process;
use keyway_tests::{FakeWorker, Gateway, post, tools};

#[tokio::test]
async fn a_real_client_reads_the_metric_s_value_and_is_told_when_somebody_waits() {
    let Some(python) = tools::python() else { return };
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("workers.toml");
    fs::write(&path, "").unwrap();
    // Scale-in is at once, so that the fleet goes back to nothing within the test.
    let config = format!(
        "[discovery]\nfile = {path:?}\ninterval_seconds = 0.05\n\
         [scale]\nmin = 0\nwait_seconds = 60.0\nscale_in_seconds = 0.1\nwindow_seconds = 0.5\n\
         external_listen = \"127.0.0.1:0\"\n\
         [[scale.model]]\nname = \"{FAKE_MODEL}\"\n[[scale.model]]\nname = \"other\"\nmin = 3\n\
         [[scale.model]]\nname = \"split\"\nrole = \"prefill\"\nmin = 2\n\
         [[scale.model]]\nname = \"split\"\nrole = \"decode\"\nmin = 4\n"
    );
    let gateway = Gateway::builder().config(&config).start().await;
    let address = gateway.process.announced("external scaler on ").await;
    let desired = async |model| gateway.metrics().await.sum("keyway_desired_workers", &[("model", model)]);

    let mut keda = Command::new(python);
    keda.arg(workspace_root().join("tests/python/keda_client.py"))
        .args([&address, FAKE_MODEL, "other", "split"]);
    let keda = Process::spawn("KEDA's client", &mut keda);
    keda.announced("follows").await;
    assert_eq!((desired(FAKE_MODEL).await, desired("other").await), (0.0, 3.0));

    let addr = gateway.addr;
    let waits = tokio::spawn(async move { post(addr, CHAT, &chat("anybody?")).await });
    assert_eq!(keda.announced("pushed True ").await, "1");
    assert_eq!(desired(FAKE_MODEL).await, 1.0);
    let worker = FakeWorker::start().await;
    fs::write(&path, format!("worker = [\"http://{}\"]", worker.addr())).unwrap();
    assert_eq!(waits.await.unwrap().status(), 200);
    // With nothing left to do the fleet may go, and KEDA is told that too.
    assert_eq!(keda.announced("pushed False ").await, "0");
    let calls = |outcome| [("method", "stream_is_active"), ("outcome", outcome)];
    let metrics = gateway.metrics().await;
    assert_eq!(metrics.sum("keyway_external_scaler_calls_total", &calls("ok")), 1.0);
    assert_eq!(metrics.sum("keyway_external_scaler_calls_total", &calls("failed")), 1.0);
}
