//! Msgpack to KV events, whatever engine and release it comes from. A batch that is not msgpack is an error;
//! an event that makes no sense is counted and left out, because the removals beside it still count.
//!
//! Nothing here recurses, and nothing is reserved for a length before the elements were seen to be there:
//! what is decoded takes at most [`BYTES_PER_BYTE`] times the payload.

use std::fmt;

use super::msgpack::{NotMsgpack, Reader, Value};
use super::{BlockRemoved, BlockStored, EngineHash, EventBatch, ExtraKey, KvEvent};

/// Memory that a byte of payload can come to take. The shortest event has 17 bytes and takes some 350 in a
/// vector that may be half empty. Within an event a nil that becomes an empty list of extra keys, or a
/// one-byte hash, takes 24, an empty string as an extra key 32.
#[cfg(test)]
pub(super) const BYTES_PER_BYTE: usize = 48;

/// A batch, or an event in it, cannot be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DecodeError(&'static str);

impl fmt::Display for DecodeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "KV events: {}", self.0)
    }
}

impl std::error::Error for DecodeError {}

impl From<NotMsgpack> for DecodeError {
    fn from(_: NotMsgpack) -> Self {
        Self("not msgpack, or cut short")
    }
}

/// A batch, and what in it could not be read.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Decoded {
    /// The events that could be read, in order.
    pub batch: EventBatch,
    /// Events of a known type that make no sense.
    pub malformed: usize,
    /// What was wrong with the first of them.
    pub first_error: Option<DecodeError>,
    /// Events of types this version does not know; newer engines may add some.
    pub unknown: usize,
}

/// A batch that is known to be msgpack, and whose events are read one by one as they are asked for: of a
/// large batch no more is in memory, beside its bytes, than one event. It gives each event; `None` for one of
/// a type this version does not know, an error for one that makes no sense.
#[derive(Debug, Clone)]
pub struct Events<'a> {
    /// When the engine made the batch, by its clock, in seconds since 1970.
    pub ts: f64,
    /// Which of several data-parallel engines; `None` if there is one.
    pub data_parallel_rank: Option<u32>,
    unread: Reader<'a>,
    left: u32,
}

impl EventBatch {
    /// Reads a payload whole, in any of the known forms.
    pub fn decode(payload: &[u8]) -> Result<Decoded, DecodeError> {
        let events = Events::open(payload)?;
        let mut decoded = Decoded::default();
        decoded.batch.ts = events.ts;
        decoded.batch.data_parallel_rank = events.data_parallel_rank;
        for event in events {
            match event {
                Ok(Some(event)) => decoded.batch.events.push(event),
                Ok(None) => decoded.unknown += 1,
                Err(error) => {
                    decoded.malformed += 1;
                    decoded.first_error.get_or_insert(error);
                }
            }
        }
        Ok(decoded)
    }
}

impl<'a> Events<'a> {
    /// Looks at a payload in any of the known forms. An error if it is none of them, or cut short anywhere.
    pub fn open(payload: &'a [u8]) -> Result<Self, DecodeError> {
        let mut reader = Reader::new(payload);
        let (mut ts, mut events, mut rank) = (None, None, None);
        // Each part is read to its end, so that from here on every length in it is known to be true.
        match reader.next()? {
            Value::Array(len) => {
                for place in 0..len {
                    let value = Some(reader.whole()?);
                    match place {
                        0 => ts = value,
                        1 => events = value,
                        2 => rank = value,
                        _ => {}
                    }
                }
            }
            Value::Map(len) => {
                for _ in 0..len {
                    let (name, value) = (reader.whole()?, reader.whole()?);
                    match text(name).unwrap_or_default() {
                        "ts" => ts = Some(value),
                        "events" => events = Some(value),
                        "data_parallel_rank" | "attn_dp_rank" => rank = Some(value),
                        _ => {}
                    }
                }
            }
            _ => return Err(DecodeError("a batch is an array or a map")),
        }
        let ts = ts.and_then(number).ok_or(DecodeError("`ts` is not a number"))?;
        let data_parallel_rank = optional(rank, uint, "`data_parallel_rank` is not a number")?;
        let mut unread = Reader::new(events.ok_or(DecodeError("`events` is missing"))?);
        let Value::Array(left) = unread.next()? else { return Err(DecodeError("`events` is not an array")) };
        Ok(Self { ts, data_parallel_rank, unread, left })
    }

    /// What is unread, to be kept: [`Events::resume`] goes on with it.
    pub fn unread(&self) -> (u32, &'a [u8]) {
        (self.left, self.unread.rest())
    }

