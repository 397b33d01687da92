//! Why no kernel serves a call, in few lines: what somebody can do something about.

use lz_model::{GraphDoubt, Reason};

/// Why a kernel is out.
#[derive(Clone, Debug, PartialEq)]
pub struct Rejection {
    /// The kernel.
    pub kernel_id: String,
    /// Every reason.
    pub reasons: Vec<Reason>,
}

impl Rejection {
    /// Whether a proof in a CUDA graph is all that is missing.
    pub fn is_unproven_in_graphs(&self) -> bool {
        matches!(self.reasons[..], [Reason::CudaGraphUnsafe { why: GraphDoubt::Unproven }])
    }
}

/// How many kernels are named with their reasons; the others are counted.
const NAMED: usize = 6;

/// The reasons that matter. A lock that cannot be served needs no other kernel named; kernels for other hardware and of
/// libraries that are not installed are counted, unless there are no others.
pub(crate) fn summary(rejections: &[Rejection]) -> String {
    if rejections.is_empty() {
        return "; none is registered".into();
    }
    let locked = rejections.iter().flat_map(|r| &r.reasons).find_map(|reason| match reason {
        Reason::PolicyLocked { locked } => Some(locked),
        _ => None,
    });
    match locked {
        Some(locked) => of_lock(locked, rejections),
        None => of_all(rejections),
    }
}

fn of_lock(locked: &str, rejections: &[Rejection]) -> String {
    let is_named = |r: &&Rejection| !r.reasons.iter().any(|reason| matches!(reason, Reason::PolicyLocked { .. }));
    let named: Vec<&Rejection> = rejections.iter().filter(is_named).collect();
    match named.is_empty() {
        true => format!(": '{locked}' is locked, and no kernel of that name is registered for the operation"),
        false => format!(": '{locked}' is locked and cannot serve the call{}", lines(&named)),
    }
}

fn of_all(rejections: &[Rejection]) -> String {
    let is_elsewhere = |r: &Rejection| r.reasons.iter().any(Reason::is_other_hardware);
    let library = |r: &Rejection| {
        r.reasons.iter().find_map(|reason| match reason {
            Reason::NotInstalled { library } => Some(library.clone()),
            _ => None,
        })
    };
    let elsewhere = rejections.iter().filter(|r| is_elsewhere(r)).count();
    if rejections.len() == 1 || elsewhere == rejections.len() {
        return lines(&rejections.iter().collect::<Vec<_>>());
    }
    let here: Vec<&Rejection> = rejections.iter().filter(|r| !is_elsewhere(r)).collect();
    let mut libraries: Vec<String> = here.iter().filter_map(|r| library(r)).collect();
    libraries.sort();
    libraries.dedup();
    let installed: Vec<&Rejection> = here.into_iter().filter(|r| library(r).is_none()).collect();
    let mut text = lines(&installed);
    if !libraries.is_empty() {
        text.push_str(&format!("\n  not installed: {}", libraries.join(", ")));
    }
    match elsewhere {
        0 => {}
        1 => text.push_str("\n  1 kernel is for other hardware"),
        n => text.push_str(&format!("\n  {n} kernels are for other hardware")),
    }
    text
}

/// A line for each of the first, and how many more there are.
fn lines(rejections: &[&Rejection]) -> String {
    let mut text = String::new();
    for rejection in rejections.iter().take(NAMED) {
        let reasons: Vec<String> = rejection.reasons.iter().map(|r| format!("[{}] {r}", r.code())).collect();
        text.push_str(&format!("\n  {}: {}", rejection.kernel_id, reasons.join("; ")));
    }
    if rejections.len() > NAMED {
        text.push_str(&format!("\n  and {} more", rejections.len() - NAMED));
    }
    text
}
