//! What must hold of a program's calls, so that running them is safe.

use std::fmt;

use super::{ALIGNMENT, Layout, MOST_OUTPUTS, Operand, Root};
use crate::Bytes;
use crate::view::{check as inside, element_count};

/// What is wrong with a call.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("call {call}: {what}")]
pub struct LayoutError {
    /// Which call.
    pub call: usize,
    /// What is wrong.
    pub what: String,
}

/// The bytes of a tensor, counted from the start of its root; none of an empty one.
fn span(operand: &Operand) -> Bytes {
    Bytes::of(operand.dtype, &operand.shape, &operand.strides, operand.place.offset)
}

/// Whether no two indices of a tensor are the same element: sorted by stride, each axis steps over all those before it.
fn is_injective(shape: &[i64], strides: &[i64]) -> bool {
    let mut axes: Vec<(i64, i64)> =
        shape.iter().zip(strides).filter(|(n, _)| **n > 1).map(|(&n, &stride)| (stride.abs(), n)).collect();
    axes.sort_unstable();
    let mut reach = 1;
    axes.into_iter().all(|(stride, n)| {
        let apart = stride >= reach;
        reach = stride.saturating_mul(n - 1).saturating_add(reach);
        apart
    })
}

/// A tensor of a call.
#[derive(Clone, Copy)]
enum Name {
    Input(usize),
    Output(usize),
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Name::Input(at) => write!(f, "input {at}"),
            Name::Output(at) => write!(f, "output {at}"),
        }
    }
}

impl Name {
    fn is_written(self) -> bool {
        matches!(self, Name::Output(_))
    }
}

/// Checks every place of a call.
pub(super) fn call(layout: &Layout, at: usize) -> Result<(), LayoutError> {
    let call = &layout.calls[at];
    let wrong = |what: String| LayoutError { call: at, what };
    if call.outputs.len() > MOST_OUTPUTS {
        return Err(wrong(format!("{} outputs, at most {MOST_OUTPUTS} are possible", call.outputs.len())));
    }
    let (scratch, arena) = (&call.scratch, layout.arena);
    let fits = scratch.start <= scratch.end && scratch.end <= arena;
    if !(scratch.is_empty() || fits && scratch.start.is_multiple_of(ALIGNMENT)) || scratch.start > scratch.end {
        return Err(wrong(format!("scratch memory {scratch:?} in an arena of {arena} bytes")));
    }
    let inputs = call.inputs.iter().enumerate().filter_map(|(i, one)| Some((Name::Input(i), one.as_ref()?)));
    let outputs = call.outputs.iter().enumerate().map(|(i, one)| (Name::Output(i), one));
    let operands: Vec<(Name, &Operand)> = inputs.chain(outputs).collect();
    for (name, operand) in &operands {
        let written = name.is_written();
        let (len, address) = root(layout, operand, written).map_err(|what| wrong(format!("{name} {what}")))?;
        let Operand { dtype, shape, strides, place } = operand;
        let first = place.offset;
        if !(address.wrapping_add(first)).is_multiple_of(dtype.align()) {
            return Err(wrong(format!("{name} begins at byte {first}, which is no place of {dtype}")));
        }
        let bits = dtype.bits() as usize;
        if first * 8 % bits != 0 && element_count(shape) > 0 && bits < 8 {
            return Err(wrong(format!("{name} begins at byte {first}, which is no place of {dtype}")));
        }
        // Offsets that are no multiple of the element are excluded above, so whole elements are counted.
        let offset = first * 8 / bits;
        inside(*dtype, shape, strides, offset as i64, len).map_err(|why| wrong(format!("{name}: {why}")))?;
        if written && !is_injective(shape, strides) {
            return Err(wrong(format!("{name} has two indices for one element: {shape:?} strides {strides:?}")));
        }
    }
    apart(&operands, scratch).map_err(wrong)
}

/// How many bytes the memory a tensor lies in has, and its address as far as it is known.
fn root(layout: &Layout, operand: &Operand, written: bool) -> Result<(usize, usize), String> {
    match operand.place.root {
        Root::Arena => Ok((layout.arena, 0)),
        Root::External(at) => {
            let slot = layout.slots.get(at).ok_or_else(|| format!("is in external {at}, which does not exist"))?;
            if written && !slot.written {
                return Err(format!("is written, and '{}' may only be read", slot.name));
            }
            if slot.dtype.align() < operand.dtype.align() {
                return Err(format!("is {}, which '{}' is not aligned for", operand.dtype, slot.name));
            }
            Ok((slot.dtype.bytes_for(element_count(&slot.shape).max(0) as usize), 0))
        }
        Root::Constant(_) if written => Err("is a constant, and is written".into()),
        Root::Constant(at) => {
            let constant = layout.constants.get(at).ok_or_else(|| format!("is constant {at}, which does not exist"))?;
            let view = constant.view();
            let of = Bytes::of(view.dtype(), view.shape(), view.strides(), 0);
            // Elements before the first would be outside of every offset.
            Ok((if of.start == 0 { of.end } else { 0 }, view.as_ref().address()))
        }
    }
}

/// Checks that nothing that is written lies over something else of the call.
fn apart(operands: &[(Name, &Operand)], scratch: &std::ops::Range<usize>) -> Result<(), String> {
    let temporary = Bytes { start: scratch.start, end: scratch.end };
    for (i, (name, one)) in operands.iter().enumerate() {
        if one.place.root == Root::Arena && span(one).overlaps(temporary) {
            return Err(format!("{name} lies over the scratch memory"));
        }
        for (other_name, other) in &operands[..i] {
            if (name.is_written() || other_name.is_written())
                && one.place.root == other.place.root
                && span(one).overlaps(span(other))
            {
                return Err(format!("{name} lies over {other_name}"));
            }
        }
    }
    Ok(())
}
