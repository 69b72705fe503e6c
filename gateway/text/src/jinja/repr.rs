//! Values as text, as Python's `str` and `repr` write them, and as `json.dumps` does.

use std::fmt::Write as _;
use std::sync::Arc;

use super::Error;
use super::value::{Value, View};

/// Python's `str(value)`: a text as it is, an undefined value as no text, all else as its `repr`.
pub(super) fn to_str(value: &Value) -> Arc<str> {
    match value {
        Value::Text(text) => text.text.clone(),
        Value::Undefined(_) => "".into(),
        other => {
            let mut out = String::new();
            write_repr(other, &mut out);
            out.into()
        }
    }
}

/// Appends Python's `str(value)`, as [`to_str`] has it, without a text in between.
pub(super) fn write_str(value: &Value, out: &mut String) {
    match value {
        Value::Text(text) => out.push_str(&text.text),
        Value::Undefined(_) => {}
        other => write_repr(other, out),
    }
}

/// Appends Python's `repr(value)`, which puts texts in quotes.
pub(super) fn write_repr(value: &Value, out: &mut String) {
    // Writing to a String cannot fail.
    let _ = match value {
        Value::Undefined(_) => write!(out, "Undefined"),
        Value::None => write!(out, "None"),
        Value::Bool(b) => write!(out, "{}", if *b { "True" } else { "False" }),
        Value::Int(int) => write!(out, "{int}"),
        Value::Float(float) => write!(out, "{}", float_repr(*float)),
        Value::Text(text) if text.safe => {
            out.push_str("Markup(");
            write_quoted(&text.text, out);
            write!(out, ")")
        }
        Value::Text(text) => {
            write_quoted(&text.text, out);
            Ok(())
        }
        Value::List(items) => {
            write_items("[", items, "]", out);
            Ok(())
        }
        Value::Tuple(items) => {
            write_items("(", items, if items.len() == 1 { ",)" } else { ")" }, out);
            Ok(())
        }
        Value::View(view, items) => {
            let name = match view {
                View::Keys => "dict_keys([",
                View::Values => "dict_values([",
                View::Items => "dict_items([",
            };
            write_items(name, items, "])", out);
            Ok(())
        }
        Value::Dict(dict) => {
            write_dict(dict.entries(), out);
            Ok(())
        }
        Value::Namespace(dict) => {
            out.push_str("<Namespace ");
            write_dict(dict.borrow().entries(), out);
            write!(out, ">")
        }
        Value::Range(r) if r.step == 1 => write!(out, "range({}, {})", r.start, r.stop),
        Value::Range(r) => write!(out, "range({}, {}, {})", r.start, r.stop, r.step),
        Value::Macro(m) => write!(out, "<Macro '{}'>", m.def.name),
        other => write!(out, "<{} object>", other.type_name()),
    };
}

fn write_items(open: &str, items: &[Value], close: &str, out: &mut String) {
    out.push_str(open);
    for (i, item) in items.iter().enumerate() {
        if i > 0 {
            out.push_str(", ");
        }
        write_repr(item, out);
    }
    out.push_str(close);
}

fn write_dict(entries: &[(Value, Value)], out: &mut String) {
    out.push('{');
    for (i, (key, value)) in entries.iter().enumerate() {
        if i > 0 {
            out.push_str(", ");
        }
        write_repr(key, out);
        out.push_str(": ");
        write_repr(value, out);
    }
    out.push('}');
}

/// A string as Python quotes it: single quotes unless only those are inside; what cannot be printed is
/// escaped.
pub(super) fn write_quoted(text: &str, out: &mut String) {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push(quote);
    for c in text.chars() {
        match c {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            c if c == quote => out.extend(['\\', c]),
            c if c == ' ' || printable(c) => out.push(c),
            c => {
                let code = u32::from(c);
                let _ = match code {
                    0..=0xff => write!(out, "\\x{code:02x}"),
                    0x100..=0xffff => write!(out, "\\u{code:04x}"),
                    _ => write!(out, "\\U{code:08x}"),
                };
            }
        }
    }
    out.push(quote);
}

/// Whether Python would print the character inside a `repr`. Rust's `escape_debug` knows, except that it also
/// escapes marks that combine with what is before them, unless something is.
fn printable(c: char) -> bool {
    if c.is_ascii() {
        return !c.is_ascii_control();
    }
    let pair: String = ['a', c].into_iter().collect();
    pair.escape_debug().nth(1) == Some(c)
}

