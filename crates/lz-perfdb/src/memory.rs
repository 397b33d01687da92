//! Rows that are not on the disk: those it did not take, and all of them where there is no file.

use std::collections::BTreeMap;

use crate::record::{Key, Record};
use crate::sql::Effect;

/// Rows by key, at most so many.
pub(crate) struct Memory {
    rows: BTreeMap<Key, Record>,
    limit: usize,
}

impl Memory {
    pub fn new(limit: usize) -> Memory {
        Memory { rows: BTreeMap::new(), limit }
    }

    /// Puts a row in, unless the one that is there is to be kept; `None` when there is no room for it.
    pub fn put(&mut self, record: Record, replaces: fn(&Record, &Record) -> bool) -> Option<Effect> {
        let effect = match self.rows.get(&record.key) {
            Some(old) if !replaces(old, &record) => return Some(Effect::Kept),
            Some(_) => Effect::Replaced,
            None if self.rows.len() >= self.limit => return None,
            None => Effect::Added,
        };
        self.rows.insert(record.key.clone(), record);
        Some(effect)
    }

    pub fn rows(&self) -> impl Iterator<Item = &Record> {
        self.rows.values()
    }

    pub fn rows_mut(&mut self) -> impl Iterator<Item = &mut Record> {
        self.rows.values_mut()
    }

    pub fn len(&self) -> usize {
        self.rows.len()
    }

    pub fn limit(&self) -> usize {
        self.limit
    }

    pub fn retain(&mut self, mut keep: impl FnMut(&Record) -> bool) {
        self.rows.retain(|_, record| keep(record));
    }

    /// Forgets these, where they are still what they were.
    pub fn written(&mut self, rows: &[Record]) {
        for record in rows {
            if self.rows.get(&record.key) == Some(record) {
                self.rows.remove(&record.key);
            }
        }
    }
}
