//! The `match:` form.

use lz_expr::{Expr, ExprErrorKind as Kind, MatchValue as M, Value};

use crate::support::{SM, scope, table};

fn read<'a>(entries: &[(&'a str, M<'a>)]) -> Expr {
    Expr::from_match(entries.iter().cloned(), &scope()).unwrap_or_else(|e| panic!("{e}"))
}

/// One entry: the expression it stands for and whether it holds of the table.
#[track_caller]
fn means(field: &str, value: M<'_>, source: &str, holds: bool) {
    let expr = read(&[(field, value)]);
    assert_eq!(expr.source(), source);
    assert_eq!(expr.test(&table()), Ok(holds), "{source}");
}

#[test]
fn the_forms_of_the_specification() {
    means("sm", M::Str(">=90"), "sm >= 90", true);
    means("operation", M::Str("attention.*"), "operation matches 'attention.*'", true);
    means("op", M::Str("attention.*"), "op matches 'attention.*'", true);
    means("seq_len", M::Str(">16384"), "seq_len > 16384", false);
    means("dtype", M::Str("bfloat16"), "dtype == 'bfloat16'", true);
    means("dtype", M::Str("!=x"), "dtype != 'x'", true);
    means("batch", M::Str("<= 8"), "batch <= 8", false);
    means("batch", M::Int(16), "batch == 16", true);
    means("deterministic", M::Bool(false), "deterministic == false", true);
    let list = M::List(vec![M::Str("float16"), M::Str("bfloat16")]);
    means("dtype", list, "dtype in ['float16', 'bfloat16']", true);
}

#[test]
fn other_values() {
    means("batch", M::Str("16"), "batch == 16", true);
    means("batch", M::Str(" == 1_6 "), "batch == 1_6", true);
    means("batch", M::Str("> -1"), "batch > -1", true);
    means("batch", M::Str("!=16"), "batch != 16", false);
    means("batch", M::Str("<16.5"), "batch < 16.5", true);
    means("batch", M::Float(16.0), "batch == 16.0", true);
    means("scale", M::Float(1e-7), "scale == 1e-7", false);
    means("scale", M::Str(">=0.5"), "scale >= 0.5", true);
    means("scale", M::Int(-1), "scale == -1", false);
    means("batch", M::Int(i64::MIN), "batch == -9223372036854775808", false);
    means("deterministic", M::Str("!=True"), "deterministic != True", true);
    means("op", M::Str("!=attention.*"), "not op matches 'attention.*'", false);
    means("op", M::Str("==attention.*"), "op matches 'attention.*'", true);
    means("dtype", M::Str("bfloat1?"), "dtype matches 'bfloat1?'", true);
    means("dtype", M::Str(r"it's \ so"), r"dtype == 'it\'s \\ so'", false);
    means("dtype", M::Str(""), "dtype == ''", false);
    let list = M::List(vec![M::Int(3), M::Str(">=16")]);
    means("batch", list, "(batch == 3 or batch >= 16)", true);
    let list = M::List(vec![M::Int(3), M::Str("17")]);
    means("batch", list, "batch in [3, 17]", false);
    let list = M::List(vec![M::Bool(true), M::Bool(false)]);
    means("deterministic", list, "(deterministic == true or deterministic == false)", true);
}

#[test]
fn strings_arrive_unchanged() {
    let odd = "a'b\"c\\d e";
    let expr = read(&[("dtype", M::Str(odd))]);
    let same = table().with(6, Value::Str("a'b\"c\\d e"));
    assert_eq!(expr.test(&same), Ok(true));
    assert_eq!(expr.test(&table()), Ok(false));
}

#[test]
fn all_entries_must_hold() {
    assert_eq!(read(&[]).test(&table()), Ok(true));
    let both = read(&[("sm", M::List(vec![M::Str("<80"), M::Str(">=90")])), ("op", M::Str("attention.*"))]);
    assert_eq!(both.source(), "(sm < 80 or sm >= 90) and op matches 'attention.*'");
    assert_eq!(both.test(&table()), Ok(true));
    assert_eq!(both.test(&table().with(SM, Value::Int(85))), Ok(false));
    assert_eq!(both.test(&table().with(7, Value::Str("norm"))), Ok(false));
}

#[test]
fn values_that_do_not_fit() {
    for (field, value, text, column) in [
        ("batch", M::Str("many"), "batch: \"many\"", 8),
        ("batch", M::Str(""), "batch: \"\"", 8),
        ("batch", M::Str(">"), "batch: \">\"", 8),
        ("batch", M::Str(">=x"), "batch: \">=x\"", 8),
        ("batch", M::Str("1 or true"), "batch: \"1 or true\"", 8),
        ("batch", M::Str("=3"), "batch: \"=3\"", 8),
        ("batch", M::Str("- 3"), "batch: \"- 3\"", 8),
        ("batch", M::Bool(true), "batch: true", 8),
        ("scale", M::Float(f64::NAN), "scale: NaN", 8),
        ("scale", M::Str("inf"), "scale: \"inf\"", 8),
        ("dtype", M::Int(3), "dtype: 3", 8),
        ("dtype", M::Str(">a"), "dtype: \">a\"", 8),
        ("op", M::Str("=a"), "op: \"=a\"", 5),
        ("deterministic", M::Str("yes"), "deterministic: \"yes\"", 16),
        ("deterministic", M::Str(">true"), "deterministic: \">true\"", 16),
        ("deterministic", M::Int(1), "deterministic: 1", 16),
        ("batch", M::List(vec![]), "batch: []", 8),
        ("batch", M::List(vec![M::Int(1), M::Str("x")]), "batch: \"x\"", 8),
        ("batch", M::List(vec![M::List(vec![M::Int(1)])]), "batch: [..]", 8),
    ] {
        let error = Expr::from_match([(field, value)], &scope()).unwrap_err();
        assert_eq!((error.text.as_str(), error.column), (text, column));
        let Kind::BadMatchValue { field: named, .. } = &error.kind else {
            panic!("{error}");
        };
        assert_eq!(named, field);
    }
    let error = Expr::from_match([("batsh", M::Int(1))], &scope()).unwrap_err();
    let kind = Kind::UnknownName { name: "batsh".into(), nearest: Some("batch".into()) };
    assert_eq!((error.kind, error.column), (kind, 1));
}
