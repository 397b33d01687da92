//! What expressions are made of: types, values, and where values come from.

use std::fmt;

/// The type of a field or an expression.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Type {
    /// `true` or `false`.
    Bool,
    /// A 64-bit signed integer.
    Int,
    /// A 64-bit IEEE 754 number.
    Float,
    /// Text.
    Str,
}

impl fmt::Display for Type {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Type::Bool => "bool",
            Type::Int => "int",
            Type::Float => "float",
            Type::Str => "str",
        })
    }
}

/// A value of one of the four types.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Value<'a> {
    /// A [`Type::Bool`] value.
    Bool(bool),
    /// A [`Type::Int`] value.
    Int(i64),
    /// A [`Type::Float`] value.
    Float(f64),
    /// A [`Type::Str`] value.
    Str(&'a str),
}

impl Value<'_> {
    /// The type this is a value of.
    pub fn ty(&self) -> Type {
        match self {
            Value::Bool(_) => Type::Bool,
            Value::Int(_) => Type::Int,
            Value::Float(_) => Type::Float,
            Value::Str(_) => Type::Str,
        }
    }
}

/// Where an expression finds the values of the fields it names.
///
/// The value of a slot must have the type its [`Scope`](crate::Scope) gave it,
/// except that an Int serves for a Float; any other type makes evaluation fail
/// with [`EvalError::FieldType`](crate::EvalError::FieldType).
pub trait Env {
    /// The value of the field in `slot`.
    fn get(&self, slot: u16) -> Value<'_>;
}

impl<E: Env + ?Sized> Env for &E {
    fn get(&self, slot: u16) -> Value<'_> {
        (**self).get(slot)
    }
}
