//! Each construct, and the forms the specification writes out.

use lz_expr::{Cut, Env, EvalError, Expr, Modulus, Scope, Type, Value};

use crate::support::*;

#[test]
fn the_forms_of_the_specification() {
    let scope = scope();
    for (source, ty) in [
        ("batch_size >= 8 AND target.has_tensor_cores", Type::Bool),
        ("seq_len > 8192", Type::Bool),
        ("context.deterministic == true", Type::Bool),
        ("deterministic == true", Type::Bool),
        ("target.sm_version >= 80", Type::Bool),
        ("dtype in [float16, bfloat16]", Type::Bool),
        ("batch * heads * seq_tiles", Type::Int),
        ("batch * heads", Type::Int),
    ] {
        let expr = Expr::compile_as(source, &scope, ty).unwrap_or_else(|e| panic!("{e}"));
        assert_eq!((expr.ty(), expr.source()), (ty, source));
    }
    holds("batch_size >= 8 AND target.has_tensor_cores");
    gives("seq_len > 8192", Value::Bool(false));
    gives("deterministic == true", Value::Bool(false));
    holds("target.sm_version >= 80");
    holds("dtype in [float16, bfloat16]");
    gives("batch * heads * seq_tiles", Value::Int(16 * 32 * 64));
}

#[test]
fn literals() {
    gives("16_384", Value::Int(16_384));
    gives("-9223372036854775808", Value::Int(i64::MIN));
    gives("9_223_372_036_854_775_807", Value::Int(i64::MAX));
    gives("1.5", Value::Float(1.5));
    gives("1_0.2_5", Value::Float(10.25));
    gives("2e-3", Value::Float(0.002));
    gives("1E+2", Value::Float(100.0));
}

