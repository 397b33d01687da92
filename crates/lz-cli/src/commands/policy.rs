//! `layerzero policy`: what is odd about rules, and which of them decide about a call.

use std::path::PathBuf;

use layerzero::WhyReport;
use lz_select::{Effect, Finding, KernelIx, RuleTrace, Severity, Snapshot, analyse};
use serde::Serialize;
use serde_json::json;

use crate::args::{CallArgs, EngineArgs, PolicyArgs};
use crate::call::ResolvedCall;
use crate::color::Style;
use crate::commands::config::warn;
use crate::error::CliError;
use crate::exit::Exit;
use crate::printer::Printer;
use crate::session::Session;
use crate::surroundings::{self, Surroundings};

/// Check the rules of a file, or explain which rules decide about a call
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    what: What,
}

/// What about the rules.
#[derive(Debug, clap::Subcommand)]
enum What {
    /// Find unknown kernels, rules that can never match, and rules that others leave without effect
    ///
    /// Kernels and devices are those of this machine, and of the documents given. Exits with 1 when anything is
    /// certainly a mistake, with 3 when the file cannot be read.
    Check(CheckArgs),
    /// Show every rule about a call's operation: whether it applied, and what it did to which kernels
    ///
    /// Exits with 1 when no kernel can serve the call.
    Explain(Box<ExplainArgs>),
}

#[derive(Debug, clap::Args)]
struct CheckArgs {
    /// The configuration file; by default everything that is in force here
    file: Option<PathBuf>,
    #[command(flatten)]
    engine: EngineArgs,
}

#[derive(Debug, clap::Args)]
struct ExplainArgs {
    #[command(flatten)]
    call: CallArgs,
    #[command(flatten)]
    engine: EngineArgs,
    #[command(flatten)]
    policy: PolicyArgs,
}

/// Answers.
pub fn run(args: &Args, at: &Surroundings, printer: &mut Printer<'_>) -> Result<Exit, CliError> {
    match &args.what {
        What::Check(args) => check(args, at, printer),
        What::Explain(args) => explain(args, at, printer),
    }
}

fn check(args: &CheckArgs, at: &Surroundings, printer: &mut Printer<'_>) -> Result<Exit, CliError> {
    let sources = args.file.as_ref().map_or_else(|| at.sources(), |file| at.alone(file));
    let config = surroundings::config(&sources)?;
    let session = Session::unconfigured(&args.engine, at)?;
    let findings = session.engine.with_snapshot(|snapshot| analyse(config.policy(), snapshot));
    warn(&config, printer);
    let exit = if findings.iter().any(|f| f.severity == Severity::Error) { Exit::No } else { Exit::Ok };
    if printer.wants_json() {
        printer.json(&json!({ "rules": config.policy().rules.len(), "findings": findings }))?;
        return Ok(exit);
    }
    for finding in &findings {
        let (style, severity) = severity(finding);
        let label = printer.paint(style, severity);
        printer.line(format!("{label}: {finding}"))?;
    }
    let count = |n: usize, what: &str| format!("{n} {what}{}", if n == 1 { "" } else { "s" });
    let counted = |wanted: Severity| findings.iter().filter(|f| f.severity == wanted).count();
    printer.line(format!(
        "{}: {}, {}, {}",
        count(config.policy().rules.len(), "rule"),
        count(counted(Severity::Error), "error"),
        count(counted(Severity::Warning), "warning"),
        count(counted(Severity::Note), "note"),
    ))?;
    Ok(exit)
}

fn severity(finding: &Finding) -> (Style, &'static str) {
    match finding.severity {
        Severity::Error => (Style::Bad, "error"),
        Severity::Warning => (Style::Warning, "warning"),
        Severity::Note => (Style::Good, "note"),
    }
}

/// The answer of `explain`.
#[derive(Serialize)]
struct Answer {
    op: &'static str,
    device: String,
    rules: Vec<RuleReport>,
    chosen: Option<String>,
    overridden_by: Option<String>,
    rollout: Option<String>,
    why: Option<WhyReport>,
}

#[derive(Serialize)]
struct RuleReport {
    name: String,
    action: &'static str,
    target: String,
    /// When it applies; empty for always.
    condition: String,
    /// What its condition looked at.
    found: String,
    applied: bool,
    /// The rule that took its place.
    overruled_by: Option<String>,
    effects: Vec<EffectReport>,
}

