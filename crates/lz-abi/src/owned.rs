//! Row-major tensors that own their memory.

use crate::view::{Extents, TensorView, TensorViewMut, element_count, row_major};
use crate::{Arena, DType, numeric};

/// A row-major tensor that owns its memory, which is aligned to 64 bytes.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    dtype: DType,
    shape: Extents,
    memory: Arena,
}

impl Tensor {
    /// All zeros. Panics when there is no memory for it.
    pub fn zeros(dtype: DType, shape: &[i64]) -> Tensor {
        Tensor::try_zeros(dtype, shape).unwrap_or_else(|| panic!("no memory for a {dtype} tensor of shape {shape:?}"))
    }

    /// All zeros, or `None` when there is no memory for it.
    pub fn try_zeros(dtype: DType, shape: &[i64]) -> Option<Tensor> {
        let bits = |n: i64, size: &i64| if *size < 0 { None } else { n.checked_mul((*size).max(1)) };
        shape.iter().try_fold(i64::from(dtype.bits()), bits)?;
        let memory = Arena::try_new(dtype.bytes_for(element_count(shape) as usize))?;
        Some(Tensor { dtype, shape: shape.into(), memory })
    }

    /// Row-major in memory that is there already; `None` if that is too short.
    pub fn in_memory(dtype: DType, shape: &[i64], memory: Arena) -> Option<Tensor> {
        let bits = |n: i64, size: &i64| if *size < 0 { None } else { n.checked_mul((*size).max(1)) };
        shape.iter().try_fold(i64::from(dtype.bits()), bits)?;
        let needed = dtype.bytes_for(element_count(shape) as usize);
        (memory.len() >= needed).then(|| Tensor { dtype, shape: shape.into(), memory })
    }

    /// From numbers in row-major order, rounded to the dtype. Panics when there are not as many
    /// numbers as the shape has elements.
    pub fn from_f64(dtype: DType, shape: &[i64], values: &[f64]) -> Tensor {
        let mut tensor = Tensor::zeros(dtype, shape);
        assert_eq!(values.len() as i64, element_count(shape), "numbers for shape {shape:?}");
        for (i, &value) in values.iter().enumerate() {
            numeric::store(dtype, tensor.memory.bytes_mut(), i, value);
        }
        tensor
    }

    /// From integers in row-major order, stored as [`numeric::store_int`] does. Panics as [`Tensor::from_f64`].
    pub fn from_ints(dtype: DType, shape: &[i64], values: &[i64]) -> Tensor {
        let mut tensor = Tensor::zeros(dtype, shape);
        assert_eq!(values.len() as i64, element_count(shape), "numbers for shape {shape:?}");
        for (i, &value) in values.iter().enumerate() {
            numeric::store_int(dtype, tensor.memory.bytes_mut(), i, value);
        }
        tensor
    }

    /// A view for reading.
    pub fn view(&self) -> TensorView<'_> {
        // SAFETY: its memory holds every element, and is borrowed as long as the view.
        unsafe { TensorView::new(self.dtype, self.shape.clone(), row_major(&self.shape), self.memory.bytes().as_ptr()) }
    }

    /// A view for writing.
    pub fn view_mut(&mut self) -> TensorViewMut<'_> {
        let (shape, strides) = (self.shape.clone(), row_major(&self.shape));
        // SAFETY: as above, borrowed for writing.
        unsafe { TensorViewMut::new(self.dtype, shape, strides, self.memory.bytes_mut().as_mut_ptr()) }
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Sizes.
    pub fn shape(&self) -> &[i64] {
        &self.shape
    }

    /// Every element, in row-major order.
    pub fn to_f64(&self) -> Vec<f64> {
        self.view().to_f64()
    }

    /// The raw memory, little-endian.
    pub fn bytes(&self) -> &[u8] {
        self.memory.bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_aligned_to_a_cache_line() {
        for size in [1, 3, 64, 1000] {
            let tensor = Tensor::zeros(DType::U8, &[size]);
            assert_eq!((tensor.bytes().as_ptr() as usize % 64, tensor.bytes().len()), (0, size as usize));
        }
    }

    #[test]
    fn integers_are_stored_bit_by_bit() {
        let ints = |dtype, value: i64| Tensor::from_ints(dtype, &[1], &[value]).view().get_int(&[0]);
        for value in [i64::MAX, i64::MIN, (1 << 53) + 1, -1] {
            assert_eq!(ints(DType::I64, value), value);
        }
        assert_eq!([ints(DType::U8, 256), ints(DType::U8, -1), ints(DType::I8, 128)], [0, 255, -128]);
        assert_eq!([ints(DType::I32, 1 << 31), ints(DType::I16, 1 << 15)], [-(1 << 31), -(1 << 15)]);
        assert_eq!([ints(DType::I4, 8), ints(DType::I4, -9), ints(DType::Bool, 2)], [-8, 7, 1]);
        assert_eq!(ints(DType::F32, (1 << 24) + 1), 1 << 24);
        assert_eq!(Tensor::from_ints(DType::MxFp4, &[2], &[3, -100]).to_f64(), [3.0, -6.0]);
    }

    #[test]
    fn memory_that_is_too_short_holds_no_tensor() {
        let memory = || Arena::try_new(24).unwrap();
        assert!(Tensor::in_memory(DType::F32, &[2, 3], memory()).is_some_and(|one| one.to_f64() == [0.0; 6]));
        assert!(Tensor::in_memory(DType::F32, &[7], memory()).is_none());
        assert!(Tensor::in_memory(DType::F32, &[-1], memory()).is_none());
        assert!(Tensor::in_memory(DType::F32, &[i64::MAX, i64::MAX], memory()).is_none());
    }

    #[test]
    fn impossible_sizes_are_refused() {
        assert!(Tensor::try_zeros(DType::F32, &[-1]).is_none());
        assert!(Tensor::try_zeros(DType::F32, &[i64::MAX, i64::MAX]).is_none());
        assert!(Tensor::try_zeros(DType::F32, &[1 << 60]).is_none());
        assert!(Tensor::try_zeros(DType::F32, &[0, 5]).is_some());
    }
}
