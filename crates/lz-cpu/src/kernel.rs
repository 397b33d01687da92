//! What a native kernel is.

use lz_model::{KernelArgs, KernelDescriptor, KernelError, Op};

/// A kernel written in Rust. Implementors are unit structs: all they have is code.
pub trait NativeKernel {
    /// The ids of the operations it implements.
    const OPS: &'static [&'static str];

    /// What selection knows of it, for one of [`NativeKernel::OPS`].
    fn descriptor(op: &'static Op) -> KernelDescriptor;

    /// Does the work. The arguments are bound and checked; only the data may still be wrong, which
    /// is [`KernelError::BadData`], found before a tensor that is updated in place is touched.
    fn run(args: &mut KernelArgs<'_, '_>) -> Result<(), KernelError>;
}
