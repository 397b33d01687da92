//! What this machine is, as [`DeviceSpec`]s.
//!
//! [`detect`] looks at the host processor and at the NVIDIA GPUs the CUDA driver shows to this
//! process. It always answers: what cannot be found out is left unset and said in
//! [`Machine::notes`]. AMD, Gaudi and Intel GPUs are never detected; those, and any hardware that
//! is somewhere else, are *described*: [`described`] has the common ones, and
//! [`DeviceSpec::from_file`] reads any other.
//!
//! ```
//! let machine = lz_hardware::detect();
//! assert_eq!(machine.devices[0].platform, lz_model::Platform::Cpu);
//!
//! let h100 = lz_hardware::described("h100").unwrap();
//! assert_eq!(h100.generation.as_deref(), Some("hopper"));
//! ```
//!
//! No CUDA context is created, so detection takes no GPU memory. It does initialise the CUDA
//! driver, and the driver cannot be used in a child forked after that: detect in the process that
//! will run the kernels, not in one that forks workers. [`detect_cpu`], [`cpu_memory`] and
//! [`cuda_memory`] do not touch the CUDA driver.

mod cpu;
mod cuda;
mod described;
mod memory;
mod note;
mod nvml;
mod topology;

use lz_model::DeviceSpec;
use serde::Serialize;

pub use cuda::CudaAbsent;
pub use described::{described, described_names};
pub use memory::{Memory, cpu_memory};
pub use note::Note;
pub use nvml::cuda_memory;

/// The devices of this machine, and what could not be learnt about them.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Machine {
    /// The CPU, then the CUDA devices in the driver's order.
    pub devices: Vec<DeviceSpec>,
    /// What could not be detected, and why.
    pub notes: Vec<Note>,
}

/// Detects every device of this machine. Never fails and never needs a GPU.
pub fn detect() -> Machine {
    let mut notes = Vec::new();
    let mut devices = vec![cpu::probe(&mut notes)];
    match cuda::probe() {
        Ok((found, remarks)) => {
            devices.extend(found);
            notes.extend(remarks);
        }
        Err(reason) => notes.push(Note::CudaAbsent { reason }),
    }
    Machine { devices, notes }
}

/// Detects the host processor, as far as this process may use it.
///
/// `cores`, `threads` and `memory_bytes` respect the affinity mask and the control group, so in a
/// container they are its share and not the host's. A listed feature is one the processor has and
/// the operating system has enabled; for the `amx-*` ones Linux additionally wants each process to
/// ask for permission (`arch_prctl(ARCH_REQ_XCOMP_PERM)`) before first use.
pub fn detect_cpu() -> DeviceSpec {
    cpu::probe(&mut Vec::new())
}

/// Detects the CUDA devices, in the driver's order, without creating a context.
///
/// What is unknown of a device that is there stays unset; [`detect`] says why.
pub fn detect_cuda() -> Result<Vec<DeviceSpec>, CudaAbsent> {
    cuda::probe().map(|(devices, _)| devices)
}
