//! Attention of float64: `softmax(scale · q·kᵀ + mask)·v` for each head.
//!
//! | | |
//! |---|---|
//! | input 0 | q `[batch, heads, queries, width]`, float64 |
//! | input 1 | k `[batch, kv heads, keys, width]`, float64; heads are a multiple of kv heads, and those of a group share one |
//! | input 2 | v `[batch, kv heads, keys, value width]`, float64 |
//! | input 3 | a mask of at most four axes that is broadcast to `[batch, heads, queries, keys]`: bool, or float64 that is added; may be absent |
//! | output 0 | `[batch, heads, queries, value width]`, float64, of any strides |
//! | param 0 | the key at which the first query is; 0 by default |
//! | param 1 | whether keys after a query do not count; false by default |
//! | param 2 | how many keys before a query count; all by default |
//! | param 3 | scale; 1/√width by default |
//! | param 4 | softcap: `c · tanh(score / c)` in the place of each score; none by default |
//!
//! A query without any key gives 0, and a key without weight adds nothing, whatever its value is.
//!
//! Loops over the queries of a task count lanes: indices into arrays of one length, which the compiler turns into vectors.
//!
//! A task is [`PANEL`] queries of a head, which are the columns of two products: of keys and queries, and of values and weights. Keys are
//! read in blocks; what came before a block is scaled down where the block has a larger score.

#![allow(clippy::needless_range_loop)] // see above: lanes

use std::ops::Range;

use lz_abi::{Args, DType, KernelError, Param, TensorRef};

use super::super::matmul::{Products, tasks};
use super::super::{Kernel, Meta, param, wrong};
use super::tile::{PANEL, Strided, multiply};
use crate::simd::{Work, exp64};

/// Keys of a block.
const KEYS: usize = 64;
/// Multiplications below which one thread does all: about 5 µs of one core.
const ONE_THREAD: usize = 1 << 16;

/// A number for each query of a task.
type Lanes = [f64; PANEL];

/// Four axes at an address.
#[derive(Clone, Copy)]
struct Four {
    start: *const u8,
    strides: [isize; 4],
}

// SAFETY: an address; who uses it vouches for it.
unsafe impl Send for Four {}
// SAFETY: as above.
unsafe impl Sync for Four {}

impl Four {
    /// Of a tensor that is broadcast to a shape.
    fn of(tensor: &TensorRef<'_>, shape: [usize; 4]) -> Result<Four, KernelError> {
        let (sizes, steps) = (tensor.shape(), tensor.strides());
        let mut strides = [0; 4];
        let skipped = 4usize.checked_sub(sizes.len());
        let fits = skipped.is_some_and(|skipped| {
            sizes.iter().zip(steps).zip(skipped..).all(|((&size, &step), axis)| {
                strides[axis] = if size == 1 { 0 } else { step as isize };
                size == 1 || size == shape[axis] as i64
            })
        });
        if !fits {
            return wrong(format!("{tensor:?} does not broadcast to {shape:?}"));
        }
        Ok(Four { start: tensor.raw().start(), strides })
    }

    /// The address of an element.
    #[inline(always)]
    fn at<T>(&self, index: [usize; 4]) -> *const T {
        let mut place = 0;
        for axis in 0..4 {
            place += index[axis] as isize * self.strides[axis];
        }
        self.start.cast::<T>().wrapping_offset(place)
    }
}

/// Which scores count.
#[derive(Clone, Copy)]
enum Mask {
    None,
    Bool(Four),
    Added(Four),
}

/// A call.
#[derive(Clone, Copy)]
struct Call {
    heads: usize,
    group: usize,
    queries: usize,
    keys: usize,
    width: usize,
    v_width: usize,
    q: Four,
    k: Four,
    v: Four,
    out: Four,
    mask: Mask,
    shift: i64,
    causal: bool,
    window: Option<i64>,
    scale: f64,
    softcap: Option<f64>,
}

impl Call {
    /// The keys that count for a query.
    fn reach(&self, query: usize) -> Range<usize> {
        let position = query as i64 + self.shift;
        let end = if self.causal { position.saturating_add(1) } else { i64::MAX };
        let first = self.window.map_or(0, |before| position.saturating_sub(before));
        let [first, end] = [first, end].map(|key| key.clamp(0, self.keys as i64) as usize);
        first..end.max(first)
    }
}

