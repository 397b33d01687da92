//! The format a weight is packed in: how it lies in memory, not which weight it is.

use std::fmt;
use std::num::NonZeroU8;
use std::str::FromStr;

/// How the weights of a call lie in memory.
///
/// ```
/// use lz_model::Packing;
///
/// let blocked: Packing = "blocked_32x1".parse().unwrap();
/// assert_eq!(Packing::blocked(32, 1), Some(blocked));
/// assert_eq!((Packing::default().to_string(), blocked.to_string()), ("plain".into(), "blocked_32x1".into()));
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Packing {
    /// As the operation's schema has them.
    #[default]
    Plain,
    /// In blocks that are each in one piece, one row of blocks after the other. What does not fill a block is padded with
    /// zeros.
    Blocked {
        /// Output features of a block.
        rows: NonZeroU8,
        /// Input features of a block.
        columns: NonZeroU8,
    },
}

impl Packing {
    /// Blocks of so many output by so many input features; `None` for none.
    pub const fn blocked(rows: u8, columns: u8) -> Option<Packing> {
        match (NonZeroU8::new(rows), NonZeroU8::new(columns)) {
            (Some(rows), Some(columns)) => Some(Packing::Blocked { rows, columns }),
            _ => None,
        }
    }

    /// Whether the weights are not packed.
    pub const fn is_plain(&self) -> bool {
        matches!(self, Packing::Plain)
    }

    /// A word that is zero only for plain weights.
    pub(crate) const fn code(self) -> u16 {
        match self {
            Packing::Plain => 0,
            Packing::Blocked { rows, columns } => (rows.get() as u16) << 8 | columns.get() as u16,
        }
    }

    /// The inverse of [`Packing::code`].
    pub(crate) const fn from_code(code: u16) -> Packing {
        match Packing::blocked((code >> 8) as u8, code as u8) {
            Some(blocked) => blocked,
            None => Packing::Plain,
        }
    }
}

impl fmt::Display for Packing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Packing::Plain => f.pad("plain"),
            Packing::Blocked { rows, columns } => f.pad(&format!("blocked_{rows}x{columns}")),
        }
    }
}

/// A name that is no packing format.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "unknown packing format '{name}'; write 'plain', or 'blocked_32x1' for blocks of 32 rows by 1 column (1 to 255)"
)]
pub struct UnknownPacking {
    /// The name as given.
    pub name: String,
}

impl FromStr for Packing {
    type Err = UnknownPacking;

    fn from_str(name: &str) -> Result<Packing, UnknownPacking> {
        let size = |text: &str| text.parse().ok().filter(|_| text.bytes().all(|b| b.is_ascii_digit()));
        let blocked = || {
            let (rows, columns) = name.strip_prefix("blocked_")?.split_once('x')?;
            Packing::blocked(size(rows)?, size(columns)?)
        };
        let found = if name == "plain" { Some(Packing::Plain) } else { blocked() };
        found.ok_or_else(|| UnknownPacking { name: name.to_owned() })
    }
}

impl serde::Serialize for Packing {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> serde::Deserialize<'de> for Packing {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Packing, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_format_is_read_as_it_is_written() {
        for code in 0..=u16::MAX {
            let packing = Packing::from_code(code);
            let sizes = (code >> 8, code & 0xff);
            assert_eq!(packing.code(), if sizes.0 == 0 || sizes.1 == 0 { 0 } else { code });
            assert_eq!(packing.to_string().parse(), Ok(packing));
        }
        for wrong in
            ["", "Plain", "blocked", "blocked_0x1", "blocked_1x256", "blocked_+1x1", "blocked_1x", "blocked_1x1x1"]
        {
            assert!(wrong.parse::<Packing>().is_err(), "{wrong}");
        }
    }
}
