//! Names, types and metadata of contract v1, in both directions. Knows headers, reads no data.

use std::collections::BTreeMap;

use safetensors::tensor::Dtype;

use super::FORMAT_VERSION;
use crate::contract::{CaptureSpec, LayerIndex, StateDtype};
use crate::diagnosis::{self, Expected};
use crate::digest::Digest;
use crate::header::{ShardHeader, TensorEntry};
use crate::sample::SampleId;

pub(super) fn input_ids(id: SampleId) -> String {
    format!("{id}.input_ids")
}

pub(super) fn loss_mask(id: SampleId) -> String {
    format!("{id}.loss_mask")
}

pub(super) fn states(id: SampleId, layer: LayerIndex) -> String {
    format!("{id}.hidden_states.{layer}")
}

pub(super) fn scale(id: SampleId, layer: LayerIndex) -> String {
    format!("{id}.hidden_states.{layer}.scale")
}

pub(super) fn state_dtype(dtype: StateDtype) -> Dtype {
    match dtype {
        StateDtype::Bf16 => Dtype::BF16,
        StateDtype::Fp8 => Dtype::F8_E4M3,
    }
}

/// Tensors of one sample.
pub(crate) fn tensors_per_sample(spec: &CaptureSpec) -> usize {
    2 + spec.layers.len() * if spec.dtype == StateDtype::Fp8 { 2 } else { 1 }
}

/// The metadata every shard repeats, so that it can be understood without its manifest.
pub(super) fn metadata(spec: &CaptureSpec, fingerprint: &Digest) -> Vec<(&'static str, String)> {
    let layers: Vec<String> = spec.layers.iter().map(LayerIndex::to_string).collect();
    vec![
        ("format", "aerie".to_owned()),
        ("format_version", FORMAT_VERSION.to_string()),
        ("fingerprint", fingerprint.to_string()),
        ("layers", layers.join(",")),
        ("hidden_size", spec.hidden_size.to_string()),
        ("dtype", spec.dtype.to_string()),
        ("pre_norm", "true".to_owned()),
    ]
}

/// The spec and the fingerprint's digest that a shard's metadata states.
pub(super) fn read_metadata(
    metadata: &BTreeMap<String, String>,
) -> Result<(CaptureSpec, Digest), String> {
    let field = |name: &str| {
        metadata.get(name).ok_or_else(|| format!("no `{name}` in the metadata: not an Aerie shard"))
    };
    let malformed = |name: &str, value: &str| format!("metadata `{name}` is {value:?}");
    let version = field("format_version")?;
    if *version != FORMAT_VERSION.to_string() {
        return Err(format!("format version {version}, this program reads {FORMAT_VERSION}"));
    }
    if field("pre_norm")? != "true" {
        return Err("states after the final norm: only pre_norm = true is version 1".into());
    }
    let layers = field("layers")?;
    let layers: Vec<LayerIndex> = layers
        .split(',')
        .map(|layer| layer.parse().map(LayerIndex))
        .collect::<Result<_, _>>()
        .map_err(|_| malformed("layers", layers))?;
    if !layers.is_sorted_by(|a, b| a < b) {
        return Err("the layers in the metadata are not ascending".into());
    }
    let hidden_size = field("hidden_size")?;
    let hidden_size = hidden_size
        .parse()
        .ok()
        .filter(|size| (1..=1 << 20).contains(size))
        .ok_or_else(|| malformed("hidden_size", hidden_size))?;
    let dtype = match field("dtype")?.as_str() {
        "bf16" => StateDtype::Bf16,
        "fp8" => StateDtype::Fp8,
        other => return Err(malformed("dtype", other)),
    };
    let fingerprint = field("fingerprint")?;
    let fingerprint = fingerprint.parse().map_err(|_| malformed("fingerprint", fingerprint))?;
    Ok((CaptureSpec { layers, hidden_size, dtype }, fingerprint))
}

