//! Whether an engine is fit for production: the checklist, answered.

use std::collections::BTreeSet;
use std::fmt;

use lz_config::Config;
use lz_model::schema::OpKind;
use lz_model::{Catalog, DeviceIx, Platform, Reason, Trust};
use lz_resilience::{BreakerState, Level, Verdict};
use lz_select::{Action, BackendState, KernelIx, Pattern, RolloutRule, RuleSpec, Severity, Snapshot, Verify, analyse};
use serde::Serialize;

use super::Engine;
use crate::documents::{PinKind, PinStatus};

/// How a check came out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum CheckStatus {
    /// As it should be.
    Pass,
    /// It works, and could be better.
    Warn,
    /// Not fit.
    Fail,
    /// There is nothing to check.
    Skipped,
}

impl CheckStatus {
    /// In a word.
    pub fn name(self) -> &'static str {
        match self {
            CheckStatus::Pass => "pass",
            CheckStatus::Warn => "warn",
            CheckStatus::Fail => "fail",
            CheckStatus::Skipped => "skipped",
        }
    }
}

/// One line of the checklist.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Check {
    /// What was looked at.
    pub name: &'static str,
    /// How it came out.
    pub status: CheckStatus,
    /// What was found.
    pub detail: String,
    /// What to do about it; empty when nothing is to be done.
    pub hint: String,
}

/// The checklist, answered.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Readiness {
    /// No check failed.
    pub ready: bool,
    /// Every check, in the order of the list.
    pub checks: Vec<Check>,
}

impl Readiness {
    /// What a list of checks amounts to.
    pub fn of(checks: Vec<Check>) -> Readiness {
        Readiness { ready: checks.iter().all(|check| check.status != CheckStatus::Fail), checks }
    }
}

impl fmt::Display for Readiness {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for check in &self.checks {
            let detail = check.detail.replace('\n', "\n                          ");
            writeln!(f, "  {:<8} {:<14} {detail}", check.status.name(), check.name)?;
            if !check.hint.is_empty() {
                writeln!(f, "  {:<8} {:<14} → {}", "", "", check.hint)?;
            }
        }
        let warnings = self.checks.iter().filter(|check| check.status == CheckStatus::Warn).count();
        match (self.ready, warnings) {
            (false, _) => write!(f, "not ready"),
            (true, 0) => write!(f, "ready"),
            (true, 1) => write!(f, "ready, with 1 warning"),
            (true, n) => write!(f, "ready, with {n} warnings"),
        }
    }
}

/// How a check came out, what was found, what to do.
type Answer = (CheckStatus, String, &'static str);

fn pass(detail: impl Into<String>) -> Answer {
    (CheckStatus::Pass, detail.into(), "")
}

fn warn(detail: impl Into<String>, hint: &'static str) -> Answer {
    (CheckStatus::Warn, detail.into(), hint)
}

fn fail(detail: impl Into<String>, hint: &'static str) -> Answer {
    (CheckStatus::Fail, detail.into(), hint)
}

fn skipped(detail: impl Into<String>) -> Answer {
    (CheckStatus::Skipped, detail.into(), "")
}

/// `1 lock`, `2 locks`.
fn count(n: usize, what: &str) -> String {
    format!("{n} {what}{}", if n == 1 { "" } else { "s" })
}

/// What the checks look at.
struct Look<'a> {
    engine: &'a Engine,
    config: &'a Config,
    snapshot: &'a Snapshot,
}

/// A line of the checklist: its name, and how it is answered.
type Line = (&'static str, fn(&Look<'_>) -> Answer);

/// The checklist, in order. To add a check: write its function, add a line.
static CHECKS: &[Line] = &[
    ("configuration", configuration),
    ("capabilities", capabilities),
    ("kernels", kernels),
    ("locks", locks),
    ("rules", rules),
    ("versions", versions),
    ("memory", memory),
    ("results", results),
    ("breakers", breakers),
    ("level", level),
    ("rollouts", rollouts),
    ("jit", jit),
    ("graphs", graphs),
    ("lockfile", lockfile),
    ("dispatch_table", dispatch_table),
    ("perfdb", perfdb),
    ("drift", drift),
    ("telemetry", telemetry),
];

