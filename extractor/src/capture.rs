//! The states of one batch, as the target returns them. Knows nothing of files.

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use half::bf16;
use rayon::prelude::*;
use shared::{LayerIndex, StateDtype, StateRows, fp8};

/// Hidden states of every token of a batch at the requested layers.
///
/// The replies of a target are this type and nothing else: there is no list whose nesting depends
/// on a flag.
#[derive(Clone, Debug, PartialEq)]
pub struct Capture {
    /// Rows in every layer.
    pub tokens: usize,
    /// Width of a row.
    pub hidden_size: usize,
    /// One entry a requested layer, in the order of the request.
    pub layers: Vec<LayerCapture>,
}

/// Row-major [tokens, hidden] states of one layer's output, before the final norm.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerCapture {
    /// Which layer's output this is.
    pub layer: LayerIndex,
    /// The values.
    pub rows: LayerRows,
}

/// Row-major values in the number format that the device computed them in.
#[derive(Clone, Debug, PartialEq)]
pub enum LayerRows {
    /// Single precision.
    F32(Vec<f32>),
    /// bfloat16.
    Bf16(Vec<bf16>),
    /// float8 e4m3fn codes, stored already.
    Fp8 {
        /// [tokens, hidden] codes.
        codes: Vec<u8>,
        /// [tokens] multipliers.
        scales: Vec<f32>,
        /// [tokens] sums of squared errors and of squares of the values, in units of the
        /// multiplier squared.
        errors: Vec<[f32; 2]>,
    },
    /// Pieces of one number format, end to end, as they came from the ranks.
    Pieces(Vec<LayerRows>),
}

impl LayerRows {
    /// Number of values.
    pub fn len(&self) -> usize {
        match self {
            Self::F32(values) => values.len(),
            Self::Bf16(values) => values.len(),
            Self::Fp8 { codes, .. } => codes.len(),
            Self::Pieces(pieces) => pieces.iter().map(Self::len).sum(),
        }
    }

    /// Whether there are no values.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes of the values.
    pub fn bytes(&self) -> usize {
        match self {
            Self::F32(values) => size_of_val(values.as_slice()),
            Self::Bf16(values) => size_of_val(values.as_slice()),
            Self::Fp8 { codes, scales, .. } => codes.len() + size_of_val(scales.as_slice()),
            Self::Pieces(pieces) => pieces.iter().map(Self::bytes).sum(),
        }
    }

