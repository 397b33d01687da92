//! Tensors in somebody else's memory.
//!
//! The promise behind a [`TensorRef`] or [`TensorMut`] is made once, where it is built: every element its sizes and strides
//! can reach lies in memory that lives, and may be read (or written) through it, as long as its lifetime. From there on
//! nothing is unsafe: an index is checked against the sizes, a slice against dtype, strides and alignment.

use std::fmt;
use std::marker::PhantomData;

use crate::view::{Extents, TensorView, TensorViewMut, element_count, indices, is_row_major};
use crate::{Bytes, DType, Device, RawTensor, Scalar, numeric};

/// A tensor that is read. Laid out as [`RawTensor`].
#[repr(transparent)]
#[derive(Clone, Copy)]
pub struct TensorRef<'a> {
    raw: RawTensor,
    memory: PhantomData<&'a [u8]>,
}

/// A tensor that is written. Laid out as [`RawTensor`].
#[repr(transparent)]
pub struct TensorMut<'a> {
    raw: RawTensor,
    memory: PhantomData<&'a mut [u8]>,
}

// SAFETY: a shared borrow of bytes.
unsafe impl Send for TensorRef<'_> {}
// SAFETY: as above.
unsafe impl Sync for TensorRef<'_> {}
// SAFETY: a mutable borrow of bytes.
unsafe impl Send for TensorMut<'_> {}
// SAFETY: through a shared reference it can be read, and not written.
unsafe impl Sync for TensorMut<'_> {}

/// Why a tensor is no slice of some type.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotASlice {
    /// The elements are of another type.
    #[error("its elements are {dtype}, not {wanted}")]
    OtherType {
        /// What they are.
        dtype: DType,
        /// What was asked for.
        wanted: &'static str,
    },
    /// The elements do not follow each other in memory.
    #[error("shape {shape:?} with strides {strides:?} is not row-major without gaps")]
    Strided {
        /// Its sizes.
        shape: Vec<i64>,
        /// Its strides.
        strides: Vec<i64>,
    },
    /// The first element is not where one may be.
    #[error("its address {address:#x} is no multiple of {align}")]
    Misaligned {
        /// Where it is.
        address: usize,
        /// What it should be a multiple of.
        align: usize,
    },
    /// The host cannot read it.
    #[error("it is on a device of DLPack type {}, not in host memory", .0.kind)]
    Elsewhere(Device),
}

/// The rows of a tensor, each a slice.
pub struct Rows<'a, T> {
    start: *const T,
    shape: &'a [i64],
    strides: &'a [i64],
    /// From one row to the next, where that is always the same.
    even: Option<isize>,
    len: usize,
    count: usize,
    memory: PhantomData<&'a [T]>,
}

impl<T> Clone for Rows<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Rows<'_, T> {}

// SAFETY: a shared borrow of plain values.
unsafe impl<T: Scalar> Send for Rows<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Scalar> Sync for Rows<'_, T> {}

impl<'a, T: Scalar> Rows<'a, T> {
    /// Elements of a row.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether rows have no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// How many rows there are; none when they have no elements.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Row number `row`, counted with the last leading axis fastest. Panics when there is none.
    #[inline]
    pub fn get(&self, row: usize) -> &'a [T] {
        assert!(row < self.count, "row {row} of {}", self.count);
        let place = match self.even {
            Some(step) => row as isize * step,
            None => {
                let (mut rest, mut place) = (row as i64, 0);
                for (&n, &stride) in self.shape.iter().zip(self.strides).rev() {
                    place += rest % n * stride;
                    rest /= n;
                }
                place as isize
            }
        };
        // SAFETY: the row is inside the sizes, its elements follow each other, and they are aligned values of this type.
        unsafe { std::slice::from_raw_parts(self.start.offset(place), self.len) }
    }

    /// The rows along one of the axes before the last, at a place of the other axes. What `at` says of that axis is not looked at.
    pub fn along(&self, axis: usize, at: &[usize]) -> Line<'a, T> {
        assert_eq!(at.len(), self.shape.len(), "an index for each axis but the last");
        let mut place = 0;
        for (i, (&at, (&n, &stride))) in at.iter().zip(self.shape.iter().zip(self.strides)).enumerate() {
            if i != axis {
                assert!((at as i64) < n, "{at} of {n} along axis {i}");
                place += at as i64 * stride;
            }
        }
        // Without an element there are no rows to be looked at.
        let count = if self.count == 0 { 0 } else { self.shape[axis] as usize };
        // Only if there are rows, the place is inside the memory.
        let start = if count == 0 { self.start } else { self.start.wrapping_offset(place as isize) };
        Line { start, step: self.strides[axis] as isize, len: self.len, count, memory: PhantomData }
    }
}

