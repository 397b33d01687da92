//! Calls as users make them, and what can be wrong with one.

use lz_abi::{DType, DTypeSet, did_you_mean};

use crate::context::Context;
use crate::ids::DeviceIx;
use crate::layout::{DefaultLayouts, Layout};
use crate::param::ParamValue;
use crate::schema::CheckCode;
use crate::tensor_meta::TensorMeta;

/// A call with its arguments in schema order.
#[derive(Clone, Copy, Debug)]
pub struct Call<'a> {
    /// One entry per input of the schema; trailing ones may be missing.
    pub inputs: &'a [Option<TensorMeta<'a>>],
    /// One entry per parameter of the schema; `None` values take the default, trailing ones may be missing.
    pub params: &'a [ParamValue],
    /// The layout, when the caller says.
    pub layout: Option<Layout>,
    /// The device, for operations without tensors.
    pub device: DeviceIx,
    /// Demands and surroundings.
    pub context: Context,
}

/// A call with its arguments by name.
#[derive(Clone, Debug, Default)]
pub struct NamedCall<'a> {
    /// Tensors by name.
    pub inputs: Vec<(&'a str, TensorMeta<'a>)>,
    /// Parameters by name.
    pub params: Vec<(&'a str, ParamValue)>,
    /// The layout, when the caller says.
    pub layout: Option<Layout>,
    /// The device, for operations without tensors.
    pub device: DeviceIx,
    /// Demands and surroundings.
    pub context: Context,
}

impl<'a> NamedCall<'a> {
    /// A call with nothing in it yet.
    pub fn new() -> NamedCall<'a> {
        NamedCall::default()
    }

    /// Adds a tensor.
    pub fn input(mut self, name: &'a str, meta: TensorMeta<'a>) -> NamedCall<'a> {
        self.inputs.push((name, meta));
        self
    }

    /// Adds a parameter.
    pub fn param(mut self, name: &'a str, value: ParamValue) -> NamedCall<'a> {
        self.params.push((name, value));
        self
    }

    /// Says the layout.
    pub fn layout(mut self, layout: Layout) -> NamedCall<'a> {
        self.layout = Some(layout);
        self
    }

    /// Says the demands.
    pub fn context(mut self, context: Context) -> NamedCall<'a> {
        self.context = context;
        self
    }
}

/// How arguments are read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BindRules {
    /// The layouts of calls that do not say theirs.
    pub default_layouts: DefaultLayouts,
    /// Strides that contradict such a layout are an error instead of a warning.
    pub strict: bool,
    /// Threads of calls on the CPU that do not say theirs; 0 for not known.
    pub threads: u16,
}

/// What is odd about a tensor whose strides contradict the layout it is read in.
pub fn contradiction(input: &str, shape: &[i64], layout: Layout) -> String {
    format!("'{input}' of shape {shape:?} is read as {layout}, but its strides are those of a transposed view")
}

/// What to do about strides that contradict a layout.
pub fn say_the_layout(layout: Layout) -> String {
    let (other, order) = match layout {
        Layout::Nhd => (Layout::Hnd, "(pages, heads, slots, head_dim)"),
        _ => (Layout::Bhsd, "(batch, heads, sequence, head_dim)"),
    };
    format!("pass layout='{other}' if its dimensions are {order}, or layout='{layout}' if they are not")
}

