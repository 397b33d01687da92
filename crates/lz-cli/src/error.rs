//! What can go wrong, with the code, the exit and the hint that go with it.

use std::io;
use std::path::PathBuf;

use layerzero::Error as EngineError;
use lz_model::capabilities::{CapabilitiesError, Problem};
use lz_model::{CallError, DeviceFileError};
use serde::Serialize;

use crate::exit::Exit;

/// An error of a command.
#[derive(Debug, thiserror::Error)]
pub enum CliError {
    /// The command line cannot be parsed.
    #[error("{}", plain(.0))]
    Usage(clap::Error),
    /// Arguments that do not fit together.
    #[error("{what}")]
    Argument {
        /// What is wrong.
        what: String,
        /// What to do.
        hint: String,
    },
    /// The call or the name of an operation is wrong.
    #[error(transparent)]
    Call(#[from] CallError),
    /// The engine refuses.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// A name that is neither a file nor a device.
    #[error("unknown device '{name}'{}", lz_model::did_you_mean(nearest))]
    UnknownDevice {
        /// The name.
        name: String,
        /// The closest known one.
        nearest: Option<String>,
    },
    /// A device description that cannot be used.
    #[error(transparent)]
    DeviceFile(#[from] DeviceFileError),
    /// A capabilities document that was refused.
    #[error("{}: {error}", path.display())]
    Capabilities {
        /// The file.
        path: PathBuf,
        /// Why.
        error: Box<EngineError>,
    },
    /// A file that cannot be read.
    #[error("cannot read '{}': {source}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A lockfile or dispatch table that cannot be used.
    #[error("{what} '{}': {message}", path.display())]
    Document {
        /// What it was taken for.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// What is wrong with it, and where.
        message: String,
    },
    /// A generated file that is not what would be generated now.
    #[error("'{}' is not the current {what} schema: {difference}", path.display())]
    Outdated {
        /// The file.
        path: PathBuf,
        /// Which schema.
        what: &'static str,
        /// The first difference.
        difference: String,
    },
    /// The answer cannot be written.
    #[error("cannot write the answer: {0}")]
    Output(#[from] io::Error),
}

/// An error as JSON.
#[derive(Debug, Serialize)]
pub struct ErrorDocument {
    code: &'static str,
    message: String,
    hint: String,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    problems: Vec<ProblemDocument>,
}

/// One problem of a document, as JSON.
#[derive(Debug, Serialize)]
struct ProblemDocument {
    path: String,
    message: String,
}

impl CliError {
    /// Arguments that do not fit together.
    pub fn argument(what: impl Into<String>, hint: impl Into<String>) -> CliError {
        CliError::Argument { what: what.into(), hint: hint.into() }
    }

    /// A stable code.
    pub fn code(&self) -> &'static str {
        match self {
            CliError::Usage(_) => "USAGE",
            CliError::Argument { .. } => "BAD_ARGUMENT",
            CliError::Call(error) => error.code(),
            CliError::Engine(error) => error.code(),
            CliError::Capabilities { error, .. } => error.code(),
            CliError::UnknownDevice { .. } => "UNKNOWN_DEVICE",
            CliError::DeviceFile(_) => "INVALID_DEVICE",
            CliError::Unreadable { .. } => "UNREADABLE_FILE",
            CliError::Document { .. } => "INVALID_DOCUMENT",
            CliError::Outdated { .. } => "OUTDATED_SCHEMA",
            CliError::Output(_) => "OUTPUT_FAILED",
        }
    }

    /// How the command ends.
    pub fn exit(&self) -> Exit {
        match self {
            CliError::Usage(_) | CliError::Argument { .. } | CliError::Call(_) | CliError::UnknownDevice { .. } => {
                Exit::Usage
            }
            CliError::DeviceFile(_)
            | CliError::Capabilities { .. }
            | CliError::Unreadable { .. }
            | CliError::Document { .. } => Exit::Config,
            CliError::Outdated { .. } => Exit::No,
            CliError::Output(_) => Exit::Unusable,
            CliError::Engine(error) => match error {
                EngineError::Call(_) | EngineError::UnknownKernel { .. } => Exit::Usage,
                EngineError::NoKernel { .. } | EngineError::CudaGraphUnsafe { .. } | EngineError::Execution { .. } => {
                    Exit::No
                }
                EngineError::Snapshot(_)
                | EngineError::Capabilities { .. }
                | EngineError::Config(_)
                | EngineError::ExplainDisabled
                | EngineError::TableRefused { .. } => Exit::Config,
                EngineError::UnknownDevice(_) | EngineError::Watch(_) => Exit::Unusable,
            },
        }
    }

    /// What to do about it.
    pub fn hint(&self) -> String {
        match self {
            CliError::Usage(_) => "see 'layerzero --help'".into(),
            CliError::Argument { hint, .. } => hint.clone(),
            CliError::Call(error) => error.hint(),
            CliError::Engine(error) => error.hint(),
            CliError::Capabilities { error, .. } => error.hint(),
            CliError::UnknownDevice { .. } => {
                format!("pass a JSON file, 'cpu' or 'cuda:0', or one of {}", lz_hardware::described_names().join(", "))
            }
            CliError::DeviceFile(_) => "see what a description holds with 'layerzero schema device'".into(),
            CliError::Unreadable { .. } => "check the path".into(),
            CliError::Document { what: "lockfile", .. } => "write it anew with 'layerzero lock'".into(),
            CliError::Document { .. } => "write it anew with 'layerzero solve'".into(),
            CliError::Outdated { path, what, .. } => {
                format!("layerzero schema {what} > {}", path.display())
            }
            CliError::Output(_) => "check the disk or pipe that standard output goes to".into(),
        }
    }

    /// As JSON.
    pub fn document(&self) -> ErrorDocument {
        let problems = match self {
            CliError::Capabilities { error, .. } => problems(error),
            CliError::Engine(error) => problems(error),
            _ => Vec::new(),
        };
        ErrorDocument { code: self.code(), message: self.to_string(), hint: self.hint(), problems }
    }
}

/// The single problems of a document that was refused.
fn problems(error: &EngineError) -> Vec<ProblemDocument> {
    match error {
        EngineError::Capabilities { error: CapabilitiesError::Problems(problems), .. } => {
            let document = |p: &Problem| ProblemDocument { path: p.path.clone(), message: p.message.clone() };
            problems.iter().map(document).collect()
        }
        EngineError::Config(error) => {
            let document = |p: &lz_config::Problem| ProblemDocument { path: p.at.to_string(), message: p.to_string() };
            error.problems.iter().map(document).collect()
        }
        _ => Vec::new(),
    }
}

/// What clap has to say, without its own label and hint.
fn plain(error: &clap::Error) -> String {
    let text = error.render().to_string();
    let text = text.strip_prefix("error: ").unwrap_or(&text).trim_end();
    text.strip_suffix("For more information, try '--help'.").unwrap_or(text).trim_end().to_owned()
}