/// The rows of a tensor along one of its axes, evenly apart.
pub struct Line<'a, T> {
    start: *const T,
    step: isize,
    len: usize,
    count: usize,
    memory: PhantomData<&'a [T]>,
}

impl<T> Clone for Line<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Line<'_, T> {}

// SAFETY: a shared borrow of plain values.
unsafe impl<T: Scalar> Send for Line<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Scalar> Sync for Line<'_, T> {}

impl<'a, T: Scalar> Line<'a, T> {
    /// How many rows there are.
    pub fn count(&self) -> usize {
        self.count
    }

    /// A row by its number.
    #[inline(always)]
    pub fn get(&self, row: usize) -> &'a [T] {
        assert!(row < self.count, "row {row} of {}", self.count);
        // SAFETY: the row is inside the sizes, its elements follow each other, and they are aligned values of this type.
        unsafe { std::slice::from_raw_parts(self.start.offset(row as isize * self.step), self.len) }
    }
}

/// The place of an element, in elements from the first. Panics when the index is outside the sizes.
pub(crate) fn place(shape: &[i64], strides: &[i64], index: &[i64]) -> isize {
    let inside = index.len() == shape.len() && index.iter().zip(shape).all(|(i, n)| (0..*n).contains(i));
    assert!(inside, "index {index:?} is outside shape {shape:?}");
    index.iter().zip(strides).map(|(i, s)| i * s).sum::<i64>() as isize
}

