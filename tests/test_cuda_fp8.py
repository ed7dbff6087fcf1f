"""Convolutions of e4m3 (precision="fp8"), run by the emulator, compared with float64 of the same rounded factors.

With the terms of test_cuda_own_conv.py, and p = w * f(x) of rounded factors:

- the tensor cores cut off 33 numbers and their sum, four times for every 128 channels at a tap, below 2^-13 of the
  largest of them. That is at most 4 * sqrt(sum p^2) of the 128 if signs are random. The errors have random signs too:
                                                                4 * sqrt(4 * 34) * 2^-13 * 4 * sqrt(sum p^2)
- f is computed in the kernel with the errors that test_cuda_own_conv.py lists, so that near the middle of two numbers
  of e4m3 it may become the other one:                          sum |w| * (the distance of the two, if it may)
- the other sums, bias, add and the result's rounding: as there.
"""

import gpu
import ml_dtypes
import numpy as np
import pytest
from cases import CONVS, small
from cuda_kernels import ROWS, SILU, SM_90, E, built, emulated, header, number
from emulator import build
from engine import error, latents, small_vae
from errors import refused
from test_cuda_own_conv import SIZES, WGMMA, Case, Conv, check, check_stats, every_dtype, in_blocks, outs
from test_emulator import launch

E4M3 = ml_dtypes.float8_e4m3fn
LARGEST = 448
CUT = 2.0**-13
kernels = built("conv_wgmma")
probes = built("probe", of=build.HERE)
every_tile = pytest.mark.parametrize("tile", WGMMA, ids=["128", "96"])


def rounded(v):
    """To e4m3, as float64; more than 448 becomes 448."""
    return np.clip(v, -LARGEST, LARGEST).astype(np.float32).astype(E4M3).astype(np.float64)


class Fp8(Case):
    """A case with filters of e4m3 and their scales."""

    def __init__(self, *args, **how):
        super().__init__(*args, **how)
        self.set_filters(self.w)

    def set_filters(self, w):
        w = w.astype(np.float32)
        largest = np.abs(w).max((0, 2, 3, 4))
        self.w_scale = np.exp2(np.ceil(np.log2(np.where(largest, largest, LARGEST) / LARGEST))).astype(np.float32)
        scale = self.w_scale[:, None, None, None]
        self.factors = (w / scale).astype(E4M3)
        self.w = self.factors.astype(np.float32) * scale

    def packed(self, blocked):
        assert blocked
        return in_blocks(self.factors.view(np.uint16))

    def exact(self):
        t, f = self.loaded()
        error = 32 * E * (np.abs(t) + np.abs(f)) + (SILU[self.dtype] * np.abs(t) if self.silu else 0)
        other = np.abs(rounded(f + error) - rounded(f - error))
        f = rounded(f)
        w = self.w.astype(np.float64) * self.multiply
        bias = self.bias.astype(np.float64) * self.bias_scale
        y = self.sum_over(f, w) + bias
        size, terms = self.sum_over(np.abs(f), np.abs(w)), self.k**2 * self.x.shape[2]
        tolerance = 4 * terms**0.5 * E * size + 4 * E * np.abs(bias) + self.sum_over(other, np.abs(w))
        tolerance += 16 * (4 * 34) ** 0.5 * CUT * np.sqrt(self.sum_over(f**2, w**2))
        if self.add is not None:
            y = y + self.add.astype(np.float64)
            tolerance = tolerance + 4 * E * np.abs(self.add.astype(np.float64))
        return y, tolerance


@pytest.fixture(scope="module")
def conv(kernels):
    return Conv(kernels)


# ---- the format, and the emulator's sums ----


def test_rounding():
    """Every number of 16 bits of fraction around each number of e4m3, as the host rounds; ties go to the even one."""
    numbers = np.arange(0x7F, dtype=np.uint8).view(E4M3).astype(np.float32)
    between = (numbers[:-1] + numbers[1:]) / 2
    v = np.concatenate(
        [numbers, between, np.nextafter(between, 0), np.nextafter(between, 1e9), [449, 464, 1e9, np.inf]]
    )
    v = np.concatenate([v, -v]).astype(np.float32)
    got = np.array([header().to_e4m3(x) for x in v], np.uint8)
    want = np.clip(v, -LARGEST, LARGEST).astype(E4M3).view(np.uint8)
    np.testing.assert_array_equal(got, want)
    assert np.isnan(np.uint8(header().to_e4m3(np.nan)).view(E4M3))


