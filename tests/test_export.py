"""Programs that torch.export saves, in other processes."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megasoftmax.build import library
from megasoftmax.ops import registration

SAVE = """
import sys
import torch
import megasoftmax
from processes import let_ops_serve_cpus

path, device = sys.argv[1:]

class Model(torch.nn.Module):
    def forward(self, query, mask):
        options = {"mask": mask, "fused": through_ops}
        attended = megasoftmax.attention(query, query.sin(), query.cos(), **options)
        scores = query @ query.mT
        probabilities = megasoftmax.softmax(scores, causal=True, **options)
        of_columns = megasoftmax.softmax(scores, dim=1, fused=through_ops)
        largest, indices = megasoftmax.softmax_topk(scores, 2, **options)
        return attended, probabilities, of_columns, largest, indices

torch.manual_seed(0)
dtype = torch.float32 if device == "cpu" else torch.bfloat16
inputs = (torch.randn(2, 3, 5, 8, dtype=dtype).to(device), torch.rand(2, 1, 5, 5).to(device) < 0.3)
for through_ops in (False, True):
    if through_ops and device == "cpu":
        let_ops_serve_cpus(setattr)
    program = torch.export.export(Model(), inputs)
    torch.export.save(program, f"{path}/{through_ops}.pt2")
    torch.save((inputs, Model()(*inputs)), f"{path}/{through_ops}.pt")
    print(*(node.target for node in program.graph.nodes if "megasoftmax" in str(node.target)))
"""

LOAD = """
import sys
import torch

for name in sys.argv[1:]:
    program = torch.export.load(f"{name}.pt2")
    inputs, expected = torch.load(f"{name}.pt")
    torch.testing.assert_close(program.module()(*inputs), expected)
    if "megasoftmax" in sys.modules:
        print(sys.modules["megasoftmax"].build.library._loaded is not None)
"""

OPS = ("attention", "softmax", "softmax_columns", "softmax_topk")  # in the program


def test_saved_and_loaded(device, tmp_path, forks):
    """The process that loads programs imports the package, and calls none of its functions."""
    run = partial(forks.run, cwd=Path(__file__).parent)
    saved = run(SAVE, tmp_path, device)
    assert saved.returncode == 0, saved.stderr
    in_plain_torch, through_ops = saved.stdout.splitlines()
    assert not in_plain_torch
    assert set(through_ops.split()) == {f"megasoftmax.{name}_forward.default" for name in OPS}
    loaded = run("import megasoftmax\n" + LOAD, tmp_path / "False", tmp_path / "True")
    assert loaded.returncode == 0, loaded.stderr
    assert loaded.stdout.split() == ["False", str(device == "cuda")]  # kernels are loaded
    forgotten = run(LOAD, tmp_path / "True")  # torch names what is missing
    assert forgotten.returncode != 0
    assert "Please import the custom op" in forgotten.stderr
    assert "torch.ops.megasoftmax." in forgotten.stderr


@pytest.mark.parametrize("available", [False, True])
def test_ops_load_the_kernels(available, monkeypatch):
    """With the first CUDA tensor; without kernels the reference computes."""
    loads, implementations = [], {}
    status = library.Status(available, reason="none")
    monkeypatch.setattr(library, "load", lambda: loads.append(1) or status)
    owner = SimpleNamespace(impl=lambda op, function, key: implementations.update({key: function}))
    monkeypatch.setattr(registration, "_library", owner)
    registration.implement(lambda tensor, number: ("op", number), lambda *args: ("plain", args[1]))
    (compute,) = implementations.values()
    assert compute(torch.zeros(1), 2) == ("plain", 2)
    assert not loads
    assert compute(SimpleNamespace(is_cuda=True), 3) == ("op" if available else "plain", 3)
    assert len(loads) == 1
