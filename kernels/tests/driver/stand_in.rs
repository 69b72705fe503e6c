//! The stand-in for the CUDA driver (`emulate/driver`) in the place of the real one: a process finds it by
//! `LD_LIBRARY_PATH`, which must be set before it starts, so that what uses it runs in a process of its own.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use super::compile::{Product, root};

/// What the stand-in took note of.
#[derive(Debug, Default)]
pub(crate) struct Report {
    /// Calls that broke a rule of the driver's.
    pub(crate) refused: Vec<String>,
    /// Kernels that ran, those of graphs among them.
    pub(crate) kernels: u64,
    /// Graphs that were launched.
    pub(crate) replays: u64,
    /// Of each fatbin that was loaded, which code the device runs.
    #[allow(dead_code, reason = "the worker's tests ask what it computes")]
    pub(crate) code: Vec<(String, String)>,
}

/// A driver for processes that are started by a test.
#[derive(Debug)]
pub(crate) struct StandIn {
    folder: PathBuf,
    report: PathBuf,
}

impl StandIn {
    /// `None`, with the reason printed, where there is no C++ compiler.
    pub(crate) fn new() -> Option<Self> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let fatbins = format!("-DFATBINS=\"{}\"", root().join("bin").display());
        let flags = ["-shared", "-fPIC", "-fvisibility=hidden", &fatbins];
        let library = Product {
            folder: "driver",
            file: "libcuda.so",
            source: "emulate/driver/libcuda.cpp",
            flags: &flags,
        };
        let folder = library.build()?.parent().map(Path::to_owned)?;
        let (process, number) = (std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let report = std::env::temp_dir().join(format!("keyway-stand-in-{process}-{number}"));
        Some(Self { folder, report })
    }

    /// Has a command find this driver, set up as `settings` say (`emulate/driver/state.h`).
    pub(crate) fn give_to(&self, command: &mut Command, settings: &[(&str, &str)]) {
        command.env("LD_LIBRARY_PATH", &self.folder).env("STAND_IN_REPORT", &self.report);
        command.envs(settings.iter().map(|(name, value)| (format!("STAND_IN_{name}"), value)));
    }

    /// What it took note of, once the process has ended.
    pub(crate) fn report(&self) -> Report {
        let mut report = Report::default();
        for line in fs::read_to_string(&self.report).unwrap_or_default().lines() {
            match line.split_once(' ') {
                Some(("REFUSED", what)) => report.refused.push(what.to_owned()),
                Some(("CODE", what)) => {
                    let (fatbin, code) = what.split_once(' ').unwrap_or((what, ""));
                    report.code.push((fatbin.to_owned(), code.to_owned()));
                }
                Some(("DONE", counts)) => {
                    let count = |name: &str| {
                        let value = counts.split(' ').find_map(|word| word.strip_prefix(name));
                        value.and_then(|value| value.parse::<u64>().ok()).unwrap_or(0)
                    };
                    report.kernels += count("kernels=");
                    report.replays += count("replays=");
                }
                _ => {}
            }
        }
        report
    }

    /// Runs a test of this program that is ignored elsewhere, and fails if it fails.
    #[allow(dead_code, reason = "of tests that run themselves again")]
    pub(crate) fn run_test(&self, name: &str, settings: &[(&str, &str)]) -> Report {
        let mut command = Command::new(std::env::current_exe().expect("a test knows where it lies"));
        command.args(["--exact", name, "--ignored", "--nocapture", "--test-threads", "1"]);
        self.give_to(&mut command, settings);
        let output = command.output().expect("the test starts");
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let (out, err) = (text(&output.stdout), text(&output.stderr));
        assert!(output.status.success() && out.contains("1 passed"), "{name}: {}\n{out}{err}", output.status);
        self.report()
    }

    /// Whether this process is one that such a test runs in.
    #[allow(dead_code, reason = "of tests that run themselves again")]
    pub(crate) fn is_here() -> bool {
        std::env::var_os("STAND_IN_REPORT").is_some()
    }
}

impl Drop for StandIn {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.report);
    }
}
