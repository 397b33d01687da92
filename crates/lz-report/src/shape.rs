//! A call in a few words.

use std::collections::BTreeMap;

use lz_model::{BindRules, CallSpec, Catalog, Context, DType, DeviceIx, Op, ParamSpec, Query};

/// What is said of a call.
pub(crate) struct Shape {
    pub op: String,
    pub label: String,
    pub dtype: String,
    pub variant: String,
    pub dims: BTreeMap<String, i64>,
}

/// Dimensions that are told together: the first alone where both are the same, `first/second` otherwise.
const PAIRS: &[(&str, &str, &str)] = &[
    ("seq_q", "seq_k", "seq "),
    ("heads", "kv_heads", "heads "),
    ("head_dim", "v_dim", "dim "),
    ("head_dim", "rot", "dim "),
];
/// Dimensions that are told as a way from one to the other.
const ARROWS: &[(&str, &str)] = &[("in_features", "out_features"), ("hidden", "intermediate")];

/// Sizes in short, in the order given.
pub(crate) fn label(dims: &[(&str, i64)]) -> String {
    let size = |name: &str| dims.iter().find(|(n, _)| *n == name).map(|(_, size)| *size);
    let pair = |name: &str| {
        PAIRS.iter().find(|(first, second, _)| *first == name && size(second).is_some()).map(|p| (p.1, p.2))
    };
    let mut told: Vec<&str> = Vec::new();
    let mut words = Vec::new();
    for &(name, first) in dims {
        if told.contains(&name) {
            continue;
        }
        told.push(name);
        let arrow = ARROWS.iter().find(|(from, to)| *from == name && size(to).is_some());
        words.push(if let Some((_, to)) = arrow {
            told.push(to);
            format!("{first}→{}", size(to).unwrap_or(0))
        } else if let Some((second, word)) = pair(name) {
            told.push(second);
            match size(second) {
                Some(other) if other != first => format!("{word}{first}/{other}"),
                _ => format!("{word}{first}"),
            }
        } else {
            format!("{} {first}", name.replace('_', " "))
        });
    }
    words.join(" · ")
}

/// The names of an operation's dimensions in the order of its schema; none for one the catalog does not have.
pub(crate) fn dim_order(op: &str) -> Vec<&'static str> {
    let ops = Catalog::get().ops();
    ops.iter().find(|o| o.id() == op).map_or_else(Vec::new, |op| op.schema().dims.iter().map(|d| d.name).collect())
}

/// What can be said of a call: by the schema where it fits, by its tensors where it does not.
pub(crate) fn of(call: &CallSpec) -> Shape {
    let named = call.named(DeviceIx(0), Context::default());
    match Catalog::get().resolve(&call.op, &named, &BindRules::default(), |_| None) {
        Ok((_, bound)) => bound_shape(call, Catalog::get().op(bound.query.op()), &bound.query),
        Err(_) => unbound_shape(call),
    }
}

fn bound_shape(call: &CallSpec, op: &Op, query: &Query) -> Shape {
    let dims = op.schema().dims.iter().enumerate().filter(|(_, dim)| dim.derived.is_none());
    let dims: Vec<(&str, i64)> = dims.map(|(i, dim)| (dim.name, query.dim(i))).collect();
    let dtype = op.dtype(query);
    Shape {
        op: op.id().to_owned(),
        label: label(&dims),
        dtype: dtype.map_or("", DType::name).to_owned(),
        variant: variant(call, Some(op), dtype),
        dims: dims.into_iter().map(|(name, size)| (name.to_owned(), size)).collect(),
    }
}

fn unbound_shape(call: &CallSpec) -> Shape {
    let sizes = |shape: &[i64]| shape.iter().map(i64::to_string).collect::<Vec<_>>().join("×");
    let tensors = call.tensors.iter().map(|(name, t)| format!("{name} {}", sizes(&t.shape)));
    let dtype = call.tensors.values().map(|t| t.dtype).find(|d| d.is_float());
    let dtype = dtype.or_else(|| call.tensors.values().map(|t| t.dtype).next());
    Shape {
        op: call.op.clone(),
        label: tensors.collect::<Vec<_>>().join(" · "),
        dtype: dtype.map_or("", DType::name).to_owned(),
        variant: variant(call, None, dtype),
        dims: BTreeMap::new(),
    }
}

/// A number in few digits: `1e-6`, `0.125`.
fn brief(x: f64) -> String {
    let rounded: f64 = format!("{x:.4e}").parse().unwrap_or(x);
    format!("{rounded:?}")
}

/// What sizes and dtype leave open: the layout, parameters, optional tensors, other dtypes, strides.
fn variant(call: &CallSpec, op: Option<&Op>, dtype: Option<DType>) -> String {
    let mut words: Vec<String> = call.layout.iter().map(|layout| layout.name().to_owned()).collect();
    for (name, value) in &call.params {
        words.push(match value {
            ParamSpec::Bool(b) => format!("{name}={b}"),
            ParamSpec::Int(i) => format!("{name}={i}"),
            ParamSpec::Float(x) => format!("{name}={}", brief(*x)),
            ParamSpec::Str(s) => format!("{name}={s}"),
        });
    }
    for (name, tensor) in &call.tensors {
        let optional = op.and_then(|op| op.input_index(name).map(|i| op.schema().inputs[i].optional));
        let other = Some(tensor.dtype).filter(|d| Some(*d) != dtype && (d.is_float() || d.bits() < 32));
        match (optional == Some(true), other) {
            (_, Some(other)) => words.push(format!("{name} {other}")),
            (true, None) => words.push(format!("+{name}")),
            (false, None) => {}
        }
        if tensor.strides.is_some() {
            words.push(format!("{name} strided"));
        }
    }
    words.join(", ")
}
