//! `layerzero report`: what was measured, as a page.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use layerzero::perf::device_id;
use lz_model::{CallSpec, Context, DType, DeviceIx, DeviceSpec};
use lz_perfdb::{Filter, Key, Mode, Options, Outcome, PerfDb, Record, State};
use lz_report::{Candidate, Contest, Input, Machine, Regret};

use super::lock::unwritten;
use crate::args::EngineArgs;
use crate::error::CliError;
use crate::exit::Exit;
use crate::printer::Printer;
use crate::session::Session;
use crate::surroundings::Surroundings;

/// Write what was measured as one HTML page: speed over plain torch, who wins where, regret, every kernel's time
///
/// The page needs no network. With --json its content is printed instead, and the page is only written where -o says so.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  layerzero report\n  layerzero regret --model gpt2 --json > regret.json\n  \
                        layerzero report --regret regret.json -o gpt2.html --png figures")]
pub struct Args {
    /// The performance database, instead of the configuration's
    #[arg(long, value_name = "FILE")]
    db: Option<PathBuf>,
    /// The page; report.html when not given
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// What 'layerzero regret --json' printed; by default regret is that of the measured calls themselves
    #[arg(long, value_name = "FILE")]
    regret: Option<PathBuf>,
    /// Also write the figures as PNG files into this folder; needs matplotlib
    #[arg(long, value_name = "FOLDER")]
    png: Option<PathBuf>,
    /// The page's title
    #[arg(long, value_name = "TEXT")]
    title: Option<String>,
}

/// Makes the page.
pub fn run(args: &Args, at: &Surroundings, printer: &mut Printer<'_>) -> Result<Exit, CliError> {
    if let Some(folder) = &args.png {
        let what = format!("figures are drawn by Python, so '--png {}' cannot be done here", folder.display());
        return Err(CliError::argument(what, "run 'python -m layerzero report --png …', or leave --png out"));
    }
    let session = Session::asking(&EngineArgs::default(), at)?;
    let path = database(args, &session, at)?;
    let records = read(&path)?;
    let mut input = gather(&session, records);
    input.source = Some(path.display().to_string());
    input.regret = match &args.regret {
        Some(file) => Some(read_regret(&at.directory.join(file))?),
        None => Regret::from_contests(&input.contests),
    };
    let names: Vec<&str> = input.machines.iter().map(|m| m.name.as_str()).collect();
    let title = if names.is_empty() { String::new() } else { format!("Kernels on {}", names.join(", ")) };
    input.title = args.title.clone().unwrap_or(title);
    session.print_engine_warnings(printer);
    let json = printer.wants_json();
    let output = args.output.clone().or_else(|| (!json).then(|| PathBuf::from("report.html")));
    if let Some(output) = &output {
        write(&at.directory.join(output), &lz_report::page(&input))?;
    }
    match output {
        Some(output) if !json => {
            let ops: BTreeSet<&str> = input.contests.iter().map(|c| c.op.as_str()).collect();
            let (calls, ops) = (input.contests.len(), ops.len());
            printer.line(format!("wrote {}: calls {calls}, operations {ops}", output.display()))?;
        }
        _ => printer.json(&input.document())?,
    }
    Ok(Exit::Ok)
}

fn database(args: &Args, session: &Session, at: &Surroundings) -> Result<PathBuf, CliError> {
    let unknown = || {
        let what = "it is not known where the performance database is: there is no home directory";
        CliError::argument(what, "say where it is with --db, or set perfdb.path")
    };
    let path = match &args.db {
        Some(path) => at.directory.join(path),
        None => at.directory.join(session.engine.config().perfdb_path().ok_or_else(unknown)?),
    };
    if path.exists() {
        return Ok(path);
    }
    let what = format!("there is no performance database at '{}'", path.display());
    Err(CliError::argument(what, "measure with 'layerzero tune', or name another one with --db"))
}

fn read(path: &Path) -> Result<Vec<Record>, CliError> {
    let db = PerfDb::open(path, Options { read_only: true, ..Options::default() });
    let unreadable = |why: String| CliError::argument(why, "see what is wrong with it by 'layerzero perfdb verify'");
    if let State::Memory { why } = db.state() {
        return Err(unreadable(why));
    }
    db.records(&Filter::all()).map_err(|error| unreadable(error.to_string()))
}

fn read_regret(path: &Path) -> Result<Regret, CliError> {
    let text = fs::read_to_string(path).map_err(|source| CliError::Unreadable { path: path.to_owned(), source })?;
    let mut regret: Regret = serde_json::from_str(&text).map_err(|error| {
        let what = format!("'{}' is not what 'layerzero regret --json' prints: {error}", path.display());
        CliError::argument(what, "write it with 'layerzero regret … --json > FILE'")
    })?;
    if regret.about.is_empty() {
        regret.about = "Every kernel of these calls was measured afterwards, to see what would have been best.".into();
    }
    Ok(regret)
}

