//! How an answer fails, and a stream's last words then: a worker's own event where its API's clients raise an
//! error on that, else one of the gateway's that says the same.

use bytes::Bytes;

use super::screen::Failing;
use crate::{api::Api, error::Error};

/// How an answer fails.
#[derive(Debug, Clone)]
pub(super) struct Failure {
    pub(super) error: Error,
    /// The worker's own event that says so, and whether clients raise an error on it: then it is the last.
    said: Option<(Bytes, bool)>,
}

impl From<Error> for Box<Failure> {
    fn from(error: Error) -> Self {
        Self::new(Failure { error, said: None })
    }
}

impl Failure {
    /// A worker's own word that its answer failed. That an output was aborted is no error event.
    pub(super) fn of(events: &Bytes, failing: Failing) -> Self {
        let said = (!failing.aborts).then(|| (events.slice(failing.from..failing.to), failing.raises));
        Self { error: if failing.aborts { Error::WorkerAborted } else { Error::WorkerFailed }, said }
    }

    /// As a request's record has it.
    pub(super) fn outcome(&self) -> &'static str {
        if self.said.is_some() { "worker_error_event" } else { self.error.code() }
    }

    /// The last of a stream that has had so many events, the worker's own one among them.
    pub(super) fn last_words(&self, api: Api, events: u64) -> Bytes {
        let Self { error, said } = self;
        match said {
            Some((said, true)) => said.clone(),
            Some((said, false)) => match error.to_event_of(api, said, events.saturating_sub(1)) {
                Some(again) => again.into(),
                // It says nothing that could be told in another shape.
                None => [said, error.to_event(api, events).as_bytes()].concat().into(),
            },
            None => error.to_event(api, events).into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::AtFault;

    fn last_words(api: Api, event: &'static str, raises: bool) -> String {
        let failing = Failing { from: 0, to: event.len(), fault: AtFault::Worker, aborts: false, raises };
        let failure = Failure::of(&Bytes::from_static(event.as_bytes()), failing);
        assert_eq!(failure.outcome(), "worker_error_event");
        String::from_utf8(failure.last_words(api, 4).into()).unwrap()
    }

    #[test]
    fn a_worker_s_own_words_come_once_in_the_shape_of_the_api() {
        let bare = "data: {\"error\":{\"message\":\"too long\",\"code\":400}}\n\n";
        assert_eq!(last_words(Api::Chat, bare, true), bare);
        let told = last_words(Api::Messages, bare, false);
        let want = "event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"invalid_request_error\",\"message\":\"too long\"}}\n\n";
        assert_eq!(told, want);
        let detail = "data: {\"detail\":\"engine dead\"}\n\n";
        assert!(
            last_words(Api::Chat, detail, false).starts_with("data: {\"error\":{\"message\":\"engine dead\"")
        );
        let numbered = last_words(Api::Responses, detail, false);
        assert!(numbered.contains("\"sequence_number\":3") && !numbered.contains("detail"), "{numbered}");
        let cancelled = "data: {\"type\":\"response.cancelled\"}\n\n";
        let told = last_words(Api::Responses, cancelled, false);
        assert!(told.starts_with(cancelled) && told.contains("\"sequence_number\":4"), "{told}");
    }

    #[test]
    fn what_is_no_word_of_the_worker_s_is_the_gateway_s_error() {
        let failure: Box<Failure> = Error::StreamLost.into();
        assert_eq!(
            (failure.outcome(), failure.last_words(Api::Chat, 0)),
            ("stream_lost", Error::StreamLost.to_event(Api::Chat, 0).into())
        );
    }
}
