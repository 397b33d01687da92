//! A kernel's constraints compiled for one operation: names become indices, texts become expressions.

use std::ops::Deref;
use std::sync::Arc;

use lz_expr::{Expr, Type};
use lz_model::schema::{Access, DTypeRule, DimKind};
use lz_model::{
    Catalog, DType, DTypeSet, DimRule, KernelDescriptor, KvStrategy, Layout, Op, ParamRole, ParamRule, ParamValue,
    Preferred, Query, Scalar, TensorFacts,
};

use crate::decision::KernelIx;

/// A constraint that cannot be compiled.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("kernel '{kernel}', {field}: {problem}")]
pub struct BadConstraint {
    /// Which kernel.
    pub kernel: String,
    /// Which of its fields.
    pub field: String,
    /// What is wrong with it.
    pub problem: String,
}

/// What is asked of one input.
#[derive(Debug)]
pub(crate) struct InputCheck {
    pub index: usize,
    pub role: InputRole,
    /// Whether it may be given at all.
    pub usable: bool,
    /// Whether it must be given.
    pub required: bool,
    pub dtypes: DTypeSet,
    /// Named layouts accepted as they are; `None` accepts any.
    pub named_layouts: Option<Vec<Layout>>,
    pub contiguous: bool,
    pub last_stride_one: bool,
    pub aligned: bool,
    pub no_broadcast: bool,
    /// Of an operation that updates tensors in place: no argument is replaced by a transformed copy.
    pub in_place: bool,
}

impl InputCheck {
    /// Whether a tensor is fine as it is: the usual case, decided without looking further.
    pub fn fits(&self, tensor: TensorFacts) -> bool {
        let Some(dtype) = tensor.dtype() else { return !self.required };
        let layout = tensor.layout();
        self.usable
            && self.dtypes.contains(dtype)
            && self.named_layouts.as_ref().is_none_or(|named| !layout.is_named() || named.contains(&layout))
            && !(self.no_broadcast && tensor.is_broadcast()
                || self.contiguous && !tensor.is_contiguous()
                || self.last_stride_one && !tensor.has_last_stride_one()
                || self.aligned && !tensor.is_aligned())
    }
}

/// What an input is for; decides reason codes and whether the kernel's own dtypes apply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum InputRole {
    Data,
    Index,
    Mask,
    Cache,
}

/// What is asked of one parameter.
#[derive(Debug)]
pub(crate) enum ParamCheck {
    /// It must have this value (its default, or what the alias fixes).
    Is { index: usize, value: ParamValue, word: u64 },
    /// It must not be given.
    NotGiven { index: usize },
    /// It must be one of these, within these bounds.
    In { index: usize, rule: ParamRule },
    /// A tokenizer property must be one of these.
    Serves { index: usize, values: Vec<String> },
}

/// Blocks a launch needs, compiled.
#[derive(Debug)]
pub(crate) struct Grid {
    /// x, y, z.
    pub axes: [Option<Expr>; 3],
    pub blocks_per_batch_head: i64,
    pub threads: Option<i64>,
    pub shared_bytes: Option<Expr>,
}

/// A kernel compiled for one operation, at its place in a snapshot.
#[derive(Debug)]
pub(crate) struct Compiled {
    pub kernel: KernelIx,
    pub rules: Arc<Rules>,
}

impl Deref for Compiled {
    type Target = Rules;

    fn deref(&self) -> &Rules {
        &self.rules
    }
}

/// The constraints of a kernel, compiled for one operation.
#[derive(Debug)]
pub(crate) struct Rules {
    pub dims: Vec<(usize, DimRule)>,
    /// The two head counts that must be equal.
    pub equal_heads: Option<(usize, usize)>,
    pub inputs: Vec<InputCheck>,
    pub params: Vec<ParamCheck>,
    pub conditions: Vec<Expr>,
    /// Calls for which it has another priority.
    pub preferred: Option<(Expr, i32)>,
    pub workspace: Option<Expr>,
    pub grid: Option<Grid>,
    pub kv_strategies: Vec<KvStrategy>,
}

