//! Hazard: a manifest that Kubernetes refuses, or accepts and that does nothing: an unknown field, a selector
//! that selects nobody, a flag or a key that no binary knows.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use keyway_tests::bins::{bin, workspace_root};
use keyway_tests::tools;

const OVERLAYS: [&str; 6] =
    ["demo", "gateway-api", "scale-to-zero", "vllm", "prefill-decode", "keyway-worker"];

fn kubernetes() -> PathBuf {
    workspace_root().join("deploy/kubernetes")
}

pub(crate) fn said(output: &Output) -> String {
    String::from_utf8_lossy(&[&output.stdout[..], &output.stderr[..]].concat()).into_owned()
}

/// An overlay as `kubectl kustomize` builds it.
pub(crate) fn built(kubectl: &Path, overlay: &str) -> String {
    let build = |root: &Path| {
        let mut command = Command::new(kubectl);
        command.arg("kustomize").arg(root.join("overlays").join(overlay)).output().expect("kubectl runs")
    };
    let mut output = build(&kubernetes());
    if said(&output).contains("must be a file") {
        // Before 2.1 kustomize wanted folders under `bases`; Debian's kubectl has such a one.
        let copy = tempfile::tempdir().unwrap();
        for_old_kustomize(&kubernetes(), copy.path());
        output = build(copy.path());
    }
    assert!(output.status.success(), "{overlay}: {}", said(&output));
    String::from_utf8(output.stdout).unwrap()
}

/// Copies a tree; in its kustomizations folders go from `resources` to `bases`.
fn for_old_kustomize(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        let target = to.join(path.file_name().unwrap());
        if path.is_dir() {
            for_old_kustomize(&path, &target);
        } else {
            let text = fs::read_to_string(&path).unwrap();
            let (folders, rest): (Vec<&str>, Vec<&str>) =
                text.lines().partition(|line| line.trim_start().starts_with("- ../"));
            let bases =
                if folders.is_empty() { String::new() } else { format!("bases:\n{}\n", folders.join("\n")) };
            fs::write(target, format!("{}\n{bases}", rest.join("\n"))).unwrap();
        }
    }
}

fn check(python: &Path, yaml: &str) -> Output {
    let file = tempfile::NamedTempFile::new().unwrap();
    fs::write(file.path(), yaml).unwrap();
    let script = workspace_root().join("tests/python/manifests.py");
    Command::new(python).arg(script).arg(file.path()).output().expect("Python runs")
}

#[test]
fn every_overlay_is_what_kubernetes_knows_and_fits_together() {
    let (Some(kubectl), Some(python)) = (tools::tool("kubectl"), tools::python()) else { return };
    for overlay in OVERLAYS {
        let output = check(&python, &built(&kubectl, overlay));
        assert!(output.status.success(), "{overlay}:\n{}", said(&output));
    }
}

/// Each of these mistakes in an overlay (what stands there, and what instead) must be found, and named by
/// this word.
fn sees(overlay: &str, mistakes: &[(&str, &str, &str)]) {
    let (Some(kubectl), Some(python)) = (tools::tool("kubectl"), tools::python()) else { return };
    let good = built(&kubectl, overlay);
    for (what, instead, word) in mistakes {
        assert!(good.contains(what), "{what}");
        let output = check(&python, &good.replacen(what, instead, 1));
        assert!(!output.status.success() && said(&output).contains(word), "{instead}: {}", said(&output));
    }
}

#[test]
fn the_check_sees_what_is_wrong() {
    sees(
        "vllm",
        &[
            ("minAvailable: 1", "minAvailible: 1", "minAvailible"),
            ("kind: PodDisruptionBudget", "kind: PodDisruptionBudge", "PodDisruptionBudge"),
            ("serverAddress:", "serverAdress:", "serverAddress"),
            ("pollingInterval:", "pollingIntervall:", "pollingIntervall"),
            ("stabilizationWindowSeconds:", "stabilisationWindowSeconds:", "stabilisationWindowSeconds"),
            ("podMetricsEndpoints:", "podMetricEndpoints:", "podMetricEndpoints"),
            ("interval: 5s", "intervall: 5s", "spec.endpoints.0.intervall"),
            ("targetPort: http", "targetPort: https", "no pod has port https"),
            ("allowPrivilegeEscalation: false", "allowPrivilegeEscalation: true", "privileges"),
            ("replicas: 2", "replicas: two", "two"),
            ("kind: Role\n  name: keyway\n", "kind: Role\n  name: keyways\n", "no Role keyways"),
        ],
    );
}

#[test]
fn the_check_sees_a_role_s_workers_that_are_not_there() {
    sees(
        "prefill-decode",
        &[
            (
                "scaleTargetRef:\n    name: workers-decode",
                "scaleTargetRef:\n    name: workers-decoder",
                "no Deployment workers-decoder",
            ),
            (
                "kind: Role\n  name: keyway-pod-roles\n",
                "kind: Role\n  name: keyway-pods\n",
                "no Role keyway-pods",
            ),
        ],
    );
}

#[test]
fn the_check_sees_a_scaler_that_is_not_there() {
    sees(
        "scale-to-zero",
        &[
            ("scalerAddress: keyway-scaler.", "scalerAddress: keyway-scalers.", "no Service keyway-scalers."),
            ("svc:9091", "svc:9092", "no port 9092"),
            ("model: mock", "models: mock", "metadata.model"),
            ("type: external-push", "type: external-pull", "knows no trigger of type external-pull"),
        ],
    );
}

