//! Devices by torch's names: the engine's number of each. Those that detection does not know, torch describes
//! (`layerzero.devices`).

use layerzero::model::{DeviceIx, DeviceSpec, Platform, device_name as name_of, device_named};
use pyo3::prelude::*;

use crate::engine::engine;
use crate::error;
use crate::process::detached;

/// The engine's number of a device torch calls `cpu`, `cuda:0` or `npu:1`; `None` where neither detection nor torch knows it.
pub fn find(py: Python<'_>, name: &str) -> PyResult<Option<DeviceIx>> {
    let found = || engine().with_snapshot(|s| device_named(&s.spec().devices, name));
    if let Some(device) = found() {
        return Ok(Some(device));
    }
    detached(py, || engine().detect_accelerators()).map_err(|e| error::engine(py, &e))?;
    if let Some(device) = found() {
        return Ok(Some(device));
    }
    let kind = name.split(':').next().unwrap_or(name);
    let described = of_kind(py, kind)?;
    if described.is_empty() {
        return Ok(None);
    }
    detached(py, || engine().add_torch_devices(described)).map_err(|e| error::engine(py, &e))?;
    Ok(found())
}

/// The devices torch has of a kind, described.
pub fn of_kind(py: Python<'_>, torch_type: &str) -> PyResult<Vec<DeviceSpec>> {
    let described: Vec<String> = py.import("layerzero.devices")?.call_method1("described", (torch_type,))?.extract()?;
    let read = |text: &String| DeviceSpec::from_json(text);
    described.iter().map(read).collect::<Result<_, _>>().map_err(|e| {
        error::unsupported(py, &format!("torch's devices of type '{torch_type}' cannot be described: {e}"), "report it")
    })
}

/// What torch calls a device.
pub fn name(device: DeviceIx) -> String {
    engine().with_snapshot(|s| name_of(&s.spec().devices, device))
}

/// CUDA's number of a device, if it is one of CUDA's.
pub fn cuda_index(device: DeviceIx) -> Option<i32> {
    // CUDA devices come after the host, in CUDA's order.
    let is_cuda = |spec: &DeviceSpec| spec.platform == Platform::Cuda;
    engine().with_snapshot(|s| s.device(device).is_some_and(is_cuda)).then(|| i32::from(device.0) - 1)
}

/// The engine's number of a device by torch's name.
#[pyfunction]
pub fn device_number(py: Python<'_>, name: &str) -> PyResult<u16> {
    let missing = || {
        let text = format!("there is no device '{name}'");
        error::unsupported(py, &text, "see what lz.doctor() says about the devices")
    };
    find(py, name)?.map(|device| device.0).ok_or_else(missing)
}

/// Torch's name of a device by the engine's number.
#[pyfunction]
#[pyo3(name = "device_name")]
pub fn named(device: u16) -> String {
    name(DeviceIx(device))
}
