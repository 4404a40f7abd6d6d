//! The EAGLE-3 draft: named parameters and where they sit in the network. The optimizer,
//! checkpoints and export address them by the names of an exported checkpoint. Knows nothing of
//! losses, batches or files.

mod config;
mod init;
mod layer;
mod rope;
mod vocabulary;

use burn::tensor::backend::AutodiffBackend;
use burn::tensor::{FloatDType, Tensor, backend::Backend};
use thiserror::Error;

pub use config::{AttentionConfig, DraftConfig, DraftConfigError, Yarn};
pub use layer::{Attention, DecoderLayer, GqaWeights, MlaWeights};
pub use rope::rotary_frequencies;
pub use vocabulary::{DraftVocabulary, VocabularyError};

/// One parameter or its gradient.
#[derive(Clone, Debug)]
pub enum Param<B: Backend> {
    /// Weight of a norm, `[size]`.
    Vector(Tensor<B, 1>),
    /// Weight of a projection, `[out, in]`.
    Matrix(Tensor<B, 2>),
}

/// Where parameters come from: called with exported name and shape.
pub type ParamSource<'a, B, E> = dyn FnMut(&str, &[usize]) -> Result<Param<B>, E> + 'a;

/// A parameter that does not have the shape its name asks for.
#[derive(Debug, Error)]
#[error("parameter {name} has shape {found:?}; the draft config asks for {expected:?}")]
pub struct ParamShapeError {
    /// Exported name.
    pub name: String,
    /// Shape by the configuration.
    pub expected: Vec<usize>,
    /// Shape that came.
    pub found: Vec<usize>,
}

impl<B: Backend> Param<B> {
    /// Sizes of all dimensions.
    pub fn shape(&self) -> Vec<usize> {
        match self {
            Self::Vector(tensor) => tensor.dims().to_vec(),
            Self::Matrix(tensor) => tensor.dims().to_vec(),
        }
    }

    /// Copies the entries to the host as f32, row-major.
    pub fn to_vec(&self) -> Vec<f32> {
        let data = match self {
            Self::Vector(tensor) => tensor.to_data(),
            Self::Matrix(tensor) => tensor.to_data(),
        };
        data.iter::<f32>().collect()
    }

    /// A parameter of the given shape from row-major entries. The number of entries must be the
    /// product of one or two sizes.
    pub fn from_vec(values: Vec<f32>, shape: &[usize], device: &B::Device) -> Self {
        let data = burn::tensor::TensorData::new(values, shape.to_vec());
        match shape.len() {
            1 => Self::Vector(Tensor::from_data(data, device)),
            _ => Self::Matrix(Tensor::from_data(data, device)),
        }
    }

    /// The sum with another one of the same shape.
    pub fn plus(self, other: Self) -> Self {
        match (self, other) {
            (Self::Vector(a), Self::Vector(b)) => Self::Vector(a + b),
            (Self::Matrix(a), Self::Matrix(b)) => Self::Matrix(a + b),
            _ => unreachable!("a vector and a matrix have no shape in common"),
        }
    }

    /// Zeros of the same shape on the same device.
    pub fn zeros_like(&self) -> Self {
        match self {
            Self::Vector(tensor) => Self::Vector(tensor.zeros_like()),
            Self::Matrix(tensor) => Self::Matrix(tensor.zeros_like()),
        }
    }
}

/// The trainable part of an EAGLE-3 draft. Embeddings are the target's and stay outside.
#[derive(Clone, Debug)]
pub struct Eagle3Draft<B: Backend> {
    pub(crate) config: DraftConfig,
    /// `[H, num_aux * H]`.
    pub(crate) fc: Tensor<B, 2>,
    /// `num_aux` times `[H]`, or none.
    pub(crate) fc_norm: Vec<Tensor<B, 1>>,
    pub(crate) layer: DecoderLayer<B>,
    /// `[H]`.
    pub(crate) norm: Tensor<B, 1>,
    /// `[draft_vocab, H]`.
    pub(crate) lm_head: Tensor<B, 2>,
}

impl<B: Backend> Eagle3Draft<B> {
    /// Builds a draft by asking `source` for each parameter of [`DraftConfig::parameter_shapes`],
    /// in that order, with its name and shape. Errors are those of `source`, and a shape that
    /// differs from the one asked for.
    pub fn from_parameters<E: From<ParamShapeError>>(
        config: DraftConfig,
        source: &mut ParamSource<'_, B, E>,
    ) -> Result<Self, E> {
        let mut params = Vec::new();
        for (name, shape) in config.parameter_shapes() {
            let param = source(&name, &shape)?;
            let found = param.shape();
            if found != shape {
                return Err(ParamShapeError { name, expected: shape, found }.into());
            }
            params.push(param);
        }
        Ok(layer::assemble(config, params))
    }

    /// Sizes and switches.
    pub fn config(&self) -> &DraftConfig {
        &self.config
    }

