//! Products by cuBLASLt: a plan for each shape, found once. Knows nothing of layers.

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::Arc;

use cudarc::cublaslt::{result, sys};
use cudarc::driver::CudaStream;

use super::{CudaError, DeviceBuffer, DeviceMatrix, Dtype, ensure};

/// Plans that are kept; beyond, all are forgotten.
const MAX_PLANS: usize = 4096;

/// Which operands are transposed.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Form {
    /// `a [m, k] x b [n, k]^T`: a linear layer whose weight is [out, in].
    Nt,
    /// `a [m, k] x b [k, n]`: the gradient of a linear layer's input.
    Nn,
    /// `a [k, m]^T x b [k, n]`: the gradient of a linear layer's weight.
    Tn,
}

/// A product and what becomes of it: `out = alpha * a b`, plus what was there if `accumulate`.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Product {
    /// Which operands are transposed.
    pub form: Form,
    /// Whether the product is added to `out`.
    pub accumulate: bool,
    /// Factor on the product.
    pub alpha: f32,
}

impl Product {
    /// `out = x weight^T`.
    pub const LINEAR: Self = Self { form: Form::Nt, accumulate: false, alpha: 1.0 };
    /// `out += x weight^T`.
    pub const ADD_LINEAR: Self = Self { accumulate: true, ..Self::LINEAR };
}

/// Products on one stream, with a workspace of their own.
#[derive(Debug)]
pub struct Blas {
    handle: sys::cublasLtHandle_t,
    stream: Arc<CudaStream>,
    workspace: DeviceBuffer,
    plans: HashMap<Key, Plan>,
}

// SAFETY: the handle may be used from any thread, by one at a time: `matmul` takes `&mut self`.
unsafe impl Send for Blas {}

/// What decides a plan.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
struct Key {
    form: Form,
    accumulate: bool,
    /// m, n, k.
    dims: [usize; 3],
    /// Row strides of a, b, out, and what is added.
    strides: [usize; 4],
    input: Dtype,
    output: Dtype,
    /// Powers of two that all three addresses are multiples of, at most 16.
    alignment: u64,
}

/// Descriptors and algorithm of one product. cuBLASLt is column-major: it is asked for the
/// transposed product, out^T = b^T a^T, whose first operand is therefore b.
#[derive(Debug)]
struct Plan {
    operation: sys::cublasLtMatmulDesc_t,
    /// Of b, a, out, and what is added.
    layouts: [sys::cublasLtMatrixLayout_t; 4],
    algorithm: sys::cublasLtMatmulAlgo_t,
    workspace: usize,
}

impl Blas {
    /// Products on `stream`. The workspace should have 32 MiB on Hopper.
    pub fn new(stream: &Arc<CudaStream>, workspace_bytes: usize) -> Result<Self, CudaError> {
        // SAFETY: opens and closes the library, whose initialisers are the vendor's.
        if !unsafe { sys::is_culib_present() } {
            let hint = "install the CUDA toolkit (13.0), or put the folder of the PyPI package \
                        nvidia-cublas on LD_LIBRARY_PATH";
            return Err(CudaError::MissingLibrary { library: "libcublasLt", hint });
        }
        let bound = stream.context().bind_to_thread();
        bound.map_err(CudaError::driver("make the context current"))?;
        let handle = result::create_handle().map_err(CudaError::blas("create a handle"))?;
        let workspace = DeviceBuffer::new(stream.context(), workspace_bytes)?;
        Ok(Self { handle, stream: stream.clone(), workspace, plans: HashMap::new() })
    }

