//! Kernels that are not built in, and what comparisons with the reference showed.

use std::sync::Arc;

use lz_model::*;
use lz_select::*;

use super::{Times, kernel, measured, query, query_with, spec};

/// A kernel that is not built in.
fn foreign(id: &str, priority: i32, trust: Trust) -> KernelDescriptor {
    KernelDescriptor { trust, ..kernel(id, priority) }
}

#[test]
fn a_kernel_that_is_not_built_in_wins_no_tie() {
    let first = |kernels: Vec<KernelDescriptor>, perf: Times| {
        let spec = SnapshotSpec { perf: Arc::new(perf), ..spec(kernels) };
        let snapshot = spec.build(1).unwrap();
        let decision = snapshot.select(&query());
        snapshot.kernel(decision.chosen().unwrap().kernel).id.clone()
    };
    let none = Times::default;
    for trust in [Trust::Unproven, Trust::Vouched] {
        let built_in = |priority| KernelDescriptor { baseline: true, ..kernel("z.norm", priority) };
        assert_eq!(first(vec![foreign("a.norm", 50, trust), built_in(50)], none()), "z.norm");
        assert_eq!(first(vec![foreign("a.norm", 51, trust), built_in(50)], none()), "a.norm");
        let tied = || Times([("a.norm", measured(10.0, 2.0)), ("z.norm", measured(10.5, 2.0))].into());
        assert_eq!(first(vec![foreign("a.norm", 50, trust), kernel("z.norm", 50)], tied()), "z.norm");
        let faster = || Times([("a.norm", measured(5.0, 0.1)), ("z.norm", measured(10.0, 0.1))].into());
        assert_eq!(first(vec![foreign("a.norm", 50, trust), built_in(50)], faster()), "a.norm");
    }
}

#[test]
fn a_tie_that_being_built_in_decides_is_said_to_be_one() {
    let spec = spec(vec![foreign("a.norm", 50, Trust::Vouched), kernel("z.norm", 50)]);
    let why = spec.build(1).unwrap().select(&query()).why().unwrap().to_string();
    assert!(why.contains("equal to a.norm: it comes with LayerZero"), "{why}");
}

fn evidence() -> Evidence {
    Evidence { error: "off".into(), call: "a call".into(), max_error: Some(1.0), tolerance: Some(1e-5) }
}

#[test]
fn a_wrong_result_counts_for_the_whole_operation_and_for_plain_torch_only_for_the_class() {
    let kernels =
        vec![foreign("a.norm", 90, Trust::Unproven), KernelDescriptor { baseline: true, ..kernel("z.norm", 50) }];
    let mut spec = spec(kernels.clone());
    let gradients = query_with(128, Context { requires_grad: true, ..Context::default() });
    let proofs = Arc::make_mut(&mut spec.proofs);
    kernels.iter().for_each(|kernel| proofs.mismatched(kernel, &query(), evidence()));
    let out = |spec: &SnapshotSpec, query: &Query| -> Vec<bool> {
        let decision = spec.build(1).unwrap().select(query);
        decision.candidates.iter().map(|c| c.reasons.contains(&evidence().reason())).collect()
    };
    assert_eq!(out(&spec, &query()), [true, true]);
    assert_eq!(out(&spec, &query_with(4, Context::default())), [true, true], "whatever the sizes");
    assert_eq!(out(&spec, &gradients), [true, false], "gradients are another class");
    let proofs = Arc::make_mut(&mut spec.proofs);
    kernels.iter().for_each(|kernel| proofs.passed(kernel, &query()));
    assert_eq!(out(&spec, &query()), [false, false], "until it is right there");
}

#[test]
fn proof_is_needed_once_for_each_class() {
    let mut spec = spec(vec![foreign("a.norm", 90, Trust::Unproven), foreign("b.norm", 80, Trust::Vouched)]);
    let needs = |spec: &SnapshotSpec, query: &Query| {
        let snapshot = spec.build(1).unwrap();
        [KernelIx(0), KernelIx(1)].map(|ix| snapshot.needs_proof(ix, query))
    };
    let gradients = query_with(128, Context { requires_grad: true, ..Context::default() });
    assert_eq!(needs(&spec, &query()), [true, false]);
    Arc::make_mut(&mut spec.proofs).passed(&foreign("a.norm", 90, Trust::Unproven), &query());
    assert_eq!(needs(&spec, &query()), [false, false]);
    assert_eq!(needs(&spec, &query_with(7, Context::default())), [false, false]);
    assert_eq!(needs(&spec, &gradients), [true, false]);
    spec.settings.verify = Verify::Off;
    assert_eq!(needs(&spec, &gradients), [false, false]);
}
