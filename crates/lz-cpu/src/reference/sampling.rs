//! Sampling from logits, and speculative verification.

use lz_model::{KernelArgs, KernelError, TensorView, indices};

use super::Reference;
use super::arguments::Arguments;
use super::indices::read_index;
use super::random::uniform;
use super::rows::{read_row, unravel};
use super::softmax::softmax;

/// Top-k sampling.
pub struct TopK;

/// Nucleus sampling.
pub struct TopP;

/// Speculative verification.
pub struct Speculative;

/// The uniform numbers of a call: those given, each in [0, 1), or else those of its seed.
pub(crate) struct Uniforms<'t> {
    given: Option<TensorView<'t>>,
    seed: i64,
}

impl<'t> Uniforms<'t> {
    /// Those of a call.
    pub fn of(args: &KernelArgs<'_, 't>) -> Result<Uniforms<'t>, KernelError> {
        let given = args.optional_tensor("uniform");
        for at in given.iter().flat_map(|given| indices(given.shape())) {
            let value = given.as_ref().map_or(0.0, |given| given.get(&at));
            if !(0.0..1.0).contains(&value) {
                let expected = "expected a number from 0 to below 1".into();
                return Err(KernelError::BadNumber { input: "uniform", at: at.to_vec(), value, expected });
            }
        }
        Ok(Uniforms { given, seed: args.int("seed") })
    }

    /// Number `counter`, in row-major order.
    pub fn get(&self, counter: i64) -> f64 {
        match &self.given {
            Some(given) => given.get(&unravel(counter, given.shape())),
            None => uniform(self.seed, counter as u64),
        }
    }
}

/// The first place at which the cumulative probability exceeds `u`; the last with any probability
/// where rounding leaves `u` beyond the sum. `None` when these are no probabilities at all: when
/// one is NaN, or all are zero.
fn draw(probabilities: &[f64], u: f64) -> Option<usize> {
    if probabilities.iter().any(|p| p.is_nan()) {
        return None;
    }
    let mut cumulative = 0.0;
    let exceeds = probabilities.iter().position(|p| {
        cumulative += p;
        cumulative > u
    });
    exceeds.filter(|&i| probabilities[i] > 0.0).or_else(|| probabilities.iter().rposition(|&p| p > 0.0))
}

/// Token ids by descending logit, the lower id first among equals.
fn descending(logits: &[f64]) -> Vec<usize> {
    let mut ids: Vec<usize> = (0..logits.len()).collect();
    // A stable sort; -0.0 and 0.0 are equal, and rows with a NaN are never drawn from.
    ids.sort_by(|&a, &b| logits[b].partial_cmp(&logits[a]).unwrap_or(std::cmp::Ordering::Equal));
    ids
}

/// Draws one token per row. `keep` gives the candidates of a row by descending logit, with their probabilities.
fn sample(args: &mut KernelArgs<'_, '_>, keep: impl Fn(&[f64]) -> (Vec<usize>, Vec<f64>)) -> Result<(), KernelError> {
    let (logits, uniforms) = (args.tensor("logits"), Uniforms::of(args)?);
    for row in 0..args.dim("rows") {
        let numbers = read_row(&logits, row);
        let drawn = if numbers.iter().any(|x| x.is_nan()) {
            None
        } else {
            let (ids, probabilities) = keep(&numbers);
            draw(&probabilities, uniforms.get(row)).map(|place| ids[place])
        };
        let at = unravel(row, args.outputs[0].shape());
        args.outputs[0].set(&at, drawn.map_or(-1.0, |id| id as f64));
    }
    Ok(())
}

impl Reference for TopK {
    const OPS: &'static [&'static str] = &["sampling.topk"];

    fn run(args: &mut KernelArgs<'_, '_>) -> Result<(), KernelError> {
        let k = args.dim("k").max(1) as usize;
        sample(args, |logits| {
            let mut ids = descending(logits);
            ids.truncate(k);
            let mut probabilities: Vec<f64> = ids.iter().map(|&id| logits[id]).collect();
            softmax(&mut probabilities);
            (ids, probabilities)
        })
    }
}

impl Reference for TopP {
    const OPS: &'static [&'static str] = &["sampling.topp"];

    fn run(args: &mut KernelArgs<'_, '_>) -> Result<(), KernelError> {
        let p = args.float("p");
        sample(args, |logits| {
            let mut ids = descending(logits);
            let mut probabilities: Vec<f64> = ids.iter().map(|&id| logits[id]).collect();
            softmax(&mut probabilities);
            let mut cumulative = 0.0;
            let reaches = probabilities.iter().position(|probability| {
                cumulative += probability;
                cumulative >= p
            });
            let kept = reaches.map_or(ids.len(), |last| last + 1);
            ids.truncate(kept);
            probabilities.truncate(kept);
            (ids, normalized(probabilities))
        })
    }
}

