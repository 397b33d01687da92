//! What each command answers, to people and to programs.

use std::collections::BTreeSet;

use lz_model::ops::{ALIASES, OPS};
use serde_json::{Value, json};

use crate::support::{attention, fixture, layerzero, on_h100};

fn ids(kernels: &Value) -> BTreeSet<&str> {
    kernels.as_array().unwrap().iter().map(|k| k["kernel_id"].as_str().unwrap()).collect()
}

#[test]
fn doctor_shows_this_machine_and_that_it_can_be_used() {
    let outcome = layerzero("doctor").ended(0);
    for part in
        ["Devices", "(cpu)", "Backends", "lz_cpu", "available", "rms_norm in bfloat16 -> lz_cpu", "Problems\n  none"]
    {
        assert!(outcome.out.contains(part), "{part} in {}", outcome.out);
    }
    let report = layerzero("doctor --json").ended(0).json();
    assert_eq!(report["usable"], true);
    assert_eq!(report["operations"], OPS.len());
    assert_eq!(report["devices"][0]["platform"], "cpu");
    assert_eq!(report["backends"][0]["unavailable"], Value::Null);
    assert!(report["kernels_ready"].as_u64().unwrap() > 0);
    assert!(report["selection"].as_array().unwrap().iter().all(|s| s["kernel_id"].is_string()));
    assert_eq!(report["problems"], json!([]));
}

#[test]
fn a_device_no_kernel_is_for_is_an_unusable_environment() {
    let outcome = layerzero("doctor --device mi300x").ended(4);
    assert!(outcome.out.contains("kernels can run here"), "{}", outcome.out);
    let report = layerzero("doctor --device mi300x --json").ended(4).json();
    assert_eq!((&report["usable"], &report["kernels_ready"]), (&json!(false), &json!(0)));
    assert_eq!(report["notes"], json!([]), "notes are about this machine");
}

#[test]
fn doctor_summarizes_a_described_device() {
    let text = layerzero(&format!("doctor {}", on_h100())).ended(0).out;
    for part in
        ["0: NVIDIA H100 80GB HBM3 (cuda)", "SM 90, hopper, 132 cores", "cuda 12.8", "wgmma", "-> flash_attn.v2.causal"]
    {
        assert!(text.contains(part), "{part} in {text}");
    }
}

#[test]
fn doctor_shows_why_a_backend_is_disabled_and_ends_as_a_bad_configuration() {
    let refused = fixture("refused.json");
    let report = layerzero(&format!("doctor --json --capabilities {refused}")).ended(3).json();
    let backend = report["backends"].as_array().unwrap().iter().find(|b| b["name"] == "refused").unwrap();
    assert!(backend["unavailable"].as_str().unwrap().contains("CAPABILITIES_SCHEMA_MISMATCH"), "{backend}");
    assert!(report["problems"][0].as_str().unwrap().contains("refused.json"), "{report}");
}

#[test]
fn every_operation_and_alias_is_listed_with_its_contract() {
    let text = layerzero("ops").ended(0).out;
    let list = layerzero("ops --json").ended(0).json();
    let operations = list["operations"].as_array().unwrap();
    assert_eq!(operations.len(), OPS.len());
    for (schema, operation) in OPS.iter().zip(operations) {
        assert_eq!(operation["id"], schema.id);
        assert_eq!(operation["aliases"], json!(schema.also));
        assert_eq!(operation["family"], schema.family.name());
        assert_eq!(operation["kind"], schema.kind.name());
        assert_eq!(operation["inputs"].as_array().unwrap().len(), schema.inputs.len());
        assert_eq!(operation["params"].as_array().unwrap().len(), schema.params.len());
        assert_eq!(operation["outputs"].as_array().unwrap().len(), schema.outputs.len());
        assert_eq!(operation["checks"].as_array().unwrap().len(), schema.checks.len());
        assert!(text.contains(schema.id) && text.contains(schema.summary), "{}", schema.id);
    }
    let aliases = list["aliases"].as_array().unwrap();
    assert_eq!(aliases.len(), ALIASES.len());
    for (alias, listed) in ALIASES.iter().zip(aliases) {
        assert_eq!((&listed["name"], &listed["operations"]), (&json!(alias.name), &json!(alias.ops)));
    }
    assert_eq!(list["aliases"][1]["fixes"], json!({"causal": true}));
}

