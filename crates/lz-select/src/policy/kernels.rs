//! What a policy may say about kernels: their fields, and names that are not quite their ids.

use std::sync::LazyLock;

use lz_expr::{Compared, Env, Expr, ExprError, Scope, Type, Value, glob_matches};
use lz_model::KernelDescriptor;

type Read = for<'a> fn(&'a KernelDescriptor) -> Value<'a>;

/// The fields of a kernel that a filter may name: name, other name, type, value. A `source` is a library, as in
/// `prefer_sources`.
const FIELDS: &[(&str, &str, Type, Read)] = &[
    ("id", "kernel_id", Type::Str, |k| Value::Str(&k.id)),
    ("library", "source", Type::Str, |k| Value::Str(k.library())),
    ("backend", "backend_name", Type::Str, |k| Value::Str(&k.backend)),
    ("version", "kernel_version", Type::Str, |k| Value::Str(&k.version)),
    ("operation", "op", Type::Str, |k| Value::Str(&k.operation)),
    ("priority", "declared_priority", Type::Int, |k| Value::Int(i64::from(k.priority))),
    ("deterministic", "is_deterministic", Type::Bool, |k| Value::Bool(k.deterministic)),
    ("graph_safe", "cuda_graph_safe", Type::Bool, |k| Value::Bool(k.graph_safe)),
    ("autograd", "supports_autograd", Type::Bool, |k| Value::Bool(k.autograd)),
    ("batch_invariant", "is_batch_invariant", Type::Bool, |k| Value::Bool(k.batch_invariant)),
    ("jit", "is_jit", Type::Bool, |k| Value::Bool(k.jit)),
    ("reference", "is_reference", Type::Bool, |k| Value::Bool(k.reference)),
    ("experimental", "is_experimental", Type::Bool, |k| Value::Bool(is_experimental(k))),
];

static SCOPE: LazyLock<Scope> = LazyLock::new(|| {
    let mut scope = Scope::new();
    for &(name, also, ty, _) in FIELDS {
        let slot = scope.field(name, ty);
        scope.alias(also, slot);
    }
    scope
});

/// Reads a filter.
pub(crate) fn filter(text: &str) -> Result<Expr, ExprError> {
    Expr::compile_as(text, &SCOPE, Type::Bool)
}

/// A name of a kernel, library or backend that a filter compares with.
pub(crate) struct FilterName {
    /// What it is the name of: `id`, `library` or `backend`.
    pub field: &'static str,
    /// The name, or a glob.
    pub name: String,
    pub glob: bool,
    /// Whether kernels of another name are wanted.
    pub negated: bool,
}

/// The names in a filter; none of one that cannot be read.
pub(crate) fn filter_names(text: &str) -> Vec<FilterName> {
    let Ok(expr) = filter(text) else { return Vec::new() };
    let named = |compared: &Compared<'_>| {
        let field = FIELDS[usize::from(compared.slot)].0;
        let name = compared.text.to_owned();
        let is_name = matches!(field, "id" | "library" | "backend");
        is_name.then_some(FilterName { field, name, glob: compared.glob, negated: compared.negated })
    };
    expr.compared().iter().filter_map(named).collect()
}

/// A kernel's fields, as a filter sees them.
pub(crate) struct KernelFields<'a>(pub &'a KernelDescriptor);

impl Env for KernelFields<'_> {
    fn get(&self, slot: u16) -> Value<'_> {
        FIELDS[usize::from(slot)].3(self.0)
    }
}

/// Whether a kernel says of itself that it is experimental: by a word of its id or library.
fn is_experimental(kernel: &KernelDescriptor) -> bool {
    words(&kernel.id).chain(words(&kernel.backend)).any(|word| word == "experimental")
}

/// The words of a name, in one spelling.
fn words(name: &str) -> impl Iterator<Item = String> + '_ {
    name.split(['.', '_', '-']).filter(|word| !word.is_empty()).map(|word| {
        let word = word.to_ascii_lowercase();
        match word.strip_prefix('v') {
            Some(digits) if !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit()) => digits.to_owned(),
            _ if word == "attention" => "attn".to_owned(),
            _ => word,
        }
    })
}

/// Whether `name` is the id of a kernel or its beginning, up to spelling. See
/// [`Pattern::Name`](super::Pattern::Name).
pub(crate) fn is_called(name: &str, id: &str) -> bool {
    if name.contains(['*', '?']) {
        let spelled = |text: &str| words(text).collect::<Vec<_>>().join(".");
        let (name, id) = (spelled(name), spelled(id));
        return glob_matches(&name, &id) || glob_matches(&format!("{name}.*"), &id);
    }
    let name: String = words(name).collect();
    if name.is_empty() {
        return false;
    }
    let mut beginning = String::new();
    for word in words(id) {
        beginning.push_str(&word);
        if beginning.len() >= name.len() {
            return beginning == name;
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_the_specification_are_ids_in_another_spelling() {
        let called = [
            ("flash_attention_v2", "flash_attn.v2.causal"),
            ("flash_attention_v2", "flash_attn.v2"),
            ("flash_attn_2", "flash_attn.v2.causal"),
            ("flash_infer", "flashinfer.prefill"),
            ("xformers_memory_efficient", "xformers.memory_efficient.cutlass"),
            ("torch_sdpa", "torch.sdpa.math"),
            ("Torch-SDPA", "torch.sdpa.math"),
            ("torch_rms_norm", "torch.rms_norm"),
            ("*_experimental", "lib.thing_experimental"),
            ("*_experimental", "lib.thing.experimental.causal"),
            ("torch.sdpa.*", "torch.sdpa.math"),
        ];
        for (name, id) in called {
            assert!(is_called(name, id), "{name} is {id}");
        }
        let not = [
            ("flash_attention_v2", "flash_attn.v3.causal"),
            ("flash_attention_v2", "flash_attn"),
            ("torch_s", "torch.sdpa.math"),
            ("sdpa", "torch.sdpa.math"),
            ("", "torch.sdpa.math"),
            ("_", "torch.sdpa.math"),
            ("*_experimental", "lib.thing"),
            ("torch_rms_norm", "torch.add_rms_norm"),
        ];
        for (name, id) in not {
            assert!(!is_called(name, id), "{name} is not {id}");
        }
    }

    #[test]
    fn filters_see_what_kernels_say_of_themselves() {
        let mut kernel = KernelDescriptor::new("lib.fast_experimental", "norm.rms", "lib");
        kernel.deterministic = true;
        let holds = |text: &str| filter(text).unwrap().test(&KernelFields(&kernel)).unwrap();
        assert!(holds("deterministic == true and experimental and priority == 50"));
        assert!(holds("id matches 'lib.*' and source == lib and not jit"));
        kernel.library = Some("family".into());
        let holds = |text: &str| filter(text).unwrap().test(&KernelFields(&kernel)).unwrap();
        assert!(holds("library == family and source == family and backend == lib"));
        assert!(!holds("graph_safe or reference"));
        assert!(filter("determinstic").unwrap_err().to_string().contains("did you mean `deterministic`?"));
    }
}
