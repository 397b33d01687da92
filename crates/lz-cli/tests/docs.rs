//! Every command line in the documents runs, and every path they link to exists.

use std::path::{Path, PathBuf};
use std::process::Command;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn documents() -> Vec<(String, String)> {
    let read = |path: PathBuf| (path.display().to_string(), std::fs::read_to_string(&path).unwrap());
    let markdown = |path: &PathBuf| path.extension().is_some_and(|e| e == "md");
    let list = |folder: PathBuf| std::fs::read_dir(folder).into_iter().flatten().map(|e| e.unwrap().path());
    let found: Vec<_> = list(root()).chain(list(root().join("docs"))).filter(markdown).map(read).collect();
    assert!(found.len() >= 4, "the documents were not found");
    found
}

#[test]
fn every_console_line_runs() {
    let mut ran = 0;
    for (name, text) in documents() {
        let mut in_console = false;
        for line in text.lines() {
            if line.starts_with("```") {
                in_console = line == "```console";
            } else if let (true, Some(command)) = (in_console, line.strip_prefix("$ layerzero ")) {
                let mut process = Command::new(env!("CARGO_BIN_EXE_layerzero"));
                process.args(command.split_whitespace()).current_dir(root());
                // Whatever is configured on this machine, it is not for the documents.
                process.env("HOME", env!("CARGO_TARGET_TMPDIR")).env_remove("XDG_CONFIG_HOME");
                for (name, _) in std::env::vars_os().filter(|(n, _)| n.to_string_lossy().starts_with("LAYERZERO_")) {
                    process.env_remove(name);
                }
                let output = process.output().unwrap();
                let error = String::from_utf8_lossy(&output.stderr);
                assert!(output.status.success(), "{name}: layerzero {command}\n{error}");
                assert!(!output.stdout.is_empty(), "{name}: layerzero {command} printed nothing");
                ran += 1;
            }
        }
    }
    assert!(ran >= 3, "only {ran} command lines were found");
}

#[test]
fn links_lead_somewhere() {
    for (name, text) in documents() {
        for link in text.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
            let file = link.split('#').next().unwrap_or(link);
            if !link.contains("://") && !file.is_empty() {
                let folder = Path::new(&name).parent().map(|p| root().join(p)).unwrap_or_else(root);
                assert!(folder.join(file).exists(), "{name} links to {link}");
            }
        }
    }
}
