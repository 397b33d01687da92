//! Grids, shapes and features, for every operation of the catalog.

use lz_measure::workload::{FORMS, Grid, WorkloadError, features, from_shapes};
use lz_model::schema::DimKey;
use lz_model::{CallSpec, Catalog, DType, Layout, Op};
use proptest::prelude::*;
use proptest::test_runner::TestRunner;

use super::{bound, dim};

/// Every operation with tensors.
fn ops() -> impl Iterator<Item = &'static Op> {
    Catalog::get().ops().iter().filter(|op| !op.schema().inputs.is_empty())
}

fn dtype_for(op: &Op) -> DType {
    if op.id() == "dequantize" { DType::I8 } else { DType::F16 }
}

/// Sizes for the dimensions that have no usual one.
fn needed(op: &Op, grid: Grid) -> Grid {
    let needed = [
        ("rows", 24),
        ("hidden", 96),
        ("cols", 96),
        ("width", 96),
        ("vocab", 500),
        ("in_features", 64),
        ("out_features", 80),
        ("intermediate", 128),
        ("tokens", 40),
        ("moves", 6),
        ("seq", 48),
    ];
    let mut grid = grid;
    for (name, size) in needed {
        if op.schema().dims.iter().any(|d| d.name == name) {
            grid = grid.dim(name, [size]);
        }
    }
    let length = match op.id() {
        id if id.contains("decode") => "seq_k",
        _ => "seq_q",
    };
    if op.schema().dims.iter().any(|d| d.name == length) { grid.dim(length, [128]) } else { grid }
}

#[test]
fn every_operation_has_a_call_of_usual_sizes_once_its_own_are_given() {
    for op in ops() {
        let calls = needed(op, Grid::new(op.id(), dtype_for(op))).calls().unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(calls.len(), 1, "{}", op.id());
        assert_eq!(bound(&calls[0]).0.id(), op.id());
    }
}

#[test]
fn an_operation_without_the_sizes_it_needs_asks_for_them() {
    for op in ops() {
        match Grid::new(op.id(), dtype_for(op)).calls() {
            Err(WorkloadError::MissingDim { dim, .. }) => {
                let wanted = match op.id() {
                    "kv_cache.compact" => &["num_blocks"][..],
                    // A parameter as well as a size: parameters are looked at first.
                    "mlp.linear.packed" | "mlp.linear.quantized" => &["out_features"],
                    _ => &["rows", "seq_q", "seq_k", "seq", "tokens", "vocab"],
                };
                assert!(op.dim_index(dim).is_some() && wanted.contains(&dim), "{}: {dim}", op.id());
            }
            other => panic!("{}: {other:?}", op.id()),
        }
    }
}

#[test]
fn the_grid_of_the_specification() {
    let (seqs, batches) = ([512, 2048, 8192], [1, 8, 32]);
    let grid = Grid::new("attention.causal", DType::Bf16).dim("head_dim", [128]);
    let calls = grid.dim("seq_lens", seqs).dim("batch_sizes", batches).calls().unwrap();
    let has = |c: &CallSpec| (dim(c, "batch"), dim(c, "seq_q"), dim(c, "seq_k"), dim(c, "heads"), dim(c, "kv_heads"));
    let wanted: Vec<_> = seqs.iter().flat_map(|s| batches.map(|b| (b, *s, *s, 32, 32))).collect();
    assert_eq!(calls.iter().map(has).collect::<Vec<_>>(), wanted);
    assert!(calls.iter().all(|c| c.op == "attention.causal" && c.layout == Some(Layout::Bshd)));
}

#[test]
fn dimensions_go_by_all_their_names_and_plurals() {
    for names in
        [["rows", "hidden"], ["tokens", "hidden_size"], ["batch_sizes", "hiddens"], ["batches", "hidden_sizes"]]
    {
        let calls = Grid::new("rms_norm", DType::F32).dim(names[0], [7]).dim(names[1], [64]).calls().unwrap();
        assert_eq!(calls[0].tensors["input"].shape, [7, 64]);
        assert_eq!(calls[0].tensors["weight"].shape, [64]);
    }
    let linear = Grid::new("linear", DType::F32).dim("rows", [3]).dim("k", [64]).dim("n", [32]).calls().unwrap();
    assert_eq!(linear[0].tensors["weight"].shape, [32, 64]);
}

