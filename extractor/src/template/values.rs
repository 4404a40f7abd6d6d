//! Between JSON and the template engine's values. Objects keep the order of their keys, which
//! `tojson` shows. Knows nothing of what the values mean.

use std::sync::Arc;

use minijinja::value::{Enumerator, Kwargs, Object, ObjectRepr, Value, ValueKind};
use minijinja::{Error, ErrorKind, State};
use serde_json::Value as Json;

use crate::conversation::Message;

const MAX_DEPTH: usize = 128;
/// Bytes of JSON for a unit of fuel, as the engine charges for its own `tojson`.
const BYTES_A_FUEL: usize = 4;

/// The day `strftime_now` always gives: a template must render the same on every day.
/// Thursday, 1 January 2026, 00:00.
pub(super) fn strftime_fixed(format: String) -> Result<String, Error> {
    let mut text = String::new();
    let mut rest = format.chars();
    while let Some(character) = rest.next() {
        if character != '%' {
            text.push(character);
            continue;
        }
        text.push_str(match rest.next() {
            Some('Y') => "2026",
            Some('y') => "26",
            Some('m' | 'd') => "01",
            Some('B') => "January",
            Some('b' | 'h') => "Jan",
            Some('A') => "Thursday",
            Some('a') => "Thu",
            Some('H' | 'M' | 'S') => "00",
            Some('j') => "001",
            Some('F') => "2026-01-01",
            Some('T') => "00:00:00",
            Some('%') => "%",
            other => {
                let detail = format!("strftime_now does not know %{}", other.unwrap_or(' '));
                return Err(Error::new(ErrorKind::InvalidOperation, detail));
            }
        });
    }
    Ok(text)
}

/// A message as templates read it: `role`, `content`, then its other keys.
pub(super) fn write_message(message: &Message) -> Value {
    let content = match message.content.as_str() {
        "" if message.content_is_null => Value::from(()),
        text => Value::from(text),
    };
    let mut entries = vec![
        ("role".to_owned(), Value::from(message.role.name())),
        ("content".to_owned(), content),
    ];
    entries.extend(message.extra.iter().map(|(key, value)| (key.clone(), from_json(value))));
    Value::from_object(Ordered(entries))
}

/// The same value for the template engine.
pub(super) fn from_json(json: &Json) -> Value {
    match json {
        Json::Null => Value::from(()),
        Json::Bool(flag) => Value::from(*flag),
        Json::Number(number) => match (number.as_i64(), number.as_u64()) {
            (Some(integer), _) => Value::from(integer),
            (_, Some(integer)) => Value::from(integer),
            _ => Value::from(number.as_f64().unwrap_or(f64::NAN)),
        },
        Json::String(text) => Value::from(text.as_str()),
        Json::Array(list) => list.iter().map(from_json).collect::<Vec<_>>().into(),
        Json::Object(map) => {
            let entries = map.iter().map(|(key, value)| (key.clone(), from_json(value)));
            Value::from_object(Ordered(entries.collect()))
        }
    }
}

#[derive(Debug)]
struct Ordered(Vec<(String, Value)>);

impl Object for Ordered {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Map
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        self.get_value_by_str(key.as_str()?)
    }

    fn get_value_by_str(self: &Arc<Self>, key: &str) -> Option<Value> {
        self.0.iter().find(|(name, _)| name == key).map(|(_, value)| value.clone())
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Values(self.0.iter().map(|(name, _)| Value::from(name.as_str())).collect())
    }
}

/// Python's `json.dumps` with the options that templates use. Pays for what it writes while it
/// does: a list that holds another twice, and so on, is small until it is written out.
pub(super) fn to_json(state: &State, value: &Value, options: &Kwargs) -> Result<String, Error> {
    let indent: Option<usize> = options.get("indent")?;
    let separators: Option<Vec<String>> = options.get("separators")?;
    let mut writer = JsonWriter {
        state,
        paid: 0,
        indent,
        item: if indent.is_some() { "," } else { ", " }.to_owned(),
        key: ": ".to_owned(),
        sort: options.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
        ascii: options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
        out: String::new(),
    };
    if let Some([item, key]) = separators.as_deref() {
        (writer.item, writer.key) = (item.clone(), key.clone());
    }
    options.assert_all_used()?;
    writer.write(value, 0)?;
    Ok(writer.out)
}

