//! Interned strings: equal symbols are equal strings, so a cache key can hold them in a word.

use std::collections::HashMap;
use std::fmt;
use std::sync::{LazyLock, RwLock};

/// An interned string. Two symbols are equal exactly when their texts are.
///
/// Interned texts live as long as the process: intern names (dtypes, tokenizer ids, hashes of
/// vocabularies), never data, and what users say only once it is known to be valid
/// ([`ParamType::takes_text`](crate::ParamType::takes_text)).
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Symbol(u32);

#[derive(Default)]
struct Table {
    by_text: HashMap<&'static str, u32>,
    texts: Vec<&'static str>,
}

static TABLE: LazyLock<RwLock<Table>> = LazyLock::new(RwLock::default);

impl Symbol {
    /// The symbol of `text`.
    pub fn intern(text: &str) -> Symbol {
        let known = |table: &Table| table.by_text.get(text).copied();
        if let Some(id) = known(&TABLE.read().unwrap_or_else(|e| e.into_inner())) {
            return Symbol(id);
        }
        let mut table = TABLE.write().unwrap_or_else(|e| e.into_inner());
        if let Some(id) = known(&table) {
            return Symbol(id);
        }
        let id = u32::try_from(table.texts.len()).expect("fewer than 2^32 distinct names");
        let text: &'static str = Box::leak(text.into());
        table.texts.push(text);
        table.by_text.insert(text, id);
        Symbol(id)
    }

    /// Whether a text is interned.
    #[cfg(test)]
    pub(crate) fn is_known(text: &str) -> bool {
        TABLE.read().unwrap_or_else(|e| e.into_inner()).by_text.contains_key(text)
    }

    /// How many texts are interned.
    pub fn count() -> usize {
        TABLE.read().unwrap_or_else(|e| e.into_inner()).texts.len()
    }

    /// The text.
    pub fn as_str(self) -> &'static str {
        TABLE.read().unwrap_or_else(|e| e.into_inner()).texts[self.0 as usize]
    }

    /// A word that is different for every symbol, and never zero.
    pub(crate) fn code(self) -> u64 {
        u64::from(self.0) + 1
    }

    /// The symbol behind a [`Symbol::code`]; zero is none.
    pub(crate) fn from_code(code: u64) -> Option<Symbol> {
        code.checked_sub(1).map(|id| Symbol(id as u32))
    }
}

impl fmt::Display for Symbol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

impl fmt::Debug for Symbol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_texts_are_equal_symbols_across_threads() {
        let threads: Vec<_> = (0..4)
            .map(|_| std::thread::spawn(|| (0..100).map(|i| Symbol::intern(&format!("s{i}"))).collect::<Vec<_>>()))
            .collect();
        let seen: Vec<_> = threads.into_iter().map(|t| t.join().unwrap()).collect();
        assert!(seen.windows(2).all(|w| w[0] == w[1]));
        assert_eq!(seen[0][7].as_str(), "s7");
        assert_ne!(seen[0][7], seen[0][8]);
        assert_eq!(Symbol::from_code(seen[0][7].code()), Some(seen[0][7]));
    }
}
