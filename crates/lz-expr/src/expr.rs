//! A compiled expression.

use std::sync::Arc;

use crate::cuts::{Cut, Dependence, Modulus};
use crate::error::{EvalError, ExprError, ExprErrorKind};
use crate::matching::{self, MatchValue};
use crate::node::Node;
use crate::possible::{Bounds, Possible};
use crate::scope::Scope;
use crate::texts::Compared;
use crate::value::{Env, Type, Value};
use crate::{check, parse};

/// A compiled, type-checked expression. Cloning one shares it.
///
/// Two expressions are equal if they have the same source text and type.
#[derive(Clone, Debug)]
pub struct Expr(Arc<Compiled>);

#[derive(Debug)]
struct Compiled {
    source: Box<str>,
    root: Node,
    depends: Dependence,
}

impl PartialEq for Expr {
    fn eq(&self, other: &Expr) -> bool {
        self.ty() == other.ty() && self.source() == other.source()
    }
}

impl Eq for Expr {}

impl Expr {
    /// Reads an expression of any type.
    pub fn compile(source: &str, scope: &Scope) -> Result<Expr, ExprError> {
        let ast = parse::parse(source)?;
        let root = check::check(&ast, source, scope)?;
        Ok(Expr::new(source, root))
    }

    /// Reads an expression that must have type `ty`. An Int expression serves
    /// where a Float is asked for, and becomes one.
    pub fn compile_as(source: &str, scope: &Scope, ty: Type) -> Result<Expr, ExprError> {
        let ast = parse::parse(source)?;
        match (check::check(&ast, source, scope)?, ty) {
            (root, ty) if root.ty() == ty => Ok(Expr::new(source, root)),
            (Node::Int(node), Type::Float) => Ok(Expr::new(source, Node::Float(node.into_float()))),
            (root, expected) => {
                let found = root.ty();
                let kind = ExprErrorKind::WrongType { expected, found };
                Err(ExprError::at(kind, source, ast.at))
            }
        }
    }

    /// Reads the `match:` form of a policy rule: a map of field to pattern, all
    /// of which must hold. An empty map always holds.
    ///
    /// A plain value is equality, a list is any of its elements, and a string
    /// may start with a comparison (`">=90"`, `"!=x"`) or, for a Str field, be
    /// a glob (`"attention.*"`). The [`source`](Expr::source) of the result is
    /// the equivalent expression.
    pub fn from_match<'a>(
        entries: impl IntoIterator<Item = (&'a str, MatchValue<'a>)>,
        scope: &Scope,
    ) -> Result<Expr, ExprError> {
        let source = matching::render(entries, scope)?;
        Expr::compile_as(&source, scope, Type::Bool)
    }

    fn new(source: &str, root: Node) -> Expr {
        let depends = Dependence::of(&root);
        Expr(Arc::new(Compiled { source: source.into(), root, depends }))
    }

    /// The text the expression was read from.
    pub fn source(&self) -> &str {
        &self.0.source
    }

    /// The type of the expression.
    pub fn ty(&self) -> Type {
        self.0.root.ty()
    }

    /// The slots of the fields the expression names, sorted and distinct.
    pub fn slots(&self) -> &[u16] {
        &self.0.depends.slots
    }

    /// Every text a Str field is compared with, in the order they were written.
    pub fn compared(&self) -> Vec<Compared<'_>> {
        self.0.root.compared()
    }

    /// The value of the expression.
    pub fn eval<'a, E: Env + ?Sized>(&'a self, env: &'a E) -> Result<Value<'a>, EvalError> {
        self.0.root.eval(env)
    }

    /// The value of a Bool expression.
    pub fn test<E: Env + ?Sized>(&self, env: &E) -> Result<bool, EvalError> {
        match &self.0.root {
            Node::Bool(node) => node.eval(env),
            other => Err(wrong_type(Type::Bool, other)),
        }
    }

    /// The value of an Int expression.
    pub fn int<E: Env + ?Sized>(&self, env: &E) -> Result<i64, EvalError> {
        match &self.0.root {
            Node::Int(node) => node.eval(env),
            other => Err(wrong_type(Type::Int, other)),
        }
    }

    /// The value of a Float expression, or of an Int one as a float.
    pub fn float<E: Env + ?Sized>(&self, env: &E) -> Result<f64, EvalError> {
        match &self.0.root {
            Node::Float(node) => node.eval(env),
            Node::Int(node) => node.eval(env).map(|value| value as f64),
            other => Err(wrong_type(Type::Float, other)),
        }
    }

    /// What the expression can be when its fields are only known to lie in
    /// ranges.
    ///
    /// The answer is conservative: [`Possible::AlwaysTrue`] means that
    /// [`test`](Expr::test) returns `Ok(true)` for every assignment within the
    /// bounds, and any assignment that might fail makes it [`Possible::Varies`].
    pub fn possible<B: Bounds + ?Sized>(&self, bounds: &B) -> Possible {
        self.0.root.possible(bounds)
    }

    /// The thresholds of every comparison of an Int field with a constant, and
    /// of every such element of an `in` list; sorted and distinct.
    ///
    /// A Float constant counts while ints are exact as floats (below 2^53).
    pub fn cuts(&self) -> &[Cut] {
        &self.0.depends.cuts
    }

    /// Every sub-expression `field % positive-constant`; sorted and distinct.
    pub fn moduli(&self) -> &[Modulus] {
        &self.0.depends.moduli
    }
}

fn wrong_type(expected: Type, node: &Node) -> EvalError {
    let found = node.ty();
    EvalError::WrongType { expected, found }
}
