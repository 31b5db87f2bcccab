//! Numbers for people.

/// Bytes in decimal units, as on data sheets: `13.2 MB`.
pub(crate) fn bytes(count: u64) -> String {
    let value = count as f64;
    match count {
        0..1_000 => format!("{count} B"),
        1_000..1_000_000 => format!("{:.1} kB", value / 1e3),
        1_000_000..1_000_000_000 => format!("{:.1} MB", value / 1e6),
        _ => format!("{:.2} GB", value / 1e9),
    }
}

/// Parameters: `13.8 M`, `27.4 B`.
pub(crate) fn parameters(count: u64) -> String {
    match count {
        0..1_000_000 => format!("{:.1} k", count as f64 / 1e3),
        1_000_000..1_000_000_000 => format!("{:.1} M", count as f64 / 1e6),
        _ => format!("{:.2} B", count as f64 / 1e9),
    }
}

/// Whole numbers in groups of three: `262 144`.
pub(crate) fn grouped(count: usize) -> String {
    let digits = count.to_string();
    let mut text = String::with_capacity(digits.len() + digits.len() / 3);
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(' ');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short_and_exact_enough() {
        assert_eq!(bytes(0), "0 B");
        assert_eq!(bytes(999), "999 B");
        assert_eq!(bytes(1000), "1.0 kB");
        assert_eq!(bytes(13_150_000), "13.2 MB");
        assert_eq!(bytes(24 << 30), "25.77 GB");
        assert_eq!(parameters(13_819_720), "13.8 M");
        assert_eq!(parameters(27_400_000_000), "27.40 B");
        assert_eq!(grouped(7), "7");
        assert_eq!(grouped(262_144), "262 144");
        assert_eq!(grouped(1_000), "1 000");
    }
}
