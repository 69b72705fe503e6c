//! Tokens to expressions, with Jinja2's precedences: `or`, `and`, `not`, comparisons, `+ -`, `~`, `* / // %`,
//! `**`, signs, then subscripts, calls, filters and tests.

use super::Error;
use super::ast::{Args, Binary, Comparison, Expr};
use super::lexer::Token;
use super::parser::Parser;

impl Parser {
    /// An expression, or several with commas between them, which make a tuple. Ends before one of the names
    /// `ends`.
    pub(super) fn tuple(&mut self, conditional: bool, ends: &[&str]) -> Result<Expr, Error> {
        let mut items = Vec::new();
        let mut commas = false;
        loop {
            let end = match self.peek() {
                None | Some(Token::PrintEnd | Token::BlockEnd | Token::Symbol(")")) => true,
                Some(Token::Name(name)) => ends.contains(&&**name),
                Some(_) => false,
            };
            if end {
                break;
            }
            items.push(if conditional { self.expr()? } else { self.deeper(Self::or)? });
            if !self.skip_symbol(",") {
                break;
            }
            commas = true;
        }
        match items.pop() {
            Some(only) if !commas => Ok(only),
            Some(last) => {
                items.push(last);
                Ok(Expr::Tuple(items))
            }
            None => Err(self.unexpected("an expression")),
        }
    }

    /// One expression, without commas outside of brackets; an error if it lies deeper than
    /// `TEMPLATE_DEPTH_MAX`.
    pub(super) fn expr(&mut self) -> Result<Expr, Error> {
        self.deeper(Self::conditional)
    }

    fn conditional(&mut self) -> Result<Expr, Error> {
        let mut value = self.or()?;
        while self.skip_name("if") {
            let condition = self.or()?;
            let other = if self.skip_name("else") { Some(self.expr()?) } else { None };
            value = Expr::Cond(Box::new((condition, value, other)));
        }
        Ok(value)
    }

    fn or(&mut self) -> Result<Expr, Error> {
        let mut left = self.and()?;
        while self.skip_name("or") {
            left = Expr::Or(Box::new((left, self.and()?)));
        }
        Ok(left)
    }

    fn and(&mut self) -> Result<Expr, Error> {
        let mut left = self.not()?;
        while self.skip_name("and") {
            left = Expr::And(Box::new((left, self.not()?)));
        }
        Ok(left)
    }

    fn not(&mut self) -> Result<Expr, Error> {
        if self.skip_name("not") {
            return Ok(Expr::Not(Box::new(self.deeper(Self::not)?)));
        }
        self.compare()
    }

    fn compare(&mut self) -> Result<Expr, Error> {
        let first = self.sum()?;
        let mut rest = Vec::new();
        loop {
            let operator = match self.peek() {
                Some(Token::Symbol("==")) => Comparison::Eq,
                Some(Token::Symbol("!=")) => Comparison::Ne,
                Some(Token::Symbol("<")) => Comparison::Lt,
                Some(Token::Symbol("<=")) => Comparison::Le,
                Some(Token::Symbol(">")) => Comparison::Gt,
                Some(Token::Symbol(">=")) => Comparison::Ge,
                Some(Token::Name(name)) if &**name == "in" => Comparison::In,
                Some(Token::Name(name))
                    if &**name == "not"
                        && matches!(self.peek_second(), Some(Token::Name(n)) if &**n == "in") =>
                {
                    self.skip(1);
                    Comparison::NotIn
                }
                _ => break,
            };
            self.skip(1);
            rest.push((operator, self.sum()?));
        }
        Ok(if rest.is_empty() { first } else { Expr::Compare(Box::new(first), rest) })
    }

    fn sum(&mut self) -> Result<Expr, Error> {
        let mut left = self.concat()?;
        loop {
            let operator = match self.peek() {
                Some(Token::Symbol("+")) => Binary::Add,
                Some(Token::Symbol("-")) => Binary::Sub,
                _ => return Ok(left),
            };
            self.skip(1);
            left = Expr::Binary(operator, Box::new((left, self.concat()?)));
        }
    }

    fn concat(&mut self) -> Result<Expr, Error> {
        let first = self.product()?;
        if !self.is_symbol("~") {
            return Ok(first);
        }
        let mut parts = vec![first];
        while self.skip_symbol("~") {
            parts.push(self.product()?);
        }
        Ok(Expr::Concat(parts))
    }

    fn product(&mut self) -> Result<Expr, Error> {
        let mut left = self.power()?;
        loop {
            let operator = match self.peek() {
                Some(Token::Symbol("*")) => Binary::Mul,
                Some(Token::Symbol("/")) => Binary::Div,
                Some(Token::Symbol("//")) => Binary::FloorDiv,
                Some(Token::Symbol("%")) => Binary::Mod,
                _ => return Ok(left),
            };
            self.skip(1);
            left = Expr::Binary(operator, Box::new((left, self.power()?)));
        }
    }

    fn power(&mut self) -> Result<Expr, Error> {
        let mut left = self.unary(true)?;
        while self.skip_symbol("**") {
            left = Expr::Binary(Binary::Pow, Box::new((left, self.unary(true)?)));
        }
        Ok(left)
    }

    fn unary(&mut self, filters: bool) -> Result<Expr, Error> {
        let value = if self.skip_symbol("-") {
            Expr::Negative(Box::new(self.deeper(|p| p.unary(false))?))
        } else if self.skip_symbol("+") {
            Expr::Positive(Box::new(self.deeper(|p| p.unary(false))?))
        } else {
            self.primary()?
        };
        let value = self.postfix(value)?;
        if filters { self.filters(value, None) } else { Ok(value) }
    }

