//! The time of each step of a compiled graph.

use std::time::Duration;

use lz_abi::Tensor;
use lz_abi::program::External;

use super::compiled::{Compiled, ExecError, StepInfo};
use super::kernel::Host;

/// What a step takes.
#[derive(Clone, Debug, PartialEq)]
pub struct Timed {
    /// The step.
    pub step: StepInfo,
    /// Its median time.
    pub median: Duration,
}

impl Timed {
    /// Floating-point operations in a second.
    pub fn flops_per_second(&self) -> f64 {
        self.step.cost.flops / self.median.as_secs_f64().max(1e-9)
    }

    /// Bytes read and written in a second.
    pub fn bytes_per_second(&self) -> f64 {
        self.step.cost.bytes / self.median.as_secs_f64().max(1e-9)
    }
}

/// Runs a compiled graph some times, and gives the median time of each of its steps. Inputs that it updates have the same contents
/// before each run, and afterwards.
pub fn profile(
    compiled: &Compiled,
    externals: &mut [External<'_>],
    host: &dyn Host,
    rounds: usize,
) -> Result<Vec<Timed>, ExecError> {
    let count = compiled.steps().len();
    let mut rows: Vec<Vec<Duration>> = vec![Vec::with_capacity(rounds); count];
    let mut times = vec![Duration::ZERO; count];
    let before: Vec<Option<Tensor>> = externals
        .iter()
        .zip(&compiled.slots()[..compiled.inputs()])
        .map(|(external, slot)| match external {
            External::Write(tensor) if slot.written => Some(tensor.as_ref().view().to_tensor()),
            _ => None,
        })
        .collect();
    for _ in 0..rounds.max(1) {
        let ran = compiled.run_timed(externals, host, &mut times);
        for (external, contents) in externals.iter_mut().zip(&before) {
            if let (External::Write(tensor), Some(contents)) = (external, contents) {
                tensor.view_mut().copy_bits_from(&contents.view());
            }
        }
        ran?;
        rows.iter_mut().zip(&times).for_each(|(row, time)| row.push(*time));
    }
    let median = |row: &mut Vec<Duration>| {
        row.sort_unstable();
        row[row.len() / 2]
    };
    Ok(compiled.steps().zip(&mut rows).map(|(step, row)| Timed { step, median: median(row) }).collect())
}