#[test]
fn every_contract_can_be_shown_to_people() {
    for name in OPS.iter().flat_map(|op| [op.id].into_iter().chain(op.also.iter().copied())) {
        let text = layerzero(&format!("ops {name}")).ended(0).out;
        assert!(text.contains("Cost and accuracy"), "{name}: {text}");
    }
    let one = layerzero("ops rms_norm --json").ended(0).json();
    assert_eq!(one["operations"].as_array().unwrap().len(), 1);
    assert_eq!(one["operations"][0]["tolerances"]["float32"], json!({"rtol": 1e-5, "atol": 1e-5}));
    let several = layerzero("ops attention.causal --json").ended(0).json();
    assert_eq!(several["operations"].as_array().unwrap().len(), 4);
    assert_eq!(several["aliases"][0]["name"], "attention.causal");
}

#[test]
fn kernels_lists_what_is_registered_and_what_cannot_run_here() {
    let all = layerzero("kernels --json").ended(0).json();
    assert!(ids(&all["kernels"]).contains("lz_cpu.ref.norm.rms"));
    let some = layerzero(&format!("kernels --op rms_norm --json {}", on_h100())).ended(0).json();
    assert_eq!(ids(&some["kernels"]), BTreeSet::from(["liger.rms_norm", "lz_cpu.ref.norm.rms"]));
    assert_eq!(some["device"], "NVIDIA H100 80GB HBM3");
    let text = layerzero(&format!("kernels --op rms_norm {}", on_h100())).ended(0).out;
    assert!(text.contains("can be selected") && text.contains("not here: runs on cpu, this is cuda"), "{text}");
    let none = layerzero("kernels --op tokenize").ended(0).out;
    assert_eq!(none.lines().count(), 1, "{none}");
}

#[test]
fn select_gives_the_kernel_and_what_comes_after_it() {
    let answer = layerzero(&format!("select {} {} --json", attention(1), on_h100())).ended(0).json();
    assert_eq!(answer["op"], "attention.gqa.prefill");
    assert_eq!(answer["kernel_id"], "flash_attn.v2.causal");
    assert_eq!(answer["chain"], json!(["flash_attn.v2.causal", "flashinfer.single_prefill"]));
    let text = layerzero(&format!("select {} {}", attention(1), on_h100())).ended(0).out;
    assert!(
        text.contains("flash_attn.v2.causal 2.5.6") && text.contains("then    flashinfer.single_prefill"),
        "{text}"
    );
}

#[test]
fn the_policy_of_the_command_line_is_followed() {
    let kernel = |policy: &str| {
        let answer = layerzero(&format!("select {} {} --json {policy}", attention(1), on_h100())).ended(0).json();
        answer["kernel_id"].as_str().unwrap().to_owned()
    };
    assert_eq!(kernel("--lock flashinfer.single_prefill"), "flashinfer.single_prefill");
    assert_eq!(kernel("--deny flash_attn.*"), "flashinfer.single_prefill");
    assert_eq!(kernel("--prefer flashinfer"), "flashinfer.single_prefill");
    assert_eq!(kernel("--avoid flash_attn"), "flashinfer.single_prefill");
    assert_eq!(kernel("--capturing"), "flash_attn.v2.causal");
    assert_eq!(kernel("--param window_left=64"), "flashinfer.single_prefill");
}

