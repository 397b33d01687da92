//! Attention of many queries: which calls it takes, which thread computes what, and where results go. `tile` says what a
//! tile is, and where its arithmetic is.

pub mod amx;
pub mod bf16;
pub mod dot_bf16;
mod mask;
mod products;
mod softmax;
mod tile;
pub mod varlen;
mod widened;

use std::cell::Cell;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use lz_abi::TensorRef;
use lz_model::{
    DType, DTypeSet, DimRule, InputRule, KernelArgs, KernelDescriptor, KernelError, Layout, Op, ParamRule, Preferred,
    Scalar,
};

use self::mask::{Mask, MaskBias};
use self::tile::{Bounds, Path, ROWS, Scratch, Tile, WIDEST};
use self::widened::Widened;
use super::half_floats::Narrow;
use super::{FLOATS, Isa, check, describe, floats, with_float};
use crate::kernel::NativeKernel;
use crate::reference::arguments::Arguments;
use crate::reference::reach::Reach;

/// The kernel, for an instruction set.
pub struct Prefill<I>(PhantomData<I>);

/// Below torch's fused kernel (60), which multiplies bfloat16 by instructions for it where a CPU has them; above its unfused ones (40).
const PRIORITY: i32 = 50;
/// Above torch's fused kernel, which computes a good part of what is behind the causal bound, and masks windows: in float32 it takes
/// 1.2 to 2.1 times as long with AVX-512 and 1.04 to 1.4 times with AVX2; with a window, 1.6 to 4.8 times.
const AHEAD: (&str, i32) = ("query.dtype == 'float32' and (causal or window_left >= 0)", 65);

thread_local! {
    /// Memory of this thread's tiles.
    static SCRATCH: Cell<Scratch> = Cell::default();
}

impl<I: Isa> NativeKernel for Prefill<I> {
    const OPS: &'static [&'static str] =
        &["attention.standard.prefill", "attention.gqa.prefill", "attention.cross.prefill"];

    fn descriptor(op: &'static Op) -> KernelDescriptor {
        let cross = op.id() == "attention.cross.prefill";
        let preferred = (!cross && !I::FEATURES.is_empty())
            .then(|| Preferred { when: AHEAD.0.into(), priority: AHEAD.1 + I::PRIORITY });
        KernelDescriptor { preferred, ..takes_masks(described::<I>(op, PRIORITY)) }
    }

    fn run(args: &mut KernelArgs<'_, '_>) -> Result<(), KernelError> {
        with_float!(given(args, "query")?.dtype(), T => dense::<Widened<I>, T>(args))
    }
}

/// A kernel that takes masks too.
fn takes_masks(mut described: KernelDescriptor) -> KernelDescriptor {
    let masks = DTypeSet::of(&[DType::Bool, DType::F32, DType::F16, DType::Bf16]);
    described.inputs.insert("attn_mask".into(), InputRule { dtypes: Some(masks), ..InputRule::default() });
    described
}

/// A number for a call.
fn number_of_call() -> u64 {
    static CALLS: AtomicU64 = AtomicU64::new(0);
    CALLS.fetch_add(1, Ordering::Relaxed)
}

/// What attention of many queries takes, in one tensor or packed.
fn described<I: Isa>(op: &'static Op, priority: i32) -> KernelDescriptor {
    let mut described = describe::<I>(op, op.id(), priority);
    // What it does not read, it does not take.
    for name in ["attn_mask", "alibi_slopes", "sinks"] {
        described.inputs.remove(name);
    }
    described.inputs.extend(floats(&["query", "key", "value"]));
    if described.params.contains_key("dropout_p") {
        let none = ParamRule { one_of: Some(vec![Scalar::Float(0.0)]), ..ParamRule::default() };
        described.params.insert("dropout_p".into(), none);
    }
    let fits = DimRule { min: Some(1), max: Some(WIDEST as i64), ..DimRule::default() };
    for name in ["head_dim", "v_dim"] {
        described.dims.insert(name.into(), fits.clone());
    }
    KernelDescriptor { dtypes: FLOATS, requires_last_dim_stride1: true, ..described }
}

