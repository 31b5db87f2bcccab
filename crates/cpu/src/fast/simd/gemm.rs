//! Small matrix products in f32, register-blocked.

#![expect(unsafe_code, reason = "inner loops check their bounds once, before they start")]

use super::Simd;

/// What the products are added to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::fast) enum From {
    /// Zero: the old contents do not matter.
    Zero,
    /// The old contents.
    Old,
}

/// `C[i][j] (+)= Σ_p A[i][p] · B[p][j]` for `m × k` times `k × n`, where `A[i][p] = a[i·a_row + p·a_col]` and rows
/// of B and C are `b_row` and `c_row` apart.
///
/// Each element is one chain of multiply-adds with p ascending, whatever m and n are.
#[inline(always)]
pub(in crate::fast) fn gemm<S: Simd>(
    simd: S,
    (m, n, k): (usize, usize, usize),
    a: &[f32],
    a_row: usize,
    a_col: usize,
    b: &[f32],
    b_row: usize,
    c: &mut [f32],
    c_row: usize,
    from: From,
) {
    if m == 0 || n == 0 {
        return;
    }
    assert!(k == 0 || a.len() > (m - 1) * a_row + (k - 1) * a_col, "gemm: A is too short");
    assert!(k == 0 || b.len() >= (k - 1) * b_row + n, "gemm: B is too short");
    assert!(c.len() >= (m - 1) * c_row + n, "gemm: C is too short");
    simd.gemm(Product { m, n, k, a, a_row, a_col, b, b_row, c, c_row, from });
}

/// Rows of B that one or two rows of A go through at once.
const STRIP: usize = 8;

/// The operands of [`gemm`], bounds checked.
pub(in crate::fast) struct Product<'a> {
    m: usize,
    n: usize,
    k: usize,
    a: &'a [f32],
    a_row: usize,
    a_col: usize,
    b: &'a [f32],
    b_row: usize,
    c: &'a mut [f32],
    c_row: usize,
    from: From,
}

impl Product<'_> {
    /// The whole product; inlined once into a function of each instruction set.
    #[inline(always)]
    pub(super) fn run<S: Simd>(&mut self, simd: S) {
        // A row or two read B once, mostly from memory: a few whole rows at a time, as the processor fetches ahead.
        let strip = if self.m <= 2 { STRIP } else { self.k };
        let mut left = self.k;
        loop {
            self.k = strip.min(left);
            self.all_columns(simd);
            left -= self.k;
            if left == 0 {
                return;
            }
            (self.a, self.b) = (&self.a[self.k * self.a_col..], &self.b[self.k * self.b_row..]);
            self.from = From::Old;
        }
    }

    #[inline(always)]
    fn all_columns<S: Simd>(&mut self, simd: S) {
        let mut col = 0;
        if self.m <= 2 {
            while col + 4 * S::LANES <= self.n {
                if self.m == 2 {
                    self.block::<S, 2, 4>(simd, 0, col);
                } else {
                    self.block::<S, 1, 4>(simd, 0, col);
                }
                col += 4 * S::LANES;
            }
        }
        while col + 2 * S::LANES <= self.n {
            self.all_rows::<S, 2>(simd, col);
            col += 2 * S::LANES;
        }
        while col + S::LANES <= self.n {
            self.all_rows::<S, 1>(simd, col);
            col += S::LANES;
        }
        if col < self.n {
            self.last(simd, col);
        }
    }

    /// All rows of `V` vectors of columns.
    #[inline(always)]
    fn all_rows<S: Simd, const V: usize>(&mut self, simd: S, col: usize) {
        let mut row = 0;
        while row + 6 <= self.m {
            self.block::<S, 6, V>(simd, row, col);
            row += 6;
        }
        while row + 2 <= self.m {
            self.block::<S, 2, V>(simd, row, col);
            row += 2;
        }
        if row < self.m {
            self.block::<S, 1, V>(simd, row, col);
        }
    }

    #[inline(always)]
    fn block<S: Simd, const R: usize, const V: usize>(&mut self, simd: S, row: usize, col: usize) {
        let mut sums = [[simd.splat(0.0); V]; R];
        if self.from == From::Old {
            for (r, sums) in sums.iter_mut().enumerate() {
                for (v, sum) in sums.iter_mut().enumerate() {
                    *sum = simd.load(&self.c[(row + r) * self.c_row + col + v * S::LANES..]);
                }
            }
        }
        for p in 0..self.k {
            // SAFETY: `gemm` checked the last element of A and B, and this block lies within m and n.
            unsafe {
                let b = self.b.as_ptr().add(p * self.b_row + col);
                let mut columns = [simd.splat(0.0); V];
                for (v, column) in columns.iter_mut().enumerate() {
                    *column = simd.load_from(b.add(v * S::LANES));
                }
                for (r, sums) in sums.iter_mut().enumerate() {
                    let a = simd.splat(*self.a.get_unchecked((row + r) * self.a_row + p * self.a_col));
                    for (sum, column) in sums.iter_mut().zip(columns) {
                        *sum = simd.mul_add(a, column, *sum);
                    }
                }
            }
        }
        for (r, sums) in sums.iter().enumerate() {
            for (v, sum) in sums.iter().enumerate() {
                simd.store(&mut self.c[(row + r) * self.c_row + col + v * S::LANES..], *sum);
            }
        }
    }

    /// The last columns, fewer than a vector.
    #[inline(always)]
    fn last<S: Simd>(&mut self, simd: S, col: usize) {
        let cols = self.n - col;
        for row in 0..self.m {
            let out = row * self.c_row + col;
            let mut sum = match self.from {
                From::Zero => simd.splat(0.0),
                From::Old => simd.load_part(&self.c[out..out + cols]),
            };
            for p in 0..self.k {
                let b = simd.load_part(&self.b[p * self.b_row + col..][..cols]);
                sum = simd.mul_add(simd.splat(self.a[row * self.a_row + p * self.a_col]), b, sum);
            }
            simd.store_part(&mut self.c[out..out + cols], sum);
        }
    }
}

