//! What stands after `|`: Jinja2's filters over single values; those over sequences are in `sequences.rs`.

use std::cmp::Ordering;
use std::rc::Rc;

use super::call::{flag_or, int_or, required};
use super::eval::{CallArgs, Interpreter};
use super::repr::{Json, to_str, write_repr};
use super::value::{Value, order, undefined_error};
use super::{Error, format, methods, ops, sequences};

/// Names of all filters.
pub(super) const NAMES: [&str; 46] = [
    "abs",
    "attr",
    "batch",
    "capitalize",
    "center",
    "count",
    "d",
    "default",
    "dictsort",
    "e",
    "escape",
    "first",
    "float",
    "forceescape",
    "format",
    "groupby",
    "indent",
    "int",
    "items",
    "join",
    "last",
    "length",
    "list",
    "lower",
    "map",
    "max",
    "min",
    "pprint",
    "reject",
    "rejectattr",
    "replace",
    "reverse",
    "round",
    "safe",
    "select",
    "selectattr",
    "slice",
    "sort",
    "string",
    "sum",
    "title",
    "tojson",
    "trim",
    "truncate",
    "unique",
    "upper",
];

/// Filters that do not go through a value that is no text.
pub(super) const LOOK_AT_AN_END: [&str; 7] = ["count", "d", "default", "first", "last", "length", "string"];

/// What `value | name(args)` comes to; an error where no filter has this name.
pub(super) fn apply(i: &mut Interpreter, name: &str, value: Value, args: CallArgs) -> Result<Value, Error> {
    match name {
        "default" | "d" => {
            let [default, boolean] = args.bind(name, ["default_value", "boolean"])?;
            let absent = value.is_undefined() || (flag_or(boolean.as_ref(), false) && !value.truth());
            Ok(if absent { default.unwrap_or_else(|| Value::text("")) } else { value })
        }
        "length" | "count" => {
            let [] = args.bind(name, [])?;
            Ok(Value::Int(value.len()? as i128))
        }
        "tojson" => tojson(&value, args),
        "abs" | "round" | "int" | "float" => number(name, &value, args),
        "attr" => {
            let [attribute] = args.bind(name, ["name"])?;
            let attribute = to_str(&required(attribute, name)?);
            // Unlike a dot, only what the object itself has, and not what it holds.
            Ok(ops::member(i, &value, &attribute)?.unwrap_or_else(|| Value::undefined(&attribute)))
        }
        "string" | "safe" | "escape" | "e" | "forceescape" | "pprint" => {
            let [] = args.bind(name, [])?;
            Ok(marked(name, value))
        }
        "lower" | "upper" | "capitalize" | "center" | "trim" => text_method(i, name, value, args),
        "title" => {
            let [] = args.bind(name, [])?;
            Ok(Value::text(title(&to_str(&value))))
        }
        "replace" => {
            let [old, new, count] = args.bind(name, ["old", "new", "count"])?;
            let (old, new) = (to_str(&required(old, name)?), to_str(&required(new, name)?));
            let count = count.filter(|c| !matches!(c, Value::None));
            let count = int_or(count.as_ref(), -1)?;
            methods::replace(&to_str(&value), &old, &new, count).map(Value::text)
        }
        "format" => {
            let text = to_str(&value);
            let operand = if args.keyword.is_empty() {
                Value::tuple(args.positional)
            } else {
                let pairs = args.keyword.into_iter().map(|(k, v)| (Value::text(k), v));
                Value::Dict(Rc::new(super::value::Dict::from_pairs(pairs)))
            };
            Ok(Value::text(format::percent(&text, &operand, false)?))
        }
        "indent" => indent(&value, args),
        "truncate" => truncate(&value, args),
        _ if NAMES.contains(&name) => sequences::apply(i, name, value, args),
        _ => Err(Error::new(format!("there is no filter '{name}'"))),
    }
}

fn marked(name: &str, value: Value) -> Value {
    match (name, value) {
        ("safe", value) => Value::markup(to_str(&value), true),
        ("escape" | "e", Value::Text(text)) if text.safe => Value::Text(text),
        ("escape" | "e" | "forceescape", value) => Value::markup(ops::escape(&to_str(&value)), true),
        ("pprint", value) => {
            let mut out = String::new();
            write_repr(&value, &mut out);
            Value::text(out)
        }
        (_, Value::Text(text)) => Value::Text(text),
        (_, value) => Value::text(to_str(&value)),
    }
}

