//! Control characters made visible: what comes from the environment, from files and from names must not steer a terminal.

use std::borrow::Cow;

/// The text with its control characters shown (`\x1b`), but for new lines and tabs. Where the output is coloured,
/// colours (`ESC [ … m`) stay.
pub(crate) fn visible(text: &str, colored: bool) -> Cow<'_, str> {
    let hidden = |c: char| c.is_control() && !matches!(c, '\n' | '\t');
    if !text.contains(hidden) {
        return Cow::Borrowed(text);
    }
    let mut shown = String::with_capacity(text.len() + 16);
    let mut rest = text;
    while let Some(c) = rest.chars().next() {
        let taken = match color(rest).filter(|_| colored) {
            Some(length) => length,
            None if hidden(c) => {
                shown.push_str(&format!("\\x{:02x}", u32::from(c)));
                rest = &rest[c.len_utf8()..];
                continue;
            }
            None => c.len_utf8(),
        };
        shown.push_str(&rest[..taken]);
        rest = &rest[taken..];
    }
    Cow::Owned(shown)
}

/// How long the colour is that a text begins with, if it does.
fn color(text: &str) -> Option<usize> {
    let numbers = text.strip_prefix("\x1b[")?;
    let end = numbers.find(|c: char| !c.is_ascii_digit() && c != ';')?;
    numbers[end..].starts_with('m').then_some("\x1b[".len() + end + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_are_shown_and_text_is_not_touched() {
        for colored in [false, true] {
            assert_eq!(visible("a\tb\nä → ✓ °\u{a0}", colored), "a\tb\nä → ✓ °\u{a0}");
            assert_eq!(visible("\x1b]0;title\x07x", colored), "\\x1b]0;title\\x07x");
            assert_eq!(visible("\x1b[2J\r\x08\x7f", colored), "\\x1b[2J\\x0d\\x08\\x7f");
            assert_eq!(visible("\u{9b}31m\u{85}ä", colored), "\\x9b31m\\x85ä");
        }
    }

    #[test]
    fn colours_stay_where_there_are_any() {
        assert_eq!(visible("\x1b[1;31mbad\x1b[0m", true), "\x1b[1;31mbad\x1b[0m");
        assert_eq!(visible("\x1b[1;31mbad", false), "\\x1b[1;31mbad");
        assert_eq!(visible("\x1b\x1b[0m\x1b[99\nx\x1b[", true), "\\x1b\x1b[0m\\x1b[99\nx\\x1b[");
    }
}
