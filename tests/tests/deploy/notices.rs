//! Hazard: a program is shipped without the licences of what it is built from, or with those of what it is
//! not.

use std::process::Command;

use keyway_tests::bins::workspace_root;
use keyway_tests::tools;

use crate::manifests::said;

/// The notices of one program.
fn notices(program: &str) -> Option<String> {
    let python = tools::python()?;
    let script = workspace_root().join("deploy/notices.py");
    let output = Command::new(python).arg(script).args(["--program", program]).output().expect("Python runs");
    assert!(output.status.success(), "{}", said(&output));
    Some(String::from_utf8(output.stdout).expect("UTF-8"))
}

#[test]
fn a_programs_notices_are_of_what_it_is_built_from() {
    let (Some(gateway), Some(loadtest)) = (notices("keyway"), notices("keyway-loadtest")) else { return };
    let lists = |notices: &str, package: &str| {
        let mut list = notices.lines().take_while(|line| !line.starts_with("===="));
        list.any(|line| line.starts_with(&format!("{package} ")) && line.contains("https://"))
    };
    for package in ["hyper", "tokio", "kube", "tokenizers"] {
        assert!(lists(&gateway, package), "{package}");
    }
    // Of tests alone, of Windows, and of another program.
    for package in ["proptest", "windows-sys", "turmoil", "plotters"] {
        assert!(!lists(&gateway, package), "{package}");
    }
    assert!(!lists(&loadtest, "kube") && lists(&loadtest, "clap"));
    for words in ["Permission is hereby granted, free of charge", "Apache License"] {
        assert!(gateway.contains(words), "{words}");
    }
}
