//! What the index knows, written when the gateway ends (and when a successor asks for its sockets) and read
//! at the start, so that a restart does not forget where prefixes lie. Hashes and workers' names, never text.
//! A file of another key, block size or version, one that is damaged, or one that is too old is not used:
//! that costs time, as an empty index does. Workers that announce their blocks are left out; they do so
//! again.
//!
//! Form, all numbers little-endian: `KEYWAYIX`, version (4 bytes), check of the hash key (8), bytes of a
//! block (8), seconds since 1970 (8); the count of ids of what workers store (8), and for each its hash, its
//! tenant's, its worker's number and its age in seconds (8 each); then for each worker the length of its name
//! (2), the name, the count of rows that its blocks stand in (8), for each row the number of its tenant in
//! the index and the count of its blocks (8 each), and all rows' hashes from the most to the least recently
//! used (8 each), first of its blocks of text and then of those of tokens; at the end the XXH3 of all before
//! it (8).

use std::{
    collections::HashMap,
    fs, io,
    num::NonZeroUsize,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use keyway_core::index::{self, WorkerId};
use keyway_wire::block_hash::{BlockHash, Chain, HashKey};

use crate::{
    clock,
    fleet::{Fleet, Worker},
    limits::{SNAPSHOT_MAX_AGE, STORED_IDS_BYTES},
    prompt::request::KeyerConfig,
    routing::Router,
    stored_state::Owner,
};

const MAGIC: &[u8; 8] = b"KEYWAYIX";
/// 3: with the ids of what workers store. 4: with blocks' owners. 5: with blocks of text and of tokens apart.
const VERSION: u32 = 6;
/// Magic, version, key's check, block's bytes, time.
const HEAD_BYTES: usize = 36;

/// What a file says of workers that have not joined yet.
#[derive(Debug, Default)]
pub struct Remembered(HashMap<String, (Blocks, Blocks)>);

/// A worker's blocks, from the most to the least recently used.
#[derive(Debug, Default)]
pub struct Blocks {
    /// Whose they are, of so many in a row.
    rows: Vec<(index::Owner, u64)>,
    hashes: Vec<BlockHash>,
}

/// What a file says.
#[derive(Debug, Default)]
struct Read {
    remembered: Remembered,
    stored: Vec<StoredId>,
}

/// Why a file is not used.
#[derive(Debug, thiserror::Error)]
pub enum SnapshotError {
    /// The file cannot be read.
    #[error(transparent)]
    Read(#[from] io::Error),
    /// It cannot be of an index like this one's.
    #[error("{0} bytes are more than the index's own")]
    TooLarge(u64),
    /// Its check does not agree.
    #[error("it is damaged")]
    Damaged,
    /// It is something else.
    #[error("it is no snapshot of an index")]
    NoSnapshot,
    /// Another release wrote it.
    #[error("it is of another version")]
    Version,
    /// Blocks of the same text have other hashes here.
    #[error("its blocks have other names: another hash_key_file or block_bytes")]
    OtherNames,
    /// It was written so many seconds ago.
    #[error("it is {0:.0} s old")]
    Old(f64),
}

/// An id of what a worker stores, whose it is, and its age when that was read.
type StoredId = (u64, Owner, Duration);

/// What outlives the process: the index, in its file.
#[derive(Debug, Clone)]
pub struct Memory {
    /// Where; nowhere if absent.
    pub file: Option<PathBuf>,
    /// Whose index is written, and who is told what the file says.
    pub router: Arc<Router>,
    /// How its blocks are named.
    pub keyer: KeyerConfig,
}

impl Memory {
    /// Writes it; what goes wrong is logged.
    pub fn write(&self) {
        let Some(file) = &self.file else { return };
        match write(file, &self.router, self.keyer) {
            Ok(blocks) => tracing::info!(blocks, "the index was written to {}", file.display()),
            Err(error) => tracing::warn!(%error, "the index could not be written to {}", file.display()),
        }
    }

    /// Workers that join from now on are remembered.
    pub fn read(&self, index_bytes: usize) {
        let Some(file) = self.file.as_ref().filter(|file| file.exists()) else { return };
        match read(file, self.keyer, index_bytes) {
            Ok(Read { remembered, stored }) => {
                self.router.index().remember(remembered);
                self.recall_ids(stored);
            }
            Err(error) => tracing::warn!(error = error.to_string(), "{} is not used", file.display()),
        }
    }
}

impl Memory {
    /// Takes what another gateway's snapshot says in place of what is known of caches. Returns the blocks of
    /// workers that are here.
    pub fn take(&self, bytes: &[u8]) -> Result<usize, SnapshotError> {
        let Read { remembered, stored } = decode(bytes, self.keyer, clock::unix_seconds())?;
        let workers = self.router.fleet().all();
        let blocks = self.router.index().replace_by(remembered, &workers);
        self.recall_ids(stored);
        Ok(blocks)
    }

    fn recall_ids(&self, stored: Vec<StoredId>) {
        if let Some(state) = self.router.stored_state() {
            let keep = state.keep();
            let young = stored.into_iter().filter(|(_, _, age)| *age < keep);
            state.recall(young.map(|(id, owner, _)| (id, owner)).collect());
        }
    }
}

/// What the router's index knows, for another gateway.
pub fn of(router: &Router) -> Vec<u8> {
    let block_bytes = NonZeroUsize::new(router.block_bytes).unwrap_or(NonZeroUsize::MIN);
    encode(router.fleet(), router, KeyerConfig { key: router.hash_key, block_bytes }).0
}

/// Writes the snapshot in place of the one before. Returns the blocks written.
pub fn write(path: &Path, router: &Router, keyer: KeyerConfig) -> io::Result<usize> {
    let (bytes, blocks) = encode(router.fleet(), router, keyer);
    let beside = path.with_extension("new");
    fs::write(&beside, bytes)?;
    fs::rename(beside, path)?;
    Ok(blocks)
}

/// Reads a snapshot of at most `index_bytes`' worth of blocks; the error says why it is not used.
fn read(path: &Path, keyer: KeyerConfig, index_bytes: usize) -> Result<Read, SnapshotError> {
    let size = fs::metadata(path)?.len();
    if size > (index_bytes + STORED_IDS_BYTES) as u64 {
        return Err(SnapshotError::TooLarge(size));
    }
    decode(&fs::read(path)?, keyer, clock::unix_seconds())
}

impl Remembered {
    /// What it says of a worker that joins, once: its blocks of text, and those of tokens.
    pub fn take(&mut self, worker: &Worker) -> (Blocks, Blocks) {
        self.0.remove(&worker.name).unwrap_or_default()
    }

    /// Whether there are workers left that have not joined.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl Blocks {
    /// Each with its owner.
    pub fn iter(&self) -> impl Iterator<Item = (index::Owner, BlockHash)> {
        let owners = self.rows.iter().flat_map(|&(owner, count)| std::iter::repeat_n(owner, count as usize));
        owners.zip(self.hashes.iter().copied())
    }
}

impl FromIterator<(index::Owner, BlockHash)> for Blocks {
    fn from_iter<I: IntoIterator<Item = (index::Owner, BlockHash)>>(blocks: I) -> Self {
        let mut all = Self::default();
        for (owner, hash) in blocks {
            match all.rows.last_mut() {
                Some((last, count)) if *last == owner => *count += 1,
                _ => all.rows.push((owner, 1)),
            }
            all.hashes.push(hash);
        }
        all
    }
}

fn encode(fleet: &Fleet, router: &Router, keyer: KeyerConfig) -> (Vec<u8>, usize) {
    let mut out = MAGIC.to_vec();
    out.extend(VERSION.to_le_bytes());
    out.extend(check_of(keyer.key).to_le_bytes());
    out.extend((keyer.block_bytes.get() as u64).to_le_bytes());
    out.extend((clock::unix_seconds() as u64).to_le_bytes());
    let ids = router.stored_state().map(|stored| stored.all()).unwrap_or_default();
    out.extend((ids.len() as u64).to_le_bytes());
    for (entry, age) in ids {
        let Owner { worker, tenant } = entry.owner;
        out.extend(
            [entry.id, tenant, worker.0.into(), age.as_secs()].iter().flat_map(|part| part.to_le_bytes()),
        );
    }
    let mut total = 0;
    let told = |worker: &&Arc<Worker>| !worker.residency.has_events();
    for worker in fleet.all().iter().filter(told) {
        let name = worker.name.as_bytes();
        out.extend((name.len() as u16).to_le_bytes());
        out.extend(name);
        for id in [worker.id, worker.residency.token_id] {
            // So many blocks are copied under the lock, and no more of them at a time.
            let blocks: Blocks = router.index().with(|index| index.by_recency(id).collect());
            out.extend((blocks.rows.len() as u64).to_le_bytes());
            let row =
                |(owner, count): &(index::Owner, u64)| [u64::from(owner.0), *count].map(u64::to_le_bytes);
            out.extend(blocks.rows.iter().flat_map(row).flatten());
            out.extend(blocks.hashes.iter().flat_map(|block| block.0.to_le_bytes()));
            total += blocks.hashes.len();
        }
    }
    out.extend(sum_of(&out).to_le_bytes());
    (out, total)
}

fn decode(bytes: &[u8], keyer: KeyerConfig, now: f64) -> Result<Read, SnapshotError> {
    let damaged = || SnapshotError::Damaged;
    let (body, sum) = bytes.split_last_chunk::<8>().ok_or_else(damaged)?;
    if !body.starts_with(MAGIC) || body.len() < HEAD_BYTES {
        return Err(SnapshotError::NoSnapshot);
    }
    let mut rest = Bytes(&body[MAGIC.len()..]);
    if rest.u32().ok_or_else(damaged)? != VERSION {
        return Err(SnapshotError::Version);
    }
    if sum_of(body) != u64::from_le_bytes(*sum) {
        return Err(damaged());
    }
    let (check, block_bytes) = (rest.u64().ok_or_else(damaged)?, rest.u64().ok_or_else(damaged)?);
    if check != check_of(keyer.key) || block_bytes != keyer.block_bytes.get() as u64 {
        return Err(SnapshotError::OtherNames);
    }
    let age = now - rest.u64().ok_or_else(damaged)? as f64;
    if age > SNAPSHOT_MAX_AGE.as_secs_f64() {
        return Err(SnapshotError::Old(age));
    }
    let mut stored = rest.stored_ids().ok_or_else(damaged)?;
    let since = Duration::from_secs_f64(age.max(0.0));
    for (_, _, age) in &mut stored {
        *age += since;
    }
    let mut remembered = Remembered::default();
    while !rest.0.is_empty() {
        let (name, blocks) = rest.worker().ok_or_else(damaged)?;
        remembered.0.insert(name, blocks);
    }
    Ok(Read { remembered, stored })
}

/// What is left to read.
struct Bytes<'a>(&'a [u8]);

impl<'a> Bytes<'a> {
    fn take(&mut self, count: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(count)?;
        self.0 = rest;
        Some(taken)
    }

    fn u32(&mut self) -> Option<u32> {
        self.take(4)?.try_into().ok().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.take(8)?.try_into().ok().map(u64::from_le_bytes)
    }

    fn stored_ids(&mut self) -> Option<Vec<StoredId>> {
        let count = usize::try_from(self.u64()?).ok()?;
        let parts = self.take(count.checked_mul(32)?)?.as_chunks::<8>().0;
        let parts: Vec<u64> = parts.iter().map(|part| u64::from_le_bytes(*part)).collect();
        let id = |&[id, tenant, worker, age]: &[u64; 4]| {
            let owner = Owner { worker: WorkerId(worker as u32), tenant };
            (id, owner, Duration::from_secs(age.min(u32::MAX.into())))
        };
        Some(parts.as_chunks::<4>().0.iter().map(id).collect())
    }

    /// The next `count` numbers, of eight bytes each; `None` where the file ends before.
    fn numbers(&mut self, count: u64) -> Option<impl Iterator<Item = u64>> {
        let bytes = self.take(usize::try_from(count).ok()?.checked_mul(8)?)?;
        Some(bytes.as_chunks::<8>().0.iter().map(|number| u64::from_le_bytes(*number)))
    }

    fn worker(&mut self) -> Option<(String, (Blocks, Blocks))> {
        let length = u16::from_le_bytes(self.take(2)?.try_into().ok()?);
        let name = std::str::from_utf8(self.take(length.into())?).ok()?.to_owned();
        Some((name, (self.blocks()?, self.blocks()?)))
    }

    fn blocks(&mut self) -> Option<Blocks> {
        let count = self.u64()?;
        let rows: Vec<u64> = self.numbers(count.checked_mul(2)?)?.collect();
        let row = |&[owner, count]: &[u64; 2]| Some((index::Owner(u8::try_from(owner).ok()?), count));
        let rows: Vec<_> = rows.as_chunks::<2>().0.iter().map(row).collect::<Option<_>>()?;
        let total = rows.iter().try_fold(0_u64, |total, (_, count)| total.checked_add(*count))?;
        let hashes = self.numbers(total)?.map(BlockHash).collect();
        Some(Blocks { rows, hashes })
    }
}

/// Tells keys apart without giving one away.
fn check_of(key: HashKey) -> u64 {
    Chain::new(key, b"").hash(MAGIC)
}

/// A checksum of bytes, under a key that is no secret: against damage, not against forgery.
fn sum_of(bytes: &[u8]) -> u64 {
    Chain::new(HashKey::new(0), b"").hash(bytes)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{
        clock::Clock,
        config::{StoredStateConfig, WorkerConfig},
        fleet::ejection::Ejections,
        metrics::Metrics,
        stored_state::StoredState,
    };

    fn keyer(key: u64) -> KeyerConfig {
        KeyerConfig { key: HashKey::new(key), block_bytes: NonZeroUsize::new(64).unwrap() }
    }

    fn router(keyer: KeyerConfig) -> Router {
        let workers: Vec<WorkerConfig> = ["http://a:1", "http://b:1"].map(|url| url.parse().unwrap()).into();
        let clock = Clock::start();
        let fleet = Arc::new(Fleet::new(&workers, clock.now(), &Ejections::new(clock, None)));
        let metrics = Arc::new(Metrics::new().unwrap());
        let config = StoredStateConfig { memory_bytes: 1 << 16, keep: Duration::from_secs(100) };
        let stored = StoredState::new(config, keyer.key, clock, metrics.stored_state.clone());
        let router = Router::new(fleet, metrics, clock, keyway_core::pick::Policy::Prefix, keyer, 1 << 20);
        router.with_stored_state(stored)
    }

    const TENANT: index::Owner = index::Owner(9);
    const STORED: (u64, Owner) = (5, Owner { worker: WorkerId(6), tenant: 7 });

    fn snapshot() -> Vec<u8> {
        let router = router(keyer(7));
        let chain: Vec<BlockHash> = (1..=9).map(BlockHash).collect();
        let all = router.fleet().all();
        let (first, first_own) = (all[0].id, all[0].residency.token_id);
        let (early, late) = chain.split_at(4);
        router.index().with(|index| {
            drop(index.place(first, early));
            drop(index.place_of(TENANT, first, late));
            drop(index.place(first_own, &[BlockHash(20), BlockHash(21)]));
        });
        router.stored_state().unwrap().recall(vec![STORED]);
        encode(router.fleet(), &router, keyer(7)).0
    }

    #[test]
    fn what_was_written_is_remembered_by_name() {
        let mut read = decode(&snapshot(), keyer(7), clock::unix_seconds()).unwrap().remembered;
        let workers = router(keyer(7)).fleet().all();
        let mut take = |worker: &Worker| {
            let (of_text, of_tokens) = read.take(worker);
            let all = |blocks: Blocks| blocks.iter().map(|(owner, hash)| (owner, hash.0)).collect::<Vec<_>>();
            (all(of_text), all(of_tokens))
        };
        let of = |owner, hashes: std::ops::RangeInclusive<u64>| hashes.map(move |hash| (owner, hash));
        let (of_text, of_tokens) = take(&workers[0]);
        assert_eq!(of_text, of(TENANT, 5..=9).chain(of(index::Owner::NOBODY, 1..=4)).collect::<Vec<_>>());
        assert_eq!(of_tokens, of(index::Owner::NOBODY, 20..=21).collect::<Vec<_>>());
        let nothing = (Vec::new(), Vec::new());
        assert!(take(&workers[0]) == nothing && take(&workers[1]) == nothing);
    }

    #[test]
    fn ids_of_what_workers_store_are_remembered_for_as_long_as_they_are_to_be() {
        let dir = tempfile::tempdir().unwrap();
        let file = Some(dir.path().join("snapshot"));
        let memory =
            |router: Router| Memory { file: file.clone(), router: Arc::new(router), keyer: keyer(7) };
        fs::write(file.as_ref().unwrap(), snapshot()).unwrap();
        let after = memory(router(keyer(7)));
        after.read(1 << 20);
        let all = after.router.stored_state().unwrap().all();
        assert_eq!(all.iter().map(|(entry, _)| (entry.id, entry.owner)).collect::<Vec<_>>(), [STORED]);
        let later = decode(&snapshot(), keyer(7), clock::unix_seconds() + 101.0).unwrap();
        assert!(later.stored[0].2 >= Duration::from_secs(100), "too old by then");
    }

    #[test]
    fn what_is_foreign_old_or_damaged_is_refused() {
        let (good, now) = (snapshot(), clock::unix_seconds());
        let refused =
            |bytes: &[u8], key: u64, now: f64| decode(bytes, keyer(key), now).unwrap_err().to_string();
        assert!(refused(&good, 8, now).contains("other names"));
        assert!(refused(&good, 7, now + 1e6).contains("old"));
        assert!(refused(b"hello, this is not one, but it is long enough", 7, now).contains("no snapshot"));
        let mut newer = good.clone();
        newer[8] = VERSION as u8 + 1;
        assert!(refused(&newer, 7, now).contains("version"));
        for at in 12..good.len() {
            let mut bad = good.clone();
            bad[at] ^= 1;
            assert!(refused(&bad, 7, now).contains("damaged"), "byte {at}");
        }
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(mut bytes in prop::collection::vec(any::<u8>(), 0..200), keep in 0_usize..60) {
            let good = snapshot();
            bytes.splice(0..0, good[..keep.min(good.len())].iter().copied());
            let sum = sum_of(&bytes).to_le_bytes();
            bytes.extend(sum);
            drop(decode(&bytes, keyer(7), 0.0));
        }
    }
}
