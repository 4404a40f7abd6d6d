//! The header of a safetensors file under our own limits: size, count, names, rank, dtypes and
//! duplicate keys are refused before the safetensors parser sees it. Knows no tensor names.

use std::collections::BTreeMap;
use std::fmt;
use std::io::{self, Read};

use safetensors::tensor::{Dtype, Metadata};
use serde::Deserialize;
use serde::de::{self, DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use thiserror::Error;

/// What a header may be at most.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HeaderLimits {
    /// Bytes of the JSON text.
    pub bytes: u64,
    /// Number of tensors.
    pub tensors: usize,
    /// Axes of a tensor.
    pub rank: usize,
    /// Bytes of a name.
    pub name: usize,
    /// Whether names hold only `a-z 0-9 _ .`.
    pub plain_names: bool,
}

impl HeaderLimits {
    /// Limits of our own shards.
    pub const SHARD: Self =
        Self { bytes: 1 << 20, tensors: 4096, rank: 4, name: 64, plain_names: true };
    /// Limits of files made by others.
    pub const FOREIGN: Self =
        Self { bytes: 16 << 20, tensors: 65_536, rank: 8, name: 512, plain_names: false };
}

impl Default for HeaderLimits {
    fn default() -> Self {
        Self::SHARD
    }
}

/// One tensor of a file.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TensorEntry {
    /// Its name.
    pub name: String,
    /// Type of its values.
    pub dtype: Dtype,
    /// Its axes, each at least 1.
    pub shape: Vec<usize>,
    /// Position of its first byte in the file.
    pub start: u64,
    /// Its bytes.
    pub bytes: u64,
}

/// A checked header: tensors without holes or overlaps that fill the file exactly.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ShardHeader {
    /// Tensors in the order of their bytes.
    pub tensors: Vec<TensorEntry>,
    /// The free-text metadata.
    pub metadata: BTreeMap<String, String>,
    /// Position of the first tensor byte in the file.
    pub data_start: u64,
}

impl ShardHeader {
    /// Reads the header of a file of `file_bytes` bytes from its beginning.
    pub fn read(
        mut reader: impl Read,
        file_bytes: u64,
        limits: &HeaderLimits,
    ) -> Result<Self, HeaderError> {
        if file_bytes < 8 {
            return Err(HeaderError::TooShort { bytes: file_bytes });
        }
        let mut length = [0; 8];
        reader.read_exact(&mut length)?;
        let length = u64::from_le_bytes(length);
        if length > limits.bytes {
            return Err(HeaderError::TooLong { bytes: length, limit: limits.bytes });
        }
        if length > file_bytes - 8 {
            return Err(HeaderError::Truncated { needed: 8 + length, bytes: file_bytes });
        }
        let mut text = vec![0; length as usize];
        reader.read_exact(&mut text)?;
        Self::parse(&text, file_bytes, limits)
    }

    fn parse(text: &[u8], file_bytes: u64, limits: &HeaderLimits) -> Result<Self, HeaderError> {
        let text = std::str::from_utf8(text).map_err(|_| HeaderError::NotUtf8)?;
        let mut json = serde_json::Deserializer::from_str(text);
        let scan = HeaderScan { limits }
            .deserialize(&mut json)
            .and_then(|scan| json.end().map(|()| scan))
            .map_err(|error| HeaderError::Json(error.to_string()))?;
        for (name, tensor) in &scan.tensors {
            check_entry(name, tensor, limits)?;
        }
        // Offsets: without holes or overlaps, and as many bytes as shape and dtype say.
        let checked: Metadata =
            serde_json::from_str(text).map_err(|error| HeaderError::Json(error.to_string()))?;
        let data_start = 8 + text.len() as u64;
        let needed = data_start + checked.data_len() as u64;
        if needed > file_bytes {
            return Err(HeaderError::Truncated { needed, bytes: file_bytes });
        }
        if needed < file_bytes {
            return Err(HeaderError::Trailing { needed, bytes: file_bytes });
        }
        let mut tensors: Vec<TensorEntry> = scan
            .tensors
            .into_iter()
            .map(|(name, tensor)| TensorEntry {
                name,
                dtype: tensor.dtype,
                shape: tensor.shape.0,
                start: data_start + tensor.data_offsets[0],
                bytes: tensor.data_offsets[1] - tensor.data_offsets[0],
            })
            .collect();
        tensors.sort_by_key(|tensor| tensor.start);
        Ok(Self { tensors, metadata: scan.metadata, data_start })
    }

    /// The tensor of that name.
    pub fn tensor(&self, name: &str) -> Option<&TensorEntry> {
        self.tensors.iter().find(|tensor| tensor.name == name)
    }
}