    /// Name of the number format.
    pub fn dtype(&self) -> &'static str {
        match self {
            Self::F32(_) => "f32",
            Self::Bf16(_) => "bf16",
            Self::Fp8 { .. } => "fp8",
            Self::Pieces(pieces) => pieces.first().map_or("f32", Self::dtype),
        }
    }

    /// All values in f32.
    pub fn to_f32(&self) -> Vec<f32> {
        match self {
            Self::F32(values) => values.clone(),
            Self::Bf16(values) => values.iter().map(|value| value.to_f32()).collect(),
            Self::Fp8 { codes, scales, .. } => fp8::dequantize_rows(codes, scales),
            Self::Pieces(pieces) => pieces.iter().flat_map(Self::to_f32).collect(),
        }
    }

    /// The rows numbered `rows`, which must lie inside and are `hidden_size` wide, in their stored
    /// type, and what storing them in fp8 has cost: root mean square of the errors over that of the
    /// values.
    pub fn store(
        &self,
        rows: Range<usize>,
        hidden_size: usize,
        dtype: StateDtype,
    ) -> (StateRows, Option<f64>) {
        let range = rows.start * hidden_size..rows.end * hidden_size;
        match (self, dtype) {
            (Self::Bf16(values), StateDtype::Bf16) => {
                (StateRows::Bf16(values[range].to_vec()), None)
            }
            (Self::F32(values), StateDtype::Bf16) => {
                (StateRows::from_f32(&values[range], hidden_size, dtype), None)
            }
            (Self::Fp8 { .. }, StateDtype::Bf16) => {
                (StateRows::from_f32(&self.to_f32()[range], hidden_size, dtype), None)
            }
            (Self::Bf16(values), StateDtype::Fp8) => {
                let values: Vec<f32> = values[range].iter().map(|value| value.to_f32()).collect();
                quantise(&values, hidden_size)
            }
            (Self::F32(values), StateDtype::Fp8) => quantise(&values[range], hidden_size),
            (Self::Fp8 { codes, scales, errors }, StateDtype::Fp8) => {
                let error = fp8::relative_error(&errors[rows.clone()], &scales[rows.clone()]);
                let (codes, scales) = (codes[range].to_vec(), scales[rows].to_vec());
                (StateRows::Fp8 { codes, scales }, Some(error))
            }
            (Self::Pieces(pieces), _) => {
                let mut first = 0;
                for piece in pieces {
                    let last = first + piece.len() / hidden_size;
                    if first <= rows.start && rows.end <= last {
                        let own = rows.start - first..rows.end - first;
                        return piece.store(own, hidden_size, dtype);
                    }
                    first = last;
                }
                let values = Self::cut(pieces, &rows, hidden_size);
                values.store(0..rows.len(), hidden_size, dtype)
            }
        }
    }

    /// The rows numbered `rows`, `width` wide, which go across pieces.
    fn cut(pieces: &[Self], rows: &Range<usize>, width: usize) -> Self {
        let mut cut: Option<Self> = None;
        let mut first = 0;
        for piece in pieces {
            let held = piece.len() / width;
            let start = rows.start.clamp(first, first + held) - first;
            let end = rows.end.clamp(first, first + held) - first;
            first += held;
            if start == end {
                continue;
            }
            let part = piece.part(start..end, width);
            match (&mut cut, part) {
                (none @ None, part) => *none = Some(part),
                (Some(Self::F32(values)), Self::F32(more)) => values.extend(more),
                (Some(Self::Bf16(values)), Self::Bf16(more)) => values.extend(more),
                (
                    Some(Self::Fp8 { codes, scales, errors }),
                    Self::Fp8 { codes: more, scales: more_scales, errors: more_errors },
                ) => {
                    codes.extend(more);
                    scales.extend(more_scales);
                    errors.extend(more_errors);
                }
                // Pieces are of one format.
                _ => {}
            }
        }
        cut.unwrap_or_default()
    }

    /// A copy of some rows of a piece.
    fn part(&self, rows: Range<usize>, width: usize) -> Self {
        let range = rows.start * width..rows.end * width;
        match self {
            Self::F32(values) => Self::F32(values[range].to_vec()),
            Self::Bf16(values) => Self::Bf16(values[range].to_vec()),
            Self::Fp8 { codes, scales, errors } => Self::Fp8 {
                codes: codes[range].to_vec(),
                scales: scales[rows.clone()].to_vec(),
                errors: errors[rows].to_vec(),
            },
            Self::Pieces(pieces) => Self::cut(pieces, &rows, width),
        }
    }

    /// Gives the memory to rows that come later: pages that are new to a process cost more than
    /// the copy into them.
    fn recycle(self) {
        match self {
            Self::F32(values) => F32_MEMORY.put(values),
            Self::Bf16(values) => BF16_MEMORY.put(values),
            Self::Fp8 { codes, .. } => CODE_MEMORY.put(codes),
            Self::Pieces(pieces) => pieces.into_iter().for_each(Self::recycle),
        }
    }

    /// Copies f32 values.
    pub(crate) fn copy_f32(values: &[f32]) -> Self {
        Self::F32(F32_MEMORY.copy(values))
    }

    /// Copies fp8 rows.
    pub(crate) fn copy_fp8(codes: &[u8], scales: &[f32], errors: &[[f32; 2]]) -> Self {
        let (scales, errors) = (scales.to_vec(), errors.to_vec());
        Self::Fp8 { codes: CODE_MEMORY.copy(codes), scales, errors }
    }

    /// Copies bf16 values.
    pub(crate) fn copy_bf16(values: &[bf16]) -> Self {
        Self::Bf16(BF16_MEMORY.copy(values))
    }
}

impl Capture {
    /// Drops the states; their memory is used again for the next.
    pub fn recycle(self) {
        self.layers.into_iter().for_each(|layer| layer.rows.recycle());
    }
}

/// Memory of rows that nobody needs any more.
struct Memory<T>(Mutex<Vec<Vec<T>>>);

static F32_MEMORY: Memory<f32> = Memory(Mutex::new(Vec::new()));
static CODE_MEMORY: Memory<u8> = Memory(Mutex::new(Vec::new()));
static BF16_MEMORY: Memory<bf16> = Memory(Mutex::new(Vec::new()));

