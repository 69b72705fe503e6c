//! Whether a part of an event carries generated content, and its text.

use std::{borrow::Cow, fmt};

use serde::{
    Deserialize, Deserializer,
    de::{IgnoredAny, MapAccess, SeqAccess, Visitor},
};
use serde_json::value::RawValue;

/// A choice of a chat's or a completion's chunk.
#[derive(Deserialize)]
pub(super) struct Choice<'a> {
    #[serde(borrow)]
    delta: Option<Delta<'a>>,
    #[serde(borrow)]
    text: Option<Str<'a>>,
    token_ids: Option<Vec<IgnoredAny>>,
    #[serde(borrow)]
    pub(super) finish_reason: Option<Str<'a>>,
}

/// A text that is not copied. (serde borrows a `Cow` as a field of its own alone, within an `Option` it
/// copies.)
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub(super) struct Str<'a>(#[serde(borrow)] pub(super) Cow<'a, str>);

/// What a chunk adds to a chat's answer.
#[derive(Default)]
struct Delta<'a> {
    /// Its text, where it is one.
    content: Option<Str<'a>>,
    /// Anything else in it: thoughts, calls, a refusal, audio.
    other: bool,
}

/// Whether there is anything in a value: a text that is not empty, at any depth. A number or a name for the
/// place where it belongs is nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Given(pub(super) bool);

/// What `content` is: as a rule a text, else parts, of which it only matters whether there is anything in
/// them.
enum Content<'a> {
    Text(Str<'a>),
    Parts(Given),
}

/// Fields that say whose content it is, and none of it.
pub(super) fn is_label(field: &str) -> bool {
    matches!(field, "type" | "id" | "index" | "role" | "status" | "call_id" | "item_id" | "phase")
}

// === impl Choice ===

impl Choice<'_> {
    pub(super) fn has_content(&self) -> bool {
        let filled = |text: Option<&Str<'_>>| text.is_some_and(|text| !text.0.is_empty());
        filled(self.text.as_ref())
            || self.delta.as_ref().is_some_and(|delta| delta.other || filled(delta.content.as_ref()))
            || self.token_ids.as_ref().is_some_and(|ids| !ids.is_empty())
    }

    /// Its text, without thoughts.
    pub(super) fn text(&self) -> String {
        let content = self.delta.as_ref().and_then(|delta| delta.content.as_ref());
        content.or(self.text.as_ref()).map(|text| text.0.to_string()).unwrap_or_default()
    }
}

impl<'a> Choice<'a> {
    /// Its text, where it is written without escapes.
    pub(super) fn plain_text(&self) -> Option<&'a str> {
        let content = self.delta.as_ref().and_then(|delta| delta.content.as_ref());
        match content.or(self.text.as_ref())?.0 {
            Cow::Borrowed(text) => Some(text),
            Cow::Owned(_) => None,
        }
    }
}

/// The text of a response's delta, or of a message's.
pub(super) fn text_of(delta: &RawValue) -> String {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Part {
        Plain(String),
        Block { text: String },
    }
    match serde_json::from_str(delta.get()) {
        Ok(Part::Plain(text) | Part::Block { text }) => text,
        Err(_) => String::new(),
    }
}

// === impl Given ===

impl Given {
    /// Whether there is anything in `part`.
    pub(super) fn is_in(part: &RawValue) -> bool {
        serde_json::from_str::<Self>(part.get()).is_ok_and(|given| given.0)
    }
}

// === reading ===

impl<'de: 'a, 'a> Deserialize<'de> for Delta<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Fields;
        impl<'de> Visitor<'de> for Fields {
            type Value = Delta<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a delta")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Delta<'de>, A::Error> {
                let mut delta = Delta::default();
                while let Some(Str(field)) = map.next_key()? {
                    if field == "content" {
                        match map.next_value()? {
                            Content::Text(text) => delta.content = Some(text),
                            Content::Parts(given) => delta.other |= given.0,
                        }
                    } else if is_label(&field) {
                        map.next_value::<IgnoredAny>()?;
                    } else {
                        delta.other |= map.next_value::<Given>()?.0;
                    }
                }
                Ok(delta)
            }
        }
        deserializer.deserialize_map(Fields)
    }
}

impl<'de> Deserialize<'de> for Given {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Any)
    }
}

/// Reads any value as [`Given`].
struct Any;

impl<'de> Visitor<'de> for Any {
    type Value = Given;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any value")
    }

    fn visit_str<E>(self, text: &str) -> Result<Given, E> {
        Ok(Given(!text.is_empty()))
    }

    fn visit_unit<E>(self) -> Result<Given, E> {
        Ok(Given(false))
    }

    fn visit_bool<E>(self, _: bool) -> Result<Given, E> {
        Ok(Given(false))
    }

    fn visit_u64<E>(self, _: u64) -> Result<Given, E> {
        Ok(Given(false))
    }

    fn visit_i64<E>(self, _: i64) -> Result<Given, E> {
        Ok(Given(false))
    }

    fn visit_f64<E>(self, _: f64) -> Result<Given, E> {
        Ok(Given(false))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Given, A::Error> {
        let mut given = false;
        while let Some(one) = seq.next_element::<Given>()? {
            given |= one.0;
        }
        Ok(Given(given))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Given, A::Error> {
        let mut given = false;
        while let Some(Str(field)) = map.next_key()? {
            if is_label(&field) {
                map.next_value::<IgnoredAny>()?;
            } else {
                given |= map.next_value::<Given>()?.0;
            }
        }
        Ok(Given(given))
    }
}

impl<'de: 'a, 'a> Deserialize<'de> for Content<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct TextOrParts;
        impl<'de> Visitor<'de> for TextOrParts {
            type Value = Content<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a text, a list of parts or null")
            }

            fn visit_borrowed_str<E>(self, text: &'de str) -> Result<Content<'de>, E> {
                Ok(Content::Text(Str(Cow::Borrowed(text))))
            }

            fn visit_str<E>(self, text: &str) -> Result<Content<'de>, E> {
                Ok(Content::Text(Str(Cow::Owned(text.to_owned()))))
            }

            fn visit_unit<E>(self) -> Result<Content<'de>, E> {
                Ok(Content::Parts(Given(false)))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, seq: A) -> Result<Content<'de>, A::Error> {
                Any.visit_seq(seq).map(Content::Parts)
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Content<'de>, A::Error> {
                Any.visit_map(map).map(Content::Parts)
            }
        }
        deserializer.deserialize_any(TextOrParts)
    }
}
