/* cuDNN's backend API: found at run time, with short helpers. */
#define _GNU_SOURCE
#include "cudnn_api.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_SIZE = 1 << 20 }; /* so that strides fit in 64 bits */
enum { MAX_KNOBS = 64, MAX_NOTES = 32 };

/* cuDNN aborts the process if it needs cuBLASLt and finds none, so it is checked first: among cuDNN's dependencies,
 * next to cuDNN as in the wheels (CUDA 12, CUDA 13), then on the loader's path. */
static bool load_cublaslt(void *cudnn, void *entry) {
    static const char *const where[] = {"%.*s/libcublasLt.so.12",
                                        "%.*s/libcublasLt.so.13",
                                        "%.*s/../../cublas/lib/libcublasLt.so.12",
                                        "%.*s/../../cu13/lib/libcublasLt.so.13",
                                        "libcublasLt.so.12",
                                        "libcublasLt.so.13"};
    if (dlsym(cudnn, "cublasLtCreate")) return true;
    Dl_info info;
    const char *slash = dladdr(entry, &info) ? strrchr(info.dli_fname, '/') : NULL;
    for (size_t i = 0; i < sizeof where / sizeof *where; i++) {
        char name[4096];
        if (*where[i] == '%' && !slash) continue;
        const int used =
            snprintf(name, sizeof name, where[i], slash ? (int)(slash - info.dli_fname) : 0, info.dli_fname);
        if (used > 0 && (size_t)used < sizeof name && dlopen(name, RTLD_LAZY | RTLD_LOCAL)) return true;
    }
    return false;
}

vm_status vm_cudnn_open(const char *path, size_t least, vm_cudnn **out) {
    *out = NULL;
    /* One cuDNN per process: a second copy would share its sublibraries with the first by name. */
    void *library = dlopen("libcudnn.so.9", RTLD_LAZY | RTLD_LOCAL | RTLD_NOLOAD);
    if (!library) library = dlopen(path ? path : "libcudnn.so.9", RTLD_LAZY | RTLD_LOCAL);
    if (!library) return vm_fail(VM_EDEVICE, "cuDNN: expected libcudnn.so.9, got %s", dlerror());
    vm_cudnn *c = calloc(1, sizeof *c);
    if (!c) return vm_fail(VM_ENOMEM, "cuDNN: no memory for a handle");
    const struct {
        const char *name;
        void *where;
        bool running; /* required only for running */
    } entries[] = {
        {"cudnnBackendCreateDescriptor", &c->create, false}, {"cudnnBackendDestroyDescriptor", &c->destroy, false},
        {"cudnnBackendSetAttribute", &c->set, false},        {"cudnnBackendGetAttribute", &c->get, false},
        {"cudnnBackendFinalize", &c->finalize, false},       {"cudnnGetErrorString", &c->status_name, false},
        {"cudnnGetLastErrorString", &c->last_error, false},  {"cudnnCreate", &c->create_handle, true},
        {"cudnnDestroy", &c->destroy_handle, true},          {"cudnnSetStream", &c->set_stream, true},
        {"cudnnBackendExecute", &c->execute, true},          {"cudnnGetVersion", &c->get_version, false},
    };
    void *found = NULL;
    for (size_t i = 0; i < sizeof entries / sizeof *entries; i++) {
        found = dlsym(library, entries[i].name);
        if (!found && !entries[i].running) {
            free(c);
            return vm_fail(VM_EDEVICE, "cuDNN: expected a library with %s, got one without", entries[i].name);
        }
        memcpy(entries[i].where, &found, sizeof found);
    }
    const size_t version = c->version = c->get_version();
    if (version < least || !load_cublaslt(library, found)) {
        free(c);
        if (version < least)
            return vm_fail(VM_EDEVICE, "cuDNN: expected %zu.%zu or later, got %zu.%zu.%zu", least / 10000,
                           least / 100 % 100, version / 10000, version / 100 % 100, version % 100);
        return vm_fail(VM_EDEVICE, "cuDNN: expected libcublasLt beside it (nvidia-cublas-cu12), got none");
    }
    pthread_mutex_init(&c->lock, NULL);
    *out = c;
    return VM_OK;
}

void vm_cudnn_close(vm_cudnn *cudnn) {
    if (!cudnn) return;
    pthread_mutex_destroy(&cudnn->lock);
    free(cudnn);
}

/* Returns: the size of the output along one dimension. */
static int64_t output_size(const vm_conv *v, int i) {
    const int64_t reach = v->dilation[i] * (v->filter[i] - 1) + 1, pads = 2 * v->padding[i];
    if (v->transposed) return (v->size[i] - 1) * v->stride[i] - pads + reach + v->output_padding[i];
    return v->size[i] + pads < reach ? 0 : (v->size[i] + pads - reach) / v->stride[i] + 1;
}

