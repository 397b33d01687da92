//! Cutting a call along its batch: which axes of which tensors are cut, and where the results are joined.
//!
//! A batch that no kernel can launch as a whole is made in pieces, as a last resort. That is right where rows do not
//! depend on one another, and the schema tells: the batch is a dimension of the inputs that carry it and of every result.

use crate::catalog::Op;
use crate::param::ParamValue;
use crate::query::Query;
use crate::schema::{DimKind, OpKind, Output};
use crate::shape::{Axis, ShapePattern};
use crate::tensor_meta::TensorMeta;

/// How a call is cut along its batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cut {
    /// The size of the axis that is cut.
    pub size: i64,
    /// The inputs that are cut, each along which axis. The others belong to every piece.
    pub inputs: Vec<(&'static str, usize)>,
    /// Along which axis each result is joined.
    pub outputs: Vec<usize>,
}

/// Why a call cannot be cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Uncut {
    /// Another piece would find what the one before it wrote.
    #[error("it updates tensors in place")]
    InPlace,
    /// Which numbers are drawn depends on how many are.
    #[error("it draws random numbers, and pieces would draw other ones")]
    Draws,
    /// A result is of the whole batch, or sizes of other tensors follow from it.
    #[error("its results are not rows of a batch")]
    NotRows,
}

impl Op {
    /// Whether calls of the operation can be cut at all.
    pub fn can_be_cut(&self) -> bool {
        self.rows().is_ok()
    }

    /// The dimension whose rows do not depend on one another.
    fn rows(&self) -> Result<usize, Uncut> {
        let schema = self.schema();
        if schema.update.is_some() || schema.outputs.iter().any(|output| matches!(output, Output::Updates(_))) {
            return Err(Uncut::InPlace);
        }
        if schema.kind == OpKind::Sampling {
            return Err(Uncut::Draws);
        }
        let batch = schema.dims.iter().position(|dim| dim.kind == DimKind::Batch);
        batch.filter(|_| schema.kind == OpKind::Tensor).ok_or(Uncut::NotRows)
    }

    /// How a bound call is cut along its batch; `inputs` in the schema's order.
    pub fn cut(&self, inputs: &[Option<TensorMeta<'_>>], query: &Query) -> Result<Cut, Uncut> {
        let (schema, batch) = (self.schema(), self.rows()?);
        let dropout = self.param_index("dropout_p").map(|i| query.param(i, &schema.params[i]));
        if dropout.and_then(ParamValue::as_float).is_some_and(|p| p != 0.0) {
            return Err(Uncut::Draws);
        }
        // Of several leading axes the longest is cut.
        let leading = self.leading(batch, inputs).map(|(_, sizes)| sizes);
        let longest = leading.and_then(|sizes| (0..sizes.len()).rev().max_by_key(|&i| sizes[i]));
        let size = leading.zip(longest).map_or(query.dim(batch), |(sizes, at)| sizes[at]);
        let mut cut = Cut { size, inputs: Vec::new(), outputs: Vec::new() };
        for (index, meta) in inputs.iter().take(schema.inputs.len()).enumerate() {
            let Some(meta) = meta else { continue };
            let layout = query.tensor(index).layout();
            let fits = |p: &&ShapePattern| p.layout.is_none_or(|l| l == layout) && p.fits_rank(meta.shape.len());
            let pattern = self.inputs[index].iter().find(fits).ok_or(Uncut::NotRows)?;
            let follows = |axis: &Axis| match *axis {
                Axis::PlusOne(d) => d == batch,
                Axis::Dim(d) | Axis::Broadcast(d) => schema.dims[d].derived.is_some(),
                Axis::Rest(_) | Axis::Fixed(_) => false,
            };
            if pattern.axes.iter().any(follows) {
                return Err(Uncut::NotRows);
            }
            let rest = (meta.shape.len() + 1).saturating_sub(pattern.axes.len());
            if let Some(axis) = place(pattern, batch, rest, longest) {
                // A size of 1 is shared by all rows.
                if meta.shape[axis] == size {
                    cut.inputs.push((schema.inputs[index].name, axis));
                }
            }
        }
        for (output, patterns) in schema.outputs.iter().zip(&self.outputs) {
            let Output::Fresh { shape, .. } = output else { return Err(Uncut::InPlace) };
            let axis = match shape.strip_prefix("like:").or_else(|| shape.strip_prefix("rows:")) {
                Some(name) => cut.inputs.iter().find(|(input, _)| *input == name).map(|(_, axis)| *axis),
                None => {
                    let layout = query.tensor(0).layout();
                    let pattern = patterns.iter().find(|p| p.layout == Some(layout)).unwrap_or(&patterns[0]);
                    place(pattern, batch, leading.map_or(0, <[i64]>::len), longest)
                }
            };
            cut.outputs.push(axis.ok_or(Uncut::NotRows)?);
        }
        if cut.inputs.is_empty() || cut.size < 2 { Err(Uncut::NotRows) } else { Ok(cut) }
    }
}

/// Where the batch is in a shape: the axis itself, or, of the `rest` leading axes that it is the product of, the one that
/// is cut.
fn place(pattern: &ShapePattern, batch: usize, rest: usize, longest: Option<usize>) -> Option<usize> {
    let mut at = 0;
    for axis in &pattern.axes {
        match *axis {
            Axis::Rest(d) if d == batch => return longest,
            Axis::Rest(_) => at += rest,
            Axis::Dim(d) | Axis::Broadcast(d) if d == batch => return Some(at),
            _ => at += 1,
        }
    }
    None
}
