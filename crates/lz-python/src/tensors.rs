//! Tensors as they come from Python: their metadata, and views of host memory.

use layerzero::abi::{Bytes, Device, Element, RawTensor};
use layerzero::model::{DType, DeviceIx, Extents, TensorMeta, TensorView, TensorViewMut, row_major};
use pyo3::intern;
use pyo3::prelude::*;

use crate::params::integers;
use crate::torch::Torch;
use crate::{devices, error};

/// What metadata is read for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// To run the call: addresses matter.
    Run,
    /// To answer a question: the tensor may be fake, and must not be asked for its memory.
    Ask,
}

/// What is known of a tensor argument.
#[derive(Clone, Debug)]
pub struct Meta {
    pub dtype: DType,
    pub shape: Extents,
    pub strides: Option<Extents>,
    pub device: DeviceIx,
    pub aligned: bool,
    pub requires_grad: bool,
    /// Its first element in host memory; null where it has none or it is elsewhere.
    pub data: *mut u8,
}

impl Meta {
    /// As binding takes it.
    pub fn as_meta(&self) -> TensorMeta<'_> {
        TensorMeta {
            dtype: self.dtype,
            shape: &self.shape,
            strides: self.strides.as_deref(),
            device: self.device,
            aligned: self.aligned,
            requires_grad: self.requires_grad,
        }
    }

    /// Of memory on the host that was just made.
    pub fn new_on_host(dtype: DType, shape: Extents, strides: Extents, data: *mut u8) -> Meta {
        let aligned = (data as usize).is_multiple_of(16);
        Meta { dtype, shape, strides: Some(strides), device: DeviceIx(0), aligned, requires_grad: false, data }
    }

    /// Reads a tensor's metadata: through the exchange API where it can, else from its attributes.
    pub fn read(object: &Bound<'_, PyAny>, function: &str, argument: &str, purpose: Purpose) -> PyResult<Meta> {
        let py = object.py();
        let torch = Torch::find(py)?;
        if let Some(torch) = torch.filter(|torch| torch.is_tensor(object)) {
            let grad = torch.surroundings().grad && object.getattr(intern!(py, "requires_grad"))?.is_truthy()?;
            let may_look = purpose == Purpose::Run || torch.is_plain(object.as_ptr());
            if let Some(borrow) = torch.borrow.filter(|_| may_look) {
                let mut tensor = RawTensor::ABSENT;
                // SAFETY: a live tensor, and a struct to fill.
                if unsafe { borrow(object.as_ptr(), &mut tensor) } == 0 {
                    // SAFETY: just filled, and `object` keeps its tensor alive.
                    return unsafe { Meta::of(object, &tensor, grad, function, argument) };
                }
                drop(PyErr::take(py));
            }
            return Meta::from_attributes(object, grad, function, argument);
        }
        Meta::from_attributes(object, false, function, argument)
    }

    /// # Safety
    /// The struct was filled and its tensor is alive.
    unsafe fn of(
        object: &Bound<'_, PyAny>,
        tensor: &RawTensor,
        requires_grad: bool,
        function: &str,
        argument: &str,
    ) -> PyResult<Meta> {
        let py = object.py();
        // 4-bit elements come as packed bytes, and the caller says so.
        let dtype = tensor.element.dtype().filter(|dtype| !dtype.is_sub_byte()).ok_or_else(|| {
            let Element { code, bits, lanes } = tensor.element;
            unknown_dtype(py, function, argument, &format!("DLPack type {code}, {bits} bits, {lanes} lanes"))
        })?;
        let device = device(object, tensor.device, function, argument)?;
        let start = tensor.start();
        // SAFETY: the contract above.
        let (shape, strides) = unsafe { (tensor.shape(), tensor.strides()) };
        Ok(Meta {
            dtype,
            shape: shape.into(),
            strides: strides.map(Into::into),
            device,
            aligned: (start as usize).is_multiple_of(16),
            requires_grad,
            data: if tensor.device.is_host() { start } else { std::ptr::null_mut() },
        })
    }

    /// From `shape`, `dtype`, and, where they are there, `stride()` or `strides`, `device` and the address.
    fn from_attributes(
        object: &Bound<'_, PyAny>,
        requires_grad: bool,
        function: &str,
        argument: &str,
    ) -> PyResult<Meta> {
        let py = object.py();
        let kind = || object.get_type().name().map_or_else(|_| "object".into(), |n| n.to_string());
        if !object.hasattr("shape")? && object.hasattr("__dlpack__")? {
            // A producer without attributes: borrowed by whoever is there.
            let library = if crate::host::torch_is_there(py)? { "torch" } else { "numpy" };
            let borrowed = py.import(library)?.call_method1("from_dlpack", (object,))?;
            return Meta::read(&borrowed, function, argument, Purpose::Ask);
        }
        let Ok(shape) = object.getattr("shape").and_then(|s| integers(&s)) else {
            let text = format!("{function}: '{argument}' is a {}, expected a tensor", kind());
            return Err(error::argument(
                py,
                "NOT_A_TENSOR",
                &text,
                "pass a torch.Tensor, a numpy array or a DLPack producer",
            ));
        };
        if let Ok(layout) = object.getattr("layout").map(|l| l.to_string())
            && layout.starts_with("torch.")
            && layout != "torch.strided"
        {
            let text =
                format!("{function}: '{argument}' is a {layout} tensor; LayerZero works on dense, strided tensors");
            return Err(error::unsupported(py, &text, "convert it with .to_dense(), or pad a nested tensor"));
        }
        let name = object.getattr("dtype")?.str()?.to_string();
        let dtype: DType =
            name.trim_start_matches("torch.").parse().map_err(|_| unknown_dtype(py, function, argument, &name))?;
        let itemsize = (dtype.bits() as i64 / 8).max(1);
        let strides: Option<Vec<i64>> = match object.getattr("stride").ok().filter(|s| s.is_callable()) {
            Some(stride) => Some(integers(&stride.call0()?)?),
            None => {
                let bytes = object.getattr("strides").and_then(|s| integers(&s)).ok();
                if bytes.iter().flatten().any(|b| b % itemsize != 0) {
                    let text =
                        format!("{function}: the strides of '{argument}' are no multiples of its elements' size");
                    return Err(error::unsupported(py, &text, "pass a copy"));
                }
                bytes.map(|bytes| bytes.iter().map(|b| b / itemsize).collect())
            }
        };
        let device = match object.getattr("device").ok() {
            Some(found) => named_device(py, &found.str()?.to_string(), function, argument)?,
            None => DeviceIx(0),
        };
        let data = match object.getattr("__array_interface__").ok() {
            Some(interface) => interface.get_item("data")?.get_item(0)?.extract::<usize>()? as *mut u8,
            None => std::ptr::null_mut(),
        };
        Ok(Meta {
            dtype,
            shape: shape.into(),
            strides: strides.map(Into::into),
            device,
            aligned: (data as usize).is_multiple_of(16),
            requires_grad,
            data,
        })
    }

    /// Its strides, in elements.
    fn all_strides(&self) -> Extents {
        self.strides.clone().unwrap_or_else(|| row_major(&self.shape))
    }

    /// Whether it is row-major without gaps.
    pub fn is_row_major(&self) -> bool {
        let expected = row_major(&self.shape);
        let strides = self.strides.as_deref().unwrap_or(&expected);
        self.shape.contains(&0)
            || self.shape.iter().zip(strides.iter().zip(&expected)).all(|(&n, (a, b))| n == 1 || a == b)
    }

    /// The addresses it lies in; empty where it has no host memory.
    pub fn bytes(&self) -> Bytes {
        match self.data.is_null() {
            true => Bytes { start: 0, end: 0 },
            false => Bytes::of(self.dtype, &self.shape, &self.all_strides(), self.data as usize),
        }
    }

    /// A view of its memory.
    ///
    /// # Safety
    /// The tensor outlives the view, nobody writes it meanwhile, and `data` is its address in host memory.
    pub unsafe fn view<'a>(&self) -> TensorView<'a> {
        // SAFETY: the contract above.
        unsafe { TensorView::new(self.dtype, self.shape.clone(), self.all_strides(), self.data) }
    }

    /// A view of its memory to write to.
    ///
    /// # Safety
    /// As [`Meta::view`], and nobody reads it meanwhile either.
    pub unsafe fn view_mut<'a>(&self) -> TensorViewMut<'a> {
        // SAFETY: the contract above.
        unsafe { TensorViewMut::new(self.dtype, self.shape.clone(), self.all_strides(), self.data) }
    }

    /// The same tensor read as packed values of a 4-bit format: two per byte along the last axis.
    pub fn unpacked(
        mut self,
        py: Python<'_>,
        format: &str,
        function: &str,
        argument: &str,
        purpose: Purpose,
    ) -> PyResult<Meta> {
        let packed: Option<DType> = format.parse().ok().filter(|d: &DType| d.is_sub_byte());
        let Some(dtype) = packed else {
            let text = format!("{function}: format is '{format}', expected one of int4, mxfp4, nvfp4");
            return Err(error::argument(py, "BAD_PARAM", &text, "leave format out for dtypes torch has"));
        };
        let contiguous = self.is_row_major() || purpose == Purpose::Ask;
        if self.dtype != DType::U8 || self.shape.is_empty() || !contiguous {
            let text =
                format!("{function}: '{argument}' is {} {:?}, expected contiguous uint8", self.dtype, self.shape);
            return Err(error::argument(py, "WRONG_DTYPE", &text, "packed values are uint8, two per byte, row by row"));
        }
        self.dtype = dtype;
        if let Some(last) = self.shape.last_mut() {
            *last *= 2;
        }
        self.strides = None;
        Ok(self)
    }
}

