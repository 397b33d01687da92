//! What a JSON Schema has against a document: the keywords of the schemas that schemars generates from Rust types, no others.
//!
//! A crate for all of JSON Schema brings regular expressions and big integers with it: 95 of the 558 CPU seconds that the Python
//! module took to build. A test compares this module with such a crate, keyword by keyword and on changed documents.

use lz_abi::{did_you_mean, nearest};
use serde_json::{Map, Value};

use super::Problem;

/// Keywords that say nothing about which documents are valid.
const ANNOTATIONS: [&str; 6] = ["$defs", "$schema", "default", "description", "format", "title"];

/// Every problem of a document, sorted by path.
///
/// # Panics
/// If the schema has a keyword that is not known here.
pub(super) fn problems(schema: &Value, document: &Value) -> Vec<Problem> {
    let check = Check { root: schema };
    let faults = check.faults(schema, document, "");
    let mut problems: Vec<Problem> =
        faults.into_iter().map(|fault| Problem { message: fault.message(schema), path: fault.path }).collect();
    problems.sort();
    problems.dedup();
    problems
}

/// One keyword that a value does not meet.
struct Fault<'a> {
    /// Where the value is, as a JSON pointer.
    path: String,
    value: &'a Value,
    kind: Kind<'a>,
}

enum Kind<'a> {
    /// Keys that the object may not have.
    Unexpected(Vec<&'a str>),
    /// A key that it must have.
    Missing(&'a str),
    /// It is none of these values.
    NoneOf(Vec<&'a Value>),
    /// It is not valid under any of several schemas; what each of them has against it.
    NoAlternative(Vec<Fault<'a>>),
    /// Anything else, in words that follow the value.
    Other(String),
}

impl Fault<'_> {
    fn message(&self, schema: &Value) -> String {
        let value = self.value;
        match &self.kind {
            Kind::Unexpected(keys) => {
                let known = known_keys(schema);
                let describe =
                    |key: &&str| format!("unknown key '{key}'{}", did_you_mean(&nearest(key, known.iter().copied())));
                keys.iter().map(describe).collect::<Vec<_>>().join("; ")
            }
            Kind::Missing(key) => format!("{} is missing; state it", Value::from(*key)),
            Kind::NoneOf(_) | Kind::NoAlternative(_) => match self.choices() {
                Some(choices) => format!("{value} is none of {choices}"),
                None => format!("{value} is none of the kinds of value that belong here"),
            },
            Kind::Other(words) => format!("{value} {words}"),
        }
    }

    /// The values that would be valid here, as text.
    fn choices(&self) -> Option<String> {
        let mut choices: Vec<String> = match &self.kind {
            Kind::NoneOf(values) => values.iter().map(ToString::to_string).collect(),
            Kind::NoAlternative(faults) => faults.iter().filter_map(Fault::choices).collect(),
            _ => Vec::new(),
        };
        choices.dedup();
        (!choices.is_empty()).then(|| choices.join(", "))
    }
}

fn known_keys(schema: &Value) -> Vec<&str> {
    let named = schema["$defs"].as_object().into_iter().flat_map(Map::values);
    let properties = [schema].into_iter().chain(named).filter_map(|table| table["properties"].as_object());
    properties.flat_map(|p| p.keys().map(String::as_str)).collect()
}

struct Check<'a> {
    /// The whole schema, which references start from.
    root: &'a Value,
}

impl<'a> Check<'a> {
    /// What a schema has against the value at a path.
    fn faults(&self, schema: &'a Value, value: &'a Value, path: &str) -> Vec<Fault<'a>> {
        let keywords = match schema {
            Value::Object(keywords) => keywords,
            Value::Bool(true) => return Vec::new(),
            other => panic!("{other} is no schema that is known here"),
        };
        let mut faults = Vec::new();
        let mut no = |kind| faults.push(Fault { path: path.to_owned(), value, kind });
        let mut inner = Vec::new();
        for (keyword, operand) in keywords {
            match (keyword.as_str(), operand, value) {
                ("$ref", Value::String(name), _) => inner.extend(self.faults(self.named(name), value, path)),
                ("type", _, _) => {
                    if !one_or_many(operand).any(|name| has_type(value, name)) {
                        let names: Vec<String> = one_or_many(operand).map(|name| format!("\"{name}\"")).collect();
                        let types = if names.len() == 1 { "type" } else { "types" };
                        no(Kind::Other(format!("is not of {types} {}", names.join(", "))));
                    }
                }
                ("const", _, _) if value != operand => no(Kind::NoneOf(vec![operand])),
                ("enum", Value::Array(values), _) if !values.contains(value) => {
                    no(Kind::NoneOf(values.iter().collect()));
                }
                ("anyOf" | "oneOf", Value::Array(schemas), _) => {
                    let tried: Vec<_> = schemas.iter().map(|one| self.faults(one, value, path)).collect();
                    let valid = tried.iter().filter(|against| against.is_empty()).count();
                    if valid == 0 {
                        no(Kind::NoAlternative(tried.into_iter().flatten().collect()));
                    } else if valid > 1 && keyword == "oneOf" {
                        no(Kind::Other("is of several kinds of value at once, and only one is allowed".into()));
                    }
                }
                ("minimum", Value::Number(least), Value::Number(given)) if given.as_f64() < least.as_f64() => {
                    no(Kind::Other(format!("is less than the minimum of {least}")));
                }
                ("maximum", Value::Number(most), Value::Number(given)) if given.as_f64() > most.as_f64() => {
                    no(Kind::Other(format!("is greater than the maximum of {most}")));
                }
                ("minItems", Value::Number(least), Value::Array(items))
                    if least.as_u64() > Some(items.len() as u64) =>
                {
                    no(Kind::Other(format!("has fewer than {least} items")));
                }
                ("maxItems", Value::Number(most), Value::Array(items)) if most.as_u64() < Some(items.len() as u64) => {
                    no(Kind::Other(format!("has more than {most} items")));
                }
                ("prefixItems", Value::Array(schemas), Value::Array(items)) => {
                    for (i, (schema, item)) in schemas.iter().zip(items).enumerate() {
                        inner.extend(self.faults(schema, item, &format!("{path}/{i}")));
                    }
                }
                ("items", _, Value::Array(items)) => {
                    let first = keywords.get("prefixItems").and_then(Value::as_array).map_or(0, Vec::len);
                    for (i, item) in items.iter().enumerate().skip(first) {
                        inner.extend(self.faults(operand, item, &format!("{path}/{i}")));
                    }
                }
                ("required", Value::Array(keys), Value::Object(entries)) => {
                    for key in keys.iter().filter_map(Value::as_str).filter(|key| !entries.contains_key(*key)) {
                        no(Kind::Missing(key));
                    }
                }
                ("properties", Value::Object(schemas), Value::Object(entries)) => {
                    for (key, entry) in entries {
                        if let Some(schema) = schemas.get(key) {
                            inner.extend(self.faults(schema, entry, &pointer(path, key)));
                        }
                    }
                }
                ("additionalProperties", _, Value::Object(entries)) => {
                    let declared = |key: &String| keywords.get("properties").is_some_and(|p| p.get(key).is_some());
                    let others = || entries.iter().filter(|(key, _)| !declared(key));
                    if *operand != Value::Bool(false) {
                        for (key, entry) in others() {
                            inner.extend(self.faults(operand, entry, &pointer(path, key)));
                        }
                    } else if others().next().is_some() {
                        no(Kind::Unexpected(others().map(|(key, _)| key.as_str()).collect()));
                    }
                }
                // What a keyword says about values of other types is nothing.
                ("const" | "enum" | "minimum" | "maximum" | "minItems" | "maxItems", ..) => {}
                ("prefixItems" | "items" | "required" | "properties" | "additionalProperties", ..) => {}
                (name, ..) => assert!(ANNOTATIONS.contains(&name), "the keyword '{name}' is not known here"),
            }
        }
        faults.extend(inner);
        faults
    }

    fn named(&self, reference: &str) -> &'a Value {
        let found = reference.strip_prefix('#').and_then(|pointer| self.root.pointer(pointer));
        found.unwrap_or_else(|| panic!("the schema has no '{reference}'"))
    }
}

