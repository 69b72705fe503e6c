//! What a line says of placements, in base64 within its JSON, and what is taken of it. The words are the
//! core's (`keyway_core::told`).

use base64::{Engine as _, engine::general_purpose::STANDARD_NO_PAD as BASE64};
use keyway_core::{
    WorkerId,
    told::{Heard, Malformed, Outcome, Word, words},
};
use serde::{Deserialize, Serialize};

use crate::{
    metrics::PlacementMetrics,
    routing::{Router, told::Placed},
};

/// What another gateway has placed.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct PlacementNews {
    /// Tells by which key and in blocks of which size it names prompts.
    pub names: u64,
    /// The workers that the words mean: the number in the words, the worker's own, its name.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub workers: Vec<(u32, u32, String)>,
    /// The words, in base64.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub words: String,
}

/// What one who listens has been told of placements.
#[derive(Debug)]
pub(super) struct PlacementsTold {
    next: u64,
    /// Whether it was said by which names.
    said_names: bool,
}

/// What one gateway has said of its placements.
#[derive(Debug, Default)]
pub(super) struct PlacementsHeard {
    heard: Heard,
    /// Whether it was said that its names are others.
    complained: bool,
}

impl PlacementsTold {
    /// For one who begins to listen; `None`: nothing is told.
    pub(super) fn from_now(router: &Router) -> Option<Self> {
        Some(Self { next: router.placements_from()?, said_names: false })
    }

    /// What is new.
    pub(super) fn news(&mut self, router: &Router) -> Option<PlacementNews> {
        let names = router.names_check();
        let Some((said, workers)) = router.placements_after(self.next) else {
            let first = !std::mem::replace(&mut self.said_names, true);
            return first.then(|| PlacementNews { names, ..PlacementNews::default() });
        };
        (self.next, self.said_names) = (said.next, true);
        router.metrics().placements.told(said.placements, said.bytes.len(), said.missed);
        let plain = |Placed { number, id, worker }: Placed| (number.0, id.0, worker);
        let workers = workers.into_iter().map(plain).collect();
        Some(PlacementNews { names, workers, words: BASE64.encode(&said.bytes) })
    }
}

impl PlacementsHeard {
    /// Takes what it says. An error: it is no words.
    pub(super) fn take(&mut self, news: &PlacementNews, router: &Router) -> Result<(), Malformed> {
        let counted = &router.metrics().placements;
        let bytes = BASE64.decode(&news.words).map_err(|_| Malformed)?;
        let mut wrong = false;
        let said = words(&bytes).map_while(|word| word.inspect_err(|_| wrong = true).ok());
        if news.names != router.names_check() || !router.tells_placements() {
            let placements = said.filter(|word| matches!(word, Word::Placed { .. })).count();
            counted.heard(PlacementMetrics::OTHER_NAMES, placements as u64);
            self.complain(router);
        } else {
            let plain = |(number, id, worker): &(u32, u32, String)| Placed {
                number: WorkerId(*number),
                id: WorkerId(*id),
                worker: worker.clone(),
            };
            let workers: Vec<_> = news.workers.iter().map(plain).collect();
            router.hear_placements(&mut self.heard, &workers, said, |outcome| {
                let outcome = match outcome {
                    Outcome::Recorded => PlacementMetrics::RECORDED,
                    Outcome::Unfounded => PlacementMetrics::UNFOUNDED,
                    Outcome::Elsewhere => PlacementMetrics::ELSEWHERE,
                    Outcome::Closed => return,
                };
                counted.heard(outcome, 1);
            });
        }
        if wrong { Err(Malformed) } else { Ok(()) }
    }

    /// It is heard no more.
    pub(super) fn end(&mut self, router: &Router) {
        router.forget_placements(&mut self.heard);
    }

    fn complain(&mut self, router: &Router) {
        if std::mem::replace(&mut self.complained, true) {
            return;
        }
        if router.tells_placements() {
            tracing::warn!(
                "another gateway names prompts otherwise, so what it places is not known here: give all of them one \
                 routing.hash_key_file (or one auth.admin_token_file) and one routing.block_bytes, and run one version of keyway"
            );
        } else {
            tracing::info!(
                "what other gateways place is not recorded: [peers] was not there when this one started"
            );
        }
    }
}