    /// Every trainable parameter with its exported name, in a fixed order.
    pub fn parameters(&self) -> Vec<(String, Param<B>)> {
        let names = self.config.parameter_shapes().into_iter().map(|(name, _)| name);
        names.zip(layer::disassemble(self)).collect()
    }

    /// The same draft with each parameter replaced by what `replace` makes of it; shapes must stay.
    pub fn map<C: Backend>(
        &self,
        mut replace: impl FnMut(&str, Param<B>) -> Param<C>,
    ) -> Eagle3Draft<C> {
        let params =
            self.parameters().into_iter().map(|(name, param)| replace(&name, param)).collect();
        layer::assemble(self.config.clone(), params)
    }

    /// Replaces each parameter by what `replace` makes of it, which then is the only one that holds
    /// it, unless the draft has clones; shapes must stay.
    pub fn replace_each(&mut self, mut replace: impl FnMut(&str, Param<B>) -> Param<B>) {
        let device = self.device();
        let (vector, matrix) = (Tensor::empty([1], &device), Tensor::empty([1, 1], &device));
        let names = self.config.parameter_shapes().into_iter().map(|(name, _)| name);
        for (name, slot) in names.zip(layer::slots(self)) {
            match slot {
                layer::Slot::Vector(place) => {
                    let taken = std::mem::replace(place, vector.clone());
                    if let Param::Vector(new) = replace(&name, Param::Vector(taken)) {
                        *place = new;
                    }
                }
                layer::Slot::Matrix(place) => {
                    let taken = std::mem::replace(place, matrix.clone());
                    if let Param::Matrix(new) = replace(&name, Param::Matrix(taken)) {
                        *place = new;
                    }
                }
            }
        }
    }

    /// Type of the matrices, which is that of states and products.
    pub fn dtype(&self) -> FloatDType {
        self.fc.dtype().into()
    }

    /// The same draft with matrices of type `dtype`; norms stay as they are.
    pub fn with_dtype(&self, dtype: FloatDType) -> Self {
        self.map(|_, param| match param {
            Param::Matrix(matrix) => Param::Matrix(matrix.cast(dtype)),
            vector => vector,
        })
    }

    /// Where the parameters live.
    pub fn device(&self) -> B::Device {
        self.fc.device()
    }
}

impl<B: AutodiffBackend> Eagle3Draft<B> {
    /// Puts a plain draft on the differentiating backend and asks for gradients. Do this anew for
    /// every backward pass (it copies nothing): burn forgets a leaf once its graph was consumed,
    /// and of two later graphs over it that live at the same time one loses its gradients.
    pub fn tracked(inner: &Eagle3Draft<B::InnerBackend>) -> Self {
        inner.map(|_, param| match param {
            Param::Vector(tensor) => Param::Vector(Tensor::from_inner(tensor).require_grad()),
            Param::Matrix(tensor) => Param::Matrix(Tensor::from_inner(tensor).require_grad()),
        })
    }

    /// Marks every parameter as a leaf that receives gradients.
    pub fn require_grad(&self) -> Self {
        self.map(|_, param| match param {
            Param::Vector(tensor) => Param::Vector(tensor.require_grad()),
            Param::Matrix(tensor) => Param::Matrix(tensor.require_grad()),
        })
    }

    /// The draft without gradients, sharing the same storage.
    pub fn valid(&self) -> Eagle3Draft<B::InnerBackend> {
        self.map(|_, param| match param {
            Param::Vector(tensor) => Param::Vector(tensor.inner()),
            Param::Matrix(tensor) => Param::Matrix(tensor.inner()),
        })
    }

    /// Takes each parameter's gradient out of `gradients`, in the order of
    /// [`Self::parameters`]; what received none is zero.
    pub fn gradients(&self, gradients: &mut B::Gradients) -> Vec<(String, Param<B::InnerBackend>)> {
        let parameters = self.parameters().into_iter();
        let zeros = |param: Param<B>| match param {
            Param::Vector(tensor) => Param::Vector(tensor.inner().zeros_like()),
            Param::Matrix(tensor) => Param::Matrix(tensor.inner().zeros_like()),
        };
        let received = self.received(gradients).into_iter();
        let all = parameters.zip(received);
        all.map(|((name, param), got)| (name, got.unwrap_or_else(|| zeros(param)))).collect()
    }

    /// The same, `None` for what received none.
    pub fn received(&self, gradients: &mut B::Gradients) -> Vec<Option<Param<B::InnerBackend>>> {
        let mut take = |param: Param<B>| match param {
            Param::Vector(tensor) => tensor.grad_remove(gradients).map(Param::Vector),
            Param::Matrix(tensor) => tensor.grad_remove(gradients).map(Param::Matrix),
        };
        self.parameters().into_iter().map(|(_, param)| take(param)).collect()
    }
}
