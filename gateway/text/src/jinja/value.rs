//! A template's values, with Python's notions of truth, equality, order and size. How they read as text is
//! `repr.rs`.

use std::cell::{Cell, OnceCell, RefCell};
use std::cmp::Ordering;
use std::collections::{HashMap, VecDeque};
use std::rc::{Rc, Weak};
use std::sync::Arc;

use super::Error;
use super::ast::{For, MacroDef};
use super::eval::Scope;
use crate::limits::RENDER_PARTS_MAX;
use crate::message::{Field, Message};

/// A value. Cheap to clone; immutable, as in Jinja2's immutable sandbox, except for namespaces.
#[derive(Clone)]
pub(super) enum Value {
    /// A missing variable or attribute, with its name.
    Undefined(Option<Arc<str>>),
    None,
    Bool(bool),
    Int(i128),
    Float(f64),
    Text(Text),
    List(Rc<Vec<Value>>),
    Tuple(Rc<Vec<Value>>),
    Dict(Rc<Dict>),
    /// What `dict.keys()`, `.values()` and `.items()` give.
    View(View, Rc<Vec<Value>>),
    Range(Range),
    /// What most filters over sequences give: it can be iterated once.
    Generator(Rc<RefCell<VecDeque<Value>>>),
    Namespace(Rc<RefCell<Dict>>),
    Macro(Rc<Macro>),
    Function(Function),
    /// A method with its object.
    Method(Rc<(Value, &'static str)>),
    Loop(Rc<Loop>),
    Cycler(Rc<(Vec<Value>, Cell<usize>)>),
    Joiner(Rc<(Value, Cell<bool>)>),
}

/// A string; `safe` ones escape what is appended to them, as Markup does in Python.
#[derive(Clone)]
pub(super) struct Text {
    pub(super) text: Arc<str>,
    pub(super) safe: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum View {
    Keys,
    Values,
    Items,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Range {
    pub(super) start: i128,
    pub(super) stop: i128,
    pub(super) step: i128,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Function {
    Range,
    Dict,
    Namespace,
    Cycler,
    Joiner,
    RaiseException,
    StrftimeNow,
}

pub(super) struct Macro {
    pub(super) def: Arc<MacroDef>,
    /// Where it was defined; weak, because that scope holds the macro.
    pub(super) scope: Weak<Scope>,
}

/// The variable `loop` of one `for`: the item at hand, its place, and the items around it.
pub(super) struct Loop {
    pub(super) node: Arc<For>,
    pub(super) scope: Rc<Scope>,
    pub(super) pending: RefCell<VecDeque<Value>>,
    /// Number of items, where it is known from the start.
    pub(super) length: Cell<Option<usize>>,
    pub(super) index0: Cell<usize>,
    pub(super) depth0: usize,
    pub(super) before: RefCell<Option<Value>>,
    pub(super) current: RefCell<Option<Value>>,
    /// The next item, if it had to be looked at.
    pub(super) after: RefCell<Option<Value>>,
    pub(super) changed: RefCell<Option<Value>>,
}

/// A mapping that keeps the order in which keys came.
#[derive(Clone, Default)]
pub(super) struct Dict {
    entries: Vec<(Value, Value)>,
    /// Places of text keys, once there are many.
    index: OnceCell<HashMap<Arc<str>, usize>>,
}

/// Below this, looking at each key is faster than hashing.
const INDEXED_LEN: usize = 16;

// === impl Dict ===

impl Dict {
    pub(super) fn from_pairs(pairs: impl IntoIterator<Item = (Value, Value)>) -> Self {
        let mut dict = Self::default();
        for (key, value) in pairs {
            dict.insert(key, value);
        }
        dict
    }

    pub(super) fn entries(&self) -> &[(Value, Value)] {
        &self.entries
    }

    pub(super) fn get(&self, key: &Value) -> Option<&Value> {
        self.place(key).map(|i| &self.entries[i].1)
    }

    pub(super) fn get_text(&self, key: &str) -> Option<&Value> {
        self.place_text(key).map(|i| &self.entries[i].1)
    }

    pub(super) fn insert(&mut self, key: Value, value: Value) {
        if let Some(i) = self.place(&key) {
            self.entries[i].1 = value;
            return;
        }
        if let (Some(index), Value::Text(text)) = (self.index.get_mut(), &key) {
            index.insert(text.text.clone(), self.entries.len());
        }
        self.entries.push((key, value));
    }

    fn place(&self, key: &Value) -> Option<usize> {
        match key {
            Value::Text(text) => self.place_text(&text.text),
            key => self.entries.iter().position(|(k, _)| equal(k, key)),
        }
    }

    fn place_text(&self, key: &str) -> Option<usize> {
        if self.entries.len() < INDEXED_LEN {
            return self.entries.iter().position(|(k, _)| matches!(k, Value::Text(t) if &*t.text == key));
        }
        let index = self.index.get_or_init(|| {
            let texts = self.entries.iter().enumerate();
            texts.filter_map(|(i, (k, _))| k.as_text().map(|t| (Arc::from(t), i))).collect()
        });
        index.get(key).copied()
    }
}

// === impl Range ===

impl Range {
    pub(super) fn len(self) -> i128 {
        let span = if self.step > 0 { self.stop - self.start } else { self.start - self.stop };
        if span <= 0 { 0 } else { (span - 1) / self.step.abs() + 1 }
    }

    pub(super) fn at(self, i: i128) -> i128 {
        self.start + i * self.step
    }
}

// === impl Value ===

impl Value {
    pub(super) fn text(text: impl Into<Arc<str>>) -> Self {
        Self::Text(Text { text: text.into(), safe: false })
    }

    pub(super) fn markup(text: impl Into<Arc<str>>, safe: bool) -> Self {
        Self::Text(Text { text: text.into(), safe })
    }

    pub(super) fn list(items: Vec<Value>) -> Self {
        Self::List(Rc::new(items))
    }

    pub(super) fn tuple(items: Vec<Value>) -> Self {
        Self::Tuple(Rc::new(items))
    }

    pub(super) fn generator(items: impl IntoIterator<Item = Value>) -> Self {
        Self::Generator(Rc::new(RefCell::new(items.into_iter().collect())))
    }

    pub(super) fn undefined(name: &str) -> Self {
        Self::Undefined(Some(name.into()))
    }

    /// Stands for a method or attribute that the sandbox does not give out.
    pub(super) fn forbidden(name: &str) -> Self {
        Self::Undefined(Some(format!("{name} (not for templates)").into()))
    }

    pub(super) fn from_json(json: &serde_json::Value) -> Self {
        use serde_json::Value as Json;
        match json {
            Json::Null => Self::None,
            Json::Bool(b) => Self::Bool(*b),
            Json::Number(n) => match n.as_i128() {
                Some(int) => Self::Int(int),
                None => Self::Float(n.as_f64().unwrap_or(f64::NAN)),
            },
            Json::String(text) => Self::text(text.as_str()),
            Json::Array(items) => Self::list(items.iter().map(Self::from_json).collect()),
            Json::Object(fields) => Self::Dict(Rc::new(Dict {
                entries: fields.iter().map(|(k, v)| (Self::text(k.as_str()), Self::from_json(v))).collect(),
                index: OnceCell::new(),
            })),
        }
    }

    /// A list of dicts. Messages mostly have the same fields as the one before them, and share their names.
    pub(super) fn from_messages(messages: &[Message<'_>]) -> Self {
        let mut before: Rc<Dict> = Rc::default();
        let dict = |message: &Message<'_>| {
            let entry = |(i, (name, field)): (usize, (&str, &Field<'_>))| {
                let same =
                    before.entries.get(i).map(|(name, _)| name).filter(|of| of.as_text() == Some(name));
                let value = match field {
                    Field::Text(text) => Self::text(&**text),
                    Field::Other(json) => Self::from_json(json),
                };
                (same.cloned().unwrap_or_else(|| Self::text(name)), value)
            };
            let entries = message.fields().enumerate().map(entry).collect();
            before = Rc::new(Dict { entries, index: OnceCell::new() });
            Self::Dict(Rc::clone(&before))
        };
        Self::list(messages.iter().map(dict).collect())
    }

    pub(super) fn as_text(&self) -> Option<&str> {
        match self {
            Self::Text(text) => Some(&text.text),
            _ => None,
        }
    }

    pub(super) fn as_int(&self) -> Option<i128> {
        match self {
            Self::Int(int) => Some(*int),
            Self::Bool(b) => Some(i128::from(*b)),
            _ => None,
        }
    }

    pub(super) fn is_undefined(&self) -> bool {
        matches!(self, Self::Undefined(_))
    }

    /// Python's name of the type.
    pub(super) fn type_name(&self) -> &'static str {
        match self {
            Self::Undefined(_) => "undefined",
            Self::None => "NoneType",
            Self::Bool(_) => "bool",
            Self::Int(_) => "int",
            Self::Float(_) => "float",
            Self::Text(_) => "str",
            Self::List(_) => "list",
            Self::Tuple(_) => "tuple",
            Self::Dict(_) => "dict",
            Self::View(View::Keys, _) => "dict_keys",
            Self::View(View::Values, _) => "dict_values",
            Self::View(View::Items, _) => "dict_items",
            Self::Range(_) => "range",
            Self::Generator(_) => "generator",
            Self::Namespace(_) => "Namespace",
            Self::Macro(_) => "Macro",
            Self::Function(_) | Self::Method(_) => "function",
            Self::Loop(_) => "LoopContext",
            Self::Cycler(_) => "Cycler",
            Self::Joiner(_) => "Joiner",
        }
    }

    pub(super) fn truth(&self) -> bool {
        match self {
            Self::Undefined(_) | Self::None => false,
            Self::Bool(b) => *b,
            Self::Int(int) => *int != 0,
            Self::Float(float) => *float != 0.0,
            Self::Text(text) => !text.text.is_empty(),
            Self::List(items) | Self::Tuple(items) | Self::View(_, items) => !items.is_empty(),
            Self::Dict(dict) => !dict.entries.is_empty(),
            Self::Range(range) => range.len() > 0,
            _ => true,
        }
    }

    /// Python's `len`: characters of a text, else items; 0 if undefined. An error for values that have none.
    pub(super) fn len(&self) -> Result<usize, Error> {
        Ok(match self {
            Self::Undefined(_) => 0,
            Self::Text(text) => text.text.chars().count(),
            Self::List(items) | Self::Tuple(items) | Self::View(_, items) => items.len(),
            Self::Dict(dict) => dict.entries.len(),
            Self::Range(range) => range.len() as usize,
            other => return Err(Error::new(format!("'{}' has no length", other.type_name()))),
        })
    }

    /// Bytes that are gone through with its text, or with its items but not theirs.
    pub(super) fn bytes(&self) -> usize {
        let items = match self {
            Self::Text(text) => return text.text.len(),
            Self::List(items) | Self::Tuple(items) | Self::View(_, items) => items.len(),
            Self::Dict(dict) => 2 * dict.entries.len(),
            Self::Generator(items) => items.borrow().len(),
            _ => 0,
        };
        items * size_of::<Self>()
    }

    /// The items one gets by iterating.
    pub(super) fn items(&self) -> Result<Vec<Value>, Error> {
        Ok(match self {
            Self::Undefined(_) => Vec::new(),
            Self::Text(text) if text.text.len() > RENDER_PARTS_MAX => return Err(Error::too_long()),
            Self::Text(text) => {
                let mut buffer = [0; 4];
                text.text.chars().map(|c| Self::text(&*c.encode_utf8(&mut buffer))).collect()
            }
            Self::List(items) | Self::Tuple(items) | Self::View(_, items) => items.to_vec(),
            Self::Dict(dict) => dict.entries.iter().map(|(key, _)| key.clone()).collect(),
            Self::Range(range) => (0..range.len()).map(|i| Self::Int(range.at(i))).collect(),
            Self::Generator(items) => items.borrow_mut().drain(..).collect(),
            other => return Err(Error::new(format!("'{}' cannot be iterated", other.type_name()))),
        })
    }

    /// Whether the value may be a key.
    pub(super) fn hashable(&self) -> bool {
        match self {
            Self::List(_) | Self::Dict(_) => false,
            Self::Tuple(items) => items.iter().all(Self::hashable),
            _ => true,
        }
    }
}

/// A number as the wider of the two kinds.
pub(super) enum Numbers {
    Int(i128, i128),
    Float(f64, f64),
}

/// Two numbers, booleans among them, or `None` where one is not.
pub(super) fn numbers(a: &Value, b: &Value) -> Option<Numbers> {
    match (a, b) {
        (Value::Float(a), Value::Float(b)) => Some(Numbers::Float(*a, *b)),
        (Value::Float(a), b) => Some(Numbers::Float(*a, b.as_int()? as f64)),
        (a, Value::Float(b)) => Some(Numbers::Float(a.as_int()? as f64, *b)),
        (a, b) => Some(Numbers::Int(a.as_int()?, b.as_int()?)),
    }
}

/// Python's `==`: numbers by value whatever their type, lists and dicts by what is in them.
pub(super) fn equal(a: &Value, b: &Value) -> bool {
    match (a, b) {
        (Value::Text(a), Value::Text(b)) => a.text == b.text,
        (Value::None, Value::None) | (Value::Undefined(_), Value::Undefined(_)) => true,
        (Value::List(a), Value::List(b))
        | (Value::Tuple(a), Value::Tuple(b))
        | (Value::View(View::Keys, a), Value::View(View::Keys, b)) => {
            a.len() == b.len() && a.iter().zip(b.iter()).all(|(a, b)| equal(a, b))
        }
        (Value::Dict(a), Value::Dict(b)) => {
            let same = |(key, value): &(Value, Value)| b.get(key).is_some_and(|other| equal(value, other));
            a.entries.len() == b.entries.len() && a.entries.iter().all(same)
        }
        (Value::Range(a), Value::Range(b)) => a == b,
        (Value::Namespace(a), Value::Namespace(b)) => Rc::ptr_eq(a, b),
        (Value::Macro(a), Value::Macro(b)) => Rc::ptr_eq(a, b),
        (Value::Generator(a), Value::Generator(b)) => Rc::ptr_eq(a, b),
        (Value::Function(a), Value::Function(b)) => a == b,
        _ => match numbers(a, b) {
            Some(Numbers::Int(a, b)) => a == b,
            Some(Numbers::Float(a, b)) => a == b,
            None => false,
        },
    }
}

/// Python's order; an error between kinds that have none. `None` with a NaN.
pub(super) fn order(a: &Value, b: &Value) -> Result<Option<Ordering>, Error> {
    match (a, b) {
        (Value::Text(a), Value::Text(b)) => Ok(Some(a.text.cmp(&b.text))),
        (Value::List(a), Value::List(b)) | (Value::Tuple(a), Value::Tuple(b)) => {
            for (a, b) in a.iter().zip(b.iter()) {
                if !equal(a, b) {
                    return order(a, b);
                }
            }
            Ok(Some(a.len().cmp(&b.len())))
        }
        _ => match numbers(a, b) {
            Some(Numbers::Int(a, b)) => Ok(Some(a.cmp(&b))),
            Some(Numbers::Float(a, b)) => Ok(a.partial_cmp(&b)),
            None => Err(undefined_in(a, b).unwrap_or_else(|| {
                Error::new(format!("'{}' and '{}' cannot be ordered", a.type_name(), b.type_name()))
            })),
        },
    }
}

/// The error of using an undefined value, if one of the two is.
pub(super) fn undefined_in(a: &Value, b: &Value) -> Option<Error> {
    [a, b].into_iter().find(|v| v.is_undefined()).map(undefined_error)
}

pub(super) fn undefined_error(value: &Value) -> Error {
    match value {
        Value::Undefined(Some(name)) => Error::new(format!("'{name}' is undefined")),
        _ => Error::new("an undefined value is used"),
    }
}
