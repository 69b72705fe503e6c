//! A conversation's messages on their way into a template: fields in the client's order, their text borrowed
//! from where it stands. A turn of a long conversation has thousands of them, so none is copied before the
//! template has it. What templates make of them is `jinja/`; what engines change before is here and in
//! `chat_template.rs`.

use std::borrow::Cow;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fmt;

use serde::de::value::{MapAccessDeserializer, SeqAccessDeserializer};
use serde::de::{Deserialize, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::Value;

/// Fields of a message that are compared one with the other.
const COMPARED_MAX: usize = 16;

/// One message of a conversation: fields such as `role` and `content`, in the client's order.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Message<'a> {
    fields: Vec<(Cow<'a, str>, Field<'a>)>,
}

/// What a message's field holds.
#[derive(Debug, Clone, PartialEq)]
pub enum Field<'a> {
    /// A JSON string; one that the body holds without escapes is borrowed.
    Text(Cow<'a, str>),
    /// Any other JSON value, `null` among them.
    Other(Cow<'a, Value>),
}

impl<'a> Message<'a> {
    /// A JSON object; `None` if it is something else.
    pub fn of(value: &'a Value) -> Option<Self> {
        let fields = value.as_object()?.iter();
        Some(Self {
            fields: fields.map(|(name, value)| (Cow::Borrowed(name.as_str()), value.into())).collect(),
        })
    }

    /// Names and values, in the client's order.
    pub fn fields(&self) -> impl Iterator<Item = (&str, &Field<'a>)> {
        self.fields.iter().map(|(name, field)| (&**name, field))
    }

    /// The field of this name.
    pub fn get(&self, name: &str) -> Option<&Field<'a>> {
        self.fields().find(|(of, _)| *of == name).map(|(_, field)| field)
    }

    /// The field of this name, to be changed.
    pub fn get_mut(&mut self, name: &str) -> Option<&mut Field<'a>> {
        self.fields.iter_mut().find(|(of, _)| of == name).map(|(_, field)| field)
    }

    /// Sets a field: where it stands, or as the last.
    pub fn set(&mut self, name: impl Into<Cow<'a, str>>, field: Field<'a>) {
        let name = name.into();
        match self.get_mut(&name) {
            Some(place) => *place = field,
            None => self.fields.push((name, field)),
        }
    }

    /// Takes out a field.
    pub(crate) fn take(&mut self, name: &str) -> Option<Field<'a>> {
        let place = self.fields.iter().position(|(of, _)| of == name)?;
        Some(self.fields.swap_remove(place).1)
    }

    /// Leaves out a field.
    pub(crate) fn remove(&mut self, name: &str) {
        self.fields.retain(|(of, _)| of != name);
    }

    /// Leaves out the fields that are `null`.
    pub(crate) fn drop_nulls(&mut self) {
        self.fields.retain(|(_, field)| !field.is_null());
    }

    /// Puts a field in front of all others.
    pub(crate) fn set_first(&mut self, name: &'static str, field: Field<'a>) {
        self.fields.retain(|(of, _)| of != name);
        self.fields.insert(0, (Cow::Borrowed(name), field));
    }
}

impl Field<'_> {
    /// Whether it is `null`, which is as good as none.
    pub fn is_null(&self) -> bool {
        matches!(self, Self::Other(value) if value.is_null())
    }

    /// The elements, if it is an array.
    pub fn items(&self) -> Option<&[Value]> {
        match self {
            Self::Other(value) => value.as_array().map(Vec::as_slice),
            Self::Text(_) => None,
        }
    }

    /// The elements, if it is an array.
    pub(crate) fn into_items(self) -> Option<Vec<Value>> {
        match self {
            Self::Other(value) => match value.into_owned() {
                Value::Array(items) => Some(items),
                _ => None,
            },
            Self::Text(_) => None,
        }
    }

    /// The elements, to be changed.
    pub fn items_mut(&mut self) -> Option<&mut Vec<Value>> {
        match self {
            Self::Other(value) if value.is_array() => value.to_mut().as_array_mut(),
            _ => None,
        }
    }
}

impl<'a> From<&'a Value> for Field<'a> {
    fn from(value: &'a Value) -> Self {
        match value {
            Value::String(text) => Self::Text(Cow::Borrowed(text)),
            other => Self::Other(Cow::Borrowed(other)),
        }
    }
}

impl From<Value> for Field<'_> {
    fn from(value: Value) -> Self {
        match value {
            Value::String(text) => Self::Text(Cow::Owned(text)),
            other => Self::Other(Cow::Owned(other)),
        }
    }
}

impl<'de: 'a, 'a> Deserialize<'de> for Message<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Fields;
        impl<'de> Visitor<'de> for Fields {
            type Value = Message<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a message")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Message<'de>, A::Error> {
                let mut fields = Vec::new();
                while let Some(name) = map.next_key::<Text<'de>>()? {
                    fields.push((name.0, map.next_value()?));
                }
                Ok(Message { fields: without_repetitions(fields) })
            }
        }
        deserializer.deserialize_map(Fields)
    }
}

