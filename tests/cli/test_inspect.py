"""`frink-numba inspect`: the file's facts, metadata and tensors, also of models that do not run."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

from frink_numba.host.gguf import GgufFile
from tests.cli.runner import frink, frink_json


def test_the_real_models_facts(smollm2_path: Path) -> None:
    document = frink_json("inspect", "smollm2-135m")
    assert document["files"] == [{"path": str(smollm2_path), "bytes": 98_362_432}]
    assert (document["architecture"], document["gguf_version"]) == ("llama", 3)
    assert document["parameters"] == 134_515_008
    with GgufFile.open(smollm2_path) as model:
        assert document["tensors"] == [
            {"name": t.name, "kind": t.kind.name, "shape": list(t.shape), "bytes": t.nbytes}
            for t in model.tensors.values()
        ]
        assert set(document["metadata"]) == set(model.metadata)
    assert document["metadata"]["llama.block_count"] == {"type": "uint32", "value": 30}
    tokens = document["metadata"]["tokenizer.ggml.tokens"]
    assert (tokens["type"], tokens["count"], len(tokens["value"])) == ("array of string", 49152, 8)


def test_the_table_lists_tensors_on_request(smollm2_path: Path) -> None:
    short, long = frink("inspect", str(smollm2_path)), frink("inspect", str(smollm2_path), "--tensors")
    assert (short.returncode, short.stderr, long.stderr) == (0, "", "")
    assert "134,515,008" in short.stdout
    assert "blk.29.ffn_down.weight" not in short.stdout
    assert "blk.29.ffn_down.weight" in long.stdout
    assert "576 x 1536" in long.stdout


def test_an_unknown_architecture_is_inspected(tmp_path: Path) -> None:
    """Inspecting needs no engine; NaN and control characters of a file harm neither JSON nor the terminal."""
    path = tmp_path / "odd.gguf"
    writer = gguf.GGUFWriter(path, "unheard-of")
    writer.add_string("general.name", "bell\x07 and \x1b[31mred")
    writer.add_float32("odd.scale", float("nan"))
    writer.add_tensor("weight", np.ones((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    document = frink_json("inspect", str(path))
    assert document["architecture"] == "unheard-of"
    assert document["metadata"]["odd.scale"] == {"type": "float32", "value": "nan"}
    assert document["tensors"] == [{"name": "weight", "kind": "F32", "shape": [4, 32], "bytes": 512}]
    shown = frink("inspect", str(path)).stdout
    assert "\\x07" in shown
    assert "\x07" not in shown
    assert "\x1b" not in shown