impl Engine {
    /// Whether it is fit for production, by the checklist. Warnings do not keep it from being ready.
    pub fn readiness(&self) -> Readiness {
        // A lock may be on a kernel for a GPU, and those may not have been looked for yet.
        let is_lock = |rule: &RuleSpec| matches!(rule.action, Action::Lock(_));
        if self.with_snapshot(|snapshot| snapshot.spec().policy.rules.iter().any(is_lock)) {
            let _ = self.look_for_more(|_| true);
        }
        let (state, config) = (self.state.load(), self.config());
        let look = Look { engine: self, config: &config, snapshot: &state.snapshot };
        let answer = |(name, check): &Line| {
            let (status, detail, hint) = check(&look);
            Check { name, status, detail, hint: hint.to_owned() }
        };
        Readiness::of(CHECKS.iter().map(answer).collect())
    }
}

impl Look<'_> {
    fn devices(&self) -> impl Iterator<Item = DeviceIx> {
        (0..self.snapshot.spec().devices.len()).map(|i| DeviceIx(i as u16))
    }

    /// Whether nothing rules a kernel out on a device, whatever the call.
    fn runs_on(&self, kernel: KernelIx, device: DeviceIx) -> bool {
        self.snapshot.static_reasons(kernel, device).is_empty()
    }

    fn runs_here(&self, kernel: KernelIx) -> bool {
        self.devices().any(|device| self.runs_on(kernel, device))
    }

    fn kernels_called<'p>(&'p self, pattern: &'p Pattern) -> impl Iterator<Item = KernelIx> + 'p {
        self.snapshot.kernels().filter(|(_, kernel)| pattern.matches(kernel)).map(|(ix, _)| ix)
    }

    fn backends(&self) -> impl Iterator<Item = &BackendState> {
        self.snapshot.spec().backends.values()
    }
}

fn perfdb(look: &Look<'_>) -> Answer {
    let health = look.engine.perf_health();
    if !look.config.settings.perfdb.enabled {
        let priors = if look.config.settings.perfdb.priors { "what was measured elsewhere, and else by " } else { "" };
        return skipped(format!("switched off: selection goes by {priors}declared priorities"));
    }
    let measure = "'layerzero tune' measures";
    match (health.known, health.path.is_some() && !health.durable) {
        (_, true) => warn(health.state, "see 'layerzero perfdb verify'"),
        (0, false) => match look.engine.perf.kept(look.config) {
            0 => skipped(format!("nothing is measured here yet; {measure}")),
            kept if look.engine.perf.is_consulted() => {
                let of_others = "none counts: other devices, other versions, or out of date";
                warn(format!("{} in the database, {of_others}", count(kept, "measurement")), measure)
            }
            kept => skipped(format!("{} in the database, not read yet", count(kept, "measurement"))),
        },
        (known, false) => pass(format!("selection goes by {}", count(known, "measurement"))),
    }
}

fn configuration(look: &Look<'_>) -> Answer {
    if let Some(error) = look.engine.control.reloads().last_error {
        return fail(format!("the last configuration was refused:\n{error}"), "see 'layerzero config check'");
    }
    let warnings: Vec<String> = look.config.warnings.iter().map(ToString::to_string).collect();
    if !warnings.is_empty() {
        return warn(warnings.join("\n"), "unset or rename what is listed");
    }
    match look.config.files() {
        [] => pass("no files; defaults and environment"),
        files => pass(files.iter().map(|file| file.display().to_string()).collect::<Vec<_>>().join(", ")),
    }
}

fn capabilities(look: &Look<'_>) -> Answer {
    let broken = |backend: &BackendState| match &backend.unavailable {
        None | Some(Reason::NotInstalled { .. }) => None,
        Some(reason) => Some(format!("{}: [{}] {reason}", backend.descriptor.name, reason.code())),
    };
    // What a library for other hardware needs, this machine cannot give it.
    let is_for_here = |backend: &&BackendState| {
        let platforms = &backend.descriptor.platforms;
        let mut devices = look.devices().filter_map(|ix| look.snapshot.device(ix));
        platforms.is_empty() || devices.any(|device| platforms.contains(&device.platform))
    };
    let broken: Vec<String> = look.backends().filter(is_for_here).filter_map(broken).collect();
    if !broken.is_empty() {
        return warn(broken.join("\n"), "repair or remove the library; until then it is left out");
    }
    let for_here = look.backends().filter(is_for_here).count();
    let installed = look.backends().filter(is_for_here).filter(|backend| backend.unavailable.is_none()).count();
    let (absent, elsewhere) = (for_here - installed, look.backends().count() - for_here);
    pass(format!("{} in use, {absent} not installed, {elsewhere} for other hardware", count(installed, "backend")))
}

