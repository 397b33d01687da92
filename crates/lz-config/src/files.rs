//! Files and what they include, highest first.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use crate::file;
use crate::node::Data;
use crate::origin::{Origin, Position, Source};
use crate::paths;
use crate::problem::{Problem, ProblemKind};
use crate::read::{Include, Layer, Reader};
use crate::yaml;

/// How deep files may include files.
const MAX_DEPTH: usize = 8;
/// How many files are read at most.
const MAX_FILES: usize = 64;

/// Reads files, each once.
#[derive(Default)]
pub(crate) struct Files {
    /// Highest first: a file, then what it includes.
    pub layers: Vec<Layer>,
    /// Every file that was read, or should have been, in the order of reading.
    pub paths: Vec<PathBuf>,
    pub problems: Vec<Problem>,
    seen: BTreeSet<PathBuf>,
    /// The files being read, from the first to the one in hand.
    chain: Vec<PathBuf>,
    /// The folder of the project's file that is being read, if that file was found and not named.
    project: Option<PathBuf>,
    /// The folders such a file may include files from.
    allowed: Vec<PathBuf>,
    too_many: bool,
}

impl Files {
    /// Reads a file and what it includes; one that was read before is left out.
    pub fn read(&mut self, source: Source, path: &Path) {
        let at = source.at(Position { line: 1, column: 1 });
        self.include(source, path, at, String::new());
    }

    /// As [`Files::read`], of a project's file that nobody named: what it and what it includes say is marked so, and it
    /// includes no file outside the folders it may name paths in. `allowed` gives those of a project.
    pub fn read_found(&mut self, source: Source, path: &Path, allowed: impl FnOnce(&Path) -> Vec<PathBuf>) {
        let project = path.parent().unwrap_or(Path::new("")).to_owned();
        self.allowed = allowed(&project);
        self.project = Some(project);
        self.read(source, path);
        self.project = None;
    }

    /// `at` and `key` are whom to blame when the file cannot be had.
    fn include(&mut self, source: Source, path: &Path, at: Origin, key: String) {
        let identity = path.canonicalize().unwrap_or_else(|_| path.to_owned());
        let circle = self.chain.iter().position(|known| *known == identity);
        if circle.is_none() && (self.seen.contains(&identity) || self.too_many) {
            return;
        }
        self.too_many |= self.seen.len() >= MAX_FILES;
        let refused = match circle {
            Some(from) => Some(("files include each other in a circle".to_owned(), from)),
            None if self.chain.len() > MAX_DEPTH => {
                Some((format!("files include files more than {MAX_DEPTH} deep"), 0))
            }
            None if self.too_many => Some((format!("more than {MAX_FILES} files"), 0)),
            None => None,
        };
        let outside = match &self.project {
            Some(project) if matches!(source, Source::Included(_)) => paths::problem(path, project, &self.allowed),
            _ => None,
        };
        let text = match (outside, refused) {
            (Some(outside), _) => Err(outside),
            (None, Some((why, from))) => Err(ProblemKind::Include { why, chain: self.shown_chain(from, path) }),
            (None, None) => {
                self.seen.insert(identity.clone());
                self.paths.push(path.to_owned());
                file::read(path)
            }
        };
        let text = match text {
            Ok(text) => text,
            Err(kind) => {
                let value = Some(path.display().to_string());
                return self.problems.push(Problem { at, key, value, kind });
            }
        };
        if matches!(source, Source::Included(_))
            && let Some(why) = not_ours(&text)
        {
            let value = Some(path.display().to_string());
            return self.problems.push(Problem { at, key, value, kind: ProblemKind::NotOurs { why } });
        }
        self.chain.push(identity);
        let layer = Layer { project: self.project.clone(), ..self.layer(&source, &text) };
        let includes = layer.includes.clone();
        self.layers.push(layer);
        for Include { path, at, key } in includes {
            self.include(Source::Included(path.clone()), &path, source.at(at), key);
        }
        self.chain.pop();
    }

    fn layer(&mut self, source: &Source, text: &str) -> Layer {
        let mut reader = Reader::new(source);
        let (root, flaws) = yaml::parse(text);
        for flaw in flaws {
            reader.report(flaw.at, &flaw.key, flaw.value, flaw.kind);
        }
        let layer = root.map(|root| Layer::read(&root, &mut reader)).unwrap_or_default();
        self.problems.append(&mut reader.problems);
        layer
    }

    fn shown_chain(&self, from: usize, last: &Path) -> Vec<String> {
        let shown = |path: &Path| path.display().to_string();
        self.chain[from..].iter().map(|p| shown(p)).chain([shown(last)]).collect()
    }
}

/// How it is seen that a text is no configuration: it is not YAML, no map, or has none of our keys. In words that quote
/// nothing of it.
fn not_ours(text: &str) -> Option<String> {
    let (root, flaws) = yaml::parse(text);
    let Some(root) = root else {
        let at = flaws.last().map(|flaw| flaw.at).unwrap_or_default();
        return Some(format!("it is not YAML: line {}, column {}", at.line, at.column));
    };
    match &root.data {
        Data::Null => None,
        Data::Map(entries) if entries.is_empty() || entries.iter().any(|entry| Layer::knows(&entry.key)) => None,
        Data::Map(_) => Some("it has none of the keys of one".into()),
        _ => Some("it is no map".into()),
    }
}
