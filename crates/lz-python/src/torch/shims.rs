//! torch's kernels for the nodes of compiled graphs, called without Python.
//!
//! torch exports C functions for code that its compiler generates (`aoti_torch_*`). They take handles of C++ tensors; here these are
//! tensors over memory of the caller's, which live as long as the call. Each kernel is used only after an experiment: a small call
//! gave what it should.

use std::ffi::{c_int, c_void};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use layerzero::abi::{Args, DType, KernelError, Param, Tensor, TensorRef, TensorView, Workspace};
use libloading::os::unix::{Library, RTLD_LAZY};
use lz_graph::exec::foreign::{Foreign, Task};
use pyo3::prelude::*;

use super::NO_LOAD;
use crate::allocator::number;
use crate::process::detached;

/// A C++ tensor on the heap.
type Handle = *mut c_void;
/// Not zero where it failed.
type Status = i32;

/// torch's number for the host.
const HOST: i32 = 0;

/// What every call needs.
#[derive(Clone, Copy)]
struct Base {
    from_blob:
        unsafe extern "C" fn(*mut c_void, i64, *const i64, *const i64, i64, i32, i32, i32, *mut Handle) -> Status,
    delete: unsafe extern "C" fn(Handle) -> Status,
    /// Copies the second tensor's elements into the first one.
    copy: unsafe extern "C" fn(Handle, Handle, i32) -> Status,
    grad_is_enabled: unsafe extern "C" fn() -> bool,
    set_grad_enabled: unsafe extern "C" fn(bool),
    exact: Option<Exact>,
}

/// Reads whether torch computes with fewer bits than float32 has, which a program may allow it to at any time.
#[derive(Clone, Copy)]
struct Exact {
    /// `at::globalContext()`: one object, for good.
    context: *const c_void,
    /// `at::Context::float32Precision(backend, operation)`.
    precision: unsafe extern "C" fn(*const c_void, c_int, c_int) -> c_int,
}

// SAFETY: torch's context is an object of the process, whose settings are read as torch's own kernels read them.
unsafe impl Send for Exact {}
// SAFETY: as above.
unsafe impl Sync for Exact {}

/// `at::Float32Backend::MKLDNN`, and what it is asked about.
const ONEDNN: c_int = 2;
const CONVOLUTIONS: c_int = 1;
const PRODUCTS: c_int = 3;
/// `at::Float32Precision::IEEE`; smaller: nothing was set.
const IEEE: c_int = 1;

type Product = unsafe extern "C" fn(Handle, Handle, Handle) -> Status;
type AddedProduct = unsafe extern "C" fn(Handle, Handle, Handle, Handle, f64, f64) -> Status;
type Flash = unsafe extern "C" fn(
    Handle,
    Handle,
    Handle,
    f64,
    i32,
    *const Handle,
    *const f64,
    *mut Handle,
    *mut Handle,
) -> Status;
type Convolution = unsafe extern "C" fn(
    Handle,
    Handle,
    *const Handle,
    *const i64,
    i64,
    *const i64,
    i64,
    *const i64,
    i64,
    i32,
    *const i64,
    i64,
    i64,
    *mut Handle,
) -> Status;

/// torch's functions; `None` for those that this torch does not have.
struct Shims {
    base: Base,
    mm: Option<Product>,
    addmm: Option<AddedProduct>,
    bmm: Option<Product>,
    baddbmm: Option<AddedProduct>,
    flash: Option<Flash>,
    convolution: Option<Convolution>,
}

static SHIMS: OnceLock<Shims> = OnceLock::new();

/// torch's library, if the process has loaded it.
fn library() -> Option<Library> {
    // SAFETY: with RTLD_NOLOAD nothing is loaded and no initialiser runs.
    unsafe { Library::open(Some("libtorch_cpu.so"), RTLD_LAZY | NO_LOAD).ok() }
}

