//! What is known of kernels that are not built in: for which calls they were compared with the reference, and how that
//! came out.

use std::collections::HashMap;

use lz_model::{GraphDoubt, KernelDescriptor, MAX_DIMS, OpIx, Query, Reason, Trust};

use crate::graphs::Captures;

/// When results are compared with the reference's, besides measuring.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Verify {
    /// Never.
    Off,
    /// A kernel that is not built in at its first use for each class of call, before it serves.
    #[default]
    FirstUse,
    /// As [`Verify::FirstUse`], and a share of the calls of every kernel.
    Sample,
}

impl Verify {
    /// The words settings use, in the order of the variants.
    pub const WORDS: &'static [&'static str] = &["off", "first_use", "sample"];
}

/// A wrong result.
#[derive(Clone, Debug, PartialEq)]
pub struct Evidence {
    /// What is wrong with it.
    pub error: String,
    /// The call, in words.
    pub call: String,
    /// The largest difference, where it is a number.
    pub max_error: Option<f64>,
    /// What is allowed, relative to the size of the value.
    pub tolerance: Option<f64>,
}

impl Evidence {
    /// Why the kernel is out.
    pub fn reason(&self) -> Reason {
        let Evidence { error, call, max_error, tolerance } = self.clone();
        Reason::NumericalMismatch { error, call, max_error, tolerance }
    }
}

/// A kernel's id and version.
pub type KernelVersion = (String, String);

/// What the comparisons of this process showed.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Proofs {
    right: HashMap<KernelVersion, Vec<Query>>,
    /// By class, the last wrong result.
    wrong: HashMap<KernelVersion, Vec<(Query, Evidence)>>,
    captures: Captures,
}

fn name(kernel: &KernelDescriptor) -> KernelVersion {
    (kernel.id.clone(), kernel.version.clone())
}

impl Proofs {
    /// A kernel gave what the reference gives: a wrong result for the same class of call no longer counts.
    pub fn passed(&mut self, kernel: &KernelDescriptor, query: &Query) {
        let (name, class) = (name(kernel), query.proof_class());
        if let Some(wrong) = self.wrong.get_mut(&name) {
            wrong.retain(|(known, _)| *known != class);
        }
        let right = self.right.entry(name).or_default();
        if !right.contains(&class) {
            right.push(class);
        }
    }

    /// A kernel gave a wrong result.
    pub fn mismatched(&mut self, kernel: &KernelDescriptor, query: &Query, evidence: Evidence) {
        let (name, class) = (name(kernel), query.proof_class());
        if let Some(right) = self.right.get_mut(&name) {
            right.retain(|known| *known != class);
        }
        let wrong = self.wrong.entry(name).or_default();
        wrong.retain(|(known, _)| *known != class);
        wrong.push((class, evidence));
    }

    /// A kernel was captured in a CUDA graph and replayed, for a call.
    pub fn captured(&mut self, kernel: &KernelDescriptor, query: &Query, outcome: Result<(), GraphDoubt>) {
        self.captures.note(kernel, query, outcome);
    }

    /// What captures showed.
    pub fn captures(&self) -> &Captures {
        &self.captures
    }

    /// Forgets every wrong result, and every capture that failed.
    pub fn forget_wrong(&mut self) {
        self.wrong.clear();
        self.captures.forget_failures();
    }

    /// Forgets a kernel whose code is removed.
    pub fn forget(&mut self, id: &str, version: &str) {
        let name = (id.to_owned(), version.to_owned());
        self.right.remove(&name);
        self.wrong.remove(&name);
        self.captures.forget(&name);
    }

    /// Whether a kernel was compared for calls like this one, and was right.
    pub fn contains(&self, kernel: &KernelDescriptor, query: &Query) -> bool {
        self.right.get(&name(kernel)).is_some_and(|right| right.contains(&query.proof_class()))
    }

    /// The wrong result that keeps a kernel from a call: any of the operation's. What plain torch runs is kept only from
    /// calls of the class that was wrong, since often nothing else could serve the others.
    pub fn evidence(&self, kernel: &KernelDescriptor, query: &Query) -> Option<&Evidence> {
        if self.wrong.is_empty() {
            return None;
        }
        // Whatever the lengths: a decision holds for many.
        let alike = |class: &Query| class.with_dims([0; MAX_DIMS]);
        let bears = |class: &Query| match kernel.baseline {
            true => alike(class) == alike(&query.proof_class()),
            false => class.op() == query.op(),
        };
        self.wrong.get(&name(kernel))?.iter().find(|(class, _)| bears(class)).map(|(_, evidence)| evidence)
    }

    /// Every wrong result: kernel, operation, evidence. Sorted by kernel.
    pub fn mismatches(&self) -> Vec<(&KernelVersion, OpIx, &Evidence)> {
        let all = self.wrong.iter().flat_map(|(name, wrong)| wrong.iter().map(move |(c, e)| (name, c.op(), e)));
        let mut all: Vec<_> = all.collect();
        all.sort_by(|a, b| (a.0, a.1).cmp(&(b.0, b.1)));
        all
    }

    /// How many pairs of a kernel and a class of calls were found right.
    pub fn passes(&self) -> usize {
        self.right.values().map(Vec::len).sum()
    }
}

/// Whether a kernel must be compared with the reference before it serves a call.
pub(crate) fn is_needed(verify: Verify, proofs: &Proofs, kernel: &KernelDescriptor, query: &Query) -> bool {
    verify != Verify::Off && kernel.trust == Trust::Unproven && !kernel.reference && !proofs.contains(kernel, query)
}
