from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from transfuse.models.placement import place_weights

_SMAPS = Path("/proc/self/smaps")


class Net(torch.nn.Module):
    """Tied, odd-sized, empty and low-precision parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(7, 3)
        self.head = torch.nn.Linear(3, 7, bias=False)
        self.head.weight = self.embed.weight
        self.odd = torch.nn.Parameter(torch.randn(5, 1, 3))
        self.none = torch.nn.Parameter(torch.empty(0, 4))
        self.low = torch.nn.Linear(9, 2).bfloat16()


def test_weights_keep_their_values_and_ties() -> None:
    net = Net()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    place_weights(net)
    after = net.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert net.head.weight is net.embed.weight
    assert all(p.data_ptr() % 64 == 0 for p in net.parameters() if p.numel())


def test_parameters_do_not_overlap() -> None:
    net = Net()
    place_weights(net)
    net.odd.data.fill_(7.0)
    assert not (net.embed.weight == 7.0).any() and not (net.low.weight == 7.0).any()


def test_groups_lie_one_after_the_other_in_their_order() -> None:
    # Of odd sizes, so that none of them ends where an aligned address would be.
    net = torch.nn.ModuleDict(
        {name: torch.nn.Linear(3, rows).bfloat16() for name, rows in zip("abcd", (5, 7, 1, 3), strict=True)}
    )
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    groups = [[net[name].weight for name in "dba"], [net[name].bias for name in "ca"]]
    place_weights(net, groups)
    for group in groups:
        assert group[0].data_ptr() % 64 == 0
        for one, following in itertools.pairwise(group):
            assert following.data_ptr() == one.data_ptr() + one.nbytes
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())
    assert net["c"].weight.data_ptr() % 64 == 0, "others are aligned as before"
    assert len({p.data_ptr() for p in net.parameters()}) == 8


def test_a_parameter_of_two_groups_is_placed_once() -> None:
    net = Net()
    place_weights(net, [[net.odd, net.none], [net.none, net.odd]])
    assert len({p.data_ptr() for p in net.parameters() if p.numel()}) == len([p for p in net.parameters() if p.numel()])


@pytest.mark.skipif(
    not _SMAPS.exists() or "VmFlags" not in _SMAPS.read_text(), reason="this system does not tell a mapping's flags"
)
def test_the_system_is_asked_for_huge_pages_of_a_private_mapping() -> None:
    # Whether it has any left to give depends on what else the machine does, so what was asked is what is tested.
    linear = torch.nn.Linear(2048, 4096, bias=False)
    place_weights(linear)
    permissions, flags = _mapping_at(linear.weight.data_ptr())
    assert permissions == "rw-p", "shared memory gets huge pages only where the system was set up for it"
    assert "hg" in flags


def _mapping_at(address: int) -> tuple[str, list[str]]:
    """Permissions and flags of the mapping that holds an address."""
    permissions = ""
    for line in _SMAPS.read_text().splitlines():
        bounds = re.match(r"([0-9a-f]+)-([0-9a-f]+) (\S+) ", line)
        if bounds is not None:
            inside = int(bounds[1], 16) <= address < int(bounds[2], 16)
            permissions = bounds[3] if inside else ""
        elif permissions and line.startswith("VmFlags:"):
            return permissions, line.split()[1:]
    raise AssertionError(f"nothing is mapped at {address:#x}")


def test_a_module_without_parameters_stays() -> None:
    place_weights(torch.nn.ReLU())


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="pages are given up on Linux only")
def test_pages_of_the_file_are_given_up_and_the_file_may_change(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    weight = torch.randn(512, 1024)
    save_file({"weight": weight}, file)
    linear = torch.nn.Linear(1024, 512, bias=False)
    linear.weight.data = load_file(file)["weight"]
    maps = Path("/proc/self/maps")
    assert str(file) in maps.read_text()
    place_weights(linear)
    assert str(file) not in maps.read_text(), "nothing of the file is mapped any more"
    file.write_bytes(b"\0" * file.stat().st_size)
    assert torch.equal(linear.weight, weight)
