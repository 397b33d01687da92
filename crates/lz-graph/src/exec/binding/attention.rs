//! Attention.

use lz_abi::{DType, Extents, Param};
use lz_cpu::primitives::{BinaryOp, Primitive};
use lz_model::{Layout, ParamValue};

use super::catalog::Call;
use super::sequence::Sequence;
use super::{Arg, Candidate, Site, doubles};
use crate::exec::cached::Cached;
use crate::exec::kernel::Kernel;
use crate::ops::attention::Attention;
use crate::ops::cached_attention::CachedAttention;

/// Heads and tokens in each other's place.
pub(super) const SWAPPED: [usize; 4] = [0, 2, 1, 3];

/// Attention with heads before tokens. Where the result lies with tokens before heads, so does the call.
pub(super) fn attention(site: &Site<'_>, op: &Attention) -> Vec<Candidate> {
    let [query, key, value] = [0, 1, 2].map(|at| site.need(at));
    if query.dtype == DType::F64 {
        return doubles::attention(site, op);
    }
    let (queries, keys, mask) = (query.shape[2], key.shape[2], site.get(3));
    // Catalog calls are aligned at the last key, and a mask excludes a causal bound there, which one query does not need.
    let aligned = !op.top_left || queries == keys || !op.causal && op.window.is_none();
    if aligned && !(op.causal && (queries > keys || mask.is_some() && queries > 1)) {
        return called(site, op, [query, key, value], mask, op.window);
    }
    let shift = if op.top_left { 0 } else { keys - queries };
    let open = Attention { causal: false, window: None, ..op.clone() };
    if let Some(mask) = mask {
        let band = site.terms.packs.band([queries, keys], shift, op.causal, op.window);
        let mut sequence = Sequence::new(site.terms);
        let both = masked(&mut sequence, mask, Arg::constant(band));
        return sequence.around(called(site, &open, [query, key, value], Some(&both), None), "mask");
    }
    let part = |begin: i64, end: i64| [key, value].map(|arg| arg.part(2, begin, end - begin, 1));
    // Keys behind the last query count for none, and one query has a range of keys.
    if op.top_left && op.causal && op.window.is_none() && queries < keys {
        let [key, value] = part(0, queries);
        return called(site, op, [query, &key, &value], None, None);
    }
    let begin = op.window.map_or(0, |before| shift.saturating_sub(before).max(0));
    let end = if op.causal { shift + 1 } else { keys };
    if queries == 1 && begin < end {
        let [key, value] = part(begin, end.min(keys));
        return called(site, &open, [query, &key, &value], None, None);
    }
    let mask = Arg::constant(site.terms.packs.band([queries, keys], shift, op.causal, op.window));
    called(site, &open, [query, key, value], Some(&mask), None)
}

/// The same with axes of size 1 before the others.
fn leading(arg: &Arg, rank: usize) -> Arg {
    let missing = rank.saturating_sub(arg.shape.len());
    let before = |all: &Extents, of: i64| std::iter::repeat_n(of, missing).chain(all.iter().copied()).collect();
    let whole = arg.shape.iter().product::<i64>().max(1);
    Arg { shape: before(&arg.shape, 1), strides: before(&arg.strides, whole), ..arg.clone() }
}

/// A mask in scratch memory that excludes what a mask excludes and what a band does not have.
fn masked(sequence: &mut Sequence<'_>, mask: &Arg, band: Arg) -> Arg {
    let mut shape: Extents = mask.shape.iter().copied().take(mask.shape.len().saturating_sub(2)).collect();
    shape.extend(band.shape.iter().copied());
    let both = sequence.scratch(mask.dtype, &shape);
    let (mask, band) = (Some(mask.clone()), Some(band));
    match both.dtype {
        DType::Bool => sequence.before(Primitive::Binary, vec![mask, band], &both, vec![BinaryOp::LogicalAnd.param()]),
        _ => {
            let none = vec![Param::None, Param::Float(f64::NEG_INFINITY)];
            sequence.before(Primitive::Where, vec![band, mask], &both, none);
        }
    }
    both
}

/// Attention over the part of a cache that is written: the kernels for all of it, which then get views of that part.
pub(super) fn cached(site: &Site<'_>, op: &CachedAttention) -> Vec<Candidate> {
    let queries = site.need(0).shape[2];
    // The keys of one query begin where its window does.
    let window = op.window.filter(|_| queries > 1);
    let tokens = if site.output.is_row_major() { 2 } else { 1 };
    let mut found = called(site, &op.dense(), [0, 1, 2].map(|at| site.need(at)), None, window);
    // Scratch memory would have to be for what a part needs.
    found.retain_mut(|candidate| candidate.scratch() == 0 && narrowed(candidate, site, op.window, tokens));
    found
}

/// Makes the call of a candidate one that is narrowed when it runs.
fn narrowed(candidate: &mut Candidate, site: &Site<'_>, window: Option<i64>, tokens: usize) -> bool {
    let [call] = &mut candidate.calls[..] else { return false };
    let Kernel::Builtin(kernel, query) = &call.kernel else { return false };
    let Some(cached) = Cached::new(*kernel, **query, window, tokens) else { return false };
    call.kernel = Kernel::Cached(Box::new(cached));
    call.inputs.truncate(3);
    call.inputs.extend([site.get(3).cloned(), site.get(4).cloned()]);
    true
}

/// A call of the catalog's attention.
fn called(
    site: &Site<'_>,
    op: &Attention,
    [query, key, value]: [&Arg; 3],
    mask: Option<&Arg>,
    window: Option<i64>,
) -> Vec<Candidate> {
    let tokens_first = !site.output.is_row_major();
    // The catalog's masks have two axes or four.
    let mask = mask.map(|mask| leading(mask, 4));
    let mask = mask.as_ref();
    let laid = |arg: &Arg| if tokens_first { arg.permuted(&SWAPPED) } else { arg.clone() };
    let queries = query.shape[2];
    let (output, query, key, value) = (laid(site.output), laid(query), laid(key), laid(value));
    let inputs = [("query", Some(&query)), ("key", Some(&key)), ("value", Some(&value)), ("attn_mask", mask)];
    // One query at the last key may attend to all of them.
    let causal = op.causal && queries > 1;
    let params = [
        ("causal", ParamValue::Bool(causal)),
        ("scale", op.scale.map_or(ParamValue::None, ParamValue::Float)),
        ("window_left", ParamValue::Int(window.unwrap_or(-1))),
        ("softcap", ParamValue::Float(op.softcap.unwrap_or(0.0))),
    ];
    let layout = Some(if tokens_first { Layout::Bshd } else { Layout::Bhsd });
    let shared = query.shape != key.shape && heads(&query, tokens_first) != heads(&key, tokens_first);
    // Kernels for one query take no mask.
    let name = match (shared, queries == 1 && mask.is_none()) {
        (false, false) => "attention.standard.prefill",
        (false, true) => "attention.standard.decode",
        (true, false) => "attention.gqa.prefill",
        (true, true) => "attention.gqa.decode",
    };
    Call { op: name, inputs: &inputs, params: &params, layout, output: &output }.candidates(site)
}

fn heads(arg: &Arg, tokens_first: bool) -> i64 {
    arg.shape[if tokens_first { 2 } else { 1 }]
}
