/* Asks cuDNN which plan PyTorch would run, on a device that need not exist (ask_cudnn.py calls it).
 *
 *   for mode in instant, fallback:        PyTorch's order (aten/src/ATen/native/cudnn/Conv_v8.cpp)
 *       heuristics(graph, device) -> configurations, best first
 *       skip configurations that PyTorch's filter refuses; answer with the first that finalises as a plan
 *
 * cuDNN 9.8 and later take a description of a device in place of a device. No handle is made, so neither a driver nor a
 * device is needed. */
#include <string.h>

#include "../../kernels/cudnn/cudnn_api.h"

enum { FIRST_VERSION = 90800 }; /* the first that answers without a device */

/* The plan that PyTorch would run. */
typedef struct vm_conv_plan {
    bool found;    /* false: no engine takes this convolution on this device; the rest is then zero */
    int64_t bytes; /* of workspace */
    int64_t least; /* with `every`: the fewest bytes that this plan or a later one needs */
    int rank;      /* of its configuration in the heuristics' list; the fallback list counts on after it */
    int untried;   /* earlier ones that compile at run time: they need the driver, and a real device may run them */
    bool fallback; /* it comes from the fallback list */
    char name[VM_ENGINE_NAME]; /* "eng1_k2=3_k5=0": engine and knobs */
} vm_conv_plan;

/* Returns: VM_EDEVICE if there is no cuDNN that answers without a device. *version: such as 91002. */
vm_status vm_ask_open(const char *path, vm_cudnn **out, size_t *version) {
    const vm_status status = vm_cudnn_open(path, FIRST_VERSION, out);
    if (!status) *version = (*out)->version;
    return status;
}

/* Numerical notes that PyTorch's filterEngineConfigs refuses, not deterministic. */
static uint32_t bad_notes(const vm_conv *conv) {
    return 1u << NOTE_DOWN_CONVERT_INPUTS | (conv->dtype == VM_F32 && !conv->tf32 ? 1u << NOTE_TENSOR_CORE : 0);
}

/* Takes a configuration as the plan, or as a later one, if it passes PyTorch's filter and finalises. */
static void try_config(vm_cudnn *c, desc device, desc config, const vm_conv *conv, vm_conv_plan *out) {
    const vm_cudnn_plan made = vm_cudnn_try(c, config, bad_notes(conv), device, NULL);
    if (made.plan) c->destroy(made.plan);
    if (out->found) {
        if (made.plan) out->least = VM_MIN(out->least, made.bytes);
        return;
    }
    out->untried += made.compiles;
    out->rank += !made.plan;
    if (!made.plan) return;
    out->found = true;
    out->bytes = out->least = made.bytes;
    memcpy(out->name, made.name, sizeof made.name);
}

/* Walks one list of the heuristics to the first plan, or to its end with `every`. */
static void walk(vm_cudnn_question *q, desc graph, desc device, int mode, const vm_conv *conv, bool every,
                 vm_conv_plan *out) {
    desc config[MAX_CONFIGS];
    const int64_t count = vm_cudnn_configs(q, graph, device, mode, config);
    for (int64_t i = 0; i < count; i++) {
        if (!out->found || every) try_config(q->c, device, config[i], conv, out);
        q->c->destroy(config[i]);
    }
}

/* every: also looks at the plans that PyTorch tries next if it cannot have this one's workspace. device_json: cuDNN's
 * device properties (vaemem/data/gpus.json).
 * Returns: VM_EINVAL if cuDNN does not understand the device or the convolution. A plan that is not found is no error. */
vm_status vm_ask_conv(vm_cudnn *cudnn, const char *device_json, const vm_conv *conv, bool every, vm_conv_plan *out) {
    memset(out, 0, sizeof *out);
    vm_status status = vm_cudnn_check(conv);
    if (status) return status;
    vm_cudnn_question q = {.c = cudnn};
    desc device = vm_cudnn_device(&q, device_json), graph = vm_cudnn_graph(&q, conv, NULL);
    walk(&q, graph, device, HEUR_INSTANT, conv, every, out);
    if (!q.status && (!out->found || every)) {
        out->fallback = !out->found;
        walk(&q, graph, device, HEUR_FALLBACK, conv, every, out);
    }
    status = vm_cudnn_end(&q, VM_EINVAL);
    if (status)
        memset(out, 0, sizeof *out);
    else if (!out->found)
        *out = (vm_conv_plan){.untried = out->untried};
    return status;
}
