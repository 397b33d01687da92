//! Where a call stands among others.

use lz_model::schema::DimKey;
use lz_model::{CallSpec, Catalog, DeviceSpec, Facts, ParamRole, Platform};

use super::error::WorkloadError;
use super::point::bind;

/// Where a call stands among others, and how much work it is.
#[derive(Clone, Debug, PartialEq)]
pub struct Features {
    /// What calls have in common between which times can be interpolated: everything but lengths and batches.
    pub group: String,
    /// Lengths and batches, as powers of two.
    pub log2: Vec<f64>,
    /// Floating-point operations.
    pub flops: f64,
    /// Bytes that must be moved at least.
    pub bytes: f64,
}

/// The features of a call.
///
/// ```
/// use lz_measure::workload::features;
/// use lz_model::{CallSpec, DType};
///
/// let call = |rows| CallSpec::new("rms_norm").tensor("input", DType::F32, &[rows, 4096]);
/// let (few, many) = (features(&call(1)).unwrap(), features(&call(512)).unwrap());
/// assert_eq!(few.group, many.group);
/// assert_eq!((few.log2, many.log2), (vec![0.0], vec![9.0]));
/// ```
pub fn features(call: &CallSpec) -> Result<Features, WorkloadError> {
    let query = bind(call)?.query;
    let op = Catalog::get().op(query.op());
    let schema = op.schema();
    let mut group = vec![schema.id.to_owned()];
    let mut log2 = Vec::new();
    for (i, dim) in schema.dims.iter().enumerate() {
        match dim.key {
            DimKey::Exact => group.push(format!("{}={}", dim.name, query.dim(i))),
            DimKey::Bucketed(_) => log2.push((query.dim(i).max(1) as f64).log2()),
        }
    }
    for (i, param) in schema.params.iter().enumerate() {
        match param.role {
            ParamRole::Exact => group.push(format!("{}={}", param.name, query.param(i, param))),
            ParamRole::Presence if query.param_given(i) => group.push(param.name.to_owned()),
            ParamRole::Presence | ParamRole::Dim | ParamRole::Ignored => {}
        }
    }
    let tensors = schema.inputs.iter().enumerate().filter(|(i, _)| query.tensor(*i).is_present());
    group.extend(tensors.map(|(i, input)| format!("{}: {:?}", input.name, query.tensor(i))));
    let device = DeviceSpec::new(Platform::Cpu, "any");
    let facts = Facts { op, query: &query, device: &device };
    Ok(Features { group: group.join(", "), log2, flops: op.flops(&facts), bytes: op.bytes(&facts) })
}
