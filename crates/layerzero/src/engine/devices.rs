//! The devices of this machine: the CPU at once, GPUs when somebody needs them.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use lz_model::DeviceSpec;

use super::Engine;
use crate::error::Error;

impl Engine {
    /// Looks for GPUs, for an engine that was told to begin with the CPU alone. Gives how many devices there are now.
    pub fn detect_accelerators(&self) -> Result<usize, Error> {
        let known = self.add_devices(lz_hardware::detect().devices)?;
        if self.unseen.swap(false, Ordering::AcqRel) {
            self.warn_of_other_devices();
        }
        Ok(known)
    }

    /// Looks for GPUs if that was not done yet and somebody knows of devices that are none of these.
    pub(crate) fn look_for_more(&self, is_of_others: impl FnOnce(&[DeviceSpec]) -> bool) -> Result<(), Error> {
        if self.unseen.load(Ordering::Acquire) && is_of_others(&self.devices()) {
            self.detect_accelerators()?;
        }
        Ok(())
    }

    /// Takes over devices that detection does not know: those torch has of one kind, where it has none yet. They come after
    /// the detected ones. Gives how many devices there are.
    pub fn add_torch_devices(&self, found: Vec<DeviceSpec>) -> Result<usize, Error> {
        // GPUs of CUDA are numbered by their place, so they come first.
        self.detect_accelerators()?;
        let mut devices = self.devices();
        let is_new = |device: &DeviceSpec| !devices.iter().any(|known| known.torch_type() == device.torch_type());
        let found: Vec<DeviceSpec> = found.into_iter().filter(is_new).collect();
        devices.extend(found);
        self.add_devices(devices)
    }

    /// Takes over those of all devices of this machine that are not known yet: the last ones. What was measured on them and
    /// compiled for them before is in force from then on. Gives how many devices there are.
    pub fn add_devices(&self, found: Vec<DeviceSpec>) -> Result<usize, Error> {
        let mut devices = self.devices();
        if found.len() <= devices.len() {
            return Ok(devices.len());
        }
        let table = self.draft.lock().generations.clone();
        let completed = |device: DeviceSpec| table.iter().fold(device, |device, table| device.completed(table));
        devices.extend(found.into_iter().skip(devices.len()).map(completed));
        self.perf.learning_of(
            self,
            || self.config(),
            &devices,
            |learned| {
                self.update(|spec| {
                    // Another thread may have been sooner.
                    spec.devices.extend(devices.iter().skip(spec.devices.len()).cloned());
                    if let Some(model) = learned.model {
                        spec.perf = Arc::new(model);
                    }
                    if let Some(prior) = learned.prior {
                        spec.prior = prior;
                    }
                })
            },
        )?;
        self.look_at_memory_of_new_devices();
        self.jit.look_for_devices(self);
        Ok(self.devices().len())
    }
}
