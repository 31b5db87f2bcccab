//! Products against f64 and exact integer sums, and their independence of everything beside a row.

use qwill_device::MatrixData;
use qwill_device::matrix::MatrixElements;
use qwill_device::numeric::{f16_to_f32, f32_to_bf16, f32_to_f16};

use super::*;
use crate::fast::Isa;
use crate::fast::scratch::Scratch;

/// A small generator: the values only need to be irregular.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as u32
    }
    fn unit(&mut self) -> f32 {
        self.next() as f32 / (1u32 << 30) as f32 - 1.0
    }
}

/// Owned elements of every format, with integer codes over their whole range.
struct Source {
    values: Vec<f32>,
    half: Vec<u16>,
    brain: Vec<u16>,
    codes: Vec<i8>,
    packed: Vec<u8>,
    scales: Vec<u16>,
}

impl Source {
    fn new(rows: usize, cols: usize) -> Self {
        let mut random = Random(rows as u64 * 1000 + cols as u64);
        let values: Vec<f32> = (0..rows * cols).map(|_| random.unit()).collect();
        Self {
            half: values.iter().map(|v| f32_to_f16(*v)).collect(),
            brain: values.iter().map(|v| f32_to_bf16(*v)).collect(),
            values,
            codes: (0..rows * cols).map(|_| random.next() as i8).collect(),
            packed: (0..rows * cols.div_ceil(2)).map(|_| random.next() as u8).collect(),
            scales: (0..rows * cols.div_ceil(GROUP)).map(|_| f32_to_f16(random.unit() / 50.0)).collect(),
        }
    }

    fn formats(&self, rows: usize, cols: usize) -> Vec<MatrixData<'_>> {
        [
            MatrixElements::F32(&self.values),
            MatrixElements::F16(&self.half),
            MatrixElements::Bf16(&self.brain),
            MatrixElements::Int8 { codes: &self.codes, scales: &self.scales },
            MatrixElements::Int4 { packed: &self.packed, scales: &self.scales },
        ]
        .map(|elements| MatrixData { rows, cols, elements })
        .to_vec()
    }
}

fn product(
    isa: Isa,
    threads: usize,
    data: &MatrixData<'_>,
    x: &[f32],
    rows: usize,
    int8: bool,
    store: Store,
) -> Vec<f32> {
    let level = Level::new(isa).unwrap();
    let mut pool = Pool::new(threads).unwrap();
    let mut matrix = Matrix::empty(data.format(), data.rows, data.cols);
    matrix.fill(0, data, &mut pool).unwrap();
    let mut quantised = QuantisedRows::default();
    quantised.quantise((level, &mut pool), x, data.cols, data.cols, rows);
    let input = Input { values: x, stride: data.cols, rows, quantised: int8.then_some(&quantised) };
    let mut out = Buffer::new(rows + 1, data.rows + 3);
    out.data.fill(1000.0);
    multiply((level, &mut pool, &Scratch::new(threads).workers), input, &[&matrix], store, &mut out);
    for row in 0..=rows {
        let from = if row < rows { data.rows } else { 0 };
        assert!(out.row(row)[from..].iter().all(|v| *v == 1000.0), "wrote beside its outputs");
    }
    (0..rows).flat_map(|row| out.row(row)[..data.rows].to_vec()).collect()
}

#[test]
fn products_agree_with_f64_in_every_format() {
    for (rows, cols, batch) in
        [(1, 1, 1), (5, 130, 3), (16, 128, 7), (33, 257, 2), (50, 512, 13), (20, 100, 130)]
    {
        let source = Source::new(rows, cols);
        let mut random = Random(batch as u64);
        let x: Vec<f32> = (0..batch * cols).map(|_| random.unit()).collect();
        for data in source.formats(rows, cols) {
            for isa in Isa::available() {
                let found = product(isa, 2, &data, &x, batch, false, Store::Exact);
                let added = product(isa, 1, &data, &x, batch, false, Store::Add(Activations::F32));
                for (at, value) in found.iter().enumerate() {
                    let (row, output) = (at / rows, at % rows);
                    let term = |col| f64::from(data.value(output, col)) * f64::from(x[row * cols + col]);
                    let (expected, size) =
                        (0..cols).map(term).fold((0.0, 0.0), |(sum, size), t: f64| (sum + t, size + t.abs()));
                    assert!((f64::from(*value) - expected).abs() <= 2e-6 * size, "{isa} {:?}", data.format());
                    assert_eq!(added[at], 1000.0 + value);
                }
            }
        }
    }
}

