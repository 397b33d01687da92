//! Every kind of error, with its column.

use lz_expr::{Expr, ExprError, ExprErrorKind as Kind, MatchValue, Type};

use crate::support::scope;

fn error(source: &str) -> ExprError {
    match Expr::compile(source, &scope()) {
        Ok(expr) => panic!("{source} compiled to {expr:?}"),
        Err(error) => error,
    }
}

fn unexpected(found: &str, expected: &'static str) -> Kind {
    Kind::UnexpectedToken { found: found.into(), expected }
}

fn mismatch(operator: &'static str, left: Type, right: Type) -> Kind {
    Kind::TypeMismatch { operator, left, right }
}

fn operand(operator: &'static str, wanted: &'static str, found: Type) -> Kind {
    Kind::BadOperand { operator, wanted, found }
}

fn unknown(name: &str, nearest: Option<&str>) -> Kind {
    Kind::UnknownName { name: name.into(), nearest: nearest.map(str::to_owned) }
}

fn number(text: &str) -> Kind {
    Kind::BadNumber { text: text.into() }
}

const NUMBER: &str = "an int or a float";
const OPERATOR: &str = "an operator or the end";

/// Source, kind, column.
fn cases() -> Vec<(&'static str, Kind, usize)> {
    use Type::{Bool, Float, Int, Str};
    vec![
        ("batch > 1 and sead > 2", unknown("sead", None), 15),
        ("batchsize > 1", unknown("batchsize", Some("batch_size")), 1),
        ("batch == foo", unknown("foo", None), 10),
        ("foo == bar", unknown("foo", None), 1),
        ("dtype < float16", unknown("float16", None), 9),
        ("batch in [foo]", unknown("foo", None), 11),
        ("dtype == 3", mismatch("==", Str, Int), 7),
        ("3 == dtype", mismatch("==", Int, Str), 3),
        ("dtype < 'a'", mismatch("<", Str, Str), 7),
        ("true >= false", mismatch(">=", Bool, Bool), 6),
        ("deterministic == 1", mismatch("==", Bool, Int), 15),
        ("dtype == batch", mismatch("==", Str, Int), 7),
        ("batch + dtype", mismatch("+", Int, Str), 7),
        ("dtype * 2", mismatch("*", Str, Int), 7),
        ("1 + 1.5 % true", mismatch("%", Float, Bool), 9),
        ("dtype matches 1", mismatch("matches", Str, Int), 7),
        ("1 matches dtype", mismatch("matches", Int, Str), 3),
        ("dtype in [float16, 5]", mismatch("in", Str, Int), 20),
        ("batch in [1, 'a']", mismatch("in", Int, Str), 14),
        ("scale in [1, true]", mismatch("in", Float, Bool), 14),
        ("true in [true]", operand("in", "an int, a float or a str", Bool), 1),
        ("batch and true", operand("and", "a bool", Int), 1),
        ("true or dtype", operand("or", "a bool", Str), 9),
        ("not batch", operand("not", "a bool", Int), 5),
        ("-dtype", operand("-", NUMBER, Str), 2),
        ("abs(true)", operand("abs", NUMBER, Bool), 5),
        ("min(1, dtype)", operand("min", NUMBER, Str), 8),
        ("ceil_div(1, 2.0)", operand("ceil_div", "ints", Float), 13),
        ("", unexpected("end of expression", "a value"), 1),
        ("batch >", unexpected("end of expression", "a value"), 8),
        ("batch 1", unexpected("`1`", OPERATOR), 7),
        ("(batch", unexpected("end of expression", "an operator or `)`"), 7),
        ("batch in 3", unexpected("`3`", "a list such as `[a, b]`"), 10),
        ("batch in []", unexpected("`]`", "a value"), 11),
        ("batch in [1 2]", unexpected("`2`", "`,` or `]`"), 13),
        ("min(1 2)", unexpected("`2`", "`,` or `)`"), 7),
        ("[1] == 2", unexpected("`[`", "a value"), 1),
        ("batch not 3", unexpected("`not`", OPERATOR), 7),
        ("+1", unexpected("`+`", "a value"), 1),
        ("batch <> 3", unexpected("`>`", "a value"), 8),
        ("batch # 3", Kind::UnexpectedCharacter { found: '#' }, 7),
        ("true & true", Kind::UnexpectedCharacter { found: '&' }, 6),
        ("op matches attention.*", Kind::UnexpectedCharacter { found: '.' }, 21),
        ("'é' == é", Kind::UnexpectedCharacter { found: 'é' }, 8),
        ("batch > 9223372036854775808", number("9223372036854775808"), 9),
        ("-9223372036854775809", number("9223372036854775809"), 2),
        ("90a", number("90a"), 1),
        ("1 + 1.", number("1."), 5),
        ("1.5.2", number("1.5.2"), 1),
        ("1_", number("1_"), 1),
        ("0x10", number("0x10"), 1),
        ("2e", number("2e"), 1),
        ("1e999", number("1e999"), 1),
        ("1._5", number("1._5"), 1),
        ("dtype == 'a", Kind::UnterminatedString, 10),
        ("'a\\", Kind::UnterminatedString, 1),
        (r"'é\n'", Kind::BadEscape { found: 'n' }, 3),
        ("1 + mn(1, 2)", Kind::UnknownFunction { name: "mn".into(), nearest: Some("min") }, 5),
        ("target.sm_version(1)", Kind::UnknownFunction { name: "target.sm_version".into(), nearest: None }, 1),
        ("1 + abs(1, 2)", Kind::Arity { function: "abs", expected: "one argument", found: 2 }, 5),
        ("min(1)", Kind::Arity { function: "min", expected: "two or more arguments", found: 1 }, 1),
        ("ceil_div()", Kind::Arity { function: "ceil_div", expected: "two arguments", found: 0 }, 1),
        ("batch = 3", Kind::SingleEquals, 7),
        ("1 < batch < 3", Kind::ChainedComparison, 11),
        ("dtype == a == b", Kind::ChainedComparison, 12),
        ("batch in [1] in [2]", Kind::ChainedComparison, 14),
        ("true and 1 < batch not in [3]", Kind::ChainedComparison, 20),
    ]
}

