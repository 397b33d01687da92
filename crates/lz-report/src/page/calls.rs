//! Every call in a table that can be sorted and searched.

use crate::contest::{Candidate, Contest};
use crate::figures::{count, ratio, short, time};
use crate::html::Html;
use crate::page::kernel;
use crate::view::{Group, Placed, View};

pub(crate) fn write(html: &mut Html, view: &View<'_>) {
    let calls = view.groups.iter().map(|g| g.contests.len()).sum::<usize>();
    let devices = view.groups.iter().any(|g| g.device.is_some());
    html.el("section").at("class", "card").at("id", "calls").leaf("h2", "", "Calls");
    html.el("div").at("class", "tools").at("hidden", "hidden");
    html.el("label").text("search ").el("input").at("type", "search").at("id", "search").end().end();
    html.el("label").el("input").at("type", "checkbox").at("id", "others").end();
    html.text(" only where another kernel than the baseline runs").end();
    html.el("output").at("id", "shown").text(count(calls, "call")).end();
    html.end();
    html.el("div").at("class", "scroll").at("tabindex", 0).at("role", "region").at("aria-label", "Calls");
    html.el("table").at("class", "calls sortable").el("thead").el("tr");
    let numbers = ["time", "× baseline", "÷ floor"];
    for name in
        ["operation", "shape", "dtype", "mode", "device", "chosen", "time", "× baseline", "÷ floor", "runner-up"]
    {
        if name != "device" || devices {
            html.el("th")
                .at("scope", "col")
                .at("class", if numbers.contains(&name) { "n" } else { "" })
                .text(name)
                .end();
        }
    }
    html.end().end().el("tbody");
    for group in &view.groups {
        for placed in &group.contests {
            row(html, view, group, placed);
        }
    }
    html.end().end().end().end();
}

fn row(html: &mut Html, view: &View<'_>, group: &Group<'_>, placed: &Placed<'_>) {
    let contest = placed.contest;
    html.el("tr");
    if contest.beats_default() == Some(true) {
        html.at("data-other", "1");
    }
    html.leaf("td", "", group.op);
    html.el("td").el("a").at("href", format!("#{}", placed.anchor)).text(shown_label(contest)).end();
    if group.variants && !contest.variant.is_empty() {
        html.leaf("span", "variant", &contest.variant);
    }
    html.end();
    html.leaf("td", "", short(&contest.dtype)).leaf("td", "", &contest.mode);
    if let Some(device) = group.device {
        html.leaf("td", "", device);
    }
    html.el("td");
    match &contest.chosen {
        Some(chosen) => kernel::name(html, &view.colors, chosen),
        None => drop(html.leaf("span", "bad", "none works")),
    }
    if let Some(faster) = contest.passes_over() {
        let why = format!("{} was measured faster", faster.kernel);
        html.el("span").at("class", "over").at("title", why).text("not the fastest").end();
    }
    html.end();
    number(html, contest.chosen_us(), time, "");
    let class = match contest.speedup() {
        Some(ratio) if ratio >= 1.05 => "good",
        Some(ratio) if ratio <= 0.95 => "bad",
        _ => "",
    };
    number(html, contest.speedup(), ratio, class);
    number(html, contest.over_floor(), ratio, "");
    html.el("td");
    if let Some(second) = contest.candidates.iter().find(|c| Some(&c.kernel) == contest.runner_up.as_ref()) {
        kernel::name(html, &view.colors, &second.kernel);
        if let Some(slower) = second.time().zip(contest.chosen_us()).map(|(s, c)| s / c) {
            html.leaf("span", "slower-by", ratio(slower));
        }
    }
    html.end().end();
}

/// The label, or something in its place.
pub(crate) fn shown_label(contest: &Contest) -> &str {
    if contest.label.is_empty() { "(no sizes)" } else { &contest.label }
}

fn number(html: &mut Html, value: Option<f64>, text: fn(f64) -> String, class: &str) {
    html.el("td").at("class", format!("n {class}").trim_end());
    match value {
        Some(value) => html.at("data-v", value).text(text(value)),
        None => html.text("–"),
    };
    html.end();
}

/// How a candidate did, in a sentence.
pub(crate) fn sentence(candidate: &Candidate) -> String {
    let Some(us) = candidate.time() else { return candidate.kernel.clone() };
    let mut text = format!("{}: median {} ± {}", candidate.kernel, time(us), time(candidate.spread()));
    if let Some(p95) = candidate.p95_us.filter(|us| us.is_finite()) {
        text += &format!(", p95 {}", time(p95));
    }
    text += &format!(", {}", count(candidate.samples as usize, "round"));
    if let Some(ms) = candidate.warmup_ms.filter(|ms| ms.is_finite()) {
        text += &format!(", first call {}", time(ms * 1e3));
    }
    text
}
