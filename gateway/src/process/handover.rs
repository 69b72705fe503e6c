//! A restart that refuses no connection: the old process passes its listening sockets to the new one over a
//! Unix socket, goes on until the new one serves, and then drains. Connections that wait in the kernel's
//! queue stay there, since the sockets themselves are passed; `SO_REUSEPORT` would lose them with the old
//! process's queue.
//!
//! The process that comes second at `handover_socket` is the successor. It says hello, gets the sockets and
//! the secret of the hashes (so that tenants' salts stay what they are), starts its probes, and says that it
//! is ready once it accepts. If it ends before that, the old process goes on as if nothing had been. Both run
//! as the same user, which the kernel vouches for.

mod message;

use std::{
    io,
    os::unix::{
        fs::PermissionsExt,
        net::{UnixListener, UnixStream},
    },
    path::{Path, PathBuf},
    sync::Arc,
};

use tokio::{sync::oneshot, task::spawn_blocking};

pub use self::message::Legacy;
use crate::{
    limits::{HANDOVER_HELLO_TIMEOUT, HANDOVER_READY_TIMEOUT},
    process::sockets::Handles,
};

/// The old process, as the new one sees it.
#[derive(Debug)]
pub struct Predecessor {
    stream: UnixStream,
    /// What it sent besides its sockets: the key of its hashes, and whether a worker was ready.
    pub legacy: Legacy,
}

impl Predecessor {
    /// Asks the process that listens at `path` for its sockets. `None` where no process does.
    pub async fn find(path: PathBuf) -> io::Result<Option<(Self, Handles)>> {
        spawn_blocking(move || {
            let stream = match UnixStream::connect(&path) {
                Ok(stream) => stream,
                Err(error) if is_nobody(&error) => return Ok(None),
                Err(error) => return Err(named(&error, &path)),
            };
            stream.set_read_timeout(Some(HANDOVER_HELLO_TIMEOUT))?;
            message::hello(&stream).map_err(|error| named(&error, &path))?;
            let (legacy, handles) = message::receive(&stream).map_err(|error| named(&error, &path))?;
            Ok(Some((Self { stream, legacy }, handles)))
        })
        .await
        .map_err(io::Error::other)?
    }

    /// This process accepts connections now: the old one may go.
    pub async fn succeed(self) -> io::Result<()> {
        spawn_blocking(move || message::ready(&self.stream)).await.map_err(io::Error::other)?
    }
}

/// Waits at `path` for successors, one after the other, until one has taken over. `legacy` is asked for each.
pub async fn offer(
    path: PathBuf,
    handles: Handles,
    legacy: impl Fn() -> Legacy + Send + Sync + 'static,
) -> io::Result<()> {
    let listener = bind(&path)?;
    listener.set_nonblocking(true)?;
    let listener = tokio::net::UnixListener::from_std(listener)?;
    let estate = Arc::new((handles, legacy));
    loop {
        let (stream, _) = listener.accept().await?;
        let same_user = stream.peer_cred()?.uid() == rustix::process::geteuid().as_raw();
        if !same_user {
            tracing::warn!("another user asked for the listening sockets and was refused");
            continue;
        }
        let (stream, estate) = (stream.into_std()?, Arc::clone(&estate));
        let handing = spawn_blocking(move || hand_over(&stream, &estate.0, &estate.1));
        match handing.await.map_err(io::Error::other)? {
            Ok(()) => return Ok(()),
            Err(error) => tracing::warn!(%error, "the successor did not take over; this process goes on"),
        }
    }
}

fn hand_over(stream: &UnixStream, handles: &Handles, legacy: &impl Fn() -> Legacy) -> io::Result<()> {
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(HANDOVER_HELLO_TIMEOUT))?;
    message::expect_hello(stream)?;
    message::send(stream, handles, legacy())?;
    stream.set_read_timeout(Some(HANDOVER_READY_TIMEOUT))?;
    message::expect_ready(stream)
}

/// Binds beside the path and moves there, so that the path always leads to this process or the one before.
fn bind(path: &Path) -> io::Result<UnixListener> {
    let mut beside = path.as_os_str().to_owned();
    beside.push(format!(".{}", std::process::id()));
    let beside = PathBuf::from(beside);
    let listener = UnixListener::bind(&beside).map_err(|error| named(&error, path))?;
    std::fs::set_permissions(&beside, std::fs::Permissions::from_mode(0o600))?;
    std::fs::rename(&beside, path)?;
    Ok(listener)
}

fn is_nobody(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused)
}

fn named(error: &io::Error, path: &Path) -> io::Error {
    io::Error::new(error.kind(), format!("handover_socket {}: {error}", path.display()))
}

/// Starts this program again with the same arguments, to become the successor.
pub fn start_successor() {
    let mut arguments = std::env::args_os();
    let Some(program) = arguments.next() else { return };
    match std::process::Command::new(program).args(arguments).spawn() {
        Ok(mut child) => {
            tracing::info!(pid = child.id(), "started a successor");
            // Waited for, so that one that fails is no zombie; one that succeeds outlives this process.
            spawn_blocking(move || {
                if let Ok(status) = child.wait()
                    && !status.success()
                {
                    tracing::error!(%status, "the successor ended");
                }
            });
        }
        Err(error) => tracing::error!(%error, "a successor could not be started"),
    }
}

/// Completes when a successor has taken over; never where none can.
pub async fn taken_over(offer: &mut Option<oneshot::Receiver<()>>) {
    match offer {
        // An offer that failed was logged.
        Some(taken) => {
            if taken.await.is_err() {
                *offer = None;
                std::future::pending::<()>().await;
            }
        }
        None => std::future::pending().await,
    }
}
