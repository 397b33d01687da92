//! Loops over elements that follow each other, which the compiler turns into vector instructions.
//!
//! They are plain loops in functions that are always inlined. A closure of an iterator may become a function of its own, which is
//! compiled without the instructions of its caller: products that are added at once would be calls of `fmaf`, 40 times as long.

/// An argument: elements that follow each other, or one number for all.
#[derive(Clone, Copy)]
pub enum Operand<T> {
    /// From an address on.
    Many(*const T),
    /// The same everywhere.
    One(T),
}

/// out[i] = f(a[i]) for `count` elements.
///
/// # Safety
/// So many elements may be read and written, and do not overlap.
#[inline(always)]
pub unsafe fn map<A: Copy, O>(count: usize, a: *const A, out: *mut O, f: impl Fn(A) -> O) {
    // SAFETY: the caller's.
    unsafe {
        let mut i = 0;
        while i < count {
            out.add(i).write(f(*a.add(i)));
            i += 1;
        }
    }
}

/// out[i] = f(a[i], b[i]) for `count` elements.
///
/// # Safety
/// As of [`map`], of both arguments.
#[inline(always)]
pub unsafe fn zip<A: Copy, O: Copy>(
    count: usize,
    (a, b): (Operand<A>, Operand<A>),
    out: *mut O,
    f: impl Fn(A, A) -> O,
) {
    // SAFETY: the caller's.
    unsafe {
        match (a, b) {
            (Operand::Many(a), Operand::Many(b)) => {
                let mut i = 0;
                while i < count {
                    out.add(i).write(f(*a.add(i), *b.add(i)));
                    i += 1;
                }
            }
            (Operand::Many(a), Operand::One(b)) => map(count, a, out, |a| f(a, b)),
            (Operand::One(a), Operand::Many(b)) => map(count, b, out, |b| f(a, b)),
            (Operand::One(a), Operand::One(b)) => std::slice::from_raw_parts_mut(out, count).fill(f(a, b)),
        }
    }
}

/// As [`zip`], for functions that are no vector instructions: one loop for every kind of argument.
///
/// # Safety
/// As of [`zip`].
#[inline(always)]
pub unsafe fn zip_one_by_one<A: Copy, O>(
    count: usize,
    (a, b): (Operand<A>, Operand<A>),
    out: *mut O,
    f: impl Fn(A, A) -> O,
) {
    let place = |operand: &Operand<A>| match operand {
        Operand::Many(at) => (*at, 1),
        Operand::One(number) => (std::ptr::from_ref(number), 0),
    };
    let ((a, a_step), (b, b_step)) = (place(&a), place(&b));
    // SAFETY: the caller's.
    unsafe {
        let mut i = 0;
        while i < count {
            out.add(i).write(f(*a.add(i * a_step), *b.add(i * b_step)));
            i += 1;
        }
    }
}
