//! A template's text to tokens: data, blocks, expressions, and the whitespace control between them, as Jinja2
//! lexes with `trim_blocks` and `lstrip_blocks` (which Hugging Face sets). Knows no grammar.

use std::sync::Arc;

use super::Error;

/// One token of a template.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Token {
    /// Text outside of tags.
    Data(String),
    /// `{%`, with the `-` or `+` behind it, if any.
    BlockBegin,
    /// `%}`, with the `-` or `+` before it, if any.
    BlockEnd,
    /// `{{`, with the `-` or `+` behind it, if any.
    PrintBegin,
    /// `}}`, with the `-` before it, if any.
    PrintEnd,
    Name(Arc<str>),
    Text(String),
    Int(i128),
    Float(f64),
    /// An operator or a bracket.
    Symbol(&'static str),
}

/// Longest first, so that `**` is not two `*`.
const SYMBOLS: [&str; 26] = [
    "//", "**", "==", "!=", ">=", "<=", "+", "-", "/", "*", "%", "~", "[", "]", "(", ")", "{", "}", ">", "<",
    "=", ".", ":", "|", ",", ";",
];

/// Tokens with their lines.
pub(super) fn lex(source: &str) -> Result<Vec<(Token, u32)>, Error> {
    let mut text = source.replace("\r\n", "\n").replace('\r', "\n");
    if text.ends_with('\n') {
        text.pop(); // Jinja2 drops one newline at the very end
    }
    let mut lexer = Lexer { rest: &text, line: 1, line_starting: true, tokens: Vec::new() };
    while !lexer.rest.is_empty() {
        lexer.data()?;
    }
    Ok(lexer.tokens)
}

struct Lexer<'a> {
    rest: &'a str,
    line: u32,
    /// Whether what was consumed last ended with a newline, or nothing was.
    line_starting: bool,
    tokens: Vec<(Token, u32)>,
}

/// What a tag's opening says about the blanks before it.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Before {
    /// `{%-`, `{{-` and `{#-`: all blanks before the tag go.
    Strip,
    /// `{%+`, `{{+` and `{#+`: all blanks before the tag stay.
    Keep,
    /// `{%` and `{#`: blanks since the line's beginning go
    Line,
    /// `{{` says nothing of them, so they stay.
    Nothing,
}

impl<'a> Lexer<'a> {
    fn data(&mut self) -> Result<(), Error> {
        let begins = ["{%", "{{", "{#"].into_iter().filter_map(|tag| self.rest.find(tag)).min();
        let Some(at) = begins else {
            let data = self.rest.to_owned();
            self.take(self.rest.len());
            self.push(Token::Data(data));
            return Ok(());
        };
        let (data, tag) = (&self.rest[..at], &self.rest[at..at + 2]);
        let sign = self.rest[at + 2..].chars().next();
        let before = match (tag, sign) {
            (_, Some('-')) => Before::Strip,
            (_, Some('+')) => Before::Keep,
            ("{{", _) => Before::Nothing,
            _ => Before::Line,
        };
        self.push_data(data, before);
        self.take(at + 2 + usize::from(matches!(sign, Some('-' | '+'))));
        match tag {
            "{#" => self.comment(),
            "{{" => self.inside(Token::PrintBegin, Token::PrintEnd, "}}"),
            _ => match self.raw_begin() {
                Some(len) => self.raw(len),
                None => self.inside(Token::BlockBegin, Token::BlockEnd, "%}"),
            },
        }
    }

    fn push_data(&mut self, data: &str, before: Before) {
        let line_begin = data.rfind('\n').map_or(0, |i| i + 1);
        let blank_line = data[line_begin..].chars().all(is_space) && (line_begin > 0 || self.line_starting);
        let kept = match before {
            Before::Strip => data.trim_end_matches(is_space),
            Before::Line if blank_line => &data[..line_begin],
            _ => data,
        };
        self.push(Token::Data(kept.to_owned()));
    }

    fn push(&mut self, token: Token) {
        if token != Token::Data(String::new()) {
            self.tokens.push((token, self.line));
        }
    }

