//! The contract of an operation, as a document.

use std::collections::BTreeMap;

use lz_model::schema::{
    Access, Alias, CheckCode, DTypeRule, DimKey, DimKind, OpSchema, Output, OutputDType, Tolerances,
};
use lz_model::{DType, DTypeSet, DefaultLayouts, Param, ParamDefault, ParamRole, ParamType};
use serde::Serialize;
use serde_json::{Value, json};

/// Everything an operation's schema says.
#[derive(Serialize)]
pub struct Contract {
    pub id: &'static str,
    pub family: &'static str,
    pub kind: &'static str,
    pub aliases: &'static [&'static str],
    pub summary: &'static str,
    pub semantics: &'static str,
    /// Which calls of a shared alias are this operation.
    pub when: Option<&'static str>,
    pub layout: LayoutDoc,
    pub dims: Vec<DimDoc>,
    pub inputs: Vec<InputDoc>,
    pub params: Vec<ParamDoc>,
    pub outputs: Vec<OutputDoc>,
    pub checks: Vec<CheckDoc>,
    pub edges: Vec<EdgeDoc>,
    pub flops: &'static str,
    pub bytes: &'static str,
    /// By dtype of the result.
    pub tolerances: BTreeMap<&'static str, ToleranceDoc>,
}

/// Which named layout a call has that does not give one.
#[derive(Serialize)]
#[serde(tag = "rule", rename_all = "snake_case")]
pub enum LayoutDoc {
    None,
    Default { layout: &'static str, setting: Option<&'static str> },
}

#[derive(Serialize)]
pub struct DimDoc {
    pub name: &'static str,
    pub aliases: &'static [&'static str],
    pub kind: &'static str,
    /// How it enters the cache key: `exact`, or `bucketed`.
    pub key: &'static str,
    pub must_constrain: bool,
    pub derived: bool,
    pub default: Option<i64>,
}

#[derive(Serialize)]
pub struct InputDoc {
    pub name: &'static str,
    pub aliases: &'static [&'static str],
    pub shape: &'static str,
    /// The dtypes it may have, unless it has that of another input.
    pub dtypes: Vec<&'static str>,
    pub same_dtype_as: Option<&'static str>,
    pub optional: bool,
    pub updated: bool,
}

#[derive(Serialize)]
pub struct ParamDoc {
    pub name: &'static str,
    pub aliases: &'static [&'static str],
    #[serde(rename = "type")]
    pub ty: &'static str,
    pub choices: &'static [&'static str],
    pub required: bool,
    /// `null` when it is required, or derived by the operation.
    pub default: Value,
    pub role: &'static str,
    pub doc: &'static str,
}

#[derive(Serialize)]
pub struct OutputDoc {
    pub name: &'static str,
    pub shape: Option<&'static str>,
    /// A dtype, `of:INPUT`, or `named:PARAMETER`; none for updated inputs.
    pub dtype: Option<String>,
    pub updates_input: bool,
}

#[derive(Serialize)]
pub struct CheckDoc {
    pub holds: &'static str,
    pub code: &'static str,
    pub message: &'static str,
    pub hint: &'static str,
}

/// What it gives where arithmetic ends.
#[derive(Serialize)]
pub struct EdgeDoc {
    pub name: &'static str,
    pub when: &'static str,
    pub gives: &'static str,
    /// Where kernels may give something else.
    pub except: Option<&'static str>,
}

#[derive(Serialize)]
pub struct ToleranceDoc {
    pub rtol: f64,
    pub atol: f64,
}

/// A name that stands for several operations.
#[derive(Serialize)]
pub struct AliasDoc {
    pub name: &'static str,
    pub operations: &'static [&'static str],
    pub fixes: BTreeMap<&'static str, bool>,
}

impl AliasDoc {
    /// An alias as a document.
    pub fn new(alias: &Alias) -> AliasDoc {
        AliasDoc { name: alias.name, operations: alias.ops, fixes: alias.fixes.iter().copied().collect() }
    }
}

impl Contract {
    /// A schema as a document.
    pub fn new(schema: &'static OpSchema) -> Contract {
        Contract {
            id: schema.id,
            family: schema.family.name(),
            kind: schema.kind.name(),
            aliases: schema.also,
            summary: schema.summary,
            semantics: schema.semantics,
            when: (!schema.when.is_empty()).then_some(schema.when),
            layout: match schema.layout.layout(DefaultLayouts::default()) {
                None => LayoutDoc::None,
                Some(layout) => LayoutDoc::Default { layout: layout.name(), setting: schema.layout.setting() },
            },
            dims: schema.dims.iter().map(dim).collect(),
            inputs: schema.inputs.iter().map(input).collect(),
            params: schema.params.iter().map(param).collect(),
            outputs: schema.outputs.iter().map(output).collect(),
            checks: schema.checks.iter().map(check).collect(),
            edges: schema.edges.iter().map(edge).collect(),
            flops: schema.flops,
            bytes: schema.bytes,
            tolerances: tolerances(schema),
        }
    }
}

