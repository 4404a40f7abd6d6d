//! Reads the values of one tensor row by row and sums up each layer slot.

use std::fs::File;
use std::io::{self, BufReader, Read, Seek, SeekFrom};

use half::{bf16, f16};
use safetensors::tensor::Dtype;
use serde::Serialize;

use crate::digest::Digest;
use crate::fp8;
use crate::header::TensorEntry;

/// Sizes of the values of one layer slot.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct SlotStats {
    /// Number of rows.
    pub rows: usize,
    /// Root mean square of the finite values.
    pub rms: f64,
    /// Largest finite absolute value.
    pub absmax: f32,
    /// Values that are not a number.
    pub nan: usize,
    /// Infinite values.
    pub infinite: usize,
    /// Row of the first non-finite value.
    pub first: Option<usize>,
    /// Rows of zeros, of either sign.
    pub zero_rows: usize,
    /// Rows that equal the row before.
    pub repeated_rows: usize,
    /// (largest - smallest) / largest rms of a row.
    pub row_rms_spread: f64,
    #[serde(skip)]
    pub(super) digest: Digest,
}

/// Whether values of this type can be states.
pub fn is_float(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::BF16 | Dtype::F16 | Dtype::F32 | Dtype::F64 | Dtype::F8_E4M3)
}

fn decode(dtype: Dtype, bytes: &[u8]) -> f32 {
    match (dtype, bytes) {
        (Dtype::BF16, &[a, b]) => bf16::from_le_bytes([a, b]).to_f32(),
        (Dtype::F16, &[a, b]) => f16::from_le_bytes([a, b]).to_f32(),
        (Dtype::F32, &[a, b, c, d]) => f32::from_le_bytes([a, b, c, d]),
        (Dtype::F64, &[a, b, c, d, e, f, g, h]) => {
            f64::from_le_bytes([a, b, c, d, e, f, g, h]) as f32
        }
        (Dtype::F8_E4M3, &[code]) => fp8::decode(code),
        _ => f32::NAN,
    }
}

/// How a tensor's rows are dealt out to layer slots.
struct Deal {
    slots: usize,
    width: usize,
    /// Rows of one slot follow each other ([n, S, H]); otherwise slots alternate ([S, n, H]).
    slot_major: Option<usize>,
}

fn deal(shape: &[usize], tokens: Option<usize>) -> Deal {
    match *shape {
        [n, s, width] if Some(s) == tokens && n < s => {
            Deal { slots: n, width, slot_major: Some(s) }
        }
        // A swapped axis may be long: more slots than any model has layers are one slot.
        [_, slots, width] if slots <= 512 => Deal { slots, width, slot_major: None },
        [.., width] => Deal { slots: 1, width, slot_major: None },
        [] => Deal { slots: 1, width: 1, slot_major: None },
    }
}

#[derive(Default)]
struct Sums {
    rows: usize,
    squares: f64,
    absmax: f32,
    nan: usize,
    infinite: usize,
    first: Option<usize>,
    zero_rows: usize,
    repeated_rows: usize,
    before: Option<blake3::Hash>,
    row_rms: Option<(f64, f64)>,
    hasher: blake3::Hasher,
}

impl Sums {
    fn add(&mut self, dtype: Dtype, row: &[u8]) {
        let mut squares = 0f64;
        let (mut absmax, mut finite) = (0f32, true);
        let width = dtype.bitsize() / 8;
        for value in row.chunks_exact(width).map(|bytes| decode(dtype, bytes)) {
            if value.is_finite() {
                squares += f64::from(value) * f64::from(value);
                absmax = absmax.max(value.abs());
                continue;
            }
            finite = false;
            self.first.get_or_insert(self.rows);
            if value.is_nan() {
                self.nan += 1;
            } else {
                self.infinite += 1;
            }
        }
        let rms = (squares / (row.len() / width).max(1) as f64).sqrt();
        let (least, most) = self.row_rms.unwrap_or((rms, rms));
        self.row_rms = Some((least.min(rms), most.max(rms)));
        self.zero_rows += usize::from(absmax == 0.0 && finite);
        let digest = blake3::hash(row);
        self.repeated_rows += usize::from(self.before.replace(digest) == Some(digest));
        self.squares += squares;
        self.absmax = self.absmax.max(absmax);
        self.rows += 1;
        self.hasher.update(row);
    }

    fn finish(self, width: usize) -> SlotStats {
        let values = (self.rows * width).saturating_sub(self.nan + self.infinite).max(1);
        let (least, most) = self.row_rms.unwrap_or_default();
        SlotStats {
            rows: self.rows,
            rms: (self.squares / values as f64).sqrt(),
            absmax: self.absmax,
            nan: self.nan,
            infinite: self.infinite,
            first: self.first,
            zero_rows: self.zero_rows,
            repeated_rows: self.repeated_rows,
            row_rms_spread: if most > 0.0 { (most - least) / most } else { 0.0 },
            digest: Digest(*self.hasher.finalize().as_bytes()),
        }
    }
}

/// Reads the tensor once, in pieces, and sums up each slot.
pub(super) fn slots(
    file: &File,
    tensor: &TensorEntry,
    tokens: Option<usize>,
) -> io::Result<Vec<SlotStats>> {
    let Deal { slots, width, slot_major } = deal(&tensor.shape, tokens);
    let row_bytes = width * tensor.dtype.bitsize() / 8;
    if row_bytes > 1 << 26 {
        return Err(io::Error::other(format!("`{}` has rows over 64 MiB", tensor.name)));
    }
    let mut file = file;
    file.seek(SeekFrom::Start(tensor.start))?;
    let mut reader = BufReader::with_capacity(1 << 20, file.take(tensor.bytes));
    let mut sums: Vec<Sums> = (0..slots).map(|_| Sums::default()).collect();
    let mut row = vec![0; row_bytes];
    for index in 0..tensor.bytes / row_bytes.max(1) as u64 {
        reader.read_exact(&mut row)?;
        let slot = match slot_major {
            Some(rows) => index as usize / rows,
            None => index as usize % slots,
        };
        if let Some(sums) = sums.get_mut(slot) {
            sums.add(tensor.dtype, &row);
        }
    }
    Ok(sums.into_iter().map(|sums| sums.finish(width)).collect())
}