fn bind(args: &Args<'_, '_>) -> Result<(Call, usize), KernelError> {
    let (Some(q), Some(k), Some(v)) = (args.input(0), args.input(1), args.input(2)) else {
        return wrong("attention needs queries, keys and values");
    };
    let out = &args.outputs[0];
    let sizes = |shape: &[i64]| <[i64; 4]>::try_from(shape).ok().map(|shape| shape.map(|n| n as usize));
    let four = || Some((sizes(q.shape())?, sizes(k.shape())?, sizes(v.shape())?, sizes(out.shape())?));
    let Some((of_q, of_k, of_v, of_out)) = four() else { return wrong("attention takes tensors of four axes") };
    let [batch, heads, queries, width] = of_q;
    let [_, shared, keys, _] = of_k;
    let v_width = of_v[3];
    let fits = of_k == [batch, shared, keys, width]
        && of_v == [batch, shared, keys, v_width]
        && of_out == [batch, heads, queries, v_width]
        && (heads == 0 || shared > 0 && heads.is_multiple_of(shared));
    let doubles = [q.dtype(), k.dtype(), v.dtype(), out.dtype()].iter().all(|&dtype| dtype == DType::F64);
    if !fits || !doubles {
        return wrong(format!("attention of {q:?}, {k:?} and {v:?} does not give {out:?}"));
    }
    let mask = match args.input(3) {
        None => Mask::None,
        Some(mask) => {
            let of = Four::of(&mask, [batch, heads, queries, keys])?;
            match mask.dtype() {
                DType::Bool => Mask::Bool(of),
                DType::F64 => Mask::Added(of),
                other => return wrong(format!("attention of float64 takes no mask of {other}")),
            }
        }
    };
    let out = Four { start: out.raw().start(), strides: std::array::from_fn(|i| out.strides()[i] as isize) };
    let float = |at: usize| param(args, at).as_float();
    let call = Call {
        heads,
        group: heads / shared.max(1),
        queries,
        keys,
        width,
        v_width,
        q: Four::of(&q, of_q)?,
        k: Four::of(&k, of_k)?,
        v: Four::of(&v, of_v)?,
        out,
        mask,
        shift: param(args, 0).as_int().unwrap_or(0),
        causal: param(args, 1).as_bool().unwrap_or(false),
        window: param(args, 2).as_int(),
        scale: float(3).unwrap_or(1.0 / (width as f64).sqrt()),
        softcap: float(4),
    };
    Ok((call, batch))
}

/// Rows of [`PANEL`] numbers of one thread's scratch memory: queries, scores, sums of values.
fn rows(width: usize, v_width: usize) -> [usize; 3] {
    [width, KEYS, v_width]
}

/// The primitive.
pub struct Attention;

impl Kernel for Attention {
    fn run<I: Products>(args: &mut Args<'_, '_>) -> Result<(), KernelError> {
        let (call, batch) = bind(args)?;
        let threads = args.threads();
        let tiles = call.queries.div_ceil(PANEL);
        let tasks = if call.v_width == 0 { 0 } else { batch * call.heads * tiles };
        let work = tasks.saturating_mul(PANEL * (call.width + call.v_width)).saturating_mul(call.keys);
        let workers = if work < ONE_THREAD { 1 } else { threads.count() }.min(tasks);
        let slot: usize = rows(call.width, call.v_width).iter().sum::<usize>() * PANEL;
        let memory = args.workspace().take::<f64>(slot * workers)?;
        tasks::each(threads, workers, (memory, slot), tasks, |task, memory| {
            // The last queries of a causal call have the most keys, and go first.
            let task = tasks - 1 - task;
            let (tile, at) = (task % tiles, task / tiles);
            let queries = tile * PANEL..((tile + 1) * PANEL).min(call.queries);
            let tile = Tile::<I> {
                call,
                batch: at / call.heads,
                head: at % call.heads,
                queries,
                memory: memory.as_chunks_mut::<PANEL>().0,
                set: std::marker::PhantomData,
            };
            // SAFETY: `run_on` says that the CPU has the instructions. No other task has these queries of this head.
            unsafe { I::call(tile) };
        });
        Ok(())
    }

    fn scratch(inputs: &[Option<Meta<'_>>], _: &[Param], threads: usize) -> usize {
        let last =
            |at: usize| inputs.get(at).copied().flatten().and_then(|meta| meta.shape.last().copied()).unwrap_or(0);
        let rows: usize = rows(last(0) as usize, last(2) as usize).iter().sum();
        rows * PANEL * size_of::<f64>() * threads.max(1)
    }
}

/// A task.
struct Tile<'a, I> {
    call: Call,
    batch: usize,
    head: usize,
    queries: Range<usize>,
    memory: &'a mut [Lanes],
    set: std::marker::PhantomData<I>,
}

