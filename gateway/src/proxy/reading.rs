//! A request's body to what it says: its text, without what its client may not say, and what routing goes by.
//! What takes long is done where no other client waits for it, whichever part of it takes the time.

use std::sync::Arc;

use bytes::Bytes;
use http::{HeaderMap, request::Parts};

use crate::{
    access::{
        body_memory::BodyMemory,
        tenants::{self, Visit},
    },
    client::Client,
    error::Error,
    limits::{BODY_FREE_BYTES, READING_INLINE_BYTES},
    machine::threads,
    prompt::{
        content::{self, Content, Form, Plain},
        ignored::Ignored,
        request::{self, KeyerConfig, Renamed, RequestInfo},
    },
    proxy::{
        model_names::{self, ModelNames},
        named_body,
    },
};

/// How bodies are read.
#[derive(Debug, Clone)]
pub struct BodyReader {
    /// How prompts are hashed.
    pub keyer: KeyerConfig,
    /// What is left out of a prompt's text.
    pub ignored: Arc<Ignored>,
    /// What is made of a body is held as the body itself is.
    pub memory: BodyMemory,
    /// Largest body, as it comes and as it goes on.
    pub max_bytes: usize,
    /// Which requests go to other models than they name.
    pub names: Arc<ModelNames>,
}

/// Who sent a body: the connection and the tenant whose shares of memory it counts against.
#[derive(Debug, Clone, Copy)]
pub struct Sender<'a> {
    /// Its connection and address.
    pub client: &'a Arc<Client>,
    /// Where there are tenants.
    pub visit: Option<&'a Arc<Visit>>,
}

impl BodyReader {
    /// Whether other clients would wait for a body to be read where it came. What is not large
    /// [`BodyReader::read_here`] reads without a future.
    pub fn is_large(plain: &Plain) -> bool {
        plain.bytes.len() > READING_INLINE_BYTES
    }

    /// What a body says; one of a tenant is made its own ([`tenants::keep_apart`]), and `parts` are what it
    /// goes on with.
    ///
    /// # Errors
    /// What [`Content::of`] and [`tenants::keep_apart`] refuse, and what there is no memory for.
    pub async fn read(
        &self,
        parts: &mut Parts,
        plain: Plain,
        sender: Sender<'_>,
    ) -> Result<(Content, Arc<RequestInfo>), Error> {
        if !Self::is_large(&plain) {
            return self.read_here(parts, plain, sender);
        }
        let (reader, mut own) = (self.clone(), parts.clone());
        let (client, visit) = (Arc::clone(sender.client), sender.visit.cloned());
        let (result, own) = elsewhere(move || {
            let sender = Sender { client: &client, visit: visit.as_ref() };
            (reader.read_here(&mut own, plain, sender), own)
        })
        .await?;
        *parts = own;
        result
    }

    /// What routing knows of a text.
    pub async fn text(&self, form: Option<Form>, text: &Bytes) -> Arc<RequestInfo> {
        if form.is_some() || text.len() <= READING_INLINE_BYTES {
            return self.text_here(form, text);
        }
        let (reader, text) = (self.clone(), text.clone());
        let read = elsewhere(move || reader.text_here(None, &text)).await;
        // Of what panicked there nothing is known.
        read.unwrap_or_else(|_| Arc::new(request::read(b"", self.keyer)))
    }

    /// [`BodyReader::read`], at once.
    ///
    /// # Errors
    /// The same.
    pub fn read_here(
        &self,
        parts: &mut Parts,
        plain: Plain,
        sender: Sender<'_>,
    ) -> Result<(Content, Arc<RequestInfo>), Error> {
        let was_coded = plain.was_coded;
        let mut content = Content::of(&parts.headers, plain, self.max_bytes)?;
        if was_coded || content.came.is_some() {
            self.hold(&mut content.text, sender)?;
        }
        if let Some(visit) = sender.visit
            && tenants::keep_apart(visit, parts, &mut content, self.max_bytes)?
        {
            self.hold(&mut content.text, sender)?;
        }
        let mut info = self.text_here(content.form.take(), &content.text);
        if info.unread.is_some() && content.mend(self.max_bytes)? {
            info = self.text_here(None, &content.text);
        }
        if !self.names.is_empty() {
            self.names.in_path(&mut parts.uri);
            if let Some((text, renamed)) = self.renamed(&parts.headers, &info, &content.text)? {
                content.replace(&mut parts.headers, text);
                self.hold(&mut content.text, sender)?;
                // Anew, as the model is a part of what names a prompt.
                let form = Form::of(content::kind(&parts.headers), &content.text);
                info = self.text_here(form, &content.text);
                Arc::make_mut(&mut info).renamed = Some(renamed);
            }
        }
        Ok((content, info))
    }

