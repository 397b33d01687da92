//! How a kernel compares with another that was timed beside it.

use lz_model::MAX_DIMS;

use super::{Point, REACH, Says, UNTESTED, distance, median};

/// What a ratio is taken to be off by, relative, where it was not measured and its neighbours agree. Without it a single neighbour
/// would be certain.
const ELSEWHERE: f64 = 0.05;
/// How much more a ratio may be off for each doubling of sizes between the call and the nearest that was measured. Leaving out one
/// model at a time, it costs 0.9% of speed eager and 1.4% in graphs, and 4 choices of 440 are slower than 0.95 of plain torch instead
/// of 12 (`bench/results/ablation.md`).
const PER_DOUBLING: f64 = 0.1;

/// Ratios of times, at the sizes where both were measured. Some are the same at all sizes; others are when each time is taken
/// by its kernel's trend, as when one kernel is bound by its fixed cost where the other is by memory. At each size those
/// count that differ less among the neighbours, or among all where these differ by chance.
#[derive(Clone, Debug, Default)]
pub(super) struct Ratios {
    at: Vec<Ratio>,
    says: Says,
}

#[derive(Clone, Debug)]
struct Ratio {
    dims: [i64; MAX_DIMS],
    /// Of the times, in log space.
    plain: Log,
    /// Of what the trends leave over.
    rest: Log,
    /// Relative differences below this are noise.
    noise: f64,
    /// How far away the others are, in doublings, the nearer the heavier.
    others: f64,
}

#[derive(Clone, Copy, Debug)]
struct Log {
    ratio: f64,
    /// How far it is from what the others say, beyond the noise: as much may be off what is said by it as far away as they
    /// are, and less nearer by.
    odd: f64,
}

/// A ratio beyond the measured sizes.
pub(super) struct Beyond {
    pub ratio: f64,
    /// How far it may be off, relative.
    pub off: f64,
    /// How many doublings away the nearest size is at which both were measured.
    pub nearest: f64,
}

/// Which of the two.
type Kind = fn(&Ratio) -> &Log;
const PLAIN: Kind = |r| &r.plain;
const REST: Kind = |r| &r.rest;

impl Ratios {
    /// Of one kernel's times to another's.
    pub fn new(ours: &[Point], theirs: &[Point], says: Says) -> Ratios {
        let noise = |p: &Point| p.spread_us / p.median_us;
        let log = |ratio| Log { ratio, odd: 0.0 };
        let ratio = |p: &Point| {
            let other = theirs.iter().find(|t| t.dims == p.dims)?;
            let (plain, rest) = ((p.median_us / other.median_us).ln(), p.residual - other.residual);
            Some(Ratio {
                dims: p.dims,
                plain: log(plain),
                rest: log(rest),
                noise: noise(p).max(noise(other)),
                others: 0.0,
            })
        };
        Ratios::compared(ours.iter().filter_map(ratio).collect(), says)
    }

    /// Finds out how far each is from what the others say.
    fn compared(at: Vec<Ratio>, says: Says) -> Ratios {
        let mut ratios = Ratios { at, says };
        let found: Vec<_> = (0..ratios.at.len())
            .map(|i| {
                let (one, others) =
                    (&ratios.at[i], |of: &dyn Fn(&Ratio) -> f64| ratios.mean(of, &ratios.at[i].dims, Some(i)));
                let odd = |kind: Kind| {
                    let apart = ratios.said(kind, &one.dims, Some(i)).map_or(0.0, |said| kind(one).ratio - said);
                    (apart.powi(2) - one.noise.powi(2)).max(0.0).sqrt()
                };
                (odd(PLAIN), odd(REST), others(&|r| distance(&r.dims, &one.dims)).unwrap_or(0.0))
            })
            .collect();
        for (ratio, (plain, rest, others)) in ratios.at.iter_mut().zip(found) {
            (ratio.plain.odd, ratio.rest.odd, ratio.others) = (plain, rest, others);
        }
        ratios
    }

