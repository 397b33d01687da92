//! Remarks on what detection could not learn.

use std::fmt;

use serde::Serialize;

use crate::CudaAbsent;

/// Something that could not be detected, and why. Its text is one line.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "note", rename_all = "kebab-case")]
pub enum Note {
    /// There are no CUDA devices.
    CudaAbsent {
        /// Why not.
        reason: CudaAbsent,
    },
    /// NVML cannot be used, so the driver's version and free GPU memory are unknown.
    NvmlAbsent {
        /// What NVML or the loader said.
        reason: String,
    },
    /// The driver counts a device that it does not hand out.
    DeviceSkipped {
        /// The driver's ordinal.
        ordinal: u32,
        /// What the driver said.
        reason: String,
    },
    /// One fact of a device that is there.
    Unknown {
        /// The device's name.
        device: String,
        /// Which fact, as the field of `DeviceSpec` it would have filled.
        fact: &'static str,
        /// What was tried and how it failed.
        reason: String,
    },
}

impl fmt::Display for Note {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Note::CudaAbsent { reason } => write!(f, "{reason}"),
            Note::NvmlAbsent { reason } => write!(f, "no NVML: {reason}"),
            Note::DeviceSkipped { ordinal, reason } => {
                write!(f, "CUDA device {ordinal} skipped: {reason}")
            }
            Note::Unknown { device, fact, reason } => write!(f, "{fact} of {device} unknown: {reason}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_note_is_one_line_that_names_its_subject() {
        let reason = || "because".to_string();
        let notes = [
            (Note::CudaAbsent { reason: CudaAbsent::NoDriver }, "libcuda.so.1"),
            (Note::NvmlAbsent { reason: reason() }, "NVML"),
            (Note::DeviceSkipped { ordinal: 3, reason: reason() }, "device 3"),
            (Note::Unknown { device: "NVIDIA H200".into(), fact: "uuid", reason: reason() }, "uuid of NVIDIA H200"),
        ];
        for (note, subject) in notes {
            let text = note.to_string();
            assert!(text.contains(subject) && !text.contains('\n'), "{text}");
            assert!(serde_json::to_value(&note).unwrap()["note"].is_string());
        }
    }
}
