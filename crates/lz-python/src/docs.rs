//! What people read about a function, made from its schema: docstring, signature, defaults.

use layerzero::model::schema::{Edge, LayoutRule, Output, OutputDType};
use layerzero::model::{Argument, ArgumentKind, DTypeSet, DefaultLayouts, ParamDefault, ParamType, Signature, Special};
use pyo3::prelude::*;
use pyo3::{IntoPyObjectExt, types::PyDict, types::PyList};

/// The default of an argument, as Python writes it.
fn default_text(argument: &Argument) -> String {
    match argument.kind {
        // Seeds are drawn when they are not given.
        ArgumentKind::Param(p) if p.name == "seed" => "None".into(),
        ArgumentKind::Param(p) => match p.default {
            ParamDefault::Bool(b) => if b { "True" } else { "False" }.into(),
            ParamDefault::Int(i) => i.to_string(),
            ParamDefault::Float(x) if x != 0.0 && x.abs() < 1e-3 => format!("{x:e}").replace("e-", "e-0"),
            ParamDefault::Float(x) => format!("{x:?}"),
            ParamDefault::Str(s) => format!("'{s}'"),
            ParamDefault::Required | ParamDefault::Derived => "None".into(),
        },
        _ => "None".into(),
    }
}

/// What a kernel is given for an argument that was left out.
pub fn default_object(py: Python<'_>, argument: &Argument) -> Py<PyAny> {
    let object = match argument.kind {
        ArgumentKind::Param(p) if p.name != "seed" => match p.default {
            ParamDefault::Bool(b) => b.into_py_any(py),
            ParamDefault::Int(i) => i.into_py_any(py),
            ParamDefault::Float(x) => x.into_py_any(py),
            ParamDefault::Str(s) => s.into_py_any(py),
            ParamDefault::Required | ParamDefault::Derived => Ok(py.None()),
        },
        _ => Ok(py.None()),
    };
    object.unwrap_or_else(|_| py.None())
}

/// `attention(query, key, value, causal=True, …)`.
fn signature_text(signature: &Signature) -> String {
    let mut parts = Vec::new();
    let mut star = false;
    for argument in &signature.arguments {
        if argument.keyword_only && !star {
            parts.push("*".to_owned());
            star = true;
        }
        parts.push(match argument.required {
            true => argument.name.to_owned(),
            false => format!("{}={}", argument.name, default_text(argument)),
        });
    }
    format!("{}({})", signature.function.name, parts.join(", "))
}

fn dtypes_text(set: DTypeSet) -> String {
    set.iter().map(|d| d.name()).collect::<Vec<_>>().join(", ")
}

/// `(batch, seq_q, heads, head_dim) or …`.
fn shape_text(shape: &str) -> String {
    let one = |alternative: &str| {
        let (layout, axes) = match alternative.split_once(':') {
            Some((layout, axes)) => (format!(" as {}", layout.trim()), axes),
            None => (String::new(), alternative),
        };
        let axes: Vec<String> = axes.split_whitespace().map(axis_text).collect();
        let comma = if axes.len() == 1 { "," } else { "" };
        format!("({}{comma}){layout}", axes.join(", "))
    };
    shape.split('|').map(one).collect::<Vec<_>>().join(" or ")
}

fn axis_text(axis: &str) -> String {
    match axis.strip_suffix('?') {
        Some(name) => format!("{name} or 1"),
        None if axis.starts_with("...") => "...".into(),
        None => axis.replace("+1", " + 1"),
    }
}

/// Which layout a call has that does not say.
fn layout_text(signature: &Signature) -> String {
    let rule = signature.ops().map(|op| op.schema().layout).find(|rule| *rule != LayoutRule::None);
    let default = rule.and_then(|rule| rule.layout(DefaultLayouts::default())).map_or("none", |layout| layout.name());
    match rule.and_then(LayoutRule::setting) {
        Some(setting) => format!("the order of the dimensions; {default} when not given, or what {setting} says"),
        None => format!("the order of the dimensions; {default} when not given"),
    }
}

