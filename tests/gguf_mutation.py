"""Spoil a small sound GGUF model at random, by number: the same number always gives the same file.

    python -m tests.gguf_mutation --cases 10000

opens that many spoilt models in a process that may grow by 200 MB, reads all they hold, and prints as JSON how many
loaded, how many were refused, the slowest, and every case that did anything else. tests/host/test_gguf_hostile.py runs
a smaller number.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import struct
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np

from frink_numba.errors import GgufError
from frink_numba.host.gguf import GgufFile
from tests.gguf_writer import quantize, write_gguf
from tests.random_blocks import random_matrix

MEMORY_LIMIT = 200 << 20
SECONDS_LIMIT = 1.0

_WORDS = (0, 1, 2, 7, 8, 9, 13, 31, 32, 64, 255, 65535, 1 << 16, 1 << 20, (1 << 31) - 1, 1 << 31, (1 << 32) - 1)
_LONG_WORDS = (*_WORDS, 1 << 32, 1 << 40, 1 << 61, (1 << 63) - 1, 1 << 63, (1 << 64) - 8, (1 << 64) - 1)


def write_models(folder: Path) -> dict[str, list[Path]]:
    """The sound models that are spoilt: one of each thing a file can hold, and one split in two."""
    rng = np.random.default_rng(0)
    metadata = {
        "general.architecture": "llama",
        "general.alignment": np.uint32(32),
        "general.name": "a model to spoil",
        "llama.block_count": 2,
        "llama.rope.freq_base": 10000.0,
        "flag": True,
        "flags": [True, False],
        "big": np.uint64(1 << 40),
        "tokenizer.ggml.tokens": [f"token {i}" * (i % 5) for i in range(40)],
        "tokenizer.ggml.scores": np.linspace(0, 1, 40, dtype=np.float32),
        "tokenizer.chat_template": "{{ messages }}" * 20,
    }
    tensors = {
        "token_embd.weight": random_matrix("Q4_K", 3, 512, rng),
        "blk.0.attn_q.weight": quantize(rng.standard_normal((8, 64)).astype(np.float32), "Q4_1"),
        "blk.0.attn_norm.weight": rng.standard_normal(64).astype(np.float32),
        "blk.0.ffn.weight": rng.standard_normal((2, 3, 4)).astype(np.float16),
    }
    return {
        "whole": write_gguf(folder / "whole.gguf", metadata, tensors),
        "split": write_gguf(folder / "split.gguf", metadata, tensors, tensors_per_file=2),
    }


def spoil(content: bytes, header: int, dice: random.Random) -> bytes:
    """One to four random changes, most of them in the first `header` bytes."""
    data = bytearray(content)
    for _ in range(dice.choice((1, 1, 1, 2, 3, 4))):
        dice.choice(_CHANGES)(data, header, dice)
    return bytes(data)


def _place(data: bytearray, header: int, dice: random.Random) -> int:
    end = min(header, len(data)) if dice.random() < 0.85 else len(data)
    return dice.randrange(max(1, end))


def _flip_bit(data: bytearray, header: int, dice: random.Random) -> None:
    if data:
        data[_place(data, header, dice)] ^= 1 << dice.randrange(8)


def _set_bytes(data: bytearray, header: int, dice: random.Random) -> None:
    at = _place(data, header, dice)
    raw = dice.randbytes(dice.randint(1, 8))
    data[at : at + len(raw)] = raw


def _set_word(data: bytearray, header: int, dice: random.Random) -> None:
    at = _place(data, header, dice)
    raw = struct.pack("<I", dice.choice(_WORDS))
    data[at : at + 4] = raw


def _set_long_word(data: bytearray, header: int, dice: random.Random) -> None:
    at = _place(data, header, dice)
    word = dice.choice((*_LONG_WORDS, len(data), len(data) - at, len(data) - at - 8))
    data[at : at + 8] = struct.pack("<Q", word % (1 << 64))


def _change_length(data: bytearray, header: int, dice: random.Random) -> None:
    """Find eight bytes that look like a count or length, and change it a little, or a lot."""
    start = _place(data, header, dice)
    for at in range(start, min(start + 200, len(data) - 8)):
        word = int.from_bytes(data[at : at + 8], "little")
        if 0 < word < 1 << 16:
            word = dice.choice((word - 1, word + 1, word * 2, word + 256, word << 8, word << 32, word << 56, 0))
            data[at : at + 8] = struct.pack("<Q", word % (1 << 64))
            return


def _cut(data: bytearray, header: int, dice: random.Random) -> None:
    del data[_place(data, header, dice) :]


def _lengthen(data: bytearray, header: int, dice: random.Random) -> None:
    data += dice.randbytes(dice.randint(1, 300))


def _delete_block(data: bytearray, header: int, dice: random.Random) -> None:
    at = _place(data, header, dice)
    del data[at : at + dice.randint(1, 64)]


def _copy_block(data: bytearray, header: int, dice: random.Random) -> None:
    """Copy some bytes elsewhere, over what is there or in between: repeated keys, infos, strings."""
    source, target = _place(data, header, dice), _place(data, header, dice)
    block = data[source : source + dice.randint(1, 128)]
    data[target : target + dice.choice((0, len(block)))] = block


_CHANGES: tuple[Callable[[bytearray, int, random.Random], None], ...] = (
    _flip_bit,
    _flip_bit,
    _set_bytes,
    _set_word,
    _set_long_word,
    _change_length,
    _change_length,
    _cut,
    _lengthen,
    _delete_block,
    _copy_block,
)


def read_everything(path: Path) -> None:
    """Open a model, decode all metadata, touch every byte of its matrices and vectors, close it."""
    with GgufFile.open(path) as model:
        for key, value in model.metadata.items():
            repr(value)
            if "string" in model.metadata.type_name(key):
                model.metadata.raw(key)
        for name, info in model.tensors.items():
            if len(info.shape) == 2:
                model.matrix(name).data.sum()
            elif len(info.shape) == 1 and info.kind.name in ("F32", "F16", "BF16"):
                model.vector(name)


def run_case(number: int, models: dict[str, list[Path]], folder: Path) -> str:
    """Spoil one file of one model and read it: "loaded" or the refusal's text; any other exception is a fault."""
    dice = random.Random(number)
    files = models[dice.choice(("whole", "whole", "split"))]
    target = dice.randrange(len(files))
    for i, file in enumerate(files):
        content = file.read_bytes()
        if i == target:
            header = 1536 if i == 0 else 256  # where the tensors' bytes begin, or near it
            content = spoil(content, header, dice)
        (folder / file.name).write_bytes(content)
    try:
        read_everything(folder / dice.choice(files).name)
    except GgufError as error:
        return str(error)
    return "loaded"