/// Weights to probabilities; all zeros give NaN.
fn normalized(mut weights: Vec<f64>) -> Vec<f64> {
    let total: f64 = weights.iter().sum();
    weights.iter_mut().for_each(|w| *w /= total);
    weights
}

impl Reference for Speculative {
    const OPS: &'static [&'static str] = &["sampling.speculative"];

    fn run(args: &mut KernelArgs<'_, '_>) -> Result<(), KernelError> {
        let [batch, draft, vocab] = ["batch", "draft", "vocab"].map(|name| args.dim(name));
        let (draft_ids, uniforms) = (args.tensor("draft_ids"), Uniforms::of(args)?);
        let (draft_probs, target_probs) = (args.tensor("draft_probs"), args.tensor("target_probs"));
        for b in 0..batch {
            let drafted = (0..draft).map(|i| read_index(&draft_ids, "draft_ids", &[b, i], vocab));
            let drafted: Vec<i64> = drafted.collect::<Result<_, _>>()?;
            let uniform = |i: i64| uniforms.get(b * (draft + 1) + i);
            let accepts =
                |(i, &t): (i64, &i64)| uniform(i) * draft_probs.get(&[b, i, t]) < target_probs.get(&[b, i, t]);
            let accepted = (0..).zip(&drafted).take_while(|&step| accepts(step)).count() as i64;

            let target: Vec<f64> = (0..vocab).map(|t| target_probs.get(&[b, accepted, t])).collect();
            let rejected = accepted < draft;
            let rest: Vec<f64> = (0..vocab)
                .zip(&target)
                .map(
                    |(t, target)| {
                        if rejected { positive_part(target - draft_probs.get(&[b, accepted, t])) } else { *target }
                    },
                )
                .collect();
            let weights = if rest.iter().all(|&w| w == 0.0) { target } else { rest };
            let drawn = draw(&normalized(weights), uniform(draft)).map_or(-1, |t| t as i64);

            let ids = drafted[..accepted as usize].iter().copied().chain([drawn]).chain(std::iter::repeat(-1));
            for (i, id) in (0..=draft).zip(ids) {
                args.outputs[0].set(&[b, i], id as f64);
            }
            args.outputs[1].set(&[b], accepted as f64);
        }
        Ok(())
    }
}

