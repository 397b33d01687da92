//! One token drawn from a row of logits, without sorting the row.
//!
//! Weights are exponentials of differences to the largest logit, float64: a draw is the one the definition gives, unless it
//! depends on the last digits. Tokens that can be drawn are found in two ways. If they are few, each of them is at least as
//! large as the maximum of some chunk of the row. If they are many, bins of logits say where the sums are reached, and only
//! the tokens of two bins are looked at.

use super::half_floats::Narrow;
use super::sample_bins::{BINS, Bins, Contents};
use super::{BLOCK, Work, exp64};

/// Tokens with one maximum.
const CHUNK: usize = 128;
/// How many likely tokens are tried before bins, where their probability decides.
const LIKELY: usize = 256;
/// As few tokens are sorted, where more are halved first.
const FEW: usize = 32;

/// Which tokens of a row can be drawn.
#[derive(Clone, Copy)]
pub(super) enum Kept {
    /// So many of the most likely ones.
    Most(usize),
    /// The most likely ones until their probability reaches this.
    Reaching(f64),
}

/// Memory of a thread, which stays as large as the largest row needed.
#[derive(Default)]
pub(super) struct Scratch {
    /// The row as float32, where it is not.
    pub wide: Vec<f32>,
    maxima: Vec<f32>,
    some: Vec<f32>,
    weights: Vec<f64>,
    tokens: Vec<Token>,
}

/// A token by its logit and id: the order of these numbers is by descending logit, and by id among equals.
type Token = u64;

#[inline(always)]
fn token(id: usize, logit: f32) -> Token {
    // Zeros of both signs are equal.
    let bits = (logit + 0.0).to_bits();
    let ascending = if bits >> 31 == 1 { !bits } else { bits | 1 << 31 };
    u64::from(!ascending) << 32 | id as u64
}

#[inline(always)]
fn logit(of: Token) -> f32 {
    let ascending = !((of >> 32) as u32);
    f32::from_bits(if ascending >> 31 == 1 { ascending & !(1 << 31) } else { !ascending })
}

#[inline(always)]
fn id(of: Token) -> usize {
    of as u32 as usize
}

/// The draw of one token of a row by a number in [0, 1). `None` when the row has no probabilities. `FUSED`: as of [`super::Isa`].
pub(super) struct Draw<'a, T, const FUSED: bool> {
    pub row: &'a [T],
    pub kept: Kept,
    pub uniform: f64,
    pub scratch: &'a mut Scratch,
}

impl<T: Narrow, const FUSED: bool> Work for Draw<'_, T, FUSED> {
    type Output = Option<usize>;

    #[inline(always)]
    fn run(self) -> Option<usize> {
        let (row, scratch) = (self.row, self.scratch);
        let largest = largest(row, &mut scratch.maxima)?;
        let weight = |of: Token| weight::<FUSED>(logit(of), largest);
        match self.kept {
            Kept::Most(1) => return position(row, &scratch.maxima, largest),
            Kept::Most(k) if k <= scratch.maxima.len() / 4 || row.len() <= CHUNK => {
                likely(row, k, scratch);
                let kept = most(&mut scratch.tokens, k);
                let total = kept.iter().map(|&of| weight(of)).sum::<f64>();
                return drawn(kept, self.uniform * total, weight);
            }
            Kept::Most(_) => {
                weigh::<T, FUSED>(row, largest, &mut scratch.weights);
            }
            Kept::Reaching(p) => {
                let goal = p * weigh::<T, FUSED>(row, largest, &mut scratch.weights);
                let all = likely(row, LIKELY, scratch);
                let tokens = &mut scratch.tokens[..];
                if all || tokens.iter().map(|&of| weight(of)).sum::<f64>() >= goal {
                    let (last, total) = reached(tokens, goal, weight);
                    return drawn(&mut tokens[..=last], self.uniform * total, weight);
                }
            }
        }
        let (bins, tokens) = (Bins::new(row, largest), &mut scratch.tokens);
        let contents = match self.kept {
            Kept::Most(_) => bins.contents::<T, true>(row, &scratch.weights),
            Kept::Reaching(_) => bins.contents::<T, false>(row, &scratch.weights),
        };
        // The bin in which what can be drawn ends, what is before it, and what of it can be drawn.
        let (cut, before, kept, total) = match self.kept {
            Kept::Most(k) => {
                let (cut, fewer) = first(&contents.counts, |count| count >= k);
                let before: f64 = contents.masses[..cut].iter().sum();
                collect(bins, row, cut, tokens);
                let kept = most(tokens, k - fewer);
                (cut, before, kept.len(), before + kept.iter().map(|&of| weight(of)).sum::<f64>())
            }
            Kept::Reaching(p) => {
                let goal = p * contents.masses.iter().sum::<f64>();
                let (cut, before) = first(&contents.masses, |mass| mass >= goal);
                collect(bins, row, cut, tokens);
                let (last, total) = reached(tokens, goal - before, weight);
                (cut, before, last + 1, before + total)
            }
        };
        let goal = self.uniform * total;
        let (bin, less) = place(&contents, cut, goal);
        if bin == cut {
            return drawn(&mut tokens[..kept], goal - before, weight);
        }
        collect(bins, row, bin, tokens);
        drawn(tokens, goal - less, weight)
    }
}

