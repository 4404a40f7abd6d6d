//! What the shapes of a file's tensors say where `hidden_states` [S, n, H] is missing or of another
//! shape: what came, what it looks like, what to do. Knows no values.

use std::collections::BTreeMap;

use shared::CaptureSpec;
use shared::diagnosis::{self, Expected};
use shared::foreign::{is_float, stack_fault};
use shared::header::{ShardHeader, TensorEntry};

/// Name of the tensor with the states.
pub(super) const STATES: &str = "hidden_states";

const AGAIN: &str = "the rows of the other layers are not in the file: extract again, and take \
                     token by token from every entry of the list of layers, not from one of them";
const STACK: &str = "it looks like one tensor a layer: stack them in ascending order of layers, \
                     torch.stack(states, dim=1), and save the result as `hidden_states`";

/// Names what is there in place of a tensor `hidden_states`; the sample has so many `tokens`,
/// where that is known.
pub(super) fn in_place_of_states(
    header: &ShardHeader,
    tokens: Option<usize>,
    spec: &CaptureSpec,
) -> String {
    let (layers, hidden) = (spec.layers.len(), spec.hidden_size);
    let rows = tokens.map_or_else(|| "tokens".to_owned(), |tokens| tokens.to_string());
    let wanted = format!("no tensor `{STATES}` [{rows}, {layers}, {hidden}]");
    let states: Vec<&TensorEntry> = header.tensors.iter().filter(|it| is_float(it.dtype)).collect();
    let Some(first) = states.first() else {
        return format!("{wanted}, nor any other of floating-point values: there are no states");
    };
    let (found, looks) = (inventory(&states), looks_like(&states, tokens, spec));
    format!("{wanted}; in its place {found}, the first `{}`: {looks}", first.name)
}

fn looks_like(states: &[&TensorEntry], tokens: Option<usize>, spec: &CaptureSpec) -> String {
    let (count, layers) = (states.len(), spec.layers.len());
    if count > layers && states.iter().all(|tensor| tensor.shape.len() == 1) {
        let whose = match tokens.map(|tokens| (tokens, count.checked_sub(tokens))) {
            Some((_, Some(0))) => format!(", as there are {count} tokens"),
            Some((tokens, Some(others))) => {
                format!(", {tokens} of this sample and {others} of others in its batch")
            }
            _ => String::new(),
        };
        return format!(
            "it looks like one tensor a token{whose}: one layer's rows were taken for the list of \
             {layers} layers, and {AGAIN}"
        );
    }
    let Some(tokens) = tokens else {
        return "without token ids the rows can't be tied to tokens".to_owned();
    };
    if let [one] = states {
        return shape_fault(one, tokens, spec)
            .unwrap_or_else(|| format!("it has the right shape: save it as `{STATES}`"));
    }
    let expected = Expected { layers, tokens, hidden_size: spec.hidden_size };
    let shapes: Vec<&[usize]> = states.iter().map(|tensor| tensor.shape.as_slice()).collect();
    match diagnosis::check_shapes(&expected, &shapes, &[]) {
        Ok(()) => STACK.to_owned(),
        Err(fault) => fault.to_string(),
    }
}

/// Tensors by shape: how many there are of each, four shapes at most.
fn inventory(tensors: &[&TensorEntry]) -> String {
    let mut shapes: BTreeMap<&[usize], usize> = BTreeMap::new();
    for tensor in tensors {
        *shapes.entry(&tensor.shape).or_default() += 1;
    }
    let shown: Vec<String> = shapes
        .iter()
        .take(4)
        .map(|(shape, count)| {
            format!("{count} tensor{} {shape:?}", if *count == 1 { "" } else { "s" })
        })
        .collect();
    let more = if shapes.len() > shown.len() { " and others" } else { "" };
    format!("{}{more}", shown.join(", "))
}

