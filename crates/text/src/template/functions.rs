//! What templates may call beyond the engine's own filters and functions.

use std::time::{SystemTime, UNIX_EPOCH};

use minijinja::value::Value;
use minijinja::{Environment, Error, ErrorKind, Output, State, escape_formatter};
use thiserror::Error;

use super::json::tojson;
use super::python::{as_float, float_repr};

/// The message of a template's `raise_exception`.
#[derive(Debug, Error)]
#[error("{0}")]
pub(super) struct Raised(pub(super) String);

pub(super) fn register(environment: &mut Environment<'static>) {
    environment.add_filter("tojson", tojson);
    environment.add_filter("string", string);
    environment.set_formatter(print);
    environment.add_function("raise_exception", raise_exception);
    environment.add_function("strftime_now", |format: &str| {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        strftime(format, now.as_secs())
    });
}

/// Prints floats as Python does; the rest as the engine does.
fn print(out: &mut Output, state: &mut State, value: &Value) -> Result<(), Error> {
    match as_float(value) {
        Some(float) => out.write_str(&float_repr(float)).map_err(Error::from),
        None => escape_formatter(out, state, value),
    }
}

/// Python's `str(value)`.
fn string(value: &Value) -> Value {
    match (value.as_str(), as_float(value)) {
        (Some(_), _) => value.clone(),
        (None, Some(float)) => Value::from(float_repr(float)),
        (None, None) => Value::from(value.to_string()),
    }
}

fn raise_exception(message: &Value) -> Result<Value, Error> {
    let raised = Raised(message.to_string());
    Err(Error::new(ErrorKind::InvalidOperation, "the chat template raised an exception").with_source(raised))
}

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const WEEKDAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];

/// `strftime` of a time in UTC, with English names. A directive that is not known is an error.
fn strftime(format: &str, unix_seconds: u64) -> Result<String, Error> {
    let time = Civil::from_unix(unix_seconds);
    let mut text = String::new();
    let mut rest = format.chars();
    while let Some(c) = rest.next() {
        if c != '%' {
            text.push(c);
            continue;
        }
        let mut directive = rest.next();
        // `%-d` leaves out leading zeros.
        let bare = directive == Some('-');
        if bare {
            directive = rest.next();
        }
        let part = directive.and_then(|directive| time.part(directive)).ok_or_else(|| {
            Error::new(ErrorKind::InvalidOperation, format!("strftime_now: unknown directive in {format:?}"))
        })?;
        let trimmed = part.trim_start_matches('0');
        text.push_str(if !bare {
            &part
        } else if trimmed.is_empty() {
            "0"
        } else {
            trimmed
        });
    }
    Ok(text)
}

struct Civil {
    year: u64,
    /// 1 to 12.
    month: u64,
    /// 1 to 31.
    day: u64,
    day_of_year: u64,
    /// 0 is Sunday.
    weekday: u64,
    hour: u64,
    minute: u64,
    second: u64,
}

impl Civil {
    fn from_unix(unix_seconds: u64) -> Self {
        let days = unix_seconds / 86_400;
        let is_leap =
            |year: u64| year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
        // Days and years since 1 January 1600, the start of a cycle of 400 years of 146,097 days.
        let since_1600 = days + 135_140;
        let cycles = since_1600 / 146_097;
        let (mut year, mut left) = (1600 + 400 * cycles, since_1600 % 146_097);
        while left >= 365 + u64::from(is_leap(year)) {
            left -= 365 + u64::from(is_leap(year));
            year += 1;
        }
        let day_of_year = left + 1;
        let february = 28 + u64::from(is_leap(year));
        let lengths = [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
        let mut month = 1;
        for length in lengths {
            if left < length {
                break;
            }
            left -= length;
            month += 1;
        }
        let second = unix_seconds % 86_400;
        Self {
            year,
            month,
            day: left + 1,
            day_of_year,
            weekday: (days + 4) % 7,
            hour: second / 3600,
            minute: second / 60 % 60,
            second: second % 60,
        }
    }

    fn part(&self, directive: char) -> Option<String> {
        let month = MONTHS[self.month as usize - 1];
        let weekday = WEEKDAYS[self.weekday as usize];
        let hour_of_12 = (self.hour + 11) % 12 + 1;
        Some(match directive {
            'Y' => self.year.to_string(),
            'y' => format!("{:02}", self.year % 100),
            'm' => format!("{:02}", self.month),
            'd' => format!("{:02}", self.day),
            'e' => format!("{:2}", self.day),
            'j' => format!("{:03}", self.day_of_year),
            'H' => format!("{:02}", self.hour),
            'I' => format!("{hour_of_12:02}"),
            'M' => format!("{:02}", self.minute),
            'S' => format!("{:02}", self.second),
            'p' => if self.hour < 12 { "AM" } else { "PM" }.to_owned(),
            'B' => month.to_owned(),
            'b' | 'h' => month[..3].to_owned(),
            'A' => weekday.to_owned(),
            'a' => weekday[..3].to_owned(),
            'u' => (if self.weekday == 0 { 7 } else { self.weekday }).to_string(),
            'w' => self.weekday.to_string(),
            'F' => format!("{}-{:02}-{:02}", self.year, self.month, self.day),
            'D' => format!("{:02}/{:02}/{:02}", self.month, self.day, self.year % 100),
            'T' => format!("{:02}:{:02}:{:02}", self.hour, self.minute, self.second),
            'R' => format!("{:02}:{:02}", self.hour, self.minute),
            'Z' => "UTC".to_owned(),
            'z' => "+0000".to_owned(),
            'n' => "\n".to_owned(),
            't' => "\t".to_owned(),
            '%' => "%".to_owned(),
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_those_of_the_calendar() {
        let format = "%Y-%m-%d %H:%M:%S %j %A %b %-d %I%p %%";
        let cases = [
            (0, "1970-01-01 00:00:00 001 Thursday Jan 1 12AM %"),
            (951_782_400, "2000-02-29 00:00:00 060 Tuesday Feb 29 12AM %"),
            (1_735_689_599, "2024-12-31 23:59:59 366 Tuesday Dec 31 11PM %"),
            (4_107_542_400, "2100-03-01 00:00:00 060 Monday Mar 1 12AM %"),
        ];
        for (seconds, expected) in cases {
            assert_eq!(strftime(format, seconds).unwrap(), expected);
        }
    }

    #[test]
    fn unknown_directives_are_errors() {
        assert!(strftime("%Q", 0).is_err());
        assert!(strftime("100%", 0).is_err());
    }
}
