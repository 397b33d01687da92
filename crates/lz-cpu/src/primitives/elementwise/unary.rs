//! Functions of one tensor.
//!
//! `out = op(x)`, x broadcast to the shape of the output.
//!
//! | | |
//! |---|---|
//! | input 0 | x |
//! | output 0 | of the dtype of x, or bool for `logical_not`, `is_nan` and `is_inf` |
//! | param 0 | the operation: [`UnaryOp`] |
//!
//! In place: x, where the output has its dtype. Integers have `neg`, `abs`, `sign`, `relu`, `square`, `not`, and the roundings, which
//! leave them as they are; bool has `not`. All others are of floats: convert integers first. `round` takes the even one of two that are
//! equally near. `not` is of bits, and of truth for bool. `gelu` and `silu` are 0 at minus infinity, their limit.

use lz_abi::{Args, DType, KernelError, Param};

use super::super::kinds::kinds;
use super::super::loops::Loop;
use super::super::matmul::Products;
use super::super::{Kernel, param, wrong};
use super::binary::Arithmetic;
use super::blocks::{Codec, Compute, Raw, Tensor, Tensors};
use super::functions::{LARGEST_ANGLE, ln, sigmoid, sine};
use super::lanes::{Operand, map, zip};
use super::numbers::with_wide;
use super::plain::Plain;
use crate::reference::activation as exact;
use crate::simd::exp::{erf, exp, tanh};
use crate::simd::gelu::{by_erf, by_tanh};
use crate::simd::silu_mul::silu;
use crate::simd::{Isa, Portable, Work};

kinds! {
    /// Functions of one number.
    UnaryOp {
        /// -x
        Neg = "neg",
        /// |x|
        Abs = "abs",
        /// -1, 0 or 1
        Sign = "sign",
        /// x²
        Square = "square",
        /// The larger of x and 0
        Relu = "relu",
        /// Every bit turned; of truth for bool
        Not = "not",
        /// ⌊x⌋
        Floor = "floor",
        /// ⌈x⌉
        Ceil = "ceil",
        /// The nearest integer, half to even
        Round = "round",
        /// Towards 0
        Trunc = "trunc",
        /// e^x
        Exp = "exp",
        /// ln x
        Log = "log",
        /// log₂ x
        Log2 = "log2",
        /// ln (1 + x)
        Log1p = "log1p",
        /// e^x - 1
        Expm1 = "expm1",
        /// √x
        Sqrt = "sqrt",
        /// 1 / √x
        Rsqrt = "rsqrt",
        /// 1 / x
        Reciprocal = "reciprocal",
        /// sin x
        Sin = "sin",
        /// cos x
        Cos = "cos",
        /// tanh x
        Tanh = "tanh",
        /// 1 / (1 + e^-x)
        Sigmoid = "sigmoid",
        /// x / (1 + e^-x)
        Silu = "silu",
        /// erf x
        Erf = "erf",
        /// x Φ(x)
        Gelu = "gelu",
        /// Its approximation with tanh
        GeluTanh = "gelu_tanh",
        /// ln (1 + e^x)
        Softplus = "softplus",
        /// x = 0
        LogicalNot = "logical_not",
        /// Whether it is no number
        IsNan = "is_nan",
        /// Whether it is infinite
        IsInf = "is_inf",
    }
}

impl UnaryOp {
    /// Whether the result is bool.
    pub fn tests(self) -> bool {
        self as u8 >= UnaryOp::LogicalNot as u8
    }

    /// Whether integers have it.
    fn takes_integers(self) -> bool {
        self as u8 <= UnaryOp::Trunc as u8
    }

    /// Whether there is such a function of an element type.
    pub fn takes(self, dtype: DType) -> bool {
        match dtype {
            DType::Bool => self.tests() || self == UnaryOp::Not,
            _ if dtype.is_float() => self != UnaryOp::Not,
            _ => self.tests() || self.takes_integers(),
        }
    }

    /// Time of an element, in bytes copied.
    fn weight(self) -> usize {
        if self.takes_integers() || self.tests() { 1 } else { 4 }
    }
}

/// The primitive.
pub struct Unary;

