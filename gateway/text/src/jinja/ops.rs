//! Operators, subscripts and attributes, as Python and Jinja2's sandbox define them.

use std::rc::Rc;
use std::sync::Arc;

use super::Error;
use super::ast::{Binary, Comparison};
use super::eval::Interpreter;
use super::repr::to_str;
use super::value::{
    Loop, Numbers, Range, Text, Value, View, equal, numbers, order, undefined_error, undefined_in,
};
use super::{format, methods};
use crate::limits::RENDER_BYTES_MAX;

pub(super) fn binary(operator: Binary, a: &Value, b: &Value) -> Result<Value, Error> {
    if let Some(error) = undefined_in(a, b) {
        return Err(error);
    }
    if let Some(numbers) = numbers(a, b) {
        return arithmetic(operator, &numbers);
    }
    match (operator, a, b) {
        (Binary::Add, Value::Text(a), Value::Text(b)) => Ok(Value::Text(joined(a, b))),
        (Binary::Add, Value::List(a), Value::List(b)) => Ok(Value::list([&a[..], &b[..]].concat())),
        (Binary::Add, Value::Tuple(a), Value::Tuple(b)) => Ok(Value::tuple([&a[..], &b[..]].concat())),
        (Binary::Mul, Value::Text(text), n) | (Binary::Mul, n, Value::Text(text)) if n.as_int().is_some() => {
            let times = times(n, text.text.len())?;
            Ok(Value::markup(text.text.repeat(times), text.safe))
        }
        (Binary::Mul, Value::List(items), n) | (Binary::Mul, n, Value::List(items))
            if n.as_int().is_some() =>
        {
            let times = times(n, items.len() * size_of::<Value>())?;
            Ok(Value::list(std::iter::repeat_n(&items[..], times).flatten().cloned().collect()))
        }
        (Binary::Mod, Value::Text(text), b) => {
            Ok(Value::markup(format::percent(&text.text, b, text.safe)?, text.safe))
        }
        _ => {
            let (a, b) = (a.type_name(), b.type_name());
            Err(Error::new(format!("{operator:?} of '{a}' and '{b}' is not possible")))
        }
    }
}

fn times(n: &Value, size: usize) -> Result<usize, Error> {
    let n = usize::try_from(n.as_int().unwrap_or(0).max(0)).unwrap_or(usize::MAX);
    match n.checked_mul(size) {
        Some(bytes) if bytes <= RENDER_BYTES_MAX => Ok(n),
        _ => Err(Error::new("a repetition is too long")),
    }
}

/// Two strings; a safe one escapes the other.
fn joined(a: &Text, b: &Text) -> Text {
    let safe = a.safe || b.safe;
    let part =
        |text: &Text| if safe && !text.safe { escape(&text.text).into() } else { Arc::clone(&text.text) };
    Text { text: [part(a), part(b)].concat().into(), safe }
}

/// HTML escaping, as markupsafe does it.
pub(super) fn escape(text: &str) -> String {
    let text = text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    text.replace('\'', "&#39;").replace('"', "&#34;")
}

fn arithmetic(operator: Binary, numbers: &Numbers) -> Result<Value, Error> {
    let large = || Error::new("a number is too large");
    let divides = matches!(operator, Binary::Div | Binary::FloorDiv | Binary::Mod);
    match *numbers {
        Numbers::Int(_, 0) | Numbers::Float(_, 0.0) if divides => Err(Error::new("division by zero")),
        Numbers::Int(a, b) => {
            let int = match operator {
                Binary::Add => a.checked_add(b),
                Binary::Sub => a.checked_sub(b),
                Binary::Mul => a.checked_mul(b),
                Binary::Div => return Ok(Value::Float(a as f64 / b as f64)),
                Binary::FloorDiv => {
                    a.checked_div(b).map(|q| q - i128::from(a % b != 0 && (a < 0) != (b < 0)))
                }
                Binary::Mod => a.checked_rem(b).map(|r| if r != 0 && (r < 0) != (b < 0) { r + b } else { r }),
                Binary::Pow if b < 0 => return Ok(Value::Float((a as f64).powf(b as f64))),
                Binary::Pow => u32::try_from(b).ok().and_then(|b| a.checked_pow(b)),
            };
            int.map(Value::Int).ok_or_else(large)
        }
        Numbers::Float(a, b) => Ok(Value::Float(match operator {
            Binary::Add => a + b,
            Binary::Sub => a - b,
            Binary::Mul => a * b,
            Binary::Div => a / b,
            Binary::FloorDiv => ((a - float_mod(a, b)) / b).round(),
            Binary::Mod => float_mod(a, b),
            Binary::Pow => a.powf(b),
        })),
    }
}

