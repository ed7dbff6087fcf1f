"""The CPU's attention as a whole: how far bfloat16 and what is split into two are from float64, beside PyTorch.

Every number of it, for every shape and instruction set, is held to a bound in test_kernels.py.
"""

import numpy as np
import pytest
from cases import Attention, AttentionRun, as_float, pairs_of
from engine import error

from vaemem import _core

pytestmark = pytest.mark.core

CASES = [Attention(512, 16, 16), Attention(64, 31, 33)]
BACKENDS = {
    kind: [name for name, usable in _core.backends(*kind) if usable and pairs_of(name, *kind)]
    for kind in (("float32", "high"), ("bfloat16", "highest"))
}


def attend(run):
    """(c, n) of a case's operands."""
    run.run()
    case = run.case
    blocks = as_float(run.x).reshape(case.h, 3, -1, case.w, 16)[:, 0]
    return blocks.transpose(1, 3, 0, 2).reshape(-1, case.n)[: case.c]


def exact(run):
    q, k, v = run.qkv.astype(np.float64).reshape(3, run.case.c, -1)
    s = q.T @ k / np.sqrt(run.case.c)
    p = np.exp(s - s.max(1, keepdims=True))
    return v @ (p / p.sum(1, keepdims=True)).T


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS["float32", "high"])
def test_split(backend, case):
    """A number kept as two bfloat16 is off by 2^-17 of itself at most, and scores are of about 4 here."""
    run = AttentionRun(case, backend, 2, 1, "float32", "high")
    assert error(attend(run), exact(run)) <= 2e-5


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS["bfloat16", "highest"])
def test_bfloat16_is_no_worse_than_pytorch(backend, case):
    torch = pytest.importorskip("torch")
    run = AttentionRun(case, backend, 2, 1, "bfloat16", "highest")
    q, k, v = torch.from_numpy(run.qkv).bfloat16().reshape(3, 1, 1, case.c, case.n).mT.contiguous()
    theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v)[0, 0].T.double().numpy()
    want = exact(run)
    # both round the weights and the result to bfloat16, which is nearly all of either error; sums differ in their order
    assert error(attend(run), want) <= 1.02 * error(theirs, want)
