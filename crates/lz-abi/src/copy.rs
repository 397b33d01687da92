//! Copies between strided tensors, bit by bit.

use smallvec::SmallVec;

/// Sizes and strides in bytes of one axis: the source's, then the target's.
#[derive(Clone, Copy)]
struct Axis {
    size: usize,
    from: isize,
    to: isize,
}

/// The axes, the outermost first. Those that both tensors walk as one are one.
fn axes(element: usize, shape: &[i64], from: &[i64], to: &[i64]) -> SmallVec<[Axis; 8]> {
    let bytes = |stride: i64| stride as isize * element as isize;
    let mut axes: SmallVec<[Axis; 8]> = SmallVec::new();
    for ((&size, &from), &to) in shape.iter().zip(from).zip(to).filter(|((size, _), _)| **size != 1) {
        let axis = Axis { size: size as usize, from: bytes(from), to: bytes(to) };
        match axes.last_mut() {
            Some(last) if last.from == axis.from * size as isize && last.to == axis.to * size as isize => {
                *last = Axis { size: last.size * axis.size, ..axis };
            }
            _ => axes.push(axis),
        }
    }
    axes
}

/// Copies elements of so many bytes: 1, 2, 4, 8 or 16.
///
/// # Safety
/// Every element that the shape and the strides (in elements) reach can be read or written, and the two tensors do not overlap.
pub(crate) unsafe fn copy(element: usize, shape: &[i64], from: (*const u8, &[i64]), to: (*mut u8, &[i64])) {
    if shape.contains(&0) {
        return;
    }
    let mut axes = axes(element, shape, from.1, to.1);
    let inner = axes.pop().unwrap_or(Axis { size: 1, from: element as isize, to: element as isize });
    let (mut source, mut target) = (from.0, to.0);
    let mut at: SmallVec<[usize; 8]> = axes.iter().map(|_| 0).collect();
    loop {
        // SAFETY: the caller's; the odometer stays within the sizes.
        unsafe {
            match element {
                1 => line::<u8>(inner, source, target),
                2 => line::<u16>(inner, source, target),
                4 => line::<u32>(inner, source, target),
                8 => line::<u64>(inner, source, target),
                _ => line::<u128>(inner, source, target),
            }
        }
        let mut axis = axes.len();
        loop {
            let Some(next) = axis.checked_sub(1) else { return };
            axis = next;
            let Axis { size, from, to } = axes[axis];
            at[axis] += 1;
            if at[axis] < size {
                (source, target) = (source.wrapping_offset(from), target.wrapping_offset(to));
                break;
            }
            at[axis] = 0;
            let back = size as isize - 1;
            (source, target) = (source.wrapping_offset(-from * back), target.wrapping_offset(-to * back));
        }
    }
}

/// # Safety
/// As of [`copy`], of the elements of one axis.
unsafe fn line<T: Copy>(axis: Axis, from: *const u8, to: *mut u8) {
    // SAFETY: the caller's. Addresses of packed files need not be aligned.
    unsafe {
        if axis.from == size_of::<T>() as isize && axis.to == axis.from {
            return std::ptr::copy_nonoverlapping(from, to, axis.size * size_of::<T>());
        }
        for i in 0..axis.size as isize {
            let one = from.wrapping_offset(i * axis.from).cast::<T>().read_unaligned();
            to.wrapping_offset(i * axis.to).cast::<T>().write_unaligned(one);
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::{DType, Tensor, TensorView};

    /// Every dtype, permuted, stepped over, broadcast and empty, beside element-by-element reads.
    #[test]
    fn copies_are_the_elements() {
        for dtype in [DType::F32, DType::F64, DType::Bf16, DType::I64, DType::I8, DType::Bool] {
            let numbers: Vec<f64> = (0..60).map(|i| f64::from(i * 7 % 2)).collect();
            let t = Tensor::from_f64(dtype, &[3, 4, 5], &numbers);
            for axes in [[0, 1, 2], [0, 2, 1], [2, 1, 0], [1, 0, 2]] {
                let view = t.view().permuted(&axes);
                assert_eq!(view.to_tensor().to_f64(), view.to_f64(), "{dtype} {axes:?}");
                let mut back = Tensor::zeros(dtype, &[3, 4, 5]);
                back.view_mut().into_permuted(&axes).copy_bits_from(&view);
                assert_eq!(back.to_f64(), numbers, "{dtype} {axes:?}");
            }
            for (shape, strides, offset) in [
                ([3, 2, 2], [20, 5, 2], 1),
                ([2, 4, 3], [0, 5, 0], 2),
                ([3, 4, 5], [-20, -5, -1], 59),
                ([2, 0, 3], [1, 1, 1], 0),
            ] {
                let view = TensorView::strided(dtype, &shape, &strides, offset, t.bytes()).unwrap();
                assert_eq!(view.to_tensor().to_f64(), view.to_f64(), "{dtype} {strides:?}");
            }
        }
    }
}
