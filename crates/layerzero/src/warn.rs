//! Warnings, each at most once a minute per cause.

use std::collections::HashMap;
use std::path::PathBuf;

use lz_model::{Layout, contradiction, say_the_layout};
use lz_select::Clock;
use parking_lot::Mutex;

/// How long a cause stays quiet after a warning.
const QUIET_MS: u64 = 60_000;
/// Most causes remembered; beyond that those that may warn again are forgotten, then all.
const MOST: usize = 1024;

/// How many kernels a warning names; the others it counts.
const NAMED: usize = 3;

/// Something worth saying that is no error.
#[derive(Clone, Debug, PartialEq)]
pub enum Warning {
    /// The strides of a tensor contradict the layout in force, and the call does not say its own.
    LayoutContradicted {
        /// The operation.
        op: &'static str,
        /// The tensor.
        input: &'static str,
        /// Its shape.
        shape: Vec<i64>,
        /// The layout in force.
        layout: Layout,
    },
    /// A kernel failed and the call went on to another.
    FellBack {
        /// The operation.
        op: &'static str,
        /// What failed.
        failed: String,
        /// What it said.
        error: String,
        /// What served the call.
        served: String,
        /// How many times longer that takes, where both times are trusted.
        factor: Option<f64>,
    },
    /// A kernel gave a wrong result, and no longer serves the operation.
    WrongResult {
        /// The operation.
        op: &'static str,
        /// The kernel.
        kernel: String,
        /// What was wrong.
        error: String,
    },
    /// Faster kernels exist, and none of them takes the call.
    OnlyReference {
        /// The operation.
        op: &'static str,
        /// The reference that serves it.
        served: String,
        /// Why the others are out: kernel and first reason.
        why: Vec<(String, String)>,
    },
    /// No kernel can launch a batch as a whole, so that it is made in pieces.
    SplitBatch {
        /// The operation.
        op: &'static str,
        /// Into how many pieces.
        pieces: i64,
        /// How many rows the axis has that is cut.
        size: i64,
        /// What keeps a kernel from the whole.
        why: String,
    },
    /// A lockfile or a dispatch table is not in force as a whole.
    NotInForce {
        /// Which, and why.
        sentence: String,
    },
    /// The figures of rollouts cannot be kept where other processes see them.
    StatusNotWritten {
        /// The file.
        path: PathBuf,
        /// What the system says.
        error: String,
    },
}

impl Warning {
    fn cause(&self) -> String {
        match self {
            // Not by shape: lengths grow with every token.
            Warning::LayoutContradicted { op, input, .. } => format!("layout {op} {input}"),
            Warning::FellBack { op, failed, .. } => format!("fallback {op} {failed}"),
            Warning::WrongResult { op, kernel, .. } => format!("wrong {op} {kernel}"),
            Warning::OnlyReference { op, why, .. } => format!("reference {op} {why:?}"),
            // Not by size: batches vary.
            Warning::SplitBatch { op, pieces, .. } => format!("split {op} {pieces}"),
            Warning::NotInForce { sentence } => sentence.clone(),
            Warning::StatusNotWritten { path, .. } => format!("status {}", path.display()),
        }
    }
}

impl std::fmt::Display for Warning {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Warning::LayoutContradicted { op, input, shape, layout } => {
                write!(f, "{op}: {}; {}", contradiction(input, shape, *layout), say_the_layout(*layout))
            }
            Warning::NotInForce { sentence } => f.write_str(sentence),
            Warning::SplitBatch { op, pieces, size, why } => {
                write!(f, "{op}: no kernel can launch the batch of {size}, which is split into {pieces} pieces ({why})")
            }
            Warning::FellBack { op, failed, error, served, factor } => {
                write!(f, "{op}: {failed} failed ({error}); {served} served the call")?;
                write_factor(f, *factor)
            }
            Warning::WrongResult { op, kernel, error } => {
                write!(f, "{op}: {kernel} {error}; it no longer serves {op} (see lz.health())")
            }
            Warning::OnlyReference { op, served, why } => {
                write!(f, "{op}: only the reference {served} takes this call; it is exact and slow")?;
                let mut before = " (";
                for (kernel, reason) in why.iter().take(NAMED) {
                    write!(f, "{before}{kernel}: {reason}")?;
                    before = "; ";
                }
                if why.len() > NAMED {
                    write!(f, "; and {} more", why.len() - NAMED)?;
                }
                f.write_str(if why.is_empty() { "" } else { ")" })
            }
            Warning::StatusNotWritten { path, error } => {
                write!(f, "'layerzero rollout status' will not show this process: {}: {error}", path.display())
            }
        }
    }
}

/// How one time compares with another. Differences of less than 5% are not worth a word.
fn write_factor(f: &mut std::fmt::Formatter<'_>, factor: Option<f64>) -> std::fmt::Result {
    match factor {
        Some(slower) if slower >= 1.05 => write!(f, ", {slower:.1} times slower"),
        Some(faster) if faster > 0.0 && 1.0 / faster >= 1.05 => write!(f, ", {:.1} times faster", 1.0 / faster),
        _ => Ok(()),
    }
}

/// Receives warnings.
pub type WarningHook = Box<dyn Fn(&Warning) + Send + Sync>;

/// Lets each cause through once a minute.
pub(crate) struct Warnings {
    clock: Clock,
    last: Mutex<HashMap<String, u64>>,
    hook: WarningHook,
}

impl Warnings {
    pub fn new(clock: Clock, hook: Option<WarningHook>) -> Warnings {
        let log: WarningHook = Box::new(|warning| tracing::warn!(target: "layerzero", "{warning}"));
        Warnings { clock, last: Mutex::default(), hook: hook.unwrap_or(log) }
    }

    pub fn give(&self, warning: &Warning) {
        let now = self.clock.now_ms();
        let mut last = self.last.lock();
        let quiet = |then: u64| now < then.saturating_add(QUIET_MS);
        if last.get(&warning.cause()).is_some_and(|&then| quiet(then)) {
            return;
        }
        if last.len() >= MOST {
            last.retain(|_, then| quiet(*then));
        }
        if last.len() >= MOST {
            last.clear();
        }
        last.insert(warning.cause(), now);
        drop(last);
        (self.hook)(warning);
    }
}
