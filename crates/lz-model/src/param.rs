//! Scalar parameters of an operation.

use std::fmt;

use crate::symbol::Symbol;

/// The value of a scalar parameter.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ParamValue {
    /// Not given, and the operation has its own rule for that.
    None,
    /// A truth value.
    Bool(bool),
    /// An integer.
    Int(i64),
    /// A real number.
    Float(f64),
    /// A name out of a closed list, or an identifier.
    Str(Symbol),
}

impl ParamValue {
    /// A string value.
    pub fn str(text: &str) -> ParamValue {
        ParamValue::Str(Symbol::intern(text))
    }

    /// The truth value, if it is one.
    pub fn as_bool(self) -> Option<bool> {
        if let ParamValue::Bool(b) = self { Some(b) } else { None }
    }

    /// The integer, if it is one.
    pub fn as_int(self) -> Option<i64> {
        if let ParamValue::Int(i) = self { Some(i) } else { None }
    }

    /// The number, if it is one; integers widen.
    pub fn as_float(self) -> Option<f64> {
        match self {
            ParamValue::Float(x) => Some(x),
            ParamValue::Int(i) => Some(i as f64),
            _ => None,
        }
    }

    /// The text, if it is one.
    pub fn as_str(self) -> Option<&'static str> {
        if let ParamValue::Str(s) = self { Some(s.as_str()) } else { None }
    }
}

impl fmt::Display for ParamValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ParamValue::None => f.write_str("none"),
            ParamValue::Bool(b) => write!(f, "{b}"),
            ParamValue::Int(i) => write!(f, "{i}"),
            ParamValue::Float(x) => write!(f, "{x}"),
            ParamValue::Str(s) => write!(f, "{s}"),
        }
    }
}

/// The type of a parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ParamType {
    /// `true` or `false`.
    Bool,
    /// An integer.
    Int,
    /// A real number.
    Float,
    /// One of these names.
    Choice(&'static [&'static str]),
    /// Any identifier.
    Name,
}

impl ParamType {
    /// Whether a text can be a value of it.
    pub fn takes_text(self, text: &str) -> bool {
        match self {
            ParamType::Choice(choices) => choices.contains(&text),
            ParamType::Name => true,
            ParamType::Bool | ParamType::Int | ParamType::Float => false,
        }
    }

    /// What its values are, in words.
    pub fn expected(self) -> String {
        match self {
            ParamType::Choice(choices) => format!("one of {}", choices.join(", ")),
            ParamType::Bool => "true or false".into(),
            ParamType::Int => "an integer".into(),
            ParamType::Float => "a number".into(),
            ParamType::Name => "a name".into(),
        }
    }
}

/// What a parameter is when the caller does not give it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ParamDefault {
    /// It must be given.
    Required,
    /// The operation derives it (a softmax scale from the head dimension, …).
    Derived,
    /// This truth value.
    Bool(bool),
    /// This integer.
    Int(i64),
    /// This number.
    Float(f64),
    /// This name.
    Str(&'static str),
}

impl ParamDefault {
    /// The value the default stands for; `None` when the parameter is required.
    pub fn value(self) -> Option<ParamValue> {
        Some(match self {
            ParamDefault::Required => return None,
            ParamDefault::Derived => ParamValue::None,
            ParamDefault::Bool(b) => ParamValue::Bool(b),
            ParamDefault::Int(i) => ParamValue::Int(i),
            ParamDefault::Float(x) => ParamValue::Float(x),
            ParamDefault::Str(s) => ParamValue::str(s),
        })
    }
}

/// How a parameter takes part in the cache key, and so in what rules may look at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ParamRole {
    /// By its exact value.
    Exact,
    /// Only by whether it was given: its value cannot decide between kernels.
    Presence,
    /// As a dimension of the same name.
    Dim,
    /// Not at all (a seed).
    Ignored,
}

/// A scalar parameter of an operation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Param {
    /// Its name.
    pub name: &'static str,
    /// Other names it is known by.
    pub also: &'static [&'static str],
    /// Its type.
    pub ty: ParamType,
    /// Its default.
    pub default: ParamDefault,
    /// Its part in the key.
    pub role: ParamRole,
    /// Every kernel of the operation honours any valid value; the others must be declared.
    pub universal: bool,
    /// Something the caller promises about the data: no result depends on it, so that a kernel may leave it aside.
    pub promise: bool,
    /// One line for people.
    pub doc: &'static str,
}

impl Param {
    /// The name by which callers give it, and what is said after a value of it: both sides of a window are `window`.
    pub fn as_given(&self) -> (&'static str, &'static str) {
        match self.name {
            "window_left" => ("window", " to the left"),
            "window_right" => ("window", " to the right"),
            name => (name, ""),
        }
    }

    /// A parameter with an exact role.
    pub const fn new(name: &'static str, ty: ParamType, default: ParamDefault, doc: &'static str) -> Param {
        Param { name, also: &[], ty, default, role: ParamRole::Exact, universal: false, promise: false, doc }
    }

    /// A truth value.
    pub const fn bool(name: &'static str, default: bool, doc: &'static str) -> Param {
        Param::new(name, ParamType::Bool, ParamDefault::Bool(default), doc)
    }

    /// An integer.
    pub const fn int(name: &'static str, default: i64, doc: &'static str) -> Param {
        Param::new(name, ParamType::Int, ParamDefault::Int(default), doc)
    }

    /// A number.
    pub const fn float(name: &'static str, default: f64, doc: &'static str) -> Param {
        Param::new(name, ParamType::Float, ParamDefault::Float(default), doc)
    }

    /// One of several names.
    pub const fn choice(
        name: &'static str,
        choices: &'static [&'static str],
        default: &'static str,
        doc: &'static str,
    ) -> Param {
        Param::new(name, ParamType::Choice(choices), ParamDefault::Str(default), doc)
    }

    /// Any identifier; empty when not given.
    pub const fn name(name: &'static str, doc: &'static str) -> Param {
        Param::new(name, ParamType::Name, ParamDefault::Derived, doc).universal()
    }

    /// An integer that sizes the call: a dimension of the same name.
    pub const fn dim(name: &'static str, doc: &'static str) -> Param {
        Param::new(name, ParamType::Int, ParamDefault::Required, doc).role(ParamRole::Dim).universal()
    }

    /// A promise that sizes the call: a dimension of the same name, 0 where nothing is promised.
    pub const fn promise(name: &'static str, doc: &'static str) -> Param {
        Param { promise: true, ..Param::dim(name, doc).default(ParamDefault::Int(0)) }
    }

    /// A seed: random numbers are a function of it, the choice of kernel never is.
    pub const fn seed() -> Param {
        Param::new("seed", ParamType::Int, ParamDefault::Int(0), "seed of the draws")
            .role(ParamRole::Ignored)
            .universal()
    }

    /// The same parameter with another role.
    pub const fn role(mut self, role: ParamRole) -> Param {
        self.role = role;
        self
    }

    /// The same parameter, which every kernel honours.
    pub const fn universal(mut self) -> Param {
        self.universal = true;
        self
    }

    /// The same parameter where it changes no result: it may be given, and no kernel need know it.
    pub const fn without_effect(mut self) -> Param {
        self.universal = true;
        self.promise = true;
        self
    }

    /// The same parameter with another default.
    pub const fn default(mut self, default: ParamDefault) -> Param {
        self.default = default;
        self
    }

    /// The same parameter under further names.
    pub const fn also(mut self, names: &'static [&'static str]) -> Param {
        self.also = names;
        self
    }
}
