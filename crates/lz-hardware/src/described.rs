//! Devices that need not be here: their descriptions, as data.

use lz_model::DeviceSpec;

/// One described device.
struct Described {
    /// What to ask for it by.
    name: &'static str,
    /// The words of a marketing name that identify the part, so that a detected device can be
    /// given its datasheet figures. Empty where such devices are not detected.
    words: &'static [&'static str],
    /// The description, a `DeviceSpec` file.
    json: &'static str,
}

macro_rules! device {
    ($name:literal, $words:expr) => {
        Described { name: $name, words: &$words, json: include_str!(concat!("../data/devices/", $name, ".json")) }
    };
}

/// Every described device. Figures are those of the vendors' datasheets, peaks without sparsity.
const DESCRIBED: [Described; 13] = [
    device!("t4", ["T4"]),
    device!("a100", ["A100"]),
    device!("l40s", ["L40S"]),
    device!("h100", ["H100"]),
    device!("h100-pcie", ["H100", "PCIe"]),
    device!("h100-nvl", ["H100", "NVL"]),
    device!("h200", ["H200"]),
    device!("h200-nvl", ["H200", "NVL"]),
    device!("b200", ["B200"]),
    device!("mi300x", []),
    device!("gaudi3", []),
    device!("xpu-max1550", []),
    device!("m4-max", []),
];

const NAMES: [&str; DESCRIBED.len()] = {
    let mut names = [""; DESCRIBED.len()];
    let mut index = 0;
    while index < names.len() {
        names[index] = DESCRIBED[index].name;
        index += 1;
    }
    names
};

/// The names [`described`] knows.
pub fn described_names() -> &'static [&'static str] {
    &NAMES
}

/// A device by its short name (`h100`), completed as a detected one would be.
pub fn described(name: &str) -> Option<DeviceSpec> {
    let device = DESCRIBED.iter().find(|device| device.name == name)?;
    Some(DeviceSpec::from_json(device.json).expect("a shipped description parses; a test loads it"))
}

/// The description of the part a detected device's marketing name is about. Words must match
/// whole (a T400 is no T4), and the row that matches most of them wins (`H100 PCIe` over `H100`).
pub(crate) fn part_named(name: &str) -> Option<DeviceSpec> {
    let in_name =
        |word: &&str| name.split(|c: char| !c.is_ascii_alphanumeric()).any(|part| part.eq_ignore_ascii_case(word));
    DESCRIBED
        .iter()
        .filter(|device| !device.words.is_empty() && device.words.iter().all(in_name))
        .max_by_key(|device| device.words.len())
        .and_then(|device| described(device.name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_drivers_name_finds_its_part_and_no_other() {
        let expected = [
            ("Tesla T4", Some("Tesla T4")),
            ("NVIDIA T400 4GB", None),
            ("NVIDIA A100-SXM4-80GB", Some("NVIDIA A100-SXM4-80GB")),
            ("NVIDIA A100-PCIE-40GB", Some("NVIDIA A100-SXM4-80GB")),
            ("NVIDIA H100 80GB HBM3", Some("NVIDIA H100 80GB HBM3")),
            ("NVIDIA H100 PCIe", Some("NVIDIA H100 PCIe")),
            ("NVIDIA H100 NVL", Some("NVIDIA H100 NVL")),
            ("NVIDIA H200 NVL", Some("NVIDIA H200 NVL")),
            ("NVIDIA GB200", None),
            ("NVIDIA GeForce RTX 4090", None),
            ("", None),
        ];
        for (name, part) in expected {
            let found = part_named(name).map(|part| part.name);
            assert_eq!(found.as_deref(), part, "{name}");
        }
    }
}
