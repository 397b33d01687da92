//! Products of float64 that fit into registers.

use super::super::matmul::Products;
use crate::simd::vector::doubles::{DOUBLES, Eight};

/// Columns of a panel.
pub const PANEL: usize = 2 * DOUBLES;

/// Numbers at an address: from a row to the next, and from a number of a row to the next.
#[derive(Clone, Copy)]
pub struct Strided {
    pub start: *const f64,
    pub row: isize,
    pub step: isize,
}

impl Strided {
    /// From a row and a number of it on.
    #[inline(always)]
    pub fn at(self, row: usize, number: usize) -> Strided {
        let start = self.start.wrapping_offset(row as isize * self.row + number as isize * self.step);
        Strided { start, ..self }
    }
}

/// sums = a · b, or sums += a · b if `add`: of rows of a with `depth` numbers, and `depth` rows of b, of which each is [`PANEL`]
/// numbers and `apart` from the next.
///
/// # Safety
/// This runs with the instructions of `I`. So many numbers are at a and b, and a has a row for each of the sums.
#[inline(always)]
pub unsafe fn multiply<I: Products>(
    a: Strided,
    (b, apart): (*const f64, isize),
    depth: usize,
    sums: &mut [[f64; PANEL]],
    add: bool,
) {
    for (tile, sums) in sums.chunks_mut(I::Eight::ROWS).enumerate() {
        let (a, count) = (a.at(tile * I::Eight::ROWS, 0), sums.len());
        // SAFETY: the caller's.
        unsafe {
            macro_rules! of {
                ($($rows:literal)+) => {
                    match count {
                        $($rows if $rows <= I::Eight::ROWS => some::<I::Eight, $rows>(a, (b, apart), depth, sums, add),)+
                        _ => unreachable!("no more rows than fit into registers"),
                    }
                };
            }
            of!(1 2 3 4 5 6 7 8);
        }
    }
}

/// The same for so many rows.
#[inline(always)]
unsafe fn some<V: Eight, const ROWS: usize>(
    a: Strided,
    (b, apart): (*const f64, isize),
    depth: usize,
    sums: &mut [[f64; PANEL]],
    add: bool,
) {
    // SAFETY: the caller's.
    unsafe {
        if V::SIDE == 2 {
            return columns::<V, ROWS, 2>(a, (b, apart), depth, (sums, 0), add);
        }
        columns::<V, ROWS, 1>(a, (b, apart), depth, (sums, 0), add);
        columns::<V, ROWS, 1>(a, (b.add(DOUBLES), apart), depth, (sums, 1), add);
    }
}

/// The same for `SIDE` times [`DOUBLES`] columns.
#[allow(clippy::needless_range_loop)] // an index names a row or a register of it, in several arrays at once
#[inline(always)]
unsafe fn columns<V: Eight, const ROWS: usize, const SIDE: usize>(
    a: Strided,
    (b, apart): (*const f64, isize),
    depth: usize,
    (sums, side): (&mut [[f64; PANEL]], usize),
    add: bool,
) {
    assert!(sums.len() == ROWS);
    let (mut from, mut number) = (b, a.start);
    // SAFETY: the caller's.
    unsafe {
        let mut tile = [[V::splat(0.0); SIDE]; ROWS];
        for _ in 0..depth {
            let mut own = [V::splat(0.0); SIDE];
            for c in 0..SIDE {
                own[c] = V::load(&*from.wrapping_add(c * DOUBLES).cast());
            }
            for r in 0..ROWS {
                let x = V::splat(*number.wrapping_offset(r as isize * a.row));
                for c in 0..SIDE {
                    tile[r][c] = own[c].times(x, tile[r][c]);
                }
            }
            from = from.wrapping_offset(apart);
            number = number.wrapping_offset(a.step);
        }
        for r in 0..ROWS {
            for c in 0..SIDE {
                let sums = &mut sums[r].as_chunks_mut::<DOUBLES>().0[side + c];
                let sum = if add { V::load(sums).plus(tile[r][c]) } else { tile[r][c] };
                sum.store(sums);
            }
        }
    }
}
