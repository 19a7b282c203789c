"""How a model wants its tokens drawn where a request does not say."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class SamplingDefaults:
    """What the manifest's `sampling` says; None: nothing. Names, ranges and meanings are those of
    SamplingParams.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    @property
    def given(self) -> dict[str, float]:
        """What it says, by parameter."""
        values = {name: getattr(self, name) for name in NAMES}
        return {name: value for name, value in values.items() if value is not None}


NAMES = tuple(field.name for field in fields(SamplingDefaults))
NOTHING = SamplingDefaults()
