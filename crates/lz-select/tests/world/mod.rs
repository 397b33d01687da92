//! Random worlds for property tests: kernels, devices, policies, measurements and calls.

use std::sync::Arc;

use lz_model::*;
use lz_select::*;
use proptest::prelude::*;

/// A condition as text and, independently, as code over the named sizes.
#[derive(Clone, Debug)]
pub struct Cond {
    pub text: String,
    kind: u8,
    a: i64,
    b: i64,
}

/// The sizes of a dense attention call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    pub batch: i64,
    pub seq_q: i64,
    pub seq_k: i64,
    pub heads: i64,
    pub kv_heads: i64,
    pub head_dim: i64,
}

impl Cond {
    pub fn holds(&self, s: &Sizes) -> bool {
        let (a, b) = (self.a, self.b);
        match self.kind {
            0 => s.seq_q <= a,
            1 => s.seq_q * s.batch <= a * 8,
            2 => s.seq_k % b == 0,
            3 => s.seq_k > a || s.batch < b,
            4 => s.seq_q == s.seq_k,
            5 => !(s.seq_q >= a && s.seq_k % b == 0),
            _ => (s.seq_k + b - 1) / b * s.heads < a,
        }
    }

    /// A priority made up from it: different rules give different ones.
    pub fn priority(&self) -> i32 {
        30 + (self.a % 16) as i32
    }

    fn new(kind: u8, a: i64, b: i64) -> Cond {
        let text = match kind {
            0 => format!("seq_q <= {a}"),
            1 => format!("seq_q * batch <= {a} * 8"),
            2 => format!("seq_k % {b} == 0"),
            3 => format!("seq_k > {a} or batch < {b}"),
            4 => "seq_q == seq_k".into(),
            5 => format!("not (seq_q >= {a} and seq_k % {b} == 0)"),
            _ => format!("ceil_div(seq_k, {b}) * heads < {a}"),
        };
        Cond { text, kind, a, b }
    }
}

pub fn cond() -> impl Strategy<Value = Cond> {
    (0u8..7, 1i64..300, 2i64..20).prop_map(|(kind, a, b)| Cond::new(kind, a, b))
}

fn dim_rule() -> impl Strategy<Value = DimRule> {
    let bound = || prop::option::weighted(0.4, prop_oneof![1i64..300, 100i64..140]);
    let multiple = prop::option::weighted(0.2, prop::sample::select(vec![2i64, 3, 4, 8, 16]));
    let listed = prop::option::weighted(0.05, prop::collection::vec(1i64..300, 1..4));
    (bound(), bound(), multiple, listed).prop_map(|(min, max, multiple_of, one_of)| DimRule {
        min,
        max,
        multiple_of,
        one_of,
    })
}

/// A kernel and, for the brute-force checker, its conditions as code.
#[derive(Clone, Debug)]
pub struct RandomKernel {
    pub descriptor: KernelDescriptor,
    pub conditions: Vec<Cond>,
    /// Workspace is this many bytes per query position, if it needs any.
    pub workspace_per_position: Option<i64>,
    /// The grid's y axis is `seq_q` tiled by this.
    pub tile: Option<i64>,
}

