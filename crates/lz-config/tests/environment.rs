//! The environment: every variable there is, and those there are not.

use std::collections::BTreeMap;

use lz_config::{Config, ConfigError, Kind, Layers, Origin, SETTINGS, Sources, Value};

fn resolve(variables: &[(&str, &str)]) -> Result<Config, ConfigError> {
    let environment: BTreeMap<String, String> =
        variables.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
    Layers::load(&Sources { environment, ..Sources::default() })?.resolve()
}

#[test]
fn the_variables_of_the_specification() {
    let config = resolve(&[
        ("LAYERZERO_DISABLED", "1"),
        ("LAYERZERO_LOCK_ATTENTION", "flash_attn.v3.causal"),
        ("LAYERZERO_PREFER", "flashinfer, flash_attn"),
        ("LAYERZERO_AVOID", "xformers"),
        ("LAYERZERO_VERBOSE", "1"),
        ("LAYERZERO_DETERMINISTIC", "1"),
        ("LAYERZERO_DEBUG", "1"),
    ])
    .unwrap();
    let settings = &config.settings;
    assert!(!settings.enabled && settings.verbose && settings.deterministic && settings.debug);
    assert_eq!(settings.prefer_sources, ["flashinfer", "flash_attn"]);
    assert_eq!(settings.avoid_sources, ["xformers"]);
    let rules: Vec<&str> = config.policy().rules.iter().map(|r| r.name.as_str()).collect();
    assert_eq!(rules[0], "lock attention to flash_attn.v3.causal (LAYERZERO_LOCK_ATTENTION)");
    assert_eq!(config.warnings, []);
    assert!(!config.selection().enabled);
}

#[test]
fn every_setting_can_be_said_by_its_variable() {
    for setting in SETTINGS {
        let name = setting.variable_name();
        let (text, value) = match (setting.kind, setting.default()) {
            (Kind::Bool, Value::Bool(on)) if name == "LAYERZERO_DISABLED" => ("true".to_owned(), Value::Bool(!on)),
            (Kind::Bool, Value::Bool(on)) => ((!on).to_string(), Value::Bool(!on)),
            (Kind::Int { min, max }, Value::Int(n)) => {
                let other = if n == max { min } else { n + 1 };
                (other.to_string(), Value::Int(other))
            }
            (Kind::Number { .. }, Value::Float(x)) => ((x + 0.5).to_string(), Value::Float(x + 0.5)),
            (Kind::Names, _) => ("a,b".into(), Value::names(["a", "b"])),
            (Kind::Choice(words), was) => {
                let other = words.iter().find(|word| Value::from(**word) != was).unwrap();
                ((*other).into(), Value::from(*other))
            }
            // A policy must be one that a document has, and there is no other value that is supported.
            (Kind::Name | Kind::Only { .. }, _) => continue,
            (_, _) => ("/x/y".into(), Value::from("/x/y")),
        };
        // Thresholds must stay in order.
        if setting.key == "breaker.timeout_ms" || setting.key.ends_with("_health") {
            assert!(resolve(&[(&name, &text)]).is_ok() || setting.key != "breaker.timeout_ms");
        }
        let config = resolve(&[(&name, &text)]).unwrap_or_else(|e| panic!("{name}={text}: {e}"));
        let entry = config.entries().iter().find(|e| e.key == setting.key).unwrap();
        assert_eq!((&entry.value, &entry.origin), (&value, &Origin::Environment { name: name.clone() }), "{name}");
        assert_eq!(config.warnings, [], "{name}");
        assert_ne!(config.settings, lz_config::Settings::default(), "{name} changes something");
    }
}

#[test]
fn a_number_is_whole_or_not_and_within_its_range() {
    let name = "LAYERZERO_GRAPH_MEMORY_DELTA_WARNING_MB";
    let kept = |text: &str| resolve(&[(name, text)]).map(|config| config.settings.graph.memory_delta_warning_mb);
    assert_eq!((kept("0.25").unwrap(), kept("3").unwrap()), (0.25, 3.0));
    for wrong in ["-1", "nan", "inf", "1e30", "much"] {
        let error = kept(wrong).unwrap_err().to_string();
        assert!(error.contains("expected a number from 0 to 1048576"), "{wrong}: {error}");
    }
}

#[test]
fn a_variable_that_means_nothing_is_warned_about_with_the_nearest() {
    let config = resolve(&[
        ("LAYERZERO_DISABLE", "1"),
        ("LAYERZERO_PREFERED", "x"),
        ("LAYERZERO_BREAKER_TIMEOUT", "5"),
        ("LAYERZERO_LOCK_ATENTION", "x"),
        ("LAYERZERO_LOCK_FILE", "x"),
        ("LAYERZERO_XYZZY", "x"),
        ("LAYERZERO_CONFIG", "read elsewhere"),
        ("LAYERZERO_VERBOSE", ""),
        ("LAYERZEROISH", "not ours"),
    ])
    .unwrap();
    let warnings: Vec<String> = config.warnings.iter().map(ToString::to_string).collect();
    insta::assert_snapshot!(warnings.join("\n"));
    assert_eq!(config.settings, lz_config::Settings::default());
}

#[test]
fn a_value_that_makes_no_sense_is_an_error() {
    let told = |name: &str, value: &str| resolve(&[(name, value)]).unwrap_err().to_string();
    let all = [
        told("LAYERZERO_DISABLED", "perhaps"),
        told("LAYERZERO_MEMORY_HEADROOM_MB", "lots"),
        told("LAYERZERO_BREAKER_FAILURE_THRESHOLD", "0"),
        told("LAYERZERO_BACKEND_ISOLATION", "subproces"),
        told("LAYERZERO_POLICY", "production"),
    ];
    insta::assert_snapshot!(all.join("\n"));
}

#[test]
fn the_process_environment_holds_only_what_is_looked_at() {
    let names: Vec<String> = lz_config::environment().into_keys().collect();
    assert!(names.iter().all(|n| n.starts_with("LAYERZERO_") || n == "HOME" || n == "XDG_CONFIG_HOME"), "{names:?}");
}
