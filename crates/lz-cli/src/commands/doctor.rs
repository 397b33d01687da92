//! `layerzero doctor`: what this machine is, what can be used on it, and what is wrong.

use std::collections::BTreeMap;
use std::path::PathBuf;

use layerzero::{Engine, KernelInfo};
use lz_model::{Catalog, DType, DeviceIx, DeviceSpec, NamedCall, TensorMeta};
use serde::Serialize;

use crate::args::EngineArgs;
use crate::color::Style;
use crate::error::CliError;
use crate::exit::Exit;
use crate::printer::Printer;
use crate::program::{Libraries, Unproven};
use crate::session::Session;
use crate::surroundings::Surroundings;

/// Show the machine, its backends and kernels, and what is wrong with them
///
/// Exits with 4 when nothing can run: there is no device, or no kernel for it.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    engine: EngineArgs,
}

/// The answer.
#[derive(Serialize)]
struct Answer {
    version: &'static str,
    usable: bool,
    devices: Vec<DeviceSpec>,
    /// What torch calls the device that is meant where a call does not say.
    device: String,
    /// Whether the device is described, so that libraries are assumed and nothing was looked for.
    described: bool,
    notes: Vec<String>,
    backends: Vec<BackendReport>,
    /// What was never run on the hardware it is for.
    unproven: Vec<Unproven>,
    operations: usize,
    kernels: usize,
    /// Those that nothing rules out on every device.
    kernels_ready: usize,
    selection: Vec<SelfCheck>,
    configuration: Configuration,
    problems: Vec<String>,
}

/// The configuration in force.
#[derive(Serialize)]
struct Configuration {
    /// The files that were read.
    files: Vec<PathBuf>,
    warnings: Vec<String>,
    /// Why the last one of the program this is a part of was refused; `null` when it was not.
    refused_reload: Option<String>,
}

#[derive(Serialize)]
struct BackendReport {
    name: String,
    version: String,
    platforms: Vec<&'static str>,
    kernels: usize,
    /// Why it cannot be used; `null` when it can.
    unavailable: Option<String>,
    /// Whether its library was imported, so that it is known to load.
    imported: bool,
    /// Whether it has kernels for one of the devices.
    for_devices: bool,
}

/// One call that was selected for.
#[derive(Serialize)]
struct SelfCheck {
    call: String,
    kernel_id: Option<String>,
    error: Option<String>,
}

/// Examines and reports.
pub fn run(args: &Args, at: &Surroundings, printer: &mut Printer<'_>) -> Result<Exit, CliError> {
    let (session, refused) = Session::open_anyway(&args.engine, Libraries::Found, at)?;
    let answer = examine(&session, &refused)?;
    session.print_warnings(printer);
    if printer.wants_json() {
        printer.json(&answer)?;
    } else {
        print(&answer, printer)?;
    }
    Ok(match refused.first() {
        _ if !answer.usable => Exit::Unusable,
        Some(error) => error.exit(),
        None => Exit::Ok,
    })
}

fn examine(session: &Session, refused: &[CliError]) -> Result<Answer, CliError> {
    let engine = &session.engine;
    let kernels = engine.list_kernels(None)?;
    let ready = kernels.iter().filter(|k| k.unavailable.is_empty()).count();
    let devices = engine.devices();
    let selection = if devices.is_empty() { Vec::new() } else { self_check(engine, session.device) };
    let config = engine.config();
    let configuration = Configuration {
        files: config.files().to_vec(),
        warnings: config.warnings.iter().map(ToString::to_string).collect(),
        refused_reload: session.refused_reload(),
    };
    let mut problems: Vec<String> = refused.iter().map(ToString::to_string).collect();
    let reload = configuration.refused_reload.iter();
    problems.extend(reload.map(|error| format!("the last configuration was refused, the one before serves: {error}")));
    if devices.is_empty() {
        problems.push("there is no device".into());
    }
    if ready == 0 {
        problems.push(format!("none of the {} kernels can run here", kernels.len()));
    }
    problems.extend(selection.iter().filter(|s| s.kernel_id.is_none()).map(|s| format!("nothing serves {}", s.call)));
    Ok(Answer {
        version: env!("CARGO_PKG_VERSION"),
        usable: ready > 0 && !devices.is_empty(),
        device: session.device_name(),
        described: session.is_described,
        backends: backends(session, &kernels),
        unproven: session.unproven(),
        operations: Catalog::get().ops().len(),
        kernels: kernels.len(),
        kernels_ready: ready,
        devices,
        notes: session.notes.iter().map(ToString::to_string).collect(),
        selection,
        configuration,
        problems,
    })
}

