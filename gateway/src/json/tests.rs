//! JSON taken apart here is what `serde_json` reads, with an outline and without.

use proptest::prelude::*;

use super::{cursor::string_end, *};

/// Any JSON, with escapes, white space, repeated keys.
fn json() -> impl Strategy<Value = String> {
    let space = || prop::sample::select(vec!["", " ", "\n\t", "\r "]);
    let string = prop::collection::vec(
        prop::sample::select(vec![
            "a",
            "é",
            "\\\"",
            "\\\\",
            "\\u00e9",
            "{",
            "]",
            ",",
            ":",
            "\\n",
            "\\ud83d\\ude00",
        ]),
        0..6,
    );
    // Some are long enough to be part of an outline, and so that escapes stand far from their beginning.
    let string = (string, prop::sample::select(vec![1, 1, 3, 40]))
        .prop_map(|(parts, times)| format!("\"{}\"", parts.concat().repeat(times)));
    let scalar = prop::sample::select(vec!["0", "-1.5e+3", "true", "false", "null", "1E9"]);
    let leaf = prop_oneof![string.clone(), scalar.prop_map(str::to_owned)];
    leaf.prop_recursive(4, 24, 5, move |inner| {
        let list =
            (prop::collection::vec((space(), inner.clone()), 0..5), space()).prop_map(|(items, end)| {
                let items: Vec<String> = items.into_iter().map(|(s, item)| format!("{s}{item}{s}")).collect();
                format!("[{}{end}]", items.join(","))
            });
        let field = (space(), string.clone(), space(), inner);
        let object = (prop::collection::vec(field, 0..5), space()).prop_map(|(fields, end)| {
            let fields: Vec<String> =
                fields.into_iter().map(|(s, name, t, value)| format!("{s}{name}{t}:{s}{value}{t}")).collect();
            format!("{{{}{end}}}", fields.join(","))
        });
        prop_oneof![list, object]
    })
}

/// Builds what the parts say, all the way down, with the last of repeated keys.
fn rebuilt(value: Value<'_>) -> serde_json::Value {
    if let Some(fields) = value.fields() {
        let fields = fields.map(|field| field.map(|(name, value)| (name.into_owned(), rebuilt(value))));
        return serde_json::Value::Object(fields.collect::<Result<_, _>>().unwrap());
    }
    if let Some(items) = value.items() {
        return items.map(|item| rebuilt(item.unwrap())).collect();
    }
    match value.text() {
        Some(text) => serde_json::Value::String(text.into_owned()),
        None => serde_json::from_str(value.raw()).unwrap(),
    }
}

fn document(text: &str) -> Result<serde_json::Value, Malformed> {
    let whole = |fields: Option<Fields<'_>>| {
        let fields = fields.ok_or(Malformed)?;
        let fields = fields.map(|field| field.map(|(name, value)| (name.into_owned(), rebuilt(value))));
        fields.collect::<Result<_, _>>().map(serde_json::Value::Object)
    };
    let read = whole(Value::document(text));
    assert_eq!(whole(Outline::of(text).document()), read, "its outline says something else");
    read
}

proptest! {
    #[test]
    fn what_serde_takes_is_taken_apart_alike(inner in json(), before in "[ \n]{0,2}", after in "[ \n]{0,2}") {
        let text = format!("{before}{{\"x\":{inner}}}{after}");
        let expected: serde_json::Value = serde_json::from_str(&text).unwrap();
        prop_assert_eq!(document(&text).unwrap(), expected);
    }

    #[test]
    fn what_is_called_malformed_is_refused_by_serde_too(text in "\\{[\"\\\\{}\\[\\],: a1é]{0,40}") {
        let fields = Value::document(&text).unwrap();
        prop_assert!(fields.size_hint().0 <= text.len());
        if Value::document(&text).unwrap().any(|field| field.is_err()) {
            prop_assert!(serde_json::from_str::<serde_json::Value>(&text).is_err(), "{}", text);
        }
        // Neither with an outline does it take what it refuses without, nor the other way round.
        let refused = |fields: Option<Fields<'_>>| fields.unwrap().any(|field| field.is_err());
        let outline = Outline::of(&text);
        prop_assert_eq!(refused(outline.document()), refused(Value::document(&text)));
    }

    #[test]
    fn a_string_ends_at_its_first_quote_that_is_not_escaped(text in "[a\"\\\\\u{22}\u{23}\u{5b}-\u{5d}é]{0,40}", at in 0_usize..3) {
        let mut expected = None;
        let mut escaped = false;
        let mut bytes = text.bytes().enumerate().skip(at);
        while let Some((i, byte)) = bytes.next() {
            match byte {
                b'"' => {
                    expected = Some((i + 1, escaped));
                    break;
                }
                b'\\' => {
                    escaped = true;
                    bytes.next();
                }
                _ => {}
            }
        }
        prop_assert_eq!(string_end(text.as_bytes(), at), expected);
    }

    #[test]
    fn the_last_field_of_a_document_is_its_own_or_none(inner in json(), last in json(), more in json(), all: bool) {
        let text = format!("{{\"z\":{inner},\"it\":{{\"a\":{last}, \"b\":{inner}}} ,\"y\":{more}}}");
        let value: serde_json::Value = serde_json::from_str(&text).unwrap();
        // Whoever reads it need not read it to its end.
        let read = |fields: &mut Fields<'_>| {
            let first = fields.next()?.ok().map(|(_, first)| rebuilt(first));
            if all {
                fields.for_each(drop);
            }
            first
        };
        let found = Value::last_object_of_document(&text, &Finder::new("\"it\""), read);
        prop_assert!(found.as_ref().is_none_or(|found| *found == value["it"]["a"]), "{found:?}");
        if !text.contains("it\\\"") && text.matches("\"it\"").count() == 1 {
            prop_assert!(found.is_some());
        }
        for nested in [
            format!("{{\"z\":{{\"it\":{{\"a\":{last}}}}},\"y\":1}}"),
            format!("{{\"it\":{{\"a\":{last}}},\"y\":1"),
            format!("{{\"it\":{{\"a\":{last},\"y\":1}}"),
            format!("{{\"it\":[{last}]}}"),
        ] {
            prop_assert_eq!(Value::last_object_of_document(&nested, &Finder::new("\"it\""), read), None, "{}", nested);
        }
    }
}

#[test]
fn what_is_broken_off_or_too_deep_is_malformed() {
    let deep = format!("{{\"a\":{}{}}}", "[".repeat(200), "]".repeat(200));
    for text in [
        "",
        " ",
        "[]",
        "{",
        "{\"a\":1",
        "{\"a",
        "{\"a\\\"",
        "{\"a\":[1,2",
        "{} {}",
        "{}x",
        "{\"a\":1,,\"b\":2}",
        "{\"a\" 1}",
        "{\"a\":}",
        "{a:1}",
        &deep,
    ] {
        assert!(document(text).is_err(), "{text:?}");
    }
}
