//! What the process is told by signals: SIGTERM or SIGINT to end, SIGHUP to read its configuration again,
//! SIGUSR2 to start its successor.

use std::io;

use tokio::{
    signal::unix::{Signal, SignalKind, signal},
    sync::oneshot,
};

/// The signals that a running gateway listens to.
#[derive(Debug)]
pub struct Signals {
    end: oneshot::Receiver<()>,
    hangup: Signal,
    successor: Signal,
}

/// What a signal asks the gateway to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// Drain and end: the first SIGTERM or SIGINT, or what an operator asks for by `/drain`.
    End,
    /// Read the configuration again.
    Reload,
    /// Start a new process that takes over.
    Succeed,
}

impl Signals {
    /// Listens from now on. A second SIGTERM or SIGINT ends the process at once.
    pub fn listen() -> io::Result<Self> {
        let (mut term, mut int) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
        let (first, end) = oneshot::channel();
        tokio::spawn(async move {
            let mut first = Some(first);
            loop {
                tokio::select! { _ = term.recv() => {}, _ = int.recv() => {} }
                match first.take() {
                    Some(first) => drop(first.send(())),
                    None => std::process::exit(130),
                }
            }
        });
        let (hangup, successor) = (signal(SignalKind::hangup())?, signal(SignalKind::user_defined2())?);
        Ok(Self { end, hangup, successor })
    }

    /// Waits for the next.
    pub async fn next(&mut self) -> Order {
        tokio::select! {
            _ = &mut self.end => Order::End,
            _ = self.hangup.recv() => Order::Reload,
            _ = self.successor.recv() => Order::Succeed,
        }
    }
}
