//! What a target is opened with. Knows nothing of files or command lines.

use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::time::Duration;

use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use shared::StateDtype;

use super::error::TargetError;
use super::plan::{ExpertPlan, RankPlan};
use super::spec::{QaNormEps, TargetSpec};

/// Where the target computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Device {
    /// Threads of this process.
    #[default]
    Cpu,
    /// NVIDIA GPUs, one a rank.
    Cuda,
}

impl std::fmt::Display for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Cpu => "cpu",
            Self::Cuda => "cuda",
        })
    }
}

/// Number format that products are computed in, with f32 sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Compute {
    /// bf16 on CUDA, f32 on the CPU.
    #[default]
    Auto,
    /// bfloat16.
    Bf16,
    /// Single precision.
    F32,
}

impl Compute {
    /// The format that `device` computes in.
    pub fn on(self, device: Device) -> Self {
        match (self, device) {
            (Self::Auto, Device::Cpu) => Self::F32,
            (Self::Auto, Device::Cuda) => Self::Bf16,
            (chosen, _) => chosen,
        }
    }
}

impl std::fmt::Display for Compute {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::Bf16 => "bf16",
            Self::F32 => "f32",
        })
    }
}

/// How rows cross the GPUs of several ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Exchange {
    /// NCCL's send and receive.
    #[default]
    Nccl,
    /// The copy engines, which leave all multiprocessors to products; the GPUs must reach each
    /// other's memory.
    Copies,
}

/// Options of [`super::open`]. `qa_norm_eps` and `compute` change the states a little, so they
/// belong to the fingerprint of a data set, as do `device` and `tp`.
#[derive(Clone, Debug, PartialEq)]
pub struct EngineOptions {
    /// Directory of the checkpoint.
    pub dir: PathBuf,
    /// Where to compute.
    pub device: Device,
    /// Number format of the products.
    pub compute: Compute,
    /// Tokens of the largest batch; a GPU takes the memory for it at the start.
    pub batch_tokens: usize,
    /// Ranks of tensor parallelism.
    pub tp: usize,
    /// How rows cross the GPUs; the states are the same.
    pub exchange: Exchange,
    /// Epsilon of the norms of the MLA latents.
    pub qa_norm_eps: QaNormEps,
    /// How routed experts are spread.
    pub experts: ExpertPlan,
    /// CPU threads of all ranks together; `None` takes one a core.
    pub threads: Option<NonZeroUsize>,
    /// How captured states are stored: a GPU quantises them before it copies.
    pub states: StateDtype,
    /// Longest time for one batch.
    pub deadline: Duration,
    /// What goes wrong, in tests.
    #[cfg(test)]
    pub(crate) faults: Vec<super::fault::Fault>,
}

impl EngineOptions {
    /// One rank on the CPU with the defaults of vLLM.
    pub fn new(dir: impl Into<PathBuf>) -> Self {
        Self {
            dir: dir.into(),
            device: Device::Cpu,
            compute: Compute::Auto,
            batch_tokens: 8192,
            tp: 1,
            exchange: Exchange::default(),
            qa_norm_eps: QaNormEps::default(),
            experts: ExpertPlan::Auto,
            threads: None,
            states: StateDtype::Bf16,
            deadline: Duration::from_secs(600),
            #[cfg(test)]
            faults: Vec::new(),
        }
    }

    /// Refuses what no device can do.
    pub(super) fn check(&self) -> Result<(), TargetError> {
        if (self.device, self.compute) == (Device::Cpu, Compute::Bf16) {
            return Err(TargetError::Option {
                option: "--compute",
                value: self.compute.to_string(),
                expected: "the CPU computes in f32",
            });
        }
        Ok(())
    }

    /// Shares of all ranks.
    pub(super) fn plans(&self, spec: &TargetSpec) -> Result<Vec<RankPlan>, TargetError> {
        if !(1..=64).contains(&self.tp) {
            return Err(TargetError::Option {
                option: "--tp",
                value: self.tp.to_string(),
                expected: "1 to 64 ranks are possible",
            });
        }
        (0..self.tp).map(|rank| RankPlan::new(spec, self.tp, rank, self.experts)).collect()
    }

    /// CPU threads of all ranks together.
    pub fn all_threads(&self) -> usize {
        let total = match self.threads {
            Some(threads) => threads.get(),
            None => std::thread::available_parallelism().map_or(1, NonZeroUsize::get),
        };
        total.max(self.tp)
    }

    /// Threads of one rank: with as many ranks as cores, each computes alone.
    pub(super) fn threads_per_rank(&self) -> usize {
        (self.all_threads() / self.tp).max(1)
    }
}
