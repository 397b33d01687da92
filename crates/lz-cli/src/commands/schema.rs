//! `layerzero schema`: the JSON Schemas of the files LayerZero reads, generated from the types that read them.

use std::fs;
use std::path::{Path, PathBuf};

use clap::ValueEnum;
use layerzero::DispatchTable;
use lz_model::DeviceSpec;
use serde_json::Value;

use crate::error::CliError;
use crate::exit::Exit;
use crate::printer::Printer;
use crate::surroundings::Surroundings;

/// Print the JSON Schema of a file LayerZero reads, or check a copy of it
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Which schema
    #[arg(default_value = "capabilities")]
    what: What,
    /// Print nothing; exit with 1 when this file is not the schema, byte for byte
    #[arg(long, value_name = "FILE")]
    check: Option<PathBuf>,
}

/// The files that have a schema.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum What {
    /// A backend's capabilities
    Capabilities,
    /// A device description
    Device,
    /// A configuration file, layerzero.yaml
    Config,
    /// A dispatch table, of 'layerzero solve'
    DispatchTable,
}

impl What {
    fn name(self) -> &'static str {
        match self {
            What::Capabilities => "capabilities",
            What::Device => "device",
            What::Config => "config",
            What::DispatchTable => "dispatch-table",
        }
    }

    fn schema(self) -> Value {
        match self {
            What::Capabilities => lz_model::capabilities::json_schema(),
            What::Device => schemars::schema_for!(DeviceSpec).to_value(),
            What::Config => lz_config::schema(),
            What::DispatchTable => DispatchTable::json_schema(),
        }
    }
}

/// Prints or checks.
pub fn run(args: &Args, _: &Surroundings, printer: &mut Printer<'_>) -> Result<Exit, CliError> {
    let schema = args.what.schema();
    match &args.check {
        None => printer.raw_json(&schema)?,
        Some(path) => check(args.what, &schema, path)?,
    }
    Ok(Exit::Ok)
}

fn check(what: What, schema: &Value, path: &Path) -> Result<(), CliError> {
    let outdated = |difference| CliError::Outdated { path: path.to_owned(), what: what.name(), difference };
    let text = fs::read_to_string(path).map_err(|error| outdated(format!("it cannot be read: {error}")))?;
    let current = format!("{schema:#}\n");
    if text == current {
        return Ok(());
    }
    let differing = text.lines().zip(current.lines()).position(|(a, b)| a != b);
    let line = differing.unwrap_or_else(|| text.lines().count().min(current.lines().count()));
    Err(outdated(format!("line {} differs", line + 1)))
}
