//! A gathered table of float64.

/// Rows of numbers, copied out of a tensor so that they can be used many times.
pub struct Matrix {
    rows: usize,
    cols: usize,
    data: Vec<f64>,
}

impl Matrix {
    /// A matrix from its elements by row and column.
    pub fn gather(rows: i64, cols: i64, at: impl Fn(i64, i64) -> f64) -> Matrix {
        let (rows, cols) = (rows.max(0), cols.max(0));
        let data = (0..rows).flat_map(|r| (0..cols).map(move |c| (r, c))).map(|(r, c)| at(r, c)).collect();
        Matrix { rows: rows as usize, cols: cols as usize, data }
    }

    /// The number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// The number of columns.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// One row.
    pub fn row(&self, row: usize) -> &[f64] {
        &self.data[row * self.cols..(row + 1) * self.cols]
    }

    /// The product with a vector: one number per row.
    pub fn times(&self, vector: &[f64]) -> Vec<f64> {
        (0..self.rows).map(|r| dot(self.row(r), vector)).collect()
    }
}

/// The sum of products.
pub fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(x, y)| x * y).sum()
}
