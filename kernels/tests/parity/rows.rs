//! Row-wise kernels against their twins.

use kernels::cuda::{DeviceHeads, Dtype, LatentHeads, RankParts, RopeView, RowNorm};
use kernels::rope::{RopeLayout, RopeTable};
use kernels::{activation, norm, reference};

use super::{Gpu, Named, Outcome, TYPES, near, round, same, type_pairs};

pub(crate) const CASES: &[Named] = &[
    ("copy", copy),
    ("add", add),
    ("silu_mul", silu_mul),
    ("zero", zero),
    ("repeat_row", repeat_row),
    ("embed", embed),
    ("rms_norm", rms_norm),
    ("add_rms_norm", add_rms_norm),
    ("add_parts", add_parts),
    ("rope", rope),
    ("expand_latent", expand_latent),
];

fn copy(gpu: &mut Gpu) -> Outcome {
    for ([rows, cols], pitch) in gpu.shapes() {
        for (from, to) in type_pairs() {
            let values = gpu.rng.values(rows * cols, from);
            let x = gpu.matrix(&values, [rows, cols], from, pitch)?;
            let out = gpu.matrix(&vec![9.0; rows * cols], [rows, cols], to, 8)?;
            gpu.kernels.on(&gpu.stream).copy(&out.view, &x.view)?;
            let want: Vec<f32> = values.iter().map(|&x| round(x, to)).collect();
            same(&format!("{from:?} {to:?} [{rows}, {cols}]"), &gpu.values(&out)?, &want)?;
        }
    }
    Ok(())
}

fn add(gpu: &mut Gpu) -> Outcome {
    for ([rows, cols], pitch) in gpu.shapes() {
        for (from, to) in type_pairs() {
            let (a, b) = (gpu.rng.values(rows * cols, to), gpu.rng.values(rows * cols, from));
            let x = gpu.matrix(&a, [rows, cols], to, pitch)?;
            let y = gpu.matrix(&b, [rows, cols], from, 8)?;
            gpu.kernels.on(&gpu.stream).add(&x.view, &y.view)?;
            let want: Vec<f32> = a.iter().zip(&b).map(|(a, b)| round(a + b, to)).collect();
            same(&format!("{from:?} {to:?} [{rows}, {cols}]"), &gpu.values(&x)?, &want)?;
        }
    }
    Ok(())
}

fn silu_mul(gpu: &mut Gpu) -> Outcome {
    for ([rows, cols], pitch) in gpu.shapes() {
        for (from, to) in type_pairs() {
            // Gate and up side by side, as one product leaves them.
            let both = gpu.rng.values(rows * 2 * cols, from);
            let x = gpu.matrix(&both, [rows, 2 * cols], from, pitch)?;
            let out = gpu.matrix(&vec![9.0; rows * cols], [rows, cols], to, 8)?;
            let (gate, up) = (x.view.columns(0..cols), x.view.columns(cols..2 * cols));
            gpu.kernels.on(&gpu.stream).silu_mul(&out.view, &gate, &up)?;
            let mut want = Vec::new();
            for row in both.chunks(2 * cols) {
                let mut gate = row[..cols].to_vec();
                activation::silu_mul(&mut gate, &row[cols..]);
                want.extend(gate);
            }
            near(&format!("{from:?} {to:?} [{rows}, {cols}]"), &gpu.values(&out)?, &want, to)?;
        }
    }
    Ok(())
}

fn zero(gpu: &mut Gpu) -> Outcome {
    for (shape, pitch) in gpu.shapes() {
        for dtype in TYPES {
            let x = gpu.matrix(&vec![9.0; shape[0] * shape[1]], shape, dtype, pitch)?;
            gpu.kernels.on(&gpu.stream).zero(&x.view)?;
            same(
                &format!("{dtype:?} {shape:?}"),
                &gpu.values(&x)?,
                &vec![0.0; shape[0] * shape[1]],
            )?;
        }
    }
    Ok(())
}

fn repeat_row(gpu: &mut Gpu) -> Outcome {
    for ([rows, cols], pitch) in gpu.shapes() {
        let values = gpu.rng.values(cols, Dtype::F32);
        let row = gpu.matrix(&values, [1, cols], Dtype::F32, 0)?;
        let out = gpu.matrix(&vec![9.0; rows * cols], [rows, cols], Dtype::Bf16, pitch)?;
        gpu.kernels.on(&gpu.stream).repeat_row(&out.view, &row.view)?;
        let want: Vec<f32> =
            (0..rows * cols).map(|i| round(values[i % cols], Dtype::Bf16)).collect();
        same(&format!("[{rows}, {cols}]"), &gpu.values(&out)?, &want)?;
    }
    Ok(())
}

