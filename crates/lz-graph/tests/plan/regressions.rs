//! Planner bugs that spec 002 tells of, and updates of inputs.

use lz_abi::DType;
use lz_graph::ir::{Dim, ValueId};
use lz_graph::ops::unary::UnaryKind;
use lz_graph::plan::{Choices, Fit, Instance, OfOps, Ordering, Place, Root, Sharing, plan, plan_with};

use crate::graphs::{Builder, Kernels, assert_valid, known, symbols};

fn vector(n: i64) -> Vec<Dim> {
    known(&[n])
}

#[test]
fn a_chain_of_results_is_written_in_one_place() {
    let mut b = Builder::new("chain");
    let x = b.input("x", DType::F32, &vector(64));
    let mut values = vec![b.permute(x, &[0])];
    for kind in [UnaryKind::Exp, UnaryKind::Relu, UnaryKind::Tanh, UnaryKind::Neg] {
        let last = values[values.len() - 1];
        values.push(b.unary(kind, last));
    }
    let out = b.permute(values[4], &[0]);
    b.graph.outputs.push(out);
    let instance = Instance::of(&b.graph, &symbols(&[])).unwrap();
    let demands = OfOps::of(&instance);
    let found = plan(&instance, &demands);
    assert_valid(&instance, &found, &demands);
    assert!(values.iter().all(|value| found.place(*value) == found.place(values[0])));
    assert_eq!(found.arena, 256);
}

/// Ids are reshaped and then read; nothing may be written over them meanwhile. A view of an input is in the input's
/// memory, so the arena holds none of it; and where views are copies (`Sharing::Nothing`), the copy has 8 bytes for
/// each id.
#[test]
fn reshaped_ids_live_until_they_are_read() {
    let mut b = Builder::new("ids");
    let ids = b.input("ids", DType::I64, &known(&[2, 8]));
    let flat = b.reshape(ids, &known(&[16]));
    let x = b.input("x", DType::F32, &known(&[16]));
    let noise = b.permute(x, &[0]);
    let noise = b.relu(noise);
    let again = b.unary(UnaryKind::Neg, flat);
    b.graph.outputs.extend([noise, again]);
    let instance = Instance::of(&b.graph, &symbols(&[])).unwrap();
    let demands = OfOps::of(&instance);
    let found = plan(&instance, &demands);
    assert_valid(&instance, &found, &demands);
    assert_eq!(instance.bytes(flat), 16 * 8);
    assert_eq!(found.place(flat), Some(&Place::at(Root::Input(0), 0)));
    for &ordering in Ordering::ALL {
        for &fit in Fit::ALL {
            let choices = Choices { orderings: &[ordering], sharings: &[Sharing::Nothing], fits: &[fit] };
            let copied = plan_with(&instance, &demands, &choices);
            assert_valid(&instance, &copied, &demands);
            assert_eq!(copied.place(flat).unwrap().root, Root::Arena);
            assert!(copied.arena >= 128);
        }
    }
}

#[test]
fn nothing_is_written_over_a_value_that_a_view_of_it_still_needs() {
    let mut b = Builder::new("stale");
    let x = b.input("x", DType::F32, &known(&[4, 16]));
    let y = b.permute(x, &[1, 0]);
    let flat = b.reshape(y, &known(&[64]));
    let over = b.relu(y);
    let late = b.unary(UnaryKind::Exp, flat);
    let over = b.reshape(over, &known(&[64]));
    let sum = b.add(over, late);
    b.graph.outputs.push(sum);
    let instance = Instance::of(&b.graph, &symbols(&[])).unwrap();
    let demands = OfOps::of(&instance);
    for sharing in [Sharing::InPlace, Sharing::Views, Sharing::Nothing] {
        let choices = Choices { orderings: &[Ordering::Made], sharings: &[sharing], fits: &[Fit::BySize] };
        let found = plan_with(&instance, &demands, &choices);
        assert_valid(&instance, &found, &demands);
    }
    let found = plan(&instance, &demands);
    let relu = b.graph.consumers(y).into_iter().map(|id| b.graph.node(id).output).find(|&value| value != flat);
    assert_ne!(found.place(y), found.place(relu.unwrap()));
}

#[test]
fn a_sum_of_a_value_with_itself_is_written_over_it_and_one_with_a_view_of_it_is_not() {
    let mut b = Builder::new("twice");
    let x = b.input("x", DType::F32, &known(&[8, 8]));
    let y = b.permute(x, &[1, 0]);
    let twice = b.add(y, y);
    let seen = b.reshape(twice, &known(&[8, 8]));
    let mixed = b.add(twice, seen);
    let out = b.permute(mixed, &[1, 0]);
    b.graph.outputs.push(out);
    let instance = Instance::of(&b.graph, &symbols(&[])).unwrap();
    let demands = OfOps::of(&instance);
    let found = plan(&instance, &demands);
    assert_valid(&instance, &found, &demands);
    assert_eq!(found.place(twice), found.place(y));
    assert_ne!(found.place(mixed), found.place(twice));
}

