//! Python's two ways to format: `"%s" % value`, and `"{}".format(value)`.

use super::Error;
use super::call::int_or;
use super::eval::{CallArgs, Interpreter};
use super::ops::{self, escape};
use super::repr::{float_repr, to_str, write_repr};
use super::value::Value;

/// How one value is laid out.
#[derive(Debug, Default, Clone, PartialEq)]
struct Spec {
    fill: Option<char>,
    align: Option<char>,
    sign: Option<char>,
    alternate: bool,
    zero: bool,
    width: usize,
    grouping: Option<char>,
    precision: Option<usize>,
    kind: Option<char>,
}

/// Widths and precisions beyond this are a mistake.
const WIDTH_MAX: usize = 1 << 16;

/// `text % operand`. A safe text escapes what it takes in.
pub(super) fn percent(text: &str, operand: &Value, safe: bool) -> Result<String, Error> {
    let positional = match operand {
        Value::Tuple(items) => items.to_vec(),
        other => vec![other.clone()],
    };
    let mut values = positional.into_iter();
    let mut chars = text.chars().peekable();
    let mut out = String::new();
    let mut named = matches!(operand, Value::Dict(_));
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let mut spec = Spec::default();
        let mut value = None;
        if chars.peek() == Some(&'(') {
            chars.next();
            let key: String = chars.by_ref().take_while(|c| *c != ')').collect();
            let Value::Dict(dict) = operand else { return Err(Error::new("'%(' needs a mapping")) };
            let found = dict.get_text(&key).cloned();
            value = Some(found.ok_or_else(|| Error::new(format!("'%' finds no '{key}'")))?);
            named = true;
        }
        while let Some(flag) = chars.next_if(|c| "#0- +".contains(*c)) {
            match flag {
                '#' => spec.alternate = true,
                '0' => spec.zero = true,
                '-' => spec.align = Some('<'),
                flag if spec.sign != Some('+') => spec.sign = Some(flag),
                _ => {}
            }
        }
        spec.width = count(&mut chars, &mut values)?.unwrap_or(0);
        if chars.next_if_eq(&'.').is_some() {
            spec.precision = Some(count(&mut chars, &mut values)?.unwrap_or(0));
        }
        while chars.next_if(|c| "hlL".contains(*c)).is_some() {}
        let kind = chars.next().ok_or_else(|| Error::new("'%' ends too early"))?;
        if kind == '%' {
            out.push('%');
            continue;
        }
        let value = match value {
            Some(value) => value,
            None => values.next().ok_or_else(|| Error::new("'%' lacks a value"))?,
        };
        let text = converted(&value, kind, spec)?;
        let escapes = safe && !matches!(&value, Value::Text(text) if text.safe);
        out.push_str(&if escapes { escape(&text) } else { text });
    }
    if values.next().is_some() && !named {
        return Err(Error::new("'%' does not use all values"));
    }
    Ok(out)
}

/// Digits, or `*`, which takes the next value.
fn count(
    chars: &mut std::iter::Peekable<std::str::Chars<'_>>,
    values: &mut std::vec::IntoIter<Value>,
) -> Result<Option<usize>, Error> {
    if chars.next_if_eq(&'*').is_some() {
        let value = values.next().ok_or_else(|| Error::new("'%' lacks a value"))?;
        return bounded(int_or(Some(&value), 0)?).map(Some);
    }
    let mut digits = String::new();
    while let Some(digit) = chars.next_if(char::is_ascii_digit) {
        digits.push(digit);
    }
    if digits.is_empty() { Ok(None) } else { bounded(digits.parse().unwrap_or(i128::MAX)).map(Some) }
}

fn bounded(width: i128) -> Result<usize, Error> {
    let width = usize::try_from(width).ok().filter(|w| *w <= WIDTH_MAX);
    width.ok_or_else(|| Error::new(format!("a width beyond {WIDTH_MAX}")))
}

