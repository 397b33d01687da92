//! Tensors in host memory, owned and borrowed: what native kernels are called with.

use smallvec::SmallVec;

use crate::dtype::DType;
use crate::numeric;
use crate::query::TensorMeta;

/// Sizes or strides; on the stack up to rank 6.
pub type Extents = SmallVec<[i64; 6]>;

/// Why bytes, shape and strides do not make a tensor.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TensorError {
    /// The buffer ends before the last element.
    #[error("a {dtype} tensor of shape {shape:?} needs {needed} bytes, the buffer has {got}")]
    TooShort {
        /// Element type.
        dtype: DType,
        /// Shape.
        shape: Vec<i64>,
        /// Bytes needed.
        needed: usize,
        /// Bytes there are.
        got: usize,
    },
    /// A negative size, a size beyond memory, or strides of another rank.
    #[error("shape {shape:?} with strides {strides:?} is no tensor")]
    BadShape {
        /// Shape.
        shape: Vec<i64>,
        /// Strides.
        strides: Vec<i64>,
    },
}

/// Where elements lie: shape, strides and offset, in elements.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Geometry {
    dtype: DType,
    shape: Extents,
    strides: Extents,
    offset: i64,
}

/// Strides of a row-major tensor without gaps.
pub fn row_major(shape: &[i64]) -> Extents {
    let mut strides: Extents = SmallVec::from_elem(1, shape.len());
    for i in (0..shape.len().saturating_sub(1)).rev() {
        strides[i] = strides[i + 1].saturating_mul(shape[i + 1].max(1));
    }
    strides
}

impl Geometry {
    fn checked(
        dtype: DType,
        shape: &[i64],
        strides: &[i64],
        offset: i64,
        bytes: usize,
    ) -> Result<Geometry, TensorError> {
        let bad = || TensorError::BadShape { shape: shape.to_vec(), strides: strides.to_vec() };
        if shape.len() != strides.len() || offset < 0 || shape.iter().any(|&n| n < 0) {
            return Err(bad());
        }
        // The reachable elements lie between the sum of the negative and of the positive spans.
        let (mut low, mut high) = (i128::from(offset), i128::from(offset));
        for (&n, &stride) in shape.iter().zip(strides) {
            let span = i128::from(n - 1) * i128::from(stride);
            if span < 0 { low += span } else { high += span }
        }
        if !shape.contains(&0) {
            if low < 0 || high >= i128::from(i64::MAX) {
                return Err(bad());
            }
            let needed = dtype.bytes_for(high as usize + 1);
            if needed > bytes {
                return Err(TensorError::TooShort { dtype, shape: shape.to_vec(), needed, got: bytes });
            }
        }
        Ok(Geometry { dtype, shape: shape.into(), strides: strides.into(), offset })
    }

    fn at(&self, index: &[i64]) -> usize {
        debug_assert_eq!(index.len(), self.shape.len());
        let inner: i64 = index.iter().zip(&self.strides).map(|(i, s)| i * s).sum();
        (self.offset + inner) as usize
    }

    fn permuted(&self, order: &[usize]) -> Geometry {
        Geometry {
            shape: order.iter().map(|&i| self.shape[i]).collect(),
            strides: order.iter().map(|&i| self.strides[i]).collect(),
            ..self.clone()
        }
    }

    fn is_contiguous(&self) -> bool {
        let expected = row_major(&self.shape);
        self.shape.contains(&0)
            || self.shape.iter().zip(self.strides.iter().zip(&expected)).all(|(&n, (a, b))| n == 1 || a == b)
    }
}

/// Elements of a shape; zero whenever some size is, however large the others are.
fn element_count(shape: &[i64]) -> i64 {
    if shape.iter().any(|&n| n <= 0) { 0 } else { shape.iter().product() }
}

/// Every index of a shape, in row-major order.
pub fn indices(shape: &[i64]) -> impl Iterator<Item = Extents> + use<> {
    let shape: Extents = shape.into();
    let total = element_count(&shape);
    (0..total).map(move |flat| {
        let mut index: Extents = SmallVec::from_elem(0, shape.len());
        let mut rest = flat;
        for axis in (0..shape.len()).rev() {
            index[axis] = rest % shape[axis];
            rest /= shape[axis];
        }
        index
    })
}

