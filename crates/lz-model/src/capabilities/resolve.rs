//! From a well-formed document to descriptors: names resolved against the catalog, all problems collected.

use std::collections::{BTreeMap, BTreeSet};

use lz_abi::{DType, DTypeSet, did_you_mean, nearest};
use lz_expr::{Expr, Type};

use super::doc::{Document, Kernel, Platforms};
use super::{Capabilities, Problem};
use crate::catalog::{Catalog, Op};
use crate::device::Platform;
use crate::kernel::{
    BackendDescriptor, DimRule, GridRule, InputRule, KernelDescriptor, ParamRule, PluginOrigin, QuantRule,
    TokenizerRule,
};
use crate::param::{Param, ParamRole};
use crate::schema::{DTypeRule, Dim, DimKind};
use crate::version::Requirement;

/// Problems found so far, and where we are.
#[derive(Default)]
struct Problems(Vec<Problem>);

impl Problems {
    fn add(&mut self, path: &str, message: impl Into<String>) {
        self.0.push(Problem { path: path.to_owned(), message: message.into() });
    }

    fn parse<T: std::str::FromStr<Err: std::fmt::Display>>(&mut self, path: &str, text: &str) -> Option<T> {
        text.parse().map_err(|e: T::Err| self.add(path, e.to_string())).ok()
    }
}

pub(super) fn resolve(document: Document, hash: String) -> Result<Capabilities, Vec<Problem>> {
    let mut problems = Problems::default();
    let platforms = document.platform.list();
    if document.backend.trim().is_empty() {
        problems.add("/backend", "the name is empty; name the library");
    }
    if document.library.as_ref().is_some_and(|library| library.trim().is_empty()) {
        problems.add("/library", "the name is empty; name the library, or leave it out");
    }
    if platforms.is_empty() {
        problems.add("/platform", "no platform; name one of cpu, cuda, rocm, hpu, xpu, mps, privateuse1");
    }
    let requires = requirements(&mut problems, "/requires", &document.requires);
    let mut seen = BTreeSet::new();
    let mut kernels = Vec::new();
    for (operation, docs) in &document.ops {
        let path = format!("/ops/{}", operation.replace('~', "~0").replace('/', "~1"));
        let ops: Vec<&Op> = match Catalog::get().find(operation) {
            Ok(target) => target.ops.iter().map(|ix| Catalog::get().op(*ix)).collect(),
            Err(error) => {
                problems.add(&path, error.to_string());
                continue;
            }
        };
        for (i, kernel) in docs.iter().enumerate() {
            let path = format!("{path}/{i}");
            let version = kernel.version.clone().unwrap_or_else(|| document.backend_version.clone());
            if !seen.insert((kernel.kernel_id.clone(), version.clone())) {
                let message = format!("kernel id '{}' is used twice; ids are unique in a backend", kernel.kernel_id);
                problems.add(&format!("{path}/kernel_id"), message);
            }
            let mut reader = KernelReader { problems: &mut problems, path: &path, ops: &ops, doc: kernel };
            let mut descriptor = reader.read(operation, &document.backend, &platforms);
            descriptor.version = version;
            descriptor.library.clone_from(&document.library);
            descriptor.proven &= document.proven;
            descriptor.requires.extend(requires.iter().cloned());
            kernels.push(descriptor);
        }
    }
    if !problems.0.is_empty() {
        problems.0.sort();
        problems.0.dedup();
        return Err(problems.0);
    }
    let backend = BackendDescriptor {
        name: document.backend,
        library: document.library,
        version: document.backend_version,
        platforms,
        origin: document.plugin_origin.unwrap_or(PluginOrigin::Builtin),
        requires,
        capabilities_hash: hash,
    };
    Ok(Capabilities { backend, kernels, generations: document.gpu_generations })
}

fn requirements(problems: &mut Problems, path: &str, texts: &[String]) -> Vec<Requirement> {
    texts.iter().enumerate().filter_map(|(i, text)| problems.parse(&format!("{path}/{i}"), text)).collect()
}

/// Reads one kernel against the operations it was written for.
struct KernelReader<'a> {
    problems: &'a mut Problems,
    path: &'a str,
    ops: &'a [&'static Op],
    doc: &'a Kernel,
}

