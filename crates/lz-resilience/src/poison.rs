//! Errors that say more than that a kernel failed, told by their words.
//!
//! Kernels are called through many libraries, and most errors arrive as text. What is looked for are the names and
//! sentences of the CUDA and HIP runtimes and drivers, which the libraries pass on.

/// After these the context is lost: every later call of the process on that device fails too.
const POISONING: &[&str] = &[
    // Sentences nobody else says.
    "an illegal memory access was encountered",
    "device-side assert triggered",
    "unspecified launch failure",
    "an illegal instruction was encountered",
    "uncorrectable ecc error",
    "uncorrectable nvlink error",
    "the launch timed out and was terminated",
    "operation not supported on global/shared address space",
    "invalid access of peer gpu memory over nvlink or a hardware error",
    "context is destroyed",
    // The driver's names.
    "cuda_error_illegal_address",
    "cuda_error_assert",
    "cuda_error_launch_failed",
    "cuda_error_launch_timeout",
    "cuda_error_misaligned_address",
    "cuda_error_illegal_instruction",
    "cuda_error_invalid_address_space",
    "cuda_error_invalid_pc",
    "cuda_error_hardware_stack_error",
    "cuda_error_ecc_uncorrectable",
    "cuda_error_nvlink_uncorrectable",
    "cuda_error_contained",
    "cuda_error_context_is_destroyed",
    // The runtime's names.
    "cudaerrorillegaladdress",
    "cudaerrorassert",
    "cudaerrorlaunchfailure",
    "cudaerrorlaunchtimeout",
    "cudaerrormisalignedaddress",
    "cudaerrorillegalinstruction",
    "cudaerrorinvalidaddressspace",
    "cudaerrorinvalidpc",
    "cudaerrorhardwarestackerror",
    "cudaerroreccuncorrectable",
    "cudaerrornvlinkuncorrectable",
    "cudaerrorcontained",
    "cudaerrorcontextisdestroyed",
    // HIP's names.
    "hiperrorillegaladdress",
    "hiperrorassert",
    "hiperrorlaunchfailure",
    "hiperrorlaunchtimeout",
    "hiperroreccnotcorrectable",
    "hiperrorcontextisdestroyed",
];

/// The same, but also what a library may say of arguments it refuses.
const POISONING_ON_A_DEVICE: &[&str] = &["misaligned address", "invalid program counter", "hardware stack error"];

/// Ways of naming a device's runtime.
const DEVICE: &[&str] = &["cuda error", "[cuda]", "hip error", "[hip]", "cudaerror", "cuda runtime error"];

const OUT_OF_MEMORY: &[&str] = &[
    "out of memory",
    "out_of_memory",
    "outofmemory",
    "memoryerror",
    "cudaerrormemoryallocation",
    "cublas_status_alloc_failed",
    "cudnn_status_alloc_failed",
    "cusolver_status_alloc_failed",
    "cusparse_status_alloc_failed",
    "can't allocate memory",
    "cannot allocate memory",
    "not enough memory: you tried to allocate",
    "unable to allocate",
    "bad_alloc",
];

/// Whether an error says that the device's context is lost, so that every later call on it fails as well.
///
/// ```
/// use lz_resilience::is_poisoning;
/// assert!(is_poisoning("CUDA error: an illegal memory access was encountered"));
/// assert!(!is_poisoning("CUDA error: invalid configuration argument"));
/// ```
pub fn is_poisoning(message: &str) -> bool {
    let message = message.to_ascii_lowercase();
    let says = |words: &[&str]| words.iter().any(|word| message.contains(word));
    says(POISONING) || says(POISONING_ON_A_DEVICE) && says(DEVICE)
}