fn kernels(look: &Look<'_>) -> Answer {
    let served = |op: &&lz_model::Op| look.snapshot.kernels_for(op.ix()).any(|kernel| look.runs_here(kernel));
    let ops = || Catalog::get().ops().iter();
    // Tokenizers work on text, and come with the model that needs one.
    let missing: Vec<&str> =
        ops().filter(|op| op.schema().kind != OpKind::Tokenization && !served(op)).map(|op| op.id()).collect();
    let some = |names: &[&str]| match names {
        [first, second, third, rest @ ..] if !rest.is_empty() => {
            format!("{first}, {second}, {third} and {} more", rest.len())
        }
        names => names.join(", "),
    };
    if !missing.is_empty() {
        let detail = format!("no kernel runs here for {}", some(&missing));
        return fail(detail, "'layerzero kernels' says why each is out");
    }
    let idle = |device: &DeviceIx| !look.snapshot.kernels().any(|(kernel, _)| look.runs_on(kernel, *device));
    let idle: Vec<String> =
        look.devices().filter(idle).filter_map(|ix| Some(look.snapshot.device(ix)?.name.clone())).collect();
    if !idle.is_empty() {
        return warn(format!("no kernel runs on {}", idle.join(", ")), "install a library for it, or leave it out");
    }
    pass(format!("{} of {} operations have a kernel here", ops().filter(served).count(), ops().count()))
}

fn locks(look: &Look<'_>) -> Answer {
    let rules = look.snapshot.spec().policy.rules.iter();
    match rules.filter(|rule| matches!(rule.action, Action::Lock(_))).count() {
        0 => skipped("none"),
        locks => verdict(
            look,
            |action| matches!(action, Action::Lock(_)),
            format!("{}, each on a kernel that can run here", count(locks, "lock")),
            "name a kernel of 'layerzero kernels', take the lock away, or make it optional",
        ),
    }
}

fn rules(look: &Look<'_>) -> Answer {
    let policy = &look.snapshot.spec().policy;
    match policy.rules.iter().filter(|rule| !matches!(rule.action, Action::Lock(_))).count() {
        0 => skipped("none"),
        rules => verdict(
            look,
            |action| !matches!(action, Action::Lock(_)),
            format!("{}, nothing odd about any", count(rules, "rule")),
            "see 'layerzero policy check'",
        ),
    }
}

/// What the analysis finds about some of the rules: the same that `layerzero policy check` and `config check` find.
fn verdict(look: &Look<'_>, wanted: fn(&Action) -> bool, well: String, hint: &'static str) -> Answer {
    let policy = &look.snapshot.spec().policy;
    let mut findings = analyse(policy, look.snapshot);
    findings.retain(|finding| wanted(&policy.rules[finding.index].action));
    let worst = findings.iter().map(|finding| finding.severity).max();
    let found = |least: Severity| {
        let told = findings.iter().filter(|finding| finding.severity >= least);
        told.map(ToString::to_string).collect::<Vec<_>>().join("\n")
    };
    match worst {
        Some(Severity::Error) => fail(found(Severity::Warning), hint),
        Some(Severity::Warning) => warn(found(Severity::Warning), hint),
        Some(Severity::Note) | None => pass(well),
    }
}

