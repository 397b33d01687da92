//! How deep expressions may be, and that the deepest need little stack.

use lz_expr::{Expr, ExprErrorKind, MAX_NESTING, Value};

use crate::support::*;

#[test]
fn chains_are_one_level_and_nesting_has_an_exact_limit() {
    let long = format!("batch{}", "+1".repeat(2000));
    gives(&long, Value::Int(2016));
    let long = format!("true{}", "&&true".repeat(600));
    holds(&long);
    let nested = |n: usize| format!("{}1{}", "(".repeat(n), ")".repeat(n));
    gives(&nested(MAX_NESTING), Value::Int(1));
    assert!(Expr::compile(&nested(MAX_NESTING + 1), &scope()).is_err());
}

#[test]
fn the_deepest_trees_fit_a_small_stack() {
    // What one level looks like before and after the next, and its height.
    let forms = [
        ("1+(", ")", 2),
        ("(", "*1+1)", 3),
        ("1+2*abs(", ")", 3),
        ("-", "", 1),
        ("not ", "", 1),
        ("true or true and (", ")==true", 4),
        ("(", "==true and true or true)", 4),
        ("min(1, 1-", ")", 2),
    ];
    let run = move || {
        for (before, after, height) in forms {
            let leaf =
                if before.contains("true") || after.contains("true") || before == "not " { "true" } else { "batch" };
            let nested = |n: usize| format!("{}{leaf}{}", before.repeat(n), after.repeat(n));
            let (most, scope) = (MAX_NESTING / height, scope());
            let expr = Expr::compile(&nested(most), &scope).unwrap_or_else(|e| panic!("{e}"));
            assert!(expr.eval(&table()).is_ok(), "{before}");
            for n in [most + 1, 4096 / (before.len() + after.len() + 1)] {
                let error = Expr::compile(&nested(n), &scope).unwrap_err();
                assert!(matches!(error.kind, ExprErrorKind::TooDeep { .. }), "{error}");
            }
        }
    };
    let thread = std::thread::Builder::new().stack_size(1 << 20);
    thread.spawn(run).unwrap().join().unwrap();
}
