//! Functions of two tensors.
//!
//! `out = op(a, b)`, both broadcast to the shape of the output.
//!
//! | | |
//! |---|---|
//! | input 0 | a |
//! | input 1 | b, of the dtype of a |
//! | output 0 | of the dtype of a, or bool for comparisons |
//! | param 0 | the operation: [`BinaryOp`] |
//! | param 1 | a number in place of b: b is not looked at, and may be left out of the list |
//! | param 2 | a number in place of a |
//!
//! In place: a or b (or, absent both, the output is both), unless it is a comparison of another dtype than bool. A number in
//! place of an argument is not rounded to the dtype: bfloat16 is computed with it as float32, as torch does.
//!
//! `div` is for floats. `floor_div` rounds down and `mod` has the sign of b, as in Python and torch; `trunc_div` and `fmod` are
//! C's. An integer divided by 0 is [`KernelError::BadData`]. `max` and `min` of a NaN are NaN. `and`, `or` and `xor` are of bits, and
//! of truth for bool; `logical_and`, `logical_or` and `logical_xor` are of truth and give bool.

use std::fmt;

use lz_abi::{Args, DType, KernelError, Param, TensorMut, TensorRef};

use super::super::kinds::kinds;
use super::super::loops::Loop;
use super::super::matmul::Products;
use super::super::{Kernel, param, wrong};
use super::blocks::{Codec, Compute, Raw, Tensor, Tensors};
use super::lanes::{Operand, map, zip, zip_one_by_one};
use super::numbers::{Number, with_wide};
use super::plain::{Plain, two_scalars};
use crate::simd::{Isa, Portable, Work};

kinds! {
    /// Functions of two numbers.
    BinaryOp {
        /// a + b
        Add = "add",
        /// a - b
        Sub = "sub",
        /// a · b
        Mul = "mul",
        /// a / b, of floats
        Div = "div",
        /// ⌊a / b⌋
        FloorDiv = "floor_div",
        /// a / b, rounded towards 0
        TruncDiv = "trunc_div",
        /// a - b ⌊a / b⌋, with the sign of b
        Mod = "mod",
        /// The remainder with the sign of a
        Fmod = "fmod",
        /// a^b
        Pow = "pow",
        /// The larger one
        Max = "max",
        /// The smaller one
        Min = "min",
        /// Bits of both
        And = "and",
        /// Bits of either
        Or = "or",
        /// Bits of one
        Xor = "xor",
        /// a = b
        Eq = "eq",
        /// a ≠ b
        Ne = "ne",
        /// a < b
        Lt = "lt",
        /// a ≤ b
        Le = "le",
        /// a > b
        Gt = "gt",
        /// a ≥ b
        Ge = "ge",
        /// a ≠ 0 and b ≠ 0
        LogicalAnd = "logical_and",
        /// a ≠ 0 or b ≠ 0
        LogicalOr = "logical_or",
        /// Either a ≠ 0 or b ≠ 0
        LogicalXor = "logical_xor",
    }
}

impl BinaryOp {
    /// Whether the result is bool.
    pub fn compares(self) -> bool {
        self as u8 >= BinaryOp::Eq as u8
    }

    fn is_bitwise(self) -> bool {
        matches!(self, BinaryOp::And | BinaryOp::Or | BinaryOp::Xor)
    }

    fn divides(self) -> bool {
        matches!(self, BinaryOp::FloorDiv | BinaryOp::TruncDiv | BinaryOp::Mod | BinaryOp::Fmod)
    }

    /// Time of an element, in bytes copied.
    fn weight(self) -> usize {
        if matches!(self, BinaryOp::Pow) || self.divides() { 16 } else { 1 }
    }
}

impl fmt::Display for BinaryOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Arithmetic of a number.
pub(in crate::primitives) trait Arithmetic: Number {
    /// Whether it has fractions.
    const FLOAT: bool;
    fn add(self, b: Self) -> Self;
    fn sub(self, b: Self) -> Self;
    fn mul(self, b: Self) -> Self;
    fn div(self, b: Self) -> Self;
    fn floor_div(self, b: Self) -> Self;
    fn trunc_div(self, b: Self) -> Self;
    fn modulo(self, b: Self) -> Self;
    fn fmod(self, b: Self) -> Self;
    fn pow(self, b: Self) -> Self;
    fn max(self, b: Self) -> Self;
    fn min(self, b: Self) -> Self;
    fn and(self, b: Self) -> Self;
    fn or(self, b: Self) -> Self;
    fn xor(self, b: Self) -> Self;
}

