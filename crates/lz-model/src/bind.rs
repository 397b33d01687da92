//! From arguments to a query: shapes matched, dimensions named, every mistake reported as one.

use lz_abi::DType;
use smallvec::SmallVec;

use crate::call::{BindRules, Call, CallError};
use crate::catalog::{Facts, Op};
use crate::context::Context;
use crate::device::DeviceSpec;
use crate::layout::{self, DefaultLayouts, Layout, LayoutVerdict};
use crate::param::ParamValue;
use crate::query::{MAX_DIMS, MAX_PARAMS, Query};
use crate::schema::{DTypeRule, Sizes};
use crate::sdpa::SdpaChoice;
use crate::shape::{Axis, ShapePattern};
use crate::tensor_meta::{TensorFacts, TensorMeta};

/// A call whose arguments fit the operation.
#[derive(Clone, Debug)]
pub struct Bound {
    /// What selection looks at.
    pub query: Query,
    /// Its layout, where the operation has named ones.
    pub layout: Option<LayoutVerdict>,
}

impl Op {
    /// Matches a call with the schema. [`Op::check`] tells whether the values also make sense.
    pub fn bind(&self, call: &Call<'_>, rules: &BindRules) -> Result<Bound, CallError> {
        Binder::new(self, call)?.run(rules)
    }

    /// The layout of a call that does not say its own: the default, or the only one there is for tensors of that rank
    /// (packed tokens have no batch dimension). `rank_of` gives the rank of an input, if it is there.
    pub fn default_layout(&self, defaults: DefaultLayouts, rank_of: impl Fn(usize) -> Option<usize>) -> Option<Layout> {
        let default = self.schema().layout.layout(defaults)?;
        let tagged = (0..self.inputs.len()).filter(|&index| self.input_has_named_layouts(index));
        let Some((index, rank)) = tagged.filter_map(|index| Some((index, rank_of(index)?))).next() else {
            return Some(default);
        };
        let fitting = self.inputs[index].iter().filter(|p| p.fits_rank(rank)).filter_map(|p| p.layout);
        let mut fitting: SmallVec<[Layout; 4]> = fitting.collect();
        fitting.dedup();
        Some(if let [only] = fitting[..] { only } else { default })
    }

    /// Checks the conditions every valid call meets. They depend on the query alone, so one that
    /// was checked before need not be checked again.
    pub fn check(&self, query: &Query, device: &DeviceSpec) -> Result<(), CallError> {
        let facts = Facts { op: self, query, device };
        for (check, holds) in &self.checks {
            if !holds.test(&facts).unwrap_or(false) {
                return Err(CallError::Check {
                    op: self.id(),
                    code: check.code,
                    message: check.message,
                    hint: check.hint,
                    values: facts.describe(holds),
                });
            }
        }
        Ok(())
    }
}

/// The state of one binding.
struct Binder<'o, 'a> {
    op: &'o Op,
    inputs: &'a [Option<TensorMeta<'a>>],
    params: SmallVec<[ParamValue; MAX_PARAMS]>,
    explicit_layout: Option<Layout>,
    query: Query,
    /// Which input, or parameter, first showed each dimension.
    shown_by: [Option<&'static str>; MAX_DIMS],
}

impl Sizes for Binder<'_, '_> {
    fn dim(&self, name: &str) -> i64 {
        let Some(i) = self.op.dim_index(name) else {
            return 0;
        };
        match (self.shown_by[i], self.op.schema().dims[i].derived) {
            (None, Some(rule)) => rule(self),
            _ => self.query.dims[i],
        }
    }
    fn param(&self, name: &str) -> ParamValue {
        self.op.param_index(name).map_or(ParamValue::None, |i| self.params[i])
    }
    fn dtype(&self, input: &str) -> Option<DType> {
        self.op.input_index(input).and_then(|i| self.inputs.get(i).copied().flatten()).map(|meta| meta.dtype)
    }
}

