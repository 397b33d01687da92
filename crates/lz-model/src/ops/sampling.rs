//! Sampling from logits, and speculative verification.

use lz_abi::{DType, DTypeSet};

use crate::param::{Param, ParamDefault, ParamType};
use crate::schema::*;

const ROWS: Dim = Dim::bucketed("rows", DimKind::Batch).also(&["batch", "batch_size"]);
const VOCAB: Dim = Dim::bucketed("vocab", DimKind::Other).also(&["vocab_size"]);
const LOGITS: Input = Input::new("logits", "...rows vocab", DTypeSet::FLOATS);
const UNIFORM: Input = Input::new("uniform", "...rows", DTypeSet::of(&[DType::F32, DType::F64])).optional();
const IDS: Output = Output::Fresh { name: "ids", shape: "...rows", dtype: OutputDType::Fixed(DType::I64) };
const VOCAB_NOT_EMPTY: Check = Check {
    holds: "vocab >= 1",
    code: CheckCode::Constraint,
    message: "the vocabulary is empty",
    hint: "pass logits with at least one column",
};

const UNIFORM_RANGE: Edge = Edge {
    name: "uniform_range",
    when: "a uniform number is NaN or outside [0, 1)",
    gives: "an error on the CPU (BAD_DATA)",
    except: "other devices are not waited for: a number below 0 counts as 0, and 1 or more or NaN draws the last token \
that can be drawn",
};

/// Top-k sampling.
pub static TOPK: OpSchema = OpSchema {
    id: "sampling.topk",
    family: Family::Sampling,
    kind: OpKind::Sampling,
    also: &["sample_topk"],
    summary: "draws one of the k most likely tokens of each row",
    semantics: "keep the k largest logits (the lower index first among equals), softmax over them, and take the first \
kept token, by descending logit, at which the cumulative probability exceeds the row's uniform number. A NaN among the \
logits gives id -1.",
    dims: &[ROWS, VOCAB, Dim::bucketed("k", DimKind::Other)],
    inputs: &[LOGITS, UNIFORM],
    params: &[Param::dim("k", "how many tokens to keep; more than there are keeps all"), Param::seed()],
    outputs: &[IDS],
    checks: &[
        VOCAB_NOT_EMPTY,
        Check {
            holds: "k >= 1",
            code: CheckCode::Constraint,
            message: "k is smaller than 1",
            hint: "keep at least one token",
        },
    ],
    tolerances: Tolerances::Exact,
    edges: &[UNIFORM_RANGE],
    flops: "6 * rows * vocab",
    bytes: "rows * vocab * dtype_bits / 8",
    ..BLANK
};

/// Nucleus sampling.
pub static TOPP: OpSchema = OpSchema {
    id: "sampling.topp",
    family: Family::Sampling,
    kind: OpKind::Sampling,
    also: &["sample_topp"],
    summary: "draws from the smallest set of tokens whose probability reaches p",
    semantics: "softmax, sort descending (the lower index first among equals), keep tokens until their cumulative \
probability reaches p (the one that reaches it included, always at least one), renormalize, and take the first at which \
the cumulative probability exceeds the row's uniform number. A NaN among the logits gives id -1.",
    dims: &[ROWS, VOCAB],
    inputs: &[LOGITS, UNIFORM],
    params: &[
        Param::new("p", ParamType::Float, ParamDefault::Required, "probability to keep, in (0, 1]").universal(),
        Param::seed(),
    ],
    outputs: &[IDS],
    checks: &[
        VOCAB_NOT_EMPTY,
        Check {
            holds: "p > 0.0 and p <= 1.0",
            code: CheckCode::Constraint,
            message: "p is outside (0, 1]",
            hint: "p is a probability: 1 keeps everything",
        },
    ],
    tolerances: Tolerances::Exact,
    edges: &[UNIFORM_RANGE],
    flops: "20 * rows * vocab",
    bytes: "rows * vocab * dtype_bits / 8",
    ..BLANK
};

/// Speculative verification.
pub static SPECULATIVE: OpSchema = OpSchema {
    id: "sampling.speculative",
    family: Family::Sampling,
    kind: OpKind::Sampling,
    also: &["speculative_verify"],
    summary: "accepts or rejects drafted tokens so that the result is distributed as the target model's",
    semantics: "draft token t at step i is accepted when uniform[i] * draft[i, t] < target[i, t]; at the first rejection \
a token is drawn from max(target - draft, 0) normalized (from target itself where that is all zero), after the last \
acceptance one from the extra target row, in both cases as the first token, in vocabulary order, whose cumulative \
probability exceeds uniform[draft]. ids holds the accepted tokens, the drawn one, then -1; accepted counts the accepted ones.",
    dims: &[
        Dim::bucketed("batch", DimKind::Batch).also(&["batch_size", "rows"]),
        Dim::bucketed("draft", DimKind::Other),
        VOCAB,
    ],
    inputs: &[
        Input::new("draft_ids", "batch draft", DTypeSet::INDICES),
        Input::new("draft_probs", "batch draft vocab", DTypeSet::FLOATS),
        Input::same("target_probs", "batch draft+1 vocab", "draft_probs"),
        Input::new("uniform", "batch draft+1", DTypeSet::of(&[DType::F32, DType::F64])).optional(),
    ],
    params: &[Param::seed()],
    outputs: &[
        Output::Fresh { name: "ids", shape: "batch draft+1", dtype: OutputDType::Fixed(DType::I64) },
        Output::Fresh { name: "accepted", shape: "batch", dtype: OutputDType::Fixed(DType::I64) },
    ],
    checks: &[VOCAB_NOT_EMPTY],
    tolerances: Tolerances::Exact,
    edges: &[UNIFORM_RANGE],
    flops: "4 * batch * draft * vocab",
    bytes: "batch * (2 * draft + 1) * vocab * dtype_bits / 8",
    ..BLANK
};
