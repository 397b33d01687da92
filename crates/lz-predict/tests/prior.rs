//! What was measured on other machines: which devices it is about, how it is scaled, and how far it may be off.

use lz_model::{BindRules, CallSpec, Catalog, Context, DType, DeviceIx, DeviceSpec, Facts, KernelDescriptor, Layout};
use lz_model::{Platform, Query};
use lz_predict::{Prior, PriorError, PriorFile, PriorTime, PriorTimes};
use lz_select::{Compared, Estimate, EstimateKind, PerfSource, Rival};

fn gpu(name: &str, sm: u32, bandwidth_gbs: f64) -> DeviceSpec {
    let mut device = DeviceSpec::new(Platform::Cuda, name);
    (device.sm, device.bandwidth_gbs) = (Some(sm), Some(bandwidth_gbs));
    device.peak_tflops.insert("bfloat16".into(), 1000.0);
    device
}

fn rms(rows: i64, hidden: i64, dtype: DType) -> CallSpec {
    CallSpec::new("norm.rms").tensor("x", dtype, &[rows, hidden])
}

fn attention(seq: i64, layout: Layout) -> CallSpec {
    let shape = |heads: i64| match layout {
        Layout::Bshd => [1, seq, heads, 128],
        _ => [1, heads, seq, 128],
    };
    let mut call = CallSpec::new("attention.causal");
    for (name, heads) in [("query", 32), ("key", 8), ("value", 8)] {
        call = call.tensor(name, DType::Bf16, &shape(heads));
    }
    call.layout = Some(layout);
    call
}

/// A call with the times of plain torch's kernel and of another, host and device.
fn times(call: CallSpec, plain: (f64, f64), other: (f64, f64)) -> PriorTimes {
    let time = |kernel, (host, device): (f64, f64)| PriorTime::Parts(kernel, host.max(device), 0.1, host, device);
    PriorTimes { call, graph: false, threads: 0, baseline: Some(0), times: vec![time(0, plain), time(1, other)] }
}

fn file(calls: Vec<PriorTimes>) -> PriorFile {
    let mut file = PriorFile::new(gpu("Big", 90, 4000.0), 0, 1);
    file.kernels = vec![("torch.plain".into(), "2.0".into()), ("lib.other".into(), "1".into())];
    file.calls = calls;
    file
}

fn query(call: &CallSpec, context: Context) -> Query {
    let named = call.named(DeviceIx(0), context);
    Catalog::get().resolve(&call.op, &named, &BindRules::default(), |_| None).unwrap().1.query
}

fn kernel(id: &str, version: &str) -> KernelDescriptor {
    let mut kernel = KernelDescriptor::new(id, "norm.rms", "lib");
    kernel.version = version.into();
    kernel
}

fn ask(prior: &Prior, device: &DeviceSpec, kernel: &KernelDescriptor, query: &Query) -> Option<Estimate> {
    prior.estimate(kernel, &Facts { op: Catalog::get().op(query.op()), query, device })
}

/// How far a time may be off, relative.
fn off(estimate: Option<Estimate>) -> f64 {
    let estimate = estimate.unwrap();
    assert_eq!((estimate.kind, estimate.trusted), (EstimateKind::Prior, true));
    estimate.apart_us.unwrap() / estimate.median_us
}