fn unknown_dtype(py: Python<'_>, function: &str, argument: &str, name: &str) -> PyErr {
    let text = format!("{function}: '{argument}' is {name}, which LayerZero does not have");
    error::argument(py, "WRONG_DTYPE", &text, "cast it, for instance to float32")
}

/// The engine's device of a tensor, which DLPack says is there.
fn device(object: &Bound<'_, PyAny>, device: Device, function: &str, argument: &str) -> PyResult<DeviceIx> {
    match device.kind {
        _ if device.is_host() => Ok(DeviceIx(0)),
        Device::CUDA => named_device(object.py(), &format!("cuda:{}", device.id), function, argument),
        // DLPack knows kinds of devices, torch the names of its backends.
        _ => named_device(object.py(), &object.getattr("device")?.str()?.to_string(), function, argument),
    }
}

/// The engine's device for a name of torch's, such as `cpu` or `cuda:1`.
fn named_device(py: Python<'_>, name: &str, function: &str, argument: &str) -> PyResult<DeviceIx> {
    if matches!(name.split(':').next(), Some("cpu" | "meta")) {
        return Ok(DeviceIx(0));
    }
    devices::find(py, name)?.ok_or_else(|| {
        let text = format!("{function}: '{argument}' is on {name}, which neither LayerZero nor torch finds here");
        error::unsupported(py, &text, "see what lz.doctor() says about the devices")
    })
}

/// The name of a dtype in torch and numpy, and how many elements share a byte.
pub fn storage(dtype: DType) -> (&'static str, i64) {
    if dtype.is_sub_byte() { ("uint8", 2) } else { (dtype.name(), 1) }
}
