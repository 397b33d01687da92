//! What conditions can be at all: decided by trying every case their thresholds tell apart.

use lz_expr::{Bounds, Expr, Known, Possible, Type, Value};
use lz_model::{DType, DeviceSpec, Layout, Op, ParamRole, ParamType, Platform};

/// The most cases that are tried; beyond it nothing is claimed.
const MAX_CASES: usize = 4_096;

/// What a field can be.
#[derive(Clone, Copy, Debug)]
enum Choice<'a> {
    /// An integer of this range, and whether it is a multiple of each of the field's moduli.
    Ints { low: i64, high: i64, multiples: u32 },
    /// This value.
    Value(Value<'a>),
    /// Anything.
    Any,
}

/// One field of the conditions.
struct Axis<'a> {
    slot: u16,
    moduli: Vec<i64>,
    choices: Vec<Choice<'a>>,
}

/// The cases that some conditions over an operation's fields tell apart.
pub(super) struct Reach<'a> {
    axes: Vec<Axis<'a>>,
}

/// One case.
struct Case<'r, 'a> {
    axes: &'r [Axis<'a>],
    at: &'r [usize],
}

impl<'a> Reach<'a> {
    /// The cases of `conditions`, on any device or on one. `None` when they are too many to try.
    pub fn new(op: &'a Op, conditions: &[&Expr], device: Option<&'a DeviceSpec>) -> Option<Reach<'a>> {
        let mut slots: Vec<u16> = conditions.iter().flat_map(|e| e.slots()).copied().collect();
        slots.sort_unstable();
        slots.dedup();
        let axes: Vec<Axis<'a>> = slots.into_iter().map(|slot| axis(op, slot, conditions, device)).collect();
        let cases = axes.iter().try_fold(1usize, |n, axis| n.checked_mul(axis.choices.len()));
        cases.filter(|&n| n <= MAX_CASES).map(|_| Reach { axes })
    }

    /// Whether in every case `claim` holds of it.
    fn every(&self, claim: impl Fn(&Case<'_, 'a>) -> bool) -> bool {
        let mut at = vec![0; self.axes.len()];
        loop {
            if !claim(&Case { axes: &self.axes, at: &at }) {
                return false;
            }
            let advanced = at.iter_mut().zip(&self.axes).any(|(i, axis)| {
                *i += 1;
                let more = *i < axis.choices.len();
                if !more {
                    *i = 0;
                }
                more
            });
            if !advanced {
                return true;
            }
        }
    }

    /// Whether `conditions` can certainly never hold together.
    pub fn never(&self, conditions: &[Expr]) -> bool {
        self.every(|case| case.fails(conditions))
    }

    /// Whether wherever `these` hold, `those` certainly hold too.
    pub fn implies(&self, these: &[Expr], those: &[Expr]) -> bool {
        let certain = |case: &Case<'_, 'a>| those.iter().all(|e| e.possible(case) == Possible::AlwaysTrue);
        self.every(|case| case.fails(these) || certain(case))
    }
}

impl Case<'_, '_> {
    fn fails(&self, conditions: &[Expr]) -> bool {
        conditions.iter().any(|e| e.possible(self) == Possible::AlwaysFalse)
    }

    fn field(&self, slot: u16) -> Option<(&Axis<'_>, Choice<'_>)> {
        let i = self.axes.iter().position(|axis| axis.slot == slot)?;
        Some((&self.axes[i], self.axes[i].choices[self.at[i]]))
    }
}

impl Bounds for Case<'_, '_> {
    fn bounds(&self, slot: u16) -> Known<'_> {
        match self.field(slot) {
            Some((_, Choice::Ints { low, high, .. })) => Known::Between(low, high),
            Some((_, Choice::Value(value))) => Known::Exactly(value),
            Some((_, Choice::Any)) | None => Known::Nothing,
        }
    }

    fn divisible(&self, slot: u16, m: i64) -> Option<bool> {
        let (axis, Choice::Ints { multiples, .. }) = self.field(slot)? else { return None };
        let bit = axis.moduli.iter().position(|&known| known == m)?;
        Some(multiples >> bit & 1 == 1)
    }
}

