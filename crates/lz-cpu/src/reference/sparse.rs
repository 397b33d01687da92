//! Block-sparse attention.

use lz_model::{KernelArgs, KernelError, Layout, TensorView, TensorViewMut};

use super::Reference;
use super::arguments::Arguments;
use super::indices::{bad_data, read_index, read_segments};
use super::matrix::Matrix;
use super::softmax::{Scoring, weighted_sum, weights};

/// Blocks of one size, listed as block compressed rows.
pub struct Block;

/// Blocks of many sizes, by a mask per key/value head.
pub struct VariableBlock;

/// What both need: tensors in the order head, position, element.
struct Heads<'t> {
    query: TensorView<'t>,
    key: TensorView<'t>,
    value: TensorView<'t>,
    kv_heads: i64,
    group: i64,
    seq_q: i64,
    seq_k: i64,
    head_dim: i64,
    scoring: Scoring,
}

impl<'t> Heads<'t> {
    fn of(args: &KernelArgs<'_, 't>, order: &[usize]) -> Heads<'t> {
        let [query, key, value] = ["query", "key", "value"].map(|name| args.tensor(name).permuted(order));
        let [heads, kv_heads, head_dim] = ["heads", "kv_heads", "head_dim"].map(|name| args.dim(name));
        Heads {
            query,
            key,
            value,
            kv_heads,
            group: heads / kv_heads.max(1),
            seq_q: args.dim("seq_q"),
            seq_k: args.dim("seq_k"),
            head_dim,
            scoring: Scoring::of(args, head_dim),
        }
    }

    /// Attention where `may` allows key/value head, query and key.
    fn attend(&self, may: impl Fn(i64, i64, usize) -> bool, mut output: TensorViewMut<'_>) {
        for kv in 0..self.kv_heads {
            let keys = Matrix::gather(self.seq_k, self.head_dim, |j, d| self.key.get(&[kv, j, d]));
            let values = Matrix::gather(self.seq_k, self.head_dim, |j, d| self.value.get(&[kv, j, d]));
            for (h, i) in (kv * self.group..(kv + 1) * self.group).flat_map(|h| (0..self.seq_q).map(move |i| (h, i))) {
                let query: Vec<f64> = (0..self.head_dim).map(|d| self.query.get(&[h, i, d])).collect();
                let weights = weights(&query, &keys, self.scoring, |j| may(kv, i, j).then_some(0.0));
                for (d, x) in weighted_sum(&weights, &values).into_iter().enumerate() {
                    output.set(&[h, i, d as i64], x);
                }
            }
        }
    }
}

impl Reference for Block {
    const OPS: &'static [&'static str] = &["attention.sparse.block"];

    fn run(args: &mut KernelArgs<'_, '_>) -> Result<(), KernelError> {
        const ORDER: [usize; 3] = [1, 0, 2];
        let heads = Heads::of(args, &ORDER);
        let [block_rows, block_cols] = ["block_rows", "block_cols"].map(|name| args.dim(name).max(1));
        let indices = args.tensor("indices");
        let col_blocks = heads.seq_k / block_cols;
        // For each block row, which block columns are listed.
        let mut listed: Vec<Vec<bool>> = Vec::new();
        for segment in read_segments(&args.tensor("indptr"), "indptr", indices.shape()[0])? {
            let mut columns = vec![false; col_blocks as usize];
            for at in segment {
                columns[read_index(&indices, "indices", &[at], col_blocks)? as usize] = true;
            }
            listed.push(columns);
        }
        let may = |_, i: i64, j: usize| listed[(i / block_rows) as usize][j / block_cols as usize];
        heads.attend(may, args.outputs[0].view_mut().into_permuted(&ORDER));
        Ok(())
    }
}

impl Reference for VariableBlock {
    const OPS: &'static [&'static str] = &["attention.sparse.variable_block"];

    fn run(args: &mut KernelArgs<'_, '_>) -> Result<(), KernelError> {
        let order = if args.layout("query") == Layout::Nhd { [1, 0, 2] } else { [0, 1, 2] };
        let heads = Heads::of(args, &order);
        let mask = args.tensor("block_mask");
        let (row_sizes, col_sizes) = (args.tensor("block_row_sizes"), args.tensor("block_col_sizes"));
        let kv_heads = 0..heads.kv_heads;
        let of_rows = kv_heads.clone().map(|kv| block_of_each(&row_sizes, "block_row_sizes", kv, heads.seq_q));
        let of_rows: Vec<Vec<i64>> = of_rows.collect::<Result<_, _>>()?;
        let of_cols = kv_heads.map(|kv| block_of_each(&col_sizes, "block_col_sizes", kv, heads.seq_k));
        let of_cols: Vec<Vec<i64>> = of_cols.collect::<Result<_, _>>()?;
        let may = |kv: i64, i: i64, j: usize| match (of_rows[kv as usize].get(i as usize), of_cols[kv as usize].get(j))
        {
            (Some(&row), Some(&col)) => mask.get(&[kv, row, col]) != 0.0,
            _ => false,
        };
        heads.attend(may, args.outputs[0].view_mut().into_permuted(&order));
        Ok(())
    }
}

