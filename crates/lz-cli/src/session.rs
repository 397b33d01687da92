//! From engine and policy arguments, and the configuration in force, to an engine.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use layerzero::{Engine, Error as EngineError};
use lz_model::{DeviceIx, DeviceSpec};
use lz_select::{Pattern, PolicySpec, Snapshot};

use crate::args::{EngineArgs, PolicyArgs};
use crate::device::{self, Here};
use crate::error::CliError;
use crate::printer::Printer;
use crate::program::{Libraries, Program, Unproven};
use crate::surroundings::Surroundings;

/// An engine, and the warnings it gave.
pub struct Session {
    /// The engine.
    pub engine: Engine,
    /// The device that is meant where a command does not say.
    pub device: DeviceIx,
    /// What could not be found out about this machine, when the engine answers for it.
    pub notes: Vec<lz_hardware::Note>,
    /// Backends whose libraries were not imported: found, or assumed, to be installed.
    pub not_imported: Vec<String>,
    /// Whether the device is described, so that libraries are assumed.
    pub is_described: bool,
    /// What the answer takes for granted.
    assumption: Option<String>,
    program: Option<Arc<dyn Program>>,
    warnings: Arc<Mutex<Vec<String>>>,
}

impl Session {
    /// The engine the arguments describe, with the configuration in force. A document that is refused is an error.
    pub fn open(args: &EngineArgs, at: &Surroundings) -> Result<Session, CliError> {
        Session::unconfigured(args, at)?.configured(at)
    }

    /// As [`Session::open`], for a question: libraries are found without importing them.
    pub fn asking(args: &EngineArgs, at: &Surroundings) -> Result<Session, CliError> {
        let (session, refused) = Session::described(args, Libraries::Found, at)?;
        refused.into_iter().next().map_or(Ok(session), Err)?.configured(at)
    }

    /// As [`Session::open`], to decide a call of an operation as a process would: by what was measured, and by what the command
    /// line wants.
    pub fn deciding(args: &EngineArgs, at: &Surroundings, op: &str, policy: &PolicyArgs) -> Result<Session, CliError> {
        let session = Session::asking(args, at)?;
        session.engine.learn_if_there();
        session.set_policy(op, policy)?;
        Ok(session)
    }

    /// As [`Session::open`], without any configuration.
    pub fn unconfigured(args: &EngineArgs, at: &Surroundings) -> Result<Session, CliError> {
        let (session, refused) = Session::described(args, Libraries::Imported, at)?;
        refused.into_iter().next().map_or(Ok(session), Err)
    }

    /// As [`Session::open`], with what is refused left out, and why: backends are disabled, of a configuration the
    /// defaults are in force.
    pub fn open_anyway(
        args: &EngineArgs,
        libraries: Libraries<'_>,
        at: &Surroundings,
    ) -> Result<(Session, Vec<CliError>), CliError> {
        let (session, mut refused) = Session::described(args, libraries, at)?;
        refused.extend(session.configure(at).err());
        Ok((session, refused))
    }

    /// With the configuration in force.
    pub fn configured(self, at: &Surroundings) -> Result<Session, CliError> {
        self.configure(at).map(|()| self)
    }

    fn configure(&self, at: &Surroundings) -> Result<(), CliError> {
        self.engine.load_sources(&at.sources())?;
        let mut warned = self.engine.config().warnings.iter().map(ToString::to_string).collect::<Vec<_>>();
        warned.extend(self.engine.pin_warnings());
        self.warnings.lock().unwrap_or_else(PoisonError::into_inner).extend(warned);
        Ok(())
    }

    fn described(
        args: &EngineArgs,
        libraries: Libraries<'_>,
        at: &Surroundings,
    ) -> Result<(Session, Vec<CliError>), CliError> {
        let here = device::find(args.device.as_deref(), at)?;
        let is_described = matches!(here, Here::Described(_));
        let session = match here {
            Here::Described(device) => Session::made(vec![*device], Libraries::Assumed(&args.assume), at)?,
            Here::Device(device) => Session::made(vec![*device], libraries, at)?,
            Here::Machine(machine, device) => {
                Session { notes: machine.notes, device, ..Session::made(machine.devices, libraries, at)? }
            }
        };
        if !args.assume.is_empty() && !is_described && at.program.is_some() {
            let what = "--assume is for a described device; the libraries of this machine are known";
            return Err(CliError::argument(what, "add --device with a described device, or leave --assume out"));
        }
        let refused = args.capabilities.iter().filter_map(|path| load(&session.engine, path).err()).collect();
        Ok((session, refused))
    }

    /// An engine for these devices, whose kernels can run.
    pub fn on(devices: Vec<DeviceSpec>, at: &Surroundings) -> Result<Session, CliError> {
        Session::made(devices, Libraries::Imported, at)
    }