/// The weight of a token: 1 for the most likely one, and 0 at minus infinity alone.
#[inline(always)]
fn weight<const FUSED: bool>(logit: f32, largest: f32) -> f64 {
    let weight = exp64::exp::<FUSED>(f64::from(logit) - f64::from(largest));
    if logit == f32::NEG_INFINITY { 0.0 } else { weight }
}

/// The largest logit, and the maximum of each chunk. `None` when a logit is NaN, or the largest is infinite.
#[inline(always)]
fn largest<T: Narrow>(row: &[T], maxima: &mut Vec<f32>) -> Option<f32> {
    const LANES: usize = 16;
    /// Infinity without its sign: what is more is NaN.
    const INFINITY: u32 = 0x7f80_0000;
    maxima.clear();
    let (mut wide, mut sizes) = ([0f32; CHUNK], [0u32; LANES]);
    for chunk in row.chunks(CHUNK) {
        let wide = T::wide(chunk, &mut wide);
        let mut most = [f32::NEG_INFINITY; LANES];
        let (groups, rest) = wide.as_chunks::<LANES>();
        let mut last = [f32::NEG_INFINITY; LANES];
        last[..rest.len()].copy_from_slice(rest);
        for group in groups.iter().chain([&last]) {
            for i in 0..LANES {
                most[i] = if group[i] > most[i] { group[i] } else { most[i] };
                sizes[i] = sizes[i].max(group[i].to_bits() & !(1 << 31));
            }
        }
        let mut width = LANES / 2;
        while width > 0 {
            for i in 0..width {
                most[i] = if most[i] > most[i + width] { most[i] } else { most[i + width] };
            }
            width /= 2;
        }
        maxima.push(most[0]);
    }
    let largest = maxima.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    (largest.is_finite() && sizes.iter().all(|&size| size <= INFINITY)).then_some(largest)
}

/// The weights of all tokens, and their sum.
#[inline(always)]
fn weigh<T: Narrow, const FUSED: bool>(row: &[T], largest: f32, weights: &mut Vec<f64>) -> f64 {
    const LANES: usize = 16;
    weights.resize(row.len(), 0.0);
    let (mut wide, mut sums) = ([0f32; BLOCK], [0f64; LANES]);
    for (block, weights) in row.chunks(BLOCK).zip(weights.chunks_mut(BLOCK)) {
        let wide = T::wide(block, &mut wide);
        for (to, logit) in weights.iter_mut().zip(wide) {
            *to = weight::<FUSED>(*logit, largest);
        }
        let (groups, rest) = weights.as_chunks::<LANES>();
        for group in groups {
            for i in 0..LANES {
                sums[i] += group[i];
            }
        }
        sums[0] += rest.iter().sum::<f64>();
    }
    sums.into_iter().sum()
}

/// The first token with this logit.
#[inline(always)]
fn position<T: Narrow>(row: &[T], maxima: &[f32], logit: f32) -> Option<usize> {
    let chunk = maxima.iter().position(|&most| most == logit)?;
    let mut wide = [0f32; CHUNK];
    let wide = T::wide(row.chunks(CHUNK).nth(chunk)?, &mut wide);
    wide.iter().position(|&x| x == logit).map(|i| chunk * CHUNK + i)
}

/// Collects the `count` most likely tokens and possibly others: those that are not less than the `count`th largest maximum of a
/// chunk. Says whether these are all that have a weight.
#[inline(always)]
fn likely<T: Narrow>(row: &[T], count: usize, scratch: &mut Scratch) -> bool {
    scratch.some.clone_from(&scratch.maxima);
    let mut least = f32::NEG_INFINITY;
    if count < scratch.some.len() {
        least = *scratch.some.select_nth_unstable_by(count - 1, |a, b| b.total_cmp(a)).1;
    }
    above(row, &scratch.maxima, least.max(f32::MIN), &mut scratch.tokens);
    least == f32::NEG_INFINITY
}

/// Collects the tokens of a bin.
#[inline(always)]
fn collect<T: Narrow>(bins: Bins, row: &[T], bin: usize, tokens: &mut Vec<Token>) {
    tokens.clear();
    bins.each_in(row, bin, |id, logit| tokens.push(token(id, logit)));
}

