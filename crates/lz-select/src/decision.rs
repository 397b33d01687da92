//! The outcome of a selection: which kernel, and everything that was considered.

use std::num::NonZeroU8;
use std::sync::Arc;

use lz_model::{Query, Reason};
use serde::Serialize;

use crate::memory::MemoryRange;
use crate::perf::Estimate;
use crate::why::Ranked;

/// A kernel's place in its snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct KernelIx(pub u32);

/// What must be done to the arguments before a kernel can take them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Transforms(u8);

impl Transforms {
    /// Nothing.
    pub const NONE: Transforms = Transforms(0);
    /// Hand operands over in another order of dimensions.
    pub const LAYOUT: Transforms = Transforms(1);
    /// Copy operands to row-major memory.
    pub const CONTIGUOUS: Transforms = Transforms(2);
    /// Cast operands to a wider dtype, and the result back.
    pub const CAST: Transforms = Transforms(4);

    /// With those of `other`.
    #[must_use]
    pub fn and(self, other: Transforms) -> Transforms {
        Transforms(self.0 | other.0)
    }

    /// Whether all of `other` are in it.
    pub fn has(self, other: Transforms) -> bool {
        self.0 & other.0 == other.0
    }

    /// Whether nothing is to be done.
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Names, for people and reports.
    pub fn names(self) -> Vec<&'static str> {
        let all = [(Self::LAYOUT, "layout"), (Self::CONTIGUOUS, "contiguous"), (Self::CAST, "cast")];
        all.into_iter().filter(|(t, _)| self.has(*t)).map(|(_, name)| name).collect()
    }
}

/// The named parts of a score. They add up to [`Terms::total`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Terms {
    /// Declared priority.
    pub priority: f64,
    /// Preferences, avoidances and boosts of the policy.
    pub policy: f64,
    /// Measured or predicted speed against the fastest.
    pub perf: f64,
    /// It would have to be compiled first.
    pub jit: f64,
    /// Arguments would have to be transformed.
    pub transform: f64,
}

impl Terms {
    /// The score.
    pub fn total(&self) -> f64 {
        self.priority + self.policy + self.perf + self.jit + self.transform
    }

    /// What overrules speed: the operator's will, and that a kernel is ready.
    pub(crate) fn precedence(&self) -> f64 {
        self.policy + self.jit
    }
}

/// One kernel that was considered.
#[derive(Clone, Debug, PartialEq)]
pub struct Candidate {
    /// Which kernel.
    pub kernel: KernelIx,
    /// Why it is out; empty when it is not.
    pub reasons: Vec<Reason>,
    /// How many of these say no more than that only the last resort, or what has proved itself, runs now: LayerZero is
    /// disabled, the process is degraded, or the workspace of a last resort leaves less free than it should.
    pub cautions: usize,
    /// Its score, by parts.
    pub terms: Terms,
    /// How long it takes, if that is known.
    pub estimate: Option<Estimate>,
    /// What must be done to the arguments first.
    pub transforms: Transforms,
    /// It would have to be compiled first, so that whoever need not be goes before it.
    pub cold: bool,
    /// It is the operation's definition of right: the last resort, which need not be measured.
    pub reference: bool,
    /// It is what plain torch would run.
    pub baseline: bool,
    /// It comes with LayerZero. One that does not wins no tie.
    pub built_in: bool,
    /// Where times decided: the fastest of those it ties with, which its rank follows, as an index into the candidates.
    pub tied_with: Option<usize>,
    /// Memory it takes beyond arguments and results, in bytes, where it says.
    pub workspace: Option<i64>,
}

impl Candidate {
    /// Whether it could serve the call.
    pub fn accepted(&self) -> bool {
        self.reasons.is_empty()
    }
}

/// What the ranking went by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Basis {
    /// Every candidate was measured: the fastest wins.
    Measured,
    /// Every candidate was measured or predicted: the fastest wins.
    Predicted,
    /// Measured on other machines: what ships with LayerZero decides.
    Prior,
    /// Not enough is known: the highest score wins.
    Declared,
    /// The operator locked the kernel.
    Locked,
}

/// Everything about one selection. [`explain`](crate::Snapshot::select) returns this very value.
#[derive(Clone, Debug, PartialEq)]
pub struct Decision {
    /// What was asked.
    pub query: Query,
    /// Every registered kernel of the operation, in the snapshot's fixed order.
    pub candidates: Vec<Candidate>,
    /// The accepted ones, best first, as indices into `candidates`.
    pub ranking: Vec<usize>,
    /// What the ranking went by.
    pub basis: Basis,
    /// Where the times were measured, if that was not here: the device and the version of torch.
    pub prior: Option<Arc<str>>,
    /// How the ranking found its first kernel; overrides, pins and rollouts may have put another one before it.
    pub ranked_first: Option<Ranked>,
    /// The kernel the selection chose and that was struck out since, and why.
    pub struck_out: Option<(String, Reason)>,
    /// Names of the policy rules that applied; [`Snapshot::trace`](crate::Snapshot::trace) says what they did.
    pub rules: Vec<String>,
    /// The lock that left only the kernels it names, if one applied.
    pub locked_by: Option<String>,
    /// The rule that put its kernel before all others, if one did.
    pub overridden_by: Option<String>,
    /// The lockfile or dispatch table that chose the kernel, if one did.
    pub pinned_by: Option<Arc<str>>,
    /// The rollout that put its kernel before all others, if one did.
    pub rollout: Option<String>,
    /// How degraded the process is; `full` when it is not.
    pub level: &'static str,
    /// Whether every shape of the cell gets this very decision.
    pub uniform: bool,
    /// What a workspace may take on the device, in bytes, where its memory is known.
    pub available: Option<i64>,
    /// The available bytes with which it holds.
    pub memory: MemoryRange,
}

