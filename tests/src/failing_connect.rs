//! Connections of a process that fail with an error of the system's, for as long as the test says. A small
//! library in C between the process and its C library does that (`failing_connect.c`): what a host lacks
//! cannot be taken from it without root.

use std::path::Path;
use std::process::Command;

use tempfile::TempDir;

use crate::cluster::GatewayBuilder;
use crate::tools;

/// The library, and the file that tells it what to do.
#[derive(Debug)]
pub struct FailingConnect(TempDir);

impl FailingConnect {
    /// Builds it; `None` means: skip the test.
    ///
    /// # Panics
    /// When there is a C compiler and it does not.
    pub fn build() -> Option<Self> {
        let compiler = tools::tool("cc")?;
        let this = Self(TempDir::new().expect("a folder"));
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/failing_connect.c");
        let library = this.0.path().join("failing.so");
        let status = Command::new(compiler)
            .args(["-shared", "-fPIC", "-o"])
            .arg(&library)
            .arg(source)
            .arg("-ldl")
            .status();
        assert!(status.is_ok_and(|status| status.success()), "the library is not built");
        Some(this)
    }

    /// Puts it into a gateway.
    #[must_use]
    pub fn put_into(&self, gateway: GatewayBuilder) -> GatewayBuilder {
        let dir = self.0.path();
        gateway.env("LD_PRELOAD", &dir.join("failing.so")).env("TEST_CONNECT_FAILS", &dir.join("error"))
    }

    /// From now on every connection fails with this error; with 0, none does.
    ///
    /// # Panics
    /// When the file cannot be written.
    pub fn with(&self, errno: i32) {
        // Whole at once: a half-written number is another error.
        let (new, file) = (self.0.path().join("new"), self.0.path().join("error"));
        std::fs::write(&new, errno.to_string()).expect("write");
        std::fs::rename(new, file).expect("rename");
    }
}
