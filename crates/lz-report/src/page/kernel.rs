//! A kernel's name with its colour.

use crate::color::{Colors, Paint};
use crate::html::Html;

/// The class of a kernel's colour.
pub(crate) fn class(paint: &Paint) -> String {
    format!("k{}{}", paint.ink, if paint.hatched { " hatched" } else { "" })
}

/// Its letter in its colour, and its name.
pub(crate) fn name(html: &mut Html, colors: &Colors, kernel: &str) {
    html.el("span").at("class", "kernel").at("title", kernel);
    if let Some(paint) = colors.get(kernel) {
        html.el("span").at("class", format!("mark {}", class(paint))).at("aria-hidden", "true");
        html.text(&paint.mark).end();
    }
    html.leaf("span", "id", kernel).end();
}
