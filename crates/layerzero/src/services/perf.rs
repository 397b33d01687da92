//! What was measured on this machine: kept in the performance database, put in force in the snapshot.
//!
//! The database is a cache. Whatever happens to it, selection goes on with what is known.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use lz_config::{Config, Origin};
use lz_model::{BindRules, CallSpec, Catalog, Context, DeviceIx, DeviceSpec, KernelDescriptor};
use lz_perfdb::{Filter, Mode, Options, Outcome, PerfDb, Provenance, Record, StoreError};
use lz_predict::{Model, Observation, Prior, Seen};
use lz_select::{NoPerfData, PerfSource, Restriction, Snapshot};
use parking_lot::Mutex;
use serde::Serialize;

use crate::core::{Core, Draft, State};
use crate::error::Error;

/// The performance database, and what of it is in force.
#[derive(Default)]
pub(crate) struct Perf {
    db: Mutex<Option<Arc<PerfDb>>>,
    /// How many measurements selection goes by.
    known: AtomicUsize,
    /// The unbiased state of an epoch.
    unbiased: Mutex<Option<(u64, Arc<State>)>>,
    /// Whether anything was to be learned yet: from then on another database takes effect at once.
    consulted: AtomicBool,
    /// What was measured elsewhere, of the devices there were when it was asked for.
    prior: Mutex<Option<(Vec<DeviceSpec>, Arc<Prior>)>>,
    /// Held while what is known is read and put in force, so that what was read for fewer devices is not put in force last.
    learning: Mutex<()>,
}

/// What is put in force together. `None` stands for what is in force already.
pub(crate) struct Learned {
    /// What was measured here.
    pub model: Option<Model>,
    /// What was measured elsewhere.
    pub prior: Option<Arc<dyn PerfSource>>,
}

/// How the performance database is doing.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct PerfHealth {
    /// Where it is; nothing when it is off.
    pub path: Option<String>,
    /// What state it is in, as a sentence.
    pub state: String,
    /// Whether what is measured now is kept.
    pub durable: bool,
    /// Measurements that selection goes by.
    pub known: usize,
    /// What was to be said about it, each thing once.
    pub notes: Vec<String>,
}

/// What a device is known by in the database: the same device always, another one never.
pub fn device_id(device: &DeviceSpec) -> String {
    device.uuid.clone().unwrap_or_else(|| format!("{}/{}", device.signature(), device.name))
}

pub(crate) fn context_of(mode: Mode) -> Context {
    Context { capturing: mode == Mode::Graph, ..Context::default() }
}

impl Perf {
    /// Selection without anything that was measured, decided or suffered before: who could serve a call at all. The
    /// operator's rules hold.
    pub fn unbiased(&self, core: &Core) -> Result<Arc<State>, Error> {
        let draft = impartial(core);
        let mut known = self.unbiased.lock();
        if let Some((_, state)) = known.as_ref().filter(|(epoch, _)| *epoch == draft.epoch) {
            return Ok(state.clone());
        }
        let state = Arc::new(draft.build()?);
        let before = known.replace((draft.epoch, state.clone()));
        // Released first: dropping a state may run code that asks for this one.
        drop(known);
        drop(before);
        Ok(state)
    }

    /// Opens the database the configuration names; none when it is off. Later calls give the one that is open, unless the
    /// configuration names another one now.
    pub fn open(&self, config: &Config) -> Option<Arc<PerfDb>> {
        let mut open = self.db.lock();
        let path = config.settings.perfdb.enabled.then(|| config.perfdb_path()).flatten();
        let Some(path) = path else {
            *open = None;
            return None;
        };
        if let Some(db) = open.as_ref().filter(|db| db.path() == Some(&path)) {
            return Some(db.clone());
        }
        let ttl = config.settings.perfdb.ttl_days;
        let ttl = (ttl > 0).then(|| std::time::Duration::from_secs(u64::from(ttl) * 86_400));
        // In the user's cache, under our name, where nobody asked for it: whatever is there is ours.
        let own_place = config.origin("perfdb.path") == Some(&Origin::Default);
        let db = Arc::new(PerfDb::open(&path, Options { ttl, own_place, ..Options::default() }));
        *open = Some(db.clone());
        Some(db)
    }