impl Kernel for Unary {
    fn run<I: Products>(args: &mut Args<'_, '_>) -> Result<(), KernelError> {
        let op = UnaryOp::of(param(args, 0))?;
        let plain = !op.tests() && op != UnaryOp::Not;
        if let Some(Plain { count, of: [Operand::Many(x)], to }) =
            plain.then(|| Plain::of(args, [Param::None], op.weight())).flatten()
        {
            // SAFETY: as of a binary function.
            unsafe { compute::<I, f32>(op as u8, count, (Raw::many(x.cast()), Raw::many(x.cast())), to.cast()) };
            return Ok(());
        }
        let (input, threads, out) = (args.input(0), args.threads(), &args.outputs[0]);
        let (shape, strides, own) = (out.shape(), out.strides(), out.dtype());
        let dtype = input.map_or(own, |input| input.dtype());
        if !op.takes(dtype) || own != if op.tests() { DType::Bool } else { dtype } {
            return wrong(format!("{} of {input:?} does not give {own}", op.name()));
        }
        let (sizes, steps) = input.map_or((shape, strides), |input| (input.shape(), input.strides()));
        let walk = Loop::new(shape, [(shape, strides), (sizes, steps), (&[], &[])])?;
        let start = out.raw().start();
        // For truth, not is x = 0.
        let op = if dtype == DType::Bool && op == UnaryOp::Not { UnaryOp::LogicalNot } else { op };
        let narrow = dtype.is_float() && dtype != DType::F64;
        let codec = if narrow { Codec::of::<I>(dtype)? } else { Codec::of::<Portable>(dtype)? };
        let compute: Compute = match (op.tests(), narrow) {
            (false, true) => compute::<I, f32>,
            (true, true) => test::<I, f32>,
            (false, false) => with_wide!(dtype, A => compute::<Portable, A>),
            (true, false) => with_wide!(dtype, A => test::<Portable, A>),
        };
        let to = Tensor { start, codec: if op.tests() { Codec::truth() } else { codec }, scalar: None };
        let a = Tensor { start: input.map_or(start, |input| input.raw().start()), codec, scalar: None };
        // There is no second argument.
        let b = Tensor { scalar: Some(0), ..a };
        let all = Tensors { walk, tensors: [to, a, b], compute, op: op as u8 };
        // SAFETY: `run_on` says that the CPU has the instructions. The loop reaches elements of these tensors only; an absent input
        // is the output itself, and another one does not overlap it.
        unsafe { all.each(op.weight(), threads) };
        Ok(())
    }
}

/// Functions of a number.
pub(super) trait Functions: Arithmetic {
    /// Writes `count` results.
    ///
    /// # Safety
    /// As of [`map`].
    unsafe fn compute<const FUSED: bool>(op: UnaryOp, count: usize, x: *const Self, to: *mut Self);
    /// Whether it is no number.
    fn is_nan(self) -> bool;
    /// Whether it is infinite.
    fn is_inf(self) -> bool;
}

