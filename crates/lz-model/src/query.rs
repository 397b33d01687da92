//! The query: everything selection may look at, in a fixed-size value that is its own cache key.

use std::fmt;

use crate::accuracy::Accuracy;
use crate::context::{Context, KvStrategy, ReductionOrder};
use crate::ids::{DeviceIx, OpIx};
use crate::packing::Packing;
use crate::param::{Param, ParamRole, ParamType, ParamValue};
use crate::quant::QuantSpec;
use crate::sdpa::SdpaChoice;
use crate::symbol::Symbol;
use crate::tensor_meta::TensorFacts;

/// Most named dimensions an operation has.
pub const MAX_DIMS: usize = 12;
/// Most tensors an operation takes.
pub const MAX_INPUTS: usize = 16;
/// Most parameters an operation takes.
pub const MAX_PARAMS: usize = 10;

/// A call, reduced to what can decide between kernels.
///
/// It is plain data of a fixed size, comparable as a whole: the selection cache
/// compares these fields themselves, never only a hash of them.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Query {
    op: u16,
    device: u16,
    flags: u16,
    tp_size: u16,
    quant: u32,
    threads: u16,
    packing: u16,
    sdpa: u16,
    kv_strategy: u8,
    reduction: u8,
    min_accuracy_rank: u8,
    accuracy: u8,
    /// [`TensorFacts`], four to a word: the first is the lowest.
    tensors: [u64; MAX_INPUTS / 4],
    pub(crate) params: [u64; MAX_PARAMS],
    pub(crate) dims: [i64; MAX_DIMS],
}

const NONE_INT: u64 = i64::MIN as u64;
const NONE_FLOAT: u64 = f64::NAN.to_bits() | 1;

/// What fingerprints begin with: bits without a pattern.
const SEEDS: [u64; 2] = [0x9e37_79b9_7f4a_7c15, 0xd1b5_4a32_d192_ed03];

/// Mixes two words into one: both halves of their product.
#[inline]
fn fold(a: u64, b: u64) -> u64 {
    let product = u128::from(a ^ SEEDS[0]) * u128::from(b ^ SEEDS[1]);
    product as u64 ^ (product >> 64) as u64
}

impl Query {
    const CAPTURING: u16 = 1 << 1;
    const REQUIRES_GRAD: u16 = 1 << 2;
    /// Its dimensions are exact: it is no key of a cell.
    const EXACT: u16 = 1 << 15;

    pub(crate) fn new(op: OpIx, device: DeviceIx, context: &Context) -> Query {
        let bits = [
            context.deterministic,
            context.capturing,
            context.requires_grad,
            context.batch_invariant,
            context.tp_invariant,
        ];
        Query {
            op: op.0,
            device: device.0,
            flags: bits.iter().rev().fold(0, |flags, &bit| flags << 1 | u16::from(bit)),
            tp_size: context.tp_size,
            quant: QuantSpec::code(context.quant),
            threads: context.threads,
            packing: context.packing.code(),
            sdpa: context.sdpa.code(),
            kv_strategy: context.kv_strategy.map_or(0, |s| s as u8),
            reduction: context.reduction.map_or(0, |r| r as u8),
            min_accuracy_rank: context.min_accuracy_rank,
            accuracy: context.accuracy as u8,
            tensors: [0; MAX_INPUTS / 4],
            params: [0; MAX_PARAMS],
            dims: [0; MAX_DIMS],
        }
    }

    /// Which operation is asked for.
    pub fn op(&self) -> OpIx {
        OpIx(self.op)
    }

    /// On which device.
    pub fn device(&self) -> DeviceIx {
        DeviceIx(self.device)
    }

