//! The time of each step of a compiled graph.

use std::time::Duration;

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

/// Runs a compiled graph some times, and gives the median time of each of its steps.
pub fn profile(
    compiled: &Compiled,
    externals: &mut [External<'_>],
    host: &dyn Host,
    rounds: usize,
) -> Result<Vec<Timed>, ExecError> {
    let count = compiled.steps().len();
    let mut rows: Vec<Vec<Duration>> = vec![Vec::with_capacity(rounds); count];
    let mut times = vec![Duration::ZERO; count];
    for _ in 0..rounds.max(1) {
        compiled.run_timed(externals, host, &mut times)?;
        rows.iter_mut().zip(&times).for_each(|(row, time)| row.push(*time));
    }
    let median = |row: &mut Vec<Duration>| {
        row.sort_unstable();
        row[row.len() / 2]
    };
    Ok(compiled.steps().zip(&mut rows).map(|(step, row)| Timed { step, median: median(row) }).collect())
}