/// The remainder with the divisor's sign.
fn float_mod(a: f64, b: f64) -> f64 {
    let r = a % b;
    if r != 0.0 && (r < 0.0) != (b < 0.0) { r + b } else { r }
}

pub(super) fn negative(value: &Value) -> Result<Value, Error> {
    match value {
        Value::Float(float) => Ok(Value::Float(-float)),
        value => match value.as_int() {
            Some(int) => int.checked_neg().map(Value::Int).ok_or_else(|| Error::new("a number is too large")),
            None if value.is_undefined() => Err(undefined_error(value)),
            None => Err(Error::new(format!("'{}' has no negative", value.type_name()))),
        },
    }
}

pub(super) fn positive(value: &Value) -> Result<Value, Error> {
    match value {
        Value::Float(float) => Ok(Value::Float(*float)),
        value => value.as_int().map(Value::Int).ok_or_else(|| Error::new("'+' needs a number")),
    }
}

pub(super) fn compare(operator: Comparison, a: &Value, b: &Value) -> Result<bool, Error> {
    Ok(match operator {
        Comparison::Eq => equal(a, b),
        Comparison::Ne => !equal(a, b),
        Comparison::In => contains(b, a)?,
        Comparison::NotIn => !contains(b, a)?,
        Comparison::Lt => order(a, b)?.is_some_and(std::cmp::Ordering::is_lt),
        Comparison::Le => order(a, b)?.is_some_and(std::cmp::Ordering::is_le),
        Comparison::Gt => order(a, b)?.is_some_and(std::cmp::Ordering::is_gt),
        Comparison::Ge => order(a, b)?.is_some_and(std::cmp::Ordering::is_ge),
    })
}

/// Python's `value in container`.
pub(super) fn contains(container: &Value, value: &Value) -> Result<bool, Error> {
    match (container, value) {
        (Value::Text(text), Value::Text(part)) => Ok(text.text.contains(&*part.text)),
        (Value::Text(_), other) => Err(Error::new(format!("a string holds no '{}'", other.type_name()))),
        (Value::Dict(_), value) if !value.hashable() => {
            Err(Error::new(format!("'{}' is no key", value.type_name())))
        }
        (Value::Dict(dict), value) => Ok(dict.get(value).is_some()),
        (container, value) => Ok(container.items()?.iter().any(|item| equal(item, value))),
    }
}

/// `object.name`: what Python finds on the object comes before what the object holds.
pub(super) fn attribute(i: &mut Interpreter, object: &Value, name: &str) -> Result<Value, Error> {
    if let Some(found) = member(i, object, name)? {
        return Ok(found);
    }
    Ok(match object {
        Value::Undefined(_) => return Err(undefined_error(object)),
        Value::Dict(dict) => dict.get_text(name).cloned(),
        _ => None,
    }
    .unwrap_or_else(|| Value::undefined(name)))
}

/// `object[key]`: what the object holds comes before its attributes.
pub(super) fn item(i: &mut Interpreter, object: &Value, key: &Value) -> Result<Value, Error> {
    let at = |len: usize| {
        let index = key.as_int()?;
        let index = if index < 0 { index + len as i128 } else { index };
        usize::try_from(index).ok().filter(|index| *index < len)
    };
    let found = match object {
        Value::Undefined(_) => return Err(undefined_error(object)),
        Value::Dict(dict) => dict.get(key).cloned(),
        Value::List(items) | Value::Tuple(items) => at(items.len()).map(|index| items[index].clone()),
        Value::Range(range) => at(range.len() as usize).map(|index| Value::Int(range.at(index as i128))),
        Value::Text(text) => match key.as_int() {
            Some(index) if index >= 0 => {
                let index = usize::try_from(index).unwrap_or(usize::MAX);
                text.text.chars().nth(index).map(|c| Value::markup(c.to_string(), text.safe))
            }
            Some(index) => {
                let back = usize::try_from(-1 - index).unwrap_or(usize::MAX);
                text.text.chars().nth_back(back).map(|c| Value::markup(c.to_string(), text.safe))
            }
            None => None,
        },
        _ => None,
    };
    match (found, key.as_text()) {
        (Some(found), _) => Ok(found),
        (None, Some(name)) => Ok(member(i, object, name)?.unwrap_or_else(|| Value::undefined(name))),
        (None, None) => Ok(Value::undefined(&to_str(key))),
    }
}

