//! The header of a safetensors file: which tensors lie where. Trusts nothing in it.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;

use serde::Deserialize;
use serde::de::{Deserializer, Error, MapAccess, Visitor};

use super::WeightsError;
use super::mapped::MappedFile;

/// Largest header that is read; Kimi-K2.5's 64 files have less than 1 MiB each.
pub const MAX_HEADER_BYTES: u64 = 16 << 20;
/// Most tensors a file may hold.
pub const MAX_TENSORS: usize = 65_536;
/// Bytes of the header's length, which begins the file.
const PREFIX: usize = 8;

/// Number format of a stored tensor.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Dtype {
    F32,
    F16,
    Bf16,
    F8E4m3,
    U8,
    I32,
    I64,
    /// Formats that no weight of ours has, by name.
    Other(String),
}

impl Dtype {
    fn of(name: String) -> Self {
        match name.as_str() {
            "F32" => Self::F32,
            "F16" => Self::F16,
            "BF16" => Self::Bf16,
            "F8_E4M3" => Self::F8E4m3,
            "U8" => Self::U8,
            "I32" => Self::I32,
            "I64" => Self::I64,
            _ => Self::Other(name),
        }
    }

    /// Bytes of an element; `None` where unknown.
    fn bytes(&self) -> Option<usize> {
        match self {
            Self::F8E4m3 | Self::U8 => Some(1),
            Self::F16 | Self::Bf16 => Some(2),
            Self::F32 | Self::I32 => Some(4),
            Self::I64 => Some(8),
            Self::Other(_) => None,
        }
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F32 => "F32",
            Self::F16 => "F16",
            Self::Bf16 => "BF16",
            Self::F8E4m3 => "F8_E4M3",
            Self::U8 => "U8",
            Self::I32 => "I32",
            Self::I64 => "I64",
            Self::Other(name) => name,
        })
    }
}

/// One tensor of a file.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Entry {
    pub(super) dtype: Dtype,
    pub(super) shape: Vec<usize>,
    /// Bytes of the file.
    pub(super) bytes: Range<usize>,
}

/// The tensors of a file by stored name.
#[derive(Debug)]
pub(super) struct Header {
    pub(super) tensors: BTreeMap<String, Entry>,
    /// First byte after the header.
    pub(super) end: usize,
}

/// Reads and checks the header: limits, sizes against shapes, no gap and no overlap, and the end
/// of the last tensor against the size of the file.
pub(super) fn read(file: &MappedFile) -> Result<Header, WeightsError> {
    let malformed =
        |reason: String| WeightsError::Header { path: file.path().to_path_buf(), reason };
    let (prefix, _) = file.bytes(0..PREFIX)?.as_chunks::<PREFIX>();
    let bytes = prefix.first().map_or(0, |prefix| u64::from_le_bytes(*prefix));
    if bytes > MAX_HEADER_BYTES {
        let (path, limit) = (file.path().to_path_buf(), MAX_HEADER_BYTES);
        return Err(WeightsError::HeaderTooLarge { path, bytes, limit });
    }
    let end = PREFIX + bytes as usize;
    let RawHeader(raw) = serde_json::from_slice(file.bytes(PREFIX..end)?)
        .map_err(|error| malformed(error.to_string()))?;
    let mut tensors = BTreeMap::new();
    for (name, raw) in raw {
        let entry = entry(raw, end).map_err(|reason| malformed(format!("{name}: {reason}")))?;
        tensors.insert(name, entry);
    }
    check_layout(&tensors, end, file)?;
    Ok(Header { tensors, end })
}

fn entry(raw: RawEntry, start: usize) -> Result<Entry, String> {
    let [first, last] = raw.data_offsets;
    let dtype = Dtype::of(raw.dtype);
    let elements = raw.shape.iter().try_fold(1usize, |product, &n| product.checked_mul(n));
    let elements = elements.ok_or("more elements than can be counted")?;
    let bytes = last.checked_sub(first).ok_or("ends before it starts")?;
    if let Some(size) = dtype.bytes()
        && elements.checked_mul(size) != Some(bytes)
    {
        return Err(format!("{bytes} bytes for {elements} elements of {dtype}"));
    }
    let at = |offset: usize| start.checked_add(offset).ok_or("offset beyond any file");
    Ok(Entry { dtype, shape: raw.shape, bytes: at(first)?..at(last)? })
}

fn check_layout(
    tensors: &BTreeMap<String, Entry>,
    start: usize,
    file: &MappedFile,
) -> Result<(), WeightsError> {
    let path = || file.path().to_path_buf();
    let mut ranges: Vec<&Range<usize>> = tensors.values().map(|entry| &entry.bytes).collect();
    ranges.sort_by_key(|range| (range.start, range.end));
    let mut end = start;
    for range in ranges {
        if range.start != end {
            let reason = format!("a gap or an overlap of tensors at byte {end}");
            return Err(WeightsError::Header { path: path(), reason });
        }
        end = range.end;
    }
    match file.len() {
        found if found < end => {
            let (expected, found) = (end as u64, found as u64);
            Err(WeightsError::Truncated { path: path(), expected, found })
        }
        found if found > end => {
            let reason = format!("{} bytes after the last tensor", found - end);
            Err(WeightsError::Header { path: path(), reason })
        }
        _ => Ok(()),
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawEntry {
    dtype: String,
    shape: Vec<usize>,
    data_offsets: [usize; 2],
}

/// Entries in file order; a name may come only once.
struct RawHeader(BTreeMap<String, RawEntry>);

impl<'de> Deserialize<'de> for RawHeader {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = BTreeMap<String, RawEntry>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object with an entry for each tensor")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut tensors = BTreeMap::new();
                let mut has_metadata = false;
                while let Some(name) = map.next_key::<String>()? {
                    let repeated = if name == "__metadata__" {
                        map.next_value::<BTreeMap<String, String>>()?;
                        std::mem::replace(&mut has_metadata, true)
                    } else {
                        tensors.insert(name.clone(), map.next_value()?).is_some()
                    };
                    if repeated {
                        return Err(A::Error::custom(format!("{name} comes twice")));
                    }
                    if tensors.len() > MAX_TENSORS {
                        return Err(A::Error::custom(format!("more than {MAX_TENSORS} tensors")));
                    }
                }
                Ok(tensors)
            }
        }
        deserializer.deserialize_map(Entries).map(Self)
    }
}
