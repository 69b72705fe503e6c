//! What a choice says, in the types by which `keyway_apis` tells answers.

use keyway_apis::{CallDelta, Counts, Finish, Said};

use super::running::{Running, usage_of};
use crate::answer::output::{StopReason, TextOutput};
use crate::answer::reader::Shown;
use crate::engine::sequence::FinishReason;

/// More of an answer. Its calls have no ids: the answer gives them theirs.
pub(super) fn said(text: Shown) -> Said {
    let call = |call: crate::answer::answer_format::CallDelta| CallDelta {
        index: call.index,
        id: None,
        name: call.name,
        arguments: call.arguments,
    };
    Said {
        reasoning: text.reasoning,
        content: text.content,
        calls: text.calls.into_iter().map(call).collect(),
    }
}

/// How an output ended; one that has not ended counts as one that ended by itself.
pub(super) fn finish(output: &TextOutput) -> Finish {
    match (output.finish, &output.stop_reason) {
        (Some(FinishReason::Length), _) => Finish::Length,
        (_, Some(StopReason::Text(text))) => Finish::Sequence(text.clone()),
        _ => Finish::Stop,
    }
}

/// Token counts of an answer.
pub(super) fn counts(choices: &[Running]) -> Counts {
    let usage = usage_of(choices);
    Counts {
        prompt: usage.prompt_tokens,
        cached: usage.cached_tokens().unwrap_or(0),
        answer: usage.completion_tokens,
        reasoning: choices.iter().map(|choice| choice.output.reasoning_tokens as u64).sum(),
    }
}
