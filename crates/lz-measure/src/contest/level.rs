//! The level of a round: how fast the machine was while it lasted, in common for all candidates.

use super::statistics::{median, median_of};

/// A candidate's samples: the round and the time of each.
pub(super) struct Track<'a> {
    pub samples: &'a [(u32, f64)],
    /// Whether it has a say in what the levels were.
    pub anchor: bool,
}

/// A candidate's times, freed of the levels of their rounds.
pub(super) struct Leveled {
    /// Its times by the level of their rounds.
    pub times: Vec<f64>,
    /// The median of those.
    pub median: f64,
    /// How many others the levels were found from, in the mean over its rounds.
    pub others: f64,
}

const PASSES: usize = 10;

/// Divides every time by the level of its round; `None` for candidates without samples.
///
/// The level, for a candidate, is the median over the *other* anchors of time by own median. Were its own time among
/// them, it would be the middle one in many rounds, and its noise would vanish in the level. Medians and levels are found
/// in turns. A candidate that is the only anchor keeps its times as they were measured.
pub(super) fn level(tracks: &[Track<'_>]) -> Vec<Option<Leveled>> {
    let mut table = Table::new(tracks);
    let anchors: Vec<usize> = (0..tracks.len()).filter(|&i| table.anchors[i]).collect();
    for _ in 0..PASSES {
        let before = table.medians.clone();
        for &i in &anchors {
            let leveled: Vec<f64> = table.levels(i).map(|at| at.log - at.level).collect();
            table.medians[i] = median(&leveled).unwrap_or(0.0);
        }
        if before.iter().zip(&table.medians).all(|(a, b)| (a - b).abs() < 1e-5) {
            break;
        }
    }
    // Levels are known up to a factor: such that the times are those of the rounds in the middle.
    let raw = |i: usize| median(&tracks[i].samples.iter().map(|s| s.1.ln()).collect::<Vec<f64>>()).unwrap_or(0.0);
    let shifts: Vec<f64> = anchors.iter().map(|&i| raw(i) - table.medians[i]).collect();
    let shift = median(&shifts).unwrap_or(0.0);
    table.medians.iter_mut().for_each(|m| *m += shift);
    let one = |i: usize| {
        let others: usize = table.levels(i).map(|at| at.others).sum();
        let times: Vec<f64> = table.levels(i).zip(tracks[i].samples).map(|(at, s)| s.1 / at.level.exp()).collect();
        Some(Leveled { median: median(&times)?, others: others as f64 / times.len() as f64, times })
    };
    (0..tracks.len()).map(one).collect()
}

/// All times in logarithms, so that of two others both have the same say.
struct Table {
    /// Rows are rounds, columns candidates.
    logs: Vec<Vec<Option<f64>>>,
    anchors: Vec<bool>,
    medians: Vec<f64>,
}

impl Table {
    fn new(tracks: &[Track<'_>]) -> Table {
        let rounds = tracks.iter().flat_map(|t| t.samples).map(|s| s.0 + 1).max().unwrap_or(0);
        let mut logs = vec![vec![None; tracks.len()]; rounds as usize];
        for (i, track) in tracks.iter().enumerate() {
            for &(round, us) in track.samples {
                logs[round as usize][i] = Some(us.ln());
            }
        }
        let column = |i: usize| -> Vec<f64> { logs.iter().filter_map(|row| row[i]).collect() };
        let medians = (0..tracks.len()).map(|i| median(&column(i)).unwrap_or(0.0)).collect();
        let anchors = tracks.iter().map(|t| t.anchor && !t.samples.is_empty()).collect();
        Table { logs, anchors, medians }
    }

    /// The rounds a candidate took part in, as the other anchors saw them.
    fn levels(&self, i: usize) -> impl Iterator<Item = Round> + '_ {
        let mut ratios = Vec::with_capacity(self.medians.len());
        self.logs.iter().filter_map(move |row| {
            let log = row[i]?;
            ratios.clear();
            let others = (0..row.len()).filter(|&j| j != i && self.anchors[j]);
            ratios.extend(others.filter_map(|j| row[j].map(|log| log - self.medians[j])));
            Some(Round { log, others: ratios.len(), level: median_of(&mut ratios).unwrap_or(0.0) })
        })
    }
}

/// A round of one candidate: its time and the level, as logarithms, and how many others told the level.
struct Round {
    log: f64,
    level: f64,
    others: usize,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn leveled(samples: &[&[(u32, f64)]], anchors: &[bool]) -> Vec<Option<Leveled>> {
        let tracks: Vec<Track<'_>> =
            samples.iter().zip(anchors).map(|(samples, &anchor)| Track { samples, anchor }).collect();
        level(&tracks)
    }

    fn close(a: f64, b: f64) -> bool {
        (a / b - 1.0).abs() < 1e-9
    }

    #[test]
    fn what_all_candidates_share_is_taken_out() {
        let levels = [1.0, 2.0, 0.5, 1.0, 4.0];
        let of = |us: f64| -> Vec<(u32, f64)> { levels.iter().zip(0..).map(|(l, r)| (r, us * l)).collect() };
        let (a, b, c) = (of(10.0), of(11.0), of(30.0));
        let leveled = leveled(&[&a, &b, &c], &[true; 3]);
        for (one, us) in leveled.iter().flatten().zip([10.0, 11.0, 30.0]) {
            assert!(close(one.median, us), "{}", one.median);
            assert!(one.times.iter().all(|t| close(*t, us)), "{:?}", one.times);
            assert_eq!(one.others, 2.0);
        }
    }

    #[test]
    fn who_left_early_is_put_on_the_scale_of_those_who_stayed() {
        // The machine was three times slower in the only round the second one ran in.
        let first: Vec<(u32, f64)> = vec![(0, 30.0), (1, 10.0), (2, 10.0), (3, 10.0), (4, 10.0)];
        let leveled = leveled(&[&first, &[(0, 3000.0)]], &[true, false]);
        assert!(close(leveled[0].as_ref().unwrap().median, 10.0));
        assert!(close(leveled[1].as_ref().unwrap().median, 1000.0));
    }

    #[test]
    fn nothing_measured_gives_nothing() {
        assert!(leveled(&[&[], &[]], &[true, true]).iter().all(Option::is_none));
    }
}
