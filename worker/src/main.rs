//! The command `keyway-worker`: options, log, signals, exit status. The worker itself is the library.

use std::process::ExitCode;

use clap::{CommandFactory as _, Parser as _};
use keyway_worker::WorkerOptions;
use keyway_worker::cli::{Cli, Task};
use keyway_worker::log;
use tokio::signal::unix::{SignalKind, signal};

/// Connections are cheap beside the engine, which has a thread of its own.
const RUNTIME_THREADS: usize = 2;

fn main() -> ExitCode {
    match run(Cli::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            log::last_words(&format!("error: {message}\n"));
            ExitCode::FAILURE
        }
    }
}

fn run(cli: Cli) -> Result<(), String> {
    match cli.into_task()? {
        Task::Completions(shell) => {
            clap_complete::generate(shell, &mut Cli::command(), "keyway-worker", &mut std::io::stdout());
            Ok(())
        }
        #[cfg(target_os = "linux")]
        Task::ExpertRank(options, log_format) => {
            let _log = log::to_stderr(log_format);
            keyway_worker::run_rank(&options)
        }
        #[cfg(not(target_os = "linux"))]
        Task::ExpertRank(..) => Err("expert-parallel processes need Linux".to_owned()),
        Task::Serve(options, log_format) => {
            let _log = log::to_stderr(log_format);
            let runtime = tokio::runtime::Builder::new_multi_thread()
                .worker_threads(RUNTIME_THREADS)
                .enable_all()
                .build()
                .map_err(|e| format!("cannot start the runtime: {e}"))?;
            runtime.block_on(serve(*options))
        }
    }
}

async fn serve(options: WorkerOptions) -> Result<(), String> {
    let no_signal = |e: std::io::Error| format!("cannot wait for signals: {e}");
    let mut terminate = signal(SignalKind::terminate()).map_err(no_signal)?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(no_signal)?;
    let mut worker = keyway_worker::start(options).await.map_err(|e| e.to_string())?;
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
        () = worker.engine_stopped() => return Err("the engine has stopped; the log says why".to_owned()),
    }
    tracing::info!("draining: no new connections, open answers may end");
    tokio::select! {
        () = worker.shutdown() => Ok(()),
        // A second signal means now.
        _ = terminate.recv() => Ok(()),
        _ = interrupt.recv() => Ok(()),
    }
}
