//! NVML: what the CUDA driver API only tells to those who own a context.

use std::sync::OnceLock;

use nvml_wrapper::Nvml;

use crate::memory::Memory;

/// NVML, opened once: initialising it takes milliseconds and free memory is asked for often.
fn nvml() -> Result<&'static Nvml, &'static str> {
    static NVML: OnceLock<Result<Nvml, String>> = OnceLock::new();
    NVML.get_or_init(|| Nvml::init().map_err(|error| error.to_string().replace('\n', " ")))
        .as_ref()
        .map_err(String::as_str)
}

/// The version of the kernel-mode driver: `570.86.10`.
pub(crate) fn driver_version() -> Result<String, String> {
    nvml()?.sys_driver_version().map_err(|error| error.to_string())
}

/// Free and total memory of the GPU whose `DeviceSpec::uuid` is given, without a CUDA context.
///
/// The identity is the UUID because NVML and the CUDA driver may number the same devices
/// differently (`CUDA_VISIBLE_DEVICES`, `CUDA_DEVICE_ORDER`). `None` where NVML or the device is
/// absent, or where the device has no memory of its own to report.
pub fn cuda_memory(uuid: &str) -> Option<Memory> {
    let info = nvml().ok()?.device_by_uuid(uuid).ok()?.memory_info().ok()?;
    Some(Memory { free: info.free, total: info.total })
}
