//! Named tensors on the host, to and from safetensors bytes. Knows no model and writes no files.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

use half::bf16;
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use thiserror::Error;

/// One tensor: little-endian row-major bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostTensor {
    /// Stored type.
    pub dtype: Dtype,
    /// Sizes of all dimensions.
    pub shape: Vec<usize>,
    /// The values.
    pub bytes: Vec<u8>,
}

impl HostTensor {
    /// f32 values.
    pub fn f32(values: &[f32], shape: &[usize]) -> Self {
        let bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        Self { dtype: Dtype::F32, shape: shape.to_vec(), bytes }
    }

    /// Values rounded to bf16, ties to even.
    pub fn bf16(values: &[f32], shape: &[usize]) -> Self {
        let bytes = values.iter().flat_map(|&v| bf16::from_f32(v).to_le_bytes()).collect();
        Self { dtype: Dtype::BF16, shape: shape.to_vec(), bytes }
    }

    /// i64 values, one dimension.
    pub fn i64(values: &[i64]) -> Self {
        let bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        Self { dtype: Dtype::I64, shape: vec![values.len()], bytes }
    }

    /// Truth values, one dimension.
    pub fn bool(values: &[bool]) -> Self {
        let bytes = values.iter().map(|&v| u8::from(v)).collect();
        Self { dtype: Dtype::BOOL, shape: vec![values.len()], bytes }
    }

    /// The values as f32, for F32, BF16 and F16; `None` for other types.
    pub fn to_f32(&self) -> Option<Vec<f32>> {
        let (pairs, rest) = self.bytes.as_chunks::<2>();
        match self.dtype {
            Dtype::F32 => {
                let (quads, _) = self.bytes.as_chunks::<4>();
                Some(quads.iter().map(|&b| f32::from_le_bytes(b)).collect())
            }
            Dtype::BF16 if rest.is_empty() => {
                Some(pairs.iter().map(|&b| bf16::from_le_bytes(b).to_f32()).collect())
            }
            Dtype::F16 if rest.is_empty() => {
                Some(pairs.iter().map(|&b| half::f16::from_le_bytes(b).to_f32()).collect())
            }
            _ => None,
        }
    }

    /// The values as i64, for I64; `None` for other types.
    pub fn to_i64(&self) -> Option<Vec<i64>> {
        let (words, _) = self.bytes.as_chunks::<8>();
        (self.dtype == Dtype::I64).then(|| words.iter().map(|&b| i64::from_le_bytes(b)).collect())
    }

    /// The values as truth values, for BOOL; `None` for other types.
    pub fn to_bool(&self) -> Option<Vec<bool>> {
        (self.dtype == Dtype::BOOL).then(|| self.bytes.iter().map(|&b| b != 0).collect())
    }
}

/// The content of one safetensors file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TensorFile {
    /// Free text by key.
    pub metadata: BTreeMap<String, String>,
    /// Tensors by name.
    pub tensors: BTreeMap<String, HostTensor>,
}

impl TensorFile {
    /// The bytes of the file. Equal contents give equal bytes.
    pub fn encode(&self) -> Result<Vec<u8>, TensorFileError> {
        let views = self.tensors.iter().map(|(name, tensor)| {
            TensorView::new(tensor.dtype, tensor.shape.clone(), &tensor.bytes)
                .map(|view| (name.as_str(), view))
        });
        let views: Vec<_> =
            views.collect::<Result<_, _>>().map_err(|source| TensorFileError::Encode { source })?;
        // The writer wants a HashMap, whose order would change the bytes from run to run: several
        // keys are written as one that holds them as JSON.
        let metadata = match self.metadata.len() {
            0 => None,
            1 => Some(self.metadata.clone().into_iter().collect()),
            _ => Some(HashMap::from([(
                "aerie".to_owned(),
                serde_json::to_string(&self.metadata).unwrap_or_default(),
            )])),
        };
        safetensors::serialize(views, metadata).map_err(|source| TensorFileError::Encode { source })
    }

    /// Parses the bytes of a file; `path` is for the error.
    pub fn decode(bytes: &[u8], path: &Path) -> Result<Self, TensorFileError> {
        let invalid = |source| TensorFileError::Invalid { path: path.to_owned(), source };
        let (_, header) = SafeTensors::read_metadata(bytes).map_err(invalid)?;
        let mut metadata = BTreeMap::new();
        for (key, value) in header.metadata().iter().flatten() {
            match serde_json::from_str::<BTreeMap<String, String>>(value) {
                Ok(inner) if key == "aerie" => metadata.extend(inner),
                _ => {
                    metadata.insert(key.clone(), value.clone());
                }
            }
        }
        let parsed = SafeTensors::deserialize(bytes).map_err(invalid)?;
        let tensors = parsed.iter().map(|(name, view)| {
            let tensor = HostTensor {
                dtype: view.dtype(),
                shape: view.shape().to_vec(),
                bytes: view.data().to_vec(),
            };
            (name.to_owned(), tensor)
        });
        Ok(Self { metadata, tensors: tensors.collect() })
    }

