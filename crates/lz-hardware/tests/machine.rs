//! Detection against independent sources: `/proc/cpuinfo`, `/proc/meminfo` and `/dev`.

use std::path::Path;

use lz_hardware::{CudaAbsent, Note, cpu_memory, cuda_memory, detect, detect_cpu, detect_cuda};
use lz_model::Platform;

#[test]
fn the_cpu_comes_first_and_every_spec_is_complete() {
    let machine = detect();
    let platforms: Vec<_> = machine.devices.iter().map(|d| d.platform).collect();
    assert_eq!(platforms[0], Platform::Cpu);
    assert!(platforms[1..].iter().all(|p| *p == Platform::Cuda));
    assert_eq!(machine.devices[0], detect_cpu());
    for device in &machine.devices {
        assert!(!device.name.is_empty() && !device.vendor.is_empty());
        assert!(device.features.is_sorted_by(|a, b| a < b), "{device:?}");
        assert!(device.cores >= 1);
        assert!(device.memory_bytes > 0);
    }
    assert!(machine.notes.iter().all(|n| !n.to_string().contains('\n')));
    serde_json::to_string(&machine).unwrap();
}

#[test]
fn cuda_is_detected_or_absent_for_a_stated_reason() {
    let said = detect().notes.into_iter().find_map(|note| match note {
        Note::CudaAbsent { reason } => Some(reason),
        _ => None,
    });
    match detect_cuda() {
        Ok(devices) => {
            assert!(said.is_none());
            for device in devices {
                let sm = device.sm.expect("the driver knows every device's capability");
                assert!(sm >= 50, "{device:?}");
                let cuda = &device.versions["cuda"];
                assert!(cuda.split('.').count() == 2, "{cuda}");
                let uuid = device.uuid.expect("the driver names every device");
                assert_eq!(uuid.len(), "GPU-00112233-4455-6677-8899-aabbccddeeff".len());
                if let Some(memory) = cuda_memory(&uuid) {
                    assert!(memory.free <= memory.total && memory.total >= device.memory_bytes);
                }
            }
        }
        Err(reason) => {
            assert_eq!(said.as_ref(), Some(&reason));
            if !Path::new("/dev/nvidia0").exists() {
                assert!(
                    matches!(reason, CudaAbsent::NoDriver | CudaAbsent::NoDevice | CudaAbsent::Driver { .. }),
                    "{reason:?}"
                );
            }
        }
    }
}

#[test]
fn an_unknown_gpu_has_no_memory() {
    assert_eq!(cuda_memory("GPU-00000000-0000-0000-0000-000000000000"), None);
    assert_eq!(cuda_memory(""), None);
    assert_eq!(cuda_memory("no\0uuid"), None);
}

#[cfg(target_os = "linux")]
mod linux {
    use super::*;

    fn cpuinfo() -> String {
        std::fs::read_to_string("/proc/cpuinfo").unwrap()
    }

    #[test]
    fn counts_are_within_what_the_kernel_lists() {
        let cpu = detect_cpu();
        let listed = cpuinfo().lines().filter(|line| line.starts_with("processor")).count();
        assert!(1 <= cpu.cores && cpu.cores <= cpu.threads, "{cpu:?}");
        assert!(cpu.threads as usize <= listed, "{cpu:?}");
    }

    #[test]
    fn memory_is_no_more_than_the_machine_has() {
        let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap();
        let total: u64 =
            meminfo.split_whitespace().skip_while(|word| *word != "MemTotal:").nth(1).unwrap().parse().unwrap();
        let memory = cpu_memory().unwrap();
        assert!(0 < memory.free && memory.free <= memory.total);
        assert!(memory.total <= total * 1024);
        assert_eq!(detect_cpu().memory_bytes, memory.total);
    }

    #[test]
    fn the_kernel_release_is_recorded() {
        let version = std::fs::read_to_string("/proc/version").unwrap();
        assert!(version.contains(&detect_cpu().versions["os"]), "{version}");
    }

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn vendor_name_and_features_are_what_the_kernel_says() {
        /// Our name, the kernel's, and whether every kernel still in use lists it.
        const NAMES: [(&str, &str, bool); 19] = [
            ("sse4.2", "sse4_2", true),
            ("avx", "avx", true),
            ("avx2", "avx2", true),
            ("fma", "fma", true),
            ("f16c", "f16c", true),
            ("avx512f", "avx512f", true),
            ("avx512bw", "avx512bw", true),
            ("avx512cd", "avx512cd", true),
            ("avx512dq", "avx512dq", true),
            ("avx512vl", "avx512vl", true),
            ("avx512ifma", "avx512ifma", true),
            ("avx512vbmi", "avx512vbmi", true),
            ("avx512vnni", "avx512_vnni", true),
            ("avx512bf16", "avx512_bf16", false),
            ("avx512fp16", "avx512_fp16", false),
            ("avx-vnni", "avx_vnni", false),
            ("amx-tile", "amx_tile", false),
            ("amx-int8", "amx_int8", false),
            ("amx-bf16", "amx_bf16", false),
        ];
        let text = cpuinfo();
        let field = |name: &str| {
            text.lines()
                .find(|line| line.starts_with(name))
                .and_then(|line| line.split_once(':'))
                .map(|(_, value)| value.trim())
                .unwrap_or_default()
        };
        let cpu = detect_cpu();
        match field("vendor_id") {
            "GenuineIntel" => assert_eq!(cpu.vendor, "intel"),
            "AuthenticAMD" => assert_eq!(cpu.vendor, "amd"),
            other => assert!(!cpu.vendor.is_empty(), "{other}"),
        }
        assert_eq!(cpu.name, field("model name"));
        let flags: Vec<_> = field("flags").split(' ').collect();
        for (ours, kernels, always_listed) in NAMES {
            let listed = flags.contains(&kernels);
            assert!(!listed || cpu.supports(ours), "{ours} missed");
            assert!(listed || !always_listed || !cpu.supports(ours), "{ours} made up");
        }
        let known = |feature: &String| NAMES.iter().any(|row| row.0 == feature);
        assert!(cpu.features.iter().all(known), "{:?}", cpu.features);
        assert!(cpu.caches.is_some_and(|caches| caches.l1d >= 8 << 10));
    }
}