/// The CUDA or ROCm a package was built with, as its version says: `2.9.1+cu126` is `cuda 12`.
fn built_with(version: &str) -> Option<String> {
    let local = version.split_once('+')?.1;
    let digits = |text: &str| text.chars().take_while(char::is_ascii_digit).collect::<String>();
    let (platform, number) = match local.split_once("cu") {
        Some(("", rest)) => ("cuda", digits(rest)),
        _ => ("rocm", digits(local.strip_prefix("rocm")?)),
    };
    // `cu126` is 12.6, `cu118` 11.8; `rocm6.2` says its major version alone.
    let major = if platform == "cuda" { number.get(..2)?.to_owned() } else { number };
    (!major.is_empty()).then(|| format!("{platform} {major}"))
}

fn versions(look: &Look<'_>) -> Answer {
    let spec = look.snapshot.spec();
    let usable = || look.backends().filter(|backend| backend.unavailable.is_none());
    let of_backends = usable().map(|b| (b.descriptor.name.as_str(), b.descriptor.version.as_str()));
    let of_libraries = spec.versions.iter().map(|(name, version)| (name.as_str(), version.as_str()));
    let built: BTreeSet<(String, &str)> =
        of_backends.chain(of_libraries).filter_map(|(name, version)| Some((built_with(version)?, name))).collect();
    let platforms: BTreeSet<&String> = built.iter().map(|(with, _)| with).collect();
    let told = || built.iter().map(|(with, name)| format!("{name}: {with}")).collect::<Vec<_>>().join(", ");
    if platforms.len() > 1 {
        let hint = "install builds for one version of CUDA or ROCm; mixed ones may crash";
        return fail(format!("built for different ones: {}", told()), hint);
    }
    let installed = |name: &str| {
        let of_devices = spec.devices.iter().find_map(|device| device.versions.get(name));
        of_devices.or_else(|| spec.versions.get(name))
    };
    let unmet = usable().flat_map(|b| b.descriptor.requires.iter().map(move |r| (&b.descriptor.name, r)));
    let unmet = unmet.filter(|(_, r)| matches!(r.name.as_str(), "cuda" | "rocm" | "hip"));
    let unmet: Vec<String> = unmet
        .filter_map(|(name, requirement)| {
            let found = installed(&requirement.name)?;
            (!requirement.met_by(found)).then(|| format!("{name} requires {requirement}, found {found}"))
        })
        .collect();
    match (unmet.is_empty(), platforms.first()) {
        (false, _) => fail(unmet.join("\n"), "install builds for one version of CUDA or ROCm"),
        (true, Some(one)) => pass(format!("everything is built for {one}")),
        (true, None) => skipped("no backend says what it is built for"),
    }
}

fn memory(look: &Look<'_>) -> Answer {
    let headroom_mb = look.config.settings.memory_headroom_mb;
    if headroom_mb == 0 {
        return warn("no headroom is kept free", "set memory_headroom_mb");
    }
    let spec = look.snapshot.spec();
    // Only devices of this machine have memory that was probed.
    let devices = (0..).map(DeviceIx).zip(&spec.devices);
    let probed = devices.filter_map(|(ix, device)| Some((ix, device, spec.memory.get(ix)?)));
    let free: Vec<(&str, u64)> = probed
        .map(|(ix, device, before)| {
            let now = look.engine.probe(ix, device).unwrap_or(before);
            (device.name.as_str(), u64::try_from(now.free).unwrap_or(0) >> 20)
        })
        .collect();
    if free.is_empty() {
        return skipped("the memory of no device is known");
    }
    let short: Vec<String> = free
        .iter()
        .filter(|(_, free_mb)| *free_mb < headroom_mb)
        .map(|(name, free_mb)| format!("{name}: {free_mb} MiB are free, {headroom_mb} MiB are to stay free"))
        .collect();
    match short.is_empty() {
        true => pass(format!("{headroom_mb} MiB stay free on {}", count(free.len(), "device"))),
        false => warn(short.join("\n"), "free memory, or lower memory_headroom_mb; workspaces are refused until then"),
    }
}