    /// Goes on with what [`Events::unread`] said.
    pub fn resume((left, unread): (u32, &'a [u8])) -> Self {
        Self { ts: 0.0, data_parallel_rank: None, unread: Reader::new(unread), left }
    }
}

impl Iterator for Events<'_> {
    type Item = Result<Option<KvEvent>, DecodeError>;

    fn next(&mut self) -> Option<Self::Item> {
        self.left = self.left.checked_sub(1)?;
        let start = self.unread;
        let read = read_event(&mut self.unread);
        if matches!(read, Ok(Some(_))) {
            return Some(read);
        }
        // It was left somewhere inside.
        self.unread = start;
        if self.unread.whole().is_err() {
            self.left = 0;
        }
        Some(read)
    }
}

/// The names of the fields in an array, by place behind the event's type.
const STORED: [&str; 11] = [
    HASHES,
    "parent_block_hash",
    TOKENS,
    "block_size",
    "lora_id",
    "medium",
    SEVENTH,
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
];
const REMOVED: [&str; 3] = [HASHES, "medium", "group_idx"];
const HASHES: &str = "block_hashes";
const TOKENS: &str = "token_ids";
/// `lora_name` in vLLM; a map of salt and session, or a list of components, in SGLang.
const SEVENTH: &str = "7";
/// What stands for no value.
const NIL: &[u8] = &[0xC0];

/// A field's value. The lists that nearly all bytes of an event are in are read where they are come to, as to
/// find their ends takes as long as to read them; of the wrong type they are left as they came.
enum Field<'a> {
    Raw(&'a [u8]),
    Hashes(Vec<EngineHash>),
    Tokens(Tokens),
}

/// Token ids; of pairs of neighbours the first of each, and the second of the last.
type Tokens = (Vec<u32>, Option<u32>);

impl<'a> Field<'a> {
    /// The next value, which is that of the field `name`.
    fn read(reader: &mut Reader<'a>, name: &str) -> Result<Self, DecodeError> {
        let start = *reader;
        let list = match name {
            HASHES => hashes(reader).map(Self::Hashes),
            TOKENS => tokens(reader).map(Self::Tokens),
            _ => None,
        };
        if let Some(list) = list {
            return Ok(list);
        }
        *reader = start;
        Ok(Self::Raw(reader.whole()?))
    }

    fn is_nil(&self) -> bool {
        matches!(self, Self::Raw(value) if Reader::new(value).next() == Ok(Value::Nil))
    }
}

/// An event's values by the names of their fields.
struct Fields<'a> {
    values: Vec<(&'a str, Field<'a>)>,
}

impl<'a> Fields<'a> {
    /// Room for as many as an event has.
    fn with_room(len: u32) -> Self {
        Self { values: Vec::with_capacity((len as usize).min(1 + STORED.len())) }
    }