    fn primary(&mut self) -> Result<Expr, Error> {
        Ok(match self.next() {
            Some(Token::Name(name)) => match &*name {
                "true" | "True" => Expr::Bool(true),
                "false" | "False" => Expr::Bool(false),
                "none" | "None" => Expr::None,
                _ => Expr::Name(name),
            },
            Some(Token::Text(mut text)) => {
                while let Some(Token::Text(more)) = self.peek() {
                    text.push_str(more);
                    self.skip(1);
                }
                Expr::Text(text.into())
            }
            Some(Token::Int(int)) => Expr::Int(int),
            Some(Token::Float(float)) => Expr::Float(float),
            Some(Token::Symbol("(")) => {
                if self.skip_symbol(")") {
                    return Ok(Expr::Tuple(Vec::new()));
                }
                let value = self.tuple(true, &[])?;
                self.expect_symbol(")")?;
                value
            }
            Some(Token::Symbol("[")) => self.list()?,
            Some(Token::Symbol("{")) => self.dict()?,
            _ => {
                self.back();
                return Err(self.unexpected("an expression"));
            }
        })
    }

    fn list(&mut self) -> Result<Expr, Error> {
        let mut items = Vec::new();
        while !self.skip_symbol("]") {
            items.push(self.expr()?);
            if !self.skip_symbol(",") {
                self.expect_symbol("]")?;
                break;
            }
        }
        Ok(Expr::List(items))
    }

    fn dict(&mut self) -> Result<Expr, Error> {
        let mut items = Vec::new();
        while !self.skip_symbol("}") {
            let key = self.expr()?;
            self.expect_symbol(":")?;
            items.push((key, self.expr()?));
            if !self.skip_symbol(",") {
                self.expect_symbol("}")?;
                break;
            }
        }
        Ok(Expr::Dict(items))
    }

    fn postfix(&mut self, mut value: Expr) -> Result<Expr, Error> {
        loop {
            value = if self.skip_symbol(".") {
                match self.next() {
                    Some(Token::Name(name)) => Expr::Attr(Box::new(value), name),
                    Some(Token::Int(index)) => Expr::Item(Box::new(value), Box::new(Expr::Int(index))),
                    _ => {
                        self.back();
                        return Err(self.unexpected("an attribute's name"));
                    }
                }
            } else if self.skip_symbol("[") {
                let value = self.subscript(value)?;
                self.expect_symbol("]")?;
                value
            } else if self.is_symbol("(") {
                Expr::Call(Box::new(value), Box::new(self.args()?))
            } else {
                return Ok(value);
            };
        }
    }

    fn subscript(&mut self, value: Expr) -> Result<Expr, Error> {
        let mut parts = [None, None, None];
        let mut colons = 0;
        loop {
            if self.skip_symbol(":") {
                colons += 1;
                if colons > 2 {
                    return Err(self.unexpected("']'"));
                }
            } else if self.is_symbol("]") {
                break;
            } else {
                parts[colons] = Some(self.expr()?);
                if !self.is_symbol(":") {
                    break;
                }
            }
        }
        match parts {
            [Some(index), None, None] if colons == 0 => Ok(Expr::Item(Box::new(value), Box::new(index))),
            _ if colons == 0 => Err(self.unexpected("an index")),
            parts => Ok(Expr::Slice(Box::new(value), Box::new(parts))),
        }
    }

    /// Filters and tests after `value`; with `first`, the name of a filter that stands there without a bar.
    pub(super) fn filters(
        &mut self,
        mut value: Expr,
        mut first: Option<std::sync::Arc<str>>,
    ) -> Result<Expr, Error> {
        loop {
            value = if first.is_some() || self.skip_symbol("|") {
                let name = match first.take() {
                    Some(name) => name,
                    None => self.expect_name()?,
                };
                let args = if self.is_symbol("(") { self.args()? } else { Args::default() };
                Expr::Filter(Box::new(value), name, Box::new(args))
            } else if self.skip_name("is") {
                self.test(value)?
            } else if self.is_symbol("(") {
                Expr::Call(Box::new(value), Box::new(self.args()?))
            } else {
                return Ok(value);
            };
        }
    }

    fn test(&mut self, value: Expr) -> Result<Expr, Error> {
        let negated = self.skip_name("not");
        let name = self.expect_name()?;
        let mut args = Args::default();
        if self.is_symbol("(") {
            args = self.args()?;
        } else {
            let takes = match self.peek() {
                Some(Token::Name(name)) => !matches!(&**name, "else" | "or" | "and" | "is" | "if"),
                Some(Token::Text(_) | Token::Int(_) | Token::Float(_) | Token::Symbol("[" | "{")) => true,
                _ => false,
            };
            if takes {
                let argument = self.primary()?;
                args.positional.push(self.postfix(argument)?);
            }
        }
        let test = Expr::Test(Box::new(value), name, Box::new(args));
        Ok(if negated { Expr::Not(Box::new(test)) } else { test })
    }

    fn args(&mut self) -> Result<Args, Error> {
        let mut args = Args::default();
        self.expect_symbol("(")?;
        while !self.skip_symbol(")") {
            if self.skip_symbol("**") {
                args.star_star = Some(self.expr()?);
            } else if self.skip_symbol("*") {
                args.star = Some(self.expr()?);
            } else if let (Some(Token::Name(name)), Some(Token::Symbol("="))) =
                (self.peek(), self.peek_second())
            {
                let name = name.clone();
                self.skip(2);
                args.keyword.push((name, self.expr()?));
            } else if args.keyword.is_empty() && args.star.is_none() && args.star_star.is_none() {
                args.positional.push(self.expr()?);
            } else {
                return Err(self.unexpected("a keyword argument"));
            }
            if !self.skip_symbol(",") {
                self.expect_symbol(")")?;
                break;
            }
        }
        Ok(args)
    }
}