impl Rules {
    pub fn new(kernel: &KernelDescriptor, op: &'static Op) -> Result<Rules, BadConstraint> {
        let compiler = Compiler { kernel, op };
        Ok(Rules {
            dims: compiler.dims()?,
            equal_heads: compiler.equal_heads(),
            inputs: compiler.inputs()?,
            params: compiler.params()?,
            conditions: kernel
                .conditions
                .iter()
                .map(|c| compiler.expr("conditions", c, Type::Bool))
                .collect::<Result<_, _>>()?,
            preferred: compiler.preferred()?,
            workspace: kernel.workspace.as_ref().map(|w| compiler.expr("workspace", w, Type::Int)).transpose()?,
            grid: compiler.grid()?,
            kv_strategies: compiler.kv_strategies(),
        })
    }

    /// Every expression whose value may change within a cell.
    pub fn expressions(&self) -> impl Iterator<Item = &Expr> {
        let grid = self.grid.iter().flat_map(|g| g.axes.iter().flatten().chain(&g.shared_bytes));
        let preferred = self.preferred.iter().map(|(when, _)| when);
        self.conditions.iter().chain(preferred).chain(&self.workspace).chain(grid)
    }
}

struct Compiler<'a> {
    kernel: &'a KernelDescriptor,
    op: &'static Op,
}

