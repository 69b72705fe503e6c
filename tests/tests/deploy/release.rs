//! Hazard: what people install without a toolchain does not install, is not what was built, asks for less
//! than the programs need, or is another one each time that it is made. With small programs in place of the
//! real ones; `tests/external/release` installs and runs those.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use keyway_tests::bins::workspace_root;
use keyway_tests::tools;
use tempfile::TempDir;

use crate::chart;
use crate::manifests::said;

const VERSION: &str = env!("CARGO_PKG_VERSION");
const PROGRAMS: [&str; 3] = ["keyway", "keyway-worker", "keyway-loadtest"];

/// Builds a program for each of the project's, of this version; `None` means: skip the test.
fn stand_ins(version: &str) -> Option<TempDir> {
    let compiler = tools::tool("cc")?;
    let folder = TempDir::new().unwrap();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/stand_in.c");
    let first = folder.path().join(PROGRAMS[0]);
    let version = format!("-DVERSION=\"{version}\"");
    let output =
        Command::new(compiler).arg(version).arg("-o").arg(&first).arg(source).output().expect("cc runs");
    assert!(output.status.success(), "{}", said(&output));
    for program in &PROGRAMS[1..] {
        fs::copy(&first, folder.path().join(program)).unwrap();
    }
    Some(folder)
}

fn release(programs: &Path, out: &Path, more: &[&str]) -> Output {
    let mut command = Command::new(workspace_root().join("deploy/release.sh"));
    command.arg("--bin-dir").arg(programs).arg("--out").arg(out).args(more);
    command.env_remove("SOURCE_DATE_EPOCH").output().expect("bash runs")
}

/// What is released of small programs, as this version; `None` means: skip the test.
fn released(version: &str) -> Option<TempDir> {
    // All that the script needs beside what every test has.
    for tool in ["dpkg-deb", "readelf", "python3"] {
        tools::tool(tool)?;
    }
    let programs = stand_ins(VERSION)?;
    let out = TempDir::new().unwrap();
    let output = release(programs.path(), out.path(), &["--version", version]);
    assert!(output.status.success(), "{}", said(&output));
    Some(out)
}

fn files(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    entries
        .map(|path| (path.file_name().unwrap().to_string_lossy().into_owned(), fs::read(&path).unwrap()))
        .collect()
}

/// The one file of a folder whose name ends so.
fn ending(folder: &Path, with: &str) -> PathBuf {
    let found: Vec<String> = files(folder).into_keys().filter(|name| name.ends_with(with)).collect();
    assert_eq!(found.len(), 1, "{with}: {found:?}");
    folder.join(&found[0])
}

fn look_into(python: &Path, folder: &Path, version: &str) -> Output {
    let script = workspace_root().join("tests/python/release.py");
    Command::new(python).arg(script).arg(folder).arg(version).output().expect("Python runs")
}

/// Rewrites a zip with a line added to its program `keyway-worker`; its RECORD stays.
const SPOIL: &str = "import sys, zipfile
old = zipfile.ZipFile(sys.argv[1])
files = [(info, old.read(info)) for info in old.infolist()]
with zipfile.ZipFile(sys.argv[1], 'w') as new:
    for info, data in files:
        new.writestr(info, data + b'!' * info.filename.endswith('/keyway-worker'))";

/// pip takes the wheel and nothing else, and the programs then run.
fn pip_installs(python: &Path, out: &Path) {
    let place = TempDir::new().unwrap();
    let mut pip = Command::new(python);
    pip.args([
        "-m",
        "pip",
        "install",
        "--no-index",
        "--no-cache-dir",
        "--disable-pip-version-check",
        "--prefix",
    ]);
    let output = pip.arg(place.path()).arg(ending(out, ".whl")).output().expect("pip runs");
    assert!(output.status.success(), "{}", said(&output));
    for program in PROGRAMS {
        let output = Command::new(place.path().join("bin").join(program)).args(["config", "check"]).output();
        assert_eq!(said(&output.expect("the program runs")), format!("{program}: config check\n"));
    }
}

