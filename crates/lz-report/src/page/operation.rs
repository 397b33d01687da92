//! One operation: its kernels, who wins where, and every call.

use std::collections::BTreeMap;

use lz_model::Catalog;

use crate::contest::{Candidate, Outcome};
use crate::figures::{count, geomean, ratio};
use crate::html::Html;
use crate::page::{bars, kernel, map};
use crate::summary::Summary;
use crate::view::{Group, View};

/// So many calls are shown at once; the others open.
const SHOWN: usize = 6;

pub(crate) fn write(html: &mut Html, view: &View<'_>, group: &Group<'_>) {
    html.el("section").at("class", "card op").at("id", &group.anchor);
    html.el("h2").text(group.op);
    if let Some(device) = group.device {
        html.leaf("span", "on", device);
    }
    html.end();
    html.leaf("p", "about", about(group));
    html.el("div").at("class", "side");
    kernels(html, view, group);
    map::write(html, view, group);
    html.end();
    let (shown, more) = group.contests.split_at(group.contests.len().min(SHOWN));
    html.el("div").at("class", "contests");
    shown.iter().for_each(|placed| bars::write(html, view, placed));
    html.end();
    if !more.is_empty() {
        html.el("details").at("class", "more").leaf("summary", "", count(more.len(), "more call"));
        html.el("div").at("class", "contests");
        more.iter().for_each(|placed| bars::write(html, view, placed));
        html.end().end();
    }
    html.end();
}

fn about(group: &Group<'_>) -> String {
    let summary = Summary::of(group.iter());
    let schema = Catalog::get().ops().iter().find(|op| op.id() == group.op).map(|op| op.schema().summary);
    let mut words: Vec<String> = schema.map(str::to_owned).into_iter().collect();
    words.push(count(group.contests.len(), "call"));
    words.extend(summary.speedup.map(|s| format!("{} the baseline's speed", ratio(s.geomean))));
    if let (known @ 1.., other) = summary.other {
        words.push(format!("another kernel than the baseline in {other} of {known}"));
    }
    words.join(" · ")
}

/// How a kernel did over all calls.
#[derive(Default)]
struct Tally {
    chosen: usize,
    measured: usize,
    broken: usize,
    against: Vec<f64>,
    baseline: bool,
}

fn kernels(html: &mut Html, view: &View<'_>, group: &Group<'_>) {
    let mut tallies: BTreeMap<&str, Tally> = BTreeMap::new();
    for contest in group.iter() {
        let baseline = contest.baseline_kernel().and_then(Candidate::time);
        for candidate in &contest.candidates {
            let tally = tallies.entry(&candidate.kernel).or_default();
            tally.chosen += usize::from(candidate.chosen);
            tally.measured += usize::from(candidate.time().is_some());
            tally.broken += usize::from(candidate.outcome != Outcome::Ok);
            tally.against.extend(baseline.zip(candidate.time()).map(|(baseline, us)| baseline / us));
            tally.baseline |= candidate.baseline;
        }
    }
    let mut tallies: Vec<(&str, Tally)> = tallies.into_iter().collect();
    tallies.sort_by_key(|(kernel, s)| (usize::MAX - s.chosen, usize::MAX - s.measured, *kernel));
    html.el("div").at("class", "scroll").at("tabindex", 0).at("role", "region").at("aria-label", "Kernels");
    html.el("table").at("class", "kernels").leaf("caption", "unseen", "Kernels").el("thead").el("tr");
    html.leaf("th", "", "kernel").leaf("th", "n", "chosen").leaf("th", "n", "measured");
    html.leaf("th", "n", "× baseline").leaf("th", "n", "unusable").end().end().el("tbody");
    for (id, tally) in tallies {
        html.el("tr").el("th").at("scope", "row");
        kernel::name(html, &view.colors, id);
        if tally.baseline {
            html.leaf("span", "badge", "baseline");
        }
        html.end().leaf("td", "n", tally.chosen).leaf("td", "n", tally.measured);
        html.leaf("td", "n", geomean(tally.against).map_or_else(|| "–".to_owned(), ratio));
        html.leaf("td", if tally.broken > 0 { "n bad" } else { "n" }, tally.broken).end();
    }
    html.end().end().end();
}
