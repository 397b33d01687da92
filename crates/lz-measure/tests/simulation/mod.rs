//! A machine whose kernels have known times, and noise of the kinds that real ones have.
#![allow(dead_code)] // every test file uses its part

use lz_measure::{Contest, Next, Rules, Sample};

/// Random numbers that depend on a seed alone (xorshift64*).
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Random {
        let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
        for _ in 0..8 {
            random.bits();
        }
        random
    }

    pub fn bits(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// In [0, 1).
    pub fn uniform(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1_u64 << 53) as f64
    }

    pub fn between(&mut self, low: f64, high: f64) -> f64 {
        low + (high - low) * self.uniform()
    }

    pub fn below(&mut self, count: usize) -> usize {
        (self.uniform() * count as f64) as usize
    }

    /// Standard normal (Box and Muller).
    pub fn normal(&mut self) -> f64 {
        let (u, v) = (1.0 - self.uniform(), self.uniform());
        (-2.0 * u.ln()).sqrt() * (2.0 * std::f64::consts::PI * v).cos()
    }
}

/// What disturbs a sample.
#[derive(Clone, Copy, Debug)]
pub struct Noise {
    /// Standard deviation of what each sample has for itself, relative.
    pub own: f64,
    /// The share of samples that take ten times as long.
    pub spikes: f64,
    /// Step of the level's random walk per sample, as a logarithm; the level stays within a factor of 2.
    pub walk: f64,
}

pub struct Machine {
    pub random: Random,
    noise: Noise,
    level: f64,
}

impl Machine {
    pub fn new(seed: u64, noise: Noise) -> Machine {
        let mut random = Random::new(seed);
        let level = random.between(-0.69, 0.0);
        Machine { random, noise, level }
    }

    /// The time of a sample of a kernel that truly takes `us`.
    pub fn time(&mut self, us: f64) -> f64 {
        self.level += self.noise.walk * self.random.normal();
        if self.level > 0.0 {
            self.level = -self.level;
        }
        if self.level < -0.693 {
            self.level = (-1.386 - self.level).min(0.0);
        }
        let spike = if self.random.uniform() < self.noise.spikes { 10.0 } else { 1.0 };
        us * self.level.exp() * (self.noise.own * self.random.normal()).exp() * spike
    }
}

/// Runs a contest to its end.
pub fn hold(machine: &mut Machine, true_us: &[f64], rules: Rules) -> (Contest, Next) {
    hold_with(machine, true_us, None, rules)
}

/// The same, where one of them may be the baseline.
#[allow(dead_code)] // not every test has one
pub fn hold_with(machine: &mut Machine, true_us: &[f64], baseline: Option<usize>, rules: Rules) -> (Contest, Next) {
    let mut contest = Contest::new(rules).unwrap();
    for i in 0..true_us.len() {
        contest.add(&format!("k{i}"), baseline == Some(i)).unwrap();
    }
    loop {
        match contest.next() {
            Next::Time { candidate, calls } => {
                let per_call_us = machine.time(true_us[candidate]);
                contest.record(candidate, Sample { per_call_us, calls }).unwrap();
            }
            end => return (contest, end),
        }
    }
}
