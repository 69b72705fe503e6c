//! Runs statements and evaluates expressions. Scopes are Jinja2's: loops, macros and blocks have one of their
//! own, `if` has none; an inner scope reads the outer ones and never writes to them.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;

use super::Error;
use super::ast::{Args, Body, Expr, For, Node, Stmt, Target};
use super::repr::write_str;
use super::value::{Dict, Function, Loop, Macro, Value, undefined_error};
use super::{checks, filters, methods, ops};
use crate::limits::{RENDER_BYTES_PER_STEP, RENDER_DEPTH_MAX, RENDER_STEPS_MAX};

/// Variables that statements set, and the scope around.
pub(super) struct Scope {
    variables: RefCell<Vec<(Arc<str>, Value)>>,
    parent: Option<Rc<Scope>>,
}

/// What happens after a statement.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Flow {
    Next,
    Break,
    Continue,
}

/// The evaluated arguments of a call.
#[derive(Default)]
pub(super) struct CallArgs {
    pub(super) positional: Vec<Value>,
    pub(super) keyword: Vec<(Arc<str>, Value)>,
}

/// The state of one rendering: the variables it was given, and what it has used of its bounds.
pub(super) struct Interpreter {
    context: Vec<(Arc<str>, Value)>,
    pub(super) now: u64,
    loop_name: Arc<str>,
    steps: u64,
    depth: usize,
    bytes_max: usize,
    /// The text of the enclosing filter block or `set` block.
    body: Option<Value>,
}

// === impl Scope ===

impl Scope {
    pub(super) fn new(parent: Option<Rc<Self>>) -> Rc<Self> {
        Rc::new(Self { variables: RefCell::default(), parent })
    }

    pub(super) fn set(&self, name: Arc<str>, value: Value) {
        let mut variables = self.variables.borrow_mut();
        match variables.iter_mut().find(|(n, _)| *n == name) {
            Some((_, old)) => *old = value,
            None => variables.push((name, value)),
        }
    }

    fn get(&self, name: &str) -> Option<Value> {
        let here = self.variables.borrow().iter().find(|(n, _)| &**n == name).map(|(_, v)| v.clone());
        here.or_else(|| self.parent.as_ref()?.get(name))
    }
}

// === impl Interpreter ===

impl Interpreter {
    pub(super) fn new(context: Vec<(Arc<str>, Value)>, now: u64, bytes_max: usize) -> Self {
        Self { context, now, loop_name: "loop".into(), steps: 0, depth: 0, bytes_max, body: None }
    }

    pub(super) fn render(&mut self, body: &Body) -> Result<String, Error> {
        let mut out = String::new();
        self.run(body, &Scope::new(None), &mut out)?;
        Ok(out)
    }

    /// Steps taken so far; an error comes beyond `RENDER_STEPS_MAX`.
    #[cfg(test)]
    pub(super) fn steps(&self) -> u64 {
        self.steps
    }

    /// Counts one step, and keeps text and nesting within their bounds.
    fn step(&mut self, bytes: usize) -> Result<(), Error> {
        self.steps += 1;
        if self.steps > RENDER_STEPS_MAX {
            return Err(Error::new("the template takes too many steps"));
        }
        if bytes > self.bytes_max {
            return Err(Error::too_long());
        }
        Ok(())
    }

    /// Counts what goes through a value's bytes or items as the steps that take as long.
    fn look_through(&mut self, value: &Value) -> Result<(), Error> {
        self.steps += value.bytes() as u64 / RENDER_BYTES_PER_STEP;
        self.step(0)
    }

    /// The same of a value that was made, whose length is bounded.
    fn made(&mut self, value: Value) -> Result<Value, Error> {
        self.look_through(&value)?;
        if let Value::Text(text) = &value {
            self.step(text.text.len())?;
        }
        Ok(value)
    }

    /// Runs `f` one level deeper.
    pub(super) fn deeper<T>(&mut self, f: impl FnOnce(&mut Self) -> Result<T, Error>) -> Result<T, Error> {
        if self.depth >= RENDER_DEPTH_MAX {
            return Err(Error::new("the template recurses too deeply"));
        }
        self.depth += 1;
        let result = f(self);
        self.depth -= 1;
        result
    }

    fn run(&mut self, body: &[Node], scope: &Rc<Scope>, out: &mut String) -> Result<Flow, Error> {
        for node in body {
            let flow = self.deeper(|this| this.statement(node, scope, out)).map_err(|mut error| {
                if error.line == 0 {
                    error.line = node.line;
                }
                error
            })?;
            if flow != Flow::Next {
                return Ok(flow);
            }
        }
        Ok(Flow::Next)
    }

