//! Many contests under one budget: which one goes on next.
//!
//! Every item is visited once, in an order that covers the space of sizes well however early the budget ends. Then the
//! item goes on whose expected loss will shrink most for the time that takes, until all are small or the budget is spent.

use serde::Serialize;

/// What may be spent, and when it is enough.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Budget {
    /// Microseconds altogether.
    pub total_us: f64,
    /// Losses below this are small enough.
    pub enough: f64,
    /// Rounds of a first visit.
    pub first_rounds: u32,
    /// Rounds of every other.
    pub slice_rounds: u32,
}

impl Budget {
    /// So many microseconds, and the usual rest.
    pub fn of_us(total_us: f64) -> Budget {
        Budget { total_us, enough: 0.002, first_rounds: 5, slice_rounds: 10 }
    }
}

/// One contest to be held.
#[derive(Clone, Debug, PartialEq)]
pub struct Item {
    /// What it is known by; any number, each once.
    pub id: usize,
    /// Items of one group can be predicted from one another.
    pub group: String,
    /// How much it matters.
    pub weight: f64,
    /// Where it lies among those of its group: logarithms of its sizes.
    pub features: Vec<f64>,
    /// Microseconds a first visit takes, roughly.
    pub cost_hint_us: f64,
}

/// What to do next.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Slice {
    /// With which item.
    pub id: usize,
    /// For how many rounds.
    pub rounds: u32,
    /// How long it will take, roughly.
    pub estimate_us: f64,
}

/// What came of a slice.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Visit {
    /// What is expected to be lost by stopping now.
    pub loss: f64,
    /// Microseconds it took.
    pub took_us: f64,
    /// Of these, what it takes only once: results are compared with the reference's.
    pub once_us: f64,
    /// More rounds are of no use.
    pub finished: bool,
}

/// How far it is.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Progress {
    /// Items that were visited.
    pub done_items: usize,
    /// Items there are.
    pub items: usize,
    /// Microseconds spent.
    pub spent_us: f64,
    /// Microseconds left, as far as can be said.
    pub left_us: f64,
}

/// What is wrong with a schedule, or with what it is told.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ScheduleError {
    /// A budget that is none.
    #[error("the budget is {0} µs; give a number above zero")]
    Budget(f64),
    /// Two items of one id.
    #[error("item {0} is there twice; give every item an id of its own")]
    Twice(usize),
    /// A number that is none.
    #[error("{what} of item {id} is {value}; give a finite number that is not negative")]
    Number {
        /// The item.
        id: usize,
        /// Which number.
        what: &'static str,
        /// Its value.
        value: f64,
    },
    /// No such item.
    #[error("there is no item {0} in this schedule")]
    Unknown(usize),
}

#[derive(Clone, Debug)]
struct Entry {
    item: Item,
    loss: f64,
    /// Microseconds of a round, once some were held.
    round_us: Option<f64>,
    /// How many times longer than was guessed the first visit took.
    ratio: Option<f64>,
    visited: bool,
    finished: bool,
    known: bool,
    /// Rounds that were held.
    held: u32,
    /// Rounds of the next visit, where they are not the usual ones.
    rounds: Option<u32>,
}

impl Entry {
    /// What a slice is worth. It takes a share off the loss that is the smaller the more rounds there were: what sixty could
    /// not tell, ten more hardly will. That counts by the root of the time it takes: by the time itself large calls would
    /// get none, and if it did not count they would get all.
    fn gain(&self, slice: &Slice) -> f64 {
        let share = f64::from(slice.rounds) / f64::from(self.held.saturating_add(slice.rounds));
        self.item.weight.max(f64::MIN_POSITIVE) * self.loss * share / slice.estimate_us.max(1.0).sqrt()
    }
}

/// Which contest goes on next.
#[derive(Clone, Debug)]
pub struct Schedule {
    budget: Budget,
    entries: Vec<Entry>,
}

