"""Joins neighbouring ops into one, so that less is written, read again and waited for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from transfuse.program.graph import Graph, TorchOp, View
from transfuse.program.in_place import written_in_place
from transfuse.program.native import ELEMENTWISE, Linear, NativeOp, Norm, PackedWeight, Rotary
from transfuse.program.views import NotNative, as_rows, disjoint, same_elements

Op = NativeOp | TorchOp


def fuse(ops: list[Op], graph: Graph) -> list[Op]:
    """The same computation in fewer ops.

    Numbers change only in that what was rounded between two ops no longer is.
    """
    for join in (_norm_into_rotary, _rotary_into_store, _add_into_linear, _add_into_norm, _norm_into_linear):
        ops = _joined(ops, graph, join)
    return _without_unused(written_in_place(_tables_from_packed(ops), graph), graph)


def _joined(ops: list[Op], graph: Graph, join: Callable[[_Around, int], NativeOp | None]) -> list[Op]:
    """Apply a rule at every op, from the first on: an op that it returns takes the place of two."""
    around = _Around(ops, graph)
    for index in range(len(ops)):
        while (joined := join(around, index)) is not None:
            around.ops[index] = joined
    return [op for op in around.ops if op is not None]


class _Around:
    """The ops of a program while they are being joined; an op that went into a later one is None."""

    def __init__(self, ops: list[Op], graph: Graph) -> None:
        self.ops: list[Op | None] = list(ops)
        self._graph = graph
        self._readers: dict[int, list[int]] = {}
        self._writers: dict[int, list[int]] = {}
        for index, op in enumerate(ops):
            for view in op.reads():
                self._readers.setdefault(view.buffer, []).append(index)
            for view in op.writes():
                self._writers.setdefault(view.buffer, []).append(index)

    def native(self, index: int, kernel: str) -> NativeOp | None:
        """The op, if it is one of this kernel."""
        op = self.ops[index]
        return op if isinstance(op, NativeOp) and op.kernel == kernel else None

    def producer(self, view: View, reader: int) -> int | None:
        """The op before `reader` that alone wrote `view`, all of it, where nothing but `reader` reads it."""
        if self._graph.buffers[view.buffer].kind != "value" or view.buffer == self._graph.output.buffer:
            return None
        writers = self._alive(self._writers, view)
        readers = self._alive(self._readers, view)
        if len(writers) != 1 or set(readers) != {reader} or writers[0] >= reader:
            return None
        return writers[0]

    def _alive(self, table: dict[int, list[int]], region: View) -> list[int]:
        """Ops that still read, or write, part of a region."""
        found = []
        for index in dict.fromkeys(table.get(region.buffer, ())):
            op = self.ops[index]
            views = () if op is None else (op.reads() if table is self._readers else op.writes())
            if not all(disjoint(view, region) for view in views):
                found.append(index)
        return found

    def moves(self, early: int, late: int) -> bool:
        """Whether the op at `early` gives the same when it is done at `late`, and nobody misses it in between."""
        op = self.ops[early]
        assert op is not None
        written = {view.buffer for view in op.writes()}
        read = {view.buffer for view in op.reads()}
        for between in self.ops[early + 1 : late]:
            if between is None:
                continue
            if written & {v.buffer for v in (*between.reads(), *between.writes())}:
                return False
            if read & {view.buffer for view in between.writes()}:
                return False
        return True

    def take(self, early: int, late: int) -> None:
        """Have the op at `early` be part of the one at `late`."""
        op = self.ops[early]
        assert op is not None
        self.ops[early] = None
        for view in op.reads():
            self._readers.setdefault(view.buffer, []).append(late)
        for view in op.writes():
            self._writers.setdefault(view.buffer, []).append(late)


def _changed(op: NativeOp, tensors: dict[int, View | None]) -> NativeOp:
    """A copy of an op with some tensors replaced."""
    views = list(op.tensors)
    for index, view in tensors.items():
        views[index] = view
    return replace(op, tensors=views, ints=list(op.ints), floats=list(op.floats))


def _sources(
    op: NativeOp, around: _Around, index: int, tensors: tuple[int, ...], kernel: str
) -> Iterator[tuple[int, int, NativeOp]]:
    """Tensors of an op that another op of `kernel` wrote for it alone, with that op."""
    for number in tensors:
        view = op.tensors[number]
        if view is None:
            continue
        source = around.producer(view, index)
        found = None if source is None else around.native(source, kernel)
        if source is not None and found is not None and around.moves(source, index):
            yield number, source, found


def _norm_into_rotary(around: _Around, index: int) -> NativeOp | None:
    """Queries and keys that are normed head by head are normed as they are turned."""
    op = around.native(index, "rotary_cache")
    if op is None or op.tensors[Rotary.COS] is None:
        return None
    for number, source, norm in _sources(op, around, index, (Rotary.QUERY, Rotary.KEY), "norm"):
        view, weight, x = op.tensors[number], norm.tensors[Norm.WEIGHT], norm.tensors[Norm.X]
        assert view is not None
        out = norm.tensors[Norm.OUT]
        plain = all(norm.tensors[i] is None for i in (Norm.BIAS, Norm.ADDEND, Norm.SUM_OUT, Norm.GATE))
        slot = Rotary.QUERY_NORM if number == Rotary.QUERY else Rotary.KEY_NORM
        if (
            not plain
            or x is None
            or out is None
            or weight is None
            or len(weight.sizes) != 1
            or op.tensors[slot] is not None
        ):
            continue
        if out.sizes != view.sizes or out.strides != view.strides or out.offset != view.offset or len(x.sizes) != 3:
            continue
        joined = _changed(op, {number: x, slot: weight})
        second = int(number == Rotary.KEY)
        joined.ints[4 + second] = norm.ints[0]
        joined.floats[2 * second : 2 * second + 2] = norm.floats
        around.take(source, index)
        return joined
    return None


def _rotary_into_store(around: _Around, index: int) -> NativeOp | None:
    """Keys go to the cache as they are turned."""
    store = around.native(index, "rotary_cache")
    if store is None or store.tensors[Rotary.KEY_CACHE] is None or store.tensors[Rotary.COS] is not None:
        return None
    for _, source, turn in _sources(store, around, index, (Rotary.KEY,), "rotary_cache"):
        key, out = store.tensors[Rotary.KEY], turn.tensors[Rotary.KEY_OUT]
        assert key is not None
        if out is None or out != key or turn.tensors[Rotary.KEY_CACHE] is not None:
            continue
        taken = {i: store.tensors[i] for i in (Rotary.VALUE, Rotary.KEY_CACHE, Rotary.VALUE_CACHE, Rotary.SLOTS)}
        around.take(source, index)
        return _changed(turn, {**taken, Rotary.KEY_OUT: None})
    return None


def _add_into_linear(around: _Around, index: int) -> NativeOp | None:
    """A product's sum with a residual is taken before it is written."""
    add = around.native(index, "elementwise")
    if add is None or add.ints[0] != ELEMENTWISE["add"] or add.floats[0] != 1.0:
        return None
    for number, source, product in _sources(add, around, index, (0, 1), "linear"):
        view, other, out = add.tensors[number], add.tensors[1 - number], add.tensors[2]
        product_out = product.tensors[Linear.OUT]
        assert view is not None and out is not None and product_out is not None
        if other is None or product.tensors[Linear.RESIDUAL] is not None or not same_elements(product_out, view):
            continue
        try:
            residual, total = (_shaped(v, product_out) for v in (other, out))
        except NotNative:
            continue
        joined = _changed(product, {Linear.RESIDUAL: residual, Linear.OUT: total})
        if not _is_apart(joined):
            continue
        around.take(source, index)
        return joined
    return None


