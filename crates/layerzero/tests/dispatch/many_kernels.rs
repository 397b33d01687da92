//! One call, static and dynamic kernels behind it.

use super::*;

#[test]
fn static_and_dynamic_kernels_stand_behind_the_same_call() {
    let w = Watched::new();
    let x = input();
    let by_reference = rms(&w.engine, &x).unwrap();
    assert_eq!((by_reference.op, &*by_reference.kernel_id), ("norm.rms", "lz_cpu.ref.norm.rms"));
    assert_close(&by_reference.output().unwrap().to_f64(), &rms_by_hand(&x), 1e-6);

    w.engine.register(descriptor("test.rms", "norm.rms", 80), fill(7.0)).unwrap();
    let done = rms(&w.engine, &x).unwrap();
    assert_eq!(done.kernel_id, "test.rms");
    assert_eq!(done.outputs.len(), 1);
    assert_eq!(done.outputs[0].0, "output");
    assert_eq!(done.output().unwrap(), &Tensor::from_f64(DType::F32, &[2, 4], &[7.0; 8]));
    assert!(done.failures.is_empty() && w.warnings().is_empty());

    let kinds = w.engine.list_kernels(Some("rms_norm")).unwrap();
    let kinds: Vec<(&str, &str)> = kinds.iter().map(|k| (k.kernel_id.as_str(), k.dispatch)).collect();
    assert_eq!(kinds, [("lz_cpu.ref.norm.rms", "static"), ("test.rms", "dynamic")]);
}

#[test]
fn a_dynamic_kernel_gets_the_arguments_checked_and_completed() {
    let w = Watched::new();
    let seen = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&seen);
    let kernel = code(move |args| {
        assert_eq!(args.op().id(), "norm.rms");
        assert_eq!((args.dim("rows"), args.dim("hidden")), (2, 4));
        assert_eq!(args.param("eps").as_float(), Some(1e-6));
        assert!(args.input("weight").is_none());
        assert_eq!(args.input("x").unwrap().shape(), [2, 4]);
        assert_eq!((args.outputs.len(), args.outputs[0].shape()), (1, &[2, 4][..]));
        count.fetch_add(1, Ordering::Relaxed);
        Ok(())
    });
    w.engine.register(descriptor("test.rms", "norm.rms", 80), kernel).unwrap();
    let done = rms(&w.engine, &input()).unwrap();
    assert_eq!((done.kernel_id.as_str(), seen.load(Ordering::Relaxed)), ("test.rms", 1), "{:?}", done.failures);
}
