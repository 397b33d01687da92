//! How a kernel compares with another that was timed beside it.

use lz_model::MAX_DIMS;

use super::{Point, REACH, STEP, UNTESTED, apart, distance, nearness};

/// Ratios of times, at the sizes where both were measured. Some are the same at all sizes; others are when each time is taken
/// by its kernel's trend, as when one kernel is bound by its fixed cost where the other is by memory. At each size those
/// count that differ less among the neighbours.
#[derive(Clone, Debug, Default)]
pub(super) struct Ratios(Vec<Ratio>);

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

/// Which of the two.
type Kind = fn(&Ratio) -> &Log;
const PLAIN: Kind = |r| &r.plain;
const REST: Kind = |r| &r.rest;

impl Ratios {
    /// Of one kernel's times to another's.
    pub fn new(ours: &[Point], theirs: &[Point]) -> Ratios {
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
        Ratios::compared(ours.iter().filter_map(ratio).collect())
    }

    /// Finds out how far each is from what the others say.
    fn compared(mut ratios: Vec<Ratio>) -> Ratios {
        let odd = |i: usize, kind: Kind| {
            let others = ratios.iter().enumerate().filter(|(j, _)| *j != i).map(|(_, r)| r);
            let apart = mean(others, |r| kind(r).ratio, &ratios[i].dims).map_or(0.0, |m| kind(&ratios[i]).ratio - m);
            (apart.powi(2) - ratios[i].noise.powi(2)).max(0.0).sqrt()
        };
        let others = |i: usize| {
            let others = ratios.iter().enumerate().filter(|(j, _)| *j != i).map(|(_, r)| r);
            mean(others, |r| apart(&r.dims, &ratios[i].dims, STEP), &ratios[i].dims).unwrap_or(0.0)
        };
        let found: Vec<_> = (0..ratios.len()).map(|i| (odd(i, PLAIN), odd(i, REST), others(i))).collect();
        for (ratio, (plain, rest, others)) in ratios.iter_mut().zip(found) {
            (ratio.plain.odd, ratio.rest.odd, ratio.others) = (plain, rest, others);
        }
        Ratios(ratios)
    }

    /// The ratio at a size where the trends' is `trends`, and how far it may be off, relative: as far as its neighbours are
    /// from what theirs say of them, the less the nearer it is, and by the noise they are known up to. `None` where the two were not timed together
    /// nearby.
    pub fn at(&self, dims: &[i64; MAX_DIMS], trends: f64) -> Option<(f64, f64)> {
        let (plain, rest) = (self.among(PLAIN, dims)?, self.among(REST, dims)?);
        let (log, off) = if rest.1 < plain.1 { (rest.0 + trends.ln(), rest.1) } else { plain };
        Some((log.exp(), off))
    }

    /// How far the ratio measured at a size is from what its neighbours say, in log space and beyond what noise and
    /// their own differences explain, the trends or the plain ratios. Nothing where it was not measured, or the
    /// neighbours are far.
    pub fn doubt(&self, dims: &[i64; MAX_DIMS]) -> Option<f64> {
        let measured = self.0.iter().find(|r| r.dims == *dims)?;
        let others = Ratios::compared(self.0.iter().filter(|r| r.dims != *dims).cloned().collect());
        let by = |kind: Kind| {
            let (said, off) = others.among(kind, dims)?;
            Some(((kind(measured).ratio - said).abs() - off.hypot(measured.noise)).max(0.0))
        };
        Some(by(PLAIN)?.min(by(REST)?))
    }

    /// The mean of ratios around a size, in log space, and how far it may be off.
    fn among(&self, kind: Kind, dims: &[i64; MAX_DIMS]) -> Option<(f64, f64)> {
        if !self.0.iter().any(|r| distance(&r.dims, dims) <= REACH) {
            return None;
        }
        let mean = |of: &dyn Fn(&Ratio) -> f64| mean(self.0.iter(), of, dims);
        let weights = || self.0.iter().map(|r| nearness(&r.dims, dims));
        let neighbours = weights().sum::<f64>().powi(2) / weights().map(|w| w * w).sum::<f64>();
        let noise = mean(&|r| r.noise)?.powi(2) / neighbours;
        let way = |r: &Ratio| (apart(&r.dims, dims, STEP) / r.others.max(f64::MIN_POSITIVE)).min(1.0);
        let off = (mean(&|r| (kind(r).odd * way(r)).powi(2))? + noise).sqrt();
        Some((mean(&|r| kind(r).ratio)?, if self.0.len() > 1 { off } else { off.max(UNTESTED) }))
    }
}

/// The mean over ratios, the nearer to a size the heavier.
fn mean<'a>(
    ratios: impl Iterator<Item = &'a Ratio>,
    of: impl Fn(&Ratio) -> f64,
    dims: &[i64; MAX_DIMS],
) -> Option<f64> {
    let (mut sum, mut weights) = (0.0, 0.0);
    for ratio in ratios {
        let weight = nearness(&ratio.dims, dims);
        sum += weight * of(ratio);
        weights += weight;
    }
    (weights > 0.0).then(|| sum / weights)
}