macro_rules! floats {
    ($($type:ty)+) => {
        $(impl Arithmetic for $type {
            const FLOAT: bool = true;
            #[inline(always)]
            fn add(self, b: $type) -> $type { self + b }
            #[inline(always)]
            fn sub(self, b: $type) -> $type { self - b }
            #[inline(always)]
            fn mul(self, b: $type) -> $type { self * b }
            #[inline(always)]
            fn div(self, b: $type) -> $type { self / b }
            #[inline(always)]
            fn floor_div(self, b: $type) -> $type {
                // As torch: from the remainder, so that a rounded quotient does not reach the next integer.
                if b == 0.0 {
                    return self / b;
                }
                let rest = self % b;
                let quotient = (self - rest) / b - if rest != 0.0 && (b < 0.0) != (rest < 0.0) { 1.0 } else { 0.0 };
                let floor = quotient.floor();
                if quotient == 0.0 {
                    (0.0 as $type).copysign(self / b)
                } else if quotient - floor > 0.5 {
                    floor + 1.0
                } else {
                    floor
                }
            }
            #[inline(always)]
            fn trunc_div(self, b: $type) -> $type { (self / b).trunc() }
            #[inline(always)]
            fn modulo(self, b: $type) -> $type {
                let rest = self % b;
                if rest != 0.0 && (b < 0.0) != (rest < 0.0) { rest + b } else { rest }
            }
            #[inline(always)]
            fn fmod(self, b: $type) -> $type { self % b }
            #[inline(always)]
            fn pow(self, b: $type) -> $type { self.powf(b) }
            // Comparisons that leave a NaN of either.
            #[inline(always)]
            fn max(self, b: $type) -> $type { if self > b || self.is_nan() { self } else { b } }
            #[inline(always)]
            fn min(self, b: $type) -> $type { if self < b || self.is_nan() { self } else { b } }
            #[inline(always)]
            fn and(self, b: $type) -> $type { if self.is_true() && b.is_true() { 1.0 } else { 0.0 } }
            #[inline(always)]
            fn or(self, b: $type) -> $type { if self.is_true() || b.is_true() { 1.0 } else { 0.0 } }
            #[inline(always)]
            fn xor(self, b: $type) -> $type { if self.is_true() != b.is_true() { 1.0 } else { 0.0 } }
        })+
    };
}

macro_rules! integers {
    ($($type:ty)+) => {
        $(impl Arithmetic for $type {
            const FLOAT: bool = false;
            #[inline(always)]
            fn add(self, b: $type) -> $type { self.wrapping_add(b) }
            #[inline(always)]
            fn sub(self, b: $type) -> $type { self.wrapping_sub(b) }
            #[inline(always)]
            fn mul(self, b: $type) -> $type { self.wrapping_mul(b) }
            #[inline(always)]
            fn div(self, b: $type) -> $type { self.trunc_div(b) }
            // The lanes behind the last element divide by 0, and nobody looks at them.
            #[inline(always)]
            fn floor_div(self, b: $type) -> $type {
                if b == 0 {
                    return 0;
                }
                let (quotient, rest) = (self.wrapping_div(b), self.wrapping_rem(b));
                quotient - <$type>::from(rest != 0 && (rest < 0) != (b < 0))
            }
            #[inline(always)]
            fn trunc_div(self, b: $type) -> $type { if b == 0 { 0 } else { self.wrapping_div(b) } }
            #[inline(always)]
            fn modulo(self, b: $type) -> $type {
                if b == 0 {
                    return 0;
                }
                let rest = self.wrapping_rem(b);
                if rest != 0 && (rest < 0) != (b < 0) { rest + b } else { rest }
            }
            #[inline(always)]
            fn fmod(self, b: $type) -> $type { if b == 0 { 0 } else { self.wrapping_rem(b) } }
            /// With a negative exponent: 0, unless the base is 1 or -1.
            #[inline(always)]
            fn pow(self, b: $type) -> $type {
                match (self, b) {
                    (1, _) => 1,
                    (-1, _) => if b & 1 == 0 { 1 } else { -1 },
                    (_, ..0) => 0,
                    _ => {
                        let (mut found, mut square, mut left) = (1 as $type, self, b);
                        while left > 0 {
                            if left & 1 == 1 {
                                found = found.wrapping_mul(square);
                            }
                            square = square.wrapping_mul(square);
                            left >>= 1;
                        }
                        found
                    }
                }
            }
            #[inline(always)]
            fn max(self, b: $type) -> $type { Ord::max(self, b) }
            #[inline(always)]
            fn min(self, b: $type) -> $type { Ord::min(self, b) }
            #[inline(always)]
            fn and(self, b: $type) -> $type { self & b }
            #[inline(always)]
            fn or(self, b: $type) -> $type { self | b }
            #[inline(always)]
            fn xor(self, b: $type) -> $type { self ^ b }
        })+
    };
}

