#!/usr/bin/env python3
"""The training step of `trainer fit` in plain PyTorch: what `trainer bench` is compared with.

  runs/peer-step.py golden FILE...     loss and gradients in float64 beside those of a golden file
  runs/peer-step.py bench [--dense]    time of one step, forward and backward, in float32 on the CPU

Written from the papers' equations, not from the Rust sources. `bench` has the sizes and tokens of
`trainer bench`'s defaults; `--dense` computes every row at every step, as other trainers do. Needs
torch, safetensors and numpy. Exit code of `golden`: 0 if every difference is below 1e-9 of the
largest entry.
"""

import json
import sys
import time

import torch
import torch.nn.functional as F

SIZES = dict(
    hidden_size=576,
    intermediate_size=1536,
    num_attention_heads=9,
    num_key_value_heads=3,
    head_dim=64,
    vocab_size=49152,
    draft_vocab_size=8192,
    rms_norm_eps=1e-5,
    rope_theta=1e4,
    target_rms_norm_eps=1e-5,
    attention="gqa",
    attention_scale=64**-0.5,
    ttt_steps=7,
    step_decay=0.8,
    fc_norm=False,
    norm_output=False,
    norm_before_residual=False,
)


def norm(x, weight, eps):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def rotate(x, positions, frequencies, interleaved=False):
    """x [rows, heads, d]; pairs are the halves' entries, or neighbours."""
    angle = positions[:, None, None].to(frequencies) * frequencies
    cos, sin = angle.cos(), angle.sin()
    a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    turned = (a * cos - b * sin, b * cos + a * sin)
    return torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)


def gqa(c, layer, u, positions, need, frequencies):
    """Queries of the rows needed, keys and values of all: [rows, heads, d]."""
    d, weight = c["head_dim"], lambda name: layer[f"self_attn.{name}_proj.weight"]
    heads = lambda x, name: F.linear(x, weight(name)).unflatten(-1, (-1, d))
    q = rotate(heads(u[need], "q"), positions[need], frequencies)
    return q, rotate(heads(u, "k"), positions, frequencies), heads(u, "v")


def mla(c, layer, u, positions, need, frequencies):
    eps, n = c["rms_norm_eps"], c["num_attention_heads"]
    nope, rope, rank = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["kv_lora_rank"]
    weight = lambda name: layer[f"self_attn.{name}.weight"]
    turn = lambda x, at: rotate(x, at, frequencies, interleaved=True)
    latent = norm(F.linear(u[need], weight("q_a_proj")), weight("q_a_layernorm"), eps)
    q = F.linear(latent, weight("q_b_proj")).unflatten(-1, (n, -1))
    q = torch.cat([q[..., :nope], turn(q[..., nope:], positions[need])], -1)
    latent, key = F.linear(u, weight("kv_a_proj_with_mqa")).split([rank, rope], -1)
    kv = F.linear(norm(latent, weight("kv_a_layernorm"), eps), weight("kv_b_proj"))
    kv = kv.unflatten(-1, (n, -1))
    key = turn(key[:, None, :], positions).expand(-1, n, -1)
    return q, torch.cat([kv[..., :nope], key], -1), kv[..., nope:]


class Batch:
    """Rows of packed documents: which are trained at which step, and which are computed."""

    def __init__(self, ids, mask, offsets, steps, dense, known_top=None):
        """With `known_top`, whether the teacher's top token at each state, and at the zero state
        past the end of a document in the last entry, is in the draft vocabulary: SpecForge's rule.
        """
        rows = len(ids)
        self.ids, self.rows = torch.cat([ids, ids.new_zeros(1)]), rows
        self.start, self.end = torch.zeros(2, rows, dtype=torch.long)
        for first, end in zip(offsets, offsets[1:]):
            self.start[first:end], self.end[first:end] = first, end
        at = torch.arange(rows)
        if known_top is None:
            run = torch.zeros(rows, dtype=torch.long)  # trained tokens that follow without a gap
            for row in reversed(range(rows - 1)):
                if row + 1 < self.end[row] and mask[row + 1]:
                    run[row] = run[row + 1] + 1
            self.trained = [run >= k + 2 for k in range(steps)]
            self.divisors = [trained.sum() for trained in self.trained]
        else:
            mask = torch.cat([mask.bool() & (at + 1 < self.end), torch.tensor([False])])
            seen = lambda k: mask[self.ahead(at, k)] & known_top[self.ahead(at, 1 + k)]
            self.trained = [seen(k) for k in range(steps)]
            self.divisors = [torch.tensor(rows)] * steps
        later = [torch.stack(self.trained[k:]).any(0) for k in range(steps)]
        self.need = [at if dense else at[needed] for needed in later]
        needed = later[0].clone()
        for row in reversed(range(rows - 1)):
            if row + 1 < self.end[row]:
                needed[row] |= needed[row + 1]
        self.base = at if dense else at[needed]

    def ahead(self, rows, steps):
        """Rows that many further; past the end of a document the number of all rows."""
        return torch.where(rows + steps < self.end[rows], rows + steps, self.rows)


