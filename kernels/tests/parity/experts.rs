//! Products of routed experts against their twins. Only Hopper has them.

use half::bf16;
use kernels::cuda::{
    DeviceBuffer, DevicePanels, Dtype, EXPERT_ALIGN, ExpertWeights, Int4Weight, download,
};
use kernels::dequant::{Int4PackQuantized, Region, int4_pack_quantized};
use kernels::experts::{gated, order_int4, panel_index, product_row};

use super::{Gpu, HeldVector, Named, Outcome, same, within};

pub(crate) const CASES: &[Named] =
    &[("order_int4", order), ("gather_panels", gather_panels), ("experts", experts)];

const GROUP: usize = 32;
/// Bits of a NaN that memory holds where nothing was written.
const UNSET: u16 = 0xFFFF;

/// A random INT4 matrix.
struct Matrix {
    codes: Vec<u32>,
    scales: Vec<u16>,
    shape: [usize; 2],
}

impl Matrix {
    fn random(gpu: &mut Gpu, [rows, cols]: [usize; 2]) -> Self {
        let codes = (0..rows * cols / 8).map(|_| gpu.rng.next() as u32).collect();
        let mut scale = || bf16::from_f32(gpu.rng.normal() * 0.02).to_bits();
        let scales = (0..rows * cols / GROUP).map(|_| scale()).collect();
        Self { codes, scales, shape: [rows, cols] }
    }

    fn values(&self) -> Vec<f32> {
        let mut values = vec![0.0; self.shape[0] * self.shape[1]];
        let twin = Int4PackQuantized {
            packed: bytemuck::cast_slice(&self.codes),
            scale: bytemuck::cast_slice(&self.scales),
            shape: self.shape,
            group: GROUP,
        };
        int4_pack_quantized(&mut values, &twin, &Region::full(self.shape));
        values
    }

    /// Codes and scales in the order of products.
    fn ordered(&self, gpu: &Gpu, gated: bool) -> Outcome<(HeldVector<u32>, HeldVector<u16>)> {
        let (packed, scale) = (gpu.vector(&self.codes)?, gpu.vector(&self.scales)?);
        let weight = Int4Weight { packed: packed.view, scale: scale.view, group: GROUP };
        let codes = gpu.vector(&vec![0u32; self.codes.len()])?;
        let scales = gpu.vector(&vec![0u16; self.scales.len()])?;
        let to = (codes.view, scales.view);
        gpu.kernels.on(&gpu.stream).order_int4(to, &weight, self.shape, gated)?;
        gpu.stream.synchronize()?;
        Ok((codes, scales))
    }
}

fn order(gpu: &mut Gpu) -> Outcome {
    for shape in [[128, 128], [256, 384], [384, 256]] {
        for gated in [false, true] {
            let matrix = Matrix::random(gpu, shape);
            let (codes, scales) = matrix.ordered(gpu, gated)?;
            let want = order_int4((&matrix.codes, &matrix.scales), shape, gated);
            same(&format!("codes, {shape:?} {gated}"), &gpu.vector_values(&codes)?, &want.0)?;
            same(&format!("scales, {shape:?} {gated}"), &gpu.vector_values(&scales)?, &want.1)?;
        }
    }
    Ok(())
}

fn gather_panels(gpu: &mut Gpu) -> Outcome {
    for ([x_rows, cols], rows, end) in [([5, 64], 8, 8), ([40, 384], 75, 64), ([3, 1024], 900, 701)]
    {
        let values = gpu.rng.values(x_rows * cols, Dtype::Bf16);
        let x = gpu.matrix(&values, [x_rows, cols], Dtype::Bf16, 8)?;
        let mut sources: Vec<u32> = (0..rows).map(|_| gpu.rng.below(x_rows) as u32).collect();
        sources[1] = u32::MAX;
        let device_sources = gpu.vector(&sources)?;
        let offsets = gpu.vector(&[0, end as u32])?;
        let out = gpu.vector(&vec![UNSET; rows * cols])?;
        let panels = DevicePanels { address: out.view.address, rows, cols };
        let grouping = (device_sources.view, offsets.view);
        gpu.kernels.on(&gpu.stream).gather_panels(&panels, &x.view, grouping)?;
        let got = gpu.vector_values(&out)?;
        let mut want = vec![UNSET; rows * cols];
        for (row, &source) in sources.iter().enumerate().take(end) {
            for col in 0..cols {
                let source = if source as usize >= x_rows { 0 } else { source as usize };
                want[panel_index(row, col, rows)] =
                    bf16::from_f32(values[source * cols + col]).to_bits();
            }
        }
        same(&format!("{rows} rows of [{x_rows}, {cols}]"), &got, &want)?;
    }
    Ok(())
}

fn experts(gpu: &mut Gpu) -> Outcome {
    if !gpu.kernels.on(&gpu.stream).has_expert_products() {
        return Ok(());
    }
    let mut cases = vec![
        ([128, 128], vec![33, 31]),
        ([256, 128], vec![32]),
        ([384, 256], vec![100; 40]),
        ([256, 256], vec![0, 5, 40, 0, 64]),
        ([512, 384], vec![257, 1, 0, 161, 200]),
    ];
    if !gpu.quick {
        cases.push(([1024, 1152], vec![3000, 0, 0, 7, 255, 256, 257]));
        cases.push(([4096, 7168], vec![682, 33]));
        cases.push(([7168, 2048], vec![700, 650]));
    }
    for (shape, counts) in cases {
        for gate_up in [false, true] {
            Products::new(gpu, shape, &counts, gate_up)?.check(gpu)?;
        }
    }
    Ok(())
}

