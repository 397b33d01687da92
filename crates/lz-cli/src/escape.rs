//! Control characters made visible: what comes from the environment, from files and from names must not steer a terminal.

use std::io::{Result, Write};

/// Passes text on. Control characters (ASCII and C1) become `\x1b` and the like, but for new lines and tabs; where the
/// output is coloured, colours (`ESC [ … m`) stay.
pub(crate) struct Escaped<'a> {
    inner: &'a mut dyn Write,
    colored: bool,
    /// The beginning of a colour, or of a two-byte character that may be a control character.
    held: Vec<u8>,
}

impl<'a> Escaped<'a> {
    pub(crate) fn new(inner: &'a mut dyn Write, colored: bool) -> Escaped<'a> {
        Escaped { inner, colored, held: Vec::new() }
    }

    fn put(&mut self, byte: u8, text: &mut Vec<u8>) {
        match *self.held.as_slice() {
            [] if byte == b'\x1b' && self.colored || byte == 0xC2 => self.held.push(byte),
            [] if byte < b' ' && !matches!(byte, b'\n' | b'\t') || byte == 0x7F => show(byte, text),
            [] => text.push(byte),
            [0xC2] => {
                self.held.clear();
                if (0x80..=0x9F).contains(&byte) {
                    text.extend_from_slice(format!("\\x{byte:02x}").as_bytes());
                } else {
                    text.push(0xC2);
                    self.put(byte, text);
                }
            }
            [_] if byte == b'[' => self.held.push(byte),
            [_, _, ..] if (byte.is_ascii_digit() || byte == b';') && self.held.len() < 16 => self.held.push(byte),
            [_, _, ..] if byte == b'm' => {
                text.append(&mut self.held);
                text.push(byte);
            }
            _ => {
                let held = std::mem::take(&mut self.held);
                show(held[0], text);
                text.extend_from_slice(&held[1..]);
                self.put(byte, text);
            }
        }
    }
}

fn show(byte: u8, text: &mut Vec<u8>) {
    text.extend_from_slice(format!("\\x{byte:02x}").as_bytes());
}

impl Write for Escaped<'_> {
    fn write(&mut self, bytes: &[u8]) -> Result<usize> {
        let mut text = Vec::with_capacity(bytes.len());
        bytes.iter().for_each(|&byte| self.put(byte, &mut text));
        self.inner.write_all(&text)?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> Result<()> {
        self.inner.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn escaped(pieces: &[&str], colored: bool) -> String {
        let mut out = Vec::new();
        let mut writer = Escaped::new(&mut out, colored);
        pieces.iter().for_each(|piece| writer.write_all(piece.as_bytes()).unwrap());
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn control_characters_are_shown_and_text_is_not_touched() {
        for colored in [false, true] {
            assert_eq!(escaped(&["a\tb\nä → ✓ °\u{a0}"], colored), "a\tb\nä → ✓ °\u{a0}");
            assert_eq!(escaped(&["\x1b]0;title\x07x"], colored), "\\x1b]0;title\\x07x");
            assert_eq!(escaped(&["\x1b[2J\r\x08\x7f"], colored), "\\x1b[2J\\x0d\\x08\\x7f");
            assert_eq!(escaped(&["\u{9b}31m\u{85}"], colored), "\\x9b31m\\x85");
        }
    }

    #[test]
    fn colours_stay_where_there_are_any_even_in_pieces() {
        assert_eq!(escaped(&["\x1b[1;31mbad\x1b[0m"], true), "\x1b[1;31mbad\x1b[0m");
        assert_eq!(escaped(&["\x1b", "[1", ";31m", "bad"], true), "\x1b[1;31mbad");
        assert_eq!(escaped(&["\x1b[1;31mbad"], false), "\\x1b[1;31mbad");
        assert_eq!(escaped(&["\x1b\x1b[0m\x1b[99\nx"], true), "\\x1b\x1b[0m\\x1b[99\nx");
    }
}
