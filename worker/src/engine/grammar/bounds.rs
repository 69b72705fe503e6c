//! How large and how intricate a form may be. Checked before it is compiled, since llguidance recurses with a
//! form's depth and multiplies the parts of what must hold at once, neither of which its own counted steps
//! bound.

use serde_json::{Map, Value};

use super::Form;
use crate::limits::{
    GRAMMAR_BYTES_MAX, GRAMMAR_JOINED_MAX, GRAMMAR_LARK_BYTES_MAX, GRAMMAR_LINES_MAX, GRAMMAR_MULTIPLE_MAX,
    GRAMMAR_NEGATIONS_MAX, GRAMMAR_PATTERN_NAMES_MAX, GRAMMAR_PROPERTIES_MAX, GRAMMAR_REGEX_BYTES_MAX,
    GRAMMAR_SCHEMA_OBJECTS_MAX,
};

/// Keys that lead from a schema to others.
const COMBINATORS: [&str; 5] = ["$ref", "$dynamicRef", "allOf", "anyOf", "oneOf"];
/// Keys that become regular expressions, all of which must match where schemas are joined.
const EXPRESSIONS: [&str; 3] = ["pattern", "format", "multipleOf"];

/// A bound that a form exceeds.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub(crate) enum FormBound {
    /// It has too many parts of a kind, or too many bytes.
    #[error("it has {number} {what}; the most is {most}")]
    Number { what: &'static str, number: usize, most: usize },
    #[error("multipleOf is {0}; the most is {GRAMMAR_MULTIPLE_MAX}")]
    Multiple(f64),
    #[error("the product of multipleOf where schemas are joined is {0}; the most is {GRAMMAR_MULTIPLE_MAX}")]
    Product(f64),
}

/// Refuses a form that is over a bound; the error says which.
pub(super) fn check(form: &Form) -> Result<(), FormBound> {
    match form {
        Form::Json(schema) => check_schemas([schema]),
        Form::Regex(regex) => at_most("bytes", regex.len(), GRAMMAR_REGEX_BYTES_MAX),
        Form::Lark(lark) => check_lark(lark),
        Form::Composed(lark) => at_most("bytes", lark.len(), GRAMMAR_BYTES_MAX),
    }
}

/// The same of all schemas that a form is composed of.
pub(super) fn check_schemas<'a>(schemas: impl IntoIterator<Item = &'a Value>) -> Result<(), FormBound> {
    let mut seen = Seen::default();
    for schema in schemas {
        seen.walk(schema)?;
    }
    seen.check()
}

fn check_lark(lark: &str) -> Result<(), FormBound> {
    at_most("bytes", lark.len(), GRAMMAR_LARK_BYTES_MAX)?;
    at_most("lines", lark.lines().count(), GRAMMAR_LINES_MAX)?;
    let (ands, nots) = operators(lark);
    at_most("operators &", ands, GRAMMAR_JOINED_MAX)?;
    at_most("operators ~", nots, GRAMMAR_NEGATIONS_MAX)?;
    // Wherever `%json` stands, so that none is missed; in a string it mostly is no JSON.
    let schemas: Vec<Value> = lark
        .match_indices("%json")
        .filter_map(|(at, mark)| {
            serde_json::Deserializer::from_str(&lark[at + mark.len()..]).into_iter().next()?.ok()
        })
        .collect();
    check_schemas(&schemas)
}

/// How often `&` and `~` stand outside of strings and regular expressions, neither of which goes over a
/// line's end.
fn operators(lark: &str) -> (usize, usize) {
    let (mut ands, mut nots) = (0, 0);
    for line in lark.lines() {
        let mut inside = None;
        let mut bytes = line.bytes();
        while let Some(byte) = bytes.next() {
            match (inside, byte) {
                (Some(_), b'\\') => {
                    bytes.next();
                }
                (Some(end), _) if byte == end => inside = None,
                (None, b'"' | b'/') => inside = Some(byte),
                (None, b'&') => ands += 1,
                (None, b'~') => nots += 1,
                _ => {}
            }
        }
    }
    (ands, nots)
}

/// What is counted of schemas.
#[derive(Default)]
struct Seen {
    /// JSON objects: schemas, and what holds them.
    objects: usize,
    bytes: usize,
    /// How many fields `pattern` and `format` there are.
    strings: usize,
    /// The values of `multipleOf`, each once.
    multiples: Vec<f64>,
    /// Whether what different schemas say may have to hold at once.
    joins: bool,
}

impl Seen {
    fn walk(&mut self, schema: &Value) -> Result<(), FormBound> {
        let mut open = vec![schema];
        while let Some(value) = open.pop() {
            match value {
                Value::Array(items) => {
                    self.bytes += items.len();
                    open.extend(items);
                }
                Value::Object(fields) => {
                    self.see(fields)?;
                    open.extend(fields.values());
                }
                Value::String(text) => self.bytes += text.len(),
                _ => {}
            }
            at_most("bytes", self.bytes, GRAMMAR_BYTES_MAX)?;
            at_most("JSON objects", self.objects, GRAMMAR_SCHEMA_OBJECTS_MAX)?;
        }
        Ok(())
    }

    fn see(&mut self, fields: &Map<String, Value>) -> Result<(), FormBound> {
        self.objects += 1;
        self.bytes += fields.keys().map(String::len).sum::<usize>();
        let names = |key: &str| fields.get(key).and_then(Value::as_object).map_or(0, Map::len);
        at_most("properties in one object", names("properties"), GRAMMAR_PROPERTIES_MAX)?;
        at_most("patternProperties in one object", names("patternProperties"), GRAMMAR_PATTERN_NAMES_MAX)?;
        let count = |keys: &[&str]| keys.iter().filter(|key| fields.contains_key(**key)).count();
        let expressions = count(&EXPRESSIONS);
        let combinators = count(&COMBINATORS);
        self.joins |= fields.contains_key("allOf") || combinators > 1 || combinators == 1 && expressions > 0;
        if let Some(multiple) = fields.get("multipleOf").and_then(Value::as_f64) {
            self.multiple(multiple)?;
        }
        self.strings += count(&EXPRESSIONS[..2]);
        Ok(())
    }

    /// A number's remainder by it is a state of an automaton: of 0.25, those of 25.
    fn multiple(&mut self, multiple: f64) -> Result<(), FormBound> {
        let digits = format!("{multiple}")
            .bytes()
            .filter(u8::is_ascii_digit)
            .fold(0.0, |number, digit| number * 10.0 + f64::from(digit - b'0'));
        if digits > GRAMMAR_MULTIPLE_MAX {
            return Err(FormBound::Multiple(multiple));
        }
        if !self.multiples.contains(&digits) {
            self.multiples.push(digits);
        }
        Ok(())
    }

    fn check(&self) -> Result<(), FormBound> {
        if !self.joins {
            return Ok(());
        }
        // Each more multiplies the others.
        at_most(
            "of pattern and format beside allOf, or where schemas are joined",
            self.strings,
            GRAMMAR_JOINED_MAX,
        )?;
        let product: f64 = self.multiples.iter().product();
        if product > GRAMMAR_MULTIPLE_MAX {
            return Err(FormBound::Product(product));
        }
        Ok(())
    }
}

fn at_most(what: &'static str, number: usize, most: usize) -> Result<(), FormBound> {
    if number <= most { Ok(()) } else { Err(FormBound::Number { what, number, most }) }
}
