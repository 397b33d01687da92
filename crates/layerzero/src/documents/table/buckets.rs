//! Axes with their buckets, and which sizes of a call they are about.

use std::collections::BTreeMap;
use std::fmt;

use lz_model::schema::{Dim, DimKey, DimKind};
use lz_model::{Catalog, MAX_DIMS, Op, Query, did_you_mean, nearest};
use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize};

/// The most ends one axis may have.
const MAX_ENDS: usize = 1024;
/// The largest size there is room for above every end.
const MAX_END: i64 = 1 << 48;

/// By axis, the upper ends of its buckets, ascending.
///
/// An axis is named as dimensions are: `seq_len`, `batch`, `kv_len`, `rows`. It applies to the dimension of that name. If
/// only one axis is a sequence length (or a batch), it also applies to the other sequence lengths (or batches) of an
/// operation. Sizes to which no axis applies have the buckets of the operation.
///
/// ```
/// use layerzero::Buckets;
///
/// let buckets = Buckets::new([("seq_len", [128, 512, 2048])])?;
/// assert_eq!(buckets.to_string(), "seq_len=128,512,2048");
/// assert!(Buckets::new([("seq_len", [512, 128])]).is_err());
/// # Ok::<(), layerzero::BadBuckets>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(transparent)]
pub struct Buckets(BTreeMap<String, Vec<i64>>);

/// Why axes make no sense.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadBuckets {
    /// An axis no operation has.
    #[error("no operation has a size '{axis}' that varies{}", did_you_mean(.nearest))]
    UnknownAxis {
        /// The axis.
        axis: String,
        /// The closest one there is.
        nearest: Option<String>,
    },
    /// An axis without buckets, or with too many.
    #[error("{axis} has {count} buckets; 1 to {MAX_ENDS} can be had")]
    Count {
        /// The axis.
        axis: String,
        /// How many.
        count: usize,
    },
    /// Ends that do not ascend, or are no sizes.
    #[error("{axis}: {end} follows {before}; the upper ends of buckets ascend, from 1 to {MAX_END}")]
    Order {
        /// The axis.
        axis: String,
        /// The end at fault.
        end: i64,
        /// The one before it; 0 for the first.
        before: i64,
    },
}

/// A size that lies above all buckets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Above {
    pub dim: &'static str,
    pub size: i64,
}

/// Least and largest sizes, by dimension.
pub(crate) type Ranges = ([i64; MAX_DIMS], [i64; MAX_DIMS]);

fn named(dim: &Dim, axis: &str) -> bool {
    dim.name == axis || dim.also.contains(&axis)
}

fn varies(dim: &&Dim) -> bool {
    matches!(dim.key, DimKey::Bucketed(_))
}

fn every_dim() -> impl Iterator<Item = &'static Dim> {
    Catalog::get().ops().iter().flat_map(|op| op.schema().dims).filter(varies)
}

/// The bucket a size falls into: the end before it, and its own.
fn bucket(ends: &[i64], size: i64) -> Option<(i64, i64)> {
    let at = ends.partition_point(|&end| end < size);
    Some((if at == 0 { -1 } else { ends[at - 1] }, *ends.get(at)?))
}

impl Buckets {
    /// Axes with their upper ends.
    pub fn new<N: Into<String>, E: Into<Vec<i64>>>(
        axes: impl IntoIterator<Item = (N, E)>,
    ) -> Result<Buckets, BadBuckets> {
        let axes: BTreeMap<String, Vec<i64>> =
            axes.into_iter().map(|(name, ends)| (name.into(), ends.into())).collect();
        for (axis, ends) in &axes {
            let axis = || axis.clone();
            if !every_dim().any(|dim| named(dim, &axis())) {
                let known = every_dim().flat_map(|dim| dim.also.iter().copied().chain([dim.name]));
                let nearest = nearest(&axis(), known).map(str::to_owned);
                return Err(BadBuckets::UnknownAxis { axis: axis(), nearest });
            }
            if ends.is_empty() || ends.len() > MAX_ENDS {
                return Err(BadBuckets::Count { axis: axis(), count: ends.len() });
            }
            let pairs = ends.iter().zip([0].iter().chain(ends));
            if let Some((&end, &before)) = pairs.into_iter().find(|(end, before)| end <= before || **end > MAX_END) {
                return Err(BadBuckets::Order { axis: axis(), end, before });
            }
        }
        Ok(Buckets(axes))
    }

    /// The upper ends of an axis; empty when there is no such axis.
    pub fn ends(&self, axis: &str) -> &[i64] {
        self.0.get(axis).map_or(&[], Vec::as_slice)
    }

