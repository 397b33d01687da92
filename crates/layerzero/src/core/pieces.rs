//! A batch that no kernel can launch as a whole, made in pieces: the last resort.

use lz_model::{Bound, Catalog, Cut, Extents, NamedCall, Reason, TensorMeta, Uncut, row_major};

use super::scope::Scope;
use crate::rejections::Rejection;

/// A call that is made in pieces along its batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pieces {
    /// Where it is cut.
    pub cut: Cut,
    /// Into how many pieces.
    pub count: i64,
    /// What keeps a kernel from the whole.
    pub why: String,
}

impl Pieces {
    /// Where each piece begins, and how long it is: sizes that differ by one at most, the longer ones first.
    pub fn bounds(&self) -> impl Iterator<Item = (i64, i64)> + '_ {
        let (each, longer) = (self.cut.size / self.count, self.cut.size % self.count);
        (0..self.count).map(move |i| (i * each + i.min(longer), each + i64::from(i < longer)))
    }
}

impl Scope<'_> {
    /// How to split the batch of a call that no kernel can launch. `None` if kernels are rejected for another reason than
    /// launch limits; an error if the rows of the batch are not independent.
    pub fn pieces(
        &self,
        op: &str,
        call: &NamedCall<'_>,
        bound: &Bound,
        rejections: &[Rejection],
    ) -> Option<Result<Pieces, Uncut>> {
        let by_limits = rejections.iter().filter_map(|rejection| factor(&rejection.reasons));
        let (least, why) = by_limits.min_by_key(|(factor, _)| *factor)?;
        let operation = Catalog::get().op(bound.query.op());
        let ordered = operation.in_order(call).ok()?;
        let cut = match operation.cut(&ordered.inputs, &bound.query) {
            Ok(cut) => cut,
            Err(why) => return Some(Err(why)),
        };
        let mut count = least;
        while count <= cut.size {
            if self.serves_piece(op, call, &cut, (cut.size + count - 1) / count) {
                return Some(Ok(Pieces { cut, count, why }));
            }
            count = count.saturating_mul(2);
        }
        None
    }

    /// Whether a kernel takes a piece of so many rows.
    fn serves_piece(&self, op: &str, call: &NamedCall<'_>, cut: &Cut, rows: i64) -> bool {
        let axis = |name: &str| cut.inputs.iter().find(|(input, _)| *input == name).map(|(_, axis)| *axis);
        let shapes: Vec<(Extents, Extents)> = call
            .inputs
            .iter()
            .map(|(name, meta)| {
                let mut shape = Extents::from(meta.shape);
                let strides = meta.strides.map_or_else(|| row_major(meta.shape), Extents::from);
                if let Some(axis) = axis(name) {
                    shape[axis] = rows;
                }
                (shape, strides)
            })
            .collect();
        let inputs = call.inputs.iter().zip(&shapes).map(|((name, meta), (shape, strides))| {
            let step = axis(name).map_or(0, |axis| strides[axis].saturating_mul(rows));
            let aligned = meta.aligned && step.saturating_mul(i64::from(meta.dtype.bits())) % 128 == 0;
            // The strides are those of the whole: a piece along an inner axis has gaps.
            (*name, TensorMeta { shape, strides: Some(strides), aligned, ..*meta })
        });
        let piece = NamedCall {
            inputs: inputs.collect(),
            params: call.params.clone(),
            layout: call.layout,
            device: call.device,
            context: call.context,
        };
        self.bind(op, &piece).is_ok_and(|(_, bound)| self.chain(&bound.query).is_some())
    }
}

/// Into how many pieces a kernel's call has to be cut at least, and what is too large, where launch limits (and memory,
/// which pieces need less of) are all that keeps it from the call.
fn factor(reasons: &[Reason]) -> Option<(i64, String)> {
    let mut most = None;
    for reason in reasons {
        match reason {
            Reason::CudaGridDimExceeded { needed, limit, .. } => {
                let times = needed.saturating_add(limit - 1) / (*limit).max(1);
                if most.as_ref().is_none_or(|(before, _)| times > *before) {
                    most = Some((times.max(2), reason.to_string()));
                }
            }
            Reason::MemoryHeadroomExceeded { .. } => {}
            _ => return None,
        }
    }
    most
}