#[test]
fn a_context_alone_is_decoding() {
    for (name, op) in [
        ("attention", "attention.gqa.decode"),
        ("attention.causal", "attention.gqa.decode"),
        ("attention.gqa.decode", "attention.gqa.decode"),
        ("attention.gqa.prefill", "attention.gqa.prefill"),
        ("attention.cross", "attention.cross.decode"),
        ("attention.paged", "attention.gqa.decode.paged"),
    ] {
        let grid = Grid::new(name, DType::F16).dim("seq_len_k", [640]).dim("heads", [16]).dim("kv_heads", [4]);
        let calls = grid.calls().unwrap();
        assert_eq!((bound(&calls[0]).0.id(), dim(&calls[0], "seq_k")), (op, 640), "{name}");
    }
    let packed = Grid::new("attention.paged", DType::F16).dim("seq_lens", [100]).dim("batch", [3]).calls().unwrap();
    assert_eq!(bound(&packed[0]).0.id(), "attention.standard.prefill.paged");
    // 34 tokens each, in pages of 16.
    assert_eq!((dim(&packed[0], "max_blocks"), dim(&packed[0], "num_blocks")), (3, 9));
}

/// Sizes that may be none can be asked for, and none is not written down.
#[test]
fn calls_promise_what_is_asked_for() {
    let grid = Grid::new("attention.gqa.decode.paged", DType::Bf16).dim("max_context", [1024]);
    let plain = grid.clone().calls().unwrap();
    assert!(!plain[0].params.contains_key("shared_prefix"), "{}", plain[0]);
    let calls = grid.clone().dim("shared_prefix", [0, 512]).calls().unwrap();
    assert_eq!(calls[0], plain[0]);
    assert_eq!(calls[1].params["shared_prefix"], 512.into());
    assert_eq!(grid.clone().param("shared_prefix", 512).calls().unwrap()[0], calls[1]);
    assert!(grid.clone().dim("shared_prefix", [2048]).calls().is_err());
    assert!(grid.clone().dim("shared_prefix", [-1]).calls().is_err());
    assert!(grid.dim("batch", [0]).calls().is_err());
}

#[test]
fn layouts_and_parameters_are_those_asked_for() {
    let grid = Grid::new("attention", DType::F16).dim("seq_len", [100]).dim("heads", [4]);
    let calls = grid.clone().layout(Layout::Bhsd).param("causal", false).param("softcap", 30.0).calls().unwrap();
    assert_eq!((&calls[0].tensors["key"].shape[..], calls[0].layout), (&[1, 4, 100, 128][..], Some(Layout::Bhsd)));
    assert_eq!(calls[0].params.len(), 2);
    assert!(matches!(grid.layout(Layout::Hnd).calls(), Err(WorkloadError::Op(_))));
    // A parameter that is a size.
    let topk = Grid::new("sample_topk", DType::F32).dim("rows", [2]).dim("vocab", [100]);
    let k = |grid: &Grid| dim(&grid.calls().unwrap()[0], "k");
    assert_eq!((k(&topk), k(&topk.clone().param("k", 7)), k(&topk.clone().dim("k", [9]))), (50, 7, 9));
    // Several sequences show in their bounds only.
    let mla = Grid::new("attention.mla.prefill", DType::Bf16).dim("seq_lens", [64]).dim("batch", [1, 4]);
    let calls = mla.calls().unwrap();
    assert!(!calls[0].tensors.contains_key("qo_indptr"));
    assert_eq!((dim(&calls[1], "batch"), &calls[1].tensors["kv_indptr"].shape[..]), (4, &[5][..]));
    let blocks = Grid::new("dequantize", DType::I4).dim("rows", [8]).dim("cols", [100]);
    let calls = blocks.param("granularity", "blockwise").param("group_size", 32).calls().unwrap();
    assert_eq!((&calls[0].tensors["scales"].shape[..], calls[0].tensors["scales"].dtype), (&[8, 4][..], DType::F32));
}

#[test]
fn a_size_that_repeats_makes_one_call() {
    let grid = Grid::new("gelu", DType::F32).dim("rows", [4, 4, 8]).dim("width", [16, 16]);
    assert_eq!(grid.calls().unwrap().len(), 2);
}

