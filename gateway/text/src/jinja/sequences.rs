//! Jinja2's filters over sequences and mappings.

use std::rc::Rc;

use super::call::{flag_or, int_or, required};
use super::eval::{CallArgs, Interpreter};
use super::filters::sort_by;
use super::repr::{to_str, write_str};
use super::value::{Value, View, equal, undefined_error};
use super::{Error, checks, filters, ops};
use crate::limits::RANGE_MAX;

/// `value | name(args)`; `name` is known to be a filter.
pub(super) fn apply(i: &mut Interpreter, name: &str, value: Value, args: CallArgs) -> Result<Value, Error> {
    match name {
        "first" => {
            let [] = args.bind(name, [])?;
            Ok(match &value {
                Value::Generator(items) => items.borrow_mut().pop_front(),
                Value::List(items) | Value::Tuple(items) => items.first().cloned(),
                value => value.items()?.into_iter().next(),
            }
            .unwrap_or(Value::Undefined(None)))
        }
        "last" => {
            let [] = args.bind(name, [])?;
            if matches!(value, Value::Generator(_)) {
                return Err(Error::new("a generator cannot be reversed"));
            }
            let last = match &value {
                Value::List(items) | Value::Tuple(items) => items.last().cloned(),
                value => value.items()?.pop(),
            };
            Ok(last.unwrap_or(Value::Undefined(None)))
        }
        "list" => {
            let [] = args.bind(name, [])?;
            Ok(Value::list(value.items()?))
        }
        "items" => {
            let [] = args.bind(name, [])?;
            match &value {
                Value::Undefined(_) => Ok(Value::generator([])),
                Value::Dict(dict) => Ok(Value::generator(ops::pairs(dict.entries()).items()?)),
                _ => Err(Error::new("'items' needs a mapping")),
            }
        }
        "join" => join(i, &value, args),
        "reverse" => {
            let [] = args.bind(name, [])?;
            Ok(match &value {
                Value::Text(text) => Value::markup(text.text.chars().rev().collect::<String>(), text.safe),
                Value::List(_) | Value::Tuple(_) | Value::Dict(_) | Value::View(..) | Value::Range(_) => {
                    Value::generator(value.items()?.into_iter().rev())
                }
                value => Value::list(value.items()?.into_iter().rev().collect()),
            })
        }
        "dictsort" => dictsort(&value, args),
        "map" => map(i, &value, args),
        "select" | "reject" | "selectattr" | "rejectattr" => select(i, name, &value, args),
        "batch" | "slice" => parts(name, &value, args),
        _ => keyed(i, name, &value, args),
    }
}

fn join(i: &mut Interpreter, value: &Value, args: CallArgs) -> Result<Value, Error> {
    let [separator, attribute] = args.bind("join", ["d", "attribute"])?;
    let separator = separator.map_or_else(|| "".into(), |s| to_str(&s));
    let mut out = String::new();
    for (n, mut item) in value.items()?.into_iter().enumerate() {
        if n > 0 {
            out.push_str(&separator);
        }
        if let Some(attribute) = present(attribute.as_ref()) {
            item = get(i, &item, attribute, None)?;
        }
        write_str(&item, &mut out);
    }
    Ok(Value::text(out))
}

/// An argument that is there and not `none`.
fn present(value: Option<&Value>) -> Option<&Value> {
    value.filter(|v| !matches!(v, Value::None))
}

/// The item's attribute; a string may name a path, as `function.name` does.
fn get(
    i: &mut Interpreter,
    item: &Value,
    attribute: &Value,
    default: Option<&Value>,
) -> Result<Value, Error> {
    let Value::Text(path) = attribute else { return ops::item(i, item, attribute) };
    let mut value = item.clone();
    for part in path.text.split('.') {
        let key = part.parse::<u32>().map_or_else(|_| Value::text(part), |n| Value::Int(n.into()));
        value = ops::item(i, &value, &key)?;
        if let (Some(default), true) = (default, value.is_undefined()) {
            value = default.clone();
        }
    }
    Ok(value)
}

