//! How a command ends.

/// The exits of `layerzero`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Exit {
    /// Done.
    Ok = 0,
    /// The answer is no.
    No = 1,
    /// The command line or the call is wrong.
    Usage = 2,
    /// A configuration, a capabilities document or a device description is wrong.
    Config = 3,
    /// The environment cannot be used.
    Unusable = 4,
    /// Somebody stopped it.
    Interrupted = 130,
}

impl Exit {
    /// The number the process ends with.
    pub const fn code(self) -> i32 {
        self as i32
    }
}