def in_planes(m):
    """A matrix of e4m3, (rows, columns), in planes of 16 columns."""
    return np.ascontiguousarray(m.view(np.uint8).reshape(len(m), -1, 16).transpose(1, 0, 2)).reshape(-1)


def multiplied(probes, a, b, seed=1):
    n = a.shape[1] // 32
    in_ = np.concatenate([in_planes(a), in_planes(b)])
    out = np.zeros((64, 128), np.float32)
    return launch(probes, "products_e4m3", in_, out, n=n, block=(128,), shared=in_.size, seed=seed)


def exponent(v):
    return np.where(v == 0, -1000, np.frexp(v)[1] - 1)


def short_sums(a, b):
    """a b^T as the tensor cores sum it, 32 products at a time, by the rule in device.h."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    d = np.zeros((len(a), len(b)))
    for k in range(0, a.shape[1], 32):
        x, y = a[:, None, k : k + 32], b[None, :, k : k + 32]
        top = np.maximum((exponent(x) + exponent(y)).max(2), exponent(d))
        quantum = np.exp2(np.maximum(top, -1000) - 13)
        d = (np.trunc(d / quantum) + np.trunc(x * y / quantum[..., None]).sum(2)) * quantum
        quantum = np.exp2(exponent(d) - 13.0)
        d = np.trunc(d / quantum) * quantum
    return d


@pytest.mark.parametrize("n,seed", [(1, 1), (4, 2), (9, 3)])
def test_short_sums(probes, n, seed):
    """The emulator's bits; a GPU's if it cuts off as measured."""
    rng = np.random.default_rng(seed)
    a, b = (rng.standard_normal((rows, 32 * n)) * np.exp2(rng.integers(-7, 4, (rows, 32 * n))) for rows in (64, 128))
    a, b = a.astype(E4M3), b.astype(E4M3)
    got, want = multiplied(probes, a, b, seed), short_sums(a, b)
    np.testing.assert_array_equal(got, want)
    assert (want != a.astype(np.float64) @ b.astype(np.float64).T).any()


def test_products_of_nan(probes):
    a, b = np.ones((64, 32), E4M3), np.ones((128, 32), E4M3)
    a[3, 5] = np.nan
    got = multiplied(probes, a, b)
    assert np.isnan(got[3]).all() and (np.delete(got, 3, 0) == 32).all()


# ---- the convolution ----

CASES = [(tile, k, up, size) for tile in WGMMA for k, up in ((3, False), (1, False), (3, True)) for size in SIZES]


@pytest.mark.one_in(4)
@every_dtype
@pytest.mark.parametrize("tile,k,up,size", CASES, ids=lambda v: str(v).replace(" ", ""))
def test_numbers(conv, dtype, tile, k, up, size):
    """Run every filter at every size of the image. Channels and fused operations change from case to case."""
    turn = CASES.index((tile, k, up, size)) * 2 + (dtype == "bf16")
    case = Fp8(
        dtype, *size, [16, 144, 160, 96, 48][turn % 5], outs(tile, [16, 130, 40, 3, 128][turn // 2 % 5]),
        k=k, up=up, norm=turn % 4 != 3, silu=turn % 4 in (0, 1), add=turn % 3 != 0, stats=turn % 8 < 5,
        multiply=[1, 0.25, 0.3][turn % 3], bias_scale=[1, 0.25, 2][turn % 3], seed=turn,
    )  # fmt: skip
    check(case, conv(case, tile, wider=[0, 16, 8][turn % 3], add_is_y=turn % 2 == 1, seed=turn + 1), tile)


@pytest.mark.each_value
@every_dtype
@pytest.mark.parametrize("shape", [s for s in small(CONVS) if s.k == 3 and s.stride == 1 and not s.tiny], ids=str)
def test_shapes(conv, dtype, shape):
    """By the tile that is chosen: e4m3 has no others."""
    norm = shape.groups > 0
    case = Fp8(dtype, shape.h, shape.w, shape.in_c, shape.out_c, up=shape.up, norm=norm, silu=norm, add=bool(shape.add),
               stats=True)  # fmt: skip
    chosen = header().conv_choose(number(dtype), case.args(blocked=True, fp8=True), False, SM_90, 132)
    assert chosen.name in WGMMA
    check(case, conv(case, chosen.name, add_is_y=shape.add == "in place"), chosen.name)


def test_only_wgmma_multiplies_e4m3():
    case = Fp8("bf16", 16, 16, 64, 128)
    chosen = header().conv_choose(number("bf16"), case.args(blocked=True, fp8=True), False, SM_90 // 2, 132)
    assert chosen.rows == 0  # no other tile stands in where the kernel has too little shared memory
    for_pixels = Fp8("bf16", 16, 16, 64, 3, format=1).args(blocked=True, fp8=True)
    assert for_pixels.format != ROWS
    assert header().conv_choose(number("bf16"), for_pixels, False, SM_90, 132).rows == 0


@every_dtype
@every_tile
def test_everything_at_once(conv, dtype, tile):
    """Over two tiles each way, and more chunks than buffers, the last with a single block."""
    case = Fp8(dtype, 17, 17, 272, outs(tile, 144), norm=True, silu=True, add=True, stats=True)
    check(case, conv(case, tile, wider=16, add_is_y=True, grid=3), tile)


@pytest.mark.each_value
@every_dtype
@every_tile
@pytest.mark.parametrize("in_c", [96, 272])
def test_factors_of_pixels(conv, dtype, tile, in_c):
    case = Fp8(dtype, 17, 17, in_c, outs(tile, 48), norm=True, pixels=True, silu=in_c == 96, seed=in_c)
    check(case, conv(case, tile, wider=16, grid=3), tile)


@every_dtype
@every_tile
def test_exact(conv, dtype, tile):
    """Numbers that make the sums exact: not a bit is off."""
    case = Fp8(dtype, 32, 16, 48, outs(tile, 32), stats=True)
    rng = np.random.default_rng(5)
    case.x[...] = rng.integers(-1, 2, case.x.shape)
    case.set_filters(rng.integers(-1, 2, case.w.shape))
    case.bias[...] = rng.integers(-8, 9, case.bias.shape)
    got = conv(case, tile)
    assert (got.y == case.exact()[0].astype(case.type)).all()
    check_stats(case, got, tile)


def ones(in_c=512, k=3):
    """All products are 1.125: 128 of them fit the short sums, thousands do not."""
    case = Fp8("f16", 3, 3, in_c, 128, k=k)
    case.x[...] = 1.125
    case.set_filters(np.ones(case.w.shape))
    case.bias[...] = 0
    return case


def test_sums_move_to_float(conv, probes):
    got = conv(ones(), WGMMA[0])
    assert got.y[1, 1, 0] == 9 * 512 * 1.125
    a, b = np.full((64, 1152), 1.125, E4M3), np.ones((128, 1152), E4M3)
    assert (multiplied(probes, a[:, :128], b[:, :128]) == 144).all()
    a[:, 1] = 0.5625  # the 14 bits are too few for this sum
    assert (multiplied(probes, a, b) != 1151 * 1.125 + 0.5625).all()


@emulated
@pytest.mark.thorough
def test_a_kernel_that_keeps_short_sums_is_seen(tmp_path):
    """The same kernel, but its sums never move to float."""
    source = (build.CUDA / "conv_wgmma.cu").read_text()
    number = "d[i % 4 / 2][i / 4][half * 2 + i % 2]"
    faults = {
        "float sum[S::N][4];\n": "float sum[S::N][4];\n"
        f"for (int i = 0; i < 4 * S::N; i++) sum[i / 4][i % 4] = {number};\n",
        "vm_wgmma_e4m3<S::N, false>": "vm_wgmma_e4m3<S::N, true>",
        f"{number} += ": f"{number} = ",
    }
    for right, wrong in faults.items():
        assert source.count(right) == 1
        source = source.replace(right, wrong)
    planted = tmp_path / "conv_wgmma.cu"
    planted.write_text(source)
    got = Conv(build.Kernels([planted]))(ones(), WGMMA[0])
    assert got.y[1, 1, 0] < 5000 < 9 * 512 * 1.125


def test_large_numbers_become_the_largest(conv):
    case = Fp8("bf16", 4, 4, 16, 128, norm=True)
    case.scale[...] = 1000
    assert np.abs(case.loaded()[1]).max() > LARGEST
    check(case, conv(case, WGMMA[0]), WGMMA[0])


@every_dtype
@every_tile
@pytest.mark.parametrize("silu", [False, True])
def test_nan_spoils_what_sees_it(conv, dtype, tile, silu):
    case = Fp8(dtype, 20, 20, 32, outs(tile, 16), norm=True, silu=silu)
    clean = conv(case, tile)
    case.x[7, 16, 20] = np.nan
    got = conv(case, tile)
    rows, columns = np.arange(20)[:, None], np.arange(20)
    sees = (np.abs(rows - 7) <= 1) & (np.abs(columns - 16) <= 1)
    assert clean.flags == 0 and got.flags == 1
    assert np.isnan(got.y[sees].astype(np.float32)).all()
    assert got.y[~sees].tobytes() == clean.y[~sees].tobytes()


@every_dtype
@every_tile
def test_rings(conv, dtype, tile):
    """A slab in rings gives the bits of the whole pass."""
    case = Fp8(dtype, 79, 5, 16, outs(tile, 24), norm=True, add=True, stats=True)
    whole = conv(case, tile)
    check(case, whole, tile)
    got = conv(case, tile, slab=(2, 2), rings=(35, 47, 33))
    assert (got.y == whole.y[32:64]).all()
    made = slice(*(n * len(whole.parts) // 5 for n in (2, 4)))
    assert (got.parts[made] == whole.parts[made]).all()


@every_tile
def test_same_bits(conv, tile):
    """Whoever comes first, and however many blocks there are."""
    case = Fp8("bf16", 32, 17, 144, outs(tile, 40), norm=True, silu=True, add=True, stats=True)
    runs = [conv(case, tile, seed=seed + 1, grid=grid) for seed, grid in enumerate([1, 2, 3, 5, 99])]
    assert len({run.y.tobytes() + run.parts.tobytes() for run in runs}) == 1


# ---- whole runs ----

FP8 = {"device": "cuda", "dtype": "bfloat16", "precision": "fp8"}
on_9_0 = pytest.mark.usefixtures("compute_capability_9_0")


@pytest.fixture
def compute_capability_9_0(monkeypatch):
    gpu.go(monkeypatch)
    monkeypatch.setenv("VAEMEM_EMULATED_SM", "90")


@on_9_0
@pytest.mark.parametrize("name", ["sd", "qwen"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_decode(name, dtype):
    """A rounding is 2^-4 at most, and 2^-4 / sqrt(3) as a rule. Errors of x and filters in n passes have random signs:
    2^-4 * sqrt(2 n / 3)."""
    cpu, there = small_vae(name, parts="decoder"), small_vae(name, **FP8 | {"dtype": dtype}, parts="decoder")
    limit = 2.0**-4 * (2 * there._runner.device.backend.fp8_weights / 3) ** 0.5
    assert there.precision == "fp8" and 0.1 < limit < 0.3
    z = latents(cpu, 9, 5)
    assert gpu.LIMIT["bfloat16"] < error(there.decode(z), cpu.decode(z)) < limit
    assert there.last_run.peak_bytes == there.estimate("decode", 36, 20).peak_bytes


@on_9_0
@pytest.mark.parametrize(
    "name,how,argument",
    [
        ("sd", {"device": "cpu"}, "precision"),
        ("sd", {"dtype": "float32"}, "precision"),
        ("sd", {"convolution": "cudnn"}, "convolution"),
        ("sd", {"autotune": True}, "precision"),
        ("tiny", {}, "precision"),
    ],
)
def test_refused_elsewhere(name, how, argument):
    with refused(argument):
        small_vae(name, **FP8 | how)


def test_refused_on_other_gpus(monkeypatch):
    gpu.go(monkeypatch)
    monkeypatch.setenv("VAEMEM_EMULATED_SM", "80")
    with refused("precision"):
        small_vae("sd", **FP8)
