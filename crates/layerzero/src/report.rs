//! A decision as a report: owned, serializable, printable.

use std::fmt;

use comfy_table::{Table, presets};
use lz_model::{CallSpec, Catalog, Facts, KernelDescriptor, Op, Query, Reason, TensorSpec};
use lz_select::{Basis, Decision, Effect, EstimateKind, KernelIx, Snapshot, Terms, Why};
use serde::Serialize;

/// How many kernels for other hardware a table names.
const TOLD_FOR_OTHER_HARDWARE: usize = 3;

/// Schema version of every JSON document LayerZero prints.
pub const REPORT_VERSION: &str = "1.0";

/// A reason, with its sentence.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ReasonReport {
    /// Code and fields.
    #[serde(flatten)]
    pub reason: Reason,
    /// The sentence.
    pub message: String,
}

/// Why a kernel was chosen, with its sentence.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct WhyReport {
    /// What decided, and its figures.
    #[serde(flatten)]
    pub why: Why,
    /// The sentence.
    pub message: String,
}

/// What the order of the accepted candidates follows, but for those a rule moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum RankedBy {
    /// Times; the scores need not fall from rank to rank.
    Time,
    /// The score.
    Score,
}

/// One kernel that was considered.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CandidateReport {
    /// Its id.
    pub kernel_id: String,
    /// Its version.
    pub version: String,
    /// The library it comes from.
    pub backend: String,
    /// Whether it could serve the call.
    pub accepted: bool,
    /// Its place among the accepted, from 1.
    pub rank: Option<usize>,
    /// Its score.
    pub score: Option<f64>,
    /// The score, by parts.
    pub terms: Option<Terms>,
    /// Its time in microseconds, if measured or predicted.
    pub time_us: Option<f64>,
    /// How far off that time may be. Predictions that go by the same comparison differ by less.
    pub spread_us: Option<f64>,
    /// Where the time comes from.
    pub time_basis: Option<EstimateKind>,
    /// What it takes the host, where that was predicted by itself: the slower of the two sets the pace.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host_us: Option<f64>,
    /// What it takes the device, likewise.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device_us: Option<f64>,
    /// What its calls take in this process, where that has drifted from what was measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub live_us: Option<f64>,
    /// Whether that time is trusted to decide.
    pub time_trusted: bool,
    /// Where times decide: the fastest of those it differs from by no more than noise. Its rank follows that one's time.
    pub tied_with: Option<String>,
    /// What put it at its rank, where neither time nor score did.
    pub moved_by: Option<String>,
    /// Whether it defines what right is, and is the last resort.
    pub reference: bool,
    /// How many times longer than the roofline floor it takes.
    pub times_floor: Option<f64>,
    /// What must be done to the arguments first.
    pub transforms: Vec<&'static str>,
    /// Memory it takes beyond arguments and results, in bytes, where it says.
    pub workspace_bytes: Option<i64>,
    /// Why it is out.
    pub reasons: Vec<ReasonReport>,
}