impl KernelReader<'_> {
    fn read(&mut self, operation: &str, backend: &str, platforms: &[Platform]) -> KernelDescriptor {
        let doc = self.doc;
        let mut kernel = KernelDescriptor::new(&doc.kernel_id, operation, backend);
        if doc.kernel_id.trim().is_empty() {
            self.problems.add(&self.at("kernel_id"), "the id is empty");
        }
        if doc.aliases.iter().any(|alias| alias.trim().is_empty() || alias.contains(['*', '?', '@'])) {
            self.problems.add(&self.at("aliases"), "an alias is a plain name: not empty, without *, ? and @");
        }
        kernel.aliases.clone_from(&doc.aliases);
        let own = doc.platform.as_ref().map(Platforms::list);
        if let Some(other) = own.iter().flatten().find(|p| !platforms.contains(p)) {
            self.problems
                .add(&self.at("platform"), format!("the backend does not run on {other}; name it at the top as well"));
        }
        if own.as_ref().is_some_and(Vec::is_empty) {
            self.problems.add(&self.at("platform"), "no platform; name one, or leave it out");
        }
        let platforms = own.unwrap_or_else(|| platforms.to_vec());
        kernel.platforms.clone_from(&platforms);
        kernel.min_sm = doc.min_sm.flatten();
        if platforms.contains(&Platform::Cuda) && doc.min_sm.is_none() {
            self.problems.add(self.path, "'min_sm' is missing; state it, or null for any");
        }
        kernel.max_sm = doc.max_sm;
        kernel.generations.clone_from(&doc.supported_generations);
        kernel.min_tensor_core_generation = doc.min_tensor_core_generation;
        kernel.instruction_sets = doc.instruction_set.iter().chain(&doc.instruction_sets).cloned().collect();
        kernel.device_features.clone_from(&doc.device_features);
        kernel.vendors.clone_from(&doc.vendors);
        kernel.requires = requirements(self.problems, &self.at("requires"), &doc.requires);
        if let Some(driver) = &doc.min_driver_version {
            let path = self.at("min_driver_version");
            kernel.requires.extend(self.problems.parse::<Requirement>(&path, &format!("driver>={driver}")));
        }
        self.tensors(&mut kernel);
        kernel.dims = self.dims();
        kernel.params = self.params();
        kernel.inputs = self.inputs();
        self.expressions(&mut kernel);
        kernel.shares_kv_heads = doc.supports_gqa;
        kernel.kv_strategies.clone_from(&doc.supports_kv_strategies);
        kernel.quant = (!doc.supported_quant_dtypes.is_empty()).then(|| QuantRule {
            formats: doc.supported_quant_dtypes.clone(),
            granularities: doc.quantization_scale_granularity.into_iter().collect(),
            zero_point: doc.quantization_zero_point,
        });
        kernel.graph_safe = doc.is_cuda_graph_safe;
        kernel.deterministic = doc.deterministic;
        kernel.autograd = doc.autograd;
        kernel.batch_invariant = doc.batch_invariant;
        kernel.sdpa = doc.sdpa;
        kernel.jit = doc.jit;
        kernel.tp.clone_from(&doc.tp_invariance);
        let formats = doc.packing_formats.iter().enumerate();
        kernel.packing = formats
            .filter_map(|(i, text)| self.problems.parse(&self.at(&format!("packing_formats/{i}")), text))
            .collect();
        kernel.accuracy = doc.accuracy_class;
        kernel.tokenizer = self.tokenizer();
        kernel.priority = doc.priority;
        kernel.baseline = doc.baseline;
        kernel.proven = doc.proven;
        kernel.transform_cost_hint = doc.transform_cost_hint;
        if doc.advantage.as_ref().is_some_and(|why| why.trim().is_empty()) {
            self.problems.add(&self.at("advantage"), "say what the advantage is, or leave it out".to_owned());
        }
        for (i, fused) in doc.fuses_ops.iter().enumerate() {
            if let Err(error) = Catalog::get().find(fused) {
                self.problems.add(&self.at(&format!("fuses_ops/{i}")), error.to_string());
            }
        }
        kernel
    }

    fn at(&self, key: &str) -> String {
        format!("{}/{key}", self.path)
    }

    fn tensors(&mut self, kernel: &mut KernelDescriptor) {
        let doc = self.doc;
        kernel.dtypes = self.dtypes("dtypes", &doc.dtypes);
        // Texts have neither.
        let tensors = self.ops.iter().any(|op| !op.schema().inputs.is_empty() || !op.schema().outputs.is_empty());
        if doc.dtypes.is_empty() && tensors {
            self.problems.add(&self.at("dtypes"), "no dtype is stated; a kernel must say which it takes");
        }
        if doc.requires_layouts.is_empty() && tensors {
            self.problems
                .add(&self.at("requires_layouts"), "no layout is stated; name them, or 'contiguous' or 'strided'");
        }
        kernel.layouts.clone_from(&doc.requires_layouts);
        if let Some(layout) = doc.produces_layout.filter(|layout| !doc.requires_layouts.contains(layout)) {
            let message = format!("results are laid out as the operands are, and {layout} is none of their layouts");
            self.problems.add(&self.at("produces_layout"), message);
        }
        let path = self.at("requires_dtype");
        kernel.requires_dtype = doc.requires_dtype.as_ref().and_then(|t| self.problems.parse::<DType>(&path, t));
        kernel.requires_contiguous = doc.requires_contiguous;
        kernel.requires_last_dim_stride1 = doc.requires_last_dim_stride1;
        kernel.requires_aligned = doc.requires_aligned;
    }

    fn dtypes(&mut self, key: &str, names: &[String]) -> DTypeSet {
        let base = self.at(key);
        names
            .iter()
            .enumerate()
            .filter_map(|(i, name)| self.problems.parse::<DType>(&format!("{base}/{i}"), name))
            .collect()
    }

    /// Dimension rules: those by name, and the flat keys of the specification. Whatever is stated
    /// about one dimension, in whichever way, holds together.
    fn dims(&mut self) -> BTreeMap<String, DimRule> {
        let doc = self.doc;
        let mut rules: BTreeMap<String, DimRule> = BTreeMap::new();
        let mut state = |name: &str, rule: DimRule| rules.entry(name.to_owned()).or_default().tighten(&rule);
        for (name, rule) in &doc.dims {
            let key = format!("dims/{name}");
            if let Some(canonical) = self.dim_name(&key, name) {
                self.check_rule(&key, rule);
                state(&canonical, rule.clone());
            }
        }
        for (name, &(min, max)) in &doc.shape_constraints {
            let key = format!("shape_constraints/{name}");
            if let Some(canonical) = self.dim_name(&key, name) {
                let rule = DimRule { min: Some(min), max: Some(max), ..DimRule::default() };
                self.check_rule(&key, &rule);
                state(&canonical, rule);
            }
        }
        let head_dim = DimRule {
            min: doc.min_head_dim.flatten(),
            max: doc.max_head_dim.flatten(),
            multiple_of: doc.head_dim_multiple,
            one_of: None,
        };
        let batch = DimRule { min: doc.min_batch_size, max: doc.max_batch_size, ..DimRule::default() };
        let seq = DimRule { max: doc.max_seq_len, ..DimRule::default() };
        self.check_rule(
            if head_dim.multiple_of.is_some_and(|m| m < 1) { "head_dim_multiple" } else { "max_head_dim" },
            &head_dim,
        );
        self.check_rule("max_batch_size", &batch);
        let has = |test: &dyn Fn(&Dim) -> bool| self.ops.iter().flat_map(|op| op.schema().dims).any(test);
        let meaningless = [
            ("max_head_dim", head_dim != DimRule::default() && !has(&|d| d.name == "head_dim")),
            ("max_seq_len", seq != DimRule::default() && !has(&|d| d.kind == DimKind::Seq)),
            ("max_batch_size", batch != DimRule::default() && !has(&|d| d.kind == DimKind::Batch)),
        ];
        for (key, _) in meaningless.into_iter().filter(|(_, wrong)| *wrong) {
            self.problems.add(&self.at(key), "the operation has no such dimension; use 'dims' with one it has");
        }
        let flat = |dim: &Dim| match dim.kind {
            DimKind::HeadDim if dim.name == "head_dim" => Some((&head_dim, doc.max_head_dim.is_some())),
            DimKind::Seq => Some((&seq, doc.max_seq_len.is_some())),
            DimKind::Batch => Some((&batch, batch != DimRule::default())),
            _ => None,
        };
        for dim in self.ops.iter().flat_map(|op| op.schema().dims) {
            if let Some((rule, stated)) = flat(dim)
                && (stated || *rule != DimRule::default())
            {
                state(dim.name, rule.clone());
            }
        }
        for dim in self.ops.iter().flat_map(|op| op.schema().dims).filter(|d| d.must_constrain) {
            let stated = rules.contains_key(dim.name)
                && (dim.name != "head_dim"
                    || doc.max_head_dim.is_some()
                    || doc.dims.keys().chain(doc.shape_constraints.keys()).any(|k| self.is_dim(k, dim.name)));
            if !stated {
                let flat = if dim.name == "head_dim" { "'max_head_dim' (null for any) or " } else { "" };
                self.problems
                    .add(self.path, format!("no constraint on '{}'; state {flat}'dims.{}'", dim.name, dim.name));
            }
        }
        rules
    }

    fn is_dim(&self, name: &str, canonical: &str) -> bool {
        self.ops.iter().any(|op| op.dim_index(name).is_some_and(|i| op.schema().dims[i].name == canonical))
    }

    fn check_rule(&mut self, key: &str, rule: &DimRule) {
        let message = match rule {
            DimRule { multiple_of: Some(m), .. } if *m < 1 => {
                format!("a multiple of {m} makes no sense; use 1 or more")
            }
            DimRule { min: Some(min), max: Some(max), .. } if min > max => {
                format!("min {min} is larger than max {max}")
            }
            DimRule { one_of: Some(set), .. } if set.is_empty() => "an empty 'one_of' allows nothing".into(),
            _ => return,
        };
        self.problems.add(&self.at(key), message);
    }

    /// The canonical name of a dimension that some operation of this kernel has.
    fn dim_name(&mut self, key: &str, name: &str) -> Option<String> {
        let found = self.ops.iter().find_map(|op| op.dim_index(name).map(|i| op.schema().dims[i].name.to_owned()));
        if found.is_none() {
            let known = self.ops.iter().flat_map(|op| op.schema().dims).map(|d| d.name);
            let message = format!("no dimension '{name}' here{}", did_you_mean(&nearest(name, known)));
            self.problems.add(&self.at(key), message);
        }
        found
    }

    fn params(&mut self) -> BTreeMap<String, ParamRule> {
        let doc = self.doc;
        let mut rules = BTreeMap::new();
        for (name, rule) in &doc.params {
            match self.ops.iter().find_map(|op| op.param_index(name).map(|i| &op.schema().params[i])) {
                Some(Param { role: ParamRole::Presence | ParamRole::Ignored, .. }) if *rule != ParamRule::default() => {
                    let message = format!("'{name}' cannot decide by its value; use an empty rule {{}}");
                    self.problems.add(&self.at(&format!("params/{name}")), message);
                }
                Some(param) => {
                    rules.insert(param.name.to_owned(), rule.clone());
                }
                None => {
                    let known = self.ops.iter().flat_map(|op| op.schema().params).map(|p| p.name);
                    let message = format!("no parameter '{name}' here{}", did_you_mean(&nearest(name, known)));
                    self.problems.add(&self.at(&format!("params/{name}")), message);
                }
            }
        }
        for (supported, name) in [(doc.supports_dropout, "dropout_p"), (doc.supports_scale, "scale")] {
            if supported && self.ops.iter().any(|op| op.param_index(name).is_some()) {
                rules.entry(name.to_owned()).or_default();
            }
        }
        if doc.supports_offsets {
            rules.entry("return_offsets".to_owned()).or_default();
        }
        rules
    }

    fn inputs(&mut self) -> BTreeMap<String, InputRule> {
        let doc = self.doc;
        let mut rules: BTreeMap<String, InputRule> = BTreeMap::new();
        for (name, rule) in &doc.inputs {
            let found = self.ops.iter().find_map(|op| op.input_index(name).map(|i| &op.schema().inputs[i]));
            let Some(input) = found else {
                let known = self.ops.iter().flat_map(|op| op.schema().inputs).map(|i| i.name);
                let message = format!("no input '{name}' here{}", did_you_mean(&nearest(name, known)));
                self.problems.add(&self.at(&format!("inputs/{name}")), message);
                continue;
            };
            let dtypes = rule.dtypes.as_ref().map(|names| self.dtypes(&format!("inputs/{name}/dtypes"), names));
            rules.insert(
                input.name.to_owned(),
                InputRule {
                    dtypes,
                    layouts: rule.layouts.clone(),
                    required: rule.required || rule.purpose,
                    purpose: rule.purpose,
                    no_broadcast: rule.no_broadcast,
                },
            );
        }
        for input in self.ops.iter().flat_map(|op| op.schema().inputs) {
            if input.mask && doc.supports_attn_mask {
                let dtypes = self.mask_dtypes();
                rules.entry(input.name.to_owned()).or_default().dtypes.get_or_insert(dtypes);
            }
            let holds_data = match input.dtype {
                DTypeRule::In(set) => set.contains(DType::F32),
                DTypeRule::Same(_) => true,
            };
            if input.cache && holds_data {
                if let Some(names) = &doc.supports_kv_cache_dtypes {
                    let dtypes = self.dtypes("supports_kv_cache_dtypes", names);
                    rules.entry(input.name.to_owned()).or_default().dtypes.get_or_insert(dtypes);
                }
                if let Some(layouts) = &doc.supports_kv_cache_layouts {
                    rules.entry(input.name.to_owned()).or_default().layouts.get_or_insert_with(|| layouts.clone());
                }
            }
        }
        rules
    }

    fn mask_dtypes(&mut self) -> DTypeSet {
        let Some(types) = &self.doc.supported_attn_mask_types else {
            return DTypeSet::MASKS;
        };
        let mut set = DTypeSet::EMPTY;
        for (i, kind) in types.iter().enumerate() {
            match kind.as_str() {
                "none" => {}
                "bool" => set.insert(DType::Bool),
                "float" => DTypeSet::FLOATS.iter().for_each(|d| set.insert(d)),
                other => {
                    let path = self.at(&format!("supported_attn_mask_types/{i}"));
                    self.problems.add(&path, format!("unknown mask type '{other}'; use none, bool or float"));
                }
            }
        }
        set
    }

    /// Compiles every expression against every operation it must hold for.
    fn expressions(&mut self, kernel: &mut KernelDescriptor) {
        let doc = self.doc;
        for (i, text) in doc.conditions.iter().enumerate() {
            self.compile(&format!("conditions/{i}"), text, Type::Bool);
        }
        if let Some(text) = &doc.workspace_bytes {
            self.compile("workspace_bytes", text, Type::Int);
        }
        if let Some(grid) = &doc.grid_layout {
            let formulas = [
                ("x_formula", Some(&grid.x_formula)),
                ("y_formula", grid.y_formula.as_ref()),
                ("z_formula", grid.z_formula.as_ref()),
                ("shared_bytes_formula", grid.shared_bytes_formula.as_ref()),
            ];
            if grid.tile_size < 1 || grid.blocks_per_batch_head < 1 {
                self.problems.add(&self.at("grid_layout"), "tile_size and blocks_per_batch_head must be 1 or more");
            }
            for (key, text) in formulas {
                if let Some(text) = text {
                    let expanded = expand_tiles(text, self.ops, grid);
                    self.compile(&format!("grid_layout/{key}"), &expanded, Type::Int);
                }
            }
        }
        kernel.conditions.clone_from(&doc.conditions);
        kernel.workspace.clone_from(&doc.workspace_bytes);
        kernel.grid.clone_from(&doc.grid_layout);
    }

    fn compile(&mut self, key: &str, text: &str, ty: Type) {
        let failure = self.ops.iter().find_map(|op| Expr::compile_as(text, op.scope(), ty).err());
        if let Some(error) = failure {
            self.problems.add(
                &self.at(key),
                format!(
                    "column {}: {}{}",
                    error.column,
                    error.kind,
                    error.kind.hint().map_or_else(String::new, |h| format!("; {h}"))
                ),
            );
        }
    }

    fn tokenizer(&self) -> TokenizerRule {
        let doc = self.doc;
        let lists = [
            ("tokenizer_id", &doc.tokenizer_ids),
            ("vocab_hash", &doc.vocab_hashes),
            ("merges_hash", &doc.merges_hashes),
            ("added_tokens_hash", &doc.added_tokens_hashes),
            ("special_tokens_hash", &doc.special_tokens_hashes),
            ("normalizer_id", &doc.supports_normalizers),
            ("pretokenizer_id", &doc.supports_pretokenizers),
        ];
        let serves = lists.into_iter().filter_map(|(name, list)| Some((name.to_owned(), list.clone()?))).collect();
        TokenizerRule { serves }
    }
}

/// Replaces `seq_tiles` by the tiled length of the operation's first sequence: 1 where it is not tiled.
fn expand_tiles(text: &str, ops: &[&Op], grid: &GridRule) -> String {
    if !grid.tiles_sequence {
        return text.replace("seq_tiles", "1");
    }
    let seq = ops.iter().flat_map(|op| op.schema().dims).find(|d| d.kind == DimKind::Seq).map_or("1", |d| d.name);
    text.replace("seq_tiles", &format!("ceil_div({seq}, {})", grid.tile_size))
}

impl GridRule {
    /// A formula of this grid for `op`, with `seq_tiles` written out.
    pub fn formula_for(&self, text: &str, op: &'static Op) -> String {
        expand_tiles(text, &[op], self)
    }
}
