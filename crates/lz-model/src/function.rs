//! Functions: the operations as people call them, with an order of arguments.

use std::sync::LazyLock;

use crate::catalog::{Catalog, Op, Target};
use crate::ops::FUNCTIONS;
use crate::param::{Param, ParamRole};
use crate::schema::{Access, Input, Output};

/// How an operation, or several behind an alias, is called: a name and the order of its arguments.
#[derive(Clone, Copy, Debug)]
pub struct Function {
    /// Its name: `rms_norm`.
    pub name: &'static str,
    /// The operation or alias behind it.
    pub target: &'static str,
    /// Names of inputs, parameters and [`Special`]s; those after `*` are given by name only.
    pub arguments: &'static str,
    /// One line; the operation's own when empty.
    pub summary: &'static str,
}

/// An argument that is neither an input nor a parameter of the schema.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Special {
    /// `window`: both window parameters in one.
    Window,
    /// `layout`: the order of the dimensions, said instead of the default.
    Layout,
    /// `out`: where the result goes.
    Out,
    /// `generator`: where a seed is drawn from.
    Generator,
    /// `normalized_shape`: the sizes a norm covers.
    NormalizedShape,
    /// `format`: what packed bytes are.
    Format,
    /// `return_lse`: the call is one of the function of the same name with `_lse` behind it.
    ReturnLse,
}

impl Special {
    /// All of them, by name.
    pub const ALL: &'static [(&'static str, Special, &'static str)] = &[
        (
            "window",
            Special::Window,
            "how many earlier keys a query may attend to, or (earlier, later); all when not given",
        ),
        ("layout", Special::Layout, "the order of the tensors' dimensions; never guessed from their sizes"),
        ("out", Special::Out, "tensor the result is written to; a new one when not given"),
        ("generator", Special::Generator, "generator the seed is drawn from when none is given"),
        (
            "normalized_shape",
            Special::NormalizedShape,
            "sizes of the trailing dimensions to normalize over; the last one when not given",
        ),
        ("format", Special::Format, "the format of packed 4-bit values (int4, mxfp4, nvfp4)"),
        (
            "return_lse",
            Special::ReturnLse,
            "whether to give (output, lse): with the natural logarithm of each softmax's sum, in float32",
        ),
    ];

    /// Its name.
    pub fn name(self) -> &'static str {
        Special::ALL.iter().find(|(_, s, _)| *s == self).map_or("", |(name, ..)| name)
    }
}

/// What an argument is.
#[derive(Clone, Copy)]
pub enum ArgumentKind {
    /// A tensor.
    Input(&'static Input),
    /// A scalar.
    Param(&'static Param),
    /// Something of the front door's own.
    Special(Special),
}

/// One argument of a function.
#[derive(Clone, Copy)]
pub struct Argument {
    /// Its name.
    pub name: &'static str,
    /// What it is.
    pub kind: ArgumentKind,
    /// Whether every operation behind the function needs it.
    pub required: bool,
    /// Whether it is given by name only.
    pub keyword_only: bool,
}

/// A function, ready for use.
pub struct Signature {
    /// The function.
    pub function: &'static Function,
    /// What its name stands for.
    pub target: &'static Target,
    /// Its arguments, in order.
    pub arguments: Vec<Argument>,
}

static SIGNATURES: LazyLock<Vec<Signature>> = LazyLock::new(|| FUNCTIONS.iter().map(Signature::new).collect());

impl Signature {
    /// Every function, in the order of [`FUNCTIONS`].
    pub fn all() -> &'static [Signature] {
        &SIGNATURES
    }

    /// The function behind a name: its own, or that of an operation or alias it serves.
    pub fn find(name: &str) -> Option<&'static Signature> {
        let own = Signature::all().iter().find(|s| s.function.name == name);
        own.or_else(|| {
            let target = Catalog::get().find(name).ok()?;
            Signature::all().iter().find(|s| target.ops.iter().all(|op| s.target.ops.contains(op)))
        })
    }