fn write(path: &Path, page: &str) -> Result<(), CliError> {
    layerzero::write_file(path, |to| to.write_all(page.as_bytes())).map_err(|error| unwritten(path, &error))
}

/// Measurements as contests: those of one call, on one device, in one mode, with so many threads, side by side.
fn gather(session: &Session, records: Vec<Record>) -> Input {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let mut notes = left_out(&records);
    let valid: Vec<Record> = records.into_iter().filter(Record::is_valid).collect();
    session.engine.learn_from(&valid);
    let devices = session.engine.devices();
    let mut groups: BTreeMap<(&str, &str, Mode, u32), Vec<&Record>> = BTreeMap::new();
    for record in &valid {
        let Key { device_id, call, mode, threads, .. } = &record.key;
        groups.entry((device_id, call, *mode, *threads)).or_default().push(record);
    }
    let (mut contests, mut apart, mut elsewhere) = (Vec::new(), 0, 0);
    let mut rates: BTreeMap<&str, Rates> = BTreeMap::new();
    for ((device, call, mode, threads), records) in &groups {
        // A call that cannot be read is in `left_out`.
        let Ok(call) = call.parse::<CallSpec>() else { continue };
        apart += usize::from(records.iter().any(|r| r.contest != records[0].contest));
        let asked = ask(session, &devices, &call, device, (*mode, *threads));
        let chosen = asked.as_ref().and_then(|asked| asked.choice_among(records));
        elsewhere += usize::from(chosen.is_none());
        let work = asked.as_ref().filter(|a| a.floor_us.is_none()).map(|a| a.work);
        if let Some(work) = work {
            let times = records.iter().filter_map(|r| Some(r.outcome.timing()?.median_us));
            rates.entry(device).or_default().see(work, times.fold(f64::INFINITY, f64::min));
        }
        let mode = if *threads > 0 { format!("{mode}, {threads} threads") } else { mode.to_string() };
        let contest = Contest::new(call, *device, mode).floor(asked.as_ref().and_then(|a| a.floor_us));
        let contest = records.iter().map(|r| candidate(r)).fold(contest, Contest::candidate);
        contests.push((contest.settled(chosen), *device, work));
    }
    let by_rates = |(contest, device, work): (Contest, &str, Option<Work>)| match work {
        Some(work) => contest.floor(rates.get(device).and_then(|rates| rates.floor_us(work))),
        None => contest,
    };
    let contests = contests.into_iter().map(by_rates).collect();
    notes.extend(rates.values().filter_map(Rates::note));
    if apart > 0 {
        notes.push(format!("Of {apart} calls not all kernels were measured side by side: they compare less well."));
    }
    if elsewhere > 0 {
        let why = "their kernels, or the device, are not here";
        notes.push(format!("Of {elsewhere} calls the fastest kernel is shown as the chosen one: {why}."));
    }
    let machines = machines(&valid, &devices);
    Input { machines, contests, notes, generated_at: now.as_millis() as i64, ..Input::default() }
}

/// What is not shown, and why.
fn left_out(records: &[Record]) -> Vec<String> {
    let mut reasons: BTreeMap<&str, usize> = BTreeMap::new();
    for record in records {
        let unreadable = || record.key.call.parse::<CallSpec>().is_err().then_some("their call cannot be read");
        if let Some(why) = record.invalid.as_deref().or_else(unreadable) {
            *reasons.entry(why).or_default() += 1;
        }
    }
    let told = |(why, n): (&str, usize)| format!("Left out, {n} measurement{}: {why}", if n == 1 { "" } else { "s" });
    reasons.into_iter().map(told).collect()
}

/// What the engine here says of a call.
struct Asked {
    chosen: Option<String>,
    kernels: BTreeSet<String>,
    floor_us: Option<f64>,
    work: Work,
}

/// What a call has to do.
#[derive(Clone, Copy)]
struct Work {
    /// Of its largest tensor.
    dtype: Option<DType>,
    flops: f64,
    bytes: f64,
}

/// The best that was seen of a device whose peaks are not known: no call is held to more than another has reached.
#[derive(Default)]
struct Rates {
    bytes_per_us: f64,
    flops_per_us: BTreeMap<Option<DType>, f64>,
}

impl Rates {
    fn see(&mut self, work: Work, us: f64) {
        if us.is_finite() && us > 0.0 {
            self.bytes_per_us = self.bytes_per_us.max(work.bytes / us);
            let flops = self.flops_per_us.entry(work.dtype).or_default();
            *flops = flops.max(work.flops / us);
        }
    }

