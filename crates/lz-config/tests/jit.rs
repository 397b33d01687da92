//! Settings of kernels that are compiled on first use, and the short names code may use.

use std::path::{Path, PathBuf};

use lz_config::{Layers, Sources, Value};

fn in_force(entries: &[(&str, Value)]) -> lz_config::Config {
    let mut layers = Layers::load(&Sources::default()).unwrap();
    layers.code().set_all(entries.iter().map(|(key, value)| ((*key).to_owned(), value.clone()))).unwrap();
    layers.resolve().unwrap()
}

#[test]
fn short_names_stand_for_settings() {
    let config = in_force(&[("auto_tune_on_warmup", Value::Bool(true)), ("tune_samples", Value::Int(10))]);
    assert!(config.settings.perfdb.auto_tune_on_warmup);
    assert_eq!(config.settings.perfdb.tune_samples, 10);

    let mut layers = Layers::load(&Sources::default()).unwrap();
    layers.code().set("tune_samples", Value::Int(10)).unwrap();
    layers.code().set("tune_samples", Value::Null).unwrap();
    assert_eq!(layers.resolve().unwrap().settings.perfdb.tune_samples, 20);
    let refused = layers.code().set("tune_samples", Value::Int(0)).unwrap_err().to_string();
    assert!(refused.contains("perfdb.tune_samples"), "{refused}");
}

#[test]
fn the_manifest_lies_at_home_unless_said_otherwise() {
    let at = |home: Option<&str>, said: Option<&str>| {
        let environment = home.map(|home| ("HOME".to_owned(), home.to_owned())).into_iter().collect();
        let mut layers = Layers::load(&Sources { environment, ..Sources::default() }).unwrap();
        if let Some(path) = said {
            layers.code().set("jit.manifest_path", Value::from(path)).unwrap();
        }
        layers.resolve().unwrap().manifest_path()
    };
    assert_eq!(at(Some("/h"), None), Some(PathBuf::from("/h/.cache/layerzero/shape_manifest.json")));
    assert_eq!(at(None, None), None);
    assert_eq!(at(None, Some("/m/calls.json")).as_deref(), Some(Path::new("/m/calls.json")));
    assert_eq!(at(Some("/h"), Some("/m/calls.json")).as_deref(), Some(Path::new("/m/calls.json")));
}