    /// The demands of the call.
    pub fn context(&self) -> Context {
        let bit = |n: u16| self.flags >> n & 1 == 1;
        Context {
            deterministic: bit(0),
            capturing: bit(1),
            requires_grad: bit(2),
            batch_invariant: bit(3),
            tp_invariant: bit(4),
            kv_strategy: match self.kv_strategy {
                1 => Some(KvStrategy::Contiguous),
                2 => Some(KvStrategy::Paged),
                3 => Some(KvStrategy::Virtual),
                4 => Some(KvStrategy::Unified),
                _ => None,
            },
            tp_size: self.tp_size,
            reduction: match self.reduction {
                1 => Some(ReductionOrder::Ring),
                2 => Some(ReductionOrder::Tree),
                3 => Some(ReductionOrder::Canonical),
                _ => None,
            },
            quant: QuantSpec::from_code(self.quant),
            min_accuracy_rank: self.min_accuracy_rank,
            packing: Packing::from_code(self.packing),
            accuracy: Accuracy::from_code(self.accuracy),
            threads: self.threads,
            sdpa: SdpaChoice::from_code(self.sdpa),
        }
    }

    /// A number that is almost always different for different queries: where to look for one, never
    /// whether it is the one.
    pub fn fingerprint(&self) -> u64 {
        self.fingerprint_with(self.fingerprint_but_sizes())
    }

    /// The part of the fingerprint that [`Query::with_dims`] leaves as it is.
    ///
    /// Two words at a time, and sizes apart from the rest: it is on the path of every call, and a chain of products is as
    /// slow as it is long.
    pub fn fingerprint_but_sizes(&self) -> u64 {
        let half = |a: u16, b: u16| u64::from(a) << 16 | u64::from(b);
        let small = [self.kv_strategy, self.reduction, self.min_accuracy_rank, self.accuracy];
        let words = [
            half(self.op, self.device) << 32 | half(self.flags, self.tp_size),
            u64::from(self.quant) << 32 | half(self.threads, self.packing),
        ];
        let rest = u64::from(self.sdpa) << 32 | u64::from(u32::from_le_bytes(small));
        let head = fold(words[0], words[1]) ^ fold(rest, SEEDS[0]);
        let tensors = self.tensors.chunks_exact(2).fold(head, |hash, t| fold(hash ^ t[0], t[1]));
        let params = self.params.chunks_exact(2).fold(SEEDS[1], |hash, p| fold(hash ^ p[0], p[1]));
        fold(tensors, params)
    }

    /// The fingerprint, given its part [but sizes](Query::fingerprint_but_sizes).
    pub fn fingerprint_with(&self, but_sizes: u64) -> u64 {
        let mut lanes = [SEEDS[1], !SEEDS[1]];
        for d in self.dims.chunks_exact(4) {
            lanes[0] = fold(lanes[0] ^ d[0] as u64, d[1] as u64);
            lanes[1] = fold(lanes[1] ^ d[2] as u64, d[3] as u64);
        }
        fold(but_sizes ^ lanes[0], lanes[1])
    }

    /// What is known of input `index`.
    pub fn tensor(&self, index: usize) -> TensorFacts {
        TensorFacts((self.tensors[index / 4] >> (16 * (index % 4))) as u16)
    }

    /// Says what is known of input `index`.
    pub(crate) fn set_tensor(&mut self, index: usize, facts: TensorFacts) {
        let shift = 16 * (index % 4);
        let word = &mut self.tensors[index / 4];
        *word = *word & !(0xffff << shift) | u64::from(facts.0) << shift;
    }

    /// The size of dimension `index`.
    pub fn dim(&self, index: usize) -> i64 {
        self.dims[index]
    }

    /// All dimensions; those beyond the operation's own are zero.
    pub fn dims(&self) -> &[i64; MAX_DIMS] {
        &self.dims
    }

    /// The same query with other dimensions: the key of a cell.
    pub fn with_dims(mut self, dims: [i64; MAX_DIMS]) -> Query {
        self.dims = dims;
        self
    }

    /// The same query marked as one whose dimensions are exact, so that it can never equal the
    /// key of a cell.
    pub fn marked_exact(mut self) -> Query {
        self.flags |= Self::EXACT;
        self
    }

    /// The same call inside of a CUDA graph that is captured.
    pub fn captured(mut self) -> Query {
        self.flags |= Self::CAPTURING;
        self
    }

    /// The same call with another number of threads.
    pub fn with_threads(mut self, threads: u16) -> Query {
        self.threads = threads;
        self
    }