#[test]
fn it_is_about_devices_of_the_same_generation_and_no_others() {
    let prior = file(vec![times(rms(64, 1024, DType::Bf16), (5.0, 20.0), (5.0, 10.0))]);
    let devices = [gpu("Big", 90, 4000.0), gpu("Small", 90, 2000.0), gpu("Old", 80, 2000.0), gpu("Big", 90, 4000.0)];
    let known = Prior::new(std::slice::from_ref(&prior), &devices);
    let at = |ix: u16| {
        let query = query(&rms(64, 1024, DType::Bf16), Context::default()).with_device(DeviceIx(ix));
        ask(&known, &devices[usize::from(ix)], &kernel("lib.other", "1"), &query).map(|e| e.median_us)
    };
    assert_eq!([at(0), at(1), at(2), at(3)], [Some(10.0), Some(20.0), None, Some(10.0)]);
    assert_eq!(known.origin(DeviceIx(1)).as_deref(), Some("Big, torch 2.0"));
    assert_eq!(known.origin(DeviceIx(2)), None);
    // Of a CPU with another instruction set it says something, and is less certain.
    let cpu = |feature: &str| {
        let mut cpu = DeviceSpec::new(Platform::Cpu, feature);
        (cpu.vendor, cpu.features) = ("intel".into(), vec![feature.into()]);
        cpu
    };
    let of_cpu = PriorFile { device: cpu("avx512f"), ..prior };
    let here = [cpu("avx512f"), cpu("avx2")];
    let known = Prior::new(&[of_cpu], &here);
    let certain = |ix: u16| {
        let query = query(&rms(64, 1024, DType::Bf16), Context { threads: 4, ..Context::default() });
        off(ask(&known, &here[usize::from(ix)], &kernel("lib.other", "1"), &query.with_device(DeviceIx(ix))))
    };
    assert!((certain(1) - certain(0) - 0.3).abs() < 1e-9);
    let mut arm = cpu("neon");
    arm.vendor = "arm".into();
    assert!(!PriorFile::new(cpu("avx512f"), 0, 1).is_about(&arm));
}

#[test]
fn the_device_is_scaled_by_the_roofline_and_the_host_is_not() {
    // Memory-bound: half the bandwidth takes twice as long.
    let prior = file(vec![
        times(rms(4096, 4096, DType::Bf16), (5.0, 40.0), (5.0, 30.0)),
        times(rms(1, 4096, DType::Bf16), (12.0, 2.0), (6.0, 2.0)),
    ]);
    let here = [gpu("Small", 90, 2000.0)];
    let known = Prior::new(&[prior], &here);
    let us = |id: &str, rows: i64| {
        ask(&known, &here[0], &kernel(id, "1"), &query(&rms(rows, 4096, DType::Bf16), Context::default()))
            .unwrap()
            .median_us
    };
    assert!((us("lib.other", 4096) - 60.0).abs() < 1e-9);
    assert!((us("lib.other", 1) - 6.0).abs() < 1e-9, "the host sets the pace here as there");
}

#[test]
fn a_tie_with_plain_torch_is_broken_by_what_each_takes_the_device() {
    let call = rms(64, 1024, DType::Bf16);
    let here = gpu("Big", 90, 4000.0);
    let asked = query(&call, Context::default());
    let compared = |plain, other, noise| {
        let mut measured = times(call.clone(), plain, other);
        for time in &mut measured.times {
            if let PriorTime::Parts(_, _, spread, ..) = time {
                *spread = noise;
            }
        }
        let prior = Prior::new(&[file(vec![measured])], std::slice::from_ref(&here));
        let estimates = [("torch.plain", "2.0"), ("lib.other", "1")]
            .map(|(id, version)| ask(&prior, &here, &kernel(id, version), &asked).unwrap());
        let rival = |at: usize| Rival { estimate: &estimates[at], baseline: at == 0 };
        (rival(1).compare(&rival(0)), prior.compare(&rival(1), &rival(0)))
    };
    // Both wait for their hosts, and one keeps its device half as long.
    assert_eq!(compared((10.0, 9.5), (8.5, 5.0), 1.5), (Compared::Tie, Compared::Ahead));
    assert_eq!(compared((10.0, 9.5), (8.5, 9.3), 1.5), (Compared::Tie, Compared::Tie));
    // The host is another one here.
    assert_eq!(compared((5.0, 20.0), (3.0, 19.9), 0.1), (Compared::Tie, Compared::Tie));
}