fn axis<'a>(op: &'a Op, slot: u16, conditions: &[&Expr], device: Option<&'a DeviceSpec>) -> Axis<'a> {
    let scope = op.scope();
    let is = |name: &str| scope.slot(name) == Some(slot);
    let value = |value: Value<'a>| vec![Choice::Value(value)];
    let known = device.and_then(|device| match () {
        () if is("platform") => Some(Value::Str(device.platform.name())),
        () if is("sm") => Some(Value::Int(device.sm.map_or(0, i64::from))),
        () if is("target.has_tensor_cores") => Some(Value::Bool(device.has_tensor_cores())),
        () if is("target.generation") => Some(Value::Str(device.generation.as_deref().unwrap_or("none"))),
        () if is("target.vendor") => Some(Value::Str(&device.vendor)),
        () if is("target.name") => Some(Value::Str(&device.name)),
        () => None,
    });
    let mut moduli = Vec::new();
    let choices = match (known, scope.ty(slot)) {
        (Some(known), _) => value(known),
        (None, Type::Bool) => vec![Choice::Value(Value::Bool(false)), Choice::Value(Value::Bool(true))],
        (None, Type::Float) => vec![Choice::Any],
        (None, Type::Str) => strings(op, slot),
        (None, Type::Int) => {
            moduli = conditions.iter().flat_map(|e| e.moduli()).filter(|m| m.slot == slot).map(|m| m.modulus).collect();
            moduli.sort_unstable();
            moduli.dedup();
            // More would be too many cases anyway.
            moduli.truncate(8);
            let from = if op.dim_of_slot(slot).is_some() || is("sm") || is("context.tp_size") { 0 } else { i64::MIN };
            ints(from, conditions.iter().flat_map(|e| e.cuts()).filter(|c| c.slot == slot).map(|c| c.at), &moduli)
        }
    };
    Axis { slot, moduli, choices }
}

/// The intervals between cuts, each with every divisibility.
fn ints<'a>(from: i64, cuts: impl Iterator<Item = i64>, moduli: &[i64]) -> Vec<Choice<'a>> {
    let mut starts: Vec<i64> = cuts.filter(|&at| at > from).chain([from]).collect();
    starts.sort_unstable();
    starts.dedup();
    let ends = starts.iter().skip(1).map(|&next| next - 1).chain([i64::MAX]);
    let combinations = 0..1u32 << moduli.len();
    let both = |(low, high)| combinations.clone().map(move |multiples| Choice::Ints { low, high, multiples });
    starts.iter().copied().zip(ends).flat_map(both).collect()
}

/// Every value of a field that is one of a known set of names.
fn strings(op: &Op, slot: u16) -> Vec<Choice<'static>> {
    let scope = op.scope();
    let is = |name: &str| scope.slot(name) == Some(slot);
    let all = |names: &mut dyn Iterator<Item = &'static str>| names.map(|n| Choice::Value(Value::Str(n))).collect();
    let is_input_dtype = || op.schema().inputs.iter().any(|input| is(&format!("{}.dtype", input.name)));
    if is("operation") {
        return all(&mut [op.id()].into_iter());
    }
    if is("family") {
        return all(&mut [op.schema().family.name()].into_iter());
    }
    if is("platform") {
        return all(&mut Platform::ALL.into_iter().map(Platform::name));
    }
    if is("layout") {
        return all(&mut Layout::ALL.into_iter().map(Layout::name));
    }
    if is("dtype") || is_input_dtype() {
        return all(&mut DType::all().map(DType::name).chain(["none"]));
    }
    let params = op.schema().params.iter();
    match params.filter(|p| p.role == ParamRole::Exact && is(p.name)).map(|p| p.ty).next() {
        Some(ParamType::Choice(names)) => all(&mut names.iter().copied().chain([""])),
        _ => vec![Choice::Any],
    }
}
