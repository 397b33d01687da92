//! The catalog: every schema, made ready for use once per process.

use std::collections::HashMap;
use std::sync::LazyLock;

use lz_abi::{DType, DTypeSet, nearest};
use lz_expr::{Env, Expr, Scope, Type, Value};

use crate::call::CallError;
use crate::device::DeviceSpec;
use crate::ids::OpIx;
use crate::ops::{ALIASES, OPS};
use crate::param::{ParamRole, ParamType, ParamValue};
use crate::query::{MAX_DIMS, MAX_INPUTS, MAX_PARAMS, Query};
use crate::schema::{Alias, Check, Family, LayoutRule, OpSchema, Output, OutputDType, Tolerance};
use crate::shape::{self, ShapePattern};

/// Where an expression's field comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Field {
    Dim(usize),
    Param(usize),
    ParamGiven(usize),
    InputPresent(usize),
    InputDType(usize),
    DType,
    DTypeBits,
    Layout,
    Operation,
    Family,
    Platform,
    Sm,
    HasTensorCores,
    Generation,
    Vendor,
    DeviceName,
    Deterministic,
    Capturing,
    RequiresGrad,
    TpSize,
}

/// Fields every operation has: name, type, other names.
const COMMON_FIELDS: &[(&str, Type, Field, &[&str])] = &[
    ("dtype", Type::Str, Field::DType, &[]),
    ("dtype_bits", Type::Int, Field::DTypeBits, &[]),
    ("layout", Type::Str, Field::Layout, &[]),
    ("operation", Type::Str, Field::Operation, &["op"]),
    ("family", Type::Str, Field::Family, &[]),
    ("platform", Type::Str, Field::Platform, &["target.platform", "device"]),
    ("sm", Type::Int, Field::Sm, &["sm_version", "target.sm", "target.sm_version"]),
    ("target.has_tensor_cores", Type::Bool, Field::HasTensorCores, &["has_tensor_cores"]),
    ("target.generation", Type::Str, Field::Generation, &["generation"]),
    ("target.vendor", Type::Str, Field::Vendor, &["vendor"]),
    ("target.name", Type::Str, Field::DeviceName, &[]),
    ("context.deterministic", Type::Bool, Field::Deterministic, &[]),
    ("context.capturing", Type::Bool, Field::Capturing, &["context.cuda_graph"]),
    ("context.requires_grad", Type::Bool, Field::RequiresGrad, &[]),
    ("context.tp_size", Type::Int, Field::TpSize, &["tp_size"]),
];

/// An operation, ready for use: its schema with shapes read and expressions compiled.
pub struct Op {
    ix: OpIx,
    schema: &'static OpSchema,
    pub(crate) inputs: Vec<Vec<ShapePattern>>,
    pub(crate) outputs: Vec<Vec<ShapePattern>>,
    /// For each dimension, the parameter that sizes it, if one does.
    pub(crate) dim_params: Vec<Option<usize>>,
    scope: Scope,
    fields: Vec<Field>,
    field_names: Vec<String>,
    when: Option<Expr>,
    pub(crate) checks: Vec<(&'static Check, Expr)>,
    flops: Expr,
    flops_when: Vec<(Expr, Expr)>,
    bytes: Expr,
}

impl Op {
    fn new(ix: OpIx, schema: &'static OpSchema) -> Op {
        let id = schema.id;
        assert!(
            schema.dims.len() <= MAX_DIMS && schema.inputs.len() <= MAX_INPUTS && schema.params.len() <= MAX_PARAMS,
            "{id} is too large: at most {MAX_DIMS} dimensions, {MAX_INPUTS} inputs and {MAX_PARAMS} parameters"
        );
        let dim = |name: &str| schema.dims.iter().position(|d| d.name == name);
        let (scope, fields, field_names) = scope_of(schema);
        let bool_expr = |text| Expr::compile_as(text, &scope, Type::Bool).unwrap_or_else(|e| panic!("{id}: {e}"));
        let int_expr = |text| Expr::compile_as(text, &scope, Type::Int).unwrap_or_else(|e| panic!("{id}: {e}"));
        let output_shape = |output: &Output| match *output {
            Output::Fresh { shape, .. } if !shape.starts_with("like:") && !shape.starts_with("rows:") => {
                shape::parse(shape, dim)
            }
            _ => Vec::new(),
        };
        Op {
            ix,
            schema,
            inputs: schema.inputs.iter().map(|input| shape::parse(input.shape, dim)).collect(),
            outputs: schema.outputs.iter().map(output_shape).collect(),
            dim_params: schema
                .dims
                .iter()
                .map(|d| schema.params.iter().position(|p| p.role == ParamRole::Dim && p.name == d.name))
                .collect(),
            when: (!schema.when.is_empty()).then(|| bool_expr(schema.when)),
            checks: schema.checks.iter().map(|check| (check, bool_expr(check.holds))).collect(),
            flops: int_expr(schema.flops),
            flops_when: schema.flops_when.iter().map(|(when, flops)| (bool_expr(when), int_expr(flops))).collect(),
            bytes: int_expr(schema.bytes),
            scope,
            fields,
            field_names,
        }
    }