impl Schedule {
    /// A schedule for these items.
    pub fn new(budget: Budget, items: Vec<Item>) -> Result<Schedule, ScheduleError> {
        if !(budget.total_us.is_finite() && budget.total_us > 0.0) {
            return Err(ScheduleError::Budget(budget.total_us));
        }
        let mut seen = std::collections::HashSet::new();
        for item in &items {
            if !seen.insert(item.id) {
                return Err(ScheduleError::Twice(item.id));
            }
            for (what, value) in [("the weight", item.weight), ("the cost", item.cost_hint_us)] {
                number(item.id, what, value)?;
            }
            if let Some(&value) = item.features.iter().find(|x| !x.is_finite()) {
                return Err(ScheduleError::Number { id: item.id, what: "a feature", value });
            }
        }
        let entry = |item| Entry {
            item,
            loss: 1.0,
            round_us: None,
            ratio: None,
            visited: false,
            finished: false,
            known: false,
            held: 0,
            rounds: None,
        };
        let entries = covering_order(items).into_iter().map(entry).collect();
        Ok(Schedule { budget, entries })
    }

    /// An item that was measured before, in so many rounds, with what would be lost by going by that.
    pub fn known(&mut self, id: usize, loss: f64, held: u32) -> Result<(), ScheduleError> {
        number(id, "the loss", loss)?;
        let entry = self.entry(id)?;
        (entry.visited, entry.known, entry.loss, entry.held) = (true, true, loss, held);
        Ok(())
    }

    /// An item that was visited is to go on for so many rounds, finished or not: so much is lost if what was measured is
    /// not so.
    pub fn doubt(&mut self, id: usize, loss: f64, rounds: u32) -> Result<(), ScheduleError> {
        number(id, "the loss", loss)?;
        let entry = self.entry(id)?;
        (entry.finished, entry.loss, entry.rounds) = (false, entry.loss.max(loss), Some(rounds));
        Ok(())
    }

    /// What to do next; `None` when the budget is spent, or nothing is worth more time.
    pub fn next(&self, elapsed_us: f64) -> Option<Slice> {
        let left = self.budget.total_us - elapsed_us;
        if left <= 0.0 {
            return None;
        }
        let nothing_yet = !self.entries.iter().any(|e| e.visited && !e.known);
        let fits = |slice: &Slice| slice.estimate_us <= left;
        let mut first = self.entries.iter().filter(|e| !e.visited).map(|e| self.slice(e));
        let first = first.find(|slice| nothing_yet || fits(slice));
        first.or_else(|| {
            let open = self.entries.iter().filter(|e| e.visited && !e.finished && e.loss > self.budget.enough);
            let slices = open.map(|e| (e, self.slice(e))).map(|(e, slice)| (e.gain(&slice), slice));
            let worth = slices.filter(|(_, slice)| nothing_yet || fits(slice));
            // Of equals the first in order.
            worth.reduce(|best, other| if other.0 > best.0 { other } else { best }).map(|(_, slice)| slice)
        })
    }

    /// Tells what came of a slice.
    pub fn done(&mut self, id: usize, visit: Visit) -> Result<(), ScheduleError> {
        number(id, "the loss", visit.loss)?;
        number(id, "the time", visit.took_us)?;
        number(id, "the time of checks", visit.once_us)?;
        let at = self.entries.iter().position(|e| e.item.id == id).ok_or(ScheduleError::Unknown(id))?;
        let rounds = self.slice(&self.entries[at]).rounds;
        let entry = &mut self.entries[at];
        let first = !entry.visited || entry.known;
        entry.rounds = None;
        entry.held = if first { rounds } else { entry.held.saturating_add(rounds) };
        entry.round_us = Some((visit.took_us - visit.once_us).max(0.0) / f64::from(rounds));
        (entry.visited, entry.known, entry.finished, entry.loss) = (true, false, visit.finished, visit.loss);
        if first && entry.item.cost_hint_us > 0.0 {
            entry.ratio = Some(visit.took_us / entry.item.cost_hint_us);
        }
        Ok(())
    }

    /// How far it is.
    pub fn progress(&self, elapsed_us: f64) -> Progress {
        let unvisited: f64 = self.entries.iter().filter(|e| !e.visited).map(|e| self.slice(e).estimate_us).sum();
        let open = self.entries.iter().filter(|e| e.visited && !e.finished && e.loss > self.budget.enough);
        let wanted = unvisited + open.map(|e| self.slice(e).estimate_us).sum::<f64>();
        Progress {
            done_items: self.entries.iter().filter(|e| e.visited).count(),
            items: self.entries.len(),
            spent_us: elapsed_us,
            left_us: wanted.min(self.budget.total_us - elapsed_us).max(0.0),
        }
    }

