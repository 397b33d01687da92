use super::*;
use crate::{Bytes, KernelError, Tensor, TensorRef, Threads, row_major};
use proptest::prelude::*;

fn operand(shape: &[i64], root: Root, offset: usize) -> Operand {
    Operand { dtype: DType::F32, shape: shape.into(), strides: row_major(shape), place: Place { root, offset } }
}

/// out = a + b (+ the old contents of out where b is not given).
fn add(mut args: crate::Args<'_, '_>) -> Result<(), KernelError> {
    let a = args.input(0).unwrap().to_f64();
    let shape: Vec<i64> = args.outputs[0].shape().to_vec();
    let b = args.input(1).map_or_else(|| args.outputs[0].to_f64(), |b| b.to_f64());
    for (at, index) in crate::indices(&shape).enumerate() {
        args.outputs[0].set(&index, a[at] + b[at]);
    }
    Ok(())
}

/// x (external 0) and a constant into the arena, twice that into external 1, and once more in place.
fn example() -> Layout {
    let constant = Tensor::from_f64(DType::F32, &[4], &[10., 20., 30., 40.]);
    let call = |inputs, output, scratch| Call { inputs, outputs: vec![output], scratch, ..Call::default() };
    let (sum, out) = (operand(&[3], Root::Arena, 64), operand(&[3], Root::External(1), 0));
    Layout {
        arena: 256,
        slots: vec![Slot::read("x", DType::F32, &[3]), Slot::written("y", DType::F32, &[3])],
        constants: vec![Arc::new(constant)],
        calls: vec![
            call(
                vec![Some(operand(&[3], Root::External(0), 0)), Some(operand(&[3], Root::Constant(0), 4))],
                sum.clone(),
                0..64,
            ),
            call(vec![Some(sum.clone()), Some(sum.clone())], out.clone(), 128..256),
            call(vec![Some(sum), None], out, 0..0),
        ],
    }
}

fn run(program: &Program, x: &[f64]) -> Result<Vec<f64>, ExternalError> {
    let (x, mut y) = (Tensor::from_f64(DType::F32, &[x.len() as i64], x), Tensor::zeros(DType::F32, &[x.len() as i64]));
    {
        let (x, mut y) = (x.view(), y.view_mut());
        let mut externals = [External::Read(x.as_ref()), External::Write(y.as_mut())];
        let mut running = program.enter(&mut externals)?;
        for at in 0..program.len() {
            add(running.call(at, Threads::ONE)).unwrap();
        }
    }
    Ok(y.to_f64())
}

#[test]
fn calls_read_and_write_where_they_were_told() {
    let program = Program::new(example(), Arc::default()).unwrap();
    for _ in 0..3 {
        assert_eq!(run(&program, &[1., 2., 3.]).unwrap(), [63., 96., 129.]);
    }
    let scratch = |at| {
        let (x, mut y) = (Tensor::zeros(DType::F32, &[3]), Tensor::zeros(DType::F32, &[3]));
        let (x, mut y) = (x.view(), y.view_mut());
        let mut externals = [External::Read(x.as_ref()), External::Write(y.as_mut())];
        let mut running = program.enter(&mut externals).unwrap();
        running.call(at, Threads::ONE).workspace().left()
    };
    assert_eq!([scratch(0), scratch(1), scratch(2)], [64, 128, 0]);
}

/// Tensors at other addresses than those of the run before.
#[test]
fn tensors_may_be_others_at_each_run() {
    let program = Program::new(example(), Arc::default()).unwrap();
    let inputs = [1., 2.].map(|x| Tensor::from_f64(DType::F32, &[3], &[x; 3]));
    let mut outputs = [Tensor::zeros(DType::F32, &[3]), Tensor::zeros(DType::F32, &[3])];
    for (x, y) in [(0, 0), (1, 1), (0, 1), (1, 0)] {
        {
            let (x, mut y) = (inputs[x].view(), outputs[y].view_mut());
            let mut externals = [External::Read(x.as_ref()), External::Write(y.as_mut())];
            let mut running = program.enter(&mut externals).unwrap();
            (0..program.len()).for_each(|at| add(running.call(at, Threads::ONE)).unwrap());
        }
        assert_eq!(outputs[y].to_f64()[0], 60. + 3. * (x as f64 + 1.));
    }
}

#[test]
fn callers_at_once_do_not_meet() {
    let program = Program::new(example(), Arc::default()).unwrap();
    std::thread::scope(|scope| {
        for caller in 0..8 {
            let program = &program;
            scope.spawn(move || {
                let x = f64::from(caller);
                for _ in 0..50 {
                    assert_eq!(run(program, &[x, x, x]).unwrap()[0], 60. + 3. * x);
                }
            });
        }
    });
    assert!(program.arenas.bytes() <= arenas::KEPT * 256);
}