enum { EXTENTS_TEXT = 72 };

/* Writes "3x3", or "3x3x3" with a depth. */
static const char *in_words(const vm_conv *v, const int64_t extents[VM_CONV_DIMS], char text[EXTENTS_TEXT]) {
    int used = 0;
    if (v->dims == 3) used = snprintf(text, EXTENTS_TEXT, "%lldx", (long long)extents[0]);
    snprintf(text + used, EXTENTS_TEXT - (size_t)used, "%lldx%lld", (long long)extents[1], (long long)extents[2]);
    return text;
}

vm_status vm_cudnn_check(const vm_conv *v) {
    const int64_t counts[] = {v->n, v->c, v->k, v->groups};
    bool good = (v->dims == 2 || v->dims == 3);
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) good = good && counts[i] >= 1 && counts[i] < MAX_SIZE;
    good = good && v->c % v->groups == 0 && v->k % v->groups == 0;
    for (int i = 0; i < VM_CONV_DIMS; i++) {
        const int64_t sizes[] = {v->size[i], v->filter[i], v->stride[i], v->dilation[i]};
        const int64_t pads[] = {v->padding[i], v->output_padding[i]};
        for (int j = 0; j < 4; j++) good = good && sizes[j] >= 1 && sizes[j] < MAX_SIZE;
        for (int j = 0; j < 2; j++) good = good && pads[j] >= 0 && pads[j] < MAX_SIZE;
        good = good && output_size(v, i) >= 1 && output_size(v, i) < MAX_SIZE;
    }
    if (good) { /* the elements of a tensor, and so its strides, fit in 64 bits */
        const size_t in =
            VM_PRODUCT((size_t)v->n, (size_t)v->c, (size_t)v->size[0], (size_t)v->size[1], (size_t)v->size[2]);
        const size_t out = VM_PRODUCT((size_t)v->n, (size_t)v->k, (size_t)output_size(v, 0), (size_t)output_size(v, 1),
                                      (size_t)output_size(v, 2));
        good = VM_MAX(in, out) <= INT64_MAX / 8;
    }
    if (good) return VM_OK;
    char size[EXTENTS_TEXT], filter[EXTENTS_TEXT], stride[EXTENTS_TEXT], padding[EXTENTS_TEXT];
    return vm_fail(
        VM_EINVAL,
        "conv: expected sizes of 1 to %d with an output of 1 or more, and channels that fall into the groups, got "
        "%lldx%lldx%s, %lld filters %s in %lld groups, stride %s, padding %s",
        MAX_SIZE - 1, (long long)v->n, (long long)v->c, in_words(v, v->size, size), (long long)v->k,
        in_words(v, v->filter, filter), (long long)v->groups, in_words(v, v->stride, stride),
        in_words(v, v->padding, padding));
}

static void note(vm_cudnn_question *q, int status, const char *step) {
    if (q->status || !status) return;
    q->status = status;
    q->step = step;
}

desc vm_cudnn_make(vm_cudnn_question *q, int type) {
    desc d = NULL;
    if (q->status) return NULL;
    note(q, q->c->create(type, &d), "create");
    if (d) q->desc[q->descs++] = d;
    return d;
}

void vm_cudnn_set(vm_cudnn_question *q, desc d, int name, int type, int64_t count, const void *values) {
    if (!q->status) note(q, q->c->set(d, name, type, count, values), "attribute");
}

static void set_int(vm_cudnn_question *q, desc d, int name, int type, int value) {
    vm_cudnn_set(q, d, name, type, 1, &value);
}

static void set_desc(vm_cudnn_question *q, desc d, int name, desc value) {
    vm_cudnn_set(q, d, name, T_DESC, 1, &value);
}

void vm_cudnn_finalize(vm_cudnn_question *q, desc d, const char *what) {
    if (!q->status) note(q, q->c->finalize(d), what);
}

vm_status vm_cudnn_end(vm_cudnn_question *q, vm_status otherwise) {
    char text[256] = "";
    if (q->status) q->c->last_error(text, sizeof text);
    while (q->descs) q->c->destroy(q->desc[--q->descs]);
    if (!q->status) return VM_OK;
    return vm_fail(otherwise, "cuDNN %zu: %s: %s: %s", q->c->version, q->step, q->c->status_name(q->status), text);
}

desc vm_cudnn_device(vm_cudnn_question *q, const char *json) {
    desc d = vm_cudnn_make(q, DEVICEPROP);
    vm_cudnn_set(q, d, DEVICEPROP_JSON_REPRESENTATION, T_CHAR, (int64_t)strlen(json) + 1, json);
    vm_cudnn_finalize(q, d, "device properties");
    return d;
}

