//! Hazard: a chart that Helm cannot install, or that installs something else than the kustomize overlays that
//! were tested: another right, another port, a probe less. Helm's own library installs it into the fake API
//! server.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use keyway_tests::bins::{bin, workspace_root};
use keyway_tests::{KubeApi, tools};
use serde_json::Value;

use crate::manifests::{built, said};

fn helm() -> PathBuf {
    workspace_root().join("deploy/helm")
}

fn script(python: &Path, name: &str, args: &[&Path]) -> Output {
    let mut command = Command::new(python);
    command.arg(workspace_root().join("tests/python").join(name)).args(args).output().expect("Python runs")
}

/// Installs the chart with a file of values; what the server received.
async fn installed(python: &Path, values: &Path) -> Result<Vec<Value>, String> {
    installed_from(python, &helm().join("keyway"), values).await
}

/// Installs a chart, a folder or an archive, with a file of values; what the server received.
pub(crate) async fn installed_from(python: &Path, chart: &Path, values: &Path) -> Result<Vec<Value>, String> {
    let api = KubeApi::start().await;
    let [python, chart, values] = [python, chart, values].map(Path::to_owned);
    let kubeconfig = api.kubeconfig().to_owned();
    let installing = tokio::task::spawn_blocking(move || {
        script(&python, "chart.py", &[Path::new("install"), &chart, &kubeconfig, &values])
    });
    let output = installing.await.unwrap();
    if !output.status.success() {
        return Err(said(&output));
    }
    Ok(api.objects())
}

fn as_yaml(objects: &[Value]) -> tempfile::NamedTempFile {
    let file = tempfile::NamedTempFile::new().unwrap();
    let text: Vec<String> = objects.iter().map(Value::to_string).collect();
    fs::write(file.path(), text.join("\n---\n")).unwrap();
    file
}

/// The gateway's configuration among the objects must be one that the gateway takes.
fn config_is_valid(objects: &[Value]) {
    let config = objects.iter().find(|object| object["kind"] == "ConfigMap").expect("a ConfigMap");
    let file = keyway_tests::cluster::config_file(config["data"]["keyway.toml"].as_str().unwrap());
    let output = Command::new(bin("keyway")).args(["config", "check", "--config"]).arg(file.path()).output();
    let output = output.unwrap();
    assert!(output.status.success(), "{}", said(&output));
}

#[test]
fn the_chart_is_linted_and_packaged() {
    let Some(python) = tools::python() else { return };
    let output = script(&python, "chart.py", &[Path::new("lint"), &helm().join("keyway")]);
    assert!(output.status.success() && said(&output).contains("keyway-0.1.0.tgz"), "{}", said(&output));
}

#[tokio::test]
async fn what_it_installs_is_what_the_overlays_are() {
    let (Some(kubectl), Some(python)) = (tools::tool("kubectl"), tools::python()) else { return };
    for (overlay, files) in [
        ("demo", &["demo"][..]),
        ("gateway-api", &["demo", "gateway-api"]),
        ("vllm", &["vllm"]),
        ("prefill-decode", &["prefill-decode"]),
        ("keyway-worker", &["keyway-worker"]),
    ] {
        let values = tempfile::NamedTempFile::new().unwrap();
        let read =
            |name: &&str| fs::read_to_string(helm().join("values").join(format!("{name}.yaml"))).unwrap();
        fs::write(values.path(), files.iter().map(read).collect::<String>()).unwrap();
        let objects =
            installed(&python, values.path()).await.unwrap_or_else(|error| panic!("{overlay}: {error}"));
        config_is_valid(&objects);
        let received = as_yaml(&objects);
        let output = script(&python, "manifests.py", &[received.path()]);
        assert!(output.status.success(), "{overlay}:\n{}", said(&output));
        let wanted = tempfile::NamedTempFile::new().unwrap();
        fs::write(wanted.path(), built(&kubectl, overlay)).unwrap();
        let compare =
            |received: &Path| script(&python, "chart.py", &[Path::new("same"), received, wanted.path()]);
        let output = compare(received.path());
        assert!(output.status.success(), "{overlay}:\n{}", said(&output));
        // The comparison sees what is different.
        for (path, value) in [
            ("/spec/replicas", Value::from(7)),
            ("/spec/template/spec/containers/0/livenessProbe", Value::Null),
        ] {
            let mut other = objects.clone();
            let gateway =
                other.iter_mut().find(|o| o["kind"] == "Deployment" && o["metadata"]["name"] == "keyway");
            *gateway.unwrap().pointer_mut(path).expect(path) = value;
            assert!(!compare(as_yaml(&other).path()).status.success(), "{path}");
        }
    }
}

#[tokio::test]
async fn by_default_it_is_the_gateway_alone_with_the_rights_it_needs() {
    let Some(python) = tools::python() else { return };
    let none = tempfile::NamedTempFile::new().unwrap();
    let objects = installed(&python, none.path()).await.unwrap();
    config_is_valid(&objects);
    let received = as_yaml(&objects);
    let output = script(&python, "manifests.py", &[received.path()]);
    assert!(output.status.success(), "{}", said(&output));
    let roles: Vec<&Value> = objects.iter().filter(|object| object["kind"] == "Role").collect();
    let least = serde_json::json!([{ "apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"],
        "verbs": ["list", "watch"] }]);
    assert_eq!((roles.len(), &roles[0]["rules"]), (1, &least));
    assert!(objects.iter().all(|object| object["metadata"]["namespace"] == "models"));
}

#[tokio::test]
async fn the_right_to_watch_pods_is_given_where_it_is_asked_for() {
    let Some(python) = tools::python() else { return };
    let file = tempfile::NamedTempFile::new().unwrap();
    fs::write(file.path(), "rbac: { podRoles: true }").unwrap();
    let objects = installed(&python, file.path()).await.unwrap();
    let received = as_yaml(&objects);
    let output = script(&python, "manifests.py", &[received.path()]);
    assert!(output.status.success(), "{}", said(&output));
    let role = objects.iter().find(|o| o["kind"] == "Role" && o["metadata"]["name"] == "keyway-pod-roles");
    let watch = serde_json::json!([{ "apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"] }]);
    assert_eq!(role.expect("a role of its own")["rules"], watch);
}

#[tokio::test]
async fn values_that_make_no_sense_are_refused_with_their_key() {
    let Some(python) = tools::python() else { return };
    for (values, word) in [
        ("replica: 3", "replica"),
        ("replicas: 0", "replicas"),
        ("workers: { enabled: true }", "workers.image is needed"),
        ("autoscaling: { kind: vpa }", "kind"),
        ("workers: { roles: [{ role: encode }] }", "role"),
        ("autoscaling: { kind: keda }", "autoscaling.model is needed"),
        ("httpRoute: { enabled: true }", "httpRoute.parentRefs is needed"),
        ("httpRoute: { parentRefs: [{ names: public }] }", "names"),
    ] {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), values).unwrap();
        let error = installed(&python, file.path()).await.unwrap_err();
        assert!(error.contains(word), "{values}: {error}");
    }
}
