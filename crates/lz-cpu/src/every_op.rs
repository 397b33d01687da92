//! Every operation, with every dtype of every input, on random small calls made from its schema.

use std::collections::BTreeMap;

use lz_model::schema::{DTypeRule, Input, LayoutRule, OpKind, OpSchema, Sizes};
use lz_model::{Catalog, DType, Layout, ParamRole, ParamType, ParamValue, Tensor, TensorView, indices};

use crate::CallRefError;
use crate::call::{How, call_into};

/// A small generator (SplitMix64), so that a failure is found again.
struct Rng(u64);

impl Rng {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 33) as usize % n
    }

    fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())]
    }
}

/// A random call of an operation.
struct Case {
    dims: BTreeMap<&'static str, i64>,
    params: Vec<(&'static str, ParamValue)>,
    inputs: Vec<(&'static str, Tensor)>,
    layout: Option<Layout>,
    /// Rows are one axis: many inputs that draw their leading axes would seldom agree.
    flat: bool,
}

impl Sizes for Case {
    fn dim(&self, name: &str) -> i64 {
        self.dims[name]
    }
    fn param(&self, name: &str) -> ParamValue {
        self.params.iter().find(|(param, _)| *param == name).map_or(ParamValue::None, |(_, value)| *value)
    }
    fn dtype(&self, input: &str) -> Option<DType> {
        let given = self.inputs.iter().find(|(name, _)| *name == input);
        given.map(|(_, tensor)| tensor.dtype())
    }
}

impl Case {
    /// `forced` is the input that is given for certain, and its dtype.
    fn random(schema: &'static OpSchema, forced: (&str, DType), rng: &mut Rng) -> Case {
        let mut case = Case {
            dims: BTreeMap::new(),
            params: Vec::new(),
            inputs: Vec::new(),
            layout: None,
            flat: schema.id == "attention.merge",
        };
        for dim in schema.dims {
            let size = match dim.name {
                "heads" => rng.pick(&[0, 1, 2, 2, 4]),
                "kv_heads" => rng.pick(&[0, 1, 2, 2]),
                "head_dim" => rng.pick(&[0, 2, 2, 4]),
                "block_rows" | "block_cols" | "k" => rng.pick(&[1, 2]),
                "vocab" => rng.pick(&[1, 2, 5]),
                "table" => 4,
                "rot" => rng.pick(&[1, 2]),
                _ => rng.pick(&[0, 1, 2, 2, 3, 4]),
            };
            case.dims.insert(dim.name, size);
        }
        if schema.id == "attention.sparse.block" {
            case.dims.insert("seq_q", case.dims["row_blocks"] * case.dims["block_rows"]);
            case.dims.insert("seq_k", rng.pick(&[0, 4]));
        }
        if schema.id.contains(".standard.") {
            case.dims.insert("kv_heads", case.dims["heads"]);
        }
        for param in schema.params {
            let value = match (param.role, param.ty) {
                (ParamRole::Dim, _) => ParamValue::Int(case.dims[param.name]),
                (_, ParamType::Bool) => ParamValue::Bool(rng.below(2) == 0),
                (_, ParamType::Int) => ParamValue::Int(rng.pick(&[-1, 0, 1, 2, 32, i64::MAX])),
                (_, ParamType::Float) => ParamValue::Float(rng.pick(&[0.0, 0.5, 1.0])),
                (_, ParamType::Choice(choices)) => ParamValue::str(rng.pick(choices)),
                (_, ParamType::Name) => ParamValue::str("name"),
            };
            let required = param.default.value().is_none();
            if required || rng.below(2) == 0 {
                case.params.push((param.name, value));
            } else if let Some(default) = param.default.value() {
                case.params.push((param.name, default));
            }
        }
        for dim in schema.dims {
            if let Some(rule) = dim.derived {
                let size = rule(&case);
                case.dims.insert(dim.name, size);
            }
        }
        let tags =
            schema.inputs.iter().flat_map(|input| input.shape.split('|')).filter_map(|shape| shape.split_once(':'));
        let tags: Vec<Layout> = tags.map(|(tag, _)| tag.trim().parse().unwrap()).collect();
        if schema.layout != LayoutRule::None {
            case.layout = Some(rng.pick(&tags));
        }
        for input in schema.inputs {
            if input.optional && input.name != forced.0 && rng.below(2) == 0 {
                continue;
            }
            let dtype = match input.dtype {
                DTypeRule::Same(other) => case.inputs.iter().find(|(name, _)| *name == other).unwrap().1.dtype(),
                DTypeRule::In(_) if input.name == forced.0 => forced.1,
                DTypeRule::In(set) => rng.pick(&set.iter().collect::<Vec<_>>()),
            };
            let shape = case.shape(input, rng);
            let values = values(input, dtype, indices(&shape).count(), rng);
            case.inputs.push((input.name, Tensor::from_f64(dtype, &shape, &values)));
        }
        case
    }

    fn shape(&self, input: &Input, rng: &mut Rng) -> Vec<i64> {
        let alternatives: Vec<&str> = input
            .shape
            .split('|')
            .filter_map(|shape| match shape.split_once(':') {
                Some((tag, axes)) => (tag.trim().parse().ok() == self.layout).then_some(axes),
                None => Some(shape),
            })
            .collect();
        let mut shape = Vec::new();
        for axis in rng.pick(&alternatives).split_whitespace() {
            if let Some(name) = axis.strip_prefix("...") {
                shape.extend(vec![1; if self.flat { 0 } else { rng.below(3) }]);
                if self.dims[name] != 1 || self.flat || rng.below(2) == 0 {
                    shape.push(self.dims[name]);
                }
            } else if let Some(name) = axis.strip_suffix('?') {
                shape.push(rng.pick(&[1, self.dims[name]]));
            } else if let Some(name) = axis.strip_suffix("+1") {
                shape.push(self.dims[name] + 1);
            } else {
                shape.push(axis.parse().unwrap_or_else(|_| self.dims[axis]));
            }
        }
        shape
    }

    fn run(
        &self,
        schema: &OpSchema,
        views: &[TensorView<'_>],
        blank: fn(DType, &[i64]) -> Tensor,
    ) -> Result<Vec<Tensor>, CallRefError> {
        let inputs: Vec<_> = self.inputs.iter().map(|(name, _)| *name).zip(views.iter().cloned()).collect();
        let results = call_into(schema.id, &inputs, &self.params, self.layout, blank, &How::default())?;
        Ok(results.into_iter().map(|(_, tensor)| tensor).collect())
    }
}

fn values(input: &Input, dtype: DType, count: usize, rng: &mut Rng) -> Vec<f64> {
    let strange = rng.below(8) == 0;
    let mut values: Vec<f64> = (0..count)
        .map(|_| match dtype {
            DType::I32 | DType::I64 if strange => rng.pick(&[-1.0, 0.0, 5.0, 1e12, -1e12]),
            DType::I32 | DType::I64 | DType::Bool => rng.pick(&[0.0, 0.0, 1.0]),
            _ if strange => rng.pick(&[f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 0.0, -0.0, 1e30, 0.3]),
            _ => rng.below(401) as f64 / 100.0 - 2.0,
        })
        .collect();
    if input.shape.ends_with("+1") && !strange {
        values.sort_by(f64::total_cmp);
    }
    values
}

/// The same elements, stored backwards along every axis, in reverse axis order, with gaps.
struct Scattered {
    dtype: DType,
    shape: Vec<i64>,
    strides: Vec<i64>,
    offset: i64,
    memory: Tensor,
}

impl Scattered {
    fn of(tensor: &Tensor) -> Scattered {
        // A tensor begins at a byte: the first of two elements that share one.
        let first = if tensor.dtype().is_sub_byte() { 2 } else { 1 };
        let (mut strides, mut step, mut offset) = (Vec::new(), 2, first);
        for &n in tensor.shape() {
            strides.push(-step);
            offset += step * (n - 1).max(0);
            step *= n.max(1) + 1;
        }
        let mut memory = Tensor::zeros(tensor.dtype(), &[offset + 1]);
        let mut view = memory.view_mut();
        for (index, value) in indices(tensor.shape()).zip(tensor.to_f64()) {
            let inner: i64 = index.iter().zip(&strides).map(|(i, s)| i * s).sum();
            view.set(&[offset + inner], value);
        }
        Scattered { dtype: tensor.dtype(), shape: tensor.shape().to_vec(), strides, offset, memory }
    }

    fn view(&self) -> TensorView<'_> {
        TensorView::strided(self.dtype, &self.shape, &self.strides, self.offset, self.memory.bytes()).unwrap()
    }
}

fn dirty(dtype: DType, shape: &[i64]) -> Tensor {
    let count = indices(shape).count();
    Tensor::from_f64(dtype, shape, &vec![1.0; count])
}

#[test]
fn every_dtype_of_every_input_works_wherever_it_lies() {
    for op in Catalog::get().ops().iter().filter(|op| op.schema().kind != OpKind::Tokenization) {
        let schema = op.schema();
        for input in schema.inputs {
            let DTypeRule::In(dtypes) = input.dtype else {
                continue;
            };
            for dtype in dtypes.iter() {
                let mut succeeded = 0;
                for seed in 0..30 {
                    let case = Case::random(schema, (input.name, dtype), &mut Rng(seed));
                    let plain: Vec<_> = case.inputs.iter().map(|(_, tensor)| tensor.view()).collect();
                    let result = case.run(schema, &plain, Tensor::zeros);

                    let scattered: Vec<_> = case.inputs.iter().map(|(_, tensor)| Scattered::of(tensor)).collect();
                    let elsewhere: Vec<_> = scattered.iter().map(Scattered::view).collect();
                    let what = format!("{} with {} {dtype}, seed {seed}", schema.id, input.name);
                    assert_eq!(case.run(schema, &elsewhere, Tensor::zeros), result, "{what}: strides matter");
                    assert_eq!(case.run(schema, &plain, dirty), result, "{what}: a result is not written");
                    let some = result.iter().flatten().any(|tensor| !tensor.bytes().is_empty());
                    succeeded += usize::from(some);
                }
                assert!(succeeded > 0, "{} with {} {dtype} never ran", schema.id, input.name);
            }
        }
    }
}
