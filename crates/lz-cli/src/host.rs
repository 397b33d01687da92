//! Tensors on this machine, with random contents that mean something to the operation.

use lz_model::schema::Access;
use lz_model::{DType, Extents, Meaning, Op, Query, TensorView, TensorViewMut, indices, row_major};

use crate::call::TensorArg;
use crate::error::CliError;

/// Most elements one tensor may have. References go through every element one by one, so more would take minutes.
pub const MOST_ELEMENTS: i64 = 1 << 26;

/// A tensor in host memory.
pub struct HostTensor {
    /// Its name, as it was given.
    pub name: String,
    /// Whether the call updates it.
    pub updated: bool,
    dtype: DType,
    shape: Extents,
    strides: Extents,
    bytes: Vec<u8>,
}

impl HostTensor {
    /// A tensor of a call that was bound, filled as its meaning demands.
    pub fn random(
        arg: &TensorArg,
        op: &'static Op,
        query: &Query,
        random: &mut Random,
    ) -> Result<HostTensor, CliError> {
        let input = op.input_index(&arg.name).map(|i| &op.schema().inputs[i]);
        let strides: Extents = arg.strides.as_ref().map_or_else(|| row_major(&arg.shape), |s| s.as_slice().into());
        let dtype = arg.dtype;
        let mut tensor = HostTensor {
            name: arg.name.clone(),
            updated: input.is_some_and(|i| i.access == Access::ReadWrite),
            dtype,
            shape: arg.shape.as_slice().into(),
            bytes: vec![0; dtype.bytes_for(span(arg, &strides)?)],
            strides,
        };
        let meaning = input.map_or(Meaning::Data, |input| Meaning::of(op, input, query));
        let filler = Filler { dtype, shape: &arg.shape, meaning };
        filler.fill(&mut tensor.view_mut(), random);
        Ok(tensor)
    }

    /// For reading.
    pub fn view(&self) -> TensorView<'_> {
        TensorView::strided(self.dtype, &self.shape, &self.strides, 0, &self.bytes).expect("the memory was made for it")
    }

    /// For writing.
    pub fn view_mut(&mut self) -> TensorViewMut<'_> {
        let bytes = &mut self.bytes;
        TensorViewMut::strided(self.dtype, &self.shape, &self.strides, 0, bytes).expect("the memory was made for it")
    }
}

/// Whether a tensor of this shape is small enough to be made here.
pub fn check_size(name: &str, shape: &[i64]) -> Result<(), CliError> {
    let elements = shape.iter().try_fold(1i64, |n, &size| n.checked_mul(size));
    elements.filter(|&n| n <= MOST_ELEMENTS).map(|_| ()).ok_or_else(|| too_large(name))
}

fn too_large(name: &str) -> CliError {
    let what = format!("'{name}' is too large to run on the host, where a tensor may have {MOST_ELEMENTS} elements");
    CliError::argument(what, "ask 'layerzero select' or 'layerzero explain', which need no memory")
}

/// How many elements the memory of a tensor holds.
fn span(arg: &TensorArg, strides: &[i64]) -> Result<usize, CliError> {
    check_size(&arg.name, &arg.shape)?;
    if strides.iter().any(|&s| s < 0) {
        let what = format!("'{}' has a negative stride, which cannot be run here", arg.name);
        return Err(CliError::argument(what, "give strides of zero or more"));
    }
    if arg.shape.contains(&0) {
        return Ok(0);
    }
    let reach = |last: i64, (&size, &stride): (&i64, &i64)| last.checked_add((size - 1).checked_mul(stride)?);
    let last = arg.shape.iter().zip(strides).try_fold(0, reach);
    last.filter(|&n| n < MOST_ELEMENTS).map(|n| n as usize + 1).ok_or_else(|| too_large(&arg.name))
}

/// Fills one tensor.
struct Filler<'a> {
    dtype: DType,
    shape: &'a [i64],
    meaning: Meaning,
}

