//! Convolutions of groups of one channel: plane by plane.

use std::marker::PhantomData;

use lz_abi::{Args, KernelError};

use super::super::matmul::Products;
use super::super::windows::Geometry;
use super::super::windows::planes::SLACK;
use super::Call;
use crate::primitives::matmul::operand::{Wide, with_narrow};
use crate::primitives::windows::planes::store;
use crate::simd::Work;
use crate::simd::half_floats::Narrow;
use crate::simd::vector::{LANES, Sixteen};

/// Multiplications below which one thread does all: about 5 µs of one core.
const ONE_THREAD: usize = 1 << 16;

/// float32 numbers of one thread: a plane, its result, the weights of an output.
fn numbers(windows: &Geometry) -> [usize; 3] {
    [windows.len() + SLACK, windows.windows() + SLACK, windows.taps()].map(|count| count.next_multiple_of(16))
}

/// Bytes of scratch memory.
pub fn scratch(windows: &Geometry, threads: usize) -> usize {
    let taps = (windows.taps() * size_of::<i64>()).next_multiple_of(64);
    taps + numbers(windows).iter().sum::<usize>() * size_of::<f32>() * threads.max(1)
}

pub fn run<I: Products>(args: &mut Args<'_, '_>, call: &Call) -> Result<(), KernelError> {
    let (threads, windows) = (args.threads(), &call.windows);
    let taps = args.workspace().take::<i64>(windows.taps())?;
    taps.iter_mut().enumerate().for_each(|(i, to)| *to = windows.tap(i, windows.row()) as i64);
    let taps = &*taps;
    let planes = call.images * call.channels;
    let work = planes * windows.windows() * windows.taps();
    let workers = if work < ONE_THREAD { 1 } else { threads.count().min(planes) };
    let parts = numbers(windows);
    let slot = parts.iter().sum::<usize>();
    let memory = args.workspace().take::<f32>(slot * workers)?;
    let per_channel = call.outputs / call.channels;
    // Each thread has a slot, and takes every so manieth plane: all are the same work.
    threads.each_chunk(memory, slot, |worker, slot| {
        let (plane, slot) = slot.split_at_mut(parts[0]);
        let (result, weights) = slot.split_at_mut(parts[1]);
        for at in (worker..planes).step_by(workers) {
            let (image, channel) = (at / call.channels, at % call.channels);
            // SAFETY: `run_on` says that the CPU has the instructions. x has this plane; w, the bias and the output have these
            // outputs, which no other thread has.
            unsafe {
                call.x.copy::<I::Simple>((image, channel), windows, 0.0, plane);
                for output in channel * per_channel..(channel + 1) * per_channel {
                    let from = call.weight.at(output as isize * call.weight.row);
                    with_narrow!(from.dtype, T => {
                        T::widen(std::slice::from_raw_parts(from.start.cast::<T>(), taps.len()), &mut weights[..taps.len()]);
                    });
                    let bias = call.bias.map_or(0.0, |bias| {
                        let bias = bias.at(output as isize * bias.column);
                        with_narrow!(bias.dtype, T => (*bias.start.cast::<T>()).wide())
                    });
                    let weights = &weights[..taps.len()];
                    I::call(Taps::<I::Sixteen> { windows, plane, taps, weights, bias, to: result, set: PhantomData });
                    let to = call.out.at(((image * call.outputs + output) * windows.windows()) as isize);
                    store::<I>(&mut result[..windows.windows()], call.activation, to);
                }
            }
        }
    });
    Ok(())
}

/// Weighs the taps of every window of a plane.
struct Taps<'a, V> {
    windows: &'a Geometry,
    plane: &'a [f32],
    taps: &'a [i64],
    weights: &'a [f32],
    bias: f32,
    to: &'a mut [f32],
    set: PhantomData<V>,
}

impl<V: Sixteen> Work for Taps<'_, V> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        /// Registers of sums that are made side by side.
        const ABREAST: usize = 4;
        let Taps { windows, plane, taps, weights, bias, to, .. } = self;
        let [height, width] = windows.output;
        let apart = windows.row() * windows.stride[0];
        for y in 0..height {
            for x in (0..width).step_by(LANES * ABREAST) {
                let vectors = (width - x).div_ceil(LANES).min(ABREAST);
                // What is written behind a row is written again by the next one.
                let (from, to) = (&plane[y * apart + x..], &mut to[y * width + x..][..vectors * LANES]);
                match vectors {
                    ABREAST => sums::<V, ABREAST>(from, taps, weights, bias, to),
                    _ => to.chunks_exact_mut(LANES).enumerate().for_each(|(i, to)| {
                        sums::<V, 1>(&from[i * LANES..], taps, weights, bias, to);
                    }),
                }
            }
        }
    }
}

/// `P` times sixteen windows side by side.
#[inline(always)]
fn sums<V: Sixteen, const P: usize>(from: &[f32], taps: &[i64], weights: &[f32], bias: f32, to: &mut [f32]) {
    // SAFETY: this runs with the instructions of `V`; planes have `SLACK` numbers behind the last one that a tap is at.
    unsafe {
        let mut sums = [V::splat(bias); P];
        for (&tap, &weight) in taps.iter().zip(weights) {
            let (from, weight) = (&from[tap as usize..][..P * LANES], V::splat(weight));
            for (sum, from) in sums.iter_mut().zip(from.as_chunks::<LANES>().0) {
                *sum = V::load(from).times(weight, *sum);
            }
        }
        for (sum, to) in sums.into_iter().zip(to.as_chunks_mut::<LANES>().0) {
            sum.store(to);
        }
    }
}
