//! Which kernel wins where, in colour.

use crate::figures::{ratio, time};
use crate::html::Html;
use crate::map::Map;
use crate::page::calls::shown_label;
use crate::page::kernel;
use crate::view::{Group, Placed, View};

pub(crate) fn write(html: &mut Html, view: &View<'_>, group: &Group<'_>) {
    let Some(map) = Map::of(group) else { return };
    html.el("div").at("class", "scroll map").at("tabindex", 0).at("role", "region");
    html.at("aria-label", format!("Winners of {}", group.op));
    html.el("table").leaf("caption", "", "Who wins where, and by how much over the baseline");
    html.el("thead");
    if !map.across.is_empty() {
        html.el("tr").el("td").end();
        html.el("th").at("colspan", map.columns.len()).at("scope", "colgroup").text(&map.across).end().end();
    }
    html.el("tr").el("td").end();
    for name in &map.columns {
        html.el("th").at("scope", "col").text(name).end();
    }
    html.end().end().el("tbody");
    for (name, cells) in &map.rows {
        html.el("tr").el("th").at("scope", "row").text(name).end();
        for placed in cells {
            match placed {
                Some(placed) => cell(html, view, placed),
                None => drop(html.el("td").end()),
            }
        }
        html.end();
    }
    html.end().end().end();
}

fn cell(html: &mut Html, view: &View<'_>, placed: &Placed<'_>) {
    let contest = placed.contest;
    let Some((winner, us)) = contest.winner().and_then(|c| Some((c, c.time()?))) else {
        html.el("td").at("class", "none").at("title", format!("{}: no kernel works", shown_label(contest)));
        html.el("a").at("href", format!("#{}", placed.anchor)).text("✕").end().end();
        return;
    };
    let paint = view.colors.get(&winner.kernel);
    let mut what =
        format!("{} · {} · {}: {}, {}", shown_label(contest), contest.dtype, contest.mode, winner.kernel, time(us));
    if let Some(second) = &contest.runner_up {
        what += &format!("; then {second}");
    }
    let over = contest.passes_over();
    if let Some(faster) = over {
        what += &format!("; {} was measured faster", faster.kernel);
    }
    html.el("td").at("class", paint.map(kernel::class).unwrap_or_default()).at("title", what);
    html.el("a").at("href", format!("#{}", placed.anchor));
    html.leaf("b", "", paint.map_or("?", |paint| paint.mark.as_str()));
    if let Some(speedup) = contest.speedup() {
        html.leaf("span", "", ratio(speedup));
    }
    if over.is_some() {
        html.leaf("i", "", "▾");
    }
    html.end().end();
}
