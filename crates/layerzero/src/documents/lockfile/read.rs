//! From text to a lockfile.

use std::collections::{BTreeMap, HashMap};

use lz_model::{BindRules, CallSpec, Catalog, Context, DeviceIx, nearest};
use serde_json::Value as Json;

use super::{BASES, FORMAT, Locked, Lockfile, LockfileError, LockfileProblem as Problem};

/// The sections that map names to texts.
const SECTIONS: &[&str] = &["devices", "backends", "capabilities", "libraries"];
/// What stands in every block.
const CALL: &str = "call";
/// The keys above all sections.
const TOP_KEYS: &[&str] = &["format", "layerzero"];
/// The keys of a block.
const CALL_KEYS: &[&str] =
    &["op", "device", "call", "graph", "kernel", "version", "time_us", "baseline", "baseline_us", "basis"];
/// How much of a line is shown.
const SHOWN: usize = 60;

/// A value, and the line it stands on.
type Said = (Json, usize);

/// The keys of one place.
#[derive(Default)]
struct Keys(BTreeMap<String, Said>);

/// Where a line stands.
enum Place {
    Top,
    Section(&'static str),
    Block(usize),
}

/// Reads line by line.
struct Reader {
    top: Keys,
    sections: HashMap<&'static str, Keys>,
    /// With the lines they begin on.
    blocks: Vec<(usize, Keys)>,
    place: Place,
}

fn at<T>(line: usize, problem: Problem) -> Result<T, LockfileError> {
    Err(LockfileError { line, problem })
}

fn shown(text: &str) -> String {
    let cut: String = text.chars().take(SHOWN).collect();
    if cut.len() < text.len() { format!("{cut}…") } else { cut }
}

pub(super) fn parse(text: &str) -> Result<Lockfile, LockfileError> {
    if text.len() > Lockfile::MAX_BYTES {
        return at(1, Problem::TooLarge { bytes: text.len(), limit: Lockfile::MAX_BYTES });
    }
    let mut reader = Reader { top: Keys::default(), sections: HashMap::new(), blocks: Vec::new(), place: Place::Top };
    for (i, line) in text.lines().enumerate() {
        reader.line(line.trim(), i + 1)?;
    }
    reader.finish()
}

impl Reader {
    fn line(&mut self, line: &str, number: usize) -> Result<(), LockfileError> {
        if line.is_empty() || line.starts_with('#') {
            return Ok(());
        }
        if let Some(rest) = line.strip_prefix('[') {
            return self.section(uncommented(rest), number);
        }
        let Some((key, value)) = pair(line) else { return at(number, Problem::Syntax { found: shown(line) }) };
        let (keys, known, place) = match self.place {
            Place::Top => (&mut self.top, Some(TOP_KEYS), "at the top"),
            Place::Section(name) => (self.sections.entry(name).or_default(), None, "in a section"),
            Place::Block(i) => (&mut self.blocks[i].1, Some(CALL_KEYS), "in a block"),
        };
        if let Some(known) = known.filter(|known| !known.contains(&key.as_str())) {
            let nearest = nearest(&key, known.iter().copied());
            return at(number, Problem::UnknownKey { key, place, nearest });
        }
        match keys.0.get(&key) {
            Some(&(_, first)) => at(number, Problem::DuplicateKey { key, first }),
            None => {
                keys.0.insert(key, (value, number));
                Ok(())
            }
        }
    }

    /// What comes after the first bracket of a heading.
    fn section(&mut self, rest: &str, number: usize) -> Result<(), LockfileError> {
        let listed = rest.strip_prefix('[').and_then(|rest| rest.strip_suffix("]]"));
        let name = listed.or_else(|| rest.strip_suffix(']')).unwrap_or(rest).trim();
        match (listed, SECTIONS.iter().find(|known| **known == name)) {
            (Some(_), _) if name == CALL => {
                self.place = Place::Block(self.blocks.len());
                self.blocks.push((number, Keys::default()));
                Ok(())
            }
            (None, Some(known)) if rest.ends_with(']') => {
                self.place = Place::Section(known);
                Ok(())
            }
            _ => {
                let nearest = nearest(name, SECTIONS.iter().copied().chain([CALL]));
                at(number, Problem::UnknownSection { name: shown(name), nearest })
            }
        }
    }

    fn finish(mut self) -> Result<Lockfile, LockfileError> {
        match self.top.number("format")? {
            Some((format, _)) if format == f64::from(FORMAT) => {}
            Some((found, line)) => return at(line, Problem::Format { found }),
            None => return at(1, Problem::MissingKey { key: "format" }),
        }
        let layerzero = self.top.text("layerzero")?.unwrap_or_default();
        let mut section = |name: &str| self.sections.remove(name).unwrap_or_default().texts();
        let (devices, backends) = (section("devices")?, section("backends")?);
        let (capabilities, libraries) = (section("capabilities")?, section("libraries")?);
        let mut seen: HashMap<(String, String, bool), usize> = HashMap::new();
        let mut entries = Vec::with_capacity(self.blocks.len());
        for (line, mut keys) in self.blocks {
            let entry = keys.entry(line)?;
            // The same call in other words is the same call.
            let canonical = canonical(&entry.call).map_err(|error| {
                let line = keys.line("call").unwrap_or(line);
                LockfileError { line, problem: Problem::BadCall { error } }
            })?;
            if let Some(first) = seen.insert((entry.device.clone(), canonical.to_string(), entry.graph), line) {
                return at(line, Problem::DuplicateEntry { first });
            }
            entries.push(entry);
        }
        Ok(Lockfile { layerzero, devices, backends, capabilities, libraries, entries })
    }
}

/// The call as selection sees it; why not, when it is none.
fn canonical(call: &CallSpec) -> Result<CallSpec, String> {
    let named = call.named(DeviceIx(0), Context::default());
    let resolved = Catalog::get().resolve(&call.op, &named, &BindRules::default(), |_| None);
    let (_, bound) = resolved.map_err(|error| error.to_string())?;
    Ok(crate::documents::canonical(call, &bound))
}

impl Keys {
    fn line(&self, key: &str) -> Option<usize> {
        self.0.get(key).map(|(_, line)| *line)
    }

