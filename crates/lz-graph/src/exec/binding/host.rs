//! Calls of the program the graph came from.

use super::{Bound, Candidate, Site};
use crate::exec::kernel::Kernel;
use crate::ops::host::Host;

/// The one way to make such a call.
pub(super) fn host(site: &Site<'_>, op: &Host) -> Candidate {
    Candidate {
        name: format!("host.{}", op.target),
        calls: vec![Bound {
            kernel: Kernel::Host { call: op.call, result: op.result },
            inputs: site.inputs.to_vec(),
            outputs: vec![site.output.clone()],
            params: Vec::new(),
            dims: Vec::new(),
            scratch: 0,
            reserved: 0,
        }],
        in_place: &[],
    }
}