/// What Python finds on the object itself.
pub(super) fn member(i: &mut Interpreter, object: &Value, name: &str) -> Result<Option<Value>, Error> {
    if object.is_undefined() {
        return Ok(None);
    }
    if name.starts_with("__") && name.ends_with("__") {
        return Ok(Some(Value::forbidden(name)));
    }
    Ok(match object {
        Value::Loop(this) => loop_attribute(i, this, name)?,
        Value::Namespace(fields) => fields.borrow().get_text(name).cloned(),
        Value::Macro(this) => match name {
            "name" => Some(Value::text(&*this.def.name)),
            "arguments" => {
                Some(Value::tuple(this.def.params.iter().map(|(n, _)| Value::text(&**n)).collect()))
            }
            _ => None,
        },
        Value::Cycler(this) if name == "current" => Some(this.0[this.1.get()].clone()),
        // What `groupby` gives.
        Value::Tuple(pair) if pair.len() == 2 && name == "grouper" => Some(pair[0].clone()),
        Value::Tuple(pair) if pair.len() == 2 && name == "list" => Some(pair[1].clone()),
        object => methods::find(object, name),
    })
}

fn loop_attribute(i: &mut Interpreter, this: &Rc<Loop>, name: &str) -> Result<Option<Value>, Error> {
    let int = |n: usize| Value::Int(n as i128);
    let index0 = this.index0.get();
    Ok(Some(match name {
        "index0" => int(index0),
        "index" => int(index0 + 1),
        "first" => Value::Bool(index0 == 0),
        "last" => Value::Bool(i.peek(this)?.is_none()),
        "length" => int(i.loop_length(this)?),
        "revindex" => int(i.loop_length(this)? - index0),
        "revindex0" => int(i.loop_length(this)? - index0 - 1),
        "previtem" => this.before.borrow().clone().unwrap_or_else(|| Value::undefined("loop.previtem")),
        "nextitem" => i.peek(this)?.unwrap_or_else(|| Value::undefined("loop.nextitem")),
        "depth" => int(this.depth0 + 1),
        "depth0" => int(this.depth0),
        _ => return Ok(methods::find(&Value::Loop(Rc::clone(this)), name)),
    }))
}

/// A part of `[a:b:c]`; `none` counts as absent.
pub(super) fn slice_bound(value: &Value) -> Result<Option<i128>, Error> {
    match value {
        Value::None => Ok(None),
        Value::Undefined(_) => Err(undefined_error(value)),
        value => match value.as_int() {
            Some(int) => Ok(Some(int)),
            None => Err(Error::new(format!("'{}' is no place to cut at", value.type_name()))),
        },
    }
}

/// Python's `object[start:stop:step]`, with `None` for what is left out. Of a value that cannot be cut:
/// undefined.
pub(super) fn slice(object: &Value, [start, stop, step]: [Option<i128>; 3]) -> Result<Value, Error> {
    let step = step.unwrap_or(1).clamp(-(1 << 62), 1 << 62);
    if step == 0 {
        return Err(Error::new("a slice's step is 0"));
    }
    let places = |len: usize| {
        let len = len as i128;
        let (lowest, highest) = if step > 0 { (0, len) } else { (-1, len - 1) };
        let place = |bound: Option<i128>, default: i128| match bound {
            None => default,
            Some(bound) if bound < 0 => (bound + len).max(lowest),
            Some(bound) => bound.min(highest),
        };
        let (first, last) = if step > 0 { (lowest, highest) } else { (highest, lowest) };
        let range = Range { start: place(start, first), stop: place(stop, last), step };
        (0..range.len()).map(move |i| range.at(i) as usize)
    };
    Ok(match object {
        Value::List(items) => Value::list(places(items.len()).map(|i| items[i].clone()).collect()),
        Value::Tuple(items) => Value::tuple(places(items.len()).map(|i| items[i].clone()).collect()),
        Value::Text(text) => {
            let chars: Vec<char> = text.text.chars().collect();
            Value::markup(places(chars.len()).map(|i| chars[i]).collect::<String>(), text.safe)
        }
        Value::Range(range) => {
            Value::list(places(range.len() as usize).map(|i| Value::Int(range.at(i as i128))).collect())
        }
        Value::Undefined(_) => return Err(undefined_error(object)),
        // Python's error, which Jinja2 takes for an absent item.
        _ => Value::Undefined(None),
    })
}

/// The pairs of a mapping, as a view.
pub(super) fn pairs(entries: &[(Value, Value)]) -> Value {
    let pair = |(key, value): &(Value, Value)| Value::tuple(vec![key.clone(), value.clone()]);
    Value::View(View::Items, Rc::new(entries.iter().map(pair).collect()))
}
