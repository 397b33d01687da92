//! Documents of decisions, and the pins they come to on these devices, with these backends.

use std::collections::{BTreeMap, HashMap};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use lz_model::{BindRules, CallSpec, Catalog, Context, DeviceIx, DeviceSpec, Query};
use lz_select::{About, Pin, Pins, SnapshotSpec};

use super::lockfile::{Locked, Lockfile};
use super::mismatch::{MismatchKind, PinKind};
use super::table::{BucketPlan, DispatchTable, PlannedOp, Ranges};

/// Who put a document in force. What stands first decides first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Slot {
    CodeLockfile,
    CodeTable,
    ConfiguredLockfile,
    ConfiguredTable,
}

impl Slot {
    fn is_lockfile(self) -> bool {
        matches!(self, Slot::CodeLockfile | Slot::ConfiguredLockfile)
    }

    fn is_code(self) -> bool {
        matches!(self, Slot::CodeLockfile | Slot::CodeTable)
    }
}

/// A document of decisions.
#[derive(Clone, Debug)]
pub(crate) enum Document {
    Lockfile(Lockfile),
    Table(DispatchTable),
}

/// A document, and what it is called.
#[derive(Clone, Debug)]
pub(crate) struct Source {
    pub origin: Arc<str>,
    pub kind: PinKind,
    pub document: Document,
}

/// One decision of a document.
pub(crate) struct Entry<'a> {
    /// Its place in the document.
    pub index: usize,
    /// The same, for people.
    pub place: String,
    pub op: &'a str,
    pub call: Option<&'a CallSpec>,
    pub device: &'a str,
    pub graph: bool,
    pub kernel: &'a str,
    pub version: Option<&'a str>,
    /// Of a table, the bucket it stands under.
    bucket: Option<&'a BTreeMap<String, i64>>,
}

fn of_lockfile((index, locked): (usize, &Locked)) -> Entry<'_> {
    Entry {
        index,
        place: format!("call {}", index + 1),
        op: &locked.call.op,
        call: Some(&locked.call),
        device: &locked.device,
        graph: locked.graph,
        kernel: &locked.kernel,
        version: locked.version.as_deref(),
        bucket: None,
    }
}

fn of_table<'a>(
    index: usize,
    device: &'a str,
    (place, plan, planned): (String, &'a BucketPlan, &'a PlannedOp),
) -> Entry<'a> {
    Entry {
        index,
        place,
        op: &planned.op,
        call: planned.call.as_ref(),
        device,
        graph: planned.graph,
        kernel: &planned.kernel_id,
        version: planned.version.as_deref(),
        bucket: Some(&plan.bucket),
    }
}

/// What an entry comes to.
pub(crate) struct Resolved {
    /// The call it was decided for, on the first device it is for, if it says one.
    pub query: Option<Query>,
    pub pins: Vec<Pin>,
}

impl Source {
    pub fn lockfile(lockfile: Lockfile, name: &str) -> Arc<Source> {
        Source::new(PinKind::Lockfile, name, Document::Lockfile(lockfile))
    }

    pub fn table(table: DispatchTable, name: &str) -> Arc<Source> {
        Source::new(PinKind::Table, name, Document::Table(table))
    }

    pub fn plan(table: DispatchTable, name: &str) -> Arc<Source> {
        Source::new(PinKind::Plan, name, Document::Table(table))
    }

    fn new(kind: PinKind, name: &str, document: Document) -> Arc<Source> {
        Arc::new(Source { origin: format!("{kind} {name}").into(), kind, document })
    }

