//! What the engine says about itself and its choices.

use super::*;

/// An engine with an accepted kernel, one that needs a transform, one that is out, and the reference.
fn mixed() -> Watched {
    let w = Watched::new();
    let mut out = descriptor("test.out", "norm.rms", 95);
    out.dims.insert("hidden".into(), DimRule { min: Some(1000), ..DimRule::default() });
    out.requires = vec!["torch>=2.4".parse().unwrap()];
    let mut turned = descriptor("test.turned", "norm.rms", 60);
    turned.dtypes = DTypeSet::of(&[DType::F64]);
    turned.requires_dtype = Some(DType::F64);
    let mut small = descriptor("test.small", "norm.rms", 95);
    small.dims.insert("rows".into(), DimRule { max: Some(1), ..DimRule::default() });
    for kernel in [out, turned, small, descriptor("test.good", "norm.rms", 80)] {
        w.engine.register(kernel, fill(1.0)).unwrap();
    }
    w.engine.update(|spec| spec.policy = PolicySpec::default().prefer_source("test")).unwrap();
    w
}

#[test]
fn an_explanation_says_what_was_chosen_who_was_considered_and_why_not() {
    let w = mixed();
    let report = w.engine.explain("rms_norm", &rms_call(&[2, 4])).unwrap();
    assert_eq!((report.op, report.chosen.as_deref()), ("norm.rms", Some("test.good")));
    let ids: Vec<&str> = report.candidates.iter().map(|c| c.kernel_id.as_str()).collect();
    assert_eq!(ids[..3], ["test.good", "test.turned", "lz_cpu.ref.norm.rms"]);
    assert_eq!(report.candidates.len(), 5);
    let ranks: Vec<Option<usize>> = report.candidates.iter().map(|c| c.rank).collect();
    assert_eq!(ranks, [Some(1), Some(2), Some(3), None, None]);
    assert_eq!(report.candidates[0].score, Some(100.0), "80 and 20 for the preferred library");
    assert_eq!(report.candidates[1].transforms, ["cast"]);
    assert_eq!(report.candidates[1].score, Some(75.0), "60, 20 for the library, less 5 for a cast");
    assert_eq!(report.rules, ["prefer test"]);

    let json: Value = serde_json::to_value(&report).unwrap();
    assert_eq!(json["schema_version"], "1.0");
    assert_eq!(json["chosen"], "test.good");
    assert_eq!(json["basis"], "declared");
    assert_eq!(json["dims"], serde_json::json!({"rows": 2, "hidden": 4}));
    let candidate =
        |id: &str| json["candidates"].as_array().unwrap().iter().find(|c| c["kernel_id"] == id).unwrap().clone();
    assert_eq!(candidate("test.good")["accepted"], true);
    assert_eq!(candidate("test.good")["terms"]["policy"], 20.0);
    let small = candidate("test.small");
    assert_eq!((&small["accepted"], &small["score"]), (&Value::Bool(false), &Value::Null));
    assert_eq!(small["reasons"][0]["code"], "CONSTRAINT_FAILED");
    assert!(small["reasons"][0]["message"].as_str().unwrap().contains("rows"), "{small}");
    assert_eq!(candidate("test.out")["reasons"][0]["code"], "VERSION_UNSUPPORTED");
    assert_eq!(candidate("test.out")["reasons"][0]["required"], "torch>=2.4");

    let text = report.to_string();
    for id in ids {
        assert!(text.contains(id), "{id} is not in\n{text}");
    }
    for words in ["norm.rms on host", "chosen   test.good", "[CONSTRAINT_FAILED]", "[VERSION_UNSUPPORTED]", "rows=2"] {
        assert!(text.contains(words), "{words} is not in\n{text}");
    }
}

#[test]
fn an_explanation_without_a_choice_says_so() {
    let w = mixed();
    w.engine.update(|spec| spec.policy = PolicySpec::default().lock("norm.rms", "nobody")).unwrap();
    let report = w.engine.explain("norm.rms", &rms_call(&[2, 4])).unwrap();
    assert_eq!(report.chosen, None);
    assert!(report.to_string().contains("no kernel can serve this call"), "{report}");
    let error = rms(&w.engine, &input()).unwrap_err();
    assert_eq!(error.code(), "NO_KERNEL_FOUND");
    let text = error.to_string();
    assert!(
        text.ends_with(": 'nobody' is locked, and no kernel of that name is registered for the operation"),
        "{text}"
    );
}

