//! Names in a configuration: libraries, aliases, names nobody knows, names of what is not installed.

use std::collections::{BTreeMap, BTreeSet};

use super::*;
use layerzero::config::Layers;

/// Backends that belong to a library of another name, by hand. All others are their own library.
const LIBRARIES: &[(&str, &[&str])] = &[
    (
        "flash_attn",
        &[
            "flash_attn_3",
            "flash_attn_4",
            "flash_attn_4_tiles",
            "flash_attn_4_pages",
            "flash_attn_ck",
            "flash_attn_triton",
        ],
    ),
    ("flashinfer", &["flashinfer_prefill"]),
    ("torch", &["torch_any", "torch_cuda", "torch_rocm"]),
    ("hub", &["hub_activation", "hub_flash_attn2", "hub_flash_attn3", "hub_rmsnorm"]),
];

/// The kernel ids of the specification, and the backends whose kernels they stand for.
const SPECIFIED: &[(&str, &[&str])] = &[
    ("flash_attn.v3.causal", &["flash_attn_3"]),
    ("flash_attn.v2.causal", &["flash_attn"]),
    ("flashinfer.causal", &["flashinfer_prefill"]),
    ("xformers.causal", &["xformers"]),
    ("torch.sdpa.causal", &["torch", "torch_any", "torch_cuda", "torch_rocm"]),
    ("liger.rms_norm", &["liger"]),
    ("apex.rms_norm", &["apex"]),
    ("torch.rms_norm", &["torch", "torch_any", "torch_cuda", "torch_rocm"]),
    ("tokenizers.encode", &["tokenizers"]),
    ("tiktoken.encode", &["tiktoken"]),
    ("sentencepiece.encode", &["sentencepiece"]),
];

fn library_of(backend: &str) -> &str {
    LIBRARIES.iter().find(|(_, backends)| backends.contains(&backend)).map_or(backend, |(library, _)| library)
}

/// Every document that comes along, by backend.
fn documents() -> BTreeMap<String, String> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../python/layerzero/backends");
    let document = |entry: std::io::Result<fs::DirEntry>| {
        let path = entry.unwrap().path();
        Some((path.file_name()?.to_str()?.to_owned(), fs::read_to_string(path.join("capabilities.json")).ok()?))
    };
    let contrib = fs::read_dir(folder.join("contrib")).unwrap();
    fs::read_dir(folder).unwrap().chain(contrib).filter_map(document).collect()
}

/// An engine for an H100 that has every library.
fn everything() -> World {
    let w = World::made(|builder, _| builder.devices(vec![lz_hardware::described("h100").unwrap()]));
    for (backend, text) in documents() {
        w.engine.load_capabilities(&backend, &text).unwrap();
    }
    let installed = |spec: &mut SnapshotSpec| {
        let versions = spec.backends.values().map(|b| (b.descriptor.name.clone(), b.descriptor.version.clone()));
        spec.versions = versions.chain([("torch".to_owned(), "2.11.0".to_owned())]).collect();
    };
    w.engine.update(installed).unwrap();
    w
}

