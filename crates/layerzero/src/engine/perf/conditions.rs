//! What a device goes through while it is measured, in the few words the database keeps.

use lz_hardware::Vitals;
use lz_model::{DeviceSpec, Platform};
use lz_perfdb::{Conditions, MemoryPressure, PowerState, Temperature};

/// Below this a GPU is cold, in degrees Celsius.
const COLD: u32 = 45;
/// So near to the temperature at which it slows down a GPU is hot.
const HOT_MARGIN: u32 = 10;
/// The temperature at which a GPU that does not tell slows down.
const SLOWDOWN: u32 = 90;
/// The part of memory in use below which there is no pressure, and above which it is high.
const PRESSURE: (f64, f64) = (0.5, 0.85);
/// The part of its highest clock a GPU runs at when nothing holds it back.
const BOOST: f64 = 0.9;

/// How a device is doing now; nothing where it does not tell.
pub(super) fn conditions(device: &DeviceSpec) -> Conditions {
    match device.uuid.as_deref().filter(|_| device.platform == Platform::Cuda) {
        Some(uuid) => in_words(&lz_hardware::cuda_vitals(uuid)),
        None => Conditions::default(),
    }
}

fn in_words(vitals: &Vitals) -> Conditions {
    let hot = vitals.slowdown.unwrap_or(SLOWDOWN).saturating_sub(HOT_MARGIN);
    let temperature = |degrees: u32| match degrees {
        _ if degrees >= hot => Temperature::Hot,
        _ if degrees < COLD => Temperature::Cold,
        _ => Temperature::Warm,
    };
    let pressure = |memory: lz_hardware::Memory| {
        let used = 1.0 - memory.free as f64 / memory.total.max(1) as f64;
        match used {
            _ if used < PRESSURE.0 => MemoryPressure::Low,
            _ if used < PRESSURE.1 => MemoryPressure::Medium,
            _ => MemoryPressure::High,
        }
    };
    let boosted = vitals.clock.zip(vitals.max_clock).map(|(clock, most)| f64::from(clock) >= BOOST * f64::from(most));
    let power_state = match (vitals.held_back, boosted) {
        (Some(true), _) => Some(PowerState::Throttled),
        (_, Some(true)) => Some(PowerState::Boost),
        (Some(false), Some(false)) => Some(PowerState::Nominal),
        (_, None) | (None, _) => None,
    };
    Conditions {
        temperature: vitals.temperature.map(temperature),
        memory_pressure: vitals.memory.map(pressure),
        power_state,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lz_hardware::Memory;

    #[test]
    fn what_is_not_told_is_not_known() {
        assert_eq!(in_words(&Vitals::default()), Conditions::default());
        assert_eq!(conditions(&DeviceSpec::new(Platform::Cpu, "host")), Conditions::default());
    }

    #[test]
    fn a_gpu_is_cold_warm_or_hot_by_its_own_limit() {
        let at = |temperature, slowdown| {
            in_words(&Vitals { temperature: Some(temperature), slowdown, ..Vitals::default() }).temperature
        };
        assert_eq!(at(30, None), Some(Temperature::Cold));
        assert_eq!(at(COLD, None), Some(Temperature::Warm));
        assert_eq!(at(79, None), Some(Temperature::Warm));
        assert_eq!(at(80, None), Some(Temperature::Hot));
        assert_eq!(at(79, Some(85)), Some(Temperature::Hot));
        assert_eq!(at(79, Some(95)), Some(Temperature::Warm));
    }

    #[test]
    fn memory_presses_as_it_fills() {
        let with = |free| {
            let memory = Some(Memory { free, total: 100 });
            in_words(&Vitals { memory, ..Vitals::default() }).memory_pressure
        };
        assert_eq!(with(80), Some(MemoryPressure::Low));
        assert_eq!(with(50), Some(MemoryPressure::Medium));
        assert_eq!(with(10), Some(MemoryPressure::High));
        assert_eq!(with(0), Some(MemoryPressure::High));
    }

    #[test]
    fn what_holds_it_back_counts_more_than_its_clock() {
        let state = |held_back, clock| {
            in_words(&Vitals { held_back, clock, max_clock: Some(1980), ..Vitals::default() }).power_state
        };
        assert_eq!(state(Some(true), Some(1980)), Some(PowerState::Throttled));
        assert_eq!(state(Some(false), Some(1980)), Some(PowerState::Boost));
        assert_eq!(state(None, Some(1900)), Some(PowerState::Boost));
        assert_eq!(state(Some(false), Some(1200)), Some(PowerState::Nominal));
        assert_eq!(state(Some(false), None), None);
    }
}
