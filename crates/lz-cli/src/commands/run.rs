//! `layerzero run`: an operation on random inputs, for real.

use std::time::Instant;

use layerzero::{Arguments, Dispatched};
use lz_model::{Call, Catalog, TensorView};
use serde::Serialize;

use crate::args::{CallArgs, PolicyArgs, joined};
use crate::call::ResolvedCall;
use crate::error::CliError;
use crate::exit::Exit;
use crate::host::{HostTensor, Random, check_size};
use crate::printer::Printer;
use crate::session::Session;
use crate::surroundings::Surroundings;

/// Run an operation on this machine's CPU, with random inputs
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    call: CallArgs,
    #[command(flatten)]
    policy: PolicyArgs,
    /// The seed of the random inputs
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Use the kernels for vector instructions too; `python -m layerzero` always does
    #[arg(long)]
    simd: bool,
    /// How often the call is made; the time is the shortest
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    repeat: u32,
}

/// The answer.
#[derive(Serialize)]
struct Answer {
    op: &'static str,
    kernel_id: String,
    device: String,
    seed: u64,
    time_ms: f64,
    failures: Vec<FailureReport>,
    outputs: Vec<OutputReport>,
}

#[derive(Serialize)]
struct FailureReport {
    kernel_id: String,
    error: String,
}

/// One output, or an input that was updated.
#[derive(Serialize)]
struct OutputReport {
    name: String,
    dtype: &'static str,
    shape: Vec<i64>,
    /// FNV-1a of the elements, as 64-bit floats in row-major order.
    checksum: String,
    /// `null` when there is nothing to average, or it is not a number.
    mean: Option<f64>,
    min: Option<f64>,
    max: Option<f64>,
    nans: usize,
}

/// Runs it and prints what came out.
pub fn run(args: &Args, at: &Surroundings, printer: &mut Printer<'_>) -> Result<Exit, CliError> {
    let call = ResolvedCall::new(&args.call)?;
    // Without it, and without a program, the references run: they give the same results on every machine.
    let at = &Surroundings { simd_kernels: args.simd && at.program.is_none(), ..at.clone() };
    let session = Session::on(vec![lz_hardware::detect_cpu()], at)?.configured(at)?;
    session.set_policy(&call.op, &args.policy)?;
    let (ordered, bound) = session.engine.bind(&call.op, &call.named(session.device))?;
    let op = Catalog::get().op(bound.query.op());
    let mut random = Random::new(args.seed);
    let tensors = call.tensors.iter().map(|arg| HostTensor::random(arg, op, &bound.query, &mut random));
    let mut tensors: Vec<HostTensor> = tensors.collect::<Result<_, _>>()?;
    let in_order = Call {
        inputs: &ordered.inputs,
        params: &ordered.params,
        layout: call.layout,
        device: bound.query.device(),
        context: call.context,
    };
    for output in op.outputs(&in_order, &bound.query) {
        check_size(output.name, &output.shape)?;
    }
    let mut timed = || {
        let started = Instant::now();
        let done = session.engine.dispatch(&call.op, arguments(&call, &mut tensors))?;
        Ok::<_, CliError>((done, started.elapsed().as_secs_f64() * 1e3))
    };
    let (mut done, mut time_ms) = timed()?;
    for _ in 1..args.repeat {
        let (again, took_ms) = timed()?;
        (done, time_ms) = (again, time_ms.min(took_ms));
    }
    session.print_warnings(printer);
    let answer = Answer {
        op: done.op,
        kernel_id: done.kernel_id.clone(),
        device: session.engine.devices().into_iter().next().map_or_else(String::new, |d| d.name),
        seed: args.seed,
        time_ms,
        failures: failures(&done),
        outputs: outputs(&done, &tensors),
    };
    print(&answer, printer)?;
    Ok(Exit::Ok)
}

fn arguments<'a>(call: &'a ResolvedCall, tensors: &'a mut [HostTensor]) -> Arguments<'a> {
    let mut arguments = Arguments::new().context(call.context);
    if let Some(layout) = call.layout {
        arguments = arguments.layout(layout);
    }
    for (name, value) in &call.params {
        arguments = arguments.param(name, *value);
    }
    for (tensor, arg) in tensors.iter_mut().zip(&call.tensors) {
        arguments = if tensor.updated {
            arguments.update(&arg.name, tensor.view_mut())
        } else {
            arguments.input(&arg.name, tensor.view())
        };
    }
    arguments
}

fn failures(done: &Dispatched) -> Vec<FailureReport> {
    let report = |f: &layerzero::Failure| FailureReport { kernel_id: f.kernel_id.clone(), error: f.error.to_string() };
    done.failures.iter().map(report).collect()
}

fn outputs(done: &Dispatched, tensors: &[HostTensor]) -> Vec<OutputReport> {
    let fresh = done.outputs.iter().map(|(name, tensor)| summarize(name, &tensor.view()));
    let updated = tensors.iter().filter(|t| t.updated).map(|t| summarize(&t.name, &t.view()));
    fresh.chain(updated).collect()
}

fn summarize(name: &str, view: &TensorView<'_>) -> OutputReport {
    let values = view.to_f64();
    let numbers = || values.iter().copied().filter(|x| !x.is_nan());
    let nans = values.len() - numbers().count();
    let finite = |x: f64| Some(x).filter(|x| x.is_finite());
    OutputReport {
        name: name.to_owned(),
        dtype: view.dtype().name(),
        shape: view.shape().to_vec(),
        checksum: format!("{:016x}", checksum(&values)),
        mean: finite(numbers().sum::<f64>() / (values.len() - nans) as f64),
        min: numbers().reduce(f64::min),
        max: numbers().reduce(f64::max),
        nans,
    }
}

fn checksum(values: &[f64]) -> u64 {
    let bytes = values.iter().flat_map(|x| x.to_le_bytes());
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

fn print(answer: &Answer, printer: &mut Printer<'_>) -> Result<(), CliError> {
    if printer.wants_json() {
        return printer.json(answer);
    }
    printer.line(format!("{} ran {} in {:.3} ms", answer.kernel_id, answer.op, answer.time_ms))?;
    printer.line(format!("  on    {}", answer.device))?;
    printer.line(format!("  seed  {}", answer.seed))?;
    for failure in &answer.failures {
        printer.line(format!("  failed before: {}: {}", failure.kernel_id, failure.error))?;
    }
    let number = |x: Option<f64>| x.map_or_else(|| "none".into(), |x| format!("{x:.6}"));
    let row = |o: &OutputReport| {
        let (mean, min, max) = (number(o.mean), number(o.min), number(o.max));
        [o.name.clone(), joined(&o.shape), o.dtype.into(), mean, min, max, o.nans.to_string(), o.checksum.clone()]
    };
    let header = ["output", "shape", "dtype", "mean", "min", "max", "NaNs", "checksum"];
    printer.table(header, answer.outputs.iter().map(row))
}
