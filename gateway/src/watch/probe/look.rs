//! Looks at the port of a worker that is up, or that still streams as it drains: when its process has gone,
//! or has closed its listener to shut down, the next look is refused, however idle it is. A connection that
//! is closed at once is all that costs the worker: no request, no handshake, and none is held open, which a
//! server with few threads would feel.

use keyway_core::health::Look;

use super::{TOLD_AFTER, Watch, faults};
use crate::{
    clock,
    fleet::{Fault, Worker},
    limits::PROBE_TIMEOUT,
    net::port::{Port, Unreached},
};

/// One worker's port, with the address that took the last connection.
#[derive(Debug, Default)]
pub(super) struct Looking(Port);

impl Looking {
    /// Whether the port takes a connection; if not, what is wrong.
    pub(super) async fn look(&mut self, worker: &Worker) -> Result<(), Fault> {
        self.reach(worker).await.map_err(|error| faults::unreached(worker, &error))
    }

    async fn reach(&mut self, worker: &Worker) -> Result<(), Unreached> {
        self.0.look(worker.origin().host(), worker.origin().port(), PROBE_TIMEOUT).await
    }
}

/// Looks at the port for ever, at the times that the worker's health names.
pub(super) async fn keep_looking(watch: &Watch) {
    let Watch { worker, router, .. } = watch;
    let mut looking = Looking::default();
    loop {
        let due = worker.with_health(|health| health.next_look_at());
        clock::sleep(due.saturating_sub(router.now())).await;
        if !worker.with_health(|health| health.wants_look()) {
            worker.with_health(|health| health.no_look(router.now()));
            continue;
        }
        let seen = looking.reach(worker).await;
        let look = match &seen {
            Ok(()) => Look::Open,
            Err(error) if error.is_refusal() => Look::Refused,
            Err(_) => Look::Unknown,
        };
        let down = worker.with_health(|health| health.on_look(look, router.now()));
        if let (Look::Refused, Err(error)) = (look, seen) {
            watch.fault(faults::unreached(worker, &error), TOLD_AFTER.0);
        }
        if down {
            router.worker_failed(worker);
        }
    }
}
