"""transformers' tokenizer for a GGUF file, loaded once per process: it takes seconds."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any


@cache
def tokenizer(path: Path) -> Any:
    """Give it back as it was."""
    import transformers

    return transformers.AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