    fn floor_us(&self, work: Work) -> Option<f64> {
        let flops_per_us = self.flops_per_us.get(&work.dtype).copied().unwrap_or_default();
        let times = [(work.bytes, self.bytes_per_us), (work.flops, flops_per_us)];
        let times = times.into_iter().filter(|(work, rate)| *work > 0.0 && *rate > 0.0).map(|(work, rate)| work / rate);
        times.reduce(f64::max)
    }

    fn note(&self) -> Option<String> {
        let name = |dtype: &Option<DType>| dtype.map_or("others", DType::name);
        let flops = self.flops_per_us.iter().filter(|(_, rate)| **rate > 0.0);
        let flops: Vec<_> = flops.map(|(dtype, rate)| format!("{:.1} GFLOP/s ({})", rate / 1e3, name(dtype))).collect();
        let best = format!("{:.1} GB/s, {}", self.bytes_per_us / 1e3, flops.join(", "));
        (self.bytes_per_us > 0.0).then(|| format!("Floors go by the best rates seen in these calls: {best}."))
    }
}

impl Asked {
    /// What is chosen, if every kernel that was right is known here: otherwise another engine would choose.
    fn choice_among(&self, records: &[&Record]) -> Option<&str> {
        let mut right = records.iter().filter(|r| r.outcome.timing().is_some()).map(|r| &r.key.kernel_id);
        let chosen = self.chosen.as_ref().filter(|chosen| right.clone().any(|kernel| kernel == *chosen))?;
        right.all(|kernel| self.kernels.contains(kernel)).then_some(chosen)
    }
}

fn ask(
    session: &Session,
    devices: &[DeviceSpec],
    call: &CallSpec,
    device: &str,
    (mode, threads): (Mode, u32),
) -> Option<Asked> {
    let place = devices.iter().position(|d| device_id(d) == device)?;
    let threads = u16::try_from(threads).ok()?;
    let context = Context { capturing: mode == Mode::Graph, threads, ..Context::default() };
    let named = call.named(DeviceIx(u16::try_from(place).ok()?), context);
    let report = session.engine.report(&call.op, &named).ok()?;
    let kernels = report.candidates.into_iter().map(|c| c.kernel_id).collect();
    let largest = call.tensors.values().max_by_key(|tensor| tensor.shape.iter().product::<i64>());
    let work = Work { dtype: largest.map(|tensor| tensor.dtype), flops: report.flops, bytes: report.bytes };
    Some(Asked { chosen: report.chosen, kernels, floor_us: report.floor_us, work })
}

fn candidate(record: &Record) -> Candidate {
    let kernel = &record.key.kernel_id;
    match &record.outcome {
        Outcome::Ok(t) => Candidate::ok(kernel, t.median_us, t.p95_us, t.spread_us, t.samples).warmup(t.warmup_ms),
        Outcome::Wrong { error } => Candidate::wrong(kernel, error),
        Outcome::Failed { error } => Candidate::failed(kernel, error),
    }
    .baseline(record.baseline)
}

/// The devices that were measured on, those of this machine first, with all versions that were seen.
fn machines(records: &[Record], devices: &[DeviceSpec]) -> Vec<Machine> {
    let ids: Vec<String> = devices.iter().map(device_id).collect();
    let place = |id: &str| ids.iter().position(|known| known == id).unwrap_or(ids.len());
    let mut seen: BTreeMap<(usize, &str), BTreeMap<&str, BTreeSet<&str>>> = BTreeMap::new();
    for record in records {
        let (id, from) = (record.key.device_id.as_str(), &record.provenance);
        let versions = seen.entry((place(id), id)).or_default();
        let library = record.key.kernel_id.split('.').next().unwrap_or_default();
        for (name, version) in [
            ("layerzero", &from.layerzero_version),
            ("torch", &from.torch_version),
            ("cuda", &from.cuda_version),
            ("driver", &from.driver_version),
            (library, &from.backend_version),
        ] {
            if let Some(version) = version {
                versions.entry(name).or_default().insert(version);
            }
        }
    }
    let machine = |((place, id), versions): ((usize, &str), BTreeMap<&str, BTreeSet<&str>>)| {
        let all = |set: BTreeSet<&str>| set.into_iter().collect::<Vec<_>>().join(", ");
        let versions = versions.into_iter().map(|(name, set)| (name.to_owned(), all(set))).collect();
        // A device without a UUID is known by signature and name.
        let (signature, name) = id.split_once('/').unwrap_or(("", id));
        let known = devices.get(place);
        Machine {
            id: id.to_owned(),
            name: known.map_or_else(|| name.to_owned(), |device| device.name.clone()),
            signature: known.map_or_else(|| signature.to_owned(), DeviceSpec::signature),
            versions,
        }
    };
    seen.into_iter().map(machine).collect()
}
