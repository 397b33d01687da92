//! What can be wrong with a configuration.

use std::fmt;

use lz_model::did_you_mean;
use serde::Serialize;

use crate::origin::Origin;

/// What is wrong with a value, a key or a file.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ProblemKind {
    /// The file cannot be read.
    #[error("cannot be read: {error}")]
    Unreadable {
        /// What the system says.
        error: String,
    },
    /// It is no regular file.
    #[error("is {what}; only regular files are read")]
    NotAFile {
        /// What it is.
        what: &'static str,
    },
    /// It is larger than is read.
    #[error("is larger than {limit} bytes")]
    TooLarge {
        /// The limit.
        limit: u64,
    },
    /// It is not UTF-8.
    #[error("is not UTF-8 (first bad byte at offset {offset})")]
    NotUtf8 {
        /// How many bytes are good.
        offset: usize,
    },
    /// It is not YAML.
    #[error("{message}")]
    Syntax {
        /// What the reader says.
        message: String,
    },
    /// A file that was included and is no configuration. It may be anybody's, so nothing of it is quoted.
    #[error("is no LayerZero configuration ({why}); its content is not shown")]
    NotOurs {
        /// How that is seen.
        why: String,
    },
    /// It nests too deep.
    #[error("nests more than {limit} levels deep")]
    TooDeep {
        /// The limit.
        limit: usize,
    },
    /// An anchor or alias.
    #[error("anchors and aliases (&, *) are not allowed; write the value out")]
    Alias,
    /// A tag.
    #[error("tags (!) are not allowed; write the value alone")]
    Tag,
    /// A key stated twice.
    #[error("stated twice, first on line {first}")]
    DuplicateKey {
        /// Where first.
        first: usize,
    },
    /// A key nobody knows.
    #[error("unknown key{}", did_you_mean(.nearest))]
    UnknownKey {
        /// The closest known one.
        nearest: Option<String>,
    },
    /// A key that must be there.
    #[error("'{key}' is missing; {expected}")]
    MissingKey {
        /// The key.
        key: &'static str,
        /// What to write.
        expected: &'static str,
    },
    /// A value of another kind, or out of range.
    #[error("expected {expected}, found {found}{}", did_you_mean(.nearest))]
    WrongValue {
        /// What it may be.
        expected: String,
        /// What it is.
        found: String,
        /// The closest allowed one.
        nearest: Option<String>,
    },
    /// A value of the specification that this version cannot honour.
    #[error("{found} is not supported yet: {why}; write {only}, or leave it out")]
    NotSupported {
        /// What it is.
        found: String,
        /// What happens instead.
        why: &'static str,
        /// The value it may have.
        only: &'static str,
    },
    /// An operation nobody knows.
    #[error("unknown operation '{name}'{}", did_you_mean(.nearest))]
    UnknownOperation {
        /// The name.
        name: String,
        /// The closest known one.
        nearest: Option<String>,
    },
    /// A kernel or library nobody knows.
    #[error("no {what} is called '{name}'{}", did_you_mean(.nearest))]
    UnknownName {
        /// A kernel or a library.
        what: &'static str,
        /// The name.
        name: String,
        /// The closest known one.
        nearest: Option<String>,
    },
    /// An expression that makes no sense.
    #[error("{message} (column {column} of '{text}'){}", .hint.as_ref().map_or_else(String::new, |h| format!("; {h}")))]
    BadExpression {
        /// What is wrong.
        message: String,
        /// Where in it, from 1.
        column: usize,
        /// The expression.
        text: String,
        /// How to put it right.
        hint: Option<String>,
    },
    /// Things that do not go together, or nothing where something must be.
    #[error("{message}")]
    Contradiction {
        /// What, and what to do.
        message: String,
    },
    /// Includes that go in a circle, too deep, or over too many files.
    #[error("{why}: {}", .chain.join(" → "))]
    Include {
        /// What is wrong.
        why: String,
        /// The files, from the first to the one at fault.
        chain: Vec<String>,
    },
    /// A document newer than this build.
    #[error("version {found} is not supported; this build reads up to {supported}")]
    Version {
        /// What it says.
        found: i64,
        /// The newest that is read.
        supported: i64,
    },
    /// A path that a project's file may not name.
    #[error(
        "leads to '{outside}', outside the project '{project}' and your cache, which its file may not name; set it in \
         your own file or the environment, or list the folder there as allow_project_paths"
    )]
    OutsideProject {
        /// Where it leads, or why that cannot be known.
        outside: String,
        /// The project's folder.
        project: String,
    },
    /// A policy no document has.
    #[error("no document has a policy '{name}'{}", did_you_mean(.nearest))]
    UnknownPolicy {
        /// The name.
        name: String,
        /// The closest one.
        nearest: Option<String>,
    },
}

/// One thing wrong with a configuration.
#[derive(Clone, Debug, PartialEq)]
pub struct Problem {
    /// Where.
    pub at: Origin,
    /// Of which key: `rules[2].match.sm`; empty for the file as a whole.
    pub key: String,
    /// The value at fault, on one line and cut to a sensible length.
    pub value: Option<String>,
    /// What is wrong.
    pub kind: ProblemKind,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", self.at)?;
        if !self.key.is_empty() {
            write!(f, "{}: ", self.key)?;
        }
        match (&self.kind, &self.value) {
            // The file at fault is another than the one that is to be put right.
            (
                ProblemKind::Unreadable { .. } | ProblemKind::NotAFile { .. } | ProblemKind::TooLarge { .. },
                Some(file),
            ) if !self.key.is_empty() => {
                write!(f, "'{file}' {}", self.kind)
            }
            (kind, _) => write!(f, "{kind}"),
        }
    }
}

/// Why a configuration cannot be used: everything that is wrong with it.
#[derive(Clone, Debug, PartialEq)]
pub struct ConfigError {
    /// What is wrong; never empty.
    pub problems: Vec<Problem>,
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, problem) in self.problems.iter().enumerate() {
            write!(f, "{}{problem}", if i == 0 { "" } else { "\n" })?;
        }
        Ok(())
    }
}

impl std::error::Error for ConfigError {}

impl From<Problem> for ConfigError {
    fn from(problem: Problem) -> ConfigError {
        ConfigError { problems: vec![problem] }
    }
}

/// Something that is probably a mistake, but keeps nothing from working.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, thiserror::Error)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum ConfigWarning {
    /// An environment variable of ours that does not exist.
    #[error("environment variable {name} means nothing{}", did_you_mean(.nearest))]
    UnknownVariable {
        /// Its name.
        name: String,
        /// The closest one that does.
        nearest: Option<String>,
    },
    /// A kernels document speaks of a kernel that it does not list, but lists one of nearly that name.
    #[error("{at}: '{name}' is not among the document's kernels{}", did_you_mean(.nearest))]
    UnlistedKernel {
        /// Where.
        at: String,
        /// The name.
        name: String,
        /// The closest listed one.
        nearest: Option<String>,
    },
}
