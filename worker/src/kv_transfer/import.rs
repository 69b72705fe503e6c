//! The importer's end: fetches the KV of a prompt before the prompt is submitted, as it was kept for it
//! or as far as it is cached elsewhere. What came before something went wrong stays, block for block as
//! good as computed; the rest is computed here.

use std::net::SocketAddr;
use std::sync::Arc;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpStream, lookup_host};
use tokio::time::{Instant, timeout, timeout_at};

use super::chain::{self, Link};
use super::fault::Fault;
use super::room::{Room, Spot};
use super::seal::{self, Nonces, TAG, To};
use super::wire::{self, Ask, BLOCK_HEAD, BlockHead, CONTROL_MAX, Find, HELLO, Kind, Sealed, within};
use super::{KvTransfers, Peer, RemoteKv};
use crate::engine::holds::{Begun, BlockKv, Hold, Imported};
use crate::limits::{KV_BATCH_BYTES, KV_CONNECT_MAX, KV_FIND_TOKENS_MAX, KV_IMPORT_MAX, KV_STALL_MAX};

/// What is fetched of a prompt.
struct Wanted {
    hold: Hold,
    /// The first block that is not here.
    first: usize,
    /// The names of the prompt's prefixes, the empty one's first.
    links: Vec<Link>,
}

/// How blocks come from the exporter: through a room, if there is one and it takes that.
struct Way {
    channel: Sealed<TcpStream>,
    room: Option<Room>,
}

impl Way {
    /// Where the exporter finds the room.
    fn spot(&self) -> Spot {
        self.room.as_ref().map_or_else(Spot::default, Room::spot)
    }

    /// How many blocks the exporter has. From here on there is a room only if it puts them there.
    async fn offered(&mut self) -> Result<u32, Fault> {
        let (blocks, is_shared) = match self.channel.receive(CONTROL_MAX).await? {
            (Kind::Offer, offer) => wire::read_offer(&offer)?,
            (Kind::Refusal, refusal) => return Err(wire::read_refusal(&refusal)),
            _ => return Err(Fault::Protocol),
        };
        if !is_shared {
            self.room = None;
        } else if self.room.is_none() {
            return Err(Fault::Protocol);
        }
        Ok(blocks)
    }
}

impl KvTransfers {
    /// Fetches the KV of a prompt that another worker has computed, as far as it is not here. `None` where
    /// there was nothing to be had. Never fails: what did not come is computed.
    pub(crate) async fn fetch(
        &self,
        remote: &RemoteKv,
        prompt: &[u32],
        salt: &Arc<[u8]>,
    ) -> Option<Imported> {
        let began = Instant::now();
        let (imported, done) = self.try_fetch(remote, prompt, salt).await;
        self.note(began, done, &remote.peer);
        imported
    }

    /// Fetches what another worker has cached of a prompt, as far as it is not here. `None` where there was
    /// nothing to be had. Never fails: what did not come is computed.
    pub(crate) async fn pull(&self, peer: &Peer, prompt: &[u32], salt: &Arc<[u8]>) -> Option<Imported> {
        let began = Instant::now();
        let (imported, done) = self.try_pull(peer, prompt, salt).await;
        self.note(began, done, peer);
        imported.map(Imported::cached_there)
    }

    fn note(&self, began: Instant, done: Result<(), Fault>, peer: &Peer) {
        self.metrics.import_seconds.observe(began.elapsed().as_secs_f64());
        let Peer { host, port } = peer;
        match done {
            Ok(()) => self.metrics.imported("done"),
            Err(fault) => {
                self.metrics.imported(fault.as_str());
                // What it had may have made room for others.
                if fault == Fault::Absent {
                    tracing::debug!(cause = %fault, host, port, "KV was not fetched; the prompt is computed here");
                } else {
                    tracing::warn!(cause = %fault, host, port, "KV was not fetched; the prompt is computed here");
                }
            }
        }
    }

    async fn try_fetch(
        &self,
        remote: &RemoteKv,
        prompt: &[u32],
        salt: &Arc<[u8]>,
    ) -> (Option<Imported>, Result<(), Fault>) {
        let block_size = self.identity.block_size;
        // The last token must run.
        let most = prompt.len().saturating_sub(1) / block_size;
        let blocks = remote.tokens / block_size;
        if !remote.tokens.is_multiple_of(block_size) || blocks > most {
            return (None, Err(Fault::Prompt));
        }
        let Ok(_place) = self.imports.try_acquire() else { return (None, Err(Fault::Busy)) };
        let tokens = &prompt[..remote.tokens];
        let begun = self.engine.begin_import(tokens.to_vec(), Arc::clone(salt)).await;
        let Some(Begun { hold, first, local_tokens }) = begun else { return (None, Err(Fault::NoRoom)) };
        let wanted = Wanted { hold, first, links: chain::links(tokens, block_size, salt) };
        let fetched = timeout(KV_IMPORT_MAX, self.receive(remote, &wanted)).await;
        let imported = Imported::new(wanted.hold, local_tokens);
        (Some(imported), fetched.unwrap_or(Err(Fault::Timeout)))
    }

