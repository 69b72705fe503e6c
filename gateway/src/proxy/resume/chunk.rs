//! One chunk of a stream with the worker extension: what it adds to the output, and the chunk as a client is
//! to see it. Nothing is decoded but what is looked for; the rest stays as the worker wrote it.

use keyway_wire::extension::{AnswerExtension, FIELD};

use crate::json::Value;

/// A chunk taken apart.
#[derive(Debug)]
pub(super) struct Chunk<'a> {
    /// The fields as they are written, but the extension's.
    fields: Vec<(Field, &'a str)>,
    /// The ids it brings; `None` where it has no extension.
    pub(super) ids: Option<Vec<u32>>,
    /// Bytes of text, thoughts included.
    pub(super) text_bytes: u64,
    /// Whether it says why the output ended.
    pub(super) ends: bool,
    /// Whether it is an error.
    pub(super) is_error: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Field {
    Id,
    Created,
    Other,
}

/// What tells one answer's chunks from another's, each as a field as it is written.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Identity {
    id: Option<Box<str>>,
    created: Option<Box<str>>,
}

impl<'a> Chunk<'a> {
    /// Reads the data of an event; `None` if it is not an object.
    pub(super) fn read(data: &'a str) -> Option<Self> {
        let mut chunk =
            Self { fields: Vec::with_capacity(8), ids: None, text_bytes: 0, ends: false, is_error: false };
        let mut fields = Value::document(data)?;
        while let Some(field) = fields.next() {
            let (name, value) = field.ok()?;
            let kind = match name.as_ref() {
                FIELD => {
                    chunk.ids = Some(serde_json::from_str::<AnswerExtension>(value.raw()).ok()?.ids);
                    continue;
                }
                "choices" => {
                    chunk.read_choice(value);
                    Field::Other
                }
                "error" => {
                    chunk.is_error |= value.raw() != "null";
                    Field::Other
                }
                "id" => Field::Id,
                "created" => Field::Created,
                _ => Field::Other,
            };
            chunk.fields.push((kind, fields.last_written()));
        }
        Some(chunk)
    }

    /// There is one choice at most.
    fn read_choice(&mut self, choices: Value<'_>) {
        let choice = choices.items().and_then(|mut items| items.next()?.ok()?.fields());
        let bytes = |value: Value<'_>| value.text().map_or(0, |text| text.len() as u64);
        for (name, value) in choice.into_iter().flatten().map_while(Result::ok) {
            match name.as_ref() {
                "text" => self.text_bytes += bytes(value),
                "finish_reason" => self.ends = value.raw() != "null",
                "delta" => {
                    for (name, value) in value.fields().into_iter().flatten().map_while(Result::ok) {
                        if matches!(name.as_ref(), "content" | "reasoning_content") {
                            self.text_bytes += bytes(value);
                        }
                    }
                }
                _ => {}
            }
        }
    }

    /// Whose chunk it is.
    pub(super) fn identity(&self) -> Identity {
        let written =
            |kind| self.fields.iter().find(|(field, _)| *field == kind).map(|(_, written)| (*written).into());
        Identity { id: written(Field::Id), created: written(Field::Created) }
    }

    /// Its JSON without the extension, as one of the answer that `identity` names.
    pub(super) fn named(&self, identity: &Identity) -> Vec<u8> {
        let bytes: usize = self.fields.iter().map(|(_, written)| written.len() + 1).sum();
        let mut out = Vec::with_capacity(bytes + 64);
        out.push(b'{');
        for (i, (kind, written)) in self.fields.iter().enumerate() {
            if i > 0 {
                out.push(b',');
            }
            let theirs = match kind {
                Field::Id => identity.id.as_deref(),
                Field::Created => identity.created.as_deref(),
                Field::Other => None,
            };
            out.extend_from_slice(theirs.unwrap_or(written).as_bytes());
        }
        out.push(b'}');
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CHAT: &str = r#"{"id":"a","object":"chat.completion.chunk","created":1,"choices":[{"index":0,"delta":{"content":"h\u00e9","reasoning_content":"x"},"finish_reason":null}],"keyway":{"ids":[5,6]}}"#;

    fn written(chunk: &Chunk<'_>, identity: &Identity) -> String {
        String::from_utf8(chunk.named(identity)).unwrap()
    }

    #[test]
    fn a_chunk_brings_ids_and_bytes_and_leaves_without_the_extension() {
        let chunk = Chunk::read(CHAT).unwrap();
        assert_eq!((chunk.ids.as_deref(), chunk.text_bytes, chunk.ends), (Some(&[5, 6][..]), 4, false));
        let expected = format!("{}}}", CHAT.split(",\"keyway\"").next().unwrap());
        assert_eq!(written(&chunk, &chunk.identity()), expected);
    }

    #[test]
    fn a_resumed_chunk_bears_the_first_one_s_name() {
        let first = Chunk::read(CHAT).unwrap().identity();
        let other = r#"{"id":"b","created":2,"model":"m","choices":[{"text":"é","finish_reason":"stop"}],"keyway":{"ids":[]}}"#;
        let chunk = Chunk::read(other).unwrap();
        assert!(chunk.ends && chunk.text_bytes == 2);
        assert_eq!(
            written(&chunk, &first),
            "{\"id\":\"a\",\"created\":1,\"model\":\"m\",\"choices\":[{\"text\":\"é\",\"finish_reason\":\"stop\"}]}"
        );
    }

    #[test]
    fn errors_are_told_from_chunks() {
        assert!(Chunk::read(r#"{"error":{"message":"x","code":"engine_stopped"}}"#).unwrap().is_error);
        assert!(Chunk::read(r#"{"error":"x"}"#).unwrap().is_error);
        assert!(!Chunk::read(r#"{"id":"a","error":null}"#).unwrap().is_error);
        assert!(!Chunk::read(CHAT).unwrap().is_error);
        assert!(Chunk::read("[DONE]").is_none() && Chunk::read("{\"id\":").is_none());
    }
}
