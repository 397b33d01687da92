//! The cases of `testdata/`, computed by numpy in float64, run through the references.

use std::collections::BTreeSet;
use std::path::PathBuf;

use lz_cpu::{CallRefError, call};
use lz_model::schema::OpKind;
use lz_model::{Catalog, DType, Layout, ParamValue, Tensor, TensorView};
use serde_json::{Map, Value};

fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../testdata/ops")
}

fn number(value: &Value) -> f64 {
    match value.as_str() {
        Some(text) => text.parse().unwrap_or_else(|_| panic!("{text} is no number")),
        None => value.as_f64().unwrap_or_else(|| panic!("{value} is no number")),
    }
}

fn numbers(value: &Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(number).collect()
}

fn extents(value: &Value) -> Vec<i64> {
    value.as_array().unwrap().iter().map(|n| n.as_i64().unwrap()).collect()
}

fn dtype(value: &Value) -> DType {
    value["dtype"].as_str().unwrap().parse().unwrap()
}

/// The memory of an input, and how it is looked at.
struct Input {
    name: String,
    memory: Tensor,
    shape: Vec<i64>,
    strides: Option<(Vec<i64>, i64)>,
}

impl Input {
    fn read(name: &str, value: &Value) -> Input {
        let (dtype, shape, data) = (dtype(value), extents(&value["shape"]), numbers(&value["data"]));
        let strides = value.get("strides").map(|s| (extents(s), value["offset"].as_i64().unwrap_or(0)));
        let memory = Tensor::from_f64(dtype, &[data.len() as i64], &data);
        for (stored, given) in memory.to_f64().iter().zip(&data) {
            assert!(
                stored == given || stored.is_nan() && given.is_nan(),
                "{name}: {given} is not representable in {dtype}"
            );
        }
        Input { name: name.to_owned(), memory, shape, strides }
    }

    fn view(&self) -> TensorView<'_> {
        let (dtype, bytes) = (self.memory.dtype(), self.memory.bytes());
        match &self.strides {
            Some((strides, offset)) => TensorView::strided(dtype, &self.shape, strides, *offset, bytes),
            None => TensorView::contiguous(dtype, &self.shape, bytes),
        }
        .unwrap()
    }
}

fn params(case: &Value) -> Vec<(String, ParamValue)> {
    let value = |v: &Value| match v {
        Value::Bool(b) => ParamValue::Bool(*b),
        Value::String(s) => ParamValue::str(s),
        Value::Number(n) if n.is_i64() => ParamValue::Int(n.as_i64().unwrap()),
        other => ParamValue::Float(number(other)),
    };
    case["params"].as_object().unwrap().iter().map(|(name, v)| (name.clone(), value(v))).collect()
}

/// Runs one case; says what is wrong with the result.
fn run(op: &str, case: &Value) -> Result<(), String> {
    let inputs: Vec<Input> = case["inputs"].as_object().unwrap().iter().map(|(n, v)| Input::read(n, v)).collect();
    let views: Vec<(&str, TensorView<'_>)> = inputs.iter().map(|i| (i.name.as_str(), i.view())).collect();
    let params = params(case);
    let params: Vec<(&str, ParamValue)> = params.iter().map(|(n, v)| (n.as_str(), *v)).collect();
    let layout: Option<Layout> = case["layout"].as_str().map(|l| l.parse().unwrap());
    let result = call(case["call"].as_str().unwrap(), &views, &params, layout);
    if case.get("error").is_some() {
        return match result {
            Err(CallRefError::Kernel(error)) if error.is_callers_fault() => Ok(()),
            other => Err(format!("expected bad data to be refused, got {other:?}")),
        };
    }
    let outputs = result.map_err(|e| e.to_string())?;
    let expected: &Map<String, Value> = case["expect"].as_object().unwrap();
    if outputs.len() != expected.len() {
        return Err(format!("{} outputs, expected {}", outputs.len(), expected.len()));
    }
    for (name, output) in &outputs {
        compare(op, output, &expected[*name]).map_err(|e| format!("{name}: {e}"))?;
    }
    Ok(())
}

fn compare(op: &str, output: &Tensor, expected: &Value) -> Result<(), String> {
    if output.dtype() != dtype(expected) || output.shape() != extents(&expected["shape"]) {
        return Err(format!(
            "{} {:?}, expected {} {}",
            output.dtype(),
            output.shape(),
            expected["dtype"],
            expected["shape"]
        ));
    }
    let schema = Catalog::get().ops().iter().find(|o| o.id() == op).unwrap().schema();
    let exact = expected["exact"].as_bool().unwrap_or(false);
    let tolerance = schema.tolerances.of(output.dtype());
    for (i, (got, want)) in output.to_f64().into_iter().zip(numbers(&expected["data"])).enumerate() {
        let close = (got - want).abs() <= tolerance.atol + tolerance.rtol * want.abs();
        let equal = got == want || got.is_nan() && want.is_nan();
        if !(equal || !exact && close) {
            return Err(format!("element {i} is {got}, expected {want}"));
        }
    }
    Ok(())
}

#[test]
fn every_case_of_every_operation_agrees_with_numpy() {
    let (mut seen, mut wrong, mut count) = (BTreeSet::new(), Vec::new(), 0);
    for entry in std::fs::read_dir(folder()).expect("testdata/ops") {
        let file: Value = serde_json::from_slice(&std::fs::read(entry.unwrap().path()).unwrap()).unwrap();
        let op = file["op"].as_str().unwrap();
        for case in file["cases"].as_array().unwrap() {
            count += 1;
            if let Err(error) = run(op, case) {
                wrong.push(format!("{op} / {}: {error}", case["name"]));
            }
        }
        seen.insert(op.to_owned());
    }
    for op in Catalog::get().ops().iter().filter(|op| op.schema().kind != OpKind::Tokenization) {
        assert!(seen.contains(op.id()), "no cases for {}", op.id());
    }
    assert!(count > 1000, "only {count} cases were found");
    assert!(wrong.is_empty(), "{} of {count} cases are wrong:\n{}", wrong.len(), wrong.join("\n"));
}

#[test]
fn every_dtype_of_every_required_input_has_a_case() {
    for entry in std::fs::read_dir(folder()).expect("testdata/ops") {
        let file: Value = serde_json::from_slice(&std::fs::read(entry.unwrap().path()).unwrap()).unwrap();
        let op = Catalog::get().ops().iter().find(|o| o.id() == file["op"].as_str().unwrap()).unwrap();
        for input in op.schema().inputs.iter().filter(|input| !input.optional) {
            let lz_model::schema::DTypeRule::In(allowed) = input.dtype else {
                continue;
            };
            for dtype in allowed.iter() {
                let covered = file["cases"]
                    .as_array()
                    .unwrap()
                    .iter()
                    .any(|case| case["inputs"][input.name]["dtype"] == dtype.name());
                assert!(covered, "{}: no case has '{}' as {dtype}", op.id(), input.name);
            }
        }
    }
}