#[test]
fn every_operation_and_alias_of_dense_attention_has_a_form() {
    for op in ops() {
        let forms: Vec<_> = FORMS.iter().filter(|(name, _)| *name == op.id()).collect();
        assert_eq!(forms.len(), 1, "{}", op.id());
        for form in forms[0].1 {
            let names = form.split_whitespace().map(|axis| axis.trim_start_matches("..."));
            assert!(names.clone().all(|n| op.schema().dims.iter().any(|d| d.name == n)), "{}: {form}", op.id());
            // Distinct sizes, so that none can stand for another; powers of two, so that blocks fit.
            let shape: Vec<i64> = names.clone().enumerate().map(|(i, n)| size(op, n, i)).collect();
            let calls = from_shapes(op.id(), dtype_for(op), None, std::slice::from_ref(&shape))
                .unwrap_or_else(|e| panic!("{e}"));
            assert_eq!(bound(&calls[0]).0.id(), op.id());
            let has: Vec<i64> = names.map(|n| dim(&calls[0], n)).collect();
            assert_eq!(has, shape, "{}: {form}", op.id());
        }
    }
    for (name, _) in FORMS {
        assert!(Catalog::get().find(name).is_ok(), "{name}");
    }
}

fn size(op: &Op, name: &str, index: usize) -> i64 {
    match name {
        "heads" => 64,
        "kv_heads" if op.id().contains("standard") => 64,
        "kv_heads" => 16,
        _ => 128 << index,
    }
}

#[test]
fn shapes_as_people_write_them() {
    let shape = |op: &str, shape: &[i64]| from_shapes(op, DType::F16, None, &[shape.to_vec()]).unwrap().remove(0);
    // The example of the specification.
    let call = shape("attention.causal", &[1, 1024, 16, 128]);
    assert_eq!(call.tensors["query"].shape, [1, 1024, 16, 128]);
    assert_eq!((call.layout, bound(&call).0.id()), (Some(Layout::Bshd), "attention.standard.prefill"));
    let call = shape("attention", &[2, 1024, 32, 8, 128]);
    assert_eq!(
        (&call.tensors["value"].shape[..], bound(&call).0.id()),
        (&[2, 1024, 8, 128][..], "attention.gqa.prefill")
    );
    let call = shape("attention.gqa.decode", &[2, 1024, 32, 128]);
    assert_eq!((dim(&call, "seq_q"), dim(&call, "seq_k"), dim(&call, "kv_heads")), (1, 1024, 8));
    assert_eq!(shape("rms_norm", &[2, 3, 64]).tensors["input"].shape, [2, 3, 64]);
    assert_eq!(shape("rms_norm", &[64]).tensors["input"].shape, [64]);
    let call = shape("linear", &[2, 3, 64, 96]);
    assert_eq!((&call.tensors["input"].shape[..], &call.tensors["weight"].shape[..]), (&[2, 3, 64][..], &[96, 64][..]));
    let call = shape("embedding", &[5, 1000, 64]);
    assert_eq!((&call.tensors["indices"].shape[..], call.tensors["indices"].dtype), (&[5][..], DType::I64));
    assert_eq!(shape("sample_topp", &[2, 1000]).tensors["logits"].shape, [2, 1000]);
    // The same as a grid of one.
    let grid = Grid::new("silu_mul", DType::F16).dim("rows", [6]).dim("width", [8]).calls().unwrap();
    assert_eq!(shape("silu_mul", &[6, 8]), grid[0]);
}

#[test]
fn features_group_what_can_be_interpolated() {
    let attention = |batch: i64, seq: i64, heads: i64| {
        let calls = from_shapes("attention.causal", DType::F16, None, &[vec![batch, seq, heads, 64]]).unwrap();
        features(&calls[0]).unwrap()
    };
    let (a, b) = (attention(1, 256, 8), attention(4, 1024, 8));
    assert_eq!(a.group, b.group);
    assert_eq!((a.log2, b.log2), (vec![0.0, 8.0, 8.0], vec![2.0, 10.0, 10.0]));
    assert_eq!(b.flops, (4 * 8 * (1024 * 1025 / 2) * 4 * 64_i64) as f64);
    assert_eq!(b.bytes, (4 * 4 * 1024 * 8 * 64 * 2_i64) as f64);
    let base = CallSpec::new("attention").tensor("query", DType::F16, &[1, 256, 8, 64]);
    let base = base.tensor("key", DType::F16, &[1, 256, 8, 64]).tensor("value", DType::F16, &[1, 256, 8, 64]);
    let base = base.layout(Layout::Bshd);
    let mut strided = base.clone();
    strided.tensors.get_mut("query").unwrap().strides = Some(vec![256 * 1024, 1024, 64, 1]);
    let others = [
        attention(1, 256, 16),
        attention(1, 1, 8),
        features(&base.clone().param("causal", false)).unwrap(),
        features(&base.clone().param("scale", 0.5)).unwrap(),
        features(&base.clone().param("causal", false).tensor("attn_mask", DType::Bool, &[256, 256])).unwrap(),
        features(&strided).unwrap(),
    ];
    assert_eq!(features(&base).unwrap().group, attention(1, 256, 8).group);
    for other in others {
        assert_ne!(other.group, attention(1, 256, 8).group);
    }
    assert!(features(&CallSpec::new("attention")).is_err());
}