/// Every form in which a configuration can name kernels, with the name put in: where it is said, and the text.
fn forms(name: &str) -> Vec<(String, Sources, Option<CodeLayer>, TempDir)> {
    let mut forms = Vec::new();
    let mut file = |form: &str, text: String| {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("layerzero.yaml");
        fs::write(&path, text).unwrap();
        let sources = Sources { project: Some(path), ..Sources::default() };
        forms.push((form.to_owned(), sources, None, folder));
    };
    for key in ["prefer_sources", "avoid_sources"] {
        file(key, format!("{key}: ['{name}']\n"));
    }
    file("locks", format!("locks: {{attention: '{name}'}}\n"));
    file("optional lock", format!("locks: {{attention: {{kernel: '{name}', optional: true}}}}\n"));
    let rules = ["prefer", "avoid", "deny", "override", "fallback", "lock"];
    for key in rules.into_iter().chain(["prefer_sources", "avoid_sources", "deny_sources"]) {
        file(&format!("rule {key}"), format!("rules: [{{{key}: ['{name}']}}]\n"));
    }
    for key in ["boost", "priority"] {
        for by in ["kernel", "source"] {
            file(&format!("rule {key} {by}"), format!("rules: [{{{key}: {{{by}: '{name}', points: 9}}}}]\n"));
        }
    }
    for variable in ["LAYERZERO_PREFER", "LAYERZERO_AVOID", "LAYERZERO_LOCK_ATTENTION"] {
        let environment = [(variable.to_owned(), name.to_owned())].into_iter().collect();
        let sources = Sources { environment, ..Sources::default() };
        forms.push((variable.to_owned(), sources, None, tempfile::tempdir().unwrap()));
    }
    for key in ["prefer_sources", "avoid_sources"] {
        let mut block = CodeLayer::context();
        block.set(key, Value::names([name])).unwrap();
        forms.push((format!("with {key}"), Sources::default(), Some(block), tempfile::tempdir().unwrap()));
    }
    let mut block = CodeLayer::context();
    let rule = Value::Map(vec![("deny_sources".into(), Value::names([name]))]);
    block.set("rules", Value::List(vec![rule])).unwrap();
    forms.push(("with disabled".into(), Sources::default(), Some(block), tempfile::tempdir().unwrap()));
    forms
}

/// The kernels that what a form says is about.
fn named(w: &World, sources: &Sources, block: Option<&CodeLayer>) -> BTreeSet<String> {
    let layers = Layers::load(sources).unwrap();
    let config = layers.resolve_in(&block.into_iter().collect::<Vec<_>>()).unwrap();
    let rules = &config.policy().rules;
    assert_eq!(rules.len(), 1);
    let pattern = rules[0].action.pattern().unwrap().clone();
    w.engine.with_snapshot(|s| s.named(&pattern).map(|ix| s.kernel(ix).id.clone()).collect())
}

#[test]
fn what_was_never_run_serves_where_it_is_named() {
    let w = everything();
    let out = |kernel: &str| {
        w.engine.with_snapshot(|s| {
            let (ix, _) = s.kernels().find(|(_, k)| k.id == kernel).unwrap();
            s.static_reasons(ix, lz_model::DeviceIx(0)).iter().map(ToString::to_string).collect::<Vec<_>>()
        })
    };
    let said = |name: &str| {
        vec![format!(
            "was never run on the hardware it is for; to use it, name '{name}' in the setting backends.unproven"
        )]
    };
    // A kernel of a backend that was run, and a whole backend.
    assert_eq!(out("flash_attn.v2.train"), said("flash_attn"));
    assert_eq!(out("flash_attn.v2"), Vec::<String>::new());
    assert_eq!(out("hub.flash_attn2"), said("hub_flash_attn2"));
    for named in ["[flash_attn, hub_flash_attn2]", "[flash_attn, hub]"] {
        w.load(&format!("backends: {{unproven: {named}}}\n"));
        assert_eq!(out("flash_attn.v2.train"), Vec::<String>::new(), "{named}");
        assert_eq!(out("hub.flash_attn2"), Vec::<String>::new(), "{named}");
    }
    w.load("backends: {unproven: [hub_activation]}\n");
    assert_eq!(out("hub.flash_attn2"), said("hub_flash_attn2"));
}

#[test]
fn a_library_is_all_of_its_backends_in_every_form_of_rule() {
    let w = everything();
    let kernels: Vec<(String, String)> =
        w.engine.list_kernels(None).unwrap().into_iter().map(|k| (k.kernel_id, k.backend)).collect();
    let backends: BTreeSet<&str> = kernels.iter().map(|(_, backend)| backend.as_str()).collect();
    assert!(backends.len() > 30 && kernels.len() > 300);
    let names: BTreeSet<&str> = backends.iter().flat_map(|backend| [*backend, library_of(backend)]).collect();
    for name in names {
        let is_meant = |backend: &str| backend == name || library_of(backend) == name;
        let expected: BTreeSet<String> =
            kernels.iter().filter(|(_, backend)| is_meant(backend)).map(|(id, _)| id.clone()).collect();
        for (form, sources, block, _folder) in forms(name) {
            assert_eq!(named(&w, &sources, block.as_ref()), expected, "{form}: {name}");
        }
    }
}

