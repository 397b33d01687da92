//! Random numbers as a function of a seed and a counter: any order of evaluation gives the same.

/// 2^64 divided by the golden ratio, the increment of SplitMix64.
const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// The finalizer of SplitMix64: a bijection in which every bit depends on every other.
fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Number `counter` of the sequence of `seed`, uniform in [0, 1): the SplitMix64 stream whose
/// state starts at the mixed seed, so that neighbouring seeds have unrelated streams.
pub fn uniform(seed: i64, counter: u64) -> f64 {
    let start = mix((seed as u64).wrapping_add(GOLDEN));
    let bits = mix(start.wrapping_add(counter.wrapping_add(1).wrapping_mul(GOLDEN)));
    (bits >> 11) as f64 / (1u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_spread_evenly_and_depend_on_both_arguments() {
        let n = 10_000;
        for seed in [0, 1, -1, i64::MAX] {
            let mut tenths = [0; 10];
            for counter in 0..n {
                let u = uniform(seed, counter);
                assert!((0.0..1.0).contains(&u));
                tenths[(u * 10.0) as usize] += 1;
            }
            assert!(tenths.iter().all(|&count| (900..1100).contains(&count)), "{seed}: {tenths:?}");
        }
        assert_ne!(uniform(0, 0), uniform(1, 0));
        assert_ne!(uniform(0, 0), uniform(0, 1));
        assert_eq!(uniform(3, 4), uniform(3, 4));
    }
}
