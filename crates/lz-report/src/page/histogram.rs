//! How far the choices are from the best.

use crate::figures::{count, fine_ratio, percent, ratio};
use crate::html::Html;
use crate::page::kernel;
use crate::regret::{Lost, NONE, Regret, RegretRow};
use crate::view::View;

/// So many of the worst choices are named.
const NAMED: usize = 6;

pub(crate) fn write(html: &mut Html, view: &View<'_>, regret: &Regret) {
    html.el("section").at("class", "card").leaf("h2", "", "Regret");
    let found = format!(
        "Time lost against the fastest kernel: {} in the geometric mean, {} at worst, over {}. {}",
        fine_ratio(regret.geomean),
        fine_ratio(regret.worst),
        count(regret.rows.len(), "call"),
        regret.about
    );
    html.leaf("p", "about", found.trim());
    html.el("div").at("class", "side");
    bars(html, &regret.classes());
    let mut worst: Vec<&RegretRow> = regret.rows.iter().filter(|row| row.ratio_best > NONE).collect();
    worst.sort_by(|a, b| b.ratio_best.total_cmp(&a.ratio_best));
    if !worst.is_empty() {
        table(html, view, &worst[..worst.len().min(NAMED)]);
    }
    html.end().end();
}

fn bars(html: &mut Html, classes: &[Lost]) {
    let calls = || classes.iter().map(|class| class.calls);
    let (most, total) = (calls().max().unwrap_or(0).max(1), calls().sum::<usize>().max(1));
    let told = classes.iter().map(|class| format!("{}: {}", class.lost, class.calls)).collect::<Vec<_>>().join(", ");
    html.el("svg").at("class", "histogram").at("width", "100%").at("height", 190).at("role", "img");
    html.at("aria-label", format!("Time lost, in calls: {told}"));
    let width = 100.0 / classes.len() as f64;
    for (i, Lost { lost, calls }) in classes.iter().enumerate() {
        let height = 120.0 * *calls as f64 / most as f64;
        let middle = format!("{:.2}%", (i as f64 + 0.5) * width);
        let class = if i == 0 { "best" } else { "lost" };
        html.el("rect").at("class", class).at("x", format!("{:.2}%", (i as f64 + 0.12) * width));
        html.at("width", format!("{:.2}%", 0.76 * width)).at("y", format!("{:.1}", 160.0 - height));
        html.at("height", format!("{:.1}", height.max(1.0))).at("rx", 2).end();
        if *calls > 0 {
            let y = |lift: f64| format!("{:.1}", 160.0 - height - lift);
            html.el("text").at("class", "strong").at("x", &middle).at("y", y(18.0)).at("text-anchor", "middle");
            html.text(calls).end();
            html.el("text").at("x", &middle).at("y", y(5.0)).at("text-anchor", "middle");
            html.text(percent(*calls as f64 / total as f64)).end();
        }
        html.el("text").at("x", &middle).at("y", 178).at("text-anchor", "middle").text(lost).end();
    }
    html.end();
}

fn table(html: &mut Html, view: &View<'_>, rows: &[&RegretRow]) {
    html.el("div").at("class", "scroll").at("tabindex", 0).at("role", "region").at("aria-label", "Largest regrets");
    html.el("table").at("class", "plain").leaf("caption", "", "Where most is lost").el("thead").el("tr");
    for (class, name) in [("", "call"), ("", "chosen, and the fastest"), ("n", "lost"), ("n", "× baseline")] {
        html.leaf("th", class, name);
    }
    html.end().end().el("tbody");
    for row in rows {
        html.el("tr").el("td").leaf("span", "", &row.op).leaf("span", "variant", &row.label).end();
        html.el("td");
        for kernel in [&row.chosen, &row.best] {
            html.el("div");
            kernel::name(html, &view.colors, kernel);
            html.end();
        }
        html.end();
        html.leaf("td", "n", fine_ratio(row.ratio_best));
        html.leaf("td", "n", row.ratio_baseline.map_or_else(|| "–".to_owned(), ratio)).end();
    }
    html.end().end().end();
}
