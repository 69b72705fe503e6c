//! Whether a template goes through the parts of a message's content, told from its source as vLLM tells it
//! (`_detect_content_format` in `vllm/renderers/hf.py`): by a loop over the `content` of what a loop over
//! `messages` gives, over what a macro is given of it, or over a variable of that name.

use std::collections::HashSet;
use std::sync::Arc;

use super::ast::{Args, Body, Expr, For, MacroDef, Stmt, Target};

/// The conversation, and a message's field.
const MESSAGES: &str = "messages";
const CONTENT: &str = "content";

/// What of a template matters here, in no order.
#[derive(Default)]
struct Found<'t> {
    loops: Vec<&'t For>,
    sets: Vec<(&'t Target, &'t Expr)>,
    macros: Vec<&'t MacroDef>,
    calls: Vec<(&'t str, &'t Args)>,
}

/// Whether it does. A template that takes messages apart in a way that vLLM does not follow does not.
pub(super) fn goes_through_parts(body: &Body) -> bool {
    let mut all = Found::default();
    all.body(body);
    let Some(messages) = all.message_names() else { return false };
    let mut in_macros = Vec::new();
    for of in &all.macros {
        let given = all.parameters_of_content(of, &messages);
        let mut inner = Found::default();
        inner.body(&of.body);
        if inner.loops.iter().any(|found| matches!(&found.iter, Expr::Name(name) if given.contains(&**name)))
        {
            return true;
        }
        in_macros.extend(inner.loops.into_iter().map(std::ptr::from_ref));
    }
    all.loops.iter().any(|found| {
        messages.iter().any(|message| is_of(&found.iter, message, Some(CONTENT)))
            || (!in_macros.contains(&std::ptr::from_ref(*found))
                && matches!(&found.iter, Expr::Name(name) if &**name == CONTENT))
    })
}

/// Whether an expression is a variable, or a field of it, perhaps a slice of that or what filters make of it.
fn is_of(expr: &Expr, variable: &str, field: Option<&str>) -> bool {
    let is_variable = |expr: &Expr| matches!(expr, Expr::Name(name) if &**name == variable);
    match (expr, field) {
        (Expr::Filter(inner, ..) | Expr::Test(inner, ..) | Expr::Slice(inner, _), _) => {
            is_of(inner, variable, field)
        }
        (Expr::Attr(inner, name), Some(field)) => is_variable(inner) && &**name == field,
        (Expr::Item(inner, name), Some(field)) => {
            is_variable(inner) && matches!(&**name, Expr::Text(name) if &**name == field)
        }
        (expr, None) => is_variable(expr),
        _ => false,
    }
}

