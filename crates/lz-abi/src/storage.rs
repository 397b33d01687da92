//! Memory that stays where it is.

use std::sync::Arc;

use crate::{Tensor, TensorView};

/// A tensor that somebody owns: a weight, a constant.
///
/// # Safety
/// [`Storage::view`] gives the same dtype, sizes, strides and address at every call, and nobody writes its elements as long as
/// this lives.
pub unsafe trait Storage: Send + Sync {
    /// The elements.
    fn view(&self) -> TensorView<'_>;
}

// SAFETY: its memory is on the heap, moves with nobody, and can only be written through a `&mut Tensor`, which nobody can have
// while the storage is shared.
unsafe impl Storage for Tensor {
    fn view(&self) -> TensorView<'_> {
        Tensor::view(self)
    }
}

/// Another tensor's memory with its axes in another order.
struct Permuted {
    of: Arc<dyn Storage>,
    axes: Box<[usize]>,
}

// SAFETY: what holds for the other tensor holds for this: the same memory, and the same order of axes at every call.
unsafe impl Storage for Permuted {
    fn view(&self) -> TensorView<'_> {
        self.of.view().permuted(&self.axes)
    }
}

/// The same memory with axes in another order. Nothing is copied.
pub fn permuted(of: Arc<dyn Storage>, axes: &[usize]) -> Arc<dyn Storage> {
    assert_eq!(axes.len(), of.view().shape().len(), "an axis for each of the tensor's");
    Arc::new(Permuted { of, axes: axes.into() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DType;

    #[test]
    fn axes_change_and_memory_does_not() {
        let of: Arc<dyn Storage> = Arc::new(Tensor::from_f64(DType::F32, &[2, 3], &[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]));
        let turned = permuted(of.clone(), &[1, 0]);
        assert_eq!(turned.view().shape(), [3, 2]);
        assert_eq!(turned.view().to_f64(), [0.0, 3.0, 1.0, 4.0, 2.0, 5.0]);
        assert_eq!(turned.view().as_ref().address(), of.view().as_ref().address());
    }
}
