"""The CPU's attention in every kind of numbers, beside float64 and beside PyTorch."""

import math

import ml_dtypes
import numpy as np
import pytest
from engine import error, to_rows, up16

from vaemem import _core

# dtype of rows and precision, and the largest relative error (Frobenius) against float64 of the same rows. Rounding the
# result alone is off by 2^-11 or 2^-8 at most, by 0.4 of that at random. Products of bfloat16 round each weight, at
# "medium" q, k and v too, by 2^-9 at most (an error of q or k changes a score by about as much of its size, which is 1
# here, and e^x makes that a share of the weight). A number split into two is kept to 2^-17.
KINDS = {
    ("float16", "highest"): 2**-11,
    ("bfloat16", "highest"): 2**-8,
    ("float32", "high"): 2e-5,
    ("float32", "medium"): 2**-7,
}
BACKENDS = [(*kind, name) for kind in KINDS for name, usable in _core.backends(*kind) if usable]
SHAPES = [  # one key; fewer than a vector; a channel block without neighbour, many runs, rows that end within 16 keys
    (16, 1, 1),
    (24, 3, 5),
    (80, 13, 13),
    (64, 2, 300),
    (512, 5, 13),
    (16, 35, 45),
]
GUARD = 64


def stored(x, dtype):
    """As rows of that type keep it."""
    return x.astype(ml_dtypes.bfloat16).view(np.uint16) if dtype == "bfloat16" else x.astype(dtype)


def value(x):
    return (x.view(ml_dtypes.bfloat16) if x.dtype == np.uint16 else x).astype(np.float32)


def random_qkv(shape, dtype):
    """(3, c, h, w) of numbers that rows of that type hold."""
    return value(stored(np.random.default_rng(math.prod(shape)).standard_normal((3, *shape), np.float32), dtype))


def attend(backend, dtype, precision, qkv, threads):
    """(c, h, w), one head."""
    _, c, h, w = qkv.shape
    rows = stored(np.concatenate([to_rows(t) for t in qkv], 1), dtype)
    shapes = (3 * up16(c), h, w, c, h, w)
    floats, _ = _core.kernel_needs(backend, threads, "attention", shapes, (1, 1, False), dtype, precision)
    scratch, x = np.full(floats + 2 * GUARD, np.nan, np.float32), np.full(rows.size + 2 * GUARD, 123, rows.dtype)
    x[GUARD:-GUARD] = rows.ravel()
    unused = np.zeros(rows.size, rows.dtype)
    how, arrays = (1, 1, False, False, 0, 0.0), (x[GUARD:-GUARD], unused, *[None] * 7, scratch[GUARD:-GUARD])
    _core.kernel_pass(backend, threads, "attention", shapes, how, arrays, dtype, precision)
    assert np.isnan(scratch[:GUARD]).all() and np.isnan(scratch[-GUARD:]).all()
    assert (x[:GUARD] == 123).all() and (x[-GUARD:] == 123).all()
    got = x[GUARD:-GUARD].reshape(h, 3, -1, w, 16)
    assert np.array_equal(got[:, 1:], rows.reshape(got.shape)[:, 1:]), "keys and values were written"
    return value(got[:, 0].transpose(1, 3, 0, 2).reshape(-1, h, w)[:c])


def exact(qkv):
    q, k, v = qkv.astype(np.float64).reshape(3, qkv.shape[1], -1)
    s = q.T @ k / np.sqrt(len(q))
    p = np.exp(s - s.max(1, keepdims=True))
    return (v @ (p / p.sum(1, keepdims=True)).T).reshape(qkv.shape[1:])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype,precision,backend", BACKENDS)
def test_numbers(dtype, precision, backend, shape):
    qkv = random_qkv(shape, dtype)
    got = attend(backend, dtype, precision, qkv, 1)
    assert error(got, exact(qkv)) <= KINDS[dtype, precision]
    assert np.array_equal(got, attend(backend, dtype, precision, qkv, 3)), "threads changed the result"


@pytest.mark.parametrize("shape", [(512, 16, 16), (64, 31, 33)], ids=str)
@pytest.mark.parametrize("dtype,precision,backend", [b for b in BACKENDS if b[0] == "bfloat16"])
def test_no_worse_than_pytorch(dtype, precision, backend, shape):
    torch = pytest.importorskip("torch")
    qkv = random_qkv(shape, dtype)
    want = exact(qkv)
    tensors = torch.from_numpy(qkv).bfloat16().reshape(3, 1, 1, shape[0], -1).mT.contiguous()
    theirs = torch.nn.functional.scaled_dot_product_attention(*tensors).double().mT.reshape(shape).numpy()
    ours = attend(backend, dtype, precision, qkv, 2)
    # both round the weights and the result to bfloat16, which is nearly all of either error; sums differ in their order
    assert error(ours, want) <= 1.02 * error(theirs, want)
