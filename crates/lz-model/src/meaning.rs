//! What the numbers of a tensor mean, and so which of them make a valid call.

use crate::catalog::Op;
use crate::query::Query;
use crate::schema::Input;

/// What the numbers of a tensor mean. Sizes in it are those of one call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Meaning {
    /// Plain data, around zero.
    Data,
    /// Positions in something this long.
    Index(i64),
    /// Positions in something this long, of which all rows begin with the same ones, this many.
    Alike(i64, i64),
    /// Distinct positions, in order, around something this long.
    Counted(i64),
    /// Lengths of more than half of this.
    Length(i64),
    /// Lengths of more than half of the first, and of the second at least.
    LengthFrom(i64, i64),
    /// Ascending from zero to this.
    Bounds(i64),
    /// Parts of this, along the last axis.
    Parts(i64),
    /// Probabilities that sum to one along the last axis.
    Probabilities,
    /// Uniform in [0, 1).
    Uniform,
    /// Small positive numbers.
    Positive,
    /// Truth values, mostly true; as numbers, something to add to scores.
    Mask,
    /// Nothing is known, so zeros.
    Unknown,
}

impl Meaning {
    /// The meaning of an input of a call.
    pub fn of(op: &Op, input: &Input, query: &Query) -> Meaning {
        let found = MEANINGS.iter().find(|(name, _)| *name == input.name);
        found.map_or(Meaning::Data, |(_, rule)| rule(&|limit| size(op, query, limit).unwrap_or(0)))
    }

    /// Its name.
    pub const fn name(self) -> &'static str {
        match self {
            Meaning::Data => "data",
            Meaning::Index(_) => "index",
            Meaning::Alike(..) => "alike",
            Meaning::Counted(_) => "counted",
            Meaning::Length(_) => "length",
            Meaning::LengthFrom(..) => "length_from",
            Meaning::Bounds(_) => "bounds",
            Meaning::Parts(_) => "parts",
            Meaning::Probabilities => "probabilities",
            Meaning::Uniform => "uniform",
            Meaning::Positive => "positive",
            Meaning::Mask => "mask",
            Meaning::Unknown => "unknown",
        }
    }

    /// The size that bounds it; 0 where none does.
    pub const fn limit(self) -> i64 {
        match self {
            Meaning::Index(n) | Meaning::Counted(n) | Meaning::Length(n) | Meaning::Bounds(n) | Meaning::Parts(n) => n,
            Meaning::Alike(n, _) | Meaning::LengthFrom(n, _) => n,
            _ => 0,
        }
    }

    /// The other size it has; 0 where it has none.
    pub const fn least(self) -> i64 {
        match self {
            Meaning::Alike(_, n) | Meaning::LengthFrom(_, n) => n,
            _ => 0,
        }
    }
}

/// The sizes that bound indices, as products and quotients of dimensions.
enum Limit {
    Dim(&'static str),
    Product(&'static str, &'static str),
    Quotient(&'static str, &'static str),
    /// The first of the two whose dimensions the operation has.
    Either(&'static Limit, &'static Limit),
}

fn size(op: &Op, query: &Query, limit: &Limit) -> Option<i64> {
    let dim = |name| op.dim_index(name).map(|i| query.dim(i));
    match limit {
        Limit::Dim(name) => dim(name),
        Limit::Product(a, b) => Some(dim(a)?.saturating_mul(dim(b)?)),
        Limit::Quotient(a, b) => Some(dim(a)? / dim(b)?.max(1)),
        Limit::Either(first, second) => size(op, query, first).or_else(|| size(op, query, second)),
    }
}

type Rule = fn(&dyn Fn(&Limit) -> i64) -> Meaning;

/// What inputs mean, by name; names mean the same in every operation that has them.
const MEANINGS: &[(&str, Rule)] = &[
    ("indices", |n| Meaning::Index(n(&Limit::Either(&Limit::Dim("vocab"), &Limit::Quotient("seq_k", "block_cols"))))),
    ("draft_ids", |n| Meaning::Index(n(&Limit::Dim("vocab")))),
    ("positions", |n| Meaning::Index(n(&Limit::Dim("table")))),
    ("block_tables", |n| match n(&Limit::Quotient("shared_prefix", "block_size")) {
        0 => Meaning::Index(n(&Limit::Dim("num_blocks"))),
        alike => Meaning::Alike(n(&Limit::Dim("num_blocks")), alike),
    }),
    ("moves", |n| Meaning::Counted(n(&Limit::Dim("num_blocks")))),
    ("slot_mapping", |n| Meaning::Counted(n(&Limit::Product("num_blocks", "block_size")))),
    ("context_lens", |n| {
        let most = n(&Limit::Product("max_blocks", "block_size"));
        match n(&Limit::Dim("shared_prefix")) {
            0 => Meaning::Length(most),
            // Queries stand behind what is shared, as they do when a prompt is kept for them.
            shared => {
                Meaning::LengthFrom(most, most.min(shared.saturating_add(n(&Limit::Quotient("seq_q", "batch")).max(1))))
            }
        }
    }),
    ("cu_seqlens_q", |n| Meaning::Bounds(n(&Limit::Dim("seq_q")))),
    ("cu_seqlens_k", |n| Meaning::Bounds(n(&Limit::Dim("seq_k")))),
    ("qo_indptr", |n| Meaning::Bounds(n(&Limit::Dim("seq_q")))),
    ("kv_indptr", |n| Meaning::Bounds(n(&Limit::Dim("seq_k")))),
    ("indptr", |n| Meaning::Bounds(n(&Limit::Dim("nnz")))),
    ("block_row_sizes", |n| Meaning::Parts(n(&Limit::Dim("seq_q")))),
    ("block_col_sizes", |n| Meaning::Parts(n(&Limit::Dim("seq_k")))),
    ("draft_probs", |_| Meaning::Probabilities),
    ("target_probs", |_| Meaning::Probabilities),
    ("uniform", |_| Meaning::Uniform),
    ("scale", |_| Meaning::Positive),
    ("scales", |_| Meaning::Positive),
    ("slopes", |_| Meaning::Positive),
    ("alibi_slopes", |_| Meaning::Positive),
    ("attn_mask", |_| Meaning::Mask),
    ("block_mask", |_| Meaning::Mask),
    ("zero_points", |_| Meaning::Unknown),
];