    fn made(devices: Vec<DeviceSpec>, libraries: Libraries<'_>, at: &Surroundings) -> Result<Session, CliError> {
        let warnings = Arc::new(Mutex::new(Vec::new()));
        let given = Arc::clone(&warnings);
        let hook = move |warning: &layerzero::Warning| {
            given.lock().unwrap_or_else(PoisonError::into_inner).push(warning.to_string());
        };
        let name = devices.first().map_or_else(String::new, |device| device.name.clone());
        let builder = Engine::builder().devices(devices).on_warning(hook);
        let engine = if at.simd_kernels { builder.simd_kernels() } else { builder }.build();
        let refused = |what: String| CliError::argument(what, "name libraries as 'layerzero doctor' lists them");
        let program = at.program.clone();
        let added = program.as_ref().map_or(Ok(Vec::new()), |program| program.add_kernels(&engine, libraries));
        let not_imported = added.map_err(refused)?;
        let assumption = match libraries {
            Libraries::Assumed([]) if program.is_some() => Some(format!(
                "{name} is described: all known libraries are assumed to be installed; restrict them with --assume"
            )),
            Libraries::Assumed(named) if program.is_some() => {
                let is_torch =
                    |entry: &String| entry.split('=').next().is_some_and(|library| library.trim() == "torch");
                let torch = named.iter().find(|entry| is_torch(entry)).map_or("torch", String::as_str);
                let others: Vec<&str> = named.iter().filter(|entry| !is_torch(entry)).map(String::as_str).collect();
                Some(match others[..] {
                    [] => format!("{name} is described: {torch} is assumed to be installed"),
                    _ => format!("{name} is described: {} and {torch} are assumed to be installed", others.join(", ")),
                })
            }
            Libraries::Found if !not_imported.is_empty() => Some(
                "libraries were found where they are installed, not imported; 'layerzero ready' imports them".into(),
            ),
            _ => None,
        };
        let device = DeviceIx(0);
        let is_described = matches!(libraries, Libraries::Assumed(_));
        Ok(Session { engine, device, notes: Vec::new(), not_imported, is_described, assumption, program, warnings })
    }

    /// What torch calls the session's device: `cuda:0`.
    pub fn device_name(&self) -> String {
        lz_model::device_name(&self.engine.devices(), self.device)
    }

    /// The session's device, described.
    pub fn device_spec(&self) -> Option<DeviceSpec> {
        self.engine.devices().into_iter().nth(self.device.0 as usize)
    }

    /// Backends that were never run on the hardware they are for, of the program this is a part of.
    pub fn unproven(&self) -> Vec<Unproven> {
        let mut all = self.program.as_ref().map_or_else(Vec::new, |program| program.unproven());
        let named = &self.engine.config().settings.backends.unproven;
        all.iter_mut().for_each(|one| one.named = named.contains(&one.backend) || named.contains(&one.library));
        all
    }

    /// Puts what the command line wants for an operation in force, above the configuration.
    pub fn set_policy(&self, op: &str, args: &PolicyArgs) -> Result<(), CliError> {
        let mut policy = PolicySpec::default();
        for kernel in args.lock.iter().chain(&args.deny) {
            self.check_kernel(kernel)?;
        }
        for backend in args.prefer.iter().chain(&args.avoid) {
            self.check_backend(backend)?;
        }
        if let Some(kernel) = &args.lock {
            policy = policy.lock(op, kernel);
        }
        policy = args.deny.iter().fold(policy, |policy, kernel| policy.deny(kernel));
        policy = args.prefer.iter().fold(policy, |policy, backend| policy.prefer_source(backend));
        policy = args.avoid.iter().fold(policy, |policy, backend| policy.avoid_source(backend));
        if policy.rules.is_empty() && !args.strict {
            return Ok(());
        }
        self.engine.update(|spec| {
            spec.policy.rules.splice(0..0, policy.rules);
            spec.settings.strict |= args.strict;
        })?;
        Ok(())
    }

    /// A pattern that names no kernel is more likely a mistake than a wish.
    fn check_kernel(&self, pattern: &str) -> Result<(), CliError> {
        let wanted = Pattern::Kernel(pattern.to_owned());
        let unknown = |snapshot: &Snapshot| (!snapshot.knows(&wanted)).then(|| snapshot.nearest_name(&wanted));
        self.engine
            .with_snapshot(unknown)
            .map_or(Ok(()), |nearest| Err(EngineError::UnknownKernel { id: pattern.to_owned(), nearest }.into()))
    }

    fn check_backend(&self, name: &str) -> Result<(), CliError> {
        let wanted = Pattern::Source(name.to_owned());
        let unknown = |snapshot: &Snapshot| (!snapshot.knows(&wanted)).then(|| snapshot.nearest_name(&wanted));
        let Some(nearest) = self.engine.with_snapshot(unknown) else { return Ok(()) };
        let registered: BTreeSet<String> =
            self.engine.backends().iter().map(|b| b.descriptor.library().to_owned()).collect();
        let registered = registered.into_iter().collect::<Vec<_>>().join(", ");
        let what = format!("unknown library '{name}'{}", lz_model::did_you_mean(&nearest));
        Err(CliError::argument(what, format!("registered are {registered}")))
    }

    /// Why the last configuration of the program this is a part of was refused, if it was.
    pub fn refused_reload(&self) -> Option<String> {
        self.program.as_ref().and_then(|program| program.reloads().last_error)
    }

    /// Prints what the answer takes for granted, and the warnings given so far.
    pub fn print_warnings(&self, printer: &mut Printer<'_>) {
        self.assumption.iter().for_each(|text| printer.note(text));
        self.print_engine_warnings(printer);
    }

    /// Prints the warnings given so far alone: what was measured does not depend on what is taken for granted.
    pub fn print_engine_warnings(&self, printer: &mut Printer<'_>) {
        let warnings = std::mem::take(&mut *self.warnings.lock().unwrap_or_else(PoisonError::into_inner));
        warnings.iter().for_each(|text| printer.warning(text));
    }
}

fn load(engine: &Engine, path: &Path) -> Result<(), CliError> {
    let unreadable = |source| CliError::Unreadable { path: path.to_owned(), source };
    let text = fs::read_to_string(path).map_err(unreadable)?;
    let stem = path.file_stem().unwrap_or(path.as_os_str()).to_string_lossy();
    engine
        .load_capabilities(&stem, &text)
        .map_err(|error| CliError::Capabilities { path: path.to_owned(), error: Box::new(error) })
}
