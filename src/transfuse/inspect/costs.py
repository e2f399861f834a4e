"""What a token costs: the bytes of weights that are read for it and the floating-point operations on them.

Counted are products of matrices, two operations for each multiplication with its addition. Element-wise operations,
norms and softmax are left out: they are below a hundredth of the rest in any model worth counting.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from transfuse.fusion.query import op
from transfuse.inspect.attention import AttentionLayer
from transfuse.inspect.contractions import Flops, Row, flops_of
from transfuse.trace.graph import ModelTrace, TensorFacts, Trace, value_of


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one token in one module, or in several.

    Attributes:
        weight_bytes: read, where nothing stays in a processor's caches and the token is alone in its batch.
        flops: that do not depend on the context.
        flops_per_position: more for each position that the token attends to; attention over the cache is counted
            by itself (`ModelCosts.attention`).
        num_parameters: of the module itself, whether read or not; tied ones are counted once.
        assumed: whether something of it did not run in the recording, or may run more or less often than there, so
            that its cost follows from sizes alone.
    """

    weight_bytes: float = 0.0
    flops: float = 0.0
    flops_per_position: float = 0.0
    num_parameters: int = 0
    assumed: bool = False

    def __add__(self, other: Cost) -> Cost:
        """Both together."""
        return Cost(
            self.weight_bytes + other.weight_bytes,
            self.flops + other.flops,
            self.flops_per_position + other.flops_per_position,
            self.num_parameters + other.num_parameters,
            self.assumed or other.assumed,
        )


@dataclass(frozen=True, slots=True)
class ModelCosts:
    """What a token costs in each part of a model.

    Attributes:
        by_path: of each module itself, without its children.
        by_class: the same by class; a layer of `torch.nn` counts for the class that calls it.
        attention: attentions over the cache, in the order in which they ran.
    """

    by_path: Mapping[str, Cost]
    by_class: Mapping[str, Cost]
    attention: tuple[AttentionLayer, ...] = ()

    @property
    def total(self) -> Cost:
        """Of the model, without attention over the cache."""
        return sum(self.by_path.values(), Cost())

    def attention_flops(self, context: int) -> float:
        """Of a token that comes after `context - 1` others."""
        return sum(layer.flops(context) for layer in self.attention) + self.total.flops_per_position * context

    def cache_bytes(self, context: int) -> float:
        """Keys and values read by such a token; 0 where attention is the model's own code."""
        return sum(layer.cache_bytes(context) for layer in self.attention)


@dataclass
class _Reads:
    """Bytes read for a token by each module, and the parameters that were seen read."""

    by_path: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    seen: set[int] = field(default_factory=set)


def model_costs(model: ModelTrace, row: Row, attention: tuple[AttentionLayer, ...] = ()) -> ModelCosts:
    """Costs from a recorded forward.

    Where the recording does not show what a module does with a parameter (experts behind a seam, modules that a broken
    forward did not reach), its sizes tell, and the cost says that it is assumed, but for experts, whose number per
    token was recorded.

    Args:
        model: the recording.
        row: what it was run on.
        attention: attentions over the cache that ran in it.
    """
    modules = dict(model.root.named_modules())
    reads = _Reads()
    flops: dict[str, Flops] = defaultdict(Flops)
    per_trace: dict[int, Flops] = {}
    for path, trace in model.traces.items():
        calls = max(1, model.num_calls[path])
        if id(trace) not in per_trace:
            per_trace[id(trace)] = sum((flops_of(node, row) for node in trace.graph.nodes), Flops())
        once = per_trace[id(trace)]
        flops[path] = Flops(once.fixed * calls, once.per_position * calls)
        _read(path, modules[path], trace, calls, row, reads)
    sizes = _own_sizes(modules)
    costs = {
        path: Cost(
            reads.by_path[path],
            flops[path].fixed,
            flops[path].per_position,
            sizes[path],
            # In a list of experts as many run in a recording as the search for chosen ones happened to find.
            assumed=path in model.traces and _experts_above(path) is not None,
        )
        for path in modules
    }
    for path, module in modules.items():
        if (share := _share_of_list(path, model.root)) is not None:
            costs[path] = _by_share(module, share, sizes[path])
        elif (unseen := _unseen(path, module, model, reads)) is not None:
            costs[path] += unseen
    return ModelCosts(costs, _by_class(costs, modules), attention)


def _own_sizes(modules: Mapping[str, nn.Module]) -> dict[str, int]:
    """Number of parameters of each module itself; tied ones belong to the first."""
    counted: set[int] = set()
    sizes: dict[str, int] = {}
    for path, module in modules.items():
        own = {id(p): p.numel() for p in module._parameters.values() if p is not None and id(p) not in counted}
        counted |= own.keys()
        sizes[path] = sum(own.values())
    return sizes


