//! The page, section by section.

mod bars;
mod calls;
mod headline;
mod histogram;
mod kernel;
mod machine;
mod map;
mod operation;
mod overview;

use std::fmt::Write;
use std::sync::LazyLock;

use sha2::{Digest, Sha256};

use crate::color;
use crate::html::Html;
use crate::input::Input;
use crate::view::View;

static STYLE: LazyLock<String> = LazyLock::new(|| color::style() + include_str!("../../assets/style.css"));
static SCRIPT: &str = include_str!("../../assets/script.js");
/// Nothing is loaded, and nothing runs but the page's own style and script.
static POLICY: LazyLock<String> = LazyLock::new(|| {
    let (style, script) = (hash(&STYLE), hash(SCRIPT));
    format!("default-src 'none'; style-src 'sha256-{style}'; script-src 'sha256-{script}'; base-uri 'none'")
});

/// The page: one HTML file with everything in it, that needs no network and no script to be read.
///
/// It always comes out. Times that are none (`NaN`, infinite, negative) are shown as missing, and every text that was
/// given is only ever shown as text.
pub fn page(input: &Input) -> String {
    let view = View::of(input);
    let mut html = Html::default();
    html.el("html").at("lang", "en");
    head(&mut html, input);
    html.el("body");
    html.el("header").el("div").at("class", "wide");
    html.leaf("h1", "", title(input));
    machine::line(&mut html, input);
    html.end().end();
    html.el("main").at("class", "wide");
    if input.contests.is_empty() {
        let nothing = "Nothing has been measured yet. Measure with 'layerzero tune', then make this page again.";
        html.leaf("p", "empty", nothing);
    } else {
        headline::write(&mut html, input);
        overview::write(&mut html, &view);
    }
    if let Some(regret) = &input.regret {
        histogram::write(&mut html, &view, regret);
    }
    if !input.contests.is_empty() {
        calls::write(&mut html, &view);
        for group in &view.groups {
            operation::write(&mut html, &view, group);
        }
    }
    machine::write(&mut html, input);
    html.end();
    hatching(&mut html);
    html.constant("script", SCRIPT);
    html.end().end();
    html.finish()
}

fn title(input: &Input) -> &str {
    if input.title.trim().is_empty() { "Kernel measurements" } else { &input.title }
}

fn head(html: &mut Html, input: &Input) {
    html.el("head");
    html.el("meta").at("charset", "utf-8").end();
    html.el("meta").at("http-equiv", "Content-Security-Policy").at("content", POLICY.as_str()).end();
    html.el("meta").at("name", "viewport").at("content", "width=device-width, initial-scale=1").end();
    html.el("meta").at("name", "color-scheme").at("content", "light dark").end();
    html.leaf("title", "", title(input));
    html.constant("style", STYLE.as_str());
    html.end();
}

/// The pattern laid over bars whose colour another kernel has too.
fn hatching(html: &mut Html) {
    html.el("svg").at("class", "defs").at("width", 0).at("height", 0).at("aria-hidden", "true");
    html.el("defs").el("pattern").at("id", "hatch").at("width", 6).at("height", 6);
    html.at("patternUnits", "userSpaceOnUse").at("patternTransform", "rotate(45)");
    html.el("rect").at("class", "stripe").at("width", 2.5).at("height", 6).end();
    html.end().end().end();
}

fn hash(text: &str) -> String {
    const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let digest = Sha256::digest(text.as_bytes());
    let mut out = String::new();
    for chunk in digest.chunks(3) {
        let bits = chunk.iter().fold(0u32, |bits, byte| bits << 8 | u32::from(*byte)) << (8 * (3 - chunk.len()));
        for i in 0..4 {
            let c = if i <= chunk.len() { char::from(ALPHABET[(bits >> (18 - 6 * i) & 63) as usize]) } else { '=' };
            let _ = out.write_char(c);
        }
    }
    out
}

#[cfg(test)]
mod tests {
    #[test]
    fn hashes_are_those_browsers_compare() {
        // openssl dgst -sha256 -binary | base64, of "" and of "alert('Hello, world.');" (the example of the standard)
        assert_eq!(super::hash(""), "47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU=");
        assert_eq!(super::hash("alert('Hello, world.');"), "qznLcsROx4GACP2dm0UCKCzCG+HiZ1guq6ZZDob/Tng=");
    }
}