fn embed(gpu: &mut Gpu) -> Outcome {
    let (first, table_rows) = (1000, 37);
    for ([rows, cols], pitch) in gpu.shapes() {
        for (from, to) in type_pairs() {
            let values = gpu.rng.values(table_rows * cols, from);
            let table = gpu.matrix(&values, [table_rows, cols], from, pitch)?;
            let mut ids: Vec<u32> =
                (0..rows).map(|_| 990 + gpu.rng.below(table_rows + 20) as u32).collect();
            ids[0] = u32::MAX;
            let device_ids = gpu.vector(&ids)?;
            let out = gpu.matrix(&vec![9.0; rows * cols], [rows, cols], to, 8)?;
            gpu.kernels.on(&gpu.stream).embed(&out.view, &table.view, device_ids.view, first)?;
            let mut want = Vec::new();
            for &id in &ids {
                match (id as usize).checked_sub(first).filter(|&row| row < table_rows) {
                    Some(row) => {
                        want.extend(values[row * cols..][..cols].iter().map(|&x| round(x, to)));
                    }
                    None => want.resize(want.len() + cols, 0.0),
                }
            }
            same(&format!("{from:?} {to:?} [{rows}, {cols}]"), &gpu.values(&out)?, &want)?;
        }
    }
    Ok(())
}

fn rms_norm(gpu: &mut Gpu) -> Outcome {
    for ([rows, cols], pitch) in gpu.shapes() {
        for (from, to) in type_pairs() {
            let values = gpu.rng.values(rows * cols, from);
            let weights = gpu.rng.values(cols, Dtype::F32);
            let x = gpu.matrix(&values, [rows, cols], from, pitch)?;
            let weight = gpu.vector(&weights)?;
            let out = gpu.matrix(&vec![9.0; rows * cols], [rows, cols], to, 8)?;
            gpu.kernels.on(&gpu.stream).rms_norm(&out.view, &x.view, weight.view, 1e-5)?;
            let mut want = vec![0.0; rows * cols];
            norm::rms_norm(&mut want, &values, &weights, 1e-5);
            near(&format!("{from:?} {to:?} [{rows}, {cols}]"), &gpu.values(&out)?, &want, to)?;
        }
    }
    Ok(())
}

fn add_rms_norm(gpu: &mut Gpu) -> Outcome {
    for ([rows, cols], pitch) in gpu.shapes() {
        for residual_type in TYPES {
            for (from, to) in type_pairs() {
                let a = gpu.rng.values(rows * cols, residual_type);
                let b = gpu.rng.values(rows * cols, from);
                let weights = gpu.rng.values(cols, Dtype::F32);
                let residual = gpu.matrix(&a, [rows, cols], residual_type, pitch)?;
                let delta = gpu.matrix(&b, [rows, cols], from, 0)?;
                let weight = gpu.vector(&weights)?;
                let out = gpu.matrix(&vec![9.0; rows * cols], [rows, cols], to, 8)?;
                let views = (&residual.view, &delta.view);
                let on = gpu.kernels.on(&gpu.stream);
                on.add_rms_norm(&out.view, views, weight.view, 1e-6)?;
                let sum: Vec<f32> =
                    a.iter().zip(&b).map(|(a, b)| round(a + b, residual_type)).collect();
                let mut want = vec![0.0; rows * cols];
                norm::rms_norm(&mut want, &sum, &weights, 1e-6);
                let what = format!("{residual_type:?} {from:?} {to:?} [{rows}, {cols}]");
                same(&format!("{what} residual"), &gpu.values(&residual)?, &sum)?;
                near(&what, &gpu.values(&out)?, &want, to)?;
            }
        }
    }
    Ok(())
}

/// The second of three ranks, whose own part lies apart; what lies in its place is not read.
fn add_parts(gpu: &mut Gpu) -> Outcome {
    for ([rows, cols], pitch) in gpu.shapes() {
        for (from, to) in type_pairs() {
            for (fresh, normed) in [(true, false), (false, true), (true, true), (false, false)] {
                let (ranks, rank, size) = (3, 1, rows * cols);
                let (x_values, own_values) = (gpu.rng.values(size, to), gpu.rng.values(size, from));
                let mut received_values = gpu.rng.values(ranks * size, from);
                received_values[rank * size..(rank + 1) * size].fill(f32::NAN);
                let x = gpu.matrix(&x_values, [rows, cols], to, pitch)?;
                let own = gpu.matrix(&own_values, [rows, cols], from, 8)?;
                let received = gpu.matrix(&received_values, [ranks * rows, cols], from, 0)?;
                let out = gpu.matrix(&vec![9.0; size], [rows, cols], from, 0)?;
                let weight_values = gpu.rng.values(cols, Dtype::F32);
                let weight = gpu.vector(&weight_values)?;
                let parts =
                    RankParts { own: own.view, received: received.view.address, rank, ranks };
                let norm = RowNorm { out: out.view, weight: weight.view, eps: 1e-5 };
                let norm = normed.then_some(&norm);
                gpu.kernels.on(&gpu.stream).add_parts(&x.view, &parts, norm, fresh)?;
                let part = |index: usize| &received_values[index * size..(index + 1) * size];
                let mut want = x_values;
                reference::add_parts(&mut want, &[part(0), &own_values, part(2)], fresh);
                let want: Vec<f32> = want.into_iter().map(|x| round(x, to)).collect();
                let what = format!("{from:?} {to:?} [{rows}, {cols}] {fresh} {normed}");
                same(&what, &gpu.values(&x)?, &want)?;
                let mut want_out = vec![9.0; size];
                if normed {
                    norm::rms_norm(&mut want_out, &want, &weight_values, 1e-5);
                }
                near(&format!("norm of {what}"), &gpu.values(&out)?, &want_out, from)?;
            }
        }
    }
    Ok(())
}

