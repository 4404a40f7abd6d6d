//! cuBLASLt against sums in f64.

use kernels::cuda::{DeviceMatrix, Dtype, Form, Product};

use super::{Gpu, Named, Outcome, within};

pub(crate) const CASES: &[Named] = &[("products", products)];

fn products(gpu: &mut Gpu) -> Outcome {
    let mut dims = vec![[1, 8, 16], [5, 7, 3], [33, 64, 24], [128, 96, 256], [17, 200, 72]];
    if !gpu.quick {
        dims.push([300, 513, 1024]);
    }
    for [m, n, k] in dims {
        for form in [Form::Nt, Form::Nn, Form::Tn] {
            for (input, output) in
                [(Dtype::Bf16, Dtype::Bf16), (Dtype::Bf16, Dtype::F32), (Dtype::F32, Dtype::F32)]
            {
                for (accumulate, pitch) in [(false, 0), (true, 8), (false, 5)] {
                    let product = Product { form, accumulate, alpha: 0.75 };
                    compare(gpu, [m, n, k], (input, output), product, pitch)?;
                }
            }
        }
    }
    Ok(())
}

fn compare(
    gpu: &mut Gpu,
    [m, n, k]: [usize; 3],
    (input, output): (Dtype, Dtype),
    product: Product,
    pitch: usize,
) -> Outcome {
    let (a_shape, b_shape) = match product.form {
        Form::Nt => ([m, k], [n, k]),
        Form::Nn => ([m, k], [k, n]),
        Form::Tn => ([k, m], [k, n]),
    };
    let a_values = gpu.rng.values(m * k, input);
    let b_values = gpu.rng.values(n * k, input);
    let before = gpu.rng.values(m * n, output);
    let a = gpu.matrix(&a_values, a_shape, input, pitch)?;
    let b = gpu.matrix(&b_values, b_shape, input, pitch)?;
    let out = gpu.matrix(&before, [m, n], output, pitch)?;
    let (a_view, b_view, out_view): (DeviceMatrix, DeviceMatrix, DeviceMatrix) =
        (a.view, b.view, out.view);
    let what = format!("{product:?} {m} {n} {k} {input:?} {output:?} pitch {pitch}");
    gpu.blas
        .matmul(&out_view, &a_view, &b_view, product)
        .map_err(|error| format!("{what}: {error}: {:?}", std::error::Error::source(&error)))?;
    let mut want = Vec::with_capacity(m * n);
    for (i, j) in (0..m).flat_map(|i| (0..n).map(move |j| (i, j))) {
        let term = |l: usize| {
            let a =
                if product.form == Form::Tn { a_values[l * m + i] } else { a_values[i * k + l] };
            let b =
                if product.form == Form::Nt { b_values[j * k + l] } else { b_values[l * n + j] };
            f64::from(a) * f64::from(b)
        };
        let sum = (0..k).map(term).sum::<f64>() * f64::from(product.alpha);
        let kept = if product.accumulate { f64::from(before[i * n + j]) } else { 0.0 };
        want.push((sum + kept) as f32);
    }
    let root = (k as f32).sqrt();
    // Some cuBLASLt algorithms round the product to bf16 before they add it, seen on one H200: half
    // a unit of a sum that may be as large as 4.
    let rounded_twice = if product.accumulate { 1.0 / 64.0 } else { 0.0 };
    let tolerance = match output {
        Dtype::Bf16 => (1.0 / 128.0, 1e-4 * root + rounded_twice),
        Dtype::F32 => (1e-5, 2e-6 * root),
    };
    within(&what, &gpu.values(&out)?, &want, tolerance)
}