/// What is wrong with a tensor that has to be exactly [tokens, layers, hidden].
pub(super) fn shape_fault(
    tensor: &TensorEntry,
    tokens: usize,
    spec: &CaptureSpec,
) -> Option<String> {
    let (layers, name) = (spec.layers.len(), &tensor.name);
    match *tensor.shape.as_slice() {
        [s, n, h] if (s, n, h) == (tokens, layers, spec.hidden_size) => return None,
        [n, s, _] if s == tokens && n != tokens => {
            return Some(format!("{name} {:?}: layers come first, transpose", tensor.shape));
        }
        [values] if values == tokens * layers * spec.hidden_size => {
            return Some(format!(
                "{name} {:?}: all layers in one flattened list; [{tokens}, {layers}, {}] is \
                 expected, so have the shape kept",
                tensor.shape, spec.hidden_size
            ));
        }
        _ => {}
    }
    if let Some(fault) = stack_fault(tensor, Some(tokens)) {
        return Some(fault);
    }
    let expected = Expected { layers, tokens, hidden_size: spec.hidden_size };
    let shapes = match *tensor.shape.as_slice() {
        [s, n, h] => vec![vec![s, h]; n],
        _ => vec![tensor.shape.clone()],
    };
    let shapes: Vec<&[usize]> = shapes.iter().map(Vec::as_slice).collect();
    diagnosis::check_shapes(&expected, &shapes, &[]).err().map(|fault| fault.to_string())
}

#[cfg(test)]
mod tests {
    use safetensors::tensor::Dtype;
    use shared::{LayerIndex, StateDtype};

    use super::*;

    /// What is said of a file with such tensors for a target of hidden size 7168.
    fn said(shapes: &[&[usize]], tokens: Option<usize>) -> String {
        let tensor = |(at, shape): (usize, &&[usize])| TensorEntry {
            name: format!("state_{at}"),
            dtype: Dtype::BF16,
            shape: shape.to_vec(),
            start: 0,
            bytes: 0,
        };
        let tensors = shapes.iter().enumerate().map(tensor).collect();
        let header = ShardHeader { tensors, metadata: Default::default(), data_start: 0 };
        let layers = [2, 30, 58, 60].map(LayerIndex).to_vec();
        let spec = CaptureSpec { layers, hidden_size: 7168, dtype: StateDtype::Bf16 };
        in_place_of_states(&header, tokens, &spec)
    }

    #[test]
    fn states_under_other_names_are_named_with_what_they_look_like() {
        let tokens: &[&[usize]] = &[&[512][..]; 771];
        let layer: &[usize] = &[512, 7168];
        for (shapes, ids, words) in [
            (tokens, Some(512), "no tensor `hidden_states` [512, 4, 7168]; in its place 771 "),
            (tokens, Some(512), "771 tensors [512], the first `state_0`: it looks like one "),
            (tokens, Some(512), "one tensor a token, 512 of this sample and 259 of others in its"),
            (tokens, Some(512), "one layer's rows were taken for the list of 4 layers"),
            (tokens, Some(512), "not in the file: extract again, and take token by token from"),
            (tokens, Some(771), "one tensor a token, as there are 771 tokens: one layer's rows"),
            (tokens, Some(772), "it looks like one tensor a token: one layer's rows"),
            (tokens, None, "`hidden_states` [tokens, 4, 7168]; in its place 771 tensors [512]"),
            (tokens, None, "it looks like one tensor a token: one layer's rows"),
            (&[layer; 4], Some(512), "in its place 4 tensors [512, 7168]"),
            (&[layer; 4], Some(512), "one tensor a layer: stack them in ascending order of layers"),
            (&[layer; 4], None, "without token ids the rows can't be tied to tokens"),
            (&[layer; 3], Some(512), "4 tensors [512, 7168]; got 3 tensors [512, 7168]: 1 of 4"),
            (&[&[512, 4, 7168]], Some(512), "it has the right shape: save it as `hidden_states`"),
            (&[&[4, 512, 7168]], Some(512), "state_0 [4, 512, 7168]: layers come first"),
            (&[&[14_680_064]], Some(512), "state_0 [14680064]: all layers in one flattened list"),
            (
                &[&[3, 9], &[2], &[1], &[9], &[7]],
                None,
                "1 tensor [1], 1 tensor [2], 1 tensor [3, 9]",
            ),
            (&[], Some(512), "there are no states"),
        ] {
            let said = said(shapes, ids);
            assert!(said.contains(words), "{words}\n{said}");
        }
    }
}
