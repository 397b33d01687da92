//! Removing a kernel, and restarting a rollout: the core's part, and what the services keep about them.

use super::Engine;
use crate::error::Error;

impl Engine {
    /// Removes one version of a kernel. Calls under way finish with it.
    pub fn unregister(&self, id: &str, version: &str) -> Result<(), Error> {
        self.remove_kernel(id, version)?;
        self.jit.forget(self, id)
    }

    /// Restarts a rollout, rolled back or not. Returns `false` if no rollout has this name.
    pub fn rearm(&self, name: &str) -> bool {
        let found = self.rearm_rollout(name);
        if found {
            self.files.status.republish(self);
        }
        found
    }
}
