//! Times of kernels in one class: what one takes of somebody, the host or the device, or all in all.

use std::collections::HashMap;

use lz_model::{Facts, MAX_DIMS};
use lz_select::{Estimate, EstimateKind};

use super::ratio::{Beyond, Ratios};
use super::trend::{Trend, Work};
use super::{Id, REACH, Says, UNTESTED, distance};

/// A kernel this many times slower than the fastest may still turn out to be the choice.
const RIVAL: f64 = 1.25;

/// What is known of the kernels' times.
#[derive(Clone, Debug, Default)]
pub(super) struct Times {
    pub kernels: HashMap<Id, Kernel>,
    /// Which points say something about a size.
    pub says: Says,
    /// How many doublings beyond the measured sizes a time is still trusted.
    pub trusted_beyond: f64,
    pub yardstick: Option<Id>,
}

/// What is known of one kernel in one class.
#[derive(Clone, Debug, Default)]
pub(super) struct Kernel {
    pub points: Vec<Point>,
    trend: Trend,
    /// How far predictions between points are off, relative.
    error: f64,
    /// How it compares with the yardstick.
    ratios: Ratios,
    pub wrong: Option<String>,
    pub failed: Vec<([i64; MAX_DIMS], String)>,
}

#[derive(Clone, Debug)]
pub(super) struct Point {
    pub dims: [i64; MAX_DIMS],
    pub work: Work,
    /// Whether plain torch runs the kernel there.
    pub baseline: bool,
    pub median_us: f64,
    pub spread_us: f64,
    pub samples: u32,
    /// How far it is from the trend, in log space.
    pub residual: f64,
}

impl Times {
    pub fn fit(&mut self) {
        for kernel in self.kernels.values_mut() {
            kernel.fit(self.says);
        }
        self.compare();
    }

    /// Chooses the yardstick, and compares every other kernel with it.
    fn compare(&mut self) {
        let timed = || self.kernels.iter().filter(|(_, kernel)| kernel.is_proven());
        let speed = |k: &Kernel| k.points.iter().map(|p| p.median_us.ln()).sum::<f64>();
        let is_baseline = |k: &Kernel| 2 * k.points.iter().filter(|p| p.baseline).count() > k.points.len();
        let worth = |k: &Kernel| (k.points.len(), is_baseline(k));
        let first =
            timed().min_by(|(a, x), (b, y)| worth(y).cmp(&worth(x)).then(speed(x).total_cmp(&speed(y))).then(a.cmp(b)));
        let Some((id, yardstick)) = first.map(|(id, kernel)| (id.clone(), kernel.points.clone())) else { return };
        for (_, kernel) in self.kernels.iter_mut().filter(|(other, _)| **other != id) {
            kernel.ratios = Ratios::new(&kernel.points, &yardstick, self.says);
        }
        self.yardstick = Some(id);
    }

    /// By the yardstick where that is known around here and was timed beside the kernel nearby; else by itself alone.
    pub fn estimate(&self, id: &Id, facts: &Facts<'_>) -> Option<Estimate> {
        let kernel = self.kernels.get(id)?;
        let own = kernel.estimate(facts, self.says)?;
        match own.kind {
            EstimateKind::Predicted => {}
            EstimateKind::Extrapolated => return Some(self.beyond(id, kernel, own, facts).unwrap_or(own)),
            EstimateKind::Measured | EstimateKind::Prior => return Some(own),
        }
        let Some(yardstick) = self.yardstick.as_ref() else { return Some(own) };
        if yardstick == id {
            return Some(Estimate { apart_us: Some(0.0), ..own });
        }
        let (yardstick, work) = (self.kernels.get(yardstick)?, Work::of(facts));
        let by = yardstick.estimate(facts, self.says).filter(|by| by.kind != EstimateKind::Extrapolated);
        let trends = kernel.trend.time_us(&work) / yardstick.trend.time_us(&work);
        let (Some(by), Some((ratio, off))) = (by, kernel.ratios.at(facts.query.dims(), trends)) else {
            return Some(own);
        };
        let median_us = by.median_us * ratio;
        let spread_us = median_us * (by.spread_us / by.median_us).hypot(off);
        Some(Estimate { median_us, spread_us, apart_us: Some(median_us * off), ..own })
    }

    /// Beyond the sizes at which a kernel was measured: the yardstick's time by its trend, and another kernel's by their ratio.
    fn beyond(&self, id: &Id, kernel: &Kernel, own: Estimate, facts: &Facts<'_>) -> Option<Estimate> {
        let (dims, yardstick) = (facts.query.dims(), self.yardstick.as_ref()?);
        let itself = || Beyond { ratio: 1.0, off: 0.0, nearest: kernel.nearest(dims) };
        let Beyond { ratio, off, nearest } = if yardstick == id { itself() } else { kernel.ratios.beyond(dims)? };
        let by = self.kernels.get(yardstick)?.estimate(facts, self.says)?;
        let median_us = by.median_us * ratio;
        let spread_us = median_us * (by.spread_us / by.median_us).hypot(off);
        let trusted = nearest <= self.trusted_beyond;
        Some(Estimate { median_us, spread_us, apart_us: Some(median_us * off), trusted, ..own })
    }