fn argument_text(signature: &Signature, argument: &Argument) -> String {
    match argument.kind {
        ArgumentKind::Special(Special::Layout) => layout_text(signature),
        ArgumentKind::Special(special) => {
            let found = Special::ALL.iter().find(|(_, s, _)| *s == special);
            found.map_or_else(String::new, |(_, _, doc)| (*doc).to_owned())
        }
        ArgumentKind::Param(param) => match param.ty {
            ParamType::Choice(choices) => format!("{}: {}", param.doc, choices.join(", ")),
            _ => param.doc.to_owned(),
        },
        ArgumentKind::Input(input) => {
            use layerzero::model::schema::DTypeRule;
            let shapes: Vec<&str> = signature
                .ops()
                .filter_map(|op| op.input_index(argument.name).map(|i| op.schema().inputs[i].shape))
                .fold(Vec::new(), |mut all, shape| {
                    if !all.contains(&shape) {
                        all.push(shape);
                    }
                    all
                });
            let shapes = shapes.iter().map(|s| shape_text(s)).collect::<Vec<_>>().join(" or ");
            let dtype = match input.dtype {
                DTypeRule::In(set) => dtypes_text(set),
                DTypeRule::Same(other) => format!("the dtype of {other}"),
            };
            let optional = if input.optional { ", optional" } else { "" };
            format!("tensor {shapes}; {dtype}{optional}")
        }
    }
}

/// The whole docstring, beginning with the signature in the form `inspect` reads.
pub fn docstring(signature: &Signature) -> String {
    let ids: Vec<&str> = signature.ops().map(|op| op.id()).collect();
    let mut text = format!("{}\n--\n\n", signature_text(signature));
    let summary = signature.summary();
    let mut capital = summary.chars();
    let summary: String = capital.next().into_iter().flat_map(char::to_uppercase).chain(capital).collect();
    text.push_str(&format!("{summary}.\n\n"));
    // What an operation does, once for all operations that do the same, which are named where there are several.
    let mut meanings: Vec<(&str, Vec<&str>)> = Vec::new();
    for op in signature.ops() {
        match meanings.iter_mut().find(|(meaning, _)| *meaning == op.schema().semantics) {
            Some((_, ops)) => ops.push(op.id()),
            None => meanings.push((op.schema().semantics, vec![op.id()])),
        }
    }
    let several = meanings.len() > 1;
    for (meaning, ops) in meanings {
        let of = if several { format!("{}: ", ops.join(", ")) } else { String::new() };
        text.push_str(&format!("{of}{meaning}\n\n"));
    }
    let mut edges: Vec<&Edge> = Vec::new();
    for edge in signature.ops().flat_map(|op| op.schema().edges) {
        if !edges.contains(&edge) {
            edges.push(edge);
        }
    }
    if !edges.is_empty() {
        text.push_str("Edge cases:\n");
        for edge in edges {
            let lines = [("- Case", edge.when), ("  Result", edge.gives), ("  Exception", edge.except)];
            for (name, said) in lines.iter().filter(|(_, said)| !said.is_empty()) {
                text.push_str(&format!("    {name}: {said}.\n"));
            }
        }
        text.push('\n');
    }
    text.push_str("Args:\n");
    for argument in &signature.arguments {
        let also = argument.also();
        let also = if also.is_empty() { String::new() } else { format!(" Also: {}.", also.join(", ")) };
        text.push_str(&format!("    {}: {}.{also}\n", argument.name, argument_text(signature, argument)));
    }
    text.push_str("\nReturns:\n");
    let outputs = signature.outputs();
    match outputs.is_empty() {
        true => text.push_str(&format!("    None; {} are updated in place.\n", signature.updates().join(" and "))),
        false => {
            for output in &outputs {
                if let Output::Fresh { name, shape, .. } = output {
                    let shape = match shape.split_once(':') {
                        Some(("like", input)) => format!("shaped like {input}"),
                        Some(("rows", input)) => format!("shaped like {input} without its last dimension"),
                        _ => shape_text(shape),
                    };
                    text.push_str(&format!("    {name}: tensor {shape}.\n"));
                }
            }
        }
    }
    text.push_str(&format!("\nOperations: {}. See which kernel runs with lz.which and lz.explain.", ids.join(", ")));
    text
}

