//! What brings the elements of strided tensors of any dtype to loops over numbers that follow each other.
//!
//! It is compiled once: what depends on a dtype or an instruction set is called by its address.

use lz_abi::{DType, KernelError, Param, Threads};

use super::super::loops::{Loop, part, parts};
use super::super::wrong;
use super::lanes::Operand;
use super::numbers::{Number, Stored, with_stored};
use crate::simd::{Isa, Work};

/// Elements of a buffer: 2 KiB of float32, which stay in the first cache.
pub const BLOCK: usize = 512;

/// Room for a block of numbers of any type.
type Buffer = [u64; BLOCK];

/// How the elements of a dtype become numbers, and numbers elements.
#[derive(Clone, Copy)]
pub struct Codec {
    /// Bytes of an element.
    size: isize,
    /// Whether it is computed as what it is.
    direct: bool,
    gather: unsafe fn(usize, *const u8, isize, *mut u8),
    scatter: unsafe fn(usize, *const u8, *mut u8, isize),
    /// The bits of a scalar parameter as a number.
    number: fn(Param) -> Option<u64>,
}

impl Codec {
    /// That of a dtype.
    pub fn of<I: Isa>(dtype: DType) -> Result<Codec, KernelError> {
        with_stored!(dtype, S => Ok(Codec {
            size: size_of::<S>() as isize,
            direct: S::DIRECT,
            gather: gather::<I, S>,
            scatter: scatter::<I, S>,
            number: bits_of::<<S as Stored>::Wide>,
        }))
    }

    /// Bytes of an element.
    pub fn size(&self) -> isize {
        self.size
    }

    /// Numbers that follow each other: where the elements are, or in a buffer.
    ///
    /// # Safety
    /// This CPU has the instructions it was made for. At most [`BLOCK`] elements may be read, and as many numbers be written.
    #[inline(always)]
    pub unsafe fn numbers(&self, n: usize, at: *const u8, step: isize, buffer: *mut u8) -> *const u8 {
        if self.direct && (step == 1 || n == 1) {
            return at;
        }
        // SAFETY: the caller's.
        unsafe { (self.gather)(n, at, step, buffer) };
        buffer
    }

    /// Writes numbers to elements.
    ///
    /// # Safety
    /// As of [`Codec::numbers`].
    pub unsafe fn store(&self, n: usize, from: *const u8, at: *mut u8, step: isize) {
        // SAFETY: the caller's.
        unsafe { (self.scatter)(n, from, at, step) };
    }

    /// Elements as they are, of one byte: what comparisons give.
    pub fn truth() -> Codec {
        Codec {
            size: 1,
            direct: true,
            gather: gather::<crate::simd::Portable, Byte>,
            scatter: scatter::<crate::simd::Portable, Byte>,
            number: |_| None,
        }
    }
}

/// The bits of a number, the lowest ones first.
fn bits_of<W: Number>(param: Param) -> Option<u64> {
    W::of(param).map(|number| {
        let mut bits = 0u64;
        // SAFETY: numbers have at most eight bytes, and no padding.
        unsafe { (&raw mut bits).cast::<W>().write(number) };
        bits
    })
}

/// An argument whose type is not known: an address of one number or of all of them.
#[derive(Clone, Copy)]
pub struct Raw {
    at: *const u8,
    many: bool,
}

impl Raw {
    /// Numbers that follow each other.
    pub fn many(at: *const u8) -> Raw {
        Raw { at, many: true }
    }

    /// With its type.
    ///
    /// # Safety
    /// There are numbers of that type.
    #[inline(always)]
    pub unsafe fn operand<T: Copy>(self) -> Operand<T> {
        let at = self.at.cast::<T>();
        // SAFETY: the caller's.
        if self.many { Operand::Many(at) } else { Operand::One(unsafe { at.read_unaligned() }) }
    }
}

/// Computes so many results: of two arguments, to an address they do not overlap. The first number says what.
pub type Compute = unsafe fn(u8, usize, (Raw, Raw), *mut u8);

/// A tensor: its address, and how its elements are read.
#[derive(Clone, Copy)]
pub struct Tensor {
    /// Its first element.
    pub start: *mut u8,
    /// How they are read.
    pub codec: Codec,
    /// A number in its place.
    pub scalar: Option<u64>,
}

