//! Operation schemas: what an operation takes, gives, costs, and how right it must be.
//!
//! A schema is a constant written down once, in `ops/`. Argument checking, the query, the cache
//! key, random test inputs, the roofline floor and the reference page are all derived from it.

use lz_abi::{DType, DTypeSet};

use crate::layout::{DefaultLayouts, Layout};
use crate::param::{Param, ParamValue};

/// Which part of the inference stack an operation belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(missing_docs)] // the names are the documentation
pub enum Family {
    Attention,
    Embedding,
    PosEnc,
    Mlp,
    Norm,
    Activation,
    Sampling,
    Quantize,
    Tokenize,
    KvCache,
}

impl Family {
    /// Lower-case name, the first segment of most ids.
    pub const fn name(self) -> &'static str {
        match self {
            Family::Attention => "attention",
            Family::Embedding => "embedding",
            Family::PosEnc => "posenc",
            Family::Mlp => "mlp",
            Family::Norm => "norm",
            Family::Activation => "activation",
            Family::Sampling => "sampling",
            Family::Quantize => "quantize",
            Family::Tokenize => "tokenize",
            Family::KvCache => "kv_cache",
        }
    }
}

/// What kind of thing the operation works on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpKind {
    /// Tensors in, tensors out.
    Tensor,
    /// Text in or out, on the host.
    Tokenization,
    /// Draws random numbers.
    Sampling,
    /// Moves or repacks state between other operations.
    PrePost,
}

impl OpKind {
    /// Lower-case name.
    pub const fn name(self) -> &'static str {
        match self {
            OpKind::Tensor => "tensor",
            OpKind::Tokenization => "tokenization",
            OpKind::Sampling => "sampling",
            OpKind::PrePost => "prepost",
        }
    }
}

/// What a dimension means; decides which reason code a violated constraint gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)] // the names are the documentation
pub enum DimKind {
    Batch,
    Seq,
    Heads,
    KvHeads,
    HeadDim,
    Other,
}

/// How a dimension enters the cache key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DimKey {
    /// By its exact value: kernels are compiled for it.
    Exact,
    /// By the cell it falls into; these are the upper ends of the performance buckets.
    Bucketed(&'static [i64]),
}

/// Performance buckets of lengths and row counts: powers of two.
pub const POWERS_OF_TWO: &[i64] = &[
    1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536, 131_072, 262_144, 524_288,
    1_048_576,
];

/// The same for what may be absent: nothing is a bucket of its own.
pub const NONE_OR_POWERS_OF_TWO: &[i64] = &[
    0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536, 131_072, 262_144,
    524_288, 1_048_576,
];

/// Reads the dimensions and parameters bound so far, for dimensions computed from others.
pub trait Sizes {
    /// A dimension bound earlier.
    fn dim(&self, name: &str) -> i64;
    /// A parameter.
    fn param(&self, name: &str) -> ParamValue;
    /// The dtype of an input that was given.
    fn dtype(&self, input: &str) -> Option<DType>;
}

/// A named dimension.
#[derive(Clone, Copy)]
pub struct Dim {
    /// Its name in shapes, constraints and rules.
    pub name: &'static str,
    /// Other names rules may use for it.
    pub also: &'static [&'static str],
    /// What it means.
    pub kind: DimKind,
    /// How it enters the key.
    pub key: DimKey,
    /// A kernel must say which values it takes, even if only "any".
    pub must_constrain: bool,
    /// Computed from other dimensions and parameters; tensors must agree with it.
    pub derived: Option<fn(&dyn Sizes) -> i64>,
    /// Its size when no tensor shows it.
    pub otherwise: Option<i64>,
}

impl Dim {
    /// A dimension known by its exact value.
    pub const fn exact(name: &'static str, kind: DimKind) -> Dim {
        Dim { name, also: &[], kind, key: DimKey::Exact, must_constrain: false, derived: None, otherwise: None }
    }

    /// A dimension known by its bucket.
    pub const fn bucketed(name: &'static str, kind: DimKind) -> Dim {
        Dim { key: DimKey::Bucketed(POWERS_OF_TWO), ..Dim::exact(name, kind) }
    }

    /// A dimension known by its bucket, of which there may be none.
    pub const fn bucketed_or_none(name: &'static str, kind: DimKind) -> Dim {
        Dim { key: DimKey::Bucketed(NONE_OR_POWERS_OF_TWO), otherwise: Some(0), ..Dim::exact(name, kind) }
    }

    /// The same under further names.
    pub const fn also(mut self, names: &'static [&'static str]) -> Dim {
        self.also = names;
        self
    }

    /// The same, but kernels must constrain it.
    pub const fn must_constrain(mut self) -> Dim {
        self.must_constrain = true;
        self
    }

    /// The same, but of this size when no tensor shows it.
    pub const fn otherwise(mut self, size: i64) -> Dim {
        self.otherwise = Some(size);
        self
    }

    /// The same, but computed.
    pub const fn derived(mut self, rule: fn(&dyn Sizes) -> i64) -> Dim {
        self.derived = Some(rule);
        self
    }
}