    /// Its place in the catalog.
    pub fn ix(&self) -> OpIx {
        self.ix
    }

    /// Its id.
    pub fn id(&self) -> &'static str {
        self.schema.id
    }

    /// Its schema.
    pub fn schema(&self) -> &'static OpSchema {
        self.schema
    }

    /// The fields that rules, constraints and formulas for this operation may name.
    pub fn scope(&self) -> &Scope {
        &self.scope
    }

    /// The dimension a field is, if it is one.
    pub fn dim_of_slot(&self, slot: u16) -> Option<usize> {
        match self.fields[slot as usize] {
            Field::Dim(index) => Some(index),
            _ => None,
        }
    }

    /// A call without its promises, but for those that somebody takes notice of; `None` when it makes no others.
    pub fn unpromised(&self, query: &Query, noticed: impl Fn(&str) -> bool) -> Option<Query> {
        let mut dims = *query.dims();
        let promises = self.schema().params.iter().filter(|p| p.promise && !noticed(p.name));
        promises.filter_map(|p| self.dim_index(p.name)).for_each(|at| dims[at] = 0);
        (dims != *query.dims()).then(|| query.with_dims(dims))
    }

    /// The place of a dimension, by any of its names.
    pub fn dim_index(&self, name: &str) -> Option<usize> {
        self.schema.dims.iter().position(|d| d.name == name || d.also.contains(&name))
    }

    /// The place of an input, by any of its names.
    pub fn input_index(&self, name: &str) -> Option<usize> {
        self.schema.inputs.iter().position(|i| i.name == name || i.also.contains(&name))
    }

    /// The place of a parameter, by any of its names.
    pub fn param_index(&self, name: &str) -> Option<usize> {
        self.schema.params.iter().position(|p| p.name == name || p.also.contains(&name))
    }

    /// Whether an input comes in named layouts.
    pub fn input_has_named_layouts(&self, index: usize) -> bool {
        self.inputs[index].iter().any(|pattern| pattern.layout.is_some())
    }

    /// Whether some input of it comes in named layouts.
    pub fn has_named_layouts(&self) -> bool {
        (0..self.inputs.len()).any(|index| self.input_has_named_layouts(index))
    }

    /// Whether a call of a shared alias is this operation.
    pub fn admits(&self, facts: &Facts<'_>) -> bool {
        self.when.as_ref().is_none_or(|when| when.test(facts).unwrap_or(false))
    }

    /// Floating-point operations of a call; saturates.
    pub fn flops(&self, facts: &Facts<'_>) -> f64 {
        let special = self.flops_when.iter().find(|(when, _)| when.test(facts).unwrap_or(false));
        special.map_or(&self.flops, |(_, flops)| flops).int(facts).map_or(f64::INFINITY, |n| n as f64)
    }

    /// Bytes a call must move at least; saturates.
    pub fn bytes(&self, facts: &Facts<'_>) -> f64 {
        self.bytes.int(facts).map_or(f64::INFINITY, |n| n as f64)
    }

    /// Whether it is what torch's `scaled_dot_product_attention` computes: dense attention.
    pub fn is_torch_attention(&self) -> bool {
        self.schema.family == Family::Attention && self.schema.layout == LayoutRule::Dense
    }

    /// Whether a result of it can have a gradient: token ids, quantized values and updated caches have none.
    pub fn gives_gradients(&self) -> bool {
        let float = |name: &&str| name.parse::<DType>().is_ok_and(|d| d.is_float() && d.bits() >= 16);
        let named = |param: &str| match self.param_index(param).map(|i| self.schema.params[i].ty) {
            Some(ParamType::Choice(choices)) => choices.iter().all(float),
            _ => false,
        };
        self.schema.outputs.iter().any(|output| match *output {
            Output::Fresh { dtype: OutputDType::Of(_), .. } => true,
            Output::Fresh { dtype: OutputDType::Named(param), .. } => named(param),
            Output::Fresh { dtype: OutputDType::Fixed(_), .. } | Output::Updates(_) => false,
        })
    }

    /// The dtype a call is about: that of its first tensor which is neither index nor mask.
    pub fn dtype(&self, query: &Query) -> Option<DType> {
        let dtypes = || (0..self.schema.inputs.len()).filter_map(|i| query.tensor(i).dtype().map(|d| (i, d)));
        let data =
            dtypes().find(|(i, d)| !self.schema.inputs[*i].mask && (d.is_float() || DTypeSet::QUANTIZED.contains(*d)));
        data.or_else(|| dtypes().next()).map(|(_, d)| d)
    }

    /// How far the results of a call may be from the float64 ones: by the float a parameter names for the result
    /// (`dequantize`), else by the dtype the call is about.
    pub fn tolerance(&self, query: &Query) -> Tolerance {
        let named = self.named_result(query).filter(|dtype| dtype.is_float() && dtype.bits() >= 16);
        self.schema.tolerances.of(named.or_else(|| self.dtype(query)).unwrap_or(DType::I64))
    }

    /// The dtype that a parameter names for a result.
    fn named_result(&self, query: &Query) -> Option<DType> {
        let named = |output: &Output| match *output {
            Output::Fresh { dtype: OutputDType::Named(param), .. } => self.param_index(param),
            _ => None,
        };
        let at = self.schema.outputs.iter().find_map(named)?;
        query.param(at, &self.schema.params[at]).as_str()?.parse().ok()
    }
}

