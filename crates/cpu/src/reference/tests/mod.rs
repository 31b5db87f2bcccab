//! Tests of the reference against independent f64 formulas.
