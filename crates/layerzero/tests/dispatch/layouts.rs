//! Layouts that cannot be told apart.

use super::*;

#[test]
fn an_ambiguous_layout_is_said_once_a_minute_per_shape_and_refused_in_strict_mode() {
    let w = Watched::new();
    let tensors = |n: i64| ["query", "key", "value"].map(|_| tensor(DType::F32, &[1, n, n, 8], n));
    let call = |n: i64, layout: Option<Layout>| {
        let tensors = tensors(n);
        let [q, k, v] = views(&tensors);
        let mut arguments = Arguments::new().input("query", q).input("key", k).input("value", v);
        if let Some(layout) = layout {
            arguments = arguments.layout(layout);
        }
        w.engine.dispatch("attention", arguments).map(|done| done.output().unwrap().to_f64())
    };
    let four = call(4, None).unwrap();
    assert_eq!(four, call(4, Some(Layout::Bshd)).unwrap(), "BSHD is assumed");
    assert_ne!(four, call(4, Some(Layout::Bhsd)).unwrap());
    w.at(59_999);
    call(4, None).unwrap();
    let ambiguous = |n: i64| Warning::AmbiguousLayout {
        op: "attention.standard.prefill",
        shape: vec![1, n, n, 8],
        assumed: Layout::Bshd,
    };
    assert_eq!(w.warnings(), [ambiguous(4)]);
    assert!(ambiguous(4).to_string().contains("[1, 4, 4, 8]"));
    call(6, None).unwrap();
    assert_eq!(w.warnings(), [ambiguous(4), ambiguous(6)]);
    w.at(60_000);
    call(4, None).unwrap();
    call(6, None).unwrap();
    assert_eq!(w.warnings(), [ambiguous(4), ambiguous(6), ambiguous(4)]);

    w.settings(|s| s.strict = true);
    let error = call(4, None).unwrap_err();
    assert_eq!(error.code(), "AMBIGUOUS_LAYOUT");
    assert!(error.to_string().contains("[1, 4, 4, 8]"), "{error}");
    assert_eq!(call(4, Some(Layout::Bshd)).unwrap(), four);
    assert_eq!(w.warnings().len(), 3);
}