impl Decision {
    /// The kernel that will run.
    pub fn chosen(&self) -> Option<&Candidate> {
        self.ranking.first().map(|&i| &self.candidates[i])
    }

    /// What plain torch would run: the accepted baseline with the highest declared priority.
    pub fn baseline(&self) -> Option<&Candidate> {
        let baselines = self.candidates.iter().filter(|c| c.baseline && c.accepted());
        baselines.reduce(|best, c| if c.terms.priority > best.terms.priority { c } else { best })
    }

    /// Takes candidates that were given reasons since out of the ranking. Whoever put the first one first has not put the
    /// next one there.
    pub fn strike_out(&mut self, name: impl Fn(KernelIx) -> String) {
        let first = self.ranking.first().copied();
        let candidates = &self.candidates;
        self.ranking.retain(|&i| candidates[i].accepted());
        let struck = first.map(|i| &candidates[i]).and_then(|c| Some((name(c.kernel), c.reasons.first()?.clone())));
        if struck.is_some() {
            (self.pinned_by, self.rollout, self.overridden_by) = (None, None, None);
            self.struck_out = struck;
        }
    }

    /// The accepted candidates, best first.
    pub fn ranked(&self) -> impl Iterator<Item = &Candidate> {
        self.ranking.iter().map(|&i| &self.candidates[i])
    }
}

/// How many kernels a chain names beyond the first.
pub const FALLBACKS: usize = 6;

/// Most kernels of a snapshot: a chain names each in 16 bits.
pub const MAX_KERNELS: usize = 1 << 16;

/// A decision reduced to what dispatch needs, small enough to cache by the thousands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chain {
    /// The available bytes with which it holds.
    memory: MemoryRange,
    kernels: [u16; 1 + FALLBACKS],
    transforms: [Transforms; 1 + FALLBACKS],
    len: NonZeroU8,
}

impl Chain {
    /// The first kernels of a ranking; when there are more than fit, the last place goes to
    /// `last_resort`, so that the chain always ends in a reference where there is one.
    pub fn new(ranked: &[(KernelIx, Transforms)], last_resort: Option<(KernelIx, Transforms)>) -> Option<Chain> {
        ranked.first()?;
        let mut chain = Chain {
            memory: MemoryRange::ANY,
            kernels: [0; 1 + FALLBACKS],
            transforms: [Transforms::NONE; 1 + FALLBACKS],
            len: NonZeroU8::MIN,
        };
        for (at, &step) in ranked.iter().take(1 + FALLBACKS).enumerate() {
            chain.put(at, step);
        }
        if let Some(step) = last_resort.filter(|(kernel, _)| !chain.mentions(*kernel)) {
            chain.put(chain.length().min(FALLBACKS), step);
        }
        Some(chain)
    }

    fn put(&mut self, at: usize, (kernel, transforms): (KernelIx, Transforms)) {
        debug_assert!((kernel.0 as usize) < MAX_KERNELS, "a snapshot has no more kernels");
        self.kernels[at] = kernel.0 as u16;
        self.transforms[at] = transforms;
        self.len = self.len.max(NonZeroU8::MIN.saturating_add(at as u8));
    }

    fn length(&self) -> usize {
        usize::from(self.len.get())
    }

    /// The same, holding with so much memory alone.
    #[must_use]
    pub fn within(self, memory: MemoryRange) -> Chain {
        Chain { memory, ..self }
    }

    /// The available bytes with which it holds.
    #[inline]
    pub fn memory(&self) -> MemoryRange {
        self.memory
    }

    /// The kernel to run.
    pub fn chosen(&self) -> KernelIx {
        KernelIx(self.kernels[0].into())
    }

    /// The kernels to try, in order, with what each needs done to the arguments.
    pub fn steps(&self) -> impl ExactSizeIterator<Item = (KernelIx, Transforms)> + '_ {
        (0..self.length()).map(|i| (KernelIx(self.kernels[i].into()), self.transforms[i]))
    }

    /// Whether a kernel is in the chain.
    pub fn mentions(&self, kernel: KernelIx) -> bool {
        self.steps().any(|(named, _)| named == kernel)
    }
}
