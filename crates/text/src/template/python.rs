//! Numbers as Python writes them.

use minijinja::value::{Value, ValueKind};

/// The number, if `value` is a float (not an integer, not a truth value).
pub(super) fn as_float(value: &Value) -> Option<f64> {
    let is_float = value.kind() == ValueKind::Number && !value.is_integer();
    is_float.then(|| f64::try_from(value.clone()).ok()).flatten()
}

/// `repr(number)`: the shortest digits that read back as the same number, positional from 1e-4 up to below
/// 1e16, otherwise with an exponent of at least two digits. Infinities and NaN are `inf`, `-inf` and `nan`.
pub(super) fn float_repr(number: f64) -> String {
    if number.is_nan() {
        return "nan".to_owned();
    }
    if number.is_infinite() {
        return if number > 0.0 { "inf" } else { "-inf" }.to_owned();
    }
    // Rust writes the same shortest digits, as in `1.25e-7`.
    let scientific = format!("{number:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if (-4..16).contains(&exponent) {
        let positional = number.to_string();
        return if positional.contains('.') { positional } else { positional + ".0" };
    }
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{digits}e{sign}{:02}", exponent.abs())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_are_written_like_python() {
        let cases = [
            (1e-7, "1e-07"),
            (2.0, "2.0"),
            (-0.0, "-0.0"),
            (1e16, "1e+16"),
            (123_456_789_012_345_680.0, "1.2345678901234568e+17"),
            (9_999_999_999_999_998.0, "9999999999999998.0"),
            (0.0001, "0.0001"),
            (0.000_01, "1e-05"),
            (0.1, "0.1"),
            (1.5e300, "1.5e+300"),
            (5e-324, "5e-324"),
            (f64::INFINITY, "inf"),
            (f64::NEG_INFINITY, "-inf"),
            (f64::NAN, "nan"),
        ];
        for (number, text) in cases {
            assert_eq!(float_repr(number), text);
        }
    }

    #[test]
    fn only_floats_are_floats() {
        assert_eq!(as_float(&Value::from(2.0)), Some(2.0));
        assert_eq!(as_float(&Value::from(2)), None);
        assert_eq!(as_float(&Value::from(true)), None);
        assert_eq!(as_float(&Value::from(u64::MAX)), None);
        assert_eq!(as_float(&Value::from("2.0")), None);
    }
}
