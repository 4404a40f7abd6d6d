//! Documents into packed batches under a token budget, their states as they are stored. Knows no
//! files and no device.

use burn::tensor::backend::Backend;
use burn::tensor::{DType, FloatDType, Tensor, TensorData};
use half::bf16;
use shared::{CapturedSample, SampleId, StateDtype, StateRows, fp8};

use crate::batch::{BatchError, BatchTokens, TrainBatch};

/// A packed batch on the host, its states in memory of kind `M`.
#[derive(Clone, Debug, PartialEq)]
pub struct HostBatch<M = Vec<u8>> {
    /// Which samples, in packed order.
    pub samples: Vec<SampleId>,
    /// Ids, mask and borders of `T` rows.
    pub tokens: BatchTokens,
    /// States of the `T` rows.
    pub states: StoredStates<M>,
}

/// Where the parts of [`StoredStates`] lie: a plane of values for each layer, `[T, H]`, aux layers
/// in order and the teacher's last; behind them, for fp8, a plane of scales for each, `[T]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateLayout {
    /// Storage type.
    pub dtype: StateDtype,
    /// Planes.
    pub layers: usize,
    /// Rows `T`.
    pub rows: usize,
    /// Width `H` of a state.
    pub width: usize,
}

impl StateLayout {
    /// Bytes of a plane of values.
    fn plane(&self) -> usize {
        let value = match self.dtype {
            StateDtype::Bf16 => 2,
            StateDtype::Fp8 => 1,
        };
        self.rows * self.width * value
    }

    /// First byte of the values of plane `layer`.
    pub fn values(&self, layer: usize) -> usize {
        layer * self.plane()
    }

    /// First byte of the f32 scales of plane `layer`, a multiple of 16 for the first.
    pub fn scales(&self, layer: usize) -> usize {
        (self.layers * self.plane()).next_multiple_of(16) + layer * 4 * self.rows
    }

    /// Bytes of everything.
    pub fn bytes(&self) -> usize {
        match self.dtype {
            StateDtype::Bf16 => self.values(self.layers),
            StateDtype::Fp8 => self.scales(self.layers),
        }
    }
}

/// States of a packed batch as the shards hold them.
#[derive(Clone, Debug, PartialEq)]
pub struct StoredStates<M> {
    /// Where what is.
    pub layout: StateLayout,
    /// The bytes, at least as many as the layout has; native byte order.
    pub memory: M,
}

/// Cuts an order of documents into batches: each takes documents as long as `max_tokens` is not
/// exceeded, a longer document is a batch of its own. `lengths[i]` belongs to `order[i]`.
pub fn plan(order: &[usize], lengths: &[usize], max_tokens: usize) -> Vec<Vec<usize>> {
    let mut batches: Vec<Vec<usize>> = Vec::new();
    let mut filled = 0;
    for (&document, &tokens) in order.iter().zip(lengths) {
        match batches.last_mut() {
            Some(batch) if filled + tokens <= max_tokens => {
                batch.push(document);
                filled += tokens;
            }
            _ => {
                batches.push(vec![document]);
                filled = tokens;
            }
        }
    }
    batches
}

/// Lays documents end to end, their states in memory that `room` gives for a number of bytes.
/// A document's states are aux states in order, then the teacher's.
pub fn collate<M: AsMut<[u8]>, E: From<BatchError>>(
    documents: &[CapturedSample],
    room: impl FnOnce(usize) -> Result<M, E>,
) -> Result<HostBatch<M>, E> {
    let rows: usize = documents.iter().map(|d| d.sample().tokens()).sum();
    let first = documents.first().map(CapturedSample::states).unwrap_or_default();
    let shape = first.first().map(|state| (state.rows.dtype(), state.shape.last()));
    let (dtype, width) = shape.unwrap_or((StateDtype::Bf16, None));
    let layout =
        StateLayout { dtype, layers: first.len(), rows, width: width.copied().unwrap_or(0) };
    let mut memory = room(layout.bytes())?;
    let (mut ids, mut mask, mut offsets) = (Vec::with_capacity(rows), Vec::new(), vec![0]);
    for document in documents {
        let at = ids.len();
        ids.extend_from_slice(document.sample().input_ids());
        mask.extend_from_slice(document.sample().loss_mask());
        offsets.push(ids.len());
        for (layer, state) in document.states().iter().enumerate() {
            store(memory.as_mut(), &layout, (layer, at), &state.rows);
        }
    }
    Ok(HostBatch {
        samples: documents.iter().map(|d| d.sample().id()).collect(),
        tokens: BatchTokens::new(ids, &mask, offsets)?,
        states: StoredStates { layout, memory },
    })
}

/// [`collate`] into plain memory.
pub fn collate_plain(documents: &[CapturedSample]) -> Result<HostBatch, BatchError> {
    collate(documents, |bytes| Ok(vec![0; bytes]))
}

fn store(memory: &mut [u8], layout: &StateLayout, (layer, row): (usize, usize), rows: &StateRows) {
    let mut put = |first: usize, bytes: &[u8]| {
        memory[first..first + bytes.len()].copy_from_slice(bytes);
    };
    match rows {
        StateRows::Bf16(values) => {
            let first = layout.values(layer) + 2 * row * layout.width;
            put(first, bytemuck::cast_slice(values));
        }
        StateRows::Fp8 { codes, scales } => {
            put(layout.values(layer) + row * layout.width, codes);
            put(layout.scales(layer) + 4 * row, bytemuck::cast_slice(scales));
        }
    }
}

