//! Methods of Python's strings, lists and mappings, as far as the sandbox gives them out: none that change.

use std::rc::Rc;
use std::sync::Arc;

use super::call::{flag_or, int_or, required};
use super::eval::{CallArgs, Interpreter};
use super::lexer::is_space;
use super::repr::to_str;
use super::sequences::view;
use super::value::{Value, View, equal};
use super::{Error, format, ops};
use crate::limits::{RENDER_BYTES_MAX, RENDER_PARTS_MAX};

const TEXT: [&str; 38] = [
    "capitalize",
    "casefold",
    "center",
    "count",
    "endswith",
    "find",
    "format",
    "index",
    "isalnum",
    "isalpha",
    "isascii",
    "isdecimal",
    "isdigit",
    "islower",
    "isnumeric",
    "isspace",
    "isupper",
    "join",
    "ljust",
    "lower",
    "lstrip",
    "partition",
    "removeprefix",
    "removesuffix",
    "replace",
    "rfind",
    "rindex",
    "rjust",
    "rpartition",
    "rsplit",
    "rstrip",
    "split",
    "splitlines",
    "startswith",
    "strip",
    "swapcase",
    "title",
    "upper",
];
const TEXT_MORE: [&str; 2] = ["zfill", "expandtabs"];
const DICT: [&str; 5] = ["copy", "get", "items", "keys", "values"];
const DICT_UNSAFE: [&str; 5] = ["clear", "pop", "popitem", "setdefault", "update"];
const LIST: [&str; 3] = ["copy", "count", "index"];
const LIST_UNSAFE: [&str; 8] = ["append", "clear", "extend", "insert", "pop", "remove", "reverse", "sort"];
const TUPLE: [&str; 2] = ["count", "index"];
const LOOP: [&str; 2] = ["cycle", "changed"];
const CYCLER: [&str; 2] = ["next", "reset"];

/// Methods that do not go through their object.
pub(super) const LOOK_AT_AN_END: [&str; 6] = ["copy", "endswith", "get", "next", "reset", "startswith"];

