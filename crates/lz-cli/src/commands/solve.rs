//! `layerzero solve`: a dispatch table for a workload.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use layerzero::{Buckets, Disagreement, DispatchTable, SolveRequest};
use lz_model::{CallSpec, DeviceIx};
use serde::Serialize;

use super::lock::{LeftOut, calls, decisions, left_out, read_document, told, too_large, unfit, warn_of, write};
use crate::args::{EngineArgs, Named};
use crate::error::CliError;
use crate::exit::Exit;
use crate::measuring::{self, Sizes};
use crate::printer::Printer;
use crate::program::ModelSizes;
use crate::session::Session;
use crate::surroundings::Surroundings;

/// Decide for the calls of a workload by buckets of sizes, and write a dispatch table
///
/// LAYERZERO_DISPATCH_TABLE (or `dispatch_table:` in layerzero.yaml) puts the table in force: a call whose sizes fall
/// into a bucket gets the kernel that was decided for it; above the last bucket, and for other kinds of calls, kernels
/// are selected at run time. A table is for one kind of device and one set of capabilities; elsewhere it is refused.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Examples:\n  layerzero solve --calls calls.jsonl --buckets seq_len=128,512,2048 batch=1,4 rows=2048 -o \
                  table.json\n  layerzero solve --trace config.json --dtype bfloat16 --buckets seq_len=128,512 batch=1,4 -o \
                  table.json\n\nExits with 1 when --check finds decisions that cannot be kept."
)]
pub struct Args {
    /// The calls, as JSON, one in each line; '-' reads them from standard input. By default those that were measured or
    /// made on the device
    #[arg(long, value_name = "FILE")]
    calls: Option<PathBuf>,
    /// The upper ends of the buckets of a size; sizes are named as in 'layerzero ops'
    #[arg(long, value_name = "SIZE=128,512,2048", num_args = 1.., required_unless_present = "check")]
    buckets: Vec<Named<Sizes>>,
    /// What to call the workload; 'unnamed' when not given, or what --trace says
    #[arg(long, value_name = "NAME")]
    model: Option<String>,
    /// The calls a model makes at the ends of the buckets 'batch' and 'seq_len', traced without weights: the path of a
    /// transformers config.json, a name in the local Hugging Face cache, or a published one (gpt2, llama-3-8b, …)
    #[arg(long, value_name = "NAME|FILE", conflicts_with = "calls")]
    trace: Option<String>,
    /// What the traced model computes in; float32 when not given
    #[arg(long, requires = "trace")]
    dtype: Option<String>,
    /// The file to write; '-' prints it
    #[arg(short, long, value_name = "FILE", default_value = "dispatch_table.json")]
    output: PathBuf,
    /// Write nothing; say which decisions of this table cannot be kept here, and why
    #[arg(long, value_name = "FILE", conflicts_with_all = ["calls", "buckets", "trace"])]
    check: Option<PathBuf>,
    #[command(flatten)]
    engine: EngineArgs,
}

/// The answer.
#[derive(Serialize)]
struct Answer<'a> {
    /// The file that was written; none when it was printed.
    output: Option<&'a Path>,
    /// What torch calls the device it is for.
    device: String,
    table: &'a DispatchTable,
    outside: Vec<Outside>,
    left_out: Vec<LeftOut>,
    disagreements: &'a [Disagreement],
}

/// A call above the last bucket.
#[derive(Serialize)]
struct Outside {
    call: CallSpec,
    #[serde(flatten)]
    reason: lz_model::Reason,
    message: String,
}