impl Tensor {
    /// A number, where a parameter is one, or a tensor.
    pub fn new(start: *mut u8, codec: Codec, scalar: Param) -> Result<Tensor, KernelError> {
        let scalar = match scalar {
            Param::None => None,
            given => match (codec.number)(given) {
                None => return wrong(format!("{given:?} is no number")),
                found => found,
            },
        };
        Ok(Tensor { start, codec, scalar })
    }
}

/// The tensors of a call: the result, then the arguments.
pub struct Tensors {
    /// One loop over all of them.
    pub walk: Loop<3>,
    /// The result and the arguments.
    pub tensors: [Tensor; 3],
    /// What is computed.
    pub compute: Compute,
    /// The number it is called with.
    pub op: u8,
}

// SAFETY: addresses of tensors that may be used from any thread; every part of a call writes elements of its own.
unsafe impl Sync for Tensors {}

impl Tensors {
    /// Computes every element. `weight` is as of [`parts`], for a byte.
    ///
    /// # Safety
    /// This CPU has the instructions the addresses were made for, and they are of the tensors' dtypes. All elements the loop
    /// reaches may be read, and those of the result be written. The result is where an argument is, element by element, or
    /// overlaps none.
    pub unsafe fn each(&self, weight: usize, threads: Threads<'_>) {
        let total = self.walk.len();
        let size = self.tensors.iter().map(|tensor| tensor.codec.size as usize).max().unwrap_or(1);
        let parts = parts(total, weight * size, threads);
        threads.each(parts, |at| {
            self.walk.pieces(part(total, at, parts), |count, places| {
                // SAFETY: the caller's, of elements the loop reaches.
                unsafe { self.piece(count, places) }
            });
        });
    }

    /// # Safety
    /// As of [`Tensors::each`], of `count` elements from those places on.
    unsafe fn piece(&self, count: usize, places: [isize; 3]) {
        let steps = if count == 1 { [1, 0, 0] } else { self.walk.inner().1 };
        let at: [*mut u8; 3] = std::array::from_fn(|i| {
            let Tensor { start, codec, .. } = self.tensors[i];
            start.wrapping_offset(places[i] * codec.size)
        });
        // SAFETY: the caller's; buffers have room for a block of any numbers.
        unsafe {
            let (mut ones, mut fixed) = ([0u64; 3], [None; 3]);
            for i in 1..3 {
                let Tensor { codec, scalar, .. } = self.tensors[i];
                if let Some(number) = scalar {
                    ones[i] = number;
                } else if steps[i] == 0 {
                    (codec.gather)(1, at[i], 1, (&raw mut ones[i]).cast());
                } else {
                    continue;
                }
                fixed[i] = Some(Raw { at: (&raw const ones[i]).cast(), many: false });
            }
            let direct = self.tensors[0].codec.direct && steps[0] == 1;
            // Where it lies in the result, an argument is read before that is written.
            let near = |i: usize| self.tensors[i].codec.direct && steps[i] == 1 && at[i] != at[0];
            if direct && (1..3).all(|i| fixed[i].is_some() || near(i)) {
                let of = |i: usize| fixed[i].unwrap_or(Raw { at: at[i], many: true });
                return (self.compute)(self.op, count, (of(1), of(2)), at[0]);
            }
            let mut buffers = [std::mem::MaybeUninit::<Buffer>::uninit(); 3];
            for first in (0..count).step_by(BLOCK) {
                let n = BLOCK.min(count - first);
                let mut of = |i: usize| {
                    let Tensor { codec, .. } = self.tensors[i];
                    let at_first = at[i].offset(first as isize * steps[i] * codec.size);
                    fixed[i].unwrap_or_else(|| {
                        if near(i) {
                            return Raw { at: at_first, many: true };
                        }
                        let buffer = buffers[i].as_mut_ptr().cast::<u8>();
                        (codec.gather)(n, at_first, steps[i], buffer);
                        Raw { at: buffer, many: true }
                    })
                };
                let of = (of(1), of(2));
                let codec = self.tensors[0].codec;
                let to = at[0].offset(first as isize * steps[0] * codec.size);
                if direct {
                    (self.compute)(self.op, n, of, to);
                } else {
                    let buffer = buffers[0].as_mut_ptr().cast::<u8>();
                    (self.compute)(self.op, n, of, buffer);
                    (codec.scatter)(n, buffer, to, steps[0]);
                }
            }
        }
    }
}