impl<I: Products> Work for Tile<'_, I> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        match I::FUSED {
            true => self.attend::<true>(),
            false => self.attend::<false>(),
        }
    }
}

impl<I: Products> Tile<'_, I> {
    #[inline(always)]
    fn attend<const FUSED: bool>(self) {
        let Tile { call, batch, head, queries, memory, .. } = self;
        let (columns, memory) = memory.split_at_mut(call.width);
        let (scores, sums) = memory.split_at_mut(KEYS);
        let sums = &mut sums[..call.v_width];
        let kv_head = head / call.group;
        for (d, column) in columns.iter_mut().enumerate() {
            *column = [0.0; PANEL];
            for (to, i) in column.iter_mut().zip(queries.clone()) {
                // SAFETY: an element of q.
                *to = unsafe { *call.q.at::<f64>([batch, head, i, d]) };
            }
        }
        sums.fill([0.0; PANEL]);
        // The keys of each query; of lanes behind the last one none.
        let (mut starts, mut ends) = ([0; PANEL], [0; PANEL]);
        let (mut begin, mut end) = (usize::MAX, 0);
        for (lane, i) in queries.clone().enumerate() {
            let reach = call.reach(i);
            (starts[lane], ends[lane]) = (reach.start, reach.end);
            if !reach.is_empty() {
                (begin, end) = (begin.min(reach.start), end.max(reach.end));
            }
        }
        let (mut most, mut total) = ([f64::NEG_INFINITY; PANEL], [0.0; PANEL]);
        for first in (begin.min(end)..end).step_by(KEYS) {
            let count = KEYS.min(end - first);
            let scores = &mut scores[..count];
            let keys = Strided {
                start: call.k.at([batch, kv_head, first, 0]),
                row: call.k.strides[2],
                step: call.k.strides[3],
            };
            // SAFETY: this runs with the instructions of `I`; k has these rows, and there is a column for each of their elements.
            unsafe { multiply::<I>(keys, (columns.as_ptr().cast(), PANEL as isize), call.width, scores, false) };
            score(&call, [batch, head], &queries, (&starts, &ends), first, scores);
            let mut larger = most;
            for row in &*scores {
                for lane in 0..PANEL {
                    larger[lane] = if row[lane] > larger[lane] { row[lane] } else { larger[lane] };
                }
            }
            let mut less = [0.0; PANEL];
            for lane in 0..PANEL {
                less[lane] =
                    if most[lane] == larger[lane] { 1.0 } else { exp64::exactly::<FUSED>(most[lane] - larger[lane]) };
                total[lane] *= less[lane];
            }
            most = larger;
            for row in &mut *scores {
                for lane in 0..PANEL {
                    let weight = exp64::exactly::<FUSED>(row[lane] - most[lane]);
                    row[lane] = if row[lane] == f64::NEG_INFINITY { 0.0 } else { weight };
                    total[lane] += row[lane];
                }
            }
            if less != [1.0; PANEL] {
                for sums in &mut *sums {
                    for lane in 0..PANEL {
                        sums[lane] *= less[lane];
                    }
                }
            }
            let (start, [.., down, across]) = (call.v.at([batch, kv_head, first, 0]), call.v.strides);
            let values = Strided { start, row: across, step: down };
            // SAFETY: this runs with the instructions of `I`; v has these rows.
            unsafe {
                if all_finite(values, call.v_width, count) {
                    multiply::<I>(values, (scores.as_ptr().cast(), PANEL as isize), count, sums, true);
                } else {
                    for (d, sums) in sums.iter_mut().enumerate() {
                        for (j, weights) in scores.iter().enumerate() {
                            let value = *values.at(d, j).start;
                            let used = sums.iter_mut().zip(weights).filter(|(_, weight)| **weight != 0.0);
                            used.for_each(|(sum, weight)| *sum += weight * value);
                        }
                    }
                }
            }
        }
        for (lane, i) in queries.enumerate() {
            for (d, sums) in sums.iter().enumerate() {
                let found = if total[lane] == 0.0 { 0.0 } else { sums[lane] / total[lane] };
                // SAFETY: an element of the output, which no other task has.
                unsafe { call.out.at::<f64>([batch, head, i, d]).cast_mut().write(found) };
            }
        }
    }
}