impl Functions for f32 {
    #[inline(always)]
    unsafe fn compute<const FUSED: bool>(op: UnaryOp, count: usize, x: *const f32, to: *mut f32) {
        // SAFETY: the caller's.
        unsafe {
            match op {
                UnaryOp::Neg => map(count, x, to, |x: f32| -x),
                UnaryOp::Abs => map(count, x, to, f32::abs),
                UnaryOp::Sign => map(count, x, to, |x: f32| f32::from(x > 0.0) - f32::from(x < 0.0)),
                UnaryOp::Square => map(count, x, to, |x: f32| x * x),
                UnaryOp::Relu => map(count, x, to, |x: f32| if x < 0.0 { 0.0 } else { x }),
                UnaryOp::Floor => map(count, x, to, f32::floor),
                UnaryOp::Ceil => map(count, x, to, f32::ceil),
                UnaryOp::Round => map(count, x, to, f32::round_ties_even),
                UnaryOp::Trunc => map(count, x, to, f32::trunc),
                UnaryOp::Exp => map(count, x, to, whole_exp::<FUSED>),
                UnaryOp::Log => map(count, x, to, ln::<FUSED>),
                UnaryOp::Log2 => map(count, x, to, |x: f32| (f64::from(x)).log2() as f32),
                UnaryOp::Log1p => map(count, x, to, f32::ln_1p),
                UnaryOp::Expm1 => map(count, x, to, f32::exp_m1),
                UnaryOp::Sqrt => map(count, x, to, f32::sqrt),
                UnaryOp::Rsqrt => map(count, x, to, |x: f32| 1.0 / x.sqrt()),
                UnaryOp::Reciprocal => map(count, x, to, |x: f32| 1.0 / x),
                UnaryOp::Sin | UnaryOp::Cos => {
                    let most = std::slice::from_raw_parts(x, count).iter().fold(0f32, |most, x| most.max(x.abs()));
                    match (op == UnaryOp::Cos, most <= LARGEST_ANGLE) {
                        (false, true) => map(count, x, to, sine::<FUSED, false>),
                        (true, true) => map(count, x, to, sine::<FUSED, true>),
                        (false, false) => map(count, x, to, |x: f32| f64::from(x).sin() as f32),
                        (true, false) => map(count, x, to, |x: f32| f64::from(x).cos() as f32),
                    }
                }
                UnaryOp::Tanh => map(count, x, to, tanh::<FUSED>),
                UnaryOp::Sigmoid => map(count, x, to, sigmoid::<FUSED>),
                UnaryOp::Silu => map(count, x, to, silu::<FUSED>),
                UnaryOp::Erf => map(count, x, to, erf::<FUSED>),
                UnaryOp::Gelu => map(count, x, to, by_erf::<FUSED>),
                UnaryOp::GeluTanh => map(count, x, to, by_tanh::<FUSED>),
                UnaryOp::Softplus => map(count, x, to, |x: f32| {
                    // max(x, 0) + ln(1 + e^-|x|). What 1 + y rounds away is a share of y that the logarithm lacks too.
                    let y = exp::<FUSED>(-x.abs());
                    let sum = 1.0 + y;
                    let log = if sum == 1.0 { y } else { ln::<FUSED>(sum) * (y / (sum - 1.0)) };
                    let found = if x > 0.0 { x } else { 0.0 } + log;
                    if x.is_nan() { x } else { found }
                }),
                _ => unreachable!("checked"),
            }
        }
    }

    #[inline(always)]
    fn is_nan(self) -> bool {
        f32::is_nan(self)
    }

    #[inline(always)]
    fn is_inf(self) -> bool {
        self.abs() == f32::INFINITY
    }
}

/// e^x down to where float32 ends: as [`exp`], and below -87 by halves, which are denormal or 0.
#[inline(always)]
fn whole_exp<const FUSED: bool>(x: f32) -> f32 {
    /// e^-20 as float32.
    const SMALL: f32 = 2.061_153_6e-9;
    let low = x < -87.0;
    let found = exp::<FUSED>(if low { x + 20.0 } else { x });
    if low { if x < -104.0 { 0.0 } else { found * SMALL } } else { found }
}

impl Functions for f64 {
    #[inline(always)]
    unsafe fn compute<const FUSED: bool>(op: UnaryOp, count: usize, x: *const f64, to: *mut f64) {
        let f: fn(f64) -> f64 = match op {
            UnaryOp::Neg => |x| -x,
            UnaryOp::Abs => f64::abs,
            UnaryOp::Sign => |x| f64::from(i8::from(x > 0.0) - i8::from(x < 0.0)),
            UnaryOp::Square => |x| x * x,
            UnaryOp::Relu => exact::relu,
            UnaryOp::Floor => f64::floor,
            UnaryOp::Ceil => f64::ceil,
            UnaryOp::Round => f64::round_ties_even,
            UnaryOp::Trunc => f64::trunc,
            UnaryOp::Exp => f64::exp,
            UnaryOp::Log => f64::ln,
            UnaryOp::Log2 => f64::log2,
            UnaryOp::Log1p => f64::ln_1p,
            UnaryOp::Expm1 => f64::exp_m1,
            UnaryOp::Sqrt => f64::sqrt,
            UnaryOp::Rsqrt => |x| 1.0 / x.sqrt(),
            UnaryOp::Reciprocal => |x| 1.0 / x,
            UnaryOp::Sin => f64::sin,
            UnaryOp::Cos => f64::cos,
            UnaryOp::Tanh => f64::tanh,
            UnaryOp::Sigmoid => |x| 1.0 / (1.0 + (-x).exp()),
            UnaryOp::Silu => exact::silu,
            UnaryOp::Erf => libm::erf,
            UnaryOp::Gelu => exact::gelu,
            UnaryOp::GeluTanh => exact::gelu_tanh,
            UnaryOp::Softplus => |x| if x.is_nan() { x } else { x.max(0.0) + (-x.abs()).exp().ln_1p() },
            _ => unreachable!("checked"),
        };
        // SAFETY: the caller's.
        (0..count).for_each(|i| unsafe { to.add(i).write(f(*x.add(i))) });
    }

