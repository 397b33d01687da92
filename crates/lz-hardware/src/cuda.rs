//! NVIDIA GPUs, through the part of the CUDA driver API that needs no context.
#![allow(unsafe_code)]

use std::mem::MaybeUninit;
use std::panic;

use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys::{self, CUdevice_attribute as Attribute};
use lz_model::{DeviceSpec, GenerationTable, LaunchLimits, Platform};
use serde::Serialize;

use crate::{Note, described, nvml};

/// Why there are no CUDA devices.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, thiserror::Error)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum CudaAbsent {
    /// The driver library is not installed.
    #[error("no CUDA driver: libcuda.so.1 not found; install the NVIDIA driver to use its GPUs")]
    NoDriver,
    /// The driver is there and shows this process no device.
    #[error("no CUDA device: the driver shows none (is CUDA_VISIBLE_DEVICES empty?)")]
    NoDevice,
    /// The driver refused.
    #[error("no CUDA: {call} answered {code}")]
    Driver {
        /// The driver function.
        call: &'static str,
        /// The driver's name for the error: `CUDA_ERROR_SYSTEM_DRIVER_MISMATCH`.
        code: String,
    },
    /// The driver library lacks a function that detection calls.
    #[error("no CUDA: the driver library cannot be used: {message}")]
    Unusable {
        /// What was wrong with it.
        message: String,
    },
}

/// The devices the driver shows, in its order, with what stayed unknown of them.
pub(crate) fn probe() -> Result<(Vec<DeviceSpec>, Vec<Note>), CudaAbsent> {
    // The bindings panic on a missing library or symbol. The library is looked for first; an old
    // one without a symbol can only be found out by catching.
    panic::catch_unwind(enumerate).unwrap_or_else(|payload| {
        let text =
            payload.downcast_ref::<String>().map(String::as_str).or_else(|| payload.downcast_ref::<&str>().copied());
        Err(CudaAbsent::Unusable {
            message: text.unwrap_or("the bindings panicked").lines().next().unwrap_or_default().to_owned(),
        })
    })
}

fn enumerate() -> Result<(Vec<DeviceSpec>, Vec<Note>), CudaAbsent> {
    // SAFETY: loading a library runs its initialisers; the NVIDIA driver's are sound to run in any
    // process, and no other library goes by its name.
    if !unsafe { sys::is_culib_present() } {
        return Err(CudaAbsent::NoDriver);
    }
    result::init().map_err(|error| refused("cuInit", error))?;
    let count = result::device::get_count().map_err(|error| refused("cuDeviceGetCount", error))?;
    if count <= 0 {
        return Err(CudaAbsent::NoDevice);
    }
    let mut notes = Vec::new();
    let cuda = cuda_version()
        .map_err(|error| {
            notes.push(Note::Unknown { device: "the CUDA driver".into(), fact: "versions", reason: code(error) });
        })
        .ok();
    let driver = nvml::driver_version().map_err(|reason| notes.push(Note::NvmlAbsent { reason })).ok();
    let generations = GenerationTable::builtin();
    let mut devices = Vec::new();
    for ordinal in 0..count {
        match Device::get(ordinal) {
            Ok(device) => {
                let mut spec = device.spec(&mut notes);
                for (name, version) in [("cuda", &cuda), ("driver", &driver)] {
                    if let Some(version) = version {
                        spec.versions.insert(name.into(), version.clone());
                    }
                }
                devices.push(spec.completed(&generations));
            }
            Err(error) => notes.push(Note::DeviceSkipped { ordinal: ordinal.unsigned_abs(), reason: code(error) }),
        }
    }
    Ok((devices, notes))
}

/// The driver's own name for an error.
fn code(error: DriverError) -> String {
    format!("{:?}", error.0)
}

fn refused(call: &'static str, error: DriverError) -> CudaAbsent {
    match error.0 {
        sys::CUresult::CUDA_ERROR_NO_DEVICE => CudaAbsent::NoDevice,
        _ => CudaAbsent::Driver { call, code: code(error) },
    }
}

/// The newest CUDA version the driver supports: `13.0`.
fn cuda_version() -> Result<String, DriverError> {
    let mut version = 0;
    // SAFETY: the pointer is to a live integer, which is all the function writes.
    unsafe { sys::cuDriverGetVersion(&mut version) }.result()?;
    Ok(dotted(version))
}

/// `1000 * major + 10 * minor` as `major.minor`.
fn dotted(version: i32) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}

/// A device the driver handed out, which is what makes querying it sound.
struct Device(sys::CUdevice);

impl Device {
    fn get(ordinal: i32) -> Result<Device, DriverError> {
        result::device::get(ordinal).map(Device)
    }

