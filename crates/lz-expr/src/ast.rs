//! The shape of an expression before its names and types are known.

/// A comparison operator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cmp {
    Eq,
    Ne,
    Lt,
    Le,
    Gt,
    Ge,
}

impl Cmp {
    pub(crate) fn symbol(self) -> &'static str {
        match self {
            Cmp::Eq => "==",
            Cmp::Ne => "!=",
            Cmp::Lt => "<",
            Cmp::Le => "<=",
            Cmp::Gt => ">",
            Cmp::Ge => ">=",
        }
    }

    /// The operator that holds of `b, a` when this one holds of `a, b`.
    pub(crate) fn flipped(self) -> Cmp {
        match self {
            Cmp::Eq | Cmp::Ne => self,
            Cmp::Lt => Cmp::Gt,
            Cmp::Le => Cmp::Ge,
            Cmp::Gt => Cmp::Lt,
            Cmp::Ge => Cmp::Le,
        }
    }

    pub(crate) fn holds<T: PartialOrd + ?Sized>(self, left: &T, right: &T) -> bool {
        match self {
            Cmp::Eq => left == right,
            Cmp::Ne => left != right,
            Cmp::Lt => left < right,
            Cmp::Le => left <= right,
            Cmp::Gt => left > right,
            Cmp::Ge => left >= right,
        }
    }
}

/// An arithmetic operator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Arith {
    Add,
    Sub,
    Mul,
    Div,
    Rem,
}

impl Arith {
    pub(crate) fn symbol(self) -> &'static str {
        match self {
            Arith::Add => "+",
            Arith::Sub => "-",
            Arith::Mul => "*",
            Arith::Div => "/",
            Arith::Rem => "%",
        }
    }
}

/// A sub-expression and the byte offset it starts at.
#[derive(Debug)]
pub(crate) struct Ast {
    pub(crate) at: usize,
    /// How many operators, calls and parentheses are around its deepest leaf.
    pub(crate) height: usize,
    pub(crate) kind: AstKind,
}

/// Operators of one precedence are kept as one flat chain: the depth of the
/// tree, and with it every recursion over it, is then bounded by the nesting
/// limit and not by the length of the source.
#[derive(Debug)]
pub(crate) enum AstKind {
    Bool(bool),
    Int(i64),
    Float(f64),
    Str(String),
    Name(String),
    Not(Box<Ast>),
    Neg(Box<Ast>),
    All(Vec<Ast>),
    Any(Vec<Ast>),
    Chain(Box<Ast>, Vec<ChainLink>),
    Compare { op: Cmp, op_at: usize, sides: Box<(Ast, Ast)> },
    In { negated: bool, item: Box<Ast>, list: Vec<Ast> },
    Matches { op_at: usize, sides: Box<(Ast, Ast)> },
    Call(String, Vec<Ast>),
}

/// One `operator operand` step of an arithmetic chain.
#[derive(Debug)]
pub(crate) struct ChainLink {
    pub(crate) op: Arith,
    pub(crate) op_at: usize,
    pub(crate) operand: Ast,
}
