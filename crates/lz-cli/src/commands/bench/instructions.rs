//! `layerzero bench instructions`: how many instructions a native kernel takes for an element, counted by callgrind.
//!
//! A count does not move with the load of the machine, so two builds can be compared on a busy one. The count of a call is the
//! difference of two runs of `layerzero run`, divided by the difference of their repetitions. Valgrind has no AVX-512; kernels for
//! it are left out.

use std::process::Command;

use serde_json::{Value, json};

use super::BenchOptions;
use crate::error::CliError;
use crate::printer::Printer;

/// Repetitions of the two runs whose difference is taken.
const FEW: u32 = 1;
const MANY: u32 = 5;

/// Instruction sets that valgrind has, as kernels are named for them, and what people call them.
const ISAS: [(&str, &str); 2] = [("", "portable"), (".avx2", "AVX2")];

/// A call of a kernel that works row by row.
struct Row {
    /// The kernel, without the instruction set and the library.
    kernel: &'static str,
    /// The call.
    call: &'static str,
    /// Elements of the result.
    elements: f64,
}

const ROWS: &[Row] = &[
    Row { kernel: "rms_norm", call: "norm.rms --shape input=64x4096 --shape weight=4096", elements: 262_144.0 },
    Row {
        kernel: "add_rms_norm",
        call: "norm.fused_add_rms --shape input=64x4096 --shape residual=64x4096 --shape weight=4096",
        elements: 262_144.0,
    },
    Row {
        kernel: "layer_norm",
        call: "norm.layer --shape input=64x4096 --shape weight=4096 --shape bias=4096",
        elements: 262_144.0,
    },
    Row { kernel: "softmax", call: "activation.softmax --shape input=64x4096", elements: 262_144.0 },
    Row { kernel: "gelu", call: "activation.gelu --shape input=64x4096", elements: 262_144.0 },
    Row { kernel: "gelu", call: "activation.gelu --shape input=64x4096 --param approximate=tanh", elements: 262_144.0 },
    Row {
        kernel: "silu_mul",
        call: "activation.silu_mul --shape gate=64x4096 --shape up=64x4096",
        elements: 262_144.0,
    },
    Row {
        kernel: "rope",
        call: "posenc.rope --shape input=1x64x32x128 --shape cos=64x64 --shape sin=64x64 --layout BSHD",
        elements: 262_144.0,
    },
    Row {
        kernel: "quantize",
        call: "quantize --shape input=64x4096 --param dtype=int8 --param granularity=per_channel",
        elements: 262_144.0,
    },
    Row {
        kernel: "dequantize",
        call: "dequantize --dtype int8 --shape values=64x4096 --shape scales=64x1 --param granularity=per_channel",
        elements: 262_144.0,
    },
    Row {
        kernel: "sample_topk",
        call: "sampling.topk --shape logits=1x128256 --param k=50 --param seed=1",
        elements: 128_256.0,
    },
    Row {
        kernel: "sample_topp",
        call: "sampling.topp --shape logits=1x128256 --param p=0.9 --param seed=1",
        elements: 128_256.0,
    },
];

/// Counts.
pub fn run(_: &BenchOptions) -> Result<Value, CliError> {
    let program = std::env::current_exe().unwrap_or_default();
    if program.file_stem().is_none_or(|name| name != "layerzero") {
        let what = format!(
            "'{}' is not the command that is built in Rust, and valgrind would count all of it",
            program.display()
        );
        return Err(CliError::argument(
            what,
            "run 'cargo run --release -p lz-cli -- bench instructions' in the checkout",
        ));
    }
    let counted = ROWS.iter().flat_map(|row| ISAS.map(|(suffix, isa)| (row, suffix, isa)));
    let rows: Vec<Value> = counted
        .map(|(row, suffix, isa)| {
            let kernel = format!("lz_cpu.{}{suffix}", row.kernel);
            let count = per_call(row.call, &kernel);
            json!({
                "kernel_id": kernel,
                "isa": isa,
                "call": row.call,
                "elements": row.elements,
                "instructions": count.as_ref().ok(),
                "per_element": count.as_ref().ok().map(|n| n / row.elements),
                "unknown": count.err(),
            })
        })
        .collect();
    Ok(json!({ "counted_by": "callgrind", "rows": rows }))
}

fn per_call(call: &str, kernel: &str) -> Result<f64, String> {
    let (few, many) = (instructions(call, kernel, FEW)?, instructions(call, kernel, MANY)?);
    Ok((many - few) / f64::from(MANY - FEW))
}

fn instructions(call: &str, kernel: &str, repeat: u32) -> Result<f64, String> {
    let program = std::env::current_exe().map_err(|e| e.to_string())?;
    let mut command = Command::new(&program);
    command.args(["run", "--op"]).args(call.split(' ')).args([
        "--simd",
        "--lock",
        kernel,
        "--repeat",
        &repeat.to_string(),
    ]);
    command.env("LAYERZERO_NUM_THREADS", "1");
    counted(&command)
}

/// The instructions that a command takes, by callgrind.
pub(super) fn counted(command: &Command) -> Result<f64, String> {
    let mut counting = Command::new("valgrind");
    counting.args(["--tool=callgrind", "--callgrind-out-file=/dev/null"]).arg(command.get_program());
    counting.args(command.get_args());
    counting.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
    let output = counting.output().map_err(|e| format!("valgrind cannot be run: {e}"))?;
    let text = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() {
        let last = text.lines().rfind(|line| !line.starts_with("==")).unwrap_or("it said nothing");
        // Where the program is says nothing about it, and does not belong into a file of results.
        let last = last.replace(&*command.get_program().to_string_lossy(), "the program");
        return Err(format!("it failed under valgrind ({}): {last}", output.status));
    }
    let collected = text.lines().find_map(|line| line.split("Collected :").nth(1));
    collected.and_then(|n| n.trim().parse().ok()).ok_or_else(|| "valgrind reported no count".into())
}

/// Prints a result for people.
pub fn print(result: &Value, printer: &mut Printer<'_>) -> Result<(), CliError> {
    let row = |row: &Value| {
        let text = |key: &str| row[key].as_str().unwrap_or_default().to_owned();
        let count = row["per_element"].as_f64().map_or_else(|| text("unknown"), |n| format!("{n:.2}"));
        [text("kernel_id"), text("isa"), count, text("call")]
    };
    let rows = result["rows"].as_array().into_iter().flatten();
    printer.table(["kernel", "instructions for", "per element", "call"], rows.map(row))
}