/// Solves or checks.
pub fn run(args: &Args, at: &Surroundings, printer: &mut Printer<'_>) -> Result<Exit, CliError> {
    let session = Session::unconfigured(&args.engine, at)?;
    session.engine.leave_unread("lockfile");
    session.engine.leave_unread("dispatch_table");
    let session = session.configured(at)?;
    session.engine.learn();
    if let Some(file) = &args.check {
        let text = read_document("dispatch table", &at.directory.join(file))?;
        let table = DispatchTable::parse(&text).map_err(|error| unfit("dispatch table", file, &error))?;
        let status = session.engine.check_table(&table, &file.display().to_string())?;
        session.print_warnings(printer);
        return told(&status, printer);
    }
    let buckets = buckets(&args.buckets)?;
    let mut calls = match &args.trace {
        Some(model) => traced(model, args, session.device, at, printer)?,
        None => calls(args.calls.as_deref(), &session, at, printer)?,
    };
    calls.retain(|(_, device)| *device == session.device);
    let request = SolveRequest {
        model_id: args.model.clone().or_else(|| args.trace.clone()).unwrap_or_else(|| "unnamed".into()),
        device: session.device,
        buckets,
        calls: calls.iter().map(|(call, _)| call.clone()).collect(),
    };
    let solved = session.engine.solve(&request)?;
    let left_out = left_out(args.calls.as_deref(), &calls, solved.impossible)?;
    session.print_warnings(printer);
    warn_of(&left_out, printer);
    let text = solved.table.to_json();
    if text.len() > DispatchTable::MAX_BYTES {
        return Err(too_large(text.len(), DispatchTable::MAX_BYTES));
    }
    let file = write(&args.output, &text, at)?;
    let outside: Vec<Outside> = solved
        .outside
        .into_iter()
        .map(|(i, reason)| Outside { call: calls[i].0.clone(), message: reason.to_string(), reason })
        .collect();
    if printer.wants_json() {
        let answer = Answer {
            output: file.as_deref(),
            device: session.device_name(),
            table: &solved.table,
            outside,
            left_out,
            disagreements: &solved.disagreements,
        };
        printer.json(&answer)?;
        return Ok(Exit::Ok);
    }
    for Outside { call, message, .. } in &outside {
        printer.warning(&format!("selected at run time: {call}: {message}"));
    }
    for odd in &solved.disagreements {
        let (bucket, others) = (words(&odd.bucket), odd.others.join(", "));
        let what = format!("{bucket} is wide for {}: {} is taken, {others} for other calls in it", odd.op, odd.taken);
        printer.warning(&what);
    }
    if file.is_none() {
        printer.bytes(text.as_bytes())?;
        return Ok(Exit::Ok);
    }
    print(&args.output, &session.device_name(), &solved.table, printer)?;
    Ok(Exit::Ok)
}

/// The calls of a model at the ends of the buckets: prompts and contexts are as long as a sequence may be.
fn traced(
    model: &str,
    args: &Args,
    device: DeviceIx,
    at: &Surroundings,
    printer: &mut Printer<'_>,
) -> Result<Vec<(CallSpec, DeviceIx)>, CliError> {
    let ends = |name: &str| args.buckets.iter().find(|b| b.name == name).map_or_else(Vec::new, |b| b.value.0.clone());
    let (batch, seq) = (ends("batch"), ends("seq_len"));
    let wanted = ModelSizes { model: model.to_owned(), dtype: args.dtype.clone(), batch, context: seq.clone(), seq };
    let calls = measuring::model_calls(&wanted, at, printer)?;
    Ok(calls.into_iter().map(|(call, _)| (call, device)).collect())
}

/// The axes as they were given, each once.
fn buckets(given: &[Named<Sizes>]) -> Result<Buckets, CliError> {
    let mut axes: BTreeMap<String, Vec<i64>> = BTreeMap::new();
    for Named { name, value } in given {
        if axes.insert(name.clone(), value.0.clone()).is_some() {
            return Err(CliError::argument(format!("--buckets {name} was given twice"), "give all ends of it at once"));
        }
    }
    let hint = "write the upper ends of buckets, ascending: --buckets seq_len=128,512,2048";
    Buckets::new(axes).map_err(|error| CliError::argument(error.to_string(), hint))
}

fn words(bucket: &BTreeMap<String, i64>) -> String {
    let words: Vec<String> = bucket.iter().map(|(axis, end)| format!("{axis}={end}")).collect();
    if words.is_empty() { "every size".into() } else { words.join(" ") }
}

fn print(output: &Path, device: &str, table: &DispatchTable, printer: &mut Printer<'_>) -> Result<(), CliError> {
    let entries: usize = table.plans.iter().map(|plan| plan.ops.len()).sum();
    let (buckets, hardware) = (table.plans.len(), &table.hardware_signature);
    let of_buckets = format!("{buckets} bucket{}", if buckets == 1 { "" } else { "s" });
    printer.line(format!(
        "{}: {} in {of_buckets} for {hardware}, on {device}",
        output.display(),
        decisions(entries)
    ))?;
    let rows = table.plans.iter().flat_map(|plan| {
        plan.ops.iter().map(move |planned| {
            let mode = if planned.graph { " (graph)" } else { "" };
            let time = planned.time_us.map_or_else(String::new, |us| format!("{us} µs"));
            [words(&plan.bucket), format!("{}{mode}", planned.op), planned.kernel_id.clone(), time]
        })
    });
    printer.table(["bucket", "operation", "kernel", "time"], rows)
}
