//! Random graphs with random sizes: whatever is planned, every read finds what was written for it, both by the names
//! the validator keeps and by the bytes of a run in one arena.

use lz_abi::{DType, Tensor, TensorView};
use lz_graph::exec::interpreted;
use lz_graph::ir::{Dim, Graph, Meta, ValueId};
use lz_graph::ops::permute::Permute;
use lz_graph::ops::unary::UnaryKind;
use lz_graph::plan::{
    Choices, Fit, Instance, MemoryPlan, OfOps, Ordering, Place, Root, Sharing, Transfer, plan, plan_with, row_major,
};
use proptest::prelude::*;

use crate::graphs::{Builder, Kernels, assert_valid, symbols};

/// A graph made of some numbers: each pair chooses an operation and what it reads.
fn random(steps: &[(u8, u16, u16)], outputs: &[u16], updates: bool) -> Graph {
    let mut b = Builder::new("random");
    let s = b.symbol("s");
    let rows = [s.clone(), Dim::from(4)];
    let x = b.input("x", DType::F32, &rows);
    let cache = b.input("cache", DType::F32, &rows);
    let other = b.input("other", DType::F32, &rows);
    let weight = b.weight("w", &[4, 4]);
    let bias = b.weight("b", &[4]);
    let mut made: Vec<ValueId> = vec![x, cache, other];
    for &(kind, first, second) in steps {
        let one = made[usize::from(first) % made.len()];
        let rank = b.graph.meta(one).rank();
        // Something of the same sizes, or the same value twice.
        let same: Vec<ValueId> =
            made.iter().copied().filter(|&value| b.graph.meta(value).shape == b.graph.meta(one).shape).collect();
        let two = same[usize::from(second) % same.len()];
        let next = match kind % 8 {
            0 => b.unary(UnaryKind::Relu, one),
            1 | 2 => b.add(one, two),
            3 if rank == 2 && b.graph.meta(one).shape[1].is(4) => b.times(one, weight),
            3 => b.unary(UnaryKind::Neg, one),
            4 if rank == 2 => b.permute(one, &[1, 0]),
            4 => b.softmax(one),
            5 => b.reshape(one, &[Dim::from(2), s.clone() * Dim::from(2)]),
            6 => b.reshape(one, &rows),
            _ if b.graph.meta(one).shape.last().is_some_and(|last| last.is(4)) => b.add(one, bias),
            _ => b.unary(UnaryKind::Abs, one),
        };
        made.push(next);
    }
    b.graph.outputs = outputs.iter().map(|&at| made[usize::from(at) % made.len()]).collect();
    if updates {
        let shaped: Vec<ValueId> =
            made.iter().copied().filter(|&value| b.graph.meta(value).shape[..] == rows[..]).collect();
        let (last, before) = (shaped[shaped.len() - 1], shaped[shaped.len() / 2]);
        b.graph.updates = vec![(cache, last), (other, before)];
    }
    b.graph
}

/// Memory of a run: bytes by root.
struct Run<'a> {
    arena: Vec<u8>,
    inputs: Vec<Vec<u8>>,
    outputs: Vec<Vec<u8>>,
    instance: &'a Instance<'a>,
    plan: &'a MemoryPlan,
}

