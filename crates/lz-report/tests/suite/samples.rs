//! Inputs to make pages of: one as a tuned machine gives it, and the extremes.

use std::collections::BTreeMap;

use lz_model::{CallSpec, DType, Layout};
use lz_report::{Candidate, Contest, Input, Machine, Regret};

/// Numbers that look random and are always the same.
pub struct Dice(u64);

impl Dice {
    pub fn new(seed: u64) -> Dice {
        Dice(seed)
    }

    /// Between 0 and 1.
    pub fn roll(&mut self) -> f64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as f64 / (1u64 << 31) as f64
    }
}

const GPU: &str = "GPU-3b1c9a52-7d4e-4a2f-9a55-0c1d2e3f4a5b";

fn machine() -> Machine {
    let versions = [
        ("driver", "570.86.15"),
        ("cuda", "13.0"),
        ("torch", "2.10.0"),
        ("flashinfer", "0.5.2"),
        ("layerzero", "0.1.0"),
    ];
    let versions: BTreeMap<String, String> = versions.map(|(name, version)| (name.into(), version.into())).into();
    Machine { id: GPU.into(), name: "NVIDIA H200".into(), signature: "cuda_sm90_cu130".into(), versions }
}

fn timed(dice: &mut Dice, kernel: &str, us: f64) -> Candidate {
    let us = us * (0.97 + 0.06 * dice.roll());
    let spread = us * (0.004 + 0.03 * dice.roll() * dice.roll());
    Candidate::ok(kernel, us, us + 2.5 * spread, spread, 20 + (dice.roll() * 40.0) as u32)
        .baseline(
            kernel.starts_with("torch.sdpa.flash")
                || matches!(kernel, "torch.rms_norm" | "torch.linear" | "torch.silu_mul"),
        )
        .warmup((kernel.contains("triton")).then_some(180.0 + 900.0 * dice.roll()))
}

fn attention(dice: &mut Dice, batch: i64, seq: i64, dtype: DType) -> Contest {
    let call = CallSpec::new("attention")
        .tensor("query", dtype, &[batch, seq, 32, 128])
        .tensor("key", dtype, &[batch, seq, 8, 128])
        .tensor("value", dtype, &[batch, seq, 8, 128])
        .layout(Layout::Bshd);
    let floor = (2.0 * (batch * seq * seq * 32 * 128) as f64 / 700e6).max(0.8);
    let busy = floor * 1.0 + 4.0;
    let skew = (seq as f64).log2() - 9.0;
    let mut contest = Contest::new(call, GPU, "graph").floor(Some(floor));
    let rivals = [
        ("torch.sdpa.flash", busy * 1.75),
        ("torch.sdpa.cudnn", busy * (1.42 - 0.02 * skew)),
        ("torch.sdpa.math", busy * 11.0),
        ("flash_attn.v3", busy * (1.55 - 0.09 * skew)),
        ("flashinfer.prefill.fa3", busy * (1.18 + 0.05 * skew + 0.02 * (batch as f64).log2())),
        ("triton.attention", busy * 1.9),
    ];
    for (kernel, us) in rivals {
        contest = contest.candidate(timed(dice, kernel, us));
    }
    if dtype == DType::F16 {
        let error = "result differs from the reference: largest error 0.31 at [0, 17, 3, 96], allowed 0.004";
        contest = contest.candidate(Candidate::wrong("xformers.cutlass", error));
    }
    if seq >= 8192 {
        let error = "Traceback (most recent call last):\n  File \"adapter.py\", line 81, in run\n    return kernel(q, k, v)\n\
                     torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 64.00 GiB";
        contest.candidates.retain(|c| c.kernel != "torch.sdpa.math");
        contest = contest.candidate(Candidate::failed("torch.sdpa.math", error));
    }
    contest.settled(None)
}

fn decode(dice: &mut Dice, batch: i64, context: i64) -> Contest {
    let call = CallSpec::new("attention")
        .tensor("query", DType::Bf16, &[batch, 1, 32, 128])
        .tensor("key", DType::Bf16, &[batch, context, 8, 128])
        .tensor("value", DType::Bf16, &[batch, context, 8, 128])
        .layout(Layout::Bshd);
    let floor = 2.0 * (batch * context * 8 * 128 * 2) as f64 / 4.8e6;
    let mut contest = Contest::new(call, GPU, "graph").floor(Some(floor));
    let rivals = [
        ("torch.sdpa.flash", 14.0 + floor * 6.0),
        ("flashinfer.decode", 4.0 + floor * 1.3),
        ("flash_attn.v3.split_kv", 5.5 + floor * 1.22),
        ("torch.attention.unfused", 26.0 + floor * 4.0),
    ];
    for (kernel, us) in rivals {
        contest = contest.candidate(timed(dice, kernel, us));
    }
    contest.settled(None)
}

fn norm(dice: &mut Dice, rows: i64, hidden: i64) -> Contest {
    let call =
        CallSpec::new("rms_norm").tensor("x", DType::Bf16, &[rows, hidden]).tensor("weight", DType::Bf16, &[hidden]);
    let floor = (rows * hidden * 4) as f64 / 4.8e6;
    let contest = Contest::new(call, GPU, "eager").floor(Some(floor));
    let contest = contest
        .candidate(timed(dice, "torch.rms_norm", 7.0 + floor * 2.1))
        .candidate(timed(dice, "torch.rms_norm.composed", 21.0 + floor * 6.0))
        .candidate(timed(dice, "flashinfer.rms_norm", 4.1 + floor * 1.25))
        .candidate(timed(dice, "liger.rms_norm", 9.0 + floor * 1.15));
    contest.settled(None)
}