/// Which dtypes an input may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DTypeRule {
    /// Any of these.
    In(DTypeSet),
    /// The same as an earlier input.
    Same(&'static str),
}

/// Whether a tensor is read or also written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Only read.
    Read,
    /// Updated in place.
    ReadWrite,
}

/// A tensor an operation takes.
///
/// `shape` is a list of alternatives separated by `|`; each is a list of axes, optionally behind
/// a layout tag. An axis is a dimension's name, `...name` (any number of leading axes, whose
/// product is the dimension), `name?` (that size, or 1 to broadcast), `name+1`, or a number.
#[derive(Clone, Copy, Debug)]
pub struct Input {
    /// Its name.
    pub name: &'static str,
    /// Other names it is known by.
    pub also: &'static [&'static str],
    /// The shapes it may have.
    pub shape: &'static str,
    /// The dtypes it may have.
    pub dtype: DTypeRule,
    /// Whether it may be left out.
    pub optional: bool,
    /// Whether it is updated in place.
    pub access: Access,
    /// Part of a key/value cache: constraints on it have their own reason codes.
    pub cache: bool,
    /// An attention mask: likewise.
    pub mask: bool,
}

impl Input {
    /// A required input.
    pub const fn new(name: &'static str, shape: &'static str, dtypes: DTypeSet) -> Input {
        Input {
            name,
            also: &[],
            shape,
            dtype: DTypeRule::In(dtypes),
            optional: false,
            access: Access::Read,
            cache: false,
            mask: false,
        }
    }

    /// A required input with the dtype of an earlier one.
    pub const fn same(name: &'static str, shape: &'static str, dtype_of: &'static str) -> Input {
        Input { dtype: DTypeRule::Same(dtype_of), ..Input::new(name, shape, DTypeSet::EMPTY) }
    }

    /// The same, but it may be left out.
    pub const fn optional(mut self) -> Input {
        self.optional = true;
        self
    }

    /// The same, but it is updated in place.
    pub const fn updated(mut self) -> Input {
        self.access = Access::ReadWrite;
        self
    }

    /// The same, but it is part of a key/value cache.
    pub const fn cache(mut self) -> Input {
        self.cache = true;
        self
    }

    /// The same, but it is an attention mask.
    pub const fn mask(mut self) -> Input {
        self.mask = true;
        self
    }

    /// The same under further names.
    pub const fn also(mut self, names: &'static [&'static str]) -> Input {
        self.also = names;
        self
    }
}

/// The dtype of an output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OutputDType {
    /// That of an input.
    Of(&'static str),
    /// Always this one.
    Fixed(DType),
    /// The dtype a string parameter names.
    Named(&'static str),
}

/// A tensor an operation gives.
#[derive(Clone, Copy, Debug)]
pub enum Output {
    /// A new tensor.
    Fresh {
        /// Its name.
        name: &'static str,
        /// Its shape, in the notation of [`Input::shape`]; `like:NAME` is an input's very shape, `rows:NAME` the same without the
        /// last dimension.
        shape: &'static str,
        /// Its dtype.
        dtype: OutputDType,
    },
    /// An input that is updated in place.
    Updates(&'static str),
}

impl Output {
    /// A new tensor with the shape and dtype of an input.
    pub const fn like(name: &'static str, shape: &'static str, input: &'static str) -> Output {
        Output::Fresh { name, shape, dtype: OutputDType::Of(input) }
    }

    /// Its name.
    pub const fn name(&self) -> &'static str {
        match self {
            Output::Fresh { name, .. } | Output::Updates(name) => name,
        }
    }
}

/// Which reason a failed [`Check`] is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CheckCode {
    /// Query heads are no multiple of key/value heads.
    GqaHeadsMismatch,
    /// A mask that contradicts another argument.
    AttnMaskInvalid,
    /// Causal attention with more queries than keys.
    CausalMoreQueries,
    /// Anything else.
    Constraint,
}

/// A condition every valid call meets, beyond shapes and dtypes.
#[derive(Clone, Copy, Debug)]
pub struct Check {
    /// The condition, an expression over the operation's fields.
    pub holds: &'static str,
    /// Which reason its failure is.
    pub code: CheckCode,
    /// What is wrong when it fails.
    pub message: &'static str,
    /// What to do about it.
    pub hint: &'static str,
}

/// What an operation gives where arithmetic ends: infinities, numbers beyond float32's range, sums in half precision.
///
/// Each is a promise with a test (`tests/ops/test_edges.py`, `tests/ops/test_half_gradients.py`); one without a test fails
/// there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Edge {
    /// Its name, unique in the operation.
    pub name: &'static str,
    /// Which calls it is about.
    pub when: &'static str,
    /// What they give.
    pub gives: &'static str,
    /// Where kernels may give something else, and what; empty if nowhere.
    pub except: &'static str,
}

/// Which named layout a call has that does not say. Sizes never decide it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LayoutRule {
    /// The operation has no named layouts.
    None,
    /// BSHD, or what the setting `default_layout` says.
    Dense,
    /// NHD, or what the setting `default_cache_layout` says.
    Cache,
    /// Always this one.
    Fixed(Layout),
}