impl Shims {
    /// Those of a torch that is loaded.
    fn find() -> Option<Shims> {
        let cpu = library()?;
        // SAFETY: the library stays loaded as long as torch does, which is never unloaded. The first functions are C functions of these signatures, which torch keeps for the code its compiler made;
        // the last two are C++ functions of these mangled names: one gives a reference, which is an address, to an object that
        // lives as long as the process, the other is a method of it which takes and returns enumerations.
        unsafe {
            let context = cpu.get::<unsafe extern "C" fn() -> *const c_void>(b"_ZN2at13globalContextEv");
            let precision = cpu.get(b"_ZNK2at7Context16float32PrecisionENS_14Float32BackendENS_9Float32OpE");
            let exact = match (context, precision) {
                (Ok(context), Ok(precision)) => Some(Exact { context: context(), precision: *precision }),
                _ => None,
            };
            let base = Base {
                from_blob: *cpu.get(b"aoti_torch_create_tensor_from_blob").ok()?,
                delete: *cpu.get(b"aoti_torch_delete_tensor_object").ok()?,
                copy: *cpu.get(b"aoti_torch_copy_").ok()?,
                grad_is_enabled: *cpu.get(b"aoti_torch_grad_mode_is_enabled").ok()?,
                set_grad_enabled: *cpu.get(b"aoti_torch_grad_mode_set_enabled").ok()?,
                exact,
            };
            let found = Shims {
                base,
                mm: cpu.get(b"aoti_torch_cpu_mm_out").ok().map(|one| *one),
                addmm: cpu.get(b"aoti_torch_cpu_addmm_out").ok().map(|one| *one),
                bmm: cpu.get(b"aoti_torch_cpu_bmm_out").ok().map(|one| *one),
                baddbmm: cpu.get(b"aoti_torch_cpu_baddbmm_out").ok().map(|one| *one),
                flash: cpu.get(b"aoti_torch_cpu__scaled_dot_product_flash_attention_for_cpu").ok().map(|one| *one),
                convolution: cpu.get(b"aoti_torch_cpu_convolution").ok().map(|one| *one),
            };
            std::mem::forget(cpu);
            Some(found)
        }
    }

    /// Those of the torch that is loaded; nothing before it is.
    fn known() -> Option<&'static Shims> {
        if SHIMS.get().is_none()
            && let Some(found) = Shims::find()
        {
            let _ = SHIMS.set(found);
        }
        SHIMS.get()
    }
}

/// A tensor of torch's that is deleted when it goes out of scope.
struct Owned<'a> {
    handle: Handle,
    base: &'a Base,
}

impl Drop for Owned<'_> {
    fn drop(&mut self) {
        if !self.handle.is_null() {
            // SAFETY: a handle that torch gave, deleted once.
            unsafe { (self.base.delete)(self.handle) };
        }
    }
}

/// No gradients are recorded on this thread while it lives. No input wants any, and so nothing is looked at twice.
struct NoGrad<'a> {
    before: bool,
    base: &'a Base,
}

impl NoGrad<'_> {
    fn enter(base: &Base) -> NoGrad<'_> {
        // SAFETY: functions without preconditions, which read and write a flag of this thread.
        unsafe {
            let before = (base.grad_is_enabled)();
            (base.set_grad_enabled)(false);
            NoGrad { before, base }
        }
    }
}

impl Drop for NoGrad<'_> {
    fn drop(&mut self) {
        // SAFETY: as above.
        unsafe { (self.base.set_grad_enabled)(self.before) };
    }
}

/// A call that torch refused.
fn refused(name: &str) -> KernelError {
    KernelError::Failed(format!("{name}: torch refused the call"))
}

/// Turns a status into a result.
fn checked(status: Status, name: &str) -> Result<(), KernelError> {
    if status == 0 { Ok(()) } else { Err(refused(name)) }
}

impl Base {
    /// A tensor over memory of the caller's. It must not outlive the call it is made for.
    fn tensor(&self, tensor: TensorRef<'_>) -> Result<Owned<'_>, KernelError> {
        let dtype = number(tensor.dtype()).ok_or_else(|| refused("a tensor"))?;
        let (shape, strides, mut handle) = (tensor.shape(), tensor.strides(), std::ptr::null_mut());
        let (rank, data) = (shape.len() as i64, tensor.raw().start().cast());
        // SAFETY: as many strides as sizes, all inside memory that is borrowed for longer than the handle lives.
        let status =
            unsafe { (self.from_blob)(data, rank, shape.as_ptr(), strides.as_ptr(), 0, dtype, HOST, 0, &mut handle) };
        checked(status, "a tensor over memory")?;
        Ok(Owned { handle, base: self })
    }

    /// A handle that a call gave.
    fn given(&self, handle: Handle) -> Owned<'_> {
        Owned { handle, base: self }
    }

    /// An error where torch may compute float32 with fewer bits.
    fn is_exact(&self, dtype: DType, operation: c_int) -> Result<(), KernelError> {
        if dtype != DType::F32 {
            return Ok(());
        }
        // SAFETY: a method of this object that reads a setting which exists.
        let found = self.exact.map(|exact| unsafe { (exact.precision)(exact.context, ONEDNN, operation) });
        match found {
            Some(precision) if precision <= IEEE => Ok(()),
            _ => Err(KernelError::Failed(
                "torch may round float32 to fewer bits: see torch.backends.fp32_precision".into(),
            )),
        }
    }
}