/// Filters that are the string's method.
fn text_method(i: &mut Interpreter, name: &str, value: Value, args: CallArgs) -> Result<Value, Error> {
    let text = match value {
        Value::Text(text) => Value::Text(text),
        value => Value::text(to_str(&value)),
    };
    match name {
        "trim" => methods::call(i, &text, "strip", args),
        "center" => {
            let [width] = args.bind(name, ["width"])?;
            let args = CallArgs { positional: vec![width.unwrap_or(Value::Int(80))], keyword: Vec::new() };
            methods::call(i, &text, "center", args)
        }
        "lower" => methods::call(i, &text, "lower", args),
        "upper" => methods::call(i, &text, "upper", args),
        _ => methods::call(i, &text, "capitalize", args),
    }
}

/// Jinja2's title case: a word begins after a blank, a hyphen or an opening bracket.
fn title(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut begins = true;
    for c in text.chars() {
        if c == '-' || super::lexer::is_space(c) || "({[<".contains(c) {
            begins = true;
            out.push(c);
        } else if begins {
            begins = false;
            out.extend(c.to_uppercase());
        } else {
            out.extend(c.to_lowercase());
        }
    }
    out
}

fn number(name: &str, value: &Value, args: CallArgs) -> Result<Value, Error> {
    match name {
        "abs" => match value {
            Value::Float(float) => Ok(Value::Float(float.abs())),
            value if value.is_undefined() => Err(undefined_error(value)),
            value => value
                .as_int()
                .map(|n| Value::Int(n.saturating_abs()))
                .ok_or_else(|| Error::new("'abs' needs a number")),
        },
        "round" => round(value, args),
        "int" => {
            let [default, base] = args.bind(name, ["default", "base"])?;
            let base = int_or(base.as_ref(), 10)?;
            let parsed = match value {
                Value::Undefined(_) => return Err(undefined_error(value)),
                Value::Text(text) => parse_int(&text.text, base),
                Value::Float(float) if float.is_finite() => Some(*float as i128),
                value => value.as_int(),
            };
            Ok(parsed.map_or_else(|| default.unwrap_or(Value::Int(0)), Value::Int))
        }
        _ => {
            let [default] = args.bind(name, ["default"])?;
            let parsed = match value {
                Value::Undefined(_) => return Err(undefined_error(value)),
                Value::Text(text) => parse_float(&text.text),
                Value::Float(float) => Some(*float),
                value => value.as_int().map(|n| n as f64),
            };
            Ok(parsed.map_or_else(|| default.unwrap_or(Value::Float(0.0)), Value::Float))
        }
    }
}

fn parse_int(text: &str, base: i128) -> Option<i128> {
    let trimmed = text.trim_matches(super::lexer::is_space).replace('_', "");
    let (sign, digits) = match trimmed.strip_prefix('-') {
        Some(rest) => (-1, rest),
        None => (1, trimmed.strip_prefix('+').unwrap_or(&trimmed)),
    };
    let prefix = match base {
        16 => ["0x", "0X"],
        8 => ["0o", "0O"],
        2 => ["0b", "0B"],
        _ => ["", ""],
    };
    let digits = prefix.iter().find_map(|p| digits.strip_prefix(p)).unwrap_or(digits);
    let whole = u32::try_from(base).ok().filter(|b| (2..=36).contains(b));
    let whole =
        whole.and_then(|b| i128::from_str_radix(digits, b).ok()).filter(|_| !digits.starts_with(['+', '-']));
    whole.map(|n| sign * n).or_else(|| parse_float(text).filter(|f| f.is_finite()).map(|f| f as i128))
}

fn parse_float(text: &str) -> Option<f64> {
    text.trim_matches(super::lexer::is_space).replace('_', "").parse().ok()
}

fn round(value: &Value, args: CallArgs) -> Result<Value, Error> {
    let [precision, method] = args.bind("round", ["precision", "method"])?;
    let precision = int_or(precision.as_ref(), 0)?.clamp(-30, 30) as i32;
    let method = method.map_or_else(|| "common".into(), |m| to_str(&m));
    let scale = 10f64.powi(precision);
    let float = match (value, &*method) {
        (Value::Float(float), _) => *float,
        (value, "common") if precision >= 0 && value.as_int().is_some() => return Ok(value.clone()),
        (value, _) => value.as_int().map(|n| n as f64).ok_or_else(|| Error::new("'round' needs a number"))?,
    };
    Ok(Value::Float(match &*method {
        // The decimal text rounds half to even, as Python does.
        "common" if precision >= 0 => format!("{float:.*}", precision as usize).parse().unwrap_or(float),
        "common" => (float * scale).round_ties_even() / scale,
        "ceil" => (float * scale).ceil() / scale,
        "floor" => (float * scale).floor() / scale,
        _ => return Err(Error::new("'round' knows common, ceil and floor")),
    }))
}

