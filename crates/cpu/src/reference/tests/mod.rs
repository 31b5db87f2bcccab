//! The reference against independent f64 formulas, and the op test-suite against the reference.

mod attention;
mod broken;
mod gdn;
mod linear;
mod sample;
mod suite;

use qwill_device::suite::Random;

/// The relative distance of two vectors: `|a − b| / |b|` in the 2-norm.
fn distance(found: &[f32], expected: &[f64]) -> f64 {
    let difference: f64 = found.iter().zip(expected).map(|(a, b)| (f64::from(*a) - b).powi(2)).sum();
    let length: f64 = expected.iter().map(|b| b * b).sum();
    (difference / length.max(f64::MIN_POSITIVE)).sqrt()
}

/// A random vector of length 1.
fn unit(random: &mut Random, width: usize) -> Vec<f32> {
    let mut values = random.normals(width, 1.0);
    let norm = values.iter().map(|x| x * x).sum::<f32>().sqrt();
    for value in &mut values {
        *value /= norm;
    }
    values
}
