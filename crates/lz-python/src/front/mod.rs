//! The functions people call: a call enters by `entries`, `arguments` puts what it was given in order, `redirecting`
//! passes some calls on to another function, and `describing` and `running` take it to its kernel.

mod arguments;
mod describing;
mod entries;
mod redirecting;
mod running;

use std::ptr;
use std::sync::OnceLock;

use layerzero::model::{ArgumentKind, Catalog, Signature, Special};
use pyo3::ffi::PyObject;
use pyo3::prelude::*;
use pyo3::types::PyString;

pub use self::entries::add_functions;
pub use self::running::run;
use crate::{docs, error, packed};

/// Most arguments a function has.
pub const MAX_ARGUMENTS: usize = 24;
const _: () = assert!(MAX_ARGUMENTS <= 32, "which arguments are given is 32 bits");
/// Functions there may be: as many entry points are compiled.
const MAX_FUNCTIONS: usize = 64;

/// The arguments of a call in the function's order, borrowed from the caller; null where not given.
pub type Slots = [*mut PyObject; MAX_ARGUMENTS];

/// A function, ready to be called.
pub struct Front {
    /// Its place in the list.
    pub index: usize,
    /// Its signature.
    pub signature: &'static Signature,
    /// The names of its arguments, interned.
    names: Vec<Py<PyString>>,
    /// Other names of arguments, and their places.
    others: Vec<(Py<PyString>, usize)>,
    /// How many arguments may be given by position.
    positional: usize,
    /// What a kernel is given for an argument the caller left out.
    pub defaults: Vec<Py<PyAny>>,
    /// The places of its tensors.
    pub tensors: Vec<usize>,
    /// The same, a bit each.
    tensor_bits: u32,
    /// The places of the tensors that are updated in place.
    pub updated: Vec<usize>,
    /// The places of what else decides, a bit each.
    scalar_bits: u32,
    /// The place of the sizes a norm is over, a bit.
    sizes_bits: u32,
    /// The place of the tensor that the result is written to, a bit.
    out_bits: u32,
    /// A call with one of these takes the slow path; a bit each.
    careful_bits: u32,
    /// Whether it is what torch's attention function computes, so that `torch.nn.attention.sdpa_kernel` counts.
    is_torch_attention: bool,
    /// The place of `return_lse`, and the function such a call is one of.
    with_lse: Option<(usize, usize)>,
    /// The place of a weight that may be packed, and the functions such a call is one of.
    packed: Option<packed::Redirection>,
}

/// The places of bits that are set, in order.
#[inline]
fn places(mut bits: u32) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let at = bits.trailing_zeros();
        bits &= bits.wrapping_sub(1);
        (at < 32).then_some(at as usize)
    })
}

static FRONTS: OnceLock<Vec<Front>> = OnceLock::new();

impl Front {
    fn new(py: Python<'_>, index: usize, signature: &'static Signature) -> Front {
        let arguments = &signature.arguments;
        assert!(arguments.len() <= MAX_ARGUMENTS, "{} has too many arguments", signature.function.name);
        let bits = |wanted: &dyn Fn(&layerzero::model::Argument) -> bool| -> u32 {
            (0..arguments.len()).filter(|&i| wanted(&arguments[i])).map(|i| 1 << i).sum()
        };
        let special = |wanted: Special| bits(&|a| matches!(a.kind, ArgumentKind::Special(s) if s == wanted));
        let (sizes_bits, out_bits) = (special(Special::NormalizedShape), special(Special::Out));
        let careful_bits = special(Special::Generator);
        let tensor_bits = bits(&|a| matches!(a.kind, ArgumentKind::Input(_)));
        Front {
            index,
            signature,
            names: arguments.iter().map(|a| PyString::intern(py, a.name).unbind()).collect(),
            others: {
                let others =
                    arguments.iter().enumerate().flat_map(|(at, a)| a.also().into_iter().map(move |name| (name, at)));
                others.map(|(name, at)| (PyString::intern(py, name).unbind(), at)).collect()
            },
            defaults: arguments.iter().map(|a| docs::default_object(py, a)).collect(),
            positional: arguments.iter().filter(|a| !a.keyword_only).count(),
            tensors: places(tensor_bits).collect(),
            updated: {
                let updates = signature.updates();
                places(bits(&|a| updates.contains(&a.name)) & tensor_bits).collect()
            },
            tensor_bits,
            scalar_bits: bits(&|a| a.decides()) & !tensor_bits & !careful_bits & !sizes_bits & !out_bits,
            sizes_bits,
            out_bits,
            careful_bits,
            is_torch_attention: signature.ops().any(|op| op.is_torch_attention()),
            with_lse: {
                let at = arguments.iter().position(|a| matches!(a.kind, ArgumentKind::Special(Special::ReturnLse)));
                let name = format!("{}_lse", signature.function.name);
                let other = Signature::all().iter().position(|s| s.function.name == name);
                at.map(|at| (at, other.expect("a function with return_lse has one of the same name with _lse")))
            },
            packed: packed::redirection(signature),
        }
    }

    /// Its name.
    pub fn name(&self) -> &'static str {
        self.signature.function.name
    }

    /// The place of an argument of the front door's own.
    pub fn special(&self, wanted: Special) -> Option<usize> {
        let is_it = |kind: &ArgumentKind| matches!(kind, ArgumentKind::Special(s) if *s == wanted);
        self.signature.arguments.iter().position(|a| is_it(&a.kind))
    }

    /// The place of the tensor that the result is written to, if the function takes one.
    #[inline]
    fn out_at(&self) -> Option<usize> {
        (self.out_bits != 0).then(|| self.out_bits.trailing_zeros() as usize)
    }

    /// Every function.
    pub fn all(py: Python<'_>) -> &'static [Front] {
        FRONTS.get_or_init(|| {
            let all = Signature::all();
            assert!(all.len() <= MAX_FUNCTIONS, "{} functions, {MAX_FUNCTIONS} entry points: add some", all.len());
            all.iter().enumerate().map(|(i, s)| Front::new(py, i, s)).collect()
        })
    }

    /// The function behind any name: its own, or that of an operation or alias it serves.
    pub fn find(py: Python<'_>, name: &str) -> PyResult<&'static Front> {
        if let Some(signature) = Signature::find(name) {
            return Ok(&Front::all(py)[position(signature)]);
        }
        Err(match Catalog::get().find(name) {
            Err(unknown) => error::call(py, &unknown),
            Ok(_) => {
                let text = format!("'{name}' works on text, not on tensors");
                error::invalid(py, "NO_FUNCTION", &text, "list the functions with lz.ops()")
            }
        })
    }
}

fn position(signature: &Signature) -> usize {
    Signature::all().iter().position(|s| ptr::eq(s, signature)).unwrap_or(0)
}