    /// The stream that products run on.
    pub fn stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }

    /// Computes `product` of `a` and `b` into `out`, which overlaps neither. bf16 operands give
    /// bf16 or f32, f32 operands f32 without TF32; sums are in f32.
    pub fn matmul(
        &mut self,
        out: &DeviceMatrix,
        a: &DeviceMatrix,
        b: &DeviceMatrix,
        product: Product,
    ) -> Result<(), CudaError> {
        self.matmul_onto((out, out), a, b, product)
    }

    /// [`Self::matmul`] whose `accumulate` adds to `added` instead of `out`; `added` is as `out`,
    /// and either `out` itself or elsewhere.
    pub fn matmul_onto(
        &mut self,
        (out, added): (&DeviceMatrix, &DeviceMatrix),
        a: &DeviceMatrix,
        b: &DeviceMatrix,
        product: Product,
    ) -> Result<(), CudaError> {
        let ([a_rows, a_cols], [b_rows, b_cols]) = (a.shape(), b.shape());
        let (m, k, n, b_k) = match product.form {
            Form::Nt => (a_rows, a_cols, b_rows, b_cols),
            Form::Nn => (a_rows, a_cols, b_cols, b_rows),
            Form::Tn => (a_cols, a_rows, b_cols, b_rows),
        };
        let types = a.dtype == b.dtype && (a.dtype == Dtype::Bf16 || out.dtype == Dtype::F32);
        let alike = added.shape() == out.shape() && added.dtype == out.dtype;
        let fits = k == b_k && out.shape() == [m, n] && k > 0 && types && alike;
        ensure(fits, || format!("{product:?} of {a:?} and {b:?} on {added:?} in {out:?}"))?;
        if m == 0 || n == 0 {
            return Ok(());
        }
        let addresses = a.address | b.address | out.address | added.address | 16;
        let key = Key {
            form: product.form,
            accumulate: product.accumulate,
            dims: [m, n, k],
            strides: [a.row_stride, b.row_stride, out.row_stride, added.row_stride],
            input: a.dtype,
            output: out.dtype,
            alignment: 1 << addresses.trailing_zeros(),
        };
        let bound = self.stream.context().bind_to_thread();
        bound.map_err(CudaError::driver("make the context current"))?;
        if !self.plans.contains_key(&key) {
            // Training meets new numbers of rows in every batch.
            if self.plans.len() >= MAX_PLANS {
                self.plans.clear();
            }
            let plan = Plan::new(self.handle, &key, self.workspace.bytes())?;
            self.plans.insert(key, plan);
        }
        let Some(plan) = self.plans.get(&key) else { return Ok(()) };
        self.run(plan, [b.address, a.address, out.address, added.address], &key, product)
    }

    fn run(
        &self,
        plan: &Plan,
        [b, a, out, added]: [u64; 4],
        key: &Key,
        product: Product,
    ) -> Result<(), CudaError> {
        let beta = if product.accumulate { 1f32 } else { 0f32 };
        let [b_layout, a_layout, out_layout, added_layout] = plan.layouts;
        // SAFETY: descriptors live as long as the plan, scalars until the call returns, and the
        // addresses are the promise of their views.
        unsafe {
            result::matmul(
                self.handle,
                plan.operation,
                std::ptr::from_ref(&product.alpha).cast(),
                std::ptr::from_ref(&beta).cast(),
                b as *const c_void,
                b_layout,
                a as *const c_void,
                a_layout,
                added as *const c_void,
                added_layout,
                out as *mut c_void,
                out_layout,
                &plan.algorithm,
                self.workspace.address() as *mut c_void,
                plan.workspace,
                self.stream.cu_stream().cast(),
            )
        }
        .map_err(CudaError::blas(format!("product {key:?}")))
    }
}

impl Drop for Blas {
    fn drop(&mut self) {
        // The workspace may still be in use.
        if let Err(error) = self.stream.synchronize() {
            tracing::warn!(%error, "stream of cuBLASLt not settled");
        }
        // SAFETY: created by `new`, destroyed only here.
        if let Err(error) = unsafe { result::destroy_handle(self.handle) } {
            tracing::warn!(%error, "cuBLASLt handle not destroyed");
        }
    }
}