fn linear(dice: &mut Dice, rows: i64, (from, to): (i64, i64)) -> Contest {
    let call =
        CallSpec::new("linear").tensor("input", DType::Bf16, &[rows, from]).tensor("weight", DType::Bf16, &[to, from]);
    let floor = ((2 * rows * from * to) as f64 / 900e6).max((from * to * 2) as f64 / 4.8e6);
    let contest = Contest::new(call, GPU, "graph").floor(Some(floor));
    // Where the two are within the noise the default stays.
    let contest = contest.candidate(timed(dice, "torch.linear", 2.0 + floor * 1.22)).candidate(timed(
        dice,
        "triton.linear.split_k",
        if rows <= 16 { 2.0 + floor * 1.05 } else { 6.0 + floor * 1.6 },
    ));
    let keep = rows > 16 && dice.roll() < 0.8;
    contest.settled(keep.then_some("torch.linear"))
}

/// A machine after tuning: attention, norms and linears of a model of eight billion parameters.
pub fn tuned() -> Input {
    let dice = &mut Dice::new(7);
    let mut contests = Vec::new();
    for dtype in [DType::Bf16, DType::F16] {
        for batch in [1, 4, 16] {
            for seq in [128, 512, 2048, 8192] {
                contests.push(attention(dice, batch, seq, dtype));
            }
        }
    }
    for batch in [1, 8, 32, 128] {
        for context in [256, 1024, 4096, 16384, 65536] {
            contests.push(decode(dice, batch, context));
        }
    }
    for rows in [1, 16, 256, 4096, 16384] {
        contests.push(norm(dice, rows, 4096));
    }
    for rows in [1, 8, 64, 512, 4096] {
        for way in [(4096, 4096), (4096, 14336), (14336, 4096)] {
            contests.push(linear(dice, rows, way));
        }
    }
    let mut regret = Regret::from_contests(&contests);
    if let Some(regret) = &mut regret {
        for row in &mut regret.rows {
            let roll = dice.roll();
            row.ratio_best = 1.0 + if roll < 0.8 { 0.003 * roll } else { (roll - 0.8) * (roll - 0.8) * 3.0 };
        }
        *regret =
            Regret::of("Calls that were not tuned, each kernel measured afterwards.", std::mem::take(&mut regret.rows));
    }
    Input {
        title: "llama-3-8b on NVIDIA H200".into(),
        machines: vec![machine()],
        contests,
        regret,
        notes: vec!["14 measurements were left out: the driver has changed since (560.35.03, now 570.86.15).".into()],
        source: Some("perfdb.sqlite (412 measurements)".into()),
        generated_at: 1_772_368_440_000,
    }
}

/// A name, and an input at the edge of what there can be.
pub fn edges() -> Vec<(&'static str, Input)> {
    let dice = &mut Dice::new(3);
    let with = |contests: Vec<Contest>| Input { machines: vec![machine()], contests, ..tuned_head() };
    let norm_call = |rows: i64| CallSpec::new("rms_norm").tensor("x", DType::F32, &[rows, 64]);
    let one = Contest::new(norm_call(4), GPU, "eager")
        .candidate(Candidate::ok("torch.rms_norm", 12.0, 13.0, 0.2, 9).baseline(true));
    let many = (0..300).map(|i| {
        let contest = Contest::new(norm_call(1 << (i % 15)).param("eps", (1 + i / 15) as f64 * 1e-6), GPU, "eager");
        let kernels = (0..12)
            .map(|k| timed(dice, &format!("library{k}.rms_norm.kernel{k}"), 5.0 + f64::from(k) + f64::from(i % 15)));
        kernels.fold(contest, Contest::candidate).settled(None)
    });
    let many: Vec<Contest> = many.collect();
    let failed = (0..3).map(|i| {
        Contest::new(norm_call(1 << i), GPU, "eager")
            .candidate(Candidate::failed("torch.rms_norm", "RuntimeError: no").baseline(true))
            .candidate(Candidate::wrong("fast.rms_norm", "differs: inf"))
            .settled(None)
    });
    let wide = [0.5, 3.0, 250.0, 41_000.0, 1e7].into_iter().enumerate();
    let wide = wide.fold(Contest::new(norm_call(9), GPU, "eager").floor(Some(0.02)), |contest, (i, us)| {
        contest.candidate(Candidate::ok(format!("k{i}"), us, us * 1.5, us * 0.1, 5).baseline(i == 2))
    });
    let mut two = tuned();
    for (i, contest) in two.contests.iter_mut().enumerate() {
        contest.device = if i % 2 == 0 { GPU.into() } else { "cpu_amd_avx512f".into() };
    }
    two.machines.push(Machine { id: "cpu_amd_avx512f".into(), name: "AMD EPYC 9654".into(), ..Machine::default() });
    let unbound = ["a", "b"].map(|name| {
        let call = CallSpec::new("not.an.operation").tensor(name, DType::F32, &[3, 4]);
        Contest::new(call, "nowhere", "eager").candidate(Candidate::ok("k", 1.0, 1.0, 0.0, 1)).settled(None)
    });
    vec![
        ("empty", Input::default()),
        ("one", with(vec![one.settled(None)])),
        ("many", with(many)),
        ("failed", with(failed.collect())),
        ("wide", with(vec![wide.settled(None)])),
        ("two_devices", two),
        ("unbound", with(unbound.to_vec())),
    ]
}

fn tuned_head() -> Input {
    Input { title: "At the edge".into(), generated_at: 1_772_368_440_000, ..Input::default() }
}