impl Filler<'_> {
    fn fill(&self, tensor: &mut TensorViewMut<'_>, random: &mut Random) {
        let last = self.shape.last().copied().unwrap_or(1).max(1);
        let mut row = Vec::new();
        for (flat, index) in indices(self.shape).enumerate() {
            let (flat, column) = (flat as i64, flat as i64 % last);
            if column == 0 && self.meaning == Meaning::Probabilities {
                row = probabilities(last, random);
            }
            let value = match self.meaning {
                Meaning::Data => self.data(random),
                Meaning::Index(limit) => random.below(limit) as f64,
                // The first row is what the others begin with.
                Meaning::Alike(_, alike) if flat != column && column < alike => row[column as usize],
                Meaning::Alike(limit, _) => {
                    let place = random.below(limit) as f64;
                    if flat == column {
                        row.push(place);
                    }
                    place
                }
                Meaning::Counted(limit) => (flat % limit.max(1)) as f64,
                Meaning::Length(most) => (most - random.below(most / 2)) as f64,
                Meaning::LengthFrom(most, least) => (most - random.below((most / 2).min(most - least + 1))) as f64,
                Meaning::Bounds(limit) => (limit * column / (last - 1).max(1)) as f64,
                Meaning::Parts(limit) => {
                    let end = |i: i64| limit * i / last;
                    (end(column + 1) - end(column)) as f64
                }
                Meaning::Probabilities => row[column as usize],
                Meaning::Uniform => random.unit(),
                Meaning::Positive => 0.0625 + random.unit() / 2.0,
                Meaning::Mask if self.dtype == DType::Bool => f64::from(u8::from(random.unit() < 0.9)),
                Meaning::Mask => -random.unit(),
                Meaning::Unknown => 0.0,
            };
            tensor.set(&index, value);
        }
    }

    /// A number around zero; whole where the dtype is one of whole numbers.
    fn data(&self, random: &mut Random) -> f64 {
        match self.dtype {
            dtype if dtype.is_float() => random.normal(),
            DType::Bool => random.below(2) as f64,
            DType::U8 => random.below(16) as f64,
            DType::I4 | DType::I8 => random.below(16) as f64 - 8.0,
            _ => 0.0,
        }
    }
}

fn probabilities(count: i64, random: &mut Random) -> Vec<f64> {
    let weights: Vec<f64> = (0..count).map(|_| 0.05 + random.unit()).collect();
    let total: f64 = weights.iter().sum();
    weights.iter().map(|w| w / total).collect()
}

/// Random numbers that are a function of the seed: SplitMix64.
pub struct Random(u64);

impl Random {
    /// The numbers of a seed.
    pub fn new(seed: u64) -> Random {
        Random(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    /// Uniform in [0, 1).
    pub fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Uniform in `0..limit`; 0 when there is nothing to choose from.
    pub fn below(&mut self, limit: i64) -> i64 {
        (self.unit() * limit.max(1) as f64) as i64
    }

    /// Close to normal with variance 1, and never beyond ±3.5: a sum of four uniform numbers.
    pub fn normal(&mut self) -> f64 {
        ((0..4).map(|_| self.unit()).sum::<f64>() - 2.0) * 3f64.sqrt()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filled(meaning: Meaning, shape: &[i64]) -> Vec<i64> {
        let mut bytes = vec![0; DType::I32.bytes_for(shape.iter().product::<i64>() as usize)];
        let strides = row_major(shape);
        let mut view = TensorViewMut::strided(DType::I32, shape, &strides, 0, &mut bytes).unwrap();
        Filler { dtype: DType::I32, shape, meaning }.fill(&mut view, &mut Random::new(3));
        bytes.chunks(4).map(|word| i64::from(i32::from_le_bytes(word.try_into().unwrap()))).collect()
    }

    #[test]
    fn rows_begin_alike_and_end_as_they_will() {
        let pages = filled(Meaning::Alike(1000, 2), &[3, 4]);
        let rows: Vec<&[i64]> = pages.chunks(4).collect();
        assert!(rows[0][..2] == rows[1][..2] && rows[0][..2] == rows[2][..2], "{rows:?}");
        assert!(rows[0][2..] != rows[1][2..] && rows[1][2..] != rows[2][2..], "{rows:?}");
        assert!(pages.iter().all(|page| (0..1000).contains(page)));
    }

    #[test]
    fn no_length_is_less_than_the_least() {
        for (most, least) in [(64, 50), (64, 64), (64, 1), (1, 1)] {
            let lengths = filled(Meaning::LengthFrom(most, least), &[200]);
            assert!(lengths.iter().all(|n| (least..=most).contains(n)), "{least}..{most}: {lengths:?}");
        }
    }
}
