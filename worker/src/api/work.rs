//! A request's body read, and the part of a request that costs time and memory with long texts: where it
//! runs, and what it may take (`request_memory.rs`).

use std::sync::Arc;
use std::thread;

use bytes::Bytes;
use http_body_util::BodyExt as _;
use keyway_clients::client::{Arriving, Client};
use keyway_clients::impatient::{Impatient, Pace, TooSlow};
use keyway_text::memory;
use serde_json::Value;
use tokio::sync::oneshot;

use super::App;
use super::error::ApiError;
use crate::limits::{BODY_BYTES_MAX, INLINE_TOKENIZE_BYTES_MAX, WORK_STACK_BYTES};
use crate::request_memory::{Room, Turn};

/// Any error with which a request's body may end.
type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// A request's body that came whole, and the room that it takes.
#[derive(Debug)]
pub(super) struct Body {
    bytes: Bytes,
    room: Room,
}

impl Body {
    /// Another text in the room of the one that came.
    pub(super) fn of(bytes: Vec<u8>, mut room: Room) -> Result<Self, ApiError> {
        room.hold(bytes.len()).map_err(ApiError::no_memory)?;
        Ok(Self { bytes: bytes.into(), room })
    }

    /// Whether it may name a field.
    pub(super) fn mentions(&self, name: &str) -> bool {
        mentions(&self.bytes, &[name])
    }
}

/// Reads a body, up to the limits of size, pace and memory.
pub(super) async fn read<B>(app: &App, client: &Arc<Client>, body: B) -> Result<Body, ApiError>
where
    B: http_body::Body<Data = Bytes> + Send + Unpin + 'static,
    B::Error: Into<BoxError>,
{
    let mut room = app.memory.room(client).map_err(ApiError::no_memory)?;
    if body.size_hint().lower() > BODY_BYTES_MAX as u64 {
        return Err(ApiError::too_large());
    }
    let _arriving = Arriving::from(client);
    let mut body = Impatient::new(body, Pace { idle: app.clients.body_idle, whole: app.clients.body });
    // Copied: pieces would keep the buffers that they were read into.
    let mut bytes = Vec::new();
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| match error.downcast_ref::<TooSlow>() {
            Some(why) => ApiError::body_too_slow(*why),
            None => ApiError::body_broken(),
        })?;
        let Ok(piece) = frame.into_data() else { continue };
        let length = bytes.len() + piece.len();
        if length > BODY_BYTES_MAX {
            return Err(ApiError::too_large());
        }
        room.hold(length).map_err(ApiError::no_memory)?;
        bytes.extend_from_slice(&piece);
    }
    room.came();
    Ok(Body { bytes: bytes.into(), room })
}

/// Does what costs time with long texts and with grammars, on a thread of its own if it does. The room comes
/// back, for what is kept of the request.
pub(super) async fn work<T: Send + 'static>(
    app: &App,
    body: Body,
    work: impl FnOnce(&[u8], &mut Turn) -> Result<T, ApiError> + Send + 'static,
) -> Result<(T, Room), ApiError> {
    let Body { bytes, room } = body;
    let is_long = bytes.len() > INLINE_TOKENIZE_BYTES_MAX;
    if !is_long && !may_ask_for_a_form(&bytes) {
        return Ok((work(&bytes, &mut app.memory.short_turn(false))?, room));
    }
    let mut turn = if is_long {
        app.memory.turn().await.map_err(ApiError::no_memory)?
    } else {
        app.memory.short_turn(true)
    };
    let (done, result) = oneshot::channel();
    // A thread that ends gives back what its allocator kept; one of the runtime's would keep it.
    let named = thread::Builder::new().name("keyway-text".to_owned()).stack_size(WORK_STACK_BYTES);
    let spawned = named.spawn(move || {
        let needed = turn.needs(memory::to_render(&bytes)).map_err(ApiError::no_memory);
        let result = needed.and_then(|()| work(&bytes, &mut turn));
        drop((bytes, turn));
        // Who asked may have left.
        let _ = done.send((result, room));
    });
    if let Err(error) = spawned {
        tracing::warn!(%error, "a request cannot be read for want of a thread");
        return Err(ApiError::overloaded());
    }
    let (result, room) = result.await.map_err(ApiError::internal)?;
    Ok((result?, room))
}

/// Bytes that a value takes, some more rather than less.
pub(super) fn memory_of(value: &Value) -> usize {
    let more = match value {
        Value::String(text) => text.len(),
        Value::Array(items) => items.iter().map(memory_of).sum(),
        Value::Object(fields) => {
            fields.iter().map(|(name, value)| 2 * size_of::<Value>() + name.len() + memory_of(value)).sum()
        }
        _ => 0,
    };
    2 * size_of::<Value>() + more
}

/// Whether a body names a field, or a format in one, for whose sake a grammar may be compiled.
fn may_ask_for_a_form(body: &[u8]) -> bool {
    const FIELDS: [&str; 6] =
        ["response_format", "guided_", "structured_outputs", "tool_choice", "json_schema", "json_object"];
    mentions(body, &FIELDS)
}

fn mentions(body: &[u8], words: &[&str]) -> bool {
    // An escape may hide a letter of a field's name.
    std::str::from_utf8(body)
        .is_ok_and(|body| body.contains("\\u") || words.iter().any(|word| body.contains(word)))
}
