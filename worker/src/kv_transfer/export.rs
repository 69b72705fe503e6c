//! The exporter's end: listens, and gives a kept prompt's KV to the worker that names it and has the
//! prompt, or what is cached of a prompt to the worker that has it. What was fetched is let go, and so is
//! what was not fetched whole: the importer computes the rest.

use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};

use super::KvTransfers;
use super::chain::{self, Link};
use super::fault::Fault;
use super::room::{Mark, Room, Spot};
use super::seal::{self, Nonces, To};
use super::wire::{self, Ask, BlockHead, CONTROL_MAX, FIND_MAX, Find, HELLO, Kind, Sealed, within};
use crate::engine::holds::{BlockKv, Hold};
use crate::limits::{KV_BATCH_BYTES, KV_EXPORTS_MAX, KV_HANDSHAKE_MAX, KV_STALL_MAX};

/// Pause after a failed accept: see `server.rs`.
const ACCEPT_RETRY: Duration = Duration::from_millis(50);

/// Gives KV to whoever may have it, and lets go of what nobody fetched, until this is dropped.
pub(crate) async fn serve(listener: TcpListener, transfers: Arc<KvTransfers>) {
    let places = Arc::new(Semaphore::new(KV_EXPORTS_MAX));
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => {
                    while connections.try_join_next().is_some() {} // those that are over
                    // Where too many are served, the connection ends at once: its prompt is computed there.
                    let Ok(place) = Arc::clone(&places).try_acquire_owned() else {
                        transfers.metrics.exported(Fault::Busy.as_str());
                        continue;
                    };
                    let transfers = Arc::clone(&transfers);
                    connections.spawn(async move {
                        transfers.give(stream).await;
                        drop(place);
                    });
                }
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a connection for a KV transfer");
                    sleep(ACCEPT_RETRY).await;
                }
            },
            expired = transfers.kept.expired() => transfers.let_go(expired),
        }
    }
}

/// What an authenticated importer wants.
enum Wanted {
    /// What is kept for it.
    Kept(Ask),
    /// What is cached of a prompt that it has.
    Cached(Find),
}

impl Wanted {
    /// Where blocks may be put instead of frames.
    fn room(&self) -> Spot {
        match self {
            Self::Kept(ask) => ask.room,
            Self::Cached(find) => find.room,
        }
    }
}

/// What an authenticated importer may have.
struct Given {
    hold: Arc<Hold>,
    /// The names of the prefixes of what is held, the empty one's first.
    links: Vec<Link>,
    /// The first block that the importer does not have; `None`: it says so once it knows what is here.
    first: Option<usize>,
}

impl KvTransfers {
    fn let_go(&self, expired: usize) {
        self.metrics.kept.set(self.kept.len() as i64);
        for _ in 0..expired {
            self.metrics.exported("expired");
        }
        tracing::warn!(transfers = expired, "KV that was kept for other workers was not fetched in time");
    }

    /// Serves one connection, and notes how it went.
    async fn give(&self, stream: TcpStream) {
        // What is small goes at once; what is not fills its packets anyway.
        drop(stream.set_nodelay(true));
        let began = Instant::now();
        let done = self.try_give(stream).await;
        self.metrics.export_seconds.observe(began.elapsed().as_secs_f64());
        match done {
            Ok(()) => self.metrics.exported("done"),
            Err(fault) => {
                self.metrics.exported(fault.as_str());
                // Who is no worker, or has left, is none of the operator's business.
                if matches!(
                    fault,
                    Fault::Lost | Fault::Timeout | Fault::Protocol | Fault::Version | Fault::Absent
                ) {
                    tracing::debug!(cause = %fault, "KV was not given to another worker");
                } else {
                    tracing::warn!(cause = %fault, "KV was not given to another worker");
                }
            }
        }
    }

    async fn try_give(&self, stream: TcpStream) -> Result<(), Fault> {
        let (mut channel, wanted) =
            timeout(KV_HANDSHAKE_MAX, self.meet(stream)).await.map_err(|_| Fault::Timeout)??;
        let spot = wanted.room();
        let granted = match wanted {
            Wanted::Kept(ask) => self.grant(&ask),
            Wanted::Cached(find) => self.find(find).await,
        };
        let given = match granted {
            Ok(given) => given,
            Err(fault) => {
                if let Some(code) = fault.code() {
                    channel.send(Kind::Refusal, &[code]).await?;
                }
                return Err(fault);
            }
        };
        let blocks = given.links.len() - 1;
        let room = self.room_at(spot, &channel.mark);
        channel.send(Kind::Offer, &wire::write_offer(blocks as u32, room.is_some())).await?;
        let first = match given.first {
            Some(first) => first,
            None => begins_at(&mut channel, blocks).await?,
        };
        let mut way = Way { channel, room };
        self.send_blocks(&mut way, &given, first).await?;
        way.end().await
    }

    /// The importer's room, if this process can reach it and may.
    fn room_at(&self, spot: Spot, mark: &Mark) -> Option<Room> {
        self.room_bytes.and_then(|_| Room::open(spot, mark, self.identity.layout.block_bytes_max()))
    }