#[test]
fn the_check_sees_a_route_that_leads_nowhere() {
    sees(
        "gateway-api",
        &[
            ("backendRequest: 0s", "backendRequests: 0s", "spec.rules.0.timeouts.backendRequests"),
            ("parentRefs:", "parentReferences:", "spec.parentReferences"),
            (
                "    - name: keyway\n      port: 80",
                "    - name: keyway\n      port: 81",
                "keyway has no port 81",
            ),
        ],
    );
}

#[test]
fn every_configuration_is_valid_and_every_flag_is_known() {
    let configured = || OVERLAYS.into_iter().filter(|overlay| *overlay != "gateway-api"); // the demo's
    for overlay in configured() {
        let folder = kubernetes().join("overlays").join(overlay);
        let mut command = Command::new(bin("keyway"));
        let output =
            command.args(["config", "check", "--config"]).arg(folder.join("keyway.toml")).output().unwrap();
        assert!(output.status.success(), "{overlay}: {}", said(&output));
        let Ok(text) = fs::read_to_string(folder.join("workers.yaml")) else { continue };
        let (name, subcommand) = match overlay {
            "demo" => ("keyway-loadtest", Some("mock")),
            "keyway-worker" => ("keyway-worker", None),
            _ => continue,
        };
        let help = Command::new(bin(name)).args(subcommand).arg("--help").output().unwrap();
        let help = said(&help);
        let flags =
            text.split([' ', ',', '[', ']', '\n']).filter(|word| word.starts_with("--") && *word != "---");
        let flags: Vec<&str> = flags.collect();
        assert!(flags.len() > 3, "{flags:?}");
        for flag in flags {
            assert!(help.contains(flag), "{name} has no {flag}");
        }
    }
    let gateway = fs::read_to_string(kubernetes().join("base/gateway.yaml")).unwrap();
    assert!(gateway.contains("\"--config\", \"/etc/keyway/keyway.toml\""));
    // The grace period is longer than the pause and the drain together.
    for overlay in configured() {
        let config =
            fs::read_to_string(kubernetes().join("overlays").join(overlay).join("keyway.toml")).unwrap();
        let drain = seconds(&config, "drain_seconds");
        assert!(
            drain + seconds(&gateway, "sleep: { seconds")
                < seconds(&gateway, "terminationGracePeriodSeconds")
        );
    }
}

/// The seconds that stand behind the first `key` of a text.
fn seconds(text: &str, key: &str) -> u64 {
    let rest = text.split(key).nth(1).unwrap_or_else(|| panic!("there is no {key}"));
    let rest = rest.trim_start_matches([':', ' ', '=']);
    rest.split(|c: char| !c.is_ascii_digit()).next().unwrap().parse().unwrap()
}

/// What is wrong with how long a vLLM pod may take to end; its streams go on for `--shutdown-timeout` after
/// the pause.
fn ends_too_early(text: &str, pause: &str) -> Option<String> {
    if !text.contains("- --shutdown-timeout=") {
        return Some("without --shutdown-timeout vLLM ends its streams at once".to_owned());
    }
    let (pause, streams) = (seconds(text, pause), seconds(text, "- --shutdown-timeout"));
    let grace = seconds(text, "terminationGracePeriodSeconds:");
    (streams == 0 || pause + streams >= grace).then(|| format!("{pause} + {streams} s of {grace}"))
}

#[test]
fn a_vllm_pod_that_is_to_go_may_end_its_streams() {
    for (file, pause) in [
        ("kubernetes/overlays/vllm/workers.yaml", "sleep: { seconds:"),
        ("kubernetes/overlays/prefill-decode/workers.yaml", "sleep: { seconds:"),
        ("helm/values/vllm.yaml", "preStopSeconds:"),
        ("helm/values/prefill-decode.yaml", "preStopSeconds:"),
    ] {
        let text = fs::read_to_string(workspace_root().join("deploy").join(file)).unwrap();
        assert_eq!(ends_too_early(&text, pause), None, "{file}");
        for (what, instead) in [
            ("- --shutdown-timeout=150\n", ""),
            ("--shutdown-timeout=150", "--shutdown-timeout=170"),
            ("--shutdown-timeout=150", "--shutdown-timeout=0"),
            ("terminationGracePeriodSeconds: 180", "terminationGracePeriodSeconds: 160"),
        ] {
            assert!(text.contains(what), "{file}: {what}");
            assert!(ends_too_early(&text.replace(what, instead), pause).is_some(), "{file}: {instead}");
        }
    }
}

#[test]
fn the_units_are_what_systemd_knows() {
    let Some(systemd_analyze) = tools::tool("systemd-analyze") else { return };
    let root = tempfile::tempdir().unwrap();
    for unit in ["keyway.service", "keyway.socket", "keyway-worker.service"] {
        let text = fs::read_to_string(workspace_root().join("deploy/systemd").join(unit)).unwrap();
        // It wants the program to be there.
        let folder = bin("keyway").parent().unwrap().display().to_string();
        let path = root.path().join(unit);
        fs::write(&path, text.replace("/usr/local/bin", &folder)).unwrap();
        let output = Command::new(&systemd_analyze).args(["verify", "--man=no"]).arg(&path).output().unwrap();
        let faults: Vec<String> =
            said(&output).lines().filter(|line| line.contains(unit)).map(str::to_owned).collect();
        assert!(output.status.success() && faults.is_empty(), "{unit}: {faults:?}");
    }
}
