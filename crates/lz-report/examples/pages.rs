//! Writes pages to look at, and the same as JSON: one as a tuned machine gives it, and the extremes.
//!
//! `cargo run -p lz-report --example pages -- FOLDER`

#[path = "../tests/suite/samples.rs"]
mod samples;

fn main() -> std::io::Result<()> {
    let folder = std::path::PathBuf::from(std::env::args().nth(1).unwrap_or_else(|| ".".into()));
    std::fs::create_dir_all(&folder)?;
    for (name, input) in samples::edges().into_iter().chain([("tuned", samples::tuned())]) {
        std::fs::write(folder.join(format!("{name}.html")), lz_report::page(&input))?;
        std::fs::write(folder.join(format!("{name}.json")), serde_json::to_string(&input.document())?)?;
    }
    Ok(())
}