    /// What is to be said about the database that is open: at its path is a file that is not one of ours.
    pub fn warnings(&self) -> Vec<String> {
        let open = self.db.lock();
        let Some((db, path)) = open.as_ref().and_then(|db| Some((db, db.path()?))) else { return Vec::new() };
        let state = db.state();
        let in_the_way = matches!(state, lz_perfdb::State::Memory { .. }) && path.symlink_metadata().is_ok();
        in_the_way.then(|| state.to_string()).into_iter().collect()
    }

    /// Whether what a database knows is in force, or would be if there were one.
    pub fn is_consulted(&self) -> bool {
        self.consulted.load(Ordering::Relaxed)
    }

    /// How many measurements selection goes by.
    pub fn known(&self) -> usize {
        self.known.load(Ordering::Relaxed)
    }

    /// Puts what the database knows in force. `config` is asked when it is this thread's turn: a thread that waited must not
    /// put in force last what another configuration named.
    pub fn learn(&self, core: &Core, config: impl Fn() -> Arc<Config>) -> usize {
        self.consulted.store(true, Ordering::Relaxed);
        let _one_at_a_time = self.learning.lock();
        let config = config();
        let model = self.knowledge(core, &config, &core.devices());
        self.put_in_force(core, Learned { model, prior: Some(self.prior(&config, &core.devices())) });
        self.known()
    }

    /// As [`Perf::learn`], if there is a database: one that was never written is not made by looking.
    pub fn learn_if_there(&self, core: &Core, config: impl Fn() -> Arc<Config>) -> usize {
        self.consulted.store(true, Ordering::Relaxed);
        let _one_at_a_time = self.learning.lock();
        let config = config();
        let model = if self.is_there(&config) {
            self.knowledge(core, &config, &core.devices())
        } else {
            *self.db.lock() = None;
            Some(Model::default())
        };
        self.put_in_force(core, Learned { model, prior: Some(self.prior(&config, &core.devices())) });
        self.known()
    }

    /// Puts what these records say in force, instead of what was there.
    pub fn learn_from(&self, core: &Core, records: &[Record]) -> usize {
        let _one_at_a_time = self.learning.lock();
        self.put_in_force(core, Learned { model: Some(model_of(records, &core.devices())), prior: None });
        self.known()
    }

    /// Changes what selection depends on by what the database knows of devices that are new, and by what was measured on such
    /// devices elsewhere: all at once.
    pub fn learning_of(
        &self,
        core: &Core,
        config: impl Fn() -> Arc<Config>,
        devices: &[DeviceSpec],
        change: impl FnOnce(Learned) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let _one_at_a_time = self.learning.lock();
        let config = config();
        let consulted = self.is_consulted() && self.is_there(&config);
        let model = consulted.then(|| self.knowledge(core, &config, devices)).flatten();
        let known = model.as_ref().map(Model::len).filter(|known| *known > 0);
        let prior = self.is_consulted().then(|| self.prior(&config, devices));
        change(Learned { model: model.filter(|model| !model.is_empty()), prior })?;
        if let Some(known) = known {
            self.known.store(known, Ordering::Relaxed);
        }
        Ok(())
    }

    /// What was measured elsewhere of these devices, if that is wanted.
    fn prior(&self, config: &Config, devices: &[DeviceSpec]) -> Arc<dyn PerfSource> {
        if !config.settings.perfdb.priors {
            return Arc::new(NoPerfData);
        }
        let mut known = self.prior.lock();
        if let Some((_, prior)) = known.as_ref().filter(|(of, _)| of == devices) {
            return prior.clone();
        }
        let prior = Arc::new(Prior::shipped(devices));
        *known = Some((devices.to_vec(), prior.clone()));
        prior
    }

    /// Whether the configuration names a database that exists, be it in memory alone.
    pub fn is_there(&self, config: &Config) -> bool {
        let path = config.settings.perfdb.enabled.then(|| config.perfdb_path()).flatten();
        let is_open = |path: &std::path::Path| self.db.lock().as_ref().is_some_and(|db| db.path() == Some(path));
        path.is_some_and(|path| path.exists() || is_open(&path))
    }

