//! Memory for tests that ends, or begins, where no memory is: a kernel that reads or writes one byte too far ends the process.

use std::ptr::NonNull;

use lz_model::{Tensor, TensorView, TensorViewMut};
use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap_anonymous, mprotect, munmap};

/// Where the page is that must not be touched.
#[derive(Clone, Copy, Debug)]
pub enum Side {
    /// Before the first byte.
    Before,
    /// Behind the last byte.
    Behind,
}

/// Bytes beside a page that must not be touched.
pub struct Guarded {
    mapping: NonNull<u8>,
    mapped: usize,
    /// Where the bytes begin in the mapping.
    at: usize,
    len: usize,
}

impl Guarded {
    fn new(len: usize, side: Side) -> Guarded {
        let page = rustix::param::page_size();
        let room = len.next_multiple_of(page);
        let mapped = room + page;
        let (forbidden, at) = match side {
            Side::Before => (0, page),
            Side::Behind => (room, room - len),
        };
        // SAFETY: the system chooses a place that nothing else has, and the page that is forbidden is a part of it.
        let mapping = unsafe {
            let protection = ProtFlags::READ | ProtFlags::WRITE;
            let start = mmap_anonymous(std::ptr::null_mut(), mapped, protection, MapFlags::PRIVATE).expect("memory");
            mprotect(start.byte_add(forbidden), page, MprotectFlags::empty()).expect("a page of it");
            NonNull::new(start.cast()).expect("memory is not at zero")
        };
        Guarded { mapping, mapped, at, len }
    }

    /// A copy of all bytes a tensor reaches from its first to its last element.
    pub fn copy(view: &TensorView<'_>, side: Side) -> Guarded {
        let reached = view.as_ref().bytes();
        let mut copy = Guarded::new(reached.end - reached.start, side);
        // SAFETY: the tensors of tests are views of one allocation, so that what is between two elements is memory too.
        let bytes = unsafe { std::slice::from_raw_parts(reached.start as *const u8, copy.len) };
        copy.bytes_mut().copy_from_slice(bytes);
        copy
    }

    /// The copy of a tensor, as a tensor of the same strides.
    pub fn view<'a>(&'a self, of: &TensorView<'_>) -> TensorView<'a> {
        let first = of.as_ref().address() - of.as_ref().bytes().start;
        let offset = first * 8 / of.dtype().bits() as usize;
        TensorView::strided(of.dtype(), of.shape(), of.strides(), offset as i64, self.bytes()).expect("the same tensor")
    }

    fn bytes(&self) -> &[u8] {
        // SAFETY: `len` bytes from there on are of the mapping, which lives as long as this.
        unsafe { std::slice::from_raw_parts(self.mapping.as_ptr().add(self.at), self.len) }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, borrowed for writing.
        unsafe { std::slice::from_raw_parts_mut(self.mapping.as_ptr().add(self.at), self.len) }
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        // SAFETY: the mapping is this one's, and nobody borrows of it any more.
        unsafe { munmap(self.mapping.as_ptr().cast(), self.mapped) }.expect("it was mapped");
    }
}

/// Lets a call write to guarded copies of its results, and copies them back.
pub fn lend<R>(
    results: &mut [(&'static str, Tensor)],
    side: Side,
    call: impl FnOnce(&mut [TensorViewMut<'_>]) -> R,
) -> R {
    let mut copies: Vec<Guarded> = results.iter().map(|(_, tensor)| Guarded::copy(&tensor.view(), side)).collect();
    let given = {
        let views = results.iter().zip(&mut copies);
        let views = views.map(|((_, t), copy)| TensorViewMut::contiguous(t.dtype(), t.shape(), copy.bytes_mut()));
        call(&mut views.map(|view| view.expect("the same tensor")).collect::<Vec<_>>())
    };
    for ((_, tensor), copy) in results.iter_mut().zip(&copies) {
        let back = copy.view(&tensor.view()).to_tensor();
        *tensor = back;
    }
    given
}

#[cfg(test)]
mod tests {
    use super::*;
    use lz_model::DType;

    /// The test below runs this one in a process of its own.
    #[test]
    #[ignore = "it ends its process"]
    fn touches_a_byte_too_far() {
        let before = std::env::var_os("LZ_BEFORE").is_some();
        let mut memory = Guarded::new(5, if before { Side::Before } else { Side::Behind });
        let bytes = memory.bytes_mut().as_mut_ptr();
        let far = if before { bytes.wrapping_sub(1) } else { bytes.wrapping_add(5) };
        // SAFETY: it is not sound, and must end the process.
        unsafe { far.write_volatile(1) };
    }

    #[test]
    #[cfg(unix)]
    fn a_byte_too_far_ends_the_process() {
        use std::os::unix::process::ExitStatusExt;
        for before in [false, true] {
            let mut test = std::process::Command::new(std::env::current_exe().unwrap());
            test.args(["--exact", "guarded::tests::touches_a_byte_too_far", "--ignored"]);
            let test = if before { test.env("LZ_BEFORE", "1") } else { &mut test };
            let signal = test.output().unwrap().status.signal();
            // SIGSEGV, or SIGBUS on some systems.
            assert!([Some(11), Some(7), Some(10)].contains(&signal), "{before}: {signal:?}");
        }
    }

    #[test]
    fn a_copy_has_the_same_elements() {
        let x = Tensor::from_f64(DType::F32, &[3, 5], &(0..15).map(f64::from).collect::<Vec<_>>());
        let odd = TensorView::strided(DType::F32, &[5, 2], &[-1, 10], 4, x.bytes()).unwrap();
        for side in [Side::Before, Side::Behind] {
            let copy = Guarded::copy(&odd, side);
            assert_eq!(copy.view(&odd).to_f64(), odd.to_f64());
            let page = rustix::param::page_size();
            let (start, end) = (copy.bytes().as_ptr() as usize, copy.bytes().as_ptr_range().end as usize);
            assert!(if matches!(side, Side::Before) { start % page == 0 } else { end % page == 0 });
        }
    }
}
