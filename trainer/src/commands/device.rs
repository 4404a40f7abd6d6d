//! Where a command computes, and in which type.

use burn::backend::cuda::CudaDevice;
use burn::backend::{Cuda, Flex};
use burn::tensor::FloatDType;
use extractor::target::Device as EngineDevice;
use trainer::checkpoint::Computed;
use trainer::config::{Compute, ConfigError};
use trainer::exchange::Transport;
use trainer::ops::DeviceFault;
use trainer::world::{Place as Seat, World, WorldError};

use super::{Usage, end_saying};

/// A device.
#[derive(Clone, Debug)]
pub(crate) enum Place {
    Cpu,
    Cuda(CudaDevice),
}

/// Device of a command.
#[derive(clap::Args, Clone, Debug)]
pub(crate) struct DeviceArgs {
    /// cpu, cuda (with several processes the GPU of LOCAL_RANK), or cuda:N for a certain one.
    #[arg(long, default_value = "cpu", value_name = "DEVICE", value_parser = parse)]
    device: Asked,
}

#[derive(Clone, Copy, Debug)]
enum Asked {
    Cpu,
    Cuda(Option<usize>),
}

fn parse(text: &str) -> Result<Asked, String> {
    let number = |text: &str| text.parse().map_err(|_| format!("{text} is no number of a GPU"));
    match text.split_once(':') {
        None if text == "cpu" => Ok(Asked::Cpu),
        None if text == "cuda" => Ok(Asked::Cuda(None)),
        Some(("cuda", ordinal)) => Ok(Asked::Cuda(Some(number(ordinal)?))),
        _ => Err("expected cpu, cuda or cuda:N".to_owned()),
    }
}

/// Without one process the others would wait for ever, some of them inside a kernel, where an
/// orderly exit would wait too.
fn end_alone(lost: &WorldError) {
    end_saying(lost.to_string(), lost.exit_code());
}

/// A device that does not work any more does not end its process in an orderly way either.
fn end_without_device(fault: &DeviceFault) {
    let hint = "training goes on from its newest checkpoint with `trainer fit --resume RUN`";
    end_saying(format!("{fault}; {hint}"), fault.exit_code);
}

impl DeviceArgs {
    /// Opens the device and settles the type; what is missing is an error with exit code 69.
    pub(crate) fn open(&self, compute: Compute) -> anyhow::Result<(Place, FloatDType)> {
        self.open_one(compute, 0)
    }

    /// The same in torchrun's environment: the GPU of this process, and all processes. `digest` is
    /// the same text in those that belong together.
    pub(crate) fn open_in_world(
        &self,
        compute: Compute,
        digest: &str,
    ) -> anyhow::Result<(Place, FloatDType, World)> {
        let seat = Seat::from_env()?;
        let (place, dtype) = self.open_one(compute, seat.as_ref().map_or(0, |s| s.local_rank))?;
        // `auto` is another type on each device.
        let computed = match place {
            Place::Cpu => Computed::on::<Flex>(dtype),
            Place::Cuda(_) => Computed::on::<Cuda>(dtype),
        };
        let digest = format!("{computed}\n{digest}");
        let world = match seat {
            Some(seat) => World::join(seat, &digest, end_alone)?,
            None => World::alone(),
        };
        Ok((place, dtype, world))
    }

    /// The device of a target engine, which takes as many GPUs as it has ranks.
    pub(crate) fn of_engine(&self) -> anyhow::Result<EngineDevice> {
        match self.device {
            Asked::Cpu => Ok(EngineDevice::Cpu),
            Asked::Cuda(None) => Ok(EngineDevice::Cuda),
            Asked::Cuda(Some(_)) => Err(Usage(
                "--live takes --device cpu or cuda; CUDA_VISIBLE_DEVICES chooses the GPUs".into(),
            )
            .into()),
        }
    }

    fn open_one(&self, compute: Compute, local_rank: usize) -> anyhow::Result<(Place, FloatDType)> {
        match (self.device, compute) {
            (Asked::Cpu, Compute::Bf16) => Err(ConfigError::Value {
                key: "train.compute".to_owned(),
                value: "bf16".to_owned(),
                expected: "f32 on the CPU; bf16 needs --device cuda".to_owned(),
            }
            .into()),
            (Asked::Cpu, _) => Ok((Place::Cpu, FloatDType::F32)),
            (Asked::Cuda(ordinal), compute) => {
                let device = trainer::cuda::open(ordinal.unwrap_or(local_rank))?;
                trainer::cuda::end_on_device_panic(end_without_device);
                let dtype = match compute {
                    Compute::F32 => FloatDType::F32,
                    Compute::Auto | Compute::Bf16 => FloatDType::BF16,
                };
                Ok((Place::Cuda(device), dtype))
            }
        }
    }
}

/// Parses `--exchange`.
pub(crate) fn parse_transport(text: &str) -> Result<Transport, String> {
    match text {
        "auto" => Ok(Transport::Auto),
        "nccl" => Ok(Transport::Nccl),
        "copies" => Ok(Transport::Copies),
        _ => Err("expected auto, nccl or copies".to_owned()),
    }
}

/// Parses `--compute`.
pub(crate) fn parse_compute(text: &str) -> Result<Compute, String> {
    match text {
        "auto" => Ok(Compute::Auto),
        "f32" => Ok(Compute::F32),
        "bf16" => Ok(Compute::Bf16),
        _ => Err("expected auto, f32 or bf16".to_owned()),
    }
}
