//! Tensors in borrowed host memory, with sizes and strides of their own: axes can be permuted.

use std::marker::PhantomData;

use smallvec::SmallVec;

use crate::copy::copy;
use crate::tensor::{TensorMut, TensorRef};
use crate::{DType, Tensor};

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

/// Strides of a row-major tensor without gaps.
pub fn row_major(shape: &[i64]) -> Extents {
    let mut strides: Extents = SmallVec::from_elem(1, shape.len());
    for i in (0..shape.len().saturating_sub(1)).rev() {
        strides[i] = strides[i + 1].saturating_mul(shape[i + 1].max(1));
    }
    strides
}

/// Checks that a buffer of `bytes` bytes holds every element that can be reached.
pub(crate) fn check(
    dtype: DType,
    shape: &[i64],
    strides: &[i64],
    offset: i64,
    bytes: usize,
) -> Result<(), TensorError> {
    let bad = || TensorError::BadShape { shape: shape.to_vec(), strides: strides.to_vec() };
    if shape.len() != strides.len() || offset < 0 || shape.iter().any(|&n| n < 0) {
        return Err(bad());
    }
    if shape.contains(&0) {
        return Ok(());
    }
    // The reachable elements lie between the sum of the negative and of the positive spans.
    let (mut low, mut high) = (i128::from(offset), i128::from(offset));
    for (&n, &stride) in shape.iter().zip(strides) {
        let span = i128::from(n - 1) * i128::from(stride);
        if span < 0 { low += span } else { high += span }
    }
    if low < 0 || high >= i128::from(i64::MAX) {
        return Err(bad());
    }
    let needed = dtype.bytes_for(high as usize + 1);
    if needed > bytes {
        return Err(TensorError::TooShort { dtype, shape: shape.to_vec(), needed, got: bytes });
    }
    Ok(())
}

/// Whether a shape with these strides is row-major without gaps.
pub(crate) fn is_row_major(shape: &[i64], strides: &[i64]) -> bool {
    if shape.contains(&0) {
        return true;
    }
    let mut expected = 1;
    for (&n, &stride) in shape.iter().zip(strides).rev() {
        if n != 1 && stride != expected {
            return false;
        }
        expected *= n;
    }
    true
}

/// Elements of a shape; zero whenever some size is, however large the others are.
pub(crate) fn element_count(shape: &[i64]) -> i64 {
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

/// A tensor that is read.
#[derive(Clone, Debug)]
pub struct TensorView<'a> {
    dtype: DType,
    shape: Extents,
    strides: Extents,
    start: *const u8,
    memory: PhantomData<&'a [u8]>,
}

/// A tensor that is written.
#[derive(Debug)]
pub struct TensorViewMut<'a> {
    dtype: DType,
    shape: Extents,
    strides: Extents,
    start: *mut u8,
    memory: PhantomData<&'a mut [u8]>,
}

// SAFETY: a shared borrow of bytes.
unsafe impl Send for TensorView<'_> {}
// SAFETY: as above.
unsafe impl Sync for TensorView<'_> {}
// SAFETY: a mutable borrow of bytes.
unsafe impl Send for TensorViewMut<'_> {}
// SAFETY: through a shared reference it can be read, and not written.
unsafe impl Sync for TensorViewMut<'_> {}