impl Plan {
    fn new(handle: sys::cublasLtHandle_t, key: &Key, workspace: usize) -> Result<Self, CudaError> {
        let wrong = || CudaError::blas(format!("plan {key:?}"));
        let kind = |dtype| match dtype {
            Dtype::Bf16 => sys::cudaDataType::CUDA_R_16BF,
            Dtype::F32 => sys::cudaDataType::CUDA_R_32F,
        };
        let [m, n, k] = key.dims.map(|dim| dim as u64);
        let [a_stride, b_stride, out_stride, added_stride] =
            key.strides.map(|stride| stride as i64);
        // A row-major [rows, cols] matrix is a column-major [cols, rows] one.
        let (b_dims, a_dims) = match key.form {
            Form::Nt => ((k, n), (k, m)),
            Form::Nn => ((n, k), (k, m)),
            Form::Tn => ((n, k), (m, k)),
        };
        let layout = |(rows, cols): (u64, u64), stride, dtype| {
            result::create_matrix_layout(kind(dtype), rows, cols, stride).map_err(wrong())
        };
        let compute = sys::cublasComputeType_t::CUBLAS_COMPUTE_32F;
        let operation =
            result::create_matmul_desc(compute, sys::cudaDataType::CUDA_R_32F).map_err(wrong())?;
        let mut plan = Self {
            operation,
            layouts: [std::ptr::null_mut(); 4],
            algorithm: sys::cublasLtMatmulAlgo_t { data: [0; 8] },
            workspace: 0,
        };
        plan.layouts = [
            layout(b_dims, b_stride, key.input)?,
            layout(a_dims, a_stride, key.input)?,
            layout((n, m), out_stride, key.output)?,
            layout((n, m), added_stride, key.output)?,
        ];
        plan.transpose(key.form).map_err(wrong())?;
        let found = plan.search(handle, key.alignment, workspace).map_err(wrong())?;
        plan.algorithm = found.algo;
        plan.workspace = found.workspaceSize;
        Ok(plan)
    }

    fn transpose(&self, form: Form) -> Result<(), result::CublasError> {
        use sys::cublasLtMatmulDescAttributes_t as Attribute;
        let first = i32::from(form == Form::Nt);
        let second = i32::from(form == Form::Tn);
        for (attribute, value) in [
            (Attribute::CUBLASLT_MATMUL_DESC_TRANSA, first),
            (Attribute::CUBLASLT_MATMUL_DESC_TRANSB, second),
        ] {
            let value = std::ptr::from_ref(&value).cast();
            // SAFETY: the descriptor is live and the value an i32, as cuBLASLt asks.
            unsafe { result::set_matmul_desc_attribute(self.operation, attribute, value, 4) }?;
        }
        Ok(())
    }

    /// Asks the heuristic once.
    fn search(
        &self,
        handle: sys::cublasLtHandle_t,
        alignment: u64,
        workspace: usize,
    ) -> Result<sys::cublasLtMatmulHeuristicResult_t, result::CublasError> {
        use sys::cublasLtMatmulPreferenceAttributes_t as Attribute;
        let alignment = alignment as u32;
        let preference = result::create_matmul_pref()?;
        let [b, a, out, added] = self.layouts;
        // SAFETY: the preference is destroyed below, everything else lives in `self`; the values
        // have the types cuBLASLt asks for.
        unsafe {
            let bytes = std::ptr::from_ref(&workspace).cast();
            let mut answer = result::set_matmul_pref_attribute(
                preference,
                Attribute::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                bytes,
                size_of::<usize>(),
            );
            for attribute in [
                Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
                Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
                Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
                Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES,
            ] {
                let value = std::ptr::from_ref(&alignment).cast();
                answer = answer.and_then(|()| {
                    result::set_matmul_pref_attribute(preference, attribute, value, 4)
                });
            }
            let found = answer.and_then(|()| {
                let operation = self.operation;
                result::get_matmul_algo_heuristic(handle, operation, b, a, added, out, preference)
            });
            result::destroy_matmul_pref(preference)?;
            found
        }
    }
}

impl Drop for Plan {
    fn drop(&mut self) {
        // SAFETY: created by `new`, destroyed only here. A failure would leak a few bytes.
        unsafe {
            for layout in self.layouts {
                if !layout.is_null() {
                    let _ = result::destroy_matrix_layout(layout);
                }
            }
            let _ = result::destroy_matmul_desc(self.operation);
        }
    }
}
