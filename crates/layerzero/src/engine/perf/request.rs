//! Which calls somebody wants measured: a list, a grid of sizes, shapes, a model.

use std::collections::BTreeMap;
use std::path::Path;

use lz_measure::workload::{self, Geometry, Grid, Phase, Sizes, WorkloadError};
use lz_model::{CallError, CallSpec, DType, DefaultLayouts, DeviceIx, Layout, ParamSpec};
use lz_perfdb::Mode;
use serde::Deserialize;

use super::tune::Wanted;
use crate::core::Scope;
use crate::engine::Engine;

/// What to measure. Everything it says is measured: calls as they are, an operation at shapes or over a grid of sizes, and
/// the calls a model makes.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Request {
    /// Calls, as they are written down.
    pub calls: Vec<CallSpec>,
    /// An operation or alias.
    pub op: Option<String>,
    /// The dtype of its data; of a model, what it computes in.
    pub dtype: Option<String>,
    /// Shapes of its main input.
    pub shapes: Vec<Vec<i64>>,
    /// Sizes by dimension: every combination of them.
    pub dims: BTreeMap<String, Vec<i64>>,
    /// Parameters.
    pub params: BTreeMap<String, ParamSpec>,
    /// The layout.
    pub layout: Option<Layout>,
    /// A model: one that is known by name, the path of a transformers `config.json`, or its text.
    pub model: Option<String>,
    /// Batch sizes of the model's calls.
    pub batch: Vec<i64>,
    /// Lengths of its prompts.
    pub seq: Vec<i64>,
    /// Lengths of its contexts when it decodes.
    pub context: Vec<i64>,
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
    /// Sizes, shapes or a model that make no calls.
    #[error(transparent)]
    Workload(#[from] WorkloadError),
    /// An operation nobody knows.
    #[error(transparent)]
    Call(#[from] CallError),
    /// A file that cannot be read.
    #[error("'{path}' cannot be read: {source}")]
    Unreadable {
        /// Which.
        path: String,
        /// Why.
        source: std::io::Error,
    },
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
            RequestError::Unreadable { .. } => {
                let known: Vec<&str> = workload::GEOMETRIES.iter().map(|g| &*g.name).collect();
                format!("give the path of a config.json, or one of {}", known.join(", "))
            }
        }
    }
}

impl Request {
    /// The calls it asks for.
    pub fn wanted(&self, engine: &Engine, scope: &Scope<'_>) -> Result<Vec<Wanted>, RequestError> {
        let mode = if self.graph { Mode::Graph } else { Mode::Eager };
        let device = DeviceIx(self.device);
        let want = |call: CallSpec, weight: f64| Wanted { call, device, mode, weight };
        let mut wanted: Vec<Wanted> = self.calls.iter().map(|call| want(call.clone(), 1.0)).collect();
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
        if let Some(model) = &self.model {
            let or = |given: &[i64], usual: &[i64]| if given.is_empty() { usual.to_vec() } else { given.to_vec() };
            let (batch, seq) = (or(&self.batch, &[1]), or(&self.seq, &[128, 512]));
            let context = or(&self.context, &[512]);
            let sizes = Sizes { batch: &batch, seq: &seq, context: &context };
            let work = workload::calls(&geometry(model)?, &sizes, dtype, &[Phase::Prefill, Phase::Decode])?;
            wanted.extend(work.into_iter().map(|work| want(work.call, f64::from(work.times))));
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

/// The model a name, a path or a text stands for.
fn geometry(model: &str) -> Result<Geometry, RequestError> {
    if model.trim_start().starts_with('{') {
        return Ok(Geometry::from_hf_config(model)?);
    }
    let path = Path::new(model);
    if path.is_file() || path.extension().is_some_and(|e| e == "json") || model.contains('/') {
        let path = if path.is_dir() { path.join("config.json") } else { path.to_owned() };
        let unreadable = |source| RequestError::Unreadable { path: path.display().to_string(), source };
        let text = std::fs::read_to_string(&path).map_err(unreadable)?;
        return Ok(Geometry::from_hf_config(&text)?);
    }
    Ok(Geometry::named(model)?.clone())
}
