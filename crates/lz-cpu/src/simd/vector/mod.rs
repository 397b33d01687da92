//! Sixteen float32 numbers in registers, for sums that the compiler does not keep there by itself.

use half::{bf16, f16};

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
pub mod doubles;
mod plain;

#[cfg(target_arch = "x86_64")]
pub use avx2::InTwo;
#[cfg(target_arch = "x86_64")]
pub use avx512::InOne;
pub use plain::Plain;

/// On other architectures nothing is compiled for them.
#[cfg(not(target_arch = "x86_64"))]
pub use {Plain as InOne, Plain as InTwo};

/// How many numbers these are.
pub const LANES: usize = 16;

/// Sixteen float32 numbers. Its functions need the instructions of their type: they are called by work that
/// [`super::Isa::vectorize`] runs, with the type of that instruction set.
#[allow(clippy::missing_safety_doc)] // said above, of all of them
pub trait Sixteen: Copy {
    /// How many registers they take, of 16 or, if it is one, of 32.
    const REGISTERS: usize;
    /// One number sixteen times.
    unsafe fn splat(x: f32) -> Self;
    /// From memory.
    unsafe fn load(from: &[f32; LANES]) -> Self;
    /// From memory, widened.
    unsafe fn load_bf16(from: &[bf16; LANES]) -> Self;
    /// Sixteen pairs from memory, widened: the first of each, and the second of each.
    unsafe fn load_pairs(from: &[bf16; 2 * LANES]) -> (Self, Self);
    /// From memory, widened.
    unsafe fn load_f16(from: &[f16; LANES]) -> Self;
    /// From memory, as floats.
    unsafe fn load_i8(from: &[i8; LANES]) -> Self;
    /// One of eight integers of 4 bits, in two's complement, of each 32 bits in memory, as floats.
    unsafe fn load_i4(from: &[[u8; 4]; LANES], at: usize) -> Self;
    /// To memory.
    unsafe fn store(self, to: &mut [f32; LANES]);
    /// To memory as sixteen pairs, the first of each from `first`. What is stored must be bfloat16 numbers: nothing is rounded.
    unsafe fn store_pairs(first: Self, second: Self, to: &mut [bf16; 2 * LANES]);
    /// self · factor + other.
    unsafe fn times(self, factor: Self, other: Self) -> Self;
    /// self + other.
    unsafe fn plus(self, other: Self) -> Self;
    /// The larger of each two; `other` where one is NaN.
    unsafe fn or_larger(self, other: Self) -> Self;
    /// The sum of all, by halves: the first eight and the last eight, and so on.
    unsafe fn added(self) -> f32;
    /// The numbers of lanes with `first` ≤ `at` ≤ `last`, and minus infinity in the others.
    unsafe fn within(self, at: i32, first: &[i32; LANES], last: &[i32; LANES]) -> Self;
    /// 2^x = 2^n · 2^r with n = round(x): `polynomial` approximates 2^r for |r| ≤ 1/2, highest power first. Below -126 the result is
    /// 0, and of a NaN it is NaN. Nothing is promised above 127.
    unsafe fn exp2<const N: usize>(self, polynomial: &[f32; N]) -> Self;
    /// Rows to columns. The bits of the numbers stay what they are, whatever they mean.
    #[inline(always)]
    unsafe fn turned(rows: [Self; LANES]) -> [Self; LANES] {
        let (mut from, mut to) = ([[0f32; LANES]; LANES], rows);
        // SAFETY: the caller's.
        unsafe {
            for (from, row) in from.iter_mut().zip(rows) {
                row.store(from);
            }
            for (column, to) in to.iter_mut().enumerate() {
                let mut numbers = [0f32; LANES];
                numbers.iter_mut().zip(&from).for_each(|(number, row)| *number = row[column]);
                *to = Self::load(&numbers);
            }
        }
        to
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Avx2, Avx512, Isa, Portable, Work};
    use super::*;

    struct Everything<V>(std::marker::PhantomData<V>);

    impl<V: Sixteen> Work for Everything<V> {
        type Output = Vec<f32>;

