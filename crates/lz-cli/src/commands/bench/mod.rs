//! `layerzero bench`: measurements of LayerZero itself, one file each. To add one: write its file, add a line to
//! [`BENCHES`].

pub mod instructions;
pub mod resilience;
pub mod select;

use serde_json::Value;

use crate::error::CliError;
use crate::exit::Exit;
use crate::printer::Printer;
use crate::surroundings::Surroundings;

/// Measure LayerZero itself on this machine
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Which measurement; lists them when not given
    name: Option<String>,
    /// How many batches are timed
    #[arg(long, default_value_t = 200)]
    batches: usize,
    /// How many repetitions are timed together
    #[arg(long, default_value_t = 1000)]
    batch_size: usize,
    /// Only repeat the measured call this often: what an instruction counter runs
    #[arg(long, hide = true)]
    probe: Option<usize>,
}

/// How to measure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BenchOptions {
    /// How many batches are timed; at least one.
    pub batches: usize,
    /// How many repetitions are timed together; at least one.
    pub batch_size: usize,
    /// Only repeat the measured call this often, for an instruction counter.
    pub probe: Option<usize>,
}

/// One measurement.
pub struct Bench {
    /// What to ask for it by.
    pub name: &'static str,
    /// One line.
    pub summary: &'static str,
    /// Measures; the result is the content of a JSON document.
    pub run: fn(&BenchOptions) -> Result<Value, CliError>,
    /// Prints a result for people.
    pub print: fn(&Value, &mut Printer<'_>) -> Result<(), CliError>,
}

/// The measurements, in the order of listings.
pub static BENCHES: &[Bench] = &[
    Bench {
        name: "select",
        summary: "what selection costs, cached and cold, and how it scales with threads",
        run: select::run,
        print: select::print,
    },
    Bench {
        name: "resilience",
        summary: "what policy, breakers, counters and rollouts add to a call",
        run: resilience::run,
        print: resilience::print,
    },
    Bench {
        name: "instructions",
        summary: "how many instructions native kernels take for an element, by valgrind",
        run: instructions::run,
        print: instructions::print,
    },
];

/// Measures and prints.
pub fn run(args: &Args, _: &Surroundings, printer: &mut Printer<'_>) -> Result<Exit, CliError> {
    let Some(name) = &args.name else {
        return list(printer);
    };
    let Some(bench) = BENCHES.iter().find(|b| b.name == name) else {
        let nearest = lz_model::nearest(name, BENCHES.iter().map(|b| b.name));
        let what = format!("unknown measurement '{name}'{}", lz_model::did_you_mean(&nearest));
        return Err(CliError::argument(what, "list them with 'layerzero bench'"));
    };
    let result = (bench.run)(&BenchOptions {
        batches: args.batches.max(1),
        batch_size: args.batch_size.max(1),
        probe: args.probe,
    })?;
    if printer.wants_json() {
        printer.json(&result)?;
    } else {
        (bench.print)(&result, printer)?;
    }
    Ok(Exit::Ok)
}

fn list(printer: &mut Printer<'_>) -> Result<Exit, CliError> {
    if printer.wants_json() {
        let benches: Vec<Value> =
            BENCHES.iter().map(|b| serde_json::json!({"name": b.name, "summary": b.summary})).collect();
        printer.json(&serde_json::json!({ "benches": benches }))?;
    } else {
        printer.table(["name", "measures"], BENCHES.iter().map(|b| [b.name.into(), b.summary.into()]))?;
    }
    Ok(Exit::Ok)
}