fn rope(gpu: &mut Gpu) -> Outcome {
    // Rows, heads, unrotated width before, rotated width, pitch.
    for (rows, heads, before, dim, pitch) in
        [(5, 1, 0, 2, 0), (37, 3, 16, 8, 5), (100, 8, 128, 64, 0), (9, 9, 0, 64, 64)]
    {
        for (dtype, interleaved) in
            TYPES.into_iter().flat_map(|dtype| [(dtype, true), (dtype, false)])
        {
            let width = before + dim;
            let positions: Vec<u32> = (0..rows).map(|r| r as u32 * 13).collect();
            let table = RopeTable::new(dim, 10_000.0, None);
            let (mut cos, mut sin) = (Vec::new(), Vec::new());
            for &position in &positions {
                for &frequency in table.inv_freq() {
                    let angle = f64::from(position as f32 * frequency as f32);
                    cos.push(angle.cos() as f32);
                    sin.push(angle.sin() as f32);
                }
            }
            let mut want = gpu.rng.values(rows * heads * width, dtype);
            let x = gpu.matrix(&want, [rows, heads * width], dtype, pitch)?;
            let (device_cos, device_sin) = (gpu.vector(&cos)?, gpu.vector(&sin)?);
            let angles = RopeView {
                cos: device_cos.view,
                sin: device_sin.view,
                pairs: dim / 2,
                heads,
                interleaved,
            };
            let view = DeviceHeads::of(x.view, width, before);
            gpu.kernels.on(&gpu.stream).rope(&view, &angles)?;
            let layout = RopeLayout::packed(heads, width, before);
            match interleaved {
                true => table.rotate_interleaved(&mut want, &positions, layout),
                false => table.rotate_half(&mut want, &positions, layout),
            }
            let what = format!("{dtype:?} interleaved {interleaved} {rows} {heads} {before} {dim}");
            near(&what, &gpu.values(&x)?, &want, dtype)?;
        }
    }
    Ok(())
}

fn expand_latent(gpu: &mut Gpu) -> Outcome {
    for (rows, dims, pitch) in
        [(3, [2, 5, 3, 4], 1), (50, [8, 128, 64, 128], 0), (17, [4, 16, 8, 16], 8)]
    {
        for (dtype, pe_dtype) in type_pairs() {
            let [heads, nope, rope, v] = dims;
            let kv_values = gpu.rng.values(rows * heads * (nope + v), dtype);
            let pe_values = gpu.rng.values(rows * rope, pe_dtype);
            let kv = gpu.matrix(&kv_values, [rows, heads * (nope + v)], dtype, pitch)?;
            let k_pe = gpu.matrix(&pe_values, [rows, rope], pe_dtype, pitch)?;
            let (key, value) = (heads * (nope + rope), heads * v);
            let keys = gpu.matrix(&vec![9.0; rows * key], [rows, key], dtype, pitch)?;
            let values = gpu.matrix(&vec![9.0; rows * value], [rows, value], dtype, 0)?;
            let latent = LatentHeads { heads, nope, rope, v };
            let outputs = (&keys.view, &values.view);
            let on = gpu.kernels.on(&gpu.stream);
            on.expand_latent(outputs, &kv.view, &k_pe.view, &latent)?;
            let pe_values: Vec<f32> = pe_values.iter().map(|&pe| round(pe, dtype)).collect();
            let want = reference::expand_latent(&kv_values, &pe_values, dims);
            same(&format!("keys {dtype:?} {pe_dtype:?} {dims:?}"), &gpu.values(&keys)?, &want.0)?;
            same(&format!("values {dtype:?} {dims:?}"), &gpu.values(&values)?, &want.1)?;
        }
    }
    Ok(())
}
