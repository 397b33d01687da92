//! Running a compiled graph allocates nothing, once it has run before.
#![cfg(feature = "cpu")]
#![allow(unsafe_code)] // an allocator that counts

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use lz_abi::program::External;
use lz_abi::{DType, Tensor};
use lz_graph::exec::compiled::{Compiled, Options};
use lz_graph::ir::{Constant, Graph, Symbols};

struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

// SAFETY: everything is passed on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: as the caller says.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, start: *mut u8, layout: Layout) {
        // SAFETY: as the caller says.
        unsafe { System.dealloc(start, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

#[test]
fn a_run_allocates_nothing() {
    let document = r#"{"name": "mlp", "inputs": [{"name": "x", "dtype": "float32", "shape": [5, 48]}],
        "constants": ["w", "g"],
        "nodes": [
          {"op": "layer_norm", "attrs": {"eps": 1e-5, "axes": 1}, "inputs": ["x", "g"], "output": "n"},
          {"op": "linear", "attrs": {"activation": "relu"}, "inputs": ["n", "w"], "output": "p"},
          {"op": "binary", "attrs": {"kind": "add"}, "inputs": ["p", "x"], "output": "q"},
          {"op": "permute", "attrs": {"axes": [1, 0]}, "inputs": ["q"], "output": "r"},
          {"op": "softmax", "attrs": {"axis": -1}, "inputs": ["r"], "output": "y"}],
        "outputs": ["y"]}"#;
    let constants = [("w", vec![48, 48]), ("g", vec![48])];
    let constants = constants.map(|(name, shape)| Constant::owned(name, Tensor::zeros(DType::F32, &shape)));
    let graph = Graph::from_document(document, constants.to_vec()).unwrap();
    let options = Options { threads: 1, ..Options::default() };
    let compiled = Compiled::new(&graph, &Symbols::new(), &options).unwrap();
    let (x, mut y) = (Tensor::zeros(DType::F32, &[5, 48]), Tensor::zeros(DType::F32, &[48, 5]));
    let (x, mut y) = (x.view(), y.view_mut());
    let mut externals = [External::Read(x.as_ref()), External::Write(y.as_mut())];
    compiled.run(&mut externals).unwrap();
    let before = ALLOCATIONS.get();
    for _ in 0..10 {
        compiled.run(&mut externals).unwrap();
    }
    assert_eq!(ALLOCATIONS.get() - before, 0);
}
