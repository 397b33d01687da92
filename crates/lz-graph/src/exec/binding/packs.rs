//! Weights as products read them: packed once, shared by every plan.
//!
//! The blocks are those of `lz.pack`: 32 outputs side by side for each feature of the input, two features for bfloat16, eight
//! for integers of 4 bits.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Arc, Mutex, PoisonError};

use half::{bf16, f16};
use lz_abi::{
    Arena, Args, DType, Extents, NotASlice, Param, Scalar, Storage, Tensor, TensorRef, TensorViewMut, Workspace,
};
use lz_cpu::primitives::{InstructionSet, Primitive};
use lz_model::ops::mlp::{PACKED_GROUPS, PACKED_ROWS};

use super::rounded::{self, Rounded};

/// The numbers that weights of linear layers are made of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Weights {
    /// Those of the model.
    #[default]
    AsTheyAre,
    /// bfloat16, for inputs in float32.
    Bfloat16,
    /// Integers of 8 bits with a scale for each output.
    Int8,
    /// Integers of 4 bits with a scale for each 64 inputs of an output.
    Int4,
}

impl Weights {
    /// All of them, by name.
    pub const NAMES: [(&str, Weights); 4] = [
        ("float32", Weights::AsTheyAre),
        ("bfloat16", Weights::Bfloat16),
        ("int8", Weights::Int8),
        ("int4", Weights::Int4),
    ];
}

/// The memory of a constant, whether it is (in, out), and what is made of it. Two constants of the same memory are one.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Key {
    address: usize,
    dtype: DType,
    shape: Extents,
    strides: Extents,
    transposed: bool,
    /// The element type of what is made.
    made: DType,
}

impl Key {
    fn of(constant: &Arc<dyn Storage>, transposed: bool, made: DType) -> Key {
        let view = constant.view();
        let (address, dtype) = (view.as_ref().address(), view.dtype());
        Key { address, dtype, shape: view.shape().into(), strides: view.strides().into(), transposed, made }
    }
}

/// What was made of constants, each kept so that its memory is not used for another.
type Made<T> = Mutex<HashMap<Key, (Arc<dyn Storage>, T)>>;

/// Packed weights, by the constant they were made of.
#[derive(Default)]
pub struct Packs {
    weights: Weights,
    blocks: Made<Arc<dyn Storage>>,
    integers: Made<Rounded>,
    /// Row-major copies of constants that lie otherwise.
    copies: Made<Arc<dyn Storage>>,
    /// The same in bfloat16.
    halves: Made<Arc<dyn Storage>>,
    bands: Mutex<HashMap<Band, Arc<dyn Storage>>>,
}

/// Queries and keys, how many keys the first query is behind the first key, whether it is causal, and the keys of a window.
type Band = ([i64; 2], i64, bool, Option<i64>);

/// Bands that are kept though no plan uses them: a plan asks for each of its bands several times while it is made.
const MOST_UNUSED_BANDS: usize = 16;

/// What was made of a constant, or is made now.
fn made<T: Clone>(
    of: &Made<T>,
    constant: &Arc<dyn Storage>,
    (transposed, dtype): (bool, DType),
    make: impl FnOnce() -> Option<T>,
) -> Option<T> {
    let mut known = of.lock().unwrap_or_else(PoisonError::into_inner);
    let key = Key::of(constant, transposed, dtype);
    if let Some((_, found)) = known.get(&key) {
        return Some(found.clone());
    }
    let found = make()?;
    known.insert(key, (constant.clone(), found.clone()));
    Some(found)
}

fn bytes_of(storage: &Arc<dyn Storage>) -> usize {
    storage.view().dtype().bytes_for(storage.view().len())
}

impl Packs {
    /// None yet, of such numbers.
    pub fn of(weights: Weights) -> Packs {
        Packs { weights, ..Packs::default() }
    }

    /// The numbers that weights are made of.
    pub fn weights(&self) -> Weights {
        self.weights
    }

    /// Bytes of all packed weights and copies.
    pub fn bytes(&self) -> usize {
        let bands = self.bands.lock().unwrap_or_else(PoisonError::into_inner).values().map(bytes_of).sum::<usize>();
        let total = |of: &Made<Arc<dyn Storage>>| {
            of.lock().unwrap_or_else(PoisonError::into_inner).values().map(|(_, one)| bytes_of(one)).sum::<usize>()
        };
        let integers = self.integers.lock().unwrap_or_else(PoisonError::into_inner);
        let rounded = integers.values().map(|(_, one)| bytes_of(&one.blocks) + bytes_of(&one.scales)).sum::<usize>();
        bands + rounded + [&self.blocks, &self.copies, &self.halves].into_iter().map(total).sum::<usize>()
    }

