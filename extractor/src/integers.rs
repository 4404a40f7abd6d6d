//! Integers that JSON text can hold and 64 bits can't: the parser makes floating-point numbers of
//! them, which would go on into the rendered text. Knows no keys.

use serde_json::Value;

use crate::reject::{Fault, RejectReason};

/// 2^63: no smaller number is an integer that was lost.
const LEAST_LOST: f64 = 9_223_372_036_854_775_808.0;

/// Refuses `values` of the text `json` if one of them may be an integer that lost its digits.
/// Numbers that are written with an exponent or a fraction are meant as they are parsed.
pub(crate) fn require_kept<'v>(
    json: &str,
    values: impl IntoIterator<Item = &'v Value>,
) -> Result<(), Fault> {
    // Other parts of the text are searched too; both together are no accident worth more code.
    match beyond_64_bits(json) {
        Some(integer) if values.into_iter().any(may_be_lost) => Err(Fault::new(
            RejectReason::IntegerTooLarge,
            format!(
                "{}... has {} digits, more than 64 bits hold, and would be rendered as a \
                 floating-point number: write it as a string",
                integer.chars().take(24).collect::<String>(),
                integer.trim_start_matches('-').len()
            ),
        )),
        _ => Ok(()),
    }
}

fn may_be_lost(value: &Value) -> bool {
    match value {
        Value::Number(number) if number.is_f64() => {
            number.as_f64().is_some_and(|number| number.abs() >= LEAST_LOST)
        }
        Value::Array(list) => list.iter().any(may_be_lost),
        Value::Object(map) => map.values().any(may_be_lost),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => false,
    }
}

/// The first integer of sound JSON, outside strings, that neither i64 nor u64 holds.
fn beyond_64_bits(json: &str) -> Option<&str> {
    let (mut in_string, mut escaped, mut number) = (false, false, None);
    for (at, byte) in json.bytes().chain([b' ']).enumerate() {
        let is_part = matches!(byte, b'0'..=b'9' | b'-' | b'+' | b'.' | b'e' | b'E');
        match byte {
            _ if escaped => escaped = false,
            b'\\' if in_string => escaped = true,
            b'"' => in_string = !in_string,
            _ if in_string => {}
            b'0'..=b'9' | b'-' if number.is_none() => number = Some(at),
            _ => {}
        }
        if let Some(start) = number.filter(|_| !is_part) {
            number = None;
            let text = json.get(start..at)?;
            let is_integer = !text.contains(['.', 'e', 'E']);
            if is_integer && text.parse::<i64>().is_err() && text.parse::<u64>().is_err() {
                return Some(text);
            }
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_integers_that_64_bits_do_not_hold_are_found() {
        for (json, found) in [
            ("18446744073709551615", None),
            ("18446744073709551616", Some("18446744073709551616")),
            ("[-9223372036854775808, 1]", None),
            ("[1,-9223372036854775809]", Some("-9223372036854775809")),
            (r#"{"18446744073709551616": "99999999999999999999", "x": 1}"#, None),
            (r#"["\\", 99999999999999999999]"#, Some("99999999999999999999")),
            (r#"["\"", 7, "99999999999999999999"]"#, None),
            ("[1.99999999999999999999, 1e99999, 99999999999999999999.0, 1E+20, -0]", None),
            ("[true, false, null]", None),
        ] {
            assert_eq!(beyond_64_bits(json), found, "{json}");
        }
    }
}
