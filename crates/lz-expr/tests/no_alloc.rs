//! Evaluation and possible analysis allocate nothing.
#![allow(unsafe_code)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use lz_expr::{Bounds, Env, Expr, Known, Scope, Type, Value};

thread_local! {
    // Per thread, so that the test harness is not counted; constant, so that
    // counting does not itself allocate.
    static COUNT: Cell<u64> = const { Cell::new(0) };
}

struct Counting;

// SAFETY: every call is passed on unchanged to the system allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        COUNT.with(|count| count.set(count.get() + 1));
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        COUNT.with(|count| count.set(count.get() + 1));
        unsafe { System.realloc(pointer, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn allocations(run: impl FnOnce()) -> u64 {
    let before = COUNT.with(Cell::get);
    run();
    COUNT.with(Cell::get) - before
}

struct Fields;

impl Env for Fields {
    fn get(&self, slot: u16) -> Value<'_> {
        match slot {
            0 | 1 => Value::Int(16),
            2 => Value::Float(0.5),
            3 => Value::Str("attention.causal"),
            _ => Value::Bool(true),
        }
    }
}

impl Bounds for Fields {
    fn bounds(&self, slot: u16) -> Known<'_> {
        match slot {
            0 => Known::Between(1, 100),
            1 => Known::Nothing,
            slot => Known::Exactly(self.get(slot)),
        }
    }

    fn divisible(&self, _slot: u16, m: i64) -> Option<bool> {
        Some(m == 8)
    }
}

#[test]
fn eval_test_and_outcome_allocate_nothing() {
    let mut scope = Scope::new();
    for (name, ty) in [("x", Type::Int), ("y", Type::Int), ("f", Type::Float), ("op", Type::Str), ("flag", Type::Bool)]
    {
        scope.field(name, ty);
    }
    for source in [
        "x >= 8 and flag and op matches 'att*.c?us*l' and op in [a, attention.causal]",
        "not (x % 8 != 0) or y not in [1, 2, 3] or x in [f, 2.5]",
        "(flag == (x > 3)) != (op != 'x')",
        "ceil_div(x, 3) * y + min(x, y, 4) - max(-x, abs(y), 2) / 7 % 5",
        "min(f, x) * max(1.5, -f) + abs(f) / 3 - f % 2",
        "x / 0",
        "9223372036854775807 + x",
        "op",
    ] {
        let expr = Expr::compile(source, &scope).unwrap_or_else(|error| panic!("{error}"));
        let count = allocations(|| {
            let _ = std::hint::black_box(expr.eval(&Fields));
            let _ = std::hint::black_box(expr.test(&Fields));
            let _ = std::hint::black_box(expr.int(&Fields));
            let _ = std::hint::black_box(expr.float(&Fields));
            let _ = std::hint::black_box(expr.possible(&Fields));
            let _ = std::hint::black_box(expr.clone());
        });
        assert_eq!(count, 0, "{source}");
    }
}

#[test]
fn the_counter_counts() {
    let count = allocations(|| {
        std::hint::black_box(vec![1u8; 100]);
    });
    assert_eq!(count, 1);
}
