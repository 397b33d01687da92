//! The layers: files, environment and code.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crate::config::Config;
use crate::environment;
use crate::files::Files;
use crate::node::{Data, Entry, Node};
use crate::operation;
use crate::origin::{Position, Source};
use crate::paths;
use crate::problem::{ConfigError, Problem, ProblemKind};
use crate::read::{Layer, Lock, Reader, Said};
use crate::settings::ALIASES;
use crate::value::Value;
use crate::yaml::MAX_DEPTH;

/// What a project's file is called.
pub const FILE_NAME: &str = "layerzero.yaml";

/// Where a configuration comes from, besides code.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Sources {
    /// The user's file; it must exist.
    pub user: Option<PathBuf>,
    /// The project's file; it must exist.
    pub project: Option<PathBuf>,
    /// Whether the project's file was found in the current directory and not named by anybody. Such a file may have come
    /// with a checkout, and may not name paths outside of its folder and the user's cache.
    pub found: bool,
    /// The environment variables.
    pub environment: BTreeMap<String, String>,
}

impl Sources {
    /// Where a process with these variables ([`environment`](crate::environment())) and this
    /// current directory finds its configuration: the project file is `$LAYERZERO_CONFIG`, or
    /// `layerzero.yaml` in the directory if there is one; the user file is
    /// `layerzero/layerzero.yaml` in `$XDG_CONFIG_HOME` or `~/.config`, if there is one.
    pub fn discover(environment: BTreeMap<String, String>, directory: &Path) -> Sources {
        let variable = |name: &str| environment.get(name).filter(|value| !value.is_empty());
        let home = || variable("HOME").map(|home| Path::new(home).join(".config"));
        let folder = variable("XDG_CONFIG_HOME").map(PathBuf::from).or_else(home);
        // Something in the way (a directory, a pipe) is reported when it is read.
        let there = |path: &PathBuf| path.symlink_metadata().is_ok();
        let user = folder.map(|folder| folder.join("layerzero").join(FILE_NAME)).filter(there);
        let named = variable("LAYERZERO_CONFIG").map(|path| directory.join(path));
        let found = named.is_none();
        let project = named.or_else(|| Some(directory.join(FILE_NAME)).filter(there));
        Sources { user, project, found, environment }
    }
}

/// What code says: `configure`, `lock` and `unlock`, or a `with` block.
///
/// Every change is checked as the same words in a file would be; one that is refused changes
/// nothing.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CodeLayer {
    pub(crate) layer: Layer,
    context: bool,
}

impl CodeLayer {
    /// One for a `with` block, which stands above code.
    pub fn context() -> CodeLayer {
        CodeLayer { layer: Layer::default(), context: true }
    }

    fn source(&self) -> Source {
        if self.context { Source::Context } else { Source::Code }
    }

    /// Sets a setting (`"fallback_enabled"`, `"breaker.timeout_ms"`), a group of them
    /// (`"breaker"` with a map), or `locks`, `rules`, `rollouts`. Rules and rollouts take the
    /// place of earlier ones of code; locks add to them. Null takes back what code said.
    pub fn set(&mut self, key: &str, value: Value) -> Result<(), ConfigError> {
        self.set_all([(key.to_owned(), value)])
    }

    /// Sets several at once: all, or none.
    pub fn set_all(&mut self, entries: impl IntoIterator<Item = (String, Value)>) -> Result<(), ConfigError> {
        let entries = entries.into_iter().map(|(key, value)| (full(key), value));
        let (mut entries, mut taken_back) = (entries.collect::<Vec<_>>(), Vec::new());
        entries.retain(|(key, value)| {
            let null = *value == Value::Null && is_known(key);
            taken_back.extend(null.then(|| key.clone()));
            !null
        });
        let source = self.source();
        let mut reader = Reader::new(&source);
        if let Some((key, _)) = entries.iter().find(|(_, value)| !value.is_within(MAX_DEPTH)) {
            reader.report(Position::default(), key, None, ProblemKind::TooDeep { limit: MAX_DEPTH });
            return Err(ConfigError { problems: reader.problems });
        }
        let at = Position::default();
        let entry = |(key, value): &(String, Value)| nested(key, Node::from(value));
        let root = Node { data: Data::Map(entries.iter().map(entry).collect()), at };
        let said = Layer::read(&root, &mut reader);
        if !reader.problems.is_empty() {
            return Err(ConfigError { problems: reader.problems });
        }
        taken_back.iter().for_each(|key| self.take_back(key));
        self.layer.values.extend(said.values);
        said.locks.into_iter().for_each(|lock| self.layer.lock(lock));
        let mentions = |wanted: &str| entries.iter().any(|(key, _)| key == wanted);
        if mentions("rules") {
            self.layer.rules = said.rules;
        }
        if mentions("rollouts") {
            self.layer.rollouts = said.rollouts;
        }
        Ok(())
    }

    fn take_back(&mut self, key: &str) {
        self.layer.values.retain(|known, _| *known != key && !known.starts_with(&format!("{key}.")));
        match key {
            "locks" => self.layer.locks.clear(),
            "rules" => self.layer.rules.clear(),
            "rollouts" => self.layer.rollouts.clear(),
            _ => {}
        }
    }

    /// Takes back everything code said.
    pub fn reset(&mut self) {
        self.layer = Layer::default();
    }

    /// Only `kernel` may serve `operation` (an operation, alias or function).
    pub fn lock(&mut self, operation: &str, kernel: &str) -> Result<(), ConfigError> {
        let operation = self.operation(operation)?;
        self.say_lock(Lock { operation, kernel: Some(kernel.to_owned()), optional: false }, Value::from(kernel));
        Ok(())
    }