    /// Learns who is there and what is wanted.
    async fn meet(&self, mut stream: TcpStream) -> Result<(Sealed<TcpStream>, Wanted), Fault> {
        let mut hello = [0; HELLO];
        within(KV_STALL_MAX, stream.read_exact(&mut hello)).await?;
        let own = seal::random()?;
        let importer = wire::read_hello(&hello);
        // Who speaks another version is told which this one is.
        let nonces = Nonces { importer: importer.unwrap_or_default(), exporter: own };
        let reply = [&wire::hello(&own)[..], &self.secret.proof(&nonces)].concat();
        if !matches!(importer, Err(Fault::Protocol)) {
            within(KV_STALL_MAX, stream.write_all(&reply)).await?;
        }
        importer?;
        let (sends, receives) =
            (self.secret.tags(&nonces, To::Importer), self.secret.tags(&nonces, To::Exporter));
        let mark = self.secret.mark(&nonces);
        let mut channel = Sealed { stream, sends, receives, mark, stall: KV_STALL_MAX };
        match channel.receive(FIND_MAX).await {
            Ok((Kind::Ask, ask)) => Ok((channel, Wanted::Kept(Ask::read(&ask)?))),
            Ok((Kind::Find, find)) => Ok((channel, Wanted::Cached(Find::read(&find)?))),
            // Its first tag is the importer's proof.
            Err(Fault::Corrupt) => Err(Fault::Unauthenticated),
            Ok(_) => Err(Fault::Protocol),
            Err(fault) => Err(fault),
        }
    }

    /// What the ask may have, from then on for it alone.
    fn grant(&self, ask: &Ask) -> Result<Given, Fault> {
        self.is_alike(&ask.numerics_id, &ask.layout)?;
        let hold = self.kept.get(ask.transfer).ok_or(Fault::Unknown)?;
        let links = chain::links(hold.tokens(), self.identity.block_size, hold.salt());
        let (first, blocks) = (ask.first as usize, ask.blocks as usize);
        if links.len() != blocks + 1 || links.last() != Some(&ask.link) || first > blocks {
            return Err(Fault::Prompt);
        }
        if !self.kept.take(ask.transfer) {
            return Err(Fault::Unknown);
        }
        self.metrics.kept.set(self.kept.len() as i64);
        Ok(Given { hold, links, first: Some(first) })
    }

    /// What is cached of a prompt, and held from then on.
    async fn find(&self, find: Find) -> Result<Given, Fault> {
        self.is_alike(&find.numerics_id, &find.layout)?;
        let found = self.engine.find_cached(find.tokens, find.salt.into()).await.ok_or(Fault::Absent)?;
        let links = chain::links(found.tokens(), self.identity.block_size, found.salt());
        Ok(Given { hold: Arc::new(found), links, first: None })
    }

    /// Whether the KV of one who computes so is the KV that is computed here.
    fn is_alike(&self, numerics_id: &str, layout: &str) -> Result<(), Fault> {
        if numerics_id != self.identity.numerics_id {
            return Err(Fault::Numerics);
        }
        if layout == self.identity.layout.words { Ok(()) } else { Err(Fault::Layout) }
    }

    async fn send_blocks(&self, way: &mut Way, given: &Given, first: usize) -> Result<(), Fault> {
        let bytes_sent = self.metrics.export_bytes.over(way.room.is_some());
        let bytes: usize = self.identity.layout.block_bytes.iter().sum();
        let (stride, end) = ((KV_BATCH_BYTES / bytes.max(1)).max(1), given.links.len() - 1);
        for first in (first..end).step_by(stride) {
            for BlockKv { group, place, bytes } in given.hold.copy(first..end.min(first + stride)).await? {
                let head =
                    BlockHead { group: group as u8, place: place as u32, link: given.links[place + 1] };
                way.send(head, &bytes).await?;
                self.metrics.export_blocks.inc();
                bytes_sent.inc_by(bytes.len() as u64);
            }
        }
        Ok(())
    }
}

/// How blocks get to the importer: through its room where there is one.
struct Way {
    channel: Sealed<TcpStream>,
    room: Option<Room>,
}

impl Way {
    async fn send(&mut self, head: BlockHead, kv: &[u8]) -> Result<(), Fault> {
        let Some(room) = &mut self.room else {
            return self.channel.send_both(Kind::Block, &head.write(), kv).await;
        };
        while !room.has_place() {
            match self.channel.receive(CONTROL_MAX).await? {
                (Kind::Read, blocks) => room.was_read(wire::read_number(&blocks)?)?,
                _ => return Err(Fault::Protocol),
            }
        }
        let sum = room.put(kv).map_err(|_| Fault::Lost)?;
        self.channel.send_both(Kind::Placed, &head.write(), &sum).await
    }

    /// Says that this was all, and waits until the importer has heard so where it still has a word to say: to
    /// a connection that closes over unread words, what is on its way may be lost.
    async fn end(&mut self) -> Result<(), Fault> {
        self.channel.send(Kind::End, &[]).await?;
        within(KV_STALL_MAX, self.channel.stream.shutdown()).await?;
        while self.room.is_some() && self.channel.receive(CONTROL_MAX).await.is_ok() {}
        Ok(())
    }
}

/// Which of so many blocks is the first that the importer does not have.
async fn begins_at(channel: &mut Sealed<TcpStream>, blocks: usize) -> Result<usize, Fault> {
    match channel.receive(CONTROL_MAX).await? {
        (Kind::From, first) => {
            let first = wire::read_number(&first)? as usize;
            if first <= blocks { Ok(first) } else { Err(Fault::Protocol) }
        }
        _ => Err(Fault::Protocol),
    }
}