pub fn kernel(index: usize) -> impl Strategy<Value = RandomKernel> {
    let dtypes = prop::sample::subsequence(vec![DType::F32, DType::F16, DType::Bf16], 2..=3);
    let layouts = prop::sample::subsequence(vec![Layout::Bshd, Layout::Bhsd, Layout::Strided], 1..=3);
    let dims = prop::collection::btree_map(
        prop::sample::select(vec!["batch", "seq_q", "seq_q", "seq_k", "seq_k", "heads", "head_dim"]),
        dim_rule(),
        0..3,
    );
    let flags = prop::array::uniform8(any::<bool>());
    let operation = prop::sample::select(vec![
        "attention",
        "attention",
        "attention",
        "attention.causal",
        "attention.full",
        "attention.standard.prefill",
        "attention.gqa.prefill",
        "attention.gqa.decode",
    ]);
    let extra = (
        prop::collection::vec(cond(), 0..2),
        prop::option::weighted(0.3, 1i64..2000),
        prop::option::weighted(0.3, prop::sample::select(vec![1i64, 2, 16])),
        prop::option::weighted(0.1, 70u32..100),
    );
    (dtypes, layouts, dims, flags, operation, 0i32..4, extra).prop_map(
        move |(dtypes, layouts, dims, flags, operation, priority, (conditions, workspace, tile, min_sm))| {
            let mut k = KernelDescriptor::new(format!("k{index:02}"), operation, format!("lib{}", index % 3));
            k.version = format!("1.{}", index % 2);
            k.platforms = if index % 7 != 6 { vec![Platform::Cuda] } else { vec![Platform::Cpu] };
            k.min_sm = min_sm;
            k.dtypes = dtypes.into_iter().collect();
            k.layouts = layouts;
            k.dims = dims.into_iter().map(|(name, rule)| (name.to_owned(), rule)).collect();
            k.dims.entry("head_dim".into()).or_default();
            // Few kernels may rule out most shapes by the heads; sizes are what is tested here.
            k.dims.retain(|name, rule| {
                !["heads", "head_dim"].contains(&name.as_str())
                    || index.is_multiple_of(3)
                    || *rule == DimRule::default()
            });
            k.dims.entry("head_dim".into()).or_default();
            k.requires_last_dim_stride1 = flags[2];
            k.requires_contiguous = flags[3] && flags[2];
            k.deterministic = flags[4];
            k.graph_safe = flags[5];
            k.shares_kv_heads = flags[6];
            if flags[7] {
                k.inputs.insert(
                    "attn_mask".into(),
                    InputRule { dtypes: Some(DTypeSet::of(&[DType::Bool])), ..InputRule::default() },
                );
                k.params.insert("softcap".into(), ParamRule { max: Some(50.0), ..ParamRule::default() });
            }
            if flags[1] {
                k.params.insert("causal".into(), ParamRule::default());
            }
            k.conditions = conditions.iter().map(|c| c.text.clone()).collect();
            k.workspace = workspace.map(|w| format!("batch * seq_q * {w}"));
            k.grid = tile.map(|tile| GridRule {
                x_formula: "batch * heads".into(),
                y_formula: Some("seq_tiles".into()),
                z_formula: None,
                blocks_per_batch_head: 1,
                tiles_sequence: true,
                tile_size: tile,
                threads_per_block: None,
                shared_bytes_formula: None,
            });
            k.priority = priority * 10;
            RandomKernel { descriptor: k, conditions, workspace_per_position: workspace, tile }
        },
    )
}

/// A call of dense attention.
#[derive(Clone, Debug)]
pub struct RandomCall {
    pub sizes: Sizes,
    pub dtype: DType,
    pub layout: Layout,
    pub causal: bool,
    pub mask: Option<DType>,
    pub softcap: f64,
    pub last_stride: i64,
    pub deterministic: bool,
    pub capturing: bool,
}

pub fn call() -> impl Strategy<Value = RandomCall> {
    let size = || prop_oneof![1i64..20, 1i64..400, prop::sample::select(vec![1i64, 2, 64, 127, 128, 129, 256, 512])];
    let heads = prop::sample::select(vec![(4i64, 4i64), (8, 2), (4, 4), (6, 3), (1, 1), (16, 16)]);
    let sizes =
        (size(), size(), size(), heads, prop_oneof![1 => 1i64..300, 4 => prop::sample::select(vec![64i64, 128])])
            .prop_map(|(batch, seq_q, seq_k, (heads, kv_heads), head_dim)| Sizes {
                batch,
                seq_q,
                seq_k,
                heads,
                kv_heads,
                head_dim,
            });
    let dtype = prop::sample::select(vec![DType::F32, DType::F16, DType::Bf16, DType::F32, DType::F16, DType::F64]);
    let layout = prop::sample::select(vec![Layout::Bshd, Layout::Bhsd]);
    let mask = prop::sample::select(vec![None, None, None, Some(DType::Bool), Some(DType::F32)]);
    let softcap = prop::sample::select(vec![0.0, 0.0, 0.0, 0.0, 30.0, 80.0]);
    (sizes, dtype, layout, any::<bool>(), mask, softcap, 1i64..3, prop::bool::weighted(0.2), prop::bool::weighted(0.2))
        .prop_map(|(sizes, dtype, layout, causal, mask, softcap, last_stride, deterministic, capturing)| RandomCall {
            sizes,
            dtype,
            layout,
            causal: causal && mask.is_none() && sizes.seq_q <= sizes.seq_k,
            mask,
            softcap,
            last_stride,
            deterministic,
            capturing,
        })
}

