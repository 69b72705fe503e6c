//! Requests to Anthropic's Messages that go on with a conversation which a server is to have kept (`thread`).
//! They hold the new messages alone, and engines that do not know the field answer these without the rest. So
//! they are refused, in the way by which clients then send the whole conversation, unless the operator says
//! that the model's worker keeps them.

use std::{collections::HashSet, sync::Arc};

use http::Uri;

use crate::{config::ModelRulesByName, error::Error, prompt::request::RequestInfo};

const MESSAGES: &str = "/v1/messages";
const COUNT: &str = "/v1/messages/count_tokens";

/// Models whose workers keep such conversations.
#[derive(Debug, Clone, Default)]
pub struct Threaded(Arc<HashSet<String>>);

impl Threaded {
    /// Those whose rules say so.
    pub fn of(rules: &ModelRulesByName) -> Self {
        let models = rules.iter().filter(|(_, rules)| rules.threads);
        Self(Arc::new(models.map(|(name, _)| name.clone()).collect()))
    }

    /// Refuses a thread of a model whose workers keep none.
    ///
    /// # Errors
    /// [`Error::NoThreads`].
    pub fn check(&self, uri: &Uri, info: &RequestInfo) -> Result<(), Error> {
        let keeps = || info.model.as_deref().is_some_and(|model| self.0.contains(model));
        let path = uri.path().strip_suffix('/').unwrap_or(uri.path());
        if info.thread && matches!(path, MESSAGES | COUNT) && !keeps() {
            return Err(Error::NoThreads);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroUsize;

    use keyway_wire::block_hash::HashKey;

    use crate::{
        config::ModelRules,
        prompt::request::{KeyerConfig, read},
    };

    use super::*;

    #[test]
    fn a_thread_goes_to_workers_that_keep_it_alone() {
        let rules = |threads| ModelRules { threads, ..ModelRules::default() };
        let threaded = Threaded::of(&[("a".to_owned(), rules(true)), ("b".to_owned(), rules(false))].into());
        let config = KeyerConfig { key: HashKey::new(7), block_bytes: NonZeroUsize::new(64).unwrap() };
        let create = r#""thread":{"type":"create"}"#;
        for (path, fields, passes) in [
            ("/v1/messages", &format!(r#""model":"a",{create}"#)[..], true),
            ("/v1/messages", &format!(r#""model":"b",{create}"#), false),
            ("/v1/messages?beta=true", &format!(r#""model":"c",{create}"#), false),
            ("/v1/messages/", create, false),
            ("/v1/messages/count_tokens", create, false),
            ("/v1/messages", r#""thread":null"#, true),
            ("/v1/messages", r#""model":"b""#, true),
            ("/v1/chat/completions", create, true),
        ] {
            let info = read(format!("{{{fields}}}").as_bytes(), config);
            let checked = threaded.check(&path.parse().unwrap(), &info);
            assert_eq!(checked.is_ok(), passes, "{path} {fields}");
        }
    }
}