fn dim(dim: &lz_model::schema::Dim) -> DimDoc {
    DimDoc {
        name: dim.name,
        aliases: dim.also,
        kind: match dim.kind {
            DimKind::Batch => "batch",
            DimKind::Seq => "seq",
            DimKind::Heads => "heads",
            DimKind::KvHeads => "kv_heads",
            DimKind::HeadDim => "head_dim",
            DimKind::Other => "other",
        },
        key: match dim.key {
            DimKey::Exact => "exact",
            DimKey::Bucketed(_) => "bucketed",
        },
        must_constrain: dim.must_constrain,
        derived: dim.derived.is_some(),
        default: dim.otherwise,
    }
}

fn input(input: &lz_model::schema::Input) -> InputDoc {
    let (dtypes, same_dtype_as) = match input.dtype {
        DTypeRule::In(set) => (set.iter().map(DType::name).collect(), None),
        DTypeRule::Same(other) => (Vec::new(), Some(other)),
    };
    InputDoc {
        name: input.name,
        aliases: input.also,
        shape: input.shape,
        dtypes,
        same_dtype_as,
        optional: input.optional,
        updated: input.access == Access::ReadWrite,
    }
}

fn param(param: &Param) -> ParamDoc {
    let (ty, choices): (_, &[&str]) = match param.ty {
        ParamType::Bool => ("bool", &[]),
        ParamType::Int => ("int", &[]),
        ParamType::Float => ("float", &[]),
        ParamType::Choice(choices) => ("choice", choices),
        ParamType::Name => ("name", &[]),
    };
    ParamDoc {
        name: param.name,
        aliases: param.also,
        ty,
        choices,
        required: param.default == ParamDefault::Required,
        default: match param.default {
            ParamDefault::Required | ParamDefault::Derived => Value::Null,
            ParamDefault::Bool(b) => json!(b),
            ParamDefault::Int(i) => json!(i),
            ParamDefault::Float(x) => json!(x),
            ParamDefault::Str(s) => json!(s),
        },
        role: match param.role {
            ParamRole::Exact => "exact",
            ParamRole::Presence => "presence",
            ParamRole::Dim => "dim",
            ParamRole::Ignored => "ignored",
        },
        doc: param.doc,
    }
}

fn output(output: &Output) -> OutputDoc {
    match *output {
        Output::Fresh { name, shape, dtype } => OutputDoc {
            name,
            shape: Some(shape),
            dtype: Some(match dtype {
                OutputDType::Of(input) => format!("of:{input}"),
                OutputDType::Fixed(dtype) => dtype.name().to_owned(),
                OutputDType::Named(param) => format!("named:{param}"),
            }),
            updates_input: false,
        },
        Output::Updates(name) => OutputDoc { name, shape: None, dtype: None, updates_input: true },
    }
}

fn check(check: &lz_model::schema::Check) -> CheckDoc {
    CheckDoc {
        holds: check.holds,
        code: match check.code {
            CheckCode::GqaHeadsMismatch => "GQA_HEADS_MISMATCH",
            CheckCode::AttnMaskInvalid => "ATTN_MASK_INVALID",
            CheckCode::CausalMoreQueries => "CAUSAL_MORE_QUERIES",
            CheckCode::Constraint => "CONSTRAINT_FAILED",
        },
        message: check.message,
        hint: check.hint,
    }
}

fn edge(edge: &lz_model::schema::Edge) -> EdgeDoc {
    EdgeDoc {
        name: edge.name,
        when: edge.when,
        gives: edge.gives,
        except: (!edge.except.is_empty()).then_some(edge.except),
    }
}

/// For the floats results may be in; nothing for operations whose results must be equal.
fn tolerances(schema: &OpSchema) -> BTreeMap<&'static str, ToleranceDoc> {
    if schema.tolerances == Tolerances::Exact {
        return BTreeMap::new();
    }
    let set = schema.inputs.iter().find_map(|input| match input.dtype {
        DTypeRule::In(set) if set.iter().any(DType::is_float) => Some(set),
        _ => None,
    });
    let floats = set.unwrap_or(DTypeSet::EMPTY).iter().filter(|d| d.is_float());
    floats
        .map(|dtype| {
            let tolerance = schema.tolerances.of(dtype);
            (dtype.name(), ToleranceDoc { rtol: tolerance.rtol, atol: tolerance.atol })
        })
        .collect()
}
