//! Which device a command is about: the one it was told, else the one that calls of this program would be made on.
//!
//! What that is, the program knows ([`Program::device_in_use`](crate::program::Program::device_in_use)): of Python it is
//! torch's accelerator in use. Without a program it is the CPU.

use std::path::Path;

use lz_hardware::Machine;
use lz_model::{DeviceIx, DeviceSpec, Platform, device_named, nearest};

use crate::error::CliError;
use crate::session::Session;
use crate::surroundings::Surroundings;

/// What a command answers for.
pub enum Here {
    /// This machine, and of its devices this one where nothing else is said.
    Machine(Machine, DeviceIx),
    /// A device of this machine.
    Device(Box<DeviceSpec>),
    /// A device that is only described.
    Described(Box<DeviceSpec>),
}

/// The device a name or path stands for; without one this machine, with the device in use.
pub fn find(given: Option<&str>, at: &Surroundings) -> Result<Here, CliError> {
    let Some(name) = given else { return Ok(in_use(lz_hardware::detect(), at)) };
    if let Some(spec) = lz_hardware::described(name) {
        return Ok(Here::Described(Box::new(spec)));
    }
    let path = Path::new(name);
    if path.extension().is_some() || path.components().count() > 1 || path.exists() {
        return Ok(Here::Described(Box::new(DeviceSpec::from_file(path)?)));
    }
    let mut devices = lz_hardware::detect().devices;
    extend(&mut devices, name, at);
    match device_named(&devices, name) {
        Some(place) => Ok(Here::Device(Box::new(devices.swap_remove(place.0 as usize)))),
        None if is_torchs(name) => Err(missing(name)),
        None => {
            let nearest = nearest(name, lz_hardware::described_names().iter().copied()).map(str::to_owned);
            Err(CliError::UnknownDevice { name: name.to_owned(), nearest })
        }
    }
}

/// The number of a device of the session by its name; without one, that of the session's own.
pub fn number(session: &Session, given: Option<&str>, at: &Surroundings) -> Result<DeviceIx, CliError> {
    let Some(name) = given else { return Ok(session.device) };
    let mut devices = session.engine.devices();
    let known = devices.len();
    extend(&mut devices, name, at);
    if devices.len() > known {
        session.engine.add_devices(devices)?;
    }
    device_named(&session.engine.devices(), name).ok_or_else(|| missing(name))
}

fn in_use(mut machine: Machine, at: &Surroundings) -> Here {
    let cuda = machine.devices.iter().filter(|device| device.platform == Platform::Cuda).count();
    // A torch that cannot be asked has no accelerator in use; what keeps it from loading, its backends say.
    let name = at.program.as_ref().and_then(|program| program.device_in_use(cuda).ok());
    let name = name.as_deref().unwrap_or(Platform::Cpu.name());
    extend(&mut machine.devices, name, at);
    let device = device_named(&machine.devices, name).unwrap_or(DeviceIx(0));
    Here::Machine(machine, device)
}

/// Adds what torch has of the kind of a device, if no such device was detected.
fn extend(devices: &mut Vec<DeviceSpec>, name: &str, at: &Surroundings) {
    let kind = name.split(':').next().unwrap_or(name);
    if let (None, Some(program)) = (device_named(devices, kind), &at.program) {
        devices.extend(program.devices_of(kind).unwrap_or_default());
    }
}

/// Whether a name is one of torch's for a device: `cuda:1`.
fn is_torchs(name: &str) -> bool {
    let kind = name.split(':').next().unwrap_or(name);
    name.contains(':') || kind.parse::<Platform>().is_ok()
}

fn missing(name: &str) -> CliError {
    CliError::argument(format!("this machine has no device '{name}'"), "see 'layerzero doctor'")
}