fn one_or_many(names: &Value) -> impl Iterator<Item = &str> {
    let many = names.as_array().map_or(std::slice::from_ref(names), Vec::as_slice);
    many.iter().filter_map(Value::as_str)
}

fn has_type(value: &Value, name: &str) -> bool {
    match (name, value) {
        ("null", Value::Null) | ("boolean", Value::Bool(_)) | ("number", Value::Number(_)) => true,
        ("string", Value::String(_)) | ("array", Value::Array(_)) | ("object", Value::Object(_)) => true,
        // 2.0 is an integer too.
        ("integer", Value::Number(number)) => number.as_f64().is_some_and(|n| n.fract() == 0.0),
        _ => false,
    }
}

/// The JSON pointer of an object's entry.
fn pointer(path: &str, key: &str) -> String {
    format!("{path}/{}", key.replace('~', "~0").replace('/', "~1"))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;
    use serde_json::json;

    use super::*;
    use crate::capabilities::json_schema;

    const DOCUMENT: &str = include_str!("../../tests/fixtures/appendix_d.json");

    /// The paths of all problems, by a crate that knows all of JSON Schema.
    fn expected(schema: &Value, document: &Value) -> BTreeSet<String> {
        let validator = jsonschema::validator_for(schema).unwrap();
        validator.iter_errors(document).map(|error| error.instance_path().to_string()).collect()
    }

    fn found(schema: &Value, document: &Value) -> BTreeSet<String> {
        problems(schema, document).into_iter().map(|problem| problem.path).collect()
    }

    /// Values of every type, and those that some key of a document has.
    fn any_value() -> impl Strategy<Value = Value> {
        let values = json!([
            null, true, false, 0, 1, -1, 2.0, 2.5, 100, 101, 65536, 1e300, "", "a", "cpu", "cuda", "float32", "BSHD", [], [1],
            [1, 2], [1, 2, 3], [1, "a"], ["cpu", "rocm"], ["cpu", "nowhere"], {}, {"a": 1}, {"a~b/c": {"min": "x"}},
            {"head_dim": {"min": 1, "max": null}}, {"tile_size": 64}, {"norm.rms": [{}]}
        ]);
        proptest::sample::select(values.as_array().unwrap().clone())
    }

    /// Every key that the schema knows, and two that it does not.
    fn any_key() -> impl Strategy<Value = String> {
        let schema = json_schema();
        let keys: Vec<String> = known_keys(&schema).into_iter().chain(["a/b", "x~y"]).map(str::to_owned).collect();
        proptest::sample::select(keys)
    }

    proptest! {
        /// The document of the specification with keys added or changed: both say the same about it.
        #[test]
        fn says_what_a_whole_validator_says(
            changes in proptest::collection::vec((any_key(), any_value(), any::<bool>()), 0..4),
            removed in proptest::option::of(any_key()),
        ) {
            let schema = json_schema();
            let mut document: Value = serde_json::from_str(DOCUMENT).unwrap();
            for (key, value, in_kernel) in changes {
                let place = if in_kernel { document.pointer_mut("/ops/attention.causal/0") } else { Some(&mut document) };
                if let Some(Value::Object(entries)) = place {
                    entries.insert(key, value);
                }
            }
            if let Some(key) = removed {
                document.as_object_mut().unwrap().remove(&key);
            }
            prop_assert_eq!(found(&schema, &document), expected(&schema, &document));
        }
    }

    /// Each keyword by itself, with values that meet it and values that do not.
    #[test]
    fn each_keyword_means_what_json_schema_says() {
        let values = [
            "null",
            "true",
            "0",
            "3",
            "-1",
            "2.0",
            "2.5",
            "7",
            "\"a\"",
            "\"b\"",
            "[]",
            "[1]",
            "[1, 2]",
            "[1, \"a\", 3]",
            "{}",
            "{\"a\": 1}",
            "{\"a\": \"x\", \"b\": 2}",
            "{\"b/c\": true}",
            "18446744073709551615",
        ];
        let schemas = [
            json!({"type": "integer"}),
            json!({"type": ["string", "null"]}),
            json!({"const": "a"}),
            json!({"enum": ["a", 7, null]}),
            json!({"anyOf": [{"type": "string"}, {"minimum": 3}]}),
            json!({"oneOf": [{"type": "integer"}, {"type": "number"}]}),
            json!({"minimum": 0, "maximum": 3}),
            json!({"minItems": 1, "maxItems": 2}),
            json!({"prefixItems": [{"type": "integer"}, {"type": "string"}], "items": {"const": 3}}),
            json!({"items": {"type": "integer"}}),
            json!({"required": ["a", "b"]}),
            json!({"properties": {"a": {"type": "integer"}}, "additionalProperties": false}),
            json!({"properties": {"a": true}, "additionalProperties": {"type": "integer"}}),
            json!({"$ref": "#/$defs/Text", "$defs": {"Text": {"type": "string", "description": "a text"}}}),
        ];
        for schema in &schemas {
            let mut refused = 0;
            for text in values {
                let value: Value = serde_json::from_str(text).unwrap();
                let said = found(schema, &value);
                assert_eq!(said, expected(schema, &value), "{value} under {schema}");
                refused += usize::from(!said.is_empty());
            }
            assert!(0 < refused && refused < values.len(), "{schema} accepts all of them, or none");
        }
    }

    /// Calls a function with every schema inside a schema.
    fn each_schema<'a>(schema: &'a Value, call: &mut impl FnMut(&'a Value)) {
        call(schema);
        for (keyword, operand) in schema.as_object().into_iter().flatten() {
            let inner: Vec<&Value> = match (keyword.as_str(), operand) {
                ("$defs" | "properties", Value::Object(named)) => named.values().collect(),
                ("anyOf" | "oneOf" | "prefixItems", Value::Array(several)) => several.iter().collect(),
                ("items" | "additionalProperties", Value::Object(_)) => vec![operand],
                _ => Vec::new(),
            };
            inner.into_iter().for_each(|one| each_schema(one, call));
        }
    }

    #[test]
    fn every_keyword_of_the_generated_schema_is_known() {
        let schema = json_schema();
        let (check, mut schemas) = (Check { root: &schema }, 0);
        each_schema(&schema, &mut |one| {
            // It panics if one of the keywords is not known.
            check.faults(one, &Value::Null, "");
            schemas += 1;
        });
        assert!(schemas > 200, "only {schemas} schemas were found");
    }

    #[test]
    #[should_panic(expected = "the keyword 'pattern' is not known here")]
    fn a_keyword_that_is_not_known_is_not_ignored() {
        problems(&json!({"pattern": "^a"}), &json!("b"));
    }
}