/// The shortest digits that give the number back, as Python writes them: with an exponent below
/// 0.0001 and from 1e16 on.
fn python_float(number: f64) -> String {
    if number.is_nan() {
        return "NaN".to_owned();
    }
    let shortest = format!("{number:e}");
    let parts = shortest.split_once('e');
    match parts.and_then(|(digits, power)| Some((digits, power.parse::<i32>().ok()?))) {
        None => if number > 0.0 { "Infinity" } else { "-Infinity" }.to_owned(),
        Some((digits, power)) if !(-4..16).contains(&power) => format!("{digits}e{power:+03}"),
        Some(_) => format!("{number:?}"),
    }
}

struct JsonWriter<'a> {
    state: &'a State<'a, 'a>,
    /// Bytes of `out` that fuel was taken for.
    paid: usize,
    indent: Option<usize>,
    item: String,
    key: String,
    sort: bool,
    ascii: bool,
    out: String,
}

impl JsonWriter<'_> {
    fn write(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        let refuse = |what: String| Err(Error::new(ErrorKind::BadSerialization, what));
        if depth > MAX_DEPTH {
            return refuse("tojson: nested too deeply".into());
        }
        self.pay()?;
        match value.kind() {
            ValueKind::None => self.out.push_str("null"),
            ValueKind::Bool => self.out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number if value.is_integer() => self.out.push_str(&value.to_string()),
            ValueKind::Number => self.out.push_str(&python_float(f64::try_from(value.clone())?)),
            ValueKind::String => self.string(value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => {
                let items: Vec<Value> = value.try_iter()?.checked().collect::<Result<_, _>>()?;
                self.list(['[', ']'], &items, depth, |writer, item| writer.write(item, depth + 1))?;
            }
            ValueKind::Map => {
                let mut keys: Vec<Value> = value.try_iter()?.checked().collect::<Result<_, _>>()?;
                if self.sort {
                    keys.sort();
                }
                self.list(['{', '}'], &keys, depth, |writer, key| {
                    writer.string(&key.to_string());
                    let separator = writer.key.clone();
                    writer.out.push_str(&separator);
                    writer.write(&value.get_item(key)?, depth + 1)
                })?;
            }
            other => return refuse(format!("tojson: {other} is not JSON")),
        }
        Ok(())
    }

    /// Takes fuel for one value and for what was written since the last.
    fn pay(&mut self) -> Result<(), Error> {
        let bytes = self.out.len() - self.paid;
        self.paid = self.out.len();
        self.state.consume_fuel(1 + (bytes / BYTES_A_FUEL) as u64)
    }

    fn list(
        &mut self,
        [open, close]: [char; 2],
        items: &[Value],
        depth: usize,
        mut write: impl FnMut(&mut Self, &Value) -> Result<(), Error>,
    ) -> Result<(), Error> {
        self.out.push(open);
        for (index, item) in items.iter().enumerate() {
            if index > 0 {
                self.out += &self.item.clone();
            }
            self.new_line(depth + 1);
            write(self, item)?;
        }
        if !items.is_empty() {
            self.new_line(depth);
        }
        self.out.push(close);
        Ok(())
    }

    fn new_line(&mut self, depth: usize) {
        if let Some(indent) = self.indent {
            self.out.push('\n');
            self.out.extend(std::iter::repeat_n(' ', indent.min(16) * depth));
        }
    }

    fn string(&mut self, text: &str) {
        self.out.push('"');
        for character in text.chars() {
            match character {
                '"' => self.out.push_str("\\\""),
                '\\' => self.out.push_str("\\\\"),
                '\n' => self.out.push_str("\\n"),
                '\r' => self.out.push_str("\\r"),
                '\t' => self.out.push_str("\\t"),
                '\u{8}' => self.out.push_str("\\b"),
                '\u{c}' => self.out.push_str("\\f"),
                control if control < ' ' => self.escape(control),
                other if self.ascii && !other.is_ascii() => self.escape(other),
                other => self.out.push(other),
            }
        }
        self.out.push('"');
    }

    fn escape(&mut self, character: char) {
        for unit in character.encode_utf16(&mut [0; 2]) {
            self.out.push_str(&format!("\\u{unit:04x}"));
        }
    }
}