fn converted(value: &Value, kind: char, mut spec: Spec) -> Result<String, Error> {
    let wrong = || Error::new(format!("'%{kind}' does not take '{}'", value.type_name()));
    match kind {
        's' | 'r' | 'a' => {
            let text = if kind == 's' { to_str(value).as_ref().to_owned() } else { repr(value) };
            spec.zero = false;
            spec.sign = None;
            spec.align = spec.align.or(Some('>'));
            spec.kind = Some('s');
            laid_out(&Value::text(text), &spec)
        }
        'c' => match value {
            Value::Text(text) if text.text.chars().count() == 1 => Ok(text.text.as_ref().to_owned()),
            _ => {
                let code = value.as_int().and_then(|n| u32::try_from(n).ok()).and_then(char::from_u32);
                code.map(String::from).ok_or_else(wrong)
            }
        },
        'd' | 'i' | 'u' => {
            let int = match value {
                Value::Float(float) if float.is_finite() => *float as i128,
                value => value.as_int().ok_or_else(wrong)?,
            };
            spec.kind = Some('d');
            spec.precision = None;
            laid_out(&Value::Int(int), &spec)
        }
        'x' | 'X' | 'o' => {
            spec.kind = Some(kind);
            laid_out(&Value::Int(value.as_int().ok_or_else(wrong)?), &spec)
        }
        'e' | 'E' | 'f' | 'F' | 'g' | 'G' => {
            let float = match value {
                Value::Float(float) => *float,
                value => value.as_int().ok_or_else(wrong)? as f64,
            };
            spec.kind = Some(kind);
            laid_out(&Value::Float(float), &spec)
        }
        _ => Err(Error::new(format!("'%{kind}' is no format"))),
    }
}

fn repr(value: &Value) -> String {
    let mut out = String::new();
    write_repr(value, &mut out);
    out
}

/// Python's `text.format(args)`: fields in braces are filled in turn, by number or by name.
pub(super) fn braces(i: &mut Interpreter, text: &str, args: &CallArgs) -> Result<String, Error> {
    let mut next = 0;
    replaced(i, text, args, &mut next, 0)
}

fn replaced(
    i: &mut Interpreter,
    text: &str,
    args: &CallArgs,
    next: &mut usize,
    depth: usize,
) -> Result<String, Error> {
    let mut out = String::new();
    let mut rest = text;
    while let Some(at) = rest.find(['{', '}']) {
        out.push_str(&rest[..at]);
        let doubled = rest[at..].starts_with("{{") || rest[at..].starts_with("}}");
        if doubled {
            out.push_str(&rest[at..=at]);
            rest = &rest[at + 2..];
            continue;
        }
        if rest[at..].starts_with('}') || depth > 1 {
            return Err(Error::new("a stray brace in a format"));
        }
        let end = closing(&rest[at..]).ok_or_else(|| Error::new("a format's brace does not close"))?;
        let field = &rest[at + 1..at + end];
        rest = &rest[at + end + 1..];
        let (field, spec) = field.split_once(':').unwrap_or((field, ""));
        let (name, conversion) = field.split_once('!').unwrap_or((field, ""));
        let mut value = field_value(i, name, args, next)?;
        value = match conversion {
            "" => value,
            "s" => Value::text(to_str(&value)),
            "r" | "a" => Value::text(repr(&value)),
            _ => return Err(Error::new(format!("'!{conversion}' is no conversion"))),
        };
        let spec = replaced(i, spec, args, next, depth + 1)?;
        out.push_str(&laid_out(&value, &parse_spec(&spec)?)?);
    }
    out.push_str(rest);
    Ok(out)
}

/// Where the brace that opens `text` closes.
fn closing(text: &str) -> Option<usize> {
    let mut open = 0;
    text.char_indices().find_map(|(at, c)| {
        match c {
            '{' => open += 1,
            '}' => open -= 1,
            _ => {}
        }
        (open == 0).then_some(at)
    })
}

