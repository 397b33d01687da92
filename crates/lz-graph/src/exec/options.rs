//! How graphs are compiled.

use std::sync::Arc;

use lz_abi::program::Arenas;

use super::binding::{AsDeclared, Packs, Precision, Ranking, Terms};
use super::choosing::{Chooser, Declared};
use super::foreign::Foreign;

/// How graphs are compiled, and what their programs share.
#[derive(Clone)]
pub struct Options {
    /// The threads kernels may use.
    pub threads: usize,
    /// How exactly products are computed.
    pub precision: Precision,
    /// Decides which kernel runs a node.
    pub chooser: Arc<dyn Chooser>,
    /// Ranks the kernels of the catalog's operations.
    pub ranking: Arc<dyn Ranking>,
    /// Packed weights, shared by programs of the same weights.
    pub packs: Arc<Packs>,
    /// Arenas, shared by programs that need not run at the same time.
    pub arenas: Arc<Arenas>,
    /// Kernels of other libraries, which are candidates too.
    pub foreign: Arc<[Foreign]>,
}

impl Options {
    /// What holds for every node.
    pub(super) fn terms(&self) -> Terms<'_> {
        let Options { threads, precision, packs, ranking, foreign, chooser, .. } = self;
        let (level, measured) = (ranking.level(), chooser.measures());
        Terms { threads: *threads, precision: *precision, level, packs, ranking: &**ranking, foreign, measured }
    }
}

impl Default for Options {
    fn default() -> Options {
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        Options {
            threads,
            precision: Precision::default(),
            chooser: Arc::new(Declared),
            ranking: Arc::new(AsDeclared),
            packs: Arc::default(),
            arenas: Arc::default(),
            foreign: Arc::default(),
        }
    }
}
