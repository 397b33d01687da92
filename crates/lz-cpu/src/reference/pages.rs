//! Where the tokens of a sequence lie in a paged cache.

use lz_model::{KernelArgs, KernelError, TensorView};

use super::arguments::Arguments;
use super::indices::{bad_data, read_index};

/// The block tables of a call.
pub struct PageTable<'t> {
    block_tables: TensorView<'t>,
    context_lens: TensorView<'t>,
    num_blocks: i64,
    block_size: i64,
}

/// The part of one sequence's context that is read: its tokens `first..len`.
pub struct Context {
    /// The first token that is read.
    pub first: i64,
    /// How many tokens there are.
    pub len: i64,
    block_size: i64,
    pages: Vec<i64>,
}

impl<'t> PageTable<'t> {
    /// The tables of the call.
    pub fn of(args: &KernelArgs<'_, 't>) -> PageTable<'t> {
        PageTable {
            block_tables: args.tensor("block_tables"),
            context_lens: args.tensor("context_lens"),
            num_blocks: args.dim("num_blocks"),
            block_size: args.dim("block_size"),
        }
    }

    /// The context of a sequence. `first` tells, from its length, the first token that is read;
    /// pages before that token and after the last are not looked at.
    pub fn context(&self, sequence: i64, first: impl Fn(i64) -> i64) -> Result<Context, KernelError> {
        let capacity = self.block_tables.shape()[1].saturating_mul(self.block_size);
        let len = self.context_lens.get_int(&[sequence]);
        if !(0..=capacity).contains(&len) {
            let expected = format!("expected 0 to {capacity}, which is what its pages hold");
            return Err(bad_data("context_lens", &[sequence], len, expected));
        }
        let first = first(len).clamp(0, len);
        let mut pages = Vec::new();
        if first < len {
            for page in first / self.block_size..=(len - 1) / self.block_size {
                pages.push(read_index(&self.block_tables, "block_tables", &[sequence, page], self.num_blocks)?);
            }
        }
        Ok(Context { first, len, block_size: self.block_size, pages })
    }
}

impl Context {
    /// How many tokens are read.
    pub fn read(&self) -> i64 {
        self.len - self.first
    }

    /// The page and the slot in it of a token that is read.
    pub fn slot(&self, token: i64) -> (i64, i64) {
        let page = token / self.block_size - self.first / self.block_size;
        (self.pages[page as usize], token % self.block_size)
    }
}