/* n and c, then the last `dims` of extents, packed like PyTorch's tensors. */
static desc tensor(vm_cudnn_question *q, char uid, const vm_conv *conv, int64_t n, int64_t c,
                   const int64_t extents[VM_CONV_DIMS], int data_type) {
    const int64_t alignment = 32, id = uid;
    const int count = conv->dims + 2;
    int64_t dims[VM_CONV_DIMS + 2] = {n, c}, strides[VM_CONV_DIMS + 2], step = conv->nhwc ? c : 1;
    for (int i = 0; i < conv->dims; i++) dims[2 + i] = extents[VM_CONV_DIMS - conv->dims + i];
    for (int i = count - 1; i >= 2; step *= dims[i--]) strides[i] = step;
    strides[1] = conv->nhwc ? 1 : step;
    strides[0] = conv->nhwc ? step : step * c;
    desc d = vm_cudnn_make(q, TENSOR);
    set_int(q, d, TENSOR_DATA_TYPE, T_DATA_TYPE, data_type);
    vm_cudnn_set(q, d, TENSOR_DIMENSIONS, T_INT64, count, dims);
    vm_cudnn_set(q, d, TENSOR_STRIDES, T_INT64, count, strides);
    vm_cudnn_set(q, d, TENSOR_UNIQUE_ID, T_INT64, 1, &id);
    vm_cudnn_set(q, d, TENSOR_BYTE_ALIGNMENT, T_INT64, 1,
                 &alignment); /* the most PyTorch claims; its allocator gives 512 */
    vm_cudnn_finalize(q, d, "tensor");
    return d;
}

desc vm_cudnn_graph(vm_cudnn_question *q, const vm_conv *v, void *handle) {
    static const int data_types[] = {[VM_F32] = DATA_FLOAT, [VM_F16] = DATA_HALF, [VM_BF16] = DATA_BFLOAT16};
    const int type = data_types[v->dtype];
    const int first = VM_CONV_DIMS - v->dims; /* of the extents */
    const int64_t spatial = v->dims, from = v->transposed ? v->c : v->k, to = v->transposed ? v->k : v->c;
    const int64_t out[VM_CONV_DIMS] = {output_size(v, 0), output_size(v, 1), output_size(v, 2)};
    const float one = 1.0f, zero = 0.0f;

    desc x = tensor(q, 'x', v, v->n, v->c, v->size, type);
    desc w = tensor(q, 'w', v, from, to / v->groups, v->filter, type);
    desc y = tensor(q, 'y', v, v->n, v->k, out, type);
    desc c = vm_cudnn_make(q, CONVOLUTION);
    set_int(q, c, CONVOLUTION_COMP_TYPE, T_DATA_TYPE, DATA_FLOAT);
    set_int(q, c, CONVOLUTION_CONV_MODE, T_CONVOLUTION_MODE, CROSS_CORRELATION);
    vm_cudnn_set(q, c, CONVOLUTION_SPATIAL_DIMS, T_INT64, 1, &spatial);
    vm_cudnn_set(q, c, CONVOLUTION_FILTER_STRIDES, T_INT64, spatial, v->stride + first);
    vm_cudnn_set(q, c, CONVOLUTION_PRE_PADDINGS, T_INT64, spatial, v->padding + first);
    vm_cudnn_set(q, c, CONVOLUTION_POST_PADDINGS, T_INT64, spatial, v->padding + first);
    vm_cudnn_set(q, c, CONVOLUTION_DILATIONS, T_INT64, spatial, v->dilation + first);
    vm_cudnn_finalize(q, c, "convolution");

    /* A transposed convolution has dx as its output and dy as its input. */
    const int kind = v->transposed ? OPERATION_CONVOLUTION_BACKWARD_DATA : OPERATION_CONVOLUTION_FORWARD;
    const int shift = v->transposed ? BACKWARD_DATA_ALPHA - FORWARD_ALPHA : 0;
    desc op = vm_cudnn_make(q, kind);
    set_desc(q, op, FORWARD_X + shift, v->transposed ? y : x);
    set_desc(q, op, FORWARD_W + shift, w);
    set_desc(q, op, FORWARD_Y + shift, v->transposed ? x : y);
    set_desc(q, op, FORWARD_CONV_DESC + shift, c);
    vm_cudnn_set(q, op, FORWARD_ALPHA + shift, T_FLOAT, 1, &one);
    vm_cudnn_set(q, op, FORWARD_BETA + shift, T_FLOAT, 1, &zero);
    vm_cudnn_finalize(q, op, "operation");

    desc g = vm_cudnn_make(q, OPERATIONGRAPH);
    vm_cudnn_set(q, g, OPERATIONGRAPH_OPS, T_DESC, 1, &op);
    if (handle) vm_cudnn_set(q, g, OPERATIONGRAPH_HANDLE, T_HANDLE, 1, &handle);
    vm_cudnn_finalize(q, g, "operation graph");
    return g;
}