#[test]
fn the_kernels_of_the_specification_are_aliases_of_those_that_come_along() {
    let w = everything();
    let kernels = w.engine.list_kernels(None).unwrap();
    for (name, backends) in SPECIFIED {
        for (form, sources, block, _folder) in forms(name) {
            let found = named(&w, &sources, block.as_ref());
            // A library's name is wanted there.
            if form.contains("source")
                || form.starts_with("with ")
                || matches!(&*form, "LAYERZERO_PREFER" | "LAYERZERO_AVOID")
            {
                assert!(found.is_empty(), "{form}: {name}");
                continue;
            }
            let of: BTreeSet<&str> =
                kernels.iter().filter(|k| found.contains(&k.kernel_id)).map(|k| k.backend.as_str()).collect();
            assert_eq!(of, backends.iter().copied().collect(), "{form}: {name}");
        }
    }
    let glob = Pattern::Kernel("flash_attn.v3.*".into());
    let matched = w.engine.with_snapshot(|s| s.named(&glob).map(|ix| s.kernel(ix).backend.clone()).collect::<Vec<_>>());
    let of_library = kernels.iter().filter(|k| k.backend == "flash_attn_3").count();
    assert!(matched.len() == of_library && matched.iter().all(|backend| backend == "flash_attn_3"), "{matched:?}");
}

fn attention() -> NamedCall<'static> {
    let tensor = || TensorMeta::new(DType::F16, &[2, 512, 16, 128]);
    let call = NamedCall::new().input("query", tensor()).input("key", tensor()).input("value", tensor());
    call.param("causal", ParamValue::Bool(true)).layout(Layout::Bshd)
}

/// The kernels of the specification's call that were ruled out by policy.
fn ruled_out(w: &World) -> BTreeSet<String> {
    let report = w.engine.explain("attention.causal", &attention()).unwrap();
    let out = |c: &&layerzero::CandidateReport| c.reasons.iter().any(|r| r.reason.code().starts_with("POLICY_"));
    report.candidates.iter().filter(out).map(|c| c.kernel_id.clone()).collect()
}

#[test]
fn banning_a_library_bans_all_of_it() {
    let w = everything();
    let candidates = w.engine.explain("attention.causal", &attention()).unwrap().candidates;
    for name in
        ["flash_attn", "flash_attn_3", "flash_attn_4_tiles", "flashinfer", "flashinfer_prefill", "torch", "xformers"]
    {
        let is_meant = |backend: &str| backend == name || library_of(backend) == name;
        let expected: BTreeSet<String> =
            candidates.iter().filter(|c| is_meant(&c.backend)).map(|c| c.kernel_id.clone()).collect();
        assert!(!expected.is_empty(), "{name}");
        for key in ["deny", "deny_sources"] {
            w.load(&format!("rules: [{{{key}: {name}}}]\n"));
            assert_eq!(ruled_out(&w), expected, "{key}: {name}");
        }
        w.load(&format!("locks: {{attention: {name}}}\n"));
        let others: BTreeSet<String> = candidates.iter().map(|c| c.kernel_id.clone()).collect();
        assert_eq!(ruled_out(&w), &others - &expected, "lock {name}");
    }
}

#[test]
fn the_specifications_file_works_where_the_library_is() {
    let w = everything();
    w.load(
        "version: 1
prefer_sources: [flash_attn, flashinfer]
avoid_sources: [experimental_lib]
locks:
  attention.causal: 'flash_attn.v3.causal'
rules:
  - {match: {sm: '>=90', operation: 'attention.*'}, prefer: 'flash_attn.v3.*'}
  - {match: {seq_len: '>16384'}, avoid_sources: [xformers]}
",
    );
    let report = w.engine.explain("attention.causal", &attention()).unwrap();
    assert_eq!((report.chosen.as_deref(), report.basis), (Some("flash_attn.v3"), Basis::Locked));
    assert_eq!(w.engine.validate("flash_attn.v3.causal", &attention()).unwrap(), []);
    w.load("rules: [{match: {sm: '>=90', operation: 'attention.*'}, prefer: 'flash_attn.v3.*'}]\n");
    let report = w.engine.explain("attention.causal", &attention()).unwrap();
    let points = |id: &str| report.candidates.iter().find(|c| c.kernel_id == id).unwrap().terms.map(|t| t.policy);
    assert_eq!((points("flash_attn.v3"), points("flash_attn.v2")), (Some(20.0), Some(0.0)));
}

