//! What was decided for calls seen before, found by their words.

use std::cell::UnsafeCell;

use layerzero::Memo;
use pyo3::prelude::*;

use crate::route::Route;
use crate::words::Words;

/// Places of the memo.
const PLACES: usize = 1024;
/// Words of a call that can be the last of its function.
const LAST_WORDS: usize = 56;

/// What was decided, by the words of the call.
struct Remembered(UnsafeCell<Memory>);

struct Memory {
    memo: Option<Memo<Route>>,
    /// The last call of each function, to be found without looking for it.
    last: Vec<Option<Last>>,
}

/// A call and its route, side by side.
struct Last {
    version: u64,
    len: usize,
    words: [u64; LAST_WORDS],
    route: Route,
}

impl Memory {
    /// What was decided for a call that is not the last of its function, and what it displaces as that.
    fn find(&mut self, function: usize, version: u64, words: &[u64]) -> (Option<Route>, Option<Last>) {
        let Some(route) = self.memo.as_ref().and_then(|memo| memo.find(version, words)).map(Route::share) else {
            return (None, None);
        };
        let displaced = self.put_last(function, version, words, route.share());
        (Some(route), displaced)
    }

    /// Makes a call the last of its function. What it displaces is given back.
    fn put_last(&mut self, function: usize, version: u64, words: &[u64], route: Route) -> Option<Last> {
        let mut copy = [0; LAST_WORDS];
        copy.get_mut(..words.len())?.copy_from_slice(words);
        if self.last.len() <= function {
            self.last.resize_with(function + 1, || None);
        }
        self.last[function].replace(Last { version, len: words.len(), words: copy, route })
    }
}

// SAFETY: only touched while holding the interpreter lock (abi3 modules do not load into interpreters without one), and
// never across a call back into Python.
unsafe impl Sync for Remembered {}

static MEMO: Remembered = Remembered(UnsafeCell::new(Memory { memo: None, last: Vec::new() }));

/// What was decided for the last call of a function, if `is_it` says that its words are those of the call at hand.
///
/// # Safety
/// This thread holds the interpreter, and `is_it` runs no Python code.
#[inline]
pub unsafe fn last(function: usize, version: u64, is_it: impl FnOnce(&[u64]) -> bool) -> Option<Route> {
    // SAFETY: see `Remembered`: the reference ends here, and nothing that is called meanwhile touches the memory.
    let memory = unsafe { &*MEMO.0.get() };
    let last = memory.last.get(function)?.as_ref()?;
    (last.version == version && is_it(&last.words[..last.len])).then(|| last.route.share())
}

/// What was decided for any other call of a function.
///
/// # Safety
/// This thread holds the interpreter.
#[inline]
pub unsafe fn find(function: usize, version: u64, words: &Words) -> Option<Route> {
    // SAFETY: see `Remembered`: the reference ends before anything is called.
    let (found, displaced) = unsafe { (*MEMO.0.get()).find(function, version, words.as_slice()) };
    // Dropping a kernel may run Python code, which must not meet the memory in use.
    drop(displaced);
    found
}

/// Remembers what was decided for a call.
pub fn remember(_py: Python<'_>, function: usize, version: u64, words: &Words, route: &Route) {
    // SAFETY: the token proves that this thread holds the interpreter, see `Remembered`; nothing runs Python code before
    // the reference ends. What is displaced is dropped after, since dropping a kernel may run some.
    let displaced = unsafe {
        let memory = &mut *MEMO.0.get();
        let memo = memory.memo.get_or_insert_with(|| Memo::new(PLACES));
        let old = memo.keep(version, words.as_slice(), route.share());
        (old, memory.put_last(function, version, words.as_slice(), route.share()))
    };
    drop(displaced);
}

/// How many calls are remembered.
pub fn remembered(_py: Python<'_>) -> usize {
    // SAFETY: the token proves that this thread holds the interpreter; nothing runs Python code meanwhile.
    unsafe { (*MEMO.0.get()).memo.as_ref().map_or(0, Memo::len) }
}