macro_rules! reading {
    ($type:ident) => {
        impl<'a> $type<'a> {
            /// Whether it was given at all.
            pub fn is_present(&self) -> bool {
                self.raw.rank >= 0
            }

            /// Element type.
            pub fn dtype(&self) -> DType {
                self.raw.element.dtype().expect("checked when it was built")
            }

            /// Where its memory is.
            pub fn device(&self) -> Device {
                self.raw.device
            }

            /// Sizes.
            pub fn shape(&self) -> &'a [i64] {
                // SAFETY: the promise of this type; sizes live as long as it.
                unsafe { self.raw.shape() }
            }

            /// Strides, in elements.
            pub fn strides(&self) -> &'a [i64] {
                // SAFETY: the promise of this type; whoever builds one gives strides.
                unsafe { self.raw.strides() }.unwrap_or(&[])
            }

            /// Number of elements.
            pub fn len(&self) -> usize {
                element_count(self.shape()) as usize
            }

            /// Whether there are no elements.
            pub fn is_empty(&self) -> bool {
                self.len() == 0
            }

            /// Whether it is row-major without gaps.
            pub fn is_contiguous(&self) -> bool {
                is_row_major(self.shape(), self.strides())
            }

            /// The address of its first element.
            pub fn address(&self) -> usize {
                self.raw.start() as usize
            }

            /// The addresses its elements lie in. Empty when it has none.
            pub fn bytes(&self) -> Bytes {
                Bytes::of(self.dtype(), self.shape(), self.strides(), self.address())
            }

            /// The same as DLPack lays it out.
            pub fn raw(&self) -> &RawTensor {
                &self.raw
            }

            /// The element at `index`, as a number. Panics outside the shape.
            pub fn get(&self, index: &[i64]) -> f64 {
                let (dtype, at) = (self.dtype(), place(self.shape(), self.strides(), index));
                // SAFETY: the index is inside the sizes, and those elements may be read.
                unsafe { with_element(self.raw.start(), dtype, at, |bytes, i| numeric::load(dtype, bytes, i)) }
            }

            /// The element at `index`, as an exact integer. Panics outside the shape.
            pub fn get_int(&self, index: &[i64]) -> i64 {
                let (dtype, at) = (self.dtype(), place(self.shape(), self.strides(), index));
                // SAFETY: as above.
                unsafe { with_element(self.raw.start(), dtype, at, |bytes, i| numeric::load_int(dtype, bytes, i)) }
            }

            /// Every element, in row-major order.
            pub fn to_f64(&self) -> Vec<f64> {
                indices(self.shape()).map(|i| self.get(&i)).collect()
            }

            /// Whether the host can read its elements as values of this type.
            fn holds<T: Scalar>(&self) -> Result<(), NotASlice> {
                let (dtype, address, align) = (self.dtype(), self.address(), align_of::<T>());
                if !self.raw.device.is_host() {
                    return Err(NotASlice::Elsewhere(self.raw.device));
                }
                if !T::DTYPES.contains(&dtype) {
                    return Err(NotASlice::OtherType { dtype, wanted: std::any::type_name::<T>() });
                }
                if !address.is_multiple_of(align) && !self.is_empty() {
                    return Err(NotASlice::Misaligned { address, align });
                }
                Ok(())
            }

            /// Whether it is a slice of this type.
            fn is_slice<T: Scalar>(&self) -> Result<(), NotASlice> {
                self.holds::<T>()?;
                if self.is_contiguous() { Ok(()) } else { Err(self.strided()) }
            }

            fn strided(&self) -> NotASlice {
                NotASlice::Strided { shape: self.shape().to_vec(), strides: self.strides().to_vec() }
            }
        }

        impl fmt::Debug for $type<'_> {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                if !self.is_present() {
                    return f.write_str("no tensor");
                }
                write!(f, "{} {:?} strides {:?}", self.dtype(), self.shape(), self.strides())
            }
        }
    };
}

reading!(TensorRef);
reading!(TensorMut);

/// Where element `at` lies, in bytes from the first element, in how many bytes, and which element of those bytes it is.
fn bytes_of(dtype: DType, at: isize) -> (isize, usize, usize) {
    match dtype.bits() as isize / 8 {
        0 => (at.div_euclid(2), 1, at.rem_euclid(2) as usize),
        width => (at * width, width as usize, 0),
    }
}

/// Hands the bytes of an element over, and which element of those bytes it is (4-bit elements share a byte).
///
/// # Safety
/// Element `at`, counted from `start`, may be read.
pub(crate) unsafe fn with_element<R>(
    start: *const u8,
    dtype: DType,
    at: isize,
    f: impl FnOnce(&[u8], usize) -> R,
) -> R {
    let (first, width, which) = bytes_of(dtype, at);
    // SAFETY: the bytes of the element may be read.
    f(unsafe { std::slice::from_raw_parts(start.offset(first), width) }, which)
}

/// As [`with_element`], to be written.
///
/// # Safety
/// Element `at`, counted from `start`, may be read and written, and nobody else looks at its bytes meanwhile.
pub(crate) unsafe fn with_element_mut(start: *mut u8, dtype: DType, at: isize, f: impl FnOnce(&mut [u8], usize)) {
    let (first, width, which) = bytes_of(dtype, at);
    // SAFETY: the bytes of the element may be written.
    f(unsafe { std::slice::from_raw_parts_mut(start.offset(first), width) }, which);
}

impl<'a> TensorRef<'a> {
    /// A tensor that was not given.
    pub const ABSENT: TensorRef<'a> = TensorRef { raw: RawTensor::ABSENT, memory: PhantomData };

