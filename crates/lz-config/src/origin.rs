//! Where a value comes from.

use std::fmt;
use std::path::{Path, PathBuf};

use serde::Serialize;

/// Where a value comes from. The order of the layers is
/// context > code > environment > project file (and what it includes) > user file > default.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "layer", rename_all = "snake_case")]
pub enum Origin {
    /// Nobody said anything.
    Default,
    /// The user's file.
    UserFile {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: usize,
        /// The column, from 1.
        column: usize,
    },
    /// The project's file.
    ProjectFile {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: usize,
        /// The column, from 1.
        column: usize,
    },
    /// A file that another includes.
    Included {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: usize,
        /// The column, from 1.
        column: usize,
    },
    /// An environment variable.
    Environment {
        /// Its name.
        name: String,
    },
    /// `configure`, `lock`, `unlock`.
    Code,
    /// A `with` block.
    Context,
}

impl Origin {
    /// The file it stands in, if it is one.
    pub fn file(&self) -> Option<&Path> {
        match self {
            Origin::UserFile { path, .. } | Origin::ProjectFile { path, .. } | Origin::Included { path, .. } => {
                Some(path)
            }
            Origin::Default | Origin::Environment { .. } | Origin::Code | Origin::Context => None,
        }
    }

    /// Short enough for the name of a rule: `layerzero.yaml:31`, `LAYERZERO_PREFER`, `code`.
    pub fn short(&self) -> String {
        match self {
            Origin::UserFile { path, line, .. }
            | Origin::ProjectFile { path, line, .. }
            | Origin::Included { path, line, .. } => {
                let name = path.file_name().map_or_else(|| path.display().to_string(), |n| n.to_string_lossy().into());
                format!("{name}:{line}")
            }
            Origin::Environment { name } => name.clone(),
            Origin::Default => "default".into(),
            Origin::Code => "code".into(),
            Origin::Context => "context".into(),
        }
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Origin::UserFile { path, line, column }
            | Origin::ProjectFile { path, line, column }
            | Origin::Included { path, line, column } => write!(f, "{}:{line}:{column}", path.display()),
            Origin::Environment { name } => write!(f, "environment variable {name}"),
            Origin::Default => f.write_str("default"),
            Origin::Code => f.write_str("code"),
            Origin::Context => f.write_str("context"),
        }
    }
}

/// A place in a text; both from 1.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Position {
    pub line: usize,
    pub column: usize,
}

/// Who speaks: a layer without a place in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    User(PathBuf),
    Project(PathBuf),
    Included(PathBuf),
    /// A variable, or the environment as a whole.
    Environment(String),
    Code,
    Context,
}

impl Source {
    pub fn at(&self, Position { line, column }: Position) -> Origin {
        match self {
            Source::User(path) => Origin::UserFile { path: path.clone(), line, column },
            Source::Project(path) => Origin::ProjectFile { path: path.clone(), line, column },
            Source::Included(path) => Origin::Included { path: path.clone(), line, column },
            Source::Environment(name) => Origin::Environment { name: name.clone() },
            Source::Code => Origin::Code,
            Source::Context => Origin::Context,
        }
    }

    /// The folder that relative paths are relative to.
    pub fn folder(&self) -> &Path {
        let path = match self {
            Source::User(path) | Source::Project(path) | Source::Included(path) => path.parent(),
            Source::Environment(_) | Source::Code | Source::Context => None,
        };
        path.unwrap_or(Path::new(""))
    }
}
