//! What a service manager is told (sd_notify(3)): that the gateway serves, by which process, and that it is
//! ending. Nothing where there is none.

use std::os::{
    linux::net::SocketAddrExt,
    unix::{
        ffi::OsStrExt,
        net::{SocketAddr, UnixDatagram},
    },
};

/// Says that this process serves; after a hand-over the service's main process is this one.
pub fn ready() {
    notify(&format!("READY=1\nMAINPID={}\n", std::process::id()));
}

/// Says that this process is ending; not where a successor serves on.
pub fn stopping() {
    notify("STOPPING=1\n");
}

fn notify(state: &str) {
    let Some(path) = std::env::var_os("NOTIFY_SOCKET") else { return };
    // A name that begins with @ is abstract: the kernel's, not the file system's.
    let address = match path.as_bytes().strip_prefix(b"@") {
        Some(name) => SocketAddr::from_abstract_name(name),
        None => SocketAddr::from_pathname(&path),
    };
    let sent = address.and_then(|address| UnixDatagram::unbound()?.send_to_addr(state.as_bytes(), &address));
    if let Err(error) = sent {
        tracing::warn!(%error, "the service manager could not be told");
    }
}