/// Text compares without case unless a filter is told otherwise.
fn folded(value: Value, case_sensitive: bool) -> Value {
    match &value {
        Value::Text(text) if !case_sensitive => Value::text(text.text.to_lowercase()),
        _ => value,
    }
}

fn dictsort(value: &Value, args: CallArgs) -> Result<Value, Error> {
    let [case_sensitive, by, reverse] = args.bind("dictsort", ["case_sensitive", "by", "reverse"])?;
    let Value::Dict(dict) = value else {
        return Err(if value.is_undefined() {
            undefined_error(value)
        } else {
            Error::new("'dictsort' needs a mapping")
        });
    };
    let by_value = match by.map(|by| to_str(&by)).as_deref() {
        None | Some("key") => false,
        Some("value") => true,
        Some(_) => return Err(Error::new("'dictsort' sorts by key or value")),
    };
    let mut entries = dict.entries().to_vec();
    let sensitive = flag_or(case_sensitive.as_ref(), false);
    let key = |(k, v): &(Value, Value)| Ok(folded(if by_value { v } else { k }.clone(), sensitive));
    sort_by(&mut entries, key, flag_or(reverse.as_ref(), false))?;
    ops::pairs(&entries).items().map(Value::list)
}

fn map(i: &mut Interpreter, value: &Value, mut args: CallArgs) -> Result<Value, Error> {
    if !value.truth() {
        return Ok(Value::generator([]));
    }
    let mut out = Vec::new();
    if args.positional.is_empty() {
        let [attribute, default] = args.bind("map", ["attribute", "default"])?;
        let attribute = required(attribute, "map")?;
        for item in value.items()? {
            out.push(get(i, &item, &attribute, present(default.as_ref()))?);
        }
    } else {
        let name = to_str(&args.positional.remove(0));
        for item in value.items()? {
            let args = CallArgs { positional: args.positional.clone(), keyword: args.keyword.clone() };
            out.push(filters::apply(i, &name, item, args)?);
        }
    }
    Ok(Value::generator(out))
}

fn select(i: &mut Interpreter, name: &str, value: &Value, args: CallArgs) -> Result<Value, Error> {
    if !value.truth() {
        return Ok(Value::generator([]));
    }
    let mut positional = args.positional.into_iter();
    let attribute = if name.ends_with("attr") { Some(required(positional.next(), name)?) } else { None };
    let test = positional.next().map(|test| to_str(&test));
    let rest: Vec<Value> = positional.collect();
    let wanted = name.starts_with("select");
    let mut out = Vec::new();
    for item in value.items()? {
        let subject = match &attribute {
            Some(attribute) => get(i, &item, attribute, None)?,
            None => item.clone(),
        };
        let holds = match &test {
            Some(test) => checks::check(test, &subject, &rest)?,
            None => subject.truth(),
        };
        if holds == wanted {
            out.push(item);
        }
    }
    Ok(Value::generator(out))
}

/// `batch` and `slice`: lists of a number of items, a number of lists.
fn parts(name: &str, value: &Value, args: CallArgs) -> Result<Value, Error> {
    let [count, fill] = args.bind(name, ["count", "fill_with"])?;
    let count = int_or(Some(&required(count, name)?), 1)?;
    let count = match usize::try_from(count) {
        Ok(count) if count > 0 && count as i128 <= RANGE_MAX => count,
        _ => return Err(Error::new(format!("'{name}' takes a number from 1 to {RANGE_MAX}"))),
    };
    let items = value.items()?;
    let fill = present(fill.as_ref());
    let mut out = Vec::new();
    if name == "batch" {
        for batch in items.chunks(count) {
            let mut batch = batch.to_vec();
            if let Some(fill) = fill {
                batch.resize(count, fill.clone());
            }
            out.push(Value::list(batch));
        }
        return Ok(Value::generator(out));
    }
    let (each, longer) = (items.len() / count, items.len() % count);
    let mut rest = &items[..];
    for n in 0..count {
        let (part, more) = rest.split_at(each + usize::from(n < longer));
        let mut part = part.to_vec();
        part.extend(fill.filter(|_| n >= longer).cloned());
        out.push(Value::list(part));
        rest = more;
    }
    Ok(Value::generator(out))
}

