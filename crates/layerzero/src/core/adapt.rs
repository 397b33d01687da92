//! Transforms: what is to be done to arguments so that a kernel takes them. Whoever runs kernels does it to tensors of
//! their own kind.

use lz_model::{DType, KernelDescriptor, Layout, Op};

/// The axes that exchange two layouts, by rank.
pub fn transposition(rank: usize) -> Option<&'static [usize]> {
    match rank {
        4 => Some(&[0, 2, 1, 3]),
        3 => Some(&[1, 0, 2]),
        _ => None,
    }
}

/// The layout the kernel takes instead of `from`.
pub fn counterpart(kernel: &KernelDescriptor, from: Layout) -> Option<Layout> {
    let partner = match from {
        Layout::Bshd => Layout::Bhsd,
        Layout::Bhsd => Layout::Bshd,
        Layout::Nhd => Layout::Hnd,
        Layout::Hnd => Layout::Nhd,
        other => other,
    };
    kernel.layouts.contains(&partner).then_some(partner)
}

/// The dtype an input is handed over in: its own where the kernel takes it, else what it widens to.
pub fn wanted_dtype(op: &Op, kernel: &KernelDescriptor, index: usize, dtype: DType) -> DType {
    let input = &op.schema().inputs[index];
    let rule = kernel.inputs.iter().find(|(name, _)| op.input_index(name) == Some(index)).and_then(|(_, r)| r.dtypes);
    let taken = rule.unwrap_or(kernel.dtypes).contains(dtype);
    match kernel.requires_dtype {
        Some(to) if !taken && !input.mask && !input.cache && dtype.is_float() && dtype.widens_to(to) => to,
        _ => dtype,
    }
}
