//! Operations that update tensors in place.

use super::*;

fn cache_kernel(id: &str, op: &str, kernel: Arc<dyn DynamicKernel>) -> (KernelDescriptor, Arc<dyn DynamicKernel>) {
    let mut descriptor = descriptor(id, op, 90);
    descriptor.dtypes = DTypeSet::FLOATS_AND_FP8;
    descriptor.layouts = vec![Layout::Nhd, Layout::Hnd, Layout::Strided];
    (descriptor, kernel)
}

/// Writes nonsense where it should write, then fails.
fn vandal() -> Arc<dyn DynamicKernel> {
    code(|args| {
        let block_size = args.dim("block_size");
        let in_pages: Vec<(i64, Option<i64>)> = match args.op().id() {
            "kv_cache.append" => {
                let slots = args.input("slot_mapping").unwrap();
                let listed = (0..slots.shape()[0]).map(|i| slots.get_int(&[i])).filter(|&slot| slot >= 0);
                listed.map(|slot| (slot / block_size, Some(slot % block_size))).collect()
            }
            _ => {
                let moves = args.input("moves").unwrap();
                (0..moves.shape()[0]).map(|i| (moves.get_int(&[i, 1]), None)).collect()
            }
        };
        for output in args.outputs.iter_mut() {
            for index in indices(output.shape()) {
                if in_pages.iter().any(|&(page, slot)| index[0] == page && slot.is_none_or(|slot| index[1] == slot)) {
                    output.set(&index, 1.0);
                }
            }
        }
        Err(KernelError::Failed("gave up".into()))
    })
}

#[test]
fn a_kernel_that_scribbles_on_the_cache_and_fails_leaves_no_trace() {
    let w = Watched::new();
    for op in ["kv_cache.append", "kv_cache.compact"] {
        let (descriptor, kernel) = cache_kernel(&format!("vandal.{op}"), op, vandal());
        w.engine.register(descriptor, kernel).unwrap();
    }
    let fresh = || [tensor(DType::F16, &[3, 2, 2, 2], 5), tensor(DType::F16, &[3, 2, 2, 2], 6)];
    let new = [tensor(DType::F16, &[2, 2, 2], 7), tensor(DType::F16, &[2, 2, 2], 8)];
    let slots = Tensor::from_ints(DType::I64, &[2], &[4, -1]);
    let moves = Tensor::from_ints(DType::I32, &[1, 2], &[2, 0]);

    let [mut keys, mut values] = fresh();
    let done = w
        .engine
        .dispatch(
            "kv_append",
            Arguments::new()
                .input("key", new[0].view())
                .input("value", new[1].view())
                .input("slot_mapping", slots.view())
                .update("key_cache", keys.view_mut())
                .update("value_cache", values.view_mut()),
        )
        .unwrap();
    assert_eq!((done.kernel_id.as_str(), done.failures.len()), ("lz_cpu.ref.kv_cache.append", 1));
    assert!(done.outputs.is_empty(), "the caches were updated in place");
    for ((cache, old), new) in [keys, values].iter().zip(fresh()).zip(&new) {
        let mut want = old.to_f64();
        want[16..20].copy_from_slice(&new.to_f64()[..4]); // slot 4 is the first slot of page 2
        assert_eq!(cache.to_f64(), want);
    }

    let [mut keys, mut values] = fresh();
    let moved = w.engine.dispatch(
        "kv_compact",
        Arguments::new()
            .input("moves", moves.view())
            .update("key_cache", keys.view_mut())
            .update("value_cache", values.view_mut()),
    );
    assert_eq!(moved.unwrap().failures[0].kernel_id, "vandal.kv_cache.compact");
    for (cache, old) in [keys, values].iter().zip(fresh()) {
        let old = old.to_f64();
        let want = [&old[16..], &old[8..]].concat();
        assert_eq!(cache.to_f64(), want, "page 2 became page 0");
    }
}

