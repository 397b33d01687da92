//! Every setting, declared once: its key, type, default, range, environment variable and meaning.

use std::path::PathBuf;

use lz_model::CpuIsa;
use lz_select::Verify;

use crate::declare::{Declared, Fixed, Kind, Setting, Variable, settings};
use crate::value::Value;

settings! {
    settings {
        /// Off: only references run, and plain torch where none can.
        enabled: bool = true, env Variable::Inverted("LAYERZERO_DISABLED");
        /// Whether the next kernel serves a call when one fails. The last one is the reference.
        fallback_enabled: bool = true;
        /// Log which kernel every new kind of call gets.
        log_selections: bool = false;
        /// Whether `explain` answers. Off: it is refused, so that nobody learns from a running service which rules and
        /// kernels it has.
        explain_enabled: bool = true;
        /// Only deterministic kernels.
        deterministic: bool = false;
        /// Only kernels whose result for a row does not depend on the rest of the batch.
        batch_invariant: bool = false;
        /// Fail instead of adapting arguments that do not fit, or warning that strides contradict the layout.
        strict_mode: bool = false;
        /// The layout of attention and rope calls that do not give `layout`.
        default_layout: DenseLayout = DenseLayout::Bshd;
        /// The layout of paged caches in calls that do not give `layout`.
        default_cache_layout: CacheLayout = CacheLayout::Nhd;
        /// Choose the kernels of several operations together. Not supported yet: each operation is selected by itself.
        plan_mode: OneByOne = OneByOne;
        /// Allow layout, contiguity and dtype transforms.
        allow_adaptation: bool = true;
        /// Allow kernels that would have to be compiled first.
        allow_jit: bool = true;
        /// Only kernels that were captured and replayed here before may run inside CUDA graphs, each at sizes like those of
        /// its proof. `lz.warmup`, `lz.capture`, `lz.validate` and `layerzero tune --graph` prove them.
        graph_strict_mode: bool = false;
        /// Where backends run. `subprocess` is not supported yet.
        backend_isolation: InProcess = InProcess;
        /// The newest instruction set that kernels may use. Set it where machines with different processors must choose
        /// the same kernels. It does not change what libraries do inside: `ONEDNN_MAX_CPU_ISA` and
        /// `ATEN_CPU_CAPABILITY` are oneDNN's and torch's own limits, and are respected.
        max_cpu_isa: CpuIsa = CpuIsa::Native;
        /// The most threads a native kernel uses; 0: as many as torch's kernels (`torch.get_num_threads()`), and the
        /// same ones. 1 is the caller's thread alone. For a number in between LayerZero uses threads of its own, which
        /// share their cores with torch's while those wait for work.
        num_threads: u64 = 0, in (0, 4_096);
        /// Sequences in a paged cache often begin with the same pages: kernels that read such pages once for several sequences
        /// are used. Where nothing is shared, they take a tenth to a fifth longer. LayerZero's vLLM plugin sets it where vLLM caches
        /// prefixes.
        shared_prefixes: bool = false;
        /// Device memory that must stay free, in MiB.
        memory_headroom_mb: u64 = 1024, in (0, 1 << 30);
        /// Look for NaN in results that the reference does not have.
        checked: bool = false;
        /// When results are compared with the reference's. `first_use`: those of a kernel that is not built in, on a small
        /// call, at its first use for each class of call and before it serves; `sample`: also those of one call in
        /// `health.sample_every` of every kernel, built in or not; `off`: never. A kernel that was wrong stays out.
        verify: Verify = Verify::FirstUse;
        /// Print to standard error what happens: which kernel each new kind of call gets, reloads, compilations, failures.
        verbose: bool = false;
        /// Wait for the device after every call, so that errors show where they arise.
        debug: bool = false;
        /// Libraries or backends to prefer, the first most.
        prefer_sources: Vec<String> = Vec::new(), env Variable::Named("LAYERZERO_PREFER");
        /// Libraries or backends to avoid.
        avoid_sources: Vec<String> = Vec::new(), env Variable::Named("LAYERZERO_AVOID");
        /// Which of the `policies` of a kernels document is in force.
        policy: Option<String> = None;
        /// A lockfile to replay: decisions that `layerzero lock` wrote.
        lockfile: Option<PathBuf> = None;
        /// A dispatch table to follow: decisions by buckets of sizes, that `layerzero solve` wrote.
        dispatch_table: Option<PathBuf> = None;
        /// The `layerzero.yaml` of a project may name paths in the project, in your cache, and in these folders; `~` is
        /// the home directory. Only your own file, the environment and code can set this.
        allow_project_paths: Vec<String> = Vec::new();
        /// Reload when a configuration file changes.
        watch: bool = false;
        /// How long files must be quiet before they are read again, in milliseconds.
        watch_debounce_ms: u64 = 100, in (0, 60_000);
    }

    /// The performance database.
    perfdb: PerfDbSettings {
        /// Whether measurements are kept and used.
        enabled: bool = true;
        /// Where they are kept; `~` is the home directory, and a relative path is relative to the file that says it.
        path: PathBuf = PathBuf::from("~/.cache/layerzero/perfdb.sqlite");
        /// Whether times from other machines, which ship with LayerZero, are used for calls that were not measured
        /// here.
        priors: bool = true;
        /// Measure the calls of this process that were not measured yet: in the background, only while no call is made,
        /// those that take the most time first.
        auto_tune: bool = false;
        /// How many seconds a process may spend on that altogether.
        auto_tune_budget_s: u32 = 60, in (1, 86_400);
        /// The largest part of the time it may take, in percent: after measuring for a second at 5%, it waits 19.
        auto_tune_share: u32 = 5, in (1, 100);
        /// The least number of rounds in which a call is measured, unless you give another; each kernel runs in each
        /// round.
        tune_samples: u32 = 20, in (1, 10_000);
        /// Measure the calls of a warm-up as well.
        auto_tune_on_warmup: bool = false;
        /// For how many days a measurement counts; 0 for as long as libraries and drivers stay the same.
        ttl_days: u32 = 0, in (0, 36_500);
    }

    /// Kernels that are compiled on first use.
    jit: JitSettings {
        /// Compile in the background the kernels that calls would have used if they had been compiled.
        background_compile: bool = true;
        /// How many compilations may wait; beyond that the oldest is dropped.
        queue_size: u32 = 1_000, in (1, 1_000_000);
        /// Where the calls that were made are kept; `~` is the home directory. What was compiled is kept beside it.
        manifest_path: PathBuf = PathBuf::from("~/.cache/layerzero/shape_manifest.json");
        /// For how many days a call of the manifest counts after it was last made; 0 for ever.
        manifest_stale_days: u32 = 7, in (0, 36_500);
        /// If the only kernel for a call is not compiled yet: refuse the call. Off: the call waits until it is
        /// compiled.
        fail_on_no_fallback: bool = true;
    }

    /// Proofs and warm-ups for CUDA graphs.
    graph: GraphSettings {
        /// How much memory the capture of a kernel, or a replay, may keep beyond its results, in MiB. A kernel that keeps
        /// more fails its proof.
        memory_delta_warning_mb: f64 = 1.0, in (0, 1 << 20);
        /// How often a kernel runs on the side stream before it is captured, so that cuBLAS, cuDNN and its own library have
        /// allocated what they keep.
        warmup_iterations: u32 = 3, in (1, 1_000);
    }

    /// The selection cache.
    cache: CacheSettings {
        /// Whether decisions are remembered.
        enabled: bool = true;
        /// The most decisions that are remembered. For calls from Python, the last one of each function is remembered
        /// too.
        max_size: u64 = 10_000, in (1, 100_000_000);
        /// For how long, in seconds; 0 for as long as they are right.
        ttl_seconds: u64 = 0, in (0, 31_536_000);
    }

    /// Tokenizers.
    tokenizer: TokenizerSettings {
        /// Whether a tokenizer that is not on this machine may be downloaded inside a call.
        allow_download: bool = false;
        /// The most memory for the ids of texts seen before, in MiB; 0 keeps none.
        cache_mb: u64 = 0, in (0, 1 << 20);
    }

    /// The circuit breaker: a kernel that keeps failing an operation is left out for a while.
    breaker: BreakerSettings {
        /// Whether it may open.
        enabled: bool = true;
        /// Failures in a row that open it.
        failure_threshold: u32 = 5, in (1, 1_000_000);
        /// Successes in a row that close it again.
        success_threshold: u32 = 3, in (1, 1_000_000);
        /// How long it stays open the first time, in milliseconds.
        timeout_ms: u64 = 30_000, in (1, 86_400_000);
        /// How long it stays open at most; the time doubles with every opening.
        max_timeout_ms: u64 = 600_000, in (1, 86_400_000);
        /// How many calls at a time may try the kernel again, to see whether it can close.
        half_open_max_calls: u32 = 3, in (1, 1_000);
    }

    /// The degradation controller: ill health moves selection to safer kernels, level by level.
    degradation: DegradationSettings {
        /// Whether levels may change.
        enabled: bool = true;
        /// Below this health (0 to 100), only proven kernels run.
        reduced_health: u32 = 80, in (0, 100);
        /// Below this, only remembered decisions.
        cached_health: u32 = 60, in (0, 100);
        /// Below this, only rules decide.
        rule_based_health: u32 = 40, in (0, 100);
        /// Below this, only references run, and plain torch where none can.
        minimal_health: u32 = 20, in (0, 100);
        /// Points that health must rise above a threshold before the level does.
        hysteresis: u32 = 5, in (0, 50);
        /// How far back outcomes count, in milliseconds.
        window_ms: u64 = 10_000, in (1, 86_400_000);
        /// Calls that must be in it before the level moves.
        min_calls: u32 = 20, in (1, 1_000_000);
    }

    /// Libraries' kernels.
    backends: BackendsSettings {
        /// Backends or libraries that may be used though LayerZero never ran them on the hardware they are for. Read when
        /// backends are loaded. `layerzero doctor` lists them.
        unproven: Vec<String> = Vec::new();
        /// Kernels of the Hugging Face hub that may be loaded from the local cache, each with its commit:
        /// `owner/name@commit`. Nothing is downloaded. Only your own file, the environment and code can say this.
        hub_allow: Vec<String> = Vec::new(), env Variable::Named("LAYERZERO_HUB_ALLOW");
        /// The file that says which files those kernels consist of, with their SHA-256. A kernel that is not in
        /// it, or whose files differ from it, is refused. `layerzero hub` writes it; `~` is the home directory. Only
        /// your own file, the environment and code can say this.
        hub_lockfile: PathBuf = PathBuf::from("~/.cache/layerzero/hub_lock.json");
    }

    /// What `torch.compile` makes of calls.
    compile: CompileSettings {
        /// How a call becomes part of a graph that torch compiles. `auto`: norms, activations and rotary embeddings as
        /// plain torch code, which the compiler fuses with what is around them, and all else as the kernel that is
        /// chosen while the graph is traced; a kernel that a lock, a rule or a preference puts first is kept. `always`:
        /// plain torch code wherever it can express the call, unless a lock or a rule says otherwise. `off`: an
        /// operator that selects its kernel at every call.
        lowering: Lowering = Lowering::Auto;
        /// When a graph is compiled again whose kernels were chosen while it was traced. `never`; `policy`: when
        /// settings, locks and `with` blocks differ from those it was traced with; `measurements`: also after new
        /// measurements.
        recompile: Recompile = Recompile::Policy;
    }

    /// Health counters.
    health: HealthSettings {
        /// One call in this many is timed.
        sample_every: u64 = 64, in (1, 1 << 32);
    }
}

