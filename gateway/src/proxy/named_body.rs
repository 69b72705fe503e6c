//! A body in which another model is named, or one more field is, every other byte as it was: an object in
//! JSON, or a form. Where a field stands several times, the last one counts, as in Python's readers.

use std::ops::Range;

use bytes::{BufMut, Bytes, BytesMut};

use crate::{json::Value, machine::heap, prompt::content::Form};

/// The field of all APIs that names a model.
const MODEL: &str = "model";

/// The body with this model in place of its own; `None` where it names none. `kind` is its content type.
pub fn with_model(body: &Bytes, kind: Option<&[u8]>, model: &str) -> Option<Bytes> {
    if let Some(place) = Form::place_of_model(kind, body) {
        return Some(match place {
            (at, true) => spliced(
                body,
                &at,
                form_urlencoded::byte_serialize(model.as_bytes()).collect::<String>().as_bytes(),
            ),
            (at, false) => spliced(body, &at, model.as_bytes()),
        });
    }
    with_string(std::str::from_utf8(body).ok()?, MODEL, model)
}

/// A JSON object with this string in place of the value of its last field of this name; `None` where it has
/// none, or is no object.
pub fn with_string(text: &str, field: &str, string: &str) -> Option<Bytes> {
    let mut last = None;
    for part in Value::document(text)? {
        let (name, value) = part.ok()?;
        if name == field {
            last = Some(value.raw());
        }
    }
    let old = last?;
    let start = old.as_ptr() as usize - text.as_ptr() as usize;
    // A string is always written.
    let new = serde_json::to_string(string).ok()?;
    Some(spliced(text.as_bytes(), &(start..start + old.len()), new.as_bytes()))
}

/// An object in JSON with one more field in front, whose value is JSON too.
pub fn with_field(object: &Bytes, name: &str, json: &str) -> Bytes {
    with_fields(object, &format!("\"{name}\":{json}"))
}

/// An object in JSON with these fields in front, as they are written.
pub fn with_fields(object: &Bytes, fields: &str) -> Bytes {
    let inside = memchr::memchr(b'{', object).map_or(0, |at| at + 1);
    let rest = &object[inside..];
    let mut out = BytesMut::with_capacity(heap::room_for(object.len() + fields.len() + 8));
    out.put_u8(b'{');
    out.put_slice(fields.as_bytes());
    if !rest.trim_ascii_start().starts_with(b"}") {
        out.put_u8(b',');
    }
    out.put_slice(rest);
    out.freeze()
}

/// An object in JSON without the fields of these names, the others as they are written; as it is where it has
/// none of them, or is no object.
pub fn without(object: &Bytes, names: &[&str]) -> Bytes {
    let unchanged = || object.clone();
    let Some(fields) = std::str::from_utf8(object).ok().and_then(Value::document) else { return unchanged() };
    let Ok(fields) = fields.collect::<Result<Vec<_>, _>>() else { return unchanged() };
    if !fields.iter().any(|(name, _)| names.contains(&name.as_ref())) {
        return unchanged();
    }
    let mut out = BytesMut::with_capacity(heap::room_for(object.len()));
    for (name, value) in fields.iter().filter(|(name, _)| !names.contains(&name.as_ref())) {
        out.put_u8(if out.is_empty() { b'{' } else { b',' });
        // A name is always written.
        out.put_slice(serde_json::to_string(name.as_ref()).unwrap_or_default().as_bytes());
        out.put_u8(b':');
        out.put_slice(value.raw().as_bytes());
    }
    out.put_slice(if out.is_empty() { b"{}" } else { b"}" });
    out.freeze()
}

