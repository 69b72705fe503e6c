//! Takes out of a stream the usage that the gateway asked for and its client did not: the chunk that carries
//! it, and the fields that say in every other chunk that it is none. What is left is what the worker would
//! have said unasked.

use std::{ops::Range, sync::Arc};

use bytes::Bytes;
use http::StatusCode;

use crate::{
    fleet::{Habit, Question, StreamKind, Worker},
    json::Value,
    sse::{self, Event},
};

/// What becomes of the usage in one answer.
#[derive(Debug)]
pub struct UsageFilter(Mode);

#[derive(Debug)]
enum Mode {
    /// It is the client's.
    Pass,
    /// Neither the client nor the gateway asked: shows what the worker says then.
    Learn { worker: Arc<Worker>, kind: StreamKind, habit: Habit },
    /// The gateway's own.
    Hide { kind: StreamKind, nulls: Nulls },
}

/// Why chunks say that there is no usage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Nulls {
    /// The worker writes so unasked, too.
    Unasked,
    /// It writes some chunks so, asked or not, and not the first. SGLang does where tools may be called,
    /// depending on `tool_choice` and on what is said.
    InSome,
    /// It has been asked: all chunks say so then.
    Asked,
    /// The stream's first chunk will show it.
    Unseen,
}

impl UsageFilter {
    /// Leaves everything as it is.
    pub fn pass_all() -> Self {
        Self(Mode::Pass)
    }

    pub(super) fn learn(worker: Arc<Worker>, kind: StreamKind) -> Self {
        Self(Mode::Learn { worker, kind, habit: Habit::Silent })
    }

    /// `unasked`: as far as is known its chunks say so unasked. `always`: each was asked for its counts.
    pub(super) fn hide(kind: StreamKind, unasked: bool, always: bool) -> Self {
        let nulls = match (unasked, always) {
            (true, _) => Nulls::Unasked,
            (_, true) => Nulls::Asked,
            _ => Nulls::Unseen,
        };
        Self(Mode::Hide { kind, nulls })
    }

    /// The kind of stream whose question this status may refuse: where the gateway asked, and the worker has
    /// not yet answered one that did. Notes it where it has now.
    pub fn may_be_refused(&self, status: StatusCode, worker: &Worker) -> Option<StreamKind> {
        let Mode::Hide { kind, .. } = self.0 else { return None };
        if worker.habits.question(kind) != Question::Open {
            return None;
        }
        if status.is_success() {
            worker.habits.answered(kind, Question::Taken);
        }
        matches!(status, StatusCode::BAD_REQUEST | StatusCode::UNPROCESSABLE_ENTITY).then_some(kind)
    }

    /// What the client is to see of these whole events; `mentioned`: whether they name a usage.
    pub fn pass(&mut self, events: Bytes, mentioned: bool) -> Bytes {
        if let Mode::Hide { nulls: nulls @ Nulls::Unseen, .. } = &mut self.0 {
            *nulls = Nulls::in_first_of(&events);
        }
        if !mentioned {
            return events;
        }
        match &mut self.0 {
            Mode::Pass => events,
            Mode::Learn { habit, .. } => {
                for event in sse::events(&events) {
                    match Mention::in_event(&event).map(|mention| mention.null) {
                        Some(false) => *habit = Habit::Tells,
                        Some(true) if *habit != Habit::Tells => *habit = Habit::Nulls,
                        _ => {}
                    }
                }
                events
            }
            Mode::Hide { nulls, .. } => hidden(&events, *nulls),
        }
    }

    /// The stream has ended well.
    pub fn ended(&self) {
        if let Mode::Learn { worker, kind, habit } = &self.0 {
            worker.habits.learn(*kind, *habit);
        }
    }
}

impl Nulls {
    /// What the first chunk among these events shows, if one is there.
    fn in_first_of(events: &Bytes) -> Self {
        let is_chunk =
            |event: &Event<'_>| event.text().is_some_and(|data| data.trim_start().starts_with('{'));
        match sse::events(events).find(is_chunk) {
            None => Self::Unseen,
            Some(first) if Mention::in_event(&first).is_some() => Self::Asked,
            Some(_) => Self::InSome,
        }
    }
}

/// Where a chunk's `usage` stands in its JSON, and whether it is `null`.
#[derive(Debug, PartialEq, Eq)]
struct Mention {
    null: bool,
    /// Whether the chunk has nothing else to say.
    alone: bool,
    value: Range<usize>,
    /// With its name and one comma.
    field: Range<usize>,
}

impl Mention {
    fn in_event(event: &Event<'_>) -> Option<Self> {
        Self::of(event.text()?)
    }

