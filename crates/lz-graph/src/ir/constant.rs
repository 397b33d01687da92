//! Values that are known before a call: weights, masks, numbers.

use std::fmt;
use std::sync::Arc;

pub use lz_abi::Storage;
use lz_abi::{DType, Tensor, TensorView};

/// A value that is known before a call. Clones share its memory.
#[derive(Clone)]
pub struct Constant {
    storage: Arc<dyn Storage>,
    name: Arc<str>,
}

impl Constant {
    /// A weight by its name in the model, in memory of somebody else.
    pub fn new(name: &str, storage: Arc<dyn Storage>) -> Constant {
        Constant { storage, name: name.into() }
    }

    /// A tensor of its own.
    pub fn owned(name: &str, tensor: Tensor) -> Constant {
        Constant::new(name, Arc::new(tensor))
    }

    /// One number, without dimensions.
    pub fn number(name: &str, dtype: DType, number: f64) -> Constant {
        Constant::owned(name, Tensor::from_f64(dtype, &[], &[number]))
    }

    /// The same memory under another name.
    pub fn renamed(self, name: &str) -> Constant {
        Constant { name: name.into(), ..self }
    }

    /// Its memory.
    pub fn storage(&self) -> &Arc<dyn Storage> {
        &self.storage
    }

    /// Its name in the model.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its elements.
    pub fn view(&self) -> TensorView<'_> {
        self.storage.view()
    }

    /// Its number, if it has one element.
    pub fn scalar(&self) -> Option<f64> {
        let view = self.view();
        (view.len() == 1).then(|| view.get(&vec![0; view.shape().len()]))
    }

    /// Whether both are the same memory.
    pub fn is(&self, other: &Constant) -> bool {
        Arc::ptr_eq(&self.storage, &other.storage)
    }
}

impl fmt::Debug for Constant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let view = self.view();
        write!(f, "{}: {}{:?}", self.name, view.dtype(), view.shape())
    }
}