#[test]
fn kinds_and_columns() {
    for (source, kind, column) in cases() {
        let error = error(source);
        assert_eq!((&error.kind, error.column), (&kind, column), "{source}");
        assert_eq!(error.text, source);
    }
}

/// The errors that no short source shows.
fn others() -> Vec<ExprError> {
    let field = [("batch", MatchValue::Str("many"))];
    vec![
        error(&"x".repeat(5000)),
        error(&"(".repeat(65)),
        Expr::compile_as("batch", &scope(), Type::Bool).unwrap_err(),
        Expr::from_match(field, &scope()).unwrap_err(),
    ]
}

#[test]
fn limits() {
    let long = error(&"é".repeat(3000));
    let (length, limit) = (6000, 4096);
    assert_eq!(long.kind, Kind::TooLong { length, limit });
    assert_eq!((long.column, long.text.len()), (2049, 4096));
    assert!(Expr::compile(&format!("1{}", " ".repeat(4095)), &scope()).is_ok());
    assert!(Expr::compile(&format!("1{}", " ".repeat(4096)), &scope()).is_err());

    let limit = 64;
    let deep = Kind::TooDeep { limit };
    let column = |source: String| {
        let error = error(&source);
        assert_eq!(error.kind, deep, "{source}");
        error.column
    };
    assert_eq!(column("(".repeat(4000)), 65);
    assert_eq!(column("!".repeat(4000)), 65);
    assert_eq!(column("not ".repeat(1000)), 4 * 64 + 1);
    assert_eq!(column("-".repeat(4000)), 65);
    assert_eq!(column("abs(".repeat(1000)), 4 * 64 + 1);
    assert_eq!(column("1 in [".repeat(600)), 6 * 64 + 6);
}

#[test]
fn wrong_type_names_both() {
    let error = Expr::compile_as("  batch + 1", &scope(), Type::Bool).unwrap_err();
    let (expected, found) = (Type::Bool, Type::Int);
    assert_eq!(error.kind, Kind::WrongType { expected, found });
    assert_eq!(error.column, 3);
    assert_eq!(error.kind.to_string(), "the expression is int, but bool is wanted");
    assert!(Expr::compile_as("1.5", &scope(), Type::Int).is_err());
}

#[test]
fn every_kind_can_be_produced() {
    // No wildcard: a new kind does not compile until it has a number here, and
    // then fails below until a case produces it.
    fn number(kind: &Kind) -> usize {
        match kind {
            Kind::UnknownName { .. } => 0,
            Kind::TypeMismatch { .. } => 1,
            Kind::BadOperand { .. } => 2,
            Kind::UnexpectedToken { .. } => 3,
            Kind::UnexpectedCharacter { .. } => 4,
            Kind::TooLong { .. } => 5,
            Kind::TooDeep { .. } => 6,
            Kind::BadNumber { .. } => 7,
            Kind::UnterminatedString => 8,
            Kind::BadEscape { .. } => 9,
            Kind::WrongType { .. } => 10,
            Kind::UnknownFunction { .. } => 11,
            Kind::Arity { .. } => 12,
            Kind::SingleEquals => 13,
            Kind::ChainedComparison => 14,
            Kind::BadMatchValue { .. } => 15,
        }
    }
    let mut seen = [false; 16];
    for (source, ..) in cases() {
        seen[number(&error(source).kind)] = true;
    }
    for error in others() {
        seen[number(&error.kind)] = true;
    }
    assert_eq!(seen, [true; 16]);
}

#[test]
fn display_points_at_the_column() {
    assert_eq!(
        error("batchsize >= 8").to_string(),
        "unknown name `batchsize`\n  batchsize >= 8\n  ^\nhint: did you mean `batch_size`?"
    );
    assert_eq!(
        error("dtype == 'é' and batch = 3").to_string(),
        "`=` is not an operator; `==` compares\n  dtype == 'é' and batch = 3\n  \
         \u{20}                      ^\nhint: write `==`"
    );
    assert_eq!(error("dtype == 3").to_string(), "`==` does not take str and int\n  dtype == 3\n        ^");
    let chained = error("1 < batch < 3").to_string();
    assert!(chained.contains("and"), "{chained}");
    assert!(error("[1]").to_string().contains("may only follow `in`"));
    assert!(error("true | true").to_string().contains("write `or`"));
}

#[test]
fn display_shows_only_the_line_and_its_neighbourhood() {
    assert_eq!(error("batch > 1 and\n\tfoo > 2").to_string(), "unknown name `foo`\n  \tfoo > 2\n  \t^");
    assert_eq!(error("batch >\n").to_string(), "unexpected end of expression, wanted a value\n  \n  ^");
    let long = error(&format!("{}foo{}", "1 + ".repeat(500), " + 1".repeat(400)));
    let shown = long.to_string();
    let lines: Vec<_> = shown.lines().collect();
    let caret = lines[2].chars().count() - 1;
    let under: String = lines[1].chars().skip(caret).take(3).collect();
    assert_eq!((under.as_str(), long.column), ("foo", 2001));
    assert!(lines[1].chars().count() < 130);
}

#[test]
fn it_is_an_error() {
    let boxed: Box<dyn std::error::Error + Send + Sync> = Box::new(error("("));
    assert!(boxed.to_string().starts_with("unexpected end of expression"));
}