    /// Moves on by `len` bytes.
    fn take(&mut self, len: usize) -> &'a str {
        let (taken, rest) = self.rest.split_at(len);
        self.rest = rest;
        self.line += taken.matches('\n').count() as u32;
        if !taken.is_empty() {
            self.line_starting = taken.ends_with('\n');
        }
        taken
    }

    /// Skips the blanks that the end of a tag (already consumed, with this sign before it) takes with it.
    fn after_tag(&mut self, sign: Option<char>, trims: bool) {
        match sign {
            Some('-') => {
                let len = self.rest.len() - self.rest.trim_start_matches(is_space).len();
                self.take(len);
            }
            None if trims && self.rest.starts_with('\n') => {
                self.take(1);
            }
            _ => {}
        }
    }

    fn comment(&mut self) -> Result<(), Error> {
        let end = self.rest.find("#}").ok_or_else(|| self.error("a comment does not end"))?;
        let sign = self.rest[..end].chars().next_back().filter(|c| matches!(c, '-' | '+'));
        self.take(end + 2);
        self.after_tag(sign, true);
        Ok(())
    }

    /// Bytes up to the end of `raw %}`, if that is what comes.
    fn raw_begin(&self) -> Option<usize> {
        let inner = self.rest.trim_start_matches(is_space).strip_prefix("raw")?.trim_start_matches(is_space);
        let after = inner.strip_prefix("%}").or_else(|| inner.strip_prefix("-%}"))?;
        Some(self.rest.len() - after.len())
    }

    fn raw(&mut self, begin: usize) -> Result<(), Error> {
        let sign = self.take(begin).ends_with("-%}").then_some('-');
        self.after_tag(sign, false);
        let mut from = 0;
        while let Some(at) = self.rest[from..].find("{%").map(|at| at + from) {
            let inner = &self.rest[at + 2..];
            let open = inner.chars().next().filter(|c| matches!(c, '-' | '+'));
            let inner = inner[open.map_or(0, char::len_utf8)..].trim_start_matches(is_space);
            let Some(inner) = inner.strip_prefix("endraw") else {
                from = at + 2;
                continue;
            };
            let inner = inner.trim_start_matches(is_space);
            let close = inner.chars().next().filter(|c| matches!(c, '-' | '+'));
            let Some(after) = inner[close.map_or(0, char::len_utf8)..].strip_prefix("%}") else {
                return Err(self.error("'endraw' does not end"));
            };
            let before = match open {
                Some('-') => Before::Strip,
                Some(_) => Before::Keep,
                None => Before::Line,
            };
            let data = &self.rest[..at];
            self.push_data(data, before);
            self.take(self.rest.len() - after.len());
            self.after_tag(close, true);
            return Ok(());
        }
        Err(self.error("'raw' without 'endraw'"))
    }

    /// Tokens of a tag up to its end.
    fn inside(&mut self, begin: Token, end: Token, close: &str) -> Result<(), Error> {
        let trims = end == Token::BlockEnd;
        self.push(begin);
        let mut brackets: Vec<&'static str> = Vec::new();
        loop {
            let blank = self.rest.len() - self.rest.trim_start_matches(is_space).len();
            self.take(blank);
            if brackets.is_empty() {
                let sign = self.rest.chars().next().filter(|c| *c == '-' || (trims && *c == '+'));
                let len = usize::from(sign.is_some());
                let signed = self.rest[len..].starts_with(close).then_some((len, sign));
                let end_tag = signed.or_else(|| self.rest.starts_with(close).then_some((0, None)));
                if let Some((len, sign)) = end_tag {
                    self.push(end);
                    self.take(len + 2);
                    self.after_tag(sign, trims);
                    return Ok(());
                }
            }
            let Some(c) = self.rest.chars().next() else { return Err(self.error("a tag does not end")) };
            let token = match c {
                '"' | '\'' => self.text(c)?,
                '0'..='9' => self.number()?,
                c if c == '_' || c.is_alphabetic() => {
                    let len = self.rest.find(|c: char| c != '_' && !c.is_alphanumeric());
                    Token::Name(self.take(len.unwrap_or(self.rest.len())).into())
                }
                _ => self.symbol(&mut brackets)?,
            };
            self.push(token);
        }
    }

    fn symbol(&mut self, brackets: &mut Vec<&'static str>) -> Result<Token, Error> {
        let found = SYMBOLS.into_iter().find(|s| self.rest.starts_with(s));
        let symbol = found.ok_or_else(|| {
            self.error(format!("unexpected '{}'", self.rest.chars().next().unwrap_or_default()))
        })?;
        match symbol {
            "(" => brackets.push(")"),
            "[" => brackets.push("]"),
            "{" => brackets.push("}"),
            ")" | "]" | "}" if brackets.pop() != Some(symbol) => {
                return Err(self.error(format!("unexpected '{symbol}'")));
            }
            _ => {}
        }
        self.take(symbol.len());
        Ok(Token::Symbol(symbol))
    }

    fn text(&mut self, quote: char) -> Result<Token, Error> {
        let mut escaped = false;
        let end = self.rest[1..].find(|c| {
            let ends = c == quote && !escaped;
            escaped = c == '\\' && !escaped;
            ends
        });
        let end = end.ok_or_else(|| self.error("a string does not end"))?;
        let text = self.take(end + 2);
        unescape(&text[1..=end]).map(Token::Text).ok_or_else(|| self.error("a bad escape in a string"))
    }

    fn number(&mut self) -> Result<Token, Error> {
        let digits = |s: &str| s.len() - s.trim_start_matches(|c: char| c.is_ascii_digit() || c == '_').len();
        for (prefix, radix) in [("0x", 16), ("0X", 16), ("0b", 2), ("0B", 2), ("0o", 8), ("0O", 8)] {
            let Some(rest) = self.rest.strip_prefix(prefix) else { continue };
            let len = rest.find(|c: char| c != '_' && !c.is_digit(radix)).unwrap_or(rest.len());
            let text = self.take(2 + len)[2..].replace('_', "");
            return i128::from_str_radix(&text, radix).map(Token::Int).map_err(|e| self.error(e));
        }
        let mut len = digits(self.rest);
        let mut float = false;
        if let Some(fraction) = self.rest[len..].strip_prefix('.').map(digits).filter(|n| *n > 0) {
            (len, float) = (len + 1 + fraction, true);
        }
        if let Some(rest) = self.rest[len..].strip_prefix(['e', 'E']) {
            let unsigned = rest.strip_prefix(['+', '-']).unwrap_or(rest);
            let exponent = digits(unsigned);
            if exponent > 0 {
                (len, float) = (len + 1 + rest.len() - unsigned.len() + exponent, true);
            }
        }
        let text = self.take(len).replace('_', "");
        if float {
            return text.parse().map(Token::Float).map_err(|e| self.error(e));
        }
        text.parse().map(Token::Int).map_err(|e| self.error(e))
    }

    fn error(&self, message: impl std::fmt::Display) -> Error {
        Error::syntax(message.to_string(), self.line)
    }
}

