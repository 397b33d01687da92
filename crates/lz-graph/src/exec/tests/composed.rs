//! Operations that are made of several calls, and the terms under which kernels are chosen.

use std::sync::Arc;

use lz_cpu::primitives::InstructionSet;
use lz_model::{CpuIsa, NamedCall};

use super::*;
use crate::exec::binding::{Packs, Ranking};
use crate::exec::kernel::Kernel;
use crate::exec::profile::profile;

/// A graph of one node, with a sum before it so that it reads the arena.
pub(super) fn single(op: &str, attrs: &str, dtype: DType, shapes: &[&[i64]]) -> (Graph, Vec<Tensor>) {
    let names: Vec<String> = (0..shapes.len()).map(|at| format!("x{at}")).collect();
    let input =
        |(name, shape): (&String, &&[i64])| format!(r#"{{"name": "{name}", "dtype": "{dtype}", "shape": {shape:?}}}"#);
    let inputs: Vec<String> = names.iter().zip(shapes).map(input).collect();
    let read: Vec<String> = std::iter::once("s".to_owned()).chain(names[1..].iter().cloned()).collect();
    let text = format!(
        r#"{{"name": "one", "inputs": [{}], "nodes": [
          {{"op": "binary", "attrs": {{"kind": "add"}}, "inputs": ["x0", "x0"], "output": "s"}},
          {{"op": "{op}", "attrs": {attrs}, "inputs": {read:?}, "output": "y"}}], "outputs": ["y"]}}"#,
        inputs.join(", ")
    );
    let tensors = shapes.iter().enumerate().map(|(at, shape)| drawn(dtype, shape, 5 + at as u64)).collect();
    (graph(&text), tensors)
}

/// The kernel of the only node, which must not be its reference.
fn fast(op: &str, attrs: &str, dtype: DType, shapes: &[&[i64]]) -> String {
    let (graph, tensors) = single(op, attrs, dtype, shapes);
    let tolerance = match dtype {
        DType::Bf16 => 2e-2,
        DType::F16 => 2e-3,
        DType::F64 => 1e-12,
        _ => 2e-6,
    };
    let compiled = agrees(&graph, &tensors, tolerance);
    assert_eq!(compiled.failed(), 0, "{:?}", compiled.failures());
    let used = kernels(&compiled).pop().unwrap();
    assert!(!used.contains("reference") && !used.contains(".ref."), "{op} {attrs} of {dtype}{shapes:?}: {used}");
    used
}

