//! Everything that changes the bytes of a data set, gathered into its fingerprint. A value that
//! does not change them (batch size, line limit) stays out, so that a run may resume with another.

use shared::CaptureSpec;
use shared::digest::Digest;
use shared::fingerprint::Fingerprint;
use shared::shard::FORMAT_VERSION;

use crate::config::{ConfigError, ExtractConfig};
use crate::encode::Encoder;
use crate::import;
use crate::pipeline::PipelineError;
use crate::target::TargetError;
use crate::target::weights::Checkpoint;

/// Raised by hand whenever the engine or the encoder gives other values for the same input.
const NUMERICS_VERSION: u32 = 1;

/// The fingerprint of what `config` would write.
pub fn fingerprint(
    config: &ExtractConfig,
    encoder: &Encoder,
    contract: &CaptureSpec,
) -> Result<Fingerprint, PipelineError> {
    let target = &config.target;
    Ok(of_data(config, encoder, contract)?
        .with("numerics", NUMERICS_VERSION.to_string())
        .with("target.device", target.device.to_string())
        .with("target.compute", target.compute.on(target.device).to_string())
        .with("target.tp", target.tp.to_string())
        .with("target.qa_norm_eps", target.qa_norm_eps.to_string()))
}

/// The fingerprint of states that another tool computed: nothing in it speaks of this engine.
/// `made_by` is what the user says of that tool.
pub fn of_import(
    config: &ExtractConfig,
    encoder: &Encoder,
    contract: &CaptureSpec,
    made_by: &str,
) -> Result<Fingerprint, PipelineError> {
    Ok(of_data(config, encoder, contract)?
        .with("states", "imported")
        .with("states.form", import::FORM)
        .with("states.made_by", made_by))
}

/// What does not depend on who computed the states.
fn of_data(
    config: &ExtractConfig,
    encoder: &Encoder,
    contract: &CaptureSpec,
) -> Result<Fingerprint, PipelineError> {
    let checkpoint = Checkpoint::open(config.model()?).map_err(TargetError::from)?;
    let weights = Digest(checkpoint.digest().map_err(TargetError::from)?);
    let layers: Vec<String> = contract.layers.iter().map(ToString::to_string).collect();
    let encode = serde_json::to_string(encoder.options()).map_err(ConfigError::unprintable)?;
    Ok(Fingerprint::default()
        .with("format", FORMAT_VERSION.to_string())
        .with("target.revision", &config.target.revision)
        .with("target.weights", weights.to_string())
        .with("tokenizer_and_template", Digest(encoder.digest()).to_string())
        .with("encoding", encode)
        .with("layers", layers.join(","))
        .with("hidden_size", contract.hidden_size.to_string())
        .with("dtype", contract.dtype.to_string())
        .with("last_state", "pre_norm"))
}