    #[inline(always)]
    fn is_nan(self) -> bool {
        f64::is_nan(self)
    }

    #[inline(always)]
    fn is_inf(self) -> bool {
        self.abs() == f64::INFINITY
    }
}

macro_rules! integers {
    ($($type:ty)+) => {
        $(impl Functions for $type {
            #[inline(always)]
            unsafe fn compute<const FUSED: bool>(op: UnaryOp, count: usize, x: *const $type, to: *mut $type) {
                // SAFETY: the caller's.
                unsafe {
                    match op {
                        UnaryOp::Neg => map(count, x, to, <$type>::wrapping_neg),
                        UnaryOp::Abs => map(count, x, to, <$type>::wrapping_abs),
                        UnaryOp::Sign => map(count, x, to, <$type>::signum),
                        UnaryOp::Square => map(count, x, to, |x: $type| x.wrapping_mul(x)),
                        UnaryOp::Relu => map(count, x, to, |x: $type| Ord::max(x, 0)),
                        UnaryOp::Not => map(count, x, to, |x: $type| !x),
                        _ => map(count, x, to, |x: $type| x),
                    }
                }
            }

            #[inline(always)]
            fn is_nan(self) -> bool {
                false
            }

            #[inline(always)]
            fn is_inf(self) -> bool {
                false
            }
        })+
    };
}

integers!(i32 i64);

unsafe fn compute<I: Isa, A: Functions>(op: u8, count: usize, (x, _): (Raw, Raw), to: *mut u8) {
    let op = UnaryOp::ALL[op as usize];
    // SAFETY: the caller's.
    unsafe {
        let x = x.operand::<A>();
        if I::FUSED {
            I::call(Computed::<A, true> { op, count, x, to: to.cast() });
        } else {
            I::call(Computed::<A, false> { op, count, x, to: to.cast() });
        }
    }
}

/// Results of their argument's type.
struct Computed<A, const FUSED: bool> {
    op: UnaryOp,
    count: usize,
    x: Operand<A>,
    to: *mut A,
}

impl<A: Functions, const FUSED: bool> Work for Computed<A, FUSED> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Computed { op, count, x, to } = self;
        let (x, many) = match &x {
            Operand::Many(x) => (*x, true),
            Operand::One(x) => (std::ptr::from_ref(x), false),
        };
        // SAFETY: who makes one vouches for the addresses. One number is computed once, and written everywhere.
        unsafe {
            A::compute::<FUSED>(op, if many { count } else { 1 }, x, to);
            if !many {
                let found = *to;
                std::slice::from_raw_parts_mut(to, count).fill(found);
            }
        }
    }
}

unsafe fn test<I: Isa, A: Functions>(op: u8, count: usize, (x, _): (Raw, Raw), to: *mut u8) {
    // SAFETY: the caller's.
    unsafe { I::call(Tested { op: UnaryOp::ALL[op as usize], count, x: x.operand::<A>(), to }) }
}

/// Truth values.
struct Tested<A> {
    op: UnaryOp,
    count: usize,
    x: Operand<A>,
    to: *mut u8,
}

impl<A: Functions> Work for Tested<A> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Tested { op, count, x, to } = self;
        let of = (x, Operand::One(A::default()));
        // SAFETY: who makes one vouches for the addresses.
        unsafe {
            match op {
                UnaryOp::LogicalNot => zip(count, of, to, |x, _| u8::from(!x.is_true())),
                UnaryOp::IsNan => zip(count, of, to, |x: A, _| u8::from(x.is_nan())),
                _ => zip(count, of, to, |x: A, _| u8::from(x.is_inf())),
            }
        }
    }
}