fn scope_of(schema: &OpSchema) -> (Scope, Vec<Field>, Vec<String>) {
    let mut scope = Scope::new();
    let (mut fields, mut names) = (Vec::new(), Vec::new());
    let mut add = |name: &str, ty: Type, field: Field, also: &[&str]| {
        if scope.slot(name).is_some() {
            return;
        }
        let slot = scope.field(name, ty);
        fields.push(field);
        names.push(name.to_owned());
        for alias in also {
            if scope.slot(alias).is_none() {
                scope.alias(*alias, slot);
            }
        }
    };
    for (i, dim) in schema.dims.iter().enumerate() {
        add(dim.name, Type::Int, Field::Dim(i), dim.also);
    }
    for (i, param) in schema.params.iter().enumerate() {
        match param.role {
            ParamRole::Exact => {
                let ty = match param.ty {
                    ParamType::Bool => Type::Bool,
                    ParamType::Int => Type::Int,
                    ParamType::Float => Type::Float,
                    ParamType::Choice(_) | ParamType::Name => Type::Str,
                };
                add(param.name, ty, Field::Param(i), param.also);
            }
            ParamRole::Presence => add(&format!("{}.given", param.name), Type::Bool, Field::ParamGiven(i), &[]),
            ParamRole::Dim | ParamRole::Ignored => {}
        }
    }
    for (i, input) in schema.inputs.iter().enumerate() {
        add(&format!("{}.present", input.name), Type::Bool, Field::InputPresent(i), &[]);
        add(&format!("{}.dtype", input.name), Type::Str, Field::InputDType(i), &[]);
    }
    for &(name, ty, field, also) in COMMON_FIELDS {
        add(name, ty, field, also);
    }
    (scope, fields, names)
}

/// A query with what is needed to read its fields by name.
#[derive(Clone, Copy)]
pub struct Facts<'a> {
    /// The operation.
    pub op: &'a Op,
    /// The query.
    pub query: &'a Query,
    /// The device it is about.
    pub device: &'a DeviceSpec,
}

impl Facts<'_> {
    /// The values an expression looks at: `heads=6, kv_heads=4`.
    pub fn describe(&self, expr: &Expr) -> String {
        let one = |&slot: &u16| {
            let name = &self.op.field_names[slot as usize];
            match self.get(slot) {
                Value::Bool(v) => format!("{name}={v}"),
                Value::Int(v) => format!("{name}={v}"),
                Value::Float(v) => format!("{name}={v}"),
                Value::Str(v) => format!("{name}={v}"),
            }
        };
        expr.slots().iter().map(one).collect::<Vec<_>>().join(", ")
    }
}