    /// What the database knows of these devices; `None` where it cannot be read, or not all of it.
    fn knowledge(&self, core: &Core, config: &Config, devices: &[DeviceSpec]) -> Option<Model> {
        let Some(db) = self.open(config) else { return Some(Model::default()) };
        let provenances = core.with_snapshot(|snapshot| provenances(snapshot, devices));
        let stale = |record: &Record| {
            let current = provenances.get(&(record.key.device_id.clone(), record.key.kernel_id.clone()))?;
            record.is_valid().then(|| record.provenance.stale_against(current)).flatten()
        };
        let (mut db, mut marked, mut least) = (db.clone(), db.invalidate(stale), 0);
        if let Err(StoreError::Forked { .. }) = marked {
            // What the parent wrote last cannot be seen from here.
            least = self.known();
            db = self.reopened(config)?;
            marked = db.invalidate(stale);
        }
        if let Err(error) = marked {
            tracing::debug!(target: "layerzero", "rows that are out of date were not marked: {error}");
        }
        match db.records(&Filter::all().valid()) {
            // A row that could not be marked must not count either.
            Ok(records) => {
                let records: Vec<Record> = records.into_iter().filter(|record| stale(record).is_none()).collect();
                Some(model_of(&records, devices)).filter(|model| model.len() >= least)
            }
            Err(error) => {
                tracing::warn!(target: "layerzero", "the performance database cannot be read: {error}");
                None
            }
        }
    }

    /// The database, opened anew: what is open belongs to the process this one was forked from.
    fn reopened(&self, config: &Config) -> Option<Arc<PerfDb>> {
        *self.db.lock() = None;
        self.open(config)
    }

    /// Puts what was learned in force, all of it at once, if it is anything new.
    fn put_in_force(&self, core: &Core, learned: Learned) {
        let known = learned.model.as_ref().map_or_else(|| self.known(), Model::len);
        let model = learned.model.filter(|model| !model.is_empty() || self.known() > 0);
        let prior = learned.prior.filter(|prior| {
            let is_in_force = |now: &Arc<dyn PerfSource>| Arc::ptr_eq(now, prior) || now.is_empty() && prior.is_empty();
            !core.with_snapshot(|snapshot| is_in_force(&snapshot.spec().prior))
        });
        if model.is_some() || prior.is_some() {
            let put = core.update(|spec| {
                match model {
                    Some(model) if model.is_empty() => spec.perf = Arc::new(NoPerfData),
                    Some(model) => spec.perf = Arc::new(model),
                    None => {}
                }
                if let Some(prior) = prior {
                    spec.prior = prior;
                }
            });
            if let Err(error) = put {
                tracing::warn!(target: "layerzero", "what was measured cannot be put in force: {error}");
            }
        }
        self.known.store(known, Ordering::Relaxed);
    }

    /// Keeps records. That they cannot be kept fails nobody; gives why.
    pub fn keep(&self, config: &Config, records: Vec<Record>) -> Result<(), StoreError> {
        let Some(db) = self.open(config) else { return Ok(()) };
        match db.put(records.clone()).wait() {
            Err(StoreError::Forked { .. }) => self.reopened(config).map_or(Ok(()), |db| db.put(records).wait()),
            result => result,
        }
    }

    /// How many measurements the database holds, whether or not selection goes by them. One that was never written is not
    /// made by looking.
    pub fn kept(&self, config: &Config) -> usize {
        let db = self.is_there(config).then(|| self.open(config)).flatten();
        db.and_then(|db| db.records(&Filter::all()).ok()).map_or(0, |records| records.len())
    }

    /// How the performance database is doing.
    pub fn health(&self) -> PerfHealth {
        let open = self.db.lock().clone();
        let known = self.known();
        match open {
            Some(db) => PerfHealth {
                path: db.path().map(|path| path.display().to_string()),
                state: db.state().to_string(),
                durable: db.state().is_durable(),
                known,
                notes: db.notes(),
            },
            None => PerfHealth { state: "not open".into(), known, ..PerfHealth::default() },
        }
    }
}