#[test]
fn what_is_other_here_makes_it_less_certain() {
    let prior = file(vec![times(rms(64, 1024, DType::Bf16), (5.0, 20.0), (5.0, 10.0))]);
    let big = [gpu("Big", 90, 4000.0)];
    let known = Prior::new(std::slice::from_ref(&prior), &big);
    let at = |version: &str, call: &CallSpec| {
        off(ask(&known, &big[0], &kernel("lib.other", version), &query(call, Context::default())))
    };
    let same = at("1", &rms(64, 1024, DType::Bf16));
    assert!((0.05..0.07).contains(&same), "{same}");
    assert!(at("1.1", &rms(64, 1024, DType::Bf16)) > same + 0.049);
    assert!(at("1", &rms(64, 1024, DType::F16)) > same + 0.049, "float16 goes by bfloat16");
    assert!(at("1", &rms(64, 2048, DType::Bf16)) > same + 0.09, "a doubling away");
    let small = [gpu("Small", 90, 2000.0)];
    let scaled = Prior::new(&[prior], &small);
    let call = query(&rms(64, 1024, DType::Bf16), Context::default());
    assert!(off(ask(&scaled, &small[0], &kernel("lib.other", "1"), &call)) > same + 0.09);
}

#[test]
fn the_nearest_number_of_threads_counts() {
    let with_threads =
        |threads, other| PriorTimes { threads, ..times(rms(64, 1024, DType::Bf16), (0.0, 20.0), (0.0, other)) };
    let mut prior = file(vec![with_threads(1, 10.0), with_threads(8, 40.0)]);
    prior.device = DeviceSpec::new(Platform::Cpu, "cpu");
    let here = [prior.device.clone()];
    let known = Prior::new(&[prior], &here);
    let at = |threads| {
        let query = query(&rms(64, 1024, DType::Bf16), Context { threads, ..Context::default() });
        ask(&known, &here[0], &kernel("lib.other", "1"), &query)
    };
    let us = |threads| at(threads).unwrap().median_us;
    assert_eq!([us(1), us(2), us(4), us(64)], [10.0, 10.0, 40.0, 40.0]);
    assert!((off(at(64)) - off(at(8)) - 0.3).abs() < 1e-9, "10% for each of three doublings");
}

#[test]
fn another_layout_and_views_go_by_what_was_measured_of_the_usual_one() {
    let prior = file(vec![times(attention(1024, Layout::Bhsd), (5.0, 20.0), (5.0, 10.0))]);
    let big = [gpu("Big", 90, 4000.0)];
    let known = Prior::new(&[prior], &big);
    for (layout, wanted) in [(Layout::Bhsd, 10.0), (Layout::Bshd, 10.0)] {
        let query = query(&attention(1024, layout), Context::default());
        let found = ask(&known, &big[0], &kernel("lib.other", "1"), &query).unwrap();
        assert!((found.median_us - wanted).abs() < 1e-9, "{layout}");
    }
}

#[test]
fn the_form_that_was_measured_counts_before_the_usual_one() {
    let strided = |rows: i64| {
        let mut call = rms(rows, 1024, DType::Bf16);
        call.tensors.get_mut("x").unwrap().strides = Some(vec![4096, 1]);
        call
    };
    // The strided call comes first in the file.
    let prior = file(vec![
        times(strided(64), (5.0, 60.0), (5.0, 70.0)),
        times(rms(64, 1024, DType::Bf16), (5.0, 20.0), (5.0, 10.0)),
    ]);
    let big = [gpu("Big", 90, 4000.0)];
    let known = Prior::new(std::slice::from_ref(&prior), &big);
    let us = |known: &Prior, kernel: &KernelDescriptor, call: &CallSpec| {
        ask(known, &big[0], kernel, &query(call, Context::default())).map(|e| e.median_us)
    };
    let other = kernel("lib.other", "1");
    assert_eq!(us(&known, &other, &rms(64, 1024, DType::Bf16)), Some(10.0));
    assert_eq!(us(&known, &other, &strided(64)), Some(70.0));
    // Where only the usual form was measured, that counts; but what a copy of the operand takes is not known.
    let usual = Prior::new(&[PriorFile { calls: prior.calls[1..].to_vec(), ..prior }], &big);
    assert_eq!(us(&usual, &other, &strided(64)), Some(10.0));
    let mut copies = kernel("lib.other", "1");
    copies.layouts = vec![Layout::Contiguous];
    assert_eq!(us(&usual, &copies, &strided(64)), None);
    assert_eq!(us(&usual, &copies, &rms(64, 1024, DType::Bf16)), Some(10.0));
}

