//! Memory layouts of tensors, and how the layout of an attention input is recognised.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::nearest::nearest;

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
#[error("unknown layout '{name}'{}", crate::nearest::did_you_mean(.nearest))]
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

/// Where a layout was read from, strongest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LayoutEvidence {
    /// The caller said so.
    Explicit,
    /// The strides are those of a transposed view.
    Strides,
    /// The shapes admit only this one, or make it far more likely.
    Shape,
    /// Nothing tells the two apart; the likelier was assumed.
    Ambiguous,
}

/// A recognised layout and the evidence for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayoutVerdict {
    /// BSHD or BHSD.
    pub layout: Layout,
    /// How it was recognised.
    pub evidence: LayoutEvidence,
}

/// What helps to tell heads from positions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayoutHints {
    /// Head counts models commonly have.
    pub common_head_counts: Vec<i64>,
}

impl Default for LayoutHints {
    fn default() -> Self {
        LayoutHints {
            common_head_counts: vec![
                1, 2, 4, 6, 8, 10, 12, 14, 16, 20, 24, 25, 28, 32, 36, 40, 48, 56, 64, 71, 80, 96, 112, 128,
            ],
        }
    }
}

/// Shape and strides of a rank-4 attention input.
#[derive(Clone, Copy, Debug)]
pub struct Rank4<'a> {
    /// Sizes.
    pub shape: &'a [i64],
    /// Strides in elements; `None` is contiguous.
    pub strides: Option<&'a [i64]>,
}

/// Recognises whether `query` and `key` are BSHD or BHSD.
///
/// An explicit layout wins. Then the strides: a view transposed from a projection's output has
/// its second dimension inside its third, and only BHSD looks like that. Then the shapes: equal
/// lengths with unequal head counts, or head counts against positions. What is left is
/// ambiguous: the longer axis is taken for the sequence, BSHD where they are equal, and the caller
/// warns, or refuses in strict mode.
pub fn detect(
    query: Rank4<'_>,
    key: Option<Rank4<'_>>,
    explicit: Option<Layout>,
    hints: &LayoutHints,
) -> LayoutVerdict {
    let verdict = |layout, evidence| LayoutVerdict { layout, evidence };
    if let Some(layout) = explicit {
        return verdict(layout, LayoutEvidence::Explicit);
    }
    if [Some(query), key].into_iter().flatten().any(is_transposed_view) {
        return verdict(Layout::Bhsd, LayoutEvidence::Strides);
    }
    match by_shape(query.shape, key.map(|k| k.shape), hints) {
        Ok(layout) => verdict(layout, LayoutEvidence::Shape),
        Err(guess) => verdict(guess, LayoutEvidence::Ambiguous),
    }
}

fn is_transposed_view(tensor: Rank4<'_>) -> bool {
    // A dimension of size one may carry any stride, so it says nothing.
    tensor.strides.is_some_and(|s| tensor.shape[1] > 1 && tensor.shape[2] > 1 && s[1] < s[2])
}