    /// A tensor at an address in host memory.
    ///
    /// # Safety
    /// `strides` are as many as `shape`. Every element they reach from `start` may be read for `'a`, and nobody writes it
    /// meanwhile.
    pub unsafe fn new(dtype: DType, shape: &'a [i64], strides: &'a [i64], start: *const u8) -> TensorRef<'a> {
        TensorRef { raw: describe(dtype, shape, strides, start.cast_mut()), memory: PhantomData }
    }

    /// All elements as a slice, if they are contiguous values of this type.
    pub fn as_slice<T: Scalar>(&self) -> Result<&'a [T], NotASlice> {
        self.is_slice::<T>()?;
        if self.is_empty() {
            return Ok(&[]);
        }
        // SAFETY: contiguous, aligned elements of this very type, which may be read for `'a`.
        Ok(unsafe { std::slice::from_raw_parts(self.raw.start().cast(), self.len()) })
    }

    /// The rows of the last axis, if each is a slice of this type. A tensor without axes is one row of one element.
    pub fn rows<T: Scalar>(&self) -> Result<Rows<'a, T>, NotASlice> {
        let (shape, strides) = (self.shape(), self.strides());
        let (len, step) = (shape.last().map_or(1, |&n| n as usize), strides.last().copied().unwrap_or(1));
        self.holds::<T>()?;
        if step != 1 && len > 1 && !self.is_empty() {
            return Err(self.strided());
        }
        let count = self.len().checked_div(len).unwrap_or(0);
        let even = self.is_contiguous().then_some(len as isize);
        let leading = shape.len().saturating_sub(1);
        let (shape, strides) = (&shape[..leading], &strides[..leading]);
        Ok(Rows { start: self.raw.start().cast(), shape, strides, even, len, count, memory: PhantomData })
    }

    /// The same with sizes and strides of its own.
    pub fn view(&self) -> TensorView<'a> {
        // SAFETY: the same elements, for the same time.
        unsafe { TensorView::new(self.dtype(), self.shape().into(), self.strides().into(), self.raw.start()) }
    }
}

impl<'a> TensorMut<'a> {
    /// A tensor at an address in host memory, to be written.
    ///
    /// # Safety
    /// `strides` are as many as `shape`. Every element they reach from `start` may be read and written for `'a`, and nobody
    /// else does either meanwhile.
    pub unsafe fn new(dtype: DType, shape: &'a [i64], strides: &'a [i64], start: *mut u8) -> TensorMut<'a> {
        TensorMut { raw: describe(dtype, shape, strides, start), memory: PhantomData }
    }

    /// All elements as a slice, if they are contiguous values of this type.
    pub fn as_slice<T: Scalar>(&mut self) -> Result<&mut [T], NotASlice> {
        self.is_slice::<T>()?;
        if self.is_empty() {
            return Ok(&mut []);
        }
        // SAFETY: contiguous, aligned elements of this very type, borrowed from this tensor for writing.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.raw.start().cast(), self.len()) })
    }

    /// The row of the last axis at an index of the others, if it is a slice of this type. Panics outside the shape.
    pub fn row<T: Scalar>(&mut self, at: &[i64]) -> Result<&mut [T], NotASlice> {
        self.holds::<T>()?;
        let (shape, strides) = (self.shape(), self.strides());
        let last = shape.len().saturating_sub(1);
        let (len, step) = (shape.last().map_or(1, |&n| n as usize), strides.last().copied().unwrap_or(1));
        if step != 1 && len > 1 && !self.is_empty() {
            return Err(self.strided());
        }
        let place = place(&shape[..last], &strides[..last], at);
        if len == 0 {
            return Ok(&mut []);
        }
        // SAFETY: the row is inside the sizes, and its aligned elements of this very type follow each other; they are borrowed
        // from this tensor for writing.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.raw.start().cast::<T>().offset(place), len) })
    }

    /// Stores a number, rounded to the dtype. Panics outside the shape.
    pub fn set(&mut self, index: &[i64], value: f64) {
        let (dtype, at) = (self.dtype(), place(self.shape(), self.strides(), index));
        // SAFETY: the index is inside the sizes, and those elements may be written.
        unsafe { with_element_mut(self.raw.start(), dtype, at, |bytes, i| numeric::store(dtype, bytes, i, value)) };
    }

    /// The same to be read, while this is borrowed.
    pub fn as_ref(&self) -> TensorRef<'_> {
        TensorRef { raw: self.raw, memory: PhantomData }
    }

    /// The same with sizes and strides of its own, while this is borrowed.
    pub fn view_mut(&mut self) -> TensorViewMut<'_> {
        let (shape, strides): (Extents, Extents) = (self.shape().into(), self.strides().into());
        // SAFETY: the same elements, borrowed from this tensor.
        unsafe { TensorViewMut::new(self.dtype(), shape, strides, self.raw.start()) }
    }
}