/// `C[i][j] = Σ_p A[i][p] · B[j][p]` for `m × k` times the transpose of `n × k`.
///
/// Each element is one vector of partial sums over p, then the sum of its lanes, whatever m and n are.
#[inline(always)]
pub(in crate::fast) fn gemm_transposed<S: Simd>(
    simd: S,
    (m, n, k): (usize, usize, usize),
    a: &[f32],
    a_row: usize,
    b: &[f32],
    b_row: usize,
    c: &mut [f32],
    c_row: usize,
) {
    if m == 0 || n == 0 {
        return;
    }
    assert!(a.len() >= (m - 1) * a_row + k, "gemm_transposed: A is too short");
    assert!(b.len() >= (n - 1) * b_row + k, "gemm_transposed: B is too short");
    assert!(c.len() >= (m - 1) * c_row + n, "gemm_transposed: C is too short");
    simd.gemm_transposed(Dots { m, n, k, a, a_row, b, b_row, c, c_row });
}

/// The operands of [`gemm_transposed`], bounds checked.
pub(in crate::fast) struct Dots<'a> {
    m: usize,
    n: usize,
    k: usize,
    a: &'a [f32],
    a_row: usize,
    b: &'a [f32],
    b_row: usize,
    c: &'a mut [f32],
    c_row: usize,
}

impl Dots<'_> {
    /// The whole product; inlined once into a function of each instruction set.
    #[inline(always)]
    pub(super) fn run<S: Simd>(&mut self, simd: S) {
        let mut row = 0;
        while row + 2 <= self.m {
            self.all_columns::<S, 2>(simd, row);
            row += 2;
        }
        if row < self.m {
            self.all_columns::<S, 1>(simd, row);
        }
    }

    #[inline(always)]
    fn all_columns<S: Simd, const R: usize>(&mut self, simd: S, row: usize) {
        let mut col = 0;
        while col + 4 <= self.n {
            self.block::<S, R, 4>(simd, row, col);
            col += 4;
        }
        while col < self.n {
            self.block::<S, R, 1>(simd, row, col);
            col += 1;
        }
    }

    #[inline(always)]
    fn block<S: Simd, const R: usize, const C: usize>(&mut self, simd: S, row: usize, col: usize) {
        let mut sums = [[simd.splat(0.0); C]; R];
        let whole = self.k / S::LANES * S::LANES;
        let mut p = 0;
        while p < whole {
            // SAFETY: `gemm_transposed` checked the last row of A and B, and this block lies within m and n.
            unsafe {
                let mut a = [simd.splat(0.0); R];
                for (r, a) in a.iter_mut().enumerate() {
                    *a = simd.load_from(self.a.as_ptr().add((row + r) * self.a_row + p));
                }
                let mut b = [simd.splat(0.0); C];
                for (c, b) in b.iter_mut().enumerate() {
                    *b = simd.load_from(self.b.as_ptr().add((col + c) * self.b_row + p));
                }
                for (sums, a) in sums.iter_mut().zip(a) {
                    for (sum, b) in sums.iter_mut().zip(b) {
                        *sum = simd.mul_add(a, b, *sum);
                    }
                }
            }
            p += S::LANES;
        }
        for (r, sums) in sums.iter_mut().enumerate() {
            for (c, sum) in sums.iter_mut().enumerate() {
                if whole < self.k {
                    let a = simd.load_part(&self.a[(row + r) * self.a_row..][whole..self.k]);
                    let b = simd.load_part(&self.b[(col + c) * self.b_row..][whole..self.k]);
                    *sum = simd.mul_add(a, b, *sum);
                }
                self.c[(row + r) * self.c_row + col + c] = simd.sum(*sum);
            }
        }
    }
}
