//! The fields an expression may name.

use std::collections::BTreeMap;

use crate::Type;

/// The fields an expression may name.
///
/// A slot is an index chosen by insertion order; several names may share one.
/// A name is reachable from expression text only if it is a dotted identifier
/// (`target.sm_version`) that is not a keyword.
#[derive(Clone, Debug, Default)]
pub struct Scope {
    types: Vec<Type>,
    names: BTreeMap<String, u16>,
}

impl Scope {
    /// A scope with no fields.
    pub fn new() -> Scope {
        Scope::default()
    }

    /// Declares a field and returns its slot.
    ///
    /// Declaring a name again with the same type returns the slot it has; with
    /// another type, the name moves to a new slot.
    ///
    /// # Panics
    ///
    /// If more than 65536 slots are declared.
    pub fn field(&mut self, name: impl Into<String>, ty: Type) -> u16 {
        let name = name.into();
        if let Some(slot) = self.slot(&name)
            && self.ty(slot) == ty
        {
            return slot;
        }
        let slot = u16::try_from(self.types.len()).expect("a scope has at most 65536 slots");
        self.types.push(ty);
        self.names.insert(name, slot);
        slot
    }

    /// Gives the field in `slot` one more name. A name already in use moves.
    ///
    /// # Panics
    ///
    /// If no field has that slot.
    pub fn alias(&mut self, alias: impl Into<String>, slot: u16) {
        assert!(usize::from(slot) < self.types.len(), "alias for slot {slot}, which no field has");
        self.names.insert(alias.into(), slot);
    }

    /// The slot a name stands for.
    pub fn slot(&self, name: &str) -> Option<u16> {
        self.names.get(name).copied()
    }

    /// The type of the field in `slot`.
    ///
    /// # Panics
    ///
    /// If no field has that slot.
    pub fn ty(&self, slot: u16) -> Type {
        self.types[usize::from(slot)]
    }

    /// Every name, aliases included, in alphabetical order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.names.keys().map(String::as_str)
    }

    /// The known name a misspelt one most likely meant, if any is close. A name
    /// without its prefix (`sm_version` for `target.sm_version`) counts as close.
    pub fn nearest(&self, name: &str) -> Option<&str> {
        closest(name, self.names())
    }
}

/// The candidate closest to `name`, if it is within a third of its length.
pub(crate) fn closest<'a>(name: &str, candidates: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let length = name.chars().count();
    let allowed = (length / 3).max(1);
    let distance = |candidate: &str| {
        let whole = strsim::osa_distance(name, candidate);
        match candidate.rsplit_once('.') {
            Some((_, last)) if !name.contains('.') => whole.min(strsim::osa_distance(name, last)),
            _ => whole,
        }
    };
    candidates
        .map(|candidate| (distance(candidate), candidate))
        .filter(|&(distance, _)| distance <= allowed && distance < length)
        .min_by_key(|&(distance, _)| distance)
        .map(|(_, candidate)| candidate)
}
