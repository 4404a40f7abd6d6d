//! What the kernels cannot do, said before a device is opened and weights are loaded. Knows no
//! driver.

use kernels::cuda::{MAX_EXPERT_GROUPS, MAX_EXPERTS, MAX_HEAD_WIDTH};

use crate::target::error::TargetError;
use crate::target::spec::{AttentionSpec, TargetSpec};

/// Refuses a model with heads, or with a choice of experts, that no kernel takes.
pub(super) fn check(spec: &TargetSpec) -> Result<(), TargetError> {
    let at_most = |field: &str, size: usize, most: usize| {
        if size <= most {
            return Ok(());
        }
        let problem = format!("is {size}; on a GPU at most {most} are supported: use --device cpu");
        Err(TargetError::ConfigField { field: field.to_owned(), problem })
    };
    match &spec.attention {
        AttentionSpec::Gqa(gqa) => at_most("head_dim", gqa.head_dim, MAX_HEAD_WIDTH)?,
        AttentionSpec::Mla(mla) => {
            let qk = mla.qk_nope_head_dim + mla.qk_rope_head_dim;
            at_most("qk_nope_head_dim + qk_rope_head_dim", qk, MAX_HEAD_WIDTH)?;
            at_most("v_head_dim", mla.v_head_dim, MAX_HEAD_WIDTH)?;
        }
    }
    let Some(moe) = &spec.moe else { return Ok(()) };
    at_most("n_routed_experts", moe.num_experts, MAX_EXPERTS)?;
    at_most("n_group", moe.num_groups, MAX_EXPERT_GROUPS)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn what_no_kernel_takes_is_refused_by_name_and_number() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let llama = TargetSpec::read(&root.join("tests/fixtures/stories260k")).unwrap();
        let kimi = TargetSpec::read(&root.join("models/nano-kimi")).unwrap();
        assert!(check(&llama).is_ok() && check(&kimi).is_ok());
        let refused = |spec: &TargetSpec| {
            let error = check(spec).unwrap_err();
            assert_eq!(error.exit_code(), 65);
            error.to_string()
        };
        let mut wide = llama;
        let AttentionSpec::Gqa(gqa) = &mut wide.attention else { panic!() };
        gqa.head_dim = 258;
        assert!(refused(&wide).contains("`head_dim` is 258; on a GPU at most 256"));
        let mut many = kimi.clone();
        many.moe.as_mut().unwrap().num_experts = 2048;
        assert!(refused(&many).contains("`n_routed_experts` is 2048"));
        let mut grouped = kimi.clone();
        grouped.moe.as_mut().unwrap().num_groups = 64;
        assert!(refused(&grouped).contains("`n_group` is 64"));
        let mut latent = kimi;
        let AttentionSpec::Mla(mla) = &mut latent.attention else { panic!() };
        (mla.qk_nope_head_dim, mla.qk_rope_head_dim) = (200, 64);
        assert!(refused(&latent).contains("is 264"));
    }
}
