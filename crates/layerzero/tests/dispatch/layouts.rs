//! Strides that contradict the layout in force.

use super::*;

#[test]
fn a_contradiction_is_said_once_a_minute_per_tensor_and_refused_in_strict_mode() {
    let w = Watched::new();
    let call = |n: i64, turned: bool, layout: Option<Layout>| {
        let tensors = ["query", "key", "value"].map(|_| tensor(DType::F32, &[1, n, n, 8], n));
        let [q, k, v] = views(&tensors);
        let q = if turned { q.permuted(&[0, 2, 1, 3]) } else { q };
        let mut arguments = Arguments::new().input("query", q).input("key", k).input("value", v);
        if let Some(layout) = layout {
            arguments = arguments.layout(layout);
        }
        w.engine.dispatch("attention", arguments).map(|done| done.output().unwrap().to_f64())
    };
    let four = call(4, false, None).unwrap();
    assert_eq!(four, call(4, false, Some(Layout::Bshd)).unwrap(), "BSHD is the default");
    assert_ne!(four, call(4, false, Some(Layout::Bhsd)).unwrap());
    assert_eq!(w.warnings(), []);
    let turned = call(4, true, None).unwrap();
    assert_eq!(turned, call(4, true, Some(Layout::Bshd)).unwrap(), "strides do not change the layout");
    w.at(59_999);
    call(6, true, None).unwrap();
    let said = |n: i64| Warning::LayoutContradicted {
        op: "attention.standard.prefill",
        input: "query",
        shape: vec![1, n, n, 8],
        layout: Layout::Bshd,
    };
    assert_eq!(w.warnings(), [said(4)], "a call that says its layout is not warned of, and shapes do not count");
    let text = said(4).to_string();
    for part in ["'query'", "[1, 4, 4, 8]", "BSHD", "layout='BHSD'"] {
        assert!(text.contains(part), "{text}");
    }
    w.at(60_000);
    call(6, true, None).unwrap();
    assert_eq!(w.warnings(), [said(4), said(6)]);

    w.settings(|s| s.strict = true);
    let error = call(4, true, None).unwrap_err();
    assert_eq!(error.code(), "LAYOUT_CONTRADICTED");
    assert!(error.to_string().contains("[1, 4, 4, 8]"), "{error}");
    assert_eq!(call(4, true, Some(Layout::Bshd)).unwrap(), turned);
    assert_eq!(call(4, false, None).unwrap(), four);
    w.settings(|s| (s.strict, s.default_layouts.dense) = (true, Layout::Bhsd));
    assert_eq!(call(4, true, None).unwrap(), call(4, true, Some(Layout::Bhsd)).unwrap());
    assert_eq!(w.warnings().len(), 2);
}