/// The function of a kernel that was found before.
fn function<T>(found: impl Fn(&'static Shims) -> Option<T>) -> Result<(&'static Base, T), KernelError> {
    let missing = || KernelError::Failed("this torch does not have the function".into());
    let shims = Shims::known().ok_or_else(missing)?;
    Ok((&shims.base, found(shims).ok_or_else(missing)?))
}

fn input<'t>(args: &Args<'_, 't>, at: usize) -> Result<TensorRef<'t>, KernelError> {
    args.input(at).ok_or_else(|| KernelError::Failed(format!("input {at} is missing")))
}

/// `mm` and `bmm`.
fn product(args: &Args<'_, '_>, name: &str, found: fn(&Shims) -> Option<Product>) -> Result<(), KernelError> {
    let (base, function) = function(found)?;
    let (a, b, output) = (input(args, 0)?, input(args, 1)?, args.outputs[0].as_ref());
    base.is_exact(output.dtype(), PRODUCTS)?;
    let (a, b, output) = (base.tensor(a)?, base.tensor(b)?, base.tensor(output)?);
    let _no_grad = NoGrad::enter(base);
    // SAFETY: three live tensors; the last is over memory this call may write, which the others do not share.
    checked(unsafe { function(output.handle, a.handle, b.handle) }, name)
}

/// `addmm` and `baddbmm`.
fn added_product(
    args: &Args<'_, '_>,
    name: &str,
    found: fn(&Shims) -> Option<AddedProduct>,
) -> Result<(), KernelError> {
    let (base, function) = function(found)?;
    let (a, b, output) = (input(args, 0)?, input(args, 1)?, args.outputs[0].as_ref());
    base.is_exact(output.dtype(), PRODUCTS)?;
    let alpha = args.param(0).as_float().unwrap_or(1.0);
    let added = args.input(2).map(|added| base.tensor(added)).transpose()?;
    let (a, b, output) = (base.tensor(a)?, base.tensor(b)?, base.tensor(output)?);
    // With a factor of 0 what is added is not read, not even what is no number.
    let (added, beta) = added.as_ref().map_or((output.handle, 0.0), |added| (added.handle, 1.0));
    let _no_grad = NoGrad::enter(base);
    // SAFETY: live tensors; the first is over memory this call may write, which the others do not share, unless it is not read.
    checked(unsafe { function(output.handle, added, a.handle, b.handle, beta, alpha) }, name)
}

fn mm(args: Args<'_, '_>) -> Result<(), KernelError> {
    product(&args, "mm", |shims| shims.mm)
}

fn bmm(args: Args<'_, '_>) -> Result<(), KernelError> {
    product(&args, "bmm", |shims| shims.bmm)
}

fn addmm(args: Args<'_, '_>) -> Result<(), KernelError> {
    added_product(&args, "addmm", |shims| shims.addmm)
}

fn baddbmm(args: Args<'_, '_>) -> Result<(), KernelError> {
    added_product(&args, "baddbmm", |shims| shims.baddbmm)
}

/// torch gives a tensor of its own, which is copied.
fn flash(args: Args<'_, '_>) -> Result<(), KernelError> {
    let (base, function) = function(|shims| shims.flash)?;
    let [query, key, value] =
        [base.tensor(input(&args, 0)?)?, base.tensor(input(&args, 1)?)?, base.tensor(input(&args, 2)?)?];
    let mask = args.input(3).map(|mask| base.tensor(mask)).transpose()?;
    let output = base.tensor(args.outputs[0].as_ref())?;
    let (causal, scale) = (args.param(0).as_bool().unwrap_or(false), args.param(1).as_float());
    let (mut result, mut sums) = (std::ptr::null_mut(), std::ptr::null_mut());
    let _no_grad = NoGrad::enter(base);
    // SAFETY: live tensors, pointers to what is optional or null, and places for two handles.
    let status = unsafe {
        function(
            query.handle,
            key.handle,
            value.handle,
            0.0,
            causal.into(),
            mask.as_ref().map_or(std::ptr::null(), |mask| &mask.handle),
            scale.as_ref().map_or(std::ptr::null(), |scale| scale),
            &mut result,
            &mut sums,
        )
    };
    let (result, _sums) = (base.given(result), base.given(sums));
    checked(status, "attention")?;
    // SAFETY: two live tensors, the first over memory this call may write.
    checked(unsafe { (base.copy)(output.handle, result.handle, 0) }, "attention")
}

/// torch gives a tensor of its own, which is copied.
fn convolution(args: Args<'_, '_>) -> Result<(), KernelError> {
    let (base, function) = function(|shims| shims.convolution)?;
    let (x, weight) = (input(&args, 0)?, input(&args, 1)?);
    base.is_exact(x.dtype(), CONVOLUTIONS)?;
    let axes = x.shape().len().saturating_sub(2);
    let number = |at: usize| args.params().get(at).and_then(|one| one.as_int()).unwrap_or(1);
    let of =
        |which: usize| (0..axes).map(|axis| number(1 + which * axes + axis)).collect::<smallvec::SmallVec<[i64; 3]>>();
    let (stride, padding, dilation, none) = (of(0), of(1), of(2), [0; 3]);
    let count = axes as i64;
    let bias = args.input(2).map(|bias| base.tensor(bias)).transpose()?;
    let (x, weight, output) = (base.tensor(x)?, base.tensor(weight)?, base.tensor(args.outputs[0].as_ref())?);
    let mut result = std::ptr::null_mut();
    let _no_grad = NoGrad::enter(base);
    // SAFETY: live tensors, a pointer to what is optional or null, `count` numbers each, and a place for a handle.
    let status = unsafe {
        function(
            x.handle,
            weight.handle,
            bias.as_ref().map_or(std::ptr::null(), |bias| &bias.handle),
            stride.as_ptr(),
            count,
            padding.as_ptr(),
            count,
            dilation.as_ptr(),
            count,
            0,
            none.as_ptr(),
            count,
            number(0),
            &mut result,
        )
    };
    let result = base.given(result);
    checked(status, "convolution")?;
    // SAFETY: two live tensors, the first over memory this call may write.
    checked(unsafe { (base.copy)(output.handle, result.handle, 0) }, "convolution")
}

/// Shows that a kernel does what it should.
type Experiment = fn(&Foreign) -> Result<(), KernelError>;

/// All of them.
const KERNELS: [(Foreign, Experiment); 6] = [
    (Foreign { name: "torch.mm", task: Task::Product, dtypes: FLOATS, run: mm }, multiplies),
    (Foreign { name: "torch.addmm", task: Task::AddedProduct, dtypes: FLOATS, run: addmm }, adds),
    (Foreign { name: "torch.bmm", task: Task::Products, dtypes: FLOATS, run: bmm }, multiplies_batches),
    (Foreign { name: "torch.baddbmm", task: Task::ScaledProducts, dtypes: FLOATS, run: baddbmm }, scales_batches),
    (Foreign { name: "torch.sdpa.flash", task: Task::Attention, dtypes: FLOATS, run: flash }, attends),
    (Foreign { name: "torch.convolution", task: Task::Convolution, dtypes: FLOATS, run: convolution }, convolves),
];

const FLOATS: &[DType] = &[DType::F32, DType::F64, DType::Bf16, DType::F16];
/// Where torch may round float32.
const OTHER_FLOATS: &[DType] = &[DType::F64, DType::Bf16, DType::F16];

/// The kernels whose experiments succeeded, a bit each in the order of [`KERNELS`].
static PROVEN: AtomicU32 = AtomicU32::new(0);

/// Each kernel, and why it is not used; nothing before torch is imported. An experiment that failed is made again: in a dispatch
/// mode torch refuses all of them.
pub fn tried(py: Python<'_>) -> Vec<(Foreign, Option<KernelError>)> {
    let tried = detached(py, experiments);
    // What refused may have been Python code.
    drop(PyErr::take(py));
    tried
}

fn experiments() -> Vec<(Foreign, Option<KernelError>)> {
    if library().is_none() {
        return Vec::new();
    }
    let tried = KERNELS.iter().enumerate().map(|(at, (kernel, experiment))| {
        if PROVEN.load(Ordering::Relaxed) & 1 << at != 0 {
            return (*kernel, None);
        }
        let why = experiment(kernel).err();
        if why.is_none() {
            PROVEN.fetch_or(1 << at, Ordering::Relaxed);
        }
        (*kernel, why)
    });
    tried.collect()
}

/// Whether torch says if it rounds float32; where it does not, the kernels of products and convolutions do not take it.
pub fn tells_precision() -> bool {
    Shims::known().is_some_and(|shims| shims.base.exact.is_some())
}

/// The kernels that compiled graphs may use.
pub fn kernels(py: Python<'_>) -> Vec<Foreign> {
    let exact = |operation| Shims::known().is_some_and(|shims| shims.base.is_exact(DType::F32, operation).is_ok());
    let (products, convolutions) = (exact(PRODUCTS), exact(CONVOLUTIONS));
    let dtypes = |task| match task {
        Task::Attention => FLOATS,
        Task::Convolution if convolutions => FLOATS,
        Task::Convolution => OTHER_FLOATS,
        _ if products => FLOATS,
        _ => OTHER_FLOATS,
    };
    let found = tried(py).into_iter().filter(|(_, why)| why.is_none());
    found.map(|(kernel, _)| Foreign { dtypes: dtypes(kernel.task), ..kernel }).collect()
}

/// Whether a kernel gives what it should for numbers of float64.
fn gives(
    kernel: &Foreign,
    inputs: &[(&[i64], &[f64])],
    params: &[Param],
    (shape, expected): (&[i64], &[f64]),
) -> Result<(), KernelError> {
    let tensors: Vec<Tensor> = inputs.iter().map(|(shape, x)| Tensor::from_f64(DType::F64, shape, x)).collect();
    let views: Vec<TensorView<'_>> = tensors.iter().map(Tensor::view).collect();
    let inputs: Vec<TensorRef<'_>> = views.iter().map(TensorView::as_ref).collect();
    let mut output = Tensor::zeros(DType::F64, shape);
    {
        let mut view = output.view_mut();
        (kernel.run)(Args::new(&inputs, &mut [view.as_mut()], params, &[], &mut Workspace::none()))?;
    }
    let given = output.to_f64();
    let fits = given.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-9);
    if fits { Ok(()) } else { Err(KernelError::Failed(format!("gave {given:?} in the place of {expected:?}"))) }
}

