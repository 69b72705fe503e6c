//! Tokens to statements. Expressions are in `parse_expr.rs`. Takes what chat templates may use: no
//! inheritance, no includes.

use std::sync::Arc;

use super::Error;
use super::ast::{Body, Expr, For, MacroDef, Node, Param, Stmt, Target};
use super::lexer::{Token, lex};
use crate::limits::TEMPLATE_DEPTH_MAX;

/// Reads a whole template into statements. The first thing that does not fit is an error.
pub(super) fn parse(source: &str) -> Result<Body, Error> {
    let mut parser = Parser { tokens: lex(source)?, at: 0, depth: 0, loops: 0 };
    let body = parser.body(&[])?;
    match parser.peek() {
        None => Ok(body),
        Some(_) => Err(parser.unexpected("the end")),
    }
}

pub(super) struct Parser {
    tokens: Vec<(Token, u32)>,
    at: usize,
    depth: usize,
    /// Loops around the statement being parsed.
    loops: usize,
}

// === impl Parser ===

impl Parser {
    pub(super) fn peek(&self) -> Option<&Token> {
        self.tokens.get(self.at).map(|(token, _)| token)
    }

    pub(super) fn peek_second(&self) -> Option<&Token> {
        self.tokens.get(self.at + 1).map(|(token, _)| token)
    }

    pub(super) fn line(&self) -> u32 {
        self.tokens.get(self.at).or(self.tokens.last()).map_or(1, |(_, line)| *line)
    }

    pub(super) fn next(&mut self) -> Option<Token> {
        let token = self.peek().cloned();
        self.at += 1;
        token
    }

    /// Takes the last token back.
    pub(super) fn back(&mut self) {
        self.at -= 1;
    }

    pub(super) fn skip(&mut self, count: usize) {
        self.at += count;
    }

    pub(super) fn is_symbol(&self, symbol: &str) -> bool {
        matches!(self.peek(), Some(Token::Symbol(s)) if *s == symbol)
    }

    pub(super) fn is_name(&self, name: &str) -> bool {
        matches!(self.peek(), Some(Token::Name(n)) if &**n == name)
    }

    pub(super) fn skip_symbol(&mut self, symbol: &str) -> bool {
        let found = self.is_symbol(symbol);
        self.at += usize::from(found);
        found
    }

    pub(super) fn skip_name(&mut self, name: &str) -> bool {
        let found = self.is_name(name);
        self.at += usize::from(found);
        found
    }

    pub(super) fn expect_symbol(&mut self, symbol: &'static str) -> Result<(), Error> {
        if self.skip_symbol(symbol) { Ok(()) } else { Err(self.unexpected(symbol)) }
    }

    pub(super) fn expect_name(&mut self) -> Result<Arc<str>, Error> {
        if let Some(Token::Name(name)) = self.peek() {
            let name = Arc::clone(name);
            self.at += 1;
            return Ok(name);
        }
        Err(self.unexpected("a name"))
    }

    pub(super) fn unexpected(&self, wanted: &str) -> Error {
        let found = match self.peek() {
            None => "the end of the template".to_owned(),
            Some(Token::Data(_)) => "text".to_owned(),
            Some(Token::BlockBegin) => "'{%'".to_owned(),
            Some(Token::BlockEnd) => "'%}'".to_owned(),
            Some(Token::PrintBegin) => "'{{'".to_owned(),
            Some(Token::PrintEnd) => "'}}'".to_owned(),
            Some(Token::Name(name)) => format!("'{name}'"),
            Some(Token::Symbol(symbol)) => format!("'{symbol}'"),
            Some(Token::Text(_)) => "a string".to_owned(),
            Some(Token::Int(_) | Token::Float(_)) => "a number".to_owned(),
        };
        Error::syntax(format!("expected {wanted}, found {found}"), self.line())
    }

