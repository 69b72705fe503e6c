//! What a process takes, by the kernel's own account (`/proc`): memory and CPU time. How much is too much is
//! the test's to say.

use std::fs;
use std::time::Duration;

use crate::process::Process;

/// What a process has taken so far.
#[derive(Debug, Clone, Copy)]
pub struct Resources {
    /// Memory that it wrote and holds (`RssAnon`): pages of its own code, read in as it runs, are not among
    /// it.
    pub memory_bytes: u64,
    /// The most of all resident memory that it ever held (`VmHWM`), or since [`Resources::forget_peak`].
    pub peak_bytes: u64,
    /// Time of all its threads on a core (`schedstat`, in nanoseconds; `stat` counts in ticks of 10 ms). Of
    /// threads that have ended nothing is known.
    pub cpu: Duration,
}

impl Resources {
    /// Of a process that runs.
    ///
    /// # Panics
    /// When it has ended, or this is not Linux.
    pub fn of(process: &Process) -> Self {
        let read = |file: &str| {
            fs::read_to_string(format!("/proc/{}/{file}", process.id())).expect("a running process")
        };
        let status = read("status");
        let kib = |key: &str| -> u64 {
            let line = status.lines().find_map(|line| line.strip_prefix(key)).expect("a line of status");
            line.split_whitespace().next().and_then(|n| n.parse().ok()).expect("kilobytes")
        };
        Self {
            memory_bytes: kib("RssAnon:") << 10,
            peak_bytes: kib("VmHWM:") << 10,
            cpu: Self::cpu_of_threads(process, |_| true),
        }
    }

    /// Time on a core of the threads of such names.
    ///
    /// # Panics
    /// When the process has ended, or this is not Linux.
    pub fn cpu_of_threads(process: &Process, of: impl Fn(&str) -> bool) -> Duration {
        let threads = fs::read_dir(format!("/proc/{}/task", process.id())).expect("a running process");
        let on_core = |thread: fs::DirEntry| -> Option<u64> {
            // One that has ended meanwhile has none.
            let read = |file: &str| fs::read_to_string(thread.path().join(file)).ok();
            if !of(read("comm")?.trim_end()) {
                return None;
            }
            read("schedstat")?.split_whitespace().next()?.parse().ok()
        };
        Duration::from_nanos(threads.flatten().filter_map(on_core).sum())
    }

    /// Lets the peak begin anew at what the process holds.
    ///
    /// # Panics
    /// When it has ended, or this is not Linux.
    pub fn forget_peak(process: &Process) {
        fs::write(format!("/proc/{}/clear_refs", process.id()), "5").expect("a running process");
    }

    /// CPU time since `before`.
    pub fn cpu_since(&self, before: &Self) -> Duration {
        self.cpu.saturating_sub(before.cpu)
    }

    /// Bytes of memory more than `before`.
    pub fn grown_since(&self, before: &Self) -> u64 {
        self.memory_bytes.saturating_sub(before.memory_bytes)
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[tokio::test]
    async fn memory_and_time_of_a_process_are_seen() {
        // It keeps what it has until it is killed.
        let script = "import signal\nkept = bytearray(b'x') * (64 << 20)\nsum(range(5_000_000))\n\
                      print('done', flush=True)\nsignal.pause()";
        let process = Process::spawn("python3", Command::new("python3").args(["-c", script]));
        process.announced("done").await;
        let now = Resources::of(&process);
        assert!(now.memory_bytes > 64 << 20 && now.peak_bytes >= now.memory_bytes, "{now:?}");
        assert!(now.cpu > Duration::ZERO, "{now:?}");
    }
}
