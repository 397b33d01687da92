//! Masks that only say "not after the query", and "not too long before it": attention does that itself.

use super::attention::is_masked;
use super::indices::{Lin, Reader, Term, Truth};
use crate::ir::{Dim, Graph, GraphError, Meta, ValueId};
use crate::ops::Op;
use crate::ops::attention::Attention;
use lz_abi::DType;

/// Where a mask keeps keys, if it is known.
fn kept(graph: &Graph, mask: ValueId) -> Option<Truth> {
    let dtype = graph.meta(mask).dtype;
    match Reader::new(graph).term(mask)? {
        Term::Truth(truth) => Some(truth),
        Term::Choice(_, yes, no) if yes == 0.0 && no == 0.0 => Some(Truth::Known(true)),
        Term::Choice(truth, yes, no) if yes == 0.0 && is_masked(no, dtype) => Some(truth),
        Term::Choice(truth, yes, no) if no == 0.0 && is_masked(yes, dtype) => Some(truth.not()),
        _ => None,
    }
}

/// `a <= b` for all sizes the symbols may stand for: their difference is a number.
fn at_most(a: &Dim, b: &Dim) -> bool {
    (b.clone() - a.clone()).known().is_some_and(|difference| difference >= 0)
}

/// What the parts of a mask say about key j and query i.
#[derive(Default)]
struct Bounds {
    /// The least c of all `j - i <= c`.
    ahead: Option<Dim>,
    /// The least c of all `i - j <= c`.
    behind: Option<Dim>,
}

impl Bounds {
    fn take(&mut self, lin: &Lin, mask: &Meta, queries: &Dim, keys: &Dim) -> Option<()> {
        let rank = mask.rank();
        let step = |back: usize| match rank.checked_sub(back) {
            Some(axis) if !mask.shape[axis].is(1) => lin.steps[axis],
            _ => 0,
        };
        let leading = (0..rank.saturating_sub(2)).all(|axis| lin.steps[axis] == 0 || mask.shape[axis].is(1));
        let (i, j, c) = (step(2), step(1), lin.start.clone());
        // i + c >= j, and so on: what always holds says nothing.
        let least = |bound: &mut Option<Dim>, c: Dim| {
            let kept = match bound.take() {
                Some(other) if at_most(&other, &c) => other,
                Some(other) if !at_most(&c, &other) => return None,
                _ => c,
            };
            *bound = Some(kept);
            Some(())
        };
        let last = |size: &Dim| size.clone() - Dim::from(1);
        match (leading, i, j) {
            (false, ..) => None,
            (_, 0, 0) => at_most(&Dim::from(0), &c).then_some(()),
            (_, 0, -1) => at_most(&last(keys), &c).then_some(()),
            (_, -1, 0) => at_most(&last(queries), &c).then_some(()),
            (_, 1, 0) | (_, 0, 1) => at_most(&Dim::from(0), &c).then_some(()),
            (_, 1, -1) if at_most(&last(keys), &c) => Some(()),
            (_, 1, -1) => least(&mut self.ahead, c),
            (_, -1, 1) if at_most(&last(queries), &c) => Some(()),
            (_, -1, 1) => least(&mut self.behind, c),
            _ => None,
        }
    }
}

/// The attention that needs no mask, if the mask is causal, a window, or keeps everything.
fn without_mask(graph: &Graph, attention: &Attention, queries: Dim, keys: Dim, mask: ValueId) -> Option<Attention> {
    let parts = match kept(graph, mask)? {
        Truth::Known(true) => Vec::new(),
        Truth::All(parts) => parts,
        part @ Truth::Positive(_) => vec![part],
        _ => return None,
    };
    let mut bounds = Bounds::default();
    for part in &parts {
        let Truth::Positive(lin) = part else { return None };
        bounds.take(lin, graph.meta(mask), &queries, &keys)?;
    }
    let mut found = attention.clone();
    let shift = keys - queries;
    if let Some(ahead) = &bounds.ahead {
        let top_left = match ahead {
            ahead if *ahead == shift => false,
            ahead if ahead.is(0) => true,
            _ => return None,
        };
        // Both must say the same of where the last query is.
        if (attention.causal || attention.window.is_some()) && attention.top_left != top_left && !shift.is(0) {
            return None;
        }
        (found.causal, found.top_left) = (true, top_left);
    }
    if let Some(behind) = bounds.behind {
        // A window that is open to keys after the query is no attention that kernels know.
        found.causal.then_some(())?;
        // Attention counts from the key where the query is: j >= i + shift - window.
        let shift = if found.top_left { Dim::from(0) } else { shift.clone() };
        let window = (behind + shift).known().filter(|window| *window >= 0)?;
        found.window = Some(found.window.map_or(window, |own| own.min(window)));
    }
    // A query before all keys has none: a mask of finite numbers gives it the mean of all values.
    let finite = graph.meta(mask).dtype != DType::Bool;
    let first_has_a_key = !found.causal || found.top_left || shift.is_never_negative();
    (!finite || first_has_a_key).then_some(found)
}

/// Whether a mask of truth values over scores is known to leave each query a key: it is causal, and there is a key for
/// the first
/// query.
pub fn leaves_a_key(graph: &Graph, q: ValueId, scores: ValueId, mask: ValueId) -> bool {
    let (rank, shape) = (graph.meta(q).rank(), &graph.meta(scores).shape);
    let (queries, keys) = (shape[rank - 2].clone(), shape[rank - 1].clone());
    let plain = Attention { causal: false, top_left: false, scale: None, window: None, softcap: None };
    let shift = keys.clone() - queries.clone();
    without_mask(graph, &plain, queries, keys, mask)
        .is_some_and(|found| !found.causal || found.top_left || shift.is_never_negative())
}

/// Takes masks away that attention does not need.
pub fn causal(graph: &mut Graph) -> Result<usize, GraphError> {
    let mut count = 0;
    for id in graph.order()? {
        let Some(made) = graph.get(id) else { continue };
        let Op::Attention(attention) = &made.op else { continue };
        let [Some(q), Some(k), Some(v), Some(mask)] = made.inputs[..] else { continue };
        let (queries, keys) = (graph.meta(q).shape[2].clone(), graph.meta(k).shape[2].clone());
        let Some(op) = without_mask(graph, attention, queries, keys, mask) else { continue };
        count += usize::from(super::pattern::change(graph, id, |_| Some((op.into(), vec![Some(q), Some(k), Some(v)]))));
    }
    Ok(count)
}
