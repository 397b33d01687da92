//! What handing out the arguments of a call costs: `cargo bench -p lz-abi --bench program`.

use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;

use lz_abi::program::{Call, External, Layout, Operand, Place, Program, Root, Slot};
use lz_abi::{DType, Tensor, Threads};

const CALLS: usize = 1000;

fn main() {
    let operand = |root, offset| Operand {
        dtype: DType::F32,
        shape: [16].as_slice().into(),
        strides: [1].as_slice().into(),
        place: Place { root, offset },
    };
    let call = |at: usize| Call {
        inputs: vec![Some(operand(Root::External(0), 0)), Some(operand(Root::Arena, 64 * (at % 2)))],
        outputs: vec![operand(Root::Arena, 64 * ((at + 1) % 2))],
        ..Call::default()
    };
    let layout = Layout {
        arena: 128,
        slots: vec![Slot::read("x", DType::F32, &[16])],
        calls: (0..CALLS).map(call).collect(),
        ..Layout::default()
    };
    let program = Program::new(layout, Arc::default()).expect("the places are right");
    let x = Tensor::zeros(DType::F32, &[16]);
    let x = x.view();
    let mut externals = [External::Read(x.as_ref())];
    let (mut calls, mut entries) = (f64::INFINITY, f64::INFINITY);
    // Rounds are shorter than a time slice: the least of many was not interrupted.
    for _ in 0..5000 {
        let mut running = program.enter(&mut externals).expect("the tensor is right");
        let start = Instant::now();
        for at in 0..CALLS {
            black_box(running.call(at, Threads::ONE));
        }
        calls = calls.min(start.elapsed().as_secs_f64() / CALLS as f64);
        drop(running);
        let start = Instant::now();
        for _ in 0..100 {
            drop(black_box(program.enter(&mut externals).expect("the tensor is right")));
        }
        entries = entries.min(start.elapsed().as_secs_f64() / 100.0);
    }
    println!("{:.1} ns for the arguments of a call, {:.1} ns to begin and end a run", calls * 1e9, entries * 1e9);
}