/// Where the tensors of one sample are; indices into the header's list.
#[derive(Clone, Debug)]
pub(super) struct SampleTensors {
    pub(super) tokens: usize,
    pub(super) input_ids: usize,
    pub(super) loss_mask: usize,
    /// (codes or values, scale) a layer, in the order of the spec.
    pub(super) layers: Vec<(usize, Option<usize>)>,
}

/// Checks that the tensors are exactly those of whole samples under `spec`, and locates them.
pub(super) fn locate(
    header: &ShardHeader,
    spec: &CaptureSpec,
) -> Result<BTreeMap<SampleId, SampleTensors>, String> {
    let mut by_sample: BTreeMap<SampleId, BTreeMap<&str, usize>> = BTreeMap::new();
    for (index, tensor) in header.tensors.iter().enumerate() {
        let (id, field) = tensor
            .name
            .split_once('.')
            .and_then(|(id, field)| Some((id.parse::<SampleId>().ok()?, field)))
            .ok_or_else(|| format!("tensor `{}` belongs to no sample", tensor.name))?;
        by_sample.entry(id).or_default().insert(field, index);
    }
    by_sample
        .into_iter()
        .map(|(id, fields)| {
            let located = locate_sample(header, spec, fields);
            located.map(|tensors| (id, tensors)).map_err(|reason| format!("sample {id}: {reason}"))
        })
        .collect()
}

fn locate_sample(
    header: &ShardHeader,
    spec: &CaptureSpec,
    mut fields: BTreeMap<&str, usize>,
) -> Result<SampleTensors, String> {
    let mut take = |name: &str| {
        let index = fields.remove(name).ok_or_else(|| format!("`{name}` is missing"))?;
        let tensor = header.tensors.get(index).ok_or("index out of range")?;
        Ok::<_, String>((index, tensor))
    };
    let (input_ids, ids) = take("input_ids")?;
    let [tokens] = ids.shape.as_slice() else {
        return Err(format!("input_ids has shape {:?}, one axis is expected", ids.shape));
    };
    let tokens = *tokens;
    check("input_ids", ids, Dtype::U32, &[tokens])?;
    let (loss_mask, mask) = take("loss_mask")?;
    check("loss_mask", mask, Dtype::U8, &[tokens])?;
    let mut layers = Vec::with_capacity(spec.layers.len());
    let mut shapes = Vec::with_capacity(spec.layers.len());
    for layer in &spec.layers {
        let name = format!("hidden_states.{layer}");
        let (index, values) = take(&name)?;
        check_dtype(&name, values, state_dtype(spec.dtype))?;
        shapes.push(values.shape.as_slice());
        let scale = match spec.dtype {
            StateDtype::Bf16 => None,
            StateDtype::Fp8 => {
                let name = format!("{name}.scale");
                let (index, scale) = take(&name)?;
                check(&name, scale, Dtype::F32, &[tokens])?;
                Some(index)
            }
        };
        layers.push((index, scale));
    }
    let expected = Expected { layers: spec.layers.len(), tokens, hidden_size: spec.hidden_size };
    diagnosis::check_shapes(&expected, &shapes, &[]).map_err(|fault| fault.to_string())?;
    match fields.keys().next() {
        Some(extra) => Err(format!("`{extra}` is not part of the contract")),
        None => Ok(SampleTensors { tokens, input_ids, loss_mask, layers }),
    }
}

fn check(name: &str, tensor: &TensorEntry, dtype: Dtype, shape: &[usize]) -> Result<(), String> {
    check_dtype(name, tensor, dtype)?;
    if tensor.shape != shape {
        return Err(format!("{name} has shape {:?}, {shape:?} is expected", tensor.shape));
    }
    Ok(())
}

fn check_dtype(name: &str, tensor: &TensorEntry, dtype: Dtype) -> Result<(), String> {
    if tensor.dtype != dtype {
        return Err(format!("{name} is {}, {dtype} is expected", tensor.dtype));
    }
    Ok(())
}
