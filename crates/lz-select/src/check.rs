//! Legality: may this kernel serve this call? Speed is never looked at here.

use lz_model::schema::DimKind;
use lz_model::{
    Context, DeviceSpec, DimRule, Facts, GraphDoubt, KernelDescriptor, Layout, Op, Packing, ParamValue, Platform,
    QuantSpec, Query, Reason, Requirement, SdpaRole, TensorFacts,
};

use crate::constraint::{Compiled, Grid, InputCheck, InputRole, ParamCheck, castable, param_allowed};
use crate::decision::Transforms;
use crate::snapshot::Settings;

/// What does not depend on the call: the device and the installed versions. An instruction set of the device counts
/// where it is `usable`: nobody forbade it, and the library uses it.
pub(crate) fn device_reasons(
    kernel: &KernelDescriptor,
    device: &DeviceSpec,
    usable: impl Fn(&str) -> bool,
    version_of: impl Fn(&str) -> Option<String>,
) -> Vec<Reason> {
    let mut reasons = Vec::new();
    if !kernel.platforms.contains(&device.platform) {
        let required = kernel.platforms.iter().map(|p| p.name()).collect::<Vec<_>>().join(" or ");
        // Nothing else about the device can be judged.
        return vec![Reason::PlatformMismatch { required, found: device.platform.name().into() }];
    }
    let found = device.sm.unwrap_or(0);
    if let Some(required) = kernel.min_sm.filter(|&min| device.platform == Platform::Cuda && found < min) {
        reasons.push(Reason::SmTooOld { required, found });
    }
    if let Some(required) =
        kernel.max_sm.filter(|&max| device.platform == Platform::Cuda && (device.sm.is_none() || found >= max))
    {
        reasons.push(Reason::SmTooNew { required, found });
    }
    let generation = device.generation.as_deref().unwrap_or("unknown");
    if !kernel.generations.is_empty() && !kernel.generations.iter().any(|g| g == generation) {
        let required = kernel.generations.join(", ");
        reasons.push(Reason::GpuGenerationUnsupported { required, found: generation.into() });
    }
    let tensor_cores = device.tensor_core_generation.unwrap_or(0);
    if let Some(required) = kernel.min_tensor_core_generation.filter(|&min| tensor_cores < min) {
        reasons.push(Reason::TensorCoreGenUnsupported { required, found: tensor_cores });
    }
    for required in kernel.instruction_sets.iter().filter(|f| !device.supports(f) || !usable(f)) {
        reasons.push(Reason::InstructionSetMismatch { required: required.clone() });
    }
    for required in kernel.device_features.iter().filter(|f| !device.supports(f)) {
        reasons.push(Reason::DeviceCapabilityUnsupported { required: required.clone() });
    }
    if !kernel.vendors.is_empty() && !kernel.vendors.contains(&device.vendor) {
        let required = format!("vendor {}", kernel.vendors.join(" or "));
        reasons.push(Reason::DeviceCapabilityUnsupported { required });
    }
    reasons.extend(kernel.requires.iter().filter_map(|r| version_reason(r, device, &version_of)));
    reasons
}

fn version_reason(
    requirement: &Requirement,
    device: &DeviceSpec,
    version_of: impl Fn(&str) -> Option<String>,
) -> Option<Reason> {
    let found = device.versions.get(&requirement.name).cloned().or_else(|| version_of(&requirement.name));
    if found.as_ref().is_some_and(|v| requirement.met_by(v)) {
        return None;
    }
    let (required, found) = (requirement.to_string(), found.unwrap_or_else(|| "none".into()));
    Some(if requirement.name == "driver" {
        Reason::DriverVersionUnsupported { required, found }
    } else {
        Reason::VersionUnsupported { required, found }
    })
}

/// A call as the checks see it.
pub(crate) struct Case<'a> {
    pub op: &'static Op,
    pub query: &'a Query,
    /// The query's demands, read out once.
    pub context: Context,
    pub facts: Facts<'a>,
    pub settings: &'a Settings,
    /// What a workspace may take, in bytes.
    pub available: i64,
}

