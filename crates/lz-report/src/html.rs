//! HTML that cannot be broken out of: names are ours, values are always escaped.
//!
//! The result is also well-formed XML. Scripts and style sheets, where HTML knows no escapes, can only be constants.

use std::fmt::{self, Display, Write};

/// A document being written. An element is opened, given attributes, filled and ended:
/// `html.el("p").at("class", "note").text("…").end()`.
#[derive(Default)]
pub(crate) struct Html {
    out: String,
    open: Vec<&'static str>,
    /// The start tag of the innermost element can still take attributes.
    in_tag: bool,
}

impl Html {
    /// Begins an element.
    pub fn el(&mut self, name: &'static str) -> &mut Html {
        self.close_tag();
        self.out.push('<');
        self.out.push_str(name);
        self.open.push(name);
        self.in_tag = true;
        self
    }

    /// Gives the element just begun an attribute.
    pub fn at(&mut self, name: &'static str, value: impl Display) -> &mut Html {
        debug_assert!(self.in_tag, "attribute {name} after content");
        self.out.push(' ');
        self.out.push_str(name);
        self.out.push_str("=\"");
        self.escaped(value);
        self.out.push('"');
        self
    }

    /// Adds text.
    pub fn text(&mut self, text: impl Display) -> &mut Html {
        self.close_tag();
        self.escaped(text);
        self
    }

    /// Ends the innermost element.
    pub fn end(&mut self) -> &mut Html {
        let name = self.open.pop().unwrap_or_default();
        debug_assert!(!name.is_empty(), "an end without a beginning");
        if self.in_tag && VOID.contains(&name) {
            self.out.push_str("/>");
            self.in_tag = false;
            return self;
        }
        self.close_tag();
        self.out.push_str("</");
        self.out.push_str(name);
        self.out.push('>');
        self
    }

    /// An element of this class with nothing but text in it.
    pub fn leaf(&mut self, name: &'static str, class: &'static str, text: impl Display) -> &mut Html {
        self.el(name);
        if !class.is_empty() {
            self.at("class", class);
        }
        self.text(text).end()
    }

    /// A script or style sheet: an element whose content is taken as it is.
    pub fn constant(&mut self, name: &'static str, content: &'static str) -> &mut Html {
        self.el(name).close_tag();
        self.out.push_str(content);
        self.end()
    }

    /// The document.
    pub fn finish(self) -> String {
        debug_assert!(self.open.is_empty(), "{:?} are still open", self.open);
        format!("<!DOCTYPE html>\n{}\n", self.out)
    }

    fn close_tag(&mut self) {
        if std::mem::take(&mut self.in_tag) {
            self.out.push('>');
        }
    }

    fn escaped(&mut self, value: impl Display) {
        // Writing to a string does not fail; a Display that does leaves what it wrote.
        let _ = write!(Escaped(&mut self.out), "{value}");
    }
}

/// Elements that HTML lets have no end tag.
const VOID: &[&str] = &["meta", "input", "col", "br", "rect", "line", "circle", "path"];

struct Escaped<'a>(&'a mut String);

impl Write for Escaped<'_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for c in text.chars() {
            match c {
                '&' => self.0.push_str("&amp;"),
                '<' => self.0.push_str("&lt;"),
                '>' => self.0.push_str("&gt;"),
                '"' => self.0.push_str("&quot;"),
                '\'' => self.0.push_str("&#39;"),
                '\n' | '\t' => self.0.push(c),
                '\r' => self.0.push('\n'),
                // What no document may contain, and what turns the direction of the text around it.
                c if c.is_control()
                    || matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' | '\u{fffe}' | '\u{ffff}') =>
                {
                    self.0.push('\u{fffd}');
                }
                c => self.0.push(c),
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_escaped_wherever_they_stand() {
        let mut html = Html::default();
        html.el("p").at("title", "\"><script>").text("<b> & 'c' \0 \u{202e}").end();
        let text = html.finish();
        let expected = "<p title=\"&quot;&gt;&lt;script&gt;\">&lt;b&gt; &amp; &#39;c&#39; \u{fffd} \u{fffd}</p>";
        assert_eq!(text, format!("<!DOCTYPE html>\n{expected}\n"));
    }

    #[test]
    fn elements_nest_and_void_ones_close_themselves() {
        let mut html = Html::default();
        html.el("div").el("br").end().leaf("span", "x", 1).el("svg").end().end();
        assert_eq!(html.finish(), "<!DOCTYPE html>\n<div><br/><span class=\"x\">1</span><svg></svg></div>\n");
    }
}