    /// A request's text with the model that it goes to in place of the one that it names, if that is another.
    ///
    /// # Errors
    /// What [`BodyReader::with_model`] refuses.
    pub fn renamed(
        &self,
        headers: &HeaderMap,
        info: &RequestInfo,
        text: &Bytes,
    ) -> Result<Option<(Bytes, Box<Renamed>)>, Error> {
        let Some(asked) = info.model.as_deref() else { return Ok(None) };
        let place = |model: &str| model_names::place(model, headers, (info, text), self.keyer.key);
        let Some((model, by)) = self.names.resolve(asked, place) else { return Ok(None) };
        let text = self.with_model(headers, text, model)?;
        Ok(text.map(|text| (text, model_names::renamed(asked, by))))
    }

    /// A text with another model in it; `None` where it names none.
    ///
    /// # Errors
    /// [`Error::BodyTooLarge`] where the longer name makes it that.
    pub fn with_model(&self, headers: &HeaderMap, text: &Bytes, model: &str) -> Result<Option<Bytes>, Error> {
        let text = named_body::with_model(text, content::kind(headers), model);
        match text {
            Some(text) if text.len() > self.max_bytes => {
                Err(Error::BodyTooLarge { limit_bytes: self.max_bytes })
            }
            text => Ok(text),
        }
    }

    fn text_here(&self, form: Option<Form>, text: &[u8]) -> Arc<RequestInfo> {
        // It is large, and moved some times.
        Arc::new(match form {
            Some(form) => request::read_form(form, self.keyer),
            None => request::read_without(text, self.keyer, &self.ignored),
        })
    }

    /// Room for what came out of a body.
    pub(super) fn hold(&self, text: &mut Bytes, sender: Sender<'_>) -> Result<(), Error> {
        if text.len() > BODY_FREE_BYTES {
            let mut room = self.memory.room(sender.client, sender.visit.cloned());
            room.hold(text.len())?;
            *text = room.tied_to(std::mem::take(text));
        }
        Ok(())
    }
}

/// Does `work` where large bodies are read.
pub(super) async fn elsewhere<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Error> {
    let mut work = Some(work);
    let threads = threads::large_bodies().ok_or(Error::Internal)?;
    // There is a place for each.
    let result = threads.run(move || work.take().map(|work| work())).ok_or(Error::Internal)?;
    result.await.map_err(|_| Error::Internal)
}

#[cfg(test)]
mod tests {
    use std::{
        future::{Future, poll_fn},
        num::NonZeroUsize,
        pin::pin,
        task::Poll,
    };

    use keyway_wire::block_hash::HashKey;
    use parking_lot::Mutex;

    use super::*;
    use crate::limits::LARGE_BODY_THREADS;

    fn body(prompt_bytes: usize) -> Bytes {
        format!(r#"{{"model":"m","prompt":"{}"}}"#, "p".repeat(prompt_bytes)).into()
    }

    #[tokio::test]
    async fn a_large_body_is_read_where_no_other_client_waits_for_it() {
        let memory = BodyMemory::new(1 << 30, prometheus::IntGauge::new("g", "g").unwrap());
        let keyer = KeyerConfig { key: HashKey::new(1), block_bytes: NonZeroUsize::new(64).unwrap() };
        let reader =
            BodyReader { keyer, ignored: Arc::default(), memory, max_bytes: 64 << 20, names: Arc::default() };
        let client = Client::alone();
        // While these are held up, whatever is read there has to wait.
        let held_up = Arc::new(Mutex::new(()));
        let guard = held_up.lock();
        for _ in 0..LARGE_BODY_THREADS {
            let held_up = Arc::clone(&held_up);
            threads::large_bodies().unwrap().later(move || drop(held_up.lock()));
        }
        let mut guard = Some(guard);
        for (bytes, is_here) in [(100, true), (READING_INLINE_BYTES, false), (8 << 20, false)] {
            let mut parts = http::Request::post("/v1/completions").body(()).unwrap().into_parts().0;
            let plain = Plain::of(&mut HeaderMap::new(), body(bytes), reader.max_bytes).await.unwrap();
            let mut reading = pin!(reader.read(&mut parts, plain, Sender { client: &client, visit: None }));
            let text = body(bytes);
            let mut texts = pin!(reader.text(None, &text));
            if guard.is_some() {
                let read = poll_fn(|cx| Poll::Ready(reading.as_mut().poll(cx))).await;
                let info = poll_fn(|cx| Poll::Ready(texts.as_mut().poll(cx))).await;
                assert_eq!((read.is_ready(), info.is_ready()), (is_here, is_here), "{bytes}");
                if is_here {
                    continue;
                }
                guard = None;
            }
            let ((content, info), text) = (reading.await.unwrap(), texts.await);
            assert_eq!((content.text, info.model.as_deref()), (body(bytes), Some("m")));
            assert_eq!(info.chain, text.chain);
        }
    }
}
