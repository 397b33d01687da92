//! Registering, several versions, refusals.

use super::*;

#[test]
fn of_several_versions_the_newest_is_preferred_and_any_can_be_locked_or_removed() {
    let w = Watched::new();
    for (number, result) in [("1.9", 19.0), ("1.10", 110.0), ("1.2", 12.0)] {
        w.engine.register(version(number), fill(result)).unwrap();
    }
    let x = input();
    let result = || rms(&w.engine, &x).unwrap().output().unwrap().to_f64()[0];
    let which = || w.engine.which("norm.rms", &rms_call(&[2, 4])).unwrap().version;
    assert_eq!((result(), which().as_str()), (110.0, "1.10"));

    w.engine.update(|spec| spec.policy = PolicySpec::default().lock("norm.rms", "test.rms@1.2")).unwrap();
    assert_eq!((result(), which().as_str()), (12.0, "1.2"));
    let locked_out = w.engine.validate("test.rms@1.10", &rms_call(&[2, 4])).unwrap();
    assert_eq!(locked_out, [Reason::PolicyLocked { locked: "test.rms@1.2".into() }]);
    assert_eq!(w.engine.validate("test.rms@1.2", &rms_call(&[2, 4])).unwrap(), []);

    w.engine.update(|spec| spec.policy = PolicySpec::default()).unwrap();
    w.engine.unregister("test.rms", "1.10").unwrap();
    assert_eq!((result(), which().as_str()), (19.0, "1.9"));
    w.engine.register(version("1.10"), fill(111.0)).unwrap();
    assert_eq!(result(), 111.0, "the implementation went with its registration");
    for number in ["1.10", "1.9", "1.2"] {
        w.engine.unregister("test.rms", number).unwrap();
    }
    assert_eq!(rms(&w.engine, &x).unwrap().kernel_id, "lz_cpu.ref.norm.rms");
    let again = w.engine.unregister("test.rms", "1.2").unwrap_err();
    assert_eq!(again.code(), "UNKNOWN_KERNEL");
}

#[test]
fn a_newer_version_that_fails_is_followed_by_the_older() {
    let w = Watched::new();
    w.engine.register(version("2.0"), fails(KernelError::Failed("regression".into()))).unwrap();
    w.engine.register(version("1.0"), fill(1.0)).unwrap();
    let done = rms(&w.engine, &input()).unwrap();
    assert_eq!((done.failures.len(), done.output().unwrap().to_f64()[0]), (1, 1.0));
}

#[test]
fn a_registration_that_is_refused_leaves_the_engine_as_it_was() {
    let w = Watched::new();
    w.engine.register(version("1.0"), fill(1.0)).unwrap();
    let x = input();
    rms(&w.engine, &x).unwrap();
    let before = seen(&w.engine);

    let broken = |change: fn(&mut KernelDescriptor)| {
        let mut kernel = descriptor("other.kernel", "norm.rms", 90);
        kernel.backend = "other".into();
        change(&mut kernel);
        kernel
    };
    let refused: [(KernelDescriptor, &str); 7] = [
        (version("1.0"), "'test.rms' version 1.0 is registered twice"),
        (broken(|k| k.conditions = vec!["rows >".into()]), "other.kernel"),
        (broken(|k| k.conditions = vec!["rwos > 1".into()]), "rwos"),
        (broken(|k| drop(k.dims.insert("hiden".into(), DimRule::default()))), "hiden"),
        (
            broken(|k| {
                k.dims.insert("hidden".into(), DimRule { multiple_of: Some(0), ..DimRule::default() });
            }),
            "multiple_of",
        ),
        (broken(|k| k.layouts = vec![Layout::Bshd]), "no named layouts"),
        (broken(|k| k.operation = "norm.rsm".into()), "norm.rms"),
    ];
    for (kernel, words) in refused {
        let error = w.engine.register(kernel, fill(9.0)).unwrap_err();
        assert_eq!(error.code(), "INVALID_CONFIGURATION", "{error}");
        assert!(error.to_string().contains(words), "{error}");
        assert_eq!(seen(&w.engine), before);
        assert_eq!(rms(&w.engine, &x).unwrap().output().unwrap().to_f64()[0], 1.0);
    }
    let error = w.engine.update(|spec| spec.policy = PolicySpec::default().lock("norm.rsm", "x")).unwrap_err();
    assert!(error.to_string().contains("norm.rsm"), "{error}");
    assert_eq!(seen(&w.engine), before);
}
