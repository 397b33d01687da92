//! Glob matching: `*` is any run of characters, `?` is exactly one.

/// Whether `text` matches `pattern`. Takes at most `pattern * text` steps: a
/// mismatch only ever goes back to the last `*`, as an earlier one could gain
/// nothing by taking more.
pub fn matches(pattern: &str, text: &str) -> bool {
    let (mut p, mut t) = (0, 0);
    // After the last `*`: where the pattern goes on, and where the text may.
    let mut retry: Option<(usize, usize)> = None;
    loop {
        let wanted = pattern[p..].chars().next();
        let found = text[t..].chars().next();
        match (wanted, found) {
            (Some('*'), _) => {
                p += 1;
                retry = Some((p, t));
                continue;
            }
            (Some('?'), Some(c)) => {
                p += 1;
                t += c.len_utf8();
                continue;
            }
            (Some(w), Some(c)) if w == c => {
                p += w.len_utf8();
                t += c.len_utf8();
                continue;
            }
            (None, None) => return true,
            _ => {}
        }
        let Some((after_star, resume)) = retry else {
            return false;
        };
        let Some(skipped) = text[resume..].chars().next() else {
            return false;
        };
        p = after_star;
        t = resume + skipped.len_utf8();
        retry = Some((p, t));
    }
}

#[cfg(test)]
mod tests {
    use super::matches;

    #[test]
    fn stars_and_question_marks() {
        assert!(matches("attention.*", "attention.causal"));
        assert!(matches("attention.*", "attention."));
        assert!(!matches("attention.*", "attention"));
        assert!(!matches("attention.*", "x.attention.y"));
        assert!(matches("*", ""));
        assert!(matches("", ""));
        assert!(!matches("", "a"));
        assert!(matches("a?c", "abc"));
        assert!(matches("a?c", "aéc"));
        assert!(!matches("a?c", "ac"));
        assert!(!matches("?", ""));
        assert!(matches("*ab*b", "xababab"));
        assert!(matches("*é", "éé"));
        assert!(!matches("a*b", "a*c"));
    }

    #[test]
    fn many_stars_are_not_exponential() {
        let text = "a".repeat(2000);
        let pattern = "a*".repeat(500) + "b";
        assert!(!matches(&pattern, &text));
    }
}