/// Why a call is not a valid call of the operation.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[allow(missing_docs)] // fields are what the messages say they are
pub enum CallError {
    /// No operation or alias of that name.
    #[error("unknown operation '{name}'{}", did_you_mean(.nearest))]
    UnknownOp { name: String, nearest: Option<String> },
    /// The operation has no such tensor.
    #[error("{op} takes no tensor '{name}'{}", did_you_mean(.nearest))]
    UnknownInput { op: &'static str, name: String, nearest: Option<&'static str> },
    /// A required tensor is not there.
    #[error("{op} needs the tensor '{input}'")]
    MissingInput { op: &'static str, input: &'static str },
    /// The operation has no such parameter.
    #[error("{op} takes no parameter '{name}'{}", did_you_mean(.nearest))]
    UnknownParam { op: &'static str, name: String, nearest: Option<&'static str> },
    /// A required parameter is not there.
    #[error("{op} needs the parameter '{param}'")]
    MissingParam { op: &'static str, param: &'static str },
    /// A parameter of the wrong type, or none of its choices.
    #[error("{op}: parameter '{param}' is {got}, expected {expected}")]
    BadParam { op: &'static str, param: &'static str, got: String, expected: String },
    /// More arguments than the operation has.
    #[error("{op} takes at most {most} {what}, got {got}")]
    TooMany { op: &'static str, what: &'static str, most: usize, got: usize },
    /// One argument under two of its names.
    #[error("{op}: '{name}' was given twice")]
    GivenTwice { op: &'static str, name: &'static str },
    /// A tensor that is only read was given to be updated.
    #[error("{op} only reads '{input}'; it was given to be updated")]
    NotUpdated { op: &'static str, input: &'static str },
    /// Strides of another rank than the shape.
    #[error("{op}: '{input}' has shape {shape:?} but strides {strides:?}")]
    BadStrides { op: &'static str, input: &'static str, shape: Vec<i64>, strides: Vec<i64> },
    /// A tensor of the wrong rank.
    #[error("{op}: '{input}' has rank {got} (shape {shape:?}), expected {expected}")]
    WrongRank { op: &'static str, input: &'static str, got: usize, shape: Vec<i64>, expected: String },
    /// A size that contradicts another argument.
    #[error("{op}: '{input}' has shape {shape:?}: its dimension '{dim}' is {got}, expected {expected} ({because})")]
    WrongSize {
        op: &'static str,
        input: &'static str,
        shape: Vec<i64>,
        dim: String,
        got: i64,
        expected: i64,
        because: String,
    },
    /// A negative size.
    #[error("{op}: '{input}' has a negative size in {shape:?}")]
    NegativeSize { op: &'static str, input: &'static str, shape: Vec<i64> },
    /// More elements than can be counted.
    #[error("{op}: '{input}' of shape {shape:?} has too many elements")]
    TooLarge { op: &'static str, input: &'static str, shape: Vec<i64> },
    /// A dtype the operation does not take here.
    #[error("{op}: '{input}' is {got}, expected one of {allowed}")]
    WrongDType { op: &'static str, input: &'static str, got: DType, allowed: DTypeSet },
    /// Tensors that must have one dtype have two.
    #[error("{op}: '{input}' is {got} but '{other}' is {expected}; they must be the same")]
    MixedDTypes { op: &'static str, input: &'static str, got: DType, other: &'static str, expected: DType },
    /// Tensors on several devices.
    #[error("{op}: '{input}' is on device {got} but '{other}' is on device {expected}")]
    MixedDevices { op: &'static str, input: &'static str, got: u16, other: &'static str, expected: u16 },
    /// A layout the operation does not have.
    #[error("{op} has no layout {layout}; it has {known}")]
    WrongLayout { op: &'static str, layout: Layout, known: String },
    /// Strides that contradict the layout in force, in strict mode.
    #[error("{op}: {}", contradiction(.input, .shape, *.layout))]
    LayoutContradicted { op: &'static str, input: &'static str, shape: Vec<i64>, layout: Layout },
    /// A condition of the operation does not hold.
    #[error("{op}: {message} ({values})")]
    Check { op: &'static str, code: CheckCode, message: &'static str, hint: &'static str, values: String },
    /// No operation behind an alias takes such a call.
    #[error("no operation behind '{alias}' takes this call: {}", reasons.iter().map(|r| r.to_string()).collect::<Vec<_>>().join("; "))]
    NoneFits { alias: String, reasons: Vec<CallError> },
}

impl CallError {
    /// A stable code.
    pub fn code(&self) -> &'static str {
        match self {
            CallError::UnknownOp { .. } => "UNKNOWN_OPERATION",
            CallError::UnknownInput { .. } => "UNKNOWN_INPUT",
            CallError::MissingInput { .. } => "MISSING_INPUT",
            CallError::UnknownParam { .. } => "UNKNOWN_PARAM",
            CallError::MissingParam { .. } => "MISSING_PARAM",
            CallError::BadParam { .. } => "BAD_PARAM",
            CallError::TooMany { .. } => "TOO_MANY_ARGUMENTS",
            CallError::GivenTwice { .. } => "GIVEN_TWICE",
            CallError::NotUpdated { .. } => "NOT_UPDATED",
            CallError::BadStrides { .. } => "BAD_STRIDES",
            CallError::WrongRank { .. } => "WRONG_RANK",
            CallError::WrongSize { .. } | CallError::NegativeSize { .. } | CallError::TooLarge { .. } => "WRONG_SHAPE",
            CallError::WrongDType { .. } => "WRONG_DTYPE",
            CallError::MixedDTypes { .. } => "MIXED_DTYPES",
            CallError::MixedDevices { .. } => "MIXED_DEVICES",
            CallError::WrongLayout { .. } => "WRONG_LAYOUT",
            CallError::LayoutContradicted { .. } => "LAYOUT_CONTRADICTED",
            CallError::Check { code, .. } => match code {
                CheckCode::GqaHeadsMismatch => "GQA_HEADS_MISMATCH",
                CheckCode::AttnMaskInvalid => "ATTN_MASK_INVALID",
                CheckCode::CausalMoreQueries => "CAUSAL_MORE_QUERIES",
                CheckCode::Constraint => "CONSTRAINT_FAILED",
            },
            CallError::NoneFits { reasons, .. } => reasons.first().map_or("NONE_FITS", CallError::code),
        }
    }

    /// The operation it names, for errors that name one.
    fn op_mut(&mut self) -> Option<&mut &'static str> {
        match self {
            CallError::UnknownOp { .. } | CallError::NoneFits { .. } => None,
            CallError::UnknownInput { op, .. }
            | CallError::MissingInput { op, .. }
            | CallError::UnknownParam { op, .. }
            | CallError::MissingParam { op, .. }
            | CallError::BadParam { op, .. }
            | CallError::TooMany { op, .. }
            | CallError::GivenTwice { op, .. }
            | CallError::NotUpdated { op, .. }
            | CallError::BadStrides { op, .. }
            | CallError::WrongRank { op, .. }
            | CallError::WrongSize { op, .. }
            | CallError::NegativeSize { op, .. }
            | CallError::TooLarge { op, .. }
            | CallError::WrongDType { op, .. }
            | CallError::MixedDTypes { op, .. }
            | CallError::MixedDevices { op, .. }
            | CallError::WrongLayout { op, .. }
            | CallError::LayoutContradicted { op, .. }
            | CallError::Check { op, .. } => Some(op),
        }
    }

    /// The error of a call by alias, from the errors of every operation behind it: when they all
    /// say the same, that, about the alias.
    pub(crate) fn of_alias(alias: &'static str, mut reasons: Vec<CallError>) -> CallError {
        // An operation that has other arguments altogether is not the one that was meant.
        let about_names = |e: &CallError| {
            use CallError::*;
            matches!(
                e,
                UnknownInput { .. } | MissingInput { .. } | UnknownParam { .. } | MissingParam { .. } | TooMany { .. }
            )
        };
        if !reasons.iter().all(about_names) {
            reasons.retain(|e| !about_names(e));
        }
        for op in reasons.iter_mut().filter_map(CallError::op_mut) {
            *op = alias;
        }
        reasons.dedup();
        match <[CallError; 1]>::try_from(reasons) {
            Ok([one]) => one,
            Err(reasons) => CallError::NoneFits { alias: alias.to_owned(), reasons },
        }
    }

    /// What to do about it.
    pub fn hint(&self) -> String {
        match self {
            CallError::UnknownOp { .. } => "list the operations with 'layerzero ops'".into(),
            CallError::UnknownInput { op, .. } | CallError::MissingInput { op, .. } | CallError::TooMany { op, .. } => {
                format!("see its inputs with 'layerzero ops {op}'")
            }
            CallError::UnknownParam { op, .. }
            | CallError::MissingParam { op, .. }
            | CallError::BadParam { op, .. } => {
                format!("see its parameters with 'layerzero ops {op}'")
            }
            CallError::WrongRank { input, expected, .. } => format!("reshape '{input}' to {expected}"),
            CallError::WrongSize { input, because, .. } => {
                format!("make '{input}' agree with the others: {because}")
            }
            CallError::GivenTwice { .. } => "give it once, under one name".into(),
            CallError::NotUpdated { input, .. } => format!("pass '{input}' as an input"),
            CallError::BadStrides { .. } => "pass one stride per dimension, in elements".into(),
            CallError::NegativeSize { .. } => "sizes are zero or more".into(),
            CallError::TooLarge { .. } => "a tensor has at most 2^63 - 1 elements".into(),
            CallError::WrongDType { input, allowed, .. } => {
                format!("cast '{input}' to one of {allowed}")
            }
            CallError::MixedDTypes { input, expected, .. } => format!("cast '{input}' to {expected}"),
            CallError::MixedDevices { input, other, .. } => {
                format!("move '{input}' to the device of '{other}'")
            }
            CallError::WrongLayout { known, .. } => format!("use one of {known}"),
            CallError::LayoutContradicted { layout, .. } => say_the_layout(*layout),
            CallError::Check { hint, .. } => (*hint).into(),
            CallError::NoneFits { reasons, .. } => reasons.first().map_or_else(String::new, CallError::hint),
        }
    }
}