    async fn try_pull(
        &self,
        peer: &Peer,
        prompt: &[u32],
        salt: &Arc<[u8]>,
    ) -> (Option<Imported>, Result<(), Fault>) {
        let Ok(_place) = self.imports.try_acquire() else { return (None, Err(Fault::Busy)) };
        let deadline = Instant::now() + KV_IMPORT_MAX;
        let finding = timeout_at(deadline, self.find_at(peer, prompt, salt)).await;
        let (mut way, blocks) = match finding.unwrap_or(Err(Fault::Timeout)) {
            Ok(found) => found,
            Err(fault) => return (None, Err(fault)),
        };
        let block_size = self.identity.block_size;
        // The last token must run.
        let most = prompt.len().saturating_sub(1) / block_size;
        if blocks == 0 || blocks > most {
            return (None, Err(Fault::Protocol));
        }
        let tokens = &prompt[..blocks * block_size];
        let begun = self.engine.begin_import(tokens.to_vec(), Arc::clone(salt)).await;
        let Some(Begun { hold, first, local_tokens }) = begun else { return (None, Err(Fault::NoRoom)) };
        let wanted = Wanted { hold, first, links: chain::links(tokens, block_size, salt) };
        let fetching = async {
            way.channel.send(Kind::From, &(wanted.first as u32).to_le_bytes()).await?;
            self.take_blocks(&mut way, &wanted).await
        };
        let fetched = timeout_at(deadline, fetching).await;
        (Some(Imported::new(wanted.hold, local_tokens)), fetched.unwrap_or(Err(Fault::Timeout)))
    }

    /// Asks another worker what it has cached of a prompt: how many blocks, on a connection on which they can
    /// be had.
    async fn find_at(&self, peer: &Peer, prompt: &[u32], salt: &[u8]) -> Result<(Way, usize), Fault> {
        let stream = self.connect(peer).await?;
        let mut way = self.meet_exporter(stream).await?;
        let find = Find {
            tokens: prompt[..prompt.len().min(KV_FIND_TOKENS_MAX)].to_vec(),
            salt: salt.to_vec(),
            room: way.spot(),
            numerics_id: self.identity.numerics_id.clone(),
            layout: self.identity.layout.words.clone(),
        };
        // Such a salt is no gateway's.
        let find = find.write().ok_or(Fault::Absent)?;
        way.channel.send(Kind::Find, &find).await?;
        let blocks = way.offered().await? as usize;
        Ok((way, blocks))
    }

    async fn receive(&self, remote: &RemoteKv, wanted: &Wanted) -> Result<(), Fault> {
        let stream = self.connect(&remote.peer).await?;
        let mut way = self.meet_exporter(stream).await?;
        let blocks = wanted.links.len() - 1;
        let ask = Ask {
            transfer: remote.transfer,
            first: wanted.first as u32,
            blocks: blocks as u32,
            link: wanted.links.last().copied().unwrap_or_default(),
            room: way.spot(),
            numerics_id: self.identity.numerics_id.clone(),
            layout: self.identity.layout.words.clone(),
        };
        way.channel.send(Kind::Ask, &ask.write()).await?;
        if way.offered().await? != ask.blocks {
            return Err(Fault::Protocol);
        }
        self.take_blocks(&mut way, wanted).await
    }

    async fn connect(&self, peer: &Peer) -> Result<TcpStream, Fault> {
        let connecting = async {
            let addrs = lookup_host((peer.host.as_str(), peer.port)).await;
            let addrs: Vec<SocketAddr> = addrs.map_err(|_| Fault::Unreachable)?.collect();
            // Without a key whoever listens could give anything.
            if self.secret.is_none() && !addrs.iter().all(|addr| addr.ip().is_loopback()) {
                return Err(Fault::NotLoopback);
            }
            TcpStream::connect(&addrs[..]).await.map_err(|_| Fault::Unreachable)
        };
        let stream = timeout(KV_CONNECT_MAX, connecting).await.map_err(|_| Fault::Unreachable)??;
        // An ask is small, and waited for.
        drop(stream.set_nodelay(true));
        Ok(stream)
    }