/// Python's shortest text of a float: an exponent below 1e-4 and from 1e16 on, written with its sign and two
/// digits.
pub(super) fn float_repr(float: f64) -> String {
    if float.is_nan() {
        return "nan".to_owned();
    }
    if float.is_infinite() {
        return if float > 0.0 { "inf" } else { "-inf" }.to_owned();
    }
    let text = format!("{float:?}"); // has the same bounds
    match text.split_once('e') {
        Some((mantissa, exponent)) => {
            let (sign, digits) = match exponent.strip_prefix('-') {
                Some(digits) => ('-', digits),
                None => ('+', exponent),
            };
            format!("{}e{sign}{digits:0>2}", mantissa.strip_suffix(".0").unwrap_or(mantissa))
        }
        None => text,
    }
}

/// `json.dumps` with its options.
pub(super) struct Json {
    pub(super) ensure_ascii: bool,
    pub(super) indent: Option<String>,
    pub(super) item_separator: String,
    pub(super) key_separator: String,
    pub(super) sort_keys: bool,
}

impl Json {
    pub(super) fn dumps(&self, value: &Value) -> Result<String, Error> {
        let mut out = String::new();
        self.write(value, 0, &mut out)?;
        Ok(out)
    }

    fn write(&self, value: &Value, depth: usize, out: &mut String) -> Result<(), Error> {
        match value {
            Value::None => out.push_str("null"),
            Value::Bool(b) => out.push_str(if *b { "true" } else { "false" }),
            Value::Int(int) => out.push_str(&int.to_string()),
            Value::Float(float) => out.push_str(&json_float(*float)),
            Value::Text(text) => self.text(&text.text, out),
            Value::List(items) | Value::Tuple(items) => {
                out.push('[');
                for (i, item) in items.iter().enumerate() {
                    self.separate(i, depth + 1, out);
                    self.write(item, depth + 1, out)?;
                }
                self.end(!items.is_empty(), depth, out);
                out.push(']');
            }
            Value::Dict(dict) => {
                let mut entries: Vec<&(Value, Value)> = dict.entries().iter().collect();
                if self.sort_keys {
                    super::filters::sort_by(&mut entries, |entry| Ok(entry.0.clone()), false)?;
                }
                out.push('{');
                for (i, (key, item)) in entries.into_iter().enumerate() {
                    self.separate(i, depth + 1, out);
                    self.key(key, out)?;
                    out.push_str(&self.key_separator);
                    self.write(item, depth + 1, out)?;
                }
                self.end(!dict.entries().is_empty(), depth, out);
                out.push('}');
            }
            other => {
                return Err(Error::new(format!("'{}' has no form in JSON", other.type_name())));
            }
        }
        Ok(())
    }

    fn key(&self, key: &Value, out: &mut String) -> Result<(), Error> {
        match key {
            Value::Text(text) => self.text(&text.text, out),
            Value::None | Value::Bool(_) | Value::Int(_) | Value::Float(_) => {
                out.push('"');
                self.write(key, 0, out)?;
                out.push('"');
            }
            other => return Err(Error::new(format!("'{}' is no key in JSON", other.type_name()))),
        }
        Ok(())
    }

    /// What stands before item `i`.
    fn separate(&self, i: usize, depth: usize, out: &mut String) {
        if i > 0 {
            out.push_str(&self.item_separator);
        }
        self.line(depth, out);
    }

    fn end(&self, any: bool, depth: usize, out: &mut String) {
        if any {
            self.line(depth, out);
        }
    }

    fn line(&self, depth: usize, out: &mut String) {
        if let Some(indent) = &self.indent {
            out.push('\n');
            out.extend(std::iter::repeat_n(indent.as_str(), depth));
        }
    }

    fn text(&self, text: &str, out: &mut String) {
        out.push('"');
        for c in text.chars() {
            match c {
                '"' => out.push_str("\\\""),
                '\\' => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                '\x08' => out.push_str("\\b"),
                '\x0c' => out.push_str("\\f"),
                c if c < ' ' || (self.ensure_ascii && !(' '..='~').contains(&c)) => {
                    let mut units = [0; 2];
                    for unit in c.encode_utf16(&mut units) {
                        let _ = write!(out, "\\u{unit:04x}");
                    }
                }
                c => out.push(c),
            }
        }
        out.push('"');
    }
}

fn json_float(float: f64) -> String {
    match float {
        f if f.is_nan() => "NaN".to_owned(),
        f if f == f64::INFINITY => "Infinity".to_owned(),
        f if f == f64::NEG_INFINITY => "-Infinity".to_owned(),
        f => float_repr(f),
    }
}