/// What selection is made of, without anything that was measured, decided or suffered before.
pub(crate) fn impartial(core: &Core) -> Draft {
    let mut draft = core.draft.lock().clone();
    (draft.spec.perf, draft.spec.prior) = (Arc::new(NoPerfData), Arc::new(NoPerfData));
    draft.spec.pins = Arc::default();
    draft.spec.restriction = Restriction::default();
    // Proof is what measuring gives.
    draft.spec.settings.graph_strict = false;
    (draft.spec.rollouts, draft.spec.warm) = (Vec::new(), None);
    draft
}

fn model_of(records: &[Record], devices: &[DeviceSpec]) -> Model {
    let ids: Vec<String> = devices.iter().map(device_id).collect();
    // A record means the same whatever the settings are.
    let rules = BindRules::default();
    let observation = |record: &Record| {
        let device = DeviceIx(u16::try_from(ids.iter().position(|id| *id == record.key.device_id)?).ok()?);
        observed(record, record.provenance.kernel_version.clone()?, device, devices, &rules)
    };
    Model::new(records.iter().filter_map(observation), devices)
}

/// A record as an observation of a version of its kernel on a device; nothing where its call is not one that is known here.
pub(crate) fn observed(
    record: &Record,
    version: String,
    device: DeviceIx,
    devices: &[DeviceSpec],
    rules: &BindRules,
) -> Option<Observation> {
    let call: CallSpec = record.key.call.parse().ok()?;
    // More threads than can be said are no number a call can have.
    let threads = u16::try_from(record.key.threads).ok()?;
    let named = call.named(device, Context { threads, ..context_of(record.key.mode) });
    let resolved = Catalog::get().resolve(&call.op, &named, rules, |ix| devices.get(usize::from(ix.0)));
    Some(Observation {
        query: resolved.ok()?.1.query,
        kernel: record.key.kernel_id.clone(),
        version,
        baseline: record.baseline,
        seen: seen(&record.outcome),
    })
}

fn seen(outcome: &Outcome) -> Seen {
    match outcome {
        Outcome::Ok(t) => {
            Seen::Took { median_us: t.median_us, spread_us: t.spread_us, samples: t.samples, parts: t.parts }
        }
        Outcome::Wrong { error } => Seen::Wrong(error.clone()),
        Outcome::Failed { error } => Seen::Failed(error.clone()),
    }
}

/// What a kernel's measurements depend on, as it is now.
pub(crate) fn provenance(snapshot: &Snapshot, kernel: &KernelDescriptor, device: &DeviceSpec) -> Provenance {
    let spec = snapshot.spec();
    let backend = spec.backends.get(&kernel.backend).map(|b| &b.descriptor);
    let version = |name: &str| spec.versions.get(name).or_else(|| device.versions.get(name)).cloned();
    Provenance {
        kernel_version: Some(kernel.version.clone()),
        backend_version: backend.map(|b| b.version.clone()),
        layerzero_version: Some(env!("CARGO_PKG_VERSION").to_owned()),
        capabilities_hash: backend.map(|b| b.capabilities_hash.clone()).filter(|hash| !hash.is_empty()),
        torch_version: version("torch"),
        cuda_version: device.versions.get("cuda").cloned(),
        driver_version: device.versions.get("driver").cloned(),
        device_uuid: device.uuid.clone(),
    }
}

/// By device and kernel id. Of several versions of a kernel the newest counts: the others' rows are kept as they are.
pub(crate) fn provenances(snapshot: &Snapshot, devices: &[DeviceSpec]) -> BTreeMap<(String, String), Provenance> {
    let mut all = BTreeMap::new();
    for device in devices {
        for (_, kernel) in snapshot.kernels() {
            let several = snapshot.kernels().filter(|(_, k)| k.id == kernel.id).count() > 1;
            let mut current = provenance(snapshot, kernel, device);
            if several {
                (current.kernel_version, current.backend_version) = (None, None);
            }
            all.entry((device_id(device), kernel.id.clone())).or_insert(current);
        }
    }
    all
}