/// Hugging Face's `tojson`, which is Python's `json.dumps` without escaping of HTML or, by default, of
/// non-ASCII.
fn tojson(value: &Value, args: CallArgs) -> Result<Value, Error> {
    let names = ["ensure_ascii", "indent", "separators", "sort_keys"];
    let [ensure_ascii, indent, separators, sort_keys] = args.bind("tojson", names)?;
    let indent = match indent {
        None | Some(Value::None) => None,
        Some(Value::Text(text)) => Some(text.text.as_ref().to_owned()),
        Some(width) => Some(" ".repeat(int_or(Some(&width), 0)?.clamp(0, 64) as usize)),
    };
    let (item_separator, key_separator) = match separators {
        None | Some(Value::None) => (if indent.is_some() { "," } else { ", " }.to_owned(), ": ".to_owned()),
        Some(separators) => match &separators.items()?[..] {
            [item, key] => (to_str(item).as_ref().to_owned(), to_str(key).as_ref().to_owned()),
            _ => return Err(Error::new("'separators' needs two strings")),
        },
    };
    let json = Json {
        ensure_ascii: flag_or(ensure_ascii.as_ref(), false),
        indent,
        item_separator,
        key_separator,
        sort_keys: flag_or(sort_keys.as_ref(), false),
    };
    json.dumps(value).map(Value::text)
}

fn indent(value: &Value, args: CallArgs) -> Result<Value, Error> {
    let [width, first, blank] = args.bind("indent", ["width", "first", "blank"])?;
    let Value::Text(text) = value else { return Err(Error::new("'indent' needs a string")) };
    let indention = match &width {
        Some(Value::Text(text)) => text.text.as_ref().to_owned(),
        width => " ".repeat(int_or(width.as_ref(), 4)?.clamp(0, 1000) as usize),
    };
    let with_newline = format!("{}\n", text.text);
    let lines = methods::split_lines(&with_newline, false);
    let mut out = String::new();
    for (n, line) in lines.iter().enumerate() {
        if n > 0 {
            out.push('\n');
        }
        let indented = if n == 0 {
            flag_or(first.as_ref(), false)
        } else {
            flag_or(blank.as_ref(), false) || !line.is_empty()
        };
        if indented {
            out.push_str(&indention);
        }
        out.push_str(line);
    }
    Ok(Value::markup(out, text.safe))
}

fn truncate(value: &Value, args: CallArgs) -> Result<Value, Error> {
    let [length, killwords, end, leeway] = args.bind("truncate", ["length", "killwords", "end", "leeway"])?;
    let Value::Text(text) = value else { return Err(Error::new("'truncate' needs a string")) };
    let end = end.map_or_else(|| "...".into(), |e| to_str(&e));
    let length = usize::try_from(int_or(length.as_ref(), 255)?).unwrap_or(0);
    let leeway = usize::try_from(int_or(leeway.as_ref(), 5)?).unwrap_or(0);
    let chars: Vec<char> = text.text.chars().collect();
    if chars.len() <= length.saturating_add(leeway) {
        return Ok(value.clone());
    }
    let Some(kept) = length.checked_sub(end.chars().count()) else {
        return Err(Error::new("'truncate' has no room for its end"));
    };
    let kept: String = chars[..kept].iter().collect();
    let cut = if flag_or(killwords.as_ref(), false) { None } else { kept.rfind(' ') };
    Ok(Value::text(format!("{}{end}", &kept[..cut.unwrap_or(kept.len())])))
}

/// Sorts stably by a key; an error if two keys have no order.
pub(super) fn sort_by<T>(
    items: &mut [T],
    mut key: impl FnMut(&T) -> Result<Value, Error>,
    reverse: bool,
) -> Result<(), Error> {
    let keys = items.iter().map(&mut key).collect::<Result<Vec<_>, _>>()?;
    let mut places: Vec<usize> = (0..items.len()).collect();
    let mut failed = None;
    places.sort_by(|a, b| {
        let (a, b) = if reverse { (b, a) } else { (a, b) };
        match order(&keys[*a], &keys[*b]) {
            Ok(order) => order.unwrap_or(Ordering::Equal),
            Err(error) => {
                failed.get_or_insert(error);
                Ordering::Equal
            }
        }
    });
    if let Some(error) = failed {
        return Err(error);
    }
    // Applies the permutation in place.
    for i in 0..places.len() {
        let mut from = places[i];
        while from < i {
            from = places[from];
        }
        items.swap(i, from);
    }
    Ok(())
}