impl Env for Facts<'_> {
    fn get(&self, slot: u16) -> Value<'_> {
        let (query, schema) = (self.query, self.op.schema);
        let dtype = |d: Option<DType>| Value::Str(d.map_or("none", DType::name));
        match self.op.fields[slot as usize] {
            Field::Dim(i) => Value::Int(query.dim(i)),
            Field::Param(i) => match query.param(i, &schema.params[i]) {
                ParamValue::Bool(b) => Value::Bool(b),
                ParamValue::Int(n) => Value::Int(n),
                ParamValue::Float(x) => Value::Float(x),
                ParamValue::Str(s) => Value::Str(s.as_str()),
                ParamValue::None => match schema.params[i].ty {
                    ParamType::Bool => Value::Bool(false),
                    ParamType::Int => Value::Int(0),
                    ParamType::Float => Value::Float(f64::NAN),
                    ParamType::Choice(_) | ParamType::Name => Value::Str(""),
                },
            },
            Field::ParamGiven(i) => Value::Bool(query.param_given(i)),
            Field::InputPresent(i) => Value::Bool(query.tensor(i).is_present()),
            Field::InputDType(i) => dtype(query.tensor(i).dtype()),
            Field::DType => dtype(self.op.dtype(query)),
            Field::DTypeBits => Value::Int(self.op.dtype(query).map_or(8, |d| i64::from(d.bits()))),
            Field::Layout => Value::Str(query.tensor(0).layout().name()),
            Field::Operation => Value::Str(schema.id),
            Field::Family => Value::Str(schema.family.name()),
            Field::Platform => Value::Str(self.device.platform.name()),
            Field::Sm => Value::Int(self.device.sm.map_or(0, i64::from)),
            Field::HasTensorCores => Value::Bool(self.device.has_tensor_cores()),
            Field::Generation => Value::Str(self.device.generation.as_deref().unwrap_or("none")),
            Field::Vendor => Value::Str(&self.device.vendor),
            Field::DeviceName => Value::Str(&self.device.name),
            Field::Deterministic => Value::Bool(query.context().deterministic),
            Field::Capturing => Value::Bool(query.context().capturing),
            Field::RequiresGrad => Value::Bool(query.context().requires_grad),
            Field::TpSize => Value::Int(i64::from(query.context().tp_size)),
        }
    }
}

/// What a name stands for: one operation, or several behind an alias.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    /// The name.
    pub name: &'static str,
    /// The operations, in order of resolution.
    pub ops: Vec<OpIx>,
    /// Parameters the name fixes.
    pub fixes: &'static [(&'static str, bool)],
}

/// Every operation and alias.
pub struct Catalog {
    ops: Vec<Op>,
    by_name: HashMap<&'static str, Target>,
}

static CATALOG: LazyLock<Catalog> = LazyLock::new(|| Catalog::new(OPS, ALIASES));

impl Catalog {
    fn new(schemas: &[&'static OpSchema], aliases: &'static [Alias]) -> Catalog {
        let most = usize::from(u16::MAX);
        assert!(schemas.len() <= most, "{} operations; an index of one has 16 bits", schemas.len());
        let ops: Vec<Op> = schemas.iter().enumerate().map(|(i, schema)| Op::new(OpIx(i as u16), schema)).collect();
        let mut by_name = HashMap::new();
        let mut insert =
            |name, target| assert!(by_name.insert(name, target).is_none(), "two operations are called '{name}'");
        for op in &ops {
            for &name in [op.schema.id].iter().chain(op.schema.also) {
                insert(name, Target { name, ops: vec![op.ix], fixes: &[] });
            }
        }
        let find = |id: &str| ops.iter().find(|op| op.id() == id).unwrap_or_else(|| panic!("no operation '{id}'")).ix;
        for alias in aliases {
            insert(
                alias.name,
                Target { name: alias.name, ops: alias.ops.iter().map(|id| find(id)).collect(), fixes: alias.fixes },
            );
        }
        Catalog { ops, by_name }
    }

    /// The catalog of this process.
    pub fn get() -> &'static Catalog {
        &CATALOG
    }

    /// Every operation, in the order of [`OPS`].
    pub fn ops(&self) -> &[Op] {
        &self.ops
    }

    /// One operation.
    pub fn op(&self, ix: OpIx) -> &Op {
        &self.ops[ix.0 as usize]
    }

