#!/usr/bin/env python3
"""Hidden states by transformers: what the target engine is compared with.

  runs/peer-states.py golden MODEL FILE    states in float32 beside those of a golden file
  runs/peer-states.py bench MODEL          prefill of 4 x 512 tokens in float32 on the CPU

MODEL is a directory with bf16 or f32 weights, or INT4 pack-quantized ones, which are decoded here.
Needs torch, transformers and safetensors. `golden` prints the largest difference of any state, in
units of the state's rms. Exit code of `golden`: 0 if it is below 1e-4.
"""

import json
import sys
import time
from pathlib import Path

import torch
import transformers
from safetensors import safe_open


def tensors(folder):
    """Every tensor of a checkpoint by its plain name; INT4 is decoded to q * scale."""
    found = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            found |= {
                name.removeprefix("language_model."): file.get_tensor(name) for name in file.keys()
            }
    for name in [name for name in found if name.endswith(".weight_packed")]:
        stem = name.removesuffix("_packed")
        packed, scale = found.pop(name), found.pop(f"{stem}_scale")
        rows, columns = found.pop(f"{stem}_shape").tolist()
        nibbles = (
            torch.stack([(packed >> 4 * n) & 15 for n in range(8)], -1).view(rows, -1)[:, :columns]
            - 8
        )
        width = columns // scale.shape[1]
        found[stem] = (nibbles * scale.repeat_interleave(width, 1).float()).bfloat16()
    return {
        name: t
        for name, t in found.items()
        if not name.startswith(("vision_tower.", "mm_projector."))
    }


def load(folder):
    config = json.loads((Path(folder) / "config.json").read_text())
    config = config.get("text_config", config)
    config.pop("auto_map", None)
    config.pop("quantization_config", None)
    if config["model_type"] in ("kimi_k2", "kimi_k25"):
        config["model_type"] = "deepseek_v3"
    kind = config.pop("model_type")
    config = transformers.AutoConfig.for_model(kind, **config)
    config._attn_implementation = "eager"
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    given = tensors(folder)
    merged = {n: t for n, t in model.state_dict().items() if n.endswith("experts.gate_up_proj")}
    for name, tensor in merged.items():  # the library keeps the experts of a layer in one tensor
        stem = name.removesuffix("gate_up_proj")
        each = lambda n, part: given.pop(f"{stem}{n}.{part}_proj.weight")
        count = len(tensor)
        given[name] = torch.stack(
            [torch.cat([each(n, "gate"), each(n, "up")]) for n in range(count)]
        )
        given[f"{stem}down_proj"] = torch.stack([each(n, "down") for n in range(count)])
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    missing, unexpected = model.load_state_dict(
        {n: t.float() for n, t in given.items()}, strict=False
    )
    missing = [n for n in missing if n != "lm_head.weight"]
    if missing or unexpected:
        sys.exit(f"weights do not fit: missing {missing[:3]}, unexpected {unexpected[:3]}")
    if config.tie_word_embeddings:
        model.tie_weights()
    return model


def golden(model, path):
    states = []
    layers = model.model.layers
    layers[0].register_forward_pre_hook(
        lambda _, inputs, named: states.append((inputs or [named["hidden_states"]])[0]),
        with_kwargs=True,
    )
    for layer in layers:
        layer.register_forward_hook(
            lambda _, inputs, out: states.append(out[0] if isinstance(out, tuple) else out)
        )
    file = safe_open(path, "pt")
    names, differences = set(file.keys()), []
    for prompt in sorted({name.split(".")[0] for name in names}):
        states.clear()
        ids = file.get_tensor(f"{prompt}.input_ids").long()[None]
        with torch.no_grad():
            model(ids, use_cache=False)
        rows = (
            file.get_tensor(f"{prompt}.rows").long() if f"{prompt}.rows" in names else slice(None)
        )
        for k, state in enumerate(states):
            expected = file.get_tensor(f"{prompt}.h_{k}")
            difference = (state[0][rows] - expected).abs().max()
            differences.append(difference / expected.pow(2).mean().sqrt())
        print(f"{prompt}: {ids.shape[1]} tokens, {len(states)} states")
    given = [name for name in names if name.split(".")[1].startswith("h_")]
    if len(differences) != len(given):
        sys.exit(f"{len(differences)} states of the model; the file has another number")
    worst = torch.stack(differences).max().item()  # nan where one is
    print(f"largest difference {worst:.1e} of a state's rms")
    return worst < 1e-4


def bench(folder):
    model = load(folder).model
    ids = torch.arange(4 * 512).view(4, 512) * 7919 % model.config.vocab_size
    best = float("inf")
    for _ in range(4):
        start = time.perf_counter()
        with torch.no_grad():
            model(ids, use_cache=False, output_hidden_states=True)
        best = min(best, time.perf_counter() - start)
    print(
        f"transformers {transformers.__version__}, torch {torch.__version__}, "
        f"{torch.get_num_threads()} threads: {ids.numel() / best:.0f} tokens/s"
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["golden"] and len(sys.argv) == 4:
        sys.exit(not golden(load(sys.argv[2]), sys.argv[3]))
    elif sys.argv[1:2] == ["bench"] and len(sys.argv) == 3:
        bench(sys.argv[2])
    else:
        sys.exit(__doc__)