    /// The text that a body makes in a scope of its own.
    pub(super) fn capture(&mut self, body: &[Node], scope: &Rc<Scope>) -> Result<String, Error> {
        let mut out = String::new();
        self.run(body, scope, &mut out)?;
        Ok(out)
    }

    fn statement(&mut self, node: &Node, scope: &Rc<Scope>, out: &mut String) -> Result<Flow, Error> {
        self.step(out.len())?;
        match &node.stmt {
            Stmt::Data(data) => out.push_str(data),
            Stmt::Print(expr) => write_str(&self.eval(expr, scope)?, out),
            Stmt::If(branches, otherwise) => {
                for (condition, body) in branches {
                    if self.eval(condition, scope)?.truth() {
                        return self.run(body, scope, out);
                    }
                }
                return self.run(otherwise, scope, out);
            }
            Stmt::For(node) => {
                let items = self.eval(&node.iter, scope)?;
                self.for_(node, &items, 0, scope, out)?;
            }
            Stmt::Set(target, expr) => {
                let value = self.eval(expr, scope)?;
                self.assign(target, value, scope)?;
            }
            Stmt::SetBlock(target, filters, body) => {
                let text = self.filtered(filters, body, scope)?;
                self.assign(target, text, scope)?;
            }
            Stmt::Filter(filters, body) => write_str(&self.filtered(filters, body, scope)?, out),
            Stmt::Macro(def) => {
                let value = Macro { def: Arc::clone(def), scope: Rc::downgrade(scope) };
                scope.set(Arc::clone(&def.name), Value::Macro(Rc::new(value)));
            }
            Stmt::Call(def, call) => {
                let caller = Macro { def: Arc::clone(def), scope: Rc::downgrade(scope) };
                let Expr::Call(callee, args) = call else { return Err(Error::new("'call' needs a call")) };
                let callee = self.eval(callee, scope)?;
                let mut args = self.args(args, scope)?;
                args.keyword.push(("caller".into(), Value::Macro(Rc::new(caller))));
                write_str(&self.call(&callee, args)?, out);
            }
            Stmt::With(values, body) => {
                let inner = Scope::new(Some(Rc::clone(scope)));
                for (target, expr) in values {
                    let value = self.eval(expr, scope)?;
                    self.assign(target, value, &inner)?;
                }
                self.run(body, &inner, out)?;
            }
            Stmt::Scope(body) => {
                self.run(body, &Scope::new(Some(Rc::clone(scope))), out)?;
            }
            Stmt::Break => return Ok(Flow::Break),
            Stmt::Continue => return Ok(Flow::Continue),
        }
        Ok(Flow::Next)
    }

    /// The text of a block after its filters.
    fn filtered(&mut self, filters: &Expr, body: &[Node], scope: &Rc<Scope>) -> Result<Value, Error> {
        let text = self.capture(body, &Scope::new(Some(Rc::clone(scope))))?;
        let outer = self.body.replace(Value::text(text));
        let filtered = self.eval(filters, scope);
        self.body = outer;
        filtered
    }

    fn assign(&mut self, target: &Target, value: Value, scope: &Rc<Scope>) -> Result<(), Error> {
        match target {
            Target::Name(name) => scope.set(Arc::clone(name), value),
            Target::Attr(name, attribute) => match self.lookup(name, scope) {
                Value::Namespace(_) if attribute.starts_with('_') => {
                    return Err(Error::new(format!("'{attribute}' cannot be set on a namespace")));
                }
                Value::Namespace(fields) => fields.borrow_mut().insert(Value::text(&**attribute), value),
                _ => return Err(Error::new(format!("'{name}' is not a namespace"))),
            },
            Target::Tuple(targets) => {
                let items = value.items()?;
                if items.len() != targets.len() {
                    let what = format!("{} values for {} names", items.len(), targets.len());
                    return Err(Error::new(what));
                }
                for (target, item) in targets.iter().zip(items) {
                    self.assign(target, item, scope)?;
                }
            }
        }
        Ok(())
    }