floats!(f32 f64);
integers!(i32 i64);

/// The primitive.
pub struct Binary;

impl Kernel for Binary {
    fn run<I: Products>(args: &mut Args<'_, '_>) -> Result<(), KernelError> {
        let op = BinaryOp::of(param(args, 0))?;
        let scalars = two_scalars(args);
        if let (false, Some(Plain { count, of: [a, b], to })) =
            (op.compares() || op.is_bitwise(), Plain::of(args, scalars, op.weight()))
        {
            // SAFETY: `run_on` says that the CPU has the instructions. So many elements are there; an argument that is the result
            // is read before its element is written.
            unsafe { I::call(Computed { op, count, of: (a, b), to }) };
            return Ok(());
        }
        let given = |i: usize| !matches!(scalars[i], Param::None);
        let inputs: [Option<TensorRef<'_>>; 2] = std::array::from_fn(|i| if given(i) { None } else { args.input(i) });
        let (threads, out) = (args.threads(), &args.outputs[0]);
        let (shape, strides, own) = (out.shape(), out.strides(), out.dtype());
        let dtype = inputs[0].or(inputs[1]).map_or(own, |input| input.dtype());
        let owns = (0..2).any(|i| !given(i) && inputs[i].is_none());
        let alike = inputs.iter().flatten().all(|input| input.dtype() == dtype) && (!owns || own == dtype);
        if !alike || own != if op.compares() { DType::Bool } else { dtype } {
            return wrong(format!("{op} of {inputs:?} does not give {own}"));
        }
        let float = dtype.is_float();
        if op == BinaryOp::Div && !float || op.is_bitwise() && float {
            return wrong(format!("{op} does not take {own}"));
        }
        let layout = |i: usize| match &inputs[i] {
            _ if given(i) => (&[][..], &[][..]),
            Some(input) => (input.shape(), input.strides()),
            None => (shape, strides),
        };
        let walk = Loop::new(shape, [(shape, strides), layout(0), layout(1)])?;
        let start = out.raw().start();
        let codec = if float && dtype != DType::F64 { Codec::of::<I>(dtype)? } else { Codec::of::<Portable>(dtype)? };
        let of = |i: usize| Tensor::new(inputs[i].map_or(start, |input| input.raw().start()), codec, scalars[i]);
        let (a, b) = (of(0)?, of(1)?);
        if op.divides() && !float && walk.len() > 0 {
            check_divisor(given(1).then_some(scalars[1]), inputs[1].as_ref(), out)?;
        }
        let to = Tensor { start, codec: if op.compares() { Codec::truth() } else { codec }, scalar: None };
        let compute: Compute = match (op.compares(), float && dtype != DType::F64) {
            (false, true) => compute::<I, f32>,
            (true, true) => compare::<I, f32>,
            (false, false) => with_wide!(dtype, A => compute::<Portable, A>),
            (true, false) => with_wide!(dtype, A => compare::<Portable, A>),
        };
        let all = Tensors { walk, tensors: [to, a, b], compute, op: op as u8 };
        // SAFETY: `run_on` says that the CPU has the instructions. The loop reaches elements of these tensors only; an absent input
        // is the output itself, and others do not overlap it.
        unsafe { all.each(op.weight(), threads) };
        Ok(())
    }
}

/// Fails where a divisor is 0.
fn check_divisor(scalar: Option<Param>, b: Option<&TensorRef<'_>>, out: &TensorMut<'_>) -> Result<(), KernelError> {
    let is_zero = |dtype: DType, start: *mut u8, shape: &[i64], strides: &[i64]| -> Result<bool, KernelError> {
        let walk = Loop::new(shape, [(shape, strides)])?;
        let (bytes, step) = (dtype.bits() as isize / 8, walk.inner().1[0]);
        let mut zero = false;
        walk.pieces(0..walk.len(), |count, [place]| {
            for i in 0..count as isize {
                let at = start.wrapping_offset((place + i * step) * bytes);
                // SAFETY: an element of the tensor, of so many bytes; integers of which none is set are 0.
                zero |= unsafe { std::slice::from_raw_parts(at, bytes as usize) }.iter().all(|&byte| byte == 0);
            }
        });
        Ok(zero)
    };
    let zero = match (scalar, b) {
        (Some(scalar), _) => i64::of(scalar) == Some(0),
        (None, Some(b)) => is_zero(b.dtype(), b.raw().start(), b.shape(), b.strides())?,
        (None, None) => is_zero(out.dtype(), out.raw().start(), out.shape(), out.strides())?,
    };
    match zero {
        true => {
            Err(KernelError::BadData { input: "b", at: vec![], value: 0, expected: "a divisor other than 0".into() })
        }
        false => Ok(()),
    }
}

unsafe fn compute<I: Isa, A: Arithmetic>(op: u8, count: usize, of: (Raw, Raw), to: *mut u8) {
    // SAFETY: the caller's.
    unsafe {
        I::call(Computed::<A> {
            op: BinaryOp::ALL[op as usize],
            count,
            of: (of.0.operand(), of.1.operand()),
            to: to.cast(),
        })
    };
}

unsafe fn compare<I: Isa, A: Arithmetic>(op: u8, count: usize, of: (Raw, Raw), to: *mut u8) {
    // SAFETY: the caller's.
    unsafe {
        I::call(Compared::<A> { op: BinaryOp::ALL[op as usize], count, of: (of.0.operand(), of.1.operand()), to })
    };
}

/// Results of their arguments' type.
struct Computed<A> {
    op: BinaryOp,
    count: usize,
    of: (Operand<A>, Operand<A>),
    to: *mut A,
}

impl<A: Arithmetic> Work for Computed<A> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Computed { op, count, of, to } = self;
        // SAFETY: who makes one vouches for the addresses.
        unsafe {
            match op {
                BinaryOp::Add => zip(count, of, to, A::add),
                BinaryOp::Sub => zip(count, of, to, A::sub),
                BinaryOp::Mul => zip(count, of, to, A::mul),
                BinaryOp::Div => zip(count, of, to, A::div),
                BinaryOp::FloorDiv => zip_one_by_one(count, of, to, A::floor_div),
                BinaryOp::TruncDiv => zip_one_by_one(count, of, to, A::trunc_div),
                BinaryOp::Mod => zip_one_by_one(count, of, to, A::modulo),
                BinaryOp::Fmod => zip_one_by_one(count, of, to, A::fmod),
                BinaryOp::Pow => match of {
                    // Exact, and by far faster.
                    (Operand::Many(a), Operand::One(b)) if A::FLOAT && b.to_f64() == 2.0 => {
                        map(count, a, to, |a| a.mul(a))
                    }
                    (Operand::Many(a), Operand::One(b)) if A::FLOAT && b.to_f64() == 3.0 => {
                        map(count, a, to, |a| a.mul(a).mul(a));
                    }
                    _ => zip_one_by_one(count, of, to, A::pow),
                },
                BinaryOp::Max => zip(count, of, to, A::max),
                BinaryOp::Min => zip(count, of, to, A::min),
                BinaryOp::And => zip(count, of, to, A::and),
                BinaryOp::Or => zip(count, of, to, A::or),
                BinaryOp::Xor => zip(count, of, to, A::xor),
                _ => unreachable!("a comparison"),
            }
        }
    }
}

/// Truth values.
struct Compared<A> {
    op: BinaryOp,
    count: usize,
    of: (Operand<A>, Operand<A>),
    to: *mut u8,
}

impl<A: Arithmetic> Work for Compared<A> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Compared { op, count, of, to } = self;
        // SAFETY: who makes one vouches for the addresses.
        unsafe {
            match op {
                BinaryOp::Eq => zip(count, of, to, |a, b| u8::from(a == b)),
                BinaryOp::Ne => zip(count, of, to, |a, b| u8::from(a != b)),
                BinaryOp::Lt => zip(count, of, to, |a, b| u8::from(a < b)),
                BinaryOp::Le => zip(count, of, to, |a, b| u8::from(a <= b)),
                BinaryOp::Gt => zip(count, of, to, |a, b| u8::from(a > b)),
                BinaryOp::Ge => zip(count, of, to, |a, b| u8::from(a >= b)),
                BinaryOp::LogicalAnd => zip(count, of, to, |a, b| u8::from(a.is_true() & b.is_true())),
                BinaryOp::LogicalOr => zip(count, of, to, |a, b| u8::from(a.is_true() | b.is_true())),
                _ => zip(count, of, to, |a, b| u8::from(a.is_true() != b.is_true())),
            }
        }
    }
}
