//! Plans that are changed by hand: the validator finds each change.

use lz_abi::DType;
use lz_graph::ir::{Dim, Graph, ValueId};
use lz_graph::plan::{Instance, MemoryPlan, OfOps, Place, Root, plan};
use lz_graph::validate::{Finding, Problem};

use crate::graphs::{Builder, Kernels, findings, gpt2, symbols};

/// The first thing found in a plan that was changed.
fn first(instance: &Instance<'_>, kernels: &Kernels, change: impl FnOnce(&mut MemoryPlan)) -> Finding {
    let mut changed = plan(instance, kernels);
    assert_eq!(findings(instance, &changed, kernels), []);
    change(&mut changed);
    findings(instance, &changed, kernels).into_iter().next().expect("a finding")
}

#[test]
fn every_value_that_is_moved_over_one_that_lives_is_found() {
    let graph = gpt2(1, 2);
    let instance = Instance::of(&graph, &symbols(&[("s", 32)])).unwrap();
    let demands = OfOps::of(&instance);
    let made = plan(&instance, &demands);
    let in_arena: Vec<ValueId> = (made.order.iter())
        .filter(|id| !made.is_view(**id))
        .map(|&id| graph.node(id).output)
        .filter(|value| made.place(*value).unwrap().root == Root::Arena)
        .collect();
    let mut moved = 0;
    for (step, &value) in in_arena.iter().enumerate() {
        // To each offset at which another value is read after this one is written.
        for &other in &in_arena[..step] {
            let from = made.place(value).unwrap().offset_bytes;
            let to = made.place(other).unwrap().offset_bytes;
            let written = made.order.iter().position(|&id| graph.node(id).output == value).unwrap();
            let lives = made.order[written..].iter().any(|&id| graph.node(id).inputs.contains(&Some(other)));
            let over = graph.made_by(value).unwrap().1.inputs.contains(&Some(other));
            if from == to || !lives || over {
                continue;
            }
            let mut changed = made.clone();
            changed.places[value.index()] = Some(Place::at(Root::Arena, to));
            assert_ne!(findings(&instance, &changed, &demands), [], "{value:?} over {other:?}");
            moved += 1;
        }
    }
    assert!(moved >= 10, "{moved} moves");
}

/// a = relu(x), p = aᵀ, y = a + relu(p), and yᵀ in two forms.
fn small() -> (Graph, [ValueId; 4]) {
    let mut b = Builder::new("small");
    let x = b.input("x", DType::F32, &[Dim::from(16), Dim::from(16)]);
    let a = b.relu(x);
    let p = b.permute(a, &[1, 0]);
    let q = b.relu(p);
    let y = b.add(a, q);
    let z = b.permute(y, &[1, 0]);
    let r = b.reshape(z, &[Dim::from(256)]);
    b.graph.outputs.extend([r, z]);
    (b.graph, [x, a, p, y])
}

