//! A small typed expression language for policy rules, kernel constraints, and
//! workspace and grid formulas.
//!
//! An expression is parsed and type-checked once, against a [`Scope`] of known
//! fields, and evaluated many times against an [`Env`] that supplies their
//! values. Whatever can be wrong with the text (an unknown name, a comparison
//! of a string with a number) is found at load time and reported with a column
//! and a hint; evaluation allocates nothing.
//!
//! ```
//! use lz_expr::{Bounds, Env, EvalError, Expr, Known, Possible, Scope, Type, Value};
//!
//! let mut scope = Scope::new();
//! let batch = scope.field("batch_size", Type::Int);
//! let dtype = scope.field("dtype", Type::Str);
//! scope.alias("batch", batch); // a second name for the same slot
//!
//! let rule = Expr::compile_as("batch >= 8 AND dtype in [float16, bfloat16]", &scope, Type::Bool)?;
//!
//! struct Call { batch: i64, dtype: &'static str }
//! impl Env for Call {
//!     fn get(&self, slot: u16) -> Value<'_> {
//!         match slot {
//!             0 => Value::Int(self.batch),
//!             _ => Value::Str(self.dtype),
//!         }
//!     }
//! }
//! assert_eq!(rule.test(&Call { batch: 16, dtype: "float16" }), Ok(true));
//! assert_eq!(rule.test(&Call { batch: 4, dtype: "float16" }), Ok(false));
//!
//! // The same rule, decided for a whole range of batch sizes at once.
//! struct Small;
//! impl Bounds for Small {
//!     fn bounds(&self, slot: u16) -> Known<'_> {
//!         if slot == 0 { Known::Between(1, 7) } else { Known::Nothing }
//!     }
//!     fn divisible(&self, _slot: u16, _m: i64) -> Option<bool> { None }
//! }
//! assert_eq!(rule.possible(&Small), Possible::AlwaysFalse);
//!
//! // Mistakes are found when the text is read.
//! let error = Expr::compile("batch_sise >= 8", &scope).unwrap_err();
//! assert_eq!(error.column, 1);
//! assert!(error.to_string().contains("did you mean `batch_size`?"));
//! # assert_eq!(dtype, 1);
//! # Ok::<(), lz_expr::ExprError>(())
//! ```
//!
//! # The language
//!
//! From loosest to tightest binding:
//!
//! | form | meaning |
//! |---|---|
//! | `a or b`, `OR`, `\|\|` | short-circuits |
//! | `a and b`, `AND`, `&&` | short-circuits |
//! | `not a`, `NOT`, `!` | |
//! | `==` `!=` `<` `<=` `>` `>=` | never chained: write `a < x and x < b` |
//! | `x in [a, b]`, `x not in [a, b]` | equal to any / to none of the elements |
//! | `s matches 'attention.*'` | glob: `*` any run, `?` one character |
//! | `a + b`, `a - b` | |
//! | `a * b`, `a / b`, `a % b` | |
//! | `-a` | |
//! | `min(a, b, ..)` `max(a, b, ..)` `ceil_div(a, b)` `abs(a)` | |
//!
//! Literals are integers (`16_384`), floats (`1.5`, `2e-3`), strings in single
//! or double quotes (with `\\`, `\'` and `\"`), and `true` / `false` (also
//! `True`, `TRUE`). Names are dotted identifiers. Where a string is called for,
//! opposite a string in `==`, `!=`, `matches` or `in [..]`, a bare word that is
//! not a known field stands for itself: `dtype == bfloat16`.
//!
//! # Types
//!
//! * Int and Float mix to Float; in an `in` test, `min` or `max`, one Float makes
//!   all of them Float. (Beyond 2^53, Ints round when they become Floats.)
//! * Strings have `==`, `!=`, `in` and `matches`;
//!   bools have `==`, `!=` and logic. Everything else is a load-time error.
//! * Int `/` Int truncates toward zero; `ceil_div` rounds up; `%` is the
//!   Euclidean remainder, never negative.
//! * Int arithmetic is checked: [`EvalError::Overflow`]. Division and remainder
//!   by zero are [`EvalError::DivisionByZero`], for floats too. Float overflow
//!   and comparisons with NaN follow IEEE 754; `min` and `max` pass over a NaN.
//!
//! # Limits
//!
//! A source has at most [`MAX_SOURCE_BYTES`] bytes, and nests at most
//! [`MAX_NESTING`] levels deep: that many operators, calls and parentheses may
//! be around any one value. A chain such as `a and b and c` or `a + b - c` is
//! one level however long it is.

mod ast;
mod check;
mod cuts;
mod error;
mod eval;
mod expr;
mod glob;
mod lex;
mod matching;
mod node;
mod numeric;
mod parse;
mod possible;
mod scope;
mod span;
mod texts;
mod value;

pub use cuts::{Cut, Modulus};
pub use error::{EvalError, ExprError, ExprErrorKind};
pub use expr::Expr;
pub use glob::matches as glob_matches;
pub use matching::MatchValue;
pub use possible::{Bounds, Known, Possible};
pub use scope::Scope;
pub use texts::Compared;
pub use value::{Env, Type, Value};

/// The longest source an expression may have, in bytes.
pub const MAX_SOURCE_BYTES: usize = 4096;

/// How many operators, calls and parentheses there may be around one value.
pub const MAX_NESTING: usize = 64;