/// The block of each position, from the sizes of a head's blocks. Positions behind the last block
/// are in none, and so are not listed.
fn block_of_each(
    sizes: &TensorView<'_>,
    input: &'static str,
    kv_head: i64,
    positions: i64,
) -> Result<Vec<i64>, KernelError> {
    let mut blocks = Vec::new();
    for block in 0..sizes.shape()[1] {
        let size = sizes.get_int(&[kv_head, block]);
        let left = positions - blocks.len() as i64;
        if !(0..=left).contains(&size) {
            return Err(bad_data(
                input,
                &[kv_head, block],
                size,
                format!("expected 0 to {left}, the positions that are left"),
            ));
        }
        blocks.extend((0..size).map(|_| block));
    }
    Ok(blocks)
}

#[cfg(test)]
mod tests {
    use crate::{CallRefError, call};
    use lz_model::{DType, Layout, ParamValue, Tensor};

    fn ints(shape: &[i64], values: &[i64]) -> Tensor {
        Tensor::from_ints(DType::I32, shape, values)
    }

    /// Zero scores: a query gives the mean of the values it attends to.
    fn block(indptr: &[i64], indices: &[i64]) -> Result<Vec<f64>, CallRefError> {
        let zeros = Tensor::zeros(DType::F64, &[4, 1, 1]);
        let values = Tensor::from_f64(DType::F64, &[4, 1, 1], &[0., 2., 10., 30.]);
        let (indptr, indices) = (ints(&[indptr.len() as i64], indptr), ints(&[indices.len() as i64], indices));
        let inputs = [
            ("query", zeros.view()),
            ("key", zeros.view()),
            ("value", values.view()),
            ("indptr", indptr.view()),
            ("indices", indices.view()),
        ];
        let params = [("R", ParamValue::Int(2)), ("C", ParamValue::Int(2))];
        Ok(call("attention.sparse.block", &inputs, &params, None)?[0].1.to_f64())
    }

    #[test]
    fn only_listed_blocks_are_attended_to() {
        assert_eq!(block(&[0, 1, 3], &[1, 0, 1]).unwrap(), [20., 20., 10.5, 10.5]);
        assert_eq!(block(&[0, 0, 1], &[0]).unwrap(), [0., 0., 1., 1.]);
        assert!(matches!(block(&[0, 1, 1], &[2]), Err(CallRefError::Kernel(e)) if e.is_callers_fault()));
        assert!(matches!(block(&[0, 1, 4], &[0]), Err(CallRefError::Kernel(e)) if e.is_callers_fault()));
    }

    #[test]
    fn blocks_of_many_sizes() {
        let run = |row_sizes: [i64; 2]| {
            let zeros = Tensor::zeros(DType::F64, &[1, 3, 1]);
            let values = Tensor::from_f64(DType::F64, &[1, 3, 1], &[1., 3., 11.]);
            let mask = Tensor::from_f64(DType::Bool, &[1, 2, 2], &[1., 0., 1., 1.]);
            let (rows, cols) = (ints(&[1, 2], &row_sizes), ints(&[1, 2], &[2, 1]));
            let inputs = [
                ("query", zeros.view()),
                ("key", zeros.view()),
                ("value", values.view()),
                ("block_mask", mask.view()),
                ("block_row_sizes", rows.view()),
                ("block_col_sizes", cols.view()),
            ];
            Ok::<_, CallRefError>(
                call("attention.sparse.variable_block", &inputs, &[], Some(Layout::Hnd))?[0].1.to_f64(),
            )
        };
        assert_eq!(run([1, 2]).unwrap(), [2., 5., 5.]);
        assert_eq!(run([1, 1]).unwrap(), [2., 5., 0.]);
        for bad in [[1, 3], [-1, 2], [i64::from(i32::MAX), 1]] {
            assert!(matches!(run(bad), Err(CallRefError::Kernel(e)) if e.is_callers_fault()));
        }
    }
}
