//! Decoding of quantised weights against its twins.

use half::bf16;
use kernels::cuda::{Dtype, Fp8BlockWeight, Int4Weight, Nvfp4Weight};
use kernels::dequant::{
    Fp8Block, GlobalScale, Int4PackQuantized, Nvfp4, Region, fp8_block, int4_pack_quantized, nvfp4,
};

use super::{Gpu, Named, Outcome, TYPES, near, same};

pub(crate) const CASES: &[Named] =
    &[("dequant_int4", int4), ("dequant_fp8_block", fp8), ("dequant_nvfp4", fp4)];

fn shapes(gpu: &Gpu) -> Vec<([usize; 2], usize)> {
    let mut shapes = vec![([1, 8], 0), ([3, 13], 1), ([40, 96], 8), ([9, 1000], 0), ([2, 9000], 8)];
    if !gpu.quick {
        shapes.push(([700, 7168], 0));
    }
    shapes
}

fn int4(gpu: &mut Gpu) -> Outcome {
    for ([rows, cols], pitch) in shapes(gpu) {
        for (dtype, group) in TYPES.into_iter().flat_map(|d| [(d, 32), (d, 8), (d, 12)]) {
            let packed: Vec<u32> =
                (0..rows * cols.div_ceil(8)).map(|_| gpu.rng.next() as u32).collect();
            let scale: Vec<u16> = (0..rows * cols.div_ceil(group))
                .map(|_| bf16::from_f32(gpu.rng.normal() * 0.01).to_bits())
                .collect();
            let (device_packed, device_scale) = (gpu.vector(&packed)?, gpu.vector(&scale)?);
            let out = gpu.matrix(&vec![9.0; rows * cols], [rows, cols], dtype, pitch)?;
            let weight = Int4Weight { packed: device_packed.view, scale: device_scale.view, group };
            gpu.kernels.on(&gpu.stream).dequant_int4(&out.view, &weight)?;
            let mut want = vec![0.0; rows * cols];
            let twin = Int4PackQuantized {
                packed: bytemuck::cast_slice(&packed),
                scale: bytemuck::cast_slice(&scale),
                shape: [rows, cols],
                group,
            };
            int4_pack_quantized(&mut want, &twin, &Region::full([rows, cols]));
            same(&format!("{dtype:?} [{rows}, {cols}] / {group}"), &gpu.values(&out)?, &want)?;
        }
    }
    Ok(())
}

/// A code that is not NaN.
fn code(gpu: &mut Gpu) -> u8 {
    let code = gpu.rng.next() as u8;
    if code & 0x7F == 0x7F { code - 1 } else { code }
}

fn fp8(gpu: &mut Gpu) -> Outcome {
    for ([rows, cols], pitch) in shapes(gpu) {
        for (dtype, block) in TYPES.into_iter().flat_map(|d| [(d, 128), (d, 16), (d, 5)]) {
            let codes: Vec<u8> = (0..rows * cols).map(|_| code(gpu)).collect();
            let scales = rows.div_ceil(block) * cols.div_ceil(block);
            let scale_inv = gpu.rng.values(scales, Dtype::F32);
            let (device_codes, device_scale) = (gpu.vector(&codes)?, gpu.vector(&scale_inv)?);
            let out = gpu.matrix(&vec![9.0; rows * cols], [rows, cols], dtype, pitch)?;
            let weight =
                Fp8BlockWeight { weight: device_codes.view, scale_inv: device_scale.view, block };
            gpu.kernels.on(&gpu.stream).dequant_fp8_block(&out.view, &weight)?;
            let mut want = vec![0.0; rows * cols];
            let twin = Fp8Block {
                weight: &codes,
                scale_inv: bytemuck::cast_slice(&scale_inv),
                shape: [rows, cols],
                block,
            };
            fp8_block(&mut want, &twin, &Region::full([rows, cols]));
            near(
                &format!("{dtype:?} [{rows}, {cols}] / {block}"),
                &gpu.values(&out)?,
                &want,
                dtype,
            )?;
        }
    }
    Ok(())
}

fn fp4(gpu: &mut Gpu) -> Outcome {
    for ([rows, cols], pitch) in shapes(gpu) {
        for dtype in TYPES {
            let packed: Vec<u8> =
                (0..rows * cols.div_ceil(2)).map(|_| gpu.rng.next() as u8).collect();
            let scale: Vec<u8> = (0..rows * cols.div_ceil(16)).map(|_| code(gpu)).collect();
            let (device_packed, device_scale) = (gpu.vector(&packed)?, gpu.vector(&scale)?);
            let out = gpu.matrix(&vec![9.0; rows * cols], [rows, cols], dtype, pitch)?;
            let weight =
                Nvfp4Weight { packed: device_packed.view, scale: device_scale.view, global: 0.37 };
            gpu.kernels.on(&gpu.stream).dequant_nvfp4(&out.view, &weight)?;
            let mut want = vec![0.0; rows * cols];
            let global = GlobalScale::Multiplier(0.37);
            let twin = Nvfp4 { packed: &packed, scale: &scale, global, shape: [rows, cols] };
            nvfp4(&mut want, &twin, &Region::full([rows, cols]));
            near(&format!("{dtype:?} [{rows}, {cols}]"), &gpu.values(&out)?, &want, dtype)?;
        }
    }
    Ok(())
}
