//! KV events to msgpack, in the form of one engine's releases. Each event is a table of fields; the form
//! decides which of them are written, and how. Byte for byte what `msgspec` writes for the engines' own
//! types.

use super::msgpack::Writer;
use super::{BlockRemoved, BlockStored, EngineHash, EventBatch, ExtraKey, KvEvent};

/// How events are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum WireFormat {
    /// vLLM from v0.24 on: an event is a map.
    #[default]
    VllmMap,
    /// vLLM up to v0.23: an event is an array, with nil for what has no value.
    VllmArray,
    /// SGLang from autumn 2026 on.
    SglangMap,
    /// SGLang before: hashes are signed; salt and session stand in a map at the place where vLLM has the
    /// adapter.
    SglangArray,
}

impl WireFormat {
    const fn is_map(self) -> bool {
        matches!(self, Self::VllmMap | Self::SglangMap)
    }

    const fn is_sglang(self) -> bool {
        matches!(self, Self::SglangMap | Self::SglangArray)
    }
}

impl EventBatch {
    /// The payload of a message. Fields that `format` has no place for are left out.
    pub fn encode(&self, format: WireFormat) -> Vec<u8> {
        let mut writer = Writer::default();
        writer.array(3);
        writer.float(self.ts);
        writer.array(self.events.len());
        for event in &self.events {
            match event {
                KvEvent::BlockStored(stored) => {
                    write_event(&mut writer, format, "BlockStored", &stored_fields(stored, format));
                }
                KvEvent::BlockRemoved(removed) => {
                    write_event(&mut writer, format, "BlockRemoved", &removed_fields(removed, format));
                }
                KvEvent::AllBlocksCleared => write_event(&mut writer, format, "AllBlocksCleared", &[]),
            }
        }
        match self.data_parallel_rank {
            None => writer.nil(),
            Some(rank) => writer.uint(u64::from(rank)),
        }
        writer.out
    }
}

/// One field of an event.
struct Field<'a> {
    name: &'static str,
    value: FieldValue<'a>,
    /// Written to a map even if it is nil: the engine's type has no default for it.
    required: bool,
}