macro_rules! reading {
    ($type:ident) => {
        impl $type<'_> {
            /// Element type.
            pub fn dtype(&self) -> DType {
                self.geometry.dtype
            }
            /// Sizes.
            pub fn shape(&self) -> &[i64] {
                &self.geometry.shape
            }
            /// Strides, in elements.
            pub fn strides(&self) -> &[i64] {
                &self.geometry.strides
            }
            /// Number of elements.
            pub fn len(&self) -> usize {
                element_count(&self.geometry.shape) as usize
            }
            /// Whether there are no elements.
            pub fn is_empty(&self) -> bool {
                self.len() == 0
            }
            /// Whether it is row-major without gaps.
            pub fn is_contiguous(&self) -> bool {
                self.geometry.is_contiguous()
            }
            /// The element at `index`, as a number. Panics outside the shape's memory.
            pub fn get(&self, index: &[i64]) -> f64 {
                numeric::load(self.geometry.dtype, &self.bytes, self.geometry.at(index))
            }
            /// The element at `index`, as an exact integer.
            pub fn get_int(&self, index: &[i64]) -> i64 {
                numeric::load_int(self.geometry.dtype, &self.bytes, self.geometry.at(index))
            }
            /// Every element, in row-major order.
            pub fn to_f64(&self) -> Vec<f64> {
                indices(self.shape()).map(|i| self.get(&i)).collect()
            }
            /// What selection needs to know of it.
            pub fn meta(&self) -> TensorMeta<'_> {
                let start = self.bytes.as_ptr() as usize + self.geometry.dtype.bytes_for(self.geometry.offset as usize);
                let meta = TensorMeta::new(self.geometry.dtype, &self.geometry.shape).strided(&self.geometry.strides);
                TensorMeta { aligned: start.is_multiple_of(16), ..meta }
            }
        }
    };
}

/// A tensor that is read.
#[derive(Clone, Debug)]
pub struct TensorView<'a> {
    geometry: Geometry,
    bytes: &'a [u8],
}

/// A tensor that is written.
#[derive(Debug)]
pub struct TensorViewMut<'a> {
    geometry: Geometry,
    bytes: &'a mut [u8],
}

reading!(TensorView);
reading!(TensorViewMut);

impl<'a> TensorView<'a> {
    /// A row-major tensor over `bytes`.
    pub fn contiguous(dtype: DType, shape: &[i64], bytes: &'a [u8]) -> Result<TensorView<'a>, TensorError> {
        TensorView::strided(dtype, shape, &row_major(shape), 0, bytes)
    }

    /// A tensor over `bytes` with strides and an offset, both in elements.
    pub fn strided(
        dtype: DType,
        shape: &[i64],
        strides: &[i64],
        offset: i64,
        bytes: &'a [u8],
    ) -> Result<TensorView<'a>, TensorError> {
        let geometry = Geometry::checked(dtype, shape, strides, offset, bytes.len())?;
        Ok(TensorView { geometry, bytes })
    }

    /// The same elements with axes in another order.
    pub fn permuted(&self, order: &[usize]) -> TensorView<'a> {
        TensorView { geometry: self.geometry.permuted(order), bytes: self.bytes }
    }

    /// A row-major copy, bit by bit.
    pub fn to_tensor(&self) -> Tensor {
        let mut tensor = Tensor::zeros(self.dtype(), self.shape());
        let width = self.dtype().bits() as usize / 8;
        for (i, index) in indices(self.shape()).enumerate() {
            let from = self.geometry.at(&index);
            if width == 0 {
                // Two to a byte: every four-bit value survives being read as a number.
                numeric::store(self.dtype(), &mut tensor.bytes, i, numeric::load(self.dtype(), self.bytes, from));
            } else {
                tensor.bytes[i * width..][..width].copy_from_slice(&self.bytes[from * width..][..width]);
            }
        }
        tensor
    }

    /// A row-major copy in another dtype.
    pub fn cast(&self, dtype: DType) -> Tensor {
        if dtype == self.dtype() {
            return self.to_tensor();
        }
        Tensor::from_f64(dtype, self.shape(), &self.to_f64())
    }
}

impl<'a> TensorViewMut<'a> {
    /// A row-major tensor over `bytes`.
    pub fn contiguous(dtype: DType, shape: &[i64], bytes: &'a mut [u8]) -> Result<TensorViewMut<'a>, TensorError> {
        let geometry = Geometry::checked(dtype, shape, &row_major(shape), 0, bytes.len())?;
        Ok(TensorViewMut { geometry, bytes })
    }

    /// A tensor over `bytes` with strides and an offset, both in elements.
    pub fn strided(
        dtype: DType,
        shape: &[i64],
        strides: &[i64],
        offset: i64,
        bytes: &'a mut [u8],
    ) -> Result<TensorViewMut<'a>, TensorError> {
        let geometry = Geometry::checked(dtype, shape, strides, offset, bytes.len())?;
        Ok(TensorViewMut { geometry, bytes })
    }

    /// Stores a number, rounded to the dtype.
    pub fn set(&mut self, index: &[i64], value: f64) {
        numeric::store(self.geometry.dtype, self.bytes, self.geometry.at(index), value);
    }

    /// A view for reading.
    pub fn as_view(&self) -> TensorView<'_> {
        TensorView { geometry: self.geometry.clone(), bytes: self.bytes }
    }

    /// The addresses its memory spans: first, and one past the last.
    pub fn address_range(&self) -> (usize, usize) {
        let range = self.bytes.as_ptr_range();
        (range.start as usize, range.end as usize)
    }

    /// A shorter-lived view for writing.
    pub fn reborrow(&mut self) -> TensorViewMut<'_> {
        TensorViewMut { geometry: self.geometry.clone(), bytes: self.bytes }
    }

    /// The same elements with axes in another order.
    pub fn into_permuted(self, order: &[usize]) -> TensorViewMut<'a> {
        TensorViewMut { geometry: self.geometry.permuted(order), bytes: self.bytes }
    }

    /// The memory behind it, to be put back with [`TensorViewMut::restore`].
    pub fn save(&self) -> Vec<u8> {
        self.bytes.to_vec()
    }

    /// Puts saved memory back, bit by bit.
    pub fn restore(&mut self, saved: &[u8]) {
        self.bytes.copy_from_slice(saved);
    }

    /// Overwrites every element with those of a tensor of the same shape.
    pub fn copy_from(&mut self, source: &TensorView<'_>) {
        for index in indices(source.shape()) {
            self.set(&index, source.get(&index));
        }
    }
}