#[derive(Serialize)]
struct EffectReport {
    kernel_id: String,
    #[serde(flatten)]
    effect: Effect,
}

fn explain(args: &ExplainArgs, at: &Surroundings, printer: &mut Printer<'_>) -> Result<Exit, CliError> {
    let call = ResolvedCall::new(&args.call)?;
    let session = Session::deciding(&args.engine, at, &call.op, &args.policy)?;
    let rules = traced(&session, &call)?;
    let report = session.engine.explain(&call.op, &call.named(session.device))?;
    session.print_warnings(printer);
    let answer = Answer {
        op: report.op,
        device: report.device.clone(),
        rules,
        chosen: report.chosen.clone(),
        overridden_by: report.overridden_by.clone(),
        rollout: report.rollout.clone(),
        why: report.why.clone(),
    };
    if printer.wants_json() {
        printer.json(&answer)?;
    } else {
        print(&answer, printer)?;
    }
    Ok(if answer.chosen.is_some() { Exit::Ok } else { Exit::No })
}

/// What every rule did to the decision about a call.
fn traced(session: &Session, call: &ResolvedCall) -> Result<Vec<RuleReport>, CliError> {
    let (_, bound) = session.engine.bind(&call.op, &call.named(session.device))?;
    Ok(session.engine.with_snapshot(|snapshot| {
        let traces = snapshot.trace(&snapshot.select(&bound.query));
        traces.into_iter().map(|trace| report(snapshot, trace)).collect()
    }))
}

fn report(snapshot: &Snapshot, trace: RuleTrace) -> RuleReport {
    let effect = |(kernel, effect): (KernelIx, Effect)| EffectReport { kernel_id: snapshot.name(kernel), effect };
    RuleReport {
        name: trace.name,
        action: trace.action,
        target: trace.target,
        condition: trace.condition,
        found: trace.found,
        applied: trace.applied,
        overruled_by: trace.overruled_by,
        effects: trace.effects.into_iter().map(effect).collect(),
    }
}

fn print(answer: &Answer, printer: &mut Printer<'_>) -> Result<(), CliError> {
    printer.line(format!("{} on {}", answer.op, answer.device))?;
    if answer.rules.is_empty() {
        printer.line("  no rule is about this operation")?;
    }
    for (i, rule) in answer.rules.iter().enumerate() {
        print_rule(i + 1, rule, printer)?;
    }
    let chosen = answer.chosen.as_deref().unwrap_or("nothing: no kernel can serve this call");
    let why = answer.why.as_ref().map_or_else(String::new, |why| format!(" ({})", why.message));
    printer.line(format!("  chosen  {chosen}{why}"))
}

fn print_rule(number: usize, rule: &RuleReport, printer: &mut Printer<'_>) -> Result<(), CliError> {
    printer.line(format!("  {number}. {}", rule.name))?;
    let when = match (rule.condition.as_str(), rule.found.as_str()) {
        ("", _) => "always".to_owned(),
        (condition, "") => format!("when {condition}"),
        (condition, found) => format!("when {condition} (here {found})"),
    };
    printer.line(format!("     {} {}, {when}", rule.action, rule.target))?;
    match (&rule.overruled_by, rule.applied) {
        (_, false) => printer.line("     did not apply"),
        (Some(by), true) => printer.line(format!("     applied, but '{by}' decided before it")),
        (None, true) if rule.effects.is_empty() => printer.line("     applied; no kernel here is concerned"),
        (None, true) => {
            let effect = |e: &EffectReport| format!("     {}: {}", e.kernel_id, words(e.effect));
            rule.effects.iter().map(effect).try_for_each(|line| printer.line(line))
        }
    }
}

fn words(effect: Effect) -> String {
    match effect {
        Effect::Points { points } => format!("{points:+} points"),
        Effect::Priority { priority } => format!("priority {priority}"),
        Effect::Denied => "ruled out".into(),
        Effect::Locked => "the only one that may serve".into(),
        Effect::LockedOut => "ruled out in favour of the locked one".into(),
        Effect::PutFirst => "put first".into(),
        Effect::NextInLine => "next in line".into(),
    }
}
