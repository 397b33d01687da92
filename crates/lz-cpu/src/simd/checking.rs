//! A kernel against the reference of its operation.

use lz_model::{DType, DTypeSet, Layout, ParamValue, Tensor, TensorView};

use crate::call::{How, call_into};
use crate::guarded::{Guarded, Side, lend};
use crate::{Builtin, CallRefError, call, descriptors};

/// Bytes of scratch memory that a kernel gets. Whether its own formula is enough is what callers of the engine find out.
const SCRATCH: usize = 1 << 24;

/// Which kernels are compared with the reference of which operation.
pub struct Agreement {
    op: &'static str,
    kernel: &'static str,
    exact: bool,
    /// How far float32 results may be off, of their size and beside it.
    off: f64,
    /// How far those of kernels that multiply bfloat16 may be off beside it.
    rounded: f64,
}

type Inputs<'a> = [(&'a str, TensorView<'a>)];
type Params<'a> = [(&'a str, ParamValue)];

impl Agreement {
    /// All kernels of this name, one for each instruction set. Results may be off by what float32 is off.
    pub fn of(op: &'static str, kernel: &'static str) -> Agreement {
        Agreement { op, kernel, exact: false, off: 1e-6, rounded: 0.0 }
    }

    /// Results must be the same to the last bit.
    pub fn exactly(self) -> Agreement {
        Agreement { exact: true, ..self }
    }

    /// float32 results may be off by so much, of their size and beside it.
    pub fn within(self, off: f64) -> Agreement {
        Agreement { off, ..self }
    }

    /// Kernels that multiply bfloat16 round what they multiply, and may be off by so much beside what others are.
    pub fn rounding(self, rounded: f64) -> Agreement {
        Agreement { rounded, ..self }
    }

    /// The kernels that compute with the dtype of one of the inputs.
    fn kernels(&self, inputs: &Inputs<'_>) -> Vec<(Builtin, String)> {
        let is_it = |id: &str| {
            id.strip_prefix(self.kernel)
                .is_some_and(|isa| ["", ".avx2", ".avx512", ".avx512_bf16", ".amx"].contains(&isa))
        };
        let takes = |dtypes: DTypeSet| inputs.iter().any(|(_, view)| dtypes.contains(view.dtype()));
        let found = descriptors().filter(|(_, d)| is_it(&d.id) && takes(d.dtypes));
        let found: Vec<_> = found.map(|(kernel, d)| (kernel, d.id)).collect();
        assert!(!found.is_empty(), "no kernel is called {}", self.kernel);
        found
    }

    /// Calls every kernel this CPU has the instructions for: on one thread with memory that ends where its tensors end, and on
    /// three with memory that begins where they begin.
    fn each(
        &self,
        inputs: &Inputs<'_>,
        params: &Params<'_>,
        layout: Option<Layout>,
        mut with: impl FnMut(&str, Result<Vec<(&'static str, Tensor)>, CallRefError>),
    ) {
        // Nothing of what is not written may look like a result.
        let blank =
            |dtype, shape: &[i64]| Tensor::from_f64(dtype, shape, &vec![-77.0; shape.iter().product::<i64>() as usize]);
        for (kernel, id) in self.kernels(inputs) {
            for (threads, side) in [(1, Side::Behind), (3, Side::Before)] {
                let copies: Vec<Guarded> = inputs.iter().map(|(_, view)| Guarded::copy(view, side)).collect();
                let inputs = inputs.iter().zip(&copies).map(|((name, view), copy)| (*name, copy.view(view)));
                let inputs: Vec<_> = inputs.collect();
                let how = How {
                    kernel: Some(kernel),
                    scratch: SCRATCH,
                    threads: crate::threads(threads),
                    lend: match side {
                        Side::Before => |results, run| lend(results, Side::Before, run),
                        Side::Behind => |results, run| lend(results, Side::Behind, run),
                    },
                };
                let result = call_into(self.op, &inputs, params, layout, blank, &how);
                let lacks = |e: &CallRefError| e.to_string().starts_with("this CPU lacks");
                if !result.as_ref().is_err_and(lacks) {
                    with(&id, result);
                }
            }
        }
    }

    /// All results are those of the reference.
    pub fn check(&self, inputs: &Inputs<'_>, params: &Params<'_>, layout: Option<Layout>) {
        let expected = call(self.op, inputs, params, layout).unwrap();
        self.each(inputs, params, layout, |kernel, results| {
            for ((name, got), (_, wanted)) in results.unwrap().iter().zip(&expected) {
                assert_eq!((got.dtype(), got.shape()), (wanted.dtype(), wanted.shape()), "{kernel}: {name}");
                let off = match got.dtype() {
                    _ if self.exact => None,
                    DType::F32 => Some(self.off),
                    DType::F16 => Some(1.1e-3),
                    DType::Bf16 => Some(8e-3),
                    _ => None,
                };
                let rounds = [".avx512_bf16", ".amx"].iter().any(|isa| kernel.ends_with(isa));
                let beside = self.off + if rounds { self.rounded } else { 0.0 };
                for (i, (got, wanted)) in got.to_f64().into_iter().zip(wanted.to_f64()).enumerate() {
                    let same = got == wanted || got.is_nan() && wanted.is_nan();
                    let near = off.is_some_and(|off| (got - wanted).abs() <= off * wanted.abs() + beside);
                    assert!(same || near, "{kernel}: {name}[{i}] is {got}, not {wanted}");
                }
            }
        });
    }

    /// What every kernel says of a call that is wrong.
    pub fn fails(&self, inputs: &Inputs<'_>, params: &Params<'_>, layout: Option<Layout>) -> String {
        let reference = call(self.op, inputs, params, layout).unwrap_err().to_string();
        self.each(inputs, params, layout, |kernel, result| {
            assert_eq!(result.unwrap_err().to_string(), reference, "{kernel}");
        });
        reference
    }
}

/// Numbers from -1 to 1.
pub fn drawn(dtype: DType, shape: &[i64], seed: u64) -> Tensor {
    let mut state = seed | 1;
    let numbers = (0..shape.iter().product::<i64>()).map(|_| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f64 / f64::from(1u32 << 23) - 1.0
    });
    Tensor::from_f64(dtype, shape, &numbers.collect::<Vec<_>>())
}

/// The first elements of each row of a tensor with longer rows.
pub fn strided<'a>(tensor: &'a Tensor, shape: &[i64]) -> TensorView<'a> {
    let view = tensor.view();
    TensorView::strided(tensor.dtype(), shape, view.strides(), 0, tensor.bytes()).unwrap()
}