def _limit_memory() -> None:
    with open("/proc/self/statm") as statm:
        now = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY_LIMIT, resource.RLIM_INFINITY))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sound, spoilt = folder / "sound", folder / "spoilt"
        sound.mkdir()
        spoilt.mkdir()
        models = write_models(sound)
        for files in models.values():
            read_everything(files[0])
        if sys.platform.startswith("linux"):
            _limit_memory()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        loaded = 0
        slowest = 0.0
        faults: dict[int, str] = {}
        refusals: Counter[str] = Counter()
        begin = time.perf_counter()
        for number in range(arguments.first, arguments.first + arguments.cases):
            start = time.perf_counter()
            try:
                outcome = run_case(number, models, spoilt)
            except Exception:
                faults[number] = traceback.format_exc(limit=-3)
                continue
            seconds = time.perf_counter() - start
            slowest = max(slowest, seconds)
            if seconds > SECONDS_LIMIT:
                faults[number] = f"took {seconds:.2f} s"
            loaded += outcome == "loaded"
            if outcome != "loaded":
                message = outcome.split(": ", 1)[1]
                refusals[" ".join(w for w in message.split() if w.isalpha())[-60:]] += 1
        result = {
            "cases": arguments.cases,
            "loaded": loaded,
            "refused": refusals.total(),
            "different refusals": len(refusals),
            "seconds": round(time.perf_counter() - begin, 2),
            "slowest": round(slowest, 4),
            "memory growth": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024,
            "faults": faults,
        }
    print(json.dumps(result, indent=1))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