    /// Learns whether the other end has the key. One of this machine may put its blocks into a room.
    async fn meet_exporter(&self, mut stream: TcpStream) -> Result<Way, Fault> {
        let own = seal::random()?;
        within(KV_STALL_MAX, stream.write_all(&wire::hello(&own))).await?;
        let (mut hello, mut proof) = ([0; HELLO], [0; TAG]);
        within(KV_STALL_MAX, stream.read_exact(&mut hello)).await?;
        let nonces = Nonces { importer: own, exporter: wire::read_hello(&hello)? };
        within(KV_STALL_MAX, stream.read_exact(&mut proof)).await?;
        if !self.secret.is_proof(&nonces, &proof) {
            return Err(Fault::Unauthenticated);
        }
        let (sends, receives) =
            (self.secret.tags(&nonces, To::Exporter), self.secret.tags(&nonces, To::Importer));
        let mark = self.secret.mark(&nonces);
        let addrs = (stream.local_addr(), stream.peer_addr());
        let is_near = matches!(addrs, (Ok(own), Ok(other)) if own.ip() == other.ip());
        let block_bytes = self.identity.layout.block_bytes_max();
        let room =
            self.room_bytes.filter(|_| is_near).and_then(|bytes| Room::make(&mark, bytes, block_bytes));
        Ok(Way { channel: Sealed { stream, sends, receives, mark, stall: KV_STALL_MAX }, room })
    }

    /// Takes the blocks in, a few megabytes at a time.
    async fn take_blocks(&self, way: &mut Way, wanted: &Wanted) -> Result<(), Fault> {
        let layout = &self.identity.layout;
        let most = (BLOCK_HEAD + layout.block_bytes_max()).max(CONTROL_MAX);
        let mut frames_left = (wanted.links.len() - 1 - wanted.first) * layout.block_bytes.len();
        let (mut batch, mut bytes) = (Vec::new(), 0);
        let is_shared = way.room.is_some();
        loop {
            let block = match way.channel.receive(most).await {
                Ok((Kind::End, _)) => Ok(None),
                Ok((kind, frame)) if frames_left > 0 => {
                    self.block_of(kind, &frame, way, wanted).await.map(Some)
                }
                Ok(_) => Err(Fault::Protocol),
                Err(fault) => Err(fault),
            };
            frames_left = frames_left.saturating_sub(1);
            if let Ok(Some(block)) = block {
                bytes += block.bytes.len();
                batch.push(block);
                if bytes < KV_BATCH_BYTES {
                    continue;
                }
                bytes = 0;
                self.adopt(&wanted.hold, std::mem::take(&mut batch), is_shared).await?;
                continue;
            }
            // What came before the end, or before a fault, is good.
            self.adopt(&wanted.hold, batch, is_shared).await?;
            return block.map(drop);
        }
    }

    /// The block of a frame, if it is one of the prompt's.
    async fn block_of(
        &self,
        kind: Kind,
        frame: &[u8],
        way: &mut Way,
        wanted: &Wanted,
    ) -> Result<BlockKv, Fault> {
        let (head, rest) = BlockHead::read(frame)?;
        let (group, place) = (usize::from(head.group), head.place as usize);
        if wanted.links.get(place.saturating_add(1)) != Some(&head.link) {
            return Err(Fault::Prompt);
        }
        let block_bytes = *self.identity.layout.block_bytes.get(group).ok_or(Fault::Layout)?;
        let bytes = match (kind, &mut way.room) {
            (Kind::Block, None) if rest.len() == block_bytes => rest.to_vec(),
            (Kind::Block, None) => return Err(Fault::Layout),
            (Kind::Placed, Some(room)) => {
                let kv = room.take(block_bytes, rest.try_into().map_err(|_| Fault::Protocol)?)?;
                if let Some(blocks) = room.says() {
                    way.channel.send(Kind::Read, &blocks.to_le_bytes()).await?;
                }
                kv
            }
            _ => return Err(Fault::Protocol),
        };
        Ok(BlockKv { group, place, bytes })
    }

    async fn adopt(&self, hold: &Hold, blocks: Vec<BlockKv>, is_shared: bool) -> Result<(), Fault> {
        let count = blocks.len() as u64;
        let bytes: usize = blocks.iter().map(|block| block.bytes.len()).sum();
        hold.adopt(blocks).await?;
        self.metrics.import_blocks.inc_by(count);
        self.metrics.import_bytes.over(is_shared).inc_by(bytes as u64);
        Ok(())
    }
}