    /// The ratio at a size where the trends' is `trends`, and how far it may be off, relative: as far as its neighbours are
    /// from what theirs say of them, the less the nearer it is, and by the noise they are known up to. `None` where the two were not timed together
    /// nearby.
    pub fn at(&self, dims: &[i64; MAX_DIMS], trends: f64) -> Option<(f64, f64)> {
        let plain = self.among(PLAIN, dims)?;
        // What differs by chance has no trend to go by.
        let rest = (self.says == Says::Near).then(|| self.among(REST, dims)).flatten();
        let (log, off) = match rest {
            Some((rest, off)) if off < plain.1 => (rest + trends.ln(), off),
            _ => plain,
        };
        Some((log.exp(), off))
    }

    /// The ratio beyond the measured sizes, and how far it may be off, relative: √(0.05² + σ²) + 0.1 · doublings to the nearest
    /// measured size. σ² is how much the ratios differ, the nearer the heavier.
    pub fn beyond(&self, dims: &[i64; MAX_DIMS]) -> Option<Beyond> {
        let log = self.said(PLAIN, dims, None)?;
        let variance = self.mean(|r| (r.plain.ratio - log).powi(2), dims, None)?;
        let nearest = self.at.iter().map(|r| distance(&r.dims, dims)).fold(f64::INFINITY, f64::min);
        Some(Beyond { ratio: log.exp(), off: (ELSEWHERE.powi(2) + variance).sqrt() + PER_DOUBLING * nearest, nearest })
    }

    /// How far the ratio measured at a size is from what its neighbours say, in log space and beyond what noise and
    /// their own differences explain, the trends or the plain ratios. Nothing where it was not measured, or the
    /// neighbours are far.
    pub fn doubt(&self, dims: &[i64; MAX_DIMS]) -> Option<f64> {
        let measured = self.at.iter().find(|r| r.dims == *dims)?;
        let others = Ratios::compared(self.at.iter().filter(|r| r.dims != *dims).cloned().collect(), self.says);
        let by = |kind: Kind| {
            let (said, off) = others.among(kind, dims)?;
            Some(((kind(measured).ratio - said).abs() - off.hypot(measured.noise)).max(0.0))
        };
        Some(by(PLAIN)?.min(by(REST)?))
    }

    /// The mean of ratios around a size, in log space, and how far it may be off.
    fn among(&self, kind: Kind, dims: &[i64; MAX_DIMS]) -> Option<(f64, f64)> {
        if !self.at.iter().any(|r| distance(&r.dims, dims) <= REACH) {
            return None;
        }
        let mean = |of: &dyn Fn(&Ratio) -> f64| self.mean(of, dims, None);
        let weights = || self.at.iter().map(|r| self.says.weight(&r.dims, dims));
        let neighbours = weights().sum::<f64>().powi(2) / weights().map(|w| w * w).sum::<f64>();
        let noise = mean(&|r| r.noise)?.powi(2) / neighbours;
        let way = |r: &Ratio| (distance(&r.dims, dims) / r.others.max(f64::MIN_POSITIVE)).min(1.0);
        let odd = match self.says {
            Says::Near => mean(&|r| (kind(r).odd * way(r)).powi(2))?,
            // What differs by chance is known the better the more there are.
            Says::All => mean(&|r| kind(r).odd)?.powi(2) / neighbours,
        };
        let off = (odd + noise).sqrt();
        Some((self.said(kind, dims, None)?, if self.at.len() > 1 { off } else { off.max(UNTESTED) }))
    }

    /// What the ratios say of a size, in log space: those nearby, or all of them, of which some were had in bad moments.
    fn said(&self, kind: Kind, dims: &[i64; MAX_DIMS], without: Option<usize>) -> Option<f64> {
        let others = || self.at.iter().enumerate().filter(|(i, _)| Some(*i) != without).map(|(_, r)| kind(r).ratio);
        match self.says {
            Says::Near => self.mean(|r| kind(r).ratio, dims, without),
            Says::All => others().next().map(|_| median(others().collect())),
        }
    }

    /// The mean over ratios, by what they say of a size; without one of them when that is being tested.
    fn mean(&self, of: impl Fn(&Ratio) -> f64, dims: &[i64; MAX_DIMS], without: Option<usize>) -> Option<f64> {
        let (mut sum, mut weights) = (0.0, 0.0);
        for (_, ratio) in self.at.iter().enumerate().filter(|(i, _)| Some(*i) != without) {
            let weight = self.says.weight(&ratio.dims, dims);
            sum += weight * of(ratio);
            weights += weight;
        }
        (weights > 0.0).then(|| sum / weights)
    }
}