int64_t vm_cudnn_configs(vm_cudnn_question *q, desc graph, desc device, int mode, desc config[MAX_CONFIGS]) {
    vm_cudnn *c = q->c;
    desc heuristics = vm_cudnn_make(q, ENGINEHEUR);
    set_desc(q, heuristics, ENGINEHEUR_OPERATION_GRAPH, graph);
    set_int(q, heuristics, ENGINEHEUR_MODE, T_HEUR_MODE, mode);
    if (device) set_desc(q, heuristics, ENGINEHEUR_DEVICEPROP, device);
    int64_t made = 0, count = 0, got = 0;
    if (q->status || c->finalize(heuristics)) return 0;
    if (c->get(heuristics, ENGINEHEUR_RESULTS, T_DESC, 0, &count, NULL)) return 0;
    while (made < count && made < MAX_CONFIGS && !c->create(ENGINECFG, &config[made])) made++;
    if (c->get(heuristics, ENGINEHEUR_RESULTS, T_DESC, made, &got, config)) got = 0;
    while (made > got) c->destroy(config[--made]);
    return made;
}

/* Reads the notes of an engine, as the sum of 1 << note. Returns: false if they cannot be read. */
static bool read_notes(vm_cudnn *c, desc engine, int attribute, int type, uint32_t *bits) {
    int notes[MAX_NOTES];
    int64_t count = 0;
    *bits = 0;
    if (c->get(engine, attribute, type, MAX_NOTES, &count, notes) || count > MAX_NOTES) return false;
    for (int64_t i = 0; i < count; i++) *bits |= 1u << (notes[i] & 31);
    return true;
}

/* Writes the engine's name. Returns: its index. */
static int name_engine(vm_cudnn *c, desc config, desc engine, char *out, size_t size) {
    int64_t index = 0, count = 0;
    c->get(engine, ENGINE_GLOBAL_INDEX, T_INT64, 1, &count, &index);
    int used = snprintf(out, size, "eng%d", (int)index);
    desc knob[MAX_KNOBS] = {NULL};
    for (int i = 0; i < MAX_KNOBS; i++) c->create(KNOB_CHOICE, &knob[i]);
    int64_t knobs = 0;
    if (c->get(config, ENGINECFG_KNOB_CHOICES, T_DESC, MAX_KNOBS, &knobs, knob)) knobs = 0;
    for (int64_t i = 0; i < knobs && i < MAX_KNOBS; i++) {
        int type = 0;
        int64_t value = 0;
        c->get(knob[i], KNOB_CHOICE_KNOB_TYPE, T_KNOB_TYPE, 1, &count, &type);
        c->get(knob[i], KNOB_CHOICE_KNOB_VALUE, T_INT64, 1, &count, &value);
        const size_t room = (size_t)used < size ? size - (size_t)used : 0;
        used += snprintf(out + size - room, room, "_k%d=%lld", type, (long long)value);
    }
    for (int i = 0; i < MAX_KNOBS; i++)
        if (knob[i]) c->destroy(knob[i]);
    return (int)index;
}

vm_cudnn_plan vm_cudnn_try(vm_cudnn *c, desc config, uint32_t bad, desc device, void *handle) {
    vm_cudnn_plan made = {.plan = NULL};
    desc engine = NULL, plan = NULL;
    uint32_t notes;
    int64_t count = 0;
    if (c->create(ENGINE, &engine) || c->create(EXECUTION_PLAN, &plan) ||
        c->get(config, ENGINECFG_ENGINE, T_DESC, 1, &count, &engine) ||
        !read_notes(c, engine, ENGINE_NUMERICAL_NOTE, T_NUMERICAL_NOTE, &notes) || (notes & bad))
        goto done;
    if (!c->set(plan, EXECUTION_PLAN_ENGINE_CONFIG, T_DESC, 1, &config) &&
        !(device ? c->set(plan, EXECUTION_PLAN_DEVICEPROP, T_DESC, 1, &device)
                 : c->set(plan, EXECUTION_PLAN_HANDLE, T_HANDLE, 1, &handle)) &&
        !c->finalize(plan) && !c->get(plan, EXECUTION_PLAN_WORKSPACE_SIZE, T_INT64, 1, &count, &made.bytes)) {
        made.engine = name_engine(c, config, engine, made.name, sizeof made.name);
        made.plan = plan;
        plan = NULL;
    } else {
        made.compiles = read_notes(c, engine, ENGINE_BEHAVIOR_NOTE, T_BEHAVIOR_NOTE, &notes) &&
                        (notes & 1u << BEHAVIOR_RUNTIME_COMPILATION);
    }
done:
    if (plan) c->destroy(plan);
    if (engine) c->destroy(engine);
    return made;
}
