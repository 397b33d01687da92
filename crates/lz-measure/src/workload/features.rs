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

#[cfg(test)]
mod tests {
    use lz_model::DType;

    use super::*;

    fn paged(batch: i64, shared: i64) -> Features {
        let cache = [9, 16, 2, 64];
        let call = CallSpec::new("attention.paged")
            .tensor("query", DType::Bf16, &[batch, 8, 64])
            .tensor("key_cache", DType::Bf16, &cache)
            .tensor("value_cache", DType::Bf16, &cache)
            .tensor("block_tables", DType::I32, &[batch, 4])
            .tensor("context_lens", DType::I32, &[batch])
            .param("shared_prefix", shared);
        features(&call).unwrap()
    }

    /// Keys and values of 64 tokens in 2 heads of 64, queries and results of 8, two bytes each.
    #[test]
    fn what_all_sequences_share_is_moved_once() {
        let bytes = |batch: i64, tokens: i64| (2 * tokens * 2 * 64 * 2 + 2 * batch * 8 * 64 * 2) as f64;
        for batch in [0, 1, 2, 7] {
            assert_eq!(paged(batch, 0).bytes, bytes(batch, batch * 64));
            assert_eq!(paged(batch, 48).bytes, bytes(batch, batch * 16 + 48 * batch.min(1)));
            assert_eq!(paged(batch, 64).bytes, bytes(batch, 64 * batch.min(1)));
        }
    }

    #[test]
    fn times_of_calls_that_promise_something_are_comparable() {
        let (plain, promised) = (paged(2, 0), paged(2, 48));
        assert_eq!((plain.group, plain.flops), (promised.group, promised.flops));
        assert_eq!(plain.log2.last(), Some(&0.0));
        assert_eq!(plain.log2[..plain.log2.len() - 1], promised.log2[..promised.log2.len() - 1]);
    }
}