/// What Python calls a space: Unicode's white space and four separators of ASCII.
pub(super) fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\x1c'..='\x1f').contains(&c)
}

/// Python's escapes of a string literal.
fn unescape(text: &str) -> Option<String> {
    let mut out = String::with_capacity(text.len());
    let mut chars = text.chars();
    while let Some(c) = chars.next() {
        if c != '\\' {
            out.push(c);
            continue;
        }
        match chars.next()? {
            '\n' => {}
            'n' => out.push('\n'),
            't' => out.push('\t'),
            'r' => out.push('\r'),
            'b' => out.push('\x08'),
            'f' => out.push('\x0c'),
            'v' => out.push('\x0b'),
            'a' => out.push('\x07'),
            'x' => out.push(hex(&mut chars, 2)?),
            'u' => out.push(hex(&mut chars, 4)?),
            'U' => out.push(hex(&mut chars, 8)?),
            c @ '0'..='7' => {
                let more = chars.as_str().chars().take(2).take_while(|c| c.is_digit(8)).count();
                let digits: String = std::iter::once(c).chain(chars.by_ref().take(more)).collect();
                out.push(char::from_u32(u32::from_str_radix(&digits, 8).ok()?)?);
            }
            c @ ('\\' | '\'' | '"') => out.push(c),
            other => out.extend(['\\', other]),
        }
    }
    Some(out)
}

fn hex(chars: &mut std::str::Chars<'_>, len: usize) -> Option<char> {
    let digits = chars.as_str().get(..len)?;
    *chars = chars.as_str()[len..].chars();
    char::from_u32(u32::from_str_radix(digits, 16).ok()?)
}
