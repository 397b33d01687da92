//! Convolutions as products of matrices.

use lz_abi::{Args, DType, KernelError};

use super::super::loops::Loop;
use super::super::matmul::epilogue::Epilogue;
use super::super::matmul::float::{self, Source};
use super::super::matmul::operand::Matrix;
use super::super::matmul::{self, Products, Sizes};
use super::super::windows::Geometry;
use super::super::windows::planes::SLACK;
use super::super::windows::source::Windows;
use super::Call;

/// Bytes of the planes of a pass, where an image has no more: they are read again by every group of outputs.
const PASS: usize = 8 << 20;
/// Bytes of planes below which one thread copies them all.
const ONE_THREAD: usize = 64 << 10;

/// Images of a pass.
fn pass(image: usize, images: usize) -> usize {
    (PASS / (image * size_of::<f32>()).max(1)).clamp(1, images.max(1))
}

/// Bytes of scratch memory: for so many images, channels, and outputs and channels of a group.
pub fn scratch(
    windows: &Geometry,
    (images, channels, outputs): (usize, usize, usize),
    depth: usize,
    threads: usize,
) -> usize {
    // Fewer channels make larger passes, but none is larger than this.
    let image = channels * windows.len();
    let planes = (image * images).min(image.max(PASS / size_of::<f32>())) + SLACK;
    let sizes = Sizes { m: outputs, n: windows.windows() * images, k: depth * windows.taps() };
    let taps = (windows.taps() * size_of::<i64>()).next_multiple_of(64);
    taps + (planes * size_of::<f32>()).next_multiple_of(64) + float::scratch(sizes, threads)
}

/// Whether windows can be read where x is. Without channels nothing is read.
fn reads_in_place(call: &Call) -> bool {
    let windows = &call.windows;
    call.channels == 0
        || call.x.dtype == DType::F32
            && call.x.steps.iter().all(|&step| step >= 0)
            && call.x.steps[3] == 1
            && windows.padding == [0; 2]
            && windows.stride[1] == 1
}

pub fn run<I: Products>(args: &mut Args<'_, '_>, call: &Call) -> Result<(), KernelError> {
    let threads = args.threads();
    let mut windows = call.windows;
    let in_place = reads_in_place(call);
    let row = if in_place { call.x.steps[2] as usize } else { windows.row() };
    let taps = args.workspace().take::<i64>(windows.taps())?;
    taps.iter_mut().enumerate().for_each(|(i, to)| *to = windows.tap(i, row) as i64);
    let taps = &*taps;
    let (depth, per_group) = (call.channels / call.groups, call.outputs / call.groups);
    // Windows of one element are one row of them.
    let mut step = row * windows.stride[0];
    if windows.taps() == 1 && step == windows.output[1] {
        windows.output = [1, windows.windows()];
        step = 0;
    }
    let image = if in_place { 0 } else { call.channels * windows.len() };
    let at_once = if in_place { call.images } else { pass(image, call.images) };
    let planes = args.workspace().take::<f32>(if in_place { 0 } else { at_once * image + SLACK })?;
    let sizes =
        |images: usize| Sizes { m: per_group, n: images * call.windows.windows(), k: depth * call.windows.taps() };
    let memory = args.workspace().take::<f32>(float::scratch(sizes(at_once), threads.count()) / size_of::<f32>())?;
    for first in (0..call.images).step_by(at_once) {
        let images = at_once.min(call.images - first);
        let source = if in_place {
            let [n, c, y, _] = call.x.steps.map(|step| step as usize);
            let [height, width] = call.windows.input;
            let readable = match call.channels {
                0 => 0,
                channels => (call.images - 1) * n + (channels - 1) * c + (height - 1) * y + width,
            };
            let steps = [n, c, step];
            Windows { start: call.x.start.cast(), readable, steps, output: windows.output, taps }
        } else {
            let parts = images * call.channels;
            let workers = if parts * image / call.channels.max(1) * size_of::<f32>() < ONE_THREAD { 1 } else { parts };
            let plane = call.windows.len();
            let (here, per) = (&mut planes[..parts * plane], parts.div_ceil(workers));
            threads.each_chunk(here, plane * per, |part, to| {
                for (i, to) in to.chunks_exact_mut(plane).enumerate() {
                    let at = part * per + i;
                    let place = (first + at / call.channels, at % call.channels);
                    // SAFETY: `run_on` says that the CPU has the instructions; x has these planes.
                    unsafe { call.x.copy::<I::Simple>(place, &call.windows, 0.0, to) };
                }
            });
            let steps = [image, plane, step];
            Windows { start: planes.as_ptr(), readable: planes.len(), steps, output: windows.output, taps }
        };
        let out = call.out.at((first * call.outputs * call.windows.windows()) as isize);
        product::<I>(call, source, out, sizes(images), threads, memory);
    }
    Ok(())
}

/// The product of every group with the windows of some images.
fn product<I: Products>(
    call: &Call,
    source: Windows<'_>,
    out: Matrix,
    sizes: Sizes,
    threads: lz_abi::Threads<'_>,
    memory: &mut [f32],
) {
    let (per_group, windows) = (sizes.m, call.windows.windows());
    let mut batch = Loop::<4>::one();
    // The outputs of a group, its weights, its channels, its biases.
    let bias = call.bias.map_or(0, |bias| bias.column);
    let channels = call.channels / call.groups * source.steps[1];
    let steps = [per_group * windows, per_group * call.weight.row as usize, channels].map(|step| step as isize);
    batch.push(call.groups, [steps[0], steps[1], steps[2], per_group as isize * bias]);
    let epilogue = Epilogue {
        alpha: 1.0,
        beta: 0.0,
        activation: call.activation,
        // A number for each row.
        bias: call.bias.map(|bias| Matrix { row: bias.column, column: 0, ..bias }),
        c: out,
        out,
        image: windows,
        images: (call.outputs * windows) as isize,
    };
    let call = matmul::Call { sizes, a: call.weight, b: Source::Windows(source), batch, epilogue };
    float::run_in::<I>(threads, memory, &call);
}