#[test]
fn what_nobody_knows_is_refused_with_the_nearest_name() {
    let w = World::with_kernels(&["a.rms", "b.rms"]);
    w.load("locks: {norm.rms: b.rms}\n");
    let wrong = [
        ("locks: {norm.rms: b.rsm}", ":1:9: locks.norm.rms: no kernel is called 'b.rsm'; did you mean 'b.rms'?"),
        ("locks: {norm.rms: flash_attn.v3.casual}", "did you mean 'flash_attn.v3.causal'?"),
        (
            "prefer_sources: [flashinfr]",
            ": prefer_sources: no library is called 'flashinfr'; did you mean 'flashinfer'?",
        ),
        ("avoid_sources: [xformer]", "no library is called 'xformer'; did you mean 'xformers'?"),
        ("rules: [{prefer: 'no.such.*'}]", ": rules[0]: no kernel is called 'no.such.*'"),
        ("rules: [{avoid: xformres}]", "did you mean 'xformers'?"),
        ("rules: [{deny: a.rsm}]", "did you mean 'a.rms'?"),
        ("rules: [{deny_sources: nobody_at_all}]", "no library is called 'nobody_at_all'"),
        ("rules: [{override: a.rmss}, {fallback: b.rmss}]", "did you mean 'b.rms'?"),
        ("rules: [{boost: {kernel: a.rmss, points: 3}}]", "did you mean 'a.rms'?"),
        ("rules: [{lock: a.rmss, operation: rms_norm}]", "did you mean 'a.rms'?"),
        ("rules: [{filter: 'id != a.rmss'}]", "rules[0]: no kernel is called 'a.rmss'; did you mean 'a.rms'?"),
        (
            "rules: [{filter: \"not (source in [xformres, b])\"}]",
            "no library is called 'xformres'; did you mean 'xformers'?",
        ),
        ("rules: [{filter: \"backend == 'flashinfer_prefil' or reference\"}]", "did you mean 'flashinfer_prefill'?"),
        ("rules: [{filter: \"kernel_id matches 'nobody.*'\"}]", "no kernel is called 'nobody.*'"),
        (
            "rollouts: [{name: n, operation: rms_norm, candidate: b.rmss, mode: shadow}]",
            ":1:12: rollouts[0].candidate: no kernel is called 'b.rmss'; did you mean 'b.rms'?",
        ),
        ("locks: {norm.rms: lz_cpu.ref.activation.gelu}", "'lz_cpu.ref.activation.gelu' does not serve norm.rms"),
        ("locks: {norm.rms: a.rms}\nrules: [{deny: a}]", "leaves no kernel for norm.rms: all it names are denied by"),
    ];
    for (text, expected) in wrong {
        w.write("layerzero.yaml", text);
        let error = w.engine.reload().unwrap_err();
        assert!(error.to_string().contains(expected), "{text}: {error}");
        assert!(error.to_string().lines().all(|line| line.len() < 300), "{error}");
        assert_eq!(error.code(), "INVALID_CONFIGURATION");
        assert_eq!(w.serves(), "b.rms", "{text}: the last good one is in force");
        assert!(!w.engine.readiness().ready);
    }
    w.load("version: 1\n");
    let error = w.engine.lock("attention.causal", "no.such.kernel").unwrap_err();
    assert!(error.to_string().contains("no kernel is called 'no.such.kernel'"), "{error}");
    let mut block = CodeLayer::context();
    block.set("prefer_sources", Value::names(["b", "flashinferr"])).unwrap();
    assert!(w.engine.overlay(block).unwrap_err().to_string().contains("did you mean 'flashinfer'?"));
    // What a filter names may be a library that is not here, or the name of a kernel of it.
    w.load("rules: [{filter: \"library != xformers and id != 'flash_attn.v2' and not (id matches 'flash*')\"}]\n");
    w.load("rules: [{filter: \"id != entirely_something_else\"}, {filter: id == nothing, optional: true}]\n");
    w.load("rollouts: [{name: n, operation: attention, candidate: flash_attn.v3.causal, mode: shadow}]\n");
    // Nothing is there to be avoided, and it is nearly nothing else.
    w.load("avoid_sources: [experimental_lib]\n");
    assert!(w.engine.readiness().ready);
}

