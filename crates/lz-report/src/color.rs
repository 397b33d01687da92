//! One colour and one letter per kernel, the same in every figure.
//!
//! Kernels that are candidates of one operation never share a letter, and share a colour only when there are more of
//! them than colours; the second round is hatched. Torch's own kernels are grey: what is coloured is another choice.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

use serde::Serialize;

use crate::contest::Contest;

/// A colour on a light and on a dark page. Text on it is white where `white_text` says so, otherwise dark.
pub(crate) struct Ink {
    pub light: &'static str,
    pub dark: &'static str,
    pub white_text: bool,
}

const fn ink(light: &'static str, dark: &'static str, white_text: bool) -> Ink {
    Ink { light, dark, white_text }
}

/// Grey first, then colours that stay apart for colour-blind eyes.
pub(crate) const INKS: &[Ink] = &[
    ink("#8b929d", "#78808e", false),
    ink("#155fa8", "#3f8ff5", true),
    ink("#e07a0f", "#ffad42", false),
    ink("#08815f", "#23bd8e", true),
    ink("#c95bab", "#e886c9", false),
    ink("#3d9cd6", "#a9e1f7", false),
    ink("#92300c", "#ee5f45", true),
    ink("#343b4a", "#f1f3b0", true),
];
/// Text on inks: dark and white.
pub(crate) const TEXTS: [&str; 2] = ["#111318", "#ffffff"];
/// The page behind them: light and dark.
pub(crate) const SURFACES: [&str; 2] = ["#ffffff", "#171a20"];

/// Letters for all but the baseline, whose letter is D.
const LETTERS: &[u8] = b"ABCEFGHJKLMNPQRSTUVWXYZ";

/// How a kernel is drawn.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Paint {
    /// The letter it has in maps.
    pub mark: String,
    /// Its colour on a light page.
    pub color: &'static str,
    /// Whether it is hatched, because another kernel has the colour too.
    pub hatched: bool,
    /// Which ink.
    #[serde(skip)]
    pub(crate) ink: usize,
}

/// Which kernel is drawn how.
#[derive(Default)]
pub(crate) struct Colors(BTreeMap<String, Paint>);

impl Colors {
    /// Deals colours out: operation by operation, the kernels that win most first.
    pub fn of(contests: &[Contest]) -> Colors {
        let mut wins: BTreeMap<&str, BTreeMap<&str, usize>> = BTreeMap::new();
        let mut baselines = BTreeSet::new();
        for contest in contests {
            let kernels = wins.entry(&contest.op).or_default();
            for candidate in &contest.candidates {
                *kernels.entry(&candidate.kernel).or_default() += usize::from(candidate.chosen);
                if candidate.baseline {
                    baselines.insert(candidate.kernel.as_str());
                }
            }
        }
        let mut rivals: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
        for kernels in wins.values() {
            for kernel in kernels.keys() {
                rivals.entry(kernel).or_default().extend(kernels.keys());
            }
        }
        let mut places: BTreeMap<&str, usize> = BTreeMap::new();
        for kernels in wins.values() {
            let mut kernels: Vec<(&str, usize)> = kernels.iter().map(|(kernel, wins)| (*kernel, *wins)).collect();
            kernels.sort_by_key(|(kernel, wins)| (usize::MAX - wins, *kernel));
            for (kernel, _) in kernels {
                if places.contains_key(kernel) {
                    continue;
                }
                let like = rivals[kernel].iter().filter(|k| baselines.contains(*k) == baselines.contains(kernel));
                let taken: BTreeSet<usize> = like.filter_map(|k| places.get(k).copied()).collect();
                let place = (0..).find(|place| !taken.contains(place)).unwrap_or(0);
                places.insert(kernel, place);
            }
        }
        let paint = |(kernel, place): (&str, usize)| (kernel.to_owned(), paint(place, baselines.contains(kernel)));
        Colors(places.into_iter().map(paint).collect())
    }

    /// How a kernel is drawn, if it was measured.
    pub fn get(&self, kernel: &str) -> Option<&Paint> {
        self.0.get(kernel)
    }

    /// All of them.
    pub fn paints(self) -> BTreeMap<String, Paint> {
        self.0
    }
}

fn paint(place: usize, baseline: bool) -> Paint {
    let numbered = |letter: char, round: usize| match round {
        0 => letter.to_string(),
        n => format!("{letter}{}", n + 1),
    };
    let (ink, hatched, mark) = if baseline {
        (0, place % 2 == 1, numbered('D', place))
    } else {
        let colors = INKS.len() - 1;
        let letter = char::from(LETTERS[place % LETTERS.len()]);
        (1 + place % colors, (place / colors) % 2 == 1, numbered(letter, place / LETTERS.len()))
    };
    Paint { mark, color: INKS[ink].light, hatched, ink }
}

/// The colours as a style sheet: variables, and the classes `k0`, `k1`, … that use them.
pub(crate) fn style() -> String {
    let mut css = String::new();
    let variables = |css: &mut String, dark: bool| {
        for (i, ink) in INKS.iter().enumerate() {
            let (color, white) = if dark { (ink.dark, false) } else { (ink.light, ink.white_text) };
            let _ = write!(css, "--k{i}:{color};--t{i}:{};", TEXTS[usize::from(white)]);
        }
        let _ = write!(css, "--surface:{};", SURFACES[usize::from(dark)]);
    };
    css.push_str(":root{");
    variables(&mut css, false);
    css.push_str("}\n@media (prefers-color-scheme:dark){:root{");
    variables(&mut css, true);
    css.push_str("}}\n");
    for i in 0..INKS.len() {
        let _ = writeln!(css, ".k{i}{{background-color:var(--k{i});color:var(--t{i});fill:var(--k{i})}}");
    }
    css
}

#[cfg(test)]
mod tests;