impl LayoutRule {
    /// The layout of calls that do not say theirs.
    pub fn layout(self, defaults: DefaultLayouts) -> Option<Layout> {
        match self {
            LayoutRule::None => None,
            LayoutRule::Dense => Some(defaults.dense),
            LayoutRule::Cache => Some(defaults.cache),
            LayoutRule::Fixed(layout) => Some(layout),
        }
    }

    /// The setting that changes it.
    pub fn setting(self) -> Option<&'static str> {
        match self {
            LayoutRule::Dense => Some("default_layout"),
            LayoutRule::Cache => Some("default_cache_layout"),
            LayoutRule::None | LayoutRule::Fixed(_) => None,
        }
    }
}

/// How far a kernel may be from the float64 result.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Tolerance {
    /// Relative.
    pub rtol: f64,
    /// Absolute.
    pub atol: f64,
}

/// Tolerances by dtype.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Tolerances {
    /// Those of the specification: 1e-5 (float32), 1e-3 (float16), 1e-2 (bfloat16), and what the
    /// mantissa of the narrower formats allows.
    Numeric,
    /// Results are indices or moved bits: equal or wrong.
    Exact,
}

impl Tolerances {
    /// The tolerance for results of a dtype.
    pub fn of(self, dtype: DType) -> Tolerance {
        let both = |t| Tolerance { rtol: t, atol: t };
        match self {
            Tolerances::Exact => both(0.0),
            Tolerances::Numeric => match dtype {
                DType::F64 => both(1e-10),
                DType::F32 => both(1e-5),
                DType::Tf32 | DType::F16 => both(1e-3),
                DType::Bf16 => both(1e-2),
                DType::F8E4M3 => both(0.125),
                DType::F8E5M2 => both(0.25),
                DType::MxFp4 | DType::NvFp4 => both(0.5),
                _ => both(0.0),
            },
        }
    }
}

/// What a second attempt at an update in place needs: the first kernel may have failed with tensors half written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Update {
    /// Nothing. What is written does not depend on what was there, so writing it again gives the same.
    Idempotent,
    /// The rows (indices of the first axis) that are overwritten, as they were before: the call also reads them.
    Rows {
        /// The input that lists the rows, a matrix of indices.
        index: &'static str,
        /// Its column that names the rows written.
        column: i64,
    },
}

/// The contract of one operation.
#[derive(Clone, Copy)]
pub struct OpSchema {
    /// Hierarchical name: `attention.gqa.decode.paged`.
    pub id: &'static str,
    /// Its family.
    pub family: Family,
    /// Its kind.
    pub kind: OpKind,
    /// Names that mean just this operation (`rms_norm`).
    pub also: &'static [&'static str],
    /// One line.
    pub summary: &'static str,
    /// What is computed, exactly.
    pub semantics: &'static str,
    /// The named dimensions, in key order.
    pub dims: &'static [Dim],
    /// The tensors taken, in call order.
    pub inputs: &'static [Input],
    /// The scalars taken, in call order.
    pub params: &'static [Param],
    /// The tensors given.
    pub outputs: &'static [Output],
    /// How an update in place is tried again with another kernel; `None` when nothing is updated.
    pub update: Option<Update>,
    /// Which calls of a shared alias are this operation; empty for all.
    pub when: &'static str,
    /// What every valid call meets.
    pub checks: &'static [Check],
    /// Which named layout applies.
    pub layout: LayoutRule,
    /// The layout the tensors always have, for an operation that has no choice of layouts: a caller may name it.
    pub fixed_layout: Option<Layout>,
    /// How right a kernel must be.
    pub tolerances: Tolerances,
    /// What it gives where arithmetic ends.
    pub edges: &'static [Edge],
    /// Floating-point operations, as an expression over the dimensions.
    pub flops: &'static str,
    /// Other formulas for calls that do less: condition and operations, the first that holds.
    pub flops_when: &'static [(&'static str, &'static str)],
    /// Bytes that must move at least, likewise; `dtype_bits` is the size of the first input's elements.
    pub bytes: &'static str,
}

/// A schema with everything empty, for `..BLANK` in definitions.
pub const BLANK: OpSchema = OpSchema {
    id: "",
    family: Family::Attention,
    kind: OpKind::Tensor,
    also: &[],
    summary: "",
    semantics: "",
    dims: &[],
    inputs: &[],
    params: &[],
    outputs: &[],
    update: None,
    when: "",
    checks: &[],
    layout: LayoutRule::None,
    fixed_layout: None,
    tolerances: Tolerances::Numeric,
    edges: &[],
    flops: "0",
    flops_when: &[],
    bytes: "0",
};

/// A name that stands for several operations, possibly with parameters fixed.
#[derive(Clone, Copy, Debug)]
pub struct Alias {
    /// The name.
    pub name: &'static str,
    /// What it stands for, in order of resolution.
    pub ops: &'static [&'static str],
    /// Parameters it fixes.
    pub fixes: &'static [(&'static str, bool)],
}