#[test]
fn each_kind_of_damage_is_found_by_its_check() {
    let (graph, [x, a, p, _]) = small();
    let instance = Instance::of(&graph, &symbols(&[])).unwrap();
    let mut kernels = Kernels::of(&instance);
    let node = graph.producer(p).unwrap().index();
    kernels.scratch[node] = 100;
    let arena = |offset| Some(Place::at(Root::Arena, offset));
    let found = |change: &dyn Fn(&mut MemoryPlan)| {
        let finding = first(&instance, &kernels, change);
        (finding.validator, finding.problem)
    };

    assert!(matches!(
        found(&|plan| {
            plan.order.pop();
        }),
        ("order", Problem::Order { why: "does not run", .. })
    ));
    assert!(matches!(found(&|plan| plan.order.reverse()), ("order", Problem::Order { .. })));
    assert!(matches!(
        found(&|plan| {
            let id = plan.order[1];
            plan.order.insert(2, id);
        }),
        ("order", Problem::Order { why: "runs twice", .. })
    ));
    assert!(matches!(found(&|plan| plan.places[a.index()] = None), ("order", Problem::NoPlace(_))));
    assert!(matches!(
        found(&|plan| {
            plan.places.pop();
        }),
        ("order", Problem::Foreign(_))
    ));
    assert!(matches!(
        found(&|plan| {
            let end = plan.arena;
            plan.places[a.index()] = arena(end)
        }),
        ("inside", Problem::Outside { .. })
    ));
    assert!(matches!(
        found(&|plan| plan.places[a.index()] = Some(Place::at(Root::Output(7), 0))),
        ("inside", Problem::Outside { .. })
    ));
    assert!(matches!(found(&|plan| plan.arena = 64), ("inside", Problem::Outside { .. })));
    assert!(matches!(
        found(&|plan| {
            plan.arena += 4;
            plan.places[p.index()].as_mut().unwrap().offset_bytes += 4
        }),
        ("alignment" | "in-place", _)
    ));
    assert!(matches!(
        found(&|plan| {
            plan.arena += 4;
            plan.scratch[node].as_mut().unwrap().offset_bytes += 4
        }),
        ("alignment", Problem::Alignment { alignment: 64, .. })
    ));
    assert!(matches!(
        found(&|plan| plan.places[a.index()] = Some(Place::at(Root::Input(0), 0))),
        ("protected", Problem::Protected { .. })
    ));
    assert!(matches!(found(&|plan| plan.places[x.index()] = arena(0)), ("protected", Problem::NoPlace(_))));
    // A permutation over its own input.
    assert!(matches!(
        found(&|plan| plan.places[p.index()] = plan.places[a.index()].clone()),
        ("in-place", Problem::InPlace { why: "which the operation cannot", .. })
    ));
    assert!(matches!(found(&|plan| plan.views[node] = true), ("in-place", Problem::NoView { .. })));
    assert!(matches!(found(&|plan| plan.scratch[node] = None), ("scratch", Problem::Scratch { needed: 100, .. })));
    // Scratch over the input, and over the result.
    assert!(matches!(
        found(&|plan| plan.scratch[node].as_mut().unwrap().offset_bytes =
            plan.places[a.index()].as_ref().unwrap().offset_bytes),
        ("contents", Problem::Contents { .. })
    ));
    assert!(matches!(
        found(&|plan| plan.scratch[node].as_mut().unwrap().offset_bytes =
            plan.places[p.index()].as_ref().unwrap().offset_bytes),
        ("contents", Problem::Clash { .. })
    ));
    // A result with strides that is no view, and a view that is read row-major.
    assert!(matches!(
        found(&|plan| plan.places[p.index()].as_mut().unwrap().strides = Some([1, 16].as_slice().into())),
        ("strides", Problem::NoView { .. })
    ));
    assert!(matches!(
        found(&|plan| {
            plan.views[node] = true;
            let place = plan.places[a.index()].clone().unwrap();
            plan.places[p.index()] = Some(Place { strides: Some([1, 16].as_slice().into()), ..place });
        }),
        ("strides", Problem::Strides { input: 0, .. })
    ));
}

#[test]
fn results_in_the_arena_and_missing_copies_are_found() {
    let mut b = Builder::new("copies");
    let x = b.input("x", DType::F32, &[Dim::from(64)]);
    let cache = b.input("cache", DType::F32, &[Dim::from(64)]);
    let y = b.relu(x);
    b.graph.outputs.extend([y, x]);
    b.graph.updates.push((cache, y));
    let instance = Instance::of(&b.graph, &symbols(&[])).unwrap();
    let kernels = Kernels::of(&instance);
    let finding = first(&instance, &kernels, |plan| {
        plan.arena = 256;
        plan.places[y.index()] = Some(Place::at(Root::Arena, 0));
        plan.transfers.iter_mut().filter(|one| one.value == y).for_each(|one| one.from = Place::at(Root::Arena, 0));
    });
    assert!(matches!(finding.problem, Problem::Result { .. }), "{finding}");
    let finding = first(&instance, &kernels, |plan| plan.transfers.retain(|one| one.value != x));
    assert!(matches!(finding.problem, Problem::Result { .. }), "{finding}");
    let finding = first(&instance, &kernels, |plan| plan.transfers.retain(|one| one.value != y));
    assert!(matches!(finding.problem, Problem::Updated { .. }), "{finding}");
}
