//! A request that goes on as a chat, where its model's engines speak chats alone, and its answer in the API
//! that was asked. Which these are, and what is made of bytes: [`crate::translation`].

use std::sync::Arc;

use http::{HeaderMap, HeaderValue, header, request::Parts};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use keyway_apis::SystemPlace;
use keyway_text::memory;
use keyway_wire::headers::IGNORED;

use crate::{
    error::Error,
    limits::{READING_INLINE_BYTES, TRANSLATED_ANSWER_BYTES_MAX},
    prompt::{content::Content, request::RequestInfo, session, token_keyer::TokenPrompt},
    proxy::{
        body::{BoxError, Response, full},
        reading::{Sender, elsewhere},
        request_reader::RequestReader,
    },
    translation::{self, EventsBack, WayBack, Wish},
};

impl RequestReader {
    /// Makes a request a chat: its head, its body, and what routing knows of it but for its session, which
    /// the client may name in words that chats do not have.
    pub(super) async fn as_chat(
        &self,
        wish: Wish,
        parts: &mut Parts,
        (content, info): (&mut Content, &mut Arc<RequestInfo>),
        sender: Sender<'_>,
    ) -> Result<Option<WayBack>, Error> {
        let hints = self.session_hints;
        let session = hints.then(|| session::of(&parts.headers, info, self.bodies.keyer.key)).flatten();
        let text = content.text.clone();
        // Parsed it takes far more than its bytes, where it is all small values.
        let mut room = self.bodies.memory.room(sender.client, sender.visit.cloned());
        room.hold(memory::to_render(&text))?;
        let place = self.system_place(info.model.as_deref());
        let made = if text.len() > READING_INLINE_BYTES {
            elsewhere(move || translation::to_chat(wish, &text, place)).await?
        } else {
            translation::to_chat(wish, &text, place)
        };
        let (chat, way) = made?;
        let limit_bytes = self.bodies.max_bytes;
        if chat.len() > limit_bytes {
            return Err(Error::BodyTooLarge { limit_bytes });
        }
        *content = Content { text: chat.into(), came: None, unread: None, form: None };
        self.bodies.hold(&mut content.text, sender)?;
        translation::head_to_chat(parts);
        let renamed = Arc::make_mut(info).renamed.take();
        *info = self.bodies.text(None, &content.text).await;
        let chat = Arc::make_mut(info);
        (chat.session, chat.renamed) = (session, renamed);
        Ok(way)
    }

    /// Where a model's template shows system messages, or its base model's.
    pub(super) fn system_place(&self, model: Option<&str>) -> SystemPlace {
        if self.tokens.is_empty() {
            return SystemPlace::InFront;
        }
        let base = self.base_of(model);
        self.tokens.system_place(base.as_deref().or(model))
    }
}

/// How many tokens a prompt has, as Anthropic's clients read it.
pub(super) fn count(tokens: Option<&TokenPrompt>) -> Result<Response, Error> {
    let total = tokens.ok_or(Error::CountUnknown)?.total;
    let mut response = http::Response::new(full(format!(r#"{{"input_tokens":{total}}}"#)));
    is_json(response.headers_mut());
    Ok(response)
}

/// A chat's answer in the API that was asked. One that is no stream is read to its end before.
pub(super) async fn answer_back(response: Response, way: WayBack) -> Result<Response, Error> {
    let (mut head, body) = response.into_parts();
    let WayBack { mut back, ignored } = way;
    head.headers.remove(header::CONTENT_LENGTH);
    head.headers.extend(ignored.map(|names| (http::HeaderName::from_static(IGNORED), names)));
    let kind = head.headers.get(header::CONTENT_TYPE).map_or(&b""[..], HeaderValue::as_bytes);
    if head.status.is_success() && kind.starts_with(b"text/event-stream") {
        return Ok(http::Response::from_parts(head, body.turned_back(EventsBack::new(back))));
    }
    let chat = Limited::new(body, TRANSLATED_ANSWER_BYTES_MAX).collect().await.map_err(unread)?.to_bytes();
    let told = if head.status.is_success() {
        back.whole(&chat).map_err(|_| Error::AnswerUnreadable)?
    } else {
        back.error(head.status.as_u16(), &chat)
    };
    is_json(&mut head.headers);
    Ok(http::Response::from_parts(head, full(told)))
}

fn is_json(headers: &mut HeaderMap) {
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
}

/// Why an answer could not be read to its end.
pub(super) fn unread(error: BoxError) -> Error {
    match error.downcast::<Error>() {
        Ok(error) => *error,
        Err(error) if error.is::<LengthLimitError>() => Error::AnswerUnreadable,
        Err(_) => Error::StreamLost,
    }
}
