//! Every call as a dot: how many times as fast as the baseline, operation by operation.

use crate::contest::Contest;
use crate::figures::{ratio, time};
use crate::html::Html;
use crate::summary::Summary;
use crate::view::{Group, Placed, View};

/// A logarithmic axis of ratios that always shows 1.
struct Axis {
    low: f64,
    high: f64,
}

impl Axis {
    fn of(ratios: impl Iterator<Item = f64>) -> Axis {
        // What is further away is at the end of the axis.
        let ratios = ratios.map(|r| r.clamp(1e-3, 1e5));
        let (low, high) = ratios.fold((0.9_f64, 1.25_f64), |(low, high), r| (low.min(r), high.max(r)));
        Axis { low: low / 1.06, high: high * 1.06 }
    }

    fn at(&self, ratio: f64) -> f64 {
        ((ratio / self.low).ln() / (self.high / self.low).ln()).clamp(0.0, 1.0) * 100.0
    }

    /// Powers of two, or of a power of two where there would be too many; in a short range more.
    fn ticks(&self) -> Vec<f64> {
        let inside = |t: &f64| *t >= self.low && *t <= self.high;
        let octaves = (self.high / self.low).log2();
        if octaves < 1.3 {
            return [0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.4, 1.6, 1.8].into_iter().filter(inside).collect();
        }
        let every = ((octaves / 6.0).ceil() as i32).max(1);
        (-40..=40).map(|i| 2f64.powi(i * every)).filter(inside).collect()
    }
}

pub(crate) fn write(html: &mut Html, view: &View<'_>) {
    let all = || view.groups.iter().flat_map(Group::iter).filter_map(Contest::speedup);
    if all().next().is_none() {
        return;
    }
    let axis = Axis::of(all());
    html.el("section").at("class", "card").leaf("h2", "", "Speed over the baseline");
    let about = "Each dot is a call; its place is the time of torch's own kernel over that of the chosen one, its colour \
                 the chosen kernel. Grey: the baseline itself is chosen. The bar is the geometric mean.";
    html.leaf("p", "about", about);
    html.el("table").at("class", "strips").el("thead").el("tr");
    html.leaf("th", "", "operation").leaf("th", "n calls", "calls").el("th").at("class", "strip");
    ruler(html, &axis);
    html.end().leaf("th", "n", "mean").leaf("th", "n range", "least – most").end().end();
    html.el("tbody");
    for group in &view.groups {
        let Some(speedup) = Summary::of(group.iter()).speedup else { continue };
        html.el("tr").el("th").at("scope", "row");
        html.el("a").at("href", format!("#{}", group.anchor)).text(group.op).end();
        if let Some(device) = group.device {
            html.leaf("span", "on", device);
        }
        html.end();
        html.leaf("td", "n calls", group.contests.len());
        html.el("td").at("class", "strip");
        strip(html, view, group, &axis, speedup.geomean);
        html.end();
        html.leaf("td", "n strong", ratio(speedup.geomean));
        html.leaf("td", "n range", format!("{} – {}", ratio(speedup.least), ratio(speedup.most)));
        html.end();
    }
    html.end().end().end();
}

fn ruler(html: &mut Html, axis: &Axis) {
    html.el("svg").at("class", "ruler").at("width", "100%").at("height", 18).at("aria-hidden", "true");
    for tick in axis.ticks() {
        let at = format!("{:.2}%", axis.at(tick));
        html.el("text").at("x", at).at("y", 13).at("text-anchor", "middle").text(short(tick)).end();
    }
    html.end();
}

fn strip(html: &mut Html, view: &View<'_>, group: &Group<'_>, axis: &Axis, geomean: f64) {
    let what = format!("{} calls, mean {}", group.contests.len(), ratio(geomean));
    html.el("svg").at("width", "100%").at("height", 34).at("role", "img").at("aria-label", what);
    html.el("rect").at("class", "slower").at("width", format!("{:.2}%", axis.at(1.0))).at("height", 34).end();
    for tick in axis.ticks() {
        let at = format!("{:.2}%", axis.at(tick));
        let class = if tick == 1.0 { "one" } else { "grid" };
        html.el("line").at("class", class).at("x1", &at).at("x2", &at).at("y1", 0).at("y2", 34).end();
    }
    for (i, placed) in group.contests.iter().enumerate() {
        let Some(ratio) = placed.contest.speedup() else { continue };
        dot(html, view, placed, axis.at(ratio), [17, 11, 23, 7, 27][i % 5]);
    }
    let at = axis.at(geomean);
    html.el("line").at("class", "mean").at("x1", format!("{at:.2}%")).at("x2", format!("{at:.2}%"));
    html.at("y1", 3).at("y2", 31).end().end();
}

fn dot(html: &mut Html, view: &View<'_>, placed: &Placed<'_>, x: f64, y: u32) {
    let contest = placed.contest;
    let paint = contest.winner().and_then(|c| view.colors.get(&c.kernel));
    let class = paint.map_or_else(|| "dot".to_owned(), |paint| format!("dot k{}", paint.ink));
    html.el("circle").at("class", class).at("cx", format!("{x:.2}%")).at("cy", y).at("r", 4);
    let chosen = contest.winner().and_then(|c| Some(format!("{}, {}", c.kernel, time(c.time()?)))).unwrap_or_default();
    let times = contest.speedup().map(ratio).unwrap_or_default();
    let (label, dtype, mode) = (&contest.label, &contest.dtype, &contest.mode);
    html.leaf("title", "", format!("{label} · {dtype} · {mode}: {times} ({chosen})")).end();
}

/// `2×`, `½×` without needless digits.
fn short(tick: f64) -> String {
    let text = format!("{tick:.3}");
    format!("{}×", text.trim_end_matches('0').trim_end_matches('.'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_axis_shows_one_and_few_ticks() {
        for ratios in [vec![], vec![1.0], vec![0.2, 40.0], vec![1e-9, 1e9], vec![1.01]] {
            let axis = Axis::of(ratios.iter().copied());
            let ticks = axis.ticks();
            assert!(ticks.contains(&1.0) && (2..=9).contains(&ticks.len()), "{ratios:?}: {ticks:?}");
            assert!(ratios.iter().all(|r| (0.0..=100.0).contains(&axis.at(*r))));
        }
        assert_eq!((short(2.0), short(0.25), short(1.1)), ("2×".into(), "0.25×".into(), "1.1×".into()));
    }
}
