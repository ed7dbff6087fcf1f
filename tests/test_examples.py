"""Every public function and class has an example in its docstring, and every example in vaemem runs."""

import doctest
import importlib
import inspect
import pkgutil
import threading

import numpy as np
import pytest

import vaemem

pytestmark = pytest.mark.python

# Of these an example may want one; where it is missing the example is skipped.
OPTIONAL = ("torch", "diffusers", "pandas", "scipy", "matplotlib", "tqdm", "PIL")
# An AutoencoderKL of four levels, as the real ones have: an image is eight times its latent's size.
SMALL = {
    "block_out_channels": [32, 32, 64, 64],
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
    "layers_per_block": 1,
    "latent_channels": 4,
    "norm_num_groups": 8,
    "scaling_factor": 0.18215,
}


def is_there(package):
    try:
        return bool(importlib.import_module(package))
    except ImportError:
        return False


def modules():
    """All of vaemem, except what stays at home, what ComfyUI imports, and what wants a package that is not there."""
    yield vaemem
    without = {"_core", "_cuda", "__main__", "comfyui", "invokeai", *(() if TORCH else ("pytorch",))}
    for module in pkgutil.walk_packages(vaemem.__path__, "vaemem."):
        if not without & set(module.name.split(".")):
            yield importlib.import_module(module.name)


TORCH = is_there("torch")
MODULES = list(modules())
EXAMPLES = [
    test for module in MODULES for test in doctest.DocTestFinder().find(module, module.__name__) if test.examples
]


@pytest.fixture(scope="module")
def names():
    """What an example may use beside the names of its own module."""
    public = {name: getattr(vaemem, name) for name in vaemem.__all__}
    return public | {
        "np": np,
        "threading": threading,
        "vaemem": vaemem,
        "plot": vaemem.plot,
        "vae": vaemem.VAE.random(config=SMALL),
    }


@pytest.mark.parametrize("test", EXAMPLES, ids=lambda test: test.name.removeprefix("vaemem."))
def test_runs(test, names, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # examples write files
    test.globs = test.globs | names
    runner = doctest.DebugRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    try:
        runner.run(test, clear_globs=False)
    except doctest.DocTestFailure as failure:
        pytest.fail(f"{failure.example.source}want {failure.example.want}got {failure.got}", pytrace=False)
    except doctest.UnexpectedException as unexpected:
        error = unexpected.exc_info[1]
        if isinstance(error, ImportError) and not all(map(is_there, OPTIONAL)):
            pytest.skip(str(error))
        raise error from None


def public():
    """(name, object, its class or None) of what users call: functions, classes and their own methods."""
    rooms = [vaemem, *(module for module in MODULES if module.__name__ in ("vaemem.plot", "vaemem.pytorch"))]
    for room in rooms:
        offered = getattr(room, "__all__", [name for name in vars(room) if not name.startswith("_")])
        for name in offered:
            thing = getattr(room, name)
            if not callable(thing) or (isinstance(thing, type) and issubclass(thing, BaseException)):
                continue
            if not thing.__module__.startswith(room.__name__):
                continue  # imported there from a room that is looked at itself
            yield f"{room.__name__}.{name}", thing, None
            kinds = (
                [kind for kind in thing.__mro__ if kind.__module__[:6] == "vaemem"] if isinstance(thing, type) else []
            )
            for own, value in [item for kind in kinds for item in vars(kind).items()]:
                function = value.__func__ if isinstance(value, classmethod | staticmethod) else value
                if inspect.isfunction(function) and not own.startswith("_"):
                    yield f"{room.__name__}.{name}.{own}", function, thing


def has_example(thing, owner):
    """In its own docstring, or by a call in its class's."""
    examples = doctest.DocTestParser().get_examples
    return bool(examples(thing.__doc__ or "")) or (
        owner is not None and any(f".{thing.__name__}(" in example.source for example in examples(owner.__doc__ or ""))
    )


def test_every_public_name_has_an_example():
    found = list(public())
    assert len(found) > 60
    assert [name for name, thing, owner in found if not has_example(thing, owner)] == []