impl<'de: 'a, 'a> Deserialize<'de> for Field<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Any;
        impl<'de> Visitor<'de> for Any {
            type Value = Field<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a value")
            }

            fn visit_borrowed_str<E: Error>(self, text: &'de str) -> Result<Field<'de>, E> {
                Ok(Field::Text(Cow::Borrowed(text)))
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<Field<'de>, E> {
                Ok(Field::Text(Cow::Owned(text.to_owned())))
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Field<'de>, A::Error> {
                other(Value::deserialize(MapAccessDeserializer::new(map)))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, seq: A) -> Result<Field<'de>, A::Error> {
                other(Value::deserialize(SeqAccessDeserializer::new(seq)))
            }

            fn visit_bool<E: Error>(self, value: bool) -> Result<Field<'de>, E> {
                other(Ok(value))
            }

            fn visit_i64<E: Error>(self, value: i64) -> Result<Field<'de>, E> {
                other(Ok(value))
            }

            fn visit_u64<E: Error>(self, value: u64) -> Result<Field<'de>, E> {
                other(Ok(value))
            }

            fn visit_f64<E: Error>(self, value: f64) -> Result<Field<'de>, E> {
                other(Ok(value))
            }

            fn visit_unit<E: Error>(self) -> Result<Field<'de>, E> {
                other(Ok(Value::Null))
            }
        }
        deserializer.deserialize_any(Any)
    }
}

/// Of equal names the last one's value counts, in the first one's place, as in Python's `json`.
fn without_repetitions<'a>(fields: Vec<(Cow<'a, str>, Field<'a>)>) -> Vec<(Cow<'a, str>, Field<'a>)> {
    let mut kept: Vec<(Cow<'a, str>, Field<'a>)> = Vec::with_capacity(fields.len());
    // Comparing each with all is quickest for the few that messages have, and endless for the many that a
    // client may send.
    let mut places = (fields.len() > COMPARED_MAX).then(HashMap::new);
    for (name, field) in fields {
        let place = match &mut places {
            Some(places) => match places.entry(name.clone()) {
                Entry::Occupied(place) => Some(*place.get()),
                Entry::Vacant(vacant) => {
                    vacant.insert(kept.len());
                    None
                }
            },
            None => kept.iter().position(|(of, _)| *of == name),
        };
        match place {
            Some(place) => kept[place].1 = field,
            None => kept.push((name, field)),
        }
    }
    kept
}

fn other<'a, E>(value: Result<impl Into<Value>, E>) -> Result<Field<'a>, E> {
    value.map(|value| Field::Other(Cow::Owned(value.into())))
}

/// A name, borrowed where it has no escapes.
struct Text<'a>(Cow<'a, str>);

impl<'de: 'a, 'a> Deserialize<'de> for Text<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        match Field::deserialize(deserializer)? {
            Field::Text(text) => Ok(Self(text)),
            Field::Other(_) => Err(D::Error::custom("a name is no string")),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    /// What a message is as JSON.
    fn json_of(message: &Message<'_>) -> Value {
        let value = |field: &Field<'_>| match field {
            Field::Text(text) => Value::String(text.to_string()),
            Field::Other(value) => Value::clone(value),
        };
        Value::Object(message.fields().map(|(name, field)| (name.to_owned(), value(field))).collect())
    }

    fn any_json() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            any::<u64>().prop_map(Value::from),
            (-1e30..1e30).prop_map(Value::from),
            ".{0,8}".prop_map(Value::from),
        ];
        leaf.prop_recursive(3, 16, 4, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
                prop::collection::vec((".{0,4}", inner), 0..4)
                    .prop_map(|fields| Value::Object(fields.into_iter().collect())),
            ]
        })
    }

    proptest! {
        /// Read from bytes or made from a value, a message says what serde_json's own map says.
        #[test]
        fn a_message_is_its_json(fields in prop::collection::vec(("[abc\\u{e9}\n\"]{0,2}", any_json()), 0..30)) {
            let inner: Vec<String> = fields.iter().map(|(k, v)| format!("{}:{v}", Value::from(k.as_str()))).collect();
            let bytes = format!("{{{}}}", inner.join(","));
            let want: Value = serde_json::from_str(&bytes).unwrap();
            let read: Message<'_> = serde_json::from_str(&bytes).unwrap();
            prop_assert_eq!(json_of(&read).to_string(), want.to_string());
            prop_assert_eq!(json_of(&Message::of(&want).unwrap()).to_string(), want.to_string());
        }
    }

    #[test]
    fn text_is_borrowed_where_it_can_be() {
        let message: Message<'_> = serde_json::from_str(r#"{"role":"user","content":"a\n"}"#).unwrap();
        assert!(matches!(message.get("role"), Some(Field::Text(Cow::Borrowed("user")))));
        assert!(matches!(message.get("content"), Some(Field::Text(Cow::Owned(text))) if text == "a\n"));
        for wrong in ["3", "[]", "null", "\"a\""] {
            assert!(serde_json::from_str::<Message<'_>>(wrong).is_err() && Message::of(&json!(3)).is_none());
        }
    }
}