impl<M: AsRef<[u8]>> StoredStates<M> {
    /// Values of plane `layer`, row-major `[T, H]`.
    fn plane(&self, layer: usize) -> Vec<f32> {
        let (layout, bytes) = (&self.layout, self.memory.as_ref());
        let values = &bytes[layout.values(layer)..layout.values(layer + 1)];
        match layout.dtype {
            StateDtype::Bf16 => values
                .chunks_exact(2)
                .map(|pair| bf16::from_ne_bytes([pair[0], pair[1]]).to_f32())
                .collect(),
            StateDtype::Fp8 => {
                let scales = &bytes[layout.scales(layer)..layout.scales(layer + 1)];
                let scales: Vec<f32> = bytemuck::pod_collect_to_vec(scales);
                fp8::dequantize_rows(values, &scales)
            }
        }
    }

    /// Aux states side by side, `[T, aux * H]`, and the teacher's, `[T, H]`, as values of type
    /// `dtype`; converted on the host.
    pub fn to_device<B: Backend>(&self, place: (&B::Device, FloatDType)) -> [Tensor<B, 2>; 2] {
        let StateLayout { layers, rows, width, .. } = self.layout;
        let aux_layers = layers.saturating_sub(1);
        let mut aux = vec![0.0; rows * aux_layers * width];
        for layer in 0..aux_layers {
            let plane = self.plane(layer);
            for (row, values) in plane.chunks_exact(width.max(1)).enumerate() {
                let first = (row * aux_layers + layer) * width;
                aux[first..first + width].copy_from_slice(values);
            }
        }
        let (device, dtype) = place;
        let upload = |values: Vec<f32>, shape: [usize; 2]| -> Tensor<B, 2> {
            let data = TensorData::new(values, shape).convert_dtype(dtype.into());
            Tensor::from_data(data, (device, DType::from(dtype)))
        };
        let last = if layers > 0 { self.plane(aux_layers) } else { Vec::new() };
        [upload(aux, [rows, aux_layers * width]), upload(last, [rows, width])]
    }
}

impl<M: AsRef<[u8]>> HostBatch<M> {
    /// Copies the states to a device, as values of type `dtype`.
    pub fn to_device<B: Backend>(
        self,
        device: &B::Device,
        dtype: FloatDType,
    ) -> Result<TrainBatch<B>, BatchError> {
        let [aux, last_hidden] = self.states.to_device((device, dtype));
        TrainBatch::new(self.tokens, aux, last_hidden)
    }
}

#[cfg(test)]
mod tests {
    use burn::backend::Flex;
    use proptest::prelude::*;
    use shared::{CaptureSpec, LayerIndex, LayerState, TokenSample};

    use super::*;

    fn document(ids: &[u32], layers: &[u16], width: usize, dtype: StateDtype) -> CapturedSample {
        let sample = TokenSample::new(ids.to_vec(), vec![1; ids.len()]).unwrap();
        let layers: Vec<LayerIndex> = layers.iter().map(|&l| LayerIndex(l)).collect();
        let spec = CaptureSpec { layers: layers.clone(), hidden_size: width, dtype };
        let states = layers.into_iter().map(|layer| {
            let value = |token: usize| ids[token] as f32 + f32::from(layer.0) / 4.0;
            let rows = (0..ids.len() * width).map(|at| value(at / width)).collect::<Vec<f32>>();
            let rows = StateRows::from_f32(&rows, width, dtype);
            LayerState { layer, shape: vec![ids.len(), width], rows }
        });
        CapturedSample::new(sample, &spec, states.collect(), &[]).unwrap()
    }

    #[test]
    fn rows_keep_their_states_and_the_last_layer_is_the_teacher() {
        for dtype in [StateDtype::Bf16, StateDtype::Fp8] {
            let layers = [0, 1, 3];
            let documents =
                [document(&[1, 2], &layers, 2, dtype), document(&[5], &layers, 2, dtype)];
            let batch = collate_plain(&documents).unwrap();
            assert_eq!(batch.tokens.doc_offsets(), [0, 2, 3]);
            assert_eq!(batch.tokens.input_ids(), [1, 2, 5]);
            let place = (&Default::default(), FloatDType::F32);
            let [aux, last] = batch.states.to_device::<Flex>(place);
            assert_eq!((aux.dims(), last.dims()), ([3, 4], [3, 2]));
            // Every row of one value has the largest code and its own scale: exact in fp8 too.
            let values = |x: Tensor<Flex, 2>| x.into_data().to_vec::<f32>().unwrap();
            assert_eq!(values(aux)[4..8], [2.0, 2.0, 2.25, 2.25]);
            assert_eq!(values(last), [1.75, 1.75, 2.75, 2.75, 5.75, 5.75]);
        }
    }

    proptest! {
        #[test]
        fn packing_keeps_order_and_budget(
            lengths in prop::collection::vec(1usize..50, 0..80), budget in 1usize..120,
        ) {
            let order: Vec<usize> = (0..lengths.len()).collect();
            let batches = plan(&order, &lengths, budget);
            prop_assert_eq!(batches.concat(), order);
            for (at, batch) in batches.iter().enumerate() {
                let total: usize = batch.iter().map(|&d| lengths[d]).sum();
                prop_assert!(total <= budget || batch.len() == 1);
                // The next document would not have fitted.
                if let Some(next) = batches.get(at + 1) {
                    prop_assert!(total + lengths[next[0]] > budget);
                }
            }
        }
    }
}