    fn from_array(reader: &mut Reader<'a>, len: u32, names: &[&'static str]) -> Result<Self, DecodeError> {
        let mut fields = Self::with_room(len);
        for place in 0..len as usize {
            match names.get(place) {
                Some(name) => fields.values.push((name, Field::read(reader, name)?)),
                None => drop(reader.whole()?),
            }
        }
        Ok(fields)
    }

    fn from_map(reader: &mut Reader<'a>, len: u32) -> Result<Self, DecodeError> {
        let mut fields = Self::with_room(len);
        for _ in 0..len {
            match text(reader.whole()?) {
                Some(name) => fields.values.push((name, Field::read(reader, name)?)),
                None => drop(reader.whole()?),
            }
        }
        Ok(fields)
    }

    /// The field, of several of one name the last; nil is as good as none.
    fn field(&self, name: &str) -> Option<&Field<'a>> {
        let found = self.values.iter().rev().find(|(field, _)| *field == name);
        found.map(|(_, value)| value).filter(|value| !value.is_nil())
    }

    /// The same, and its value, which is not in the fields any more.
    fn take(&mut self, name: &str) -> Option<Field<'a>> {
        let found = self.values.iter_mut().rev().find(|(field, _)| *field == name);
        found.map(|(_, value)| std::mem::replace(value, Field::Raw(NIL))).filter(|value| !value.is_nil())
    }

    /// The field's value as it came.
    fn get(&self, name: &str) -> Option<&'a [u8]> {
        match self.field(name) {
            Some(Field::Raw(value)) => Some(value),
            _ => None,
        }
    }

    /// A field that decides what is cached where: of the wrong type, the event is not understood.
    fn strict<T>(
        &self,
        name: &str,
        read: fn(&'a [u8]) -> Option<T>,
        wrong: &'static str,
    ) -> Result<Option<T>, DecodeError> {
        optional(self.get(name), read, wrong)
    }

    /// A field that only describes: of the wrong type, it is left out.
    fn lenient<T>(&self, name: &str, read: fn(&'a [u8]) -> Option<T>) -> Option<T> {
        self.get(name).and_then(read)
    }
}

fn optional<'a, T>(
    value: Option<&'a [u8]>,
    read: fn(&'a [u8]) -> Option<T>,
    wrong: &'static str,
) -> Result<Option<T>, DecodeError> {
    let value = value.filter(|value| Reader::new(value).next() != Ok(Value::Nil));
    value.map(|value| read(value).ok_or(DecodeError(wrong))).transpose()
}

/// The next event, which is read to its end if it is understood; `None` if its type is not known.
fn read_event(reader: &mut Reader<'_>) -> Result<Option<KvEvent>, DecodeError> {
    let nameless = DecodeError("an event without a type");
    match reader.next()? {
        Value::Array(len) => {
            let rest = len.checked_sub(1).ok_or(nameless)?;
            let tag = text(reader.whole()?).ok_or(nameless)?;
            let names: &[&str] = match tag {
                "BlockStored" => &STORED,
                "BlockRemoved" => &REMOVED,
                _ => &[],
            };
            read_fields(tag, Fields::from_array(reader, rest, names)?)
        }
        Value::Map(len) => {
            let fields = Fields::from_map(reader, len)?;
            let tag = fields.get("type").and_then(text).ok_or(nameless)?;
            read_fields(tag, fields)
        }
        _ => Err(DecodeError("an event is an array or a map")),
    }
}

fn read_fields(tag: &str, fields: Fields<'_>) -> Result<Option<KvEvent>, DecodeError> {
    Ok(Some(match tag {
        "BlockStored" => KvEvent::BlockStored(read_stored(fields)?),
        "BlockRemoved" => KvEvent::BlockRemoved(read_removed(fields)?),
        "AllBlocksCleared" => KvEvent::AllBlocksCleared,
        _ => return Ok(None),
    }))
}

fn read_hashes(fields: &mut Fields<'_>) -> Result<Vec<EngineHash>, DecodeError> {
    match fields.take(HASHES) {
        Some(Field::Hashes(hashes)) => Ok(hashes),
        Some(_) => Err(DecodeError("`block_hashes` is not an array of hashes")),
        None => Err(DecodeError("`block_hashes` is missing")),
    }
}

fn read_stored(mut fields: Fields<'_>) -> Result<BlockStored, DecodeError> {
    let (token_ids, bigram_tail) = match fields.take(TOKENS) {
        Some(Field::Tokens(tokens)) => tokens,
        Some(_) => return Err(DecodeError("`token_ids` is not an array of token ids or pairs")),
        None => Tokens::default(),
    };
    let mut stored = BlockStored {
        block_hashes: read_hashes(&mut fields)?,
        parent_block_hash: fields.strict("parent_block_hash", hash, "`parent_block_hash` is not a hash")?,
        token_ids,
        bigram_tail,
        block_size: fields.strict("block_size", uint, "`block_size` is not a number")?.unwrap_or(0),
        lora_id: fields.lenient("lora_id", int),
        medium: fields.strict("medium", string, "`medium` is not a string")?,
        lora_name: fields.strict("lora_name", string, "`lora_name` is not a string")?,
        extra_keys: fields
            .strict("extra_keys", extra_keys, "`extra_keys` is not an array of arrays")?
            .unwrap_or_default(),
        group_idx: fields.strict("group_idx", uint, "`group_idx` is not a number")?,
        kv_cache_spec_kind: fields.lenient("kv_cache_spec_kind", string),
        kv_cache_spec_sliding_window: fields.lenient("kv_cache_spec_sliding_window", uint),
        cache_salt: fields.strict("cache_salt", string, "`cache_salt` is not a string")?,
        session_id: fields.lenient("session_id", string),
        locality: fields.lenient("locality", string),
    };
    if let Some(seventh) = fields.get(SEVENTH) {
        read_seventh(&mut stored, seventh)?;
    }
    Ok(stored)
}

/// The seventh value of an array means what its type says.
fn read_seventh(stored: &mut BlockStored, value: &[u8]) -> Result<(), DecodeError> {
    let mut reader = Reader::new(value);
    match reader.next()? {
        Value::Text(_) => stored.lora_name = string(value),
        Value::Map(len) => {
            let metadata = Fields::from_map(&mut reader, len)?;
            stored.cache_salt = metadata.strict("cache_salt", string, "`cache_salt` is not a string")?;
            stored.session_id = metadata.lenient("session_id", string);
        }
        Value::Array(_) => {}
        _ => return Err(DecodeError("the seventh value is no adapter, map or list")),
    }
    Ok(())
}

fn read_removed(mut fields: Fields<'_>) -> Result<BlockRemoved, DecodeError> {
    let block_hashes = read_hashes(&mut fields)?;
    let counts = fields.lenient("remaining_copy_counts", |value| list(value, uint));
    Ok(BlockRemoved {
        medium: fields.strict("medium", string, "`medium` is not a string")?,
        group_idx: fields.strict("group_idx", uint, "`group_idx` is not a number")?,
        locality: fields.lenient("locality", string),
        remaining_copy_counts: counts.filter(|counts| counts.len() == block_hashes.len()),
        block_hashes,
    })
}

/// Every element of an array.
fn list<'a, T>(value: &'a [u8], read: fn(&'a [u8]) -> Option<T>) -> Option<Vec<T>> {
    let mut reader = Reader::new(value);
    let Ok(Value::Array(len)) = reader.next() else { return None };
    let mut elements = Vec::with_capacity(len as usize);
    for _ in 0..len {
        elements.push(read(reader.whole().ok()?)?);
    }
    Some(elements)
}

fn hashes(reader: &mut Reader<'_>) -> Option<Vec<EngineHash>> {
    let Ok(Value::Array(len)) = reader.next() else { return None };
    // The batch was read to its end before, so the length is true.
    let mut hashes = Vec::with_capacity(len as usize);
    for _ in 0..len {
        let number = reader.quick_uint().map(EngineHash::Int);
        hashes.push(if let Some(number) = number { number } else { hash(reader.whole().ok()?)? });
    }
    Some(hashes)
}

fn hash(value: &[u8]) -> Option<EngineHash> {
    match Reader::new(value).next().ok()? {
        Value::Uint(bits) => Some(EngineHash::Int(bits)),
        Value::Negative(bits) => Some(EngineHash::Int(bits as u64)),
        Value::Bytes(bytes) => Some(EngineHash::Bytes(bytes.into())),
        _ => None,
    }
}

fn tokens(reader: &mut Reader<'_>) -> Option<Tokens> {
    let Value::Array(len) = reader.next().ok()? else { return None };
    // It was read to its end before, so the length is true.
    let mut ids = vec![0; len as usize];
    let quick = reader.quick_ids(&mut ids);
    ids.truncate(quick);
    let mut tail = None;
    for i in quick as u32..len {
        match reader.next().ok()? {
            Value::Uint(id) if tail.is_none() => ids.push(u32::try_from(id).ok()?),
            Value::Array(2) if tail.is_some() || i == 0 => {
                let (Value::Uint(left), Value::Uint(right)) = (reader.next().ok()?, reader.next().ok()?)
                else {
                    return None;
                };
                let left = u32::try_from(left).ok()?;
                if tail.is_some_and(|tail| tail != left) {
                    return None;
                }
                ids.push(left);
                tail = Some(u32::try_from(right).ok()?);
            }
            _ => return None,
        }
    }
    Some((ids, tail))
}

fn extra_keys(value: &[u8]) -> Option<Vec<Vec<ExtraKey>>> {
    list(value, |keys| match Reader::new(keys).next().ok()? {
        Value::Nil => Some(Vec::new()),
        _ => list(keys, |key| Some(extra_key(key))),
    })
}

fn extra_key(value: &[u8]) -> ExtraKey {
    text(value).map_or_else(|| ExtraKey::Raw(value.into()), |text| ExtraKey::Text(text.to_owned()))
}

fn text(value: &[u8]) -> Option<&str> {
    match Reader::new(value).next().ok()? {
        Value::Text(bytes) => std::str::from_utf8(bytes).ok(),
        _ => None,
    }
}

fn string(value: &[u8]) -> Option<String> {
    text(value).map(str::to_owned)
}

fn uint(value: &[u8]) -> Option<u32> {
    match Reader::new(value).next().ok()? {
        Value::Uint(value) => u32::try_from(value).ok(),
        _ => None,
    }
}

fn int(value: &[u8]) -> Option<i64> {
    match Reader::new(value).next().ok()? {
        Value::Uint(value) => i64::try_from(value).ok(),
        Value::Negative(value) => Some(value),
        _ => None,
    }
}

fn number(value: &[u8]) -> Option<f64> {
    match Reader::new(value).next().ok()? {
        Value::Float(value) => Some(value),
        Value::Uint(value) => Some(value as f64),
        Value::Negative(value) => Some(value as f64),
        _ => None,
    }
}
