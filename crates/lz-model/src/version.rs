//! Version requirements, in the notation of Python packages.

use std::fmt;
use std::str::FromStr;

use pep440_rs::{Version, VersionSpecifiers};

/// A demand on the version of a library or driver: `cuda>=12.0`, `torch>=2.2,<3`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Requirement {
    /// Lower-case name.
    pub name: String,
    specifiers: VersionSpecifiers,
}

/// A requirement that cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("'{text}' is no version requirement: {problem}")]
pub struct BadRequirement {
    /// As given.
    pub text: String,
    /// What is wrong.
    pub problem: String,
}

impl FromStr for Requirement {
    type Err = BadRequirement;

    fn from_str(text: &str) -> Result<Self, BadRequirement> {
        let bad = |problem: String| BadRequirement { text: text.to_owned(), problem };
        let split = text.find(['<', '>', '=', '!', '~']).unwrap_or(text.len());
        let (name, specifiers) = text.split_at(split);
        let name = name.trim().to_ascii_lowercase();
        if name.is_empty() || !name.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c)) {
            return Err(bad("expected a name, then versions, like 'torch>=2.2'".into()));
        }
        let specifiers =
            VersionSpecifiers::from_str(specifiers.trim()).map_err(|e| bad(e.to_string().replace('\n', " ")))?;
        Ok(Requirement { name, specifiers })
    }
}

impl Requirement {
    /// Whether a version meets it. A version that cannot be read meets nothing; local parts
    /// (`+cu130`) do not count.
    pub fn met_by(&self, version: &str) -> bool {
        Version::from_str(version).is_ok_and(|v| self.specifiers.contains(&v.without_local()))
    }
}

impl fmt::Display for Requirement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.name, self.specifiers)
    }
}

/// Orders two versions; one that cannot be read is older than any that can.
pub fn compare(a: &str, b: &str) -> std::cmp::Ordering {
    match (Version::from_str(a), Version::from_str(b)) {
        (Ok(a), Ok(b)) => a.cmp(&b),
        (Ok(_), Err(_)) => std::cmp::Ordering::Greater,
        (Err(_), Ok(_)) => std::cmp::Ordering::Less,
        (Err(_), Err(_)) => a.cmp(b),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requirements_of_the_specification() {
        let cuda: Requirement = "cuda>=12.0".parse().unwrap();
        assert!(cuda.met_by("12.3") && cuda.met_by("13.0") && !cuda.met_by("11.8") && !cuda.met_by("unknown"));
        let torch: Requirement = "torch>=2.2,<3".parse().unwrap();
        assert!(torch.met_by("2.11.0+cu130") && !torch.met_by("3.0"));
        assert!("anything".parse::<Requirement>().unwrap().met_by("0.0.1"));
    }

    #[test]
    fn nonsense_is_refused_with_its_text() {
        for text in ["", ">=1", "torch>=", "a b>=1"] {
            let error = text.parse::<Requirement>().unwrap_err();
            assert_eq!(error.text, text);
        }
    }

    #[test]
    fn versions_compare_as_versions() {
        assert!(compare("2.10.0", "2.9.1").is_gt());
        assert!(compare("1.0", "garbage").is_gt());
    }
}
