//! Devices: what hardware can do, detected elsewhere or described in a file.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use lz_abi::DType;
use serde::{Deserialize, Serialize};

use crate::generation::GenerationTable;
use crate::ids::DeviceIx;

/// The kind of processor a kernel runs on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "lowercase")]
#[repr(u8)]
pub enum Platform {
    /// The host processor.
    Cpu,
    /// NVIDIA GPUs.
    Cuda,
    /// AMD GPUs.
    Rocm,
    /// Habana Gaudi.
    Hpu,
    /// Intel GPUs.
    Xpu,
    /// Apple GPUs, by Metal.
    Mps,
    /// A device of another vendor, which torch knows by a backend of that vendor's.
    Privateuse1,
}

impl Platform {
    /// Every platform.
    pub const ALL: [Platform; 7] = [
        Platform::Cpu,
        Platform::Cuda,
        Platform::Rocm,
        Platform::Hpu,
        Platform::Xpu,
        Platform::Mps,
        Platform::Privateuse1,
    ];

    /// The name used in files.
    pub const fn name(self) -> &'static str {
        match self {
            Platform::Cpu => "cpu",
            Platform::Cuda => "cuda",
            Platform::Rocm => "rocm",
            Platform::Hpu => "hpu",
            Platform::Xpu => "xpu",
            Platform::Mps => "mps",
            Platform::Privateuse1 => "privateuse1",
        }
    }

    /// What torch calls devices of this kind. AMD's are `cuda` to it.
    pub const fn torch_type(self) -> &'static str {
        match self {
            Platform::Rocm => "cuda",
            Platform::Privateuse1 => "privateuseone",
            other => other.name(),
        }
    }
}

impl fmt::Display for Platform {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A name that is no platform.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown platform '{0}': expected one of cpu, cuda, rocm, hpu, xpu, mps, privateuse1")]
pub struct UnknownPlatform(pub String);

impl FromStr for Platform {
    type Err = UnknownPlatform;
    fn from_str(text: &str) -> Result<Self, UnknownPlatform> {
        Platform::ALL.into_iter().find(|p| p.name() == text).ok_or_else(|| UnknownPlatform(text.into()))
    }
}

/// Limits a kernel launch must respect (CUDA and ROCm).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct LaunchLimits {
    /// Largest grid, per axis.
    pub max_grid: [u32; 3],
    /// Most threads in a block.
    pub max_threads_per_block: u32,
    /// Shared memory a block may opt in to, in bytes.
    pub max_shared_bytes_per_block: u32,
}

impl Default for LaunchLimits {
    /// The limits every CUDA device since SM 3.0 has.
    fn default() -> Self {
        LaunchLimits {
            max_grid: [i32::MAX as u32, 65_535, 65_535],
            max_threads_per_block: 1024,
            max_shared_bytes_per_block: 48 * 1024,
        }
    }
}

/// Sizes of the CPU caches in bytes, as one core sees them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct CpuCaches {
    /// First-level data cache.
    pub l1d: u64,
    /// Second-level cache.
    pub l2: u64,
    /// Last-level cache.
    pub l3: u64,
}

