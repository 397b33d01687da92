//! Memory that stays where it is.

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