#[test]
fn what_is_known_and_not_installed_is_said_once() {
    let w = World::with_kernels(&["a.rms"]);
    let said = || w.warnings.lock().unwrap().iter().map(ToString::to_string).collect::<Vec<_>>();
    w.load("prefer_sources: [flash_attn, flashinfer]\navoid_sources: [xformers]\n");
    assert_eq!(
        said(),
        ["not installed here: flash_attn, flashinfer; what the configuration says about it has no effect"]
    );
    w.engine.reload().unwrap();
    w.advance(120_000);
    w.engine.reload().unwrap();
    assert_eq!(said().len(), 1, "{:?}", said());
    w.load("locks: {attention.causal: flash_attn.v3.causal}\n");
    let lock = "lock attention.causal to flash_attn.v3.causal (layerzero.yaml:1): it is not installed here; calls that it covers fail";
    assert_eq!(said()[1..], [lock]);
    assert_eq!(w.serves(), "a.rms", "nothing else is harmed");
    assert!(!w.engine.readiness().ready);
}

#[test]
fn optional_names_may_be_unknown() {
    let w = World::with_kernels(&["a.rms", "b.rms"]);
    let optional = "locks: {norm.rms: {kernel: plugin.rms, optional: true}}
rules: [{prefer_sources: [plugin_lib], optional: true}, {operation: rms_norm, lock: plugin.*, optional: true}]\n";
    w.load(optional);
    assert_eq!(w.serves(), "a.rms");
    assert!(w.engine.readiness().ready && w.warnings.lock().unwrap().is_empty());
    w.register(&["plugin.rms"]);
    w.engine.reload().unwrap();
    assert_eq!(w.serves(), "plugin.rms");
    w.engine.lock_if_there("gelu", "plugin.gelu").unwrap();
    // One that is known and cannot run here locks nothing either.
    w.engine.lock_if_there("norm.rms", "liger.rms_norm").unwrap();
    assert_eq!(w.serves(), "plugin.rms", "the rule of the file is next");
    let error = w.engine.configure([("locks".into(), Value::Map(vec![("gelu".into(), Value::Map(Vec::new()))]))]);
    assert!(error.unwrap_err().to_string().contains("'kernel' is missing"));
}

#[test]
fn names_are_checked_once_all_kernels_are_registered() {
    let w = World::made(|builder, _| builder.kernels_follow());
    w.load("locks: {norm.rms: plugin.rms}\n");
    w.register(&["other.rms", "plugin.rms"]);
    w.engine.settle_names().unwrap();
    assert_eq!(w.serves(), "plugin.rms");
    w.write("layerzero.yaml", "locks: {norm.rms: plugni.rms}\n");
    assert!(w.engine.reload().unwrap_err().to_string().contains("did you mean 'plugin.rms'?"));
    assert_eq!(w.serves(), "plugin.rms");
    // A kernel that was there is no unknown name.
    w.engine.unregister("plugin.rms", "1.0").unwrap();
    w.set("verbose", true);

    let w = World::made(|builder, _| builder.kernels_follow());
    w.load("locks: {norm.rms: plugni.rms}\n");
    w.register(&["plugin.rms"]);
    for _ in 0..2 {
        assert!(w.engine.settle_names().unwrap_err().to_string().contains("did you mean 'plugin.rms'?"));
    }
    w.write("layerzero.yaml", "locks: {norm.rms: plugin.rms}\n");
    w.engine.settle_names().unwrap();
    assert_eq!(w.serves(), "plugin.rms");
}