    /// Bytes of the constants that weights were packed of.
    pub fn source_bytes(&self) -> usize {
        let blocks = self.blocks.lock().unwrap_or_else(PoisonError::into_inner);
        let integers = self.integers.lock().unwrap_or_else(PoisonError::into_inner);
        blocks.values().map(|(source, _)| source).chain(integers.values().map(|(source, _)| source)).map(bytes_of).sum()
    }

    /// A constant that lies row-major at an address its elements may have: itself, or a copy.
    pub fn laid(&self, constant: &Arc<dyn Storage>) -> Arc<dyn Storage> {
        if constant.view().is_contiguous() { self.aligned(constant) } else { self.copied(constant) }
    }

    /// A constant at an address its elements may have: itself, or a row-major copy.
    pub fn aligned(&self, constant: &Arc<dyn Storage>) -> Arc<dyn Storage> {
        let (address, align) = (constant.view().as_ref().address(), constant.view().dtype().align());
        if address.is_multiple_of(align) { constant.clone() } else { self.copied(constant) }
    }

    fn copied(&self, constant: &Arc<dyn Storage>) -> Arc<dyn Storage> {
        let copy = || Some(Arc::new(constant.view().to_tensor()) as Arc<dyn Storage>);
        let dtype = constant.view().dtype();
        made(&self.copies, constant, (false, dtype), copy).unwrap_or_else(|| constant.clone())
    }

    /// The packed form of a constant matrix: (out, in), or (in, out) if `transposed`. `None` if it cannot be packed.
    pub(in crate::exec) fn packed(
        &self,
        constant: &Arc<dyn Storage>,
        transposed: bool,
        instructions: InstructionSet,
    ) -> Option<Arc<dyn Storage>> {
        made(&self.blocks, constant, (transposed, constant.view().dtype()), || {
            let view = constant.view();
            let view = if transposed { view.permuted(&[1, 0]) } else { view };
            let blocks = match view.dtype() {
                DType::F32 => return Some(Arc::new(packed_floats(view.as_ref(), instructions)?)),
                DType::F16 => pack::<f16>(view.as_ref(), 1),
                DType::Bf16 => pack::<bf16>(view.as_ref(), 2),
                _ => return None,
            };
            Some(Arc::new(blocks.ok()?))
        })
    }

    /// The same, rounded to bfloat16.
    pub(in crate::exec) fn packed_halves(
        &self,
        constant: &Arc<dyn Storage>,
        transposed: bool,
    ) -> Option<Arc<dyn Storage>> {
        if constant.view().dtype() != DType::F32 {
            return None;
        }
        made(&self.blocks, constant, (transposed, DType::Bf16), || {
            let view = constant.view();
            let view = if transposed { view.permuted(&[1, 0]) } else { view };
            let blocks = pack_as::<f32, bf16>(view.as_ref(), DType::Bf16, 2, bf16::from_f32);
            Some(Arc::new(blocks.ok()?))
        })
    }

    /// A constant in bfloat16.
    pub(super) fn halved(&self, constant: &Arc<dyn Storage>) -> Arc<dyn Storage> {
        let cast = || Some(Arc::new(constant.view().cast(DType::Bf16)) as Arc<dyn Storage>);
        made(&self.halves, constant, (false, DType::Bf16), cast).unwrap_or_else(|| constant.clone())
    }

    /// Which keys count for which queries, as truth values: where query `i` is at key `i + shift`, those up to it if `causal`, and
    /// so many before it if there is a window.
    pub(super) fn band(&self, sizes: [i64; 2], shift: i64, causal: bool, window: Option<i64>) -> Arc<dyn Storage> {
        let mut known = self.bands.lock().unwrap_or_else(PoisonError::into_inner);
        let make = || -> Arc<dyn Storage> {
            let counts = |i: i64, j: i64| {
                let ahead = j - i - shift;
                !(causal && ahead > 0 || window.is_some_and(|before| -ahead > before))
            };
            let [queries, keys] = sizes;
            let kept = (0..queries).flat_map(|i| (0..keys).map(move |j| i64::from(counts(i, j))));
            Arc::new(Tensor::from_ints(DType::Bool, &sizes, &kept.collect::<Vec<_>>()))
        };
        if known.len() >= MOST_UNUSED_BANDS {
            known.retain(|_, band| Arc::strong_count(band) > 1);
        }
        known.entry((sizes, shift, causal, window)).or_insert_with(make).clone()
    }

