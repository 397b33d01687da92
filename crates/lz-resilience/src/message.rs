//! What failed kernels say, kept short.

use serde::{Deserialize, Serialize};

/// Most bytes of a message that are kept: some libraries put whole tensors into their errors.
const MOST: usize = 512;

/// The last thing that went wrong.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LastError {
    /// What was said, cut off after 512 bytes.
    pub message: String,
    /// When, by the clock of whoever recorded it.
    pub at_ms: u64,
}

impl LastError {
    pub(crate) fn new(message: &str, at_ms: u64) -> LastError {
        LastError { message: clip(message), at_ms }
    }
}

/// The beginning of a message.
pub(crate) fn clip(message: &str) -> String {
    if message.len() <= MOST {
        return message.to_owned();
    }
    let mut end = MOST;
    while !message.is_char_boundary(end) {
        end -= 1;
    }
    format!("{}…", &message[..end])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_messages_are_cut_between_characters() {
        assert_eq!(clip("short"), "short");
        let cut = clip(&"é".repeat(10_000));
        assert!(cut.len() <= MOST + '…'.len_utf8() && cut.starts_with("éé") && cut.ends_with("é…"));
        let odd = clip(&format!("x{}", "é".repeat(10_000)));
        assert!(odd.ends_with("é…"));
    }
}
