//! Rows of a table by index: one copy each.

use lz_abi::{Args, TensorRef};
use lz_model::{KernelArgs, KernelDescriptor, KernelError, Op};

use super::half_floats::Narrow;
use super::{FLOATS, Portable, describe, floats, rows_per_thread, with_float};
use crate::kernel::NativeKernel;
use crate::reference::indices::read_index;
use crate::reference::rows::unravel;

/// The kernel. It moves memory, which every instruction set does alike.
pub struct Lookup;

/// The places of its arguments in the schema.
const INDICES: usize = 0;
const WEIGHT: usize = 1;

impl NativeKernel for Lookup {
    const OPS: &'static [&'static str] = &["embedding.lookup"];

    fn descriptor(op: &'static Op) -> KernelDescriptor {
        let reference = describe::<Portable>(op, "embedding", 55);
        let mut inputs = reference.inputs.clone();
        inputs.extend(floats(&["weight"]));
        KernelDescriptor { dtypes: FLOATS, inputs, requires_last_dim_stride1: true, ..reference }
    }

    fn run(args: &mut KernelArgs<'_, '_>) -> Result<(), KernelError> {
        let args = &mut args.args;
        let (indices, weight) =
            args.input(INDICES).zip(args.input(WEIGHT)).ok_or_else(|| KernelError::Failed("no input".into()))?;
        with_float!(weight.dtype(), T => run::<T>(args, indices, weight))
    }
}

fn run<T: Narrow>(args: &mut Args<'_, '_>, indices: TensorRef<'_>, weight: TensorRef<'_>) -> Result<(), KernelError> {
    let (rows, limit, threads) = (weight.rows::<T>()?, weight.shape()[0], args.threads());
    let index = Index::of(indices);
    for at in 0..indices.len() {
        if !(0..limit).contains(&index.get(at)) {
            // The error names the place.
            read_index(&indices.view(), "indices", &unravel(at as i64, indices.shape()), limit)?;
        }
    }
    let output = args.outputs[0].as_slice::<T>()?;
    if output.is_empty() {
        return Ok(());
    }
    let per_part = rows_per_thread(indices.len(), size_of_val(output), threads.count());
    threads.each_chunk(output, per_part * rows.len(), |part, output| {
        for (i, output) in output.chunks_exact_mut(rows.len()).enumerate() {
            output.copy_from_slice(rows.get(index.get(part * per_part + i) as usize));
        }
    });
    Ok(())
}

/// Indices in row-major order.
#[derive(Clone, Copy)]
enum Index<'a> {
    I64(&'a [i64]),
    I32(&'a [i32]),
    /// With gaps between them.
    Apart(TensorRef<'a>),
}

impl<'a> Index<'a> {
    fn of(indices: TensorRef<'a>) -> Index<'a> {
        match (indices.as_slice(), indices.as_slice()) {
            (Ok(all), _) => Index::I64(all),
            (_, Ok(all)) => Index::I32(all),
            _ => Index::Apart(indices),
        }
    }

    fn get(self, at: usize) -> i64 {
        match self {
            Index::I64(all) => all[at],
            Index::I32(all) => i64::from(all[at]),
            Index::Apart(all) => all.get_int(&unravel(at as i64, all.shape())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::checking::{Agreement, drawn, strided};
    use lz_model::{DType, Tensor};
    use proptest::prelude::*;

    fn agreement() -> Agreement {
        Agreement::of("embedding.lookup", "lz_cpu.embedding").exactly()
    }

    proptest! {
        #[test]
        fn it_gives_what_the_reference_gives(
            ids in proptest::collection::vec((0i64..7, 0i64..7), 0..9),
            (hidden, gap) in (0i64..70, 0i64..3),
            dtype in prop_oneof![Just(DType::F32), Just(DType::F16), Just(DType::Bf16)],
            (wide, apart, seed) in (any::<bool>(), any::<bool>(), any::<u64>()),
        ) {
            let table = drawn(dtype, &[7, hidden + gap], seed);
            let n = ids.len() as i64;
            let ids: Vec<i64> = ids.into_iter().flat_map(|(a, b)| [a, b]).collect();
            let ids = Tensor::from_ints(if wide { DType::I64 } else { DType::I32 }, &[n, 2], &ids);
            let turned = ids.view().permuted(&[1, 0]);
            let ids = if apart { turned } else { ids.view() };
            agreement().check(&[("indices", ids), ("weight", strided(&table, &[7, hidden]))], &[], None);
        }
    }

    #[test]
    fn many_rows_are_shared_among_threads() {
        let ids: Vec<i64> = (0..300).map(|i| i * 7 % 50).collect();
        let (ids, table) = (Tensor::from_ints(DType::I64, &[300], &ids), drawn(DType::F32, &[50, 257], 1));
        agreement().check(&[("indices", ids.view()), ("weight", table.view())], &[], None);
    }

    #[test]
    fn an_index_beyond_the_table_is_the_callers_mistake() {
        let table = drawn(DType::F32, &[3, 2], 1);
        for bad in [3, -1] {
            let ids = Tensor::from_ints(DType::I32, &[2, 2], &[0, 1, bad, 2]);
            let error = agreement().fails(&[("indices", ids.view()), ("weight", table.view())], &[], None);
            assert_eq!(error, format!("indices[1, 0] is {bad}, expected an index from 0 to below 3"));
        }
    }
}