impl RandomCall {
    pub fn query(&self) -> Query {
        let s = self.sizes;
        let shape = |seq, heads| match self.layout {
            Layout::Bshd => [s.batch, seq, heads, s.head_dim],
            _ => [s.batch, heads, seq, s.head_dim],
        };
        let (q, k) = (shape(s.seq_q, s.heads), shape(s.seq_k, s.kv_heads));
        let strides = |shape: [i64; 4]| {
            let last = self.last_stride;
            [shape[1] * shape[2] * shape[3] * last, shape[2] * shape[3] * last, shape[3] * last, last]
        };
        let (qs, ks) = (strides(q), strides(k));
        let mask_shape = [s.seq_q, s.seq_k];
        let mut named = NamedCall::new()
            .input("query", TensorMeta::new(self.dtype, &q).strided(&qs))
            .input("key", TensorMeta::new(self.dtype, &k).strided(&ks))
            .input("value", TensorMeta::new(self.dtype, &k).strided(&ks))
            .param("causal", ParamValue::Bool(self.causal))
            .param("softcap", ParamValue::Float(self.softcap))
            .layout(self.layout)
            .context(Context { deterministic: self.deterministic, capturing: self.capturing, ..Context::default() });
        if let Some(dtype) = self.mask {
            named = named.input("attn_mask", TensorMeta::new(dtype, &mask_shape));
        }
        Catalog::get().resolve("attention", &named, &BindRules::default(), |_| None).expect("a valid call").1.query
    }

    pub fn op_id(&self) -> &'static str {
        let s = self.sizes;
        match (s.heads == s.kv_heads, s.seq_q == 1) {
            (true, true) => "attention.standard.decode",
            (true, false) => "attention.standard.prefill",
            (false, true) => "attention.gqa.decode",
            (false, false) => "attention.gqa.prefill",
        }
    }
}

/// A call that is another call with one size changed, or a call of its own.
#[derive(Clone, Debug)]
pub enum Variant {
    Size(usize, i64),
    Own(Box<RandomCall>),
}

pub fn variant() -> impl Strategy<Value = Variant> {
    prop_oneof![
        8 => (0usize..3, prop_oneof![1i64..400, 100i64..140]).prop_map(|(dim, size)| Variant::Size(dim, size)),
        1 => call().prop_map(|c| Variant::Own(Box::new(c))),
    ]
}

impl Variant {
    pub fn of(self, base: &RandomCall) -> RandomCall {
        let (dim, size) = match self {
            Variant::Size(dim, size) => (dim, size),
            Variant::Own(call) => return *call,
        };
        let mut call = base.clone();
        let sizes = &mut call.sizes;
        *[&mut sizes.batch, &mut sizes.seq_q, &mut sizes.seq_k][dim] = size;
        // A causal call has at least as many keys as queries.
        call.causal &= sizes.seq_q <= sizes.seq_k;
        call
    }
}

/// Times made up from the kernel and the shape it is asked at; some kernels are unknown.
pub struct MadeUpTimes {
    pub seed: u64,
    pub known_fraction: u64,
}