    pub fn doubt(&self, dims: &[i64; MAX_DIMS]) -> f64 {
        let here = |kernel: &Kernel| kernel.points.iter().find(|p| p.dims == *dims).map(|p| p.median_us);
        let best = self.kernels.values().filter_map(here).fold(f64::INFINITY, f64::min);
        let doubted = self.kernels.values().filter_map(|kernel| {
            let (measured_us, doubt) = (here(kernel)?, kernel.ratios.doubt(dims)?);
            // Even as fast as the neighbours say it would not be the choice.
            (measured_us / doubt.exp() <= RIVAL * best).then_some(doubt)
        });
        doubted.fold(0.0, f64::max)
    }

    /// At how many sizes a kernel was measured.
    pub fn points(&self, id: &Id) -> usize {
        self.kernels.get(id).map_or(0, |kernel| kernel.points.len())
    }
}

impl Kernel {
    /// Whether it ran and was right.
    pub fn is_proven(&self) -> bool {
        self.wrong.is_none() && !self.points.is_empty()
    }

    /// One more size, if the time is one and the size is new. Gives whether it was taken.
    pub fn add(&mut self, point: Point) -> bool {
        let sound = point.median_us.is_finite() && point.median_us > 0.0;
        let sound = sound && point.spread_us.is_finite() && point.spread_us >= 0.0;
        let taken = sound && !self.points.iter().any(|p| p.dims == point.dims);
        if taken {
            self.points.push(point);
        }
        taken
    }

    fn fit(&mut self, says: Says) {
        self.trend = Trend::fit(self.points.iter().map(|p| (p.work, p.median_us)));
        for point in &mut self.points {
            point.residual = (point.median_us / self.trend.time_us(&point.work)).ln();
        }
        let errors = self.errors(says);
        let rms = (errors.iter().map(|error| error.powi(2)).sum::<f64>() / errors.len().max(1) as f64).sqrt();
        self.error = if errors.len() < 3 { UNTESTED } else { rms };
    }

    fn estimate(&self, facts: &Facts<'_>, says: Says) -> Option<Estimate> {
        let dims = facts.query.dims();
        if let Some(point) = self.points.iter().find(|p| p.dims == *dims) {
            return Some(Estimate {
                median_us: point.median_us,
                spread_us: point.spread_us,
                apart_us: None,
                sides: None,
                samples: point.samples,
                kind: EstimateKind::Measured,
                trusted: true,
            });
        }
        let trend = self.trend.time_us(&Work::of(facts));
        let nearest = self.nearest(dims);
        let inside = nearest <= REACH && self.is_between(dims);
        let residual = self.interpolate(dims, says, None)?;
        let median_us = trend * residual.exp();
        let spread_us = median_us * if inside { self.error } else { self.error.max(UNTESTED) * (1.0 + nearest) };
        Some(Estimate {
            median_us,
            spread_us,
            apart_us: None,
            sides: None,
            samples: self.points.iter().map(|p| p.samples).sum(),
            kind: if inside { EstimateKind::Predicted } else { EstimateKind::Extrapolated },
            trusted: inside,
        })
    }

    /// How far the nearest measured size is, in doublings.
    fn nearest(&self, dims: &[i64; MAX_DIMS]) -> f64 {
        self.points.iter().map(|p| distance(&p.dims, dims)).fold(f64::INFINITY, f64::min)
    }

    /// Whether every size lies between the least and the largest that were measured.
    fn is_between(&self, dims: &[i64; MAX_DIMS]) -> bool {
        (0..MAX_DIMS).all(|d| {
            let sizes = || self.points.iter().map(|p| p.dims[d]);
            sizes().min().is_some_and(|low| low <= dims[d]) && sizes().max().is_some_and(|high| dims[d] <= high)
        })
    }

    /// The residual at a shape, without one of the points when that is being tested: of the neighbours, the nearer the
    /// heavier; or of all, the lower quartile, as a host is often kept from its work, and never helped.
    fn interpolate(&self, dims: &[i64; MAX_DIMS], says: Says, without: Option<usize>) -> Option<f64> {
        let points = self.points.iter().enumerate().filter(|(i, _)| Some(*i) != without).map(|(_, point)| point);
        if says == Says::All {
            let mut residuals: Vec<f64> = points.map(|p| p.residual).collect();
            residuals.sort_unstable_by(f64::total_cmp);
            return residuals.get(residuals.len() / 4).copied();
        }
        let (mut sum, mut weights) = (0.0, 0.0);
        for point in points {
            let weight = says.weight(&point.dims, dims);
            sum += weight * point.residual;
            weights += weight;
        }
        (weights > 0.0).then(|| sum / weights)
    }

    /// For every point, how far its time is from what the others would have predicted, in log space.
    fn errors(&self, says: Says) -> Vec<f64> {
        let error = |(i, p): (usize, &Point)| Some(p.residual - self.interpolate(&p.dims, says, Some(i))?);
        self.points.iter().enumerate().filter_map(error).collect()
    }
}
