use super::*;
use crate::contest::Candidate;
use lz_model::CallSpec;

fn contest(op: &str, kernels: &[&str]) -> Contest {
    let call = CallSpec::new(op);
    let candidates = kernels
        .iter()
        .enumerate()
        .map(|(i, name)| Candidate::ok(*name, 1.0 + i as f64, 9.0, 0.0, 5).baseline(name.starts_with("torch")));
    candidates.fold(Contest::new(call, "d", "eager"), Contest::candidate).settled(None)
}

#[test]
fn rivals_have_letters_of_their_own_and_a_kernel_keeps_its_colour() {
    let many: Vec<String> = (0..40).map(|i| format!("x.k{i:02}")).collect();
    let many: Vec<&str> = many.iter().map(String::as_str).collect();
    let ops = [
        contest("a", &["torch.a", "fast.a", "shared"]),
        contest("b", &["other.b", "shared", "torch.b", "torch.c"]),
        contest("c", &many),
    ];
    let colors = Colors::of(&ops);
    for op in &ops {
        let marks: BTreeSet<&str> =
            op.candidates.iter().map(|c| colors.get(&c.kernel).unwrap().mark.as_str()).collect();
        assert_eq!(marks.len(), op.candidates.len(), "{}", op.op);
    }
    let look = |kernel: &str| colors.get(kernel).map(|p| (p.mark.as_str(), p.ink, p.hatched)).unwrap();
    assert_eq!(look("torch.a"), ("D", 0, false));
    // Two baselines of one operation are both grey; hatching and a number distinguish them.
    assert_eq!((look("torch.b"), look("torch.c")), (("D", 0, false), ("D2", 0, true)));
    assert_eq!(look("fast.a"), ("A", 1, false));
    assert_eq!((look("x.k00"), look("x.k07"), look("x.k23").0), (("A", 1, false), ("J", 1, true), "A2"));
}

fn channels(hex: &str) -> [f64; 3] {
    let channel = |i: usize| f64::from(u8::from_str_radix(&hex[i..i + 2], 16).unwrap()) / 255.0;
    [1, 3, 5].map(channel).map(|c| if c <= 0.04045 { c / 12.92 } else { ((c + 0.055) / 1.055).powf(2.4) })
}

/// The contrast ratio of WCAG 2.
fn contrast(a: &str, b: &str) -> f64 {
    let luminance = |hex| {
        let [r, g, b] = channels(hex);
        0.2126 * r + 0.7152 * g + 0.0722 * b
    };
    let (a, b): (f64, f64) = (luminance(a), luminance(b));
    (a.max(b) + 0.05) / (a.min(b) + 0.05)
}

/// The colour in CIE Lab as an eye without one kind of cone sees it (Machado et al. 2009).
fn seen(hex: &str, cones: &[[f64; 3]; 3]) -> [f64; 3] {
    let rgb = channels(hex);
    let [r, g, b] = cones.map(|row| row.iter().zip(rgb).map(|(m, c)| m * c).sum::<f64>().clamp(0.0, 1.0));
    let f = |t: f64| if t > 0.008856 { t.cbrt() } else { 7.787 * t + 16.0 / 116.0 };
    let x = f((0.4124 * r + 0.3576 * g + 0.1805 * b) / 0.9505);
    let y = f(0.2126 * r + 0.7152 * g + 0.0722 * b);
    let z = f((0.0193 * r + 0.1192 * g + 0.9505 * b) / 1.089);
    [116.0 * y - 16.0, 500.0 * (x - y), 200.0 * (y - z)]
}

const EYES: [[[f64; 3]; 3]; 4] = [
    [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]],
    [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
];

#[test]
fn inks_stay_apart_for_every_eye_and_text_on_them_is_readable() {
    for (dark, surface) in SURFACES.iter().enumerate() {
        let hex = |ink: &Ink| if dark == 1 { ink.dark } else { ink.light };
        for (i, ink) in INKS.iter().enumerate() {
            let text = TEXTS[usize::from(dark == 0 && ink.white_text)];
            assert!(contrast(hex(ink), surface) >= 3.0, "{} on {surface}", hex(ink));
            assert!(contrast(hex(ink), text) >= 4.5, "{text} on {}: {}", hex(ink), contrast(hex(ink), text));
            for other in &INKS[..i] {
                for eye in &EYES {
                    let (a, b) = (seen(hex(ink), eye), seen(hex(other), eye));
                    let apart = a.iter().zip(b).map(|(p, q)| (p - q).powi(2)).sum::<f64>().sqrt();
                    assert!(apart >= 10.0, "{} and {}: {apart}", hex(ink), hex(other));
                }
            }
        }
    }
}