#[test]
fn everything_the_engine_says_about_a_call_agrees() {
    let w = mixed();
    for shape in [[2, 4], [1, 4], [1, 2000], [3, 1500]] {
        let call = rms_call(&shape);
        let report = w.engine.explain("norm.rms", &call).unwrap();
        let which = w.engine.which("norm.rms", &call).unwrap();
        let plan = w.engine.select("norm.rms", &call).unwrap();
        assert_eq!(report.chosen.as_ref(), Some(&which.kernel_id));
        assert_eq!(Some(which.score), report.candidates[0].score);
        let ranked: Vec<&str> = report.candidates.iter().filter(|c| c.accepted).map(|c| c.kernel_id.as_str()).collect();
        assert_eq!(plan, ranked, "{shape:?}");
        let listed: Vec<String> =
            w.engine.list_kernels(Some("norm.rms")).unwrap().into_iter().map(|k| k.kernel_id).collect();
        let mut considered: Vec<&str> = report.candidates.iter().map(|c| c.kernel_id.as_str()).collect();
        considered.sort_unstable();
        assert_eq!(listed, considered);
        for candidate in &report.candidates {
            let reasons = w.engine.validate(&candidate.kernel_id, &call).unwrap();
            let reported: Vec<Reason> = candidate.reasons.iter().map(|r| r.reason.clone()).collect();
            assert_eq!(reasons, reported, "{}", candidate.kernel_id);
            assert_eq!(reasons.is_empty(), plan.contains(&candidate.kernel_id));
        }
        for info in w.engine.list_kernels(Some("norm.rms")).unwrap() {
            if !info.unavailable.is_empty() {
                assert!(!plan.contains(&info.kernel_id), "{}", info.kernel_id);
            }
        }
        let x = tensor(DType::F32, &shape, 3);
        assert_eq!(rms(&w.engine, &x).unwrap().kernel_id, which.kernel_id);
    }
    assert_eq!(w.engine.which("norm.rms", &rms_call(&[1, 4])).unwrap().kernel_id, "test.small");
    let error = w.engine.validate("test.god", &rms_call(&[1, 4])).unwrap_err();
    assert!(error.to_string().contains("did you mean 'test.good'?"), "{error}");
    let error = w.engine.list_kernels(Some("norm.rsm")).unwrap_err();
    assert_eq!(error.code(), "UNKNOWN_OPERATION");
}

#[test]
fn two_versions_of_a_kernel_can_be_told_apart_in_a_plan() {
    let w = Watched::new();
    w.engine.register(version("1.0"), fill(1.0)).unwrap();
    w.engine.register(version("2.0"), fill(2.0)).unwrap();
    let plan = w.engine.select("norm.rms", &rms_call(&[2, 4])).unwrap();
    assert_eq!(plan.len(), 3);
    assert_ne!(plan[0], plan[1], "which version comes first?");
}

#[test]
fn a_change_is_seen_by_the_next_call_although_decisions_are_cached() {
    let w = Watched::new();
    let x = input();
    assert_eq!(rms(&w.engine, &x).unwrap().kernel_id, "lz_cpu.ref.norm.rms");
    w.engine.register(descriptor("test.rms", "norm.rms", 80), fill(1.0)).unwrap();
    assert_eq!(rms(&w.engine, &x).unwrap().kernel_id, "test.rms");
    w.engine.update(|spec| spec.policy = PolicySpec::default().deny("test.*")).unwrap();
    assert_eq!(rms(&w.engine, &x).unwrap().kernel_id, "lz_cpu.ref.norm.rms");
    w.engine.update(|spec| spec.policy = PolicySpec::default()).unwrap();
    w.settings(|s| s.enabled = false);
    assert_eq!(rms(&w.engine, &x).unwrap().kernel_id, "lz_cpu.ref.norm.rms", "only references run");
    w.settings(|s| s.enabled = true);
    w.engine.unregister("test.rms", "1.0").unwrap();
    assert_eq!(rms(&w.engine, &x).unwrap().kernel_id, "lz_cpu.ref.norm.rms");
}