def attention(q, keys, values, visible, scale):
    """q [rows, heads, d] over step 0's keys [base, groups, d] and the row's own of later steps."""
    share = q.shape[1] // keys[0].shape[1]
    keys = [k.repeat_interleave(share, 1) for k in keys]
    values = [v.repeat_interleave(share, 1) for v in values]
    far = torch.einsum("rhd,bhd->rhb", q, keys[0]) * scale
    far = far.masked_fill(~visible[:, None, :], float("-inf"))
    own = [(q * k).sum(-1, keepdim=True) * scale for k in keys[1:]]
    share_of = torch.softmax(torch.cat([far] + own, -1), -1)
    out = torch.einsum("rhb,bhd->rhd", share_of[..., : far.shape[-1]], values[0])
    for m, v in enumerate(values[1:]):
        out = out + share_of[..., far.shape[-1] + m, None] * v
    return out


def step(c, w, frozen, batch, aux, last, frequencies):
    """The loss, `sum_k decay^k * (sum over step k's trained rows) / divisor`, and its parts."""
    eps = c["rms_norm_eps"]
    layer = {name[9:]: tensor for name, tensor in w.items() if name.startswith("midlayer.")}
    project = mla if c["attention"] == "mla" else gqa
    parts = [a[batch.base] for a in aux]
    if c["fc_norm"]:
        parts = [norm(a, w[f"fc_norm.{n}.weight"], eps) for n, a in enumerate(parts)]
    hidden, rows = F.linear(torch.cat(parts, -1), w["fc.weight"]), batch.base
    keys, values, losses = [], [], []
    for k in range(c["ttt_steps"]):
        token = frozen["embed"][batch.ids[batch.ahead(rows, 1 + k)]]
        normed = norm(hidden, layer["hidden_norm.weight"], eps)
        u = torch.cat([norm(token, layer["input_layernorm.weight"], eps), normed], -1)
        # Places of this step's rows among the last one's.
        need = torch.searchsorted(rows, batch.need[k])
        q, key, value = project(c, layer, u, rows - batch.start[rows] + k, need, frequencies)
        keys, values = keys + [key], values + [value]
        for m in range(1, k + 1):
            keys[m], values[m] = keys[m][need], values[m][need]
        rows = batch.need[k]
        residual = (normed if c["norm_before_residual"] else hidden)[need]
        visible = (batch.base <= rows[:, None]) & (batch.base >= batch.start[rows][:, None])
        a = attention(q, keys, values, visible, c["attention_scale"]).flatten(1)
        y = residual + F.linear(a, layer["self_attn.o_proj.weight"])
        n = norm(y, layer["post_attention_layernorm.weight"], eps)
        gate = F.silu(F.linear(n, layer["mlp.gate_proj.weight"]))
        up = gate * F.linear(n, layer["mlp.up_proj.weight"])
        z = y + F.linear(up, layer["mlp.down_proj.weight"])
        out = norm(z, w["norm.weight"], eps)
        hidden = out if c["norm_output"] else z
        logits = F.linear(out, w["lm_head.weight"]).log_softmax(-1)
        cross = -(last(batch.ahead(rows, 1 + k)) * logits).sum(-1)
        losses.append((cross * batch.trained[k][rows]).sum() / batch.divisors[k].clamp(min=1))
    return sum(c["step_decay"] ** k * loss for k, loss in enumerate(losses)), losses


def teacher_of(c, frozen, states, wanted):
    """The teacher over the draft vocabulary at the wanted states, as a function of their numbers,
    and for each whether its top token is in that vocabulary; the last state is the zero state."""
    states = torch.cat([states, torch.zeros_like(states[:1])])
    normed = norm(states[wanted], frozen["norm"], c["target_rms_norm_eps"])
    logits = F.linear(normed, frozen["head"])
    place = torch.zeros(len(states), dtype=torch.long)
    place[wanted] = torch.arange(len(wanted))
    shares = logits[:, frozen["ids"]].softmax(-1)
    return (lambda rows: shares[place[rows]]), torch.isin(logits.argmax(-1), frozen["ids"])


