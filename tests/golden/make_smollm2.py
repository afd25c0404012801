"""Compute the golden of SmolLM2-135M-Instruct: `python -m tests.golden.make_smollm2 MODEL.gguf`.

transformers loads the same GGUF file, dequantized to float32. For every position of every prompt the golden keeps a
sketch of the logits (see sketch.py), their norm, the top 8 tokens with their logits, and the log-probability of
the token that follows; two positions are kept whole; and for every prompt the 40 tokens of greedy decoding, with the
margin between the first and the second logit.

Needs the `oracle` extra (made with torch 2.13 and transformers 5.24). Takes two minutes on two cores.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
import transformers

from tests.golden.prompts import PROMPTS
from tests.golden.sketch import sketch
from tests.golden.smollm2 import FILE, NEW_TOKENS, TOP, WHOLE


def greedy(model: torch.nn.Module, ids: list[int]) -> tuple[list[int], list[float]]:
    """40 tokens after `ids`, none of which stops, and the margin of each."""
    chosen, margins, cache = [], [], None
    step = torch.tensor([ids])
    for _ in range(NEW_TOKENS):
        out = model(step, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = out.past_key_values
        best = out.logits[0, -1].topk(2)
        chosen.append(int(best.indices[0]))
        margins.append(float(best.values[0] - best.values[1]))
        step = best.indices[:1][None]
    return chosen, margins


def next_log_probabilities(rows: np.ndarray, ids: list[int]) -> np.ndarray:
    """float64 [n - 1]: log p(ids[i + 1] | ids[.. i]) from logits [n, vocab]."""
    every = torch.from_numpy(rows).double().log_softmax(-1)
    return every[torch.arange(len(ids) - 1), torch.tensor(ids[1:])].numpy()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    path = parser.parse_args().model.resolve()
    torch.set_grad_enabled(False)
    where = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        **where, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    kept: dict[str, np.ndarray] = {}
    for name, text in PROMPTS.items():
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        rows = model(torch.tensor([ids]), use_cache=False).logits[0].numpy()
        order = np.argsort(-rows, axis=1, kind="stable")[:, :TOP]
        tokens, margins = greedy(model, ids)
        kept |= {
            f"{name}/tokens": np.array(ids, np.int32),
            f"{name}/sketch": sketch(rows).astype(np.float32),
            f"{name}/norm": np.linalg.norm(rows.astype(np.float64), axis=1).astype(np.float32),
            f"{name}/top_ids": order.astype(np.int32),
            f"{name}/top_logits": np.take_along_axis(rows, order, axis=1),
            f"{name}/log_probabilities": next_log_probabilities(rows, ids),
            f"{name}/greedy": np.array(tokens, np.int32),
            f"{name}/margins": np.array(margins, np.float32),
        }
        if name in WHOLE:
            kept[f"{name}/last"] = rows[-1]
        print(f"{name}: {len(ids)} tokens, smallest greedy margin {min(margins):.3f}, {tokenizer.decode(tokens)!r}")
    np.savez_compressed(FILE, **kept)
    print(f"{FILE.name}: {FILE.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