#[test]
fn demands_of_the_call_rule_kernels_out() {
    let report = |demand: &str| layerzero(&format!("explain {} {} --json {demand}", attention(1), on_h100()));
    let reasons = |report: &Value, kernel: &str| {
        let candidates = report["candidates"].as_array().unwrap();
        let candidate = candidates.iter().find(|c| c["kernel_id"] == kernel).unwrap();
        candidate["reasons"]
            .as_array()
            .unwrap()
            .iter()
            .map(|r| r["code"].as_str().unwrap().to_owned())
            .collect::<Vec<_>>()
    };
    let deterministic = report("--deterministic").ended(1).json();
    assert_eq!(deterministic["chosen"], Value::Null);
    assert_eq!(reasons(&deterministic, "flash_attn.v2.causal"), ["NON_DETERMINISTIC"]);
    let capturing = report("--capturing").ended(0).json();
    assert_eq!(reasons(&capturing, "flashinfer.single_prefill"), ["CUDA_GRAPH_UNSAFE"]);
    let grad = report("--requires-grad").ended(1).json();
    assert_eq!(reasons(&grad, "flash_attn.v2.causal").len(), 1, "{grad}");
}

#[test]
fn strides_and_layouts_reach_the_engine() {
    // Transposed views of projections: heads before positions, strides the other way round.
    let shapes = "--op attention --dtype fp16 --shape q=1x32x512x128 --shape k=1x32x512x128 --shape v=1x32x512x128";
    let strides = "--strides q=2097152x128x4096x1 --strides k=2097152x128x4096x1 --strides v=2097152x128x4096x1";
    let bhsd = layerzero(&format!("explain {shapes} {strides} --layout BHSD {} --json", on_h100())).ended(0).json();
    let query = bhsd["tensors"]["query"].as_str().unwrap();
    assert!(query.starts_with("float16 BHSD") && bhsd["dims"]["seq_q"] == json!(512), "{bhsd}");
    let said = layerzero(&format!("explain {shapes} --layout BSHD {} --json", on_h100())).ended(0).json();
    assert_eq!(said["dims"]["seq_q"], json!(32));
}

#[test]
fn strides_that_contradict_the_layout_are_warned_about_and_refused_when_strict() {
    let shapes = "select --op attention --shape query=2x8x8x64 --shape key=2x8x8x64 --shape value=2x8x8x64";
    layerzero(&format!("{shapes} --strict")).ended(0);
    let call = format!("{shapes} --strides query=4096x64x512x1");
    layerzero(&call)
        .ended(0)
        .says("warning: attention.standard.prefill: 'query' of shape [2, 8, 8, 64] is read as BSHD");
    layerzero(&format!("{call} --strict")).ended(2).says("error[LAYOUT_CONTRADICTED]");
    layerzero(&format!("{call} --strict --layout BSHD")).ended(0);
}

#[test]
fn one_dtype_fits_each_tensor_and_one_tensor_can_have_its_own() {
    let paged = "explain --json --device cpu --op attention.paged --shape query=2x8x64 --shape key_cache=16x16x2x64 \
                 --shape value_cache=16x16x2x64 --shape block_tables=2x8 --shape context_lens=2";
    let tensors = |line: &str| layerzero(line).ended(0).json()["tensors"].clone();
    let dtypes = tensors(&format!("{paged} --dtype bf16"));
    let expected = [
        ("query", "bfloat16"),
        ("key_cache", "bfloat16"),
        ("value_cache", "bfloat16"),
        ("block_tables", "int64"),
        ("context_lens", "int64"),
    ];
    for (tensor, dtype) in expected {
        assert!(dtypes[tensor].as_str().unwrap().starts_with(dtype), "{dtypes}");
    }
    let mixed =
        tensors(&format!("{paged} --dtype bf16 --input-dtype key_cache=fp8_e4m3 --input-dtype block_tables=int32"));
    assert!(mixed["key_cache"].as_str().unwrap().starts_with("float8_e4m3fn"), "{mixed}");
    assert!(
        mixed["value_cache"].as_str().unwrap().starts_with("float8_e4m3fn"),
        "the value cache has the dtype of the keys: {mixed}"
    );
    assert!(mixed["block_tables"].as_str().unwrap().starts_with("int32"), "{mixed}");
}

