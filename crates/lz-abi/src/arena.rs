//! Scratch memory: an arena somebody owns, and the part of it that is lent for one call.

use std::marker::PhantomData;

use crate::Scalar;

/// Bytes that begin where a cache line does.
#[repr(C, align(64))]
#[derive(Clone, Copy)]
struct Line([u8; 64]);

/// Memory aligned to 64 bytes, all zeros when it is new.
#[derive(Clone, Default)]
pub struct Arena {
    lines: Vec<Line>,
    len: usize,
}

impl Arena {
    /// Memory of so many bytes; `None` when there is not that much.
    pub fn try_new(len: usize) -> Option<Arena> {
        let mut lines = Vec::new();
        lines.try_reserve_exact(len.div_ceil(64)).ok()?;
        lines.resize(len.div_ceil(64), Line([0; 64]));
        Some(Arena { lines, len })
    }

    /// Makes sure that there are so many bytes. What was in them is lost.
    pub fn reserve(&mut self, len: usize) -> Result<(), OutOfScratch> {
        if len > self.len {
            *self = Arena::try_new(len).ok_or(OutOfScratch { wanted: len, left: self.len })?;
        }
        Ok(())
    }

    /// How many bytes there are.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Its bytes.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the lines are `len` or more initialised bytes in one piece, borrowed as long as the result.
        unsafe { std::slice::from_raw_parts(self.lines.as_ptr().cast(), self.len) }
    }

    /// Its bytes, to be written.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, borrowed for writing.
        unsafe { std::slice::from_raw_parts_mut(self.lines.as_mut_ptr().cast(), self.len) }
    }

    /// All of it, to be lent to one call.
    pub fn lend(&mut self) -> Workspace<'_> {
        let left = self.len;
        Workspace { next: self.lines.as_mut_ptr().cast(), left, memory: PhantomData }
    }
}

impl PartialEq for Arena {
    fn eq(&self, other: &Arena) -> bool {
        self.bytes() == other.bytes()
    }
}

impl std::fmt::Debug for Arena {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Arena({} bytes)", self.len)
    }
}

/// Scratch memory for one call. Parts that were taken are given back when the call ends.
#[repr(C)]
pub struct Workspace<'a> {
    next: *mut u8,
    left: usize,
    memory: PhantomData<&'a mut [u8]>,
}

// SAFETY: it is a mutable borrow of bytes, which may be sent and looked at from anywhere.
unsafe impl Send for Workspace<'_> {}
// SAFETY: through a shared reference only its length can be read.
unsafe impl Sync for Workspace<'_> {}

/// A kernel asked for more scratch memory than its descriptor says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{wanted} bytes of scratch memory are wanted, {left} are left; the kernel's workspace formula is too small")]
pub struct OutOfScratch {
    /// Bytes that were asked for.
    pub wanted: usize,
    /// Bytes there are.
    pub left: usize,
}

impl<'a> Workspace<'a> {
    /// No scratch memory.
    pub fn none() -> Workspace<'a> {
        Workspace { next: std::ptr::null_mut(), left: 0, memory: PhantomData }
    }

    /// So many bytes from an address on.
    ///
    /// # Safety
    /// They are initialised, aligned to 64 bytes, and nobody else uses them for `'a`.
    pub(crate) unsafe fn at(start: *mut u8, len: usize) -> Workspace<'a> {
        Workspace { next: start, left: len, memory: PhantomData }
    }

    /// Bytes that can still be taken.
    pub fn left(&self) -> usize {
        self.left
    }

    /// Room for `count` values, aligned to 64 bytes. It holds what the call before left there.
    pub fn take<T: Scalar>(&mut self, count: usize) -> Result<&'a mut [T], OutOfScratch> {
        let wanted = count.saturating_mul(size_of::<T>());
        // The last part may end anywhere; those before it end where the next can begin.
        let used = wanted.checked_next_multiple_of(64).unwrap_or(usize::MAX).min(self.left);
        if wanted > self.left {
            return Err(OutOfScratch { wanted, left: self.left });
        }
        if wanted == 0 {
            return Ok(&mut []);
        }
        let start = self.next;
        self.left -= used;
        self.next = self.next.wrapping_add(used);
        // SAFETY: `wanted` bytes from `start` on belong to this workspace and to nobody else, since `next` has moved past
        // them. They are initialised and aligned to 64 bytes, and any bits make a `T`.
        Ok(unsafe { std::slice::from_raw_parts_mut(start.cast(), count) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn memory_that_is_not_there_is_an_error() {
        assert!(Arena::try_new(usize::MAX / 2).is_none());
        let mut arena = Arena::default();
        assert!(arena.reserve(usize::MAX / 2).is_err() && arena.is_empty());
        assert!(Workspace::none().take::<f32>(1).is_err());
        assert!(Workspace::none().take::<f64>(usize::MAX).is_err());
    }

    proptest! {
        #[test]
        fn parts_are_aligned_and_do_not_overlap(size in 0usize..2000, wanted in proptest::collection::vec(0usize..200, 0..12)) {
            let mut arena = Arena::try_new(size).unwrap();
            prop_assert_eq!(arena.bytes().as_ptr() as usize % 64, 0);
            let mut workspace = arena.lend();
            let mut parts: Vec<&mut [i32]> = Vec::new();
            for n in wanted {
                let left = workspace.left();
                match workspace.take::<i32>(n) {
                    Ok(part) => parts.push(part),
                    Err(error) => prop_assert_eq!(error, OutOfScratch { wanted: n * 4, left }),
                }
            }
            for (i, part) in parts.iter_mut().enumerate() {
                prop_assert!(part.is_empty() || (part.as_ptr() as usize).is_multiple_of(64));
                part.fill(i as i32);
            }
            for (i, part) in parts.iter().enumerate() {
                prop_assert!(part.iter().all(|&v| v == i as i32));
            }
        }
    }
}
