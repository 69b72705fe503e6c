//! The command `keyway-worker`: options, log, signals, exit status. The worker itself is the library.

use std::io;
use std::process::ExitCode;

use clap::{CommandFactory as _, Parser as _};
use keyway_worker::cli::{Cli, Task};
use keyway_worker::{RankExit, StartError, WorkerOptions, log};
use tokio::signal::unix::{SignalKind, signal};

/// Connections are cheap beside the engine, which has a thread of its own.
const RUNTIME_THREADS: usize = 2;

/// Why the command fails, in a line for its user.
#[derive(Debug, thiserror::Error)]
enum Failure {
    #[error("cannot start the runtime: {0}")]
    Runtime(#[source] io::Error),
    #[error("cannot wait for signals: {0}")]
    Signals(#[source] io::Error),
    #[error(transparent)]
    Start(#[from] StartError),
    /// The engine's thread ended before it was told to.
    #[error("the engine has stopped; the log says why")]
    Stopped,
    #[error(transparent)]
    Rank(#[from] RankExit),
    #[cfg(not(target_os = "linux"))]
    #[error("expert-parallel processes need Linux")]
    NeedsLinux,
}

fn main() -> ExitCode {
    match run(Cli::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            log::last_words(&format!("error: {failure}\n"));
            ExitCode::FAILURE
        }
    }
}

fn run(cli: Cli) -> Result<(), Failure> {
    match cli.into_task() {
        Task::Completions(shell) => {
            clap_complete::generate(shell, &mut Cli::command(), "keyway-worker", &mut std::io::stdout());
            Ok(())
        }
        #[cfg(target_os = "linux")]
        Task::ExpertRank(options, log_format) => {
            let _log = log::to_stderr(log_format);
            Ok(keyway_worker::run_rank(&options)?)
        }
        #[cfg(not(target_os = "linux"))]
        Task::ExpertRank(..) => Err(Failure::NeedsLinux),
        Task::Serve(options, log_format) => {
            let _log = log::to_stderr(log_format);
            let runtime = tokio::runtime::Builder::new_multi_thread()
                .worker_threads(RUNTIME_THREADS)
                .enable_all()
                .build()
                .map_err(Failure::Runtime)?;
            runtime.block_on(serve(*options))
        }
    }
}

async fn serve(options: WorkerOptions) -> Result<(), Failure> {
    let mut terminate = signal(SignalKind::terminate()).map_err(Failure::Signals)?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(Failure::Signals)?;
    let mut worker = keyway_worker::start(options).await?;
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
        () = worker.engine_stopped() => return Err(Failure::Stopped),
    }
    tracing::info!("draining: no new connections, open answers may end");
    tokio::select! {
        () = worker.shutdown() => Ok(()),
        // A second signal means now.
        _ = terminate.recv() => Ok(()),
        _ = interrupt.recv() => Ok(()),
    }
}