fn backends(session: &Session, kernels: &[KernelInfo]) -> Vec<BackendReport> {
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    kernels.iter().for_each(|k| *counts.entry(&k.backend).or_default() += 1);
    let devices = session.engine.devices();
    let report = |state: lz_select::BackendState| BackendReport {
        for_devices: devices.iter().any(|device| state.descriptor.platforms.contains(&device.platform)),
        kernels: counts.get(state.descriptor.name.as_str()).copied().unwrap_or(0),
        platforms: state.descriptor.platforms.iter().map(|p| p.name()).collect(),
        imported: state.unavailable.is_none() && !session.not_imported.contains(&state.descriptor.name),
        unavailable: state.unavailable.map(|reason| format!("[{}] {reason}", reason.code())),
        name: state.descriptor.name,
        version: state.descriptor.version,
    };
    session.engine.backends().into_iter().map(report).collect()
}

/// A call every model makes: the operation, and its tensors with their shapes.
type Usual = (&'static str, &'static [(&'static str, &'static [i64])]);

const USUAL: &[Usual] = &[
    ("rms_norm", &[("input", &[16, 4096]), ("weight", &[4096])]),
    ("attention.causal", &[("query", &[1, 512, 32, 128]), ("key", &[1, 512, 8, 128]), ("value", &[1, 512, 8, 128])]),
];

/// Selects for the usual calls.
fn self_check(engine: &Engine, device: DeviceIx) -> Vec<SelfCheck> {
    let check = |&(op, inputs): &Usual| {
        let meta = |shape| TensorMeta { device, ..TensorMeta::new(DType::Bf16, shape) };
        let metas = inputs.iter().map(|&(name, shape)| (name, meta(shape)));
        let which = engine.which(op, &NamedCall { inputs: metas.collect(), device, ..NamedCall::new() });
        SelfCheck {
            call: format!("{op} in bfloat16"),
            kernel_id: which.as_ref().ok().map(|s| s.kernel_id.clone()),
            error: which.err().map(|e| e.to_string()),
        }
    };
    USUAL.iter().map(check).collect()
}

fn print(answer: &Answer, printer: &mut Printer<'_>) -> Result<(), CliError> {
    printer.line(format!("layerzero {}", answer.version))?;
    printer.heading("Devices")?;
    for (i, device) in answer.devices.iter().enumerate() {
        print_device(i, device, printer)?;
    }
    if answer.devices.len() > 1 {
        printer.line(format!("  calls that do not say are made on {}", answer.device))?;
    }
    for note in &answer.notes {
        printer.line(format!("  note: {note}"))?;
    }
    printer.heading("Backends")?;
    let row = |b: &BackendReport| {
        let usable = match (b.imported, answer.described) {
            (true, _) => "available",
            (false, true) => "assumed to be installed",
            (false, false) => "installed, not imported",
        };
        let status = b.unavailable.clone().unwrap_or_else(|| usable.into());
        [b.name.clone(), b.version.clone(), b.platforms.join(", "), b.kernels.to_string(), status]
    };
    // What is missing on this machine is worth a line each; what a described machine cannot use is not.
    let (shown, others): (Vec<_>, Vec<_>) = answer.backends.iter().partition(|b| b.for_devices || !answer.described);
    printer.table(["backend", "version", "platforms", "kernels", "status"], shown.into_iter().map(row))?;
    if !others.is_empty() {
        let names: Vec<&str> = others.iter().map(|b| b.name.as_str()).collect();
        printer.line(format!("  for other hardware: {}", names.join(", ")))?;
    }
    print_unproven(&answer.unproven, printer)?;
    printer.heading("Selection")?;
    let (ready, kernels) = (answer.kernels_ready, answer.kernels);
    printer.line(format!("  {} operations, {kernels} kernels, {ready} of them can run here", answer.operations))?;
    for check in &answer.selection {
        printer.line(format!("  {} -> {}", check.call, check.kernel_id.as_deref().unwrap_or("nothing")))?;
    }
    printer.heading("Configuration")?;
    print_configuration(&answer.configuration, printer)?;
    printer.heading("Problems")?;
    if answer.problems.is_empty() {
        let none = printer.paint(Style::Good, "none");
        return printer.line(format!("  {none}"));
    }
    for problem in &answer.problems {
        let problem = printer.paint(Style::Bad, &problem.replace('\n', "\n  "));
        printer.line(format!("  {problem}"))?;
    }
    Ok(())
}

