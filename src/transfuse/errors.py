"""Every error that Transfuse raises on purpose.

    TransfuseError
    ├── ConfigError                 a setting is wrong, or two contradict each other
    ├── RequestError                the request's own fault; the engine and other requests go on
    │   ├── SamplingParamsError     a sampling field is out of its range
    │   ├── StructuredOutputsError  a schema, expression or grammar is none, is not supported, or exceeds a limit
    │   ├── PromptError             the prompt is empty, of the wrong kind, or holds ids outside the vocabulary
    │   ├── CapacityError           the request can never fit, however long it waits
    │   └── WrongTaskError          the model does something else: it embeds texts, say, and is asked to go on with one
    ├── ModelError
    │   ├── ModelNotFoundError      no such folder, file or hub id
    │   ├── DownloadError           the default model could not be fetched or failed its checksum
    │   ├── RemoteCodeError         the folder brings code, and --trust-remote-code was not given
    │   ├── WeightsError            tensors missing, unexpected or misshapen, or the file is damaged
    │   └── UnsupportedModelError   this implementation cannot run the model; the message says why
    ├── EngineError
    │   ├── EngineClosedError       used after close()
    │   ├── EngineDeadError         the process that runs the model died or froze; the request is lost
    │   ├── EngineUnavailableError  that process is loading, unresponsive or given up: nothing can be sent to it now
    │   ├── QueueFullError          all places are taken at this moment
    │   └── NonFiniteLogitsError    the model gave NaN or infinity for one request, which alone fails
    ├── KernelError                 the compiled kernels cannot be had: torch's serve instead, and say why
    ├── BenchmarkError              what was to be measured did not start, or ended meanwhile
    └── SelftestError               the server that was to be tried does not answer, or lists no model

A message names what was wrong, where, the limit, and what to do. Invariants are asserted, not raised.
"""

from __future__ import annotations

from collections.abc import Sequence


class TransfuseError(Exception):
    """Base of all errors that Transfuse raises on purpose."""


class ConfigError(TransfuseError, ValueError):
    """A setting is wrong, or two settings contradict each other."""


class RequestError(TransfuseError, ValueError):
    """The request itself is at fault: the engine and all other requests go on."""


class SamplingParamsError(RequestError):
    """A field of `SamplingParams` is out of its range.

    Attributes:
        field: name of the field.
        value: what was given.
    """

    def __init__(self, field: str, value: object, expected: str) -> None:
        super().__init__(f"SamplingParams.{field} is {value!r}; expected {expected}.")
        self.field = field
        self.value = value


class StructuredOutputsError(RequestError):
    """What the answer must be cannot be had: no schema, expression or grammar, not supported, or beyond a limit."""


class PromptError(RequestError):
    """The prompt is empty, of the wrong kind, or holds token ids outside the vocabulary."""


class CapacityError(RequestError):
    """The request can never fit in the model's length or in the cache, however long it waits."""


class WrongTaskError(RequestError):
    """The model does something else than what is asked of it; the message says what it does."""


class ModelError(TransfuseError):
    """A model cannot be found, loaded or run."""


class ModelNotFoundError(ModelError):
    """No such folder, file or hub id."""


class DownloadError(ModelError):
    """The default model could not be fetched, or what came failed its checksum."""


class RemoteCodeError(ModelError):
    """The model folder brings its own code, and running it was not allowed."""


class WeightsError(ModelError):
    """The checkpoint does not fit the model.

    Attributes:
        missing: tensors that the model has and the checkpoint lacks.
        unexpected: tensors of the checkpoint that the model has no place for.
        misshapen: `name: checkpoint shape -> model shape`, one string each.
    """

    def __init__(
        self,
        message: str,
        *,
        missing: Sequence[str] = (),
        unexpected: Sequence[str] = (),
        misshapen: Sequence[str] = (),
    ) -> None:
        super().__init__(message)
        self.missing = tuple(missing)
        self.unexpected = tuple(unexpected)
        self.misshapen = tuple(misshapen)


class UnsupportedModelError(ModelError):
    """The chosen implementation cannot run this model; the message gives the reason and the way out."""


class EngineError(TransfuseError):
    """The engine, not a request, is at fault."""


class EngineClosedError(EngineError):
    """The engine was used after `close()`."""


class QueueFullError(EngineError):
    """All places, running and waiting, are taken at this moment.

    Attributes:
        retry_after: seconds after which trying again is worthwhile.
    """

    def __init__(self, message: str, *, retry_after: int = 1) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class EngineDeadError(EngineError):
    """The process that runs the model died or froze; what it was computing is lost and may be sent again."""


class EngineUnavailableError(EngineError):
    """The process that runs the model takes no requests now; the message says why and whether it will."""


class NonFiniteLogitsError(EngineError):
    """The model gave NaN or infinite logits for one request; that request alone ends."""


class KernelError(TransfuseError):
    """The compiled kernels cannot be built or loaded; the message says why and what to do."""


class BenchmarkError(TransfuseError):
    """What was to be measured, a server or another engine, did not start, cannot be reached, or ended meanwhile."""


class SelftestError(TransfuseError):
    """The server whose answers were to be tried does not answer at all, or lists no model."""