    /// Runs a loop over `items`; also the inner one of a recursive loop.
    pub(super) fn for_(
        &mut self,
        node: &Arc<For>,
        items: &Value,
        depth0: usize,
        scope: &Rc<Scope>,
        out: &mut String,
    ) -> Result<(), Error> {
        let length = if node.condition.is_none() { items.len().ok() } else { None };
        let this = Rc::new(Loop {
            node: Arc::clone(node),
            scope: Rc::clone(scope),
            pending: RefCell::new(VecDeque::from(items.items()?)),
            length: Cell::new(length),
            index0: Cell::new(0),
            depth0,
            before: RefCell::default(),
            current: RefCell::default(),
            after: RefCell::default(),
            changed: RefCell::default(),
        });
        let mut count = 0;
        while let Some(item) = self.advance(&this)? {
            this.index0.set(count);
            let before = this.current.replace(Some(item.clone()));
            this.before.replace(before);
            let inner = Scope::new(Some(Rc::clone(scope)));
            self.assign(&node.target, item, &inner)?;
            inner.set(Arc::clone(&self.loop_name), Value::Loop(Rc::clone(&this)));
            count += 1;
            if self.run(&node.body, &inner, out)? == Flow::Break {
                break;
            }
        }
        if count == 0 {
            self.run(&node.otherwise, &Scope::new(Some(Rc::clone(scope))), out)?;
        }
        Ok(())
    }

    fn advance(&mut self, this: &Loop) -> Result<Option<Value>, Error> {
        if let Some(item) = this.after.take() {
            return Ok(Some(item));
        }
        loop {
            self.step(0)?;
            let Some(item) = this.pending.borrow_mut().pop_front() else { return Ok(None) };
            let Some(condition) = &this.node.condition else { return Ok(Some(item)) };
            let inner = Scope::new(Some(Rc::clone(&this.scope)));
            self.assign(&this.node.target, item.clone(), &inner)?;
            if self.eval(condition, &inner)?.truth() {
                return Ok(Some(item));
            }
        }
    }

    /// The loop's next item, which stays the next.
    pub(super) fn peek(&mut self, this: &Loop) -> Result<Option<Value>, Error> {
        let next = self.advance(this)?;
        this.after.replace(next.clone());
        Ok(next)
    }

    /// The loop's number of items; looks at all of them if it must.
    pub(super) fn loop_length(&mut self, this: &Loop) -> Result<usize, Error> {
        if let Some(length) = this.length.get() {
            return Ok(length);
        }
        let mut rest = VecDeque::new();
        while let Some(item) = self.advance(this)? {
            rest.push_back(item);
        }
        let length = this.index0.get() + 1 + rest.len();
        // They have met the condition; without one that would be asked again.
        let first = rest.pop_front();
        this.after.replace(first);
        this.length.set(Some(length));
        this.pending.replace(rest);
        Ok(length)
    }

    pub(super) fn lookup(&self, name: &str, scope: &Scope) -> Value {
        let found = scope.get(name);
        let context = || self.context.iter().find(|(n, _)| &**n == name).map(|(_, value)| value.clone());
        found.or_else(context).unwrap_or_else(|| match name {
            "range" => Value::Function(Function::Range),
            "dict" => Value::Function(Function::Dict),
            "namespace" => Value::Function(Function::Namespace),
            "cycler" => Value::Function(Function::Cycler),
            "joiner" => Value::Function(Function::Joiner),
            "raise_exception" => Value::Function(Function::RaiseException),
            "strftime_now" => Value::Function(Function::StrftimeNow),
            _ => Value::undefined(name),
        })
    }

    pub(super) fn eval(&mut self, expr: &Expr, scope: &Rc<Scope>) -> Result<Value, Error> {
        self.step(0)?;
        self.deeper(|this| this.expression(expr, scope))
    }

    fn expression(&mut self, expr: &Expr, scope: &Rc<Scope>) -> Result<Value, Error> {
        Ok(match expr {
            Expr::None => Value::None,
            Expr::Bool(b) => Value::Bool(*b),
            Expr::Int(int) => Value::Int(*int),
            Expr::Float(float) => Value::Float(*float),
            Expr::Text(text) => Value::text(Arc::clone(text)),
            Expr::Body => self.body.clone().unwrap_or(Value::None),
            Expr::Name(name) => self.lookup(name, scope),
            Expr::Tuple(items) => Value::tuple(self.all(items, scope)?),
            Expr::List(items) => Value::list(self.all(items, scope)?),
            Expr::Dict(items) => self.dict(items, scope)?,
            Expr::Attr(object, name) => {
                let object = self.eval(object, scope)?;
                ops::attribute(self, &object, name)?
            }
            Expr::Item(object, key) => {
                let object = self.eval(object, scope)?;
                let key = self.eval(key, scope)?;
                ops::item(self, &object, &key)?
            }
            Expr::Slice(object, parts) => {
                let object = self.eval(object, scope)?;
                let mut bounds = [None; 3];
                for (bound, part) in bounds.iter_mut().zip(parts.iter()) {
                    if let Some(part) = part {
                        *bound = ops::slice_bound(&self.eval(part, scope)?)?;
                    }
                }
                self.look_through(&object)?;
                ops::slice(&object, bounds)?
            }
            Expr::Call(callee, args) => {
                let callee = self.eval(callee, scope)?;
                let args = self.args(args, scope)?;
                if let Value::Method(bound) = &callee
                    && !methods::LOOK_AT_AN_END.contains(&bound.1)
                {
                    self.look_through(&bound.0)?;
                }
                let value = self.call(&callee, args)?;
                self.made(value)?
            }
            Expr::Filter(value, name, args) => {
                let value = self.eval(value, scope)?;
                let args = self.args(args, scope)?;
                if matches!(value, Value::Text(_)) || !filters::LOOK_AT_AN_END.contains(&&**name) {
                    self.look_through(&value)?;
                }
                let value = filters::apply(self, name, value, args)?;
                self.made(value)?
            }
            Expr::Test(value, name, args) => {
                let value = self.eval(value, scope)?;
                let args = self.args(args, scope)?;
                Value::Bool(checks::check(name, &value, &args.positional)?)
            }
            other => self.operation(other, scope)?,
        })
    }

