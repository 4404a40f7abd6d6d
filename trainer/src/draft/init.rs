//! Fresh parameters from a seed. Knows names and shapes only.

use burn::tensor::backend::Backend;

use super::{DraftConfig, DraftConfigError, Eagle3Draft, Param, ParamShapeError, layer};

/// Standard deviation of every fresh matrix.
const SPREAD: f64 = 0.02;

impl<B: Backend> Eagle3Draft<B> {
    /// Fresh parameters: norms one, matrices normal with spread 0.02. Each depends on the seed
    /// and its own name only, so it is the same on every device and for every order.
    pub fn init(
        config: DraftConfig,
        seed: u64,
        device: &B::Device,
    ) -> Result<Self, DraftConfigError> {
        config.validate()?;
        let params = config.parameter_shapes().into_iter().map(|(name, shape)| {
            let count = shape.iter().product();
            let values = match shape.len() {
                1 => vec![1.0; count],
                _ => normal(seed, &name, count),
            };
            Param::from_vec(values, &shape, device)
        });
        let params = params.collect();
        Ok(layer::assemble(config, params))
    }

    /// Replaces the head by rows of the target's, one for each draft token, `[draft_vocab, H]`.
    pub fn with_lm_head(self, rows: burn::tensor::Tensor<B, 2>) -> Result<Self, ParamShapeError> {
        let expected = vec![self.config.draft_vocab_size, self.config.hidden_size];
        let found = rows.dims().to_vec();
        if found != expected {
            return Err(ParamShapeError { name: "lm_head.weight".to_owned(), expected, found });
        }
        Ok(Self { lm_head: rows, ..self })
    }
}

/// `count` normal numbers that depend on seed and name.
fn normal(seed: u64, name: &str, count: usize) -> Vec<f32> {
    let digest =
        blake3::Hasher::new().update(&seed.to_le_bytes()).update(name.as_bytes()).finalize_xof();
    let mut stream = Uniform { reader: digest, buffer: [0; 4096], used: 4096 };
    let mut values = Vec::with_capacity(count + 1);
    while values.len() < count {
        // Box-Muller: two uniform numbers make two normal ones.
        let radius = SPREAD * (-2.0 * stream.next().ln()).sqrt();
        let (sin, cos) = (stream.next() * std::f64::consts::TAU).sin_cos();
        values.extend([(radius * cos) as f32, (radius * sin) as f32]);
    }
    values.truncate(count);
    values
}

/// Uniform numbers in (0, 1] from an endless hash output, drawn a buffer at a time.
struct Uniform {
    reader: blake3::OutputReader,
    buffer: [u8; 4096],
    used: usize,
}

impl Uniform {
    fn next(&mut self) -> f64 {
        if self.used == self.buffer.len() {
            self.reader.fill(&mut self.buffer);
            self.used = 0;
        }
        let mut bytes = [0; 8];
        bytes.copy_from_slice(&self.buffer[self.used..self.used + 8]);
        self.used += 8;
        ((u64::from_le_bytes(bytes) >> 11) + 1) as f64 / (1u64 << 53) as f64
    }
}
