//! A tile of attention of many queries: up to [`ROWS`] queries that share a key/value head, and which keys each may attend to.
//!
//! The queries of a tile are the lanes of vectors: scores are [key][query], sums of values [element][query]. So the largest score
//! and the sum of weights of each query are found without adding up lanes. Keys come in blocks; `softmax` makes weights
//! of a block's scores. How products are computed is a [`Path`]: `widened` in float32, `bf16` by instructions for
//! pairs of bfloat16.

use lz_abi::Line;

use super::super::Isa;
use super::super::exp::tanh;
use super::super::half_floats::Narrow;
use super::super::vector::Sixteen;
use super::bf16::PairScratch;
use super::mask::MaskBias;
use super::widened::WideScratch;

/// Queries of a tile: two vectors of AVX-512, so that a block of eight keys by all queries is 16 sums in registers.
pub(super) const ROWS: usize = 32;
/// Keys of a block: its scores are 8 KiB.
pub(super) const KEYS: usize = 64;
/// The widest head.
pub(super) const WIDEST: usize = 256;

/// A number of each query of a tile.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct Lanes(pub [f32; ROWS]);

/// Memory of a thread.
#[derive(Default)]
pub(super) struct Scratch {
    pub wide: WideScratch,
    pub pairs: PairScratch,
}

/// How tiles of a dtype are computed.
pub(super) trait Path<T: Narrow> {
    /// The instructions it needs.
    type Isa: Isa;

    /// Computes a tile, and gives each query's result to `write`.
    fn attend(tile: Tile<'_, T>, scratch: &mut Scratch, write: Write<'_>);
}

/// The keys that each query of a tile may attend to.
#[derive(Clone, Copy)]
pub(super) struct Bounds {
    /// The first.
    pub first: [i32; ROWS],
    /// The last; before the first where there is none.
    pub last: [i32; ROWS],
}

/// Takes the result of a query, by its lane. A call by address: tiles are compiled once for everything that takes their results.
pub(super) type Write<'a> = &'a mut dyn FnMut(usize, &[f32]);

/// A call, and a key/value head of one of its sequences.
pub(super) type Head = (u64, usize);

/// A tile of queries that share a key/value head.
pub(super) struct Tile<'a, T: Narrow> {
    pub queries: &'a [&'a [T]],
    pub keys: Line<'a, T>,
    pub values: Line<'a, T>,
    /// The first of these that is the sequence's: keys are counted from there.
    pub start: usize,
    /// How many there are.
    pub count: usize,
    pub head: Head,
    pub bounds: &'a Bounds,
    /// What is added to scores.
    pub bias: MaskBias<'a>,
    pub scale: f32,
    /// 0 is none.
    pub softcap: f32,
    pub v_dim: usize,
}

/// The keys of a tile.
#[derive(Clone, Copy)]
pub(super) struct Span {
    /// Those that some query attends to: from, and to below.
    pub from: usize,
    pub end: usize,
    /// The first and the last that every query attends to.
    all: (i32, i32),
}

impl<T: Narrow> Tile<'_, T> {
    /// Which keys it reads.
    #[inline(always)]
    pub fn span(&self) -> Span {
        let count = self.queries.len();
        let (first, last) = (&self.bounds.first[..count], &self.bounds.last[..count]);
        let from = first.iter().copied().min().unwrap_or(0).max(0) as usize;
        let end = (last.iter().copied().max().unwrap_or(-1).max(-1) + 1) as usize;
        let all = (first.iter().copied().max().unwrap_or(0), last.iter().copied().min().unwrap_or(-1));
        Span { from, end, all }
    }

    /// Makes scores of the products of the keys from `first` on. Gives the factor that makes exponents of 2 out of them, which is
    /// above 0.
    #[inline(always)]
    pub fn score<V: Sixteen, const FUSED: bool>(&self, first: usize, span: Span, scores: &mut [Lanes]) -> f32 {
        use std::f32::consts::LOG2_E;
        let factor = if self.softcap > 0.0 {
            let cap = self.softcap;
            for score in Lanes::flat(scores) {
                *score = cap * tanh::<FUSED>(*score * self.scale / cap);
            }
            LOG2_E
        } else if !self.bias.is_none() || self.scale < f32::MIN_POSITIVE {
            for score in Lanes::flat(scores) {
                *score *= self.scale;
            }
            LOG2_E
        } else {
            self.scale * LOG2_E
        };
        self.bias.add(first, scores.len(), scores);
        let last = (first + scores.len()) as i32 - 1;
        if (first as i32) < span.all.0 || last > span.all.1 {
            self.bounds.apply::<V>(first, scores);
        }
        factor
    }
}

impl Lanes {
    /// All numbers, one after the other.
    #[allow(unsafe_code)]
    #[inline(always)]
    fn flat(all: &mut [Lanes]) -> &mut [f32] {
        // SAFETY: the structure is its array, whose size is a multiple of its alignment.
        unsafe { std::slice::from_raw_parts_mut(all.as_mut_ptr().cast(), all.len() * ROWS) }
    }
}

impl Bounds {
    /// Makes the scores of keys that a query may not attend to minus infinity.
    #[allow(unsafe_code)]
    #[inline(always)]
    fn apply<V: Sixteen>(&self, first: usize, scores: &mut [Lanes]) {
        for (key, scores) in (first as i32..).zip(scores) {
            for (v, scores) in scores.0.as_chunks_mut().0.iter_mut().enumerate() {
                let (first, last) = (&self.first.as_chunks().0[v], &self.last.as_chunks().0[v]);
                // SAFETY: `vectorize` runs it where the instructions of `V` are.
                unsafe { V::load(scores).within(key, first, last).store(scores) };
            }
        }
    }
}