/// Everything selection needs to know of one device.
///
/// Detected by the `lz-hardware` crate, or read from a JSON file with [`DeviceSpec::from_file`],
/// so that a choice for any hardware can be asked about anywhere. Only `platform` and `name` are
/// required in a file; [`DeviceSpec::completed`] derives what the rest implies.
///
/// ```
/// let h100 = lz_model::DeviceSpec::from_json(r#"{"platform": "cuda", "name": "H100", "sm": 90}"#).unwrap();
/// assert_eq!(h100.generation.as_deref(), Some("hopper"));
/// assert!(h100.supports("fp8"));
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct DeviceSpec {
    /// The kind of processor.
    pub platform: Platform,
    /// Marketing name: `NVIDIA H200`.
    pub name: String,
    /// What torch calls devices of its kind, where the platform does not say: the name of a vendor's backend, `npu`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub torch_type: Option<String>,
    /// `nvidia`, `amd`, `intel`, `habana`, `apple`, `arm`, …
    #[serde(default)]
    pub vendor: String,
    /// Stable identity of this very device, where it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uuid: Option<String>,
    /// CUDA compute capability as `10 * major + minor`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sm: Option<u32>,
    /// GPU generation, by the generation table unless given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub generation: Option<String>,
    /// Tensor-core generation, by the generation table unless given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tensor_core_generation: Option<u32>,
    /// AMD architecture: `gfx942`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gfx: Option<String>,
    /// What the hardware can do: CPU features (`avx2`, `avx512f`, `amx-bf16`, `neon`), GPU
    /// instruction sets (`wgmma`, `tcgen05.mma`) and capabilities (`fp8`, `bf16`, `graphs`).
    #[serde(default)]
    pub features: Vec<String>,
    /// Versions of what drives the device: `driver`, `cuda`, `rocm`.
    #[serde(default)]
    pub versions: BTreeMap<String, String>,
    /// Physical cores (CPU) or multiprocessors (GPU).
    #[serde(default)]
    pub cores: u32,
    /// Hardware threads (CPU).
    #[serde(default)]
    pub threads: u32,
    /// CPU caches.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub caches: Option<CpuCaches>,
    /// Total memory in bytes.
    #[serde(default)]
    pub memory_bytes: u64,
    /// Launch limits (GPU).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub launch: Option<LaunchLimits>,
    /// Peak memory bandwidth in GB/s, for the roofline floor.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bandwidth_gbs: Option<f64>,
    /// Peak dense TFLOP/s by dtype name, for the roofline floor.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub peak_tflops: BTreeMap<String, f64>,
}

/// Why a device description could not be used.
#[derive(Debug, thiserror::Error)]
pub enum DeviceFileError {
    /// The file could not be read.
    #[error("cannot read device file '{}': {source}", path.display())]
    Read {
        /// Which file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The text is no device description.
    #[error("not a device description{}: {source}", path.as_ref().map(|p| format!(" ('{}')", p.display())).unwrap_or_default())]
    Parse {
        /// Which file, when it was one.
        path: Option<PathBuf>,
        /// Where and what.
        source: serde_json::Error,
    },
}

impl DeviceSpec {
    /// A device about which nothing but platform and name is known.
    pub fn new(platform: Platform, name: impl Into<String>) -> DeviceSpec {
        DeviceSpec {
            platform,
            name: name.into(),
            torch_type: None,
            vendor: String::new(),
            uuid: None,
            sm: None,
            generation: None,
            tensor_core_generation: None,
            gfx: None,
            features: Vec::new(),
            versions: BTreeMap::new(),
            cores: 0,
            threads: 0,
            caches: None,
            memory_bytes: 0,
            launch: None,
            bandwidth_gbs: None,
            peak_tflops: BTreeMap::new(),
        }
    }

    /// Reads a description and completes it.
    pub fn from_json(text: &str) -> Result<DeviceSpec, DeviceFileError> {
        let spec: DeviceSpec =
            serde_json::from_str(text).map_err(|source| DeviceFileError::Parse { path: None, source })?;
        Ok(spec.completed(&GenerationTable::builtin()))
    }

    /// Reads a description from a file and completes it.
    pub fn from_file(path: &Path) -> Result<DeviceSpec, DeviceFileError> {
        let text =
            std::fs::read_to_string(path).map_err(|source| DeviceFileError::Read { path: path.to_owned(), source })?;
        DeviceSpec::from_json(&text).map_err(|error| match error {
            DeviceFileError::Parse { source, .. } => DeviceFileError::Parse { path: Some(path.to_owned()), source },
            read => read,
        })
    }