/// Everything about one selection.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    /// Schema version of this document.
    pub schema_version: &'static str,
    /// The operation the call was.
    pub op: &'static str,
    /// The device it is about.
    pub device: String,
    /// Sizes by name.
    #[serde(serialize_with = "as_map")]
    pub dims: Vec<(&'static str, i64)>,
    /// Tensors by name: dtype, layout, strides.
    #[serde(serialize_with = "as_map")]
    pub tensors: Vec<(&'static str, String)>,
    /// The kernel that would run.
    pub chosen: Option<String>,
    /// What the ranking went by.
    pub basis: Basis,
    /// Where the times were measured, if that was not here: the device and the version of torch.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prior: Option<String>,
    /// Why that kernel.
    pub why: Option<WhyReport>,
    /// What the order of the candidates follows.
    pub ranked_by: RankedBy,
    /// Policy rules that applied.
    pub rules: Vec<String>,
    /// The rule that put its kernel before all others, if one did.
    pub overridden_by: Option<String>,
    /// The lockfile or dispatch table that chose the kernel, if one did.
    pub pinned_by: Option<String>,
    /// Why a dispatch table says nothing about the call, although it does about others like it.
    pub outside_table: Option<ReasonReport>,
    /// What plain torch would run.
    pub baseline: Option<String>,
    /// How many times faster than that the chosen kernel is, where both times are known.
    pub times_baseline: Option<f64>,
    /// Some times are guesses, because the sizes lie beyond those that were measured for these kernels.
    pub beyond_measured: bool,
    /// The rollout that gave the call to its candidate, if one did.
    pub rollout: Option<String>,
    /// How degraded the process is: `full`, `reduced`, `cached`, `rule_based` or `minimal`.
    pub level: &'static str,
    /// Floating-point operations of the call.
    pub flops: f64,
    /// Bytes it must move at least.
    pub bytes: f64,
    /// The least time that work can take on this device, where its peaks are known. Paged operations
    /// count as if every sequence filled its table.
    pub floor_us: Option<f64>,
    /// What a workspace may take on the device beyond the headroom, in bytes, where its free memory is known.
    pub available_bytes: Option<i64>,
    /// Into how many pieces the batch is split, where no kernel can launch it as a whole.
    pub pieces: Option<i64>,
    /// Every registered kernel of the operation: accepted ones by rank, then the others.
    pub candidates: Vec<CandidateReport>,
}

/// Pairs as an object, in their order.
fn as_map<T: Serialize, S: serde::Serializer>(pairs: &[(&'static str, T)], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_map(pairs.iter().map(|(name, value)| (name, value)))
}

/// A quantity with a prefix that keeps it readable: `1.57 G`.
fn scaled(value: f64) -> String {
    let prefixes = [(1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k")];
    match prefixes.iter().find(|(unit, _)| value >= *unit) {
        Some((unit, prefix)) => format!("{:.2}{prefix}", value / unit),
        None => format!("{value:.0} "),
    }
}

/// How many times faster the chosen kernel is than what plain torch would run, where both times are trusted.
fn times_baseline(decision: &Decision) -> Option<f64> {
    let trusted = |c: &lz_select::Candidate| c.estimate.filter(|e| e.trusted && e.median_us > 0.0).map(|e| e.median_us);
    Some(trusted(decision.baseline()?)? / trusted(decision.chosen()?)?)
}

/// What moved kernels to other places than time or score give them.
fn moves(snapshot: &Snapshot, decision: &Decision) -> Vec<(KernelIx, String)> {
    let mut moved = Vec::new();
    if let (Some(chosen), Some(why)) = (decision.chosen(), decision.why())
        && matches!(
            why,
            Why::Rollout { .. }
                | Why::Override { .. }
                | Why::Pin { .. }
                | Why::SdpaKernel { .. }
                | Why::NextInLine { .. }
        )
    {
        moved.push((chosen.kernel, why.to_string()));
    }
    for rule in snapshot.trace(decision) {
        let effect = |effect| match effect {
            Effect::PutFirst => Some(format!("put first by '{}'", rule.name)),
            Effect::NextInLine => Some(format!("put second by '{}'", rule.name)),
            _ => None,
        };
        moved.extend(rule.effects.iter().filter_map(|&(kernel, e)| Some((kernel, effect(e)?))));
    }
    moved
}

/// Whether a kernel is for calls with an input that this one does not have.
fn is_for_other_calls(op: &Op, query: &Query, kernel: &KernelDescriptor) -> bool {
    let given = |name: &str| op.input_index(name).is_some_and(|i| query.tensor(i).is_present());
    kernel.inputs.iter().any(|(name, rule)| rule.purpose && !given(name))
}

impl Report {
    pub(crate) fn new(snapshot: &Snapshot, decision: &Decision) -> Report {
        let query = &decision.query;
        let op = Catalog::get().op(query.op());
        let schema = op.schema();
        let device = snapshot.device(query.device());
        let (flops, bytes) = device.map_or((0.0, 0.0), |device| {
            let facts = Facts { op, query, device };
            (op.flops(&facts), op.bytes(&facts))
        });
        let moved = moves(snapshot, decision);
        let floor_us = device.zip(op.dtype(query)).and_then(|(d, dtype)| d.roofline_us(dtype, flops, bytes));
        let mut candidates: Vec<CandidateReport> = decision
            .candidates
            .iter()
            .enumerate()
            .filter(|(_, c)| !is_for_other_calls(op, query, snapshot.kernel(c.kernel)))
            .map(|(i, c)| {
                let kernel = snapshot.kernel(c.kernel);
                let accepted = c.accepted();
                CandidateReport {
                    kernel_id: kernel.id.clone(),
                    version: kernel.version.clone(),
                    backend: kernel.backend.clone(),
                    accepted,
                    rank: decision.ranking.iter().position(|&r| r == i).map(|r| r + 1),
                    score: accepted.then(|| c.terms.total()),
                    terms: accepted.then_some(c.terms),
                    time_us: c.estimate.map(|e| e.median_us),
                    spread_us: c.estimate.map(|e| e.spread_us),
                    time_basis: c.estimate.map(|e| e.kind),
                    host_us: c.estimate.and_then(|e| e.sides).map(|s| s.host.median_us),
                    device_us: c.estimate.and_then(|e| e.sides).map(|s| s.device.median_us),
                    live_us: None,
                    time_trusted: c.estimate.is_some_and(|e| e.trusted),
                    tied_with: c.tied_with.map(|i| snapshot.name(decision.candidates[i].kernel)),
                    moved_by: moved.iter().find(|(k, _)| accepted && *k == c.kernel).map(|(_, by)| by.clone()),
                    reference: c.reference,
                    times_floor: c.estimate.zip(floor_us).filter(|(_, f)| *f > 0.0).map(|(e, f)| e.median_us / f),
                    transforms: c.transforms.names(),
                    workspace_bytes: c.workspace,
                    reasons: c
                        .reasons
                        .iter()
                        .map(|r| ReasonReport { reason: r.clone(), message: r.to_string() })
                        .collect(),
                }
            })
            .collect();
        candidates.sort_by_key(|c| c.rank.unwrap_or(usize::MAX));
        let tensors = schema.inputs.iter().enumerate();
        Report {
            schema_version: REPORT_VERSION,
            op: op.id(),
            device: device.map_or_else(|| "none".into(), |d| d.name.clone()),
            dims: schema.dims.iter().zip(query.dims()).map(|(d, &size)| (d.name, size)).collect(),
            tensors: tensors
                .filter(|(i, _)| query.tensor(*i).is_present())
                .map(|(i, t)| (t.name, format!("{:?}", query.tensor(i))))
                .collect(),
            chosen: decision.chosen().map(|c| snapshot.kernel(c.kernel).id.clone()),
            basis: decision.basis,
            prior: decision.prior.as_deref().map(str::to_owned),
            why: decision.why().map(|why| WhyReport { message: why.to_string(), why }),
            ranked_by: if decision.is_ranked_by_time() { RankedBy::Time } else { RankedBy::Score },
            rules: decision.rules.clone(),
            overridden_by: decision.overridden_by.clone(),
            pinned_by: decision.pinned_by.as_deref().map(str::to_owned),
            outside_table: None,
            baseline: decision.baseline().map(|c| snapshot.kernel(c.kernel).id.clone()),
            times_baseline: times_baseline(decision),
            beyond_measured: decision
                .ranked()
                .any(|c| c.estimate.is_some_and(|e| e.kind == EstimateKind::Extrapolated)),
            rollout: decision.rollout.clone(),
            level: decision.level,
            flops,
            bytes,
            floor_us,
            available_bytes: decision.available,
            pieces: None,
            candidates,
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let join = |items: Vec<String>| items.join(", ");
        writeln!(f, "{} on {}", self.op, self.device)?;
        writeln!(f, "  sizes    {}", join(self.dims.iter().map(|(n, s)| format!("{n}={s}")).collect()))?;
        writeln!(f, "  tensors  {}", join(self.tensors.iter().map(|(n, t)| format!("{n}: {t}")).collect()))?;
        write!(f, "  work     {}FLOP, {}B", scaled(self.flops), scaled(self.bytes))?;
        match self.floor_us {
            Some(floor) => writeln!(f, ", roofline {floor:.2} µs")?,
            None => writeln!(f)?,
        }
        let takes_memory = self.candidates.iter().any(|c| c.workspace_bytes.is_some_and(|bytes| bytes > 0));
        if let Some(available) = self.available_bytes.filter(|_| takes_memory) {
            writeln!(f, "  memory   {}B available for a workspace", scaled(available as f64))?;
        }
        if !self.rules.is_empty() {
            writeln!(f, "  policy   {}", self.rules.join("; "))?;
        }
        if self.level != "full" {
            writeln!(f, "  degraded {}", self.level)?;
        }
        match &self.chosen {
            Some(kernel) => {
                let why = self.why.as_ref().map_or("", |why| why.message.as_str());
                writeln!(f, "  chosen   {kernel} ({why})")?;
            }
            None => match self.pieces {
                Some(pieces) => {
                    writeln!(f, "  chosen   nothing for the whole: the batch is split into {pieces} pieces")?
                }
                None => writeln!(f, "  chosen   nothing: no kernel can serve this call")?,
            },
        }
        if let Some(outside) = &self.outside_table {
            let (code, message) = (outside.reason.code(), &outside.message);
            writeln!(f, "  table    says nothing: [{code}] {message}; selected at run time")?;
        }
        if let Some(baseline) = &self.baseline {
            write!(f, "  baseline {baseline}")?;
            match self.times_baseline.filter(|_| self.chosen.as_ref() != Some(baseline)) {
                Some(times) => writeln!(f, "; the choice is {times:.2}× as fast")?,
                None => writeln!(f)?,
            }
        }
        if let Some(prior) = &self.prior {
            writeln!(
                f,
                "  prior    times marked '≈' follow from what was measured on {prior}; tune to measure them here"
            )?;
        }
        if self.beyond_measured {
            writeln!(f, "  guessed  times marked '?' lie beyond the measured sizes; tune such sizes to be certain")?;
        }
        let mut table = Table::new();
        // Where times decide, a score would contradict the rank beside it.
        let by_time = self.ranked_by == RankedBy::Time;
        let header = ["", "kernel", "version", "score", "time", "why"];
        table.load_style(presets::NOTHING).set_header(header.into_iter().filter(|h| !(by_time && *h == "score")));
        // A few kernels for other hardware are told like all others; many would hide the rest.
        let elsewhere = self.candidates.iter().filter(|c| c.is_for_other_hardware()).count();
        let told = |c: &&CandidateReport| elsewhere <= TOLD_FOR_OTHER_HARDWARE || !c.is_for_other_hardware();
        for c in self.candidates.iter().filter(told) {
            let score = c.score.map_or_else(String::new, |s| format!("{s:.1}"));
            let rank = c.rank.map_or_else(|| "✗".into(), |r| r.to_string());
            let time = c.time_us.map_or_else(String::new, |t| time_text(t, c));
            let cells = [rank, c.kernel_id.clone(), c.version.clone()].into_iter();
            table.add_row(cells.chain((!by_time).then_some(score)).chain([time, why(c, self.ranked_by)]));
        }
        write!(f, "{}", table.trim_fmt())?;
        if elsewhere > TOLD_FOR_OTHER_HARDWARE {
            write!(f, "\n ✗  {elsewhere} kernels for other hardware")?;
        }
        Ok(())
    }
}

impl CandidateReport {
    fn is_for_other_hardware(&self) -> bool {
        self.reasons.iter().any(|told| matches!(told.reason, Reason::PlatformMismatch { .. }))
    }
}

/// A time, with a mark for what is not measured, and how far it is from the floor.
fn time_text(time_us: f64, candidate: &CandidateReport) -> String {
    let mark = match candidate.time_basis {
        Some(EstimateKind::Predicted) => "~",
        Some(EstimateKind::Extrapolated) => "?",
        Some(EstimateKind::Prior) => "≈",
        _ => "",
    };
    let floor = candidate.times_floor.map(|times| format!("{times:.1}× floor"));
    let sides = candidate.host_us.zip(candidate.device_us);
    let sides = sides.map(|(host, device)| format!("host {host:.1}, device {device:.1}"));
    let more: Vec<String> = floor.into_iter().chain(sides).collect();
    let more = if more.is_empty() { String::new() } else { format!(" ({})", more.join("; ")) };
    format!("{mark}{time_us:.1} µs{more}")
}

/// Why a kernel is out, or at its rank.
fn why(candidate: &CandidateReport, ranked_by: RankedBy) -> String {
    if !candidate.accepted {
        return candidate
            .reasons
            .iter()
            .map(|r| format!("[{}] {}", r.reason.code(), r.message))
            .collect::<Vec<_>>()
            .join("; ");
    }
    let Some(terms) = &candidate.terms else {
        return String::new();
    };
    let by_score = ranked_by == RankedBy::Score;
    // Where times decide, what overrules them: the policy, and what is not compiled.
    let parts = [
        ("priority", terms.priority, by_score),
        ("policy", terms.policy, true),
        ("speed", terms.perf, by_score),
        ("jit", terms.jit, true),
        ("transform", terms.transform, by_score),
    ];
    let counts = parts.iter().filter(|(_, value, counts)| *counts && *value != 0.0);
    let mut text: Vec<String> = counts.map(|(name, value, _)| format!("{name} {value:+.0}")).collect();
    if by_score && text.is_empty() && !candidate.reference {
        text.push("priority +0".into());
    }
    text.extend((candidate.reference && text.is_empty()).then(|| "last resort".to_owned()));
    text.extend((!by_score && !candidate.time_trusted && !candidate.reference).then(|| "no trusted time".to_owned()));
    let drifted = |live_us: f64| format!("takes {live_us:.1} µs here: measure it again");
    text.extend(candidate.live_us.map(drifted));
    text.extend(candidate.tied_with.as_ref().map(|fastest| format!("ties with {fastest}")));
    text.extend((!candidate.transforms.is_empty()).then(|| format!("needs {}", candidate.transforms.join(" + "))));
    let workspace = candidate.workspace_bytes.filter(|&bytes| bytes > 0);
    text.extend(workspace.map(|bytes| format!("workspace {}B", scaled(bytes as f64))));
    text.extend(candidate.moved_by.clone());
    text.join(", ")
}

/// A call in a few words: `attention.gqa.prefill 1×32×512×128 bfloat16`.
pub fn label(call: &CallSpec) -> String {
    let schema = Catalog::get().find(&call.op).ok().map(|t| Catalog::get().op(t.ops[0]).schema());
    let first = schema.and_then(|s| s.inputs.iter().find_map(|i| call.tensors.get(i.name)));
    let Some(tensor) = first.or_else(|| call.tensors.values().next()) else { return call.op.clone() };
    let sizes = |t: &TensorSpec| t.shape.iter().map(ToString::to_string).collect::<Vec<_>>().join("×");
    // Of the others, the first with a size of its own: a weight's width, the length of a context.
    let names = schema.iter().flat_map(|s| s.inputs.iter().map(|i| i.name));
    let mut others = names.filter_map(|name| Some((name, call.tensors.get(name)?)));
    let other = others.find(|(_, t)| t.shape.iter().any(|size| !tensor.shape.contains(size)));
    let other = other.map_or_else(String::new, |(name, t)| format!(", {name} {}", sizes(t)));
    format!("{} {} {}{other}", call.op, sizes(tensor), tensor.dtype.name())
}
