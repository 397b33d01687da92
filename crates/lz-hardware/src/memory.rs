//! Host memory this process may use.

use std::fs;
use std::path::Path;

use serde::Serialize;

/// Memory of a device in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Memory {
    /// What can be taken now.
    pub free: u64,
    /// What there is at most.
    pub total: u64,
}

/// Free and total host memory, no more than the control group (v2 or v1) allows.
///
/// `None` where the system has no `/proc/meminfo`.
pub fn cpu_memory() -> Option<Memory> {
    memory_under(Path::new("/"))
}

/// The names one version of control groups gives to the same things.
struct Cgroup {
    /// The controller's name in `/proc/self/cgroup`; empty for v2.
    controller: &'static str,
    mount: &'static str,
    limit: &'static str,
    usage: &'static str,
    /// Page cache in `memory.stat` that the kernel drops before refusing memory.
    reclaimable: &'static str,
}

/// Where the memory controller is found: v2, v2 beside v1, v1.
const CGROUPS: [Cgroup; 3] = [
    Cgroup {
        controller: "",
        mount: "sys/fs/cgroup",
        limit: "memory.max",
        usage: "memory.current",
        reclaimable: "inactive_file",
    },
    Cgroup {
        controller: "",
        mount: "sys/fs/cgroup/unified",
        limit: "memory.max",
        usage: "memory.current",
        reclaimable: "inactive_file",
    },
    Cgroup {
        controller: "memory",
        mount: "sys/fs/cgroup/memory",
        limit: "memory.limit_in_bytes",
        usage: "memory.usage_in_bytes",
        reclaimable: "total_inactive_file",
    },
];

fn memory_under(root: &Path) -> Option<Memory> {
    let meminfo = fs::read_to_string(root.join("proc/meminfo")).ok()?;
    let kib = |name| field(&meminfo, name).map(|kib| kib.saturating_mul(1024));
    let total = kib("MemTotal:")?;
    let mut memory = Memory { free: kib("MemAvailable:").or_else(|| kib("MemFree:"))?, total };
    let membership = fs::read_to_string(root.join("proc/self/cgroup")).unwrap_or_default();
    for line in membership.lines() {
        let mut parts = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(group)) = (parts.next(), parts.next()) else {
            continue;
        };
        for cgroup in &CGROUPS {
            if controllers.split(',').any(|c| c == cgroup.controller) {
                restrict(&mut memory, cgroup, &root.join(cgroup.mount), group);
            }
        }
    }
    memory.free = memory.free.min(memory.total);
    Some(memory)
}

/// Applies the limits of a group and of every group around it. Where a container sees the host's
/// path but only its own tree, the lower directories are missing and the mount itself counts.
fn restrict(memory: &mut Memory, cgroup: &Cgroup, mount: &Path, group: &str) {
    for level in Path::new(group.trim_start_matches('/')).ancestors() {
        let read = |name| fs::read_to_string(mount.join(level).join(name)).ok();
        let number = |name| read(name)?.trim().parse::<u64>().ok();
        let Some(limit) = number(cgroup.limit) else {
            continue;
        };
        memory.total = memory.total.min(limit);
        if let Some(usage) = number(cgroup.usage) {
            let dropped = read("memory.stat").and_then(|stat| field(&stat, cgroup.reclaimable));
            let held = usage.saturating_sub(dropped.unwrap_or(0));
            memory.free = memory.free.min(limit.saturating_sub(held));
        }
    }
}

/// The number after `name` on the line that starts with it.
fn field(text: &str, name: &str) -> Option<u64> {
    text.lines().find_map(|line| {
        let mut words = line.split_whitespace();
        (words.next()? == name).then(|| words.next()?.parse().ok())?
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn tree(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        root
    }

    const MEMINFO: (&str, &str) =
        ("proc/meminfo", "MemTotal:       16777216 kB\nMemFree: 1 kB\nMemAvailable:    8388608 kB\n");

    fn memory(files: &[(&str, &str)]) -> Option<Memory> {
        memory_under(tree(files).path())
    }

    #[test]
    fn without_control_groups_it_is_what_meminfo_says() {
        let host = Memory { free: 8 * GIB, total: 16 * GIB };
        assert_eq!(memory(&[MEMINFO]), Some(host));
        assert_eq!(memory(&[]), None);
        assert_eq!(memory(&[("proc/meminfo", "nonsense")]), None);
    }

    #[test]
    fn the_tightest_v2_group_wins_and_page_cache_counts_as_free() {
        let found = memory(&[
            MEMINFO,
            ("proc/self/cgroup", "0::/outer/inner\n"),
            ("sys/fs/cgroup/outer/memory.max", "4294967296\n"),
            ("sys/fs/cgroup/outer/memory.current", "3221225472\n"),
            ("sys/fs/cgroup/outer/memory.stat", "anon 1\ninactive_file 1073741824\n"),
            ("sys/fs/cgroup/outer/inner/memory.max", "max\n"),
        ]);
        let limited = Memory { free: 2 * GIB, total: 4 * GIB };
        assert_eq!(found, Some(limited));
    }

    #[test]
    fn a_v1_container_that_sees_the_hosts_path_is_limited_by_its_mount() {
        let found = memory(&[
            MEMINFO,
            ("proc/self/cgroup", "4:memory:/docker/abc\n1:cpu:/docker/abc\n0::/\n"),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "2147483648\n"),
            ("sys/fs/cgroup/memory/memory.usage_in_bytes", "1073741824\n"),
        ]);
        let limited = Memory { free: GIB, total: 2 * GIB };
        assert_eq!(found, Some(limited));
    }

    #[test]
    fn the_unlimited_v1_limit_limits_nothing() {
        let found = memory(&[
            MEMINFO,
            ("proc/self/cgroup", "4:memory:/\n"),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n"),
            ("sys/fs/cgroup/memory/memory.usage_in_bytes", "5\n"),
        ]);
        assert_eq!(found.map(|m| (m.free, m.total)), Some((8 * GIB, 16 * GIB)));
    }
}
