//! Every combination of sizes of one operation.

use std::collections::BTreeMap;

use lz_model::schema::Dim;
use lz_model::{CallSpec, Catalog, DType, Layout, Op, ParamRole, ParamSpec, nearest};

use super::error::WorkloadError;
use super::point::{MOST_ELEMENTS, Point};

/// The most calls a grid may have.
const MOST_CALLS: u128 = 100_000;

/// Calls of one operation over lists of sizes: every combination of them.
///
/// A dimension goes by its name, its other names, or the plural of one; sizes that are not given are the usual ones
/// (a batch of 1, 32 heads of 128, as many keys as queries), and what has no usual size must be given.
///
/// ```
/// use lz_measure::workload::Grid;
/// use lz_model::DType;
///
/// let calls = Grid::new("attention.causal", DType::Bf16)
///     .dim("head_dim", [128])
///     .dim("seq_lens", [512, 2048, 8192])
///     .dim("batch_sizes", [1, 8, 32])
///     .calls()
///     .unwrap();
/// assert_eq!(calls.len(), 9);
/// assert_eq!(calls[1].tensors["query"].shape, [8, 512, 32, 128]);
/// ```
#[derive(Clone, Debug)]
pub struct Grid {
    op: String,
    dtype: DType,
    dims: Vec<(String, Vec<i64>)>,
    params: BTreeMap<String, ParamSpec>,
    layout: Option<Layout>,
}

impl Grid {
    /// A grid of an operation or alias, with data of a dtype.
    pub fn new(op: impl Into<String>, dtype: DType) -> Grid {
        Grid { op: op.into(), dtype, dims: Vec::new(), params: BTreeMap::new(), layout: None }
    }

    /// Gives a dimension its sizes.
    pub fn dim(mut self, name: impl Into<String>, sizes: impl IntoIterator<Item = i64>) -> Grid {
        self.dims.push((name.into(), sizes.into_iter().collect()));
        self
    }

    /// Gives a parameter its value, in all calls.
    pub fn param(mut self, name: impl Into<String>, value: impl Into<ParamSpec>) -> Grid {
        self.params.insert(name.into(), value.into());
        self
    }

    /// Says the layout; the operation's own when it is not said.
    pub fn layout(mut self, layout: Layout) -> Grid {
        self.layout = Some(layout);
        self
    }

    /// The calls, without repetition. The first dimension of the operation varies fastest.
    pub fn calls(&self) -> Result<Vec<CallSpec>, WorkloadError> {
        let op = self.op()?;
        let mut lists: Vec<Option<&[i64]>> = vec![None; op.schema().dims.len()];
        for (given, sizes) in &self.dims {
            let Some(index) = dim_index(op, given) else { return Err(unknown(op, &self.op, given)) };
            if lists[index].replace(sizes_of(&op.schema().dims[index], given, sizes)?).is_some() {
                return Err(WorkloadError::DimTwice { op: self.op.clone(), dim: op.schema().dims[index].name });
            }
        }
        let mut params = self.params.clone();
        let mut sized = Vec::new();
        for (given, value) in &self.params {
            let param = op.param_index(given).map(|i| &op.schema().params[i]);
            if let (Some(param), ParamSpec::Int(size)) = (param.filter(|p| p.role == ParamRole::Dim), value) {
                params.remove(given);
                sized.push((op.dim_index(param.name), param.name, *size));
            }
        }
        for (index, dim, size) in &sized {
            let Some(index) = *index else { continue };
            let size = sizes_of(&op.schema().dims[index], dim, std::slice::from_ref(size))?;
            if lists[index].replace(size).is_some() {
                return Err(WorkloadError::DimTwice { op: self.op.clone(), dim });
            }
        }
        let count = lists.iter().flatten().map(|list| list.len() as u128).try_fold(1, u128::checked_mul);
        match count {
            Some(count) if count <= MOST_CALLS => {}
            count => return Err(WorkloadError::TooMany { calls: count.unwrap_or(u128::MAX), most: MOST_CALLS }),
        }
        let mut calls: Vec<CallSpec> = Vec::new();
        let mut seen = std::collections::HashSet::new();
        for number in 0..count.unwrap_or(0) {
            let mut rest = number;
            let mut size = |list: &Option<&[i64]>| {
                let list = (*list)?;
                let at = rest % list.len() as u128;
                rest /= list.len() as u128;
                list.get(at as usize).copied()
            };
            let sizes = lists.iter().map(&mut size).collect();
            let (dtype, layout) = (self.dtype, self.layout);
            let call = Point { op, name: &self.op, dtype, layout, params: &params, sizes, leading: None }.call()?;
            if seen.insert(call.to_string()) {
                calls.push(call);
            }
        }
        Ok(calls)
    }

    /// The operation whose dimensions are meant: the first behind an alias that has them all.
    fn op(&self) -> Result<&'static Op, WorkloadError> {
        let ops = ops(&self.op)?;
        let has = |op: &&&'static Op| self.dims.iter().all(|(given, _)| dim_index(op, given).is_some());
        let op = ops.iter().find(has).or(ops.first());
        op.copied().ok_or_else(|| WorkloadError::NoTensors { op: self.op.clone() })
    }
}

/// The operations behind a name that take tensors.
pub(super) fn ops(name: &str) -> Result<Vec<&'static Op>, WorkloadError> {
    let ops: Vec<_> = Catalog::get().find(name)?.ops.iter().map(|ix| Catalog::get().op(*ix)).collect();
    if ops.iter().any(|op| op.schema().inputs.is_empty()) {
        return Err(WorkloadError::NoTensors { op: name.to_owned() });
    }
    Ok(ops)
}

/// A dimension by its name, its other names, or the plural of one of them.
fn dim_index(op: &Op, given: &str) -> Option<usize> {
    let singular = |ending: &str| given.strip_suffix(ending).and_then(|name| op.dim_index(name));
    op.dim_index(given).or_else(|| singular("s")).or_else(|| singular("es"))
}

fn unknown(op: &'static Op, name: &str, given: &str) -> WorkloadError {
    let dims = op.schema().dims;
    let names = dims.iter().flat_map(|d| std::iter::once(d.name).chain(d.also.iter().copied()));
    WorkloadError::UnknownDim {
        op: name.to_owned(),
        name: given.to_owned(),
        nearest: nearest(given, names),
        known: dims.iter().map(|d| d.name).collect::<Vec<_>>().join(", "),
    }
}

/// A list of sizes that a dimension can have.
fn sizes_of<'a>(dim: &Dim, what: &str, sizes: &'a [i64]) -> Result<&'a [i64], WorkloadError> {
    let none = dim.otherwise == Some(0) && !sizes.is_empty() && sizes.iter().all(|n| (0..=MOST_ELEMENTS).contains(n));
    if none { Ok(sizes) } else { checked(what, sizes) }
}

/// A list of sizes that are some.
pub(super) fn checked<'a>(what: &str, sizes: &'a [i64]) -> Result<&'a [i64], WorkloadError> {
    if sizes.is_empty() {
        return Err(WorkloadError::Empty { what: what.to_owned() });
    }
    match sizes.iter().find(|size| !(1..=MOST_ELEMENTS).contains(*size)) {
        Some(&got) => Err(WorkloadError::BadSize { what: what.to_owned(), got, most: MOST_ELEMENTS }),
        None => Ok(sizes),
    }
}
