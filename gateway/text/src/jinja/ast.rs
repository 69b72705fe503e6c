//! A parsed template: statements and expressions. Only data.

use std::sync::Arc;

/// A statement and its line.
#[derive(Debug)]
pub(super) struct Node {
    pub(super) line: u32,
    pub(super) stmt: Stmt,
}

pub(super) type Body = Vec<Node>;

#[derive(Debug)]
pub(super) enum Stmt {
    Data(String),
    Print(Expr),
    If(Vec<(Expr, Body)>, Body),
    For(Arc<For>),
    Set(Target, Expr),
    /// `{% set x | filter %}…{% endset %}`; the filters apply to `Expr::Body`.
    SetBlock(Target, Expr, Body),
    Macro(Arc<MacroDef>),
    Call(Arc<MacroDef>, Expr),
    Filter(Expr, Body),
    With(Vec<(Target, Expr)>, Body),
    /// A body with variables of its own: `generation` and `block`.
    Scope(Body),
    Break,
    Continue,
}

#[derive(Debug)]
pub(super) struct For {
    pub(super) target: Target,
    pub(super) iter: Expr,
    pub(super) condition: Option<Expr>,
    pub(super) body: Body,
    pub(super) otherwise: Body,
    pub(super) recursive: bool,
}

/// A macro, or the body of a `call` block, which is one without a name.
#[derive(Debug)]
pub(super) struct MacroDef {
    pub(super) name: Arc<str>,
    pub(super) params: Vec<Param>,
    pub(super) body: Body,
    /// Whether the body names `varargs`, `kwargs` or `caller`: then it takes them.
    pub(super) varargs: bool,
    pub(super) kwargs: bool,
    pub(super) caller: bool,
}

/// A parameter and its default.
pub(super) type Param = (Arc<str>, Option<Expr>);

#[derive(Debug)]
pub(super) enum Target {
    Name(Arc<str>),
    /// An attribute of a namespace.
    Attr(Arc<str>, Arc<str>),
    Tuple(Vec<Target>),
}

#[derive(Debug, Default)]
pub(super) struct Args {
    pub(super) positional: Vec<Expr>,
    pub(super) keyword: Vec<(Arc<str>, Expr)>,
    pub(super) star: Option<Expr>,
    pub(super) star_star: Option<Expr>,
}

#[derive(Debug)]
pub(super) enum Expr {
    None,
    Bool(bool),
    Int(i128),
    Float(f64),
    Text(Arc<str>),
    /// The text of the block that a filter block or `set` block encloses.
    Body,
    Name(Arc<str>),
    Tuple(Vec<Expr>),
    List(Vec<Expr>),
    Dict(Vec<(Expr, Expr)>),
    Attr(Box<Expr>, Arc<str>),
    Item(Box<Expr>, Box<Expr>),
    Slice(Box<Expr>, Box<[Option<Expr>; 3]>),
    Call(Box<Expr>, Box<Args>),
    Filter(Box<Expr>, Arc<str>, Box<Args>),
    Test(Box<Expr>, Arc<str>, Box<Args>),
    /// Condition, value, other value.
    Cond(Box<(Expr, Expr, Option<Expr>)>),
    And(Box<(Expr, Expr)>),
    Or(Box<(Expr, Expr)>),
    Not(Box<Expr>),
    Negative(Box<Expr>),
    Positive(Box<Expr>),
    Binary(Binary, Box<(Expr, Expr)>),
    Concat(Vec<Expr>),
    Compare(Box<Expr>, Vec<(Comparison, Expr)>),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Binary {
    Add,
    Sub,
    Mul,
    Div,
    FloorDiv,
    Mod,
    Pow,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Comparison {
    Eq,
    Ne,
    Lt,
    Le,
    Gt,
    Ge,
    In,
    NotIn,
}

impl Comparison {
    /// Whether it looks for the left side in the right one.
    pub(super) const fn is_in(self) -> bool {
        matches!(self, Self::In | Self::NotIn)
    }
}
