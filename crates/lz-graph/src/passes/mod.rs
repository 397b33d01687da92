//! Passes: each makes a graph smaller or faster, and leaves its results what they are.
//!
//! [`PASSES`] is the list, in the order in which they run; [`optimize`] runs it until nothing changes. A pass states a
//! [`pattern`] and what stands in its place.
//!
//! # Why this order
//!
//! The list runs again as long as something changes, so the order matters only where one pass takes away what another
//! one needs.
//! Each of these has a test that fails when the two are swapped:
//!
//! | first | then | because otherwise |
//! |---|---|---|
//! | `absorb_transpose` | `fold` | a transposed weight becomes a copy: the model's own memory is not used |
//! | `absorb_transpose` | `permutes` | the swap of kᵀ joins the permute that splits heads, and is no swap any more |
//! | `gated` | `activation` | the linear layer takes the function of the gate, and the product stays alone |
//! | `bias` | `merge_linear` | the bias is added to a part of a merged layer, where no layer can take it |
//! | `residual` | `add_norm` | the norm takes a sum that the linear layer before it adds for free |

mod absorb;
mod activations;
mod add_norm;
mod attention;
mod constants;
mod conv;
mod cse;
mod fold;
mod gqa;
mod indices;
mod linear;
mod masks;
mod merge_linear;
mod norms;
pub mod pattern;
mod rope;
mod softmax;
#[cfg(test)]
mod tests;
mod tidy;

use std::collections::{BTreeMap, BTreeSet};

use crate::ir::{Graph, GraphError};

/// Changes a graph; says how often.
pub type Pass = fn(&mut Graph) -> Result<usize, GraphError>;

/// All passes, in the order in which they run.
pub const PASSES: &[(&str, Pass)] = &[
    // Equal values become one, so that patterns find the same value in all its places.
    ("cse", cse::cse),
    ("tidy", tidy::tidy),
    // What products of matrices can do themselves.
    ("absorb_transpose", absorb::transposes),
    ("absorb_scalar", absorb::scalars),
    ("pretranspose", absorb::pretranspose),
    ("permutes", tidy::permutes),
    ("fold", fold::fold),
    // What a framework has taken apart.
    ("softmax", softmax::softmax),
    ("gelu", activations::gelu),
    ("silu", activations::silu),
    ("layer_norm", norms::layer_norm),
    ("rms_norm", norms::rms_norm),
    ("rope", rope::rope),
    ("rope_tables", rope::tables),
    // Attention.
    ("attention", attention::attention),
    ("attention_scale", attention::scale),
    ("gqa", gqa::gqa),
    ("causal_mask", masks::causal),
    // Linear layers.
    ("linear", linear::linear),
    ("leading_axes", linear::leading_axes),
    ("bias", linear::bias),
    ("gated", activations::gated),
    ("activation", linear::activation),
    // Convolutions.
    ("conv_affine", conv::affine),
    ("conv_activation", conv::activation),
    // Sums with what goes around a layer.
    ("residual", linear::residual),
    ("add_norm", add_norm::add_norm),
    ("merge_linear", merge_linear::merge),
    ("sweep", |graph| Ok(graph.sweep())),
];

/// How to optimise.
#[derive(Clone, Debug)]
pub struct Options {
    off: BTreeSet<&'static str>,
    /// Whether the graph is verified after each pass. Debug builds always do.
    pub verify: bool,
    /// How often the list runs at most.
    pub rounds: usize,
}

impl Default for Options {
    fn default() -> Options {
        Options { off: BTreeSet::new(), verify: cfg!(debug_assertions), rounds: 32 }
    }
}

/// A name that is no pass.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("there is no pass '{name}'{}", lz_abi::did_you_mean(nearest))]
pub struct UnknownPass {
    /// The name.
    pub name: String,
    /// A pass with a name like it.
    pub nearest: Option<String>,
}

impl Options {
    /// The same without a pass.
    pub fn without(mut self, name: &str) -> Result<Options, UnknownPass> {
        match PASSES.iter().find(|(one, _)| *one == name) {
            Some((name, _)) => {
                self.off.insert(name);
                Ok(self)
            }
            None => {
                let nearest = lz_abi::nearest(name, PASSES.iter().map(|(name, _)| *name)).map(str::to_owned);
                Err(UnknownPass { name: name.to_owned(), nearest })
            }
        }
    }
}

/// What passes did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// How often each pass changed something. Those that did nothing are not named.
    pub rewrites: BTreeMap<&'static str, usize>,
    /// How often the list ran.
    pub rounds: usize,
    /// Whether nothing was left to do. If not, [`Options::rounds`] was reached.
    pub settled: bool,
    /// How many nodes there were.
    pub before: usize,
    /// How many nodes there are.
    pub after: usize,
}

/// Runs all passes until nothing changes.
pub fn optimize(graph: &mut Graph, options: &Options) -> Result<Report, GraphError> {
    optimize_with(PASSES, graph, options)
}

/// Runs some passes until nothing changes.
fn optimize_with(passes: &[(&'static str, Pass)], graph: &mut Graph, options: &Options) -> Result<Report, GraphError> {
    let mut report = Report { before: graph.len(), ..Report::default() };
    while report.rounds < options.rounds && !report.settled {
        report.rounds += 1;
        report.settled = true;
        for (name, pass) in passes.iter().filter(|(name, _)| !options.off.contains(name)) {
            let count = pass(graph)?;
            if options.verify || cfg!(debug_assertions) {
                graph.verify()?;
            }
            if count > 0 {
                *report.rewrites.entry(name).or_default() += count;
                report.settled = false;
            }
        }
    }
    report.after = graph.len();
    Ok(report)
}
