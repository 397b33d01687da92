//! Patterns: expressions over operations, with names for the values they are found with.
//!
//! ```text
//! let x = any("x");
//! let gelu = x.clone() * (unary(Erf, x * FRAC_1_SQRT_2) + 1.0) * 0.5;
//! rewrite(graph, &gelu, |_, found| Some((Unary { kind: Gelu }.into(), vec![found.input("x")])))
//! ```
//!
//! - The order of the operands of commutative operations does not matter.
//! - A product is matched as a whole, however it is associated: `0.5 * x * y`, `x * (y * 0.5)` and `x * y / 2` are one
//!   pattern.
//! - A name stands for the same value everywhere.
//! - What is computed between the named values and the root must be read by nothing else: otherwise it has to be
//!   computed anyway, and nothing is gained.

use std::ops::{Add, Div, Mul, Sub};
use std::rc::Rc;

use smallvec::SmallVec;

use crate::ir::{Graph, GraphError, NodeId, ValueId};
use crate::ops::Op;
use crate::ops::binary::{Binary, BinaryKind};
use crate::ops::unary::{Unary, UnaryKind};

/// What a value must be.
#[derive(Clone)]
pub struct Pattern(Rc<Form>);

type Test = Box<dyn Fn(&Op) -> bool>;

enum Form {
    /// Anything, which gets a name.
    Any(&'static str),
    /// One number, the same for all elements.
    Number(f64),
    /// Some number, which gets a name.
    SomeNumber(&'static str),
    /// The result of an operation.
    Node { test: Test, inputs: Vec<Pattern>, commutes: bool },
    /// A product of factors and a number.
    Product { factors: Vec<Pattern>, scale: f64 },
    /// One of several patterns; the first that fits.
    OneOf(Vec<Pattern>),
    /// A pattern whose value gets a name.
    Named(&'static str, Pattern),
    /// A pattern whose nodes others may read.
    Shared(Pattern),
}

fn pattern(form: Form) -> Pattern {
    Pattern(Rc::new(form))
}

/// Any value.
pub fn any(name: &'static str) -> Pattern {
    pattern(Form::Any(name))
}

/// One number, the same for all elements, as near as its element type can hold it.
pub fn number(number: f64) -> Pattern {
    pattern(Form::Number(number))
}

/// Any number, the same for all elements.
pub fn some_number(name: &'static str) -> Pattern {
    pattern(Form::SomeNumber(name))
}

/// The result of an operation that passes a test; `inputs`: its first inputs. Others must not be given.
pub fn node(test: impl Fn(&Op) -> bool + 'static, inputs: impl IntoIterator<Item = Pattern>) -> Pattern {
    pattern(Form::Node { test: Box::new(test), inputs: inputs.into_iter().collect(), commutes: false })
}

/// A function of one number.
pub fn unary(kind: UnaryKind, input: Pattern) -> Pattern {
    node(move |op| matches!(op, Op::Unary(Unary { kind: found }) if *found == kind), [input])
}

/// A function of two numbers.
pub fn binary(kind: BinaryKind, left: Pattern, right: Pattern) -> Pattern {
    let test: Test = Box::new(move |op| matches!(op, Op::Binary(Binary { kind: found }) if *found == kind));
    pattern(Form::Node { test, inputs: vec![left, right], commutes: kind.commutes() })
}

/// One of several patterns.
pub fn one_of(patterns: impl IntoIterator<Item = Pattern>) -> Pattern {
    pattern(Form::OneOf(patterns.into_iter().collect()))
}

/// The pattern, or a cast of it.
pub fn maybe_cast(input: Pattern) -> Pattern {
    one_of([input.clone(), node(|op| matches!(op, Op::Cast(_)), [input])])
}

/// The square of a value.
pub fn square(x: Pattern) -> Pattern {
    one_of([binary(BinaryKind::Pow, x.clone(), number(2.0)), x.clone() * x])
}

impl Pattern {
    /// The same, with a name for its value.
    pub fn named(self, name: &'static str) -> Pattern {
        pattern(Form::Named(name, self))
    }

    /// The same; its nodes may be read by others.
    pub fn shared(self) -> Pattern {
        pattern(Form::Shared(self))
    }

    /// The same value to a power.
    pub fn pow(self, exponent: f64) -> Pattern {
        binary(BinaryKind::Pow, self, number(exponent))
    }

    fn factors(self) -> (Vec<Pattern>, f64) {
        match &*self.0 {
            Form::Product { factors, scale } => (factors.clone(), *scale),
            Form::Number(number) => (Vec::new(), *number),
            _ => (vec![self], 1.0),
        }
    }
}

impl Mul for Pattern {
    type Output = Pattern;
    fn mul(self, other: Pattern) -> Pattern {
        let ((mut factors, scale), (others, by)) = (self.factors(), other.factors());
        factors.extend(others);
        pattern(Form::Product { factors, scale: scale * by })
    }
}

impl Mul<f64> for Pattern {
    type Output = Pattern;
    fn mul(self, by: f64) -> Pattern {
        self * number(by)
    }
}

impl Div for Pattern {
    type Output = Pattern;
    fn div(self, other: Pattern) -> Pattern {
        binary(BinaryKind::Div, self, other)
    }
}

impl Add for Pattern {
    type Output = Pattern;
    fn add(self, other: Pattern) -> Pattern {
        binary(BinaryKind::Add, self, other)
    }
}

impl Add<f64> for Pattern {
    type Output = Pattern;
    fn add(self, other: f64) -> Pattern {
        self + number(other)
    }
}

impl Sub for Pattern {
    type Output = Pattern;
    fn sub(self, other: Pattern) -> Pattern {
        binary(BinaryKind::Sub, self, other)
    }
}

/// What a pattern was found with.
#[derive(Clone, Debug, Default)]
pub struct Match {
    values: SmallVec<[(&'static str, ValueId); 6]>,
    /// The nodes of the pattern, the root first. Not those that others may read.
    nodes: SmallVec<[NodeId; 12]>,
}

impl Match {
    /// The value of a name, if the pattern that was found has it.
    pub fn get(&self, name: &str) -> Option<ValueId> {
        self.values.iter().find(|(one, _)| *one == name).map(|(_, value)| *value)
    }

    /// The value of a name.
    pub fn value(&self, name: &str) -> ValueId {
        self.get(name).unwrap_or_else(|| panic!("the pattern has no '{name}'"))
    }

    /// The value of a name, as an input.
    pub fn input(&self, name: &str) -> Option<ValueId> {
        Some(self.value(name))
    }

    /// The number of a name.
    pub fn number(&self, graph: &Graph, name: &str) -> f64 {
        number_of(graph, self.value(name)).expect("the pattern has seen a number")
    }

    /// Gives a value a name; `false` if the name stands for another one.
    pub fn bind(&mut self, name: &'static str, value: ValueId) -> bool {
        match self.get(name) {
            Some(bound) => bound == value,
            None => {
                self.values.push((name, value));
                true
            }
        }
    }
}

/// The number all elements of a value are, if that is known: a constant with one element, or `full`.
pub fn number_of(graph: &Graph, value: ValueId) -> Option<f64> {
    if let Some(constant) = graph.constant(value) {
        return constant.scalar();
    }
    match &graph.made_by(value)?.1.op {
        Op::Full(full) => Some(lz_abi::numeric::rounded(full.dtype, full.value.of_type(full.dtype).float())),
        _ => None,
    }
}

/// Whether a number is the one that is wanted, or the nearest one of its element type.
pub fn is_near(graph: &Graph, value: ValueId, found: f64, wanted: f64) -> bool {
    // One part in a million: constants are written with six or more digits.
    (found - wanted).abs() <= 1e-6 * wanted.abs() || {
        let dtype = graph.meta(value).dtype;
        dtype.is_float() && found == lz_abi::numeric::rounded(dtype, wanted)
    }
}

#[derive(Clone)]
enum Goal {
    /// A value must be what a pattern says. `true`: its nodes may be read by others.
    Is(Pattern, ValueId, bool),
    Product(Factors),
}

/// What is left of a product: values that must be factors, and factors that must be found.
#[derive(Clone)]
struct Factors {
    open: SmallVec<[ValueId; 4]>,
    wanted: Vec<Pattern>,
    /// The numbers found so far, multiplied, and what they must give.
    scale: f64,
    wanted_scale: f64,
    root: ValueId,
    shared: bool,
}

/// Looks for patterns in a graph as it is.
pub struct Search<'g> {
    graph: &'g Graph,
    uses: &'g [usize],
}

impl<'g> Search<'g> {
    /// In this graph, with its [`Graph::uses`].
    pub fn new(graph: &'g Graph, uses: &'g [usize]) -> Search<'g> {
        Search { graph, uses }
    }

    /// Looks for a pattern whose root is a value.
    pub fn find(&self, pattern: &Pattern, value: ValueId) -> Option<Match> {
        self.solve(vec![Goal::Is(pattern.clone(), value, false)], Match::default())
    }

    /// Whether nothing outside of the pattern reads what is computed inside, except for the root.
    fn is_closed(&self, found: &Match) -> bool {
        let inside = |value: ValueId| {
            let reads = |node: &NodeId| self.graph.node(*node).inputs.iter().filter(|one| **one == Some(value)).count();
            found.nodes.iter().map(reads).sum::<usize>()
        };
        found.nodes.iter().skip(1).all(|node| {
            let output = self.graph.node(*node).output;
            inside(output) == self.uses[output.index()]
        })
    }

    fn solve(&self, mut goals: Vec<Goal>, found: Match) -> Option<Match> {
        let Some(goal) = goals.pop() else {
            return self.is_closed(&found).then_some(found);
        };
        match goal {
            Goal::Is(pattern, value, shared) => self.is(&pattern, value, shared, goals, found),
            Goal::Product(factors) => self.product(factors, goals, found),
        }
    }

    fn product(&self, mut left: Factors, mut goals: Vec<Goal>, mut found: Match) -> Option<Match> {
        let Some(value) = left.open.pop() else {
            // A number that is divided by is as near as its element type can hold it, too.
            let near = |found, wanted| is_near(self.graph, left.root, found, wanted);
            let (found_scale, wanted) = (left.scale, left.wanted_scale);
            let fits = near(found_scale, wanted) || near(1.0 / found_scale, 1.0 / wanted);
            let fits = fits && left.wanted.is_empty();
            return fits.then(|| self.solve(goals, found)).flatten();
        };
        if let Some(number) = number_of(self.graph, value) {
            left.scale *= number;
            goals.push(Goal::Product(left));
            return self.solve(goals, found);
        }
        for i in 0..left.wanted.len() {
            let (mut goals, mut others) = (goals.clone(), left.clone());
            let factor = others.wanted.remove(i);
            let shared = left.shared;
            goals.push(Goal::Product(others));
            goals.push(Goal::Is(factor, value, shared));
            if let Some(found) = self.solve(goals, found.clone()) {
                return Some(found);
            }
        }
        let (id, made) = self.graph.made_by(value)?;
        let (first, second) = (made.inputs.first().copied().flatten()?, made.inputs.get(1).copied().flatten());
        match (&made.op, second) {
            (Op::Binary(Binary { kind: BinaryKind::Mul }), Some(second)) => left.open.extend([first, second]),
            (Op::Binary(Binary { kind: BinaryKind::Div }), Some(second)) => {
                left.scale /= number_of(self.graph, second)?;
                left.open.push(first);
            }
            (Op::Unary(Unary { kind: UnaryKind::Neg }), _) => {
                left.scale = -left.scale;
                left.open.push(first);
            }
            _ => return None,
        }
        if !left.shared && !found.nodes.contains(&id) {
            found.nodes.push(id);
        }
        goals.push(Goal::Product(left));
        self.solve(goals, found)
    }

    fn is(
        &self,
        pattern: &Pattern,
        value: ValueId,
        shared: bool,
        mut goals: Vec<Goal>,
        mut found: Match,
    ) -> Option<Match> {
        match &*pattern.0 {
            Form::Any(name) => found.bind(name, value).then(|| self.solve(goals, found)).flatten(),
            Form::Number(wanted) => {
                let fits = number_of(self.graph, value).is_some_and(|n| is_near(self.graph, value, n, *wanted));
                fits.then(|| self.solve(goals, found)).flatten()
            }
            Form::SomeNumber(name) => {
                number_of(self.graph, value)?;
                found.bind(name, value).then(|| self.solve(goals, found)).flatten()
            }
            Form::Named(name, inner) => {
                found.bind(name, value).then(|| self.is(inner, value, shared, goals, found)).flatten()
            }
            Form::Shared(inner) => self.is(inner, value, true, goals, found),
            Form::OneOf(patterns) => {
                patterns.iter().find_map(|pattern| self.is(pattern, value, shared, goals.clone(), found.clone()))
            }
            Form::Product { factors, scale } => {
                // The root is a product itself: a factor cannot stand for all of it.
                let (id, made) = self.graph.made_by(value)?;
                let is_product = matches!(
                    made.op,
                    Op::Binary(Binary { kind: BinaryKind::Mul | BinaryKind::Div })
                        | Op::Unary(Unary { kind: UnaryKind::Neg })
                );
                if !is_product {
                    return None;
                }
                if !shared && !found.nodes.contains(&id) {
                    found.nodes.push(id);
                }
                goals.push(Goal::Product(Factors {
                    open: SmallVec::from_slice(&[value]),
                    wanted: factors.clone(),
                    scale: 1.0,
                    wanted_scale: *scale,
                    root: value,
                    shared,
                }));
                self.solve(goals, found)
            }
            Form::Node { test, inputs, commutes } => {
                let (id, made) = self.graph.made_by(value)?;
                let given = made.inputs.iter().flatten().count();
                if !test(&made.op) || given != inputs.len() {
                    return None;
                }
                if !shared && !found.nodes.contains(&id) {
                    found.nodes.push(id);
                }
                let values: SmallVec<[ValueId; 4]> =
                    made.inputs[..inputs.len()].iter().copied().collect::<Option<_>>()?;
                let turns = if *commutes && values[0] != values[1] { 2 } else { 1 };
                (0..turns).find_map(|turn| {
                    let mut goals = goals.clone();
                    // Named values are easier to compare than to find: operands are looked at from the first on.
                    for i in (0..inputs.len()).rev() {
                        let at = if turn == 1 { 1 - i } else { i };
                        goals.push(Goal::Is(inputs[i].clone(), values[at], shared));
                    }
                    self.solve(goals, found.clone())
                })
            }
        }
    }
}

/// An operation and its inputs.
pub type Replacement = (Op, Vec<Option<ValueId>>);

/// Gives every node that is the root of a pattern another operation, until there is none. `replace` may refuse; it may
/// add nodes,
/// which are removed if the result would have another element type or other sizes. Returns how many nodes were changed.
pub fn rewrite(
    graph: &mut Graph,
    pattern: &Pattern,
    replace: impl Fn(&mut Graph, &Match) -> Option<Replacement>,
) -> Result<usize, GraphError> {
    let (mut count, mut uses) = (0, graph.uses());
    for id in graph.order()? {
        // What was removed meanwhile is no root.
        let Some(output) = graph.get(id).map(|node| node.output) else { continue };
        let Some(found) = Search::new(graph, &uses).find(pattern, output) else { continue };
        if change(graph, id, |graph| replace(graph, &found)) {
            (count, uses) = (count + 1, graph.uses());
        } else {
            // Nodes that were tried and removed leave values behind.
            uses.resize(graph.value_count(), 0);
        }
    }
    Ok(count)
}

/// Gives a node another operation, if the result stays what it is. Removes what nothing reads afterwards.
pub fn change(graph: &mut Graph, id: NodeId, replace: impl FnOnce(&mut Graph) -> Option<Replacement>) -> bool {
    let made = graph.value_count();
    let changed = match replace(graph) {
        Some((op, inputs)) => graph.change(id, op, &inputs).is_ok(),
        None => false,
    };
    if changed || graph.value_count() > made {
        graph.sweep();
    }
    changed
}
