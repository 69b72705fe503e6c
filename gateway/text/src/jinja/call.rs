//! Calls: macros, functions, methods, and the arguments they take.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;

use super::Error;
use super::eval::{CallArgs, Interpreter, Scope};
use super::methods;
use super::repr::to_str;
use super::value::{Dict, Function, Macro, Range, Value};
use crate::limits::RANGE_MAX;
use crate::strftime::strftime;

// === impl CallArgs ===

impl CallArgs {
    /// The arguments for the parameters `names`, positional or by name.
    pub(super) fn bind<const N: usize>(
        self,
        what: &str,
        names: [&str; N],
    ) -> Result<[Option<Value>; N], Error> {
        if self.positional.len() > N {
            return Err(Error::new(format!("'{what}' takes at most {N} arguments")));
        }
        let mut bound = [const { None }; N];
        for (slot, value) in bound.iter_mut().zip(self.positional) {
            *slot = Some(value);
        }
        for (name, value) in self.keyword {
            let Some(i) = names.iter().position(|n| **n == *name) else {
                return Err(Error::new(format!("'{what}' takes no argument '{name}'")));
            };
            if bound[i].replace(value).is_some() {
                return Err(Error::new(format!("'{what}' got two values for '{name}'")));
            }
        }
        Ok(bound)
    }
}

/// An argument that must be there.
pub(super) fn required(value: Option<Value>, what: &str) -> Result<Value, Error> {
    value.ok_or_else(|| Error::new(format!("'{what}' lacks an argument")))
}

/// An optional integer, with the value it has if absent.
pub(super) fn int_or(value: Option<&Value>, default: i128) -> Result<i128, Error> {
    match value {
        None => Ok(default),
        Some(value) => {
            value.as_int().ok_or_else(|| Error::new(format!("'{}' is no integer", value.type_name())))
        }
    }
}

/// An optional flag: whatever value it has counts by its truth, as in Python; `default` if it is absent.
pub(super) fn flag_or(value: Option<&Value>, default: bool) -> bool {
    value.map_or(default, Value::truth)
}

// === impl Interpreter ===

impl Interpreter {
    pub(super) fn call(&mut self, callee: &Value, args: CallArgs) -> Result<Value, Error> {
        match callee {
            Value::Macro(this) => self.call_macro(this, args),
            Value::Function(function) => self.call_function(*function, args),
            Value::Method(bound) => methods::call(self, &bound.0, bound.1, args),
            Value::Loop(this) if this.node.recursive => {
                let [items] = args.bind("loop", ["iterable"])?;
                let items = required(items, "loop")?;
                let (node, scope, mut out) = (Arc::clone(&this.node), Rc::clone(&this.scope), String::new());
                self.deeper(|i| i.for_(&node, &items, this.depth0 + 1, &scope, &mut out))?;
                Ok(Value::text(out))
            }
            Value::Cycler(this) => Ok(this.0[this.1.get()].clone()),
            Value::Joiner(this) => Ok(if this.1.replace(true) { this.0.clone() } else { Value::text("") }),
            other => Err(Self::not_callable(other)),
        }
    }

    fn call_macro(&mut self, this: &Macro, args: CallArgs) -> Result<Value, Error> {
        let def = &this.def;
        let Some(outer) = this.scope.upgrade() else {
            return Err(Error::new(format!("macro '{}' is called outside of its block", def.name)));
        };
        let scope = Scope::new(Some(outer));
        let mut positional = args.positional.into_iter();
        let mut keyword = args.keyword;
        let mut take =
            |name: &str| keyword.iter().position(|(n, _)| **n == *name).map(|i| keyword.remove(i).1);
        let mut caller = None;
        for (name, default) in &def.params {
            let value = match positional.next() {
                Some(value) => value,
                None => match (take(name), default) {
                    (Some(value), _) => value,
                    (None, Some(default)) => self.eval(default, &scope)?,
                    (None, None) => Value::undefined(name),
                },
            };
            if &**name == "caller" {
                caller = Some(value.clone());
            }
            scope.set(Arc::clone(name), value);
        }
        if def.caller && caller.is_none() {
            scope.set("caller".into(), take("caller").unwrap_or_else(|| Value::undefined("caller")));
        }
        if def.kwargs {
            let pairs = keyword.into_iter().map(|(name, value)| (Value::text(name), value));
            scope.set("kwargs".into(), Value::Dict(Rc::new(Dict::from_pairs(pairs))));
        } else if let Some((name, _)) = keyword.first() {
            return Err(Error::new(format!("macro '{}' takes no argument '{name}'", def.name)));
        }
        let rest: Vec<Value> = positional.collect();
        if def.varargs {
            scope.set("varargs".into(), Value::tuple(rest));
        } else if !rest.is_empty() {
            let most = def.params.len();
            return Err(Error::new(format!("macro '{}' takes at most {most} arguments", def.name)));
        }
        Ok(Value::text(self.capture(&def.body, &scope)?))
    }