/// A tensor in another dtype.
pub struct Conversion {
    /// One loop over both: the result, then what is converted.
    pub walk: Loop<2>,
    /// The result and what is converted.
    pub tensors: [Tensor; 2],
    /// Makes numbers of numbers.
    pub convert: unsafe fn(usize, *const u8, *mut u8),
}

// SAFETY: as of `Tensors`.
unsafe impl Sync for Conversion {}

impl Conversion {
    /// Converts every element.
    ///
    /// # Safety
    /// As of [`Tensors::each`]; the tensors do not overlap.
    pub unsafe fn each(&self, threads: Threads<'_>) {
        let (total, [to, from]) = (self.walk.len(), self.tensors);
        let parts = parts(total, to.codec.size.max(from.codec.size) as usize, threads);
        threads.each(parts, |at| {
            let [to, from] = self.tensors;
            let [to_step, from_step] = self.walk.inner().1;
            self.walk.pieces(part(total, at, parts), |count, [o, x]| {
                let mut buffers = [std::mem::MaybeUninit::<Buffer>::uninit(); 2];
                let [wide, found] = &mut buffers;
                for first in (0..count).step_by(BLOCK) {
                    let n = BLOCK.min(count - first);
                    let first = first as isize;
                    // SAFETY: the caller's; buffers have room for a block of any numbers.
                    unsafe {
                        let (wide, found) = (wide.as_mut_ptr().cast::<u8>(), found.as_mut_ptr().cast::<u8>());
                        let at = from.start.offset((x + first * from_step) * from.codec.size);
                        (from.codec.gather)(n, at, from_step, wide);
                        (self.convert)(n, wide, found);
                        let at = to.start.offset((o + first * to_step) * to.codec.size);
                        (to.codec.scatter)(n, found, at, to_step);
                    }
                }
            });
        });
    }
}

unsafe fn gather<I: Isa, S: Stored>(n: usize, at: *const u8, step: isize, buffer: *mut u8) {
    // SAFETY: the caller's.
    unsafe { I::call(Gather { n, at: at.cast::<S>(), step, buffer: buffer.cast::<S::Wide>() }) };
}

unsafe fn scatter<I: Isa, S: Stored>(n: usize, from: *const u8, to: *mut u8, step: isize) {
    // SAFETY: the caller's.
    unsafe { I::call(Scatter { n, from: from.cast::<S::Wide>(), to: to.cast::<S>(), step }) };
}

/// Reads strided elements as numbers.
struct Gather<S: Stored> {
    n: usize,
    at: *const S,
    step: isize,
    buffer: *mut S::Wide,
}

impl<S: Stored> Work for Gather<S> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Gather { n, at, step, buffer } = self;
        // SAFETY: who makes one says that so many elements may be read, and written to the buffer.
        unsafe {
            let to = std::slice::from_raw_parts_mut(buffer, n);
            if step == 1 {
                return S::widen(std::slice::from_raw_parts(at, n), to);
            }
            let mut narrow = [S::default(); BLOCK];
            narrow[..n].iter_mut().enumerate().for_each(|(i, to)| *to = *at.offset(i as isize * step));
            S::widen(&narrow[..n], to);
        }
    }
}

/// Writes numbers to strided elements.
struct Scatter<S: Stored> {
    n: usize,
    from: *const S::Wide,
    to: *mut S,
    step: isize,
}

impl<S: Stored> Work for Scatter<S> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Scatter { n, from, to, step } = self;
        // SAFETY: who makes one says that so many elements may be written.
        unsafe {
            let from = std::slice::from_raw_parts(from, n);
            if step == 1 {
                return S::narrow(from, std::slice::from_raw_parts_mut(to, n));
            }
            let mut narrow = [S::default(); BLOCK];
            S::narrow(from, &mut narrow[..n]);
            narrow[..n].iter().enumerate().for_each(|(i, x)| to.offset(i as isize * step).write(*x));
        }
    }
}

/// A byte as it is.
#[derive(Clone, Copy, Default)]
#[repr(transparent)]
struct Byte(u8);

// SAFETY: the same type.
unsafe impl Stored for Byte {
    type Wide = Byte;
    const DIRECT: bool = true;
    #[inline(always)]
    fn widen(from: &[Byte], to: &mut [Byte]) {
        to.copy_from_slice(from);
    }
    #[inline(always)]
    fn narrow(from: &[Byte], to: &mut [Byte]) {
        to.copy_from_slice(from);
    }
}
