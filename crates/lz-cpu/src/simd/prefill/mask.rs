//! The mask of a call, as what is added to the scores of a tile of queries.

use lz_abi::{Rows, TensorRef};
use lz_model::{DType, KernelError};

use super::super::half_floats::Narrow;
use super::tile::{Lanes, ROWS};
use half::{bf16, f16};

/// A mask of a dtype.
#[derive(Clone, Copy)]
pub(super) enum Mask<'a> {
    /// None was given.
    None,
    /// Where it is false, no weight.
    Bool(Table<'a, u8>),
    /// Added to scores.
    F32(Table<'a, f32>),
    /// Added to scores.
    F16(Table<'a, f16>),
    /// Added to scores.
    Bf16(Table<'a, bf16>),
}

/// Rows of a mask, one for each query; axes of size 1 count for every index.
#[derive(Clone, Copy)]
pub(super) struct Table<'a, M> {
    rows: Rows<'a, M>,
    shape: &'a [i64],
}

impl<'a> Mask<'a> {
    /// Of a call.
    pub fn of(given: Option<TensorRef<'a>>) -> Result<Mask<'a>, KernelError> {
        let Some(mask) = given else { return Ok(Mask::None) };
        let shape = mask.shape();
        Ok(match mask.dtype() {
            DType::Bool => Mask::Bool(Table { rows: mask.rows()?, shape }),
            DType::F32 => Mask::F32(Table { rows: mask.rows()?, shape }),
            DType::F16 => Mask::F16(Table { rows: mask.rows()?, shape }),
            DType::Bf16 => Mask::Bf16(Table { rows: mask.rows()?, shape }),
            other => return Err(KernelError::Failed(format!("does not take a mask of {other}"))),
        })
    }
}

impl<'a, M: lz_abi::Scalar> Table<'a, M> {
    /// The row of a query, by batch, head and place.
    fn row(&self, at: [usize; 3]) -> &'a [M] {
        let leading = &self.shape[..self.shape.len() - 1];
        let row = leading
            .iter()
            .zip(&at[3 - leading.len()..])
            .fold(0, |row, (&size, &i)| row * size as usize + if size == 1 { 0 } else { i });
        self.rows.get(row)
    }
}

/// What a mask adds to the scores of a tile's queries.
pub(super) enum MaskBias<'a> {
    None,
    Bool(TileRows<'a, u8>),
    F32(TileRows<'a, f32>),
    F16(TileRows<'a, f16>),
    Bf16(TileRows<'a, bf16>),
}

/// The rows of a tile's queries.
pub(super) struct TileRows<'a, M> {
    rows: [&'a [M]; ROWS],
    count: usize,
}

impl<'a> MaskBias<'a> {
    /// For so many queries, each at a batch, head and place.
    pub fn new(mask: Mask<'a>, count: usize, at: impl Fn(usize) -> [usize; 3]) -> MaskBias<'a> {
        fn rows<'a, M: lz_abi::Scalar>(
            of: Table<'a, M>,
            count: usize,
            at: impl Fn(usize) -> [usize; 3],
        ) -> TileRows<'a, M> {
            let none: &[M] = &[];
            TileRows { rows: std::array::from_fn(|lane| if lane < count { of.row(at(lane)) } else { none }), count }
        }
        match mask {
            Mask::None => MaskBias::None,
            Mask::Bool(table) => MaskBias::Bool(rows(table, count, at)),
            Mask::F32(table) => MaskBias::F32(rows(table, count, at)),
            Mask::F16(table) => MaskBias::F16(rows(table, count, at)),
            Mask::Bf16(table) => MaskBias::Bf16(rows(table, count, at)),
        }
    }
}

/// score + bias. A bias of minus infinity excludes the key, even if the score is NaN: the sum would be NaN.
#[inline(always)]
fn biased(score: f32, bias: f32) -> f32 {
    if bias == f32::NEG_INFINITY { bias } else { score + bias }
}

impl MaskBias<'_> {
    /// Whether nothing is added.
    #[inline(always)]
    pub fn is_none(&self) -> bool {
        matches!(self, MaskBias::None)
    }

    /// Adds it to the scores of `keys` keys from `first` on.
    #[inline(always)]
    pub fn add(&self, first: usize, keys: usize, scores: &mut [Lanes]) {
        match self {
            MaskBias::None => {}
            MaskBias::Bool(of) => of.each(first, keys, scores, |allowed, score| {
                *score = if allowed == 0 { f32::NEG_INFINITY } else { *score };
            }),
            MaskBias::F32(of) => of.each(first, keys, scores, |bias, score| *score = biased(*score, bias)),
            MaskBias::F16(of) => of.widened(first, keys, scores),
            MaskBias::Bf16(of) => of.widened(first, keys, scores),
        }
    }
}

impl<M: Copy> TileRows<'_, M> {
    #[inline(always)]
    fn each(&self, first: usize, keys: usize, scores: &mut [Lanes], mut with: impl FnMut(M, &mut f32)) {
        for (lane, row) in self.rows[..self.count].iter().enumerate() {
            for (&of, scores) in row[first..first + keys].iter().zip(scores.iter_mut()) {
                with(of, &mut scores.0[lane]);
            }
        }
    }
}

impl<M: Narrow> TileRows<'_, M> {
    #[inline(always)]
    fn widened(&self, first: usize, keys: usize, scores: &mut [Lanes]) {
        let mut wide = [0f32; super::tile::KEYS];
        for (lane, row) in self.rows[..self.count].iter().enumerate() {
            let wide = M::wide(&row[first..first + keys], &mut wide);
            wide.iter()
                .zip(scores.iter_mut())
                .for_each(|(bias, scores)| scores.0[lane] = biased(scores.0[lane], *bias));
        }
    }
}