def _read(path: str, module: nn.Module, trace: Trace, calls: int, row: Row, reads: _Reads) -> None:
    """Note the parameters that a module's own operations read."""
    for node in trace.graph.nodes:
        parameter = _parameter(module, node)
        if parameter is None:
            continue
        reads.seen.add(id(parameter))
        gathered = [user for user in node.users if op(user) in ("embedding", "index_select")]
        if gathered and len(gathered) == len(node.users):
            facts = value_of(gathered[0])
            rows = math.prod(facts.shape) if isinstance(facts, TensorFacts) else parameter.shape[-1]
            reads.by_path[path] += calls * rows * parameter.element_size() / row.num_tokens
        else:
            reads.by_path[path] += calls * parameter.nbytes


def _parameter(module: nn.Module, node: fx.Node) -> nn.Parameter | None:
    if node.op != "get_attr":
        return None
    owner, _, name = str(node.target).rpartition(".")
    found = getattr(module.get_submodule(owner), name, None)
    return found if isinstance(found, nn.Parameter) else None


def _unseen(path: str, module: nn.Module, model: ModelTrace, reads: _Reads) -> Cost | None:
    """What parameters cost that no recorded operation read."""
    hidden = [p for p in module._parameters.values() if p is not None and id(p) not in reads.seen]
    ran = path in model.traces
    if not hidden or (not ran and model.error is None):
        return None
    chosen = _num_chosen(model.traces[path]) if ran else None
    stacked = [p for p in hidden if chosen is not None and p.dim() > 1]
    total = Cost()
    for parameter in hidden:
        if chosen is not None and any(parameter is other for other in stacked):
            share = min(1.0, chosen / parameter.shape[0])
            is_matrix = parameter.dim() > 2
            total += Cost(share * parameter.nbytes, 2.0 * share * parameter.numel() if is_matrix else 0.0)
        else:
            total += _assumed(module, parameter)
    return total


def _num_chosen(trace: Trace) -> int | None:
    """How many experts a token goes to, where a forward is handed their indices, [T, k]."""
    for argument in trace.arguments.values():
        facts = value_of(argument)
        if isinstance(facts, TensorFacts) and facts.dtype == torch.int64 and len(facts.shape) == 2:
            return facts.shape[1]
    return None


def _assumed(module: nn.Module, parameter: nn.Parameter, share: float = 1.0) -> Cost:
    """A guess from sizes: each matrix is multiplied with once, and a table gives one row."""
    if isinstance(module, nn.Embedding):
        return Cost(share * parameter[0].nbytes, assumed=True)
    flops = 2.0 * share * parameter.numel() if parameter.dim() >= 2 else 0.0
    # Vectors cost next to nothing: sinks and biases that are handed to a seam.
    return Cost(share * parameter.nbytes, flops, assumed=parameter.dim() > 1)


def _by_share(module: nn.Module, share: float, num_parameters: int) -> Cost:
    """What a module costs that a token reaches with this probability."""
    parameters = [p for p in module._parameters.values() if p is not None]
    return sum((_assumed(module, parameter, share) for parameter in parameters), Cost(num_parameters=num_parameters))


def _share_of_list(path: str, root: nn.Module) -> float | None:
    """The share of a list of experts that a token goes to, by the config's numbers; None outside of one."""
    above = _experts_above(path)
    if above is None:
        return None
    experts = root.get_submodule(above)
    config: Any = getattr(root, "config", None)
    counts = (getattr(config, name, None) for name in _CHOSEN)
    chosen = next((count for count in counts if isinstance(count, int)), None)
    if chosen is None or not isinstance(experts, nn.ModuleList):
        return None
    return min(1.0, float(chosen) / len(experts))


def _experts_above(path: str) -> str | None:
    """The path of what holds the experts that a module is one of, or part of."""
    parts = path.split(".")
    return ".".join(parts[: parts.index("experts") + 1]) if "experts" in parts[:-1] else None


# Experts of a token, as configs call them.
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_k")


def _by_class(costs: Mapping[str, Cost], modules: Mapping[str, nn.Module]) -> dict[str, Cost]:
    found: dict[str, Cost] = {}
    for path, cost in costs.items():
        owner = next(p for p in _upwards(path) if not p or not is_layer_of_torch(modules[p]))
        name = type(modules[owner]).__name__
        found[name] = found.get(name, Cost()) + cost
    return {name: cost for name, cost in found.items() if cost != Cost()}


def _upwards(path: str) -> Iterator[str]:
    while path:
        yield path
        path = path.rpartition(".")[0]
    yield ""


def is_layer_of_torch(module: nn.Module) -> bool:
    """Whether a module is one of torch's own: what `torch.fx` would call a leaf, or a container."""
    return type(module).__module__.startswith("torch.nn.")
