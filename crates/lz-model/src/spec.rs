//! A call as it is written down: in files, in the performance database, on the wire.

use std::collections::BTreeMap;
use std::fmt;

use lz_abi::DType;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use crate::accuracy::Accuracy;
use crate::bind::Bound;
use crate::call::NamedCall;
use crate::catalog::Catalog;
use crate::context::Context;
use crate::ids::DeviceIx;
use crate::layout::{DefaultLayouts, Layout};
use crate::packing::Packing;
use crate::param::{ParamRole, ParamType, ParamValue};
use crate::tensor_meta::TensorMeta;

/// One tensor of a [`CallSpec`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TensorSpec {
    /// Its dtype.
    #[serde(serialize_with = "name_of", deserialize_with = "dtype_named")]
    pub dtype: DType,
    /// Its sizes.
    pub shape: Vec<i64>,
    /// Its strides in elements; row-major without gaps when not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub strides: Option<Vec<i64>>,
}

impl TensorSpec {
    /// A tensor that is row-major without gaps.
    pub fn new(dtype: DType, shape: &[i64]) -> TensorSpec {
        TensorSpec { dtype, shape: shape.to_vec(), strides: None }
    }

    fn meta(&self, device: DeviceIx) -> TensorMeta<'_> {
        let meta = TensorMeta::new(self.dtype, &self.shape).on(device);
        self.strides.as_ref().map_or(meta, |strides| meta.strided(strides))
    }
}

fn name_of<S: Serializer>(dtype: &DType, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(dtype.name())
}

fn dtype_named<'de, D: Deserializer<'de>>(deserializer: D) -> Result<DType, D::Error> {
    String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
}

/// The value of a parameter in a [`CallSpec`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum ParamSpec {
    /// A truth value.
    Bool(bool),
    /// An integer.
    Int(i64),
    /// A real number.
    Float(f64),
    /// A name.
    Str(String),
}

impl ParamSpec {
    /// The value; `None` for "not given".
    pub fn of(value: ParamValue) -> Option<ParamSpec> {
        Some(match value {
            ParamValue::None => return None,
            ParamValue::Bool(b) => ParamSpec::Bool(b),
            ParamValue::Int(i) => ParamSpec::Int(i),
            ParamValue::Float(x) => ParamSpec::Float(x),
            ParamValue::Str(s) => ParamSpec::Str(s.as_str().to_owned()),
        })
    }

    /// The value as calls have it, of a parameter of that type. A text that cannot be one is not interned: in its place is
    /// one that no parameter takes.
    fn value_of(&self, ty: Option<ParamType>) -> ParamValue {
        match self {
            ParamSpec::Str(s) if !ty.is_some_and(|ty| ty.takes_text(s)) => ParamValue::str("an unknown text"),
            _ => self.value(),
        }
    }

    /// The value as calls have it.
    pub fn value(&self) -> ParamValue {
        match self {
            ParamSpec::Bool(b) => ParamValue::Bool(*b),
            ParamSpec::Int(i) => ParamValue::Int(*i),
            ParamSpec::Float(x) => ParamValue::Float(*x),
            ParamSpec::Str(s) => ParamValue::str(s),
        }
    }
}

/// A call, written down: operation, tensors, parameters, layout. On which device it runs is said beside it.
///
/// ```
/// use lz_model::{CallSpec, DType, TensorSpec};
///
/// let call = CallSpec::new("rms_norm").tensor("x", DType::Bf16, &[512, 4096]).param("eps", 1e-6);
/// let text = call.to_string();
/// assert_eq!(text, r#"{"op":"rms_norm","tensors":{"x":{"dtype":"bfloat16","shape":[512,4096]}},"params":{"eps":1e-6}}"#);
/// assert_eq!(text.parse::<CallSpec>().unwrap(), call);
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CallSpec {
    /// The operation or alias.
    pub op: String,
    /// Tensors by name.
    pub tensors: BTreeMap<String, TensorSpec>,
    /// Parameters by name; those at their default may be left out.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub params: BTreeMap<String, ParamSpec>,
    /// The layout, where the operation has several.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layout: Option<Layout>,
    /// How its weights lie in memory.
    #[serde(default, skip_serializing_if = "Packing::is_plain")]
    pub packing: Packing,
    /// How exactly it must be computed, at least.
    #[serde(default, skip_serializing_if = "Accuracy::is_standard")]
    pub accuracy: Accuracy,
}

impl From<bool> for ParamSpec {
    fn from(value: bool) -> Self {
        ParamSpec::Bool(value)
    }
}

impl From<i64> for ParamSpec {
    fn from(value: i64) -> Self {
        ParamSpec::Int(value)
    }
}

impl From<f64> for ParamSpec {
    fn from(value: f64) -> Self {
        ParamSpec::Float(value)
    }
}

impl From<&str> for ParamSpec {
    fn from(value: &str) -> Self {
        ParamSpec::Str(value.to_owned())
    }
}