/// Makes products scores: scaled, capped, masked, and minus infinity where a key does not count.
#[inline(always)]
fn score(
    call: &Call,
    [batch, head]: [usize; 2],
    queries: &Range<usize>,
    (starts, ends): (&[usize; PANEL], &[usize; PANEL]),
    first: usize,
    scores: &mut [Lanes],
) {
    for (key, row) in (first..).zip(scores) {
        for lane in 0..PANEL {
            row[lane] *= call.scale;
        }
        if let Some(cap) = call.softcap {
            row.iter_mut().for_each(|score| *score = cap * (*score / cap).tanh());
        }
        // SAFETY: elements of the mask.
        match &call.mask {
            Mask::None => {}
            Mask::Bool(mask) => row.iter_mut().zip(queries.clone()).for_each(|(score, i)| unsafe {
                if *mask.at::<u8>([batch, head, i, key]) == 0 {
                    *score = f64::NEG_INFINITY;
                }
            }),
            Mask::Added(mask) => row.iter_mut().zip(queries.clone()).for_each(|(score, i)| unsafe {
                let added = *mask.at::<f64>([batch, head, i, key]);
                // The key does not count, even if the score is NaN.
                *score = if added == f64::NEG_INFINITY { added } else { *score + added };
            }),
        }
        for lane in 0..PANEL {
            let counts = starts[lane] <= key && key < ends[lane];
            row[lane] = if counts { row[lane] } else { f64::NEG_INFINITY };
        }
    }
}

/// Whether no number of a block of values is infinite or NaN: such ones times a weight of 0 are not 0.
///
/// # Safety
/// So many numbers are there.
#[inline(always)]
unsafe fn all_finite(values: Strided, width: usize, count: usize) -> bool {
    // 0 times a finite number is 0, and of others it is NaN.
    let mut sum = 0.0;
    for j in 0..count {
        let row = values.at(0, j);
        // SAFETY: the caller's.
        unsafe {
            if row.row == 1 {
                let row = std::slice::from_raw_parts(row.start, width);
                let mut lanes = [0f64; 8];
                let (groups, rest) = row.as_chunks::<8>();
                for group in groups {
                    for lane in 0..8 {
                        lanes[lane] += 0.0 * group[lane];
                    }
                }
                for x in rest {
                    lanes[0] += 0.0 * x;
                }
                for lane in lanes {
                    sum += lane;
                }
            } else {
                for d in 0..width {
                    sum += 0.0 * *row.at(d, 0).start;
                }
            }
        }
    }
    sum == 0.0
}

#[cfg(test)]
mod tests {
    use lz_abi::{Tensor, TensorView};
    use proptest::prelude::*;

    use super::super::super::Primitive;
    use super::super::super::checking::{agree, drawn, results};
    use super::*;

    /// Element by element, as the definition has it.
    fn expected(inputs: &[Option<TensorView<'_>>], call: &Reach, softcap: Option<f64>) -> Vec<f64> {
        let [q, k, v] = [0, 1, 2].map(|at| inputs[at].as_ref().unwrap());
        let mask = inputs[3].as_ref();
        let (heads, shared, keys, width) = (q.shape()[1], k.shape()[1], k.shape()[2], q.shape()[3]);
        let shape = [q.shape()[0], heads, q.shape()[2], v.shape()[3]];
        lz_abi::indices(&shape)
            .map(|at| {
                let (b, h, i, c) = (at[0], at[1], at[2], at[3]);
                let kv = h / (heads / shared);
                let weights: Vec<f64> = (0..keys)
                    .map(|j| {
                        let ahead = j - i - call.shift;
                        if call.causal && ahead > 0 || call.window.is_some_and(|before| -ahead > before) {
                            return f64::NEG_INFINITY;
                        }
                        let dot: f64 = (0..width).map(|d| q.get(&[b, h, i, d]) * k.get(&[b, kv, j, d])).sum();
                        let score = dot * call.scale;
                        let score = softcap.map_or(score, |cap| cap * (score / cap).tanh());
                        let place = |mask: &TensorView<'_>| {
                            let all = [b, h, i, j];
                            let skipped = 4 - mask.shape().len();
                            let own: Vec<i64> = (skipped..4)
                                .map(|axis| if mask.shape()[axis - skipped] == 1 { 0 } else { all[axis] })
                                .collect();
                            mask.get(&own)
                        };
                        match mask.map(|mask| (mask.dtype(), place(mask))) {
                            None => score,
                            Some((DType::Bool, kept)) => {
                                if kept == 0.0 {
                                    f64::NEG_INFINITY
                                } else {
                                    score
                                }
                            }
                            Some((_, added)) => score + added,
                        }
                    })
                    .collect();
                let most = weights.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                if most == f64::NEG_INFINITY {
                    return 0.0;
                }
                let weights: Vec<f64> = weights.iter().map(|x| (x - most).exp()).collect();
                let used = weights.iter().zip(0..).filter(|(weight, _)| **weight > 0.0);
                used.map(|(weight, j)| weight * v.get(&[b, kv, j, c])).sum::<f64>() / weights.iter().sum::<f64>()
            })
            .collect()
    }

