//! Named arguments: put into order, typed, and bound to the operation they are a call of.

use lz_abi::nearest;
use smallvec::SmallVec;

use crate::bind::Bound;
use crate::call::{BindRules, Call, CallError, NamedCall};
use crate::catalog::{Catalog, Facts, Op};
use crate::device::{DeviceSpec, Platform};
use crate::param::{Param, ParamType, ParamValue};
use crate::query::{MAX_INPUTS, MAX_PARAMS};
use crate::tensor_meta::TensorMeta;

/// Named arguments in schema order.
#[derive(Clone, Debug)]
pub struct OrderedCall<'a> {
    /// Tensors.
    pub inputs: [Option<TensorMeta<'a>>; MAX_INPUTS],
    /// Parameters.
    pub params: [ParamValue; MAX_PARAMS],
}

impl Op {
    /// Puts named arguments into schema order.
    pub fn in_order<'a>(&self, call: &NamedCall<'a>) -> Result<OrderedCall<'a>, CallError> {
        let schema = self.schema();
        let mut ordered = OrderedCall { inputs: [None; MAX_INPUTS], params: [ParamValue::None; MAX_PARAMS] };
        for (name, meta) in &call.inputs {
            let index = self.input_index(name).ok_or_else(|| CallError::UnknownInput {
                op: self.id(),
                name: (*name).to_owned(),
                nearest: nearest(name, schema.inputs.iter().map(|i| i.name)),
            })?;
            if ordered.inputs[index].replace(*meta).is_some() {
                return Err(CallError::GivenTwice { op: self.id(), name: schema.inputs[index].name });
            }
        }
        for (name, value) in &call.params {
            let index = self.param_index(name).ok_or_else(|| CallError::UnknownParam {
                op: self.id(),
                name: (*name).to_owned(),
                nearest: nearest(name, schema.params.iter().map(|p| p.name)),
            })?;
            if std::mem::replace(&mut ordered.params[index], *value) != ParamValue::None {
                return Err(CallError::GivenTwice { op: self.id(), name: schema.params[index].name });
            }
        }
        Ok(ordered)
    }

    /// The parameters of a call with defaults filled in, checked.
    pub fn params(&self, given: &[ParamValue]) -> Result<SmallVec<[ParamValue; MAX_PARAMS]>, CallError> {
        let params = self.schema().params;
        if given.len() > params.len() && given[params.len()..].iter().any(|v| *v != ParamValue::None) {
            return Err(CallError::TooMany { op: self.id(), what: "parameters", most: params.len(), got: given.len() });
        }
        params
            .iter()
            .enumerate()
            .map(|(i, param)| match given.get(i).copied().unwrap_or(ParamValue::None) {
                ParamValue::None => {
                    param.default.value().ok_or(CallError::MissingParam { op: self.id(), param: param.name })
                }
                value => self.typed(param, value),
            })
            .collect()
    }

    fn typed(&self, param: &Param, value: ParamValue) -> Result<ParamValue, CallError> {
        match (param.ty, value) {
            // The smallest integer stands for "not given" in the key.
            (ParamType::Int, ParamValue::Int(i)) if i != i64::MIN => return Ok(value),
            (ParamType::Bool, ParamValue::Bool(_)) | (ParamType::Name, ParamValue::Str(_)) => return Ok(value),
            (ParamType::Float, ParamValue::Float(x)) if !x.is_nan() => return Ok(value),
            (ParamType::Float, ParamValue::Int(i)) => return Ok(ParamValue::Float(i as f64)),
            (ty @ ParamType::Choice(_), ParamValue::Str(s)) if ty.takes_text(s.as_str()) => return Ok(value),
            _ => {}
        }
        let (got, expected) = (value.to_string(), param.ty.expected());
        Err(CallError::BadParam { op: self.id(), param: param.name, got, expected })
    }
}

impl Catalog {
    /// Finds the operation a named call is, and binds it: the first behind `name` that takes it.
    pub fn resolve<'a, 'd>(
        &self,
        name: &str,
        call: &NamedCall<'a>,
        rules: &BindRules,
        device: impl Fn(crate::ids::DeviceIx) -> Option<&'d DeviceSpec>,
    ) -> Result<(OrderedCall<'a>, Bound), CallError> {
        let target = self.find(name)?;
        let mut call = call.clone();
        for &(param, value) in target.fixes {
            let given = call.params.iter().find(|(name, _)| {
                self.op(target.ops[0]).param_index(name) == self.op(target.ops[0]).param_index(param)
            });
            match given {
                Some((_, given)) if *given != ParamValue::Bool(value) => {
                    let (got, expected) = (given.to_string(), format!("{value}, as '{name}' says"));
                    return Err(CallError::BadParam { op: target.name, param, got, expected });
                }
                Some(_) => {}
                None => call.params.push((param, ParamValue::Bool(value))),
            }
        }
        let mut reasons = Vec::new();
        for &ix in &target.ops {
            let op = self.op(ix);
            let attempt = op.in_order(&call).and_then(|ordered| {
                let in_order = Call {
                    inputs: &ordered.inputs,
                    params: &ordered.params,
                    layout: call.layout,
                    device: call.device,
                    context: call.context,
                };
                let bound = op.bind(&in_order, rules)?;
                Ok((ordered, bound))
            });
            match attempt {
                Ok((ordered, mut bound)) => {
                    let unknown = DeviceSpec::new(Platform::Cpu, "unknown");
                    let spec = device(bound.query.device()).unwrap_or(&unknown);
                    let threads = match spec.platform {
                        Platform::Cpu if call.context.threads == 0 => rules.threads,
                        Platform::Cpu => call.context.threads,
                        _ => 0,
                    };
                    bound.query = bound.query.with_threads(threads);
                    if target.ops.len() == 1 || op.admits(&Facts { op, query: &bound.query, device: spec }) {
                        op.check(&bound.query, spec)?;
                        return Ok((ordered, bound));
                    }
                }
                Err(error) if target.ops.len() == 1 => return Err(error),
                Err(error) => reasons.push(error),
            }
        }
        Err(CallError::of_alias(target.name, reasons))
    }
}
