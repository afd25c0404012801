"""Files of the Hugging Face Hub: names, split files, and the real client against a hub of our own on this machine."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from frink_numba.errors import FetchError, ModelNotFoundError
from frink_numba.host.fetch import fetch, resolve
from frink_numba.host.fetch_hub import HubFile

_FILES = {
    "whole.gguf": b"whole" * 1000,
    "big/model-00001-of-00003.gguf": b"one" * 1000,
    "big/model-00002-of-00003.gguf": b"two" * 1000,
    "big/model-00003-of-00003.gguf": b"three" * 1000,
}


class _Hub(BaseHTTPRequestHandler):
    """The part of the hub that hf_hub_download asks: HEAD and GET of /OWNER/REPO/resolve/main/FILE."""

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        name = self.path.partition("/owner/repo/resolve/")[2].partition("/")[2]
        content = _FILES.get(name)
        self.send_response(200 if content is not None else 404)
        if content is None:
            self.send_header("X-Error-Code", "EntryNotFound")
        else:
            self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
            self.send_header("X-Repo-Commit", "a" * 40)
        self.send_header("Content-Length", str(len(content or b"")))
        self.end_headers()
        if body and content:
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        return


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A hub on the loopback address, for child processes: huggingface_hub reads its settings when it is imported."""
    pytest.importorskip("huggingface_hub", reason='pip install "frink-numba[hf]"')
    with ThreadingHTTPServer(("127.0.0.1", 0), _Hub) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        monkeypatch.setenv("FRINK_CACHE_DIR", str(tmp_path / "cache"))
        yield
        server.shutdown()
        thread.join()


def _fetch(name: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "frink_numba", "fetch", name],
        cwd=Path(__file__).resolve().parents[2],
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_file_of_the_hub_is_fetched_and_found(hub: None, tmp_path: Path) -> None:
    done = _fetch("hf:owner/repo/whole.gguf")
    place = tmp_path / "cache" / "models" / "hf" / "owner" / "repo" / "whole.gguf"
    assert (done.returncode, done.stdout) == (0, f"{place}\n"), done.stderr
    assert place.read_bytes() == _FILES["whole.gguf"]
    assert resolve("hf:owner/repo/whole.gguf") == place


@pytest.mark.parametrize("asked", [1, 2])
def test_every_part_of_a_split_file_is_fetched(hub: None, tmp_path: Path, asked: int) -> None:
    """Whichever part is named, all come, and the first one's path is the answer."""
    done = _fetch(f"hf:owner/repo/big/model-{asked:05d}-of-00003.gguf")
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "cache" / "models" / "hf" / "owner" / "repo"
    assert done.stdout == f"{folder / 'big' / 'model-00001-of-00003.gguf'}\n"
    for name, content in _FILES.items():
        if name.startswith("big/"):
            assert (folder / name).read_bytes() == content


def test_a_missing_file_is_one_line(hub: None) -> None:
    done = _fetch("hf:owner/repo/absent.gguf")
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("frink-numba: error: hf:owner/repo/absent.gguf: ")
    assert done.stderr.count("\n") == 1
    assert "hf auth login" in done.stderr


def test_a_split_model_counts_as_fetched_only_when_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FRINK_CACHE_DIR", str(tmp_path))
    parts = HubFile.parse("hf:o/r/m-00001-of-00002.gguf").local_parts(tmp_path / "models")
    parts[0].parent.mkdir(parents=True)
    parts[0].write_bytes(b"x")
    with pytest.raises(ModelNotFoundError, match="is not fetched yet"):
        resolve("hf:o/r/m-00001-of-00002.gguf")
    parts[1].write_bytes(b"x")
    assert resolve("hf:o/r/m-00001-of-00002.gguf") == parts[0]


def test_without_the_package_the_command_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FRINK_CACHE_DIR", str(tmp_path))
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(FetchError, match=r'pip install "frink-numba\[hf\]"'):
        fetch("hf:owner/repo/whole.gguf")


@pytest.mark.parametrize(
    "name", ["hf:repo/file.gguf", "hf:a/b/c.bin", "hf:a/b/../../c.gguf", "hf:a//c.gguf", "hf:", "hf:../b/c.gguf"]
)
def test_other_forms_are_refused(name: str) -> None:
    """A name must not lead out of the cache folder."""
    with pytest.raises(ModelNotFoundError, match="expected hf:OWNER/REPO/FILE"):
        HubFile.parse(name)