fn given<'t>(args: &KernelArgs<'_, 't>, name: &str) -> Result<TensorRef<'t>, KernelError> {
    args.input(name).ok_or_else(|| KernelError::Failed(format!("no {name}")))
}

/// How products become scores.
#[derive(Clone, Copy)]
struct Scoring {
    pub scale: f32,
    /// 0 is none.
    pub softcap: f32,
}

impl Scoring {
    /// What the call says.
    pub fn of(args: &KernelArgs<'_, '_>) -> Scoring {
        let usual = 1.0 / (args.dim("head_dim").max(1) as f64).sqrt();
        let cap = args.float_or("softcap", 0.0);
        Scoring {
            scale: args.param("scale").as_float().unwrap_or(usual) as f32,
            // A cap that float32 does not hold is still one.
            softcap: if cap > 0.0 { (cap as f32).max(f32::MIN_POSITIVE) } else { 0.0 },
        }
    }
}

impl Bounds {
    /// Of queries at positions among so many keys.
    pub fn new(reach: Reach, keys: i64, count: usize, position: impl Fn(usize) -> i64) -> Bounds {
        let mut bounds = Bounds { first: [0; ROWS], last: [-1; ROWS] };
        for lane in 0..count {
            let position = position(lane);
            let last = if reach.causal { position } else { i64::MAX };
            let right = if reach.right >= 0 { position.saturating_add(reach.right) } else { i64::MAX };
            bounds.first[lane] = reach.first_key(position).min(keys) as i32;
            bounds.last[lane] = last.min(right).min(keys - 1).max(-1) as i32;
        }
        bounds
    }
}

/// How the queries of a sequence that share a key/value head are cut into tiles: of one head each, or, if a head has few, of several.
#[derive(Clone, Copy)]
struct Cut {
    queries: usize,
    /// Queries of one head, or of all.
    run: usize,
    /// Tiles of a run, and how many queries each has.
    tiles: usize,
    each: usize,
}

impl Cut {
    pub fn new(queries: usize, group: usize) -> Cut {
        let run = if queries < ROWS { queries * group } else { queries };
        let tiles = run.div_ceil(ROWS).max(1);
        // Even tiles, of whole vectors.
        Cut { queries, run, tiles, each: run.div_ceil(tiles).next_multiple_of(16) }
    }

    /// How many tiles there are of `group` heads.
    pub fn count(self, group: usize) -> usize {
        (self.queries * group).div_ceil(self.run.max(1)) * self.tiles
    }

    /// How many queries a tile has, and the head and place of the first of them, counted through the heads.
    pub fn tile(self, number: usize) -> (usize, usize) {
        let (run, tile) = (number / self.tiles, number % self.tiles);
        let first = (tile * self.each).min(self.run);
        ((self.run - first).min(self.each), run * self.run + first)
    }

    /// The head within its group and the place of a query.
    pub fn place(self, query: usize) -> (usize, usize) {
        (query / self.queries, query % self.queries)
    }
}

/// Rows of a result, which several threads write.
struct Target<T> {
    start: *mut T,
    len: usize,
    width: usize,
}

// SAFETY: `row` is only asked for rows that no other thread writes.
#[allow(unsafe_code)]
unsafe impl<T: Send> Sync for Target<T> {}

impl<T: Narrow> Target<T> {
    pub fn new(output: &mut [T], width: usize) -> Target<T> {
        Target { start: output.as_mut_ptr(), len: output.len(), width }
    }

    /// Writes a row, rounded.
    ///
    /// # Safety
    /// The slice is borrowed, and nobody else writes this row.
    #[allow(unsafe_code)]
    #[inline(always)]
    pub unsafe fn write(&self, row: usize, numbers: &[f32]) {
        assert!((row + 1) * self.width <= self.len, "row {row} of {}", self.len / self.width.max(1));
        // SAFETY: it is inside the slice, and the caller's alone.
        T::narrow(numbers, unsafe { std::slice::from_raw_parts_mut(self.start.add(row * self.width), self.width) });
    }
}