/// The object's method, or that it exists and may not be had.
pub(super) fn find(object: &Value, name: &str) -> Option<Value> {
    let (lists, forbidden): (&[&[&'static str]], &[&str]) = match object {
        Value::Text(_) => (&[&TEXT, &TEXT_MORE], &[]),
        Value::Dict(_) => (&[&DICT], &DICT_UNSAFE),
        Value::List(_) => (&[&LIST], &LIST_UNSAFE),
        Value::Tuple(_) | Value::Range(_) => (&[&TUPLE], &[]),
        Value::Loop(_) => (&[&LOOP], &[]),
        Value::Cycler(_) => (&[&CYCLER], &[]),
        _ => return None,
    };
    let method = lists.iter().flat_map(|list| list.iter()).find(|method| **method == name);
    match method {
        Some(method) => Some(Value::Method(Rc::new((object.clone(), method)))),
        None => forbidden.contains(&name).then(|| Value::forbidden(name)),
    }
}

/// Calls the method `name`, which `find` gave.
pub(super) fn call(i: &mut Interpreter, object: &Value, name: &str, args: CallArgs) -> Result<Value, Error> {
    match object {
        Value::Text(text) if name == "format" => {
            Ok(Value::markup(format::braces(i, &text.text, &args)?, text.safe))
        }
        Value::Text(text) => {
            let result = text_method(&text.text, name, args)?;
            // A safe string's changes are safe.
            Ok(match result {
                Value::Text(result) if text.safe => Value::markup(result.text, true),
                result => result,
            })
        }
        Value::Dict(dict) => match name {
            "get" => {
                let [key, default] = args.bind(name, ["key", "default"])?;
                let key = required(key, name)?;
                if !key.hashable() {
                    return Err(Error::new(format!("'{}' is no key", key.type_name())));
                }
                Ok(dict.get(&key).cloned().or(default).unwrap_or(Value::None))
            }
            "copy" => Ok(object.clone()),
            "keys" => Ok(view(View::Keys, dict.entries())),
            "values" => Ok(view(View::Values, dict.entries())),
            _ => Ok(view(View::Items, dict.entries())),
        },
        Value::Loop(this) if name == "cycle" => match args.positional.len() {
            0 => Err(Error::new("'cycle' needs items")),
            len => Ok(args.positional[this.index0.get() % len].clone()),
        },
        Value::Loop(this) => {
            let now = Value::tuple(args.positional);
            let before = this.changed.replace(Some(now.clone()));
            Ok(Value::Bool(!before.is_some_and(|before| equal(&before, &now))))
        }
        Value::Cycler(this) => {
            let current = this.0[this.1.get()].clone();
            this.1.set(if name == "next" { (this.1.get() + 1) % this.0.len() } else { 0 });
            Ok(if name == "next" { current } else { Value::None })
        }
        _ if name == "copy" => Ok(object.clone()),
        _ => {
            let [wanted] = args.bind(name, ["value"])?;
            let wanted = required(wanted, name)?;
            let items = object.items()?;
            if name == "count" {
                return Ok(Value::Int(items.iter().filter(|item| equal(item, &wanted)).count() as i128));
            }
            let place = items.iter().position(|item| equal(item, &wanted));
            place.map(|n| Value::Int(n as i128)).ok_or_else(|| Error::new("'index' finds no such item"))
        }
    }
}

fn text_method(text: &str, name: &str, args: CallArgs) -> Result<Value, Error> {
    match name {
        "strip" | "lstrip" | "rstrip" => strip(text, name, args),
        "split" | "rsplit" | "splitlines" | "partition" | "rpartition" => split(text, name, args),
        "startswith" | "endswith" | "find" | "rfind" | "index" | "rindex" | "count" => {
            search(text, name, args)
        }
        "center" | "ljust" | "rjust" | "zfill" => pad(text, name, args),
        "join" => {
            let [items] = args.bind(name, ["iterable"])?;
            let mut parts = Vec::new();
            for item in required(items, name)?.items()? {
                match item {
                    Value::Text(part) => parts.push(part.text),
                    other => {
                        return Err(Error::new(format!("'join' needs strings, not '{}'", other.type_name())));
                    }
                }
            }
            Ok(Value::text(parts.join(text)))
        }
        "replace" => {
            let [old, new, count] = args.bind(name, ["old", "new", "count"])?;
            let (old, new) = (needed(old, name)?, needed(new, name)?);
            replace(text, &old, &new, int_or(count.as_ref(), -1)?).map(Value::text)
        }
        "removeprefix" | "removesuffix" => {
            let [part] = args.bind(name, ["part"])?;
            let part = needed(part, name)?;
            let rest = match name {
                "removeprefix" => text.strip_prefix(&*part),
                _ => text.strip_suffix(&*part),
            };
            Ok(Value::text(rest.unwrap_or(text)))
        }
        "expandtabs" => {
            let [size] = args.bind(name, ["tabsize"])?;
            Ok(Value::text(expand_tabs(text, int_or(size.as_ref(), 8)?.clamp(0, 100) as usize)))
        }
        _ => {
            let [] = args.bind(name, [])?;
            Ok(without_arguments(text, name))
        }
    }
}

fn without_arguments(text: &str, name: &str) -> Value {
    let all = |holds: fn(char) -> bool| Value::Bool(!text.is_empty() && text.chars().all(holds));
    let only = |has: fn(char) -> bool, not: fn(char) -> bool| {
        Value::Bool(text.chars().any(has) && !text.chars().any(not))
    };
    match name {
        "lower" => Value::text(text.to_lowercase()),
        "casefold" => Value::text(text.to_lowercase().replace('ß', "ss")),
        "upper" => Value::text(text.to_uppercase()),
        "isalnum" => all(char::is_alphanumeric),
        "isalpha" => all(char::is_alphabetic),
        "isascii" => Value::Bool(text.is_ascii()),
        "isdecimal" | "isdigit" | "isnumeric" => all(char::is_numeric),
        "isspace" => all(is_space),
        "islower" => only(char::is_lowercase, char::is_uppercase),
        "isupper" => only(char::is_uppercase, char::is_lowercase),
        "capitalize" => {
            let mut chars = text.chars();
            let first: String = chars.next().map(titled).unwrap_or_default();
            Value::text(first + &chars.as_str().to_lowercase())
        }
        "swapcase" => {
            let swapped = |c: char| {
                if c.is_uppercase() { c.to_lowercase().to_string() } else { c.to_uppercase().to_string() }
            };
            Value::text(text.chars().map(swapped).collect::<String>())
        }
        _ => {
            let mut inside = false;
            let titled = text.chars().map(|c| {
                let cased = c.is_lowercase() || c.is_uppercase();
                let out = if inside { c.to_lowercase().to_string() } else { titled(c) };
                inside = cased;
                out
            });
            Value::text(titled.collect::<String>())
        }
    }
}

/// A character as the first of a word: the rest of its upper-case form is small, so that "ß" gives "Ss".
fn titled(c: char) -> String {
    let mut upper = c.to_uppercase();
    let first: String = upper.next().into_iter().collect();
    first + &upper.flat_map(char::to_lowercase).collect::<String>()
}

fn needed(value: Option<Value>, what: &str) -> Result<Arc<str>, Error> {
    match required(value, what)? {
        Value::Text(text) => Ok(text.text),
        other => Err(Error::new(format!("'{what}' needs a string, not '{}'", other.type_name()))),
    }
}

fn optional(value: Option<Value>, what: &str) -> Result<Option<Arc<str>>, Error> {
    match value {
        None | Some(Value::None) => Ok(None),
        value => needed(value, what).map(Some),
    }
}

fn strip(text: &str, name: &str, args: CallArgs) -> Result<Value, Error> {
    let [chars] = args.bind(name, ["chars"])?;
    let chars = optional(chars, name)?;
    let strips = |c: char| chars.as_ref().map_or_else(|| is_space(c), |chars| chars.contains(c));
    Ok(Value::text(match name {
        "strip" => text.trim_matches(strips),
        "lstrip" => text.trim_start_matches(strips),
        _ => text.trim_end_matches(strips),
    }))
}

fn split(text: &str, name: &str, args: CallArgs) -> Result<Value, Error> {
    let list = |parts: Vec<&str>| Value::list(parts.into_iter().map(Value::text).collect());
    // At most as many parts as there are blanks, unless a separator says where.
    let too_many = |places: usize| if places > RENDER_PARTS_MAX { Err(Error::too_long()) } else { Ok(()) };
    if name == "splitlines" {
        too_many(text.chars().filter(|c| is_space(*c)).count())?;
        let [keep] = args.bind(name, ["keepends"])?;
        return Ok(list(split_lines(text, flag_or(keep.as_ref(), false))));
    }
    if name.ends_with("partition") {
        let [separator] = args.bind(name, ["sep"])?;
        let separator = needed(separator, name)?;
        let halves =
            if name == "partition" { text.split_once(&*separator) } else { text.rsplit_once(&*separator) };
        let parts = match halves {
            Some((before, after)) => [before, &separator, after],
            None if name == "partition" => [text, "", ""],
            None => ["", "", text],
        };
        return Ok(Value::tuple(parts.into_iter().map(Value::text).collect()));
    }
    let [separator, most] = args.bind(name, ["sep", "maxsplit"])?;
    let most = usize::try_from(int_or(most.as_ref(), -1)?).unwrap_or(usize::MAX - 1);
    let separator = optional(separator, name)?;
    too_many(match &separator {
        Some(separator) if !separator.is_empty() => text.matches(&**separator).take(most).count(),
        _ => text.chars().filter(|c| is_space(*c)).take(most).count(),
    })?;
    let mut parts: Vec<&str> = match (&separator, name) {
        (Some(separator), _) if separator.is_empty() => return Err(Error::new("an empty separator")),
        (Some(separator), "split") => text.splitn(most.saturating_add(1), &**separator).collect(),
        (Some(separator), _) => text.rsplitn(most.saturating_add(1), &**separator).collect(),
        (None, _) => split_blanks(text, most, name == "rsplit"),
    };
    if name == "rsplit" {
        parts.reverse();
    }
    Ok(list(parts))
}

/// Splits at runs of blanks, from the left, or from the right in reverse order.
fn split_blanks(text: &str, most: usize, from_right: bool) -> Vec<&str> {
    let mut rest = text.trim_matches(is_space);
    let mut parts = Vec::new();
    while !rest.is_empty() {
        let at = if from_right { rest.rfind(is_space) } else { rest.find(is_space) };
        let Some(at) = at.filter(|_| parts.len() < most) else {
            let whole =
                if from_right { text.trim_start_matches(is_space) } else { text.trim_end_matches(is_space) };
            // With splits left over, the last part keeps the text's own blanks on its far side.
            let kept = if from_right {
                &text[..offset(text, rest) + rest.len()]
            } else {
                &text[offset(text, rest)..]
            };
            parts.push(if parts.len() < most || whole.is_empty() { rest } else { kept });
            break;
        };
        let width = rest[at..].chars().next().map_or(1, char::len_utf8);
        let (left, right) = (&rest[..at], &rest[at + width..]);
        let (part, more) = if from_right { (right, left) } else { (left, right) };
        parts.push(part);
        rest = if from_right { more.trim_end_matches(is_space) } else { more.trim_start_matches(is_space) };
    }
    parts
}

/// Where `part`, which lies within `text`, begins.
fn offset(text: &str, part: &str) -> usize {
    part.as_ptr() as usize - text.as_ptr() as usize
}

/// Python's `splitlines`: lines without what ends them, or with it if `keep`. All ends that Python knows
/// count.
pub(super) fn split_lines(text: &str, keep: bool) -> Vec<&str> {
    let ends = |c: char| {
        matches!(c, '\n' | '\r' | '\x0b' | '\x0c' | '\x1c'..='\x1e' | '\u{85}' | '\u{2028}' | '\u{2029}')
    };
    let mut lines = Vec::new();
    let mut rest = text;
    while let Some(at) = rest.find(ends) {
        let width = if rest[at..].starts_with("\r\n") {
            2
        } else {
            rest[at..].chars().next().map_or(1, char::len_utf8)
        };
        lines.push(&rest[..if keep { at + width } else { at }]);
        rest = &rest[at + width..];
    }
    if !rest.is_empty() {
        lines.push(rest);
    }
    lines
}

fn search(text: &str, name: &str, args: CallArgs) -> Result<Value, Error> {
    let [what, start, end] = args.bind(name, ["sub", "start", "end"])?;
    let bounds = [start, end].map(|b| b.filter(|b| !matches!(b, Value::None)));
    let (start, end) = (bounds[0].as_ref(), bounds[1].as_ref());
    let (mut skipped, mut within) = (0, text);
    let part;
    if start.is_some() || end.is_some() {
        let bound = |b: Option<&Value>| b.map(|b| int_or(Some(b), 0)).transpose();
        let (start, end) = (bound(start)?, bound(end)?);
        let cut = ops::slice(&Value::text(text), [start, end, None])?;
        let len = text.chars().count() as i128;
        skipped = start.map_or(0, |s| if s < 0 { (s + len).max(0) } else { s });
        part = to_str(&cut);
        within = &part;
    }
    let what = required(what, name)?;
    if let ("startswith" | "endswith", Value::Tuple(options)) = (name, &what) {
        let mut any = false;
        for option in options.iter() {
            let option = needed(Some(option.clone()), name)?;
            any |=
                if name == "startswith" { within.starts_with(&*option) } else { within.ends_with(&*option) };
        }
        return Ok(Value::Bool(any));
    }
    let what = needed(Some(what), name)?;
    Ok(match name {
        "startswith" => Value::Bool(within.starts_with(&*what)),
        "endswith" => Value::Bool(within.ends_with(&*what)),
        "count" => Value::Int(within.matches(&*what).count() as i128),
        _ => {
            let found = if name.starts_with('r') { within.rfind(&*what) } else { within.find(&*what) };
            let place = found.map(|at| within[..at].chars().count() as i128 + skipped);
            if place.is_none() && name.ends_with("index") {
                return Err(Error::new("'index' finds no such text"));
            }
            Value::Int(place.unwrap_or(-1))
        }
    })
}

fn pad(text: &str, name: &str, args: CallArgs) -> Result<Value, Error> {
    let [width, fill] = args.bind(name, ["width", "fillchar"])?;
    let width = int_or(Some(&required(width, name)?), 0)?.clamp(0, 1 << 20) as usize;
    let fill = optional(fill, name)?.unwrap_or_else(|| if name == "zfill" { "0" } else { " " }.into());
    let len = text.chars().count();
    let Some(missing) = width.checked_sub(len) else { return Ok(Value::text(text)) };
    let (left, right) = match name {
        "ljust" => (0, missing),
        // Python puts the odd one on the left if the width is odd too.
        "center" => {
            let left = missing / 2 + (missing & width & 1);
            (left, missing - left)
        }
        _ => (missing, 0),
    };
    let (sign, digits) = match text.strip_prefix(['+', '-']) {
        Some(digits) if name == "zfill" => (&text[..1], digits),
        _ => ("", text),
    };
    Ok(Value::text(format!("{sign}{}{digits}{}", fill.repeat(left), fill.repeat(right))))
}

fn expand_tabs(text: &str, size: usize) -> String {
    let (mut out, mut column) = (String::new(), 0);
    for c in text.chars() {
        match c {
            '\t' if size == 0 => {}
            '\t' => {
                let blanks = size - column % size;
                out.extend(std::iter::repeat_n(' ', blanks));
                column += blanks;
            }
            c => {
                column = if matches!(c, '\n' | '\r') { 0 } else { column + 1 };
                out.push(c);
            }
        }
    }
    out
}

/// Python's `replace`, with all occurrences if `count` is negative.
pub(super) fn replace(text: &str, old: &str, new: &str, count: i128) -> Result<String, Error> {
    let count = usize::try_from(count).unwrap_or(usize::MAX);
    let places = text.matches(old).take(count).count();
    if places.saturating_mul(new.len()) > RENDER_BYTES_MAX {
        return Err(Error::too_long());
    }
    Ok(text.replacen(old, new, count))
}