#[test]
fn programs_share_arenas() {
    let arenas = Arc::new(Arenas::default());
    let small = Program::new(example(), arenas.clone()).unwrap();
    let large = Program::new(Layout { arena: 1 << 16, ..example() }, arenas.clone()).unwrap();
    for _ in 0..2 {
        run(&small, &[1., 2., 3.]).unwrap();
        run(&large, &[1., 2., 3.]).unwrap();
        assert_eq!(run(&small, &[1., 2., 3.]).unwrap(), [63., 96., 129.]);
    }
    assert_eq!(arenas.bytes(), 1 << 16);
}

/// A tensor may be moved out of the slice a kernel gets: the next run has it again.
#[test]
fn what_a_kernel_does_to_the_list_of_its_outputs_is_forgotten() {
    let program = Program::new(example(), Arc::default()).unwrap();
    let (x, mut y) = (Tensor::zeros(DType::F32, &[3]), Tensor::zeros(DType::F32, &[3]));
    let (x, mut y) = (x.view(), y.view_mut());
    let mut externals = [External::Read(x.as_ref()), External::Write(y.as_mut())];
    let mut running = program.enter(&mut externals).unwrap();
    let mut shapes = Vec::new();
    for _ in 0..2 {
        let mut args = running.call(1, Threads::ONE);
        shapes.push(args.outputs[0].shape().to_vec());
        let other: &'static mut Tensor = Box::leak(Box::new(Tensor::zeros(DType::F32, &[1])));
        let view: &'static mut crate::TensorViewMut<'static> = Box::leak(Box::new(other.view_mut()));
        args.outputs[0] = view.as_mut();
    }
    assert_eq!(shapes, [[3], [3]]);
}

#[test]
fn tensors_of_another_kind_are_refused() {
    let program = Program::new(example(), Arc::default()).unwrap();
    let zeros = |dtype, shape: &[i64]| Tensor::zeros(dtype, shape);
    let message =
        |x: TensorRef<'_>, y: External<'_>| program.enter(&mut [External::Read(x), y]).err().unwrap().to_string();
    let (x, y) = (zeros(DType::F32, &[3]), &mut zeros(DType::F32, &[3]));
    let mut good = y.view_mut();
    let other = zeros(DType::F64, &[3]);
    let wanted = "the program takes row-major float32 [3] in host memory";
    let said = message(other.view().as_ref(), External::Write(good.as_mut()));
    assert_eq!(said, format!("'x' is float64 [3] strides [1], {wanted}"));
    let long = zeros(DType::F32, &[4]);
    let said = message(long.view().as_ref(), External::Write(good.as_mut()));
    assert_eq!(said, format!("'x' is float32 [4] strides [1], {wanted}"));
    let said = message(TensorRef::ABSENT, External::Write(good.as_mut()));
    assert_eq!(said, format!("'x' is no tensor, {wanted}"));
    let wide = zeros(DType::F32, &[6]);
    let apart = crate::TensorView::strided(DType::F32, &[3], &[2], 0, wide.bytes()).unwrap();
    let said = message(apart.as_ref(), External::Write(good.as_mut()));
    assert_eq!(said, format!("'x' is float32 [3] strides [2], {wanted}"));
    let odd = crate::TensorView::contiguous(DType::F32, &[3], &wide.bytes()[1..13]).unwrap();
    assert!(message(odd.as_ref(), External::Write(good.as_mut())).contains("which is no multiple of 4"));
    // SAFETY: nothing is read: the address is refused.
    let null = unsafe { TensorRef::new(DType::F32, &[3], &[1], std::ptr::null()) };
    assert!(message(null, External::Write(good.as_mut())).starts_with("the address of 'x' is 0x0"));
    let said = message(x.view().as_ref(), External::Read(good.as_view().as_ref()));
    assert_eq!(said, "'y' is written, and may only be read");
    assert!(matches!(program.enter(&mut []), Err(ExternalError::Count { given: 0, wanted: 2 })));
    // SAFETY: the same memory twice, which is what must be refused before anybody looks at it.
    let same = unsafe { TensorRef::new(DType::F32, &[3], &[1], good.as_mut().address() as *const u8) };
    let shared = message(same, External::Write(good.as_mut()));
    assert_eq!(shared, "'y' is written, and shares memory with 'x'");
}

#[test]
fn an_arena_that_cannot_be_is_an_error() {
    let program = Program::new(Layout { arena: usize::MAX / 2, ..example() }, Arc::default()).unwrap();
    assert_eq!(run(&program, &[1., 2., 3.]), Err(ExternalError::NoArena(usize::MAX / 2)));
}

/// A call that reads one tensor and writes another, with scratch memory.
fn one(input: Operand, output: Operand, scratch: std::ops::Range<usize>) -> Layout {
    Layout {
        calls: vec![Call { inputs: vec![Some(input)], outputs: vec![output], scratch, ..Call::default() }],
        ..example()
    }
}

