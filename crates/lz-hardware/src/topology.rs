//! Cores and caches as Linux publishes them in `/proc` and `/sys`.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use lz_model::CpuCaches;

/// Physical cores behind the CPUs this process may run on.
pub(crate) fn physical_cores(root: &Path) -> Option<u32> {
    let status = fs::read_to_string(root.join("proc/self/status")).ok()?;
    let allowed = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?;
    let cores: BTreeSet<String> = cpu_list(allowed)?
        .map(|cpu| {
            let topology = format!("sys/devices/system/cpu/cpu{cpu}/topology");
            fs::read_to_string(root.join(topology).join("thread_siblings_list")).ok()
        })
        .collect::<Option<_>>()?;
    u32::try_from(cores.len()).ok().filter(|&cores| cores > 0)
}

/// The CPUs in a kernel list such as `0-3,8`.
fn cpu_list(text: &str) -> Option<impl Iterator<Item = u32>> {
    let ranges: Option<Vec<_>> = text
        .trim()
        .split(',')
        .map(|range| {
            let (first, last) = range.split_once('-').unwrap_or((range, range));
            Some(first.parse::<u32>().ok()?..=last.parse::<u32>().ok()?)
        })
        .collect();
    Some(ranges?.into_iter().flatten())
}

/// The caches of the first CPU; a level that is not published is 0.
pub(crate) fn caches(root: &Path) -> CpuCaches {
    let mut caches = CpuCaches::default();
    let indices = fs::read_dir(root.join("sys/devices/system/cpu/cpu0/cache"));
    for index in indices.into_iter().flatten().flatten() {
        let read = |name| fs::read_to_string(index.path().join(name)).ok();
        let (Some(level), Some(kind), Some(size)) = (read("level"), read("type"), read("size")) else {
            continue;
        };
        let size = bytes(size.trim()).unwrap_or(0);
        match (level.trim(), kind.trim()) {
            ("1", "Data" | "Unified") => caches.l1d = size,
            ("2", "Data" | "Unified") => caches.l2 = size,
            ("3", "Data" | "Unified") => caches.l3 = size,
            _ => {}
        }
    }
    caches
}

/// A size such as `48K` or `300M`.
fn bytes(text: &str) -> Option<u64> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit = match &text[digits.len()..] {
        "" => 1,
        "K" => 1 << 10,
        "M" => 1 << 20,
        "G" => 1 << 30,
        _ => return None,
    };
    digits.parse::<u64>().ok()?.checked_mul(unit)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernel_lists_and_sizes_are_read() {
        let cpus = |text| cpu_list(text).map(|cpus| cpus.collect::<Vec<_>>());
        assert_eq!(cpus("\t0-2,8\n"), Some(vec![0, 1, 2, 8]));
        assert_eq!(cpus("5"), Some(vec![5]));
        assert_eq!(cpus("x"), None);
        assert_eq!(bytes("48K"), Some(48 << 10));
        assert_eq!(bytes("2M"), Some(2 << 20));
        assert_eq!(bytes("64"), Some(64));
        assert_eq!(bytes("1.5Q"), None);
    }

    #[test]
    fn hyperthreads_of_allowed_cpus_share_a_core() {
        let root = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        assert_eq!(physical_cores(root.path()), None);
        write("proc/self/status", "Name: x\nCpus_allowed_list:\t0-1,4\n");
        for (cpu, siblings) in [(0, "0,4"), (1, "1,5"), (4, "0,4"), (5, "1,5")] {
            let file = format!("sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list");
            write(&file, siblings);
        }
        assert_eq!(physical_cores(root.path()), Some(2));
    }

    #[test]
    fn instruction_caches_are_not_data_caches() {
        let root = tempfile::tempdir().unwrap();
        assert_eq!(caches(root.path()), CpuCaches::default());
        let published = [("1", "Instruction", "32K"), ("1", "Data", "48K"), ("2", "Unified", "2M")];
        for (index, (level, kind, size)) in published.into_iter().enumerate() {
            let at = format!("sys/devices/system/cpu/cpu0/cache/index{index}");
            let at = root.path().join(at);
            fs::create_dir_all(&at).unwrap();
            for (name, text) in [("level", level), ("type", kind), ("size", size)] {
                fs::write(at.join(name), format!("{text}\n")).unwrap();
            }
        }
        let expected = CpuCaches { l1d: 48 << 10, l2: 2 << 20, l3: 0 };
        assert_eq!(caches(root.path()), expected);
    }
}