    /// A constant matrix as integers with scales: (out, in), or (in, out) if `transposed`. `None` if it cannot be rounded.
    pub(super) fn rounded(&self, constant: &Arc<dyn Storage>, transposed: bool) -> Option<Rounded> {
        made(&self.integers, constant, (transposed, constant.view().dtype()), || {
            let view = constant.view();
            let view = if transposed { view.permuted(&[1, 0]) } else { view };
            match view.dtype() {
                DType::F32 => rounded::round::<f32>(view.as_ref(), self.weights),
                DType::F16 => rounded::round::<f16>(view.as_ref(), self.weights),
                DType::Bf16 => rounded::round::<bf16>(view.as_ref(), self.weights),
                _ => None,
            }
        })
    }
}

/// The blocks of a weight in float32 (out, in), made by all threads.
fn packed_floats(weight: TensorRef<'_>, instructions: InstructionSet) -> Option<Tensor> {
    let (outs, ins) = (weight.shape()[0], weight.shape()[1]);
    let (panels, width) = ((outs + PACKED_ROWS - 1) / PACKED_ROWS, PACKED_ROWS);
    let mut memory = Arena::try_new(DType::F32.bytes_for((panels * ins * width) as usize))?;
    {
        let mut blocks = TensorViewMut::contiguous(DType::F32, &[panels, ins, width], memory.bytes_mut()).ok()?;
        let (mut outputs, params, mut workspace) = ([blocks.as_mut()], [Param::Bool(true)], Workspace::none());
        let inputs = [weight];
        let args = Args::new(&inputs, &mut outputs, &params, &[], &mut workspace);
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        Primitive::Pack.run_on(instructions, &mut args.with_threads(lz_cpu::threads(threads))).ok()?;
    }
    Tensor::in_memory(DType::F32, &[panels, ins, width, 1], memory)
}

/// The blocks of a weight (out, in), with so many features side by side.
fn pack<T: Scalar>(weight: TensorRef<'_>, side: usize) -> Result<Tensor, NotASlice> {
    pack_as::<T, T>(weight, weight.dtype(), side, |number| number)
}

/// The same of other numbers.
fn pack_as<T: Scalar, U: Scalar>(
    weight: TensorRef<'_>,
    dtype: DType,
    side: usize,
    number: impl Fn(T) -> U,
) -> Result<Tensor, NotASlice> {
    let (outs, ins) = (weight.shape()[0] as usize, weight.shape()[1] as usize);
    let width = PACKED_ROWS as usize;
    let whole = if side == 1 { 1 } else { PACKED_GROUPS as usize };
    let groups = ins.div_ceil(side).next_multiple_of(whole);
    let panels = outs.div_ceil(width);
    let mut blocks = Tensor::zeros(dtype, &[panels as i64, groups as i64, width as i64, side as i64]);
    let place = |n: usize, k: usize| ((n / width * groups + k / side) * width + n % width) * side + k % side;
    {
        let mut view = blocks.view_mut();
        let mut target = view.as_mut();
        let target = target.as_slice::<U>()?;
        each::<T>(&weight, |n, k, found| target[place(n, k)] = number(found))?;
    }
    Ok(blocks)
}

/// Calls a function with each output, input and number of a weight (out, in), in the order of its memory.
pub(super) fn each<T: Scalar>(weight: &TensorRef<'_>, mut take: impl FnMut(usize, usize, T)) -> Result<(), NotASlice> {
    // Along the axis whose elements follow each other.
    let (source, by_input) = match weight.strides() {
        [1, _] => (weight.view().permuted(&[1, 0]), true),
        _ => (weight.view(), false),
    };
    let source = source.as_ref();
    let rows = source.rows::<T>()?;
    for row in 0..rows.count() {
        for (column, &number) in rows.get(row).iter().enumerate() {
            if by_input { take(column, row, number) } else { take(row, column, number) }
        }
    }
    Ok(())
}