/// max(x, 0), except that NaN stays NaN.
fn positive_part(x: f64) -> f64 {
    if x < 0.0 { 0.0 } else { x }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{CallRefError, call};
    use lz_model::{DType, ParamValue, Tensor};

    fn sample_one(op: &str, logits: &[f64], u: f64, param: (&str, ParamValue)) -> f64 {
        let logits = Tensor::from_f64(DType::F64, &[logits.len() as i64], logits);
        let u = Tensor::from_f64(DType::F64, &[], &[u]);
        call(op, &[("logits", logits.view()), ("uniform", u.view())], &[param], None).unwrap()[0].1.to_f64()[0]
    }

    fn topk(logits: &[f64], k: i64, u: f64) -> f64 {
        sample_one("sampling.topk", logits, u, ("k", ParamValue::Int(k)))
    }

    fn topp(logits: &[f64], p: f64, u: f64) -> f64 {
        sample_one("sampling.topp", logits, u, ("p", ParamValue::Float(p)))
    }

    /// Logits of the probabilities 1/2, 1/8, 3/8.
    fn logits() -> [f64; 3] {
        [4f64.ln(), 0.0, 3f64.ln()]
    }

    #[test]
    fn one_of_k_is_the_largest_and_ties_go_to_the_lower_id() {
        for u in [0.0, 0.5, 0.999] {
            assert_eq!(topk(&[1.0, 5.0, 5.0, 2.0], 1, u), 1.0);
        }
        assert_eq!([0.4, 0.6].map(|u| topk(&[1.0, 5.0, 5.0, 2.0], 2, u)), [1.0, 2.0]);
    }

    #[test]
    fn top_k_draws_by_descending_probability() {
        // Among 4 and 3 of 8: the first has 4/7.
        assert_eq!([0.0, 0.57, 0.58, 0.99].map(|u| topk(&logits(), 2, u)), [0.0, 0.0, 2.0, 2.0]);
        assert_eq!(topk(&logits(), 99, 0.9), 1.0);
    }

    #[test]
    fn top_p_keeps_until_the_probability_is_reached() {
        // 1/2 alone reaches 0.4; with 0.6 it takes 3/8 along.
        assert_eq!(topp(&logits(), 0.4, 0.99), 0.0);
        assert_eq!([0.57, 0.58, 0.99].map(|u| topp(&logits(), 0.6, u)), [0.0, 2.0, 2.0]);
        assert_eq!([0.49, 0.51, 0.87, 0.88].map(|u| topp(&logits(), 1.0, u)), [0.0, 2.0, 2.0, 1.0]);
    }

    #[test]
    fn rows_that_are_no_distribution_give_minus_one() {
        let none = f64::NEG_INFINITY;
        for bad in [[f64::NAN, 1.0], [none, none], [f64::INFINITY, 0.0]] {
            assert_eq!((topk(&bad, 2, 0.5), topp(&bad, 0.9, 0.5)), (-1.0, -1.0), "{bad:?}");
        }
        // Excluded tokens are never drawn, not even by a number that leaves nothing else.
        let last = 1.0 - f64::EPSILON / 2.0;
        assert_eq!((topk(&[0.0, none], 2, last), topp(&[0.0, none], 1.0, last)), (0.0, 0.0));
    }

    #[test]
    fn a_uniform_number_outside_its_range_is_the_callers_mistake() {
        for bad in [1.0, -1e-9, f64::NAN, f64::INFINITY] {
            let logits = Tensor::from_f64(DType::F32, &[2, 2], &[0.0; 4]);
            let u = Tensor::from_f64(DType::F64, &[2], &[0.5, bad]);
            let params = [("k", ParamValue::Int(2))];
            let inputs = [("logits", logits.view()), ("uniform", u.view())];
            let CallRefError::Kernel(error) = call("sampling.topk", &inputs, &params, None).unwrap_err() else {
                panic!("the kernel refuses it")
            };
            assert!(error.is_callers_fault());
            assert_eq!(error.to_string(), format!("uniform[1] is {bad}, expected a number from 0 to below 1"));
        }
    }

    #[test]
    fn without_uniform_numbers_the_seed_decides() {
        let row = [0.0; 8];
        let logits = Tensor::from_f64(DType::F32, &[50, 8], &row.repeat(50));
        let run = |seed| {
            let params = [("k", ParamValue::Int(8)), ("seed", ParamValue::Int(seed))];
            call("sampling.topk", &[("logits", logits.view())], &params, None).unwrap()[0].1.to_f64()
        };
        assert_eq!(run(1), run(1));
        assert_ne!(run(1), run(2));
        assert!((0..8).all(|id| run(1).contains(&f64::from(id))));
    }

    #[test]
    fn draws_survive_rounding() {
        assert_eq!(draw(&[0.3, 0.7, 0.0], 1.0), Some(1));
        assert_eq!(draw(&[0.0, 1.0], -1.0), Some(1));
        assert_eq!(draw(&[0.0, 0.0], 0.0), None);
    }

    fn verify(ids: &[i64], draft: &[f64], target: &[f64], u: &[f64]) -> Result<(Vec<f64>, f64), CallRefError> {
        let n = ids.len() as i64;
        let ids = Tensor::from_ints(DType::I32, &[1, n], ids);
        let draft = Tensor::from_f64(DType::F64, &[1, n, 2], draft);
        let target = Tensor::from_f64(DType::F64, &[1, n + 1, 2], target);
        let u = Tensor::from_f64(DType::F64, &[1, n + 1], u);
        let inputs = [
            ("draft_ids", ids.view()),
            ("draft_probs", draft.view()),
            ("target_probs", target.view()),
            ("uniform", u.view()),
        ];
        let out = call("sampling.speculative", &inputs, &[], None)?;
        Ok((out[0].1.to_f64(), out[1].1.to_f64()[0]))
    }

    #[test]
    fn drafts_are_kept_until_the_first_rejection() {
        let (draft, target) = ([0.5, 0.5, 0.5, 0.5], [0.5, 0.5, 0.2, 0.8, 0.3, 0.7]);
        // Both pass (0.9 * 0.5 < 0.5, 0.3 * 0.5 < 0.2); the extra row then gives token 1 beyond 0.3.
        assert_eq!(verify(&[1, 0], &draft, &target, &[0.9, 0.3, 0.4]).unwrap(), (vec![1., 0., 1.], 2.));
        // The second fails (0.5 * 0.5 > 0.2); what is left of target - draft is token 1 alone.
        assert_eq!(verify(&[1, 0], &draft, &target, &[0.9, 0.5, 0.0]).unwrap(), (vec![1., 1., -1.], 1.));
        // Nothing is left of a target below the draft everywhere: draw from the target itself.
        let below = [0.2, 0.3, 0.2, 0.8, 0.3, 0.7];
        assert_eq!(verify(&[1, 0], &draft, &below, &[0.9, 0.5, 0.6]).unwrap(), (vec![1., -1., -1.], 0.));
        assert_eq!(verify(&[], &[], &[0.3, 0.7], &[0.2]).unwrap(), (vec![0.], 0.));
        assert!(
            matches!(verify(&[2], &[0.5; 2], &[0.5; 4], &[0.0; 2]), Err(CallRefError::Kernel(e)) if e.is_callers_fault())
        );
    }
}
