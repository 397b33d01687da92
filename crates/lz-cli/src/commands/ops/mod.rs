//! `layerzero ops`: the operations and their contracts.

mod contract;

use lz_model::ops::ALIASES;
use lz_model::{Catalog, OpIx};
use serde::Serialize;

use self::contract::{AliasDoc, Contract, InputDoc, LayoutDoc, OutputDoc, ParamDoc};
use crate::error::CliError;
use crate::exit::Exit;
use crate::printer::Printer;
use crate::surroundings::Surroundings;

/// List the operations, or show the contract of one
#[derive(Debug, clap::Args)]
pub struct Args {
    /// An operation or alias
    name: Option<String>,
}

/// The answer: operations with their contracts, and the names that stand for several of them.
#[derive(Serialize)]
struct Answer {
    operations: Vec<Contract>,
    aliases: Vec<AliasDoc>,
}

/// Prints the list or the contracts.
pub fn run(args: &Args, _: &Surroundings, printer: &mut Printer<'_>) -> Result<Exit, CliError> {
    let answer = answer(args.name.as_deref())?;
    if printer.wants_json() {
        printer.json(&answer)?;
    } else if args.name.is_some() {
        print_contracts(&answer, printer)?;
    } else {
        print_list(&answer, printer)?;
    }
    Ok(Exit::Ok)
}

fn answer(name: Option<&str>) -> Result<Answer, CliError> {
    let catalog = Catalog::get();
    let wanted: Vec<OpIx> = match name {
        None => catalog.ops().iter().map(|op| op.ix()).collect(),
        Some(name) => catalog.find(name)?.ops.clone(),
    };
    let alias = ALIASES.iter().find(|a| Some(a.name) == name);
    let aliases = match (name, alias) {
        (None, _) => ALIASES.iter().map(AliasDoc::new).collect(),
        (Some(_), alias) => alias.map(AliasDoc::new).into_iter().collect(),
    };
    let operations = wanted.iter().map(|&ix| Contract::new(catalog.op(ix).schema())).collect();
    Ok(Answer { operations, aliases })
}

fn print_list(answer: &Answer, printer: &mut Printer<'_>) -> Result<(), CliError> {
    printer.line(format!("{} operations; 'layerzero ops NAME' shows the contract of one", answer.operations.len()))?;
    let row = |op: &Contract| [op.id.into(), op.kind.into(), op.aliases.join(", "), op.summary.into()];
    printer.table(["operation", "kind", "also", "summary"], answer.operations.iter().map(row))?;
    printer.heading("Names that stand for several")?;
    let row = |alias: &AliasDoc| [alias.name.into(), alias.operations.join(", "), fixes(alias)];
    printer.table(["name", "operations", "fixes"], answer.aliases.iter().map(row))
}

fn fixes(alias: &AliasDoc) -> String {
    alias.fixes.iter().map(|(param, value)| format!("{param}={value}")).collect::<Vec<_>>().join(", ")
}

fn print_contracts(answer: &Answer, printer: &mut Printer<'_>) -> Result<(), CliError> {
    for alias in &answer.aliases {
        printer.line(format!("{} stands for the first of these that takes the call:", alias.name))?;
        let row = |op: &Contract| [op.id.into(), op.when.unwrap_or("always").into(), fixes(alias)];
        printer.table(["operation", "when", "fixes"], answer.operations.iter().map(row))?;
        printer.line("")?;
    }
    for (i, op) in answer.operations.iter().enumerate() {
        if i > 0 {
            printer.line("")?;
        }
        print_contract(op, printer)?;
    }
    Ok(())
}