    /// As [`CodeLayer::lock`], where `kernel` is known and can run; elsewhere it does nothing.
    pub fn lock_if_there(&mut self, operation: &str, kernel: &str) -> Result<(), ConfigError> {
        let operation = self.operation(operation)?;
        let written = Value::Map(vec![("kernel".into(), kernel.into()), ("optional".into(), Value::Bool(true))]);
        self.say_lock(Lock { operation, kernel: Some(kernel.to_owned()), optional: true }, written);
        Ok(())
    }

    /// No lock on `operation`, whoever put it there.
    pub fn unlock(&mut self, operation: &str) -> Result<(), ConfigError> {
        let operation = self.operation(operation)?;
        self.say_lock(Lock { operation, kernel: None, optional: false }, Value::Null);
        Ok(())
    }

    fn say_lock(&mut self, lock: Lock, value: Value) {
        let origin = self.source().at(Position::default());
        self.layer.lock(Said { what: lock, value, origin });
    }

    fn operation(&self, name: &str) -> Result<String, ConfigError> {
        operation::canonical(name).map_err(|nearest| {
            let kind = ProblemKind::UnknownOperation { name: name.to_owned(), nearest };
            let at = self.source().at(Position::default());
            Problem { at, key: "locks".into(), value: Some(name.to_owned()), kind }.into()
        })
    }

    /// Whether nothing was said.
    pub fn is_empty(&self) -> bool {
        self.layer == Layer::default()
    }
}

/// A short name as the key it stands for; any other as it is.
fn full(key: String) -> String {
    ALIASES.iter().find(|(short, _)| *short == key).map_or(key, |(_, setting)| (*setting).to_owned())
}

/// `a.b: value` as `a: {b: value}`.
fn nested(key: &str, value: Node) -> Entry {
    let at = Position::default();
    match key.split_once('.') {
        None => Entry { key: key.to_owned(), at, value },
        Some((group, rest)) => {
            let inner = Node { data: Data::Map(vec![nested(rest, value)]), at };
            Entry { key: group.to_owned(), at, value: inner }
        }
    }
}

fn is_known(key: &str) -> bool {
    use crate::settings::{GROUPS, SETTINGS};
    let section = matches!(key, "locks" | "rules" | "rollouts");
    section || SETTINGS.iter().any(|s| s.key == key) || GROUPS.iter().any(|(name, _)| *name == key)
}

/// The folders that code, the environment or the user's own file allow a project's file to name paths in. What is wrong
/// with any of them is reported when they are read as layers.
fn allowed_by_user(sources: &Sources, code: &CodeLayer) -> Vec<String> {
    let environment = environment::read(&sources.environment, &mut Vec::new());
    let mut own = Files::default();
    if let Some(path) = &sources.user {
        own.read(Source::User(path.clone()), path);
    }
    paths::listed([&code.layer, &environment].into_iter().chain(&own.layers))
}

/// All layers: files and environment as they were read, and what code says.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Layers {
    sources: Sources,
    /// Highest first.
    files: Vec<Layer>,
    environment: Layer,
    code: CodeLayer,
    paths: Vec<PathBuf>,
}

impl Layers {
    /// Reads files and environment. Everything that is wrong with any of them is reported.
    pub fn load(sources: &Sources) -> Result<Layers, ConfigError> {
        Layers::load_for(sources, &CodeLayer::default())
    }

    /// As [`Layers::load`], below what code says.
    fn load_for(sources: &Sources, code: &CodeLayer) -> Result<Layers, ConfigError> {
        let mut files = Files::default();
        if let Some(path) = &sources.project {
            let source = Source::Project(path.clone());
            match sources.found {
                true => files.read_found(source, path, |project| {
                    paths::allowed(project, &sources.environment, &allowed_by_user(sources, code))
                }),
                false => files.read(source, path),
            }
        }
        if let Some(path) = &sources.user {
            files.read(Source::User(path.clone()), path);
        }
        let environment = environment::read(&sources.environment, &mut files.problems);
        if !files.problems.is_empty() {
            return Err(ConfigError { problems: files.problems });
        }
        let (files, paths) = (files.layers, files.paths);
        Ok(Layers { sources: sources.clone(), files, environment, code: CodeLayer::default(), paths })
    }

    /// Where they were read from.
    pub fn sources(&self) -> &Sources {
        &self.sources
    }

    /// What code says, to be changed.
    pub fn code(&mut self) -> &mut CodeLayer {
        &mut self.code
    }

    /// Reads the same files again; what code says stays. `self` is untouched when they cannot be used.
    pub fn reread(&self) -> Result<Layers, ConfigError> {
        self.moved(&self.sources)
    }

    /// Reads other sources; what code says stays.
    pub fn moved(&self, sources: &Sources) -> Result<Layers, ConfigError> {
        Ok(Layers { code: self.code.clone(), ..Layers::load_for(sources, &self.code)? })
    }

    /// What is in force.
    pub fn resolve(&self) -> Result<Config, ConfigError> {
        self.resolve_in(&[])
    }

    /// What is in force inside `with` blocks, the innermost first.
    pub fn resolve_in(&self, contexts: &[&CodeLayer]) -> Result<Config, ConfigError> {
        let contexts = contexts.iter().map(|context| &context.layer);
        let layers: Vec<&Layer> = contexts.chain([&self.code.layer, &self.environment]).chain(&self.files).collect();
        let home = self.sources.environment.get("HOME").map(PathBuf::from);
        let config = Config::resolve(&layers, self.paths.clone(), home)?;
        paths::check(&layers, &self.sources.environment, &config)?;
        Ok(config)
    }
}