#[test]
fn features_have_one_coordinate_for_each_bucketed_dimension() {
    for op in ops() {
        let call = needed(op, Grid::new(op.id(), dtype_for(op))).calls().unwrap().remove(0);
        let features = features(&call).unwrap();
        let bucketed = op.schema().dims.iter().filter(|d| matches!(d.key, DimKey::Bucketed(_))).count();
        assert_eq!(features.log2.len(), bucketed, "{}", op.id());
        assert!(features.log2.iter().all(|x| x.is_finite() && *x >= 0.0));
        assert!(features.bytes > 0.0 && features.flops >= 0.0, "{}", op.id());
    }
}

fn likely_size() -> impl Strategy<Value = i64> {
    prop_oneof![3 => 1i64..300, 2 => prop::sample::select(vec![1, 16, 64, 128, 256, 4096])]
}

fn any_size() -> impl Strategy<Value = i64> {
    let odd = prop::sample::select(vec![0, -1, i64::MIN, i64::MAX, 1 << 40, (1 << 40) + 1, 1 << 62]);
    prop_oneof![8 => likely_size(), 1 => odd]
}

fn any_sizes() -> impl Strategy<Value = Option<Vec<i64>>> {
    prop_oneof![
        10 => Just(None),
        10 => prop::collection::vec(likely_size(), 1..3).prop_map(Some),
        1 => prop::collection::vec(any_size(), 0..3).prop_map(Some),
    ]
}

#[test]
fn any_sizes_of_any_operation_make_calls_that_have_them_or_are_refused() {
    let all: Vec<_> = ops().collect();
    let sizes = prop::collection::vec(any_sizes(), 12);
    let layout = prop::option::weighted(0.1, prop::sample::select(Layout::ALL.to_vec()));
    let made = std::cell::Cell::new(0);
    let run = |(which, sizes, layout): (prop::sample::Index, Vec<Option<Vec<i64>>>, Option<Layout>)| {
        let op = all[which.index(all.len())];
        let named = op.schema().dims.iter().zip(sizes);
        let given: Vec<(&str, Vec<i64>)> = named.filter_map(|(dim, sizes)| Some((dim.name, sizes?))).collect();
        let grid = given.iter().fold(Grid::new(op.id(), dtype_for(op)), |g, (name, sizes)| g.dim(*name, sizes.clone()));
        let Ok(calls) = layout.into_iter().fold(grid, Grid::layout).calls() else { return Ok(()) };
        made.set(made.get() + 1);
        let mut wanted: Vec<Vec<i64>> = vec![vec![]];
        for (_, sizes) in &given {
            prop_assert!(sizes.iter().all(|n| *n > 0) && !sizes.is_empty());
            wanted = wanted.iter().flat_map(|w| sizes.iter().map(|n| [&w[..], &[*n]].concat())).collect();
        }
        let has = |call: &CallSpec| -> Vec<i64> { given.iter().map(|(name, _)| dim(call, name)).collect() };
        let mut had: Vec<Vec<i64>> = calls.iter().map(has).collect();
        wanted.sort_unstable();
        wanted.dedup();
        had.sort_unstable();
        prop_assert_eq!(had, wanted);
        for call in &calls {
            prop_assert_eq!(bound(call).0.id(), op.id());
            prop_assert!(features(call).is_ok());
        }
        Ok(())
    };
    let mut runner = TestRunner::new(ProptestConfig::with_cases(1500));
    runner.run(&(any::<prop::sample::Index>(), sizes, layout), run).unwrap();
    assert!(made.get() > 200, "only {} of the grids made calls", made.get());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(600))]

    #[test]
    fn any_shape_of_any_name_makes_a_call_or_is_refused(
        which in any::<prop::sample::Index>(),
        shape in prop::collection::vec(any_size(), 0..7),
        dtype in prop::sample::select(DType::all().collect::<Vec<_>>()),
    ) {
        let names: Vec<&str> = FORMS.iter().map(|(name, _)| *name).chain(["tokenize", "attention.mla", "nothing"]).collect();
        let op = names[which.index(names.len())];
        match from_shapes(op, dtype, None, std::slice::from_ref(&shape)) {
            Ok(calls) => {
                prop_assert!(shape.iter().all(|n| *n > 0));
                bound(&calls[0]);
            }
            Err(error) => prop_assert!(!error.to_string().is_empty() && !error.hint().is_empty()),
        }
    }
}