const A: [f64; 4] = [1.0, 2.0, 3.0, 4.0];
const B: [f64; 4] = [5.0, 6.0, 7.0, 8.0];

fn multiplies(kernel: &Foreign) -> Result<(), KernelError> {
    gives(kernel, &[(&[2, 2], &A), (&[2, 2], &B)], &[], (&[2, 2], &[19.0, 22.0, 43.0, 50.0]))
}

fn adds(kernel: &Foreign) -> Result<(), KernelError> {
    let inputs: [(&[i64], &[f64]); 3] = [(&[2, 2], &A), (&[2, 2], &B), (&[2], &[1.0, -1.0])];
    gives(kernel, &inputs, &[Param::Float(2.0)], (&[2, 2], &[39.0, 43.0, 87.0, 99.0]))
}

fn multiplies_batches(kernel: &Foreign) -> Result<(), KernelError> {
    gives(kernel, &[(&[2, 1, 2], &A), (&[2, 2, 1], &B)], &[], (&[2, 1, 1], &[17.0, 53.0]))
}

fn scales_batches(kernel: &Foreign) -> Result<(), KernelError> {
    let inputs: [(&[i64], &[f64]); 2] = [(&[2, 1, 2], &A), (&[2, 2, 1], &B)];
    gives(kernel, &inputs, &[Param::Float(0.5)], (&[2, 1, 1], &[8.5, 26.5]))
}

