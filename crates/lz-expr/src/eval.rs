//! Evaluation of compiled trees. Nothing here allocates.

use crate::ast::Arith;
use crate::error::EvalError;
use crate::glob;
use crate::node::{BoolNode, FloatNode, IntNode, Node, StrNode};
use crate::value::{Env, Type, Value};

/// The environment of constants.
pub(crate) struct NoFields;

impl Env for NoFields {
    fn get(&self, _slot: u16) -> Value<'_> {
        Value::Bool(false)
    }
}

fn mistyped(slot: u16, expected: Type, found: Value<'_>) -> EvalError {
    let found = found.ty();
    EvalError::FieldType { slot, expected, found }
}

impl Node {
    pub(crate) fn eval<'a, E: Env + ?Sized>(&'a self, env: &'a E) -> Result<Value<'a>, EvalError> {
        match self {
            Node::Bool(node) => node.eval(env).map(Value::Bool),
            Node::Int(node) => node.eval(env).map(Value::Int),
            Node::Float(node) => node.eval(env).map(Value::Float),
            Node::Str(node) => node.eval(env).map(Value::Str),
        }
    }
}

impl BoolNode {
    pub(crate) fn eval<E: Env + ?Sized>(&self, env: &E) -> Result<bool, EvalError> {
        match self {
            BoolNode::Const(value) => Ok(*value),
            BoolNode::Field(slot) => match env.get(*slot) {
                Value::Bool(value) => Ok(value),
                other => Err(mistyped(*slot, Type::Bool, other)),
            },
            BoolNode::Not(inner) => inner.eval(env).map(|value| !value),
            BoolNode::All(parts) => {
                for part in parts {
                    if !part.eval(env)? {
                        return Ok(false);
                    }
                }
                Ok(true)
            }
            BoolNode::Any(parts) => {
                for part in parts {
                    if part.eval(env)? {
                        return Ok(true);
                    }
                }
                Ok(false)
            }
            BoolNode::Same { negated, sides } => Ok((sides.0.eval(env)? == sides.1.eval(env)?) != *negated),
            BoolNode::IntCmp(op, sides) => Ok(op.holds(&sides.0.eval(env)?, &sides.1.eval(env)?)),
            BoolNode::FloatCmp(op, sides) => Ok(op.holds(&sides.0.eval(env)?, &sides.1.eval(env)?)),
            BoolNode::StrSame { negated, sides } => Ok((sides.0.eval(env)? == sides.1.eval(env)?) != *negated),
            BoolNode::IntIn(both) => {
                let item = both.0.eval(env)?;
                for element in &both.1 {
                    if element.eval(env)? == item {
                        return Ok(true);
                    }
                }
                Ok(false)
            }
            BoolNode::FloatIn(both) => {
                let item = both.0.eval(env)?;
                for element in &both.1 {
                    if element.eval(env)? == item {
                        return Ok(true);
                    }
                }
                Ok(false)
            }
            BoolNode::StrIn(both) => {
                let item = both.0.eval(env)?;
                for element in &both.1 {
                    if element.eval(env)? == item {
                        return Ok(true);
                    }
                }
                Ok(false)
            }
            BoolNode::Glob(sides) => {
                let text = sides.0.eval(env)?;
                Ok(glob::matches(sides.1.eval(env)?, text))
            }
        }
    }
}

