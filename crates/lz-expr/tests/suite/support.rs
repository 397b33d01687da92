//! A scope like the ones policies see, and an environment for it.

use lz_expr::{Env, EvalError, Expr, Scope, Type, Value};

pub const BATCH: u16 = 0;
pub const SEQ_LEN: u16 = 1;
pub const SM: u16 = 4;
pub const SCALE: u16 = 5;
pub const DTYPE: u16 = 6;
pub const CORES: u16 = 8;

pub fn scope() -> Scope {
    let mut scope = Scope::new();
    for (slot, (name, ty)) in [
        ("batch_size", Type::Int),
        ("seq_len", Type::Int),
        ("heads", Type::Int),
        ("seq_tiles", Type::Int),
        ("target.sm_version", Type::Int),
        ("scale", Type::Float),
        ("dtype", Type::Str),
        ("operation", Type::Str),
        ("target.has_tensor_cores", Type::Bool),
        ("context.deterministic", Type::Bool),
    ]
    .into_iter()
    .enumerate()
    {
        assert_eq!(usize::from(scope.field(name, ty)), slot);
    }
    for (alias, slot) in [("batch", 0), ("sm", 4), ("op", 7), ("deterministic", 9)] {
        scope.alias(alias, slot);
    }
    scope
}

/// Values by slot.
pub struct Table(pub Vec<Value<'static>>);

impl Env for Table {
    fn get(&self, slot: u16) -> Value<'_> {
        self.0[usize::from(slot)]
    }
}

impl Table {
    pub fn with(mut self, slot: u16, value: Value<'static>) -> Table {
        self.0[usize::from(slot)] = value;
        self
    }
}

pub fn table() -> Table {
    Table(vec![
        Value::Int(16),
        Value::Int(4096),
        Value::Int(32),
        Value::Int(64),
        Value::Int(90),
        Value::Float(0.5),
        Value::Str("bfloat16"),
        Value::Str("attention.causal"),
        Value::Bool(true),
        Value::Bool(false),
    ])
}

pub fn compiled(source: &str) -> Expr {
    Expr::compile(source, &scope()).unwrap_or_else(|error| panic!("{error}"))
}

#[track_caller]
pub fn gives(source: &str, expected: Value<'_>) {
    let expr = compiled(source);
    assert_eq!(expr.eval(&table()), Ok(expected), "{source}");
    assert_eq!(expr.ty(), expected.ty(), "{source}");
}

#[track_caller]
pub fn holds(source: &str) {
    gives(source, Value::Bool(true));
}

#[track_caller]
pub fn fails(source: &str, error: EvalError) {
    assert_eq!(compiled(source).eval(&table()), Err(error), "{source}");
}
