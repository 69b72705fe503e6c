//! What stands after `is`: Jinja2's tests.

use std::rc::Rc;

use super::ast::Comparison;
use super::value::{Value, equal, undefined_error};
use super::{Error, filters, ops};

/// Names of all tests.
const NAMES: [&str; 39] = [
    "odd",
    "even",
    "divisibleby",
    "defined",
    "undefined",
    "filter",
    "test",
    "none",
    "boolean",
    "false",
    "true",
    "integer",
    "float",
    "lower",
    "upper",
    "string",
    "mapping",
    "number",
    "sequence",
    "iterable",
    "callable",
    "sameas",
    "escaped",
    "in",
    "==",
    "eq",
    "equalto",
    "!=",
    "ne",
    ">",
    "gt",
    "greaterthan",
    "ge",
    ">=",
    "<",
    "lt",
    "lessthan",
    "<=",
    "le",
];

/// Whether `value is name(args)`.
pub(super) fn check(name: &str, value: &Value, args: &[Value]) -> Result<bool, Error> {
    let comparison = match name {
        "in" => Some(Comparison::In),
        "==" | "eq" | "equalto" => Some(Comparison::Eq),
        "!=" | "ne" => Some(Comparison::Ne),
        ">" | "gt" | "greaterthan" => Some(Comparison::Gt),
        ">=" | "ge" => Some(Comparison::Ge),
        "<" | "lt" | "lessthan" => Some(Comparison::Lt),
        "<=" | "le" => Some(Comparison::Le),
        _ => None,
    };
    let takes = usize::from(comparison.is_some() || matches!(name, "divisibleby" | "sameas"));
    if args.len() != takes {
        return Err(Error::new(format!("the test '{name}' takes {takes} arguments, not {}", args.len())));
    }
    match (comparison, args) {
        (Some(comparison), [other]) => ops::compare(comparison, value, other),
        (None, [other]) if name == "divisibleby" => Ok(remainder(value, other)? == 0),
        (None, [other]) => Ok(same(value, other)),
        _ => check_alone(name, value),
    }
}

fn check_alone(name: &str, value: &Value) -> Result<bool, Error> {
    Ok(match name {
        "defined" => !value.is_undefined(),
        "undefined" => value.is_undefined(),
        "none" => matches!(value, Value::None),
        "boolean" => matches!(value, Value::Bool(_)),
        "true" => matches!(value, Value::Bool(true)),
        "false" => matches!(value, Value::Bool(false)),
        "integer" => matches!(value, Value::Int(_)),
        "float" => matches!(value, Value::Float(_)),
        "number" => matches!(value, Value::Int(_) | Value::Float(_) | Value::Bool(_)),
        "string" => matches!(value, Value::Text(_)),
        "mapping" => matches!(value, Value::Dict(_)),
        "sequence" => matches!(
            value,
            Value::Text(_)
                | Value::List(_)
                | Value::Tuple(_)
                | Value::Dict(_)
                | Value::Range(_)
                | Value::Undefined(_)
        ),
        "iterable" => matches!(
            value,
            Value::Text(_)
                | Value::List(_)
                | Value::Tuple(_)
                | Value::Dict(_)
                | Value::Range(_)
                | Value::Undefined(_)
                | Value::View(..)
                | Value::Generator(_)
                | Value::Loop(_)
        ),
        "callable" => matches!(
            value,
            Value::Undefined(_)
                | Value::Macro(_)
                | Value::Function(_)
                | Value::Method(_)
                | Value::Loop(_)
                | Value::Joiner(_)
        ),
        "escaped" => matches!(value, Value::Text(text) if text.safe),
        "odd" => remainder(value, &Value::Int(2))? == 1,
        "even" => remainder(value, &Value::Int(2))? == 0,
        "lower" => cased(value, char::is_lowercase, char::is_uppercase),
        "upper" => cased(value, char::is_uppercase, char::is_lowercase),
        "filter" => value.as_text().is_some_and(|name| filters::NAMES.contains(&name)),
        "test" => value.as_text().is_some_and(|name| NAMES.contains(&name)),
        _ => return Err(Error::new(format!("there is no test '{name}'"))),
    })
}

fn remainder(value: &Value, by: &Value) -> Result<i128, Error> {
    match (value.as_int(), by.as_int()) {
        (Some(value), Some(by)) if by != 0 => Ok(value.checked_rem_euclid(by).unwrap_or(0)),
        _ if value.is_undefined() => Err(undefined_error(value)),
        _ => Err(Error::new("this test needs two integers")),
    }
}

/// Whether the text has a character of the one kind and none of the other.
fn cased(value: &Value, wanted: fn(char) -> bool, other: fn(char) -> bool) -> bool {
    let text = super::repr::to_str(value);
    text.chars().any(wanted) && !text.chars().any(other)
}

/// Python's `is`: the very same list, tuple or dict; of other types, equal values of one type.
fn same(a: &Value, b: &Value) -> bool {
    match (a, b) {
        (Value::List(a), Value::List(b)) | (Value::Tuple(a), Value::Tuple(b)) => Rc::ptr_eq(a, b),
        (Value::Dict(a), Value::Dict(b)) => Rc::ptr_eq(a, b),
        _ => a.type_name() == b.type_name() && equal(a, b),
    }
}
