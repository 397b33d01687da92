//! One attention out of two over different keys.

use lz_model::{KernelArgs, KernelError, indices};

use super::Reference;
use super::arguments::Arguments;

/// Weighs two results by the sums of their softmaxes.
pub struct Merge;

impl Reference for Merge {
    const OPS: &'static [&'static str] = &["attention.merge"];

    fn run(args: &mut KernelArgs<'_, '_>) -> Result<(), KernelError> {
        let [out_a, lse_a, out_b, lse_b] = ["out_a", "lse_a", "out_b", "lse_b"].map(|name| args.tensor(name));
        let width = args.dim("v_dim");
        let mut outputs = args.outputs.iter_mut();
        let (output, logarithms) = (outputs.next().expect("an output"), outputs.next().expect("two outputs"));
        for row in indices(lse_a.shape()) {
            let (a, b) = (lse_a.get(&row), lse_b.get(&row));
            let lse = log_add(a, b);
            logarithms.set(&row, lse);
            for d in 0..width {
                let mut at = row.clone();
                at.push(d);
                // A part that attended to nothing takes no part, whatever it holds.
                let part = |of: f64, value: f64| if of == f64::NEG_INFINITY { 0.0 } else { (of - lse).exp() * value };
                output.set(&at, part(a, out_a.get(&at)) + part(b, out_b.get(&at)));
            }
        }
        Ok(())
    }
}

/// log(exp(a) + exp(b))
fn log_add(a: f64, b: f64) -> f64 {
    let most = a.max(b);
    if a.is_nan() || b.is_nan() {
        f64::NAN
    } else if most == f64::NEG_INFINITY {
        most
    } else {
        most + ((a - most).exp() + (b - most).exp()).ln()
    }
}

#[cfg(test)]
mod tests {
    use crate::call;
    use lz_model::{DType, Tensor};

    fn merge(a: f64, lse_a: f64, b: f64, lse_b: f64) -> (f64, f64) {
        let (out_a, out_b) = (Tensor::from_f64(DType::F64, &[1, 1], &[a]), Tensor::from_f64(DType::F64, &[1, 1], &[b]));
        let (la, lb) = (Tensor::from_f64(DType::F32, &[1], &[lse_a]), Tensor::from_f64(DType::F32, &[1], &[lse_b]));
        let inputs = [("out_a", out_a.view()), ("lse_a", la.view()), ("out_b", out_b.view()), ("lse_b", lb.view())];
        let given = call("attention.merge", &inputs, &[], None).unwrap();
        (given[0].1.to_f64()[0], given[1].1.to_f64()[0])
    }

    #[test]
    fn parts_weigh_as_much_as_their_sums() {
        let (out, lse) = merge(8.0, 0.0, 4.0, 3f64.ln());
        assert!((out - 5.0).abs() < 1e-6 && (lse - 4f64.ln()).abs() < 1e-6);
        let none = f64::NEG_INFINITY;
        assert_eq!(merge(f64::NAN, none, 4.0, 1.0), (4.0, 1.0));
        assert_eq!(merge(1.0, none, 4.0, none), (0.0, none));
        assert!(merge(1.0, f64::NAN, 4.0, 0.0).0.is_nan());
    }
}
