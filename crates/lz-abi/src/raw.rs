//! A tensor as DLPack lays it out.

use std::ffi::c_void;
use std::ptr;

use crate::{Device, Element};

/// DLPack's `DLTensor`: addresses without a promise. [`crate::TensorRef`] is one whose memory can be read.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct RawTensor {
    /// Where its memory begins.
    pub data: *mut c_void,
    /// Where its memory is.
    pub device: Device,
    /// How many sizes there are; -1 marks a tensor that was not given.
    pub rank: i32,
    /// Its elements.
    pub element: Element,
    /// Its sizes.
    pub shape: *const i64,
    /// Its strides in elements; null means row-major without gaps.
    pub strides: *const i64,
    /// From `data` to its first element.
    pub byte_offset: u64,
}

impl RawTensor {
    /// No tensor.
    pub const ABSENT: RawTensor = RawTensor {
        data: ptr::null_mut(),
        device: Device { kind: 0, id: 0 },
        rank: -1,
        element: Element { code: 0, bits: 0, lanes: 0 },
        shape: ptr::null(),
        strides: ptr::null(),
        byte_offset: 0,
    };

    /// Where its first element is.
    pub fn start(&self) -> *mut u8 {
        self.data.cast::<u8>().wrapping_add(self.byte_offset as usize)
    }

    /// Its sizes.
    ///
    /// # Safety
    /// Whoever filled the struct followed DLPack, and the tensor is still alive.
    pub unsafe fn shape<'a>(&self) -> &'a [i64] {
        // SAFETY: by the contract above `shape` points to `rank` sizes; it may be null when there are none.
        if self.rank <= 0 { &[] } else { unsafe { std::slice::from_raw_parts(self.shape, self.rank as usize) } }
    }

    /// Its strides in elements; none means row-major without gaps.
    ///
    /// # Safety
    /// As for [`RawTensor::shape`].
    pub unsafe fn strides<'a>(&self) -> Option<&'a [i64]> {
        if self.strides.is_null() {
            return None;
        }
        // SAFETY: by the contract above non-null `strides` point to `rank` values.
        Some(unsafe { std::slice::from_raw_parts(self.strides, self.rank.max(0) as usize) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::offset_of;

    #[test]
    fn the_layout_is_dlpacks() {
        assert_eq!((size_of::<RawTensor>(), align_of::<RawTensor>()), (48, 8));
        let offsets = [
            offset_of!(RawTensor, data),
            offset_of!(RawTensor, device),
            offset_of!(RawTensor, rank),
            offset_of!(RawTensor, element),
            offset_of!(RawTensor, shape),
            offset_of!(RawTensor, strides),
            offset_of!(RawTensor, byte_offset),
        ];
        assert_eq!(offsets, [0, 8, 16, 20, 24, 32, 40]);
        assert_eq!((offset_of!(Device, kind), offset_of!(Device, id), size_of::<Device>()), (0, 4, 8));
        let element = [offset_of!(Element, code), offset_of!(Element, bits), offset_of!(Element, lanes)];
        assert_eq!((element, size_of::<Element>()), ([0, 1, 2], 4));
    }
}
