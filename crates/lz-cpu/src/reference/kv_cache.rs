//! Upkeep of a paged key/value cache.

use lz_abi::TensorRef;
use lz_model::{KernelArgs, KernelError, Layout, TensorMut, indices};

use super::Reference;
use super::arguments::Arguments;
use super::indices::{bad_data, read_index};

/// Writes new keys and values.
pub struct Append;

/// Moves pages.
pub struct Compact;

/// Where the updated caches stand among the outputs of both operations.
const CACHES: [usize; 2] = [0, 1];

impl Reference for Append {
    const OPS: &'static [&'static str] = &["kv_cache.append"];

    fn run(args: &mut KernelArgs<'_, '_>) -> Result<(), KernelError> {
        let new = [args.tensor("key"), args.tensor("value")];
        let [num_blocks, block_size] = ["num_blocks", "block_size"].map(|name| args.dim(name));
        let mapping = args.tensor("slot_mapping");
        let slots = slots(mapping.as_ref(), num_blocks.saturating_mul(block_size))?;
        // In the order page, slot, head, element.
        let order = if args.layout("key_cache") == Layout::Hnd { [0, 2, 1, 3] } else { [0, 1, 2, 3] };
        for (which, new) in CACHES.into_iter().zip(new) {
            let mut cache = args.outputs[which].view_mut().into_permuted(&order);
            for (token, slot) in slots.clone() {
                for at in indices(&new.shape()[1..]) {
                    cache.set(&[slot / block_size, slot % block_size, at[0], at[1]], new.get(&[token, at[0], at[1]]));
                }
            }
        }
        Ok(())
    }
}

/// The tokens that have a slot, with it. All slots are checked first.
pub(crate) fn slots<'a>(
    mapping: TensorRef<'a>,
    capacity: i64,
) -> Result<impl Iterator<Item = (i64, i64)> + Clone + 'a, KernelError> {
    let tokens = mapping.shape()[0];
    let all = (0..tokens).map(move |token| (token, mapping.get_int(&[token])));
    if let Some((token, slot)) = all.clone().find(|(_, slot)| *slot >= capacity) {
        return Err(bad_data("slot_mapping", &[token], slot, format!("but the cache has {capacity} slots")));
    }
    Ok(all.filter(|(_, slot)| *slot >= 0))
}

impl Reference for Compact {
    const OPS: &'static [&'static str] = &["kv_cache.compact"];

    fn run(args: &mut KernelArgs<'_, '_>) -> Result<(), KernelError> {
        let (moves, num_blocks) = (args.tensor("moves"), args.dim("num_blocks"));
        let page = |i: i64, end: i64| read_index(&moves, "moves", &[i, end], num_blocks);
        let moves: Vec<(i64, i64)> =
            (0..moves.shape()[0]).map(|i| Ok((page(i, 0)?, page(i, 1)?))).collect::<Result<_, KernelError>>()?;
        for which in CACHES {
            let cache = &mut args.outputs[which];
            let sources: Vec<Vec<f64>> = moves.iter().map(|&(from, _)| read_page(cache, from)).collect();
            for (&(_, to), numbers) in moves.iter().zip(sources) {
                write_page(cache, to, &numbers);
            }
        }
        Ok(())
    }
}

fn read_page(cache: &TensorMut<'_>, page: i64) -> Vec<f64> {
    indices(&cache.shape()[1..]).map(|at| cache.get(&[page, at[0], at[1], at[2]])).collect()
}