    fn wrong<T>(key: &str, expected: &'static str, (found, line): &Said) -> Result<T, LockfileError> {
        let found = shown(&found.to_string());
        at(*line, Problem::WrongValue { key: key.to_owned(), expected, found, nearest: None })
    }

    fn text(&mut self, key: &str) -> Result<Option<String>, LockfileError> {
        match self.0.get(key) {
            None => Ok(None),
            Some((Json::String(text), _)) => Ok(Some(text.clone())),
            Some(other) => Keys::wrong(key, "a text in quotes", other),
        }
    }

    fn required(&mut self, key: &'static str, block: usize) -> Result<String, LockfileError> {
        match self.text(key)? {
            Some(text) if !text.is_empty() => Ok(text),
            Some(_) => Keys::wrong(key, "a name", &self.0[key]),
            None => at(block, Problem::MissingKey { key }),
        }
    }

    fn number(&mut self, key: &str) -> Result<Option<(f64, usize)>, LockfileError> {
        let Some(said) = self.0.get(key) else { return Ok(None) };
        match said.0.as_f64().filter(|x| *x >= 0.0 && x.is_finite()) {
            Some(number) => Ok(Some((number, said.1))),
            None => Keys::wrong(key, "a number of at least 0", said),
        }
    }

    fn flag(&mut self, key: &str) -> Result<bool, LockfileError> {
        match self.0.get(key) {
            None => Ok(false),
            Some((Json::Bool(flag), _)) => Ok(*flag),
            Some(other) => Keys::wrong(key, "true or false", other),
        }
    }

    fn texts(mut self) -> Result<BTreeMap<String, String>, LockfileError> {
        let names: Vec<String> = self.0.keys().cloned().collect();
        names.into_iter().map(|name| Ok((name.clone(), self.text(&name)?.unwrap_or_default()))).collect()
    }

    fn entry(&mut self, block: usize) -> Result<Locked, LockfileError> {
        let text = self.required("call", block)?;
        let call: CallSpec = text.parse().or_else(|error: serde_json::Error| {
            // Its own line and column would be taken for those of the file.
            let place = format!(" at line {} column {}", error.line(), error.column());
            let error = error.to_string().replace(&place, &format!(" (character {} of it)", error.column()));
            at(self.line("call").unwrap_or(block), Problem::BadCall { error })
        })?;
        if let Some(op) = self.text("op")?.filter(|op| *op != call.op) {
            return at(self.line("op").unwrap_or(block), Problem::OtherOp { op, call: call.op });
        }
        let basis = self.text("basis")?;
        if let Some(word) = basis.as_deref().filter(|word| !BASES.contains(word)) {
            let line = self.line("basis").unwrap_or(block);
            let (expected, nearest) = ("what a decision went by", nearest(word, BASES.iter().copied()));
            let found = format!("'{}'", shown(word));
            return at(line, Problem::WrongValue { key: "basis".into(), expected, found, nearest });
        }
        Ok(Locked {
            device: self.required("device", block)?,
            graph: self.flag("graph")?,
            kernel: self.required("kernel", block)?,
            version: self.text("version")?,
            time_us: self.number("time_us")?.map(|(us, _)| us),
            baseline: self.text("baseline")?,
            baseline_us: self.number("baseline_us")?.map(|(us, _)| us),
            basis,
            call,
        })
    }
}

/// A heading without what is said about it.
fn uncommented(line: &str) -> &str {
    line.split_once('#').map_or(line, |(line, _)| line).trim()
}

/// A key and its value.
fn pair(line: &str) -> Option<(String, Json)> {
    let (key, rest) = if line.starts_with('"') {
        prefix(line).and_then(|(key, rest)| Some((key.as_str()?.to_owned(), rest)))?
    } else {
        let end = line.find(|c: char| !c.is_ascii_alphanumeric() && !matches!(c, '_' | '-')).filter(|end| *end > 0)?;
        (line[..end].to_owned(), &line[end..])
    };
    let rest = rest.trim_start().strip_prefix('=')?.trim_start();
    let (value, rest) = match rest.strip_prefix('\'') {
        Some(rest) => rest.split_once('\'').map(|(text, rest)| (Json::from(text), rest))?,
        None => prefix(rest)?,
    };
    let rest = rest.trim_start();
    (rest.is_empty() || rest.starts_with('#')).then_some((key, value))
}

/// The JSON value a text begins with, and what follows it.
fn prefix(text: &str) -> Option<(Json, &str)> {
    let mut values = serde_json::Deserializer::from_str(text).into_iter::<Json>();
    let value = values.next()?.ok()?;
    Some((value, &text[values.byte_offset()..]))
}
