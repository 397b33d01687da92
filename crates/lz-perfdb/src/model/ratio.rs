//! How a kernel compares with another that was timed beside it.

use lz_model::MAX_DIMS;

use super::{Point, REACH, UNTESTED, distance, nearness};

/// Ratios of times, at the sizes where both were measured. Some are the same at all sizes; others are when each time is taken
/// by its kernel's trend, as when one kernel is bound by its fixed cost where the other is by memory. At each size those
/// count that differ less among the neighbours.
#[derive(Clone, Debug, Default)]
pub(super) struct Ratios(Vec<Ratio>);

#[derive(Clone, Debug)]
struct Ratio {
    dims: [i64; MAX_DIMS],
    /// Of the times, in log space.
    plain: f64,
    /// Of what the trends leave over.
    rest: f64,
    /// Relative differences below this are noise.
    noise: f64,
}

impl Ratios {
    /// Of one kernel's times to another's.
    pub fn new(ours: &[Point], theirs: &[Point]) -> Ratios {
        let noise = |p: &Point| p.spread_us / p.median_us;
        let ratio = |p: &Point| {
            let other = theirs.iter().find(|t| t.dims == p.dims)?;
            let (plain, rest) = ((p.median_us / other.median_us).ln(), p.residual - other.residual);
            Some(Ratio { dims: p.dims, plain, rest, noise: noise(p).max(noise(other)) })
        };
        Ratios(ours.iter().filter_map(ratio).collect())
    }

    /// The ratio at a size where the trends' is `trends`, and how far it may be off, relative: the standard error of a
    /// mean over the neighbours, which differ among themselves and are each known up to noise. `None` where the two were
    /// not timed together nearby.
    pub fn at(&self, dims: &[i64; MAX_DIMS], trends: f64) -> Option<(f64, f64)> {
        let plain = among(self.0.iter(), |r| r.plain, dims)?;
        let (rest, off) = among(self.0.iter(), |r| r.rest, dims)?;
        let (log, off) = if off < plain.1 { (rest + trends.ln(), off) } else { plain };
        Some((log.exp(), off))
    }

    /// How far the ratio measured at a size is from what its neighbours say, in log space and beyond what noise and
    /// their own differences explain, the trends or the plain ratios. Nothing where it was not measured, or the
    /// neighbours are far.
    pub fn doubt(&self, dims: &[i64; MAX_DIMS]) -> Option<f64> {
        let measured = self.0.iter().find(|r| r.dims == *dims)?;
        let by = |log: fn(&Ratio) -> f64| {
            let (others, off) = among(self.0.iter().filter(|r| r.dims != *dims), log, dims)?;
            Some(((log(measured) - others).abs() - off.hypot(measured.noise)).max(0.0))
        };
        Some(by(|r| r.plain)?.min(by(|r| r.rest)?))
    }
}

/// The mean of ratios around a size, in log space, and how far it may be off.
fn among<'a>(
    ratios: impl Iterator<Item = &'a Ratio> + Clone,
    log: fn(&Ratio) -> f64,
    dims: &[i64; MAX_DIMS],
) -> Option<(f64, f64)> {
    if !ratios.clone().any(|r| distance(&r.dims, dims) <= REACH) {
        return None;
    }
    let weighted = || ratios.clone().map(|r| (nearness(&r.dims, dims), r));
    let total: f64 = weighted().map(|(w, _)| w).sum();
    let mean = |of: &dyn Fn(&Ratio) -> f64| weighted().map(|(w, r)| w * of(r)).sum::<f64>() / total;
    let center = mean(&log);
    let variance = mean(&|r| (log(r) - center).powi(2)) + mean(&|r| r.noise).powi(2);
    let neighbours = total.powi(2) / weighted().map(|(w, _)| w * w).sum::<f64>();
    let off = (variance / neighbours).sqrt();
    Some((center, if ratios.count() > 1 { off } else { off.max(UNTESTED) }))
}
