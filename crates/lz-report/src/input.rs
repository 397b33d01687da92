//! What a page is made of.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::color::Paint;
use crate::contest::Contest;
use crate::map::Map;
use crate::regret::{Lost, Regret};
use crate::view::{Group, Placed, View};

/// Everything a page shows.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Input {
    /// The page's title.
    pub title: String,
    /// The devices things were measured on.
    #[serde(default)]
    pub machines: Vec<Machine>,
    /// What was measured.
    #[serde(default)]
    pub contests: Vec<Contest>,
    /// How far from the best the choices are, where that was found out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub regret: Option<Regret>,
    /// What a reader should know besides: what was left out, and why.
    #[serde(default)]
    pub notes: Vec<String>,
    /// Where the measurements come from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<String>,
    /// When the page is made, in milliseconds since 1970.
    #[serde(default)]
    pub generated_at: i64,
}

/// A device things were measured on, and with what.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Machine {
    /// What [`Contest::device`] names it by.
    pub id: String,
    /// Its name, for people.
    pub name: String,
    /// What measurements on it are valid for: `cuda_sm90_cu130`.
    #[serde(default)]
    pub signature: String,
    /// Versions of what was measured with: driver, torch, the libraries.
    #[serde(default)]
    pub versions: BTreeMap<String, String>,
}

/// [`Input`] with what the page makes of it, for those who draw the same elsewhere.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Document<'a> {
    /// What the page shows.
    #[serde(flatten)]
    pub input: &'a Input,
    /// How each kernel is drawn.
    pub colors: BTreeMap<String, Paint>,
    /// Who wins where, operation by operation.
    pub maps: Vec<WinnerMap>,
    /// How many choices lose how much.
    pub lost: Vec<Lost>,
}

/// Who wins where: a grid over the sizes of one operation on one device.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct WinnerMap {
    /// The operation.
    pub op: String,
    /// The device's name, where there are several.
    pub device: Option<String>,
    /// What runs along the columns.
    pub across: String,
    /// The names of the columns.
    pub columns: Vec<String>,
    /// The names of the rows.
    pub rows: Vec<String>,
    /// The cells, row by row; nothing where nothing was measured.
    pub cells: Vec<Vec<Option<Cell>>>,
}

/// One cell of a [`WinnerMap`].
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Cell {
    /// The kernel that wins; nothing where none works.
    pub kernel: Option<String>,
    /// How many times as fast as the baseline it is.
    pub times_baseline: Option<f64>,
}

impl Input {
    /// The input as a document: what `layerzero report --json` prints.
    pub fn document(&self) -> Document<'_> {
        let view = View::of(self);
        let maps = view.groups.iter().filter_map(winner_map).collect();
        let lost = self.regret.as_ref().map(Regret::classes).unwrap_or_default();
        Document { input: self, maps, lost, colors: view.colors.paints() }
    }
}

fn winner_map(group: &Group<'_>) -> Option<WinnerMap> {
    let map = Map::of(group)?;
    let cell = |placed: &Placed<'_>| {
        let contest = placed.contest;
        Cell { kernel: contest.winner().map(|c| c.kernel.clone()), times_baseline: contest.speedup() }
    };
    let row = |cells: Vec<Option<&Placed<'_>>>| cells.into_iter().map(|placed| placed.map(cell)).collect();
    let (rows, cells) = map.rows.into_iter().map(|(name, cells)| (name, row(cells))).unzip();
    let (op, device) = (group.op.to_owned(), group.device.map(str::to_owned));
    Some(WinnerMap { op, device, across: map.across, columns: map.columns, rows, cells })
}