fn print_contract(op: &Contract, printer: &mut Printer<'_>) -> Result<(), CliError> {
    printer.line(format!("{}: {}", op.id, op.summary))?;
    let also = if op.aliases.is_empty() { String::new() } else { format!("; also {}", op.aliases.join(", ")) };
    printer.line(format!("  {} operation of the {} family{also}", op.kind, op.family))?;
    printer.line(format!("  {}", op.semantics))?;
    match op.layout {
        LayoutDoc::None => {}
        LayoutDoc::Default { layout, setting: None } => {
            printer.line(format!("  The layout is {layout} unless it is given."))?;
        }
        LayoutDoc::Default { layout, setting: Some(setting) } => {
            printer.line(format!("  The layout is {layout} unless it is given, or '{setting}' is set."))?;
        }
    }
    if !op.inputs.is_empty() {
        printer.heading("Inputs")?;
        let row = |i: &InputDoc| [i.name.into(), i.shape.into(), input_dtypes(i), input_notes(i)];
        printer.table(["name", "shape", "dtype", ""], op.inputs.iter().map(row))?;
    }
    if !op.params.is_empty() {
        printer.heading("Parameters")?;
        let row = |p: &ParamDoc| [p.name.into(), param_type(p), param_default(p), param_notes(p)];
        printer.table(["name", "type", "default", ""], op.params.iter().map(row))?;
    }
    if !op.outputs.is_empty() {
        printer.heading("Outputs")?;
        printer.table(["name", "shape", "dtype"], op.outputs.iter().map(output_row))?;
    }
    if !op.checks.is_empty() {
        printer.heading("Every call must meet")?;
        let row = |c: &contract::CheckDoc| [c.holds.into(), c.code.into()];
        printer.table(["condition", "else"], op.checks.iter().map(row))?;
    }
    if !op.edges.is_empty() {
        printer.heading("Edge cases")?;
        for edge in &op.edges {
            printer.line(format!("  {}: when {}", edge.name, edge.when))?;
            printer.line(format!("    {}", edge.gives))?;
            if let Some(except) = edge.except {
                printer.line(format!("    except: {except}"))?;
            }
        }
    }
    printer.heading("Cost and accuracy")?;
    printer.line(format!("  flops      {}", op.flops))?;
    printer.line(format!("  bytes      {}", op.bytes))?;
    let tolerances: Vec<String> = op.tolerances.iter().map(|(dtype, t)| format!("{dtype} {:e}", t.rtol)).collect();
    let tolerances = if tolerances.is_empty() { "results must be equal".into() } else { tolerances.join(", ") };
    printer.line(format!("  tolerance  {tolerances}"))
}

fn input_dtypes(input: &InputDoc) -> String {
    input.same_dtype_as.map_or_else(|| input.dtypes.join(", "), |other| format!("that of '{other}'"))
}

fn input_notes(input: &InputDoc) -> String {
    let also = (!input.aliases.is_empty()).then(|| format!("also {}", input.aliases.join(", ")));
    let optional = input.optional.then(|| "optional".to_owned());
    let updated = input.updated.then(|| "updated in place".to_owned());
    [optional, updated, also].into_iter().flatten().collect::<Vec<_>>().join("; ")
}

fn param_type(param: &ParamDoc) -> String {
    if param.choices.is_empty() { param.ty.into() } else { param.choices.join("|") }
}

fn param_default(param: &ParamDoc) -> String {
    match &param.default {
        _ if param.required => "required".into(),
        serde_json::Value::Null => "derived".into(),
        serde_json::Value::String(text) => text.clone(),
        value => value.to_string(),
    }
}

fn param_notes(param: &ParamDoc) -> String {
    let also = (!param.aliases.is_empty()).then(|| format!("; also {}", param.aliases.join(", ")));
    format!("{}{}", param.doc, also.unwrap_or_default())
}

fn output_row(output: &OutputDoc) -> [String; 3] {
    let shape = match output.shape {
        None => "updated in place".into(),
        Some(shape) => shape.strip_prefix("like:").map_or_else(|| shape.into(), |input| format!("that of '{input}'")),
    };
    let dtype = output.dtype.as_deref().map_or_else(String::new, |dtype| match dtype.split_once(':') {
        Some(("of", input)) => format!("that of '{input}'"),
        Some((_, param)) => format!("what '{param}' names"),
        None => dtype.into(),
    });
    [output.name.into(), shape, dtype]
}
