//! Opening a connection to a worker. Where the gateway itself has no room for one, kept connections that no
//! request uses are closed for it, and a client's request waits a moment for one to come free; the worker is
//! not blamed.

use std::io;

use super::{
    failure::{FailureCause, SendError},
    http1::Connection,
    links::Turn,
    origin::{Kept, Link, Origin},
    shared::{Place, Shared},
};
use crate::{
    clock::{self, Instant},
    limits::{SHORTAGE_LOOK, SHORTAGE_PATIENCE},
    machine::descriptors::{self, Shortages},
    net::{Connector, speaks_another_protocol},
    shortage::Shortage,
};

/// What opens one connection.
pub(super) struct Opening<'a> {
    pub(super) connector: &'a Connector,
    pub(super) kept: &'a Kept,
    pub(super) shortages: &'a Shortages,
    pub(super) origin: &'a Origin,
    /// Whether it is for a client's request: those leave some descriptors to probes and operators.
    pub(super) is_a_client_s: bool,
}

/// What a request can go out on now, by the protocol that the worker speaks.
pub(super) enum Opened {
    /// For one request at a time.
    Own(Link),
    /// For several: it is among those of its origin, and this is a place on it.
    Shared(Place),
}

impl Opening<'_> {
    /// A place on a shared connection, opened since then where that is asked for; `None` where the worker
    /// speaks HTTP/1.1 after all.
    pub(super) async fn place(&self, since: Option<Instant>) -> Result<Option<Place>, SendError> {
        let links = self.origin.links();
        if let Some(place) = links.enter(since) {
            return Ok(Some(place));
        }
        let _turn = match links.turn(since).await {
            Turn::Place(place) => return Ok(Some(place)),
            Turn::Failed(error) => return Err(error),
            Turn::Open(turn) => turn,
        };
        match self.own().await {
            Ok(Opened::Shared(place)) => Ok(Some(place)),
            Ok(Opened::Own(link)) => {
                self.origin.keep(link);
                Ok(None)
            }
            Err(error) => {
                links.failed(&error);
                Err(error)
            }
        }
    }

    /// A connection, of whichever kind the worker wants.
    pub(super) async fn own(&self) -> Result<Opened, SendError> {
        let mut until = None;
        loop {
            let error = match self.try_once().await {
                Ok(opened) => return Ok(opened),
                Err(error) => error,
            };
            let Some(lacks) = Shortage::behind(&error) else {
                let cause = FailureCause::of_io(&error);
                tracing::debug!(%cause, "no connection to the worker");
                return Err(SendError::Connect(cause));
            };
            let now = Instant::now();
            let until = *until.get_or_insert_with(|| {
                self.shortages.note(lacks);
                now + SHORTAGE_PATIENCE
            });
            if lacks.is_shared() && self.kept.shed() {
                continue;
            }
            if !(self.is_a_client_s && lacks.passes() && now < until) {
                return Err(SendError::Local(lacks));
            }
            clock::sleep(SHORTAGE_LOOK).await;
            if let Some((link, _)) = self.origin.take() {
                return Ok(Opened::Own(link));
            }
        }
    }

    async fn try_once(&self) -> io::Result<Opened> {
        if self.is_a_client_s && descriptors::are_short_for_requests() {
            return Err(Shortage::Descriptors.into_error());
        }
        let origin = self.origin;
        let connect = |offer_http2| {
            self.connector.connect(origin.host(), origin.port(), origin.security(), offer_http2)
        };
        let offered = origin.offers_http2();
        let opened = match connect(offered).await {
            Err(error) if !offered && speaks_another_protocol(&error) => connect(true).await?,
            opened => opened?,
        };
        if origin.security().is_some() {
            origin.speaks_http2(opened.http2);
        }
        if origin.is_shared() {
            let shared = self.connector.in_time(Shared::open(opened.stream)).await?;
            return Ok(Opened::Shared(origin.links().add(shared)));
        }
        Ok(Opened::Own(Box::new(Connection::new(opened.stream))))
    }
}
