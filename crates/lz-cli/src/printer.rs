//! The one way out: text and tables for people, JSON for programs, errors and warnings beside.

use std::io::{self, Write};

use clap::error::ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand;
use comfy_table::{Table, presets};
use serde::Serialize;

use crate::color::{Paint, Style};
use crate::error::CliError;
use crate::escape::visible;
use crate::exit::Exit;

/// The version every JSON document carries.
pub const SCHEMA_VERSION: &str = layerzero::REPORT_VERSION;

/// A document with its version.
#[derive(Serialize)]
struct Versioned<'a, T: Serialize + ?Sized> {
    schema_version: &'static str,
    #[serde(flatten)]
    content: &'a T,
}

#[derive(Serialize)]
struct Failed<T> {
    error: T,
}

/// Writes answers, in the form that was asked for.
pub struct Printer<'w> {
    out: &'w mut dyn Write,
    err: &'w mut dyn Write,
    json: bool,
    paint: Paint,
    err_paint: Paint,
    /// Whether somebody looks at what is printed beside the answer as it comes.
    watched: bool,
    /// How wide the line is that shows how far it is.
    shown: usize,
}

impl<'w> Printer<'w> {
    /// A printer to two outputs.
    pub fn new(
        out: &'w mut dyn Write,
        err: &'w mut dyn Write,
        json: bool,
        paint: Paint,
        err_paint: Paint,
    ) -> Printer<'w> {
        Printer { out, err, json, paint, err_paint, watched: false, shown: 0 }
    }

    /// Says whether somebody looks at what is printed beside the answer as it comes.
    pub fn set_watched(&mut self, watched: bool) {
        self.watched = watched;
    }

    /// Shows how far it is, in one line that is written over and over.
    pub fn progress(&mut self, text: &str) {
        if self.watched {
            let text = visible(text, false);
            let width = text.chars().count();
            let blank = " ".repeat(self.shown.saturating_sub(width));
            let _ = write!(self.err, "\r{text}{blank}").and_then(|()| self.err.flush());
            self.shown = width;
        }
    }

    /// Takes the line away that shows how far it is.
    pub fn end_progress(&mut self) {
        if std::mem::take(&mut self.shown) > 0 {
            let _ = write!(self.err, "\r\x1b[2K").and_then(|()| self.err.flush());
        }
    }

    /// Whether JSON was asked for.
    pub fn wants_json(&self) -> bool {
        self.json
    }

    /// Prints one JSON document, with its version in front.
    pub fn json<T: Serialize + ?Sized>(&mut self, content: &T) -> Result<(), CliError> {
        self.raw_json(&Versioned { schema_version: SCHEMA_VERSION, content })
    }

    /// Prints a JSON document as it is.
    pub fn raw_json<T: Serialize + ?Sized>(&mut self, document: &T) -> Result<(), CliError> {
        self.line(serde_json::to_string_pretty(document).map_err(io::Error::from)?)
    }

    /// Prints a line.
    pub fn line(&mut self, text: impl AsRef<str>) -> Result<(), CliError> {
        Ok(writeln!(self.out, "{}", visible(text.as_ref(), self.paint.is_on()))?)
    }

    /// Prints a heading, after an empty line.
    pub fn heading(&mut self, text: &str) -> Result<(), CliError> {
        let text = self.paint.paint(Style::Heading, text);
        self.line(format!("\n{text}"))
    }

    /// The text, set off if the output is coloured.
    pub fn paint(&self, style: Style, text: &str) -> String {
        self.paint.paint(style, text)
    }

    /// Prints a table, indented under its heading.
    pub fn table<const N: usize>(
        &mut self,
        header: [&str; N],
        rows: impl IntoIterator<Item = [String; N]>,
    ) -> Result<(), CliError> {
        let mut table = Table::new();
        table.load_style(presets::NOTHING).set_header(header);
        for row in rows {
            table.add_row(row);
        }
        table.trim_fmt().lines().try_for_each(|line| self.line(format!(" {}", line.trim_end())))
    }

    /// Prints bytes as they are.
    pub fn bytes(&mut self, bytes: &[u8]) -> Result<(), CliError> {
        Ok(self.out.write_all(bytes)?)
    }

    /// Prints what clap has to show: help, or the version.
    pub fn help(&mut self, help: &clap::Error) -> Result<(), CliError> {
        let text = help.render();
        let text = if self.paint.is_on() { text.ansi().to_string() } else { text.to_string() };
        self.bytes(text.as_bytes())
    }

    /// Prints a warning, beside the answer.
    pub fn warning(&mut self, text: &str) {
        let label = self.err_paint.paint(Style::Warning, "warning");
        self.beside(&format!("{label}: {text}"));
    }

    /// Prints a note, beside the answer.
    pub fn note(&mut self, text: &str) {
        let label = self.err_paint.paint(Style::Good, "note");
        self.beside(&format!("{label}: {text}"));
    }

    /// Prints an error beside the answer, and as the answer when that is JSON. Gives the exit it leads to.
    pub fn error(&mut self, error: &CliError) -> Exit {
        match error {
            // A reader that has seen enough is no failure.
            CliError::Output(source) if source.kind() == io::ErrorKind::BrokenPipe => {
                return Exit::Ok;
            }
            CliError::Usage(help) if help.kind() == DisplayHelpOnMissingArgumentOrSubcommand => {
                self.beside(&error.to_string())
            }
            _ => {
                let label = self.err_paint.paint(Style::Bad, &format!("error[{}]", error.code()));
                let hint = self.err_paint.paint(Style::Good, "hint");
                self.beside(&format!("{label}: {error}\n{hint}: {}", error.hint()));
            }
        }
        if self.json {
            // The exit tells of the error, whether or not its document finds a reader.
            let _ = self.json(&Failed { error: error.document() }).and_then(|()| self.flush());
        }
        error.exit()
    }

    /// Prints beside the answer. When that fails there is nowhere left to say so.
    fn beside(&mut self, text: &str) {
        let _ = writeln!(self.err, "{}", visible(text, self.err_paint.is_on()));
    }

    /// Writes out what is buffered.
    pub fn flush(&mut self) -> Result<(), CliError> {
        Ok(self.out.flush()?)
    }
}