    /// Runs `parse` one level deeper; templates nest no deeper than a bound.
    pub(super) fn deeper<T>(
        &mut self,
        parse: impl FnOnce(&mut Self) -> Result<T, Error>,
    ) -> Result<T, Error> {
        if self.depth >= TEMPLATE_DEPTH_MAX {
            return Err(Error::syntax("the template nests too deeply".to_owned(), self.line()));
        }
        self.depth += 1;
        let parsed = parse(self);
        self.depth -= 1;
        parsed
    }

    /// Statements up to a block that begins with one of `ends`, whose `{%` is consumed and whose name is not.
    fn body(&mut self, ends: &[&str]) -> Result<Body, Error> {
        let mut body = Vec::new();
        loop {
            let line = self.line();
            let stmt = match self.next() {
                None if ends.is_empty() => return Ok(body),
                None => return Err(self.unexpected(&format!("'{}'", ends.join("' or '")))),
                Some(Token::Data(data)) => Stmt::Data(data),
                Some(Token::PrintBegin) => {
                    let value = self.tuple(true, &[])?;
                    self.expect(&Token::PrintEnd, "'}}'")?;
                    Stmt::Print(value)
                }
                Some(Token::BlockBegin) => {
                    if matches!(self.peek(), Some(Token::Name(name)) if ends.contains(&&**name)) {
                        return Ok(body);
                    }
                    let stmt = self.deeper(Self::statement)?;
                    self.expect(&Token::BlockEnd, "'%}'")?;
                    stmt
                }
                Some(_) => {
                    self.at -= 1;
                    return Err(self.unexpected("text or a tag"));
                }
            };
            body.push(Node { line, stmt });
        }
    }

    fn expect(&mut self, token: &Token, name: &str) -> Result<(), Error> {
        if self.peek() == Some(token) {
            self.at += 1;
            return Ok(());
        }
        Err(self.unexpected(name))
    }

    /// The rest of a tag, the statements after it, and the name of its end (consumed).
    fn enclosed(&mut self, ends: &[&str]) -> Result<(Body, Arc<str>), Error> {
        self.expect(&Token::BlockEnd, "'%}'")?;
        let body = self.body(ends)?;
        Ok((body, self.expect_name()?))
    }

    fn statement(&mut self) -> Result<Stmt, Error> {
        let name = self.expect_name()?;
        match &*name {
            "if" => self.if_(),
            "for" => self.for_(),
            "set" => self.set(),
            "macro" => {
                let name = self.expect_name()?;
                Ok(Stmt::Macro(Arc::new(self.macro_(name, &["endmacro"])?)))
            }
            "call" => self.call(),
            "filter" => {
                let name = self.expect_name()?;
                let filter = self.filters(Expr::Body, Some(name))?;
                Ok(Stmt::Filter(filter, self.enclosed(&["endfilter"])?.0))
            }
            "with" => self.with(),
            "generation" => Ok(Stmt::Scope(self.enclosed(&["endgeneration"])?.0)),
            "block" => {
                let name = self.expect_name()?;
                let body = self.enclosed(&["endblock"])?.0;
                self.skip_name(&name);
                Ok(Stmt::Scope(body))
            }
            "break" if self.loops > 0 => Ok(Stmt::Break),
            "continue" if self.loops > 0 => Ok(Stmt::Continue),
            "print" => Ok(Stmt::Print(self.expr()?)),
            _ => {
                self.at -= 1;
                Err(self.unexpected("a statement that chat templates know"))
            }
        }
    }

    fn if_(&mut self) -> Result<Stmt, Error> {
        let mut branches = Vec::new();
        loop {
            let condition = self.tuple(false, &[])?;
            let (body, end) = self.enclosed(&["elif", "else", "endif"])?;
            branches.push((condition, body));
            match &*end {
                "elif" => {}
                "else" => return Ok(Stmt::If(branches, self.enclosed(&["endif"])?.0)),
                _ => return Ok(Stmt::If(branches, Vec::new())),
            }
        }
    }