/// One product of some experts.
struct Products {
    shape: [usize; 2],
    counts: Vec<usize>,
    gate_up: bool,
    matrices: Vec<Matrix>,
    /// First row of each expert, and the end.
    offsets: Vec<u32>,
    /// Row-major, of every grouped row.
    x: Vec<f32>,
}

impl Products {
    fn new(gpu: &mut Gpu, shape: [usize; 2], counts: &[usize], gate_up: bool) -> Outcome<Self> {
        let mut offsets = vec![0];
        for count in counts {
            let end = offsets[offsets.len() - 1] as usize + count.next_multiple_of(EXPERT_ALIGN);
            offsets.push(end as u32);
        }
        let rows = offsets[counts.len()] as usize;
        Ok(Self {
            shape,
            counts: counts.to_vec(),
            gate_up,
            matrices: counts.iter().map(|_| Matrix::random(gpu, shape)).collect(),
            offsets,
            x: gpu.rng.values(rows * shape[1], Dtype::Bf16),
        })
    }

    /// Rows that the buffers have room for: some are never touched.
    fn room(&self) -> usize {
        self.offsets[self.counts.len()] as usize + 2 * EXPERT_ALIGN
    }

    /// Expert and number of every row that is real.
    fn rows(&self) -> impl Iterator<Item = (usize, usize)> {
        let counts = self.counts.iter().enumerate();
        counts.flat_map(move |(expert, &count)| {
            (0..count).map(move |row| (expert, self.offsets[expert] as usize + row))
        })
    }

    fn check(&self, gpu: &Gpu) -> Outcome {
        let [out, input] = self.shape;
        let (mut codes, mut scales) = (Vec::new(), Vec::new());
        for matrix in &self.matrices {
            let ordered = matrix.ordered(gpu, self.gate_up)?;
            codes.extend(gpu.vector_values(&ordered.0)?);
            scales.extend(gpu.vector_values(&ordered.1)?);
        }
        let (codes, scales) = (gpu.vector(&codes)?, gpu.vector(&scales)?);
        let offsets = gpu.vector(&self.offsets)?;
        let weights = ExpertWeights {
            codes: codes.view,
            scales: scales.view,
            experts: self.counts.len(),
            out,
            input,
        };
        let mut panels = vec![UNSET; self.room() * input];
        for (_, row) in self.rows() {
            for col in 0..input {
                panels[panel_index(row, col, self.room())] =
                    bf16::from_f32(self.x[row * input + col]).to_bits();
            }
        }
        let panels = gpu.vector(&panels)?;
        let x = DevicePanels { address: panels.view.address, rows: self.room(), cols: input };
        let width = if self.gate_up { out / 2 } else { out };
        let result = gpu.vector(&vec![UNSET; self.room() * width])?;
        let on = gpu.kernels.on(&gpu.stream);
        let grouping = (&weights, offsets.view);
        if self.gate_up {
            let out = DevicePanels { address: result.view.address, rows: self.room(), cols: width };
            on.experts_gate_up(&out, &x, grouping)?;
        } else {
            let out = result.buffer.matrix([self.room(), width], Dtype::Bf16);
            on.experts_down(&out, &x, grouping)?;
        }
        self.compare(&gpu_values(gpu, &result.buffer, self.room() * width)?, width)
    }

    fn compare(&self, got: &[u16], width: usize) -> Outcome {
        let [out, input] = self.shape;
        let value = |row: usize, col: usize| {
            let place = match self.gate_up {
                true => panel_index(row, col, self.room()),
                false => row * width + col,
            };
            got[place]
        };
        let end = self.offsets[self.counts.len()] as usize;
        let what = format!("{:?} [{out}, {input}], gates {}", self.counts, self.gate_up);
        let behind = (end..self.room()).flat_map(|row| (0..width).map(move |col| (row, col)));
        if let Some((row, col)) = behind.into_iter().find(|&(r, c)| value(r, c) != UNSET) {
            return Err(format!("{what}: row {row} of {end} written at {col}").into());
        }
        // In f64 on one core: all rows of small products, some of large ones.
        let step = (out * input * self.x.len() / input).div_ceil(1 << 29);
        let mut weight = (usize::MAX, Vec::new());
        for (expert, row) in self.rows().step_by(step) {
            if weight.0 != expert {
                weight = (expert, self.matrices[expert].values());
            }
            let mut want = product_row(&self.x[row * input..][..input], &weight.1);
            if self.gate_up {
                want = gated(&want);
            }
            let got: Vec<f32> =
                (0..width).map(|col| bf16::from_bits(value(row, col)).to_f32()).collect();
            let absolute = 2e-5 * (input as f32).sqrt();
            let what = format!("{what}, row {row} of expert {expert}");
            within(&what, &got, &want, (1.0 / 128.0, absolute))?;
        }
        Ok(())
    }
}

fn gpu_values(gpu: &Gpu, buffer: &DeviceBuffer, len: usize) -> Outcome<Vec<u16>> {
    Ok(download(&gpu.stream, buffer.vector(len))?)
}