fn field_value(i: &mut Interpreter, name: &str, args: &CallArgs, next: &mut usize) -> Result<Value, Error> {
    let end = name.find(['.', '[']).unwrap_or(name.len());
    let (first, mut path) = name.split_at(end);
    let found = if first.is_empty() {
        *next += 1;
        args.positional.get(*next - 1)
    } else if let Ok(place) = first.parse::<usize>() {
        args.positional.get(place)
    } else {
        args.keyword.iter().find(|(n, _)| **n == *first).map(|(_, value)| value)
    };
    let mut value =
        found.cloned().ok_or_else(|| Error::new(format!("'format' finds no value for '{name}'")))?;
    while !path.is_empty() {
        if let Some(rest) = path.strip_prefix('[') {
            let (key, rest) =
                rest.split_once(']').ok_or_else(|| Error::new("a format's bracket does not close"))?;
            let key = key.parse().map_or_else(|_| Value::text(key), Value::Int);
            value = ops::item(i, &value, &key)?;
            path = rest;
        } else {
            let rest = &path[1..];
            let end = rest.find(['.', '[']).unwrap_or(rest.len());
            value = ops::attribute(i, &value, &rest[..end])?;
            path = &rest[end..];
        }
    }
    Ok(value)
}

fn parse_spec(text: &str) -> Result<Spec, Error> {
    let mut spec = Spec::default();
    let mut chars = text.chars().peekable();
    let aligns = |c: Option<char>| c.filter(|c| "<>=^".contains(*c));
    if let Some(align) = aligns(text.chars().nth(1)) {
        spec.fill = chars.next();
        spec.align = Some(align);
        chars.next();
    } else if let Some(align) = aligns(text.chars().next()) {
        spec.align = Some(align);
        chars.next();
    }
    spec.sign = chars.next_if(|c| "+- ".contains(*c));
    spec.alternate = chars.next_if_eq(&'#').is_some();
    spec.zero = chars.next_if_eq(&'0').is_some();
    let mut none = Vec::new().into_iter();
    if chars.peek() != Some(&'*') {
        spec.width = count(&mut chars, &mut none)?.unwrap_or(0);
    }
    spec.grouping = chars.next_if(|c| ",_".contains(*c));
    if chars.next_if_eq(&'.').is_some() {
        spec.precision = count(&mut chars, &mut none)?;
    }
    spec.kind = chars.next();
    if chars.next().is_some() {
        return Err(Error::new(format!("'{text}' is no format")));
    }
    Ok(spec)
}

/// The value's text within its width.
fn laid_out(value: &Value, spec: &Spec) -> Result<String, Error> {
    let kind = spec.kind;
    let wrong = || Error::new(format!("this format does not take '{}'", value.type_name()));
    let (negative, prefix, digits) = match (value, kind) {
        (Value::Text(text), None | Some('s')) => {
            let shown: String = match spec.precision {
                Some(most) => text.text.chars().take(most).collect(),
                None => text.text.as_ref().to_owned(),
            };
            return Ok(aligned("", &shown, spec, '<'));
        }
        (Value::Float(float), kind) => {
            (float.is_sign_negative() && !float.is_nan(), "", float_digits(float.abs(), kind, spec)?)
        }
        (Value::Bool(b), None) => return Ok(aligned("", if *b { "True" } else { "False" }, spec, '<')),
        (value, kind) => match (value.as_int(), kind) {
            (Some(int), Some('e' | 'E' | 'f' | 'F' | 'g' | 'G' | '%')) => {
                (int < 0, "", float_digits((int as f64).abs(), kind, spec)?)
            }
            (Some(int), _) => {
                let (prefix, digits) = int_digits(int.unsigned_abs(), kind).ok_or_else(wrong)?;
                (int < 0, if spec.alternate { prefix } else { "" }, digits)
            }
            (None, None) if *spec == Spec::default() => return Ok(to_str(value).as_ref().to_owned()),
            (None, _) => return Err(wrong()),
        },
    };
    let sign = match (negative, spec.sign) {
        (true, _) => "-",
        (false, Some('+')) => "+",
        (false, Some(' ')) => " ",
        _ => "",
    };
    let digits = spec.grouping.map_or_else(|| digits.clone(), |separator| grouped(&digits, separator));
    Ok(aligned(&format!("{sign}{prefix}"), &digits, spec, '>'))
}

