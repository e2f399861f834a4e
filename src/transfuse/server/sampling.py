"""Puts together how to sample, and remembers where each value came from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

from transfuse.explanation import Source
from transfuse.outputs import RequestOutput
from transfuse.sampling_params import SamplingParams

_NOTHING: Final[Mapping[str, Any]] = {}


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample.

    Attributes:
        params: the values.
        sources: by field, where it came from, where that is not a default of the API's.
    """

    params: SamplingParams
    sources: Mapping[str, Source]

    @classmethod
    def of(
        cls, given: Mapping[str, Any], model_defaults: Mapping[str, Any], route_defaults: Mapping[str, Any] = _NOTHING
    ) -> Sampling:
        """What a request comes to.

        Args:
            given: by field, what it says; None: nothing.
            model_defaults: by field, what the model's makers recommend where it says nothing.
            route_defaults: by field, what holds where neither does, if not what `SamplingParams` has.

        Raises:
            SamplingParamsError: fields contradict each other.
        """
        known = {name: value for name, value in given.items() if value is not None}
        sources: dict[str, Source] = dict.fromkeys(model_defaults, "generation_config")
        sources |= dict.fromkeys(known, "request")
        return cls(SamplingParams(**{**route_defaults, **model_defaults, **known}), sources)

    def sources_of(self, output: RequestOutput) -> Mapping[str, Source]:
        """The sources of what an answer was sampled by in the end, which the reply's format may have changed."""
        assert output.terms is not None, "the engine sets it"
        held = output.terms.params
        changed = [
            field.name for field in fields(held) if getattr(held, field.name) != getattr(self.params, field.name)
        ]
        return {**self.sources, **dict.fromkeys(changed, "reply_format")}