impl Run<'_> {
    fn bytes(&mut self, root: Root) -> &mut [u8] {
        match root {
            Root::Arena => &mut self.arena,
            Root::Input(i) => &mut self.inputs[i],
            Root::Output(i) => &mut self.outputs[i],
            Root::Constant(_) => panic!("a constant is written"),
        }
    }

    fn read(&self, value: ValueId, place: &Place) -> Tensor {
        let (sizes, dtype) = (self.instance.sizes(value).unwrap(), self.instance.meta(value).dtype);
        let constant;
        let memory = match place.root {
            Root::Arena => &self.arena,
            Root::Input(i) => &self.inputs[i],
            Root::Output(i) => &self.outputs[i],
            Root::Constant(id) => {
                constant = self.instance.graph().constant(id).unwrap().view().to_tensor().bytes().to_vec();
                &constant
            }
        };
        let strides = place.strides.clone().unwrap_or_else(|| row_major(&sizes));
        let mut numbers = Vec::new();
        for index in lz_abi::indices(&sizes) {
            let at: i64 = index.iter().zip(&strides).map(|(i, stride)| i * stride).sum();
            let first = place.offset_bytes + 4 * at as usize;
            numbers.push(f64::from(f32::from_ne_bytes(memory[first..first + 4].try_into().unwrap())));
        }
        Tensor::from_f64(dtype, &sizes, &numbers)
    }

    fn write(&mut self, place: &Place, tensor: &Tensor) {
        assert_eq!(place.strides, None);
        let (offset, bytes) = (place.offset_bytes, tensor.bytes().to_vec());
        self.bytes(place.root)[offset..offset + bytes.len()].copy_from_slice(&bytes);
    }

    fn run(&mut self) {
        for &id in &self.plan.order {
            if self.plan.is_view(id) {
                continue;
            }
            let node = self.instance.node(id);
            if let Some(scratch) = self.plan.scratch[id.index()] {
                self.arena[scratch.offset_bytes..scratch.offset_bytes + scratch.bytes].fill(0xff);
            }
            let given: Vec<Option<Tensor>> =
                node.inputs.iter().map(|input| input.map(|id| self.read(id, self.plan.place(id).unwrap()))).collect();
            let views: Vec<Option<TensorView<'_>>> = given.iter().map(|one| one.as_ref().map(Tensor::view)).collect();
            let meta = self.instance.meta(node.output);
            let mut output = Tensor::try_zeros(meta.dtype, &meta.sizes().unwrap()).unwrap();
            self.instance.op(id).evaluate(&views, &mut output).unwrap();
            let place = self.plan.place(node.output).unwrap().clone();
            self.write(&place, &output);
            // A kernel may use its scratch until it ends.
            if let Some(scratch) = self.plan.scratch[id.index()] {
                self.arena[scratch.offset_bytes..scratch.offset_bytes + scratch.bytes].fill(0xff);
            }
        }
        for Transfer { value, from, to, .. } in &self.plan.transfers {
            let moved = self.read(*value, from);
            self.write(to, &moved);
        }
    }
}

/// Runs a plan in one arena that starts as NaN, and compares with the interpreter.
fn assert_runs(instance: &Instance<'_>, plan: &MemoryPlan) {
    let graph = instance.graph();
    let inputs: Vec<Tensor> = graph
        .inputs
        .iter()
        .enumerate()
        .map(|(i, &id)| {
            let Meta { dtype, .. } = *instance.meta(id);
            let sizes = instance.sizes(id).unwrap();
            let n: i64 = sizes.iter().product();
            let numbers: Vec<f64> = (0..n).map(|k| ((k * 7 + 3 * i as i64) % 11) as f64 / 8.0 - 0.5).collect();
            Tensor::from_f64(dtype, &sizes, &numbers)
        })
        .collect();
    let views: Vec<TensorView<'_>> = inputs.iter().map(Tensor::view).collect();
    let (results, updates) = interpreted::run(graph, &views).unwrap();
    let mut run = Run {
        arena: vec![0xff; plan.arena],
        inputs: inputs.iter().map(|input| input.bytes().to_vec()).collect(),
        outputs: graph.outputs.iter().map(|&id| vec![0xff; instance.bytes(id)]).collect(),
        instance,
        plan,
    };
    run.run();
    for (i, result) in results.iter().enumerate() {
        assert_eq!(run.outputs[i], result.bytes(), "result {i}\n{plan:#?}");
    }
    for (i, &input) in graph.inputs.iter().enumerate() {
        let update = graph.updates.iter().position(|&(old, _)| old == input);
        let expected = update.map_or(inputs[i].bytes(), |at| updates[at].bytes());
        assert_eq!(run.inputs[i], expected, "input {i}\n{plan:#?}");
    }
}

