//! Whether a CUDA graph is being captured on the stream a call would use.

use std::ffi::{c_int, c_void};
use std::ptr;

use libloading::os::unix::{Library, RTLD_LAZY};

use layerzero::abi::Device;
use pyo3::prelude::*;

use crate::exchange::WorkStream;
use crate::torch::NO_LOAD;

/// CUDA runtimes torch may have been built with.
const RUNTIMES: [&str; 3] = ["libcudart.so.13", "libcudart.so.12", "libcudart.so.11.0"];

/// `cudaStreamIsCapturing(stream, &status)`: 0 when it answered; the status is 0 when nothing is captured.
type StreamIsCapturing = unsafe extern "C" fn(*mut c_void, *mut c_int) -> c_int;

/// `cudaThreadExchangeStreamCaptureMode(&mode)`: puts the calling thread's mode in force, and gives the one before.
type ExchangeCaptureMode = unsafe extern "C" fn(*mut c_int) -> c_int;

/// A function of the CUDA runtime that is loaded, if one is.
///
/// # Safety
/// `T` is the function's type.
unsafe fn of_runtime<T: Copy>(name: &[u8]) -> Option<T> {
    // SAFETY: with RTLD_NOLOAD nothing is loaded and no initialiser runs; the runtime stays loaded as long as torch, which
    // is never unloaded. The caller knows the type.
    RUNTIMES.iter().find_map(|runtime| unsafe {
        let runtime = Library::open(Some(*runtime), RTLD_LAZY | NO_LOAD).ok()?;
        let function: T = *runtime.get(name).ok()?;
        std::mem::forget(runtime);
        Some(function)
    })
}

/// Puts another mode of captures in force for this thread, and gives the one before: 0 global, 1 of this thread, 2 relaxed. `None` when
/// there is no runtime to ask. Where it is global, a thread that takes memory, loads code or asks about an event while another
/// captures a graph fails, and breaks the capture; with 1 only captures of its own count.
#[pyfunction]
pub fn exchange_capture_mode(mode: c_int) -> Option<c_int> {
    let mut mode = mode;
    // SAFETY: the signature is that of the runtime's C interface; it writes one number.
    let exchanged = unsafe {
        of_runtime::<ExchangeCaptureMode>(b"cudaThreadExchangeStreamCaptureMode")
            .is_some_and(|exchange| exchange(&mut mode) == 0)
    };
    exchanged.then_some(mode)
}

/// Asks torch for the current stream and the CUDA runtime for its state: some ten nanoseconds, no synchronisation.
#[derive(Clone, Copy)]
pub struct Capture {
    stream: WorkStream,
    status: StreamIsCapturing,
}

impl Capture {
    /// With the runtime that is loaded, if one is.
    pub fn find(stream: Option<WorkStream>) -> Option<Capture> {
        let stream = stream?;
        // SAFETY: the signature is that of the runtime's C interface, the same in all these versions.
        let status: StreamIsCapturing = unsafe { of_runtime(b"cudaStreamIsCapturing") }?;
        Some(Capture { stream, status })
    }

    /// Whether the current stream of a device is being captured; `None` when nobody answers.
    #[inline]
    pub fn is_under_way(&self, device: i32) -> Option<bool> {
        let (mut stream, mut status) = (ptr::null_mut(), 0);
        // SAFETY: torch writes its current stream, the runtime takes it and writes a number.
        unsafe {
            if (self.stream)(Device::CUDA, device, &mut stream) != 0 {
                return None;
            }
            // The default stream cannot be captured, and asking about it would disturb the capture of another.
            if stream.is_null() {
                return Some(false);
            }
            ((self.status)(stream, &mut status) == 0).then_some(status != 0)
        }
    }
}
