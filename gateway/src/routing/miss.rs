//! Why a prediction of cached tokens failed, as far as the gateway can tell: a metric's label, and a word in
//! the access log.

/// What a prediction is made from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Source {
    /// Blocks of text, of a prompt that was not tokenised: tokens are estimated from bytes.
    Text,
    /// Blocks of tokens, in a model of the worker's cache.
    Model,
    /// Blocks of tokens that its events announced.
    Events,
}

/// What is known of an answer whose cached tokens were not those that were predicted.
#[derive(Debug, Clone, Copy)]
pub(super) struct Miss {
    /// What the prediction was made from.
    pub(super) source: Source,
    /// Whether the worker counts as many tokens in the prompt as the gateway.
    pub(super) tokens_agree: bool,
    /// Cached tokens as they were predicted, and as the worker reports them.
    pub(super) predicted: u64,
    /// Cached tokens of the prompt, by the usage that the worker reports.
    pub(super) reported: u64,
    /// Of those predicted, what the worker had announced when it was chosen; the rest it was computing for
    /// others.
    pub(super) announced: u64,
    /// Whether events said since then that blocks were stored, or removed.
    pub(super) events_came: bool,
    /// Whether events said since then that blocks were removed from the worker's cache.
    pub(super) blocks_removed: bool,
    /// Tokens that are as good as equal.
    pub(super) slack: u64,
}

/// Whether a cause is what the worker's own events say: nothing is set up wrongly there.
pub(super) fn is_explained(cause: &str) -> bool {
    ["under_way", "evicted", "announced_late"].contains(&cause)
}

impl Miss {
    /// The likely cause, as the metric's label: of a prediction by events the first that fits.
    pub(super) fn cause(&self) -> &'static str {
        match self.source {
            // An estimate from bytes.
            Source::Text => "text",
            // It forgets otherwise than the worker does.
            Source::Model => "model",
            // The template or the tokenizer is not the worker's.
            Source::Events if !self.tokens_agree => "tokens",
            Source::Events if self.predicted > self.reported => self.cause_of_over(),
            // It had stored more than it had said when it was chosen.
            Source::Events if self.events_came => "announced_late",
            Source::Events => "unexplained",
        }
    }

    fn cause_of_over(&self) -> &'static str {
        if self.reported + self.slack >= self.announced {
            // Another request was computing the rest, and had not finished when this one began.
            "under_way"
        } else if self.blocks_removed {
            "evicted"
        } else {
            "unexplained"
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_cause_is_told_from_the_others() {
        let over = Miss {
            source: Source::Events,
            tokens_agree: true,
            predicted: 320,
            reported: 64,
            announced: 320,
            events_came: true,
            blocks_removed: false,
            slack: 16,
        };
        let under = Miss { predicted: 64, reported: 320, announced: 64, ..over };
        for (miss, cause) in [
            (over, "unexplained"),
            (Miss { blocks_removed: true, ..over }, "evicted"),
            (Miss { announced: 80, blocks_removed: true, ..over }, "under_way"),
            (Miss { announced: 81, ..over }, "unexplained"),
            (Miss { tokens_agree: false, ..over }, "tokens"),
            (Miss { source: Source::Model, tokens_agree: false, ..over }, "model"),
            (Miss { source: Source::Text, ..over }, "text"),
            (under, "announced_late"),
            (Miss { events_came: false, ..under }, "unexplained"),
        ] {
            assert_eq!(miss.cause(), cause, "{miss:?}");
            let by_events = !["unexplained", "tokens", "model", "text"].contains(&cause);
            assert_eq!(is_explained(miss.cause()), by_events, "{cause}");
        }
    }
}
