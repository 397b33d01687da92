//! What people read, where it does not depend on this machine.

use insta::assert_snapshot;

use crate::support::{attention, layerzero, on_h100};

#[test]
fn contract_of_an_operation() {
    assert_snapshot!(layerzero("ops rms_norm").out);
}

#[test]
fn contract_of_an_alias() {
    assert_snapshot!(layerzero("ops attention.cross").out);
}

#[test]
fn explain_prefill_on_an_h100() {
    assert_snapshot!(layerzero(&format!("explain {} {}", attention(2), on_h100())).ended(0).out);
}

#[test]
fn explain_one_sequence_with_a_preference() {
    assert_snapshot!(layerzero(&format!("explain {} {} --prefer flashinfer", attention(1), on_h100())).ended(0).out);
}

#[test]
fn explain_an_odd_head_dimension() {
    let call = "--op attention --dtype bf16 --shape query=1x128x8x20 --shape key=1x128x8x20 --shape value=1x128x8x20";
    assert_snapshot!(layerzero(&format!("explain {call} {}", on_h100())).ended(1).out);
}

#[test]
fn explain_paged_decode_as_json() {
    let call = "--op attention.paged --dtype bf16 --shape query=4x32x128 --shape key_cache=512x16x8x128 \
                --shape value_cache=512x16x8x128 --shape block_tables=4x64 --shape context_lens=4";
    assert_snapshot!(layerzero(&format!("explain {call} {} --json", on_h100())).ended(0).out);
}

#[test]
fn select_on_an_h100() {
    assert_snapshot!(layerzero(&format!("select {} {}", attention(1), on_h100())).ended(0).out);
}

#[test]
fn kernels_on_an_h100() {
    assert_snapshot!(layerzero(&format!("kernels --op attention {}", on_h100())).ended(0).out);
}

#[test]
fn no_kernel_at_all() {
    let outcome = layerzero("select --op rms_norm --shape input=4x64 --device h100").ended(1);
    assert_snapshot!(outcome.err);
}

#[test]
fn the_help() {
    assert_snapshot!(layerzero("--help").out);
}

#[test]
fn the_help_of_explain() {
    assert_snapshot!(layerzero("explain --help").out);
}