impl PerfSource for MadeUpTimes {
    fn estimate(&self, kernel: &KernelDescriptor, facts: &Facts<'_>) -> Option<Estimate> {
        use std::hash::{DefaultHasher, Hash, Hasher};
        let mut hasher = DefaultHasher::new();
        (self.seed, &kernel.id, facts.query.dims()).hash(&mut hasher);
        let hash = hasher.finish();
        (hash % 10 < self.known_fraction).then_some(Estimate {
            median_us: 1.0 + (hash >> 8 & 0xff) as f64,
            spread_us: (hash >> 16 & 0xf) as f64,
            apart_us: (hash >> 26 & 1 == 0).then_some((hash >> 20 & 0xf) as f64),
            sides: None,
            samples: 20,
            kind: if hash >> 24 & 1 == 0 { EstimateKind::Measured } else { EstimateKind::Predicted },
            trusted: hash >> 25 & 3 != 0,
        })
    }

    fn edges(&self, _: OpIx) -> Vec<(usize, i64)> {
        vec![(1, 100), (2, 333)]
    }
}

/// A world.
#[derive(Clone, Debug)]
pub struct World {
    pub kernels: Vec<RandomKernel>,
    pub rules: Vec<(Cond, u8, usize)>,
    pub free: Option<i64>,
    pub max_grid_y: u32,
    pub strict: bool,
    pub perf: (u64, u64),
}

pub fn world() -> impl Strategy<Value = World> {
    let kernels = (1usize..10).prop_flat_map(|n| (0..n).map(kernel).collect::<Vec<_>>());
    let rules = prop::collection::vec((cond(), 0u8..9, 0usize..10), 0..6);
    let free = prop::option::weighted(0.6, 1i64..2_000_000);
    (kernels, rules, free, 1u32..200, prop::bool::weighted(0.3), (any::<u64>(), 0u64..12)).prop_map(
        |(kernels, rules, free, max_grid_y, strict, perf)| World { kernels, rules, free, max_grid_y, strict, perf },
    )
}

impl World {
    pub fn device(&self) -> DeviceSpec {
        let mut device = DeviceSpec::new(Platform::Cuda, "made-up");
        device.sm = Some(86);
        let mut device = device.completed(&GenerationTable::builtin());
        device.launch =
            Some(LaunchLimits { max_grid: [i32::MAX as u32, self.max_grid_y, 65_535], ..LaunchLimits::default() });
        device
    }

    pub fn spec(&self) -> SnapshotSpec {
        let mut spec = SnapshotSpec { devices: vec![self.device()], ..SnapshotSpec::default() };
        spec.memory = Arc::new(DeviceMemory::of([self.free.map(|free| MemoryState { free, largest_block: free })]));
        spec.settings.memory_headroom_bytes = 0;
        spec.settings.strict = self.strict;
        for lib in 0..3 {
            spec.backend(BackendDescriptor::native(format!("lib{lib}"), "1", vec![Platform::Cuda]));
        }
        spec.kernels = self.kernels.iter().map(|k| Arc::new(k.descriptor.clone())).collect();
        spec.perf = Arc::new(MadeUpTimes { seed: self.perf.0, known_fraction: self.perf.1 });
        for (i, (cond, action, target)) in self.rules.iter().enumerate() {
            let pattern = Pattern::Kernel(format!("k{target:02}"));
            let action = match action {
                0 => Action::Prefer(pattern),
                1 => Action::Avoid(pattern),
                2 => Action::Boost(pattern, 15),
                3 => Action::Deny(pattern),
                4 => Action::Lock(pattern),
                5 => Action::Override(pattern),
                6 => Action::Priority(pattern, cond.priority()),
                7 => Action::Fallback(pattern),
                _ => Action::Filter(format!("priority >= {}", 5 * target)),
            };
            spec.policy =
                spec.policy.rule(&format!("rule {i}"), Some("attention"), Condition::When(cond.text.clone()), action);
        }
        spec
    }
}
