//! Typed access to the fields of a JSON object, with errors that name the field. Knows nothing of
//! models. A field that is null counts as absent.

use std::ops::RangeInclusive;

use serde_json::{Map, Value};

use super::error::TargetError;

/// A JSON object and the dotted name that leads to it.
#[derive(Clone, Debug)]
pub(super) struct Fields<'a> {
    map: &'a Map<String, Value>,
    prefix: String,
}

impl<'a> Fields<'a> {
    pub(super) fn new(value: &'a Value, prefix: &str) -> Result<Self, TargetError> {
        match value {
            Value::Object(map) => Ok(Self { map, prefix: prefix.to_owned() }),
            other => Err(TargetError::ConfigField {
                field: if prefix.is_empty() { "(root)".to_owned() } else { prefix.to_owned() },
                problem: format!("is {}; an object is expected", kind(other)),
            }),
        }
    }

    pub(super) fn wrong(&self, name: &str, problem: String) -> TargetError {
        TargetError::ConfigField { field: self.path(name), problem }
    }

    pub(super) fn require(
        &self,
        name: &str,
        holds: bool,
        problem: impl FnOnce() -> String,
    ) -> Result<(), TargetError> {
        if holds { Ok(()) } else { Err(self.wrong(name, problem())) }
    }

    pub(super) fn object(&self, name: &str) -> Result<Fields<'a>, TargetError> {
        self.optional_object(name)?.ok_or_else(|| self.missing(name))
    }

    pub(super) fn optional_object(&self, name: &str) -> Result<Option<Fields<'a>>, TargetError> {
        self.get(name).map(|value| Fields::new(value, &self.path(name))).transpose()
    }

    pub(super) fn text(&self, name: &str) -> Result<&'a str, TargetError> {
        self.optional_text(name)?.ok_or_else(|| self.missing(name))
    }

    pub(super) fn text_or(&self, name: &str, default: &'a str) -> Result<&'a str, TargetError> {
        Ok(self.optional_text(name)?.unwrap_or(default))
    }

    pub(super) fn optional_text(&self, name: &str) -> Result<Option<&'a str>, TargetError> {
        match self.get(name) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(self.wrong(name, format!("is {}; text is expected", kind(other)))),
        }
    }

    pub(super) fn flag_or(&self, name: &str, default: bool) -> Result<bool, TargetError> {
        match self.get(name) {
            None => Ok(default),
            Some(Value::Bool(flag)) => Ok(*flag),
            Some(other) => {
                Err(self.wrong(name, format!("is {}; true or false is expected", kind(other))))
            }
        }
    }

    pub(super) fn refuse_flag(&self, name: &str, why: &str) -> Result<(), TargetError> {
        let set = self.flag_or(name, false)?;
        self.require(name, !set, || format!("is true; {why}"))
    }

    pub(super) fn refuse_false(&self, name: &str, why: &str) -> Result<(), TargetError> {
        let set = self.flag_or(name, true)?;
        self.require(name, set, || format!("is false; {why}"))
    }

    pub(super) fn size(
        &self,
        name: &str,
        range: RangeInclusive<usize>,
    ) -> Result<usize, TargetError> {
        self.optional_size(name, range)?.ok_or_else(|| self.missing(name))
    }

    pub(super) fn size_or(
        &self,
        name: &str,
        range: RangeInclusive<usize>,
        default: usize,
    ) -> Result<usize, TargetError> {
        Ok(self.optional_size(name, range)?.unwrap_or(default))
    }

    pub(super) fn even(
        &self,
        name: &str,
        range: RangeInclusive<usize>,
    ) -> Result<usize, TargetError> {
        let size = self.size(name, range)?;
        self.require(name, size.is_multiple_of(2), || format!("is {size}; it must be even"))?;
        Ok(size)
    }

    pub(super) fn optional_size(
        &self,
        name: &str,
        range: RangeInclusive<usize>,
    ) -> Result<Option<usize>, TargetError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        let size = value.as_u64().and_then(|size| usize::try_from(size).ok());
        match size {
            Some(size) if range.contains(&size) => Ok(Some(size)),
            _ => {
                let (low, high) = (range.start(), range.end());
                let shown = shorten(value);
                Err(self.wrong(
                    name,
                    format!("is {shown}; an integer from {low} to {high} is expected"),
                ))
            }
        }
    }

    pub(super) fn number(
        &self,
        name: &str,
        range: RangeInclusive<f64>,
    ) -> Result<f64, TargetError> {
        self.optional_number(name, range)?.ok_or_else(|| self.missing(name))
    }

    pub(super) fn optional_number(
        &self,
        name: &str,
        range: RangeInclusive<f64>,
    ) -> Result<Option<f64>, TargetError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        match value.as_f64() {
            Some(number) if range.contains(&number) => Ok(Some(number)),
            _ => {
                let (low, high) = (range.start(), range.end());
                let shown = shorten(value);
                Err(self
                    .wrong(name, format!("is {shown}; a number from {low} to {high} is expected")))
            }
        }
    }

    /// One token id, a list of them, or none.
    pub(super) fn ids(&self, name: &str) -> Result<Vec<u32>, TargetError> {
        let id = |value: &Value| {
            value.as_u64().and_then(|id| u32::try_from(id).ok()).ok_or_else(|| {
                self.wrong(name, format!("holds {}; token ids are expected", shorten(value)))
            })
        };
        match self.get(name) {
            None => Ok(Vec::new()),
            Some(Value::Array(values)) => values.iter().map(id).collect(),
            Some(value) => Ok(vec![id(value)?]),
        }
    }

    fn get(&self, name: &str) -> Option<&'a Value> {
        self.map.get(name).filter(|value| !value.is_null())
    }

    fn path(&self, name: &str) -> String {
        if self.prefix.is_empty() { name.to_owned() } else { format!("{}.{name}", self.prefix) }
    }

    fn missing(&self, name: &str) -> TargetError {
        self.wrong(name, "is missing".to_owned())
    }
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "true or false",
        Value::Number(_) => "a number",
        Value::String(_) => "text",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

fn shorten(value: &Value) -> String {
    let mut text: String = value.to_string().chars().take(41).collect();
    if text.chars().count() > 40 {
        text.pop();
        text.push('…');
    }
    text
}
