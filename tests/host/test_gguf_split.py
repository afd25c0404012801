"""Split models: any part opens all; a part that is missing, foreign, doubled or damaged is refused by its name."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from frink_numba.errors import GgufError
from frink_numba.host.gguf import GgufFile
from tests.gguf_bytes import ARRAY, FLOAT32, INT32, STRING, UINT16, UINT32, array, gguf, key, string, tensor, u32
from tests.gguf_writer import write_gguf

_METADATA = {"general.architecture": "llama", "general.name": "split", "tokens": ["a", "b"]}


def _tensors(n: int = 5, seed: int = 1) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {f"t{i}": rng.standard_normal((i + 2, 8)).astype(np.float32) for i in range(n)}


def _mapped(paths: list[Path]) -> list[Path]:
    """Those of `paths` that this process has mapped; none where that cannot be told."""
    maps = Path("/proc/self/maps")
    mapped = maps.read_text() if maps.exists() else ""
    return [path for path in paths if str(path) in mapped]


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    """A model of five tensors in three files, two tensors each but the last."""
    files = write_gguf(tmp_path / "model.gguf", _METADATA, _tensors(), tensors_per_file=2)
    assert [file.name for file in files] == [f"model-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    return files


@pytest.mark.parametrize("opened", [0, 1, 2])
def test_any_part_opens_all(parts: list[Path], opened: int) -> None:
    with GgufFile.open(parts[opened]) as model:
        assert model.paths == tuple(parts)
        assert model.metadata["general.name"] == "split"
        assert model.metadata["tokens"] == ["a", "b"]
        assert [info.part for info in model.tensors.values()] == [0, 0, 1, 1, 2]
        for name, expected in _tensors().items():
            np.testing.assert_array_equal(model.matrix(name).data.view(np.float32), expected)
    assert not _mapped(parts)


def test_parts_may_be_symbolic_links(parts: list[Path], tmp_path: Path) -> None:
    """Download caches keep files under their checksums and link to them: the link's name counts."""
    store, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    store.mkdir()
    snapshot.mkdir()
    for i, path in enumerate(parts):
        (snapshot / path.name).symlink_to(shutil.move(path, store / f"blob{i}"))
    with GgufFile.open(snapshot / parts[1].name) as model:
        assert len(model.tensors) == 5


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_missing_part_is_named(parts: list[Path], missing: int) -> None:
    parts[missing].unlink()
    with pytest.raises(GgufError, match=f"of the 3 parts .* missing: {parts[missing].name}$"):
        GgufFile.open(parts[(missing + 1) % 3])


def test_of_many_missing_parts_some_are_named(tmp_path: Path) -> None:
    path = tmp_path / "m-00002-of-60000.gguf"
    path.write_bytes(gguf([key("split.count", UINT16, (60000).to_bytes(2, "little"))]))
    with pytest.raises(GgufError, match=r"missing: m-00001-of-60000\.gguf, .* and more$"):
        GgufFile.open(path)


@pytest.mark.parametrize("opened", [0, 1, 2])
def test_copy_of_another_part_is_named(parts: list[Path], opened: int) -> None:
    shutil.copy(parts[0], parts[1])
    with pytest.raises(GgufError, match=rf"{parts[1].name}: holds part 1 of its model where part 2 belongs"):
        GgufFile.open(parts[opened])


def test_part_of_a_model_with_other_tensors_is_named(parts: list[Path], tmp_path: Path) -> None:
    """A part of another model that repeats a tensor."""
    folder = tmp_path / "other"
    folder.mkdir()
    other = dict(reversed(_tensors().items()))
    shutil.copy(write_gguf(folder / "model.gguf", _METADATA, other, tensors_per_file=2)[2], parts[2])
    with pytest.raises(GgufError, match=f"{parts[2].name}: tensor 't0' is in {parts[0].name} already: a foreign part"):
        GgufFile.open(parts[0])


def test_part_of_a_model_with_another_tensor_count_is_named(parts: list[Path], tmp_path: Path) -> None:
    folder = tmp_path / "other"
    folder.mkdir()
    other = {f"x{i}": tensor for i, tensor in enumerate(_tensors(6).values())}
    shutil.copy(write_gguf(folder / "model.gguf", _METADATA, other, tensors_per_file=2)[1], parts[1])
    with pytest.raises(GgufError, match=f"{parts[1].name}: key 'split.tensors.count' is 6, but the 3 parts hold 5"):
        GgufFile.open(parts[0])


def _part(number: int, count: int, total: int, name: str, extra: list[bytes] | None = None) -> bytes:
    keys = [
        key("split.no", UINT16, number.to_bytes(2, "little")),
        key("split.count", UINT16, count.to_bytes(2, "little")),
        key("split.tensors.count", INT32, total.to_bytes(4, "little")),
        *(extra or []),
    ]
    return gguf(keys, [tensor(name, [4])], bytes(16))


