//! From call arguments to a call: dtypes filled in, parameters typed as the schema has them.

use std::collections::HashSet;
use std::path::Path;

use lz_model::schema::DTypeRule;
use lz_model::{
    CallSpec, Catalog, Context, DType, DTypeSet, DeviceIx, Layout, NamedCall, Op, ParamType, ParamValue, TensorMeta,
};

use crate::args::{CallArgs, Named};
use crate::error::CliError;

/// One tensor of a call.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorArg {
    /// Its name.
    pub name: String,
    /// Its dtype.
    pub dtype: DType,
    /// Its sizes.
    pub shape: Vec<i64>,
    /// Its strides, when they were given.
    pub strides: Option<Vec<i64>>,
}

/// A call whose arguments have types. Whether they fit the operation, binding tells.
#[derive(Clone, Debug)]
pub struct ResolvedCall {
    /// The operation or alias.
    pub op: String,
    /// The tensors.
    pub tensors: Vec<TensorArg>,
    /// The parameters.
    pub params: Vec<(String, ParamValue)>,
    /// The layout, when it was given.
    pub layout: Option<Layout>,
    /// The demands.
    pub context: Context,
}

impl ResolvedCall {
    /// Resolves the arguments against the schema of the operation.
    pub fn new(args: &CallArgs) -> Result<ResolvedCall, CliError> {
        let catalog = Catalog::get();
        let ops: Vec<&Op> = catalog.find(&args.op)?.ops.iter().map(|&ix| catalog.op(ix)).collect();
        unique("--shape", &args.shapes)?;
        unique("--param", &args.params)?;
        let dtypes = DTypes { ops: &ops, args };
        let tensor = |shape: &Named<crate::args::Extents>| TensorArg {
            name: shape.name.clone(),
            dtype: dtypes.of(&shape.name),
            shape: shape.value.0.clone(),
            strides: args.strides.iter().find(|s| s.name == shape.name).map(|s| s.value.0.clone()),
        };
        let tensors: Vec<TensorArg> = args.shapes.iter().map(tensor).collect();
        check_belonging(args, &tensors)?;
        let params = args.params.iter().map(|p| (p.name.clone(), typed(&ops, &p.name, &p.value))).collect();
        let context = Context {
            deterministic: args.deterministic,
            capturing: args.capturing,
            requires_grad: args.requires_grad,
            batch_invariant: args.batch_invariant,
            packing: args.packing,
            accuracy: args.accuracy,
            threads: args.threads,
            ..Context::default()
        };
        Ok(ResolvedCall { op: args.op.clone(), tensors, params, layout: args.layout, context })
    }

    /// The call, made on a device, as the engine takes it.
    pub fn named(&self, device: DeviceIx) -> NamedCall<'_> {
        let mut call = NamedCall::new().context(self.context);
        for tensor in &self.tensors {
            let meta = TensorMeta { device, ..TensorMeta::new(tensor.dtype, &tensor.shape) };
            let meta = tensor.strides.as_ref().map_or(meta, |strides| meta.strided(strides));
            call = call.input(&tensor.name, meta);
        }
        for (name, value) in &self.params {
            call = call.param(name, *value);
        }
        NamedCall { layout: self.layout, device, ..call }
    }
}

/// Reads calls from a file, one as JSON in each line; `-` is standard input.
pub fn read_calls(path: &Path) -> Result<Vec<CallSpec>, CliError> {
    let unreadable = |source| CliError::Unreadable { path: path.to_owned(), source };
    let text = match path.to_str() {
        Some("-") => std::io::read_to_string(std::io::stdin()).map_err(unreadable)?,
        _ => std::fs::read_to_string(path).map_err(unreadable)?,
    };
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    let call = |(number, line): (usize, &str)| {
        line.parse().map_err(|error| {
            let what = format!("{}, line {}: no call: {error}", path.display(), number + 1);
            CliError::argument(
                what,
                r#"write calls like {"op": "rms_norm", "tensors": {"x": {"dtype": "float32", "shape": [8, 64]}}}"#,
            )
        })
    };
    lines.map(call).collect()
}

