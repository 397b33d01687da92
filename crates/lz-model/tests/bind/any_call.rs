//! Any call at all.

use super::*;

const SIZES: &[i64] = &[0, 1, 1, 2, 3, 4, 5, 8, 16, 64, 1 << 20, 1 << 40, i64::MAX - 1, i64::MAX, -1, i64::MIN];

fn any_value() -> impl Strategy<Value = ParamValue> {
    let words = vec![
        "",
        "int8",
        "int4",
        "nvfp4",
        "mxfp4",
        "fp8_e4m3",
        "blockwise",
        "per_tensor",
        "per_channel",
        "float32",
        "tanh",
        "silu",
        "nonsense",
    ];
    prop_oneof![
        2 => Just(ParamValue::None),
        1 => any::<bool>().prop_map(ParamValue::Bool),
        2 => prop::sample::select(SIZES).prop_map(ParamValue::Int),
        1 => any::<f64>().prop_map(ParamValue::Float),
        1 => (0.0f64..1.0).prop_map(ParamValue::Float),
        3 => prop::sample::select(words).prop_map(ParamValue::str),
    ]
}

/// A dtype that the schema allows, mostly.
fn dtypes(rule: DTypeRule, first: DType) -> BoxedStrategy<DType> {
    let any = prop::sample::select(DType::all().collect::<Vec<_>>());
    match rule {
        DTypeRule::In(set) => prop_oneof![9 => prop::sample::select(set.iter().collect::<Vec<_>>()), 1 => any].boxed(),
        DTypeRule::Same(_) => prop_oneof![9 => Just(first), 1 => any].boxed(),
    }
}

type AnyTensor = Option<(DType, Vec<i64>, Option<Vec<i64>>)>;

fn any_tensor(rule: DTypeRule) -> impl Strategy<Value = AnyTensor> {
    let shape = prop::collection::vec(prop::sample::select(SIZES), 0..6);
    let tensor = (dtypes(rule, DType::F32), shape).prop_flat_map(|(dtype, shape)| {
        let rank = shape.len();
        let strides = prop::collection::vec(prop::sample::select(SIZES), rank);
        (Just(dtype), Just(shape), prop::option::of(strides))
    });
    prop::option::weighted(0.9, tensor)
}

fn any_call() -> impl Strategy<Value = (usize, Vec<AnyTensor>, Vec<ParamValue>, Option<Layout>, bool)> {
    (0..Catalog::get().ops().len()).prop_flat_map(|op| {
        let schema = Catalog::get().ops()[op].schema();
        let inputs: Vec<_> = schema.inputs.iter().map(|i| any_tensor(i.dtype)).collect();
        let params = prop::collection::vec(any_value(), schema.params.len());
        let layout = prop::option::weighted(0.3, prop::sample::select(&Layout::ALL[..]));
        (Just(op), inputs, params, layout, any::<bool>())
    })
}

/// Binds and looks at all there is to look at; nothing may panic.
fn bind_and_look(
    op: &Op,
    tensors: &[AnyTensor],
    params: &[ParamValue],
    layout: Option<Layout>,
    strict: bool,
) -> Result<Bound, CallError> {
    let metas: Vec<Option<TensorMeta<'_>>> = tensors
        .iter()
        .map(|tensor| {
            let (dtype, shape, strides) = tensor.as_ref()?;
            let meta = TensorMeta::new(*dtype, shape);
            Some(match strides {
                Some(strides) => meta.strided(strides),
                None => meta,
            })
        })
        .collect();
    let call = Call { inputs: &metas, params, layout, device: DeviceIx(0), context: Context::default() };
    let rules = BindRules { strict, ..BindRules::default() };
    let bound = op.bind(&call, &rules).inspect_err(|e| {
        assert!(!e.to_string().is_empty() && !e.hint().is_empty() && !e.code().is_empty());
    })?;
    let device = DeviceSpec::new(Platform::Cpu, "any");
    let outputs = op.outputs(&call, &bound.query);
    let fresh = op.schema().outputs.iter().filter(|o| matches!(o, Output::Fresh { .. }));
    assert_eq!(outputs.len(), fresh.count());
    for output in &outputs {
        assert!(output.shape.iter().all(|&n| n >= 0), "{output:?}");
    }
    let facts = Facts { op, query: &bound.query, device: &device };
    let _ = (op.flops(&facts), op.bytes(&facts), op.dtype(&bound.query), op.admits(&facts));
    assert!(!format!("{:?}", bound.query).is_empty());
    op.check(&bound.query, &device)?;
    Ok(bound)
}

