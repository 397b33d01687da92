//! Windows of float64: loops over row-major tensors, for models that need the digits more than the time.

use lz_abi::Threads;

use super::Geometry;

impl Geometry {
    /// The windows along an axis whose elements at a tap are in the tensor, and the element of the first of them.
    fn inside(&self, axis: usize, tap: usize) -> (std::ops::Range<usize>, usize) {
        let (stride, at) = (self.stride[axis], tap * self.dilation[axis]);
        let first = self.padding[axis].saturating_sub(at).div_ceil(stride).min(self.output[axis]);
        let end = (self.input[axis] + self.padding[axis]).saturating_sub(at).div_ceil(stride).min(self.output[axis]);
        (first..end.max(first), (first * stride + at).saturating_sub(self.padding[axis]))
    }

    /// Calls a function with each window of a plane and each of its elements that is in the tensor, tap by tap: the place of the window,
    /// the tap, and the place of the element.
    fn each_element(&self, mut f: impl FnMut(usize, usize, usize)) {
        for tap in 0..self.taps() {
            let (rows, top) = self.inside(0, tap / self.kernel[1]);
            let (columns, left) = self.inside(1, tap % self.kernel[1]);
            for (i, y) in rows.enumerate() {
                let (to, from) = (y * self.output[1], (top + i * self.stride[0]) * self.input[1] + left);
                for (j, x) in columns.clone().enumerate() {
                    f(to + x, tap, from + j * self.stride[1]);
                }
            }
        }
    }

    /// Elements of a window that a mean counts along an axis: with the padding, or only those in the tensor.
    pub fn counted(&self, axis: usize, window: usize, padding: bool) -> usize {
        // Counted from the first place of the padding.
        let (first, size) = (window * self.stride[axis], self.input[axis] + self.padding[axis]);
        let (begin, end) = if padding { (0, size + self.padding[axis]) } else { (self.padding[axis], size) };
        (first + self.kernel[axis]).min(end).saturating_sub(first.max(begin))
    }
}

/// A convolution.
pub struct Doubles<'a> {
    /// The windows.
    pub windows: &'a Geometry,
    /// Channels, outputs, and groups of both.
    pub sizes: [usize; 3],
    /// The input, the weights and the biases.
    pub x: &'a [f64],
    /// See above.
    pub w: &'a [f64],
    /// See above.
    pub bias: Option<&'a [f64]>,
    /// What becomes of each sum.
    pub activation: fn(f64) -> f64,
}

impl Doubles<'_> {
    /// Computes it, a plane of the output at a time.
    pub fn convolve(&self, threads: Threads<'_>, out: &mut [f64]) {
        let [channels, outputs, groups] = self.sizes;
        let (depth, per_group) = (channels / groups, outputs / groups);
        let (size, taps) = (self.windows.input[0] * self.windows.input[1], self.windows.taps());
        threads.each_chunk(out, self.windows.windows(), |at, to| {
            let (image, output) = (at / outputs, at % outputs);
            to.fill(self.bias.map_or(0.0, |bias| bias[output]));
            for channel in 0..depth {
                let plane = &self.x[(image * channels + output / per_group * depth + channel) * size..][..size];
                let weights = &self.w[(output * depth + channel) * taps..][..taps];
                self.windows.each_element(|window, tap, element| to[window] += weights[tap] * plane[element]);
            }
            to.iter_mut().for_each(|sum| *sum = (self.activation)(*sum));
        });
    }
}

/// The largest number of each window.
pub fn largest(windows: &Geometry, threads: Threads<'_>, x: &[f64], out: &mut [f64]) {
    let size = windows.input[0] * windows.input[1];
    threads.each_chunk(out, windows.windows(), |at, to| {
        let plane = &x[at * size..][..size];
        to.fill(f64::NEG_INFINITY);
        windows.each_element(|window, _, element| {
            let x = plane[element];
            if x > to[window] || x.is_nan() {
                to[window] = x;
            }
        });
    });
}

/// The mean of each window, with the padding or without it.
pub fn mean(windows: &Geometry, padding: bool, threads: Threads<'_>, x: &[f64], out: &mut [f64]) {
    let size = windows.input[0] * windows.input[1];
    threads.each_chunk(out, windows.windows(), |at, to| {
        let plane = &x[at * size..][..size];
        to.fill(0.0);
        windows.each_element(|window, _, element| to[window] += plane[element]);
        for (window, sum) in to.iter_mut().enumerate() {
            let (y, x) = (window / windows.output[1], window % windows.output[1]);
            *sum /= (windows.counted(0, y, padding) * windows.counted(1, x, padding)) as f64;
        }
    });
}