    /// One line about it.
    pub fn summary(&self) -> &'static str {
        let own = Catalog::get().op(self.target.ops[0]).schema().summary;
        if self.function.summary.is_empty() { own } else { self.function.summary }
    }

    /// The operations behind it.
    pub fn ops(&self) -> impl Iterator<Item = &'static Op> + '_ {
        self.target.ops.iter().map(|&ix| Catalog::get().op(ix))
    }

    /// The names of the new tensors it gives. All operations behind a function give the same.
    pub fn outputs(&self) -> Vec<&'static Output> {
        let schema = Catalog::get().op(self.target.ops[0]).schema();
        schema.outputs.iter().filter(|o| matches!(o, Output::Fresh { .. })).collect()
    }

    /// The inputs it updates in place.
    pub fn updates(&self) -> Vec<&'static str> {
        let schema = Catalog::get().op(self.target.ops[0]).schema();
        schema.inputs.iter().filter(|i| i.access == Access::ReadWrite).map(|i| i.name).collect()
    }

    fn new(function: &'static Function) -> Signature {
        let catalog = Catalog::get();
        let target = catalog.find(function.target).unwrap_or_else(|e| panic!("{}: {e}", function.name));
        let ops: Vec<&'static Op> = target.ops.iter().map(|&ix| catalog.op(ix)).collect();
        let mut keyword_only = false;
        let mut arguments = Vec::new();
        for name in function.arguments.split_whitespace() {
            if name == "*" {
                keyword_only = true;
                continue;
            }
            let special = Special::ALL.iter().find(|(n, ..)| *n == name).map(|(_, s, _)| *s);
            let input = || ops.iter().find_map(|op| op.input_index(name).map(|i| &op.schema().inputs[i]));
            let param = || ops.iter().find_map(|op| op.param_index(name).map(|i| &op.schema().params[i]));
            let needed = |op: &&Op| match (op.input_index(name), op.param_index(name)) {
                (Some(i), _) => !op.schema().inputs[i].optional,
                (_, Some(i)) => op.schema().params[i].default.value().is_none(),
                _ => false,
            };
            let kind = special
                .map(ArgumentKind::Special)
                .or_else(|| input().map(ArgumentKind::Input))
                .or_else(|| param().map(ArgumentKind::Param))
                .unwrap_or_else(|| panic!("{}: nothing is called '{name}'", function.name));
            // An argument only some of the operations need is optional: which operation it is depends on it.
            let required = special.is_none() && ops.iter().all(needed);
            arguments.push(Argument { name, kind, required, keyword_only });
        }
        Signature { function, target, arguments }
    }
}

impl Argument {
    /// Other names it may be given by: those of other libraries for the same thing.
    pub fn also(&self) -> Vec<&'static str> {
        let names = match self.kind {
            ArgumentKind::Input(input) => input.also,
            ArgumentKind::Param(param) => param.also,
            ArgumentKind::Special(Special::Window) => &["window_size"],
            ArgumentKind::Special(_) => &[],
        };
        names.iter().copied().filter(|name| *name != self.name).collect()
    }

    /// Whether its value can decide which kernel runs.
    pub fn decides(&self) -> bool {
        !matches!(self.kind, ArgumentKind::Param(p) if p.role == ParamRole::Ignored)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every input and parameter of every operation can be given through its function.
    #[test]
    fn nothing_of_a_schema_is_out_of_reach() {
        for signature in Signature::all() {
            let has = |names: &mut dyn Iterator<Item = &'static str>| {
                let names: Vec<_> = names.collect();
                signature.arguments.iter().any(|a| names.contains(&a.name))
            };
            for op in signature.ops() {
                let schema = op.schema();
                for input in schema.inputs {
                    let mut names = [input.name].into_iter().chain(input.also.iter().copied());
                    assert!(has(&mut names), "{}: {}", signature.function.name, input.name);
                }
                for param in schema.params {
                    let covered = if param.name.starts_with("window_") { "window" } else { param.name };
                    assert!(has(&mut [covered].into_iter()), "{}: {}", signature.function.name, param.name);
                }
            }
        }
    }

    #[test]
    fn a_name_means_one_argument() {
        for signature in Signature::all() {
            let names = signature.arguments.iter().flat_map(|a| [a.name].into_iter().chain(a.also()));
            let mut names: Vec<&str> = names.collect();
            let count = names.len();
            names.sort_unstable();
            names.dedup();
            assert_eq!(names.len(), count, "{}", signature.function.name);
        }
    }

    #[test]
    fn every_tensor_operation_has_a_function() {
        for op in Catalog::get().ops().iter().filter(|op| !op.schema().inputs.is_empty()) {
            assert!(Signature::find(op.id()).is_some(), "{}", op.id());
        }
    }

    #[test]
    fn required_arguments_come_first() {
        for signature in Signature::all() {
            let positional = signature.arguments.iter().filter(|a| !a.keyword_only).map(|a| a.required);
            assert!(positional.is_sorted_by(|a, b| a >= b), "{}", signature.function.name);
        }
    }
}