    /// Reads a file.
    pub fn read(path: &Path) -> Result<Self, TensorFileError> {
        let bytes = std::fs::read(path)
            .map_err(|source| TensorFileError::Read { path: path.to_owned(), source })?;
        Self::decode(&bytes, path)
    }

    /// The f32 values of a tensor of the given shape; `path` is for the error.
    pub fn f32(
        &self,
        name: &str,
        shape: &[usize],
        path: &Path,
    ) -> Result<Vec<f32>, TensorFileError> {
        let tensor = self.get(name, path)?;
        let values = tensor.to_f32().filter(|_| tensor.shape == shape);
        values.ok_or_else(|| TensorFileError::Unexpected {
            path: path.to_owned(),
            name: name.to_owned(),
            expected: format!("a float of shape {shape:?}"),
            found: format!("{:?} of shape {:?}", tensor.dtype, tensor.shape),
        })
    }

    /// A tensor by name; `path` is for the error.
    pub fn get(&self, name: &str, path: &Path) -> Result<&HostTensor, TensorFileError> {
        self.tensors.get(name).ok_or_else(|| TensorFileError::Missing {
            path: path.to_owned(),
            name: name.to_owned(),
            present: some_names(self.tensors.keys()),
        })
    }
}

fn some_names<'a>(names: impl ExactSizeIterator<Item = &'a String>) -> String {
    let count = names.len();
    let mut text = names.take(8).cloned().collect::<Vec<_>>().join(", ");
    if count > 8 {
        text.push_str(&format!(", ... ({count} in all)"));
    }
    text
}

/// A tensor file that cannot be read or does not hold what is needed.
#[derive(Debug, Error)]
pub enum TensorFileError {
    /// The operating system refused.
    #[error("reading {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Its reason.
        #[source]
        source: std::io::Error,
    },
    /// Not a safetensors file.
    #[error("{} is not a valid safetensors file (truncated?)", path.display())]
    Invalid {
        /// The file.
        path: PathBuf,
        /// The parser's reason.
        #[source]
        source: safetensors::SafeTensorError,
    },
    /// Shape and bytes of a tensor to be written disagree.
    #[error("a tensor cannot be written as safetensors")]
    Encode {
        /// The writer's reason.
        #[source]
        source: safetensors::SafeTensorError,
    },
    /// A tensor is not there.
    #[error("{} holds no tensor {name}; it holds {present}", path.display())]
    Missing {
        /// The file.
        path: PathBuf,
        /// The missing tensor.
        name: String,
        /// Some that are there.
        present: String,
    },
    /// A tensor has another shape or type.
    #[error("{}: {name} is {found}, expected {expected}", path.display())]
    Unexpected {
        /// The file.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// What is needed.
        expected: String,
        /// What is there.
        found: String,
    },
}

impl TensorFileError {
    /// Process exit code.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Read { .. } => 74,
            Self::Encode { .. } => 70,
            _ => 65,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_contents_give_equal_bytes_and_read_back() {
        let mut file = TensorFile::default();
        for key in ["a", "b", "c", "d", "e"] {
            file.metadata.insert(key.into(), "x".into());
        }
        file.tensors.insert("w".into(), HostTensor::f32(&[1.0, -2.5], &[2, 1]));
        file.tensors.insert("h".into(), HostTensor::bf16(&[0.1], &[1]));
        file.tensors.insert("d2t".into(), HostTensor::i64(&[0, -3]));
        file.tensors.insert("t2d".into(), HostTensor::bool(&[true, false]));
        let bytes = file.encode().unwrap();
        assert!((0..5).all(|_| file.clone().encode().unwrap() == bytes));
        let back = TensorFile::decode(&bytes, Path::new("f")).unwrap();
        assert_eq!(back, file);
        assert_eq!(back.tensors["h"].to_f32().unwrap(), [0.100_097_656]);
        assert_eq!(back.tensors["d2t"].to_i64().unwrap(), [0, -3]);
        assert_eq!(back.tensors["d2t"].to_f32(), None);
    }

    #[test]
    fn a_cut_file_and_a_wrong_shape_are_named() {
        let mut file = TensorFile::default();
        file.tensors.insert("w".into(), HostTensor::f32(&[1.0, 2.0], &[2]));
        let bytes = file.encode().unwrap();
        let cut = TensorFile::decode(&bytes[..bytes.len() - 1], Path::new("x.safetensors"));
        assert!(cut.unwrap_err().to_string().contains("x.safetensors"));
        let error = file.f32("w", &[3], Path::new("f")).unwrap_err().to_string();
        assert!(error.contains("[3]") && error.contains("[2]"), "{error}");
        assert!(file.f32("v", &[2], Path::new("f")).unwrap_err().to_string().contains("holds w"));
    }
}