#[test]
fn places_that_are_not_safe_are_refused() {
    let said = |layout: Layout| Program::new(layout, Arc::default()).err().map(|why| why.what).unwrap_or_default();
    let (x, y) = (operand(&[3], Root::External(0), 0), operand(&[3], Root::External(1), 0));
    assert_eq!(said(one(x.clone(), y.clone(), 0..64)), "");
    assert!(
        said(one(operand(&[4], Root::External(0), 0), y.clone(), 0..0)).contains("needs 16 bytes, the buffer has 12")
    );
    assert!(said(one(operand(&[3], Root::External(0), 4), y.clone(), 0..0)).contains("needs 16 bytes"));
    assert!(said(one(operand(&[3], Root::Arena, 248), y.clone(), 0..0)).contains("the buffer has 256"));
    assert!(said(one(operand(&[1], Root::Arena, 2), y.clone(), 0..0)).contains("no place of float32"));
    assert!(
        said(one(operand(&[1], Root::Constant(1), 0), y.clone(), 0..0)).contains("constant 1, which does not exist")
    );
    assert!(said(one(operand(&[5], Root::Constant(0), 0), y.clone(), 0..0)).contains("the buffer has 16"));
    assert!(
        said(one(operand(&[1], Root::External(2), 0), y.clone(), 0..0)).contains("external 2, which does not exist")
    );
    assert_eq!(
        said(one(x.clone(), operand(&[1], Root::Constant(0), 0), 0..0)),
        "output 0 is a constant, and is written"
    );
    assert_eq!(said(one(y.clone(), x.clone(), 0..0)), "output 0 is written, and 'x' may only be read");
    assert_eq!(said(one(y.clone(), y.clone(), 0..0)), "output 0 lies over input 0");
    let in_arena = |offset| operand(&[16], Root::Arena, offset);
    assert_eq!(said(one(in_arena(0), in_arena(32), 0..0)), "output 0 lies over input 0");
    assert_eq!(said(one(in_arena(0), in_arena(64), 128..256)), "");
    assert_eq!(said(one(in_arena(0), in_arena(128), 64..192)), "output 0 lies over the scratch memory");
    assert_eq!(said(one(in_arena(0), in_arena(64), 0..64)), "input 0 lies over the scratch memory");
    assert!(said(one(x.clone(), y.clone(), 32..64)).starts_with("scratch memory 32..64"));
    assert!(said(one(x.clone(), y.clone(), 192..320)).starts_with("scratch memory"));
    let repeated = Operand { shape: [4, 3].as_slice().into(), strides: [0, 1].as_slice().into(), ..y.clone() };
    assert!(said(one(x.clone(), repeated.clone(), 0..0)).contains("two indices for one element"));
    assert_eq!(said(one(Operand { place: x.place, ..repeated }, y.clone(), 0..0)), "");
    let wide = Operand { dtype: DType::F64, shape: [1].as_slice().into(), ..x.clone() };
    assert_eq!(said(one(wide, y.clone(), 0..0)), "input 0 is float64, which 'x' is not aligned for");
    let many = Layout { calls: vec![Call { outputs: vec![y; 5], ..Call::default() }], ..example() };
    assert_eq!(said(many), "5 outputs, at most 4 are possible");
}

proptest! {
    /// A layout is accepted only if no byte that is written is used by another tensor of the call or by its scratch memory.
    #[test]
    fn accepted_places_are_apart(
        places in proptest::collection::vec((0usize..24, 0i64..9, 1i64..3), 2..5), outputs in 1usize..3,
        scratch in 0usize..4,
    ) {
        let operands: Vec<Operand> = places
            .iter()
            .map(|&(first, n, stride)| Operand { strides: [stride].as_slice().into(), ..operand(&[n], Root::Arena, first * 4) })
            .collect();
        let (inputs, written) = operands.split_at(operands.len() - outputs);
        let call = Call {
            inputs: inputs.iter().cloned().map(Some).collect(),
            outputs: written.to_vec(),
            scratch: 0..scratch * 64,
            ..Call::default()
        };
        let accepted = Program::new(Layout { arena: 128, calls: vec![call], ..Layout::default() }, Arc::default()).is_ok();
        // Byte by byte, over the whole range of a tensor.
        let range = |one: &Operand| {
            let bytes = Bytes::of(DType::F32, &one.shape, &one.strides, one.place.offset);
            bytes.start..bytes.end
        };
        let mut users = [(0, 0); 512];
        for (at, one) in operands.iter().enumerate() {
            for byte in range(one) {
                users[byte].0 += 1;
                users[byte].1 += usize::from(at >= inputs.len());
            }
        }
        (0..scratch * 64).for_each(|byte| { users[byte].0 += 1; users[byte].1 += 1; });
        let apart = users.iter().all(|&(all, written)| written == 0 || all == 1);
        let inside = operands.iter().all(|one| range(one).end <= 128) && scratch * 64 <= 128;
        prop_assert_eq!(accepted, apart && inside);
    }
}