/// The sets of tensors a function can be called with, one per operation that differs: for each argument its shape, in
/// the notation of [`Input::shape`](layerzero::model::schema::Input::shape), and whether it must be given.
fn forms(signature: &Signature) -> Vec<Vec<(&'static str, &'static str, bool)>> {
    let mut forms = Vec::new();
    for op in signature.ops() {
        let tensors = signature.arguments.iter().filter(|argument| matches!(argument.kind, ArgumentKind::Input(_)));
        let form: Vec<_> = tensors
            .filter_map(|argument| {
                let input = &op.schema().inputs[op.input_index(argument.name)?];
                Some((argument.name, input.shape, !input.optional))
            })
            .collect();
        if !forms.contains(&form) {
            forms.push(form);
        }
    }
    forms
}

/// Every function as data: for the torch operators, the stubs and the reference pages.
pub fn functions(py: Python<'_>) -> PyResult<Bound<'_, PyList>> {
    let list = PyList::empty(py);
    for signature in Signature::all() {
        let entry = PyDict::new(py);
        entry.set_item("name", signature.function.name)?;
        entry.set_item("target", signature.function.target)?;
        entry.set_item("ops", signature.ops().map(|op| op.id()).collect::<Vec<_>>())?;
        entry.set_item("signature", signature_text(signature))?;
        let args = PyList::empty(py);
        for argument in &signature.arguments {
            let (kind, ty) = match argument.kind {
                ArgumentKind::Input(_) => ("input", "tensor"),
                ArgumentKind::Special(_) => ("special", "object"),
                ArgumentKind::Param(p) => (
                    "param",
                    match p.ty {
                        ParamType::Bool => "bool",
                        ParamType::Int => "int",
                        ParamType::Float => "float",
                        ParamType::Choice(_) | ParamType::Name => "str",
                    },
                ),
            };
            let arg = PyDict::new(py);
            arg.set_item("name", argument.name)?;
            arg.set_item("kind", kind)?;
            arg.set_item("type", ty)?;
            arg.set_item("required", argument.required)?;
            arg.set_item("default", default_object(py, argument))?;
            arg.set_item("default_text", default_text(argument))?;
            arg.set_item("keyword_only", argument.keyword_only)?;
            arg.set_item("also", argument.also())?;
            args.append(arg)?;
        }
        entry.set_item("args", args)?;
        let outputs = PyList::empty(py);
        for output in signature.outputs() {
            if let Output::Fresh { name, shape, dtype } = output {
                let out = PyDict::new(py);
                out.set_item("name", name)?;
                out.set_item("shape", shape)?;
                // None of the two: the dtype is what one of the arguments says.
                out.set_item("dtype_of", if let OutputDType::Of(input) = dtype { Some(input) } else { None })?;
                out.set_item("dtype", if let OutputDType::Fixed(dtype) = dtype { Some(dtype.name()) } else { None })?;
                outputs.append(out)?;
            }
        }
        entry.set_item("outputs", outputs)?;
        entry.set_item("updates", signature.updates())?;
        entry.set_item("family", signature.ops().next().map(|op| op.schema().family.name()))?;
        entry.set_item("forms", forms(signature))?;
        let setting = signature.ops().find_map(|op| op.schema().layout.setting());
        entry.set_item("layout_setting", setting)?;
        list.append(entry)?;
    }
    Ok(list)
}
