//! Synchronisation primitives: the real ones, or loom's when its models run.

#[cfg(loom)]
pub(crate) use loom::sync::{
    Arc, Condvar, Mutex,
    atomic::{AtomicU64, Ordering},
};
#[cfg(not(loom))]
pub(crate) use std::sync::{
    Arc, Condvar, Mutex,
    atomic::{AtomicU64, Ordering},
};

/// Locks, whoever panicked before: every structure here is consistent between statements.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> impl std::ops::DerefMut<Target = T> + use<'_, T> {
    match mutex.lock() {
        Ok(guard) => guard,
        Err(poisoned) => poisoned.into_inner(),
    }
}