pub(crate) fn describe(dtype: DType, shape: &[i64], strides: &[i64], start: *mut u8) -> RawTensor {
    debug_assert_eq!(shape.len(), strides.len());
    RawTensor {
        data: start.cast(),
        device: Device::HOST,
        rank: shape.len() as i32,
        element: dtype.element(),
        shape: shape.as_ptr(),
        strides: strides.as_ptr(),
        byte_offset: 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Tensor;

    #[test]
    fn a_tensor_is_laid_out_as_dlpacks() {
        assert_eq!(size_of::<TensorRef<'_>>(), size_of::<RawTensor>());
        assert_eq!(size_of::<TensorMut<'_>>(), size_of::<RawTensor>());
        assert_eq!(align_of::<TensorRef<'_>>(), align_of::<RawTensor>());
    }

    #[test]
    fn slices_are_checked() {
        let mut t = Tensor::from_f64(DType::F32, &[2, 2], &[1., 2., 3., 4.]);
        assert_eq!(t.view().as_ref().as_slice::<f32>(), Ok(&[1f32, 2., 3., 4.][..]));
        let wrong = t.view().as_ref().as_slice::<i32>().unwrap_err();
        assert_eq!(wrong.to_string(), "its elements are float32, not i32");
        let turned = t.view().permuted(&[1, 0]);
        assert!(matches!(turned.as_ref().as_slice::<f32>(), Err(NotASlice::Strided { .. })));
        let odd = TensorView::contiguous(DType::F32, &[1], &t.bytes()[1..5]).unwrap();
        assert!(matches!(odd.as_ref().as_slice::<f32>(), Err(NotASlice::Misaligned { align: 4, .. })));
        t.view_mut().as_mut().as_slice::<f32>().unwrap()[3] = 9.0;
        assert_eq!(t.to_f64(), [1., 2., 3., 9.]);
        let empty = Tensor::zeros(DType::F64, &[3, 0]);
        assert_eq!(empty.view().as_ref().as_slice::<f64>(), Ok(&[][..]));
        let mut raw = *t.view().as_ref().raw();
        raw.device = Device { kind: Device::CUDA, id: 0 };
        let elsewhere = TensorRef { raw, memory: PhantomData };
        assert!(matches!(elsewhere.as_slice::<f32>(), Err(NotASlice::Elsewhere(_))));
    }

    #[test]
    #[should_panic(expected = "index [0, 2] is outside shape [2, 2]")]
    fn an_index_outside_the_shape_is_caught() {
        Tensor::zeros(DType::F32, &[2, 2]).view().as_ref().get(&[0, 2]);
    }

    #[test]
    fn rows_are_where_the_strides_say() {
        let numbers: Vec<f64> = (0..24).map(f64::from).collect();
        let t = Tensor::from_f64(DType::F32, &[2, 3, 4], &numbers);
        let turned = t.view().permuted(&[1, 0, 2]);
        let tensor = turned.as_ref();
        let rows = tensor.rows::<f32>().unwrap();
        assert_eq!((rows.count(), rows.len()), (6, 4));
        assert_eq!(rows.get(1), [12., 13., 14., 15.]);
        assert_eq!(rows.get(2), [4., 5., 6., 7.]);
        assert!(t.view().permuted(&[0, 2, 1]).as_ref().rows::<f32>().is_err());
        assert!(tensor.rows::<f64>().is_err());
        let empty = Tensor::zeros(DType::F32, &[3, 0]);
        assert_eq!(empty.view().as_ref().rows::<f32>().unwrap().count(), 0);
        // Without an element there is none out of its place.
        let apart = Tensor::zeros(DType::F32, &[4, 0]);
        let (shape, strides) = ([0, 4], [8, 2]);
        let none = TensorView::strided(DType::F32, &shape, &strides, 0, apart.bytes()).unwrap();
        assert_eq!(none.as_ref().rows::<f32>().unwrap().count(), 0);
        let one = Tensor::from_f64(DType::F32, &[], &[5.0]);
        assert_eq!(one.view().as_ref().rows::<f32>().unwrap().get(0), [5.0]);
    }

    #[test]
    fn a_row_is_written_where_the_strides_say() {
        let mut t = Tensor::zeros(DType::F32, &[2, 3, 2]);
        let mut view = t.view_mut().into_permuted(&[1, 0, 2]);
        let mut tensor = view.as_mut();
        tensor.row::<f32>(&[2, 1]).unwrap().copy_from_slice(&[7.0, 8.0]);
        assert!(matches!(tensor.row::<i32>(&[0, 0]), Err(NotASlice::OtherType { .. })));
        assert_eq!(t.to_f64()[10..], [7.0, 8.0]);
        let mut view = t.view_mut().into_permuted(&[0, 2, 1]);
        assert!(matches!(view.as_mut().row::<f32>(&[0, 0]), Err(NotASlice::Strided { .. })));
        assert!(Tensor::zeros(DType::F32, &[2, 0]).view_mut().as_mut().row::<f32>(&[1]).unwrap().is_empty());
    }

    #[test]
    fn lines_are_the_rows_along_an_axis() {
        let numbers: Vec<f64> = (0..24).map(f64::from).collect();
        let t = Tensor::from_f64(DType::F32, &[2, 3, 4], &numbers);
        for order in [[0, 1, 2], [1, 0, 2]] {
            let turned = t.view().permuted(&order);
            let tensor = turned.as_ref();
            let (rows, sizes) =
                (tensor.rows::<f32>().unwrap(), (tensor.shape()[0] as usize, tensor.shape()[1] as usize));
            for (i, j) in (0..sizes.0).flat_map(|i| (0..sizes.1).map(move |j| (i, j))) {
                assert_eq!(rows.along(1, &[i, 99]).get(j), rows.get(i * sizes.1 + j));
                assert_eq!(rows.along(0, &[99, j]).get(i), rows.get(i * sizes.1 + j));
            }
            assert_eq!((rows.along(1, &[0, 0]).count(), rows.along(0, &[0, 0]).count()), (sizes.1, sizes.0));
        }
        let empty = Tensor::zeros(DType::F32, &[2, 3, 0]);
        assert_eq!(empty.view().as_ref().rows::<f32>().unwrap().along(1, &[1, 0]).count(), 0);
    }

    #[test]
    #[should_panic(expected = "2 of 2 along axis 0")]
    fn a_line_outside_the_shape_is_caught() {
        let t = Tensor::zeros(DType::F32, &[2, 3, 4]);
        t.view().as_ref().rows::<f32>().unwrap().along(1, &[2, 0]);
    }

    #[test]
    #[should_panic(expected = "row 3 of 3")]
    fn a_row_beyond_a_line_is_caught() {
        let t = Tensor::zeros(DType::F32, &[2, 3, 4]);
        t.view().as_ref().rows::<f32>().unwrap().along(1, &[1, 0]).get(3);
    }

    #[test]
    #[should_panic(expected = "index [2] is outside shape [2]")]
    fn a_row_outside_the_shape_is_caught() {
        let _ = Tensor::zeros(DType::F32, &[2, 2]).view_mut().as_mut().row::<f32>(&[2]);
    }

    #[test]
    fn an_absent_tensor_is_no_tensor() {
        assert!(!TensorRef::ABSENT.is_present());
        assert_eq!(format!("{:?}", TensorRef::ABSENT), "no tensor");
    }
}
