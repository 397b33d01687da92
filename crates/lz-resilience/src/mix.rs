//! One hash, the same in every process and every version.

/// SplitMix64's output function, after its increment (Steele, Lea, Flood 2014).
///
/// Which calls a canary takes is decided by it, so it never changes.
pub(crate) fn mix(x: u64) -> u64 {
    let z = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ z >> 31
}

#[cfg(test)]
mod tests {
    #[test]
    fn it_is_splitmix64() {
        // The generator's first outputs for the seeds 0 and 1234567, as published with it.
        assert_eq!(super::mix(0), 0xe220_a839_7b1d_cdaf);
        assert_eq!(super::mix(1_234_567), 6_457_827_717_110_365_317);
    }
}