/// Pieces kept: those of a few batches, with a hundred layers on eight ranks.
const PIECES_MAX: usize = 4096;

/// Values that one thread copies at a time: one thread alone is slower than a GPU sends.
const COPIED_AT_ONCE: usize = 1 << 20;

impl<T: Copy + Default + Send + Sync> Memory<T> {
    fn put(&self, values: Vec<T>) {
        let mut free = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if free.len() < PIECES_MAX && values.capacity() > 0 {
            free.push(values);
        }
    }

    fn copy(&self, values: &[T]) -> Vec<T> {
        let mut free = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let fits = |memory: &Vec<T>| memory.capacity() >= values.len();
        // Where none is large enough, one that is too small makes room.
        let mut memory = match free.iter().rposition(fits) {
            Some(index) => free.swap_remove(index),
            None => {
                drop(free.pop());
                Vec::new()
            }
        };
        drop(free);
        memory.resize(values.len(), T::default());
        let pieces = memory.par_chunks_mut(COPIED_AT_ONCE).zip(values.par_chunks(COPIED_AT_ONCE));
        pieces.for_each(|(to, from)| to.copy_from_slice(from));
        memory
    }
}

/// The plain twin of what a GPU does before it copies.
fn quantise(values: &[f32], hidden_size: usize) -> (StateRows, Option<f64>) {
    let (codes, scales) = fp8::quantize_rows(values, hidden_size);
    let error = fp8::relative_error(&fp8::squared_errors(values, &codes, &scales), &scales);
    (StateRows::Fp8 { codes, scales }, Some(error))
}

impl Default for LayerRows {
    fn default() -> Self {
        Self::F32(Vec::new())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Samples inside a piece, across two, and across all.
    #[test]
    fn pieces_store_what_the_whole_stores() {
        let values: Vec<f32> = (0..24).map(|value| value as f32 / 4.0 - 3.0).collect();
        let bf16s: Vec<bf16> = values.iter().map(|&value| bf16::from_f32(value)).collect();
        let cuts = [0, 2, 2, 14, 24];
        let pieces = |of: &dyn Fn(Range<usize>) -> LayerRows| {
            LayerRows::Pieces(cuts.windows(2).map(|cut| of(cut[0]..cut[1])).collect())
        };
        let (codes, scales) = fp8::quantize_rows(&values, 2);
        let errors = fp8::squared_errors(&values, &codes, &scales);
        let fp8 = |cut: Range<usize>| LayerRows::Fp8 {
            codes: codes[cut.clone()].to_vec(),
            scales: scales[cut.start / 2..cut.end / 2].to_vec(),
            errors: errors[cut.start / 2..cut.end / 2].to_vec(),
        };
        for (whole, pieces) in [
            (fp8(0..24), pieces(&fp8)),
            (LayerRows::F32(values.clone()), pieces(&|cut| LayerRows::F32(values[cut].to_vec()))),
            (LayerRows::Bf16(bf16s.clone()), pieces(&|cut| LayerRows::Bf16(bf16s[cut].to_vec()))),
        ] {
            assert_eq!((pieces.len(), pieces.bytes()), (whole.len(), whole.bytes()));
            assert_eq!((pieces.dtype(), pieces.to_f32()), (whole.dtype(), whole.to_f32()));
            for rows in [0..1, 0..12, 1..7, 2..5, 6..9, 11..12, 3..3] {
                for dtype in [StateDtype::Bf16, StateDtype::Fp8] {
                    let (a, b) =
                        (whole.store(rows.clone(), 2, dtype), pieces.store(rows.clone(), 2, dtype));
                    assert_eq!(a, b, "{rows:?} {dtype:?}");
                }
            }
        }
    }

    #[test]
    fn memory_is_used_again_and_values_are_the_new_ones() {
        let memory = Memory(Mutex::new(Vec::new()));
        let first = memory.copy(&[1.0, 2.0, 3.0]);
        let address = first.as_ptr();
        memory.put(first);
        let second = memory.copy(&[4.0, 5.0]);
        assert_eq!((second.as_ptr(), second.as_slice()), (address, &[4.0, 5.0][..]));
        memory.put(second);
        assert_eq!(memory.copy(&[7.0; 100]), [7.0; 100]);
        assert!(memory.0.lock().unwrap().is_empty());
    }
}
