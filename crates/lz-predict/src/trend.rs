//! The trend of a kernel's times: a fixed cost, a cost per operation, a cost per byte.

use lz_model::Facts;

/// What a call has to do.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Work {
    flops: f64,
    bytes: f64,
}

impl Work {
    /// The work of a call, by its operation's formulas, for those who take no notice of what it promises: most do not, and
    /// who does is compared with them.
    pub fn of(facts: &Facts<'_>) -> Work {
        let without = facts.op.unpromised(facts.query, |_| false);
        let facts = &Facts { query: without.as_ref().unwrap_or(facts.query), ..*facts };
        let sound = |x: f64| if x.is_finite() && x > 0.0 { x } else { 0.0 };
        Work { flops: sound(facts.op.flops(facts)), bytes: sound(facts.op.bytes(facts)) }
    }

    fn terms(&self) -> [f64; 3] {
        [1.0, self.flops, self.bytes]
    }
}

/// `fixed + per_flop * flops + per_byte * bytes`, none of them negative.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Trend {
    costs: [f64; 3],
}

impl Trend {
    /// The trend with the least relative error over the points. Costs are not negative, so that more work never takes
    /// less time: of all sets of costs that may be there, the best one whose costs are all positive.
    pub fn fit(points: impl Iterator<Item = (Work, f64)> + Clone) -> Trend {
        let error =
            |trend: &Trend| points.clone().map(|(work, t)| (trend.time_us(&work) / t - 1.0).powi(2)).sum::<f64>();
        let candidates = (1..8u8).filter_map(|set| Trend::with(set, points.clone()));
        let scored = candidates.map(|trend| (error(&trend), trend)).filter(|(error, _)| error.is_finite());
        scored.min_by(|a, b| a.0.total_cmp(&b.0)).map_or_else(Trend::default, |(_, trend)| trend)
    }

    /// Least squares over the costs in `set`; `None` when they cannot be told apart, or one is negative.
    fn with(set: u8, points: impl Iterator<Item = (Work, f64)>) -> Option<Trend> {
        let chosen: Vec<usize> = (0..3).filter(|i| set >> i & 1 == 1).collect();
        let n = chosen.len();
        let mut matrix = vec![vec![0.0; n + 1]; n];
        for (work, time) in points {
            let terms = work.terms();
            // Relative errors count: every term is divided by the time it stands for.
            let row: Vec<f64> = chosen.iter().map(|&i| terms[i] / time).collect();
            for i in 0..n {
                for j in 0..n {
                    matrix[i][j] += row[i] * row[j];
                }
                matrix[i][n] += row[i];
            }
        }
        let solved = solve(matrix)?;
        let mut costs = [0.0; 3];
        for (&i, cost) in chosen.iter().zip(&solved) {
            if !(cost.is_finite() && *cost > 0.0) {
                return None;
            }
            costs[i] = *cost;
        }
        Some(Trend { costs })
    }

    /// The time of some work; always positive.
    pub fn time_us(&self, work: &Work) -> f64 {
        let time: f64 = self.costs.iter().zip(work.terms()).map(|(cost, term)| cost * term).sum();
        time.max(1e-3)
    }
}

/// Solves `n` equations, the right side in the last column; `None` when they do not determine the unknowns.
fn solve(mut m: Vec<Vec<f64>>) -> Option<Vec<f64>> {
    let n = m.len();
    // Columns differ by many powers of ten: a cost per byte and one per call.
    let scale: Vec<f64> = (0..n).map(|i| m[i][i].sqrt()).collect();
    if scale.iter().any(|s| !(s.is_finite() && *s > 0.0)) {
        return None;
    }
    for i in 0..n {
        for j in 0..n {
            m[i][j] /= scale[i] * scale[j];
        }
        m[i][n] /= scale[i];
    }
    for column in 0..n {
        let pivot = (column..n).max_by(|&a, &b| m[a][column].abs().total_cmp(&m[b][column].abs()))?;
        m.swap(column, pivot);
        if m[column][column].abs() < 1e-9 {
            return None;
        }
        for row in column + 1..n {
            let pivot = m[column].clone();
            let factor = m[row][column] / pivot[column];
            m[row].iter_mut().zip(&pivot).skip(column).for_each(|(to, from)| *to -= factor * from);
        }
    }
    let mut x = vec![0.0; n];
    for i in (0..n).rev() {
        let known: f64 = (i + 1..n).map(|k| m[i][k] * x[k]).sum();
        x[i] = (m[i][n] - known) / m[i][i];
    }
    Some((0..n).map(|i| x[i] / scale[i]).collect())
}