#[test]
fn schemas_are_printed_and_copies_checked() {
    let folder = tempfile::tempdir().unwrap();
    for what in ["capabilities", "device", "config"] {
        let printed = layerzero(&format!("schema {what}")).ended(0).out;
        let schema: Value = serde_json::from_str(&printed).unwrap();
        assert!(schema["type"] == "object" || schema["type"][0] == "object", "{what}");
        let copy = folder.path().join(format!("{what}.json"));
        let copy = copy.to_str().unwrap();
        std::fs::write(copy, &printed).unwrap();
        assert_eq!(layerzero(&format!("schema {what} --check {copy}")).ended(0).out, "");
        std::fs::write(copy, printed.replacen("object", "array", 1)).unwrap();
        let hint = format!("layerzero schema {what} > {copy}");
        layerzero(&format!("schema {what} --check {copy}")).ended(1).says("error[OUTDATED_SCHEMA]").says(&hint);
        layerzero(&format!("schema {what} --check {copy}.missing")).ended(1).says("cannot be read");
    }
    assert_eq!(layerzero("schema").out, layerzero("schema capabilities").out);
}

#[test]
fn the_fixtures_fit_the_schema_they_are_checked_against() {
    for name in ["flash_attn.json", "flashinfer.json", "liger.json"] {
        lz_model::capabilities::read(&std::fs::read_to_string(fixture(name)).unwrap()).unwrap();
    }
}

#[test]
fn a_device_file_is_a_device() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("mine.json");
    std::fs::write(&file, r#"{"platform": "cuda", "name": "Mine", "sm": 80, "versions": {"cuda": "12.4"}}"#).unwrap();
    let line = format!(
        "select {} --capabilities {} --json --device {}",
        attention(2),
        fixture("flash_attn.json"),
        file.display()
    );
    let answer = layerzero(&line).ended(0).json();
    assert_eq!((&answer["device"], &answer["kernel_id"]), (&json!("Mine"), &json!("flash_attn.v2.causal")));
}

#[test]
fn benches_are_listed_and_measured() {
    assert!(layerzero("bench").ended(0).out.contains("select"));
    let list = layerzero("bench --json").ended(0).json();
    assert_eq!(list["benches"][0]["name"], "select");
    let result = layerzero("bench select --batches 3 --batch-size 10 --json").ended(0).json();
    assert_eq!(result["bench"], "select");
    assert!(layerzero("bench select --batches 3 --batch-size 10").ended(0).out.contains("select"));
}

#[test]
fn completions_know_the_commands() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = layerzero(&format!("completions {shell}")).ended(0).out;
        assert!(script.contains("doctor") && script.contains("explain"), "{shell}");
    }
}

#[test]
fn help_and_version_are_answers() {
    let help = layerzero("--help").ended(0).out;
    for command in ["doctor", "ops", "kernels", "select", "explain", "run", "schema", "bench", "completions"] {
        assert!(help.contains(command), "{command}");
        assert!(layerzero(&format!("{command} --help")).ended(0).out.contains("Usage: layerzero"), "{command}");
    }
    assert_eq!(layerzero("--version").ended(0).out, format!("layerzero {}\n", env!("CARGO_PKG_VERSION")));
}

#[test]
fn colours_are_there_only_when_wanted() {
    assert!(!layerzero("ops rms_norm").out.contains('\x1b'));
    assert!(layerzero("ops rms_norm --color always").out.contains("\x1b[1mInputs\x1b[0m"));
    assert!(!layerzero("ops rms_norm --color never").out.contains('\x1b'));
    assert!(
        layerzero("ops nonsense --color always").ended(2).err.contains("\x1b[1;31merror[UNKNOWN_OPERATION]\x1b[0m")
    );
}