impl Compiler<'_> {
    fn bad(&self, field: impl Into<String>, problem: impl Into<String>) -> BadConstraint {
        BadConstraint { kernel: self.kernel.id.clone(), field: field.into(), problem: problem.into() }
    }

    fn expr(&self, field: &str, text: &str, ty: Type) -> Result<Expr, BadConstraint> {
        Expr::compile_as(text, self.op.scope(), ty).map_err(|e| self.bad(field, e.to_string()))
    }

    fn preferred(&self) -> Result<Option<(Expr, i32)>, BadConstraint> {
        let compile = |p: &Preferred| Ok((self.expr("preferred.when", &p.when, Type::Bool)?, p.priority));
        self.kernel.preferred.as_ref().map(compile).transpose()
    }

    /// Rules for dimensions this operation does not have are about the others behind the alias.
    fn dims(&self) -> Result<Vec<(usize, DimRule)>, BadConstraint> {
        let target = Catalog::get().find(&self.kernel.operation).map_err(|e| self.bad("operation", e.to_string()))?;
        let mut dims = Vec::new();
        for (name, rule) in &self.kernel.dims {
            if rule.multiple_of.is_some_and(|m| m < 1) {
                return Err(self.bad(format!("dims.{name}"), "multiple_of must be 1 or more"));
            }
            match self.op.dim_index(name) {
                Some(index) => dims.push((index, rule.clone())),
                None if target.ops.iter().any(|&ix| Catalog::get().op(ix).dim_index(name).is_some()) => {}
                None => {
                    return Err(self.bad("dims", format!("'{}' has no dimension '{name}'", self.op.id())));
                }
            }
        }
        for (name, rule) in &self.kernel.params {
            if let (Some(index), Some(rule)) = (self.dim_param(name), self.size_rule(name, rule)?) {
                dims.push((index, rule));
            }
        }
        for dim in self.op.schema().dims.iter().filter(|d| d.must_constrain) {
            if !self.kernel.dims.keys().any(|name| self.op.dim_index(name) == self.op.dim_index(dim.name)) {
                return Err(self.bad("dims", format!("no constraint on '{}'; state one, even an empty one", dim.name)));
            }
        }
        Ok(dims)
    }

    /// The dimension that a parameter of that name sizes.
    fn dim_param(&self, name: &str) -> Option<usize> {
        let param = &self.op.schema().params[self.op.param_index(name)?];
        (param.role == ParamRole::Dim).then(|| self.op.dim_index(param.name)).flatten()
    }

    /// A rule for a parameter that is a size, as a rule for the dimension.
    fn size_rule(&self, name: &str, rule: &ParamRule) -> Result<Option<DimRule>, BadConstraint> {
        if self.dim_param(name).is_none() || *rule == ParamRule::default() {
            return Ok(None);
        }
        let whole = |scalar: &Scalar| match scalar {
            Scalar::Int(i) => Ok(*i),
            _ => Err(self.bad(format!("params.{name}"), "a size is one of whole numbers")),
        };
        Ok(Some(DimRule {
            min: rule.min.map(|x| x.ceil() as i64),
            max: rule.max.map(|x| x.floor() as i64),
            multiple_of: None,
            one_of: rule.one_of.as_ref().map(|list| list.iter().map(whole).collect()).transpose()?,
        }))
    }

    fn equal_heads(&self) -> Option<(usize, usize)> {
        let of_kind = |kind| self.op.schema().dims.iter().position(|d| d.kind == kind);
        let pair = (of_kind(DimKind::Heads)?, of_kind(DimKind::KvHeads)?);
        (!self.kernel.shares_kv_heads).then_some(pair)
    }

    fn inputs(&self) -> Result<Vec<InputCheck>, BadConstraint> {
        let (kernel, schema) = (self.kernel, self.op.schema());
        let has_named = self.op.has_named_layouts();
        if !has_named && !schema.inputs.is_empty() && !kernel.layouts.iter().any(|l| !l.is_named()) {
            let problem = format!("'{}' has no named layouts; say 'contiguous' or 'strided'", self.op.id());
            return Err(self.bad("layouts", problem));
        }
        for name in kernel.inputs.keys() {
            let known = Catalog::get()
                .find(&kernel.operation)
                .is_ok_and(|t| t.ops.iter().any(|&ix| Catalog::get().op(ix).input_index(name).is_some()));
            if !known {
                return Err(self.bad("inputs", format!("'{}' has no input '{name}'", self.op.id())));
            }
        }
        let in_place = schema.inputs.iter().any(|input| input.access == Access::ReadWrite);
        let check = |(index, input): (usize, &lz_model::schema::Input)| {
            let rule = kernel.inputs.iter().find(|(name, _)| self.op.input_index(name) == Some(index)).map(|(_, r)| r);
            let allowed = self.schema_dtypes(index);
            let role = match input {
                _ if input.mask => InputRole::Mask,
                _ if allowed.iter().all(|d| !d.is_float() && !DTypeSet::QUANTIZED.contains(d)) => InputRole::Index,
                _ if input.cache => InputRole::Cache,
                _ => InputRole::Data,
            };
            let own_dtypes = if matches!(role, InputRole::Index | InputRole::Mask) { allowed } else { kernel.dtypes };
            let (named_layouts, contiguous) = self.layouts(index, rule.and_then(|r| r.layouts.as_deref()))?;
            Ok(InputCheck {
                index,
                role,
                usable: !input.optional || rule.is_some(),
                required: rule.is_some_and(|r| r.required),
                dtypes: rule.and_then(|r| r.dtypes).unwrap_or(own_dtypes),
                named_layouts,
                contiguous: contiguous || kernel.requires_contiguous,
                last_stride_one: kernel.requires_last_dim_stride1,
                aligned: kernel.requires_aligned,
                no_broadcast: rule.is_some_and(|r| r.no_broadcast),
                in_place,
            })
        };
        schema.inputs.iter().enumerate().map(check).collect()
    }

    /// Which named layouts an input may have (`None` for any), and whether it must be contiguous. A
    /// rule for the input that names none leaves the kernel's own names in force.
    fn layouts(&self, index: usize, rule: Option<&[Layout]>) -> Result<(Option<Vec<Layout>>, bool), BadConstraint> {
        let own = &self.kernel.layouts[..];
        let stated = rule.unwrap_or(own);
        let named = |list: &[Layout]| list.iter().copied().filter(|l| l.is_named()).collect::<Vec<_>>();
        let strided = stated.contains(&Layout::Strided);
        let contiguous = stated.contains(&Layout::Contiguous) && !strided;
        if !self.op.input_has_named_layouts(index) || strided {
            return Ok((None, contiguous));
        }
        let names = if named(stated).is_empty() && !stated.is_empty() { named(own) } else { named(stated) };
        if names.is_empty() && !(contiguous && own.contains(&Layout::Strided)) {
            let input = self.op.schema().inputs[index].name;
            return Err(self.bad("layouts", format!("no layout is stated for '{input}'; name them, or say 'strided'")));
        }
        Ok(((!names.is_empty()).then_some(names), contiguous))
    }

    fn schema_dtypes(&self, index: usize) -> DTypeSet {
        match self.op.schema().inputs[index].dtype {
            DTypeRule::In(set) => set,
            DTypeRule::Same(other) => self.op.input_index(other).map_or(DTypeSet::EMPTY, |i| self.schema_dtypes(i)),
        }
    }

    fn params(&self) -> Result<Vec<ParamCheck>, BadConstraint> {
        let kernel = self.kernel;
        let target = Catalog::get().find(&kernel.operation).map_err(|e| self.bad("operation", e.to_string()))?;
        let mut checks = Vec::new();
        for &(name, value) in target.fixes {
            if let Some(index) = self.op.param_index(name) {
                checks.push(self.is(index, ParamValue::Bool(value)));
            }
        }
        for name in kernel.params.keys() {
            if !target.ops.iter().any(|&ix| Catalog::get().op(ix).param_index(name).is_some()) {
                return Err(self.bad("params", format!("'{}' has no parameter '{name}'", self.op.id())));
            }
        }
        for (index, param) in self.op.schema().params.iter().enumerate() {
            let rule = kernel.params.iter().find(|(name, _)| self.op.param_index(name) == Some(index)).map(|(_, r)| r);
            match (param.role, rule) {
                (ParamRole::Presence | ParamRole::Ignored, Some(rule)) if *rule != ParamRule::default() => {
                    let problem = format!("'{}' cannot decide by its value; use an empty rule", param.name);
                    return Err(self.bad("params", problem));
                }
                (ParamRole::Exact, Some(rule)) => checks.push(ParamCheck::In { index, rule: rule.clone() }),
                (ParamRole::Exact, None) if !param.universal => {
                    let fixed = target.fixes.iter().any(|(name, _)| *name == param.name);
                    if let (false, Some(value)) = (fixed, param.default.value()) {
                        checks.push(self.is(index, value));
                    }
                }
                (ParamRole::Presence, None) if !param.universal && param.default.value().is_some() => {
                    checks.push(ParamCheck::NotGiven { index });
                }
                _ => {}
            }
            if let Some(values) = kernel.tokenizer.serves.get(param.name) {
                checks.push(ParamCheck::Serves { index, values: values.clone() });
            }
        }
        Ok(checks)
    }

    fn is(&self, index: usize, value: ParamValue) -> ParamCheck {
        ParamCheck::Is { index, value, word: Query::encode(&self.op.schema().params[index], value) }
    }

    fn grid(&self) -> Result<Option<Grid>, BadConstraint> {
        let Some(rule) = &self.kernel.grid else {
            return Ok(None);
        };
        let formula = |text: &String| self.expr("grid", &rule.formula_for(text, self.op), Type::Int);
        Ok(Some(Grid {
            axes: [
                Some(formula(&rule.x_formula)?),
                rule.y_formula.as_ref().map(formula).transpose()?,
                rule.z_formula.as_ref().map(formula).transpose()?,
            ],
            blocks_per_batch_head: rule.blocks_per_batch_head,
            threads: rule.threads_per_block,
            shared_bytes: rule.shared_bytes_formula.as_ref().map(formula).transpose()?,
        }))
    }

    fn kv_strategies(&self) -> Vec<KvStrategy> {
        if !self.kernel.kv_strategies.is_empty() {
            return self.kernel.kv_strategies.clone();
        }
        let paged = self.op.input_index("block_tables").is_some();
        vec![if paged { KvStrategy::Paged } else { KvStrategy::Contiguous }]
    }
}

/// Whether a parameter's value meets a rule.
pub(crate) fn param_allowed(rule: &ParamRule, value: ParamValue) -> bool {
    let number = value.as_float();
    let in_bounds = rule.min.is_none_or(|min| number.is_some_and(|x| x >= min))
        && rule.max.is_none_or(|max| number.is_some_and(|x| x <= max));
    let listed = rule.one_of.as_ref().is_none_or(|list| {
        list.iter().any(|scalar| match (scalar, value) {
            (Scalar::Bool(a), ParamValue::Bool(b)) => *a == b,
            (Scalar::Int(a), _) => number == Some(*a as f64),
            (Scalar::Float(a), _) => number == Some(*a),
            (Scalar::Str(a), ParamValue::Str(b)) => a == b.as_str(),
            _ => false,
        })
    });
    in_bounds && listed
}

/// The dtype a kernel would be given after a cast, if casting helps at all.
pub(crate) fn castable(kernel: &KernelDescriptor, dtype: DType) -> bool {
    kernel.requires_dtype.is_some_and(|to| dtype != to && dtype.widens_to(to) && kernel.dtypes.contains(to))
}