fn spliced(body: &[u8], at: &Range<usize>, new: &[u8]) -> Bytes {
    let length = body.len() - at.len() + new.len();
    let mut out = BytesMut::with_capacity(heap::room_for(length));
    out.put_slice(&body[..at.start]);
    out.put_slice(new);
    out.put_slice(&body[at.end..]);
    out.freeze()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn json(body: &str, model: &str) -> Option<String> {
        let out = with_model(&Bytes::copy_from_slice(body.as_bytes()), None, model)?;
        Some(String::from_utf8(out.to_vec()).unwrap())
    }

    #[test]
    fn the_model_s_string_is_all_that_changes() {
        for (body, want) in [
            (r#"{"model":"a","n" : 1}"#, r#"{"model":"real","n" : 1}"#),
            (
                " { \"n\":1.0e5,\n\"model\" : \"\\u0061\" ,\"x\":\"\\u00e9\"} ",
                " { \"n\":1.0e5,\n\"model\" : \"real\" ,\"x\":\"\\u00e9\"} ",
            ),
            (r#"{"model":"first","mod\u0065l":"last"}"#, r#"{"model":"first","mod\u0065l":"real"}"#),
            (r#"{"x":{"model":"a"},"model":"b"}"#, r#"{"x":{"model":"a"},"model":"real"}"#),
        ] {
            assert_eq!(json(body, "real").as_deref(), Some(want));
        }
        assert_eq!(json(r#"{"model":"a"}"#, "q\"\\é").unwrap(), r#"{"model":"q\"\\é"}"#);
        for body in ["", "[]", "{}", r#"{"x":{"model":"a"}}"#, r#"{"model":"a""#, "model=a"] {
            assert_eq!(json(body, "real"), None, "{body}");
        }
    }

    #[test]
    fn fields_are_left_out_by_what_their_names_mean() {
        let left = |body: &str| {
            String::from_utf8(without(&Bytes::copy_from_slice(body.as_bytes()), &["x", "é"]).to_vec())
                .unwrap()
        };
        for (body, want) in [
            (r#" { "a" : 1.0e5, "x":[{"x":2}], "b":"é" } "#, r#"{"a":1.0e5,"b":"é"}"#),
            (r#"{"\u0078":1,"x":2,"\u00e9":3}"#, "{}"),
            (r#"{"a":{"x":1}}"#, r#"{"a":{"x":1}}"#),
            ("[]", "[]"),
            (r#"{"x":1"#, r#"{"x":1"#),
        ] {
            assert_eq!(left(body), want, "{body}");
        }
    }

    #[test]
    fn a_form_s_field_is_all_that_changes() {
        let parts = |first: &str, model: &str| {
            let field = |name: &str, value: &str| {
                format!("--x\r\ncontent-disposition: form-data; name=\"{name}\"\r\n\r\n{value}\r\n")
            };
            let file =
                "--x\r\ncontent-disposition: form-data; name=\"file\"; filename=\"model\"\r\n\r\nmodel\r\n";
            [&field("model", first), file, &field("model", model), &field("n", "1"), "--x--\r\n"].concat()
        };
        let multipart = &b"multipart/form-data; boundary=x"[..];
        let body = Bytes::from(parts("other", "alias"));
        assert_eq!(with_model(&body, Some(multipart), "a real one").unwrap(), parts("other", "a real one"));
        let pairs = &b"application/x-www-form-urlencoded"[..];
        for (body, want) in [
            (&b"a=b&model=b%65ta&c=d"[..], &b"a=b&model=a%2Freal+one&c=d"[..]),
            (b"model=x&mod%65l=y", b"model=x&mod%65l=a%2Freal+one"),
            (b"model=", b"model=a%2Freal+one"),
        ] {
            let body = Bytes::from_static(body);
            assert_eq!(with_model(&body, Some(pairs), "a/real one").unwrap(), want);
        }
        for (kind, body) in [(multipart, "--x--"), (pairs, "a=b&models=c"), (pairs, "model")] {
            assert_eq!(with_model(&Bytes::from_static(body.as_bytes()), Some(kind), "m"), None, "{body}");
        }
    }

    proptest! {
        /// Whatever stands around it, the new body says the new model and else what it said before.
        #[test]
        fn any_object_says_the_same_but_for_its_model(
            before in prop::collection::vec(("[a-z\"\\\\]{0,4}", "\\PC{0,20}"), 0..4),
            old in "\\PC{0,10}", new in "\\PC{0,10}", after in "\\PC{0,20}",
        ) {
            let mut fields: Vec<String> = before
                .iter()
                .map(|(name, value)| format!("{}: {}", serde_json::json!(name), serde_json::json!([value])))
                .collect();
            fields.push(format!("\"model\": {}", serde_json::json!(old)));
            fields.push(format!("\"after\":{}", serde_json::json!(after)));
            let body = format!("{{{}}}", fields.join(" ,"));
            let out = json(&body, &new).unwrap();
            let mut want: serde_json::Value = serde_json::from_str(&body).unwrap();
            want["model"] = serde_json::json!(new);
            prop_assert_eq!(serde_json::from_str::<serde_json::Value>(&out).unwrap(), want);
            prop_assert_eq!(out.len() + serde_json::json!(old).to_string().len(),
                body.len() + serde_json::json!(new).to_string().len());
        }

        /// No bytes are too odd to be looked through.
        #[test]
        fn odd_bodies_are_looked_through(body in prop::collection::vec(any::<u8>(), 0..200), pairs in any::<bool>()) {
            let kind = if pairs { &b"application/x-www-form-urlencoded"[..] } else { b"multipart/form-data; boundary=a" };
            let body = Bytes::from(body);
            for kind in [Some(kind), None] {
                if let Some(out) = with_model(&body, kind, "m") {
                    prop_assert!(out.len() <= body.len() + 3);
                }
            }
        }
    }
}