/// Whether an error says that memory ran out. The context lives on.
///
/// ```
/// use lz_resilience::is_out_of_memory;
/// assert!(is_out_of_memory("CUDA out of memory. Tried to allocate 20.00 MiB."));
/// ```
pub fn is_out_of_memory(message: &str) -> bool {
    let message = message.to_ascii_lowercase();
    OUT_OF_MEMORY.iter().any(|word| message.contains(word))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What torch puts under every CUDA error; it must not decide anything.
    const ADVICE: &str = "\nCUDA kernel errors might be asynchronously reported at some other API call, so the \
        stacktrace below might be incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\nCompile with \
        `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n";

    #[test]
    fn lost_contexts_are_told_by_their_messages() {
        let torch = [
            "an illegal memory access was encountered",
            "device-side assert triggered",
            "unspecified launch failure",
            "misaligned address",
            "an illegal instruction was encountered",
            "uncorrectable ECC error encountered",
            "hardware stack error",
            "invalid program counter",
            "the launch timed out and was terminated",
            "operation not supported on global/shared address space",
            "uncorrectable NVLink error detected during the execution",
            "Invalid access of peer GPU memory over nvlink or a hardware error",
        ];
        for message in torch {
            assert!(is_poisoning(&format!("CUDA error: {message}{ADVICE}")), "{message}");
            assert!(is_poisoning(&format!("Triton Error [CUDA]: {message}")), "{message}");
            assert!(!is_out_of_memory(&format!("CUDA error: {message}{ADVICE}")), "{message}");
        }
        let elsewhere = [
            "CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access was encountered",
            "DriverError(CUDA_ERROR_MISALIGNED_ADDRESS, \"misaligned address\")",
            "cudaErrorHardwareStackError: hardware stack error",
            "cudaErrorIllegalInstruction",
            "CUDA error (/flash-attention/csrc/flash_fwd_launch_template.h:188): an illegal memory access was encountered",
            "BatchPrefillWithPagedKVCache failed with error an illegal memory access was encountered",
            "CUDNN_STATUS_EXECUTION_FAILED: cudaErrorLaunchFailure: unspecified launch failure",
            "HIP error: an illegal memory access was encountered",
            "hipErrorIllegalAddress",
            "CUDA driver error: device-side assert triggered",
            "[700] Call to cuCtxSynchronize results in CUDA_ERROR_ILLEGAL_ADDRESS",
        ];
        for message in elsewhere {
            assert!(is_poisoning(message), "{message}");
        }
    }

    #[test]
    fn errors_that_pass_are_not_taken_for_lost_contexts() {
        let harmless = [
            format!("CUDA error: invalid configuration argument{ADVICE}"),
            format!("CUDA error: no kernel image is available for execution on the device{ADVICE}"),
            format!("CUDA error: invalid device function{ADVICE}"),
            format!("CUDA error: too many resources requested for launch{ADVICE}"),
            format!("CUDA error: out of memory{ADVICE}"),
            "CUDA error: operation not permitted when stream is capturing".into(),
            "CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 10.00 GiB total capacity)".into(),
            "out of resource: shared memory, Required: 147456, Hardware limit: 101376".into(),
            "FlashAttention only supports Ampere GPUs or newer.".into(),
            "expected a 16-byte aligned tensor, got a misaligned address for `key`".into(),
            "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED".into(),
            "assert triggered in user code".into(),
            String::new(),
        ];
        for message in harmless {
            assert!(!is_poisoning(&message), "{message}");
        }
    }

    #[test]
    fn memory_that_ran_out_is_told_by_its_messages() {
        let short = [
            "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79.15 GiB of which 18.88 MiB is free.",
            "CUDA error: out of memory",
            "HIP out of memory. Tried to allocate 2.00 GiB",
            "CUDA_ERROR_OUT_OF_MEMORY",
            "cudaErrorMemoryAllocation: out of memory",
            "hipErrorOutOfMemory",
            "MPS backend out of memory (MPS allocated: 18.00 GB)",
            "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
            "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 4000000000000 bytes. Error code 12 (Cannot allocate memory)",
            "[enforce fail at alloc_cpu.cpp:75] data. DefaultCPUAllocator: not enough memory: you tried to allocate 1024 bytes.",
            "Unable to allocate 1.00 TiB for an array with shape (137438953472,) and data type float64",
            "std::bad_alloc",
            "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 17179869184 bytes.",
            "OutOfMemoryError: no room",
        ];
        for message in short {
            assert!(is_out_of_memory(message), "{message}");
            assert!(!is_poisoning(message), "{message}");
        }
        assert!(!is_out_of_memory("out of resource: shared memory, Required: 147456, Hardware limit: 101376"));
        assert!(!is_out_of_memory("CUDA error: an illegal memory access was encountered"));
    }
}