    fn of(data: &str) -> Option<Self> {
        let place = |part: &str| {
            let start = part.as_ptr() as usize - data.as_ptr() as usize;
            start..start + part.len()
        };
        let mut fields = Value::document(data)?;
        let (mut found, mut alone, mut before) = (None, true, None::<usize>);
        while let Some(field) = fields.next() {
            let (name, value) = field.ok()?;
            let written = place(fields.last_written());
            match &*name {
                "usage" => {
                    let start = before.unwrap_or(written.start);
                    found = Some((
                        value.raw() == "null",
                        place(value.raw()),
                        start..written.end,
                        before.is_none(),
                    ));
                }
                "choices" => alone = value.items()?.next().is_none(),
                _ => {}
            }
            // The first field takes the comma behind it.
            if let Some((_, _, field, true)) = &mut found
                && name != "usage"
                && field.end < written.start
                && before == Some(field.end)
            {
                field.end = written.start;
            }
            before = Some(written.end);
        }
        found.map(|(null, value, field, _)| Self { null, alone, value, field })
    }
}

/// The events without the usage.
fn hidden(events: &Bytes, nulls: Nulls) -> Bytes {
    let mut out = Vec::with_capacity(events.len());
    for event in sse::events(events) {
        let mention = Mention::in_event(&event).zip(event.data.as_deref());
        match mention {
            Some((mention, _)) if !mention.null && mention.alone => event.write_with(None, &mut out),
            Some((Mention { null: false, value, .. }, data)) if nulls == Nulls::Unasked => {
                let with_null = [&data[..value.start], b"null", &data[value.end..]].concat();
                event.write_with(Some(&with_null), &mut out);
            }
            Some((Mention { null, field, .. }, data)) if !null || nulls == Nulls::Asked => {
                event.write_with(Some(&[&data[..field.start], &data[field.end..]].concat()), &mut out);
            }
            _ => out.extend_from_slice(event.raw),
        }
    }
    out.into()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::usage::is_mentioned;

    fn hide(nulls: bool, events: &str) -> String {
        let out = UsageFilter::hide(StreamKind::Chat, nulls, false)
            .pass(Bytes::copy_from_slice(events.as_bytes()), is_mentioned(events.as_bytes()));
        String::from_utf8(out.to_vec()).unwrap()
    }

    const COUNTS: &str = r#"{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":8}}"#;

    #[test]
    fn the_chunk_of_the_usage_goes_and_every_other_byte_stays() {
        let usage = format!("data: {{\"choices\":[],\"usage\":{COUNTS}}}");
        for end in ["\n\n", "\r\n\r\n", "\r\r"] {
            let events = |parts: &[&str]| parts.iter().flat_map(|part| [*part, end]).collect::<String>();
            let (say, done) = ("data: {\"choices\":[{\"delta\":\"the \\\"usage\\\" of\"}]}", "data: [DONE]");
            assert_eq!(hide(false, &events(&[say, &usage, done])), events(&[say, done]));
            assert_eq!(hide(true, &events(&[&usage])), "");
            assert_eq!(
                hide(false, &events(&[": ping \"usage\"", done])),
                events(&[": ping \"usage\"", done])
            );
        }
        let with_comment = format!(": ping\n{usage}\n\n");
        assert_eq!(hide(false, &with_comment), ": ping\n\n");
    }

    #[test]
    fn fields_that_asking_causes_go_wherever_they_stand() {
        for (said, want) in [
            (r#"{"id":1,"usage":null}"#, r#"{"id":1}"#),
            (r#"{"usage":null,"id":1}"#, r#"{"id":1}"#),
            (r#"{"usage": null, "id": 1, "x": 2}"#, r#"{"id": 1, "x": 2}"#),
            (r#"{"id": 1, "usage": null, "x": 2}"#, r#"{"id": 1, "x": 2}"#),
            (r#"{"choices":[1],"usage":{"prompt_tokens":3}}"#, r#"{"choices":[1]}"#),
            (r#"{"choices":[{"usage":null}]}"#, r#"{"choices":[{"usage":null}]}"#),
            (r#"{"usage":null}"#, "{}"),
        ] {
            assert_eq!(hide(false, &format!("data: {said}\n\n")), format!("data: {want}\n\n"));
        }
        // Where a worker says null unasked, null stays.
        let said = r#"{"choices":[1],"usage":{"prompt_tokens":3}}"#;
        assert_eq!(hide(true, &format!("data:{said}\n\n")), "data:{\"choices\":[1],\"usage\":null}\n\n");
        let null = "data: {\"choices\":[1],\"usage\":null}\n\n";
        assert_eq!(hide(true, null), null);
    }

    #[test]
    fn what_does_not_mention_it_is_not_copied() {
        let events = Bytes::from_static(b"data: {\"choices\":[]}\n\n");
        assert_eq!(
            UsageFilter::hide(StreamKind::Chat, false, false)
                .pass(events.clone(), is_mentioned(&events))
                .as_ptr(),
            events.as_ptr()
        );
    }

    /// SGLang's way where tools may be called, and OpenAI's own; each chunk as it arrives.
    #[test]
    fn nulls_are_left_where_the_first_chunk_has_none() {
        let first = "data: {\"choices\":[{\"delta\":{\"role\":\"assistant\"}}]}\n\n";
        let word = "data: {\"choices\":[{\"delta\":{\"content\":\"a\"}}],\"usage\":null}\n\n";
        let first_with = "data: {\"choices\":[{\"delta\":{\"role\":\"assistant\"}}],\"usage\":null}\n\n";
        let bare = "data: {\"choices\":[{\"delta\":{\"content\":\"a\"}}]}\n\n";
        let usage = format!("data: {{\"choices\":[],\"usage\":{COUNTS}}}\n\n");
        let pass = |always: bool, chunks: &[&str]| {
            let mut filter = UsageFilter::hide(StreamKind::ChatWithTools, false, always);
            let pass = |chunk: &&str| {
                let events = Bytes::copy_from_slice(chunk.as_bytes());
                let mentioned = is_mentioned(&events);
                String::from_utf8(filter.pass(events, mentioned).to_vec()).unwrap()
            };
            chunks.iter().map(pass).collect::<String>()
        };
        let ping = ": ping\n\n";
        assert_eq!(pass(false, &[ping, first, word, bare, &usage]), [ping, first, word, bare].concat());
        assert_eq!(pass(false, &[ping, first_with, word, &usage]), [ping, first, bare].concat());
        // The last chunk may have its counts beside what it says.
        let counted = word.replace("null", COUNTS);
        assert_eq!(pass(false, &[first, word, &counted]), [first, word, bare].concat());
        // Where each chunk has its counts nothing can be told by the first.
        assert_eq!(pass(true, &[first, word, &usage]), [first, bare].concat());
    }

    proptest! {
        /// Chunks of any order and spacing, with the field written into them as an engine that was asked
        /// does.
        #[test]
        fn what_was_put_in_comes_out(
            names in prop::collection::vec(prop::sample::select(vec!["id", "model", "x"]), 1..4),
            at in any::<prop::sample::Index>(),
            spaced in any::<bool>(),
            counts in any::<bool>(),
        ) {
            let (comma, colon) = if spaced { (", ", ": ") } else { (",", ":") };
            let mut fields: Vec<String> =
                names.iter().enumerate().map(|(i, name)| format!("\"{name}{i}\"{colon}[{i}, \"usage\"]")).collect();
            fields.push(format!("\"choices\"{colon}[{{\"index\":0}}]"));
            let chunk = |fields: &[String]| format!("data: {{{}}}\n\n", fields.join(comma));
            let plain = chunk(&fields);
            let value = if counts { COUNTS } else { "null" };
            fields.insert(at.index(fields.len() + 1), format!("\"usage\"{colon}{value}"));
            prop_assert_eq!(hide(false, &chunk(&fields)), plain);
        }
    }
}
