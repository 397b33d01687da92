//! What kernels are called: ids, aliases, backends and libraries; and which names are known here.

use lz_expr::glob_matches;
use lz_model::{KernelDescriptor, Reason, nearest};
use serde::{Deserialize, Serialize};

use super::kernels::{self, FilterName};
use super::{Action, Pattern};
use crate::decision::KernelIx;
use crate::snapshot::Snapshot;

/// Everything a lock, a rule or a preference may name a kernel by.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct KernelName {
    /// Its id.
    pub id: String,
    /// Other names it answers to.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub aliases: Vec<String>,
    /// Its backend.
    pub backend: String,
    /// The library that belongs to.
    pub library: String,
}

impl From<&KernelDescriptor> for KernelName {
    fn from(kernel: &KernelDescriptor) -> KernelName {
        let (id, aliases) = (kernel.id.clone(), kernel.aliases.clone());
        KernelName { id, aliases, backend: kernel.backend.clone(), library: kernel.library().to_owned() }
    }
}

impl KernelName {
    fn names(&self) -> Names<'_> {
        Names { id: &self.id, aliases: &self.aliases, backend: &self.backend, library: &self.library }
    }

    fn all(&self) -> impl Iterator<Item = &str> {
        [&self.id, &self.backend, &self.library].into_iter().chain(&self.aliases).map(String::as_str)
    }
}

/// As [`KernelName`], borrowed.
#[derive(Clone, Copy)]
pub(super) struct Names<'a> {
    pub id: &'a str,
    pub aliases: &'a [String],
    pub backend: &'a str,
    pub library: &'a str,
}

impl<'a> From<&'a KernelDescriptor> for Names<'a> {
    fn from(kernel: &'a KernelDescriptor) -> Names<'a> {
        Names { id: &kernel.id, aliases: &kernel.aliases, backend: &kernel.backend, library: kernel.library() }
    }
}

impl Pattern {
    /// Whether it names a kernel that is called this, whatever its version.
    pub(super) fn names(&self, kernel: Names<'_>) -> bool {
        let own = || std::iter::once(kernel.id).chain(kernel.aliases.iter().map(String::as_str));
        let from = |name: &str| glob_matches(name, kernel.library) || glob_matches(name, kernel.backend);
        match self {
            Pattern::Source(name) => from(name),
            Pattern::Kernel(_) => {
                let (name, _) = self.versioned();
                own().any(|called| glob_matches(name, called)) || from(name)
            }
            Pattern::Name(name) => own().any(|called| kernels::is_called(name, called)),
        }
    }

    /// The name, and the version behind `@` where one is given.
    pub(super) fn versioned(&self) -> (&str, Option<&str>) {
        match self {
            Pattern::Kernel(text) => text.rsplit_once('@').map_or((text, None), |(name, v)| (name, Some(v))),
            Pattern::Source(text) | Pattern::Name(text) => (text, None),
        }
    }
}

impl Snapshot {
    /// Whether a pattern names anything: a kernel that is registered, or one that is known by name alone because its
    /// library is not loaded here; a backend or library even if it has no kernel.
    pub fn knows(&self, pattern: &Pattern) -> bool {
        let source = || {
            let (name, _) = pattern.versioned();
            let is = |known: &str| !matches!(pattern, Pattern::Name(_)) && glob_matches(name, known);
            self.spec.backends.values().any(|b| is(&b.descriptor.name) || is(b.descriptor.library()))
        };
        self.kernels().any(|(_, kernel)| pattern.names(Names::from(&**kernel)))
            || self.spec.names.iter().any(|kernel| pattern.names(kernel.names()))
            || source()
    }

    /// The known name that was most likely meant.
    pub fn nearest_name(&self, pattern: &Pattern) -> Option<String> {
        let (name, _) = pattern.versioned();
        let registered: Vec<KernelName> = self.kernels().map(|(_, kernel)| KernelName::from(&**kernel)).collect();
        let kernels = || registered.iter().chain(self.spec.names.iter());
        let backends = self.spec.backends.values().flat_map(|b| [b.descriptor.name.as_str(), b.descriptor.library()]);
        let found = match pattern {
            Pattern::Source(_) => {
                let sources = kernels().flat_map(|k| [k.backend.as_str(), k.library.as_str()]);
                nearest(name, backends.chain(sources))
            }
            Pattern::Kernel(_) | Pattern::Name(_) => nearest(name, backends.chain(kernels().flat_map(KernelName::all))),
        };
        found.map(str::to_owned)
    }

    /// The known name that was most likely meant by a name in a filter, if nothing is called that: `Err`. A filter compares
    /// a field as it is, so that neither aliases nor versions count.
    pub(super) fn check_filter_name(&self, wanted: &FilterName) -> Result<(), Option<String>> {
        let registered: Vec<KernelName> = self.kernels().map(|(_, kernel)| KernelName::from(&**kernel)).collect();
        let kernels = registered.iter().chain(self.spec.names.iter());
        let backends = self.spec.backends.values().map(|backend| &backend.descriptor);
        let known: Vec<&str> = match wanted.field {
            "id" => kernels.map(|k| k.id.as_str()).collect(),
            "backend" => kernels.map(|k| k.backend.as_str()).chain(backends.map(|b| b.name.as_str())).collect(),
            _ => kernels.map(|k| k.library.as_str()).chain(backends.map(|b| b.library())).collect(),
        };
        let is = |name: &&str| if wanted.glob { glob_matches(&wanted.name, name) } else { wanted.name == *name };
        if known.iter().any(is) {
            return Ok(());
        }
        Err(nearest(&wanted.name, known).map(str::to_owned))
    }

    /// The registered kernels a pattern names.
    pub fn named<'a>(&'a self, pattern: &'a Pattern) -> impl Iterator<Item = KernelIx> + 'a {
        self.kernels().filter(|(_, kernel)| pattern.matches(kernel)).map(|(ix, _)| ix)
    }

    /// Why a kernel's library cannot be used.
    fn uninstalled(&self, kernel: KernelIx) -> Option<&Reason> {
        let kernel = self.kernel(kernel);
        self.spec.backends.get(&kernel.backend)?.unavailable.as_ref().filter(|_| !kernel.standalone)
    }

    /// Whether the library of a kernel that a pattern names is installed.
    pub(super) fn is_installed(&self, pattern: &Pattern) -> bool {
        self.named(pattern).any(|kernel| self.uninstalled(kernel).is_none())
    }

    /// Why nothing a pattern names is installed here; `None` when something is. For a lock, why nothing of it can run on
    /// any device here.
    pub(super) fn absent(&self, action: &Action) -> Option<String> {
        let pattern = action.pattern()?;
        let devices = || (0..self.spec.devices.len()).map(|i| lz_model::DeviceIx(i as u16));
        let library = |ix: KernelIx| self.uninstalled(ix);
        let mut why: Option<&Reason> = None;
        let mut any = false;
        for ix in self.named(pattern) {
            any = true;
            let runs = match action {
                Action::Lock(_) => devices().any(|device| self.static_reasons(ix, device).is_empty()),
                _ => library(ix).is_none(),
            };
            if runs {
                return None;
            }
            let standing = || devices().next().and_then(|device| self.static_reasons(ix, device).first());
            why = why.or_else(|| library(ix)).or_else(standing);
        }
        match (why, pattern.versioned().1) {
            (Some(reason), _) => Some(reason.to_string()),
            (None, Some(version)) if !any => Some(format!("version {version} is not registered")),
            (None, _) => Some("it is not loaded".into()),
        }
    }
}
