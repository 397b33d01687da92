//! One call of any operation, from the sizes of its dimensions.

use std::collections::BTreeMap;

use lz_model::schema::{DTypeRule, DimKind, Family, Input, Sizes};
use lz_model::{
    BindRules, Bound, CallError, CallSpec, Catalog, Context, DType, DTypeSet, DefaultLayouts, DeviceIx, DeviceSpec,
    Facts, Layout, Op, ParamDefault, ParamSpec, ParamValue, Platform, TensorSpec,
};

use super::error::WorkloadError;
use super::usual::{self, Known};

/// The most elements a tensor may have: 2 TiB in half precision.
pub(super) const MOST_ELEMENTS: i64 = 1 << 40;

/// Sizes of an operation's dimensions, as far as they are known.
#[derive(Clone)]
pub(super) struct Point<'a> {
    /// The operation whose schema is followed.
    pub op: &'static Op,
    /// The name the call is made by.
    pub name: &'a str,
    pub dtype: DType,
    pub layout: Option<Layout>,
    pub params: &'a BTreeMap<String, ParamSpec>,
    /// By dimension; `None` is not known.
    pub sizes: Vec<Option<i64>>,
    /// The leading axes whose product is a dimension, where a shape told them.
    pub leading: Option<Vec<i64>>,
}

impl Sizes for Point<'_> {
    fn dim(&self, name: &str) -> i64 {
        let Some(i) = self.op.dim_index(name) else { return 0 };
        self.sizes[i].or_else(|| self.op.schema().dims[i].derived.map(|rule| rule(self))).unwrap_or(0)
    }
    fn param(&self, name: &str) -> ParamValue {
        let Some(i) = self.op.param_index(name) else { return ParamValue::None };
        let param = &self.op.schema().params[i];
        let given = self.params.iter().find(|(n, _)| self.op.param_index(n) == Some(i)).map(|(_, v)| v.value());
        let usual = || usual::param(self.op.id(), param.name).map(|v| v.value());
        given.or_else(|| param.default.value()).or_else(usual).unwrap_or(ParamValue::None)
    }
    fn dtype(&self, input: &str) -> Option<DType> {
        self.op.input_index(input).map(|i| self.dtype_of(&self.op.schema().inputs[i]))
    }
}