    /// Its decisions. Those for graph capture alone come first: the others are for capture too.
    pub fn entries(&self) -> Vec<Entry<'_>> {
        let mut entries: Vec<Entry<'_>> = match &self.document {
            Document::Lockfile(lockfile) => lockfile.entries.iter().enumerate().map(of_lockfile).collect(),
            Document::Table(table) => {
                let planned = table.entries().enumerate();
                planned.map(|(index, entry)| of_table(index, &table.hardware_signature, entry)).collect()
            }
        };
        entries.sort_by_key(|entry| !entry.graph);
        entries
    }

    /// Whether it has decided something for a device that is none of these.
    pub fn is_for_others(&self, devices: &[DeviceSpec]) -> bool {
        let here: Vec<String> = devices.iter().map(DeviceSpec::signature).collect();
        match &self.document {
            Document::Lockfile(lockfile) => lockfile.entries.iter().any(|entry| !here.contains(&entry.device)),
            Document::Table(table) => !table.plans.is_empty() && !here.contains(&table.hardware_signature),
        }
    }

    /// Why it is out as a whole. Of a lockfile each entry is judged by itself.
    pub fn refusal(&self, spec: &SnapshotSpec) -> Option<MismatchKind> {
        let Document::Table(table) = &self.document else { return None };
        let signature = &table.hardware_signature;
        if devices_of(spec, signature).next().is_none() {
            return Some(other_device(spec, signature));
        }
        table.capabilities.iter().find_map(|(backend, hash)| capabilities_changed(spec, backend, hash))
    }

    /// What each of its entries comes to, in their order, or why it comes to nothing. What depends on the snapshot
    /// (whether the kernel is there, and can serve) is not looked at.
    pub fn resolve(&self, spec: &SnapshotSpec, entries: &[Entry<'_>]) -> Vec<Result<Resolved, MismatchKind>> {
        let backends: HashMap<&str, &str> =
            spec.kernels.iter().map(|kernel| (kernel.id.as_str(), kernel.backend.as_str())).collect();
        // What is written down means the same whatever the settings are.
        let rules = BindRules::default();
        let mut resolved: Vec<_> = entries
            .iter()
            .map(|entry| {
                if let (Document::Lockfile(lockfile), Some(backend)) = (&self.document, backends.get(entry.kernel))
                    && let Some(hash) = lockfile.capabilities.get(*backend)
                    && let Some(changed) = capabilities_changed(spec, backend, hash)
                {
                    return Err(changed);
                }
                self.resolve_one(spec, entry, &rules)
            })
            .collect();
        set_aside_ambiguous(entries, &mut resolved);
        resolved
    }

    /// The pins it comes to; none when it is out as a whole.
    pub fn pins(&self, spec: &SnapshotSpec) -> Vec<Pin> {
        if self.refusal(spec).is_some() {
            return Vec::new();
        }
        self.resolve(spec, &self.entries()).into_iter().flatten().flat_map(|resolved| resolved.pins).collect()
    }

    fn resolve_one(&self, spec: &SnapshotSpec, entry: &Entry<'_>, rules: &BindRules) -> Result<Resolved, MismatchKind> {
        let Some(call) = entry.call else { return self.resolve_named(spec, entry) };
        let mut first = None;
        let mut pins = Vec::new();
        for device in devices_of(spec, entry.device) {
            // What is said for all calls is said for those under capture too.
            for capturing in [entry.graph, true].into_iter().take(if entry.graph { 1 } else { 2 }) {
                let query = self.bind(spec, call, device, capturing, rules)?;
                let (low, high) = self.ranges(entry, &query)?;
                first.get_or_insert(query);
                pins.push(self.pin(entry, About::Class(query.pinned_class()), (low, high)));
            }
        }
        let query = Some(first.ok_or_else(|| other_device(spec, entry.device))?);
        Ok(Resolved { query, pins })
    }

    fn pin(&self, entry: &Entry<'_>, about: About, (low, high): Ranges) -> Pin {
        let (kernel, version) = (entry.kernel.to_owned(), entry.version.map(str::to_owned));
        Pin { about, low, high, kernel, version, origin: self.origin.clone() }
    }

    /// An entry that says no call is for every call of its operation in its bucket.
    fn resolve_named(&self, spec: &SnapshotSpec, entry: &Entry<'_>) -> Result<Resolved, MismatchKind> {
        let invalid = |error: lz_model::CallError| MismatchKind::InvalidCall { error: error.to_string() };
        let target = Catalog::get().find(entry.op).map_err(invalid)?;
        let (Document::Table(table), Some(bucket)) = (&self.document, entry.bucket) else {
            return Ok(Resolved { query: None, pins: Vec::new() });
        };
        let of_device = |device: DeviceIx| {
            target.ops.iter().map(move |&op| {
                let about = About::Named { op, device, graph: entry.graph, fixes: target.fixes };
                self.pin(entry, about, table.shape_buckets.spans(Catalog::get().op(op), bucket))
            })
        };
        let pins: Vec<Pin> = devices_of(spec, entry.device).flat_map(of_device).collect();
        if pins.is_empty() { Err(other_device(spec, entry.device)) } else { Ok(Resolved { query: None, pins }) }
    }

    fn bind(
        &self,
        spec: &SnapshotSpec,
        call: &CallSpec,
        device: DeviceIx,
        capturing: bool,
        rules: &BindRules,
    ) -> Result<Query, MismatchKind> {
        let named = call.named(device, Context { capturing, ..Context::default() });
        let resolved = Catalog::get().resolve(&call.op, &named, rules, |ix| spec.devices.get(usize::from(ix.0)));
        let (_, bound) = resolved.map_err(|error| MismatchKind::InvalidCall { error: error.to_string() })?;
        Ok(bound.query)
    }

    /// The sizes an entry is about: its call's own, or those of its buckets.
    fn ranges(&self, entry: &Entry<'_>, query: &Query) -> Result<Ranges, MismatchKind> {
        let Document::Table(table) = &self.document else { return Ok((*query.dims(), *query.dims())) };
        let op = Catalog::get().op(query.op());
        let outside = |dim: &str, found| MismatchKind::OutsideBucket { dim: dim.to_owned(), found };
        let ranges = table.shape_buckets.ranges(op, query).map_err(|above| outside(above.dim, above.size))?;
        let label = table.shape_buckets.label(op, query);
        let mut said = entry.bucket.into_iter().flatten();
        if let Some((axis, _)) = said.find(|(axis, end)| label.get(*axis).is_some_and(|found| found != *end)) {
            let size = op.dim_index(axis).map_or(0, |dim| query.dim(dim));
            return Err(outside(axis, size));
        }
        Ok(ranges)
    }

    pub fn is_table(&self) -> bool {
        self.as_table().is_some()
    }

    pub fn as_table(&self) -> Option<&DispatchTable> {
        match &self.document {
            Document::Table(table) => Some(table),
            Document::Lockfile(_) => None,
        }
    }
}