fn check_entry(name: &str, tensor: &RawTensor, limits: &HeaderLimits) -> Result<(), HeaderError> {
    let plain = |c: u8| c.is_ascii_lowercase() || c.is_ascii_digit() || c == b'_' || c == b'.';
    let bad_letters = if limits.plain_names {
        !name.bytes().all(plain)
    } else {
        name.chars().any(char::is_control)
    };
    if name.is_empty() || name.len() > limits.name || bad_letters {
        return Err(HeaderError::Name(name.chars().take(80).collect()));
    }
    let fault = |reason: String| HeaderError::Tensor { name: name.to_owned(), reason };
    let shape = &tensor.shape.0;
    if shape.len() > limits.rank {
        return Err(fault(format!("{} axes, at most {} are allowed", shape.len(), limits.rank)));
    }
    if shape.contains(&0) {
        return Err(fault(format!("shape {shape:?} has an empty axis")));
    }
    let [start, end] = tensor.data_offsets;
    if end < start {
        return Err(fault(format!("ends at {end} before its start {start}")));
    }
    Ok(())
}

/// Why a header is refused.
#[derive(Debug, Error)]
pub enum HeaderError {
    /// No room for the length field.
    #[error("{bytes} bytes are no safetensors file: 8 bytes of header length are expected")]
    TooShort {
        /// Bytes of the file.
        bytes: u64,
    },
    /// Longer than allowed.
    #[error(
        "its first 8 bytes claim a header of {bytes} bytes, at most {limit} are allowed: no \
         safetensors file, or a damaged one"
    )]
    TooLong {
        /// Bytes claimed.
        bytes: u64,
        /// Bytes allowed.
        limit: u64,
    },
    /// The file ends before its contents.
    #[error("truncated: {needed} bytes are needed, the file has {bytes}")]
    Truncated {
        /// Bytes that the header implies.
        needed: u64,
        /// Bytes of the file.
        bytes: u64,
    },
    /// The file goes on behind its contents.
    #[error("{} bytes behind the last tensor", bytes - needed)]
    Trailing {
        /// Bytes that the header implies.
        needed: u64,
        /// Bytes of the file.
        bytes: u64,
    },
    /// Not text.
    #[error("the header is not UTF-8")]
    NotUtf8,
    /// Not the JSON of a header, or a duplicate key.
    #[error("the header is not acceptable: {0}")]
    Json(String),
    /// A tensor name with other letters or too long.
    #[error("tensor name {0:?} is not allowed")]
    Name(String),
    /// A tensor with a wrong shape or offset.
    #[error("tensor `{name}`: {reason}")]
    Tensor {
        /// Its name.
        name: String,
        /// What is wrong.
        reason: String,
    },
    /// Reading did not succeed.
    #[error("reading the header")]
    Io(#[from] io::Error),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawTensor {
    dtype: Dtype,
    shape: Axes,
    data_offsets: [u64; 2],
}

/// A shape whose length is bounded while it is read.
struct Axes(Vec<usize>);

impl<'de> Deserialize<'de> for Axes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct AxesVisitor;
        impl<'de> Visitor<'de> for AxesVisitor {
            type Value = Axes;
            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("a list of axes")
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut axes: A) -> Result<Axes, A::Error> {
                let mut shape = Vec::new();
                while let Some(axis) = axes.next_element()? {
                    shape.push(axis);
                    if shape.len() > 32 {
                        return Err(de::Error::custom("more than 32 axes"));
                    }
                }
                Ok(Axes(shape))
            }
        }
        deserializer.deserialize_seq(AxesVisitor)
    }
}

struct Scan {
    tensors: BTreeMap<String, RawTensor>,
    metadata: BTreeMap<String, String>,
}

struct HeaderScan<'a> {
    limits: &'a HeaderLimits,
}

impl<'de> DeserializeSeed<'de> for HeaderScan<'_> {
    type Value = Scan;
    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Scan, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for HeaderScan<'_> {
    type Value = Scan;
    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("an object of tensors")
    }
    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Scan, A::Error> {
        let mut tensors = BTreeMap::new();
        let mut metadata = None;
        while let Some(name) = map.next_key::<String>()? {
            if name == "__metadata__" {
                if metadata.replace(map.next_value::<UniqueText>()?.0).is_some() {
                    return Err(de::Error::custom("`__metadata__` occurs twice"));
                }
                continue;
            }
            if tensors.len() >= self.limits.tensors {
                map.next_value::<IgnoredAny>()?;
                let limit = self.limits.tensors;
                return Err(de::Error::custom(format!("more than {limit} tensors")));
            }
            let tensor = map.next_value::<RawTensor>()?;
            if tensors.contains_key(&name) {
                let shown: String = name.chars().take(80).collect();
                return Err(de::Error::custom(format!("tensor {shown:?} occurs twice")));
            }
            tensors.insert(name, tensor);
        }
        Ok(Scan { tensors, metadata: metadata.unwrap_or_default() })
    }
}

/// String to string, no key twice.
struct UniqueText(BTreeMap<String, String>);

impl<'de> Deserialize<'de> for UniqueText {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct TextVisitor;
        impl<'de> Visitor<'de> for TextVisitor {
            type Value = UniqueText;
            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("an object of strings")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<UniqueText, A::Error> {
                let mut text = BTreeMap::new();
                while let Some((key, value)) = map.next_entry::<String, String>()? {
                    if text.contains_key(&key) {
                        return Err(de::Error::custom(format!("metadata {key:?} occurs twice")));
                    }
                    text.insert(key, value);
                }
                Ok(UniqueText(text))
            }
        }
        deserializer.deserialize_map(TextVisitor)
    }
}
