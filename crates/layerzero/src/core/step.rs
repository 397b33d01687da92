//! A step: a kernel that may be tried for a call.

use std::sync::Arc;

use lz_model::KernelDescriptor;
use lz_resilience::{Breaker, KernelHealth};
use lz_select::{KernelIx, Transforms};

use super::executable::Executable;
use super::guard::{Guard, backend_version};
use super::state::State;

/// A kernel to try for a call.
#[derive(Clone)]
pub struct Step {
    /// The operation the call is.
    pub op: &'static str,
    /// Whether it is trusted with the operation now.
    pub breaker: Arc<Breaker>,
    /// How it has been doing.
    pub health: Arc<KernelHealth>,
    /// The kernel.
    pub kernel: Arc<KernelDescriptor>,
    /// What must be done to the arguments first.
    pub transforms: Transforms,
    /// What runs it.
    pub executable: Executable,
    /// Whether it must be compared with the reference before it serves the call.
    pub unproven: bool,
}

impl AsRef<Step> for Step {
    fn as_ref(&self) -> &Step {
        self
    }
}

impl State {
    /// A kernel's step for an operation.
    pub fn step(&self, guard: &Guard, op: &'static str, kernel: KernelIx, transforms: Transforms) -> Step {
        let descriptor = self.snapshot.kernel(kernel).clone();
        Step {
            op,
            breaker: guard.breaker(&descriptor, backend_version(&self.snapshot, &descriptor.backend), op),
            health: guard.health(&descriptor.id),
            kernel: descriptor,
            transforms,
            executable: self.executables[kernel.0 as usize].clone(),
            unproven: false,
        }
    }
}