impl<'t> Found<'t> {
    /// What loops over the conversation call a message; `None` where vLLM gives up.
    fn message_names(&self) -> Option<HashSet<&'t str>> {
        let mut conversations = vec![MESSAGES];
        let mut next = 0;
        while let Some(of) = conversations.get(next).copied() {
            next += 1;
            for (target, value) in &self.sets {
                if is_of(value, of, None) {
                    let Target::Name(name) = target else { return None };
                    if !conversations.contains(&&**name) {
                        conversations.push(name);
                    }
                }
            }
        }
        let mut names = HashSet::new();
        for found in &self.loops {
            if conversations.iter().any(|of| is_of(&found.iter, of, None)) {
                let Target::Name(name) = &found.target else { return None };
                names.insert(&**name);
            }
        }
        Some(names)
    }

    /// The parameters by which a macro is given the content of messages.
    fn parameters_of_content(&self, of: &'t MacroDef, messages: &HashSet<&str>) -> HashSet<&'t str> {
        let is_content = |expr: &Expr| messages.iter().any(|message| is_of(expr, message, Some(CONTENT)));
        let mut given: HashSet<&str> = HashSet::new();
        for (_, args) in self.calls.iter().filter(|(name, _)| *name == &*of.name) {
            let placed = of.params.iter().zip(&args.positional).filter(|(_, arg)| is_content(arg));
            given.extend(placed.map(|((name, _), _)| &**name));
            let named = args.keyword.iter().filter(|(_, arg)| is_content(arg));
            given.extend(
                named.filter_map(|(name, _)| of.params.iter().find(|(of, _)| of == name)).map(own_name),
            );
        }
        given
    }

    fn body(&mut self, body: &'t Body) {
        for node in body {
            self.statement(&node.stmt);
        }
    }

    fn statement(&mut self, stmt: &'t Stmt) {
        match stmt {
            Stmt::Data(_) | Stmt::Break | Stmt::Continue => {}
            Stmt::Print(expr) => self.expr(expr),
            Stmt::If(branches, otherwise) => {
                for (condition, body) in branches {
                    self.expr(condition);
                    self.body(body);
                }
                self.body(otherwise);
            }
            Stmt::For(found) => {
                self.loops.push(found);
                self.expr(&found.iter);
                self.exprs(&found.condition);
                self.body(&found.body);
                self.body(&found.otherwise);
            }
            Stmt::Set(target, value) => {
                self.sets.push((target, value));
                self.expr(value);
            }
            Stmt::Macro(of) => {
                self.macros.push(of);
                self.macro_def(of);
            }
            Stmt::Call(of, call) => {
                self.expr(call);
                self.macro_def(of);
            }
            Stmt::SetBlock(_, expr, body) | Stmt::Filter(expr, body) => {
                self.expr(expr);
                self.body(body);
            }
            Stmt::With(variables, body) => {
                self.exprs(variables.iter().map(|(_, value)| value));
                self.body(body);
            }
            Stmt::Scope(body) => self.body(body),
        }
    }

    fn macro_def(&mut self, of: &'t MacroDef) {
        self.exprs(of.params.iter().filter_map(|(_, default)| default.as_ref()));
        self.body(&of.body);
    }

    fn exprs(&mut self, exprs: impl IntoIterator<Item = &'t Expr>) {
        for expr in exprs {
            self.expr(expr);
        }
    }

    fn args(&mut self, args: &'t Args) {
        self.exprs(&args.positional);
        self.exprs(args.keyword.iter().map(|(_, value)| value));
        self.exprs(args.star.iter().chain(&args.star_star));
    }

    fn expr(&mut self, expr: &'t Expr) {
        match expr {
            Expr::None
            | Expr::Bool(_)
            | Expr::Int(_)
            | Expr::Float(_)
            | Expr::Text(_)
            | Expr::Body
            | Expr::Name(_) => {}
            Expr::Tuple(items) | Expr::List(items) | Expr::Concat(items) => self.exprs(items),
            Expr::Dict(items) => self.exprs(items.iter().flat_map(|(key, value)| [key, value])),
            Expr::Attr(inner, _) | Expr::Not(inner) | Expr::Negative(inner) | Expr::Positive(inner) => {
                self.expr(inner);
            }
            Expr::Item(inner, key) => self.exprs([&**inner, &**key]),
            Expr::Slice(inner, bounds) => {
                self.expr(inner);
                self.exprs(bounds.iter().flatten());
            }
            Expr::Call(function, args) => {
                if let Expr::Name(name) = &**function {
                    self.calls.push((name, args));
                }
                self.expr(function);
                self.args(args);
            }
            Expr::Filter(inner, _, args) | Expr::Test(inner, _, args) => {
                self.expr(inner);
                self.args(args);
            }
            Expr::Cond(parts) => {
                self.exprs([&parts.0, &parts.1]);
                self.exprs(&parts.2);
            }
            Expr::And(both) | Expr::Or(both) | Expr::Binary(_, both) => self.exprs([&both.0, &both.1]),
            Expr::Compare(first, others) => {
                self.expr(first);
                self.exprs(others.iter().map(|(_, other)| other));
            }
        }
    }
}

/// A parameter's name.
fn own_name((name, _): &(Arc<str>, Option<Expr>)) -> &str {
    name
}

#[cfg(test)]
mod tests {
    use super::super::Template;

    #[test]
    fn loops_over_a_message_s_content_are_found_however_it_is_reached() {
        let goes = |source: &str| Template::new(source).unwrap().goes_through_parts();
        let each = |body: &str| format!("{{% for m in messages %}}{body}{{% endfor %}}");
        for source in [
            each("{% for p in m.content %}{{ p.text }}{% endfor %}"),
            each("{% if m['content'] is string %}{% else %}{% for p in m['content'] | list %}{% endfor %}{% endif %}"),
            "{% set rest = messages[1:] %}{% for m in rest %}{% for p in m.content %}{% endfor %}{% endfor %}".into(),
            each("{% set content = m.content %}{% for p in content %}{% endfor %}"),
            format!("{{% macro show(c) %}}{{% for p in c %}}{{% endfor %}}{{% endmacro %}}{}", each("{{ show(m.content) }}")),
            format!("{{% macro show(c) %}}{{% for p in c %}}{{% endfor %}}{{% endmacro %}}{}", each("{{ show(c=m.content) }}")),
        ] {
            assert!(goes(&source), "{source}");
        }
        for source in [
            each("{{ m.content }}"),
            each("{% for call in m.tool_calls %}{% endfor %}"),
            "{% for m in others %}{% for p in m.content %}{% endfor %}{% endfor %}".into(),
            "{% macro show(m) %}{% set content = m.content %}{% for p in content %}{% endfor %}{% endmacro %}".into(),
            each("{% for p in m[name] %}{% endfor %}"),
            "{% for i, m in messages %}{% for p in m.content %}{% endfor %}{% endfor %}".into(),
            "{% set a, b = messages %}{% for m in messages %}{% for p in m.content %}{% endfor %}{% endfor %}".into(),
        ] {
            assert!(!goes(&source), "{source}");
        }
    }
}