#[test]
fn what_plain_torch_runs_here_may_have_another_name() {
    let prior = file(vec![times(rms(64, 1024, DType::Bf16), (5.0, 20.0), (5.0, 10.0))]);
    let big = [gpu("Big", 90, 4000.0)];
    let known = Prior::new(&[prior], &big);
    let call = query(&rms(64, 1024, DType::Bf16), Context::default());
    let mut literal = kernel("torch.literal", "9");
    assert_eq!(ask(&known, &big[0], &literal, &call), None);
    literal.baseline = true;
    assert_eq!(ask(&known, &big[0], &literal, &call).map(|e| e.median_us), Some(20.0));
}

#[test]
fn files_are_read_as_they_were_written_and_others_are_refused() {
    let mut written = file(vec![times(rms(64, 1024, DType::Bf16), (5.0, 20.0), (5.0, 10.0))]);
    written.calls.push(PriorTimes {
        graph: true,
        threads: 4,
        times: vec![PriorTime::Whole(0, 3.0, 0.5)],
        ..written.calls[0].clone()
    });
    let text = written.to_text().unwrap();
    assert_eq!(text.lines().count(), 2 + written.calls.len(), "a call in each line");
    assert_eq!(PriorFile::parse(&text).unwrap(), written);
    assert!(matches!(
        PriorFile::parse(&text.replacen("\"format\":1", "\"format\":2", 1)),
        Err(PriorError::Format { found: 2 })
    ));
    assert!(matches!(PriorFile::parse("[]"), Err(PriorError::Parse(_))));
    assert!(matches!(PriorFile::parse(&text[..text.len() / 2]), Err(PriorError::Parse(_))));
}

#[test]
fn what_ships_can_be_read_is_small_and_says_something() {
    let mut names = Vec::new();
    for (name, file) in PriorFile::shipped() {
        names.push(name);
        assert!(file.device.uuid.is_none(), "{name} names one very device");
        assert!(file.calls.len() > 20 && file.runs > 0, "{name}");
        for times in &file.calls {
            assert!(
                times.times.len() > 1 && times.medians().all(|(at, us)| at < file.kernels.len() && us > 0.0),
                "{name}"
            );
            assert!(Catalog::get().find(&times.call.op).is_ok(), "{name}: {}", times.call);
        }
        let device = [file.device.clone()];
        let prior = Prior::shipped(&device);
        // Every call it has is one it can be asked about.
        for times in &file.calls {
            let context = Context { capturing: times.graph, threads: times.threads, ..Context::default() };
            let (id, version) = &file.kernels[times.medians().next().unwrap().0];
            let found = ask(&prior, &device[0], &kernel(id, version), &query(&times.call, context));
            assert!(found.is_some_and(|e| e.trusted && e.median_us > 0.0), "{name}: {}", times.call);
        }
    }
    let files = || std::fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/priors")).unwrap().map(Result::unwrap);
    let mut there: Vec<String> =
        files().map(|file| file.path().file_stem().unwrap().to_str().unwrap().into()).collect();
    there.sort();
    assert_eq!(names, there, "every file ships, and can be read");
    let bytes: u64 = files().map(|file| file.metadata().unwrap().len()).sum();
    assert!(bytes <= 2 << 20, "{bytes} bytes of priors ship; 2 MiB may");
}