/// What was never run on the hardware it is for, and whether it could be used here.
fn print_unproven(all: &[Unproven], printer: &mut Printer<'_>) -> Result<(), CliError> {
    if all.is_empty() {
        return Ok(());
    }
    printer.heading("Unproven: used where the setting backends.unproven names them")?;
    let row = |one: &Unproven| {
        let kernels = match &one.kernels[..] {
            [] => "all".to_owned(),
            [kernel] => kernel.clone(),
            [first, rest @ ..] => format!("{first} and {} more", rest.len()),
        };
        let installed = one.installed.clone().unwrap_or_else(|| "no".into());
        let named = if one.named { "named" } else { "not named" };
        [one.backend.clone(), kernels, installed, named.into(), one.why.clone()]
    };
    printer.table(["backend", "kernels", "installed", "setting", "why"], all.iter().map(row))
}

fn print_configuration(configuration: &Configuration, printer: &mut Printer<'_>) -> Result<(), CliError> {
    if configuration.files.is_empty() {
        printer.line("  no files; defaults and environment")?;
    }
    for file in &configuration.files {
        printer.line(format!("  {}", file.display()))?;
    }
    for warning in &configuration.warnings {
        let label = printer.paint(Style::Warning, "warning");
        printer.line(format!("  {label}: {warning}"))?;
    }
    Ok(())
}

fn print_device(index: usize, device: &DeviceSpec, printer: &mut Printer<'_>) -> Result<(), CliError> {
    let sm = device.sm.map(|sm| format!("SM {sm}"));
    let chip = [sm, device.generation.clone(), device.gfx.clone()].into_iter().flatten();
    let cores = (device.cores > 0).then(|| format!("{} cores", device.cores));
    let memory =
        (device.memory_bytes > 0).then(|| format!("{:.1} GiB", device.memory_bytes as f64 / f64::from(1 << 30)));
    let versions = device.versions.iter().map(|(name, version)| format!("{name} {version}"));
    let facts: Vec<String> = chip.chain(cores).chain(memory).chain(versions).collect();
    printer.line(format!("  {index}: {} ({})", device.name, device.platform))?;
    if !facts.is_empty() {
        printer.line(format!("     {}", facts.join(", ")))?;
    }
    if !device.features.is_empty() {
        printer.line(format!("     {}", features(&device.features)))?;
    }
    Ok(())
}

/// The features that decide about kernels; the rest as a number.
fn features(all: &[String]) -> String {
    const TELLING: &[&str] = &[
        "avx2",
        "fma",
        "avx512f",
        "avx512bw",
        "avx512vnni",
        "avx512bf16",
        "amx-tile",
        "amx-bf16",
        "amx-int8",
        "neon",
        "sve",
        "fp16",
        "bf16",
        "fp8",
        "graphs",
        "mma",
        "wgmma",
        "tcgen05.mma",
    ];
    let (telling, rest): (Vec<&String>, Vec<&String>) = all.iter().partition(|f| TELLING.contains(&f.as_str()));
    let mut text = telling.iter().map(|f| f.as_str()).collect::<Vec<_>>().join(" ");
    match (text.is_empty(), rest.len()) {
        (_, 0) => {}
        (true, count) => text = format!("{count} features"),
        (false, count) => text.push_str(&format!(" and {count} more features")),
    }
    text
}
