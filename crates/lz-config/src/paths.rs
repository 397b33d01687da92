//! Where paths lead, and which of them a project's file may name.
//!
//! A checkout brings its `layerzero.yaml` along, and a process reads it because it was started there. So such a file may
//! name paths inside its own folder and in the user's cache, and others only if the user allows them.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io;
use std::path::{Component, Path, PathBuf};

use crate::config::Config;
use crate::declare::Kind;
use crate::problem::{ConfigError, Problem, ProblemKind};
use crate::read::Layer;
use crate::settings::SETTINGS;
use crate::value::Value;

/// How many links are followed; systems follow as many.
const MAX_LINKS: usize = 40;

/// The setting by which a user allows more paths.
const ALLOWED: &str = "allow_project_paths";

/// What a project's file that was found cannot say: it would allow itself what only its user may.
const USERS_OWN: &[&str] = &[ALLOWED, "backends.hub_allow", "backends.hub_lockfile"];

/// Where a path leads: absolute, without `..`, every link followed. What does not exist yet keeps its name.
pub fn resolve(path: &Path) -> io::Result<PathBuf> {
    let parts =
        |path: &Path| path.components().rev().map(|part| part.as_os_str().to_owned()).collect::<Vec<OsString>>();
    let mut rest = parts(&std::path::absolute(path)?);
    let (mut found, mut links) = (PathBuf::new(), 0);
    while let Some(part) = rest.pop() {
        match Path::new(&part).components().next() {
            Some(Component::RootDir | Component::Prefix(_)) => found = PathBuf::from(&part),
            Some(Component::ParentDir) => {
                found.pop();
            }
            Some(Component::Normal(name)) => {
                let next = found.join(name);
                match next.symlink_metadata() {
                    Ok(metadata) if metadata.is_symlink() => {
                        links += 1;
                        if links > MAX_LINKS {
                            let why = format!("'{}' leads through more than {MAX_LINKS} links", path.display());
                            return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
                        }
                        rest.extend(parts(&next.read_link()?));
                    }
                    Ok(_) => found = next,
                    Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
                        found = next;
                    }
                    Err(error) => return Err(error),
                }
            }
            Some(Component::CurDir) | None => {}
        }
    }
    Ok(found)
}

/// Refuses what a project's file that was found, not named, may not say: paths outside of its folder and of the user's
/// cache, that it may name more, and kernels of the hub.
pub(crate) fn check(
    layers: &[&Layer],
    environment: &BTreeMap<String, String>,
    config: &Config,
) -> Result<(), ConfigError> {
    let mut problems = Vec::new();
    for layer in layers.iter().filter(|layer| layer.project.is_some()) {
        for (key, said) in USERS_OWN.iter().filter_map(|key| Some((*key, layer.values.get(*key)?))) {
            let message = "a project's file cannot allow this to itself; say it in your own file".to_owned();
            let kind = ProblemKind::Contradiction { message };
            problems.push(Problem { at: said.origin.clone(), key: key.into(), value: None, kind });
        }
    }
    let listed = &config.settings.allow_project_paths;
    for setting in SETTINGS.iter().filter(|setting| matches!(setting.kind, Kind::Path | Kind::File)) {
        let Some((layer, said)) = layers.iter().find_map(|layer| Some((layer, layer.values.get(setting.key)?))) else {
            continue;
        };
        let (Some(project), Value::Str(path)) = (&layer.project, &said.value) else { continue };
        let placed = config.placed(setting.key, Path::new(path));
        if let Some(kind) = problem(&placed, project, &allowed(project, environment, listed)) {
            let value = Some(path.clone());
            problems.push(Problem { at: said.origin.clone(), key: setting.key.into(), value, kind });
        }
    }
    if problems.is_empty() { Ok(()) } else { Err(ConfigError { problems }) }
}

/// Why a project's file may not name a path, given the folders it may name paths in; `None` when it may.
pub(crate) fn problem(path: &Path, project: &Path, allowed: &[PathBuf]) -> Option<ProblemKind> {
    let outside = match resolve(path) {
        Ok(leads_to) if is_in(allowed, &leads_to) => return None,
        Ok(leads_to) => leads_to.display().to_string(),
        Err(error) => error.to_string(),
    };
    Some(ProblemKind::OutsideProject { outside, project: project.display().to_string() })
}

fn is_in(folders: &[PathBuf], path: &Path) -> bool {
    folders.iter().any(|folder| path.starts_with(folder))
}

/// The folders a user allows, as the first of their layers that says so has them.
pub(crate) fn listed<'a>(layers: impl IntoIterator<Item = &'a Layer>) -> Vec<String> {
    let said = layers.into_iter().find_map(|layer| layer.values.get(ALLOWED));
    let Some(Value::List(folders)) = said.map(|said| &said.value) else { return Vec::new() };
    folders.iter().filter_map(|folder| if let Value::Str(path) = folder { Some(path.clone()) } else { None }).collect()
}

/// The folders a project's file may name paths in; `listed` are those the user allows.
pub(crate) fn allowed(project: &Path, environment: &BTreeMap<String, String>, listed: &[String]) -> Vec<PathBuf> {
    let variable = |name: &str| environment.get(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let home = variable("HOME");
    let cache = home.as_ref().map(|home| home.join(".cache"));
    let listed = listed.iter().map(|path| match (path.strip_prefix('~'), &home) {
        (Some(rest), Some(home)) => home.join(rest.trim_start_matches('/')),
        _ => PathBuf::from(path),
    });
    let folders = [Some(project.to_owned()), cache, variable("XDG_CACHE_HOME")].into_iter().flatten().chain(listed);
    // A relative one would mean another folder in every project.
    folders.filter(|folder| folder.is_absolute()).filter_map(|folder| resolve(&folder).ok()).collect()
}
