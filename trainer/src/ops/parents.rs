//! What an operation of burn's graph is made from, and the gradients that a backward pass has given
//! it so far. Knows no operation.

use burn::backend::Autodiff;
use burn::backend::autodiff::NodeId;
use burn::backend::autodiff::grads::Gradients;
use burn::tensor::backend::{Backend, BackendTypes};
use burn::tensor::{Tensor, TensorPrimitive};

/// A tensor in the graph.
pub(super) type Node<B> = <Autodiff<B> as BackendTypes>::FloatTensorPrimitive;
/// A tensor as the backend has it.
pub(super) type Primitive<B> = <B as BackendTypes>::FloatTensorPrimitive;
type Holder<B> = Box<dyn Fn(Primitive<B>) -> Node<B>>;

pub(super) fn tensor<B: Backend, const D: usize>(primitive: Primitive<B>) -> Tensor<B, D> {
    Tensor::from_primitive(TensorPrimitive::Float(primitive))
}

pub(super) fn primitive<B: Backend, const D: usize>(tensor: Tensor<B, D>) -> Primitive<B> {
    tensor.into_primitive().tensor()
}

/// A parent that wants a gradient. burn does not export the type of a node's reference, but a
/// closure can hold one.
pub(super) struct Slot<B: Backend> {
    pub(super) id: NodeId,
    /// A tensor in the graph at the parent's place.
    pub(super) holder: Holder<B>,
}

/// Parents of an operation, and all gradients made so far.
pub(super) struct Parents<'a, B: Backend> {
    pub(super) slots: Vec<Option<Slot<B>>>,
    pub(super) gradients: &'a mut Gradients,
}

impl<B: Backend> Parents<'_, B> {
    fn slot(&self, at: usize) -> Option<&Slot<B>> {
        self.slots.get(at).and_then(Option::as_ref)
    }

    /// The number of the node, if it wants a gradient.
    pub(super) fn id(&self, at: usize) -> Option<NodeId> {
        self.slot(at).map(|slot| slot.id)
    }

    pub(super) fn wants(&self, at: usize) -> bool {
        self.slot(at).is_some()
    }

    /// Takes out what a parent was given so far; `any` is a tensor of any value.
    pub(super) fn take<const D: usize, const E: usize>(
        &mut self,
        at: usize,
        any: &Tensor<B, E>,
    ) -> Option<Tensor<B, D>> {
        let holder = (self.slot(at)?.holder)(primitive(any.clone()));
        self.gradients.remove::<B>(&holder).map(tensor)
    }

    /// Gives a gradient to a parent that wants one.
    pub(super) fn give<const D: usize>(&mut self, at: usize, gradient: Tensor<B, D>) {
        if let Some(id) = self.id(at) {
            self.gradients.register::<B>(id, primitive(gradient));
        }
    }
}
