//! Names of operations: their ids, aliases and functions, and how the environment spells them.

use lz_model::ops::{ALIASES, FUNCTIONS};
use lz_model::{Catalog, nearest};

/// Every name an operation, alias or function has.
pub(crate) fn names() -> impl Iterator<Item = &'static str> {
    let ops = Catalog::get().ops().iter().flat_map(|op| [op.id()].into_iter().chain(op.schema().also.iter().copied()));
    ops.chain(ALIASES.iter().map(|alias| alias.name)).chain(FUNCTIONS.iter().map(|f| f.name))
}

/// The one name under which everything that means the same is known: `norm.rms` for `rms_norm`.
/// A glob stays as it is. The nearest name when there is none.
pub(crate) fn canonical(name: &str) -> Result<String, Option<String>> {
    if name.contains(['*', '?']) {
        let known = names().any(|known| lz_expr::glob_matches(name, known));
        return if known { Ok(name.to_owned()) } else { Err(None) };
    }
    let catalog = Catalog::get();
    let target = FUNCTIONS.iter().find(|f| f.name == name).map_or(name, |f| f.target);
    let Ok(found) = catalog.find(target) else {
        return Err(nearest(name, names()).map(str::to_owned));
    };
    let id = catalog.op(found.ops[0]).id();
    let is_id = catalog.find(id).is_ok_and(|own| own.ops == found.ops && own.fixes == found.fixes);
    Ok(if is_id { id } else { found.name }.to_owned())
}

/// How many operations a name stands for, less for one that fixes parameters: what is narrower.
pub(crate) fn breadth(name: &str) -> usize {
    match Catalog::get().find(name) {
        Ok(target) => 2 * target.ops.len() - usize::from(!target.fixes.is_empty()),
        Err(_) => usize::MAX,
    }
}

/// The operation that `LAYERZERO_LOCK_<spelled>` is about.
pub(crate) fn of_variable(spelled: &str) -> Option<String> {
    names().find(|name| spelling(name) == spelled).and_then(|name| canonical(name).ok())
}

/// How the environment spells an operation.
pub(crate) fn spelling(name: &str) -> String {
    name.replace('.', "_").to_uppercase()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_environment_can_spell_every_name_and_no_two_are_confused() {
        let mut seen = std::collections::BTreeMap::new();
        for name in names() {
            let canonical = canonical(name).unwrap();
            let known = seen.entry(spelling(name)).or_insert_with(|| canonical.clone());
            assert_eq!(*known, canonical, "{name}");
            assert_eq!(of_variable(&spelling(name)), Some(canonical));
        }
    }

    #[test]
    fn names_that_mean_the_same_are_one() {
        assert_eq!(canonical("rms_norm").unwrap(), "norm.rms");
        assert_eq!(canonical("norm.rms").unwrap(), "norm.rms");
        assert_eq!(canonical("paged_attention").unwrap(), "attention.paged");
        assert_eq!(canonical("attention").unwrap(), "attention");
        assert_eq!(canonical("attention.causal").unwrap(), "attention.causal");
        assert_eq!(canonical("atention"), Err(Some("attention".into())));
        assert!(breadth("attention.standard.prefill") < breadth("attention.causal"));
        assert!(breadth("attention.causal") < breadth("attention"));
    }
}
