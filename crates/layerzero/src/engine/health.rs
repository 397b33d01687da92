//! How an engine is doing: levels, breakers, counters, rollouts, reloads, and what happened last.

use std::fmt;

use comfy_table::{Table, presets};
use lz_resilience::rollout::Mode;
use lz_resilience::{BreakerReport, BreakerState, Degradation, KernelReport, Level, RolloutStatus, Stamped, Verdict};
use serde::Serialize;

use super::Engine;
use crate::core::{Drifted, WrongResult};
use crate::documents::PinStatus;
use crate::services::control::Reloads;
use crate::services::jit::JitStatus;
use crate::services::perf::PerfHealth;

/// The health of an engine.
#[derive(Clone, Debug, Serialize)]
pub struct Health {
    /// How degraded selection is.
    pub level: Level,
    /// From 0 to 100, over the last calls.
    pub score: f64,
    /// Kernels that were used: calls, failures, fallbacks, times, the last error.
    pub kernels: Vec<KernelReport>,
    /// Breakers, by backend, kernel and operation.
    pub breakers: Vec<BreakerReport>,
    /// Kernels whose results were wrong: they no longer serve the operation.
    pub wrong_results: Vec<WrongResult>,
    /// Kernels in a rollout.
    pub rollouts: Vec<RolloutStatus>,
    /// What became of reloads.
    pub reloads: Reloads,
    /// What the configuration warns of, and decisions of lockfiles and tables that cannot be kept.
    pub warnings: Vec<String>,
    /// Lockfiles and dispatch tables, and what of them is in force.
    pub pinned: Vec<PinStatus>,
    /// How far kernels that are compiled on first use are compiled.
    pub jit: JitStatus,
    /// What was measured, and where that is kept.
    pub perfdb: PerfHealth,
    /// Kernels whose calls take longer than was measured.
    pub drifted: Vec<Drifted>,
    /// The last events, the newest last.
    pub events: Vec<Stamped>,
}

impl Health {
    /// Whether nothing is out of order.
    pub fn is_well(&self) -> bool {
        self.level == Level::Full
            && self.reloads.last_error.is_none()
            && self.wrong_results.is_empty()
            && self.breakers.iter().all(|b| b.view.state == BreakerState::Closed)
            && !self.rollouts.iter().any(|r| matches!(r.verdict, Verdict::RolledBack { .. }))
    }
}

impl Engine {
    /// How it is doing.
    pub fn health(&self) -> Health {
        let now_ms = self.guard.clock.now_ms();
        Health {
            level: self.level(),
            score: self.guard.with_degradation(|d: &Degradation| d.view(now_ms).score).unwrap_or(100.0),
            kernels: self.guard.counters.report(),
            breakers: self.guard.breakers().report(),
            wrong_results: self.wrong_results(),
            rollouts: self.rollouts(),
            reloads: self.control.reloads(),
            warnings: self.config_warnings().into_iter().chain(self.pin_warnings()).collect(),
            pinned: self.pinned().to_vec(),
            jit: self.jit_status(),
            perfdb: self.perf_health(),
            drifted: self.drifted(),
            events: self.guard.events.recent(),
        }
    }
}

impl fmt::Display for Health {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "level {}, health {:.0} of 100", self.level, self.score)?;
        let r = &self.reloads;
        writeln!(f, "reloads: {} taken over, {} refused", r.succeeded, r.refused)?;
        if let Some(error) = &r.last_error {
            writeln!(f, "the last one was refused, the one before it serves:\n  {}", error.replace('\n', "\n  "))?;
        }
        for warning in &self.warnings {
            writeln!(f, "warning: {warning}")?;
        }
        let mut table = Table::new();
        table.load_style(presets::NOTHING);
        table.set_header(["kernel", "calls", "failures", "fallbacks", "time", "last error"]);
        for k in &self.kernels {
            let time = k.mean_ns.map_or_else(String::new, |ns| format!("{:.1} µs", ns as f64 / 1e3));
            let error = k.last_error.as_ref().map_or_else(String::new, |e| e.message.clone());
            table.add_row([
                k.kernel.clone(),
                k.calls.to_string(),
                k.failures.to_string(),
                k.fallbacks.to_string(),
                time,
                error,
            ]);
        }
        if !self.kernels.is_empty() {
            writeln!(f, "{}", table.trim_fmt())?;
        }
        for b in self.breakers.iter().filter(|b| b.view.state != BreakerState::Closed) {
            let error = b.view.last_error.as_ref().map_or("", |e| e.message.as_str());
            writeln!(f, "circuit of {} for {} is {}: {error}", b.kernel, b.op, b.view.state)?;
        }
        for w in &self.wrong_results {
            writeln!(f, "{} gave wrong results and no longer serves {}: {} ({})", w.kernel, w.op, w.error, w.call)?;
        }
        for r in &self.rollouts {
            writeln!(f, "{}", rollout_line(r))?;
        }
        if self.perfdb.known > 0 {
            writeln!(f, "selection goes by {} measurements", self.perfdb.known)?;
        }
        for drifted in &self.drifted {
            writeln!(f, "measure again: {drifted}")?;
        }
        for note in &self.perfdb.notes {
            writeln!(f, "performance database: {note}")?;
        }
        if self.jit.warm + self.jit.cold > 0 {
            writeln!(f, "{}", self.jit)?;
        }
        for failed in &self.jit.failed {
            writeln!(f, "{} could not be compiled for {}: {}", failed.kernel, failed.call, failed.error)?;
        }
        Ok(())
    }
}

/// A share as a percentage, without the dust of binary fractions.
pub fn percent(share: f64) -> String {
    format!("{}%", (share * 1e6).round() / 1e4)
}

/// A rollout in a line.
pub fn rollout_line(status: &RolloutStatus) -> String {
    let spec = &status.spec;
    let part = match spec.mode {
        Mode::Canary => format!("serves {} of {}", percent(spec.fraction), spec.operation),
        Mode::Shadow => format!("runs beside {} of {}", percent(spec.fraction), spec.operation),
    };
    let state = match &status.verdict {
        Verdict::Running => "running".to_owned(),
        Verdict::Healthy => "healthy".to_owned(),
        Verdict::RolledBack { why } => format!("rolled back: {why}"),
    };
    let seen = format!(
        "{} samples, {} errors, {} of {} compared differ",
        status.samples, status.errors, status.mismatches, status.compared
    );
    let slowdown = status.slowdown.map_or_else(String::new, |s| format!(", {s:.2} times the serving kernel's time"));
    format!("rollout {}: {} {part}; {state} ({seen}{slowdown})", spec.name, spec.candidate)
}