/// Helm takes the chart's archive.
async fn helm_installs(python: &Path, out: &Path) {
    let none = tempfile::NamedTempFile::new().unwrap();
    let packed = out.join(format!("keyway-{VERSION}.tgz"));
    let objects = chart::installed_from(python, &packed, none.path()).await.unwrap();
    let kinds: Vec<&str> = objects.iter().filter_map(|object| object["kind"].as_str()).collect();
    assert!(kinds.contains(&"Deployment") && kinds.contains(&"ConfigMap"), "{kinds:?}");
}

#[tokio::test]
async fn what_is_released_is_whole_can_be_installed_and_is_the_same_each_time() {
    let Some(python) = tools::python() else { return };
    let (Some(first), Some(second)) = (released(VERSION), released(VERSION)) else { return };
    let (once, twice) = (files(first.path()), files(second.path()));
    assert_eq!(once.len(), 9, "{:?}", once.keys());
    let other = once.iter().filter(|(name, bytes)| twice.get(*name) != Some(*bytes));
    let other: Vec<&String> = other.map(|(name, _)| name).collect();
    assert!(other.is_empty() && once.len() == twice.len(), "{other:?}");
    let output = look_into(&python, first.path(), VERSION);
    assert!(output.status.success(), "{}", said(&output));
    pip_installs(&python, first.path());
    helm_installs(&python, first.path()).await;

    // The look sees a program that is not what RECORD and SHA256SUMS say.
    let wheel = ending(second.path(), ".whl");
    let spoilt = Command::new(&python).arg("-c").arg(SPOIL).arg(&wheel).status().expect("Python runs");
    assert!(spoilt.success());
    let output = look_into(&python, second.path(), VERSION);
    let told = said(&output);
    for word in ["keyway-worker is another", "SHA256SUMS: keyway_gateway", "another program than the wheel's"]
    {
        assert!(!output.status.success() && told.contains(word), "{word}: {told}");
    }
}

#[test]
fn a_release_candidate_is_named_as_each_kind_of_package_wants_it() {
    let candidate = format!("{VERSION}-rc.1");
    let Some(out) = released(&candidate) else { return };
    let names: Vec<String> = files(out.path()).into_keys().collect();
    for name in [
        format!("keyway_gateway-{VERSION}rc1-py3-none-manylinux_"),
        format!("keyway_{VERSION}~rc.1_"),
        format!("keyway-{candidate}.tgz"),
    ] {
        assert!(names.iter().any(|found| found.starts_with(&name)), "{name}: {names:?}");
    }
}

#[test]
fn what_cannot_be_released_is_told_with_its_reason() {
    let (Some(_), Some(programs)) = (tools::tool("dpkg-deb"), stand_ins(VERSION)) else { return };
    let out = TempDir::new().unwrap();
    let refuses = |more: &[&str], word: &str| {
        let output = release(programs.path(), out.path(), more);
        let told = said(&output);
        assert!(!output.status.success() && told.contains(word), "{word}: {told}");
        assert!(files(out.path()).is_empty(), "{word}: {:?}", files(out.path()).keys());
    };
    refuses(&["--version", "9.9.9"], &format!("the programs are {VERSION}, which 9.9.9 is no form of"));
    refuses(&["--version", &format!("{VERSION}-next")], "is no version such as");
    refuses(&["--bin"], "what is --bin?");
    refuses(&["--version"], "--version wants a value");
    let other = stand_ins("0.0.1").unwrap();
    fs::copy(other.path().join("keyway"), programs.path().join("keyway-loadtest")).unwrap();
    refuses(&[], "keyway-loadtest is 0.0.1, keyway is");
    fs::write(programs.path().join("keyway-worker"), "#!/bin/sh\n").unwrap();
    refuses(&[], "cannot be stripped");
    fs::remove_file(programs.path().join("keyway")).unwrap();
    refuses(&[], "no program");
}