fn int_digits(int: u128, kind: Option<char>) -> Option<(&'static str, String)> {
    Some(match kind {
        None | Some('d' | 'n') => ("", int.to_string()),
        Some('x') => ("0x", format!("{int:x}")),
        Some('X') => ("0X", format!("{int:X}")),
        Some('o') => ("0o", format!("{int:o}")),
        Some('b') => ("0b", format!("{int:b}")),
        Some('c') => ("", char::from_u32(u32::try_from(int).ok()?)?.to_string()),
        Some(_) => return None,
    })
}

fn float_digits(float: f64, kind: Option<char>, spec: &Spec) -> Result<String, Error> {
    let precision = spec.precision.unwrap_or(6);
    if !float.is_finite() {
        let text = float_repr(float);
        return Ok(if kind.is_some_and(char::is_uppercase) { text.to_uppercase() } else { text });
    }
    Ok(match kind {
        None if spec.precision.is_none() => float_repr(float),
        Some('f' | 'F') => format!("{float:.precision$}"),
        Some('%') => format!("{:.precision$}%", float * 100.0),
        Some('e') => exponent(float, precision),
        Some('E') => exponent(float, precision).to_uppercase(),
        Some('g') | None => general(float, precision, kind.is_none()),
        Some('G') => general(float, precision, false).to_uppercase(),
        Some(other) => return Err(Error::new(format!("'{other}' is no format of a float"))),
    })
}

/// `1.5e+07`: Rust writes `1.5e7`.
fn exponent(float: f64, precision: usize) -> String {
    let text = format!("{float:.precision$e}");
    let (mantissa, exponent) = text.split_once('e').unwrap_or((&text, "0"));
    let (sign, digits) = exponent.strip_prefix('-').map_or(('+', exponent), |digits| ('-', digits));
    format!("{mantissa}e{sign}{digits:0>2}")
}

/// Significant digits without zeros at the end, with an exponent where that is shorter.
fn general(float: f64, precision: usize, point: bool) -> String {
    let precision = precision.max(1);
    let scientific = exponent(float, precision - 1);
    let (mantissa, power) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let power: i32 = power.parse().unwrap_or(0);
    let trimmed = |text: &str| {
        let text = if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.') } else { text };
        text.to_owned()
    };
    if power < -4 || power >= precision as i32 {
        return format!("{}e{}", trimmed(mantissa), scientific.split_once('e').map_or("", |(_, e)| e));
    }
    let decimals = (precision as i32 - 1 - power).max(0) as usize;
    let text = trimmed(&format!("{float:.decimals$}"));
    if point && !text.contains('.') { format!("{text}.0") } else { text }
}

fn grouped(digits: &str, separator: char) -> String {
    let end = digits.find(|c: char| !c.is_ascii_digit()).unwrap_or(digits.len());
    let mut out = String::new();
    for (n, c) in digits[..end].chars().enumerate() {
        if n > 0 && (end - n).is_multiple_of(3) {
            out.push(separator);
        }
        out.push(c);
    }
    out + &digits[end..]
}

fn aligned(sign: &str, text: &str, spec: &Spec, default: char) -> String {
    let missing = spec.width.saturating_sub(sign.chars().count() + text.chars().count());
    let zero = spec.zero && spec.align.is_none();
    let fill = spec.fill.unwrap_or(if zero { '0' } else { ' ' });
    let align = spec.align.unwrap_or(if zero && default == '>' { '=' } else { default });
    let fills = |count: usize| std::iter::repeat_n(fill, count).collect::<String>();
    match align {
        '<' => format!("{sign}{text}{}", fills(missing)),
        '=' => format!("{sign}{}{text}", fills(missing)),
        '^' => format!("{}{sign}{text}{}", fills(missing / 2), fills(missing - missing / 2)),
        _ => format!("{}{sign}{text}", fills(missing)),
    }
}