/// What depends on the call. Reasons are appended; transforms that would make it legal are
/// returned, unless they are refused, in which case they are reasons.
pub(crate) fn call_reasons(
    case: &Case<'_>,
    kernel: &KernelDescriptor,
    compiled: &Compiled,
    reasons: &mut Vec<Reason>,
) -> Transforms {
    demands(case, kernel, compiled, reasons);
    for (index, rule) in &compiled.dims {
        let found = case.query.dim(*index);
        if !rule.allows(found) {
            reasons.push(dim_reason(case.op, *index, found, rule));
        }
    }
    if let Some((heads, kv_heads)) = compiled.equal_heads {
        let (heads, kv_heads) = (case.query.dim(heads), case.query.dim(kv_heads));
        if heads != kv_heads {
            reasons.push(Reason::GqaUnsupported { heads, kv_heads });
        }
    }
    for check in &compiled.params {
        if let Some(reason) = param_reason(case, check) {
            reasons.push(reason);
        }
    }
    let mut transforms = Transforms::NONE;
    for check in &compiled.inputs {
        transforms = transforms.and(input_transforms(case, kernel, check, reasons));
    }
    for condition in &compiled.conditions {
        // A condition that cannot be evaluated does not hold: fail closed.
        if !condition.test(&case.facts).unwrap_or(false) {
            reasons.push(Reason::ConstraintFailed {
                constraint: condition.source().into(),
                found: case.facts.describe(condition),
            });
        }
    }
    if let Some(grid) = &compiled.grid {
        launch(case, grid, reasons);
    }
    if let Some(needed) = workspace(compiled, &case.facts).filter(|&needed| needed > case.available) {
        reasons.push(Reason::MemoryHeadroomExceeded { needed, available: case.available });
    }
    transforms
}

/// Memory a kernel takes beyond arguments and results, in bytes, if it says; what overflows is more than there can be.
pub(crate) fn workspace(compiled: &Compiled, facts: &Facts<'_>) -> Option<i64> {
    compiled.workspace.as_ref().map(|formula| formula.int(facts).unwrap_or(i64::MAX))
}

/// What the call demands beyond its arguments.
fn demands(case: &Case<'_>, kernel: &KernelDescriptor, compiled: &Compiled, reasons: &mut Vec<Reason>) {
    let context = &case.context;
    if context.capturing && !kernel.graph_safe {
        reasons.push(Reason::CudaGraphUnsafe { why: GraphDoubt::Undeclared });
    }
    if (context.deterministic || case.settings.deterministic) && !kernel.deterministic {
        reasons.push(Reason::NonDeterministic);
    }
    if context.requires_grad && !kernel.autograd {
        reasons.push(Reason::AutogradUnsupported);
    }
    if (context.batch_invariant || case.settings.batch_invariant) && !kernel.batch_invariant {
        reasons.push(Reason::BatchInvarianceRequired);
    }
    let needed = SdpaRole::needs(kernel.sdpa, case.facts.device.platform);
    if context.sdpa.place(needed).is_none() {
        let backend = needed.iter().map(|b| b.name()).collect::<Vec<_>>().join(" or ");
        reasons.push(Reason::SdpaBackendDisabled { backend, allowed: context.sdpa.to_string() });
    }
    if !kernel.takes(context.packing) {
        let supported = match &kernel.packing[..] {
            [] => Packing::Plain.to_string(),
            formats => formats.iter().map(ToString::to_string).collect::<Vec<_>>().join(", "),
        };
        reasons.push(match context.packing {
            Packing::Plain => Reason::PackedWeightsRequired { supported },
            found => Reason::PackingUnsupported { found: found.to_string(), supported },
        });
    }
    if kernel.accuracy < context.accuracy {
        let (provided, required) = (kernel.accuracy.to_string(), context.accuracy.to_string());
        reasons.push(Reason::AccuracyUnsupported { provided, required });
    }
    if let Some(found) = context.kv_strategy.filter(|s| !compiled.kv_strategies.contains(s)) {
        let supported = compiled.kv_strategies.iter().map(|s| s.name()).collect::<Vec<_>>().join(", ");
        reasons.push(Reason::KvStrategyUnsupported { found: found.name().into(), supported });
    }
    if context.tp_invariant {
        match &kernel.tp {
            None => reasons.push(Reason::TpInvarianceRequired),
            Some(tp) => {
                if let Some(max) = tp.max_size.filter(|&max| context.tp_size > max) {
                    reasons.push(Reason::TpSizeExceeded { max, found: context.tp_size });
                }
                if let Some(order) = context.reduction.filter(|o| *o != tp.reduction_order) {
                    let (required, found) = (order.name().into(), tp.reduction_order.name().into());
                    reasons.push(Reason::ReductionOrderMismatch { required, found });
                }
            }
        }
    }
    if let Some(quant) = context.quant {
        reasons.extend(quant_reason(kernel, quant));
        let rank = quant.format.spec().accuracy_rank;
        if rank < context.min_accuracy_rank {
            let (format, required) = (quant.format.to_string(), context.min_accuracy_rank);
            reasons.push(Reason::QuantAccuracyThresholdExceeded { format, rank, required });
        }
    }
}

