//! The template filter `tojson` as Hugging Face's templates expect it, which is Python's `json.dumps(x,
//! ensure_ascii=False)`: `", "` and `": "` between items, no HTML escaping. minijinja's own filter differs in both.

use std::fmt::Write as _;

use minijinja::value::{Kwargs, Value};
use minijinja::{Error, ErrorKind};

/// `value | tojson(indent=None, ensure_ascii=False, sort_keys=False)`. Keys come out sorted either way: the
/// engine's maps are.
pub(crate) fn tojson(value: Value, indent: Option<usize>, options: Kwargs) -> Result<String, Error> {
    let indent = match indent {
        Some(indent) => Some(indent),
        None => options.get::<Option<usize>>("indent")?,
    };
    let ascii = options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false);
    let _sorted = options.get::<Option<bool>>("sort_keys")?;
    options.assert_all_used()?;
    let json = serde_json::to_value(&value)
        .map_err(|e| Error::new(ErrorKind::InvalidOperation, "this value has no JSON form").with_source(e))?;
    let mut out = String::new();
    Writer { indent, ascii }.value(&json, 0, &mut out);
    Ok(out)
}

struct Writer {
    indent: Option<usize>,
    ascii: bool,
}

impl Writer {
    fn value(&self, value: &serde_json::Value, depth: usize, out: &mut String) {
        use serde_json::Value::{Array, Object, String as Text};
        match value {
            Text(text) => self.text(text, out),
            Array(items) if items.is_empty() => out.push_str("[]"),
            Array(items) => {
                out.push('[');
                for (i, item) in items.iter().enumerate() {
                    self.separate(i, depth + 1, out);
                    self.value(item, depth + 1, out);
                }
                self.line(depth, out);
                out.push(']');
            }
            Object(fields) if fields.is_empty() => out.push_str("{}"),
            Object(fields) => {
                out.push('{');
                for (i, (key, item)) in fields.iter().enumerate() {
                    self.separate(i, depth + 1, out);
                    self.text(key, out);
                    out.push_str(": ");
                    self.value(item, depth + 1, out);
                }
                self.line(depth, out);
                out.push('}');
            }
            scalar => out.push_str(&scalar.to_string()),
        }
    }

    /// What stands before item `i`.
    fn separate(&self, i: usize, depth: usize, out: &mut String) {
        if i > 0 {
            out.push_str(if self.indent.is_some() { "," } else { ", " });
        }
        self.line(depth, out);
    }

    fn line(&self, depth: usize, out: &mut String) {
        if let Some(indent) = self.indent {
            out.push('\n');
            out.extend(std::iter::repeat_n(' ', indent * depth));
        }
    }

    fn text(&self, text: &str, out: &mut String) {
        let quoted = serde_json::Value::from(text).to_string();
        if !self.ascii {
            out.push_str(&quoted);
            return;
        }
        for c in quoted.chars() {
            if c.is_ascii() {
                out.push(c);
            } else {
                let mut units = [0; 2];
                for unit in c.encode_utf16(&mut units) {
                    let _ = write!(out, "\\u{unit:04x}"); // a String takes everything
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dumps(value: &serde_json::Value, options: &[(&str, Value)]) -> String {
        let options = options.iter().map(|(k, v)| (*k, v.clone())).collect();
        tojson(Value::from(minijinja::value::Serde(value)), None, options).unwrap()
    }

    /// Expected texts are those of Python's `json.dumps(..., ensure_ascii=False)`.
    #[test]
    fn reads_as_python_writes_it() {
        let value =
            serde_json::json!({"a": [1, 2.5, null, true], "b": {"c": "<é> \"q\" \n"}, "e": [], "f": {}});
        assert_eq!(
            dumps(&value, &[]),
            r#"{"a": [1, 2.5, null, true], "b": {"c": "<é> \"q\" \n"}, "e": [], "f": {}}"#
        );
        assert_eq!(
            dumps(&serde_json::json!({"a": [1]}), &[("indent", 2.into())]),
            "{\n  \"a\": [\n    1\n  ]\n}"
        );
        assert_eq!(
            dumps(&serde_json::json!("é😀"), &[("ensure_ascii", true.into())]),
            r#""\u00e9\ud83d\ude00""#
        );
    }

    #[test]
    fn an_unknown_option_is_an_error() {
        let options = [("color", Value::from(1))].into_iter().collect();
        assert!(tojson(Value::from(1), None, options).is_err());
    }
}
