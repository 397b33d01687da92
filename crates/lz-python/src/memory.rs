//! What was decided for calls seen before, found by their words.

use std::cell::UnsafeCell;

use layerzero::Memo;
use pyo3::prelude::*;

use crate::engine::engine;
use crate::route::Route;
use crate::words::Words;

/// Places of the memo, at most; each holds two calls.
const MOST_PLACES: usize = 1024;
/// Words of a call that can be the last of its function.
const LAST_WORDS: usize = 56;

/// What was decided, by the words of the call.
struct Remembered(UnsafeCell<Memory>);

struct Memory {
    memo: Option<Memo<Kept>>,
    /// The last call of each function, to be found without looking for it.
    last: Vec<Option<Last>>,
}

/// A route, and when it is no longer to be used: in milliseconds of the engine's clock, `u64::MAX` for never.
struct Kept {
    route: Route,
    expires_ms: u64,
}

impl Kept {
    /// Whether it may still be used. The clock is read only where entries expire.
    #[inline]
    fn is_fresh(expires_ms: u64) -> bool {
        expires_ms == u64::MAX || engine().now_ms() < expires_ms
    }
}

/// A call and its route, side by side.
struct Last {
    version: u64,
    expires_ms: u64,
    len: usize,
    words: [u64; LAST_WORDS],
    route: Route,
}

impl Memory {
    /// What was decided for a call that is not the last of its function, and what it displaces as that.
    fn find(&mut self, function: usize, version: u64, words: &[u64]) -> (Option<Route>, Option<Last>) {
        let found = self.memo.as_ref().and_then(|memo| memo.find(version, words));
        let Some(kept) = found.filter(|kept| Kept::is_fresh(kept.expires_ms)) else {
            return (None, None);
        };
        let (route, expires_ms) = (kept.route.share(), kept.expires_ms);
        let displaced = self.put_last(function, version, words, &route, expires_ms);
        (Some(route), displaced)
    }

    /// Makes a call the last of its function. What it displaces is given back.
    fn put_last(
        &mut self,
        function: usize,
        version: u64,
        words: &[u64],
        route: &Route,
        expires_ms: u64,
    ) -> Option<Last> {
        let mut copy = [0; LAST_WORDS];
        copy.get_mut(..words.len())?.copy_from_slice(words);
        if self.last.len() <= function {
            self.last.resize_with(function + 1, || None);
        }
        self.last[function].replace(Last { version, expires_ms, len: words.len(), words: copy, route: route.share() })
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
    let holds = last.version == version && Kept::is_fresh(last.expires_ms) && is_it(&last.words[..last.len]);
    holds.then(|| last.route.share())
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

/// Remembers what was decided for a call, if and for as long as the configuration says so.
pub fn remember(_py: Python<'_>, function: usize, version: u64, words: &Words, route: &Route) {
    let (enabled, most, ttl_ms) =
        engine().with_config(|c| (c.settings.cache.enabled, c.settings.cache.max_size, c.settings.cache.ttl_ms()));
    // A place holds two.
    let places = usize::try_from(most / 2).unwrap_or(usize::MAX).min(MOST_PLACES);
    if !enabled || places == 0 {
        return;
    }
    let places = 1 << places.ilog2();
    let expires_ms = if ttl_ms == u64::MAX { ttl_ms } else { engine().now_ms().saturating_add(ttl_ms) };
    // SAFETY: the token proves that this thread holds the interpreter, see `Remembered`; nothing runs Python code before
    // the reference ends. What is displaced is dropped after, since dropping a kernel may run some.
    let displaced = unsafe {
        let memory = &mut *MEMO.0.get();
        let other_size = memory.memo.take_if(|memo| memo.places() != places);
        let memo = memory.memo.get_or_insert_with(|| Memo::new(places));
        let old = memo.keep(version, words.as_slice(), Kept { route: route.share(), expires_ms });
        (other_size, old, memory.put_last(function, version, words.as_slice(), route, expires_ms))
    };
    drop(displaced);
}

/// How many calls are remembered.
pub fn remembered(_py: Python<'_>) -> usize {
    // SAFETY: the token proves that this thread holds the interpreter; nothing runs Python code meanwhile.
    unsafe { (*MEMO.0.get()).memo.as_ref().map_or(0, Memo::len) }
}
