//! What explanations, errors and warnings say is true, and short.

use std::collections::BTreeMap;

use super::*;

/// Times by kernel id.
struct Times(BTreeMap<&'static str, f64>);

impl PerfSource for Times {
    fn estimate(&self, kernel: &KernelDescriptor, _: &Facts<'_>) -> Option<Estimate> {
        let &median_us = self.0.get(kernel.id.as_str())?;
        let (spread_us, samples, kind) = (1.0, 20, EstimateKind::Measured);
        Some(Estimate { median_us, spread_us, apart_us: None, sides: None, samples, kind, trusted: true })
    }

    fn edges(&self, _: OpIx) -> Vec<(usize, i64)> {
        Vec::new()
    }
}

fn measure(w: &World, times: &[(&'static str, f64)]) {
    let times = Arc::new(Times(times.iter().copied().collect()));
    w.engine.update(|spec| spec.perf = times).unwrap();
}

fn why(w: &World) -> String {
    w.engine.explain("rms_norm", &call(&[2, 4])).unwrap().why.unwrap().message
}

#[test]
fn an_override_whose_circuit_is_open_put_nothing_first() {
    let w = World::with_kernels(&["good.rms"]);
    w.engine.register(descriptor("flaky.rms", 10), Flaky::failing("no luck").kernel()).unwrap();
    w.set("degradation.enabled", false);
    let policy = PolicySpec::default().rule(
        "mine",
        None,
        Condition::Always,
        Action::Override(Pattern::Kernel("flaky.*".into())),
    );
    w.engine.update(|spec| spec.policy = policy).unwrap();
    assert_eq!(why(&w), "put first by 'mine'");
    for _ in 0..5 {
        rms(&w.engine).unwrap();
    }
    let report = w.engine.explain("rms_norm", &call(&[2, 4])).unwrap();
    assert_eq!((report.chosen.as_deref(), report.overridden_by), (Some("good.rms"), None));
    let told = why(&w);
    assert!(told.starts_with("next in line after flaky.rms, which is out: "), "{told}");
    assert!(told.ends_with("the circuit of flaky.rms is open: no luck"), "{told}");
}

#[test]
fn where_times_decide_the_table_shows_no_scores() {
    let w = World::with_kernels(&["slow.rms", "fast.rms"]);
    let table = || w.engine.explain("rms_norm", &call(&[2, 4])).unwrap().to_string();
    let header = |table: &str| table.lines().find(|line| line.contains(" kernel ")).unwrap().to_owned();
    assert!(header(&table()).contains("score"), "{}", table());
    measure(&w, &[("slow.rms", 20.0), ("fast.rms", 10.0)]);
    let timed = table();
    assert!(timed.contains("chosen   fast.rms (fastest measured)"), "{timed}");
    assert!(!header(&timed).contains("score") && !timed.contains("priority"), "{timed}");
    let at = |kernel: &str| timed.find(&format!("  {kernel} ")).unwrap();
    assert!(at("fast.rms") < at("slow.rms"), "{timed}");
}

#[test]
fn a_fallback_is_slower_or_faster_by_more_than_one() {
    let cases = [
        (20.0, ", 2.0 times slower"),
        (9.0, ", 1.1 times faster"),
        (10.2, "call"),
        (9.8, "call"),
        (5.0, ", 2.0 times faster"),
    ];
    for (other, expected) in cases {
        let w = World::with_kernels(&["good.rms"]);
        w.engine.register(descriptor("flaky.rms", 99), Flaky::failing("no luck").kernel()).unwrap();
        let policy = PolicySpec::default().rule(
            "mine",
            None,
            Condition::Always,
            Action::Override(Pattern::Kernel("flaky.*".into())),
        );
        w.engine.update(|spec| spec.policy = policy).unwrap();
        measure(&w, &[("flaky.rms", 10.0), ("good.rms", other)]);
        assert_eq!(rms(&w.engine).unwrap().kernel_id, "good.rms");
        let warnings: Vec<String> = w.warnings.lock().unwrap().iter().map(ToString::to_string).collect();
        assert!(warnings.len() == 1 && warnings[0].ends_with(expected), "{other}: {warnings:?}");
    }
}

/// Kernels for hardware this is not, in numbers.
fn with_gpu_kernels() -> World {
    let w = World::new();
    for i in 0..40 {
        let mut kernel = descriptor(&format!("gpu.rms.{i:02}"), 50);
        kernel.platforms = vec![Platform::Cuda];
        w.engine.register(kernel, fill(1.0)).unwrap();
    }
    w
}

#[test]
fn a_lock_that_cannot_be_served_is_an_error_of_two_lines() {
    let w = with_gpu_kernels();
    let mut narrow = descriptor("narrow.rms", 50);
    narrow.dtypes = DTypeSet::of(&[DType::Bf16]);
    w.engine.register(narrow, fill(1.0)).unwrap();
    let lock =
        |kernel: &str| w.engine.update(|spec| spec.policy = PolicySpec::default().lock("rms_norm", kernel)).unwrap();
    lock("narrow.rms");
    let error = rms(&w.engine).unwrap_err().to_string();
    assert_eq!(
        error,
        "no kernel available for 'norm.rms': 'narrow.rms' is locked and cannot serve the call\n  \
         narrow.rms: [DTYPE_UNSUPPORTED] 'input' is float32, the kernel takes bfloat16"
    );
    // All reasons are in the error as data.
    let Error::NoKernel { rejections, .. } = rms(&w.engine).unwrap_err() else { panic!("no such error") };
    assert!(rejections.len() > 40);
    lock("gpu.*");
    let error = rms(&w.engine).unwrap_err().to_string();
    assert!(error.lines().count() <= 8 && error.ends_with("and 34 more"), "{error}");
}

#[test]
fn kernels_for_other_hardware_and_libraries_that_are_missing_are_counted() {
    let w = with_gpu_kernels();
    let mut absent = descriptor("absent.rms", 50);
    absent.backend = "absent".into();
    w.engine.register(absent, fill(1.0)).unwrap();
    w.engine
        .update(|spec| {
            spec.backends.get_mut("absent").unwrap().unavailable =
                Some(Reason::NotInstalled { library: "absent".into() });
            spec.policy = PolicySpec::default().deny("lz_cpu.*");
        })
        .unwrap();
    let error = rms(&w.engine).unwrap_err().to_string();
    let lines: Vec<&str> = error.lines().collect();
    assert_eq!(lines.len(), 4, "{error}");
    assert!(lines[1].contains("lz_cpu.ref.norm.rms: [POLICY_DENIED]"), "{error}");
    assert_eq!(lines[2..], ["  not installed: absent", "  40 kernels are for other hardware"]);
}

#[test]
fn a_warning_about_the_reference_names_only_what_could_run_here() {
    let w = with_gpu_kernels();
    let told = |w: &World| {
        let (_, bound) = w.engine.bind("rms_norm", &call(&[2, 4])).unwrap();
        w.engine.process().warn_of_reference(&bound.query);
        w.warnings.lock().unwrap().iter().map(ToString::to_string).collect::<Vec<_>>()
    };
    assert_eq!(told(&w), [""; 0], "nothing here is faster");
    for i in 0..5 {
        let mut narrow = descriptor(&format!("narrow.rms.{i}"), 50);
        narrow.dtypes = DTypeSet::of(&[DType::Bf16]);
        w.engine.register(narrow, fill(1.0)).unwrap();
    }
    let warnings = told(&w);
    assert!(warnings[0].contains("(narrow.rms.0: 'input' is float32, the kernel takes bfloat16; "), "{warnings:?}");
    assert!(warnings[0].ends_with("; and 2 more)") && !warnings[0].contains("gpu."), "{warnings:?}");
}
