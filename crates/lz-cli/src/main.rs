//! The command `layerzero`. All of it is in the library, so that it can be used without a process.

use std::io::{BufWriter, IsTerminal, stderr, stdout};

use lz_cli::{Terminals, run_on};

fn main() {
    let terminals = Terminals { out: stdout().is_terminal(), err: stderr().is_terminal() };
    let mut out = BufWriter::new(stdout().lock());
    let code = run_on(std::env::args_os(), &mut out, &mut stderr().lock(), terminals);
    // What could not be written was reported; the buffer must not try again when dropped.
    let _ = out.into_parts();
    std::process::exit(code);
}
