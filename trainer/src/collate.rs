//! Documents into packed batches under a token budget. Knows no files and no device.

use burn::tensor::backend::Backend;
use burn::tensor::{DType, FloatDType, Tensor, TensorData};
use shared::{CapturedSample, SampleId};

use crate::batch::{BatchError, BatchTokens, TrainBatch};

/// A packed batch on the host.
#[derive(Clone, Debug, PartialEq)]
pub struct HostBatch {
    /// Which samples, in packed order.
    pub samples: Vec<SampleId>,
    /// Ids, mask and borders of `T` rows.
    pub tokens: BatchTokens,
    /// Aux states side by side, row-major `[T, aux * H]`.
    pub aux: Vec<f32>,
    /// Teacher states before the target's final norm, row-major `[T, H]`.
    pub last_hidden: Vec<f32>,
    /// Width of one state.
    pub hidden_size: usize,
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

/// Lays documents end to end. Their states are aux states in order, then the teacher's.
pub fn collate(documents: &[CapturedSample]) -> Result<HostBatch, BatchError> {
    let rows: usize = documents.iter().map(|d| d.sample().tokens()).sum();
    let hidden_size = documents
        .first()
        .and_then(|d| Some(d.states().first()?.rows.len() / d.sample().tokens().max(1)))
        .unwrap_or(0);
    let (mut ids, mut mask, mut offsets) = (Vec::with_capacity(rows), Vec::new(), vec![0]);
    let mut aux = Vec::new();
    let mut last_hidden = Vec::with_capacity(rows * hidden_size);
    for document in documents {
        ids.extend_from_slice(document.sample().input_ids());
        mask.extend_from_slice(document.sample().loss_mask());
        offsets.push(ids.len());
        let Some((teacher, aux_states)) = document.states().split_last() else { continue };
        let states: Vec<Vec<f32>> = aux_states.iter().map(|state| state.rows.to_f32()).collect();
        for row in 0..document.sample().tokens() {
            for state in &states {
                aux.extend_from_slice(&state[row * hidden_size..(row + 1) * hidden_size]);
            }
        }
        last_hidden.extend(teacher.rows.to_f32());
    }
    Ok(HostBatch {
        samples: documents.iter().map(|d| d.sample().id()).collect(),
        tokens: BatchTokens::new(ids, &mask, offsets)?,
        aux,
        last_hidden,
        hidden_size,
    })
}

impl HostBatch {
    /// Copies the states to a device, as values of type `dtype`.
    pub fn to_device<B: Backend>(
        self,
        device: &B::Device,
        dtype: FloatDType,
    ) -> Result<TrainBatch<B>, BatchError> {
        let rows = self.tokens.rows();
        let width = self.aux.len() / rows.max(1);
        let states = |values: Vec<f32>, shape: [usize; 2]| -> Tensor<B, 2> {
            let data = TensorData::new(values, shape).convert_dtype(dtype.into());
            Tensor::from_data(data, (device, DType::from(dtype)))
        };
        let aux = states(self.aux, [rows, width]);
        TrainBatch::new(self.tokens, aux, states(self.last_hidden, [rows, self.hidden_size]))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use shared::{CaptureSpec, LayerIndex, LayerState, StateDtype, StateRows, TokenSample};

    use super::*;

    fn document(ids: &[u32], layers: &[u16], width: usize) -> CapturedSample {
        let sample = TokenSample::new(ids.to_vec(), vec![1; ids.len()]).unwrap();
        let spec = CaptureSpec {
            layers: layers.iter().map(|&l| LayerIndex(l)).collect(),
            hidden_size: width,
            dtype: StateDtype::Bf16,
        };
        let states = layers.iter().map(|&layer| {
            let value = |token: usize| ids[token] as f32 + f32::from(layer) / 4.0;
            let rows = (0..ids.len() * width).map(|at| value(at / width)).collect::<Vec<f32>>();
            LayerState {
                layer: LayerIndex(layer),
                shape: vec![ids.len(), width],
                rows: StateRows::from_f32(&rows, width, StateDtype::Bf16),
            }
        });
        CapturedSample::new(sample, &spec, states.collect(), &[]).unwrap()
    }

    #[test]
    fn rows_keep_their_states_and_the_last_layer_is_the_teacher() {
        let documents = [document(&[1, 2], &[0, 1, 3], 2), document(&[5], &[0, 1, 3], 2)];
        let batch = collate(&documents).unwrap();
        assert_eq!(batch.tokens.doc_offsets(), [0, 2, 3]);
        assert_eq!(batch.tokens.input_ids(), [1, 2, 5]);
        assert_eq!(batch.aux[4..8], [2.0, 2.0, 2.25, 2.25]);
        assert_eq!(batch.last_hidden, [1.75, 1.75, 2.75, 2.75, 5.75, 5.75]);
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