    fn spec(&self, notes: &mut Vec<Note>) -> DeviceSpec {
        let name = result::device::get_name(self.0).unwrap_or_else(|error| {
            notes.push(Note::Unknown { device: format!("CUDA device {}", self.0), fact: "name", reason: code(error) });
            "NVIDIA GPU".into()
        });
        let mut spec = DeviceSpec::new(Platform::Cuda, name);
        let device = spec.name.clone();
        let mut unknown = |fact, error| {
            notes.push(Note::Unknown { device: device.clone(), fact, reason: code(error) });
        };

        match self.uuid() {
            Ok(bytes) => spec.uuid = Some(uuid_text(bytes, &spec.name)),
            Err(error) => unknown("uuid", error),
        }
        match self.compute_capability() {
            Ok(sm) => spec.sm = Some(sm),
            Err(error) => unknown("sm", error),
        }
        match self.launch_limits() {
            Ok(limits) => spec.launch = Some(limits),
            Err(error) => unknown("launch", error),
        }
        match self.attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT) {
            Ok(count) => spec.cores = count,
            Err(error) => unknown("cores", error),
        }
        match self.total_memory() {
            Ok(bytes) => spec.memory_bytes = bytes,
            Err(error) => unknown("memory_bytes", error),
        }
        match self.bandwidth_gbs() {
            Ok(bandwidth) => spec.bandwidth_gbs = bandwidth,
            Err(error) => unknown("bandwidth_gbs", error),
        }
        if let Some(part) = described::part_named(&spec.name) {
            spec.bandwidth_gbs = spec.bandwidth_gbs.or(part.bandwidth_gbs);
            spec.peak_tflops = part.peak_tflops;
        }
        spec
    }

    fn attribute(&self, attribute: Attribute) -> Result<u32, DriverError> {
        // SAFETY: the device is one the driver handed out.
        unsafe { result::device::get_attribute(self.0, attribute) }.map(|value| u32::try_from(value).unwrap_or(0))
    }

    fn total_memory(&self) -> Result<u64, DriverError> {
        // SAFETY: the device is one the driver handed out.
        unsafe { result::device::total_mem(self.0) }.map(|bytes| bytes as u64)
    }

    fn uuid(&self) -> Result<[u8; 16], DriverError> {
        let mut uuid = MaybeUninit::<sys::CUuuid>::uninit();
        // SAFETY: the pointer is to room for one UUID. This version of the function names a MIG
        // instance by its own UUID, where the first one names the GPU it is cut from.
        unsafe { sys::cuDeviceGetUuid_v2(uuid.as_mut_ptr(), self.0) }.result()?;
        // SAFETY: on success the driver has written all sixteen bytes.
        let uuid = unsafe { uuid.assume_init() };
        Ok(uuid.bytes.map(|byte| byte.to_ne_bytes()[0]))
    }

    fn compute_capability(&self) -> Result<u32, DriverError> {
        let major = self.attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = self.attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        Ok(10 * major + minor)
    }

    fn launch_limits(&self) -> Result<LaunchLimits, DriverError> {
        Ok(LaunchLimits {
            max_grid: [
                self.attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X)?,
                self.attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y)?,
                self.attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z)?,
            ],
            max_threads_per_block: self.attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK)?,
            max_shared_bytes_per_block: self
                .attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
        })
    }

    /// What clock and bus width give; `None` where the driver reports either as zero.
    fn bandwidth_gbs(&self) -> Result<Option<f64>, DriverError> {
        Ok(bandwidth_gbs(
            self.attribute(Attribute::CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE)?,
            self.attribute(Attribute::CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH)?,
        ))
    }
}

/// Two transfers a clock over the whole bus, in GB/s.
fn bandwidth_gbs(clock_khz: u32, bus_bits: u32) -> Option<f64> {
    (clock_khz > 0 && bus_bits > 0).then(|| 2.0 * f64::from(clock_khz) * f64::from(bus_bits) / 8.0 / 1e6)
}

/// A UUID as NVML spells it, which tells GPUs from MIG instances.
fn uuid_text(bytes: [u8; 16], name: &str) -> String {
    let mut text = String::from(if name.split(' ').any(|word| word == "MIG") { "MIG" } else { "GPU" });
    for (index, byte) in bytes.into_iter().enumerate() {
        if [0, 4, 6, 8, 10].contains(&index) {
            text.push('-');
        }
        text.push_str(&format!("{byte:02x}"));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn driver_numbers_become_what_people_write() {
        assert_eq!(dotted(13000), "13.0");
        assert_eq!(dotted(12080), "12.8");
        let bytes = std::array::from_fn(|i| i as u8 * 17);
        assert_eq!(uuid_text(bytes, "NVIDIA H200"), "GPU-00112233-4455-6677-8899-aabbccddeeff");
        assert!(uuid_text(bytes, "NVIDIA A100-SXM4-40GB MIG 1g.5gb").starts_with("MIG-0011"));
    }

    #[test]
    fn bandwidth_follows_from_clock_and_bus() {
        // A T4: 5001 MHz, 256 bits, 320 GB/s by its datasheet.
        assert_eq!(bandwidth_gbs(5_001_000, 256), Some(320.064));
        assert_eq!(bandwidth_gbs(0, 256), None);
        assert_eq!(bandwidth_gbs(5_001_000, 0), None);
    }

    #[test]
    fn a_refusal_names_the_call_and_the_code() {
        let text = |result| refused("cuInit", DriverError(result)).to_string();
        assert!(
            text(sys::CUresult::CUDA_ERROR_SYSTEM_DRIVER_MISMATCH)
                .contains("cuInit answered CUDA_ERROR_SYSTEM_DRIVER_MISMATCH")
        );
        let none = refused("cuInit", DriverError(sys::CUresult::CUDA_ERROR_NO_DEVICE));
        assert_eq!(none, CudaAbsent::NoDevice);
    }
}