fn unique<T>(flag: &str, given: &[Named<T>]) -> Result<(), CliError> {
    let mut seen = HashSet::new();
    match given.iter().find(|item| !seen.insert(item.name.as_str())) {
        Some(twice) => Err(CliError::argument(format!("{flag} {} was given twice", twice.name), "give it once")),
        None => Ok(()),
    }
}

/// Dtypes and strides are about tensors that were given, and strides are as many as sizes.
fn check_belonging(args: &CallArgs, tensors: &[TensorArg]) -> Result<(), CliError> {
    let dtypes = args.input_dtypes.iter().map(|d| ("--input-dtype", &d.name));
    let strides = args.strides.iter().map(|s| ("--strides", &s.name));
    for (flag, name) in dtypes.chain(strides) {
        if !tensors.iter().any(|t| t.name == *name) {
            let what = format!("{flag} {name}: there is no tensor of that name in the call");
            return Err(CliError::argument(what, format!("give its shape with --shape {name}=…")));
        }
    }
    let uneven = tensors.iter().find(|t| t.strides.as_ref().is_some_and(|s| s.len() != t.shape.len()));
    uneven.map_or(Ok(()), |t| {
        let what =
            format!("'{}' has {} sizes but {} strides", t.name, t.shape.len(), t.strides.as_ref().map_or(0, Vec::len));
        Err(CliError::argument(what, "give one stride, in elements, per size"))
    })
}

/// Finds the dtype of each tensor.
struct DTypes<'a> {
    ops: &'a [&'static Op],
    args: &'a CallArgs,
}

impl DTypes<'_> {
    fn of(&self, name: &str) -> DType {
        let input = self.ops.iter().find_map(|op| op.input_index(name).map(|i| &op.schema().inputs[i]));
        // By any of its names: a tensor given as `q` is the `query` whose dtype the others take.
        let is_it = |given: &str| given == name || input.is_some_and(|i| i.name == given || i.also.contains(&given));
        if let Some(said) = self.args.input_dtypes.iter().find(|d| is_it(&d.name)) {
            return said.value;
        }
        let data = self.args.dtype.unwrap_or(DType::F32);
        match input.map(|input| (input.mask, input.dtype)) {
            None => data,
            Some((_, DTypeRule::Same(other))) => self.of(other),
            Some((true, DTypeRule::In(_))) => DType::Bool,
            Some((false, DTypeRule::In(set))) if is_data(set) => self.args.dtype.unwrap_or_else(|| usual(set)),
            Some((false, DTypeRule::In(set))) => usual(set),
        }
    }
}

/// Whether inputs with these dtypes are the data `--dtype` is about, and not indices or scales beside it.
fn is_data(set: DTypeSet) -> bool {
    set.contains(DType::Bf16) || set.contains(DType::I8)
}

/// The dtype such an input usually has.
fn usual(set: DTypeSet) -> DType {
    let usual = [DType::F32, DType::I64, DType::I8].into_iter().find(|&d| set.contains(d));
    usual.or_else(|| set.iter().next()).unwrap_or(DType::F32)
}

/// The value of a parameter. What does not fit its type stays text, so that binding says what was expected.
fn typed(ops: &[&Op], name: &str, text: &str) -> ParamValue {
    let param = ops.iter().find_map(|op| op.param_index(name).map(|i| &op.schema().params[i]));
    let bool = || text.parse().ok().map(ParamValue::Bool);
    let int = || text.parse().ok().map(ParamValue::Int);
    let float = || text.parse().ok().map(ParamValue::Float);
    let value = match param.map(|p| p.ty) {
        Some(ParamType::Bool) => bool(),
        Some(ParamType::Int) => int(),
        Some(ParamType::Float) => float(),
        Some(ParamType::Choice(_) | ParamType::Name) | None => None,
    };
    value.unwrap_or_else(|| ParamValue::str(text))
}
