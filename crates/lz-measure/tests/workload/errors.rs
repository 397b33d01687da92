//! Every error can happen, says what was wrong, and what to do.

use lz_measure::workload::{Grid, WorkloadError, from_shapes};
use lz_model::{CallError, DType, Layout};

fn grid(op: &str) -> Grid {
    Grid::new(op, DType::F16)
}

#[test]
fn every_error_can_happen_and_says_what_was_wrong() {
    let norm = || grid("rms_norm").dim("rows", [1]).dim("hidden", [64]);
    let many = || grid("rms_norm").dim("rows", 1..1000).dim("hidden", 1..1000);
    let shapes = |op: &str, shape: &[i64]| from_shapes(op, DType::F16, None, &[shape.to_vec()]).unwrap_err();
    let failed = |grid: Grid| grid.calls().unwrap_err();
    let cases: Vec<(WorkloadError, &str)> = vec![
        (
            failed(Grid::new("rms_norm", DType::I32).dim("rows", [1]).dim("hidden", [4])),
            "'rms_norm' cannot be in int32",
        ),
        (failed(grid("tokenize")), "'tokenize' takes no tensors"),
        (failed(norm().dim("heads", [1])), "'rms_norm' has no dimension 'heads'; it has rows, hidden"),
        (
            failed(grid("attention").dim("head_dims", [64]).dim("head_dim", [64])),
            "'head_dim' of 'attention' was given twice",
        ),
        (failed(grid("rms_norm").dim("rows", [1])), "'rms_norm' needs a size for 'hidden'"),
        (failed(norm().dim("tokens", [])), "the list 'tokens' is empty"),
        (from_shapes("rms_norm", DType::F16, None, &[]).unwrap_err(), "the list 'shapes' is empty"),
        (failed(grid("rms_norm").dim("rows", [4, -3]).dim("hidden", [64])), "'rows' is -3; a size is between 1 and"),
        (shapes("rms_norm", &[3, 0]), "'a size of [3, 0]' is 0"),
        (
            failed(grid("attention.gqa.decode.paged").dim("max_context", [1000])),
            "'seq_k' of 'attention.gqa.decode.paged' was asked to be 1000, but with the other sizes it is 1008",
        ),
        (
            failed(grid("rms_norm").dim("rows", [1 << 30]).dim("hidden", [1 << 20])),
            "'input' would be [1073741824, 1048576]",
        ),
        (failed(many()), "the lists of sizes make 998001 calls; 100000 is the most"),
        (
            shapes("attention", &[1, 2, 3]),
            "a shape of 'attention' is (batch, seq_q, heads, head_dim) or (batch, seq_q, heads, kv_heads, head_dim)",
        ),
        (shapes("linear", &[1]), "a shape of 'linear' is (...rows, in_features, out_features); [1] is none"),
        (
            failed(grid("attention.gqa.decode").dim("seq_lens", [512]).dim("kv_len", [512])),
            "is not 'attention.gqa.decode', which is for heads != kv_heads and seq_q == 1",
        ),
        (
            failed(grid("attention").dim("seq_len", [8]).dim("heads", [6]).dim("kv_heads", [4])),
            "not a multiple of the number of key/value heads",
        ),
        (failed(norm().param("epsilon", 1.0)), "takes no parameter 'epsilon'"),
        (failed(grid("attention.full").dim("seq_len", [8]).param("causal", true)), "'causal' is true"),
        (failed(norm().layout(Layout::Bshd)), "has no layout BSHD"),
        (failed(grid("rmsnorm")), "unknown operation 'rmsnorm'; did you mean"),
    ];
    let mut kinds = std::collections::BTreeSet::new();
    for (error, message) in &cases {
        assert!(error.to_string().contains(message), "{error}\n{message}");
        assert!(!error.hint().is_empty(), "{error}");
        kinds.insert(kind(error));
    }
    assert_eq!(kinds.into_iter().collect::<Vec<_>>(), (0..KINDS).collect::<Vec<_>>(), "an error never happens");
    let Some((WorkloadError::Call { source, .. }, _)) =
        cases.iter().find(|(error, _)| error.to_string().contains("multiple of the number"))
    else {
        panic!()
    };
    assert!(matches!(**source, CallError::Check { .. }));
}

/// How many kinds of errors there are.
const KINDS: usize = 14;

fn kind(error: &WorkloadError) -> usize {
    use WorkloadError::*;
    match error {
        WrongDType { .. } => 0,
        NoTensors { .. } => 1,
        UnknownDim { .. } => 2,
        DimTwice { .. } => 3,
        MissingDim { .. } => 4,
        Empty { .. } => 5,
        BadSize { .. } => 6,
        OtherSize { .. } => 7,
        TooLarge { .. } => 8,
        TooMany { .. } => 9,
        WrongShape { .. } => 10,
        AnotherOp { .. } => 11,
        Call { .. } => 12,
        Op(_) => 13,
    }
}
