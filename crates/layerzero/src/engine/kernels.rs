//! Kernels that go, and rollouts that begin anew: what is known of them elsewhere goes along.

use super::Engine;
use crate::error::Error;

impl Engine {
    /// Removes one version of a kernel. Calls under way finish with it.
    pub fn unregister(&self, id: &str, version: &str) -> Result<(), Error> {
        self.remove_kernel(id, version)?;
        self.jit.forget(self, id)
    }

    /// Gives a rollout that was rolled back, or is to begin anew, its calls again. `false` when there is no such one.
    pub fn rearm(&self, name: &str) -> bool {
        let found = self.rearm_rollout(name);
        if found {
            self.files.status.republish(self);
        }
        found
    }
}
