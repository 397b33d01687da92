//! Every case of `testdata/`, through dispatch.

use super::*;

fn number(value: &Value) -> f64 {
    match value.as_str() {
        Some(text) => text.parse().unwrap(),
        None => value.as_f64().unwrap(),
    }
}

fn all_numbers(value: &Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(number).collect()
}

fn extents(value: &Value) -> Vec<i64> {
    value.as_array().unwrap().iter().map(|n| n.as_i64().unwrap()).collect()
}

/// The memory of an argument, and how it is looked at.
struct Memory {
    name: String,
    dtype: DType,
    bytes: Vec<u8>,
    shape: Vec<i64>,
    strides: Vec<i64>,
    offset: i64,
}

impl Memory {
    fn read(name: &str, value: &Value) -> Memory {
        let (dtype, shape) = (value["dtype"].as_str().unwrap().parse().unwrap(), extents(&value["shape"]));
        let data = all_numbers(&value["data"]);
        let bytes = Tensor::from_f64(dtype, &[data.len() as i64], &data).bytes().to_vec();
        let strides = value.get("strides").map_or_else(|| row_major(&shape).to_vec(), extents);
        let offset = value.get("offset").map_or(0, |o| o.as_i64().unwrap());
        Memory { name: name.into(), dtype, bytes, shape, strides, offset }
    }

    fn view(&self) -> TensorView<'_> {
        TensorView::strided(self.dtype, &self.shape, &self.strides, self.offset, &self.bytes).unwrap()
    }

    fn view_mut(&mut self) -> TensorViewMut<'_> {
        TensorViewMut::strided(self.dtype, &self.shape, &self.strides, self.offset, &mut self.bytes).unwrap()
    }
}

fn compare(op: &Op, got: &TensorView<'_>, expected: &Value) -> Result<(), String> {
    let dtype: DType = expected["dtype"].as_str().unwrap().parse().unwrap();
    if got.dtype() != dtype || got.shape() != extents(&expected["shape"]) {
        return Err(format!("is {} {:?}", got.dtype(), got.shape()));
    }
    let exact = expected["exact"].as_bool().unwrap_or(false);
    let tolerance = op.schema().tolerances.of(dtype);
    for (i, (got, want)) in got.to_f64().into_iter().zip(all_numbers(&expected["data"])).enumerate() {
        let equal = got == want || got.is_nan() && want.is_nan();
        let close = (got - want).abs() <= tolerance.atol + tolerance.rtol * want.abs();
        if !(equal || !exact && close) {
            return Err(format!("element {i} is {got}, expected {want}"));
        }
    }
    Ok(())
}

fn run_case(engine: &Engine, op: &Op, case: &Value) -> Result<(), String> {
    let updated =
        |name: &str| op.schema().outputs.iter().any(|o| matches!(o, schema::Output::Updates(n) if *n == name));
    let all = case["inputs"].as_object().unwrap().iter().map(|(name, value)| Memory::read(name, value));
    let (mut caches, inputs): (Vec<Memory>, Vec<Memory>) = all.partition(|m| updated(&m.name));
    let mut arguments = Arguments::new();
    for memory in &inputs {
        arguments = arguments.input(&memory.name, memory.view());
    }
    for memory in &mut caches {
        let name = match op.input_index(&memory.name) {
            Some(index) => op.schema().inputs[index].name,
            None => return Err(format!("no input {}", memory.name)),
        };
        arguments = arguments.update(name, memory.view_mut());
    }
    for (name, value) in case["params"].as_object().unwrap() {
        let value = match value {
            Value::Bool(b) => ParamValue::Bool(*b),
            Value::String(s) if op.param_index(name).is_some_and(|i| op.schema().params[i].ty != ParamType::Float) => {
                ParamValue::str(s)
            }
            Value::Number(n) if n.is_i64() => ParamValue::Int(n.as_i64().unwrap()),
            other => ParamValue::Float(number(other)),
        };
        arguments = arguments.param(name, value);
    }
    if let Some(layout) = case["layout"].as_str() {
        arguments = arguments.layout(layout.parse().unwrap());
    }
    let result = engine.dispatch(case["call"].as_str().unwrap(), arguments);
    if case.get("error").is_some() {
        return match result {
            Err(Error::Execution { chain, .. }) if chain.iter().all(|f| f.error.is_callers_fault()) => Ok(()),
            other => Err(format!("expected bad data to be refused, got {other:?}")),
        };
    }
    let done = result.map_err(|e| e.to_string())?;
    if done.op != op.id() {
        return Err(format!("was taken for {}", done.op));
    }
    let expected = case["expect"].as_object().unwrap();
    let mut compared = 0;
    for (name, tensor) in &done.outputs {
        compare(op, &tensor.view(), &expected[*name]).map_err(|e| format!("{name} {e}"))?;
        compared += 1;
    }
    for cache in &caches {
        compare(op, &cache.view(), &expected[&cache.name]).map_err(|e| format!("{} {e}", cache.name))?;
        compared += 1;
    }
    if compared == expected.len() { Ok(()) } else { Err(format!("{compared} results, expected {}", expected.len())) }
}

#[test]
fn every_case_of_every_operation_is_dispatched_right() {
    let w = Watched::new();
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../testdata/ops");
    let (mut count, mut wrong) = (0, Vec::new());
    for op in Catalog::get().ops().iter().filter(|op| op.schema().kind != schema::OpKind::Tokenization) {
        let path = folder.join(format!("{}.json", op.id()));
        let text = std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let file: Value = serde_json::from_slice(&text).unwrap();
        for case in file["cases"].as_array().unwrap() {
            count += 1;
            if let Err(error) = run_case(&w.engine, op, case) {
                wrong.push(format!("{} / {}: {error}", op.id(), case["name"]));
            }
        }
    }
    assert!(count > 1000, "only {count} cases were found");
    assert!(wrong.is_empty(), "{} of {count} cases are wrong:\n{}", wrong.len(), wrong.join("\n"));
}