    pub(super) fn has(&self, axis: &str, end: i64) -> bool {
        self.ends(axis).contains(&end)
    }

    /// The axis that is about a dimension, and whether by name.
    fn axis(&self, dim: &Dim) -> Option<(&str, bool)> {
        let exactly = self.0.keys().find(|axis| dim.name == **axis);
        if let Some(axis) = exactly.or_else(|| self.0.keys().find(|axis| named(dim, axis))) {
            return Some((axis, true));
        }
        if !matches!(dim.kind, DimKind::Seq | DimKind::Batch) {
            return None;
        }
        let kind = |axis: &str| every_dim().find(|dim| named(dim, axis)).map(|dim| dim.kind);
        let mut alike = self.0.keys().filter(|axis| kind(axis) == Some(dim.kind));
        alike.next().filter(|_| alike.next().is_none()).map(|axis| (axis.as_str(), false))
    }

    /// The sizes that share the bucket of a call.
    pub(crate) fn ranges(&self, op: &Op, query: &Query) -> Result<Ranges, Above> {
        let (mut low, mut high) = (*query.dims(), *query.dims());
        for (i, dim) in op.schema().dims.iter().enumerate() {
            let (DimKey::Bucketed(own), size) = (dim.key, query.dim(i)) else { continue };
            let range = match self.axis(dim) {
                Some((axis, _)) => Some(bucket(self.ends(axis), size).ok_or(Above { dim: dim.name, size })?),
                None => bucket(own, size),
            };
            if let Some((before, end)) = range {
                (low[i], high[i]) = (before + 1, end);
            }
        }
        Ok((low, high))
    }

    /// The sizes of a bucket for an operation of which nothing else is said: any, where no axis of the bucket is about
    /// them. Rows are the tokens of all sequences where the bucket is one of sequences.
    pub(crate) fn spans(&self, op: &Op, said: &BTreeMap<String, i64>) -> Ranges {
        let (mut low, mut high) = ([i64::MIN; MAX_DIMS], [i64::MAX; MAX_DIMS]);
        let span = |axis: &str| bucket(self.ends(axis), *said.get(axis)?).map(|(before, end)| (before + 1, end));
        let kind = |axis: &str| every_dim().find(|dim| named(dim, axis)).map(|dim| dim.kind);
        let tokens = || {
            let kinds = || said.keys().filter(|axis| matches!(kind(axis), Some(DimKind::Seq | DimKind::Batch)));
            let product = kinds().filter_map(|axis| span(axis)).fold((1i64, 1i64), |(low, high), (from, to)| {
                (low.saturating_mul(from.max(1)), high.saturating_mul(to))
            });
            kinds().any(|axis| kind(axis) == Some(DimKind::Seq)).then_some(product)
        };
        let dims = op.schema().dims;
        let has_sequences = dims.iter().any(|dim| dim.kind == DimKind::Seq);
        for (i, dim) in dims.iter().enumerate().filter(|(_, dim)| varies(dim)) {
            let of_rows = (!has_sequences && dim.kind == DimKind::Batch).then(tokens).flatten();
            if let Some((from, to)) = of_rows.or_else(|| span(self.axis(dim)?.0)) {
                (low[i], high[i]) = (from, to);
            }
        }
        (low, high)
    }

    /// The bucket of a call, by axis. An axis about several sizes is named for the one it names, or the largest.
    pub(crate) fn label(&self, op: &Op, query: &Query) -> BTreeMap<String, i64> {
        let mut label: BTreeMap<String, (bool, i64)> = BTreeMap::new();
        for (i, dim) in op.schema().dims.iter().enumerate().filter(|(_, dim)| varies(dim)) {
            let Some((axis, by_name)) = self.axis(dim) else { continue };
            let Some((_, end)) = bucket(self.ends(axis), query.dim(i)) else { continue };
            let best = label.entry(axis.to_owned()).or_insert((by_name, end));
            *best = (*best).max((by_name, end));
        }
        label.into_iter().map(|(axis, (_, end))| (axis, end)).collect()
    }
}

/// As the command line has it: `batch=1,4 seq_len=128,512`.
impl fmt::Display for Buckets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, (axis, ends)) in self.0.iter().enumerate() {
            let ends: Vec<String> = ends.iter().map(ToString::to_string).collect();
            write!(f, "{}{axis}={}", if i == 0 { "" } else { " " }, ends.join(","))?;
        }
        Ok(())
    }
}

impl<'de> Deserialize<'de> for Buckets {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Buckets, D::Error> {
        let axes: BTreeMap<String, Vec<i64>> = super::unique(deserializer)?;
        Buckets::new(axes).map_err(serde::de::Error::custom)
    }
}