fn quant_reason(kernel: &KernelDescriptor, quant: QuantSpec) -> Option<Reason> {
    let Some(rule) = &kernel.quant else {
        return Some(Reason::QuantFormatUnsupported { found: quant.format.to_string(), supported: "none".into() });
    };
    let supported = || rule.formats.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
    if !rule.formats.contains(&quant.format) {
        let bits = |format: lz_model::QuantFormat| format.spec().dtype.bits();
        let same_width = rule.formats.iter().find(|f| bits(**f) == bits(quant.format));
        return Some(match same_width {
            Some(to) => Reason::RequantizationRequired { from: quant.format.to_string(), to: to.to_string() },
            None => Reason::QuantFormatUnsupported { found: quant.format.to_string(), supported: supported() },
        });
    }
    if !rule.granularities.is_empty() && !rule.granularities.contains(&quant.granularity) {
        let found = format!("{} scales", quant.granularity.name());
        let supported = rule.granularities.iter().map(|g| g.name()).collect::<Vec<_>>().join(", ");
        return Some(Reason::QuantFormatUnsupported { found, supported });
    }
    (quant.zero_point && !rule.zero_point).then(|| Reason::QuantFormatUnsupported {
        found: "zero points".into(),
        supported: format!("{} without zero points", supported()),
    })
}

fn dim_reason(op: &Op, index: usize, found: i64, rule: &DimRule) -> Reason {
    let schema = &op.schema().dims[index];
    let dim = schema.name.to_owned();
    match schema.kind {
        DimKind::HeadDim => {
            if let Some(max) = rule.max.filter(|&max| found > max) {
                return Reason::HeadDimTooLarge { dim, found, max };
            }
            let misaligned = rule.multiple_of.filter(|m| found % m != 0);
            match misaligned.filter(|_| rule.min.is_none_or(|min| found >= min)) {
                Some(multiple) => Reason::HeadDimAlignment { dim, found, multiple },
                None => Reason::HeadDimInvalid { dim, found, supported: rule.describe() },
            }
        }
        DimKind::Seq if rule.max.is_some_and(|max| found > max) => {
            Reason::SeqTooLong { dim, found, max: rule.max.unwrap_or(found) }
        }
        _ => Reason::ConstraintFailed {
            constraint: format!("{dim}: {}", rule.describe()),
            found: format!("{dim}={found}"),
        },
    }
}

