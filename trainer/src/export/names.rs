//! Tensor names of each layout. Knows no values.

use super::ExportLayout;

/// Name in the exported file of a parameter of the draft.
///
/// Llama drafts are written as `midlayer.*`: an older SGLang drops `layers.0.*` without a word.
pub(super) fn exported(parameter: &str, layout: ExportLayout) -> String {
    match (layout, parameter.strip_prefix("midlayer.")) {
        (ExportLayout::Mla | ExportLayout::Speculators, Some(rest)) => format!("layers.0.{rest}"),
        _ => parameter.to_owned(),
    }
}