/// A call made from the schema: sizes chosen first, then the shapes they make.
#[derive(Clone, Debug)]
struct FromSchema {
    op: usize,
    sizes: BTreeMap<&'static str, i64>,
    layout: Option<Layout>,
    tensors: Vec<AnyTensor>,
    params: Vec<ParamValue>,
}

/// Small numbers out of a seed, for choices that need no shrinking.
struct Choices(u64);

impl Choices {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) as usize % n
    }
}

fn axis(token: &'static str, sizes: &BTreeMap<&'static str, i64>, choices: &mut Choices, shape: &mut Vec<i64>) {
    if let Some(name) = token.strip_prefix("...") {
        // One leading axis, or two of which one is trivial.
        match choices.below(3) {
            0 => shape.push(sizes[name]),
            1 => shape.extend([1, sizes[name]]),
            _ => shape.extend([sizes[name], 1]),
        }
    } else if let Some(name) = token.strip_suffix('?') {
        shape.push(if choices.below(2) == 0 { 1 } else { sizes[name] });
    } else if let Some(name) = token.strip_suffix("+1") {
        shape.push(sizes[name] + 1);
    } else {
        shape.push(token.parse().unwrap_or_else(|_| sizes[token]));
    }
}

fn from_schema() -> impl Strategy<Value = FromSchema> {
    let some = (0..Catalog::get().ops().len(), any::<u64>());
    some.prop_map(|(op, seed)| {
        let schema = Catalog::get().ops()[op].schema();
        let mut choices = Choices(seed);
        let mut sizes: BTreeMap<&'static str, i64> = BTreeMap::new();
        for dim in schema.dims {
            sizes.insert(dim.name, 1 + choices.below(6) as i64);
        }
        let tags: Vec<Layout> = schema
            .inputs
            .iter()
            .flat_map(|i| i.shape.split('|'))
            .filter_map(|s| s.split_once(':'))
            .filter_map(|(tag, _)| tag.trim().parse().ok())
            .collect();
        let layout = (!tags.is_empty()).then(|| tags[choices.below(tags.len())]);
        if layout == Some(Layout::Nhd) && schema.id == "posenc.rope" {
            sizes.insert("batch", 1);
        }
        if schema.id == "mlp.linear.packed" {
            // Up to six outputs are one block of 32.
            sizes.extend([("interleave", 1), ("groups", sizes["in_features"]), ("panels", 1)]);
        }
        if schema.id == "mlp.linear.quantized" {
            // Up to six inputs are padded to 16 pairs, of bytes as well as of halves of them.
            let scales = (sizes["in_features"] + sizes["group_size"] - 1) / sizes["group_size"];
            sizes.extend([("interleave", 2), ("groups", 16), ("panels", 1), ("scale_groups", scales)]);
        }
        let mut leading: BTreeMap<&'static str, Vec<i64>> = BTreeMap::new();
        let mut tensors: Vec<AnyTensor> = Vec::new();
        for input in schema.inputs {
            // Scales depend on the granularity, which has tests of its own.
            if input.optional && (choices.below(2) == 0 || input.shape.contains("scale_")) {
                tensors.push(None);
                continue;
            }
            let alternatives: Vec<&'static str> = input
                .shape
                .split('|')
                .filter_map(|s| match s.split_once(':') {
                    Some((tag, axes)) => (tag.trim().parse().ok() == layout).then_some(axes),
                    None => Some(s),
                })
                .collect();
            let axes = alternatives[choices.below(alternatives.len())];
            let mut shape = Vec::new();
            for token in axes.split_whitespace() {
                match token.strip_prefix("...") {
                    // Inputs that share leading axes have the same ones.
                    Some(name) => {
                        let axes = leading.entry(name).or_insert_with(|| {
                            let mut axes = Vec::new();
                            axis(token, &sizes, &mut choices, &mut axes);
                            axes
                        });
                        shape.extend_from_slice(axes);
                    }
                    None => axis(token, &sizes, &mut choices, &mut shape),
                }
            }
            let dtype = match input.dtype {
                DTypeRule::In(set) => set.iter().nth(choices.below(set.iter().count())).unwrap(),
                DTypeRule::Same(other) => {
                    let i = schema.inputs.iter().position(|i| i.name == other).unwrap();
                    tensors[i].as_ref().unwrap().0
                }
            };
            tensors.push(Some((dtype, shape, None)));
        }
        let params = schema
            .params
            .iter()
            .map(|param| match (param.role, param.default, param.ty) {
                (ParamRole::Dim, ..) => ParamValue::Int(sizes[param.name]),
                (_, ParamDefault::Required, ParamType::Choice(names)) => ParamValue::str(names[0]),
                (_, ParamDefault::Required, ParamType::Name) => ParamValue::str("some"),
                (_, ParamDefault::Required, _) => ParamValue::Float(0.5),
                _ => ParamValue::None,
            })
            .collect();
        FromSchema { op, sizes, layout, tensors, params }
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1500))]

    #[test]
    fn no_call_makes_binding_panic((op, tensors, params, layout, strict) in any_call()) {
        let _ = bind_and_look(&Catalog::get().ops()[op], &tensors, &params, layout, strict);
    }

    #[test]
    fn a_call_made_from_the_schema_binds_to_the_sizes_it_was_made_of(made in from_schema()) {
        let op = &Catalog::get().ops()[made.op];
        // A scale of dequantize needs the granularity's sizes.
        prop_assume!(op.id() != "dequantize");
        let metas: Vec<_> = made
            .tensors
            .iter()
            .map(|t| t.as_ref().map(|(dtype, shape, _)| TensorMeta::new(*dtype, shape)))
            .collect();
        let call = Call {
            inputs: &metas,
            params: &made.params,
            layout: made.layout,
            device: DeviceIx(0),
            context: Context::default(),
        };
        let bound = op.bind(&call, &BindRules::default());
        let bound = bound.map_err(|e| TestCaseError::fail(e.to_string()))?;
        for (input, tensor) in op.schema().inputs.iter().zip(&made.tensors) {
            if tensor.is_none() || input.optional {
                continue;
            }
            for token in input.shape.split_whitespace() {
                let name = token.trim_start_matches("...").trim_end_matches("+1");
                let Some(index) = op.schema().dims.iter().position(|d| d.name == name) else { continue };
                prop_assert_eq!(bound.query.dim(index), made.sizes[name], "{} of {}", name, op.id());
            }
        }
        if let Some(layout) = made.layout {
            prop_assert_eq!(bound.layout, Some(LayoutVerdict { layout, contradicted_by: None }));
        }
        let _ = bind_and_look(op, &made.tensors, &made.params, made.layout, false);
    }

    #[test]
    fn one_changed_size_never_makes_binding_panic(
        made in from_schema(),
        which in any::<prop::sample::Index>(),
        axis in any::<prop::sample::Index>(),
        size in prop::sample::select(SIZES),
        params in prop::collection::vec(any_value(), 10),
        change_params in any::<bool>(),
        forget_layout in any::<bool>(),
    ) {
        let mut made = made;
        if !made.tensors.is_empty() {
            let at = which.index(made.tensors.len());
            if let Some((_, shape, _)) = made.tensors[at].as_mut().filter(|(_, s, _)| !s.is_empty()) {
                let axis = axis.index(shape.len());
                shape[axis] = size;
            }
        }
        if change_params {
            for (param, value) in made.params.iter_mut().zip(params) {
                *param = value;
            }
        }
        let layout = made.layout.filter(|_| !forget_layout);
        let _ = bind_and_look(&Catalog::get().ops()[made.op], &made.tensors, &made.params, layout, forget_layout);
    }
}

