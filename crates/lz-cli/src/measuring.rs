//! What commands that measure have in common: which calls, for how long, who runs the kernels, how far it is.

use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use layerzero::perf::bench::Bench;
use layerzero::perf::request::{Request, RequestError};
use layerzero::perf::tune::{Progress, TuneOptions, Wanted};
use lz_model::{CallSpec, Layout, ParamSpec};

use crate::args::{BadText, Extents, Named};
use crate::device;
use crate::error::CliError;
use crate::printer::Printer;
use crate::program::ModelSizes;
use crate::session::Session;
use crate::surroundings::Surroundings;

/// Which calls to measure, and for how long.
#[derive(Debug, Default, clap::Args)]
pub struct MeasureArgs {
    /// An operation or alias, at the shapes or sizes given
    #[arg(value_name = "OP")]
    op: Option<String>,
    /// The dtype of the data
    #[arg(long)]
    dtype: Option<String>,
    /// A shape of the operation's main input; of attention batch x seq x heads x head_dim; may be repeated
    #[arg(long = "shape", value_name = "1x1024x16x128")]
    shapes: Vec<Extents>,
    /// Sizes of a dimension, of which every combination is measured; repeated for each dimension
    #[arg(long = "dim", value_name = "seq_len=512,2048")]
    dims: Vec<Named<Sizes>>,
    /// A parameter of the calls; may be repeated
    #[arg(long = "param", value_name = "NAME=VALUE")]
    params: Vec<Named<String>>,
    /// The layout of the calls
    #[arg(long)]
    layout: Option<Layout>,
    /// The calls a model makes, traced without weights: the path of a transformers config.json, a name in the local
    /// Hugging Face cache, or a published one (gpt2, llama-3-8b, …)
    #[arg(long, value_name = "NAME|FILE")]
    model: Option<String>,
    /// Batch sizes of the model's calls
    #[arg(long, value_name = "1,8", value_parser = clap::value_parser!(Sizes))]
    batch: Option<Sizes>,
    /// Lengths of the model's prompts
    #[arg(long, value_name = "128,512", value_parser = clap::value_parser!(Sizes))]
    seq: Option<Sizes>,
    /// Lengths of the model's contexts when it decodes
    #[arg(long, value_name = "512", value_parser = clap::value_parser!(Sizes))]
    context: Option<Sizes>,
    /// Calls as JSON, one in each line; '-' reads them from standard input
    #[arg(long, value_name = "FILE")]
    calls: Option<PathBuf>,
    /// Every call that was measured before
    #[arg(long)]
    known: bool,
    /// How long it may take: 60s, 2m, 500ms
    #[arg(long, default_value = "60s")]
    budget: BudgetArg,
    /// How many rounds a call gets at least; perfdb.tune_samples when not given
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    samples: Option<u32>,
    /// The device: cpu, cuda:0, … By default torch's accelerator in use, else the CPU
    #[arg(long)]
    device: Option<String>,
    /// Time calls replayed in a CUDA graph instead of eager ones
    #[arg(long)]
    graph: bool,
}

/// Sizes, written `512,2048`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sizes(pub Vec<i64>);

impl FromStr for Sizes {
    type Err = BadText;

    fn from_str(text: &str) -> Result<Self, BadText> {
        let bad = |part: &str| BadText::new(format!("'{part}' is no whole number; write sizes like 512,2048"));
        text.split(',').map(|part| part.trim().parse().map_err(|_| bad(part))).collect::<Result<_, _>>().map(Sizes)
    }
}

/// A time to spend, written `60s`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct BudgetArg(pub Duration);

impl FromStr for BudgetArg {
    type Err = BadText;

    fn from_str(text: &str) -> Result<Self, BadText> {
        let bad = || BadText::new(format!("'{text}' is no time to spend; write it like 60s, 2m or 500ms, above zero"));
        let at = text.find(|c: char| c.is_ascii_alphabetic()).unwrap_or(text.len());
        let (number, unit) = text.split_at(at);
        let unit = match unit {
            "" | "s" => 1.0,
            "ms" => 1e-3,
            "m" | "min" => 60.0,
            "h" => 3600.0,
            _ => return Err(bad()),
        };
        let seconds = number.trim().parse::<f64>().map_err(|_| bad())? * unit;
        let budget = Duration::try_from_secs_f64(seconds).map_err(|_| bad())?;
        if budget.is_zero() { Err(bad()) } else { Ok(BudgetArg(budget)) }
    }
}

