/* Programs read from any text, and played with any sizes: what they take is a trace that can be run. */
#include "../../csrc/predict/modules/program.h"
#include "input.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    input in = {data, data + size};
    const uint64_t how = take(&in, 1);
    vm_program_call call = {.dtype = how % 4 % 3, .gpu = {(int)take(&in, 1), 1 + (int)take(&in, 1)}};
    for (size_t i = 0; i < 4; i++) call.value[i] = (int64_t)number(&in);
    const vm_passing passing[] = {{"", "", "bias", 8, VM_BY_ACCELERATE, 0, 0, 0},
                                  {"a", "a", "copy", 16, VM_BY_NONE, 2, 3, 1},
                                  {"a", "a.b", "weight", number(&in), VM_BY_DIFFUSERS, 0, 0, 0},
                                  {"a.b", "a.b", "weight", 9, VM_BY_ACCELERATE, 0, 0, 0}};
    if (how & 4) call.passing = (vm_passings){4, passing};
    char *text = calloc(1, (size_t)(in.end - in.at) + 1);
    memcpy(text, in.at, (size_t)(in.end - in.at));
    vm_program *p;
    const vm_status s = vm_program_read(text, &p);
    free(text);
    CHECK((s == VM_OK) == (p != NULL));
    if (s) return 0;
    vm_trace *t;
    if (!vm_program_trace(p, &call, &t))
        for (size_t i = 0; i < t->steps; i++) CHECK(t->step[i].op != VM_TRACE_GIVE || t->step[i].id < t->ids);
    vm_trace_free(t);
    vm_program_free(p);
    return 0;
}