    struct Reach {
        shift: i64,
        causal: bool,
        window: Option<i64>,
        scale: f64,
    }

    /// Heads before tokens.
    fn seen(tokens_first: bool, tensor: &Tensor) -> TensorView<'_> {
        if tokens_first { tensor.view().permuted(&[0, 2, 1, 3]) } else { tensor.view() }
    }

    fn edge() -> impl Strategy<Value = i64> {
        prop_oneof![4 => 0i64..6, 2 => 14i64..19, 1 => 31i64..34, 1 => 62i64..67, 1 => 127i64..131]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(120))]
        #[test]
        fn it_is_its_definition(
            (batch, shared, group) in (0i64..3, 1i64..3, 1i64..3),
            (queries, keys, width, v_width) in (edge(), edge(), 1i64..20, 0i64..20),
            (shift, causal, window) in (-3i64..80, any::<bool>(), prop_oneof![Just(None), (0i64..70).prop_map(Some)]),
            (kind, rank, ones) in (0u8..3, 1usize..5, 0u8..8),
            (tokens_first, softcap, seed) in (any::<bool>(), prop_oneof![Just(None), Just(Some(0.7))], any::<u32>()),
        ) {
            let heads = shared * group;
            let seed = u64::from(seed);
            // Heads before tokens, in memory of either order.
            let laid = |[b, h, t, d]: [i64; 4], seed: u64| {
                drawn(DType::F64, &if tokens_first { [b, t, h, d] } else { [b, h, t, d] }, 1.0, seed)
            };
            let q = laid([batch, heads, queries, width], seed);
            let (k, v) = (laid([batch, shared, keys, width], seed + 1), laid([batch, shared, keys, v_width], seed + 2));
            let shape: Vec<i64> = [batch, heads, queries, keys]
                .into_iter()
                .enumerate()
                .map(|(axis, n)| if axis < 3 && ones >> axis & 1 == 1 { 1 } else { n })
                .skip(4 - rank)
                .collect();
            let numbers = drawn(DType::F64, &shape, 1.0, seed + 3).to_f64();
            let mask = match kind {
                0 => None,
                1 => Some(Tensor::from_f64(DType::Bool, &shape, &numbers.iter().map(|x| f64::from(u8::from(*x > -0.3))).collect::<Vec<_>>())),
                _ => Some(Tensor::from_f64(DType::F64, &shape, &numbers.iter().map(|x| if *x < -0.4 { f64::NEG_INFINITY } else { *x }).collect::<Vec<_>>())),
            };
            let inputs = [Some(seen(tokens_first, &q)), Some(seen(tokens_first, &k)), Some(seen(tokens_first, &v)), mask.as_ref().map(|mask| mask.view())];
            let reach = Reach { shift, causal, window, scale: 0.9 };
            let params = [
                Param::Int(shift),
                Param::Bool(causal),
                window.map_or(Param::None, Param::Int),
                Param::Float(0.9),
                softcap.map_or(Param::None, Param::Float),
            ];
            let wanted = expected(&inputs, &reach, softcap);
            let to = Tensor::from_f64(DType::F64, &[batch, heads, queries, v_width], &vec![-77.0; wanted.len()]);
            for (set, got) in results(Primitive::Attention, &inputs, &params, &to) {
                agree(&format!("{set:?}"), &got, &wanted, 1e-13, 1e-14);
            }
        }
    }

    #[test]
    fn a_value_without_weight_may_be_anything() {
        let (q, k) = (drawn(DType::F64, &[1, 1, 3, 2], 1.0, 1), drawn(DType::F64, &[1, 1, 3, 2], 1.0, 2));
        let v = Tensor::from_f64(DType::F64, &[1, 1, 3, 1], &[2.0, f64::NAN, f64::INFINITY]);
        let to = Tensor::zeros(DType::F64, &[1, 1, 3, 1]);
        let inputs = [Some(q.view()), Some(k.view()), Some(v.view())];
        for (_, got) in results(Primitive::Attention, &inputs, &[Param::Int(0), Param::Bool(true)], &to) {
            let got = got.to_f64();
            assert!(got[0] == 2.0 && got[1].is_nan() && got[2].is_nan(), "{got:?}");
        }
    }
}
