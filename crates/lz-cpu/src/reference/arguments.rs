//! Reading a call's arguments by name and type.

use lz_model::{KernelArgs, TensorView};

/// Typed access to the arguments of a bound call. Asking for something the schema does not have
/// is a mistake in the kernel, except through the `_or` forms, which serve operations that share
/// code but not every parameter.
pub trait Arguments<'t> {
    /// An input the schema requires.
    fn tensor(&self, name: &str) -> TensorView<'t>;
    /// An input that may be missing from the call, or from the operation.
    fn optional_tensor(&self, name: &str) -> Option<TensorView<'t>>;
    /// A truth value.
    fn flag(&self, name: &str) -> bool;
    /// A truth value, or `otherwise` for an operation without it.
    fn flag_or(&self, name: &str, otherwise: bool) -> bool;
    /// An integer.
    fn int(&self, name: &str) -> i64;
    /// An integer, or `otherwise` for an operation without it.
    fn int_or(&self, name: &str, otherwise: i64) -> i64;
    /// A number.
    fn float(&self, name: &str) -> f64;
    /// A number, or `otherwise` for an operation without it.
    fn float_or(&self, name: &str, otherwise: f64) -> f64;
    /// A name.
    fn text(&self, name: &str) -> &'static str;
}

impl<'t> Arguments<'t> for KernelArgs<'_, 't> {
    fn tensor(&self, name: &str) -> TensorView<'t> {
        self.input(name).unwrap_or_else(|| panic!("{} was bound without '{name}'", self.op().id())).view()
    }

    fn optional_tensor(&self, name: &str) -> Option<TensorView<'t>> {
        self.op().input_index(name)?;
        self.input(name).map(|tensor| tensor.view())
    }

    fn flag(&self, name: &str) -> bool {
        self.param(name).as_bool().unwrap_or_else(|| panic!("'{name}' is no truth value"))
    }

    fn flag_or(&self, name: &str, otherwise: bool) -> bool {
        if self.has_param(name) { self.flag(name) } else { otherwise }
    }

    fn int(&self, name: &str) -> i64 {
        self.param(name).as_int().unwrap_or_else(|| panic!("'{name}' is no integer"))
    }

    fn int_or(&self, name: &str, otherwise: i64) -> i64 {
        if self.has_param(name) { self.int(name) } else { otherwise }
    }

    fn float(&self, name: &str) -> f64 {
        self.param(name).as_float().unwrap_or_else(|| panic!("'{name}' is no number"))
    }

    fn float_or(&self, name: &str, otherwise: f64) -> f64 {
        if self.has_param(name) { self.float(name) } else { otherwise }
    }

    fn text(&self, name: &str) -> &'static str {
        self.param(name).as_str().unwrap_or_else(|| panic!("'{name}' is no name"))
    }
}