def golden(path):
    from safetensors import safe_open

    file = safe_open(path, "pt")
    c = json.loads(file.metadata()["config"])
    get = lambda name: file.get_tensor(name)
    names = [name[6:] for name in file.keys() if name.startswith("draft.")]
    w = {name: get(f"draft.{name}").double().requires_grad_() for name in names}
    d2t = get("input.d2t")
    frozen = dict(
        embed=get("input.embed_tokens.weight").double(),
        norm=get("input.target.norm.weight").double(),
        head=get("input.target.lm_head.weight").double(),
        ids=torch.arange(len(d2t)) + d2t,
    )
    aux = [get(f"input.aux.{n}").double() for n in range(3)]
    states = get("input.last_hidden").double()
    last, known = teacher_of(c, frozen, states, torch.arange(len(states) + 1))
    batch = Batch(
        get("input.input_ids"),
        get("input.loss_mask"),
        get("input.doc_offsets").tolist(),
        c["ttt_steps"],
        dense=False,
        known_top=known if c["mask_mode"] == "specforge" else None,
    )
    loss, losses = step(c, w, frozen, batch, aux, last, get("rope.inv_freq").double())
    loss.backward()
    pairs = {
        "loss": (loss, get("expected.loss")),
        "step_loss": (torch.stack(losses), get("expected.step_loss")),
    }
    pairs |= {name: (tensor.grad, get(f"grad.{name}")) for name, tensor in w.items()}
    differences = [(a - b).abs().max() / b.abs().max().clamp(min=1e-30) for a, b in pairs.values()]
    worst = torch.stack(differences).max().item()  # nan where one is
    print(f"{path}: {len(pairs)} tensors, largest difference {worst:.1e} of the largest entry")
    return worst < 1e-9


def bench(dense, rows=1024, document=256, repeat=5):
    torch.manual_seed(0)
    c = SIZES
    h, inner, v, draft_v = (
        c[k] for k in ("hidden_size", "intermediate_size", "vocab_size", "draft_vocab_size")
    )
    q, kv = c["num_attention_heads"] * c["head_dim"], c["num_key_value_heads"] * c["head_dim"]
    shapes = {
        "fc": (h, 3 * h),
        "lm_head": (draft_v, h),
        "midlayer.self_attn.q_proj": (q, 2 * h),
        "midlayer.self_attn.k_proj": (kv, 2 * h),
        "midlayer.self_attn.v_proj": (kv, 2 * h),
        "midlayer.self_attn.o_proj": (h, q),
        "midlayer.mlp.gate_proj": (inner, h),
        "midlayer.mlp.up_proj": (inner, h),
        "midlayer.mlp.down_proj": (h, inner),
    }
    w = {
        f"{name}.weight": (torch.randn(shape) * 0.02).requires_grad_()
        for name, shape in shapes.items()
    }
    for name in (
        "norm",
        "midlayer.input_layernorm",
        "midlayer.hidden_norm",
        "midlayer.post_attention_layernorm",
    ):
        w[f"{name}.weight"] = torch.ones(h, requires_grad=True)
    frozen = dict(
        embed=torch.randn(v, h) * 0.02,
        norm=torch.ones(h),
        head=torch.randn(v, h) * 0.02,
        ids=torch.arange(draft_v) * (v // draft_v),
    )
    ids = torch.arange(rows) * 7919 % v
    mask = (torch.arange(rows) % document >= document // 2).int()
    batch = Batch(ids, mask, list(range(0, rows + 1, document)), c["ttt_steps"], dense)
    aux, states = [torch.randn(rows, h) for _ in range(3)], torch.randn(rows, h)
    frequencies = c["rope_theta"] ** (-torch.arange(0, c["head_dim"], 2) / c["head_dim"])
    wanted = torch.cat([batch.ahead(need, 1 + k) for k, need in enumerate(batch.need)]).unique()
    best = float("inf")
    for _ in range(repeat + 1):
        start = time.perf_counter()
        for tensor in w.values():
            tensor.grad = None
        with torch.no_grad():
            last, _ = teacher_of(c, frozen, states, wanted)
        step(c, w, frozen, batch, aux, last, frequencies)[0].backward()
        best = min(best, time.perf_counter() - start)
    print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads: {best:.2f} s a step, "
        f"{'every row' if dense else 'rows of the loss only'}, {[len(n) for n in batch.need]}"
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["golden"] and sys.argv[2:]:
        sys.exit(not all([golden(path) for path in sys.argv[2:]]))
    elif sys.argv[1:2] == ["bench"]:
        bench("--dense" in sys.argv)
    else:
        sys.exit(__doc__)
