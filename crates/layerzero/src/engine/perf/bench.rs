//! Who runs the kernels that are measured.

use lz_model::{CallSpec, DeviceIx};
use lz_perfdb::{Mode, Parts};

/// What came out when a kernel's result was compared with the right one.
#[derive(Clone, Debug, PartialEq)]
pub enum Checked {
    /// It is right.
    Right {
        /// The largest difference seen.
        max_error: Option<f64>,
        /// How long the first call took, compilation included, in milliseconds.
        warmup_ms: Option<f64>,
    },
    /// It is wrong: what was seen, in a line.
    Wrong(String),
    /// It failed: what it said, in a line.
    Failed(String),
}

/// Runs kernels on the inputs of one call at a time. The order of use is `prepare`, then `check` and `time` for kernels
/// of that call, then the next `prepare`.
pub trait Bench {
    /// Makes inputs for a call. An error says why that is not possible here.
    fn prepare(&mut self, call: &CallSpec, device: DeviceIx, mode: Mode) -> Result<(), String>;

    /// Runs a kernel once and compares what it gives with the reference.
    fn check(&mut self, kernel: &str) -> Checked;

    /// Runs a kernel so many times. Gives the microseconds of one call.
    fn time(&mut self, kernel: &str, calls: u32) -> Result<f64, String>;

    /// What the host and the device took in each sample of a kernel since `prepare`, where that was seen apart. `None`
    /// for a kernel whose time is both in turn.
    fn parts(&mut self, kernel: &str) -> Option<Vec<Parts>> {
        let _ = kernel;
        None
    }

    /// Whether somebody wants to stop.
    fn is_interrupted(&mut self) -> bool {
        false
    }
}
