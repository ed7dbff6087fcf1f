/* Asks cuDNN for the plan that PyTorch would run, on a device that need not exist.
 *
 *   for mode in instant, fallback:        PyTorch's order (aten/src/ATen/native/cudnn/Conv_v8.cpp)
 *       heuristics(graph, device) -> configurations, best first
 *       skip what PyTorch's filter refuses; the first that finalises as a plan is the answer
 *
 * cuDNN is spoken to as cudnn_api.h says. No handle is made, so neither driver nor device is needed.
 *
 * cuDNN may still end the process (seen: a segmentation fault in 9.8 and 9.10 for compute capability 10.0), so Python
 * asks from a process of its own (vaemem/prediction/cudnn.py). */
#include <string.h>

#include "workspace.h"

/* Numerical notes that PyTorch's filterEngineConfigs refuses, not deterministic. */
static uint32_t bad_notes(const vm_conv *conv) {
    return 1u << NOTE_DOWN_CONVERT_INPUTS | (conv->dtype == VM_F32 && !conv->tf32 ? 1u << NOTE_TENSOR_CORE : 0);
}

/* A configuration that passes PyTorch's filter and finalises as a plan is the one, or where that is found, one of the
 * next. */
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

/* Walks one list of the heuristics, as far as the first plan or, with `every`, to its end. */
static void walk(vm_cudnn_question *q, desc graph, desc device, int mode, const vm_conv *conv, bool every,
                 vm_conv_plan *out) {
    desc config[MAX_CONFIGS];
    const int64_t count = vm_cudnn_configs(q, graph, device, mode, config);
    for (int64_t i = 0; i < count; i++) {
        if (!out->found || every) try_config(q->c, device, config[i], conv, out);
        q->c->destroy(config[i]);
    }
}

vm_status vm_cudnn_conv(vm_cudnn *cudnn, const char *device_json, const vm_conv *conv, bool every, vm_conv_plan *out) {
    memset(out, 0, sizeof *out);
    vm_status status = vm_cudnn_check(conv);
    if (status) return status;
    pthread_mutex_lock(&cudnn->lock);
    vm_cudnn_question q = {.c = cudnn};
    desc device = vm_cudnn_device(&q, device_json), graph = vm_cudnn_graph(&q, conv, NULL);
    walk(&q, graph, device, HEUR_INSTANT, conv, every, out);
    if (!q.status && (!out->found || every)) {
        out->fallback = !out->found;
        walk(&q, graph, device, HEUR_FALLBACK, conv, every, out);
    }
    status = vm_cudnn_end(&q, VM_EINVAL);
    pthread_mutex_unlock(&cudnn->lock);
    if (status)
        memset(out, 0, sizeof *out);
    else if (!out->found)
        *out = (vm_conv_plan){.untried = out->untried};
    return status;
}
