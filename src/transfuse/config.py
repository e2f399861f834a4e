"""Settings of the engine: frozen, resolved once, each part handed only what it needs."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from transfuse.errors import ConfigError

MODEL_IMPLS = ("auto", "fused", "plain", "original")
DTYPES = ("auto", "bfloat16", "float32", "float16")
POLICIES = ("fcfs", "priority")
RUNNERS = ("auto", "generate", "pooling")

# vLLM's name for "let the Transformers code run", so that commands written for it run unchanged.
MODEL_IMPL_ALIASES = {"transformers": "auto"}


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """What to load and how to run it.

    Attributes:
        model: folder, hub id or `.gguf` file; None for the default model.
        tokenizer: folder or hub id of another tokenizer; None for the model's own.
        runner: `generate` to continue texts, `pooling` to make vectors or scores of them, `auto` for what the model's
            files say.
        model_impl: `auto`, `fused`, `plain` or `original`.
        dtype: dtype of weights and activations; `auto` takes the checkpoint's.
        trust_remote_code: whether a folder's own Python code may run.
        revision: branch, tag or commit of a hub id.
        cache_dir: where downloads, compiled kernels, verdicts and programs are kept.
        trust_plan: skip the check of code not seen before.
        use_stored_program: whether a start may go without the model's modules where an earlier one has stored what
            they compute.
    """

    model: str | None = None
    tokenizer: str | None = None
    runner: str = "auto"
    model_impl: str = "auto"
    dtype: str = "auto"
    trust_remote_code: bool = False
    revision: str | None = None
    cache_dir: Path
    trust_plan: bool = False
    use_stored_program: bool = True

    def __post_init__(self) -> None:
        _check_choice("runner", self.runner, RUNNERS)
        _check_choice("model_impl", self.model_impl, MODEL_IMPLS)
        _check_choice("dtype", self.dtype, DTYPES)

    @property
    def may_fuse(self) -> bool:
        """Whether the model may run fused, in compiled kernels."""
        return self.model_impl in ("auto", "fused")


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheConfig:
    """How large the paged cache is.

    Attributes:
        block_size: tokens per block.
        memory_bytes: bytes of the cache; None sizes it from the memory that is available after loading.
        memory_share: the share of available memory taken where `memory_bytes` is None, in (0, 1].
        num_blocks: number of blocks, overriding both; for tests and experiments.
        enable_prefix_caching: whether requests share blocks of equal prefixes.
    """

    block_size: int = 16
    memory_bytes: int | None = None
    memory_share: float = 0.5
    num_blocks: int | None = None
    enable_prefix_caching: bool = True

    def __post_init__(self) -> None:
        _check_range("block_size", self.block_size, 1, 1024)
        if not 0.0 < self.memory_share <= 1.0:
            raise ConfigError(f"memory_share is {self.memory_share!r}; expected a share above 0 and at most 1.")
        if self.num_blocks is not None:
            _check_range("num_blocks", self.num_blocks, 2, 2**31 - 1)
        if self.memory_bytes is not None:
            _check_range("kv_cache_memory_bytes", self.memory_bytes, 1, 2**63 - 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerConfig:
    """Who may run in a step: `EngineConfig` once the model and the memory are known.

    Attributes:
        max_model_len: most tokens of a request, prompt and output together.
        max_num_seqs: most requests in a step.
        max_num_batched_tokens: ceiling of a step's tokens; measured speed may set a lower one.
        policy: `fcfs` serves in order of arrival, `priority` lower numbers first.
        enable_chunked_prefill: whether a prompt may be computed over several steps.
        enable_prefix_caching: whether requests share blocks of equal prefixes.
        block_size: tokens per block.
        keeps_states: whether the model keeps a state of each running request, of which there are `max_num_seqs` rows.
            A state is lost with the request's blocks, and stands for a whole text: no prefix of it can be shared.
        replays_outputs: whether what a preempted request computes again is computed as at first: its prompt in one
            step, then its output token by token. For models that give a text in other pieces other logits.
    """

    max_model_len: int
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    policy: str = "fcfs"
    enable_chunked_prefill: bool = True
    enable_prefix_caching: bool = True
    block_size: int = 16
    keeps_states: bool = False
    replays_outputs: bool = False

    def __post_init__(self) -> None:
        assert not (self.keeps_states and self.enable_prefix_caching), "blocks do not hold the states at their ends"
        assert not (self.replays_outputs and (self.enable_chunked_prefill or self.enable_prefix_caching)), (
            "a prompt in one piece is neither cut nor begun by another"
        )
        assert self.max_num_batched_tokens >= self.max_num_seqs, "every running request needs one token a step"


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """Everything that the caller decides, before the model and the memory are known.

    Attributes:
        model: what to load and how to run it.
        cache: how large the paged cache is.
        max_model_len: most tokens of a request; None takes the model's limit, or what fits.
        max_num_seqs: most requests in a step.
        max_num_batched_tokens: ceiling of a step's tokens.
        policy: `fcfs` or `priority`.
        enable_chunked_prefill: whether a prompt may be computed over several steps.
        num_threads: threads that compute; None leaves torch's choice.
        seed: makes requests without a seed of their own repeatable.
    """

    model: ModelConfig
    cache: CacheConfig
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    policy: str = "fcfs"
    enable_chunked_prefill: bool = True
    num_threads: int | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.max_model_len is not None:
            _check_range("max_model_len", self.max_model_len, 1, 2**31 - 1)
        _check_range("max_num_seqs", self.max_num_seqs, 1, 4096)
        _check_range("max_num_batched_tokens", self.max_num_batched_tokens, 1, 2**31 - 1)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) is below max_num_seqs ({self.max_num_seqs}): "
                "every running request needs one token a step. Raise the first or lower the second."
            )
        _check_choice("scheduling_policy", self.policy, POLICIES)
        if self.num_threads is not None:
            _check_range("num_threads", self.num_threads, 1, 1024)
        if self.seed is not None:
            _check_range("seed", self.seed, 0, 2**63 - 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class WatchConfig:
    """When the process that runs the model counts as frozen, and how often it may die.

    Times are counted in ticks of the watcher itself, so that a machine that was suspended is not taken for a frozen
    process.

    Attributes:
        tick_seconds: how often its progress is looked at.
        unresponsive_seconds: without progress for this long, it is unresponsive: nothing new is sent to it.
        kill_seconds: without progress for this long, it is killed and started again.
        max_crashes: this many deaths within `crash_window_seconds` end the restarts.
        crash_window_seconds: see `max_crashes`.
    """

    tick_seconds: float = 0.25
    unresponsive_seconds: float = 5.0
    kill_seconds: float = 20.0
    max_crashes: int = 3
    crash_window_seconds: float = 60.0

    def __post_init__(self) -> None:
        if not 0 < self.tick_seconds <= self.unresponsive_seconds <= self.kill_seconds:
            raise ConfigError(
                f"tick_seconds ({self.tick_seconds}), unresponsive_seconds ({self.unresponsive_seconds}) and "
                f"kill_seconds ({self.kill_seconds}) have to be above 0 and in this order."
            )
        _check_range("max_crashes", self.max_crashes, 1, 1000)


def engine_config(
    model: str | os.PathLike[str] | None = None,
    *,
    tokenizer: str | None = None,
    runner: str = "auto",
    model_impl: str = "auto",
    dtype: str = "auto",
    max_model_len: int | None = None,
    max_num_seqs: int = 64,
    max_num_batched_tokens: int = 2048,
    block_size: int = 16,
    kv_cache_memory_bytes: int | None = None,
    num_kv_blocks: int | None = None,
    enable_prefix_caching: bool = True,
    enable_chunked_prefill: bool = True,
    scheduling_policy: str = "fcfs",
    trust_remote_code: bool = False,
    trust_plan: bool = False,
    revision: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    num_threads: int | None = None,
    seed: int | None = None,
) -> EngineConfig:
    """The configuration that the keyword arguments of `LLM` and `AsyncLLM` stand for.

    Raises:
        ConfigError: a setting is wrong.
    """
    return EngineConfig(
        model=ModelConfig(
            model=None if model is None else os.fspath(model),
            tokenizer=tokenizer,
            runner=runner,
            model_impl=MODEL_IMPL_ALIASES.get(model_impl, model_impl),
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            revision=revision,
            cache_dir=default_cache_dir() if cache_dir is None else Path(cache_dir).expanduser(),
            trust_plan=trust_plan,
        ),
        cache=CacheConfig(
            block_size=block_size,
            memory_bytes=kv_cache_memory_bytes,
            num_blocks=num_kv_blocks,
            enable_prefix_caching=enable_prefix_caching,
        ),
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        policy=scheduling_policy,
        enable_chunked_prefill=enable_chunked_prefill,
        num_threads=num_threads,
        seed=seed,
    )


def default_cache_dir() -> Path:
    """`$TRANSFUSE_CACHE_DIR`, else `$XDG_CACHE_HOME/transfuse`, else `~/.cache/transfuse`."""
    if given := os.environ.get("TRANSFUSE_CACHE_DIR"):
        return Path(given).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "transfuse"


def shorten_thread_waits() -> None:
    """Have OpenMP's threads spin briefly for each other and then sleep; to be called before torch is loaded.

    By default they spin for milliseconds, and where another process wants a processor too, that is taken from the very
    thread that is waited for: on two cores with two busy neighbours a token took 1,224 ms, and takes 60 ms so. Alone it
    costs up to 4%. What the user has set for OpenMP stays.
    """
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & set(os.environ):
        os.environ["GOMP_SPINCOUNT"] = "20000"


def bare_environment() -> dict[str, str]:
    """The variables that another Python needs to start as this one did, and the clock's zone: nothing secret."""
    names = ("HOME", "LANG", "LC_ALL", "LC_TIME", "LD_LIBRARY_PATH", "PYTHONHOME", "PYTHONPATH", "PYTHONUSERBASE", "TZ")
    return {name: os.environ[name] for name in names if name in os.environ}


def _check_range(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(f"{name} is {value!r}; expected an integer from {low} to {high}.")


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} is {value!r}; expected one of {', '.join(choices)}.")