impl CallSpec {
    /// A call with nothing in it yet.
    pub fn new(op: impl Into<String>) -> CallSpec {
        CallSpec {
            op: op.into(),
            tensors: BTreeMap::new(),
            params: BTreeMap::new(),
            layout: None,
            packing: Packing::Plain,
            accuracy: Accuracy::Standard,
        }
    }

    /// Adds a tensor.
    pub fn tensor(mut self, name: &str, dtype: DType, shape: &[i64]) -> CallSpec {
        self.tensors.insert(name.to_owned(), TensorSpec::new(dtype, shape));
        self
    }

    /// Adds a parameter.
    pub fn param(mut self, name: &str, value: impl Into<ParamSpec>) -> CallSpec {
        self.params.insert(name.to_owned(), value.into());
        self
    }

    /// Says the layout, if it is not said yet and a setting could change it: from then on the call means the same
    /// wherever it is read.
    pub fn settle_layout(&mut self, defaults: DefaultLayouts) {
        let Ok(target) = Catalog::get().find(&self.op) else { return };
        let op = Catalog::get().op(target.ops[0]);
        if self.layout.is_some() || op.schema().layout.setting().is_none() {
            return;
        }
        let rank_of = |index: usize| {
            let input = &op.schema().inputs[index];
            let named = |(name, _): &(&String, &TensorSpec)| *name == input.name || input.also.contains(&name.as_str());
            self.tensors.iter().find(named).map(|(_, tensor)| tensor.shape.len())
        };
        self.layout = op.default_layout(defaults, rank_of);
    }

    /// Says the layout.
    pub fn layout(mut self, layout: Layout) -> CallSpec {
        self.layout = Some(layout);
        self
    }

    /// Says how its weights lie in memory.
    pub fn packing(mut self, packing: Packing) -> CallSpec {
        self.packing = packing;
        self
    }

    /// Says how exactly it must be computed, at least.
    pub fn accuracy(mut self, accuracy: Accuracy) -> CallSpec {
        self.accuracy = accuracy;
        self
    }

    /// The call, as it is bound, on a device. What the call itself says of its weights and its accuracy stands above the
    /// context.
    pub fn named(&self, device: DeviceIx, context: Context) -> NamedCall<'_> {
        let catalog = Catalog::get();
        let ops = catalog.find(&self.op).map(|target| &target.ops[..]).unwrap_or_default();
        let type_of = |name: &str| {
            let mut ops = ops.iter().map(|&ix| catalog.op(ix));
            ops.find_map(|op| op.param_index(name).map(|i| op.schema().params[i].ty))
        };
        NamedCall {
            inputs: self.tensors.iter().map(|(name, tensor)| (name.as_str(), tensor.meta(device))).collect(),
            params: self.params.iter().map(|(name, value)| (name.as_str(), value.value_of(type_of(name)))).collect(),
            layout: self.layout,
            device,
            context: Context {
                packing: if self.packing.is_plain() { context.packing } else { self.packing },
                accuracy: if self.accuracy.is_standard() { context.accuracy } else { self.accuracy },
                ..context
            },
        }
    }

    /// The one way to write a call that was bound: the operation it turned out to be, schema names, the layout that was
    /// found, and nothing that is at its default.
    pub fn canonical(call: &NamedCall<'_>, bound: &Bound) -> CallSpec {
        let op = Catalog::get().op(bound.query.op());
        let schema = op.schema();
        let mut spec = CallSpec::new(op.id());
        for (name, meta) in &call.inputs {
            let Some(input) = op.input_index(name).map(|i| &schema.inputs[i]) else { continue };
            let strides = meta.strides.filter(|_| !meta.is_contiguous()).map(<[i64]>::to_vec);
            let tensor = TensorSpec { dtype: meta.dtype, shape: meta.shape.to_vec(), strides };
            spec.tensors.insert(input.name.to_owned(), tensor);
        }
        for (i, param) in schema.params.iter().enumerate() {
            let given = call.params.iter().find(|(name, _)| op.param_index(name) == Some(i)).map(|(_, value)| *value);
            // What an alias says by its name alone is in the query.
            let bound = (param.role == ParamRole::Exact).then(|| bound.query.param(i, param));
            let Some(value) = &given.or(bound) else { continue };
            if param.default.value() != Some(*value)
                && let Some(value) = ParamSpec::of(*value)
            {
                spec.params.insert(param.name.to_owned(), value);
            }
        }
        spec.layout = bound.layout.map(|verdict| verdict.layout);
        let Context { packing, accuracy, .. } = bound.query.context();
        spec.packing(packing).accuracy(accuracy)
    }
}

/// As JSON, in one line; the same for the same call.
impl fmt::Display for CallSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&serde_json::to_string(self).map_err(|_| fmt::Error)?)
    }
}

impl std::str::FromStr for CallSpec {
    type Err = serde_json::Error;

