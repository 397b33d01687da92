//! How a kernel is run: a closed enum for the built-in ones, trait objects for the rest.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use lz_model::{Arena, HostCall, KernelArgs, KernelError, Threads};

/// A kernel registered at run time.
///
/// `run` gets arguments that were checked against the schema and the kernel's own constraints,
/// transformed if that was needed. It writes every output. It may fail, and even panic: the call
/// then goes to the next candidate.
pub trait DynamicKernel: Send + Sync {
    /// Does the work.
    fn run(&self, args: &mut KernelArgs<'_, '_>) -> Result<(), KernelError>;
}

impl<F> DynamicKernel for F
where
    F: Fn(&mut KernelArgs<'_, '_>) -> Result<(), KernelError> + Send + Sync,
{
    fn run(&self, args: &mut KernelArgs<'_, '_>) -> Result<(), KernelError> {
        self(args)
    }
}

/// What stands behind a kernel's descriptor.
#[derive(Clone)]
pub enum Executable {
    /// A built-in kernel: a direct match, no vtable.
    Static(lz_cpu::Builtin),
    /// A kernel registered at run time.
    Dynamic(Arc<dyn DynamicKernel>),
    /// Something only the language binding that registered it can call: a Python function. Dispatch on
    /// host tensors passes over it.
    Foreign(Arc<dyn Any + Send + Sync>),
    /// Only described: it can be selected and explained, not run (a kernel for hardware that is
    /// not here).
    Described,
}

impl Executable {
    /// Whether host tensors can be given to it.
    pub fn runs_on_host(&self) -> bool {
        matches!(self, Executable::Static(_) | Executable::Dynamic(_))
    }

    /// In a word, as listings show it.
    pub fn name(&self) -> &'static str {
        match self {
            Executable::Static(_) => "static",
            Executable::Dynamic(_) => "dynamic",
            Executable::Foreign(_) => "foreign",
            Executable::Described => "described",
        }
    }

    /// Runs it on tensors in host memory, with so many bytes of scratch memory.
    pub fn run(&self, call: HostCall<'_, '_, '_>, scratch: i64, threads: Threads<'_>) -> Result<(), KernelError> {
        let scratch = usize::try_from(scratch).unwrap_or(0);
        call.run((&mut Arena::default(), scratch), threads, |args| self.call(args))
    }

    /// Calls it. A panic is a failure like any other.
    pub fn call(&self, args: &mut KernelArgs<'_, '_>) -> Result<(), KernelError> {
        let run = || match self {
            Executable::Static(kernel) => kernel.run(args),
            Executable::Dynamic(kernel) => kernel.run(args),
            Executable::Foreign(_) => {
                Err(KernelError::Failed("belongs to a language binding, it cannot be run on host tensors".into()))
            }
            Executable::Described => Err(KernelError::Failed("is only described here, it cannot be run".into())),
        };
        catch_unwind(AssertUnwindSafe(run))
            .unwrap_or_else(|panic| Err(KernelError::Failed(format!("panicked: {}", panic_text(&*panic)))))
    }
}

fn panic_text(panic: &(dyn std::any::Any + Send)) -> &str {
    panic
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("no message")
}