impl<'o, 'a> Binder<'o, 'a> {
    fn new(op: &'o Op, call: &Call<'a>) -> Result<Binder<'o, 'a>, CallError> {
        let most = op.schema().inputs.len();
        if call.inputs.len() > most && call.inputs[most..].iter().any(Option::is_some) {
            return Err(CallError::TooMany { op: op.id(), what: "tensors", most, got: call.inputs.len() });
        }
        let params = op.params(call.params)?;
        let device = call.inputs.iter().flatten().next().map_or(call.device, |meta| meta.device);
        let wants_grad = call.inputs.iter().flatten().any(|meta| meta.requires_grad);
        let requires_grad = (call.context.requires_grad || wants_grad) && op.gives_gradients();
        let sdpa = if op.is_torch_attention() { call.context.sdpa } else { SdpaChoice::ANY };
        let context = Context { requires_grad, sdpa, ..call.context };
        let mut query = Query::new(op.ix(), device, &context);
        for (i, (param, value)) in op.schema().params.iter().zip(&params).enumerate() {
            query.params[i] = Query::encode(param, *value);
        }
        Ok(Binder {
            op,
            inputs: &call.inputs[..call.inputs.len().min(most)],
            params,
            explicit_layout: call.layout,
            query,
            shown_by: [None; MAX_DIMS],
        })
    }

    fn run(mut self, rules: &BindRules) -> Result<Bound, CallError> {
        self.check_presence_device_and_dtype()?;
        let verdict = self.find_layout(rules)?;
        for (i, from) in self.op.dim_params.iter().enumerate() {
            if let Some(size) = from.and_then(|p| self.params[p].as_int()) {
                if size < 0 {
                    let param = self.op.schema().dims[i].name;
                    let (got, expected) = (size.to_string(), "zero or more".into());
                    return Err(CallError::BadParam { op: self.op.id(), param, got, expected });
                }
                self.query.dims[i] = size;
                self.shown_by[i] = Some("the parameter of that name");
            }
        }
        for index in 0..self.inputs.len() {
            if let Some(meta) = self.inputs[index] {
                self.match_shape(index, &meta, verdict.map(|v| v.layout))?;
            }
        }
        for i in 0..self.op.schema().dims.len() {
            self.complete(i);
        }
        Ok(Bound { query: self.query, layout: verdict })
    }

    fn check_presence_device_and_dtype(&self) -> Result<(), CallError> {
        let (op, schema) = (self.op.id(), self.op.schema());
        let mut first: Option<(&'static str, TensorMeta<'_>)> = None;
        for (i, input) in schema.inputs.iter().enumerate() {
            let Some(meta) = self.inputs.get(i).copied().flatten() else {
                if input.optional {
                    continue;
                }
                return Err(CallError::MissingInput { op, input: input.name });
            };
            if let Some(strides) = meta.strides.filter(|s| s.len() != meta.shape.len()) {
                let (shape, strides) = (meta.shape.to_vec(), strides.to_vec());
                return Err(CallError::BadStrides { op, input: input.name, shape, strides });
            }
            let elements = meta.shape.iter().try_fold(1i64, |n, &size| n.checked_mul(size.max(1)));
            if elements.is_none() {
                return Err(CallError::TooLarge { op, input: input.name, shape: meta.shape.to_vec() });
            }
            if meta.shape.iter().any(|&n| n < 0) {
                return Err(CallError::NegativeSize { op, input: input.name, shape: meta.shape.to_vec() });
            }
            match first {
                None => first = Some((input.name, meta)),
                Some((other, reference)) if reference.device != meta.device => {
                    let (got, expected) = (meta.device.0, reference.device.0);
                    return Err(CallError::MixedDevices { op, input: input.name, got, other, expected });
                }
                Some(_) => {}
            }
            match input.dtype {
                DTypeRule::In(allowed) if !allowed.contains(meta.dtype) => {
                    return Err(CallError::WrongDType { op, input: input.name, got: meta.dtype, allowed });
                }
                DTypeRule::Same(other) => {
                    let expected = self.op.input_index(other).and_then(|i| self.inputs[i]).map(|m| m.dtype);
                    if let Some(expected) = expected.filter(|e| *e != meta.dtype) {
                        return Err(CallError::MixedDTypes { op, input: input.name, got: meta.dtype, other, expected });
                    }
                }
                DTypeRule::In(_) => {}
            }
        }
        Ok(())
    }

