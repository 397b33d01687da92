//! How a kernel is run: a closed enum for the built-in ones, trait objects for the rest.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use lz_model::{KernelArgs, KernelError};

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
    /// Only described: it can be selected and explained, not run (a kernel for hardware that is
    /// not here).
    Described,
}

impl Executable {
    /// Runs it. A panic is a failure like any other.
    pub fn run(&self, args: &mut KernelArgs<'_, '_>) -> Result<(), KernelError> {
        let run = || match self {
            Executable::Static(kernel) => kernel.run(args),
            Executable::Dynamic(kernel) => kernel.run(args),
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
