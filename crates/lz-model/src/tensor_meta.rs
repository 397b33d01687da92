//! What selection knows of a tensor: its description before the call, and the 16 bits a query keeps of it.

use std::fmt;

use lz_abi::DType;

use crate::ids::DeviceIx;
use crate::layout::Layout;

/// What is known of a tensor argument before the call.
#[derive(Clone, Copy, Debug)]
pub struct TensorMeta<'a> {
    /// Element type.
    pub dtype: DType,
    /// Sizes.
    pub shape: &'a [i64],
    /// Strides in elements; `None` is row-major without gaps.
    pub strides: Option<&'a [i64]>,
    /// Where it lives.
    pub device: DeviceIx,
    /// Whether its data starts at a multiple of 16 bytes.
    pub aligned: bool,
    /// Whether a gradient is wanted for it.
    pub requires_grad: bool,
}

impl<'a> TensorMeta<'a> {
    /// A contiguous, aligned tensor on the first device.
    pub fn new(dtype: DType, shape: &'a [i64]) -> TensorMeta<'a> {
        TensorMeta { dtype, shape, strides: None, device: DeviceIx(0), aligned: true, requires_grad: false }
    }

    /// What selection needs to know of a tensor in host memory.
    pub fn of(tensor: lz_abi::TensorRef<'a>) -> TensorMeta<'a> {
        let aligned = tensor.address().is_multiple_of(16);
        TensorMeta { aligned, ..TensorMeta::new(tensor.dtype(), tensor.shape()).strided(tensor.strides()) }
    }

    /// The same with strides.
    pub fn strided(mut self, strides: &'a [i64]) -> TensorMeta<'a> {
        self.strides = Some(strides);
        self
    }

    /// The same on another device.
    pub fn on(mut self, device: DeviceIx) -> TensorMeta<'a> {
        self.device = device;
        self
    }

    fn last_stride_is_one(&self) -> bool {
        match (self.shape.last(), self.strides.and_then(<[i64]>::last)) {
            (Some(&n), Some(&stride)) => stride == 1 || n <= 1,
            _ => true,
        }
    }

    pub(crate) fn is_contiguous(&self) -> bool {
        let Some(strides) = self.strides else {
            return true;
        };
        let mut expected = 1;
        for (&n, &stride) in self.shape.iter().zip(strides).rev() {
            if n == 0 {
                return true;
            }
            if n != 1 && stride != expected {
                return false;
            }
            expected *= n;
        }
        true
    }
}

/// What a query keeps of a tensor, in 16 bits: five properties, 6 bits of dtype, 5 bits of layout.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub struct TensorFacts(pub(crate) u16);

const _: () = assert!(Layout::ALL.len() <= 1 << 5, "more layouts than TensorFacts has bits for");

impl TensorFacts {
    const PRESENT: u16 = 1;
    const CONTIGUOUS: u16 = 1 << 1;
    const LAST_STRIDE_ONE: u16 = 1 << 2;
    pub(crate) const ALIGNED: u16 = 1 << 3;
    const BROADCAST: u16 = 1 << 4;
    /// Where the dtype begins, and how many bits it has.
    const DTYPE: (u32, u32) = (5, 6);
    /// Where the layout begins.
    const LAYOUT: u32 = 11;

    pub(crate) fn new(meta: &TensorMeta<'_>, layout: Layout, broadcast: bool) -> TensorFacts {
        let bit = |on: bool, bit: u16| if on { bit } else { 0 };
        debug_assert!((meta.dtype as u16) < 1 << Self::DTYPE.1, "more dtypes than there are bits for");
        TensorFacts(
            Self::PRESENT
                | bit(meta.is_contiguous(), Self::CONTIGUOUS)
                | bit(meta.last_stride_is_one(), Self::LAST_STRIDE_ONE)
                | bit(meta.aligned, Self::ALIGNED)
                | bit(broadcast, Self::BROADCAST)
                | (meta.dtype as u16) << Self::DTYPE.0
                | (layout as u16) << Self::LAYOUT,
        )
    }

    /// As it is most often given: see [`Query::most_usual`](crate::Query::most_usual).
    pub(crate) fn most_usual(self) -> TensorFacts {
        let Some(dtype) = self.dtype() else { return self };
        let dtype = if dtype == DType::F16 { DType::Bf16 } else { dtype };
        let layout = match self.layout() {
            Layout::Bshd => Layout::Bhsd,
            Layout::Hnd => Layout::Nhd,
            other => other,
        };
        let flags = self.0 & Self::BROADCAST | Self::PRESENT | Self::CONTIGUOUS | Self::LAST_STRIDE_ONE | Self::ALIGNED;
        TensorFacts(flags | (dtype as u16) << Self::DTYPE.0 | (layout as u16) << Self::LAYOUT)
    }

    /// Whether the tensor was given.
    pub fn is_present(self) -> bool {
        self.0 & Self::PRESENT != 0
    }
    /// Whether it is row-major without gaps.
    pub fn is_contiguous(self) -> bool {
        self.0 & Self::CONTIGUOUS != 0
    }
    /// Whether neighbours along the last dimension are neighbours in memory.
    pub fn has_last_stride_one(self) -> bool {
        self.0 & Self::LAST_STRIDE_ONE != 0
    }
    /// Whether it starts at a multiple of 16 bytes.
    pub fn is_aligned(self) -> bool {
        self.0 & Self::ALIGNED != 0
    }
    /// Whether it is broadcast along some axis.
    pub fn is_broadcast(self) -> bool {
        self.0 & Self::BROADCAST != 0
    }
    /// Its dtype, if it was given.
    pub fn dtype(self) -> Option<DType> {
        self.is_present().then(|| DType::from_code((self.0 >> Self::DTYPE.0 & ((1 << Self::DTYPE.1) - 1)) as u8))
    }
    /// Its layout; [`Layout::Strided`] when the operation names none.
    pub fn layout(self) -> Layout {
        Layout::from_code((self.0 >> Self::LAYOUT) as u8)
    }
}

impl fmt::Debug for TensorFacts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.dtype() {
            None => f.write_str("absent"),
            Some(dtype) => {
                write!(f, "{dtype} {}", self.layout())?;
                if !self.is_contiguous() {
                    f.write_str(" strided")?;
                }
                Ok(())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_kept_of_a_tensor_is_what_was_seen_of_it() {
        let dtypes: Vec<DType> = (0..=DType::Bool as u8).map(DType::from_code).collect();
        assert!(dtypes.len() > 10);
        for (i, &dtype) in dtypes.iter().enumerate() {
            for layout in Layout::ALL {
                let aligned = i % 2 == 0;
                let meta = TensorMeta { aligned, ..TensorMeta::new(dtype, &[2, 3]) };
                let facts = TensorFacts::new(&meta, layout, !aligned);
                assert_eq!((facts.dtype(), facts.layout()), (Some(dtype), layout));
                assert_eq!((facts.is_aligned(), facts.is_broadcast()), (aligned, !aligned));
                assert!(facts.is_present() && facts.is_contiguous() && facts.has_last_stride_one());
            }
        }
        assert_eq!(TensorFacts::default().dtype(), None);
    }
}
