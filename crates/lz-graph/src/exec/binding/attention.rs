//! Attention.

use lz_model::{Layout, ParamValue};

use super::catalog::Call;
use super::{Arg, Candidate, Site};
use crate::ops::attention::Attention;

/// Heads and tokens in each other's place.
pub(super) const SWAPPED: [usize; 4] = [0, 2, 1, 3];

/// Attention with heads before tokens. Where the result lies with tokens before heads, so does the call.
pub(super) fn attention(site: &Site<'_>, op: &Attention) -> Vec<Candidate> {
    let (query, key, value) = (site.need(0), site.need(1), site.need(2));
    let (queries, keys, mask) = (query.shape[2], key.shape[2], site.get(3));
    // Catalog calls are aligned at the last key, and a mask excludes a causal bound there.
    let aligned = !op.top_left || queries == keys || !op.causal && op.window.is_none();
    if !aligned || op.causal && (queries > keys || mask.is_some()) {
        return Vec::new();
    }
    let turned = !site.output.is_row_major();
    let laid = |arg: &Arg| if turned { arg.permuted(&SWAPPED) } else { arg.clone() };
    let (output, query, key, value) = (laid(site.output), laid(query), laid(key), laid(value));
    let inputs = [("query", Some(&query)), ("key", Some(&key)), ("value", Some(&value)), ("attn_mask", mask)];
    // One query at the last key may attend to all of them.
    let causal = op.causal && queries > 1;
    let params = [
        ("causal", ParamValue::Bool(causal)),
        ("scale", op.scale.map_or(ParamValue::None, ParamValue::Float)),
        ("window_left", ParamValue::Int(op.window.unwrap_or(-1))),
        ("softcap", ParamValue::Float(op.softcap.unwrap_or(0.0))),
    ];
    let layout = Some(if turned { Layout::Bshd } else { Layout::Bhsd });
    let shared = query.shape != key.shape && heads(&query, turned) != heads(&key, turned);
    let name = match (shared, queries == 1) {
        (false, false) => "attention.standard.prefill",
        (false, true) => "attention.standard.decode",
        (true, false) => "attention.gqa.prefill",
        (true, true) => "attention.gqa.decode",
    };
    Call { op: name, inputs: &inputs, params: &params, layout, output: &output }.candidates(site)
}

fn heads(arg: &Arg, turned: bool) -> i64 {
    arg.shape[if turned { 2 } else { 1 }]
}
