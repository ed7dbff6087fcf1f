"""The pipelines' phases: each pipeline has a function, and its variables hold tensors as Python's do."""

import vaemem
from vaemem.pipelines.components import PIPELINES
from vaemem.pipelines.phases import PHASES
from vaemem.prediction.held import Variables


def test_each_pipeline_has_its_phases():
    assert {kind.class_name for kind in PIPELINES.values()} == set(PHASES)


def test_a_tensor_goes_with_its_last_variable():
    process = vaemem.SimulatedProcess("T4")
    v = Variables(process)

    def tensor(kib):
        return process.tensor((kib, 512), "float16")

    def held():
        return process.allocated >> 10

    v.x = tensor(1)
    v.y = v.x
    v.x = tensor(2)
    assert held() == 3 and process.peak_allocated >> 10 == 3
    v.x = v.y
    assert held() == 1
    del v.x
    assert held() == 1
    v.y = tensor(4)
    assert held() == 4 and process.peak_allocated >> 10 == 5
    del v.y
    assert held() == 0
