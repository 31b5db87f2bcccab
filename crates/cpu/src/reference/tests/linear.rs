//! Products against f64.

use qwill_device::matrix::MatrixElements;
use qwill_device::numeric::{f16_to_f32, f32_to_f16};
use qwill_device::suite::Random;
use qwill_device::{Activations, Device, GROUP, MatrixData, Precision};

use super::distance;
use crate::ReferenceDevice;

/// `matrix · input` with the inputs as they are, in f64.
fn exact_product(data: &MatrixData<'_>, input: &[f32]) -> Vec<f64> {
    let sum = |row| (0..data.cols).map(|col| f64::from(data.value(row, col)) * f64::from(input[col])).sum();
    (0..data.rows).map(sum).collect()
}

#[test]
fn int8_activations_follow_the_written_rule_to_the_last_bit() {
    let (rows, cols) = (5, 300usize);
    let mut random = Random::new(1, "int8 rule");
    let groups = cols.div_ceil(GROUP);
    let codes: Vec<i8> = (0..rows * cols).map(|_| random.bits() as i8).collect();
    let scales: Vec<u16> = (0..rows * groups).map(|_| f32_to_f16(random.uniform(-0.01, 0.01))).collect();
    let mut input = random.normals(cols, 1.0);
    input[GROUP..2 * GROUP].fill(0.0);
    input[7] = 2.5;
    let data = MatrixData { rows, cols, elements: MatrixElements::Int8 { codes: &codes, scales: &scales } };

    let mut device = ReferenceDevice::new(Activations::Int8);
    let matrix = device.matrix(&data).unwrap();
    let (mut x, mut out) = (
        device.buffer(1, cols, Precision::Activation).unwrap(),
        device.buffer(1, rows, Precision::Activation).unwrap(),
    );
    device.write(&mut x, &input).unwrap();
    device.linear(1, &x, &matrix, &mut out).unwrap();
    let found = device.read(&out, 1).unwrap();

    for row in 0..rows {
        let mut expected = 0.0f32;
        for group in 0..groups {
            let columns = group * GROUP..cols.min((group + 1) * GROUP);
            let largest = columns.clone().map(|col| input[col].abs()).fold(0.0, f32::max);
            let scale = largest / 127.0;
            let code = |x: f32| if scale > 0.0 { (x / scale).round_ties_even() as i64 } else { 0 };
            let exact: i64 = columns.map(|col| i64::from(codes[row * cols + col]) * code(input[col])).sum();
            expected += exact as f32 * (f16_to_f32(scales[row * groups + group]) * scale);
        }
        assert_eq!(found[row].to_bits(), expected.to_bits(), "row {row}");
    }
    // And the rule is a good one: within one percent of the unquantised product.
    assert!(distance(&found, &exact_product(&data, &input)) < 0.01);
}

#[test]
fn long_sums_stay_close_to_f64() {
    let (rows, cols) = (3, 17_408);
    let mut random = Random::new(2, "long sums");
    let values = random.normals(rows * cols, 0.01);
    let input = random.normals(cols, 1.0);
    let data = MatrixData { rows, cols, elements: MatrixElements::F32(&values) };
    let mut device = ReferenceDevice::new(Activations::F32);
    let matrix = device.matrix(&data).unwrap();
    let (mut x, mut out) = (
        device.buffer(1, cols, Precision::Activation).unwrap(),
        device.buffer(1, rows, Precision::Activation).unwrap(),
    );
    device.write(&mut x, &input).unwrap();
    device.linear(1, &x, &matrix, &mut out).unwrap();
    let error = distance(&device.read(&out, 1).unwrap(), &exact_product(&data, &input));
    assert!(error < 2e-6, "{error:e}");
}

#[test]
fn shapes_that_do_not_fit_are_errors_with_both_numbers() {
    let mut device = ReferenceDevice::new(Activations::F32);
    let values = [0.0; 6];
    let matrix =
        device.matrix(&MatrixData { rows: 2, cols: 3, elements: MatrixElements::F32(&values) }).unwrap();
    let (narrow, mut out) = (
        device.buffer(4, 2, Precision::Activation).unwrap(),
        device.buffer(4, 2, Precision::Activation).unwrap(),
    );
    let message = device.linear(1, &narrow, &matrix, &mut out).unwrap_err().to_string();
    assert!(message.contains("input is [4, 2], needs [1, 3]"), "{message}");
    let input = device.buffer(4, 3, Precision::Activation).unwrap();
    let message = device.linear(5, &input, &matrix, &mut out).unwrap_err().to_string();
    assert!(message.contains("needs [5, 3]"), "{message}");
    let message = device.head(&[4], &input, &matrix, &mut out).unwrap_err().to_string();
    assert!(message.contains("row 4 of hidden, which has 4"), "{message}");
}