    /// Fills what follows from what is given: generation, tensor cores, instruction sets and
    /// number formats from the SM version, the vendor from the platform. Never overwrites.
    pub fn completed(mut self, generations: &GenerationTable) -> DeviceSpec {
        if self.vendor.is_empty() {
            self.vendor = match self.platform {
                Platform::Cuda => "nvidia",
                Platform::Rocm => "amd",
                Platform::Hpu => "habana",
                Platform::Xpu => "intel",
                Platform::Mps => "apple",
                Platform::Cpu | Platform::Privateuse1 => "unknown",
            }
            .into();
        }
        if let Some(row) = self.sm.and_then(|sm| generations.row(sm)) {
            self.generation.get_or_insert_with(|| row.generation.clone());
            self.tensor_core_generation.get_or_insert(row.tensor_cores);
            self.features.extend(row.instruction_sets.iter().cloned());
        }
        match self.platform {
            Platform::Cuda => {
                let sm = self.sm.unwrap_or(0);
                self.features.extend(["fp16", "graphs"].map(String::from));
                self.features.extend((sm >= 80).then(|| "bf16".into()));
                self.features.extend((sm >= 89).then(|| "fp8".into()));
                self.launch.get_or_insert_with(LaunchLimits::default);
            }
            Platform::Rocm | Platform::Hpu | Platform::Xpu => {
                if self.platform == Platform::Rocm {
                    self.launch.get_or_insert_with(LaunchLimits::default);
                }
                self.features.extend(["fp16", "bf16"].map(String::from));
                self.features.extend((self.platform != Platform::Xpu).then(|| "graphs".into()));
            }
            Platform::Mps => self.features.extend(["fp16", "bf16"].map(String::from)),
            Platform::Cpu | Platform::Privateuse1 => {}
        }
        self.features.sort();
        self.features.dedup();
        self
    }

    /// What torch calls devices of its kind: `cuda`, `xpu`, `npu`.
    pub fn torch_type(&self) -> &str {
        self.torch_type.as_deref().unwrap_or(self.platform.torch_type())
    }

    /// Whether the device has a feature, by name.
    pub fn supports(&self, feature: &str) -> bool {
        self.features.iter().any(|f| f == feature)
    }

    /// Whether it has matrix units of any generation.
    pub fn has_tensor_cores(&self) -> bool {
        self.tensor_core_generation.is_some() || self.platform == Platform::Rocm && self.gfx.is_some()
    }

    /// What a dispatch table or a measurement is valid for: `cuda_sm90_cu130`, `cpu_intel_avx512f_amx-int8`.
    pub fn signature(&self) -> String {
        match self.platform {
            Platform::Cuda => {
                let cuda = self.versions.get("cuda").map(|v| v.split('.').take(2).collect::<String>());
                format!("cuda_sm{}_cu{}", self.sm.unwrap_or(0), cuda.unwrap_or_else(|| "unknown".into()))
            }
            Platform::Cpu => {
                let best = ["amx-int8", "avx512f", "avx2", "neon"].into_iter().find(|f| self.supports(f));
                format!("cpu_{}_{}", self.vendor, best.unwrap_or("baseline"))
            }
            other => format!("{other}_{}", self.gfx.as_deref().unwrap_or(&self.name)),
        }
        .to_lowercase()
        .replace(' ', "-")
    }