#[test]
fn strings() {
    gives("'a b'", Value::Str("a b"));
    gives("\"it's\"", Value::Str("it's"));
    gives(r"'it\'s'", Value::Str("it's"));
    gives(r#""a\\b\"c""#, Value::Str("a\\b\"c"));
    gives("'naïve'", Value::Str("naïve"));
    for truth in ["true", "True", "TRUE", "not false", "NOT False", "!FALSE"] {
        holds(truth);
    }
}

#[test]
fn spellings_of_operators() {
    holds("false or true");
    holds("false OR true");
    holds("false || true");
    gives("true and false", Value::Bool(false));
    gives("true AND false", Value::Bool(false));
    gives("true && false", Value::Bool(false));
    holds("batch IN [16]");
    holds("batch NOT IN [17]");
    holds("batch not in [17]");
    holds("dtype MATCHES 'b*'");
}

#[test]
fn precedence() {
    holds("true or true and false");
    holds("not false and true");
    gives("not (true or false)", Value::Bool(false));
    holds("not 1 == 2");
    holds("!batch > 16");
    gives("2 + 3 * 4", Value::Int(14));
    gives("(2 + 3) * 4", Value::Int(20));
    gives("10 - 4 - 3", Value::Int(3));
    gives("100 / 10 / 5", Value::Int(2));
    gives("2 * 7 % 4", Value::Int(2));
    gives("-2 * -3", Value::Int(6));
    gives("- -3", Value::Int(3));
    holds("1 + 1 < 3 and 3 > 2");
    holds("target.has_tensor_cores == !deterministic");
    holds("true == not false");
    holds("(1 < 2) == (2 < 3)");
}

#[test]
fn comparisons() {
    for source in [
        "batch == 16",
        "batch != 15",
        "batch < 17",
        "batch <= 16",
        "batch > 15",
        "batch >= 16",
        "scale == 0.5",
        "scale < 1",
        "1 > scale",
        "batch == 16.0",
        "dtype == 'bfloat16'",
        "dtype != float16",
        "target.has_tensor_cores != deterministic",
    ] {
        holds(source);
        gives(&format!("not ({source})"), Value::Bool(false));
    }
}

#[test]
fn bare_words_are_strings_opposite_a_string() {
    holds("dtype == bfloat16");
    holds("bfloat16 == dtype");
    holds("dtype != torch.float16");
    holds("attention.causal == op");
    holds("dtype matches bfloat16");
    holds("bfloat16 matches dtype");
    holds("dtype not in [float16, 'float32', operation]");
    // A known field is the field, not a word.
    let same = table().with(7, Value::Str("bfloat16"));
    assert_eq!(compiled("dtype == operation").test(&same), Ok(true));
    assert_eq!(compiled("dtype in [operation]").test(&same), Ok(true));
    gives("dtype == operation", Value::Bool(false));
}

#[test]
fn membership() {
    holds("batch in [1, 16, 17]");
    holds("batch in [8 * 2]");
    holds("batch in [heads / 2]");
    holds("batch not in [1, 2]");
    holds("scale in [1, 0.5]");
    holds("batch in [0.5, 16.0]");
    gives("batch in [1, 2]", Value::Bool(false));
    gives("batch in [1, 2.5]", Value::Bool(false));
    // Elements after the one that matches are not evaluated.
    holds("batch in [16, 1 / 0]");
    fails("batch in [15, 1 / 0]", EvalError::DivisionByZero);
}

#[test]
fn globs() {
    holds("op matches 'attention.*'");
    holds("op matches '*causal'");
    holds("op matches '*tt?nti*l'");
    gives("op matches 'attention'", Value::Bool(false));
    gives("op matches 'attention.?'", Value::Bool(false));
}

#[test]
fn integer_arithmetic() {
    gives("7 / 2", Value::Int(3));
    gives("-7 / 2", Value::Int(-3));
    gives("7 / -2", Value::Int(-3));
    gives("-7 % 3", Value::Int(2));
    gives("-7 % -3", Value::Int(2));
    gives("7 % -3", Value::Int(1));
    gives("-9223372036854775808 % -1", Value::Int(0));
    gives("ceil_div(7, 2)", Value::Int(4));
    gives("ceil_div(8, 2)", Value::Int(4));
    gives("ceil_div(-7, 2)", Value::Int(-3));
    gives("ceil_div(7, -2)", Value::Int(-3));
    gives("ceil_div(-7, -2)", Value::Int(4));
    gives("abs(-3)", Value::Int(3));
    gives("min(3, batch, 2)", Value::Int(2));
    gives("max(3, batch, 2)", Value::Int(16));
}

#[test]
fn floats_and_mixtures() {
    gives("7 / 2.0", Value::Float(3.5));
    gives("scale * batch", Value::Float(8.0));
    // What stands left of the first float is still integer arithmetic.
    gives("7 / 2 * 1.0", Value::Float(3.0));
    gives("1.0 * 7 / 2", Value::Float(3.5));
    gives("-7.5 % 2", Value::Float(0.5));
    gives("min(1, 0.5)", Value::Float(0.5));
    gives("max(1, 0.5, 2)", Value::Float(2.0));
    gives("abs(-0.5)", Value::Float(0.5));
    gives("-scale", Value::Float(-0.5));
    gives("-(scale + 1)", Value::Float(-1.5));
}

#[test]
fn nan_follows_ieee() {
    let nan = table().with(SCALE, Value::Float(f64::NAN));
    for (source, expected) in [
        ("scale == scale", false),
        ("scale != scale", true),
        ("scale < 1", false),
        ("scale >= 1", false),
        ("scale in [scale, 1]", false),
        ("min(scale, 3) == 3", true),
        ("max(3, scale) == 3", true),
    ] {
        assert_eq!(compiled(source).test(&nan), Ok(expected), "{source}");
    }
}

#[test]
fn arithmetic_is_checked() {
    for source in [
        "9223372036854775807 + 1",
        "-9223372036854775808 - 1",
        "4611686018427387904 * 2",
        "-9223372036854775808 / -1",
        "-(-9223372036854775808)",
        "abs(-9223372036854775808)",
        "ceil_div(-9223372036854775808, -1)",
    ] {
        fails(source, EvalError::Overflow);
    }
    for source in
        ["batch / 0", "batch % 0", "ceil_div(batch, 0)", "1 / (batch - 16)", "scale / 0", "scale % 0.0", "scale / -0.0"]
    {
        fails(source, EvalError::DivisionByZero);
    }
}

#[test]
fn logic_short_circuits() {
    gives("false and 1 / 0 == 1", Value::Bool(false));
    holds("true or 1 / 0 == 1");
    fails("true and 1 / 0 == 1", EvalError::DivisionByZero);
    fails("1 / 0 == 1 and false", EvalError::DivisionByZero);
}

#[test]
fn the_environment_must_keep_to_the_scope() {
    let wrong = table().with(BATCH, Value::Str("x")).with(SCALE, Value::Int(2));
    let error = EvalError::FieldType { slot: BATCH, expected: Type::Int, found: Type::Str };
    assert_eq!(compiled("batch > 1").test(&wrong), Err(error));
    // An Int serves for a Float.
    assert_eq!(compiled("scale * 1.5").float(&wrong), Ok(3.0));
    for (slot, source, expected) in
        [(SCALE, "scale", Type::Float), (DTYPE, "dtype", Type::Str), (CORES, "target.has_tensor_cores", Type::Bool)]
    {
        let found = if expected == Type::Bool { Type::Int } else { Type::Bool };
        let value = if expected == Type::Bool { Value::Int(1) } else { Value::Bool(true) };
        let error = EvalError::FieldType { slot, expected, found };
        assert_eq!(compiled(source).eval(&table().with(slot, value)), Err(error));
    }
}

#[test]
fn typed_accessors() {
    assert_eq!(compiled("batch").float(&table()), Ok(16.0));
    assert_eq!(compiled("batch").int(&table()), Ok(16));
    let wrong = |expected, found| Err(EvalError::WrongType { expected, found });
    assert_eq!(compiled("batch").test(&table()), wrong(Type::Bool, Type::Int).map(|()| true));
    assert_eq!(compiled("scale").int(&table()), wrong(Type::Int, Type::Float).map(|()| 0));
    assert_eq!(compiled("dtype").float(&table()), wrong(Type::Float, Type::Str).map(|()| 0.0));
    let whole = Expr::compile_as("batch + 1", &scope(), Type::Float).unwrap();
    assert_eq!(whole.eval(&table()), Ok(Value::Float(17.0)));
    // Through a trait object and a reference.
    let env: &dyn Env = &table();
    assert_eq!(compiled("batch == 16").test(env), Ok(true));
    assert_eq!(compiled("batch == 16").test(&env), Ok(true));
}

#[test]
fn slots_cuts_and_moduli() {
    let cuts = |source: &str| -> Vec<(u16, i64)> {
        let expr = compiled(source);
        expr.cuts().iter().map(|&Cut { slot, at }| (slot, at)).collect()
    };
    assert_eq!(compiled("sm > 1 and dtype == x or batch < sm").slots(), [BATCH, SM, DTYPE]);
    assert_eq!(compiled("1 + 2").slots(), [0u16; 0]);
    assert_eq!(cuts("batch > 5"), [(BATCH, 6)]);
    assert_eq!(cuts("batch >= 5"), [(BATCH, 5)]);
    assert_eq!(cuts("batch < 5"), [(BATCH, 5)]);
    assert_eq!(cuts("batch <= 5"), [(BATCH, 6)]);
    assert_eq!(cuts("batch == 5"), [(BATCH, 5), (BATCH, 6)]);
    assert_eq!(cuts("batch != 5"), [(BATCH, 5), (BATCH, 6)]);
    assert_eq!(cuts("5 < batch"), [(BATCH, 6)]);
    assert_eq!(cuts("5 <= batch"), [(BATCH, 5)]);
    assert_eq!(cuts("batch in [3, 7]"), [3, 4, 7, 8].map(|at| (BATCH, at)));
    assert_eq!(cuts("batch not in [3]"), [(BATCH, 3), (BATCH, 4)]);
    assert_eq!(cuts("batch > -4 * 2"), [(BATCH, -7)]);
    assert_eq!(cuts("not (sm >= 90 or seq_len < 8 and sm >= 80) == (sm >= 90)"), [(SEQ_LEN, 8), (SM, 80), (SM, 90)]);
    assert_eq!(cuts("batch > 9223372036854775807"), []);
    assert_eq!(cuts("batch > 1.5"), [(BATCH, 2)]);
    assert_eq!(cuts("batch >= 2.0 and batch == 2.5"), [(BATCH, 2), (BATCH, 3)]);
    assert_eq!(cuts("batch > sm and batch + 1 > 3 and scale > 4"), []);

    let moduli = |source: &str| -> Vec<(u16, i64)> {
        let expr = compiled(source);
        let pair = |&Modulus { slot, modulus }: &Modulus| (slot, modulus);
        expr.moduli().iter().map(pair).collect()
    };
    assert_eq!(moduli("batch % 8 == 0"), [(BATCH, 8)]);
    assert_eq!(moduli("sm % (2 * 8) + batch % 4 > 0.5"), [(BATCH, 4), (SM, 16)]);
    assert_eq!(moduli("(batch % -8) + (2 * batch % 8) + batch % sm == 0"), []);
}

#[test]
fn expressions_compare_by_text_and_type_and_cross_threads() {
    fn shared<T: Send + Sync + Clone>(_: &T) {}
    let expr = compiled("batch > 1");
    shared(&expr);
    assert_eq!(expr, expr.clone());
    assert_eq!(expr, compiled("batch > 1"));
    assert_ne!(expr, compiled("batch  > 1"));
    assert_ne!(compiled("1"), Expr::compile_as("1", &scope(), Type::Float).unwrap());
}

#[test]
fn scopes() {
    let mut scope = Scope::new();
    let x = scope.field("x", Type::Int);
    let y = scope.field("a.y", Type::Str);
    assert_eq!((x, y), (0, 1));
    assert_eq!(scope.field("x", Type::Int), x);
    scope.alias("z", x);
    assert_eq!(scope.slot("z"), Some(x));
    assert_eq!(scope.slot("w"), None);
    assert_eq!(scope.ty(y), Type::Str);
    assert_eq!(scope.names().collect::<Vec<_>>(), ["a.y", "x", "z"]);
    assert_eq!(scope.field("x", Type::Bool), 2);
    assert_eq!(scope.slot("x"), Some(2));

    let scope = crate::support::scope();
    assert_eq!(scope.nearest("batchsize"), Some("batch_size"));
    assert_eq!(scope.nearest("sm_version"), Some("target.sm_version"));
    assert_eq!(scope.nearest("has_tensor_core"), Some("target.has_tensor_cores"));
    assert_eq!(scope.nearest("zzz"), None);
    assert_eq!(scope.nearest("q"), None);
    assert_eq!(Type::Float.to_string(), "float");
}
