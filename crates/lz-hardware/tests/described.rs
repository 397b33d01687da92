//! Every described device loads, and completes as its hardware would.

use lz_hardware::{described, described_names};
use lz_model::{DType, DeviceSpec, Platform};

fn device(name: &str) -> DeviceSpec {
    described(name).unwrap_or_else(|| panic!("{name} is described"))
}

#[test]
fn each_loads_with_what_the_roofline_needs() {
    for name in described_names() {
        let spec = device(name);
        assert!(spec.cores > 0 && spec.memory_bytes > 0, "{name}");
        assert!(spec.bandwidth_gbs.is_some_and(|gbs| gbs > 0.0), "{name}");
        assert!(!spec.vendor.is_empty() && spec.uuid.is_none(), "{name}");
        assert!(spec.features.is_sorted_by(|a, b| a < b), "{name}");
        for (dtype, peak) in &spec.peak_tflops {
            let parsed = dtype.parse::<DType>().unwrap();
            assert_eq!(parsed.name(), dtype, "{name}: a peak is keyed by dtype name");
            assert!(*peak > 0.0, "{name}");
        }
    }
    assert_eq!(described("h1000"), None);
}

#[test]
fn every_description_in_the_folder_is_listed() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/data/devices");
    let mut files: Vec<_> =
        std::fs::read_dir(folder).unwrap().map(|file| file.unwrap().path().file_stem().unwrap().to_owned()).collect();
    files.sort();
    let mut names = described_names().to_vec();
    names.sort();
    assert_eq!(files, names);
}

#[test]
fn nvidia_parts_get_their_generation_and_instructions() {
    let expected = [
        ("t4", "turing", 2, "mma", "bf16"),
        ("a100", "ampere", 3, "bf16", "fp8"),
        ("l40s", "ada", 3, "fp8", "wgmma"),
        ("h100", "hopper", 4, "wgmma", "tcgen05.mma"),
        ("h100-pcie", "hopper", 4, "wgmma", "tcgen05.mma"),
        ("h100-nvl", "hopper", 4, "wgmma", "tcgen05.mma"),
        ("h200", "hopper", 4, "tma", "tcgen05.mma"),
        ("h200-nvl", "hopper", 4, "tma", "tcgen05.mma"),
        ("b200", "blackwell", 5, "tcgen05.mma", "wgmma"),
    ];
    for (name, generation, tensor_cores, has, lacks) in expected {
        let spec = device(name);
        assert_eq!(spec.platform, Platform::Cuda);
        assert_eq!(spec.generation.as_deref(), Some(generation), "{name}");
        assert_eq!(spec.tensor_core_generation, Some(tensor_cores), "{name}");
        assert!(spec.supports(has) && !spec.supports(lacks), "{name}");
        assert!(spec.supports("graphs") && spec.has_tensor_cores(), "{name}");
        assert!(
            spec.peak_tflops.contains_key("bfloat16") == spec.supports("bf16"),
            "{name}: a bf16 peak exactly where there is bf16"
        );
        assert!(spec.signature().ends_with("_cu128"), "{name}");
        let shared = spec.launch.unwrap().max_shared_bytes_per_block;
        assert!((48 * 1024..=227 * 1024).contains(&shared), "{name}");
    }
}

#[test]
fn other_vendors_parts_are_of_their_platform() {
    let mi300x = device("mi300x");
    assert_eq!(mi300x.platform, Platform::Rocm);
    assert_eq!(mi300x.gfx.as_deref(), Some("gfx942"));
    assert!(mi300x.has_tensor_cores() && mi300x.sm.is_none());
    assert_eq!(device("gaudi3").platform, Platform::Hpu);
    assert_eq!(device("xpu-max1550").platform, Platform::Xpu);
    assert_eq!(device("m4-max").platform, Platform::Mps);
}