fn results(look: &Look<'_>) -> Answer {
    let wrong: Vec<String> = look
        .engine
        .wrong_results()
        .into_iter()
        .map(|w| format!("{} gave wrong results and no longer serves {}: {}", w.kernel, w.op, w.error))
        .collect();
    if !wrong.is_empty() {
        return fail(wrong.join("\n"), "fix or unregister it; lz.forget_failures() has it compared again");
    }
    let spec = look.snapshot.spec();
    let unproven = look.snapshot.kernels().filter(|(_, k)| k.trust == Trust::Unproven).count();
    match (unproven, spec.settings.verify) {
        (0, _) => skipped("every kernel is built in or vouched for"),
        (n, Verify::Off) => warn(
            format!(
                "{} not built in, and 'verify' is off: nothing compares them with the reference",
                count(n, "kernel")
            ),
            "set verify to first_use, or vouch for them with trusted=True",
        ),
        (n, _) => pass(format!(
            "{} not built in, compared with the reference at first use ({} so far)",
            count(n, "kernel"),
            count(spec.proofs.passes(), "comparison")
        )),
    }
}

fn breakers(look: &Look<'_>) -> Answer {
    let reports = look.engine.guard.breakers().report();
    let in_state = |wanted: &[BreakerState]| -> Vec<String> {
        let matching = reports.iter().filter(|report| wanted.contains(&report.view.state));
        matching.map(|b| format!("the circuit of {} for {} is {}", b.kernel, b.op, b.view.state)).collect()
    };
    let out = in_state(&[BreakerState::Open, BreakerState::Disabled]);
    if !out.is_empty() {
        return fail(out.join("\n"), "see the last errors in lz.health(); a disabled library needs a new process");
    }
    if !look.config.settings.breaker.enabled {
        return warn("circuit breakers are turned off", "set breaker.enabled");
    }
    let trying = in_state(&[BreakerState::HalfOpen]);
    match trying.is_empty() {
        true => pass("enabled, none is open"),
        false => warn(trying.join("\n"), "wait until it has closed"),
    }
}

fn level(look: &Look<'_>) -> Answer {
    if !look.config.settings.degradation.enabled {
        return warn("the degradation controller is turned off", "set degradation.enabled");
    }
    let hint = "see the failures in lz.health()";
    match look.engine.level() {
        Level::Full => pass("full"),
        Level::Minimal => fail("degraded to 'minimal': only references run, and plain torch where none can", hint),
        level => warn(format!("degraded to '{level}'"), hint),
    }
}

fn rollouts(look: &Look<'_>) -> Answer {
    let statuses = look.engine.rollouts();
    if statuses.is_empty() {
        return skipped("not configured");
    }
    let odd: Vec<String> = statuses
        .iter()
        .filter_map(|status| {
            let (spec, candidate) = (&status.spec, Pattern::Kernel(status.spec.candidate.clone()));
            let ops = RolloutRule::ops_of(&spec.operation);
            let serves = |kernel: KernelIx| ops.iter().any(|&op| look.snapshot.kernels_for(op).any(|k| k == kernel));
            if let Verdict::RolledBack { why } = &status.verdict {
                return Some(format!("'{}' was rolled back: {why}", spec.name));
            }
            let tried = look.kernels_called(&candidate).any(serves);
            (!tried).then(|| {
                format!("'{}' tries nothing: no kernel '{}' serves {}", spec.name, spec.candidate, spec.operation)
            })
        })
        .collect();
    match odd.is_empty() {
        true => pass(format!("{} under way", statuses.len())),
        false => warn(odd.join("\n"), "see 'layerzero rollout status'"),
    }
}

fn jit(look: &Look<'_>) -> Answer {
    let spec = look.snapshot.spec();
    let compiled = || look.snapshot.kernels().filter(|(ix, kernel)| kernel.jit && look.runs_here(*ix));
    if compiled().next().is_none() {
        return skipped("no kernel is compiled on first use");
    }
    let status = look.engine.jit_status();
    if let Some(failed) = status.failed.first() {
        let detail = format!("{status}\n{}: {}", failed.kernel, failed.error);
        return warn(detail, "see lz.health(); other kernels serve these calls");
    }
    if status.tracked && status.cold > 0 {
        return warn(status.to_string(), "warm up before traffic arrives, with lz.warmup");
    }
    let cold: Vec<String> = compiled()
        .filter(|(_, kernel)| {
            let versioned = format!("{}@{}", kernel.id, kernel.version);
            spec.health.get(&versioned).or_else(|| spec.health.get(&kernel.id)).is_some_and(|health| health.cold)
        })
        .map(|(_, kernel)| kernel.id.clone())
        .collect();
    match cold.is_empty() {
        true if status.warm > 0 => pass(status.to_string()),
        true => pass(format!("{} compiled on first use, none known to be cold", count(compiled().count(), "kernel"))),
        false => warn(format!("not compiled yet: {}", cold.join(", ")), "warm up before traffic arrives"),
    }
}