impl CacheSettings {
    /// How long a decision is remembered at most, in milliseconds; `u64::MAX` for as long as it is right.
    pub fn ttl_ms(&self) -> u64 {
        if self.ttl_seconds == 0 { u64::MAX } else { self.ttl_seconds.saturating_mul(1000) }
    }
}

/// Settings of the specification with one value so far: type, that value, what others would need.
macro_rules! declared_single {
    ($($(#[doc = $doc:literal])+ $ty:ident: $value:expr, $why:literal;)+) => {$(
        $(#[doc = $doc])+
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct $ty;

        impl Declared for $ty {
            const KIND: Kind = Kind::Only { value: $value, why: $why };
            fn to_value(&self) -> Value {
                $value.value()
            }
            fn receive(&mut self, _: &Value) {}
        }
    )+};
}

declared_single! {
    /// Each operation is selected by itself.
    OneByOne: Fixed::False, "each operation is selected by itself";
    /// Backends run in this process.
    InProcess: Fixed::Word("in_process"), "backends run in this process";
}

/// The order of dimensions of attention and rotary embedding.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DenseLayout {
    /// Batch, sequence, heads, head dimension.
    #[default]
    Bshd,
    /// Batch, heads, sequence, head dimension.
    Bhsd,
}

/// The order of dimensions of a paged cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CacheLayout {
    /// Page, slot, head, head dimension.
    #[default]
    Nhd,
    /// Page, head, slot, head dimension.
    Hnd,
}