/// Filters that look at a key of each item: `sort`, `unique`, `min`, `max`, `groupby`, `sum`.
fn keyed(i: &mut Interpreter, name: &str, value: &Value, args: CallArgs) -> Result<Value, Error> {
    let [first, case_sensitive, attribute, other] = match name {
        "sort" => args.bind(name, ["reverse", "case_sensitive", "attribute", ""])?,
        "groupby" => {
            let [attribute, default, case_sensitive] =
                args.bind(name, ["attribute", "default", "case_sensitive"])?;
            [None, case_sensitive, Some(required(attribute, name)?), default]
        }
        "sum" => {
            let [attribute, start] = args.bind(name, ["attribute", "start"])?;
            [None, None, attribute, start]
        }
        _ => {
            let [case_sensitive, attribute] = args.bind(name, ["case_sensitive", "attribute"])?;
            [None, case_sensitive, attribute, None]
        }
    };
    let sensitive = flag_or(case_sensitive.as_ref(), false);
    let (attribute, other) = (present(attribute.as_ref()), present(other.as_ref()));
    let mut items = value.items()?;
    let mut raw = |item: &Value| match attribute {
        Some(Value::Text(paths)) if name == "sort" && paths.text.contains(',') => {
            let parts = paths.text.split(',').map(|path| get(i, item, &Value::text(path), None));
            Ok(Value::tuple(parts.map(|part| part.map(|p| folded(p, sensitive))).collect::<Result<_, _>>()?))
        }
        Some(attribute) => get(i, item, attribute, other),
        None => Ok(item.clone()),
    };
    match name {
        "sum" => {
            let mut sum = other.cloned().unwrap_or(Value::Int(0));
            for item in &items {
                sum = ops::binary(super::ast::Binary::Add, &sum, &raw(item)?)?;
            }
            Ok(sum)
        }
        "unique" => {
            let mut seen: Vec<Value> = Vec::new();
            let mut out = Vec::new();
            for item in items {
                let key = folded(raw(&item)?, sensitive);
                if !seen.iter().any(|k| equal(k, &key)) {
                    seen.push(key);
                    out.push(item);
                }
            }
            Ok(Value::generator(out))
        }
        "groupby" => {
            sort_by(&mut items, |item| Ok(folded(raw(item)?, sensitive)), false)?;
            let keys = items.iter().map(&mut raw).collect::<Result<Vec<_>, _>>()?;
            Ok(grouped(keys, items, sensitive))
        }
        _ => {
            let reverse = flag_or(first.as_ref(), false) || name == "max";
            sort_by(&mut items, |item| Ok(folded(raw(item)?, sensitive)), reverse)?;
            if name == "sort" {
                return Ok(Value::list(items));
            }
            Ok(items.into_iter().next().unwrap_or(Value::Undefined(None)))
        }
    }
}

/// Runs of items with equal keys, as pairs of the first one's key and the items.
fn grouped(keys: Vec<Value>, items: Vec<Value>, case_sensitive: bool) -> Value {
    let mut groups: Vec<(Value, Value, Vec<Value>)> = Vec::new();
    for (real, item) in keys.into_iter().zip(items) {
        let key = folded(real.clone(), case_sensitive);
        match groups.last_mut() {
            Some((k, _, group)) if equal(k, &key) => group.push(item),
            _ => groups.push((key, real, vec![item])),
        }
    }
    let groups = groups.into_iter().map(|(_, real, group)| Value::tuple(vec![real, Value::list(group)]));
    Value::list(groups.collect())
}

/// What `keys()`, `values()` and `items()` of a mapping give.
pub(super) fn view(view: View, entries: &[(Value, Value)]) -> Value {
    match view {
        View::Items => ops::pairs(entries),
        View::Keys => Value::View(view, Rc::new(entries.iter().map(|(key, _)| key.clone()).collect())),
        View::Values => Value::View(view, Rc::new(entries.iter().map(|(_, value)| value.clone()).collect())),
    }
}