#[test]
fn sizes_at_the_end_of_the_number_line_are_refused_without_overflow() {
    let speculative = |draft: i64, target: i64| {
        made(vec![
            t("draft_ids", DType::I32, &[0, draft]),
            t("draft_probs", DType::F32, &[0, draft, 1]),
            t("target_probs", DType::F32, &[0, target, 1]),
        ])
    };
    let error = std::panic::catch_unwind(|| speculative(i64::MAX, 5).error("sampling.speculative"));
    assert_eq!(error.expect("no panic").code(), "WRONG_SHAPE");
}

#[test]
fn each_failed_condition_is_of_the_kind_its_schema_says() {
    for op in Catalog::get().ops() {
        for check in op.schema().checks {
            let expected = match check.code {
                CheckCode::GqaHeadsMismatch => "GQA_HEADS_MISMATCH",
                CheckCode::AttnMaskInvalid => "ATTN_MASK_INVALID",
                CheckCode::CausalMoreQueries => "CAUSAL_MORE_QUERIES",
                CheckCode::Constraint => "CONSTRAINT_FAILED",
            };
            let error = CallError::Check {
                op: op.id(),
                code: check.code,
                message: check.message,
                hint: check.hint,
                values: "x=1".into(),
            };
            assert_eq!(error.code(), expected);
            // No kernel is out for the one that concerns every kernel alike.
            let shared = !matches!(check.code, CheckCode::CausalMoreQueries);
            assert!(!shared || CODES.contains(&expected), "a call error and a reason share the code");
            assert!(!check.hint.is_empty() && !check.message.is_empty(), "{}", op.id());
        }
    }
}
