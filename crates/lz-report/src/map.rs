//! Which kernel wins where: a grid over the sizes that vary.

use std::collections::{BTreeMap, BTreeSet};

use crate::contest::Contest;
use crate::figures::short;
use crate::shape;
use crate::view::{Group, Placed};

/// Where along an axis: by words first, then by sizes.
type Key = (Vec<String>, Vec<i64>);

/// A grid: one dimension along the columns, everything else that varies along the rows.
pub(crate) struct Map<'a> {
    /// What runs along the columns; empty when no size varies.
    pub across: String,
    /// The names of the columns.
    pub columns: Vec<String>,
    /// The names of the rows, and their cells.
    pub rows: Vec<(String, Vec<Option<&'a Placed<'a>>>)>,
}

/// Of dimensions with equally many sizes, which one is the columns'.
const FIRST: &[&str] = &["seq_q", "seq_k", "seq", "rows", "tokens", "batch"];

impl<'a> Map<'a> {
    /// `None` where there is nothing to lay out, or hardly any row has more than one call.
    pub fn of(group: &'a Group<'a>) -> Option<Map<'a>> {
        let contests = &group.contests;
        let dims = independent(group);
        let across = column_dims(group, &dims);
        let down: Vec<&str> = dims.iter().filter(|d| **d != across).flatten().copied().collect();
        let differs = |text: fn(&Contest) -> &str| group.iter().map(text).collect::<BTreeSet<_>>().len() > 1;
        let words: Vec<fn(&Contest) -> &str> = [
            (|c: &Contest| short(&c.dtype)) as fn(&Contest) -> &str,
            |c| c.mode.as_str(),
            |c| c.variant.as_str(),
            // Calls that could not be bound have no dimensions, only a label.
            |c| if c.dims.is_empty() { c.label.as_str() } else { "" },
        ]
        .into_iter()
        .filter(|text| differs(*text))
        .collect();
        let sizes = |c: &Contest, names: &[&str]| -> Vec<i64> {
            names.iter().filter_map(|n| c.dims.get(*n).copied()).collect()
        };
        let named = |c: &Contest, names: &[&'a str]| -> Vec<(&'a str, i64)> {
            names.iter().filter_map(|n| Some((*n, *c.dims.get(*n)?))).collect()
        };
        let (mut columns, mut rows, mut cells) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        for placed in contests {
            let contest = placed.contest;
            let column = sizes(contest, &across);
            let name = if column.windows(2).all(|w| w[0] == w[1]) {
                column.first().map(i64::to_string).unwrap_or_default()
            } else {
                shape::label(&named(contest, &across))
            };
            columns.insert(column.clone(), name);
            let texts: Vec<String> = words.iter().map(|text| text(contest).to_owned()).collect();
            let mut told: Vec<String> = texts.iter().filter(|t| !t.is_empty()).cloned().collect();
            told.extend(Some(shape::label(&named(contest, &down))).filter(|label| !label.is_empty()));
            let row = (texts, sizes(contest, &down));
            rows.insert(row.clone(), told.join(" · "));
            cells.entry((row, column)).or_insert(placed);
        }
        let scattered = rows.len() > 8 && columns.len() > 1 && cells.len() * 4 < rows.len() * columns.len();
        (cells.len() > 1 && !scattered).then(|| {
            let row = |(key, name): (Key, String)| {
                let cells = columns.keys().map(|column| cells.get(&(key.clone(), column.clone())).copied());
                (name, cells.collect())
            };
            let rows = rows.into_iter().map(row).collect();
            Map { across: axis_name(&across), rows, columns: columns.into_values().collect() }
        })
    }
}

/// The dimensions that vary; those that always vary together stand together.
fn independent<'a>(group: &'a Group<'a>) -> Vec<Vec<&'a str>> {
    let Some(first) = group.contests.first() else { return Vec::new() };
    let order = shape::dim_order(group.op);
    let place = |name: &str| order.iter().position(|n| *n == name).unwrap_or(order.len());
    let mut names: Vec<&str> = first.contest.dims.keys().map(String::as_str).collect();
    names.sort_by_key(|name| (place(name), *name));
    let column = |name: &str| -> Vec<Option<i64>> { group.iter().map(|c| c.dims.get(name).copied()).collect() };
    let mut sets: Vec<Vec<&str>> = Vec::new();
    for name in names {
        let values = column(name);
        if values.iter().all(|v| *v == values[0]) {
            continue;
        }
        let together = |set: &&mut Vec<&str>| {
            let other = column(set[0]);
            let pairs: BTreeSet<_> = values.iter().zip(&other).collect();
            let distinct = |values: &[Option<i64>]| values.iter().collect::<BTreeSet<_>>().len();
            pairs.len() == distinct(&values) && pairs.len() == distinct(&other)
        };
        match sets.iter_mut().find(together) {
            Some(set) => set.push(name),
            None => sets.push(vec![name]),
        }
    }
    sets
}

/// The dimensions with the most sizes.
fn column_dims<'a>(group: &Group<'_>, sets: &[Vec<&'a str>]) -> Vec<&'a str> {
    let sizes = |set: &Vec<&str>| group.iter().map(|c| c.dims.get(set[0])).collect::<BTreeSet<_>>().len();
    let rank = |set: &Vec<&str>| FIRST.iter().position(|name| set.contains(name)).unwrap_or(FIRST.len());
    sets.iter().max_by_key(|set| (sizes(set), usize::MAX - rank(set))).cloned().unwrap_or_default()
}

fn axis_name(dims: &[&str]) -> String {
    match dims {
        ["seq_q", "seq_k"] => "seq".to_owned(),
        names => names.join(", ").replace('_', " "),
    }
}
