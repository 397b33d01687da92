//! Compiled constraints, kept from one snapshot to the next.
//!
//! Most changes leave the kernels as they are: a setting, a context, a kernel that failed. Compiling the constraints of all
//! kernels is four fifths of the time a snapshot takes to build.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use lz_model::KernelDescriptor;

use crate::constraint::Rules;

/// What kernels were compiled to. A snapshot that is built from a clone of a spec finds what the spec's own has compiled.
#[derive(Debug, Default)]
pub struct CompiledKernels {
    /// By the address of the descriptor, which is the same one as long as `of` can be upgraded.
    known: Mutex<HashMap<usize, Known>>,
}

#[derive(Debug)]
struct Known {
    of: Weak<KernelDescriptor>,
    /// For each operation behind the kernel's name, in order.
    rules: Vec<Arc<Rules>>,
}

impl CompiledKernels {
    /// The rules of a kernel, compiled if nobody has done that.
    pub(crate) fn rules<E>(
        &self,
        kernel: &Arc<KernelDescriptor>,
        compile: impl FnOnce() -> Result<Vec<Arc<Rules>>, E>,
    ) -> Result<Vec<Arc<Rules>>, E> {
        let address = Arc::as_ptr(kernel).addr();
        if let Some(known) = self.lock().get(&address).filter(|known| known.of.strong_count() > 0) {
            return Ok(known.rules.clone());
        }
        let rules = compile()?;
        self.lock().insert(address, Known { of: Arc::downgrade(kernel), rules: rules.clone() });
        Ok(rules)
    }

    /// Forgets kernels that are no longer registered anywhere.
    pub(crate) fn forget_removed(&self) {
        self.lock().retain(|_, known| known.of.strong_count() > 0);
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<usize, Known>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use lz_model::{BackendDescriptor, DTypeSet, DeviceSpec, KernelDescriptor, Layout, Platform};

    use crate::{Snapshot, SnapshotSpec};

    fn kernel(condition: &str) -> Arc<KernelDescriptor> {
        let mut kernel = KernelDescriptor::new("mine.rms", "norm.rms", "mine");
        kernel.platforms = vec![Platform::Cpu];
        kernel.dtypes = DTypeSet::FLOATS;
        kernel.layouts = vec![Layout::Contiguous];
        kernel.dims.insert("hidden".into(), Default::default());
        kernel.conditions = vec![condition.into()];
        Arc::new(kernel)
    }

    fn rules(snapshot: &Snapshot) -> &Arc<super::Rules> {
        &snapshot.by_op.iter().flatten().next().unwrap().rules
    }

    /// A kernel is compiled once, whatever else changes; another one under its name is compiled anew, and what is no longer
    /// registered is not kept.
    #[test]
    fn a_kernel_is_compiled_once() {
        let mut spec =
            SnapshotSpec { devices: vec![DeviceSpec::new(Platform::Cpu, "here")], ..SnapshotSpec::default() };
        spec.backend(BackendDescriptor::native("mine", "1.0", vec![Platform::Cpu]));
        spec.kernels.push(kernel("hidden <= 64"));
        let first = spec.build(1).unwrap();
        let mut changed = spec.clone();
        changed.settings.strict = true;
        let second = changed.build(2).unwrap();
        assert!(Arc::ptr_eq(rules(&first), rules(&second)));

        changed.kernels = vec![kernel("hidden <= 32")];
        let third = changed.build(3).unwrap();
        assert!(!Arc::ptr_eq(rules(&first), rules(&third)));
        assert_eq!(third.by_op.iter().flatten().count(), 1);

        drop((first, second, spec));
        changed.build(4).unwrap();
        assert_eq!(changed.compiled.lock().len(), 1);
    }

    /// What cannot be compiled is refused each time, and not kept.
    #[test]
    fn a_mistake_is_found_each_time() {
        let mut spec = SnapshotSpec::default();
        spec.backend(BackendDescriptor::native("mine", "1.0", vec![Platform::Cpu]));
        spec.kernels.push(kernel("hiden <= 64"));
        assert_eq!(spec.build(1).err(), spec.build(2).err());
        assert!(spec.build(3).is_err());
        assert_eq!(spec.compiled.lock().len(), 0);
    }
}
