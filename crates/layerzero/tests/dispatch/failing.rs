//! Kernels that fail.

use super::*;

#[test]
fn a_kernel_that_fails_in_any_way_is_followed_by_the_next_and_at_last_by_the_reference() {
    let w = Watched::new();
    let out_of_memory = KernelError::OutOfMemory("4 GiB".into());
    let engine = &w.engine;
    engine.register(descriptor("test.first", "norm.rms", 90), fails(KernelError::Failed("no luck".into()))).unwrap();
    engine.register(descriptor("test.second", "norm.rms", 80), code(|_| panic!("at {}", "the disco"))).unwrap();
    engine.register(descriptor("test.third", "norm.rms", 70), fails(out_of_memory.clone())).unwrap();
    // Writes half of the result before it gives up.
    let half = code(|args: &mut KernelArgs<'_, '_>| {
        args.outputs[0].set(&[0, 0], 99.0);
        Err(KernelError::Failed("half way".into()))
    });
    engine.register(descriptor("test.fourth", "norm.rms", 60), half).unwrap();

    let x = input();
    let done = rms(engine, &x).unwrap();
    assert_eq!(done.kernel_id, "lz_cpu.ref.norm.rms");
    assert_close(&done.output().unwrap().to_f64(), &rms_by_hand(&x), 1e-6);
    let failure = |id: &str, error| Failure { kernel_id: id.into(), error };
    assert_eq!(
        done.failures,
        [
            failure("test.first", KernelError::Failed("no luck".into())),
            failure("test.second", KernelError::Failed("panicked: at the disco".into())),
            failure("test.third", out_of_memory),
            failure("test.fourth", KernelError::Failed("half way".into())),
        ]
    );
    let plan = engine.select("rms_norm", &rms_call(&[2, 4])).unwrap();
    assert_eq!(plan, ["test.first", "test.second", "test.third", "test.fourth", "lz_cpu.ref.norm.rms"]);
}

#[test]
fn a_chain_longer_than_a_plan_still_ends_in_the_reference() {
    let w = Watched::new();
    // They are all of one backend, whose breaker would open on the way.
    w.engine.configure([("breaker.enabled".to_owned(), false.into())]).unwrap();
    for i in 0..20 {
        let kernel = descriptor(&format!("test.k{i:02}"), "norm.rms", 90 - i);
        w.engine.register(kernel, fails(KernelError::Failed(format!("{i}")))).unwrap();
    }
    let x = input();
    let done = rms(&w.engine, &x).unwrap();
    assert_eq!(done.kernel_id, "lz_cpu.ref.norm.rms");
    assert_close(&done.output().unwrap().to_f64(), &rms_by_hand(&x), 1e-6);
    let tried: Vec<&str> = done.failures.iter().map(|f| f.kernel_id.as_str()).collect();
    assert_eq!(tried, ["test.k00", "test.k01", "test.k02", "test.k03", "test.k04", "test.k05"]);
}

#[test]
fn a_fallback_is_said_once_a_minute() {
    let w = Watched::new();
    w.engine.register(descriptor("test.rms", "norm.rms", 90), fails(KernelError::Failed("no luck".into()))).unwrap();
    let x = input();
    for at in [0, 1, 30_000, 59_999] {
        w.at(at);
        rms(&w.engine, &x).unwrap();
    }
    let expected = Warning::FellBack {
        op: "norm.rms",
        failed: "test.rms".into(),
        error: "no luck".into(),
        served: "lz_cpu.ref.norm.rms".into(),
        factor: None,
    };
    assert_eq!(w.warnings(), std::slice::from_ref(&expected));
    for word in ["norm.rms", "test.rms", "no luck", "lz_cpu.ref.norm.rms"] {
        assert!(expected.to_string().contains(word), "{expected}");
    }
    // Another cause is not silenced by this one.
    w.engine
        .register(descriptor("test.gelu", "activation.gelu", 90), fails(KernelError::Failed("no luck".into())))
        .unwrap();
    w.engine.dispatch("gelu", Arguments::new().input("x", x.view())).unwrap();
    assert_eq!(w.warnings().len(), 2);
    w.at(60_000);
    rms(&w.engine, &x).unwrap();
    rms(&w.engine, &x).unwrap();
    assert_eq!(w.warnings().len(), 3);
    assert_eq!(w.warnings()[2], expected);
}

#[test]
fn without_fallback_the_first_failure_is_the_end() {
    let w = Watched::new();
    w.engine.register(descriptor("test.rms", "norm.rms", 90), fails(KernelError::OutOfMemory("4 GiB".into()))).unwrap();
    w.settings(|s| s.fallback_enabled = false);
    let error = rms(&w.engine, &input()).unwrap_err();
    assert_eq!(error.code(), "KERNEL_EXECUTION_FAILED");
    let text = error.to_string();
    let Error::Execution { op, chain } = error else { panic!("{error}") };
    assert_eq!(op, "norm.rms");
    assert_eq!(chain, [Failure { kernel_id: "test.rms".into(), error: KernelError::OutOfMemory("4 GiB".into()) }]);
    assert!(text.contains("test.rms") && text.contains("4 GiB"), "{text}");
    assert!(w.warnings().is_empty());
    w.settings(|s| s.fallback_enabled = true);
    assert_eq!(rms(&w.engine, &input()).unwrap().kernel_id, "lz_cpu.ref.norm.rms");
}

fn bad_data() -> KernelError {
    KernelError::BadData { input: "indices", at: vec![0], value: 9, expected: "but the table has 3 rows".into() }
}

#[test]
fn bad_data_stops_the_chain() {
    let w = Watched::new();
    let ran = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&ran);
    w.engine.register(descriptor("test.first", "embedding.lookup", 90), fails(bad_data())).unwrap();
    let counting = code(move |_| {
        count.fetch_add(1, Ordering::Relaxed);
        Ok(())
    });
    w.engine.register(descriptor("test.second", "embedding.lookup", 80), counting).unwrap();
    let (ids, table) = (Tensor::from_ints(DType::I64, &[1], &[0]), tensor(DType::F32, &[3, 2], 0));
    let call = |ids: &Tensor| {
        w.engine.dispatch("embedding", Arguments::new().input("indices", ids.view()).input("weight", table.view()))
    };
    let error = call(&ids).unwrap_err();
    assert!(error.hint().contains("data of the call is invalid"), "{}", error.hint());
    let Error::Execution { chain, .. } = error else { panic!() };
    assert_eq!(chain, [Failure { kernel_id: "test.first".into(), error: bad_data() }]);
    assert_eq!(ran.load(Ordering::Relaxed), 0);

    // The reference says so as well, after another kernel merely failed.
    w.engine.unregister("test.first", "1.0").unwrap();
    w.engine.unregister("test.second", "1.0").unwrap();
    w.engine
        .register(descriptor("test.first", "embedding.lookup", 90), fails(KernelError::Failed("no luck".into())))
        .unwrap();
    let Error::Execution { chain, .. } = call(&Tensor::from_ints(DType::I64, &[1], &[9])).unwrap_err() else {
        panic!()
    };
    assert_eq!(chain.len(), 2);
    assert!(matches!(&chain[1].error, KernelError::BadData { input: "indices", value: 9, .. }), "{chain:?}");
}