def _is_apart(product: NativeOp) -> bool:
    """Whether a product writes nothing that other threads may still read; each residual is read as it is replaced."""
    residual, out = product.tensors[Linear.RESIDUAL], product.tensors[Linear.OUT]
    assert out is not None
    read = [view for view in product.reads() if view is not residual]
    total = product.tensors[Linear.SUM_OUT]
    if total is not None and residual is not None:
        read.append(residual)
    if residual is not None and not disjoint(out, residual) and out != residual:
        return False
    return all(disjoint(written, view) for written in product.writes() for view in read)


def _shaped(view: View, model: View) -> View:
    """A view of as many elements with the sizes [rows, columns] of another."""
    if view.sizes == model.sizes and view.strides[-1].is_number(1):
        return view
    columns = model.sizes[-1]
    if len(view.sizes) == 1 and view.strides[0].is_number(1):
        # All elements one after the other.
        if model.sizes[0].times(columns) == view.sizes[0]:
            return replace(view, sizes=model.sizes, strides=(columns, view.strides[0]))
        raise NotNative("other rows")
    rows = as_rows(view)
    if rows.sizes != model.sizes:
        raise NotNative("other rows")
    return rows


def _add_into_norm(around: _Around, index: int) -> NativeOp | None:
    """A sum is normed as it is taken."""
    norm = around.native(index, "norm")
    if norm is None or norm.tensors[Norm.ADDEND] is not None or norm.tensors[Norm.GATE] is not None:
        return None
    x = norm.tensors[Norm.X]
    assert x is not None
    writer = _last_writer(around, x, index)
    add = None if writer is None else around.native(writer, "elementwise")
    if writer is None or add is None or add.ints[0] != ELEMENTWISE["add"] or add.floats[0] != 1.0:
        return None
    a, b, total = add.tensors
    assert a is not None and total is not None
    if b is None or not same_elements(total, x) or not around.moves(writer, index):
        return None
    try:
        if len(x.sizes) > 2:
            raise NotNative("heads")
        a, b, total = (_shaped(v, x) for v in (a, b, total))
    except NotNative:
        return None
    if a.dtype != total.dtype or b.dtype != total.dtype:
        return None
    around.take(writer, index)
    return _changed(norm, {Norm.X: a, Norm.ADDEND: b, Norm.SUM_OUT: total})


