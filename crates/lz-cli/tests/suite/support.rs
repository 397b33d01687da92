//! Running the command and reading what it said.

use std::path::{Path, PathBuf};

use lz_cli::Terminals;
use lz_cli::surroundings::Surroundings;
use serde_json::Value;

/// What a command line led to.
#[derive(Debug)]
pub struct Outcome {
    pub code: i32,
    pub out: String,
    pub err: String,
}

impl Outcome {
    /// The answer as JSON; every document has its version.
    pub fn json(&self) -> Value {
        let value: Value = serde_json::from_str(&self.out).unwrap_or_else(|e| panic!("{e}: {self:?}"));
        assert_eq!(value["schema_version"], "1.0", "{self:?}");
        value
    }

    /// The same, after checking how it ended.
    pub fn ended(self, code: i32) -> Outcome {
        assert_eq!(self.code, code, "{self:?}");
        self
    }

    /// Checks that this was said beside the answer.
    pub fn says(self, text: &str) -> Outcome {
        assert!(self.err.contains(text), "'{text}' in {self:?}");
        self
    }
}

/// Runs a command line; words are separated by white space.
pub fn layerzero(line: &str) -> Outcome {
    layerzero_args(&line.split_whitespace().collect::<Vec<_>>())
}

/// Runs a command line of words, away from any configuration of this machine.
pub fn layerzero_args(words: &[&str]) -> Outcome {
    layerzero_in(Path::new(env!("CARGO_MANIFEST_DIR")), &[], words)
}

/// Runs a command line of words in a directory, with these environment variables and no others.
pub fn layerzero_in(directory: &Path, environment: &[(&str, &str)], words: &[&str]) -> Outcome {
    let (mut out, mut err) = (Vec::new(), Vec::new());
    let surroundings = Surroundings {
        environment: environment.iter().map(|(name, value)| ((*name).into(), (*value).into())).collect(),
        directory: directory.to_owned(),
        ..Surroundings::default()
    };
    let words = ["layerzero"].iter().chain(words);
    let code = lz_cli::run_in(words, &mut out, &mut err, Terminals::default(), surroundings);
    let text = |bytes| String::from_utf8(bytes).unwrap();
    Outcome { code, out: text(out), err: text(err) }
}

/// A document of `tests/fixtures`.
pub fn fixture(name: &str) -> String {
    let path: PathBuf = [env!("CARGO_MANIFEST_DIR"), "tests", "fixtures", name].iter().collect();
    path.to_str().unwrap().to_owned()
}

/// A described H100 with the documents of three libraries.
pub fn on_h100() -> String {
    let documents =
        ["flash_attn.json", "flashinfer.json", "liger.json"].map(|f| format!("--capabilities {}", fixture(f)));
    format!("--device h100 {}", documents.join(" "))
}

/// Grouped-query attention over `batch` sequences.
pub fn attention(batch: i64) -> String {
    format!(
        "--op attention --dtype bf16 --shape query={batch}x1024x32x128 --shape key={batch}x1024x8x128 \
         --shape value={batch}x1024x8x128"
    )
}
