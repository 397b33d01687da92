//! Arenas that runs take and give back.

use std::sync::Mutex;

use crate::{Arena, OutOfScratch};

/// Arenas, and frames of one program, that are kept for the next run. More callers than this at a time allocate.
pub(super) const KEPT: usize = 16;

/// Arenas that nobody uses now. Programs that share them never run in more memory than the largest of them needs, times the
/// number of callers at a time.
#[derive(Debug)]
pub struct Arenas {
    free: Mutex<Vec<Arena>>,
}

impl Default for Arenas {
    fn default() -> Arenas {
        Arenas { free: Mutex::new(Vec::with_capacity(KEPT)) }
    }
}

impl Arenas {
    /// One of at least so many bytes: the one given back last, made larger if it must be.
    pub(super) fn take(&self, len: usize) -> Result<Arena, OutOfScratch> {
        let mut arena = self.free.lock().unwrap_or_else(|e| e.into_inner()).pop().unwrap_or_default();
        arena.reserve(len)?;
        Ok(arena)
    }

    /// Gives one back.
    pub(super) fn give(&self, arena: Arena) {
        let mut free = self.free.lock().unwrap_or_else(|e| e.into_inner());
        if free.len() < KEPT {
            free.push(arena);
        }
    }

    /// Bytes of all that nobody uses now.
    pub fn bytes(&self) -> usize {
        self.free.lock().unwrap_or_else(|e| e.into_inner()).iter().map(Arena::len).sum()
    }
}