fn write_page(cache: &mut TensorMut<'_>, page: i64, numbers: &[f64]) {
    for (at, &x) in indices(&cache.shape()[1..]).zip(numbers) {
        cache.set(&[page, at[0], at[1], at[2]], x);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{CallRefError, call};
    use lz_model::{Arena, BindRules, Call, Catalog, Context, DType, DeviceIx, HostCall, Tensor, TensorMeta, Threads};

    fn append(slots: &[i64], layout: Layout, cache: &[i64; 4]) -> Result<Vec<Tensor>, CallRefError> {
        let tokens = slots.len() as i64;
        let values: Vec<f64> = (1..=tokens * 2).map(|i| i as f64).collect();
        let key = Tensor::from_f64(DType::F32, &[tokens, 2, 1], &values);
        let value = Tensor::from_f64(DType::F32, &[tokens, 2, 1], &values.iter().map(|v| v * 10.0).collect::<Vec<_>>());
        let cache = Tensor::zeros(DType::F16, cache);
        let slots = Tensor::from_ints(DType::I64, &[tokens], slots);
        let inputs = [
            ("key", key.view()),
            ("value", value.view()),
            ("key_cache", cache.view()),
            ("value_cache", cache.view()),
            ("slot_mapping", slots.view()),
        ];
        Ok(call("kv_cache.append", &inputs, &[], Some(layout))?.into_iter().map(|(_, tensor)| tensor).collect())
    }

    #[test]
    fn tokens_land_in_their_slots_in_either_layout() {
        // Slot 3 is slot 1 of page 1; padding is skipped; the later of two tokens wins.
        let nhd = append(&[3, -1, 0, 0], Layout::Nhd, &[2, 2, 2, 1]).unwrap();
        assert_eq!(nhd[0].to_f64(), [7., 8., 0., 0., 0., 0., 1., 2.]);
        assert_eq!(nhd[1].to_f64(), [70., 80., 0., 0., 0., 0., 10., 20.]);
        let hnd = append(&[3, -1, 0, 0], Layout::Hnd, &[2, 2, 2, 1]).unwrap();
        assert_eq!(hnd[0].to_f64(), [7., 0., 8., 0., 0., 1., 0., 2.]);
    }

    #[test]
    fn a_slot_beyond_the_cache_is_an_error() {
        for bad in [4, i64::from(i32::MAX)] {
            assert!(
                matches!(append(&[0, bad], Layout::Nhd, &[2, 2, 2, 1]), Err(CallRefError::Kernel(e)) if e.is_callers_fault())
            );
        }
        assert!(append(&[-1], Layout::Nhd, &[0, 2, 2, 1]).is_ok());
        assert!(append(&[0], Layout::Nhd, &[2, 0, 2, 1]).is_err());
    }

    fn compact(moves: &[i64]) -> Result<Vec<f64>, CallRefError> {
        let cache = Tensor::from_f64(DType::F32, &[3, 2, 1, 1], &[0., 1., 10., 11., 20., 21.]);
        let moves = Tensor::from_ints(DType::I32, &[moves.len() as i64 / 2, 2], moves);
        let inputs = [("key_cache", cache.view()), ("value_cache", cache.view()), ("moves", moves.view())];
        let out = call("kv_cache.compact", &inputs, &[], None)?;
        assert_eq!(out[0].1, out[1].1);
        Ok(out[0].1.to_f64())
    }

    #[test]
    fn pages_move_all_at_once() {
        assert_eq!(compact(&[2, 0]).unwrap(), [20., 21., 10., 11., 20., 21.]);
        assert_eq!(compact(&[0, 1, 1, 0]).unwrap(), [10., 11., 0., 1., 20., 21.]);
        assert_eq!(compact(&[]).unwrap(), [0., 1., 10., 11., 20., 21.]);
        for bad in [[0, 3], [-1, 0]] {
            assert!(matches!(compact(&bad), Err(CallRefError::Kernel(e)) if e.is_callers_fault()));
        }
    }

    #[test]
    fn nothing_is_written_when_a_later_slot_is_wrong() {
        let new = Tensor::from_f64(DType::F32, &[2, 1, 1], &[1., 2.]);
        let mut caches = [Tensor::zeros(DType::F32, &[1, 1, 1, 1]), Tensor::zeros(DType::F32, &[1, 1, 1, 1])];
        let slots = Tensor::from_ints(DType::I32, &[2], &[0, 9]);
        let op = Catalog::get().ops().iter().find(|op| op.id() == "kv_cache.append").unwrap();
        let bound = {
            let views = [&new, &new, &caches[0], &caches[1], &slots].map(Tensor::view);
            let metas: Vec<_> = views.iter().map(|view| Some(TensorMeta::of(view.as_ref()))).collect();
            let call =
                Call { inputs: &metas, params: &[], layout: None, device: DeviceIx(0), context: Context::default() };
            op.bind(&call, &BindRules::default()).unwrap()
        };
        let inputs = [Some(new.view()), Some(new.view()), None, None, Some(slots.view())];
        let mut outputs: Vec<_> = caches.iter_mut().map(Tensor::view_mut).collect();
        let call = HostCall { query: &bound.query, inputs: &inputs, params: &[], outputs: &mut outputs };
        let run = <Append as Reference>::run;
        assert!(call.run((&mut Arena::default(), 0), Threads::ONE, run).is_err());
        drop(outputs);
        assert!(caches.iter().all(|cache| cache.to_f64() == [0.0]));
    }
}
