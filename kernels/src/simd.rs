//! Compiles a kernel body for the vector units found at run time. Knows no mathematics.

/// Defines `$name` that runs `$body::<FUSED>` compiled for AVX-512, for AVX2 with FMA, or for the
/// baseline, whichever the processor has. `$body` must be `#[inline(always)]`.
macro_rules! multiversion {
    ($(#[$attr:meta])* $vis:vis fn $name:ident($($arg:ident: $ty:ty),*) = $body:ident) => {
        $(#[$attr])*
        $vis fn $name($($arg: $ty),*) {
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
                fn on_avx512($($arg: $ty),*) { $body::<true>($($arg),*) }
                #[target_feature(enable = "avx2,fma")]
                fn on_avx2($($arg: $ty),*) { $body::<true>($($arg),*) }
                if $crate::simd::has_avx512() {
                    // SAFETY: the processor has every feature that the function was compiled for.
                    return unsafe { on_avx512($($arg),*) };
                }
                if $crate::simd::has_avx2() {
                    // SAFETY: as above.
                    return unsafe { on_avx2($($arg),*) };
                }
            }
            $body::<{ cfg!(target_arch = "aarch64") }>($($arg),*)
        }
    };
}
pub(crate) use multiversion;

#[cfg(target_arch = "x86_64")]
pub(crate) fn has_avx512() -> bool {
    is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl")
        && has_avx2()
}

#[cfg(target_arch = "x86_64")]
pub(crate) fn has_avx2() -> bool {
    is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma")
}

/// `a * b + c`, in one rounding where the hardware has it. Without hardware support a fused
/// product would be a slow library call, hence the switch.
#[inline(always)]
pub(crate) fn multiply_add<const FUSED: bool>(a: f32, b: f32, c: f32) -> f32 {
    if FUSED { a.mul_add(b, c) } else { a * b + c }
}
