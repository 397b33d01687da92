//! Writes new keys and values into their slots: one copy for each head of each token.

use lz_abi::{TensorMut, TensorRef};
use lz_model::{KernelArgs, KernelDescriptor, KernelError, KvStrategy, Layout, Op};

use super::half_floats::Narrow;
use super::{BLOCK, FLOATS, Portable, describe, floats, with_float};
use crate::kernel::NativeKernel;
use crate::reference::kv_cache::slots;

/// The kernel. It moves memory, which every instruction set does alike.
pub struct KvAppend;

/// The places of its arguments in the schema, and of the caches among the results.
const NEW: [usize; 2] = [0, 1];
const SLOTS: usize = 4;
const CACHES: [usize; 2] = [0, 1];

impl NativeKernel for KvAppend {
    const OPS: &'static [&'static str] = &["kv_cache.append"];

    fn descriptor(op: &'static Op) -> KernelDescriptor {
        let reference = describe::<Portable>(op, "kv_append", 55);
        let mut inputs = reference.inputs.clone();
        inputs.extend(floats(&["key", "value", "key_cache", "value_cache"]));
        KernelDescriptor {
            dtypes: FLOATS,
            inputs,
            kv_strategies: vec![KvStrategy::Contiguous, KvStrategy::Paged],
            requires_last_dim_stride1: true,
            // Above torch's kernels (35 to 50): it copies each head once, where plain torch checks and sorts the slots by operators.
            ..reference
        }
    }

    fn run(args: &mut KernelArgs<'_, '_>) -> Result<(), KernelError> {
        let [num_blocks, block_size] = ["num_blocks", "block_size"].map(|name| args.dim(name));
        let mapping = args.args.input(SLOTS).ok_or_else(|| KernelError::Failed("no slots".into()))?;
        let slots = slots(mapping, num_blocks.saturating_mul(block_size))?;
        let heads_first = args.layout("key_cache") == Layout::Hnd;
        for (new, cache) in NEW.into_iter().zip(CACHES) {
            let new = args.args.input(new).ok_or_else(|| KernelError::Failed("no input".into()))?;
            let cache = &mut args.args.outputs[cache];
            let place = Place { block_size, heads_first };
            if new.dtype() == cache.dtype() {
                with_float!(new.dtype(), T => append(new, cache, slots.clone(), place, <[T]>::copy_from_slice))?;
            } else {
                with_float!(new.dtype(), T => with_float!(cache.dtype(), U => append(new, cache, slots.clone(), place, round::<T, U>)))?;
            }
        }
        Ok(())
    }
}

/// Where a slot is in a cache.
#[derive(Clone, Copy)]
struct Place {
    block_size: i64,
    heads_first: bool,
}

impl Place {
    /// Of the row of a slot and a head.
    fn of(self, slot: i64, head: i64) -> [i64; 3] {
        let (page, within) = (slot / self.block_size, slot % self.block_size);
        if self.heads_first { [page, head, within] } else { [page, within, head] }
    }
}

/// Copies tokens to their slots, in order, so that of several for one slot the last one stays.
fn append<T: Narrow, U: Narrow>(
    new: TensorRef<'_>,
    cache: &mut TensorMut<'_>,
    slots: impl Iterator<Item = (i64, i64)>,
    place: Place,
    store: impl Fn(&mut [U], &[T]),
) -> Result<(), KernelError> {
    let (rows, heads) = (new.rows::<T>()?, new.shape()[1]);
    if rows.count() == 0 {
        return Ok(());
    }
    for (token, slot) in slots {
        for head in 0..heads {
            store(cache.row::<U>(&place.of(slot, head))?, rows.get((token * heads + head) as usize));
        }
    }
    Ok(())
}

/// Rounds a row to another dtype.
fn round<T: Narrow, U: Narrow>(to: &mut [U], from: &[T]) {
    let mut wide = [0f32; BLOCK];
    for (from, to) in from.chunks(BLOCK).zip(to.chunks_mut(BLOCK)) {
        let wide = &mut wide[..from.len()];
        T::widen(from, wide);
        U::narrow(wide, to);
    }
}

#[cfg(test)]
mod tests {
    use super::super::checking::{Agreement, drawn, strided};
    use lz_model::{DType, Layout, Tensor};
    use proptest::prelude::*;

    fn float() -> impl Strategy<Value = DType> {
        prop_oneof![Just(DType::F32), Just(DType::F16), Just(DType::Bf16)]
    }

    proptest! {
        #[test]
        fn it_gives_what_the_reference_gives(
            layout in prop_oneof![Just(Layout::Nhd), Just(Layout::Hnd)],
            (pages, size, heads, head_dim) in (1i64..4, 1i64..5, 1i64..4, prop_oneof![1i64..9, 255i64..260]),
            (dtype, cache) in (float(), float()),
            slots in proptest::collection::vec(-2i64..4, 0..9),
            (gap, seed) in (0i64..3, any::<u64>()),
        ) {
            let tokens = slots.len() as i64;
            let new = [seed, seed + 1].map(|seed| drawn(dtype, &[tokens, heads, head_dim + gap], seed));
            let shape = if layout == Layout::Hnd { [pages, heads, size, head_dim] } else { [pages, size, heads, head_dim] };
            let caches = [seed + 2, seed + 3].map(|seed| drawn(cache, &shape, seed));
            let slots: Vec<i64> = slots.into_iter().map(|slot| slot.min(pages * size - 1)).collect();
            let slots = Tensor::from_ints(DType::I64, &[tokens], &slots);
            let inputs = [
                ("key", strided(&new[0], &[tokens, heads, head_dim])),
                ("value", strided(&new[1], &[tokens, heads, head_dim])),
                ("key_cache", caches[0].view()),
                ("value_cache", caches[1].view()),
                ("slot_mapping", slots.view()),
            ];
            Agreement::of("kv_cache.append", "lz_cpu.kv_append").check(&inputs, &[], Some(layout));
        }
    }

    #[test]
    fn a_slot_beyond_the_cache_is_the_callers_mistake() {
        let (new, cache) = (drawn(DType::F32, &[2, 1, 4], 1), drawn(DType::F32, &[2, 2, 1, 4], 2));
        let slots = Tensor::from_ints(DType::I64, &[2], &[0, 4]);
        let inputs = [
            ("key", new.view()),
            ("value", new.view()),
            ("key_cache", cache.view()),
            ("value_cache", cache.view()),
            ("slot_mapping", slots.view()),
        ];
        let error = Agreement::of("kv_cache.append", "lz_cpu.kv_append").fails(&inputs, &[], Some(Layout::Nhd));
        assert_eq!(error, "slot_mapping[1] is 4, but the cache has 4 slots");
    }
}