fn graphs(look: &Look<'_>) -> Answer {
    if !look.config.settings.graph_strict_mode {
        return skipped("graph_strict_mode is off");
    }
    let on_gpu = |kernel: KernelIx| {
        let gpus = look.devices().filter(|&ix| look.snapshot.device(ix).is_some_and(|d| d.platform != Platform::Cpu));
        gpus.into_iter().any(|device| look.runs_on(kernel, device))
    };
    let safe = look.snapshot.kernels().filter(|(ix, kernel)| kernel.graph_safe && on_gpu(*ix)).count();
    match (safe, look.snapshot.proven_in_graphs()) {
        (0, _) => fail(
            "no kernel here is declared safe inside CUDA graphs",
            "turn graph_strict_mode off, or install one that is",
        ),
        (safe, 0) => fail(
            format!("none of {} is proven safe inside CUDA graphs", count(safe, "kernel")),
            "prove them with lz.warmup or 'layerzero tune --graph …', or turn graph_strict_mode off",
        ),
        (safe, proven) => pass(format!("{proven} of {} proven safe inside CUDA graphs", count(safe, "kernel"))),
    }
}

fn lockfile(look: &Look<'_>) -> Answer {
    decisions(look, PinKind::Lockfile, "see 'layerzero lock --check'; lock anew with 'layerzero lock'")
}

fn dispatch_table(look: &Look<'_>) -> Answer {
    decisions(look, PinKind::Table, "see 'layerzero solve --check'; solve anew with 'layerzero solve'")
}

/// What of the documents of a kind is in force.
fn decisions(look: &Look<'_>, kind: PinKind, hint: &'static str) -> Answer {
    let pinned = look.engine.pinned();
    let of_kind: Vec<&PinStatus> = pinned.iter().filter(|status| status.kind == kind).collect();
    let amiss: Vec<String> = of_kind.iter().filter_map(|status| status.warning()).collect();
    if of_kind.iter().any(|status| status.refused) {
        return fail(amiss.join("\n"), hint);
    }
    if !amiss.is_empty() {
        return warn(amiss.join("\n"), hint);
    }
    let said: Vec<String> =
        of_kind.iter().map(|s| format!("{}: {} in force", s.origin, count(s.entries, "decision"))).collect();
    if said.is_empty() { skipped("not configured") } else { pass(said.join("\n")) }
}

fn drift(look: &Look<'_>) -> Answer {
    let drifted = look.engine.drifted();
    match drifted.first() {
        None if look.engine.perf_health().known == 0 => skipped("nothing was measured"),
        None => pass("sampled calls take what was measured"),
        Some(worst) => warn(
            format!("{} of calls take longer than was measured; the worst: {worst}", count(drifted.len(), "kind")),
            "measure them again: 'layerzero tune', or perfdb.auto_tune",
        ),
    }
}

fn telemetry(look: &Look<'_>) -> Answer {
    match look.engine.guard.heard || tracing::dispatcher::has_been_set() {
        true => pass("events are received"),
        false => warn("nobody receives events", "give the engine an event hook, or set up logging"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_say_what_they_were_built_with() {
        let cases = [
            ("2.9.1+cu126", Some("cuda 12")),
            ("2.9.1+cu118", Some("cuda 11")),
            ("2.9.1+cu130", Some("cuda 13")),
            ("2.9.1+rocm6.2", Some("rocm 6")),
            ("2.9.1+rocm6.2.4", Some("rocm 6")),
            ("2.9.1+cpu", None),
            ("2.9.1+cu", None),
            ("2.9.1+cu1", None),
            ("2.9.1+rocm", None),
            ("2.9.1+", None),
            ("2.9.1", None),
            ("", None),
        ];
        for (version, expected) in cases {
            assert_eq!(built_with(version).as_deref(), expected, "{version}");
        }
    }
}