/// A row-major tensor that owns its memory.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    geometry: Geometry,
    bytes: Vec<u8>,
}

impl Tensor {
    /// All zeros.
    pub fn zeros(dtype: DType, shape: &[i64]) -> Tensor {
        let elements = element_count(shape);
        let bytes = vec![0; dtype.bytes_for(elements.max(0) as usize)];
        let geometry = Geometry { dtype, shape: shape.into(), strides: row_major(shape), offset: 0 };
        Tensor { geometry, bytes }
    }

    /// All zeros, or `None` when there is no memory for it.
    pub fn try_zeros(dtype: DType, shape: &[i64]) -> Option<Tensor> {
        let bits = |n: i64, size: &i64| if *size < 0 { None } else { n.checked_mul((*size).max(1)) };
        let bits = shape.iter().try_fold(i64::from(dtype.bits()), bits)?;
        // Asked for first, since a failed allocation of zeros would end the process.
        Vec::<u8>::new().try_reserve_exact(bits as usize / 8 + 1).ok()?;
        Some(Tensor::zeros(dtype, shape))
    }

    /// From numbers in row-major order, rounded to the dtype. Panics when there are not as many
    /// numbers as the shape has elements.
    pub fn from_f64(dtype: DType, shape: &[i64], values: &[f64]) -> Tensor {
        let mut tensor = Tensor::zeros(dtype, shape);
        assert_eq!(values.len() as i64, element_count(shape), "numbers for shape {shape:?}");
        for (i, &value) in values.iter().enumerate() {
            numeric::store(dtype, &mut tensor.bytes, i, value);
        }
        tensor
    }

    /// From integers in row-major order.
    pub fn from_ints(dtype: DType, shape: &[i64], values: &[i64]) -> Tensor {
        let values: Vec<f64> = values.iter().map(|&i| i as f64).collect();
        Tensor::from_f64(dtype, shape, &values)
    }

    /// A view for reading.
    pub fn view(&self) -> TensorView<'_> {
        TensorView { geometry: self.geometry.clone(), bytes: &self.bytes }
    }

    /// A view for writing.
    pub fn view_mut(&mut self) -> TensorViewMut<'_> {
        TensorViewMut { geometry: self.geometry.clone(), bytes: &mut self.bytes }
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.geometry.dtype
    }

    /// Sizes.
    pub fn shape(&self) -> &[i64] {
        &self.geometry.shape
    }

    /// Every element, in row-major order.
    pub fn to_f64(&self) -> Vec<f64> {
        self.view().to_f64()
    }

    /// The raw memory, little-endian.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strided_views_read_the_elements_they_name() {
        let t = Tensor::from_f64(DType::F32, &[2, 3], &[0., 1., 2., 3., 4., 5.]);
        let transposed = t.view().permuted(&[1, 0]);
        assert_eq!(transposed.to_f64(), [0., 3., 1., 4., 2., 5.]);
        assert!(!transposed.is_contiguous() && t.view().is_contiguous());
        let every_other = TensorView::strided(DType::F32, &[2, 2], &[3, 2], 0, t.bytes()).unwrap();
        assert_eq!(every_other.to_f64(), [0., 2., 3., 5.]);
        let reversed = TensorView::strided(DType::F32, &[3], &[-1], 2, t.bytes()).unwrap();
        assert_eq!(reversed.to_f64(), [2., 1., 0.]);
    }

    #[test]
    fn memory_that_is_not_there_is_refused() {
        let bytes = [0u8; 8];
        assert!(matches!(
            TensorView::contiguous(DType::F32, &[3], &bytes),
            Err(TensorError::TooShort { needed: 12, .. })
        ));
        assert!(matches!(TensorView::strided(DType::F32, &[2], &[-1], 0, &bytes), Err(TensorError::BadShape { .. })));
        assert!(matches!(TensorView::contiguous(DType::F32, &[-1], &bytes), Err(TensorError::BadShape { .. })));
        let huge = [i64::MAX, i64::MAX];
        assert!(TensorView::strided(DType::F32, &huge, &[i64::MAX, 1], 0, &bytes).is_err());
        assert!(TensorView::contiguous(DType::F32, &[0, 5], &[]).unwrap().is_empty());
    }

    #[test]
    fn writing_through_a_permuted_view_lands_where_it_should() {
        let mut t = Tensor::zeros(DType::Bf16, &[2, 2]);
        let mut view = t.view_mut().into_permuted(&[1, 0]);
        view.set(&[0, 1], 5.0);
        assert_eq!(t.to_f64(), [0., 0., 5., 0.]);
    }
}