enum FieldValue<'a> {
    Nil,
    Hash(&'a EngineHash),
    Hashes(&'a [EngineHash]),
    Tokens(&'a [u32], Option<u32>),
    Uint(u32),
    Int(i64),
    Text(&'a str),
    ExtraKeys(&'a [Vec<ExtraKey>]),
    Counts(&'a [u32]),
    /// SGLang's map of salt and session.
    Metadata(Option<&'a str>, Option<&'a str>),
}

impl<'a> Field<'a> {
    fn required(name: &'static str, value: FieldValue<'a>) -> Self {
        Self { name, value, required: true }
    }

    fn optional(name: &'static str, value: Option<FieldValue<'a>>) -> Self {
        Self { name, value: value.unwrap_or(FieldValue::Nil), required: false }
    }

    fn is_written(&self) -> bool {
        self.required || !matches!(self.value, FieldValue::Nil)
    }
}

fn text(value: Option<&String>) -> FieldValue<'_> {
    value.map_or(FieldValue::Nil, |value| FieldValue::Text(value))
}

fn stored_fields(stored: &BlockStored, format: WireFormat) -> Vec<Field<'_>> {
    let tokens = FieldValue::Tokens(&stored.token_ids, stored.bigram_tail);
    let mut fields = vec![
        Field::required("block_hashes", FieldValue::Hashes(&stored.block_hashes)),
        Field::required(
            "parent_block_hash",
            stored.parent_block_hash.as_ref().map_or(FieldValue::Nil, FieldValue::Hash),
        ),
        Field::required("token_ids", tokens),
        Field::required("block_size", FieldValue::Uint(stored.block_size)),
        Field::required("lora_id", stored.lora_id.map_or(FieldValue::Nil, FieldValue::Int)),
    ];
    let medium = text(stored.medium.as_ref());
    let salt = text(stored.cache_salt.as_ref());
    let session = text(stored.session_id.as_ref());
    match format {
        WireFormat::VllmMap | WireFormat::VllmArray => {
            let extra_keys = Some(&stored.extra_keys[..]).filter(|keys| !keys.is_empty());
            let window = stored.kv_cache_spec_sliding_window;
            fields.extend([
                Field::required("medium", medium),
                Field::required("lora_name", text(stored.lora_name.as_ref())),
                Field::optional("extra_keys", extra_keys.map(FieldValue::ExtraKeys)),
                Field::optional("group_idx", stored.group_idx.map(FieldValue::Uint)),
                Field::optional("kv_cache_spec_kind", Some(text(stored.kv_cache_spec_kind.as_ref()))),
                Field::optional("kv_cache_spec_sliding_window", window.map(FieldValue::Uint)),
            ]);
            if format == WireFormat::VllmMap {
                fields.push(Field::optional("locality", Some(text(stored.locality.as_ref()))));
                fields.push(Field::optional("session_id", Some(session)));
            }
        }
        WireFormat::SglangMap => fields.extend([
            Field::optional("medium", Some(medium)),
            Field::optional("cache_salt", Some(salt)),
            Field::optional("session_id", Some(session)),
        ]),
        WireFormat::SglangArray => {
            let (salt, session) = (stored.cache_salt.as_deref(), stored.session_id.as_deref());
            fields.push(Field::optional("medium", Some(medium)));
            if salt.is_some() || session.is_some() {
                fields.push(Field::optional("metadata", Some(FieldValue::Metadata(salt, session))));
            }
        }
    }
    fields
}

fn removed_fields(removed: &BlockRemoved, format: WireFormat) -> Vec<Field<'_>> {
    let medium = text(removed.medium.as_ref());
    let mut fields = vec![Field::required("block_hashes", FieldValue::Hashes(&removed.block_hashes))];
    if format.is_sglang() {
        fields.push(Field::optional("medium", Some(medium)));
        return fields;
    }
    fields.push(Field::required("medium", medium));
    fields.push(Field::optional("group_idx", removed.group_idx.map(FieldValue::Uint)));
    if format == WireFormat::VllmMap {
        let counts = removed.remaining_copy_counts.as_deref();
        fields.push(Field::optional("locality", Some(text(removed.locality.as_ref()))));
        fields.push(Field::optional("remaining_copy_counts", counts.map(FieldValue::Counts)));
    }
    fields
}

fn write_event(writer: &mut Writer, format: WireFormat, tag: &str, fields: &[Field<'_>]) {
    if format.is_map() {
        writer.map(1 + fields.iter().filter(|field| field.is_written()).count());
        writer.text("type");
        writer.text(tag);
        for field in fields.iter().filter(|field| field.is_written()) {
            writer.text(field.name);
            write_value(writer, format, &field.value);
        }
    } else {
        writer.array(1 + fields.len());
        writer.text(tag);
        for field in fields {
            write_value(writer, format, &field.value);
        }
    }
}

fn write_value(writer: &mut Writer, format: WireFormat, value: &FieldValue<'_>) {
    match value {
        FieldValue::Nil => writer.nil(),
        FieldValue::Hash(hash) => write_hash(writer, format, hash),
        FieldValue::Hashes(hashes) => {
            writer.array(hashes.len());
            for hash in *hashes {
                write_hash(writer, format, hash);
            }
        }
        FieldValue::Tokens(ids, tail) => write_tokens(writer, ids, *tail),
        FieldValue::Uint(value) => writer.uint(u64::from(*value)),
        FieldValue::Int(value) => writer.int(*value),
        FieldValue::Text(value) => writer.text(value),
        FieldValue::ExtraKeys(blocks) => {
            writer.array(blocks.len());
            for keys in *blocks {
                write_extra_keys(writer, keys);
            }
        }
        FieldValue::Counts(counts) => {
            writer.array(counts.len());
            for count in *counts {
                writer.uint(u64::from(*count));
            }
        }
        FieldValue::Metadata(salt, session) => {
            let entries = [("cache_salt", salt), ("session_id", session)];
            writer.map(entries.iter().filter(|(_, value)| value.is_some()).count());
            for (name, value) in entries.into_iter().filter_map(|(name, value)| Some((name, (*value)?))) {
                writer.text(name);
                writer.text(value);
            }
        }
    }
}

fn write_hash(writer: &mut Writer, format: WireFormat, hash: &EngineHash) {
    match hash {
        EngineHash::Int(bits) if format.is_sglang() => writer.int(*bits as i64),
        EngineHash::Int(bits) => writer.uint(*bits),
        EngineHash::Bytes(bytes) => writer.bytes(bytes),
    }
}

/// Tokens, or pairs of neighbours where the last one's right neighbour is known.
fn write_tokens(writer: &mut Writer, ids: &[u32], tail: Option<u32>) {
    writer.array(ids.len());
    for (i, id) in ids.iter().enumerate() {
        if let Some(tail) = tail {
            writer.array(2);
            writer.uint(u64::from(*id));
            writer.uint(u64::from(*ids.get(i + 1).unwrap_or(&tail)));
        } else {
            writer.uint(u64::from(*id));
        }
    }
}

fn write_extra_keys(writer: &mut Writer, keys: &[ExtraKey]) {
    if keys.is_empty() {
        return writer.nil();
    }
    writer.array(keys.len());
    for key in keys {
        match key {
            ExtraKey::Text(text) => writer.text(text),
            ExtraKey::Raw(value) => writer.raw(value),
        }
    }
}