    fn operation(&mut self, expr: &Expr, scope: &Rc<Scope>) -> Result<Value, Error> {
        Ok(match expr {
            Expr::Cond(parts) => {
                let (condition, value, other) = &**parts;
                match (self.eval(condition, scope)?.truth(), other) {
                    (true, _) => self.eval(value, scope)?,
                    (false, Some(other)) => self.eval(other, scope)?,
                    (false, None) => Value::Undefined(None),
                }
            }
            Expr::And(sides) => {
                let left = self.eval(&sides.0, scope)?;
                if left.truth() { self.eval(&sides.1, scope)? } else { left }
            }
            Expr::Or(sides) => {
                let left = self.eval(&sides.0, scope)?;
                if left.truth() { left } else { self.eval(&sides.1, scope)? }
            }
            Expr::Not(value) => Value::Bool(!self.eval(value, scope)?.truth()),
            Expr::Negative(value) => ops::negative(&self.eval(value, scope)?)?,
            Expr::Positive(value) => ops::positive(&self.eval(value, scope)?)?,
            Expr::Binary(operator, sides) => {
                let left = self.eval(&sides.0, scope)?;
                let right = self.eval(&sides.1, scope)?;
                let value = ops::binary(*operator, &left, &right)?;
                self.made(value)?
            }
            Expr::Concat(parts) => {
                let mut text = String::new();
                for part in parts {
                    write_str(&self.eval(part, scope)?, &mut text);
                }
                self.made(Value::text(text))?
            }
            Expr::Compare(first, rest) => {
                let mut left = self.eval(first, scope)?;
                for (operator, right) in rest {
                    let right = self.eval(right, scope)?;
                    self.look_through(if operator.is_in() { &right } else { &left })?;
                    if !ops::compare(*operator, &left, &right)? {
                        return Ok(Value::Bool(false));
                    }
                    left = right;
                }
                Value::Bool(true)
            }
            _ => Value::None, // the rest is in `expression`
        })
    }

    fn all(&mut self, items: &[Expr], scope: &Rc<Scope>) -> Result<Vec<Value>, Error> {
        items.iter().map(|item| self.eval(item, scope)).collect()
    }

    fn dict(&mut self, items: &[(Expr, Expr)], scope: &Rc<Scope>) -> Result<Value, Error> {
        let mut dict = Dict::default();
        for (key, value) in items {
            let key = self.eval(key, scope)?;
            if !key.hashable() {
                return Err(Error::new(format!("'{}' is no key", key.type_name())));
            }
            dict.insert(key, self.eval(value, scope)?);
        }
        Ok(Value::Dict(Rc::new(dict)))
    }

    fn args(&mut self, args: &Args, scope: &Rc<Scope>) -> Result<CallArgs, Error> {
        let mut call = CallArgs { positional: self.all(&args.positional, scope)?, keyword: Vec::new() };
        if let Some(star) = &args.star {
            call.positional.extend(self.eval(star, scope)?.items()?);
        }
        for (name, value) in &args.keyword {
            call.keyword.push((Arc::clone(name), self.eval(value, scope)?));
        }
        if let Some(star_star) = &args.star_star {
            let value = self.eval(star_star, scope)?;
            let Value::Dict(dict) = &value else { return Err(Error::new("'**' needs a mapping")) };
            for (key, value) in dict.entries() {
                let name = key.as_text().ok_or_else(|| Error::new("a keyword must be a string"))?;
                call.keyword.push((name.into(), value.clone()));
            }
        }
        Ok(call)
    }

    /// A missing callee's error, or that the value is none.
    pub(super) fn not_callable(callee: &Value) -> Error {
        match callee {
            Value::Undefined(_) => undefined_error(callee),
            other => Error::new(format!("'{}' cannot be called", other.type_name())),
        }
    }
}