#[test]
fn results_that_share_memory_or_are_inputs_get_memory_of_their_own() {
    let mut b = Builder::new("results");
    let x = b.input("x", DType::F32, &known(&[4, 4]));
    let y = b.relu(x);
    let flat = b.reshape(y, &known(&[16]));
    let w = b.weight("w", &[4]);
    b.graph.outputs.extend([y, flat, y, x, w]);
    let instance = Instance::of(&b.graph, &symbols(&[])).unwrap();
    let demands = OfOps::of(&instance);
    let found = plan(&instance, &demands);
    assert_valid(&instance, &found, &demands);
    assert_eq!(found.arena, 0);
    let copies: Vec<(ValueId, Root)> = found.transfers.iter().map(|one| (one.value, one.to.root)).collect();
    assert_eq!(copies, [(flat, Root::Output(1)), (y, Root::Output(2)), (x, Root::Output(3)), (w, Root::Output(4))]);
}

#[test]
fn a_cache_is_updated_where_it_lies() {
    let mut b = Builder::new("cache");
    let cache = b.input("cache", DType::F32, &vector(1024));
    let x = b.input("x", DType::F32, &vector(1024));
    let new = b.add(cache, x);
    let seen = b.reshape(new, &known(&[32, 32]));
    // A reader of the old contents that was made after the update still runs before it.
    let old = b.unary(UnaryKind::Exp, cache);
    let out = b.softmax(seen);
    b.graph.outputs.extend([out, old]);
    b.graph.updates.push((cache, new));
    let instance = Instance::of(&b.graph, &symbols(&[])).unwrap();
    let demands = OfOps::of(&instance);
    for &ordering in Ordering::ALL {
        for sharing in [Sharing::InPlace, Sharing::Views, Sharing::Nothing] {
            let choices = Choices { orderings: &[ordering], sharings: &[sharing], fits: &[Fit::BySize] };
            let found = plan_with(&instance, &demands, &choices);
            assert_valid(&instance, &found, &demands);
            assert_eq!(found.place(new), Some(&Place::at(Root::Input(0), 0)), "{ordering:?} {sharing:?}");
            assert_eq!(found.transfers, []);
        }
    }
}

#[test]
fn a_cache_whose_old_contents_are_needed_is_copied() {
    let mut b = Builder::new("needed");
    let cache = b.input("cache", DType::F32, &vector(1024));
    let x = b.input("x", DType::F32, &vector(1024));
    let new = b.add(cache, x);
    // Needs the new contents and the old ones.
    let both = b.add(new, cache);
    b.graph.outputs.push(both);
    b.graph.updates.push((cache, new));
    let instance = Instance::of(&b.graph, &symbols(&[])).unwrap();
    let demands = OfOps::of(&instance);
    let found = plan(&instance, &demands);
    assert_valid(&instance, &found, &demands);
    assert_eq!(found.place(new).unwrap().root, Root::Arena);
    assert_eq!(found.transfers.len(), 1);
}

#[test]
fn inputs_that_are_updated_with_each_other_are_swapped() {
    let mut b = Builder::new("swap");
    let (left, right) = (b.input("left", DType::F32, &vector(16)), b.input("right", DType::F32, &vector(16)));
    b.graph.updates.extend([(left, right), (right, left)]);
    b.graph.outputs.push(left);
    let instance = Instance::of(&b.graph, &symbols(&[])).unwrap();
    let demands = OfOps::of(&instance);
    let found = plan(&instance, &demands);
    assert_valid(&instance, &found, &demands);
    assert_eq!((found.arena, found.transfers.len()), (128, 5));
}

#[test]
fn scratch_lives_for_one_step() {
    let mut b = Builder::new("scratch");
    let x = b.input("x", DType::F32, &vector(16));
    let mut value = x;
    for _ in 0..6 {
        value = b.permute(value, &[0]);
    }
    b.graph.outputs.push(value);
    let instance = Instance::of(&b.graph, &symbols(&[])).unwrap();
    let mut kernels = Kernels::of(&instance);
    kernels.scratch.fill(4096);
    let found = plan(&instance, &kernels);
    assert_valid(&instance, &found, &kernels);
    // Scratch, the value that is read and the one that is made.
    assert_eq!((found.arena, found.bound), (4096 + 128, 4096 + 128));
}
