//! What can be wrong with a wish for calls.

use lz_model::{CallError, DType, DTypeSet, did_you_mean};

/// Why sizes or shapes make no calls.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[allow(missing_docs)] // fields are what the messages say they are
pub enum WorkloadError {
    /// A dtype the data of the operation cannot have.
    #[error("{of} cannot be in {got}; it can be in {allowed}")]
    WrongDType { of: String, got: DType, allowed: DTypeSet },
    /// An operation without tensors, which shapes cannot say anything about.
    #[error("'{op}' takes no tensors, so sizes and shapes say nothing about it")]
    NoTensors { op: String },
    /// The operation has no such dimension.
    #[error("'{op}' has no dimension '{name}'{}; it has {known}", did_you_mean(.nearest))]
    UnknownDim { op: String, name: String, nearest: Option<&'static str>, known: String },
    /// A dimension under two of its names.
    #[error("the dimension '{dim}' of '{op}' was given twice")]
    DimTwice { op: String, dim: &'static str },
    /// A dimension that nothing tells.
    #[error("'{op}' needs a size for '{dim}'")]
    MissingDim { op: String, dim: &'static str },
    /// A list without an entry.
    #[error("the list '{what}' is empty")]
    Empty { what: String },
    /// A size that nothing has.
    #[error("'{what}' is {got}; a size is between 1 and {most}")]
    BadSize { what: String, got: i64, most: i64 },
    /// A size the operation derives from others, and differently.
    #[error("'{dim}' of '{op}' was asked to be {asked}, but with the other sizes it is {has}")]
    OtherSize { op: String, dim: &'static str, asked: i64, has: i64 },
    /// A tensor no machine has room for.
    #[error("'{op}': '{input}' would be {shape:?}, more than {most} elements")]
    TooLarge { op: String, input: String, shape: Vec<i64>, most: i64 },
    /// More combinations than anybody could measure.
    #[error("the lists of sizes make {calls} calls; {most} is the most")]
    TooMany { calls: u128, most: u128 },
    /// A shape with another number of sizes.
    #[error("a shape of '{op}' is {expected}; {shape:?} is none")]
    WrongShape { op: String, shape: Vec<i64>, expected: String },
    /// Sizes that make a call of another operation.
    #[error("with these sizes the call is not '{op}', which is for {when}: {call}")]
    AnotherOp { op: String, when: &'static str, call: String },
    /// A call the operation refuses.
    #[error("{source} (in {call})")]
    Call { call: String, source: Box<CallError> },
    /// An operation nobody knows.
    #[error("{0}")]
    Op(Box<CallError>),
}

impl WorkloadError {
    /// What to do about it.
    pub fn hint(&self) -> String {
        use WorkloadError::*;
        match self {
            WrongDType { allowed, .. } => format!("use one of {allowed}"),
            NoTensors { .. } => "name an operation on tensors; 'layerzero ops' lists them".into(),
            UnknownDim { op, .. } => format!("see its dimensions with 'layerzero ops {op}'"),
            DimTwice { .. } => "give it once, under one name".into(),
            MissingDim { dim, .. } => format!("say {dim}, or a list of sizes for it"),
            Empty { what } => format!("give at least one size for '{what}', or leave it out"),
            BadSize { what, most, .. } => format!("give '{what}' between 1 and {most}"),
            OtherSize { dim, has, .. } => format!("ask for {has}, or leave '{dim}' out"),
            TooLarge { .. } => "ask for smaller sizes".into(),
            TooMany { .. } => "give shorter lists, or several of them".into(),
            WrongShape { expected, .. } => format!("give shapes as {expected}"),
            AnotherOp { .. } => "name the operation the call is of, or an alias such as 'attention'".into(),
            Call { source, .. } | Op(source) => source.hint(),
        }
    }
}

impl From<CallError> for WorkloadError {
    fn from(error: CallError) -> WorkloadError {
        WorkloadError::Op(Box::new(error))
    }
}