impl Point<'_> {
    /// The call; every size that was given is one it has.
    pub fn call(mut self) -> Result<CallSpec, WorkloadError> {
        let asked = self.sizes.clone();
        self.check_dtype()?;
        self.complete();
        let schema = self.op.schema();
        let layout = self.layout()?;
        let mut call = CallSpec::new(self.name);
        call.params = self.params.clone();
        for param in schema.params {
            let index = self.op.param_index(param.name);
            if self.params.keys().any(|name| self.op.param_index(name) == index) {
                continue;
            }
            if let Some(dim) = schema.dims.iter().position(|d| d.name == param.name) {
                let size = self.known(dim)?;
                if param.default.value() != Some(ParamValue::Int(size)) {
                    call.params.insert(param.name.to_owned(), size.into());
                }
            } else if let (ParamDefault::Required, Some(value)) = (param.default, usual::param(schema.id, param.name)) {
                call.params.insert(param.name.to_owned(), value);
            }
        }
        let wanted: Vec<bool> = schema.inputs.iter().map(|input| self.wants(input, &asked)).collect();
        for (input, _) in schema.inputs.iter().zip(&wanted).filter(|(_, wanted)| **wanted) {
            let shape = self.shape(input, layout)?;
            let elements = shape.iter().try_fold(1i64, |n, &size| n.checked_mul(size));
            if elements.is_none_or(|n| n > MOST_ELEMENTS) {
                let op = self.name.to_owned();
                return Err(WorkloadError::TooLarge { op, input: input.name.to_owned(), shape, most: MOST_ELEMENTS });
            }
            call.tensors.insert(input.name.to_owned(), TensorSpec::new(self.dtype_of(input), &shape));
        }
        call.layout = layout;
        let bound = bind(&call)?;
        let op = Catalog::get().op(bound.query.op());
        for (i, asked) in asked.iter().enumerate() {
            if let Some(asked) = asked.filter(|asked| *asked != bound.query.dim(i)) {
                let (op, dim) = (self.name.to_owned(), op.schema().dims[i].name);
                return Err(WorkloadError::OtherSize { op, dim, asked, has: bound.query.dim(i) });
            }
        }
        Ok(call)
    }

    /// Gives the dimensions nobody sized their usual sizes.
    fn complete(&mut self) {
        let schema = self.op.schema();
        // An alias stands for several operations, and none of them is meant yet.
        let is_one = Catalog::get().find(self.name).is_ok_and(|target| target.ops.len() == 1);
        let name = if is_one { schema.id } else { self.name };
        for _ in 0..schema.dims.len() {
            for i in 0..schema.dims.len() {
                let known = Known { name, schema, sizes: &self.sizes };
                if self.sizes[i].is_none() {
                    self.sizes[i] = usual::size(&known, schema.dims[i].name);
                }
            }
        }
    }

    /// The dtype must be one the operation's data can have: it is not silently replaced.
    fn check_dtype(&self) -> Result<(), WorkloadError> {
        let data = |set: DTypeSet| set != DTypeSet::INDICES && set != DTypeSet::of(&[DType::Bool]);
        let sets =
            self.op.schema().inputs.iter().filter(|input| !input.optional).filter_map(|input| match input.dtype {
                DTypeRule::In(set) => Some(set).filter(|set| data(*set)),
                DTypeRule::Same(_) => None,
            });
        match sets.into_iter().next() {
            Some(allowed) if !allowed.contains(self.dtype) => {
                Err(WorkloadError::WrongDType { of: format!("'{}'", self.name), got: self.dtype, allowed })
            }
            _ => Ok(()),
        }
    }

    fn dtype_of(&self, input: &Input) -> DType {
        match input.dtype {
            DTypeRule::Same(other) => self.dtype(other).unwrap_or(self.dtype),
            DTypeRule::In(set) if set.contains(self.dtype) => self.dtype,
            DTypeRule::In(DTypeSet::INDICES) => match self.op.schema().family {
                Family::Attention => DType::I32,
                _ => DType::I64,
            },
            DTypeRule::In(set) if set.contains(DType::F32) => DType::F32,
            DTypeRule::In(set) => set.iter().next().unwrap_or(self.dtype),
        }
    }

    /// Whether the call gets an input: required ones, usual ones, and those without which a size would not show.
    fn wants(&self, input: &Input, asked: &[Option<i64>]) -> bool {
        let schema = self.op.schema();
        if !input.optional || usual::has_tensor(schema.id, input.name) {
            return true;
        }
        let shown = |dim: &str| schema.inputs.iter().any(|i| !i.optional && names(i.shape).any(|name| name == dim));
        schema.dims.iter().zip(asked).any(|(dim, asked)| {
            asked.is_some_and(|size| dim.otherwise.is_some_and(|usual| usual != size))
                && !shown(dim.name)
                && names(input.shape).any(|name| name == dim.name)
        })
    }

    /// The layout the call has: the one that was said, or the operation's own.
    fn layout(&self) -> Result<Option<Layout>, WorkloadError> {
        let own: Vec<Layout> =
            self.op.schema().inputs.iter().flat_map(|i| i.shape.split('|')).filter_map(|a| tagged(a).0).collect();
        match (self.layout, self.op.schema().layout) {
            (None, rule) => Ok(rule.layout(DefaultLayouts::default())),
            (Some(layout), _) if own.contains(&layout) => Ok(Some(layout)),
            (Some(layout), _) => {
                let mut known: Vec<&str> = own.iter().map(|l| l.name()).collect();
                known.sort_unstable();
                known.dedup();
                let known = if known.is_empty() { "none".into() } else { known.join(", ") };
                Err(CallError::WrongLayout { op: self.op.id(), layout, known }.into())
            }
        }
    }

    fn shape(&self, input: &Input, layout: Option<Layout>) -> Result<Vec<i64>, WorkloadError> {
        let alternatives = || input.shape.split('|').map(tagged);
        let fitting = alternatives().find(|(tag, _)| tag.is_none() || *tag == layout);
        let (_, axes) = fitting.or_else(|| alternatives().next()).unwrap_or_default();
        let mut shape = Vec::new();
        for axis in axes.split_whitespace() {
            if let Ok(size) = axis.parse() {
                shape.push(size);
                continue;
            }
            let size = match self.op.dim_index(name(axis)) {
                Some(dim) => self.known(dim)?,
                None => 1,
            };
            match &self.leading {
                Some(leading) if axis.starts_with("...") => shape.extend(leading),
                _ => shape.push(size.saturating_add(i64::from(axis.ends_with("+1")))),
            }
        }
        Ok(shape)
    }

    fn known(&self, index: usize) -> Result<i64, WorkloadError> {
        let dims = self.op.schema().dims;
        let size = self.sizes[index].or_else(|| dims[index].derived.map(|rule| rule(self)));
        size.ok_or_else(|| {
            // Others follow from a length: that is what to ask for.
            let length = dims.iter().zip(&self.sizes).find(|(d, size)| d.kind == DimKind::Seq && size.is_none());
            WorkloadError::MissingDim { op: self.name.to_owned(), dim: length.map_or(&dims[index], |(d, _)| d).name }
        })
    }
}

/// An alternative of a shape without its layout's tag.
fn tagged(alternative: &str) -> (Option<Layout>, &str) {
    match alternative.split_once(':') {
        Some((tag, axes)) => (tag.trim().parse().ok(), axes),
        None => (None, alternative),
    }
}

/// The dimension an axis is of.
fn name(axis: &str) -> &str {
    axis.trim_start_matches("...").trim_end_matches("+1").trim_end_matches('?')
}

/// The dimensions a shape shows.
fn names(shape: &'static str) -> impl Iterator<Item = &'static str> {
    shape.split('|').flat_map(|alternative| tagged(alternative).1.split_whitespace().map(name))
}

/// Binds a call: nothing leaves this crate that is no call.
pub(super) fn bind(call: &CallSpec) -> Result<Bound, WorkloadError> {
    let catalog = Catalog::get();
    let named = call.named(DeviceIx(0), Context::default());
    let refused = |source| WorkloadError::Call { call: call.to_string(), source: Box::new(source) };
    let (_, bound) = catalog.resolve(&call.op, &named, &BindRules::default(), |_| None).map_err(refused)?;
    let (op, device) = (catalog.op(bound.query.op()), DeviceSpec::new(Platform::Cpu, "any"));
    if op.admits(&Facts { op, query: &bound.query, device: &device }) {
        Ok(bound)
    } else {
        let (op, when) = (call.op.clone(), op.schema().when);
        Err(WorkloadError::AnotherOp { op, when, call: call.to_string() })
    }
}
