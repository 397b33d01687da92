//! Element types and devices in DLPack's numbers.

use half::{bf16, f16};

use crate::DType;

/// An element type as DLPack writes it (`DLDataType`).
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Element {
    /// The kind of number (`DLDataTypeCode`), or one of this crate's own numbers from 200 on.
    pub code: u8,
    /// Bits of one element.
    pub bits: u8,
    /// Elements per entry; always 1 here.
    pub lanes: u16,
}

/// A device as DLPack writes it (`DLDevice`).
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Device {
    /// The kind of device (`DLDeviceType`).
    pub kind: i32,
    /// Which one of its kind.
    pub id: i32,
}

impl Device {
    /// Host memory.
    pub const HOST: Device = Device { kind: 1, id: 0 };
    /// `DLDeviceType` of CUDA devices.
    pub const CUDA: i32 = 2;

    /// Whether the host can read it.
    pub fn is_host(self) -> bool {
        self.kind == Device::HOST.kind
    }
}

const fn element(code: u8, bits: u8) -> Element {
    Element { code, bits, lanes: 1 }
}

/// DLPack's numbers, and ours from 200 on: DLPack has no tf32, and one number for all 4-bit floats.
const ELEMENTS: [(DType, Element); 16] = [
    (DType::F64, element(2, 64)),
    (DType::F32, element(2, 32)),
    (DType::Tf32, element(200, 32)),
    (DType::F16, element(2, 16)),
    (DType::Bf16, element(4, 16)),
    (DType::F8E4M3, element(10, 8)),
    (DType::F8E5M2, element(12, 8)),
    (DType::MxFp4, element(201, 4)),
    (DType::NvFp4, element(202, 4)),
    (DType::I64, element(0, 64)),
    (DType::I32, element(0, 32)),
    (DType::I16, element(0, 16)),
    (DType::I8, element(0, 8)),
    (DType::I4, element(0, 4)),
    (DType::U8, element(1, 8)),
    (DType::Bool, element(6, 8)),
];

impl DType {
    /// The same in DLPack's numbers.
    pub fn element(self) -> Element {
        ELEMENTS[self as usize].1
    }
}

impl Element {
    /// The dtype, if LayerZero has it.
    pub fn dtype(self) -> Option<DType> {
        ELEMENTS.iter().find(|(_, element)| *element == self).map(|(dtype, _)| *dtype)
    }
}

/// A Rust type whose values are the elements of a dtype.
///
/// # Safety
/// A value of the type is as large as an element of each of [`Scalar::DTYPES`], and any bits make one.
pub unsafe trait Scalar: Copy + Send + Sync + 'static {
    /// The dtypes whose elements it can read.
    const DTYPES: &'static [DType];
}

/// The bytes of integers of 8 bits, in two's complement.
pub fn as_unsigned(integers: &mut [i8]) -> &mut [u8] {
    // SAFETY: both have one size and alignment, and any bits make one of either.
    unsafe { std::slice::from_raw_parts_mut(integers.as_mut_ptr().cast(), integers.len()) }
}

macro_rules! scalars {
    ($($type:ty = $($dtype:ident)|+;)+) => {
        $(
            // SAFETY: the sizes agree (checked below), and every bit pattern is a value.
            unsafe impl Scalar for $type {
                const DTYPES: &'static [DType] = &[$(DType::$dtype),+];
            }
        )+

        #[test]
        fn scalars_are_as_large_as_their_elements() {
            $(for dtype in <$type as Scalar>::DTYPES {
                assert_eq!(size_of::<$type>() * 8, dtype.bits() as usize, "{dtype}");
            })+
        }
    };
}

scalars! {
    f64 = F64;
    f32 = F32 | Tf32;
    f16 = F16;
    bf16 = Bf16;
    i64 = I64;
    i32 = I32;
    i16 = I16;
    i8 = I8;
    u8 = U8 | Bool | F8E4M3 | F8E5M2;
}

#[test]
fn elements_are_in_the_order_of_dtypes_and_read_back() {
    for (i, (dtype, element)) in ELEMENTS.iter().enumerate() {
        assert_eq!(*dtype as usize, i);
        assert_eq!(u32::from(element.bits), dtype.bits());
        assert_eq!(element.dtype(), Some(*dtype));
    }
    assert_eq!(Element { code: 5, bits: 64, lanes: 1 }.dtype(), None, "complex numbers");
    assert_eq!(Element { lanes: 4, ..DType::F32.element() }.dtype(), None);
}