    fn for_(&mut self) -> Result<Stmt, Error> {
        let target = self.target()?;
        if !self.skip_name("in") {
            return Err(self.unexpected("'in'"));
        }
        let iter = self.tuple(false, &["recursive"])?;
        let condition = if self.skip_name("if") { Some(self.expr()?) } else { None };
        let recursive = self.skip_name("recursive");
        self.loops += 1;
        let (body, end) = self.enclosed(&["endfor", "else"])?;
        self.loops -= 1;
        let otherwise = if &*end == "else" { self.enclosed(&["endfor"])?.0 } else { Vec::new() };
        Ok(Stmt::For(Arc::new(For { target, iter, condition, body, otherwise, recursive })))
    }

    fn set(&mut self) -> Result<Stmt, Error> {
        let target = self.target()?;
        if self.skip_symbol("=") {
            return Ok(Stmt::Set(target, self.tuple(true, &[])?));
        }
        let filters = self.filters(Expr::Body, None)?;
        Ok(Stmt::SetBlock(target, filters, self.enclosed(&["endset"])?.0))
    }

    fn call(&mut self) -> Result<Stmt, Error> {
        let params = if self.is_symbol("(") { self.params()? } else { Vec::new() };
        let call = self.expr()?;
        if !matches!(call, Expr::Call(..)) {
            return Err(Error::syntax("'call' needs a call".to_owned(), self.line()));
        }
        let body = self.macro_body("caller".into(), params, &["endcall"])?;
        Ok(Stmt::Call(Arc::new(body), call))
    }

    fn macro_(&mut self, name: Arc<str>, ends: &[&str]) -> Result<MacroDef, Error> {
        let params = self.params()?;
        self.macro_body(name, params, ends)
    }

    fn macro_body(&mut self, name: Arc<str>, params: Vec<Param>, ends: &[&str]) -> Result<MacroDef, Error> {
        let (begin, loops) = (self.at, std::mem::take(&mut self.loops));
        let body = self.enclosed(ends)?.0;
        self.loops = loops;
        let names = |wanted: &str| {
            let tokens = &self.tokens[begin..self.at];
            tokens.iter().any(|(t, _)| matches!(t, Token::Name(name) if &**name == wanted))
        };
        let (varargs, kwargs, caller) = (names("varargs"), names("kwargs"), names("caller"));
        Ok(MacroDef { name, params, body, varargs, kwargs, caller })
    }

    fn params(&mut self) -> Result<Vec<Param>, Error> {
        let mut params: Vec<Param> = Vec::new();
        self.expect_symbol("(")?;
        while !self.is_symbol(")") {
            if !params.is_empty() {
                self.expect_symbol(",")?;
            }
            let name = self.expect_name()?;
            let default = if self.skip_symbol("=") { Some(self.expr()?) } else { None };
            if default.is_none() && params.last().is_some_and(|(_, d)| d.is_some()) {
                return Err(Error::syntax(
                    "a parameter without a default follows one with".to_owned(),
                    self.line(),
                ));
            }
            params.push((name, default));
        }
        self.expect_symbol(")")?;
        Ok(params)
    }

    fn with(&mut self) -> Result<Stmt, Error> {
        let mut values = Vec::new();
        while self.peek() != Some(&Token::BlockEnd) {
            if !values.is_empty() {
                self.expect_symbol(",")?;
            }
            let target = self.target_one()?;
            self.expect_symbol("=")?;
            values.push((target, self.expr()?));
        }
        Ok(Stmt::With(values, self.enclosed(&["endwith"])?.0))
    }

    fn target(&mut self) -> Result<Target, Error> {
        let first = self.target_one()?;
        if !self.is_symbol(",") {
            return Ok(first);
        }
        let mut targets = vec![first];
        while self.skip_symbol(",") {
            if self.is_name("in") || self.is_symbol("=") || self.is_symbol(")") {
                break;
            }
            targets.push(self.target_one()?);
        }
        Ok(Target::Tuple(targets))
    }

    fn target_one(&mut self) -> Result<Target, Error> {
        if self.skip_symbol("(") {
            let target = self.deeper(Self::target)?;
            self.expect_symbol(")")?;
            return Ok(target);
        }
        let name = self.expect_name()?;
        if self.skip_symbol(".") {
            return Ok(Target::Attr(name, self.expect_name()?));
        }
        Ok(Target::Name(name))
    }
}
