//! NVML: what the CUDA driver API only tells to those who own a context.

use std::sync::OnceLock;

use nvml_wrapper::Nvml;
use nvml_wrapper::bitmasks::device::ThrottleReasons;
use nvml_wrapper::enum_wrappers::device::{Clock, TemperatureSensor, TemperatureThreshold};

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

/// What a GPU is going through; `None` is what it does not tell.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Vitals {
    /// Degrees Celsius.
    pub temperature: Option<u32>,
    /// The temperature at which it slows down.
    pub slowdown: Option<u32>,
    /// Its memory.
    pub memory: Option<Memory>,
    /// Its clock, in MHz.
    pub clock: Option<u32>,
    /// The clock it may have at most.
    pub max_clock: Option<u32>,
    /// Whether heat or a power limit holds it back.
    pub held_back: Option<bool>,
}

/// What the GPU whose `DeviceSpec::uuid` is given is going through; nothing where NVML or the device is absent.
pub fn cuda_vitals(uuid: &str) -> Vitals {
    let Some(device) = nvml().ok().and_then(|nvml| nvml.device_by_uuid(uuid).ok()) else { return Vitals::default() };
    let limits = ThrottleReasons::SW_POWER_CAP
        | ThrottleReasons::HW_SLOWDOWN
        | ThrottleReasons::SW_THERMAL_SLOWDOWN
        | ThrottleReasons::HW_THERMAL_SLOWDOWN
        | ThrottleReasons::HW_POWER_BRAKE_SLOWDOWN;
    Vitals {
        temperature: device.temperature(TemperatureSensor::Gpu).ok(),
        slowdown: device.temperature_threshold(TemperatureThreshold::Slowdown).ok(),
        memory: device.memory_info().ok().map(|info| Memory { free: info.free, total: info.total }),
        clock: device.clock_info(Clock::SM).ok(),
        max_clock: device.max_clock_info(Clock::SM).ok(),
        held_back: device.current_throttle_reasons().ok().map(|reasons| reasons.intersects(limits)),
    }
}