impl IntNode {
    pub(crate) fn eval<E: Env + ?Sized>(&self, env: &E) -> Result<i64, EvalError> {
        match self {
            IntNode::Const(value) => Ok(*value),
            IntNode::Field(slot) => match env.get(*slot) {
                Value::Int(value) => Ok(value),
                other => Err(mistyped(*slot, Type::Int, other)),
            },
            IntNode::Neg(inner) => inner.eval(env)?.checked_neg().ok_or(EvalError::Overflow),
            IntNode::Abs(inner) => inner.eval(env)?.checked_abs().ok_or(EvalError::Overflow),
            IntNode::Chain(first, links) => {
                let mut value = first.eval(env)?;
                for (op, operand) in links {
                    value = int_step(*op, value, operand.eval(env)?)?;
                }
                Ok(value)
            }
            IntNode::Least(items) => {
                let mut least = i64::MAX;
                for item in items {
                    least = least.min(item.eval(env)?);
                }
                Ok(least)
            }
            IntNode::Greatest(items) => {
                let mut greatest = i64::MIN;
                for item in items {
                    greatest = greatest.max(item.eval(env)?);
                }
                Ok(greatest)
            }
            IntNode::CeilDiv(sides) => ceil_div(sides.0.eval(env)?, sides.1.eval(env)?),
        }
    }
}

pub(crate) fn int_step(op: Arith, left: i64, right: i64) -> Result<i64, EvalError> {
    if right == 0 && matches!(op, Arith::Div | Arith::Rem) {
        return Err(EvalError::DivisionByZero);
    }
    let value = match op {
        Arith::Add => left.checked_add(right),
        Arith::Sub => left.checked_sub(right),
        Arith::Mul => left.checked_mul(right),
        Arith::Div => left.checked_div(right),
        // MIN % -1 is 0; the checked form calls it an overflow.
        Arith::Rem => Some(left.wrapping_rem_euclid(right)),
    };
    value.ok_or(EvalError::Overflow)
}

pub(crate) fn ceil_div(left: i64, right: i64) -> Result<i64, EvalError> {
    let quotient = int_step(Arith::Div, left, right)?;
    let inexact = left.wrapping_rem(right) != 0;
    // Truncation already rounded a negative quotient up.
    Ok(quotient + i64::from(inexact && (left < 0) == (right < 0)))
}

impl FloatNode {
    pub(crate) fn eval<E: Env + ?Sized>(&self, env: &E) -> Result<f64, EvalError> {
        match self {
            FloatNode::Const(value) => Ok(*value),
            FloatNode::Field(slot) => match env.get(*slot) {
                Value::Float(value) => Ok(value),
                Value::Int(value) => Ok(value as f64),
                other => Err(mistyped(*slot, Type::Float, other)),
            },
            FloatNode::FromInt(inner) => inner.eval(env).map(|value| value as f64),
            FloatNode::Neg(inner) => inner.eval(env).map(|value| -value),
            FloatNode::Abs(inner) => inner.eval(env).map(f64::abs),
            FloatNode::Chain(first, links) => {
                let mut value = first.eval(env)?;
                for (op, operand) in links {
                    value = float_step(*op, value, operand.eval(env)?)?;
                }
                Ok(value)
            }
            FloatNode::Least(items) => {
                let mut least = f64::NAN;
                for item in items {
                    least = least.min(item.eval(env)?);
                }
                Ok(least)
            }
            FloatNode::Greatest(items) => {
                let mut greatest = f64::NAN;
                for item in items {
                    greatest = greatest.max(item.eval(env)?);
                }
                Ok(greatest)
            }
        }
    }
}

pub(crate) fn float_step(op: Arith, left: f64, right: f64) -> Result<f64, EvalError> {
    if right == 0.0 && matches!(op, Arith::Div | Arith::Rem) {
        return Err(EvalError::DivisionByZero);
    }
    Ok(match op {
        Arith::Add => left + right,
        Arith::Sub => left - right,
        Arith::Mul => left * right,
        Arith::Div => left / right,
        Arith::Rem => left.rem_euclid(right),
    })
}

impl StrNode {
    pub(crate) fn eval<'a, E: Env + ?Sized>(&'a self, env: &'a E) -> Result<&'a str, EvalError> {
        match self {
            StrNode::Const(value) => Ok(value),
            StrNode::Field(slot) => match env.get(*slot) {
                Value::Str(value) => Ok(value),
                other => Err(mistyped(*slot, Type::Str, other)),
            },
        }
    }
}