macro_rules! reading {
    ($type:ident) => {
        impl $type<'_> {
            /// The same as kernels take it, to be read.
            pub fn as_ref(&self) -> TensorRef<'_> {
                // SAFETY: the elements may be read as long as this tensor is borrowed, and so do sizes and strides live.
                unsafe { TensorRef::new(self.dtype, &self.shape, &self.strides, self.start) }
            }
            /// Element type.
            pub fn dtype(&self) -> DType {
                self.dtype
            }
            /// Sizes.
            pub fn shape(&self) -> &[i64] {
                &self.shape
            }
            /// Strides, in elements.
            pub fn strides(&self) -> &[i64] {
                &self.strides
            }
            /// Number of elements.
            pub fn len(&self) -> usize {
                element_count(&self.shape) as usize
            }
            /// Whether there are no elements.
            pub fn is_empty(&self) -> bool {
                self.len() == 0
            }
            /// Whether it is row-major without gaps.
            pub fn is_contiguous(&self) -> bool {
                is_row_major(&self.shape, &self.strides)
            }
            /// The element at `index`, as a number. Panics outside the shape.
            pub fn get(&self, index: &[i64]) -> f64 {
                self.as_ref().get(index)
            }
            /// The element at `index`, as an exact integer. Panics outside the shape.
            pub fn get_int(&self, index: &[i64]) -> i64 {
                self.as_ref().get_int(index)
            }
            /// Every element, in row-major order.
            pub fn to_f64(&self) -> Vec<f64> {
                let all = self.as_ref();
                match (all.as_slice::<f32>(), all.as_slice::<f64>()) {
                    (Ok(numbers), _) => numbers.iter().copied().map(f64::from).collect(),
                    (_, Ok(numbers)) => numbers.to_vec(),
                    _ => all.to_f64(),
                }
            }
        }
    };
}

reading!(TensorView);
reading!(TensorViewMut);

fn permuted(extents: &[i64], order: &[usize]) -> Extents {
    order.iter().map(|&i| extents[i]).collect()
}

/// Whether an order names every axis of a tensor once.
fn is_permutation(order: &[usize], rank: usize) -> bool {
    order.len() == rank && (0..rank).all(|axis| order.contains(&axis))
}

impl<'a> TensorView<'a> {
    /// A tensor at an address.
    ///
    /// # Safety
    /// As [`TensorRef::new`].
    pub unsafe fn new(dtype: DType, shape: Extents, strides: Extents, start: *const u8) -> TensorView<'a> {
        TensorView { dtype, shape, strides, start, memory: PhantomData }
    }

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
        let start = checked_start(dtype, shape, strides, offset, bytes.len())?;
        // SAFETY: every element that can be reached lies in `bytes`, which are borrowed for `'a`.
        Ok(unsafe { TensorView::new(dtype, shape.into(), strides.into(), bytes.as_ptr().wrapping_add(start)) })
    }

    /// The same elements with axes in another order. Panics unless `order` names every axis once.
    pub fn permuted(&self, order: &[usize]) -> TensorView<'a> {
        assert!(is_permutation(order, self.shape.len()), "{order:?} is no order of {} axes", self.shape.len());
        let (shape, strides) = (permuted(&self.shape, order), permuted(&self.strides, order));
        TensorView { shape, strides, ..self.clone() }
    }

    /// So many indices of one axis, from `start` on. Panics outside the sizes, and for elements smaller than a byte.
    pub fn part(&self, axis: usize, start: i64, len: i64) -> TensorView<'a> {
        let (shape, bytes) = part(self.dtype, &self.shape, &self.strides, axis, start, len);
        // The first element of a part is one of the whole, unless the part is empty and nothing is read.
        TensorView { shape, start: self.start.wrapping_offset(bytes), ..self.clone() }
    }

    /// A row-major copy, bit by bit.
    pub fn to_tensor(&self) -> Tensor {
        let mut tensor = Tensor::zeros(self.dtype, &self.shape);
        tensor.view_mut().copy_bits_from(self);
        tensor
    }

    /// A copy of some rows: indices of the first axis, in this order.
    pub fn rows(&self, rows: &[i64]) -> Tensor {
        let mut shape = self.shape.clone();
        shape[0] = rows.len() as i64;
        let mut copy = Tensor::zeros(self.dtype, &shape);
        copy.view_mut().copy_rows((0..).zip(rows.iter().copied()), self);
        copy
    }

    /// A row-major copy in another dtype.
    pub fn cast(&self, dtype: DType) -> Tensor {
        if dtype == self.dtype {
            return self.to_tensor();
        }
        Tensor::from_f64(dtype, &self.shape, &self.to_f64())
    }
}