impl MeasureArgs {
    /// The calls that are wanted.
    pub fn wanted(
        &self,
        session: &Session,
        at: &Surroundings,
        printer: &mut Printer<'_>,
    ) -> Result<Vec<Wanted>, CliError> {
        let sizes = |given: &Option<Sizes>| given.as_ref().map_or_else(Vec::new, |s| s.0.clone());
        let mut calls = self.read_calls()?;
        let mut counts = vec![1; calls.len()];
        if let Some(model) = &self.model {
            let wanted = ModelSizes {
                model: model.clone(),
                dtype: self.dtype.clone(),
                batch: sizes(&self.batch),
                seq: sizes(&self.seq),
                context: sizes(&self.context),
            };
            for (call, count) in model_calls(&wanted, at, printer)? {
                calls.push(call);
                counts.push(count);
            }
        }
        let request = Request {
            calls,
            counts,
            op: self.op.clone(),
            dtype: self.dtype.clone(),
            shapes: self.shapes.iter().map(|s| s.0.clone()).collect(),
            dims: self.dims.iter().map(|d| (d.name.clone(), d.value.0.clone())).collect(),
            params: self.params.iter().map(|p| (p.name.clone(), param(&p.value))).collect(),
            layout: self.layout,
            known: self.known,
            device: device::number(session, self.device.as_deref(), at)?.0,
            graph: self.graph,
        };
        request.wanted(&session.engine, &session.engine.process()).map_err(|error| match error {
            RequestError::Call(error) => CliError::Call(error),
            other => CliError::argument(other.to_string(), other.hint()),
        })
    }

    /// How to measure them.
    pub fn options(&self, session: &Session) -> TuneOptions {
        let samples = self.samples.unwrap_or_else(|| session.engine.with_config(|c| c.settings.perfdb.tune_samples));
        TuneOptions { budget: self.budget.0, samples, ..TuneOptions::default() }
    }

    fn read_calls(&self) -> Result<Vec<CallSpec>, CliError> {
        self.calls.as_deref().map_or(Ok(Vec::new()), crate::call::read_calls)
    }
}

/// A parameter's value: a truth value, a number, or a name.
fn param(text: &str) -> ParamSpec {
    let typed = text.parse().map(ParamSpec::Bool).or_else(|_| text.parse().map(ParamSpec::Int));
    typed.or_else(|_| text.parse().map(ParamSpec::Float)).unwrap_or_else(|_| ParamSpec::Str(text.to_owned()))
}

/// The calls of a model, each with how often it makes it. What is left out is a warning.
pub fn model_calls(
    wanted: &ModelSizes,
    at: &Surroundings,
    printer: &mut Printer<'_>,
) -> Result<Vec<(CallSpec, u64)>, CliError> {
    let hint = "run it by 'python -m layerzero' where torch and transformers are installed";
    let program =
        at.program.as_ref().ok_or_else(|| CliError::argument("there is nothing here to trace a model", hint))?;
    let found = program.model_calls(wanted).map_err(|refusal| CliError::argument(refusal.what, refusal.hint))?;
    for text in &found.left_out {
        printer.warning(&format!("left out: {text}"));
    }
    Ok(found.calls)
}

/// What runs kernels in this program.
pub fn bench(at: &Surroundings) -> Result<Box<dyn Bench>, CliError> {
    let hint = "run it by 'python -m layerzero' where torch is installed: this program has only references";
    let program = at.program.as_ref().ok_or_else(|| CliError::argument("there is nothing here to measure", hint))?;
    program.bench().map_err(|error| CliError::argument(error, "install torch: kernels are measured on its tensors"))
}

/// Shows how far it is, where somebody is looking.
pub fn show(printer: &mut Printer<'_>, progress: &Progress) {
    const WIDTH: usize = 24;
    let full = (progress.done * WIDTH).checked_div(progress.calls).unwrap_or(0).min(WIDTH);
    let bar = format!("{}{}", "█".repeat(full), "░".repeat(WIDTH - full));
    let left = progress.left_s.max(0.0).ceil() as u64;
    let text =
        format!("{bar} {}/{} {}:{:02} left  {}", progress.done, progress.calls, left / 60, left % 60, progress.current);
    printer.progress(&text);
}