#[test]
fn a_call_that_fails_altogether_leaves_no_trace_either() {
    let w = Watched::new();
    let (descriptor, kernel) = cache_kernel("vandal", "kv_cache.append", vandal());
    w.engine.register(descriptor, kernel).unwrap();
    let mut caches = [tensor(DType::F32, &[1, 2, 1, 2], 5), tensor(DType::F32, &[1, 2, 1, 2], 6)];
    let before = caches.clone();
    let new = tensor(DType::F32, &[1, 1, 2], 7);
    let beyond = Tensor::from_ints(DType::I64, &[1], &[100]);
    let [keys, values] = &mut caches;
    let error = w
        .engine
        .dispatch(
            "kv_append",
            Arguments::new()
                .input("key", new.view())
                .input("value", new.view())
                .input("slot_mapping", beyond.view())
                .update("key_cache", keys.view_mut())
                .update("value_cache", values.view_mut()),
        )
        .unwrap_err();
    let Error::Execution { chain, .. } = error else { panic!("{error}") };
    assert_eq!(chain.len(), 2);
    assert_eq!(caches, before);
}

#[test]
fn every_bit_of_a_row_is_put_back() {
    let w = Watched::new();
    let (descriptor, kernel) = cache_kernel("vandal", "kv_cache.compact", vandal());
    w.engine.register(descriptor, kernel).unwrap();
    // Page 1 is read and overwritten: the vandal has spoiled it when the reference reads it.
    let moves = Tensor::from_ints(DType::I64, &[2, 2], &[1, 0, 2, 1]);
    // Every code an eight-bit float has, both zeros and every NaN among them.
    let codes: Vec<u8> = (0..=255).collect();
    let page = |i: usize| &codes[64 * i..64 * (i + 1)];
    // A NaN has many codes, of which a conversion gives one; so only pages that are copied are compared bit by bit.
    for dtype in [DType::F8E4M3, DType::F8E5M2] {
        let (mut keys, mut values) = (codes.clone(), codes.clone());
        let shape = [4, 4, 1, 16];
        let done = w.engine.dispatch(
            "kv_compact",
            Arguments::new()
                .input("moves", moves.view())
                .update("key_cache", TensorViewMut::contiguous(dtype, &shape, &mut keys).unwrap())
                .update("value_cache", TensorViewMut::contiguous(dtype, &shape, &mut values).unwrap()),
        );
        assert_eq!(done.unwrap().failures.len(), 1, "the vandal ran");
        for cache in [&keys, &values] {
            let number = |code: u8| TensorView::contiguous(dtype, &[1], &[code]).unwrap().get(&[0]);
            let want = [page(1), page(2), page(2), page(3)].concat();
            for (at, (&got, &want)) in cache.iter().zip(&want).enumerate() {
                let same = got == want || number(got).is_nan() && number(want).is_nan();
                assert!(same, "{dtype}: code {at} is {got:#04x}, expected {want:#04x}");
            }
        }
    }
}

#[test]
fn a_tensor_that_is_updated_must_be_given_as_one() {
    let w = Watched::new();
    let (new, cache) = (tensor(DType::F32, &[1, 1, 2], 1), tensor(DType::F32, &[1, 1, 1, 2], 2));
    let slot = Tensor::from_ints(DType::I64, &[1], &[0]);
    let error = w
        .engine
        .dispatch(
            "kv_append",
            Arguments::new()
                .input("key", new.view())
                .input("value", new.view())
                .input("slot_mapping", slot.view())
                .input("key_cache", cache.view())
                .input("value_cache", cache.view()),
        )
        .unwrap_err();
    assert!(error.to_string().contains("'key_cache'; pass it as an updated tensor"), "{error}");
}

#[test]
fn a_tensor_that_is_only_read_may_not_panic_when_given_as_updated() {
    let result = std::panic::catch_unwind(|| {
        let mut x = input();
        Watched::new().engine.dispatch("rms_norm", Arguments::new().update("x", x.view_mut())).map(|_| ())
    });
    assert!(result.is_ok(), "an error, or a result, but no panic");
}

#[test]
fn a_result_too_large_to_exist_is_an_error_and_not_a_panic() {
    let result = std::panic::catch_unwind(|| {
        let slopes = tensor(DType::F32, &[2], 0);
        let huge = ParamValue::Int(1 << 40);
        let arguments = Arguments::new().input("slopes", slopes.view()).param("seq_q", huge).param("seq_k", huge);
        Watched::new().engine.dispatch("alibi_bias", arguments).map(|_| ())
    });
    assert!(result.expect("no panic").is_err());
}