    fn from_str(text: &str) -> Result<CallSpec, serde_json::Error> {
        serde_json::from_str(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::call::BindRules;

    fn canonical(call: &CallSpec) -> CallSpec {
        let named = call.named(DeviceIx(0), Context::default());
        let (_, bound) =
            Catalog::get().resolve(&call.op, &named, &BindRules::default(), |_| None).expect("a valid call");
        CallSpec::canonical(&named, &bound)
    }

    fn attention(op: &str) -> CallSpec {
        let shape = [1, 16, 4, 8];
        ["q", "k", "v"]
            .iter()
            .fold(CallSpec::new(op), |call, name| call.tensor(name, DType::F32, &shape))
            .layout(Layout::Bshd)
    }

    #[test]
    fn every_way_to_say_a_call_is_written_in_one() {
        let plain = canonical(&attention("attention"));
        assert_eq!(plain.op, "attention.standard.prefill");
        assert_eq!(plain.tensors.keys().collect::<Vec<_>>(), ["key", "query", "value"]);
        assert!(plain.params.is_empty());
        assert_eq!(canonical(&attention("attention.causal")), plain);
        assert_eq!(canonical(&attention("attention").param("causal", true).param("softcap", 0.0)), plain);
        assert_eq!(canonical(&plain), plain);
    }

    #[test]
    fn a_promise_is_written_where_there_is_one() {
        let plain = CallSpec::new("attention.paged")
            .tensor("query", DType::Bf16, &[2, 8, 64])
            .tensor("key_cache", DType::Bf16, &[9, 16, 2, 64])
            .tensor("value_cache", DType::Bf16, &[9, 16, 2, 64])
            .tensor("block_tables", DType::I32, &[2, 4])
            .tensor("context_lens", DType::I32, &[2]);
        // As databases and lockfiles had it before there was one.
        let written = canonical(&plain);
        assert!(!written.to_string().contains("shared_prefix"), "{written}");
        assert_eq!(canonical(&plain.clone().param("shared_prefix", 0)), written);
        let promised = canonical(&plain.param("shared_prefix", 48));
        assert_eq!(promised.params, BTreeMap::from([("shared_prefix".to_owned(), ParamSpec::Int(48))]));
        assert_eq!(canonical(&promised), promised);
    }

    #[test]
    fn packing_and_accuracy_are_written_where_they_are_not_the_usual() {
        let plain =
            CallSpec::new("mlp.linear").tensor("input", DType::F32, &[4, 32]).tensor("weight", DType::F32, &[64, 32]);
        // As databases and lockfiles had it before there were any.
        let before = r#"{"op":"mlp.linear","tensors":{"input":{"dtype":"float32","shape":[4,32]},"weight":{"dtype":"float32","shape":[64,32]}}}"#;
        assert_eq!(canonical(&plain).to_string(), before);
        assert_eq!(before.parse::<CallSpec>().unwrap(), plain);
        let packed = plain.clone().packing(Packing::blocked(32, 1).unwrap()).accuracy(Accuracy::SplitBf16x2);
        let text = canonical(&packed).to_string();
        assert!(text.ends_with(r#","packing":"blocked_32x1","accuracy":"split_bf16_2"}"#), "{text}");
        assert_eq!(text.parse::<CallSpec>().unwrap(), packed);
        let query = |call: &CallSpec| {
            let named = call.named(DeviceIx(0), Context::default());
            Catalog::get().resolve(&call.op, &named, &BindRules::default(), |_| None).unwrap().1.query
        };
        let classes =
            [&plain, &plain.clone().packing(packed.packing), &plain.clone().accuracy(packed.accuracy), &packed];
        let classes = classes.map(|call| query(call).class());
        for (i, class) in classes.iter().enumerate() {
            assert_eq!(classes.iter().position(|other| other == class), Some(i), "{class:?}");
        }
        assert!("{\"op\":\"mlp.linear\",\"tensors\":{},\"packing\":\"blocks\"}".parse::<CallSpec>().is_err());
    }

    #[test]
    fn what_an_alias_says_by_its_name_is_said() {
        let full = canonical(&attention("attention.full"));
        assert_eq!(full.params, BTreeMap::from([("causal".to_owned(), ParamSpec::Bool(false))]));
        assert_eq!(canonical(&attention("attention").param("is_causal", false)), full);
    }

    #[test]
    fn texts_that_are_no_values_are_not_interned() {
        let known = |text: &str| {
            let tensor = CallSpec::new("quantize").tensor("input", DType::F32, &[2, 4]);
            let call = CallSpec { params: [("dtype".to_owned(), ParamSpec::Str(text.into()))].into(), ..tensor };
            let resolve = |call: &CallSpec| {
                let named = call.named(DeviceIx(0), Context::default());
                Catalog::get().resolve(&call.op, &named, &BindRules::default(), |_| None).map(drop)
            };
            let unknown = CallSpec { op: "no_such_operation".into(), ..call.clone() };
            let elsewhere =
                CallSpec { params: [("eps".to_owned(), ParamSpec::Str(text.into()))].into(), ..call.clone() };
            [resolve(&call).is_ok(), resolve(&unknown).is_ok(), resolve(&elsewhere).is_ok()]
        };
        assert_eq!(known("int8"), [true, false, false]);
        for i in 0..100 {
            let text = format!("no dtype {i}");
            assert_eq!(known(&text), [false; 3]);
            assert!(!crate::symbol::Symbol::is_known(&text), "{text}");
        }
    }
}