    /// The least time, in microseconds, that moving `bytes` and doing `flops` can take here.
    pub fn roofline_us(&self, dtype: DType, flops: f64, bytes: f64) -> Option<f64> {
        let memory = self.bandwidth_gbs.map(|gbs| bytes / (gbs * 1e3));
        let compute = self.peak_tflops.get(dtype.name()).map(|tflops| flops / (tflops * 1e6));
        match (memory, compute) {
            (Some(m), Some(c)) => Some(m.max(c)),
            (one, other) => one.or(other),
        }
    }
}

/// The device that has a name: torch's (`cpu`, `cuda:1`, `npu:0`), or a platform's (`rocm:0`). Without a number it is the
/// first.
pub fn device_named(devices: &[DeviceSpec], name: &str) -> Option<DeviceIx> {
    let (kind, number) = name.split_once(':').unwrap_or((name, "0"));
    let number: usize = number.parse().ok()?;
    let is_it = |device: &DeviceSpec| device.torch_type() == kind || device.platform.name() == kind;
    let of_kind = devices.iter().enumerate().filter(|(_, device)| is_it(device));
    of_kind.map(|(at, _)| DeviceIx(at as u16)).nth(number)
}

/// What torch calls a device: `cpu`, `cuda:1`.
pub fn device_name(devices: &[DeviceSpec], device: DeviceIx) -> String {
    let Some(spec) = devices.get(device.0 as usize) else { return format!("unknown:{}", device.0) };
    let before = &devices[..device.0 as usize];
    let number = before.iter().filter(|other| other.torch_type() == spec.torch_type()).count();
    match (spec.platform, number) {
        (Platform::Cpu, 0) => Platform::Cpu.name().to_owned(),
        _ => format!("{}:{number}", spec.torch_type()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_called_as_torch_calls_them() {
        let npu = || DeviceSpec { torch_type: Some("npu".into()), ..DeviceSpec::new(Platform::Privateuse1, "x") };
        let amd = || DeviceSpec::new(Platform::Rocm, "MI300X");
        let devices = [DeviceSpec::new(Platform::Cpu, "host"), amd(), amd(), npu(), npu()];
        let names = ["cpu", "cuda:0", "cuda:1", "npu:0", "npu:1"];
        for (at, name) in names.into_iter().enumerate() {
            assert_eq!(device_name(&devices, DeviceIx(at as u16)), name);
            assert_eq!(device_named(&devices, name), Some(DeviceIx(at as u16)));
        }
        assert_eq!(device_named(&devices, "rocm:1"), Some(DeviceIx(2)));
        assert_eq!(device_named(&devices, "cuda"), Some(DeviceIx(1)));
        for absent in ["cuda:2", "xpu:0", "cuda:x", "cuda:-1", "", "npu:0:1"] {
            assert_eq!(device_named(&devices, absent), None, "{absent}");
        }
    }

    #[test]
    fn a_described_gpu_is_completed_from_its_sm_version() {
        let a100 = DeviceSpec::from_json(r#"{"platform":"cuda","name":"A100","sm":80}"#).unwrap();
        assert_eq!(a100.generation.as_deref(), Some("ampere"));
        assert_eq!(a100.tensor_core_generation, Some(3));
        assert!(a100.supports("bf16") && !a100.supports("fp8") && !a100.supports("wgmma"));
        assert_eq!(a100.launch, Some(LaunchLimits::default()));
        assert_eq!(a100.vendor, "nvidia");
    }

    #[test]
    fn what_a_file_says_is_kept() {
        let text = r#"{"platform":"cuda","name":"x","sm":90,"generation":"custom","versions":{"cuda":"12.3"}}"#;
        let spec = DeviceSpec::from_json(text).unwrap();
        assert_eq!(spec.generation.as_deref(), Some("custom"));
        assert_eq!(spec.signature(), "cuda_sm90_cu123");
    }

    #[test]
    fn unknown_keys_and_missing_files_are_errors_that_say_what() {
        let error = DeviceSpec::from_json(r#"{"platform":"cuda","name":"x","smm":90}"#).unwrap_err();
        assert!(error.to_string().contains("smm"), "{error}");
        let error = DeviceSpec::from_file(Path::new("no-such-device.json")).unwrap_err();
        assert!(error.to_string().contains("no-such-device.json"), "{error}");
    }

    #[test]
    fn the_roofline_is_the_slower_of_memory_and_compute() {
        let mut spec = DeviceSpec::new(Platform::Cuda, "x");
        assert_eq!(spec.roofline_us(DType::Bf16, 1e9, 1e6), None);
        spec.bandwidth_gbs = Some(1000.0);
        assert_eq!(spec.roofline_us(DType::Bf16, 1e9, 1e6), Some(1.0));
        spec.peak_tflops.insert("bfloat16".into(), 100.0);
        assert_eq!(spec.roofline_us(DType::Bf16, 1e9, 1e6), Some(10.0));
    }
}