fn param_reason(case: &Case<'_>, check: &ParamCheck) -> Option<Reason> {
    let schema = case.op.schema();
    let unsupported = |index: usize, found: String, supported: String| {
        let (param, side) = schema.params[index].as_given();
        Some(Reason::ParamUnsupported { param: param.into(), found: found + side, supported: supported + side })
    };
    match check {
        ParamCheck::Is { index, word, .. } if case.query.param_word(*index) == *word => None,
        ParamCheck::Is { index, value, .. } => {
            let found = case.query.param(*index, &schema.params[*index]);
            unsupported(*index, found.to_string(), value.to_string())
        }
        ParamCheck::NotGiven { index } => {
            if case.query.param_given(*index) {
                unsupported(*index, "given".into(), "only the default".into())
            } else {
                None
            }
        }
        ParamCheck::In { index, rule } => {
            let found = case.query.param(*index, &schema.params[*index]);
            if param_allowed(rule, found) { None } else { unsupported(*index, found.to_string(), describe(rule)) }
        }
        ParamCheck::Serves { index, values } => {
            let param = &schema.params[*index];
            let found = match case.query.param(*index, param) {
                ParamValue::Str(s) => s.as_str(),
                _ => "",
            };
            if values.iter().any(|v| v == found) {
                return None;
            }
            let (found, supported) = (found.to_owned(), values.join(", "));
            Some(match param.name {
                "tokenizer_id" => Reason::TokenizerIdMismatch { found, supported },
                "vocab_hash" => Reason::VocabHashMismatch { found, supported },
                "merges_hash" => Reason::MergesHashMismatch { found, supported },
                "added_tokens_hash" => Reason::AddedTokensMismatch { found, supported },
                "special_tokens_hash" => Reason::SpecialTokensMismatch { found, supported },
                _ => Reason::NormalizerMismatch { found, supported },
            })
        }
    }
}

fn describe(rule: &lz_model::ParamRule) -> String {
    let mut parts = Vec::new();
    parts.extend(rule.min.map(|min| format!("at least {min}")));
    parts.extend(rule.max.map(|max| format!("at most {max}")));
    let shown = |scalar: &lz_model::Scalar| match scalar {
        lz_model::Scalar::Bool(b) => b.to_string(),
        lz_model::Scalar::Int(i) => i.to_string(),
        lz_model::Scalar::Float(x) => x.to_string(),
        lz_model::Scalar::Str(s) => s.clone(),
    };
    parts.extend(rule.one_of.as_ref().map(|list| list.iter().map(shown).collect::<Vec<_>>().join(", ")));
    parts.join(", ")
}

fn input_transforms(
    case: &Case<'_>,
    kernel: &KernelDescriptor,
    check: &InputCheck,
    reasons: &mut Vec<Reason>,
) -> Transforms {
    let schema = &case.op.schema().inputs[check.index];
    let tensor = case.query.tensor(check.index);
    if check.fits(tensor) {
        return Transforms::NONE;
    }
    let input = || schema.name.to_owned();
    let Some(dtype) = tensor.dtype() else {
        if check.required {
            let constraint = format!("'{}' is given", schema.name);
            reasons.push(Reason::ConstraintFailed { constraint, found: "it is not".into() });
        }
        return Transforms::NONE;
    };
    if !check.usable || check.no_broadcast && tensor.is_broadcast() {
        reasons.push(match check.role {
            InputRole::Mask => Reason::AttnMaskUnsupported {
                found: if check.usable { "broadcast".into() } else { dtype.to_string() },
                supported: if check.usable { "masks of full shape".into() } else { "none".into() },
            },
            _ => Reason::InputUnsupported { input: input() },
        });
        return Transforms::NONE;
    }
    let adaptable = case.settings.allows_transforms() && !check.in_place;
    let mut transforms = Transforms::NONE;
    if !check.dtypes.contains(dtype) {
        if adaptable && check.role == InputRole::Data && castable(kernel, dtype) {
            transforms = transforms.and(Transforms::CAST);
        } else {
            let (found, supported) = (dtype.to_string(), check.dtypes.to_string());
            reasons.push(match check.role {
                InputRole::Cache => Reason::KvCacheDtypeMismatch { input: input(), found, supported },
                InputRole::Mask => Reason::AttnMaskUnsupported { found, supported },
                _ => Reason::DtypeUnsupported { input: input(), found, supported },
            });
        }
    }
    transforms.and(memory_transforms(check, tensor, adaptable, schema.name, reasons))
}

