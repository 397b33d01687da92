//! Which of two kernels is ahead, by what each takes the host and the device.

use lz_select::{Compared, Estimate, Rival, Side};

/// By medians; a tie with what plain torch runs is broken by host and device.
pub(crate) fn compare(a: &Rival<'_>, b: &Rival<'_>) -> Compared {
    match a.compare(b) {
        Compared::Tie if b.baseline && outruns(a, b) => Compared::Ahead,
        Compared::Tie if a.baseline && outruns(b, a) => Compared::Behind,
        compared => compared,
    }
}

/// A call takes max(host, device), and hosts take twice as long for the same work at one moment as at another: which of the two
/// shows changes. So `a` outruns `b` if on one side a + σ(a − b) + margin < b, and it leads there by a larger share of b than it
/// trails by on the other side.
fn outruns(a: &Rival<'_>, b: &Rival<'_>) -> bool {
    let sides = |e: &Estimate| e.sides.map(|s| (s.host, s.device));
    let (Some((a_host, a_device)), Some((b_host, b_device))) = (sides(a.estimate), sides(b.estimate)) else {
        return false;
    };
    let margin = a.margin_us(b) / a.estimate.median_us;
    let share = |a: &Side, b: &Side| 1.0 - a.median_us / b.median_us;
    let is_clear = |a: &Side, b: &Side| {
        let noise = a.apart_us.zip(b.apart_us).map(|(a, b)| a.hypot(b));
        noise.is_some_and(|noise| b.median_us - a.median_us > noise + margin * a.median_us)
    };
    let (host, device) = (share(&a_host, &b_host), share(&a_device, &b_device));
    host + device >= 0.0 && (is_clear(&a_host, &b_host) || is_clear(&a_device, &b_device))
}