    /// The calls one decision of a lockfile or a dispatch table is about, their sizes aside: those of a class, with any
    /// number of threads. Who wrote the decision down wants it, whatever was measured.
    pub fn pinned_class(&self) -> Query {
        self.class().with_threads(0)
    }

    /// The calls that are alike but for their sizes, as far as speed goes: no sizes, and nothing that only bears on
    /// which kernels are allowed. A number counts only by whether it is at its default, and not at all where every
    /// kernel honours any.
    pub fn class(&self) -> Query {
        let schema = crate::catalog::Catalog::get().op(self.op()).schema();
        let mut class = *self;
        class.dims = [0; MAX_DIMS];
        class.flags &= Self::CAPTURING;
        (class.tp_size, class.reduction, class.min_accuracy_rank, class.sdpa) = (0, 0, 0, 0);
        class.tensors.iter_mut().for_each(|four| *four &= !(0x0001_0001_0001_0001 * u64::from(TensorFacts::ALIGNED)));
        for (word, param) in class.params.iter_mut().zip(schema.params) {
            if param.ty == ParamType::Float && param.role == ParamRole::Exact {
                let default = param.default.value().map(|value| Query::encode(param, value));
                // The default stays as it is, everything else is one: a class is its own class.
                if param.universal || Some(*word) != default {
                    *word = u64::from(!param.universal);
                }
            }
        }
        class
    }

    /// The same call on another device.
    pub fn with_device(mut self, device: DeviceIx) -> Query {
        self.device = device.0;
        self
    }

    /// The call as it is made most often: operands without gaps, in the layout most kernels read (`BHSD`,
    /// `NHD`), bfloat16 for float16. Kernels take about as long for it as for the call itself.
    pub fn most_usual(mut self) -> Query {
        for index in 0..MAX_INPUTS {
            self.set_tensor(index, self.tensor(index).most_usual());
        }
        self
    }

    /// Which kernels have to be compiled for: the call's class with the sizes they are compiled for. Whether a graph is
    /// captured makes no difference to compilers, nor does the number of threads.
    pub fn compiled_class(&self) -> Query {
        let schema = crate::catalog::Catalog::get().op(self.op()).schema();
        let mut class = self.class().with_threads(0);
        class.flags &= !Self::CAPTURING;
        for ((to, from), dim) in class.dims.iter_mut().zip(self.dims).zip(schema.dims) {
            if dim.key == crate::schema::DimKey::Exact {
                *to = from;
            }
        }
        class
    }

    /// The same call where no gradients are wanted.
    pub fn without_gradients(mut self) -> Query {
        self.flags &= !Self::REQUIRES_GRAD;
        self
    }

    /// The calls for which one comparison with the reference proves a kernel: the call's class, with whether gradients are
    /// wanted. Whether a graph is captured and how many threads there are makes no difference, a number counts only by whether it is at its default, and
    /// of lengths only which of them are equal and which is the longer one: that decides what causal attention means.
    pub fn proof_class(&self) -> Query {
        let schema = crate::catalog::Catalog::get().op(self.op()).schema();
        let mut class = self.class().with_threads(0);
        class.flags = self.flags & Self::REQUIRES_GRAD;
        for (word, param) in class.params.iter_mut().zip(schema.params) {
            if param.ty == ParamType::Int && param.role == ParamRole::Exact {
                let default = param.default.value().map(|value| Query::encode(param, value));
                if Some(*word) != default {
                    *word = 1;
                }
            }
        }
        let is_length = |dim: &crate::schema::Dim| dim.kind == crate::schema::DimKind::Seq && dim.derived.is_none();
        let mut lengths: Vec<i64> =
            schema.dims.iter().zip(self.dims).filter(|(dim, _)| is_length(dim)).map(|(_, size)| size).collect();
        lengths.sort_unstable();
        lengths.dedup();
        for ((to, from), dim) in class.dims.iter_mut().zip(self.dims).zip(schema.dims) {
            if is_length(dim) {
                *to = lengths.iter().position(|&length| length == from).unwrap_or(0) as i64;
            }
        }
        class
    }