def _write_two(folder: Path, first: bytes, second: bytes) -> list[Path]:
    paths = [folder / f"two-0000{i}-of-00002.gguf" for i in (1, 2)]
    for path, content in zip(paths, (first, second), strict=True):
        path.write_bytes(content)
    return paths


def test_two_sound_parts_by_hand(tmp_path: Path) -> None:
    """The building blocks of the faults below; a key of a later part alone is kept."""
    same = key("general.name", STRING, string("x"))
    paths = _write_two(
        tmp_path, _part(0, 2, 2, "a", [same]), _part(1, 2, 2, "b", [same, key("only.here", UINT32, u32(5))])
    )
    with GgufFile.open(paths[1]) as model:
        assert list(model.tensors) == ["a", "b"]
        assert model.metadata["only.here"] == 5
        assert model.metadata["split.no"] == 0


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (
            _part(0, 2, 2, "a", [key("general.name", STRING, string("x"))]),
            _part(1, 2, 2, "b", [key("general.name", STRING, string("y"))]),
            "00002-of-00002.gguf: key 'general.name' differs from that of two-00001-of-00002.gguf: a foreign part",
        ),
        (
            _part(0, 2, 2, "a", [key("n", UINT32, u32(1))]),
            _part(1, 2, 2, "b", [key("n", INT32, u32(1))]),
            "00002-of-00002.gguf: key 'n' differs",
        ),
        (_part(0, 2, 2, "a"), _part(1, 3, 2, "b"), "00002-of-00002.gguf: .* of a model of 3 parts, .* of one of 2"),
        (_part(0, 2, 2, "a"), gguf([], [tensor("b", [4])], bytes(16)), "00002-of-00002.gguf: has no key 'split.count'"),
        (_part(0, 2, 2, "a"), b"<html>", "00002-of-00002.gguf: a web page"),
        (_part(0, 2, 2, "a"), _part(1, 2, 2, "b")[:-1], "00002-of-00002.gguf: tensor 'b' ends at byte"),
        (_part(0, 3, 2, "a"), _part(1, 2, 2, "b"), "00001-of-00002.gguf: its name says .* 2 parts, .* says 3"),
        (gguf([], [tensor("a", [4])], bytes(16)), _part(1, 2, 2, "b"), "name says .* 2 parts, .* 'split.count' says 1"),
        (
            gguf([key("split.count", FLOAT32, bytes(4))], [tensor("a", [4])], bytes(16)),
            _part(1, 2, 2, "b"),
            "'split.count' has the type float32, it must be an integer",
        ),
        (
            gguf([key("split.count", ARRAY, array(UINT16, 1, b"\x02\x00"))], [tensor("a", [4])], bytes(16)),
            _part(1, 2, 2, "b"),
            "'split.count' has the type array, it must be an integer",
        ),
    ],
    ids=["value", "type", "count", "no count", "web page", "cut off", "name", "whole model", "float", "array"],
)
def test_foreign_part_is_named(tmp_path: Path, first: bytes, second: bytes, message: str) -> None:
    paths = _write_two(tmp_path, first, second)
    with pytest.raises(GgufError, match=message):
        GgufFile.open(paths[0])
    assert not _mapped(paths)


@pytest.mark.parametrize("number", [0, 4])
def test_number_outside_the_count_is_refused(parts: list[Path], number: int) -> None:
    odd = parts[0].with_name(f"model-0000{number}-of-00003.gguf")
    shutil.copy(parts[2], odd)
    with pytest.raises(GgufError, match=f"its name says that it is part {number} of 3"):
        GgufFile.open(odd)


def test_renamed_part_says_which_name_it_needs(parts: list[Path], tmp_path: Path) -> None:
    renamed = tmp_path / "mine.gguf"
    parts[1].rename(renamed)
    with pytest.raises(GgufError, match=r"mine\.gguf: is one of 3 parts .* does not end in -00001-of-00003\.gguf"):
        GgufFile.open(renamed)


@pytest.mark.parametrize("count", [None, 0, 1])
def test_model_in_one_file_may_carry_split_keys(tmp_path: Path, count: int | None) -> None:
    """Merging parts leaves a count of 0 behind; a single file may be named 1 of 1."""
    keys = [] if count is None else [key("split.count", UINT16, count.to_bytes(2, "little"))]
    for name in ("whole.gguf", "whole-00001-of-00001.gguf"):
        path = tmp_path / name
        path.write_bytes(gguf(keys, [tensor("a", [4])], bytes(16)))
        with GgufFile.open(path) as model:
            assert model.paths == (path,)
