//! Calls, kernels and questions that the tests of the model share.

use lz_model::*;
use lz_predict::{Model, Observation, Seen};
use lz_select::{EstimateKind, PerfSource};

pub fn devices() -> Vec<DeviceSpec> {
    vec![DeviceSpec::new(Platform::Cpu, "a CPU")]
}

pub fn rms(rows: i64, hidden: i64, dtype: DType) -> Query {
    bound(&CallSpec::new("norm.rms").tensor("x", dtype, &[rows, hidden]))
}

pub fn attention(batch: i64, heads: i64, seq: i64) -> Query {
    let shape = [batch, heads, seq, 64];
    let call = CallSpec::new("attention.causal")
        .tensor("query", DType::F32, &shape)
        .tensor("key", DType::F32, &shape)
        .tensor("value", DType::F32, &shape)
        .layout(Layout::Bhsd);
    bound(&call)
}

pub fn bound(call: &CallSpec) -> Query {
    let named = call.named(DeviceIx(0), Context::default());
    Catalog::get().resolve(&call.op, &named, &BindRules::default(), |_| None).expect("a valid call").1.query
}

pub fn took(query: Query, kernel: &str, median_us: f64) -> Observation {
    let seen = Seen::Took { median_us, spread_us: median_us * 0.01, samples: 10, parts: None };
    Observation { query, kernel: kernel.into(), version: "1".into(), baseline: false, seen }
}

pub fn kernel(id: &str) -> KernelDescriptor {
    let mut kernel = KernelDescriptor::new(id, "norm.rms", "lib");
    kernel.version = "1".into();
    kernel.platforms = vec![Platform::Cpu];
    kernel.dtypes = lz_model::DTypeSet::of(&[DType::F32, DType::Bf16]);
    kernel.layouts = vec![Layout::Contiguous];
    kernel
}

pub fn ask(model: &Model, id: &str, query: &Query) -> Option<(f64, f64, EstimateKind, bool)> {
    let devices = devices();
    let facts = Facts { op: Catalog::get().op(query.op()), query, device: &devices[0] };
    model.estimate(&kernel(id), &facts).map(|e| (e.median_us, e.spread_us, e.kind, e.trusted))
}