    /// The layout the call says, or the default in force; strides only check the latter.
    fn find_layout(&self, rules: &BindRules) -> Result<Option<LayoutVerdict>, CallError> {
        let fixed = self.op.schema().fixed_layout;
        if let Some(layout) = self.explicit_layout.filter(|layout| fixed != Some(*layout)) {
            let mut known: Vec<&str> = self.named_layouts();
            known.extend(fixed.map(Layout::name));
            if !known.contains(&layout.name()) {
                let known = if known.is_empty() { "none".into() } else { known.join(", ") };
                return Err(CallError::WrongLayout { op: self.op.id(), layout, known });
            }
            return Ok(Some(LayoutVerdict { layout, contradicted_by: None }));
        }
        let rank_of = |index: usize| self.inputs.get(index).copied().flatten().map(|meta| meta.shape.len());
        let Some(layout) = self.op.default_layout(rules.default_layouts, rank_of) else {
            return Ok(None);
        };
        let contradicting = self.tagged().find(|(_, meta)| layout::contradicts(layout, meta.shape, meta.strides));
        let Some((index, meta)) = contradicting else {
            return Ok(Some(LayoutVerdict { layout, contradicted_by: None }));
        };
        let (op, input) = (self.op.id(), self.op.schema().inputs[index].name);
        if rules.strict {
            return Err(CallError::LayoutContradicted { op, input, shape: meta.shape.to_vec(), layout });
        }
        Ok(Some(LayoutVerdict { layout, contradicted_by: Some(input) }))
    }

    /// The inputs of the call that come in named layouts.
    fn tagged(&self) -> impl Iterator<Item = (usize, TensorMeta<'a>)> + '_ {
        let given = self.inputs.iter().enumerate().filter_map(|(i, meta)| Some((i, (*meta)?)));
        given.filter(|(i, _)| self.op.input_has_named_layouts(*i))
    }

    fn named_layouts(&self) -> Vec<&'static str> {
        let mut names: Vec<_> = self.op.inputs.iter().flatten().filter_map(|p| p.layout).map(Layout::name).collect();
        names.sort_unstable();
        names.dedup();
        names
    }

    fn wrong_rank(&self, input: &str, meta: &TensorMeta<'_>) -> CallError {
        let index = self.op.input_index(input).unwrap_or(0);
        let input = &self.op.schema().inputs[index];
        CallError::WrongRank {
            op: self.op.id(),
            input: input.name,
            got: meta.shape.len(),
            shape: meta.shape.to_vec(),
            expected: input.shape.split('|').map(|s| format!("({})", s.trim())).collect::<Vec<_>>().join(" or "),
        }
    }

    fn match_shape(&mut self, index: usize, meta: &TensorMeta<'_>, layout: Option<Layout>) -> Result<(), CallError> {
        let patterns = &self.op.inputs[index];
        let usable =
            |p: &&ShapePattern| p.layout.is_none_or(|tag| Some(tag) == layout) && p.fits_rank(meta.shape.len());
        let mut first_error = None;
        for pattern in patterns.iter().filter(usable) {
            match self.match_pattern(index, meta, pattern) {
                Ok((dims, shown_by, broadcast)) => {
                    self.query.dims = dims;
                    self.shown_by = shown_by;
                    let layout = pattern.layout.unwrap_or(Layout::Strided);
                    self.query.set_tensor(index, TensorFacts::new(meta, layout, broadcast));
                    return Ok(());
                }
                Err(error) => {
                    first_error.get_or_insert(error);
                }
            }
        }
        Err(first_error.unwrap_or_else(|| self.wrong_rank(self.op.schema().inputs[index].name, meta)))
    }

