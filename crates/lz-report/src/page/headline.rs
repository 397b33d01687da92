//! The figures at the top.

use crate::figures::{count, fine_ratio, percent, ratio};
use crate::html::Html;
use crate::input::Input;
use crate::summary::Summary;

pub(crate) fn write(html: &mut Html, input: &Input) {
    let summary = Summary::of(&input.contests);
    html.el("section").at("aria-label", "Headline figures");
    html.el("dl").at("class", "tiles");
    if let Some(speedup) = summary.speedup {
        let range = format!("{} to {}", ratio(speedup.least), ratio(speedup.most));
        let class = if speedup.geomean < 0.995 { "slow" } else { "fast" };
        tile(html, class, "against the baseline", &ratio(speedup.geomean), &format!("geometric mean; {range}"));
    } else {
        tile(html, "", "against the baseline", "–", "no call on which both were measured");
    }
    let (known, other) = summary.other;
    if known > 0 {
        let part = percent(other as f64 / known as f64);
        tile(html, "", "another kernel wins", &part, &format!("{other} of {}", count(known, "call")));
    }
    if let Some(regret) = &input.regret {
        let calls = count(regret.rows.len(), "call");
        let worst = format!("against the fastest; worst {}, {calls}", fine_ratio(regret.worst));
        tile(html, "", "regret", &fine_ratio(regret.geomean), &worst);
    }
    if let Some(part) = summary.of_roofline {
        tile(html, "", "of the roofline", &percent(part), "reached by the chosen kernel, median");
    }
    let over = format!("{}, {}", count(summary.ops, "operation"), count(summary.kernels, "kernel"));
    tile(html, "", "calls measured", &summary.measured.to_string(), &over);
    if summary.wrong + summary.failed > 0 {
        let what = format!("{} wrong, {} failed", summary.wrong, summary.failed);
        tile(html, "", "not usable", &(summary.wrong + summary.failed).to_string(), &what);
    }
    html.end().end();
}

fn tile(html: &mut Html, class: &str, what: &str, figure: &str, more: &str) {
    html.el("div").at("class", class).leaf("dt", "", what).leaf("dd", "figure", figure).leaf("dd", "more", more).end();
}
