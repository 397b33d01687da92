//! The kernels of one call, as bars.

use crate::contest::{Candidate, Contest, Outcome};
use crate::figures::{percent, ratio, short, tick, time};
use crate::html::Html;
use crate::page::calls::{sentence, shown_label};
use crate::page::kernel;
use crate::scale::Scale;
use crate::view::{Placed, View};

pub(crate) fn write(html: &mut Html, view: &View<'_>, placed: &Placed<'_>) {
    let contest = placed.contest;
    html.el("article").at("class", "contest").at("id", &placed.anchor);
    html.el("table").el("caption");
    html.leaf("span", "shape", shown_label(contest));
    html.leaf("span", "pill", short(&contest.dtype)).leaf("span", "pill", &contest.mode);
    if !contest.variant.is_empty() {
        html.leaf("span", "variant", &contest.variant);
    }
    html.end();
    let timed: Vec<(&Candidate, f64)> = contest.candidates.iter().filter_map(|c| Some((c, c.time()?))).collect();
    let floor = contest.least();
    let scale = scale(&timed, floor);
    html.el("colgroup");
    for class in ["who", "bar", "time", "times"] {
        html.el("col").at("class", class).end();
    }
    html.end().el("thead").at("class", "unseen").el("tr");
    for name in ["kernel", "time as a bar", "median", "times the baseline's speed"] {
        html.el("th").at("scope", "col").text(name).end();
    }
    html.end().end().el("tbody");
    for (candidate, us) in &timed {
        timed_row(html, view, contest, candidate, *us, scale, floor);
    }
    if !timed.is_empty() {
        axis(html, contest, scale, floor);
    }
    for candidate in contest.candidates.iter().filter(|c| c.time().is_none()) {
        broken_row(html, view, candidate);
    }
    html.end().end().end();
}

fn scale(timed: &[(&Candidate, f64)], floor: Option<f64>) -> Scale {
    let times: Vec<f64> = timed.iter().map(|(_, us)| *us).collect();
    let ends = timed.iter().map(|(c, us)| us + c.spread());
    Scale::of(&times, &ends.chain(floor).collect::<Vec<f64>>())
}

fn name_cell(html: &mut Html, view: &View<'_>, candidate: &Candidate) {
    html.el("th").at("scope", "row").el("span").at("class", "naming");
    kernel::name(html, &view.colors, &candidate.kernel);
    if candidate.chosen {
        html.el("span").at("class", "tick-mark").at("title", "chosen").text("✓").leaf("span", "unseen", "chosen").end();
    }
    if candidate.baseline {
        html.leaf("span", "badge", "baseline");
    }
    html.end().end();
}

fn timed_row(
    html: &mut Html,
    view: &View<'_>,
    contest: &Contest,
    candidate: &Candidate,
    us: f64,
    scale: Scale,
    floor: Option<f64>,
) {
    html.el("tr").at("title", sentence(candidate));
    if candidate.chosen {
        html.at("class", "is-chosen");
    }
    name_cell(html, view, candidate);
    html.el("td").at("class", "bar");
    html.el("svg").at("width", "100%").at("height", 22).at("aria-hidden", "true");
    let width = format!("{:.2}%", scale.at(us));
    let paint = view.colors.get(&candidate.kernel);
    let class = paint.map_or_else(|| "k0".to_owned(), |paint| format!("k{}", paint.ink));
    html.el("rect").at("class", class).at("y", 4).at("width", &width).at("height", 14).at("rx", 2).end();
    if paint.is_some_and(|paint| paint.hatched) {
        html.el("rect").at("fill", "url(#hatch)").at("y", 4).at("width", &width).at("height", 14).end();
    }
    if candidate.spread() > 0.0 {
        whisker(html, scale.at((us - candidate.spread()).max(0.0)), scale.at(us + candidate.spread()));
    }
    if let Some(floor) = floor {
        vertical(html, "floor", scale.at(floor), 0, 22);
    }
    html.end().end();
    html.leaf("td", "n", time(us));
    let against = contest.baseline_kernel().and_then(Candidate::time).map(|baseline| baseline / us);
    html.leaf("td", "n times", against.map(ratio).unwrap_or_default());
    html.end();
}

fn whisker(html: &mut Html, from: f64, to: f64) {
    html.el("line").at("class", "whisker").at("x1", format!("{from:.2}%")).at("x2", format!("{to:.2}%"));
    html.at("y1", 11).at("y2", 11).end();
    vertical(html, "whisker", from, 8, 14);
    vertical(html, "whisker", to, 8, 14);
}

fn vertical(html: &mut Html, class: &'static str, at: f64, y1: u32, y2: u32) {
    let at = format!("{at:.2}%");
    html.el("line").at("class", class).at("x1", &at).at("x2", &at).at("y1", y1).at("y2", y2).end();
}

fn axis(html: &mut Html, contest: &Contest, scale: Scale, floor: Option<f64>) {
    html.el("tr").at("class", "axis").el("td").at("class", "note");
    if let Some(floor) = floor {
        html.leaf("span", "floor-key", "floor").text(format!(" {}", time(floor)));
        if let Some(over) = contest.over_floor() {
            html.text(format!(", {} reached", percent(1.0 / over)));
        }
    }
    html.end().el("td").at("class", "bar").el("svg").at("width", "100%").at("height", 16).at("aria-hidden", "true");
    let ticks = scale.ticks();
    for us in &ticks {
        let at = scale.at(*us);
        vertical(html, "tick", at, 0, 3);
        let anchor = match at {
            a if a < 6.0 => "start",
            a if a > 92.0 => "end",
            _ => "middle",
        };
        html.el("text").at("x", format!("{at:.2}%")).at("y", 14).at("text-anchor", anchor).text(tick(*us)).end();
    }
    html.end().end();
    html.leaf("td", "note n", if scale.is_log() { "log scale" } else { "" }).leaf("td", "", "").end();
}

fn broken_row(html: &mut Html, view: &View<'_>, candidate: &Candidate) {
    html.el("tr").at("class", "broken");
    name_cell(html, view, candidate);
    html.el("td").at("colspan", 3);
    let word = match candidate.outcome {
        Outcome::Wrong => "wrong result",
        Outcome::Failed => "failed",
        Outcome::Ok => "no time",
    };
    html.leaf("span", "bad", word);
    error(html, candidate.error.as_deref().unwrap_or_default().trim());
    html.end().end();
}

/// An error in one line, or a line that opens to all of it.
fn error(html: &mut Html, text: &str) {
    const LONGEST: usize = 90;
    // Of a traceback the last line says what happened.
    let line = text.lines().map(str::trim).rfind(|line| !line.is_empty()).unwrap_or_default();
    let short: String = line.chars().take(LONGEST).collect();
    if short.is_empty() {
        return;
    }
    if short == text {
        html.text(": ").leaf("span", "error", short);
        return;
    }
    let dots = if short.len() < line.len() { "…" } else { "" };
    html.el("details").el("summary").leaf("span", "error", format!("{short}{dots}")).end();
    html.leaf("pre", "", text).end();
}