/// Collects the tokens with a logit of at least `least`.
#[inline(always)]
fn above<T: Narrow>(row: &[T], maxima: &[f32], least: f32, tokens: &mut Vec<Token>) {
    tokens.clear();
    let mut wide = [0f32; CHUNK];
    for (c, (chunk, _)) in row.chunks(CHUNK).zip(maxima).enumerate().filter(|(_, (_, most))| **most >= least) {
        let wide = T::wide(chunk, &mut wide);
        each_group(wide, |logit| logit >= least, |i| tokens.push(token(c * CHUNK + i, wide[i])));
    }
}

/// Calls `found` with each place that `is_it`. Sixteen are looked at together: few are.
#[inline(always)]
pub(super) fn each_group<N: Copy>(of: &[N], is_it: impl Fn(N) -> bool, mut found: impl FnMut(usize)) {
    let (groups, rest) = of.as_chunks::<16>();
    for (g, group) in groups.iter().enumerate() {
        let mut any = 0;
        for &one in group {
            any |= u32::from(is_it(one));
        }
        if any != 0 {
            (0..16).filter(|&i| is_it(group[i])).for_each(|i| found(g * 16 + i));
        }
    }
    let whole = of.len() - rest.len();
    (0..rest.len()).filter(|&i| is_it(rest[i])).for_each(|i| found(whole + i));
}

/// The `k` most likely of some tokens, or all.
#[inline(always)]
fn most(tokens: &mut [Token], k: usize) -> &mut [Token] {
    if k < tokens.len() {
        tokens.select_nth_unstable(k);
    }
    let k = k.min(tokens.len());
    &mut tokens[..k]
}

/// The first of some sums that `is_enough`, and the sum before it; the last if none is.
#[inline(always)]
fn first<N: Copy + Default + std::ops::Add<Output = N>>(of: &[N; BINS], is_enough: impl Fn(N) -> bool) -> (usize, N) {
    let mut before = N::default();
    for (bin, &next) in of.iter().enumerate() {
        if is_enough(before + next) {
            return (bin, before);
        }
        if bin + 1 < BINS {
            before = before + next;
        }
    }
    (BINS - 1, before)
}

/// The first bin in which the sum of weights exceeds a number, and the sum before it; the last one of any weight if none does.
#[inline(always)]
fn place(contents: &Contents, cut: usize, goal: f64) -> (usize, f64) {
    let (mut before, mut last) = (0.0, (0, 0.0));
    for (bin, mass) in contents.masses[..=cut].iter().enumerate().filter(|(_, mass)| **mass > 0.0) {
        last = (bin, before);
        if before + mass > goal {
            break;
        }
        before += mass;
    }
    last
}

/// Puts the tokens up to the first at which the sum of weights reaches `goal` before all others: its place, and the sum. The last
/// place if none does.
#[inline(always)]
fn reached(tokens: &mut [Token], goal: f64, weight: impl Fn(Token) -> f64) -> (usize, f64) {
    let (from, end, mut sum) = halved(tokens, |sum| sum >= goal, &weight);
    for (place, &of) in tokens[..end].iter().enumerate().skip(from) {
        sum += weight(of);
        if sum >= goal {
            return (place, sum);
        }
    }
    (end - 1, sum)
}

/// The first token, by descending weight, at which the sum of weights exceeds `goal`; the last one of any weight if none does.
#[inline(always)]
fn drawn(tokens: &mut [Token], goal: f64, weight: impl Fn(Token) -> f64) -> Option<usize> {
    let (from, end, mut sum) = halved(tokens, |sum| sum > goal, &weight);
    for &of in &tokens[from..end] {
        let weight = weight(of);
        sum += weight;
        if sum > goal && weight > 0.0 {
            return Some(id(of));
        }
    }
    tokens[..end].iter().copied().filter(|&of| weight(of) > 0.0).max().map(id)
}

/// Halves tokens until few are left in which a sum of weights `is_enough`, and sorts those: they are `from..end`, all before them are
/// more likely, and all after them less likely. Gives `from`, `end` and the sum before `from`.
#[inline(always)]
fn halved(
    tokens: &mut [Token],
    is_enough: impl Fn(f64) -> bool,
    weight: &impl Fn(Token) -> f64,
) -> (usize, usize, f64) {
    let (mut from, mut end, mut before) = (0, tokens.len(), 0.0);
    while end - from > FEW {
        let half = (end - from) / 2;
        let part = &mut tokens[from..end];
        part.select_nth_unstable(half);
        let sum = before + part[..half].iter().map(|&of| weight(of)).sum::<f64>();
        if is_enough(sum) {
            end = from + half;
        } else {
            (from, before) = (from + half, sum);
        }
    }
    tokens[from..end].sort_unstable();
    (from, end, before)
}