    fn slice(&self, entry: &Entry) -> Slice {
        let usual = if entry.visited && !entry.known { self.budget.slice_rounds } else { self.budget.first_rounds };
        let rounds = entry.rounds.unwrap_or(usual).max(1);
        let guess = || entry.item.cost_hint_us * self.scale(&entry.item);
        Slice { id: entry.item.id, rounds, estimate_us: entry.round_us.map_or_else(guess, |us| us * f64::from(rounds)) }
    }

    /// How many times longer than guessed a first visit will take: the middle of what was seen, and of the guess itself;
    /// less if the item of its group that is nearest in cost took less. One that had to compile for minutes must not
    /// make all others look unaffordable, nor may small ones that are all overhead make the large ones so.
    fn scale(&self, item: &Item) -> f64 {
        let mut seen: Vec<f64> = self.entries.iter().filter_map(|e| e.ratio).chain([1.0]).collect();
        seen.sort_by(f64::total_cmp);
        let middle = seen[(seen.len() - 1) / 2];
        let apart = |e: &Entry| (e.item.cost_hint_us / item.cost_hint_us).ln().abs();
        let alike = self.entries.iter().filter(|e| e.item.group == item.group && e.ratio.is_some());
        let nearest = alike.min_by(|a, b| apart(a).total_cmp(&apart(b))).and_then(|e| e.ratio);
        nearest.map_or(middle, |ratio| ratio.min(middle))
    }

    fn entry(&mut self, id: usize) -> Result<&mut Entry, ScheduleError> {
        self.entries.iter_mut().find(|e| e.item.id == id).ok_or(ScheduleError::Unknown(id))
    }
}

fn number(id: usize, what: &'static str, value: f64) -> Result<(), ScheduleError> {
    if value.is_finite() && value >= 0.0 { Ok(()) } else { Err(ScheduleError::Number { id, what, value }) }
}

/// Items in an order of which every beginning covers the sizes well: of each group in turn, the item farthest from those
/// before it; of equally far ones the cheaper.
fn covering_order(items: Vec<Item>) -> Vec<Item> {
    let mut groups: Vec<(String, Vec<Item>)> = Vec::new();
    for item in items {
        match groups.iter_mut().find(|(name, _)| *name == item.group) {
            Some((_, group)) => group.push(item),
            None => groups.push((item.group.clone(), vec![item])),
        }
    }
    let mut orders: Vec<std::vec::IntoIter<Item>> =
        groups.into_iter().map(|(_, g)| farthest_first(g).into_iter()).collect();
    let mut ordered = Vec::new();
    loop {
        let before = ordered.len();
        ordered.extend(orders.iter_mut().filter_map(Iterator::next));
        if ordered.len() == before {
            return ordered;
        }
    }
}

fn farthest_first(mut items: Vec<Item>) -> Vec<Item> {
    let cheaper = |a: &Item, b: &Item| a.cost_hint_us.total_cmp(&b.cost_hint_us).then(a.id.cmp(&b.id));
    items.sort_by(cheaper);
    let mut gaps = vec![f64::INFINITY; items.len()];
    let mut ordered: Vec<Item> = Vec::with_capacity(items.len());
    while !items.is_empty() {
        // Sorted by cost, so that of equals the first is the cheapest.
        let mut far = 0;
        for i in 1..items.len() {
            if gaps[i] > gaps[far] {
                far = i;
            }
        }
        let next = items.remove(far);
        gaps.remove(far);
        for (gap, item) in gaps.iter_mut().zip(&items) {
            *gap = gap.min(distance(&item.features, &next.features));
        }
        ordered.push(next);
    }
    ordered
}

fn distance(a: &[f64], b: &[f64]) -> f64 {
    let shared: f64 = a.iter().zip(b).map(|(a, b)| (a - b).powi(2)).sum();
    shared.sqrt() + a.len().abs_diff(b.len()) as f64
}