/// Runs a function once for each of so many items, on threads that each take the next. The last are the longest of a causal call,
/// and are taken first.
fn each_item(args: &KernelArgs<'_, '_>, items: usize, operations: f64, run: impl Fn(usize, &mut Scratch) + Sync) {
    /// Below so many multiplications, about 10 µs, one thread does all.
    const ONE_THREAD: f64 = 400_000.0;
    let threads = args.args.threads();
    let (next, parts) = (AtomicUsize::new(0), if operations < ONE_THREAD { 1 } else { threads.count().min(items) });
    threads.each(parts, |_| {
        let mut scratch = SCRATCH.take();
        loop {
            let item = next.fetch_add(1, Ordering::Relaxed);
            if item >= items {
                break;
            }
            run(items - 1 - item, &mut scratch);
        }
        SCRATCH.set(scratch);
    });
}

fn dense<P: Path<T>, T: Narrow>(args: &mut KernelArgs<'_, '_>) -> Result<(), KernelError> {
    check::<P::Isa>()?;
    let [query, key, value] = [given(args, "query")?, given(args, "key")?, given(args, "value")?];
    let (queries, keys, values) = (query.rows::<T>()?, key.rows::<T>()?, value.rows::<T>()?);
    let [batch, heads, kv_heads, seq_q, v_dim, head_dim] =
        ["batch", "heads", "kv_heads", "seq_q", "v_dim", "head_dim"].map(|name| args.dim(name) as usize);
    let (tokens, reach, scoring) = (args.dim("seq_k"), Reach::of(args), Scoring::of(args));
    let mask = Mask::of(if args.op().input_index("attn_mask").is_some() { args.input("attn_mask") } else { None })?;
    let heads_first = args.layout("query") == Layout::Bhsd;
    let output = args.args.outputs[0].as_slice::<T>()?;
    if output.is_empty() {
        return Ok(());
    }
    if tokens == 0 {
        T::narrow(&vec![0.0; output.len()], output);
        return Ok(());
    }
    let target = Target::new(output, v_dim);
    let group = heads / kv_heads.max(1);
    let cut = Cut::new(seq_q, group);
    let (tiles, offset) = (cut.count(group), tokens - seq_q as i64);
    let row = |b: usize, head: usize, i: usize| {
        if heads_first { (b * heads + head) * seq_q + i } else { (b * seq_q + i) * heads + head }
    };
    let operations = (batch * heads * seq_q * (head_dim + v_dim)) as f64 * tokens as f64;
    let call = number_of_call();
    each_item(args, batch * kv_heads * tiles, operations, |item, scratch| {
        let (b, kv_head, tile) = (item / tiles / kv_heads, item / tiles % kv_heads, item % tiles);
        let (count, first) = cut.tile(tile);
        // The batch, the head and the place of a lane's query.
        let at = |lane: usize| {
            let (head, i) = cut.place(first + lane);
            [b, kv_head * group + head, i]
        };
        let none: &[T] = &[];
        let mut rows = [none; ROWS];
        for (lane, to) in rows.iter_mut().enumerate().take(count) {
            let [b, head, i] = at(lane);
            *to = queries.get(row(b, head, i));
        }
        let bounds = Bounds::new(reach, tokens, count, |lane| at(lane)[2] as i64 + offset);
        let (axis, of) = if heads_first { (2, [b, kv_head, 0]) } else { (1, [b, 0, kv_head]) };
        let tile = Tile {
            queries: &rows[..count],
            keys: keys.along(axis, &of),
            values: values.along(axis, &of),
            start: 0,
            count: tokens as usize,
            head: (call, item / tiles),
            bounds: &bounds,
            bias: MaskBias::new(mask, count, at),
            scale: scoring.scale,
            softcap: scoring.softcap,
            v_dim,
        };
        P::attend(tile, scratch, &mut |lane, numbers| {
            let [b, head, i] = at(lane);
            // SAFETY: every query is in one tile, and every tile is one item.
            #[allow(unsafe_code)]
            unsafe {
                target.write(row(b, head, i), numbers);
            }
        });
    });
    Ok(())
}

#[cfg(test)]
mod tests;