fn cases() -> u32 {
    if std::env::var("LZ_TEST_SCALE").is_ok_and(|scale| scale == "full") { 5_000 } else { 500 }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(cases()))]

    #[test]
    fn plans_of_random_graphs_run(
        steps in prop::collection::vec(any::<(u8, u16, u16)>(), 1..24),
        outputs in prop::collection::vec(any::<u16>(), 1..5),
        updates: bool,
        s in 1i64..40,
        scratch in prop::collection::vec(0usize..300, 24),
        strided: bool,
        choice in (0..Ordering::ALL.len(), 0usize..3, 0..Fit::ALL.len()),
    ) {
        let graph = random(&steps, &outputs, updates);
        let instance = Instance::of(&graph, &symbols(&[("s", s)])).unwrap();
        let mut kernels = Kernels::of(&instance);
        kernels.strided = strided;
        for (needed, at) in kernels.scratch.iter_mut().zip(scratch) {
            *needed = if at < 200 { 0 } else { at };
        }
        let smallest = plan(&instance, &kernels);
        assert_valid(&instance, &smallest, &kernels);
        assert_runs(&instance, &smallest);

        let sharing = [Sharing::InPlace, Sharing::Views, Sharing::Nothing][choice.1];
        let choices =
            Choices { orderings: &[Ordering::ALL[choice.0]], sharings: &[sharing], fits: &[Fit::ALL[choice.2]] };
        let one = plan_with(&instance, &kernels, &choices);
        assert_valid(&instance, &one, &kernels);
        assert_runs(&instance, &one);
        prop_assert!(sharing == Sharing::Nothing || smallest.arena <= one.arena);
    }
}

/// Prints how far plans of random graphs are from their bounds, and which choices made the smallest. Run with
/// `--ignored --nocapture`.
#[test]
#[ignore = "prints measurements"]
fn measure() {
    let mut seed = 1u64;
    let mut next = || {
        seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (seed >> 33) as u16
    };
    let (mut met, mut worst, mut chosen) = (0, 1.0f64, std::collections::BTreeMap::<String, usize>::new());
    let mut of_fit = vec![(0, 0.0f64); Fit::ALL.len()];
    const GRAPHS: usize = 300;
    for _ in 0..GRAPHS {
        let steps: Vec<(u8, u16, u16)> = (0..120).map(|_| (next() as u8, next(), next())).collect();
        let graph = random(&steps, &[next(), next()], false);
        let instance = Instance::of(&graph, &symbols(&[("s", 64)])).unwrap();
        let mut kernels = Kernels::of(&instance);
        kernels.scratch.iter_mut().for_each(|bytes| *bytes = usize::from(next() % 4096) * usize::from(next() % 2));
        let found = plan(&instance, &kernels);
        let ratio = found.arena as f64 / found.bound as f64;
        (met, worst) = (met + usize::from(found.arena == found.bound), worst.max(ratio));
        *chosen.entry(format!("{:?}", found.choice)).or_default() += 1;
        for (fit, (met, worst)) in Fit::ALL.iter().zip(&mut of_fit) {
            let choices = Choices {
                orderings: &[Ordering::Made],
                sharings: &[Sharing::InPlace],
                fits: std::slice::from_ref(fit),
            };
            let found = plan_with(&instance, &kernels, &choices);
            (*met, *worst) =
                (*met + usize::from(found.arena == found.bound), worst.max(found.arena as f64 / found.bound as f64));
        }
    }
    println!("bound met {met} of {GRAPHS}, worst {worst:.3}");
    println!("by fit, for the order as made: {:?}", Fit::ALL.iter().zip(of_fit).collect::<Vec<_>>());
    chosen.iter().for_each(|(choice, times)| println!("{times:4} {choice}"));
}

#[test]
fn a_permutation_is_a_view_for_kernels_that_take_strides() {
    let mut b = Builder::new("strided");
    let x = b.input("x", DType::F32, &[Dim::from(3), Dim::from(4)]);
    let y = b.relu(x);
    let z = b.op(Permute::swap(2, 0, 1), &[y]);
    let w = b.weight("w", &[5, 3]);
    let out = b.times(z, w);
    b.graph.outputs.push(out);
    let instance = Instance::of(&b.graph, &symbols(&[])).unwrap();
    let mut kernels = Kernels::of(&instance);
    kernels.strided = true;
    let found = plan(&instance, &kernels);
    assert_valid(&instance, &found, &kernels);
    assert_runs(&instance, &found);
    let place = found.place(z).unwrap();
    assert_eq!(place.strides.as_deref(), Some(&[1, 4][..]));
    assert_eq!(found.arena, 64);

    let plain = plan(&instance, &OfOps::of(&instance));
    assert_eq!(plain.place(z).unwrap().strides, None);
    assert_eq!(plain.arena, 128);
    assert_runs(&instance, &plain);
}