/// The layout the shapes tell, or the likelier one where they do not.
fn by_shape(query: &[i64], key: Option<&[i64]>, hints: &LayoutHints) -> Result<Layout, Layout> {
    let (q1, q2) = (query[1], query[2]);
    if let Some(key) = key {
        let (k1, k2) = (key[1], key[2]);
        let grouped = |heads: i64, kv_heads: i64| kv_heads > 0 && heads % kv_heads == 0;
        // Whichever axis holds the heads must divide; often only one reading is possible.
        match (grouped(q2, k2), grouped(q1, k1)) {
            (true, false) => return Ok(Layout::Bshd),
            (false, true) => return Ok(Layout::Bhsd),
            _ => {}
        }
        // Self-attention over equal lengths: the axis that differs is the heads.
        if q1 == k1 && q2 != k2 {
            return Ok(Layout::Bshd);
        }
        if q2 == k2 && q1 != k1 {
            return Ok(Layout::Bhsd);
        }
    }
    let common = |n: i64| hints.common_head_counts.contains(&n);
    match (common(q1), common(q2)) {
        (true, false) => Ok(Layout::Bhsd),
        (false, true) => Ok(Layout::Bshd),
        // Neither looks like a head count: sequences are the longer axis.
        (false, false) if q1 != q2 => Ok(if q1 > q2 { Layout::Bshd } else { Layout::Bhsd }),
        // Both do. A first token is far more common than a single head; beyond that it is a guess.
        _ if q1 == 1 || q1 >= q2 => Err(Layout::Bshd),
        _ => Err(Layout::Bhsd),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use LayoutEvidence::*;

    fn recognise(q: [i64; 4], qs: Option<[i64; 4]>, k: Option<[i64; 4]>, explicit: Option<Layout>) -> LayoutVerdict {
        let query = Rank4 { shape: &q, strides: qs.as_ref().map(|s| &s[..]) };
        let key = k.as_ref().map(|k| Rank4 { shape: k, strides: None });
        detect(query, key, explicit, &LayoutHints::default())
    }

    #[test]
    fn an_explicit_layout_wins_over_everything() {
        let strides = Some([4096, 128, 512, 1]);
        let v = recognise([2, 4, 32, 128], strides, None, Some(Layout::Bshd));
        assert_eq!(v, LayoutVerdict { layout: Layout::Bshd, evidence: Explicit });
    }

    #[test]
    fn a_transposed_projection_is_bhsd_by_its_strides_even_when_sizes_are_equal() {
        let v = recognise([2, 32, 32, 128], Some([131072, 128, 4096, 1]), None, None);
        assert_eq!(v, LayoutVerdict { layout: Layout::Bhsd, evidence: Strides });
    }

    #[test]
    fn grouped_heads_give_the_layout_away() {
        assert_eq!(recognise([2, 1024, 32, 128], None, Some([2, 1024, 8, 128]), None).layout, Layout::Bshd);
        assert_eq!(recognise([2, 32, 1024, 128], None, Some([2, 8, 1024, 128]), None).layout, Layout::Bhsd);
        // decode: one query against a cache
        assert_eq!(recognise([4, 1, 32, 128], None, Some([4, 777, 8, 128]), None).layout, Layout::Bshd);
        assert_eq!(recognise([4, 32, 1, 128], None, Some([4, 8, 777, 128]), None).layout, Layout::Bhsd);
    }

    #[test]
    fn sequences_are_the_longer_axis_and_head_counts_are_known() {
        assert_eq!(recognise([1, 2048, 16, 64], None, None, None).evidence, Shape);
        assert_eq!(recognise([1, 2048, 16, 64], None, None, None).layout, Layout::Bshd);
        assert_eq!(recognise([1, 16, 2048, 64], None, None, None).layout, Layout::Bhsd);
        // five positions, twelve heads: twelve is a head count, five is not
        assert_eq!(recognise([1, 5, 12, 64], None, None, None).layout, Layout::Bshd);
    }

    #[test]
    fn two_head_counts_are_a_guess_and_said_to_be_one() {
        let guess = |q1, q2| recognise([1, q1, q2, 64], None, Some([1, q1, q2, 64]), None);
        assert_eq!(guess(64, 8), LayoutVerdict { layout: Layout::Bshd, evidence: Ambiguous });
        assert_eq!(guess(8, 64), LayoutVerdict { layout: Layout::Bhsd, evidence: Ambiguous });
        // the first token of a sequence, with 8 heads
        assert_eq!(guess(1, 8), LayoutVerdict { layout: Layout::Bshd, evidence: Ambiguous });
    }

    #[test]
    fn equal_sizes_without_strides_are_ambiguous_and_a_dimension_of_one_says_nothing() {
        assert_eq!(recognise([2, 32, 32, 128], None, Some([2, 32, 32, 128]), None).evidence, Ambiguous);
        assert_eq!(recognise([2, 1, 1, 128], Some([1, 1, 128, 1]), None, None).evidence, Ambiguous);
    }
}
