//! Hands over gradients in the middle of a backward pass, each as soon as no operation is left that
//! adds to it. Knows no parameters and no devices.

use std::any::Any;
use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

use burn::backend::Autodiff;
use burn::backend::autodiff::NodeId;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::tensor::Tensor;
use burn::tensor::backend::{AutodiffBackend, Backend};

use super::DraftGradients;
use super::parents::Parents;

/// Is given the number of a tensor and its gradient, while the backward pass goes on.
pub type Receiver<B> = Arc<dyn Fn(usize, Tensor<B, 2>) + Send + Sync>;

/// A backend whose backward pass hands over gradients before it has ended.
pub trait HandOver: AutodiffBackend {
    /// From now on, operations on these tensors, leaves of the graph, are counted; in the backward
    /// pass `receiver` is given the gradient of each, with its number in the list, as soon as all
    /// of them have added to it. It is missing in the result then. `receiver` runs on the thread of
    /// the backward pass under the locks of the graph: it must not use the graph or wait for
    /// another thread.
    ///
    /// Operations of burn's own are not counted: a gradient that they add to afterwards is left in
    /// the result.
    fn hand_over(leaves: &[Tensor<Self, 2>], receiver: Receiver<Self::InnerBackend>) -> Counting;
}

/// Operations are counted until this is dropped.
#[derive(Debug)]
#[must_use]
pub struct Counting(Vec<NodeId>);

/// A leaf of some graph.
struct Leaf {
    number: usize,
    /// Operations that have yet to add to its gradient.
    left: usize,
    /// A [`Receiver`] of the graph's backend.
    receiver: Box<dyn Any + Send>,
}

/// Of all graphs: numbers of nodes are the process's.
static LEAVES: LazyLock<Mutex<HashMap<NodeId, Leaf>>> = LazyLock::new(Mutex::default);

fn leaves() -> MutexGuard<'static, HashMap<NodeId, Leaf>> {
    LEAVES.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<B: DraftGradients, C: CheckpointStrategy> HandOver for Autodiff<B, C> {
    fn hand_over(list: &[Tensor<Self, 2>], receiver: Receiver<B>) -> Counting {
        let ids = list.iter().map(|leaf| leaf.clone().into_primitive().tensor().node.id);
        let ids: Vec<NodeId> = ids.collect();
        let leaf = |(number, &id): (usize, &NodeId)| {
            (id, Leaf { number, left: 0, receiver: Box::new(receiver.clone()) })
        };
        leaves().extend(ids.iter().enumerate().map(leaf));
        Counting(ids)
    }
}

impl Drop for Counting {
    fn drop(&mut self) {
        let mut leaves = leaves();
        self.0.iter().for_each(|id| {
            leaves.remove(id);
        });
    }
}

/// An operation was made that will add to the gradients of these nodes.
pub(super) fn will_add(nodes: impl Iterator<Item = NodeId>) {
    let mut leaves = leaves();
    for id in nodes {
        if let Some(leaf) = leaves.get_mut(&id) {
            leaf.left += 1;
        }
    }
}

/// An operation has added to the gradients of its parents.
pub(super) fn has_added<B: Backend>(parents: &mut Parents<'_, B>, device: &B::Device) {
    for at in 0..parents.slots.len() {
        let Some(leaf) = parents.id(at).and_then(complete) else { continue };
        let any = Tensor::<B, 1>::empty([1], device);
        let receiver = leaf.receiver.downcast_ref::<Receiver<B>>();
        if let (Some(receiver), Some(gradient)) = (receiver, parents.take(at, &any)) {
            receiver(leaf.number, gradient);
        }
    }
}

/// Counts an operation that has added; the leaf if it was the last one.
fn complete(id: NodeId) -> Option<Leaf> {
    let mut leaves = leaves();
    let leaf = leaves.get_mut(&id)?;
    leaf.left = leaf.left.saturating_sub(1);
    if leaf.left > 0 { None } else { leaves.remove(&id) }
}