/// The sizes of a part of a tensor, and how many bytes after the first element of the whole it begins.
fn part(dtype: DType, shape: &[i64], strides: &[i64], axis: usize, start: i64, len: i64) -> (Extents, isize) {
    let fits = start >= 0 && len >= 0 && start.checked_add(len).is_some_and(|end| end <= shape[axis]);
    assert!(fits, "{len} elements from {start} on, of {}", shape[axis]);
    assert!(dtype.bits().is_multiple_of(8), "{dtype} has no address for each element");
    let mut shape: Extents = shape.into();
    shape[axis] = len;
    (shape, (start * strides[axis]) as isize * (dtype.bits() / 8) as isize)
}

/// Where the first element of a tensor over a buffer is, in bytes, once its elements are known to be inside.
fn checked_start(dtype: DType, shape: &[i64], strides: &[i64], offset: i64, len: usize) -> Result<usize, TensorError> {
    check(dtype, shape, strides, offset, len)?;
    let bits = offset as usize * dtype.bits() as usize;
    if shape.contains(&0) {
        return Ok(0);
    }
    if !bits.is_multiple_of(8) {
        return Err(TensorError::BadShape { shape: shape.to_vec(), strides: strides.to_vec() });
    }
    Ok(bits / 8)
}

impl<'a> TensorViewMut<'a> {
    /// A tensor at an address, to be written.
    ///
    /// # Safety
    /// As [`TensorMut::new`].
    pub unsafe fn new(dtype: DType, shape: Extents, strides: Extents, start: *mut u8) -> TensorViewMut<'a> {
        TensorViewMut { dtype, shape, strides, start, memory: PhantomData }
    }

    /// A row-major tensor over `bytes`.
    pub fn contiguous(dtype: DType, shape: &[i64], bytes: &'a mut [u8]) -> Result<TensorViewMut<'a>, TensorError> {
        TensorViewMut::strided(dtype, shape, &row_major(shape), 0, bytes)
    }

    /// A tensor over `bytes` with strides and an offset, both in elements.
    pub fn strided(
        dtype: DType,
        shape: &[i64],
        strides: &[i64],
        offset: i64,
        bytes: &'a mut [u8],
    ) -> Result<TensorViewMut<'a>, TensorError> {
        let start = checked_start(dtype, shape, strides, offset, bytes.len())?;
        // SAFETY: every element that can be reached lies in `bytes`, which are borrowed for `'a`.
        Ok(unsafe { TensorViewMut::new(dtype, shape.into(), strides.into(), bytes.as_mut_ptr().wrapping_add(start)) })
    }

    /// The same as kernels take it, to be written.
    pub fn as_mut(&mut self) -> TensorMut<'_> {
        // SAFETY: the elements may be written as long as this tensor is borrowed, and so do sizes and strides live.
        unsafe { TensorMut::new(self.dtype, &self.shape, &self.strides, self.start) }
    }

    /// Stores a number, rounded to the dtype. Panics outside the shape.
    pub fn set(&mut self, index: &[i64], value: f64) {
        self.as_mut().set(index, value);
    }

    /// A view for reading.
    pub fn as_view(&self) -> TensorView<'_> {
        // SAFETY: the same elements, while this tensor is borrowed.
        unsafe { TensorView::new(self.dtype, self.shape.clone(), self.strides.clone(), self.start) }
    }

    /// A shorter-lived view for writing.
    pub fn reborrow(&mut self) -> TensorViewMut<'_> {
        // SAFETY: the same elements, while this tensor is borrowed.
        unsafe { TensorViewMut::new(self.dtype, self.shape.clone(), self.strides.clone(), self.start) }
    }

    /// The same elements with axes in another order. Panics unless `order` names every axis once.
    pub fn into_permuted(self, order: &[usize]) -> TensorViewMut<'a> {
        assert!(is_permutation(order, self.shape.len()), "{order:?} is no order of {} axes", self.shape.len());
        let (shape, strides) = (permuted(&self.shape, order), permuted(&self.strides, order));
        TensorViewMut { shape, strides, ..self }
    }

    /// As [`TensorView::part`].
    pub fn into_part(self, axis: usize, start: i64, len: i64) -> TensorViewMut<'a> {
        let (shape, bytes) = part(self.dtype, &self.shape, &self.strides, axis, start, len);
        TensorViewMut { shape, start: self.start.wrapping_offset(bytes), ..self }
    }

    /// Puts rows back that [`TensorView::rows`] has copied.
    pub fn put_rows(&mut self, rows: &[i64], copy: &TensorView<'_>) {
        self.copy_rows(rows.iter().copied().zip(0..), copy);
    }

    /// Copies rows of another tensor of the same dtype and row shape, bit by bit: pairs of a row here and a row there.
    fn copy_rows(&mut self, pairs: impl Iterator<Item = (i64, i64)>, from: &TensorView<'_>) {
        assert_eq!(self.dtype, from.dtype, "bits are copied between tensors of one dtype");
        assert_eq!(self.shape[1..], from.shape[1..], "rows of one shape");
        if !self.dtype.is_sub_byte() {
            let element = self.dtype.bits() as usize / 8;
            let place = |row: i64, rows: i64, stride: i64| {
                assert!((0..rows).contains(&row), "row {row} of {rows}");
                (row * stride) as isize * element as isize
            };
            for (here, there) in pairs {
                let to = self.start.wrapping_offset(place(here, self.shape[0], self.strides[0]));
                let at = from.start.wrapping_offset(place(there, from.shape[0], from.strides[0]));
                // SAFETY: rows of these tensors, which do not overlap, since one of them is borrowed for writing.
                unsafe { copy(element, &self.shape[1..], (at, &from.strides[1..]), (to, &self.strides[1..])) };
            }
            return;
        }
        let inner: Vec<Extents> = indices(&self.shape[1..]).collect();
        let index =
            |row: i64, rest: &Extents| -> Extents { std::iter::once(row).chain(rest.iter().copied()).collect() };
        for (here, there) in pairs {
            self.copy_halves_of_bytes(inner.iter().map(|rest| (index(here, rest), index(there, rest))), from);
        }
    }

    /// Copies elements of another tensor of the same dtype, of which two are in a byte: pairs of an index here and an index there.
    fn copy_halves_of_bytes(&mut self, pairs: impl Iterator<Item = (Extents, Extents)>, from: &TensorView<'_>) {
        for (here, there) in pairs {
            // Every four-bit value survives being read as a number.
            self.set(&here, from.get(&there));
        }
    }

    /// Overwrites every element with those of a tensor of the same shape and dtype, bit by bit.
    pub fn copy_bits_from(&mut self, source: &TensorView<'_>) {
        assert_eq!(self.shape, source.shape, "tensors of one shape");
        assert_eq!(self.dtype, source.dtype, "bits are copied between tensors of one dtype");
        if self.dtype.is_sub_byte() {
            return self.copy_halves_of_bytes(indices(&self.shape.clone()).zip(indices(&source.shape)), source);
        }
        let element = self.dtype.bits() as usize / 8;
        // SAFETY: both have these sizes, and do not overlap, since one of them is borrowed for writing.
        unsafe { copy(element, &self.shape, (source.start, &source.strides), (self.start, &self.strides)) };
    }

    /// Overwrites every element with those of a tensor of the same shape.
    pub fn copy_from(&mut self, source: &TensorView<'_>) {
        if self.dtype == source.dtype && self.shape == source.shape {
            return self.copy_bits_from(source);
        }
        for index in indices(source.shape()) {
            self.set(&index, source.get(&index));
        }
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
    fn parts_are_what_they_name() {
        let mut t = Tensor::from_f64(DType::F32, &[2, 3], &[0., 1., 2., 3., 4., 5.]);
        assert_eq!(t.view().part(1, 1, 2).to_f64(), [1., 2., 4., 5.]);
        assert_eq!(t.view().permuted(&[1, 0]).part(0, 2, 1).to_f64(), [2., 5.]);
        assert!(t.view().part(0, 2, 0).is_empty());
        t.view_mut().into_part(0, 1, 1).set(&[0, 0], 9.0);
        assert_eq!(t.to_f64(), [0., 1., 2., 9., 4., 5.]);
    }

    #[test]
    #[should_panic(expected = "2 elements from 2 on, of 3")]
    fn parts_end_where_the_whole_does() {
        Tensor::zeros(DType::F32, &[2, 3]).view().part(1, 2, 2);
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