        #[inline(always)]
        fn run(self) -> Vec<f32> {
            let numbers: [f32; LANES] = std::array::from_fn(|i| i as f32 * 0.5 - 3.0);
            let mut results = Vec::new();
            // SAFETY: `vectorize` runs it where the instructions are.
            unsafe {
                let x = V::load(&numbers);
                let mut keep = |v: V| {
                    let mut all = [0f32; LANES];
                    v.store(&mut all);
                    results.extend(all);
                };
                keep(x);
                keep(V::splat(1.5));
                keep(V::load_bf16(&numbers.map(bf16::from_f32)));
                keep(V::load_f16(&numbers.map(f16::from_f32)));
                keep(V::load_i8(&std::array::from_fn(|i| (i as i32 * 17 - 128) as i8)));
                let eights: [[u8; 4]; LANES] = std::array::from_fn(|i| [i as u8 * 17, 0x3f, 0x0c, 0xa8]);
                [0, 1, 2, 6, 7].into_iter().for_each(|at| keep(V::load_i4(&eights, at)));
                let pairs = std::array::from_fn(|i| bf16::from_f32(numbers[i / 2] + (i % 2) as f32));
                let (first, second) = V::load_pairs(&pairs);
                keep(first);
                keep(second);
                let mut stored = [bf16::ZERO; 2 * LANES];
                V::store_pairs(first, second, &mut stored);
                assert_eq!(stored, pairs);
                keep(x.times(V::splat(2.0), V::splat(0.25)));
                keep(x.plus(x));
                keep(x.or_larger(V::splat(0.75)));
                keep(V::splat(f32::NAN).or_larger(x));
                keep(x.within(9, &std::array::from_fn(|i| i as i32), &std::array::from_fn(|i| i as i32 + 5)));
                results.push(x.added());
                // The next row is the one before, times two.
                let mut rows = [x; LANES];
                (1..LANES).for_each(|i| rows[i] = rows[i - 1].plus(rows[i - 1]));
                V::turned(rows).into_iter().for_each(|column| {
                    let mut all = [0f32; LANES];
                    column.store(&mut all);
                    results.extend(all);
                });
            }
            results
        }
    }

    /// 2^x for sixteen numbers, by a polynomial of degree 6.
    struct Powers<V>([f32; LANES], std::marker::PhantomData<V>);

    impl<V: Sixteen> Work for Powers<V> {
        type Output = [f32; LANES];

        #[inline(always)]
        fn run(self) -> [f32; LANES] {
            let mut found = [0f32; LANES];
            // SAFETY: `vectorize` runs it where the instructions are.
            unsafe { V::load(&self.0).exp2(&crate::simd::exp::TWO_TO).store(&mut found) };
            found
        }
    }

    fn powers(of: [f32; LANES]) -> impl Iterator<Item = [f32; LANES]> {
        let all = [
            Portable::vectorize(Powers::<Plain>(of, std::marker::PhantomData)),
            Avx2::vectorize(Powers::<InTwo>(of, std::marker::PhantomData)),
            Avx512::vectorize(Powers::<InOne>(of, std::marker::PhantomData)),
        ];
        all.into_iter().flatten()
    }

    #[test]
    fn powers_of_two_are_right_to_the_last_places() {
        for start in -125_990..=100 {
            let numbers: [f32; LANES] = std::array::from_fn(|i| (start as f32 + i as f32 / 16.0) * 1e-3);
            for found in powers(numbers) {
                for (x, found) in numbers.iter().zip(found) {
                    let wanted = f64::from(*x).exp2();
                    assert!((f64::from(found) - wanted).abs() <= 2.5e-7 * wanted, "{x}: {found} {wanted}");
                }
            }
        }
    }

    #[test]
    fn powers_of_two_at_the_ends() {
        let mut numbers = [0f32; LANES];
        numbers[..4].copy_from_slice(&[f32::NAN, f32::NEG_INFINITY, -126.1, -1e30]);
        for found in powers(numbers) {
            assert!(found[0].is_nan());
            assert_eq!(found[1..4], [0.0; 3]);
            assert_eq!(found[4..], [1.0; 12]);
        }
    }

    #[test]
    fn every_type_computes_the_same() {
        let numbers: Vec<f32> = (0..LANES).map(|i| i as f32 * 0.5 - 3.0).collect();
        let each = |f: &dyn Fn(f32) -> f32| numbers.iter().map(|&x| f(x)).collect::<Vec<_>>();
        let expected: Vec<f32> = [
            each(&|x| x),
            each(&|_| 1.5),
            each(&|x| x),
            each(&|x| x),
            (0..16).map(|i| i as f32 * 17.0 - 128.0).collect(),
            (0..32).map(|i| if i % 16 < 8 { i as f32 % 16.0 } else { i as f32 % 16.0 - 16.0 }).collect(),
            each(&|_| -1.0),
            each(&|_| -8.0),
            each(&|_| -6.0),
            each(&|x| x),
            each(&|x| x + 1.0),
            each(&|x| x * 2.0 + 0.25),
            each(&|x| x + x),
            each(&|x| x.max(0.75)),
            each(&|x| x),
            each(&|x| if (-1.0..=1.5).contains(&x) { x } else { f32::NEG_INFINITY }),
            vec![numbers.iter().sum()],
            each(&|x| x).iter().flat_map(|x| (0..LANES).map(move |i| x * f32::from(1u16 << i))).collect(),
        ]
        .concat();
        let all = [
            Portable::vectorize(Everything::<Plain>(std::marker::PhantomData)),
            Avx2::vectorize(Everything::<InTwo>(std::marker::PhantomData)),
            Avx512::vectorize(Everything::<InOne>(std::marker::PhantomData)),
        ];
        for found in all.into_iter().flatten() {
            assert_eq!(found, expected);
        }
    }
}
