//! Capabilities documents and device files that are refused: each ends with 3 and says everything that is wrong.

use std::fs;

use serde_json::{Value, json};

use crate::support::{Outcome, fixture, layerzero};

/// The document of the specification's appendix D.
fn good() -> Value {
    serde_json::from_str(&fs::read_to_string(fixture("flash_attn.json")).unwrap()).unwrap()
}

/// Lists the kernels with a document written to a file.
fn load(text: &str, flags: &str) -> Outcome {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("mine.json");
    fs::write(&path, text).unwrap();
    layerzero(&format!("kernels --device h100 --capabilities {} {flags}", path.display()))
}

/// Loads the good document after a change.
fn changed(change: impl Fn(&mut Value)) -> Outcome {
    let mut document = good();
    change(&mut document);
    let text = document.to_string();
    let error = &load(&text, "--json").ended(3).json()["error"];
    assert_eq!(error["code"], "INVALID_CAPABILITIES");
    load(&text, "").ended(3).says("error[INVALID_CAPABILITIES]: ").says("mine.json").says("hint: fix the document")
}

fn kernel(document: &mut Value) -> &mut Value {
    &mut document["ops"]["attention.causal"][0]
}

#[test]
fn the_document_itself_is_accepted() {
    load(&good().to_string(), "").ended(0);
}

#[test]
fn an_unknown_schema_version_is_refused() {
    changed(|d| d["schema_version"] = json!("1.1"))
        .says("schema version '1.1' is not supported; this build reads '1.0'");
    changed(|d| d["schema_version"] = Value::Null).says("null is not a string");
    changed(|d| drop(d.as_object_mut().unwrap().remove("schema_version"))).says("'schema_version' is missing");
}

#[test]
fn constraints_must_be_stated() {
    let without = |key: &'static str| changed(move |d| drop(kernel(d).as_object_mut().unwrap().remove(key)));
    without("dtypes").says("dtypes");
    without("requires_layouts").says("requires_layouts");
    without("min_sm").says("'min_sm' is missing; state it, or null for any");
    without("max_head_dim").says("no constraint on 'head_dim'");
}

#[test]
fn ids_are_unique_in_a_document_and_across_documents() {
    changed(|d| d["ops"]["attention.full"][0]["kernel_id"] = json!("flash_attn.v2.causal"))
        .says("kernel id 'flash_attn.v2.causal' is used twice");
    // The same document again replaces itself; another one may not take its ids.
    let again = format!("kernels --capabilities {0} --capabilities {0}", fixture("flash_attn.json"));
    layerzero(&again).ended(0);
    let folder = tempfile::tempdir().unwrap();
    let copy = folder.path().join("copy.json");
    let text = std::fs::read_to_string(fixture("flash_attn.json")).unwrap();
    std::fs::write(&copy, text.replacen("\"backend\": \"flash_attn\"", "\"backend\": \"other\"", 1)).unwrap();
    let twice = format!("kernels --capabilities {} --capabilities {}", fixture("flash_attn.json"), copy.display());
    layerzero(&twice)
        .ended(3)
        .says("error[INVALID_CONFIGURATION]")
        .says("kernel 'flash_attn.v2.causal' version 2.5.6 is registered twice")
        .says("kernel 'flash_attn.v2.full' version 2.5.6 is registered twice");
}

#[test]
fn unknown_keys_operations_and_dtypes_get_a_suggestion() {
    changed(|d| kernel(d)["max_headdim"] = json!(128)).says("unknown key 'max_headdim'; did you mean 'max_head_dim'?");
    changed(|d| d["ops"]["attention.casual"] = json!([])).says("did you mean 'attention.causal'?");
    changed(|d| kernel(d)["dtypes"][0] = json!("flaot16")).says("did you mean 'float16'?");
}

#[test]
fn expressions_are_typed() {
    changed(|d| kernel(d)["conditions"] = json!(["head_dim + 1"])).says("/ops/attention.causal/0/conditions/0");
    changed(|d| kernel(d)["conditions"] = json!(["head_dim == 'large'"])).says("/ops/attention.causal/0/conditions/0");
    changed(|d| kernel(d)["conditions"] = json!(["head_dmi > 4"])).says("unknown name `head_dmi`");
}

#[test]
fn every_problem_is_reported_at_once() {
    let document = |d: &mut Value| {
        kernel(d)["dtypes"][0] = json!("flaot16");
        kernel(d)["conditions"] = json!(["head_dim +"]);
        d["ops"]["attention.full"][0].as_object_mut().unwrap().remove("min_sm");
    };
    changed(document).says("3 problem(s)");
    let mut text = good();
    document(&mut text);
    let error = &load(&text.to_string(), "--json").json()["error"];
    assert_eq!(error["problems"].as_array().unwrap().len(), 3, "{error}");
    assert_eq!(error["problems"][2]["path"], "/ops/attention.full/0");
}

#[test]
fn what_is_no_document_at_all_is_refused() {
    load("{", "").ended(3).says("not a capabilities document");
    load("{}", "").ended(3).says("'schema_version' is missing");
    load("", "").ended(3).says("error[INVALID_CAPABILITIES]");
    layerzero("kernels --capabilities no-such-file.json")
        .ended(3)
        .says("error[UNREADABLE_FILE]: cannot read 'no-such-file.json'");
}

#[test]
fn a_document_that_is_not_utf_8_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("binary.json");
    fs::write(&path, [0xff, 0xfe, 0x00]).unwrap();
    layerzero(&format!("kernels --capabilities {}", path.display())).ended(3).says("binary.json");
}

#[test]
fn a_bad_device_file_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("device.json");
    let on = |text: &str| {
        fs::write(&path, text).unwrap();
        layerzero(&format!("kernels --device {}", path.display()))
            .ended(3)
            .says("error[INVALID_DEVICE]")
            .says("schema device")
    };
    on(r#"{"platform": "cuda", "name": "x", "smm": 90}"#).says("smm");
    on(r#"{"platform": "tpu", "name": "x"}"#).says("tpu");
    on(r#"{"name": "x"}"#).says("platform");
    on("[").says("device.json");
    layerzero("kernels --device no-such-device.json").ended(3).says("cannot read device file 'no-such-device.json'");
}
