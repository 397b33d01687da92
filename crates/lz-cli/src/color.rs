//! Colours, where people see them and want them.

use crate::args::ColorChoice;

/// How a piece of text is set off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Style {
    /// A heading.
    Heading,
    /// Something good.
    Good,
    /// Something to look at.
    Warning,
    /// Something wrong.
    Bad,
}

impl Style {
    const fn ansi(self) -> &'static str {
        match self {
            Style::Heading => "\x1b[1m",
            Style::Good => "\x1b[32m",
            Style::Warning => "\x1b[1;33m",
            Style::Bad => "\x1b[1;31m",
        }
    }
}

/// Whether one output is coloured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Paint {
    on: bool,
}

impl Paint {
    /// Decides for one output.
    pub fn new(choice: ColorChoice, terminal: bool) -> Paint {
        let on = match choice {
            ColorChoice::Always => true,
            ColorChoice::Never => false,
            ColorChoice::Auto => terminal && !refused(),
        };
        Paint { on }
    }

    /// The text, set off if this output is coloured.
    pub fn paint(self, style: Style, text: &str) -> String {
        if self.on { format!("{}{text}\x1b[0m", style.ansi()) } else { text.to_owned() }
    }

    /// Whether anything is coloured.
    pub fn is_on(self) -> bool {
        self.on
    }
}

/// Whether the user refuses colours everywhere, as <https://no-color.org> has it.
///
/// The only environment variable the command reads by itself: it belongs to the terminal, not to LayerZero.
fn refused() -> bool {
    std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty())
}
