//! Values as SQLite has them, read without any conversion, and their checksum.

use rusqlite::types::ValueRef;

use crate::provenance::{MemoryPressure, PowerState, Temperature};
use crate::record::Mode;
use crate::row::Verdict;

/// A type a column can have. Reading is strict: a value of another kind is damage, not something to convert.
pub(crate) trait Cell: Sized {
    /// As SQLite takes it.
    fn value(&self) -> ValueRef<'_>;
    /// From what SQLite has; the error says what it is instead.
    fn read(value: ValueRef<'_>) -> Result<Self, String>;
}

fn unexpected(expected: &str, value: ValueRef<'_>) -> String {
    format!("expected {expected}, found {}", value.data_type())
}

fn text(value: ValueRef<'_>) -> Result<&str, String> {
    match value {
        ValueRef::Text(bytes) => std::str::from_utf8(bytes).map_err(|_| "a text that is not UTF-8".to_owned()),
        other => Err(unexpected("a text", other)),
    }
}

fn integer(value: ValueRef<'_>) -> Result<i64, String> {
    match value {
        ValueRef::Integer(value) => Ok(value),
        other => Err(unexpected("an integer", other)),
    }
}

impl Cell for String {
    fn value(&self) -> ValueRef<'_> {
        ValueRef::Text(self.as_bytes())
    }

    fn read(value: ValueRef<'_>) -> Result<String, String> {
        text(value).map(str::to_owned)
    }
}

impl Cell for f64 {
    fn value(&self) -> ValueRef<'_> {
        ValueRef::Real(*self)
    }

    fn read(value: ValueRef<'_>) -> Result<f64, String> {
        match value {
            ValueRef::Real(value) => Ok(value),
            other => Err(unexpected("a number", other)),
        }
    }
}

impl Cell for i64 {
    fn value(&self) -> ValueRef<'_> {
        ValueRef::Integer(*self)
    }

    fn read(value: ValueRef<'_>) -> Result<i64, String> {
        integer(value)
    }
}

impl Cell for u32 {
    fn value(&self) -> ValueRef<'_> {
        ValueRef::Integer(i64::from(*self))
    }

    fn read(value: ValueRef<'_>) -> Result<u32, String> {
        let value = integer(value)?;
        u32::try_from(value).map_err(|_| format!("{value} is not from 0 to {}", u32::MAX))
    }
}

impl Cell for bool {
    fn value(&self) -> ValueRef<'_> {
        ValueRef::Integer(i64::from(*self))
    }

    fn read(value: ValueRef<'_>) -> Result<bool, String> {
        match integer(value)? {
            0 => Ok(false),
            1 => Ok(true),
            other => Err(format!("{other} is neither 0 nor 1")),
        }
    }
}

impl<T: Cell> Cell for Option<T> {
    fn value(&self) -> ValueRef<'_> {
        self.as_ref().map_or(ValueRef::Null, Cell::value)
    }

    fn read(value: ValueRef<'_>) -> Result<Option<T>, String> {
        match value {
            ValueRef::Null => Ok(None),
            value => T::read(value).map(Some),
        }
    }
}

macro_rules! word_cells {
    ($($name:ty),+) => {$(
        impl Cell for $name {
            fn value(&self) -> ValueRef<'_> {
                ValueRef::Text(self.as_str().as_bytes())
            }

            fn read(value: ValueRef<'_>) -> Result<$name, String> {
                text(value)?.parse().map_err(|unknown: crate::words::UnknownWord| unknown.to_string())
            }
        }
    )+};
}

word_cells!(Mode, Verdict, Temperature, MemoryPressure, PowerState);

/// FNV-1a over kinds, lengths and bytes of values. Each step is a bijection of the state, so two inputs that differ in
/// one byte can never meet again.
pub(crate) struct Checksum(u64);

impl Checksum {
    pub fn new() -> Checksum {
        Checksum(0xcbf2_9ce4_8422_2325)
    }

    pub fn add(&mut self, value: ValueRef<'_>) {
        match value {
            ValueRef::Null => self.bytes(b"n"),
            ValueRef::Integer(value) => self.tagged(b'i', &value.to_le_bytes()),
            // SQLite keeps no negative zero.
            ValueRef::Real(value) => self.tagged(b'r', &(value + 0.0).to_bits().to_le_bytes()),
            ValueRef::Text(text) | ValueRef::Blob(text) => {
                self.tagged(b't', &(text.len() as u64).to_le_bytes());
                self.bytes(text);
            }
        }
    }

    fn tagged(&mut self, tag: u8, bytes: &[u8]) {
        self.bytes(&[tag]);
        self.bytes(bytes);
    }

    fn bytes(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = (self.0 ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
    }

    pub fn finish(self) -> i64 {
        self.0.cast_signed()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checksum(values: &[ValueRef<'_>]) -> i64 {
        let mut checksum = Checksum::new();
        values.iter().for_each(|value| checksum.add(*value));
        checksum.finish()
    }

    #[test]
    fn every_single_bit_counts() {
        let (text, number, time) = ("flash_attn.v2 漢".to_owned(), 0x0123_4567_89ab_cdef_i64, 118.25_f64);
        let whole = checksum(&[text.value(), number.value(), time.value()]);
        for bit in 0..text.len() * 8 {
            let mut bytes = text.clone().into_bytes();
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert_ne!(checksum(&[ValueRef::Text(&bytes), number.value(), time.value()]), whole);
        }
        for bit in 0..64 {
            assert_ne!(checksum(&[text.value(), (number ^ (1 << bit)).value(), time.value()]), whole);
            let other = f64::from_bits(time.to_bits() ^ (1 << bit));
            assert_ne!(checksum(&[text.value(), number.value(), other.value()]), whole);
        }
    }

    #[test]
    fn what_moves_between_columns_counts() {
        let sums = [
            checksum(&[ValueRef::Text(b"ab"), ValueRef::Text(b"c")]),
            checksum(&[ValueRef::Text(b"a"), ValueRef::Text(b"bc")]),
            checksum(&[ValueRef::Text(b"abc"), ValueRef::Text(b"")]),
            checksum(&[ValueRef::Text(b"abc"), ValueRef::Null]),
            checksum(&[ValueRef::Null, ValueRef::Text(b"abc")]),
            checksum(&[ValueRef::Integer(1), ValueRef::Null]),
            checksum(&[ValueRef::Real(1.0), ValueRef::Null]),
        ];
        let distinct: std::collections::BTreeSet<i64> = sums.into_iter().collect();
        assert_eq!(distinct.len(), sums.len());
        assert_eq!(checksum(&[ValueRef::Real(-0.0)]), checksum(&[ValueRef::Real(0.0)]));
    }

    #[test]
    fn values_of_another_kind_are_not_converted() {
        assert_eq!(f64::read(ValueRef::Integer(1)), Err("expected a number, found Integer".into()));
        assert_eq!(i64::read(ValueRef::Real(1.0)), Err("expected an integer, found Real".into()));
        assert_eq!(String::read(ValueRef::Blob(b"x")), Err("expected a text, found Blob".into()));
        assert_eq!(String::read(ValueRef::Text(b"\xff")), Err("a text that is not UTF-8".into()));
        assert_eq!(bool::read(ValueRef::Integer(2)), Err("2 is neither 0 nor 1".into()));
        assert_eq!(u32::read(ValueRef::Integer(-1)), Err("-1 is not from 0 to 4294967295".into()));
        assert_eq!(Mode::read(ValueRef::Text(b"lazy")), Err("'lazy' is not one of eager, graph".into()));
        assert_eq!(Option::<f64>::read(ValueRef::Null), Ok(None));
    }
}