/// Layout, contiguity, last stride, alignment.
fn memory_transforms(
    check: &InputCheck,
    tensor: TensorFacts,
    adaptable: bool,
    name: &str,
    reasons: &mut Vec<Reason>,
) -> Transforms {
    let input = || name.to_owned();
    let layout = tensor.layout();
    let mut transforms = Transforms::NONE;
    if let Some(named) = check.named_layouts.as_ref().filter(|named| layout.is_named() && !named.contains(&layout)) {
        if adaptable && check.role != InputRole::Cache && named.iter().any(|to| transposable(layout, *to)) {
            transforms = transforms.and(Transforms::LAYOUT);
        } else {
            let (found, supported) =
                (layout.name().into(), named.iter().map(|l| l.name()).collect::<Vec<_>>().join(", "));
            reasons.push(match check.role {
                InputRole::Cache => Reason::KvCacheLayoutMismatch { input: input(), found, supported },
                _ => Reason::LayoutUnsupported { input: input(), found, supported },
            });
        }
    }
    // A transposed view is not contiguous in its new order.
    let contiguous = tensor.is_contiguous() && !transforms.has(Transforms::LAYOUT);
    let copyable = adaptable && check.role != InputRole::Cache;
    let mut need = |needed: bool, reason: fn(String) -> Reason| match (needed, copyable) {
        (true, true) => transforms = transforms.and(Transforms::CONTIGUOUS),
        (true, false) => reasons.push(reason(input())),
        (false, _) => {}
    };
    need(check.contiguous && !contiguous, |input| Reason::NotContiguous { input });
    need(check.last_stride_one && !tensor.has_last_stride_one(), |input| Reason::StrideLastDim { input });
    need(check.aligned && !tensor.is_aligned(), |input| Reason::NotAligned { input });
    transforms
}

fn transposable(from: Layout, to: Layout) -> bool {
    matches!(
        (from, to),
        (Layout::Bshd, Layout::Bhsd)
            | (Layout::Bhsd, Layout::Bshd)
            | (Layout::Nhd, Layout::Hnd)
            | (Layout::Hnd, Layout::Nhd)
    )
}

/// Whether the device can launch the grid.
fn launch(case: &Case<'_>, grid: &Grid, reasons: &mut Vec<Reason>) {
    let device = case.facts.device;
    let Some(limits) = device.launch else {
        if matches!(device.platform, Platform::Cuda | Platform::Rocm) {
            reasons.push(Reason::DeviceCapabilityUnsupported { required: "known launch limits".into() });
        }
        return;
    };
    for (i, (formula, axis)) in grid.axes.iter().zip(['x', 'y', 'z']).enumerate() {
        let Some(formula) = formula else { continue };
        let scale = if i == 0 { grid.blocks_per_batch_head } else { 1 };
        // Overflow is larger than any limit.
        let needed = formula.int(&case.facts).unwrap_or(i64::MAX).saturating_mul(scale);
        let limit = i64::from(limits.max_grid[i]);
        if needed > limit {
            reasons.push(Reason::CudaGridDimExceeded { axis, needed, limit });
        }
    }
    let shared = grid.shared_bytes.as_ref().map(|f| f.int(&case.facts).unwrap_or(i64::MAX));
    let block = [
        ("threads", grid.threads, i64::from(limits.max_threads_per_block)),
        ("bytes of shared memory", shared, i64::from(limits.max_shared_bytes_per_block)),
    ];
    for (what, needed, limit) in block {
        if let Some(needed) = needed.filter(|&n| n > limit) {
            reasons.push(Reason::CudaBlockLimitExceeded { what: what.into(), needed, limit });
        }
    }
}