#[test]
fn norms_of_groups_and_of_several_axes_are_layer_norms_of_rows() {
    for dtype in [DType::F64, DType::F32, DType::F16, DType::Bf16] {
        for (groups, shape) in [(2, &[2, 6, 3, 5][..]), (1, &[1, 4]), (4, &[3, 4, 7]), (3, &[2, 6, 2, 2, 3])] {
            let attrs = format!(r#"{{"groups": {groups}, "eps": 1e-5}}"#);
            let channels = [shape[1]];
            fast("group_norm", &attrs, dtype, &[shape]);
            fast("group_norm", &attrs, dtype, &[shape, &channels]);
            fast("group_norm", &attrs, dtype, &[shape, &channels, &channels]);
        }
        for shape in [&[2, 3, 5][..], &[3, 5], &[2, 2, 3, 5]] {
            fast("layer_norm", r#"{"axes": 2, "eps": 1e-5}"#, dtype, &[shape]);
            fast("layer_norm", r#"{"axes": 2, "eps": 1e-5}"#, dtype, &[shape, &[3, 5], &[3, 5]]);
        }
    }
}

/// Native kernels have conditions on sizes where torch's are faster. There are none of torch's here.
#[test]
fn large_norms_have_kernels() {
    for dtype in [DType::F32, DType::F16] {
        let used = fast("layer_norm", r#"{"eps": 1e-5}"#, dtype, &[&[800, 768]]);
        assert!(used.starts_with("lz_cpu.layer_norm"), "{used}");
        fast("gated", r#"{"kind": "silu_mul"}"#, dtype, &[&[40, 768], &[40, 768]]);
    }
}

#[test]
fn softmax_may_be_over_any_axis() {
    for dtype in [DType::F64, DType::F32, DType::Bf16] {
        for (axis, shape) in
            [(0, &[4, 5][..]), (1, &[2, 7, 3]), (-2, &[2, 7, 3]), (0, &[5, 2, 3, 2]), (1, &[3, 4, 1, 1])]
        {
            fast("softmax", &format!(r#"{{"axis": {axis}}}"#), dtype, &[shape]);
        }
    }
    assert!(!fast("softmax", r#"{"axis": 1}"#, DType::F32, &[&[3, 4, 1, 1]]).contains("permuted"));
}

#[test]
fn attention_may_be_causal_for_any_numbers_of_queries_and_keys_and_have_a_mask_too() {
    for (queries, keys) in [(3, 7), (7, 3), (1, 5), (5, 1), (6, 6)] {
        for (heads, shared) in [(2, 2), (4, 2)] {
            let (q, k) = ([2, heads, queries, 16], [2, shared, keys, 16]);
            for attrs in [
                r#"{"causal": true, "top_left": true}"#,
                r#"{"causal": true, "top_left": false}"#,
                r#"{"causal": true, "top_left": true, "window": 2}"#,
                r#"{"causal": false, "top_left": true, "window": 2}"#,
            ] {
                for dtype in [DType::F32, DType::F64] {
                    fast("attention", attrs, dtype, &[&q, &k, &k]);
                    for mask in [&[keys][..], &[queries, keys], &[2, 1, queries, keys], &[1, heads, 1, keys]] {
                        fast("attention", attrs, dtype, &[&q, &k, &k, mask]);
                    }
                }
            }
        }
    }
}

/// With a mask or without, for one query or several, in each float that kernels compute with.
#[test]
fn common_calls_have_kernels() {
    for dtype in [DType::F64, DType::F32, DType::F16, DType::Bf16] {
        let call = |op: &str, attrs: &str, shapes: &[&[i64]]| drop(fast(op, attrs, dtype, shapes));
        for (queries, heads) in [(1, 2), (1, 4), (7, 2), (7, 4)] {
            let (q, k) = ([2, heads, queries, 16], [2, 2, 9, 16]);
            for attrs in ["{}", r#"{"causal": true}"#, r#"{"softcap": 3.0}"#, r#"{"window": 3, "causal": true}"#] {
                call("attention", attrs, &[&q, &k, &k]);
            }
            for mask in [&[queries, 9][..], &[2, 1, queries, 9], &[1, 1, 1, 9], &[2, 1, 1, 9]] {
                call("attention", "{}", &[&q, &k, &k, mask]);
            }
        }
        call("softmax", r#"{"axis": -1}"#, &[&[4, 9]]);
        call("rms_norm", r#"{"eps": 0.1}"#, &[&[4, 9], &[9]]);
        call("layer_norm", r#"{"eps": 0.1}"#, &[&[4, 9], &[9]]);
        call("add_rms_norm", r#"{"eps": 0.1}"#, &[&[4, 9], &[4, 9], &[9]]);
        call("gated", r#"{"kind": "silu_mul"}"#, &[&[4, 9], &[4, 9]]);
        call("rope", "{}", &[&[1, 2, 4, 8], &[4, 4], &[4, 4]]);
        call("matmul", "{}", &[&[2, 4, 8], &[2, 8, 4]]);
        call("linear", "{}", &[&[2, 4, 8], &[3, 8]]);
        call("conv", r#"{"stride": [1], "padding": [0], "dilation": [1], "groups": 1}"#, &[&[2, 4, 8], &[3, 4, 3]]);
        call("cumsum", r#"{"axis": 1}"#, &[&[2, 4, 8]]);
        for kind in ["sum", "mean", "max", "prod"] {
            let attrs = format!(r#"{{"kind": "{kind}", "axes": [1], "keepdim": true}}"#);
            call("reduce", &attrs, &[&[2, 4, 8]]);
        }
    }
}

/// An operator's limit.
struct Limited(CpuIsa);

impl Ranking for Limited {
    fn ranked(&self, _: &str, _: &NamedCall<'_>) -> Option<Vec<String>> {
        None
    }

    fn level(&self) -> CpuIsa {
        self.0
    }
}

#[test]
fn no_kernel_runs_better_instructions_than_the_operator_allows() {
    for (_, level) in CpuIsa::LEVELS {
        let options = Options { ranking: Arc::new(Limited(level)), ..options() };
        let x = drawn(DType::F32, &[64, 48], 7);
        let made = compiled(&mlp(), std::slice::from_ref(&x), &options);
        assert!(made.kernels().any(|kernel| matches!(kernel, Kernel::Primitive(..))));
        for kernel in made.kernels() {
            match kernel {
                Kernel::Primitive(_, set) => assert_eq!(*set, InstructionSet::within(level), "{level:?}"),
                Kernel::Builtin(kernel, query) => {
                    let op = lz_model::Catalog::get().op(query.op()).id();
                    let descriptors = lz_cpu::descriptors();
                    let mut own = descriptors.filter(|(other, one)| other == kernel && one.operation == op);
                    let sets = own.next().expect("a descriptor").1.instruction_sets;
                    assert!(sets.iter().all(|set| level.allows(set)), "{level:?}: {sets:?}");
                }
                _ => {}
            }
        }
        let large = drawn(DType::F32, &[64, 48], 7);
        let (expected, _) = interpreted::run(&mlp(), &[large.view()]).unwrap();
        for (a, b) in run(&made, &[large]).unwrap().0.iter().zip(&expected) {
            close(a, b, 1e-6);
        }
    }
    // Numbers are split for the matrix unit only where all instructions are allowed.
    let (product, tensors) = single("matmul", "{}", DType::F32, &[&[256, 256], &[256, 256]]);
    for (_, level) in CpuIsa::LEVELS {
        let options = Options { ranking: Arc::new(Limited(level)), ..options() };
        let made = compiled(&product, &tensors, &options);
        let splits = made.steps().any(|step| step.candidates.iter().any(|name| name.contains(".split")));
        assert_eq!(splits, level == CpuIsa::Native && lz_cpu::primitives::matmul::split::is_here(), "{level:?}");
    }
}

/// A cache that is written, and counted.
#[test]
fn profiling_leaves_the_state_of_a_model_as_it_was() {
    let graph = graph(
        r#"{"name": "state", "inputs": [{"name": "count", "dtype": "int64", "shape": [1]},
          {"name": "cache", "dtype": "float32", "shape": [4, 2]}, {"name": "x", "dtype": "float32", "shape": [1, 2]}],
        "constants": [], "nodes": [
          {"op": "full", "attrs": {"shape": [1], "value": 1, "dtype": "int64"}, "inputs": [], "output": "one"},
          {"op": "index_copy", "attrs": {"axis": 0}, "inputs": ["cache", "count", "x"], "output": "written"},
          {"op": "binary", "attrs": {"kind": "add"}, "inputs": ["count", "one"], "output": "next"},
          {"op": "unary", "attrs": {"kind": "neg"}, "inputs": ["written"], "output": "y"}],
        "outputs": ["y"], "updates": [["count", "next"], ["cache", "written"]]}"#,
    );
    let given =
        [Tensor::from_ints(DType::I64, &[1], &[2]), drawn(DType::F32, &[4, 2], 1), drawn(DType::F32, &[1, 2], 2)];
    let compiled = compiled(&graph, &given, &options());
    let mut tensors = given.to_vec();
    tensors.push(Tensor::zeros(DType::F32, &[4, 2]));
    {
        let mut views: Vec<TensorViewMut<'_>> = tensors.iter_mut().map(Tensor::view_mut).collect();
        let mut externals: Vec<External<'_>> = views.iter_mut().map(|view| External::Write(view.as_mut())).collect();
        // More rounds than the cache has places.
        profile(&compiled, &mut externals, &crate::exec::kernel::NoHost, 9).unwrap();
    }
    assert_eq!(tensors[..3], given);
}

/// Blocks of one weight, in its own numbers and in bfloat16.
#[test]
fn weights_are_packed_for_each_element_type() {
    let packs = Packs::default();
    let weight: Arc<dyn lz_abi::Storage> = Arc::new(drawn(DType::F32, &[40, 48], 1));
    let dtype = |blocks: Option<Arc<dyn lz_abi::Storage>>| blocks.unwrap().view().dtype();
    assert_eq!(dtype(packs.packed(&weight, false, InstructionSet::native())), DType::F32);
    assert_eq!(dtype(packs.packed_halves(&weight, false)), DType::Bf16);
    assert_eq!(dtype(packs.packed(&weight, false, InstructionSet::native())), DType::F32);
}

#[test]
fn a_candidate_that_does_not_fit_is_left_out() {
    let x = drawn(DType::F32, &[3, 48], 1);
    let graph = mlp();
    let instance = crate::plan::Instance::of(&graph, &interpreted::bind(&graph, &[(DType::F32, &[3, 48])]).unwrap());
    let instance = instance.unwrap();
    let options = options();
    let needs = crate::exec::binding::Needs::of(&instance, options.terms());
    let mut plan = crate::plan::plan(&instance, &needs);
    // Scratch memory that begins where none may: kernels that need it cannot run, and others can.
    for scratch in plan.scratch.iter_mut().flatten() {
        scratch.offset_bytes += 4;
        plan.arena = plan.arena.max(scratch.offset_bytes + scratch.bytes);
    }
    let made = Compiled::of(&instance, &plan, &options).unwrap();
    let (expected, _) = interpreted::run(&graph, &[x.view()]).unwrap();
    for (a, b) in run(&made, &[x]).unwrap().0.iter().zip(&expected) {
        close(a, b, 1e-6);
    }
    let whole =
        Compiled::new(&graph, &interpreted::bind(&graph, &[(DType::F32, &[3, 48])]).unwrap(), &options).unwrap();
    let count = |compiled: &Compiled| compiled.steps().map(|step| step.candidates.len()).sum::<usize>();
    assert!(count(&made) < count(&whole));
}
