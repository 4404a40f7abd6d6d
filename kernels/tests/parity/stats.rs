//! Statistics and FP8 form of captured states against their twins.

use bytemuck::Zeroable;
use kernels::cuda::{DeviceVector, StateStats};
use kernels::reference;

use super::{Gpu, Named, Outcome, TYPES, same, within};

pub(crate) const CASES: &[Named] = &[("state_stats", state_stats), ("quantise_fp8_rows", quantise)];

fn check(what: &str, got: &StateStats, values: &[f32]) -> Outcome {
    let (sum, absmax, non_finite) = reference::stats(values);
    let near = (got.sum_squares - sum).abs() <= sum * 1e-5;
    if near && got.absmax == absmax && got.non_finite == non_finite {
        return Ok(());
    }
    Err(format!("{what}: {got:?} instead of {sum} {absmax} {non_finite}").into())
}

fn state_stats(gpu: &mut Gpu) -> Outcome {
    for ([rows, cols], pitch) in gpu.shapes() {
        for dtype in TYPES {
            let mut values = gpu.rng.values(rows * cols, dtype);
            for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                let at = gpu.rng.below(values.len());
                values[at] = bad;
            }
            let mut bounds = vec![0, 0, rows / 3, rows / 3, rows];
            bounds.extend([rows, rows]);
            let bounds: Vec<u32> = bounds.into_iter().map(|bound| bound as u32).collect();
            let x = gpu.matrix(&values, [rows, cols], dtype, pitch)?;
            let per_row = gpu.vector(&vec![StateStats::zeroed(); rows])?;
            let segments = gpu.vector(&vec![StateStats::zeroed(); bounds.len() - 1])?;
            let device_bounds = gpu.vector(&bounds)?;
            let on = gpu.kernels.on(&gpu.stream);
            on.row_stats(&x.view, per_row.view)?;
            on.segment_stats(segments.view, per_row.view, device_bounds.view)?;
            for (r, got) in gpu.vector_values(&per_row)?.iter().enumerate() {
                let row = &values[r * cols..][..cols];
                check(&format!("{dtype:?} [{rows}, {cols}] row {r}"), got, row)?;
            }
            for (s, got) in gpu.vector_values(&segments)?.iter().enumerate() {
                let part = &values[bounds[s] as usize * cols..bounds[s + 1] as usize * cols];
                check(&format!("{dtype:?} [{rows}, {cols}] segment {s}"), got, part)?;
            }
        }
    }
    Ok(())
}

fn quantise(gpu: &mut Gpu) -> Outcome {
    // The twin searches all codes for each value: few of them.
    let shapes = gpu.shapes().into_iter().filter(|([rows, cols], _)| rows * cols < 100_000);
    for ([rows, cols], pitch) in shapes.collect::<Vec<_>>() {
        for dtype in TYPES {
            let mut values = gpu.rng.values(rows * cols, dtype);
            values[..cols].fill(0.0);
            if rows > 2 {
                values[cols] = f32::NAN;
                values[2 * cols] = f32::INFINITY;
            }
            let x = gpu.matrix(&values, [rows, cols], dtype, pitch)?;
            let stride = cols + 8;
            let codes = gpu.vector(&vec![0xA5u8; rows * stride])?;
            let scales = gpu.vector(&vec![9f32; rows])?;
            let errors = gpu.vector(&vec![[9f32; 2]; rows])?;
            let view: DeviceVector<u8> = codes.view;
            gpu.kernels.on(&gpu.stream).quantise_fp8_rows(
                (view, stride),
                scales.view,
                errors.view,
                &x.view,
            )?;
            let (want_codes, want_scales) = reference::quantise_fp8_rows(&values, cols);
            let what = format!("{dtype:?} [{rows}, {cols}]");
            let bits = |scales: &[f32]| -> Vec<u32> {
                scales.iter().map(|s| if s.is_nan() { u32::MAX } else { s.to_bits() }).collect()
            };
            let got_scales = gpu.vector_values(&scales)?;
            same(&format!("scales {what}"), &bits(&got_scales), &bits(&want_scales))?;
            let want = reference::fp8_errors(&values, (&want_codes, &want_scales), cols);
            let got = gpu.vector_values(&errors)?;
            for (r, (got, want)) in got.iter().zip(&want).enumerate() {
                // The errors of a row without a finite scale mean nothing either.
                if want_scales[r].is_finite() {
                    within(&format!("errors {what} row {r}"), got, want, (1e-3, 1e-6))?;
                }
            }
            let got = gpu.vector_values(&codes)?;
            for (r, got) in got.chunks(stride).enumerate() {
                // Codes of a row without a finite scale mean nothing.
                if want_scales[r].is_finite() {
                    let want = &want_codes[r * cols..][..cols];
                    same(&format!("codes {what} row {r}"), &got[..cols], want)?;
                }
                same(&format!("gap {what} row {r}"), &got[cols..], &[0xA5; 8])?;
            }
        }
    }
    Ok(())
}