    /// The word that stands for a parameter's value in the key.
    pub fn encode(param: &Param, value: ParamValue) -> u64 {
        match param.role {
            ParamRole::Ignored | ParamRole::Dim => 0,
            ParamRole::Presence => u64::from(value != ParamValue::None),
            ParamRole::Exact => match value {
                ParamValue::None => match param.ty {
                    ParamType::Int => NONE_INT,
                    ParamType::Float => NONE_FLOAT,
                    _ => 0,
                },
                ParamValue::Bool(b) => u64::from(b),
                ParamValue::Int(i) if param.ty == ParamType::Float => (i as f64).to_bits(),
                ParamValue::Int(i) => i as u64,
                // One zero, so that -0.0 and 0.0 are one key.
                ParamValue::Float(x) => (x + 0.0).to_bits(),
                ParamValue::Str(s) => s.code(),
            },
        }
    }

    /// A parameter as [`Query::encode`] gave it.
    pub fn param_word(&self, index: usize) -> u64 {
        self.params[index]
    }

    /// The value of an exact parameter, as the key holds it.
    pub fn param(&self, index: usize, param: &Param) -> ParamValue {
        let word = self.params[index];
        match param.ty {
            ParamType::Bool => ParamValue::Bool(word != 0),
            ParamType::Int if word == NONE_INT => ParamValue::None,
            ParamType::Int => ParamValue::Int(word as i64),
            ParamType::Float if word == NONE_FLOAT => ParamValue::None,
            ParamType::Float => ParamValue::Float(f64::from_bits(word)),
            ParamType::Choice(_) | ParamType::Name => Symbol::from_code(word).map_or(ParamValue::None, ParamValue::Str),
        }
    }

    /// Whether a [`ParamRole::Presence`] parameter was given.
    pub fn param_given(&self, index: usize) -> bool {
        self.params[index] != 0
    }
}

impl fmt::Debug for Query {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let op = crate::catalog::Catalog::get().op(self.op());
        write!(f, "{}(", op.id())?;
        for (dim, size) in op.schema().dims.iter().zip(self.dims) {
            write!(f, "{}={size} ", dim.name)?;
        }
        let tensors: Vec<TensorFacts> = (0..op.schema().inputs.len()).map(|i| self.tensor(i)).collect();
        write!(f, "{tensors:?})")
    }
}

#[cfg(test)]
mod tests {
    use lz_abi::DType;

    use super::*;
    use crate::layout::Layout;
    use crate::tensor_meta::TensorMeta;

    /// Queries are hashed and compared on the path of every call.
    #[test]
    fn a_query_fits_in_four_cache_lines() {
        assert!(size_of::<Query>() <= 256, "{} bytes", size_of::<Query>());
    }

    /// Every input counts: two queries that differ in the last of them are different, and lie in different places.
    #[test]
    fn the_last_input_counts_as_the_first_does() {
        let plain = Query::new(OpIx(0), DeviceIx(0), &Context::default());
        let facts = TensorFacts::new(&TensorMeta::new(DType::F32, &[2]), Layout::Strided, false);
        for at in 0..MAX_INPUTS {
            let mut with = plain;
            with.set_tensor(at, facts);
            assert_eq!((with.tensor(at), with.tensor((at + 1) % MAX_INPUTS)), (facts, TensorFacts::default()));
            assert_ne!(with, plain);
            assert_ne!(with.fingerprint(), plain.fingerprint());
        }
    }

    #[test]
    fn every_size_counts_in_a_fingerprint() {
        let (query, mut seen) =
            (Query::new(OpIx(3), DeviceIx(0), &Context::default()), std::collections::HashSet::new());
        for at in 0..MAX_DIMS {
            // Zero and small sizes beside each other, where a product could vanish.
            for size in [1, 2, 3, 8, 4096, 1 << 40] {
                let mut dims = [0; MAX_DIMS];
                dims[at] = size;
                let other = query.with_dims(dims);
                assert!(seen.insert(other.fingerprint()), "{dims:?}");
                assert_eq!(other.fingerprint_with(query.fingerprint_but_sizes()), other.fingerprint());
            }
        }
    }
}
