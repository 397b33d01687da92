//! Why a decision that was made before cannot be kept.

use lz_model::did_you_mean;
use serde::Serialize;

use crate::report::ReasonReport;

/// Why a decision is not in force.
#[derive(Clone, Debug, PartialEq, Serialize, thiserror::Error)]
#[serde(tag = "code", rename_all = "SCREAMING_SNAKE_CASE")]
pub enum MismatchKind {
    /// It was made for another device.
    #[error("was decided for {wanted}; here {found}")]
    OtherDevice {
        /// The signature it was made for.
        wanted: String,
        /// What is here, in words.
        found: String,
    },
    /// The call cannot be made here.
    #[error("the call cannot be made: {error}")]
    InvalidCall {
        /// Why.
        error: String,
    },
    /// Its call lies in another bucket, or in none.
    #[error("{dim} = {found} of its call lies outside its bucket")]
    OutsideBucket {
        /// The size.
        dim: String,
        /// How large it is.
        found: i64,
    },
    /// The kernel is not registered.
    #[error("the kernel is not there{}", did_you_mean(.nearest))]
    KernelGone {
        /// One of nearly that name.
        nearest: Option<String>,
    },
    /// The kernel is of another version.
    #[error("version {locked} was decided for; here is {found}")]
    VersionChanged {
        /// The version that was chosen.
        locked: String,
        /// The versions that are here.
        found: String,
    },
    /// The backend's capabilities document is another one.
    #[error("the capabilities of {backend} are not those it was decided with (sha256 {locked}, now {found})")]
    CapabilitiesChanged {
        /// The backend.
        backend: String,
        /// The hash of the document then, shortened.
        locked: String,
        /// The hash of the document now, shortened.
        found: String,
    },
    /// The kernel cannot serve the call.
    #[error("cannot serve the call: {}", .reasons.iter().map(|r| format!("[{}] {}", r.reason.code(), r.message)).collect::<Vec<_>>().join("; "))]
    NotValid {
        /// Why.
        reasons: Vec<ReasonReport>,
    },
    /// The kernel would have to be compiled first.
    #[error("would have to be compiled first; it is in force once it was")]
    NotCompiled,
    /// Somebody who stands above it decides otherwise.
    #[error("{by} decides otherwise: {instead} serves the call")]
    Overruled {
        /// Who.
        by: String,
        /// The kernel that serves.
        instead: String,
    },
    /// Another entry about the same calls says otherwise.
    #[error("{other} names another kernel for the same calls: numbers like softcap do not tell them apart")]
    Ambiguous {
        /// Which.
        other: String,
    },
}

impl MismatchKind {
    /// A stable code.
    pub fn code(&self) -> &'static str {
        match self {
            MismatchKind::OtherDevice { .. } => "OTHER_DEVICE",
            MismatchKind::InvalidCall { .. } => "INVALID_CALL",
            MismatchKind::OutsideBucket { .. } => "OUTSIDE_BUCKET",
            MismatchKind::KernelGone { .. } => "KERNEL_GONE",
            MismatchKind::VersionChanged { .. } => "VERSION_CHANGED",
            MismatchKind::CapabilitiesChanged { .. } => "CAPABILITIES_CHANGED",
            MismatchKind::NotValid { .. } => "NOT_VALID",
            MismatchKind::NotCompiled => "NOT_COMPILED",
            MismatchKind::Overruled { .. } => "OVERRULED",
            MismatchKind::Ambiguous { .. } => "AMBIGUOUS",
        }
    }
}

/// A decision that cannot be kept.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Mismatch {
    /// Which one: `call 12`, `plans[0].ops[2]`; the document as a whole when empty.
    pub entry: String,
    /// The call in a few words; empty when there is none.
    pub call: String,
    /// The kernel that was decided for; empty when it is about the document as a whole.
    pub kernel: String,
    /// The sentence.
    pub message: String,
    /// Code and fields.
    #[serde(flatten)]
    pub kind: MismatchKind,
}

impl Mismatch {
    pub(crate) fn new(entry: String, call: String, kernel: String, kind: MismatchKind) -> Mismatch {
        Mismatch { entry, call, kernel, message: kind.to_string(), kind }
    }

    /// A stable code.
    pub fn code(&self) -> &'static str {
        self.kind.code()
    }
}

impl std::fmt::Display for Mismatch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "[{}] ", self.code())?;
        if !self.entry.is_empty() {
            let call = if self.call.is_empty() { String::new() } else { format!(" ({})", self.call) };
            write!(f, "{}{call}: {} ", self.entry, self.kernel)?;
        }
        f.write_str(&self.message)
    }
}

/// What kind of document holds decisions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum PinKind {
    /// A lockfile.
    Lockfile,
    /// A dispatch table.
    Table,
    /// The decisions of a plan.
    Plan,
}

impl std::fmt::Display for PinKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            PinKind::Lockfile => "lockfile",
            PinKind::Table => "dispatch table",
            PinKind::Plan => "plan",
        })
    }
}

/// A document of decisions, and how much of it is in force.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PinStatus {
    /// What it is called: `lockfile layerzero.lock`, `dispatch table llama.json`.
    pub origin: String,
    /// What kind of document it is; `origin` begins with it.
    #[serde(skip)]
    pub kind: PinKind,
    /// How many decisions it holds.
    pub entries: usize,
    /// How many of them are in force.
    pub in_force: usize,
    /// Whether it is out as a whole, and the first mismatch says why.
    pub refused: bool,
    /// Those that are not, and why.
    pub mismatches: Vec<Mismatch>,
}

impl PinStatus {
    /// Whether something in it was decided for devices that are not known.
    pub(crate) fn is_for_others(&self) -> bool {
        self.mismatches.iter().any(|m| matches!(m.kind, MismatchKind::OtherDevice { .. }))
    }

    /// In a sentence, when anything is amiss.
    pub fn warning(&self) -> Option<String> {
        let first = self.mismatches.first()?;
        if self.refused {
            return Some(format!("{} is not in force: {first}", self.origin));
        }
        let more = match self.mismatches.len() - 1 {
            0 => String::new(),
            n => format!("; and {n} more"),
        };
        let (out, all) = (self.mismatches.len(), self.entries);
        Some(format!("{}: {out} of {all} decisions are not in force: {first}{more}", self.origin))
    }
}