/// Scores of 0 weigh the keys a query may see alike.
fn attends(kernel: &Foreign) -> Result<(), KernelError> {
    let (shape, zeros): (&[i64], &[f64]) = (&[1, 1, 2, 2], &[0.0; 4]);
    let inputs = [(shape, zeros), (shape, &A[..]), (shape, &B[..])];
    let causal = [Param::Bool(true), Param::Float(0.5)];
    gives(kernel, &inputs, &causal, (shape, &[5.0, 6.0, 6.0, 7.0]))?;
    let mask = [&inputs[..], &[(shape, &[0.0, f64::NEG_INFINITY, f64::NEG_INFINITY, 0.0])]].concat();
    gives(kernel, &mask, &[Param::Bool(false), Param::Float(0.5)], (shape, &B))
}

/// Two groups of a channel each, every second place, zeros around.
fn convolves(kernel: &Foreign) -> Result<(), KernelError> {
    let x: [f64; 8] = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0];
    let inputs: [(&[i64], &[f64]); 3] = [(&[1, 2, 4], &x), (&[2, 1, 2], &[1.0, 10.0, 2.0, 20.0]), (&[2], &[0.0, 1.0])];
    let params = [2, 2, 1, 1].map(Param::Int);
    gives(kernel, &inputs, &params, (&[1, 2, 3], &[10.0, 32.0, 4.0, 101.0, 153.0, 17.0]))
}