def _last_writer(around: _Around, view: View, reader: int) -> int | None:
    for index in range(reader - 1, -1, -1):
        op = around.ops[index]
        if op is not None and any(v.buffer == view.buffer for v in op.writes()):
            return index
    return None


_NORM_IN_LINEAR = {
    Linear.X: Norm.X,
    Linear.ADDEND: Norm.ADDEND,
    Linear.SUM_OUT: Norm.SUM_OUT,
    Linear.NORMED: Norm.OUT,
}


def _norm_into_linear(around: _Around, index: int) -> NativeOp | None:
    """Rows that only one product reads are normed as it begins."""
    product = around.native(index, "linear")
    if product is None or product.ints[4]:
        return None
    for _, source, norm in _sources(product, around, index, (Linear.X,), "norm"):
        x, view, out = norm.tensors[Norm.X], product.tensors[Linear.X], norm.tensors[Norm.OUT]
        weights = (norm.tensors[Norm.WEIGHT], norm.tensors[Norm.BIAS])
        if (
            x is None
            or view is None
            or out is None
            or not same_elements(out, view)
            or norm.tensors[Norm.GATE] is not None
        ):
            continue
        if len(x.sizes) > 2 or any(w is not None and len(w.sizes) != 1 for w in weights):
            continue
        try:
            rows = {
                target: None if (found := norm.tensors[number]) is None else as_rows(found)
                for target, number in _NORM_IN_LINEAR.items()
            }
        except NotNative:
            continue
        joined = _changed(product, {**rows, Linear.NORM_WEIGHT: weights[0], Linear.NORM_BIAS: weights[1]})
        joined.ints[4] = norm.ints[0]
        joined.floats[:2] = norm.floats
        if not _is_apart(joined):
            continue
        around.take(source, index)
        return joined
    return None


def _tables_from_packed(ops: list[Op]) -> list[Op]:
    """A table that is also the weight of a product, as embeddings often are, is read from the packed weight."""
    packed = {op.weight.view: op.weight for op in ops if isinstance(op, NativeOp) and op.weight and not op.weight.glu}
    return [_from_packed(op, packed) if isinstance(op, NativeOp) else op for op in ops]


def _from_packed(op: NativeOp, packed: Mapping[View, PackedWeight]) -> NativeOp:
    table = op.tensors[0]
    if op.kernel != "gather_rows" or table is None or table not in packed:
        return op
    rows, columns = (size.constant for size in table.sizes)
    ints = [1, rows, columns, op.ints[3]]
    return replace(op, tensors=[None, *op.tensors[1:]], ints=ints, weight=packed[table], weight_index=0)


def _without_unused(ops: list[Op], graph: Graph) -> list[Op]:
    """Without ops that write only what nobody reads."""
    needed = {graph.output.buffer}
    kept: list[Op] = []
    for op in reversed(ops):
        written = [view.buffer for view in op.writes()]
        lasting = any(graph.buffers[b].kind != "value" or b in needed for b in written)
        if lasting or not written:
            kept.append(op)
            needed.update(view.buffer for view in op.reads())
    return kept[::-1]