    fn call_function(&mut self, function: Function, args: CallArgs) -> Result<Value, Error> {
        match function {
            Function::Range => range(args),
            Function::Dict => Ok(Value::Dict(Rc::new(dict(args)?))),
            Function::Namespace => {
                let fields = dict(args)?;
                let hidden =
                    fields.entries().iter().find_map(|(k, _)| k.as_text().filter(|k| k.starts_with('_')));
                match hidden {
                    Some(name) => Err(Error::new(format!("'{name}' cannot be set on a namespace"))),
                    None => Ok(Value::Namespace(Rc::new(RefCell::new(fields)))),
                }
            }
            Function::Cycler => {
                if args.positional.is_empty() {
                    return Err(Error::new("'cycler' needs items"));
                }
                Ok(Value::Cycler(Rc::new((args.positional, Cell::new(0)))))
            }
            Function::Joiner => {
                let [separator] = args.bind("joiner", ["sep"])?;
                let separator = separator.unwrap_or_else(|| Value::text(", "));
                Ok(Value::Joiner(Rc::new((separator, Cell::new(false)))))
            }
            Function::RaiseException => {
                let [message] = args.bind("raise_exception", ["message"])?;
                let message = to_str(&required(message, "raise_exception")?).as_ref().to_owned();
                Err(Error { raised: true, ..Error::new(message) })
            }
            Function::StrftimeNow => {
                let [format] = args.bind("strftime_now", ["format"])?;
                let format = required(format, "strftime_now")?;
                let format = format.as_text().ok_or_else(|| Error::new("'strftime_now' needs a string"))?;
                Ok(Value::text(strftime(format, self.now)))
            }
        }
    }
}

fn range(args: CallArgs) -> Result<Value, Error> {
    let mut numbers = Vec::new();
    for value in &args.positional {
        numbers.push(int_or(Some(value), 0)?);
    }
    let (start, stop, step) = match numbers[..] {
        [stop] => (0, stop, 1),
        [start, stop] => (start, stop, 1),
        [start, stop, step] if step != 0 => (start, stop, step),
        _ => return Err(Error::new("'range' takes one to three numbers, the last not 0")),
    };
    let bounds = [start, stop, step].iter().all(|n| n.unsigned_abs() < 1 << 64);
    let range = Range { start, stop, step };
    if !bounds || range.len() > RANGE_MAX {
        return Err(Error::new(format!("a range longer than {RANGE_MAX}")));
    }
    Ok(Value::Range(range))
}

/// Python's `dict(mapping or pairs, **more)`.
fn dict(args: CallArgs) -> Result<Dict, Error> {
    let mut fields = match args.positional.first() {
        None => Dict::default(),
        Some(Value::Dict(dict)) => Dict::clone(dict),
        Some(pairs) => {
            let mut dict = Dict::default();
            for pair in pairs.items()? {
                match &pair.items()?[..] {
                    [key, value] if key.hashable() => dict.insert(key.clone(), value.clone()),
                    _ => return Err(Error::new("'dict' needs pairs")),
                }
            }
            dict
        }
    };
    for (name, value) in args.keyword {
        fields.insert(Value::text(name), value);
    }
    Ok(fields)
}