    #[allow(clippy::type_complexity)]
    fn match_pattern(
        &self,
        index: usize,
        meta: &TensorMeta<'_>,
        pattern: &ShapePattern,
    ) -> Result<([i64; MAX_DIMS], [Option<&'static str>; MAX_DIMS], bool), CallError> {
        let input = &self.op.schema().inputs[index];
        let (mut dims, mut shown_by) = (self.query.dims, self.shown_by);
        let mut broadcast = false;
        let rest = meta.shape.len() + 1 - pattern.axes.len().max(1);
        let mut at = 0;
        for axis in &pattern.axes {
            let size = match axis {
                Axis::Rest(d) => {
                    at += rest;
                    self.same_leading(input.name, meta, &meta.shape[..rest], *d)?;
                    meta.shape[..rest].iter().product()
                }
                _ => {
                    at += 1;
                    meta.shape[at - 1]
                }
            };
            let (d, wanted) = match *axis {
                Axis::Dim(d) | Axis::Rest(d) => (d, size),
                Axis::PlusOne(d) => (d, size - 1),
                Axis::Broadcast(d) => {
                    if size == 1 && dims[d] != 1 {
                        broadcast = true;
                        continue;
                    }
                    // A tensor that may broadcast does not decide a size that has a value of its own.
                    if let (None, Some(n)) = (shown_by[d], self.op.schema().dims[d].otherwise) {
                        dims[d] = n;
                        shown_by[d] = Some("the operation");
                    }
                    (d, size)
                }
                Axis::Fixed(n) => {
                    if size != n {
                        let because = format!("the operation fixes it to {n}");
                        return Err(self.wrong_size(input.name, meta, n.to_string(), size, n, because));
                    }
                    continue;
                }
            };
            if let (None, Some(rule)) = (shown_by[d], self.op.schema().dims[d].derived) {
                dims[d] = rule(self);
                shown_by[d] = Some("other arguments");
            }
            match shown_by[d] {
                None if wanted >= 0 => {
                    dims[d] = wanted;
                    shown_by[d] = Some(input.name);
                }
                Some(_) if dims[d] == wanted => {}
                by => {
                    let because = format!("from {}", by.map_or("the operation".into(), |by| format!("'{by}'")));
                    let expected = if matches!(axis, Axis::PlusOne(_)) { dims[d].saturating_add(1) } else { dims[d] };
                    let name = self.op.schema().dims[d].name.to_owned();
                    return Err(self.wrong_size(input.name, meta, name, size, expected, because));
                }
            }
        }
        Ok((dims, shown_by, broadcast))
    }

    /// Inputs that share leading axes have the very same ones, not only as many elements.
    fn same_leading(
        &self,
        input: &'static str,
        meta: &TensorMeta<'_>,
        axes: &[i64],
        dim: usize,
    ) -> Result<(), CallError> {
        match self.op.leading(dim, self.inputs) {
            Some((other, expected)) if expected != axes => {
                let product = |axes: &[i64]| axes.iter().product();
                let because = format!("the leading axes of '{other}' are {expected:?}");
                let name = format!("leading axes {axes:?}");
                Err(self.wrong_size(input, meta, name, product(axes), product(expected), because))
            }
            _ => Ok(()),
        }
    }

    fn wrong_size(
        &self,
        input: &'static str,
        meta: &TensorMeta<'_>,
        dim: String,
        got: i64,
        expected: i64,
        because: String,
    ) -> CallError {
        CallError::WrongSize { op: self.op.id(), input, shape: meta.shape.to_vec(), dim, got, expected, because }
    }

    /// Sizes a dimension no tensor showed.
    fn complete(&mut self, index: usize) {
        if self.shown_by[index].is_some() {
            return;
        }
        let dim = &self.op.schema().dims[index];
        if let Some(size) = dim.derived.map(|rule| rule(self)).or(dim.otherwise) {
            self.query.dims[index] = size;
        }
    }
}