macro_rules! declared_layouts {
    ($($ty:ident: $first:ident $first_word:literal, $second:ident $second_word:literal;)+) => {$(
        impl Declared for $ty {
            const KIND: Kind = Kind::Choice(&[$first_word, $second_word]);
            fn to_value(&self) -> Value {
                Value::from(match self {
                    $ty::$first => $first_word,
                    $ty::$second => $second_word,
                })
            }
            fn receive(&mut self, value: &Value) {
                match value {
                    Value::Str(word) if word == $first_word => *self = $ty::$first,
                    Value::Str(word) if word == $second_word => *self = $ty::$second,
                    _ => {}
                }
            }
        }
    )+};
}

declared_layouts! {
    DenseLayout: Bshd "BSHD", Bhsd "BHSD";
    CacheLayout: Nhd "NHD", Hnd "HND";
}

/// Settings that are one of several words.
macro_rules! declared_words {
    ($($(#[doc = $doc:literal])+ $ty:ident { $($(#[$meta:meta])+ $variant:ident $word:literal,)+ })+) => {$(
        $(#[doc = $doc])+
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub enum $ty {
            $($(#[$meta])+ $variant,)+
        }

        impl Declared for $ty {
            const KIND: Kind = Kind::Choice(&[$($word),+]);
            fn to_value(&self) -> Value {
                Value::from(match self {
                    $($ty::$variant => $word,)+
                })
            }
            fn receive(&mut self, value: &Value) {
                if let Value::Str(word) = value {
                    match word.as_str() {
                        $($word => *self = $ty::$variant,)+
                        _ => {}
                    }
                }
            }
        }
    )+};
}

declared_words! {
    /// How a call becomes part of a compiled graph.
    Lowering {
        /// Plain torch code for what the compiler fuses, the chosen kernel for the rest.
        #[default]
        Auto "auto",
        /// Plain torch code wherever it expresses the call.
        Always "always",
        /// An operator that selects its kernel at every call.
        Off "off",
    }
    /// What compiles a graph again.
    Recompile {
        /// Nothing.
        Never "never",
        /// Another policy.
        #[default]
        Policy "policy",
        /// Another policy, or new measurements.
        Measurements "measurements",
    }
}

const LEVELS: [&str; CpuIsa::LEVELS.len()] = {
    let mut names = [""; CpuIsa::LEVELS.len()];
    let mut index = 0;
    while index < names.len() {
        names[index] = CpuIsa::LEVELS[index].0;
        index += 1;
    }
    names
};

impl Declared for CpuIsa {
    const KIND: Kind = Kind::Choice(&LEVELS);
    fn to_value(&self) -> Value {
        Value::from(LEVELS[*self as usize])
    }
    fn receive(&mut self, value: &Value) {
        if let Value::Str(word) = value
            && let Some((_, level)) = CpuIsa::LEVELS.iter().find(|(name, _)| name == word)
        {
            *self = *level;
        }
    }
}

impl Declared for Verify {
    const KIND: Kind = Kind::Choice(Verify::WORDS);
    fn to_value(&self) -> Value {
        Value::from(Verify::WORDS[*self as usize])
    }
    fn receive(&mut self, value: &Value) {
        match value {
            Value::Str(word) if word == "off" => *self = Verify::Off,
            Value::Str(word) if word == "first_use" => *self = Verify::FirstUse,
            Value::Str(word) if word == "sample" => *self = Verify::Sample,
            _ => {}
        }
    }
}

/// A key of a file that holds more than one value; layers add to it.
pub struct Section {
    /// The key.
    pub key: &'static str,
    /// What it is for.
    pub doc: &'static str,
    /// What to write.
    pub expected: &'static str,
}

/// The keys of a file that are no settings.
pub static SECTIONS: &[Section] = &[
    Section { key: "version", doc: "The version of the file's format: 1.", expected: "1" },
    Section {
        key: "include",
        doc: "Files to read as well, relative to this one. What this file says wins; of two included files, the one \
              listed first.",
        expected: "a list of paths",
    },
    Section {
        key: "locks",
        doc: "By operation, alias or function, the kernels that alone may serve it: an id, an alias, a backend, a library, or a glob of these. A lock on a narrower name wins. `{kernel: NAME, optional: true}` does nothing where the kernel is unknown or cannot run.",
        expected: "a map of operation to kernel",
    },
    Section {
        key: "rules",
        doc: "Preferences, bans and locks with the conditions under which they apply. The first rule that decides wins.",
        expected: "a list of rules",
    },
    Section { key: "rollouts", doc: "Kernels that are tried on a part of the calls.", expected: "a list of rollouts" },
    Section { key: "schema_version", doc: "Says that this is a kernels document; up to 2 is read.", expected: "2" },
    Section {
        key: "defaults",
        doc: "Of a kernels document: `fallback_policy` (the kernel to fall to), `autotuning`, `cache_ttl_seconds`.",
        expected: "a map",
    },
    Section {
        key: "kernels",
        doc: "Of a kernels document: by group, the operation and the implementations it may use within their \
              constraints.",
        expected: "a map of group to implementations",
    },
    Section {
        key: "dispatch_rules",
        doc: "Of a kernels document: conditions and what they do (`priority_boost`, `kernel_override`, \
              `filter_kernels`). A boost without `kernel` is for all kernels that the document lists, except \
              the fallback.",
        expected: "a list of dispatch rules",
    },
    Section {
        key: "policies",
        doc: "Of a kernels document: policies by name; `policy` says which is in force.",
        expected: "a map of name to policy",
    },
];

/// Short names code may use: name, the setting it stands for.
pub(crate) static ALIASES: &[(&str, &str)] =
    &[("auto_tune_on_warmup", "perfdb.auto_tune_on_warmup"), ("tune_samples", "perfdb.tune_samples")];

/// Environment variables that are no settings: name, meaning.
pub static VARIABLES: &[(&str, &str)] = &[
    ("LAYERZERO_CONFIG", "Path of the project file; `layerzero.yaml` in the current directory when not given."),
    ("LAYERZERO_LOCK_<OP>", "Locks an operation, alias or function (upper case, dots as underscores) to a kernel."),
    (
        "LAYERZERO_TRANSFORMERS",
        "`1` makes `attn_implementation=\"layerzero\"` known to transformers when it is imported.",
    ),
];