#[test]
fn integer_products_are_the_definition_bit_for_bit() {
    for (rows, cols, batch) in [(1, 1, 1), (17, 100, 2), (16, 128, 3), (40, 384, 4), (33, 700, 9)] {
        let source = Source::new(rows, cols);
        let mut random = Random(cols as u64);
        let x: Vec<f32> = (0..batch * cols).map(|_| random.unit()).collect();
        for data in source.formats(rows, cols).into_iter().skip(3) {
            let expected: Vec<f32> = (0..batch * rows)
                .map(|at| integer_product(&data, at % rows, &x[at / rows * cols..][..cols]))
                .collect();
            for isa in Isa::available() {
                assert_eq!(product(isa, 3, &data, &x, batch, true, Store::Exact), expected, "{isa}");
            }
        }
    }
}

/// `Σ_groups f32(Σ code · input code) · (weight scale · input scale)`.
fn integer_product(data: &MatrixData<'_>, output: usize, x: &[f32]) -> f32 {
    let (scales, groups) = match data.elements {
        MatrixElements::Int8 { scales, .. } | MatrixElements::Int4 { scales, .. } => {
            (scales, x.len().div_ceil(GROUP))
        }
        _ => unreachable!("integer formats only"),
    };
    let code = |col: usize| match data.elements {
        MatrixElements::Int8 { codes, .. } => i32::from(codes[output * data.cols + col]),
        MatrixElements::Int4 { packed, .. } => {
            let byte = packed[output * data.cols.div_ceil(2) + col / 2];
            i32::from(if col.is_multiple_of(2) { byte & 15 } else { byte >> 4 }) - 8
        }
        _ => 0,
    };
    x.chunks(GROUP).enumerate().fold(0.0, |sum, (group, x)| {
        let scale = x.iter().fold(0.0f32, |m, x| m.max(x.abs())) / 127.0;
        let term = |(i, x): (usize, &f32)| code(group * GROUP + i) * (x / scale).round_ties_even() as i32;
        let dot: i32 = x.iter().enumerate().map(term).sum();
        sum + dot as f32 * (f16_to_f32(scales[output * groups + group]) * scale)
    })
}

#[test]
fn extreme_codes_do_not_saturate() {
    let (rows, cols) = (16, 256);
    let scales = vec![f32_to_f16(1.0); rows * 2];
    let x = vec![1.0f32; cols];
    for (code, byte) in [(i8::MIN, 0x00), (i8::MAX, 0xff)] {
        let (codes, packed) = (vec![code; rows * cols], vec![byte; rows * cols / 2]);
        let formats = [
            MatrixElements::Int8 { codes: &codes, scales: &scales },
            MatrixElements::Int4 { packed: &packed, scales: &scales },
        ];
        for data in formats.map(|elements| MatrixData { rows, cols, elements }) {
            for isa in Isa::available() {
                let expected = integer_product(&data, 0, &x);
                assert!(product(isa, 1, &data, &x, 1, true, Store::Exact).iter().all(|v| *v == expected));
            }
        }
    }
}

#[test]
fn bits_of_a_row_depend_on_nothing_beside_it() {
    let (rows, cols, batch) = (70, 300, 17);
    let source = Source::new(rows, cols);
    let mut random = Random(5);
    let x: Vec<f32> = (0..batch * cols).map(|_| random.unit()).collect();
    for data in source.formats(rows, cols) {
        for (isa, int8) in Isa::available().into_iter().flat_map(|isa| [(isa, false), (isa, true)]) {
            let together = product(isa, 3, &data, &x, batch, int8, Store::Set(Activations::Bf16));
            for row in 0..batch {
                let x = &x[row * cols..][..cols];
                let alone = product(isa, 1, &data, x, 1, int8, Store::Set(Activations::Bf16));
                assert_eq!(alone, together[row * rows..][..rows], "{isa} {:?} int8 {int8}", data.format());
            }
        }
    }
}
