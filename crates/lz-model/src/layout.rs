//! Memory layouts of tensors: what they are, which applies to a call that does not say, and how strides check it.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use lz_abi::nearest;

/// The order of a tensor's named dimensions, or how strictly its strides are tied down.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, schemars::JsonSchema)]
#[repr(u8)]
pub enum Layout {
    /// Any strides: the operation has no named layouts and does not care.
    #[serde(rename = "strided")]
    Strided,
    /// Row-major without gaps.
    #[serde(rename = "contiguous")]
    Contiguous,
    /// Batch, sequence, heads, head dimension.
    #[serde(rename = "BSHD")]
    Bshd,
    /// Batch, heads, sequence, head dimension.
    #[serde(rename = "BHSD")]
    Bhsd,
    /// Tokens (or pages), heads, head dimension: no batch dimension; of a paged cache,
    /// page, slot in page, heads, head dimension.
    #[serde(rename = "NHD")]
    Nhd,
    /// Heads before tokens; of a paged cache, page, heads, slot in page, head dimension.
    #[serde(rename = "HND")]
    Hnd,
}

impl Layout {
    /// Every layout.
    pub const ALL: [Layout; 6] =
        [Layout::Strided, Layout::Contiguous, Layout::Bshd, Layout::Bhsd, Layout::Nhd, Layout::Hnd];

    /// The name used in files and messages.
    pub const fn name(self) -> &'static str {
        match self {
            Layout::Strided => "strided",
            Layout::Contiguous => "contiguous",
            Layout::Bshd => "BSHD",
            Layout::Bhsd => "BHSD",
            Layout::Nhd => "NHD",
            Layout::Hnd => "HND",
        }
    }

    /// Whether it names an order of dimensions (and not only a stride requirement).
    pub const fn is_named(self) -> bool {
        !matches!(self, Layout::Strided | Layout::Contiguous)
    }

    pub(crate) const fn from_code(code: u8) -> Layout {
        Layout::ALL[code as usize]
    }
}

impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A name that is no layout.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown layout '{name}'{}", lz_abi::did_you_mean(.nearest))]
pub struct UnknownLayout {
    /// The name as given.
    pub name: String,
    /// The closest known one.
    pub nearest: Option<&'static str>,
}

impl FromStr for Layout {
    type Err = UnknownLayout;
    fn from_str(text: &str) -> Result<Self, UnknownLayout> {
        Layout::ALL.into_iter().find(|l| l.name().eq_ignore_ascii_case(text)).ok_or_else(|| UnknownLayout {
            name: text.to_owned(),
            nearest: nearest(&text.to_uppercase(), Layout::ALL.map(Layout::name)),
        })
    }
}

/// The layouts of calls that do not say theirs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DefaultLayouts {
    /// Of attention and rotary embedding: BSHD or BHSD.
    pub dense: Layout,
    /// Of paged caches: NHD or HND.
    pub cache: Layout,
}

impl Default for DefaultLayouts {
    fn default() -> Self {
        DefaultLayouts { dense: Layout::Bshd, cache: Layout::Nhd }
    }
}

/// The layout of a call. Sizes and strides never decide it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayoutVerdict {
    /// The layout: what the call says, or the default in force.
    pub layout: Layout,
    /// The input whose strides contradict it, if the call does not say its layout.
    pub contradicted_by: Option<&'static str>,
}

/// Whether the strides of a tensor contradict a layout: sequence before heads, but laid out in memory as a transposed
/// view of such a tensor, which is how heads-first tensors are made of a projection's output.
///
/// A heads-first layout is never contradicted, since both its own tensors and transposed views are common.
pub fn contradicts(layout: Layout, shape: &[i64], strides: Option<&[i64]>) -> bool {
    let (Layout::Bshd | Layout::Nhd, &[_, first, second, _], Some(&[_, inner, outer, _])) = (layout, shape, strides)
    else {
        return false;
    };
    // A dimension of size 1 may have any stride, and an expanded one has stride 0: neither says anything.
    first > 1 && second > 1 && inner > 0 && inner.checked_mul(first).is_some_and(|end| outer >= end)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn contradicted(layout: Layout, shape: [i64; 4], strides: [i64; 4]) -> bool {
        contradicts(layout, &shape, Some(&strides))
    }

    #[test]
    fn a_transposed_projection_contradicts_sequence_first() {
        // (batch 2, seq 128, heads 4 * dim 8) viewed as heads and transposed
        let (shape, strides) = ([2, 4, 128, 8], [4096, 8, 32, 1]);
        assert!(contradicted(Layout::Bshd, shape, strides));
        assert!(contradicted(Layout::Nhd, shape, strides));
        assert!(!contradicted(Layout::Bhsd, shape, strides));
        assert!(!contradicted(Layout::Hnd, shape, strides));
        // the same out of a fused projection of query, key and value
        assert!(contradicted(Layout::Bshd, shape, [12288, 8, 96, 1]));
    }

    #[test]
    fn usual_views_contradict_nothing() {
        let shape = [2, 128, 4, 8];
        let usual = [
            [4096, 32, 8, 1],   // contiguous
            [12288, 96, 8, 1],  // a third of a fused projection, (3, heads, dim)
            [12288, 96, 24, 1], // a third of a fused projection, (heads, 3, dim)
            [4096, 32, 0, 1],   // heads expanded
            [4096, 0, 8, 1],    // positions expanded
            [0, 0, 0, 0],
            [4096, -32, 8, 1],
            [32, 64, 8, 1], // batch inside the sequence
        ];
        for strides in usual {
            assert!(!contradicted(Layout::Bshd, shape, strides), "{strides:?}");
        }
        assert!(!contradicts(Layout::Bshd, &shape, None));
        // sizes of one say nothing
        assert!(!contradicted(Layout::Bshd, [2, 1, 4, 8], [32, 1, 8, 1]));
        assert!(!contradicted(Layout::Bshd, [2, 128, 1, 8], [1024, 8, 1024, 1]));
        assert!(!contradicts(Layout::Bshd, &[128, 4, 8], Some(&[8, 1024, 1])));
    }
}
