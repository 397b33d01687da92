//! Windows over the last axes of a tensor: what convolutions and pools have in common.
//!
//! A *plane* is one channel of one image as float32, with what stands around it. It is laid out so that windows side by side
//! read numbers side by side, whatever the stride: each row is cut into *phases*, of which the first has columns 0, s, 2s, …, the
//! next one 1, s + 1, 2s + 1, …. A *tap* is a place in a window. The numbers that the windows of an output row have at a tap follow
//! each other in the plane.

pub(super) mod doubles;
pub(super) mod planes;
pub(super) mod source;

/// Sizes of windows, and how they are moved: the rows, then the columns. One axis is one row.
#[derive(Clone, Copy, Debug)]
pub(super) struct Geometry {
    /// Of the tensor.
    pub input: [usize; 2],
    /// Of a window.
    pub kernel: [usize; 2],
    /// From a window to the next.
    pub stride: [usize; 2],
    /// How far the first window begins before the tensor.
    pub padding: [usize; 2],
    /// From a tap to the next.
    pub dilation: [usize; 2],
    /// How many windows there are.
    pub output: [usize; 2],
}

impl Geometry {
    /// One window of one element.
    pub const ONE: Geometry =
        Geometry { input: [1; 2], kernel: [1; 2], stride: [1; 2], padding: [0; 2], dilation: [1; 2], output: [1; 2] };

    /// From the first tap of a window to the last.
    pub fn reach(&self, axis: usize) -> usize {
        (self.kernel[axis] - 1) * self.dilation[axis]
    }

    /// Rows of a plane.
    pub fn rows(&self) -> usize {
        match self.output[0] {
            0 => 0,
            output => (output - 1) * self.stride[0] + self.reach(0) + 1,
        }
    }

    /// Phases of a row: no more than windows reach.
    pub fn phases(&self) -> usize {
        self.stride[1].min(self.reach(1) + 1)
    }

    /// Numbers of a phase.
    pub fn phase(&self) -> usize {
        self.output[1] + self.reach(1) / self.stride[1]
    }

    /// Numbers of a row.
    pub fn row(&self) -> usize {
        self.phases() * self.phase()
    }

    /// Numbers of a plane.
    pub fn len(&self) -> usize {
        self.rows() * self.row()
    }

    /// Windows of a plane.
    pub fn windows(&self) -> usize {
        self.output[0] * self.output[1]
    }

    /// Taps of a window.
    pub fn taps(&self) -> usize {
        self.kernel[0] * self.kernel[1]
    }

    /// The place of a tap of the first window, in a plane whose rows are so far apart.
    pub fn tap(&self, tap: usize, row: usize) -> usize {
        let (y, x) = (tap / self.kernel[1], tap % self.kernel[1] * self.dilation[1]);
        y * self.dilation[0] * row + x % self.stride[1] * self.phase() + x / self.stride[1]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_phase_has_the_columns_a_stride_apart() {
        let two = |one: usize, other: usize| [one, other];
        let windows = Geometry {
            input: two(5, 9),
            kernel: two(3, 3),
            stride: two(2, 2),
            padding: two(1, 1),
            dilation: two(1, 1),
            output: two(3, 5),
        };
        assert_eq!((windows.rows(), windows.phases(), windows.phase()), (7, 2, 6));
        assert_eq!((0..9).map(|tap| windows.tap(tap, 12)).collect::<Vec<_>>(), [0, 6, 1, 12, 18, 13, 24, 30, 25]);
        // A window of one column never reads the other phases.
        assert_eq!(Geometry { kernel: two(1, 1), stride: two(1, 4), ..windows }.phases(), 1);
    }
}