/// The devices of a signature.
fn devices_of<'a>(spec: &'a SnapshotSpec, signature: &'a str) -> impl Iterator<Item = DeviceIx> + 'a {
    let of_signature = spec.devices.iter().enumerate().filter(move |(_, device)| device.signature() == signature);
    of_signature.map(|(i, _)| DeviceIx(i as u16))
}

fn other_device(spec: &SnapshotSpec, wanted: &str) -> MismatchKind {
    let mut here: Vec<String> = spec.devices.iter().map(DeviceSpec::signature).collect();
    here.dedup();
    let found = match here.is_empty() {
        true => "is no device".to_owned(),
        false => format!("is {}", here.join(", ")),
    };
    MismatchKind::OtherDevice { wanted: wanted.to_owned(), found }
}

/// A backend that has no document, or is not there, is judged by its kernels.
fn capabilities_changed(spec: &SnapshotSpec, backend: &str, hash: &str) -> Option<MismatchKind> {
    let now = &spec.backends.get(backend)?.descriptor.capabilities_hash;
    let short = |hash: &str| hash.chars().take(12).collect::<String>();
    (!now.is_empty() && now != hash).then(|| MismatchKind::CapabilitiesChanged {
        backend: backend.to_owned(),
        locked: short(hash),
        found: short(now),
    })
}