    /// What a name stands for.
    pub fn find(&self, name: &str) -> Result<&Target, CallError> {
        self.by_name.get(name).ok_or_else(|| CallError::UnknownOp {
            name: name.to_owned(),
            nearest: nearest(name, self.by_name.keys().copied()).map(str::to_owned),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_operation_says_how_its_updates_are_tried_again() {
        for op in Catalog::get().ops() {
            let schema = op.schema();
            let updates = schema.outputs.iter().any(|output| matches!(output, crate::schema::Output::Updates(_)));
            assert_eq!(schema.update.is_some(), updates, "{}", op.id());
            if let Some(crate::schema::Update::Rows { index, .. }) = schema.update {
                assert!(op.input_index(index).is_some(), "{}", op.id());
            }
        }
    }

    #[test]
    fn every_operation_of_the_specification_is_there() {
        let catalog = Catalog::get();
        let specified = [
            "tokenize.encode",
            "tokenize.decode",
            "embedding.lookup",
            "posenc.rope",
            "posenc.alibi",
            "attention.causal",
            "attention.full",
            "attention.paged",
            "mlp.linear",
            "mlp.fused",
            "norm.rms",
            "norm.layer",
            "sampling.topk",
            "sampling.topp",
            "sampling.speculative",
            "quantize",
            "attention.standard.prefill",
            "attention.standard.prefill.paged",
            "attention.standard.prefill.varlen",
            "attention.gqa.prefill.varlen",
            "attention.standard.decode",
            "attention.standard.decode.paged",
            "attention.mla.prefill",
            "attention.mla.decode",
            "attention.mla.decode.paged",
            "attention.sparse.block",
            "attention.sparse.variable_block",
            "attention.gqa.prefill",
            "attention.gqa.prefill.paged",
            "attention.gqa.decode",
            "attention.gqa.decode.paged",
            "attention.cross.prefill",
            "attention.cross.decode",
            "norm.fused_add_rms",
            "activation.silu_mul",
            "activation.gelu",
            "dequantize",
            "kv_cache.append",
            "kv_cache.compact",
        ];
        for name in specified {
            assert!(catalog.find(name).is_ok(), "{name}");
        }
    }

    /// Room for what comes: many operations, each with as many inputs as a query holds.
    #[test]
    fn there_may_be_many_operations_with_many_inputs() {
        use crate::ops::norm::RMS;
        use crate::schema::{BLANK, Input};
        const COUNT: usize = 300;
        let text = |text: String| -> &'static str { text.leak() };
        let inputs: Vec<Input> =
            (0..MAX_INPUTS).map(|i| Input::new(text(format!("x{i}")), "...rows hidden", DTypeSet::FLOATS)).collect();
        let inputs: &'static [Input] = inputs.leak();
        let schema = |i: usize| OpSchema {
            id: text(format!("test.op{i}")),
            dims: RMS.dims,
            inputs,
            outputs: &[Output::Updates("x0")],
            flops: RMS.flops,
            bytes: RMS.bytes,
            ..BLANK
        };
        let schemas: Vec<&'static OpSchema> = (0..COUNT).map(|i| &*Box::leak(Box::new(schema(i)))).collect();
        let catalog = Catalog::new(&schemas, &[]);
        let shape = [4, 8];
        let mut seen = std::collections::HashSet::new();
        for op in catalog.ops() {
            let meta = crate::tensor_meta::TensorMeta::new(DType::F32, &shape);
            let given = vec![Some(meta); MAX_INPUTS];
            let call = crate::call::Call {
                inputs: &given,
                params: &[],
                layout: None,
                device: crate::ids::DeviceIx(0),
                context: crate::context::Context::default(),
            };
            let query = op.bind(&call, &crate::call::BindRules::default()).unwrap().query;
            assert_eq!((query.op(), query.tensor(MAX_INPUTS - 1).dtype()), (op.ix(), Some(DType::F32)));
            assert!(seen.insert(query.fingerprint()), "{} is found where another is", op.id());
        }
        assert_eq!(catalog.find("test.op299").unwrap().ops, [OpIx(299)]);
    }

    #[test]
    fn an_unknown_operation_suggests_the_nearest() {
        let Err(CallError::UnknownOp { nearest, .. }) = Catalog::get().find("atention.causal") else { panic!() };
        assert_eq!(nearest.as_deref(), Some("attention.causal"));
    }

    #[test]
    fn every_schema_is_complete() {
        for op in Catalog::get().ops() {
            let schema = op.schema();
            assert!(!schema.summary.is_empty() && !schema.semantics.is_empty(), "{}", op.id());
            let tensorless = schema.inputs.is_empty();
            assert_eq!(tensorless, schema.kind == crate::schema::OpKind::Tokenization, "{}", op.id());
            assert!(tensorless || !schema.outputs.is_empty(), "{}", op.id());
        }
    }
}
