//! Which calls somebody wants measured: a list, a grid of sizes, shapes.

use std::collections::BTreeMap;

use lz_measure::workload::{self, Grid, WorkloadError};
use lz_model::{CallError, CallSpec, DType, DefaultLayouts, DeviceIx, Layout, ParamSpec};
use lz_perfdb::Mode;
use serde::Deserialize;

use super::tune::Wanted;
use crate::core::Scope;
use crate::engine::Engine;

/// What to measure. Everything it says is measured: calls as they are, and an operation at shapes or over a grid of sizes.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Request {
    /// Calls, as they are written down.
    pub calls: Vec<CallSpec>,
    /// How often each of them is made, in the same order; once where it is not said.
    pub counts: Vec<u64>,
    /// An operation or alias.
    pub op: Option<String>,
    /// The dtype of its data.
    pub dtype: Option<String>,
    /// Shapes of its main input.
    pub shapes: Vec<Vec<i64>>,
    /// Sizes by dimension: every combination of them.
    pub dims: BTreeMap<String, Vec<i64>>,
    /// Parameters.
    pub params: BTreeMap<String, ParamSpec>,
    /// The layout.
    pub layout: Option<Layout>,
    /// What was called before: the calls in the performance database.
    pub known: bool,
    /// The device's number.
    pub device: u16,
    /// Whether calls are replayed in a graph.
    pub graph: bool,
}

/// Why a request cannot be met.
#[derive(Debug, thiserror::Error)]
pub enum RequestError {
    /// It asks for nothing.
    #[error("nothing is asked for: give calls, an operation with shapes or sizes, or a model")]
    Nothing,
    /// Sizes or shapes without an operation.
    #[error("{0} were given, but no operation they are of")]
    NoOperation(&'static str),
    /// A dtype nobody knows.
    #[error("{0}")]
    DType(String),
    /// Sizes or shapes that make no calls.
    #[error(transparent)]
    Workload(#[from] WorkloadError),
    /// An operation nobody knows.
    #[error(transparent)]
    Call(#[from] CallError),
}

impl RequestError {
    /// What to do about it.
    pub fn hint(&self) -> String {
        match self {
            RequestError::Nothing => "for example op=\"attention.causal\" with seq_lens=[512, 2048]".into(),
            RequestError::NoOperation(_) => "name the operation; 'layerzero ops' lists them".into(),
            RequestError::DType(_) => "name it as torch does, e.g. 'bfloat16'".into(),
            RequestError::Workload(_) => "see the documentation of lz.tune".into(),
            RequestError::Call(error) => error.hint(),
        }
    }
}

impl Request {
    /// The calls it asks for.
    pub fn wanted(&self, engine: &Engine, scope: &Scope<'_>) -> Result<Vec<Wanted>, RequestError> {
        let mode = if self.graph { Mode::Graph } else { Mode::Eager };
        let device = DeviceIx(self.device);
        let want = |call: CallSpec, weight: f64| Wanted { call, device, mode, weight };
        let counts = self.counts.iter().map(|count| *count as f64).chain(std::iter::repeat(1.0));
        let mut wanted: Vec<Wanted> = self.calls.iter().zip(counts).map(|(call, n)| want(call.clone(), n)).collect();
        if self.known {
            let known = engine.known_calls().into_iter().filter(|(_, on)| *on == device);
            wanted.extend(known.map(|(call, _)| want(call, 1.0)));
        }
        let dtype = match &self.dtype {
            Some(name) => name
                .trim_start_matches("torch.")
                .parse()
                .map_err(|e: lz_model::UnknownDType| RequestError::DType(e.to_string()))?,
            None => DType::F32,
        };
        match &self.op {
            Some(op) => {
                wanted.extend(self.of_op(op, dtype, default_layouts(scope))?.into_iter().map(|call| want(call, 1.0)))
            }
            None if !self.shapes.is_empty() => return Err(RequestError::NoOperation("shapes")),
            None if !self.dims.is_empty() => return Err(RequestError::NoOperation("sizes")),
            None => {}
        }
        // They are made later, maybe where another default is in force.
        let defaults = default_layouts(scope);
        wanted.iter_mut().for_each(|wanted| wanted.call.settle_layout(defaults));
        if wanted.is_empty() && !self.known { Err(RequestError::Nothing) } else { Ok(wanted) }
    }

    fn of_op(&self, op: &str, dtype: DType, defaults: DefaultLayouts) -> Result<Vec<CallSpec>, RequestError> {
        // A function's name stands for what it calls.
        let op = lz_model::Signature::find(op).filter(|s| s.function.name == op).map_or(op, |s| s.function.target);
        let first = lz_model::Catalog::get().op(lz_model::Catalog::get().find(op)?.ops[0]);
        let layout = self.layout.or_else(|| first.schema().layout.layout(defaults));
        let mut calls = Vec::new();
        if !self.shapes.is_empty() {
            calls = workload::from_shapes(op, dtype, layout, &self.shapes)?;
            for call in &mut calls {
                call.params.extend(self.params.clone());
            }
        }
        if !self.dims.is_empty() || self.shapes.is_empty() {
            let mut grid = Grid::new(op, dtype);
            for (name, sizes) in &self.dims {
                grid = grid.dim(name, sizes.iter().copied());
            }
            for (name, value) in &self.params {
                grid = grid.param(name, value.clone());
            }
            if let Some(layout) = layout {
                grid = grid.layout(layout);
            }
            calls.extend(grid.calls()?);
        }
        Ok(calls)
    }
}

/// The layouts of calls that do not say theirs.
fn default_layouts(scope: &Scope<'_>) -> DefaultLayouts {
    scope.snapshot().spec().settings.default_layouts
}