/// Of entries that are about the same calls and name different kernels none can be kept: which call is whose cannot be
/// told from a class.
fn set_aside_ambiguous(entries: &[Entry<'_>], resolved: &mut [Result<Resolved, MismatchKind>]) {
    let mut by_calls: HashMap<u64, Vec<usize>> = HashMap::new();
    for (i, pin) in resolved.iter().enumerate().filter_map(|(i, r)| Some((i, r.as_ref().ok()?.pins.first()?))) {
        if let About::Class(class) = &pin.about {
            by_calls.entry(class.fingerprint()).or_default().push(i);
        }
    }
    let mut ambiguous: Vec<(usize, usize)> = Vec::new();
    for alike in by_calls.values() {
        let mut boxes: HashMap<_, Vec<usize>> = HashMap::new();
        for &i in alike {
            let Some(pin) = resolved[i].as_ref().ok().and_then(|r| r.pins.first()) else { continue };
            boxes.entry((&pin.low, &pin.high, entries[i].graph)).or_default().push(i);
        }
        for of_box in boxes.values() {
            let class = |i: usize| resolved[i].as_ref().ok().and_then(|r| r.pins.first()).map(|pin| &pin.about);
            let kernel = |i: usize| (entries[i].kernel, entries[i].version);
            for &i in of_box {
                let other = of_box.iter().find(|&&j| class(j) == class(i) && kernel(j) != kernel(i));
                ambiguous.extend(other.map(|&j| (i, j)));
            }
        }
    }
    for (i, other) in ambiguous {
        resolved[i] = Err(MismatchKind::Ambiguous { other: entries[other].place.clone() });
    }
}

/// What pins depend on besides the documents.
#[derive(PartialEq)]
struct Depends {
    devices: Vec<DeviceSpec>,
    hashes: BTreeMap<String, String>,
    /// Of which kernel is of which backend, where that has a document.
    kernels: u64,
}

impl Depends {
    fn on(spec: &SnapshotSpec) -> Depends {
        let documented = spec.backends.iter().filter(|(_, backend)| !backend.descriptor.capabilities_hash.is_empty());
        let hashes: BTreeMap<String, String> =
            documented.map(|(name, backend)| (name.clone(), backend.descriptor.capabilities_hash.clone())).collect();
        let mut kernels = DefaultHasher::new();
        for kernel in spec.kernels.iter().filter(|kernel| hashes.contains_key(&kernel.backend)) {
            (&kernel.id, &kernel.backend).hash(&mut kernels);
        }
        Depends { devices: spec.devices.clone(), hashes, kernels: kernels.finish() }
    }
}

/// The most decisions that are held for captures.
const MOST_HELD: usize = 1024;

/// The documents in force, and decisions that are held.
#[derive(Clone, Default)]
pub(crate) struct Pinned {
    /// Those of plans, which are in force for the calls made inside of them: the innermost first.
    plans: Vec<Arc<Source>>,
    sources: BTreeMap<Slot, Arc<Source>>,
    /// Decisions that are held for captures of CUDA graphs, the oldest first.
    held: Vec<Pin>,
    /// What the pins of the snapshot were made of.
    made_of: Option<Arc<Depends>>,
    /// Whether the documents are others since.
    stale: bool,
}

impl Pinned {
    /// Puts a document in force, in the place of the one before.
    pub fn put(&mut self, slot: Slot, source: Arc<Source>) {
        self.sources.insert(slot, source);
        self.stale = true;
    }

    /// Puts the decisions of plans in force above all others, the first most.
    pub fn put_plans(&mut self, plans: Vec<Arc<Source>>) {
        self.stale |= !plans.is_empty() || !self.plans.is_empty();
        self.plans = plans;
    }

    /// Holds a decision, in the place of the one for the same call. Of too many the oldest is let go.
    pub fn hold(&mut self, pin: Pin) {
        self.held.retain(|held| (&held.about, &held.low, &held.high) != (&pin.about, &pin.low, &pin.high));
        if self.held.len() >= MOST_HELD {
            self.held.remove(0);
        }
        self.held.push(pin);
        self.stale = true;
    }

    /// Lets go of all decisions that are held.
    pub fn release(&mut self) {
        self.stale |= !self.held.is_empty();
        self.held.clear();
    }

    /// Puts the documents of the configuration in force.
    pub fn configure(&mut self, sources: Vec<(Slot, Arc<Source>)>) {
        let before = self.sources.len();
        self.sources.retain(|slot, _| slot.is_code());
        self.stale |= before != self.sources.len() || !sources.is_empty();
        self.sources.extend(sources);
    }

    /// Takes back what code put in force.
    pub fn take_back(&mut self) {
        let before = self.sources.len();
        self.sources.retain(|slot, _| !slot.is_code());
        self.stale |= before != self.sources.len();
        self.release();
    }

    /// Leaves lockfiles out, and tables unless they are to be kept.
    pub fn leave_out(&mut self, tables: bool) {
        if tables {
            self.put_plans(Vec::new());
            self.release();
        }
        let before = self.sources.len();
        self.sources.retain(|slot, _| !tables && !slot.is_lockfile());
        self.stale |= before != self.sources.len();
    }

    /// The documents, the highest first.
    pub fn sources(&self) -> impl Iterator<Item = &Arc<Source>> {
        self.plans.iter().chain(self.sources.values())
    }

    /// Makes the pins of a snapshot anew, if what they are made of has changed. Pins that do not come from documents are
    /// left alone as long as there are none.
    pub fn refresh(&mut self, spec: &mut SnapshotSpec) {
        if !self.stale && self.held.is_empty() && self.sources().next().is_none() {
            return;
        }
        let now = Depends::on(spec);
        if !self.stale && self.made_of.as_deref() == Some(&now) {
            return;
        }
        spec.pins = Arc::new(self.pins(spec));
        (self.made_of, self.stale) = (Some(Arc::new(now)), false);
    }

    fn pins(&self, spec: &SnapshotSpec) -> Pins {
        let of_plans = self.plans.iter().flat_map(|source| source.pins(spec));
        let of_sources = self.sources.values().flat_map(|source| source.pins(spec));
        of_plans.chain(self.held.iter().cloned()).chain(of_sources).collect()
    }
}
