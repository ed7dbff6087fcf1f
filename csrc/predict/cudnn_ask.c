/* Asks cuDNN's backend API for the plan that PyTorch would run, on a device that need not exist.
 *
 *   open: dlopen -> the eight entry points below -> version
 *   conv: tensors x, w, y + convolution -> operation -> graph
 *         for mode in instant, fallback:        PyTorch's order (aten/src/ATen/native/cudnn/Conv_v8.cpp)
 *             heuristics(graph, device) -> configurations, best first
 *             skip what PyTorch's filter refuses; the first that finalises as a plan is the answer
 *
 * The library is never linked and its headers are never included: names and numbers are those of the public header
 * cudnn_graph.h, which keeps them within major version 9. No handle is made, so neither driver nor device is needed.
 *
 * cuDNN may still end the process (seen: a segmentation fault in 9.8 and 9.10 for compute capability 10.0), so Python
 * asks from a process of its own (vaemem/_workspace.py). */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "workspace.h"

typedef void *desc;

enum { /* cudnnBackendDescriptorType_t */
       CONVOLUTION = 1,
       ENGINE = 2,
       ENGINECFG = 3,
       ENGINEHEUR = 4,
       EXECUTION_PLAN = 5,
       KNOB_CHOICE = 7,
       OPERATION_CONVOLUTION_FORWARD = 10,
       OPERATIONGRAPH = 15,
       TENSOR = 17,
       DEVICEPROP = 38
};

enum { /* cudnnBackendAttributeName_t */
       CONVOLUTION_COMP_TYPE = 100,
       CONVOLUTION_CONV_MODE,
       CONVOLUTION_DILATIONS,
       CONVOLUTION_FILTER_STRIDES,
       CONVOLUTION_POST_PADDINGS,
       CONVOLUTION_PRE_PADDINGS,
       CONVOLUTION_SPATIAL_DIMS,
       ENGINEHEUR_MODE = 200,
       ENGINEHEUR_OPERATION_GRAPH,
       ENGINEHEUR_RESULTS,
       ENGINEHEUR_DEVICEPROP = 204,
       ENGINECFG_ENGINE = 300,
       ENGINECFG_KNOB_CHOICES = 302,
       EXECUTION_PLAN_ENGINE_CONFIG = 401,
       EXECUTION_PLAN_WORKSPACE_SIZE,
       EXECUTION_PLAN_DEVICEPROP = 407,
       KNOB_CHOICE_KNOB_TYPE = 600,
       KNOB_CHOICE_KNOB_VALUE,
       FORWARD_ALPHA = 700,
       FORWARD_BETA,
       FORWARD_CONV_DESC,
       FORWARD_W,
       FORWARD_X,
       FORWARD_Y,
       OPERATIONGRAPH_OPS = 801,
       TENSOR_BYTE_ALIGNMENT = 900,
       TENSOR_DATA_TYPE,
       TENSOR_DIMENSIONS,
       TENSOR_STRIDES,
       TENSOR_UNIQUE_ID = 906,
       ENGINE_GLOBAL_INDEX = 1301,
       ENGINE_NUMERICAL_NOTE = 1303,
       ENGINE_BEHAVIOR_NOTE = 1305,
       DEVICEPROP_JSON_REPRESENTATION = 2702
};

enum { /* cudnnBackendAttributeType_t */
       T_DATA_TYPE = 1,
       T_INT64 = 3,
       T_FLOAT = 4,
       T_CONVOLUTION_MODE = 7,
       T_HEUR_MODE = 8,
       T_KNOB_TYPE = 9,
       T_NUMERICAL_NOTE = 11,
       T_DESC = 15,
       T_BEHAVIOR_NOTE = 19,
       T_CHAR = 24
};

enum { DATA_FLOAT = 0, DATA_HALF = 2, DATA_BFLOAT16 = 9 };
enum { CROSS_CORRELATION = 1, HEUR_INSTANT = 0, HEUR_FALLBACK = 2 };
enum { NOTE_TENSOR_CORE = 0, NOTE_DOWN_CONVERT_INPUTS = 1, BEHAVIOR_RUNTIME_COMPILATION = 0 };
enum { MAX_SIZE = 1 << 20 }; /* so that strides fit in 64 bits */
enum { MAX_CONFIGS = 256, MAX_KNOBS = 64, MAX_NOTES = 32, MAX_DESCS = 16 };

struct vm_cudnn {
    pthread_mutex_t lock;
    size_t version;
    int (*create)(int type, desc *out);
    int (*destroy)(desc d);
    int (*set)(desc d, int name, int type, int64_t count, const void *values);
    int (*get)(desc d, int name, int type, int64_t room, int64_t *count, void *values);
    int (*finalize)(desc d);
    size_t (*get_version)(void);
    const char *(*status_name)(int status);
    void (*last_error)(char *text, size_t room);
};

/* cuDNN aborts the process where it needs cuBLASLt and finds none, so it is looked for first: beside cuDNN, as the
 * wheels lay it (CUDA 12, CUDA 13), then where the loader looks. */
static bool load_cublaslt(void *entry) {
    static const char *const where[] = {"%.*s/../../cublas/lib/libcublasLt.so.12",
                                        "%.*s/../../cu13/lib/libcublasLt.so.13", "libcublasLt.so.12",
                                        "libcublasLt.so.13"};
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

vm_status vm_cudnn_open(const char *path, const char *no_driver, vm_cudnn **out) {
    *out = NULL;
    if (!dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL) && no_driver && !dlopen(no_driver, RTLD_LAZY | RTLD_LOCAL))
        return vm_fail(VM_EINVAL, "cuDNN: want a stand-in for libcuda.so.1, got %s", dlerror());
    /* One process, one cuDNN: a second copy would share its sublibraries with the first by their names. */
    void *library = dlopen("libcudnn.so.9", RTLD_LAZY | RTLD_LOCAL | RTLD_NOLOAD);
    if (!library) library = dlopen(path ? path : "libcudnn.so.9", RTLD_LAZY | RTLD_LOCAL);
    if (!library) return vm_fail(VM_EINVAL, "cuDNN: want libcudnn.so.9, got %s", dlerror());
    vm_cudnn *c = calloc(1, sizeof *c);
    if (!c) return vm_fail(VM_ENOMEM, "cuDNN: no memory for a handle");
    const struct {
        const char *name;
        void *where;
    } entries[] = {
        {"cudnnBackendCreateDescriptor", &c->create}, {"cudnnBackendDestroyDescriptor", &c->destroy},
        {"cudnnBackendSetAttribute", &c->set},        {"cudnnBackendGetAttribute", &c->get},
        {"cudnnBackendFinalize", &c->finalize},       {"cudnnGetVersion", &c->get_version},
        {"cudnnGetErrorString", &c->status_name},     {"cudnnGetLastErrorString", &c->last_error},
    };
    void *found = NULL;
    for (size_t i = 0; i < sizeof entries / sizeof *entries; i++) {
        found = dlsym(library, entries[i].name);
        if (!found) {
            free(c);
            return vm_fail(VM_EINVAL, "cuDNN: want a library with %s, got one without", entries[i].name);
        }
        memcpy(entries[i].where, &found, sizeof found);
    }
    const size_t version = c->version = c->get_version();
    if (version < VM_CUDNN_MIN_VERSION || !load_cublaslt(found)) {
        free(c);
        if (version < VM_CUDNN_MIN_VERSION)
            return vm_fail(VM_EINVAL,
                           "cuDNN: want 9.8 or later (the first that answers without a device), got %zu.%zu.%zu",
                           version / 10000, version / 100 % 100, version % 100);
        return vm_fail(VM_EINVAL, "cuDNN: want libcublasLt beside it (nvidia-cublas-cu12), got none");
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

size_t vm_cudnn_version(const vm_cudnn *cudnn) { return cudnn->version; }

/* One question: its descriptors, destroyed together, and the first status that was not success. */
typedef struct question {
    vm_cudnn *c;
    int status;
    const char *step;
    size_t descs;
    desc desc[MAX_DESCS];
} question;

static void note(question *q, int status, const char *step) {
    if (q->status || !status) return;
    q->status = status;
    q->step = step;
}

static desc make(question *q, int type) {
    desc d = NULL;
    if (q->status) return NULL;
    note(q, q->c->create(type, &d), "create");
    if (d) q->desc[q->descs++] = d;
    return d;
}

static void set(question *q, desc d, int name, int type, int64_t count, const void *values) {
    if (!q->status) note(q, q->c->set(d, name, type, count, values), "attribute");
}

static void set_int(question *q, desc d, int name, int type, int value) { set(q, d, name, type, 1, &value); }
static void set_desc(question *q, desc d, int name, desc value) { set(q, d, name, T_DESC, 1, &value); }

static void finalize(question *q, desc d, const char *what) {
    if (!q->status) note(q, q->c->finalize(d), what);
}

/* dims: n, c, h, w, packed as PyTorch packs them. */
static desc tensor(question *q, char uid, const vm_conv *conv, const int64_t dims[4], int data_type) {
    const int64_t n = dims[1] * dims[2] * dims[3], alignment = 32, id = uid;
    const int64_t nchw[4] = {n, dims[2] * dims[3], dims[3], 1}, nhwc[4] = {n, 1, dims[3] * dims[1], dims[1]};
    desc d = make(q, TENSOR);
    set_int(q, d, TENSOR_DATA_TYPE, T_DATA_TYPE, data_type);
    set(q, d, TENSOR_DIMENSIONS, T_INT64, 4, dims);
    set(q, d, TENSOR_STRIDES, T_INT64, 4, conv->nhwc ? nhwc : nchw);
    set(q, d, TENSOR_UNIQUE_ID, T_INT64, 1, &id);
    set(q, d, TENSOR_BYTE_ALIGNMENT, T_INT64, 1, &alignment); /* the most PyTorch claims; its allocator gives 512 */
    finalize(q, d, "tensor");
    return d;
}

static desc graph(question *q, const vm_conv *v) {
    static const int data_types[] = {[VM_F32] = DATA_FLOAT, [VM_F16] = DATA_HALF, [VM_BF16] = DATA_BFLOAT16};
    const int type = data_types[v->dtype];
    const int64_t x_dims[4] = {v->n, v->c, v->h, v->w}, w_dims[4] = {v->k, v->c, v->r, v->s};
    const int64_t y_dims[4] = {v->n, v->k, (v->h + 2 * v->padding - v->r) / v->stride + 1,
                               (v->w + 2 * v->padding - v->s) / v->stride + 1};
    const int64_t spatial = 2, ones[2] = {1, 1}, padding[2] = {v->padding, v->padding},
                  stride[2] = {v->stride, v->stride};
    const float one = 1.0f, zero = 0.0f;

    desc x = tensor(q, 'x', v, x_dims, type), w = tensor(q, 'w', v, w_dims, type), y = tensor(q, 'y', v, y_dims, type);
    desc c = make(q, CONVOLUTION);
    set_int(q, c, CONVOLUTION_COMP_TYPE, T_DATA_TYPE, DATA_FLOAT);
    set_int(q, c, CONVOLUTION_CONV_MODE, T_CONVOLUTION_MODE, CROSS_CORRELATION);
    set(q, c, CONVOLUTION_SPATIAL_DIMS, T_INT64, 1, &spatial);
    set(q, c, CONVOLUTION_FILTER_STRIDES, T_INT64, 2, stride);
    set(q, c, CONVOLUTION_PRE_PADDINGS, T_INT64, 2, padding);
    set(q, c, CONVOLUTION_POST_PADDINGS, T_INT64, 2, padding);
    set(q, c, CONVOLUTION_DILATIONS, T_INT64, 2, ones);
    finalize(q, c, "convolution");

    desc op = make(q, OPERATION_CONVOLUTION_FORWARD);
    set_desc(q, op, FORWARD_X, x);
    set_desc(q, op, FORWARD_W, w);
    set_desc(q, op, FORWARD_Y, y);
    set_desc(q, op, FORWARD_CONV_DESC, c);
    set(q, op, FORWARD_ALPHA, T_FLOAT, 1, &one);
    set(q, op, FORWARD_BETA, T_FLOAT, 1, &zero);
    finalize(q, op, "operation");

    desc g = make(q, OPERATIONGRAPH);
    set(q, g, OPERATIONGRAPH_OPS, T_DESC, 1, &op);
    finalize(q, g, "operation graph");
    return g;
}

static bool has_note(vm_cudnn *c, desc engine, int attribute, int type, int wanted) {
    int notes[MAX_NOTES];
    int64_t count = 0;
    if (c->get(engine, attribute, type, MAX_NOTES, &count, notes)) return false;
    for (int64_t i = 0; i < count && i < MAX_NOTES; i++)
        if (notes[i] == wanted) return true;
    return false;
}

/* PyTorch's filterEngineConfigs, not deterministic. */
static bool refused(vm_cudnn *c, desc engine, const vm_conv *conv) {
    if (has_note(c, engine, ENGINE_NUMERICAL_NOTE, T_NUMERICAL_NOTE, NOTE_DOWN_CONVERT_INPUTS)) return true;
    return conv->dtype == VM_F32 && !conv->tf32 &&
           has_note(c, engine, ENGINE_NUMERICAL_NOTE, T_NUMERICAL_NOTE, NOTE_TENSOR_CORE);
}

static void name_config(vm_cudnn *c, desc config, desc engine, vm_conv_plan *out) {
    int64_t index = 0, count = 0;
    c->get(engine, ENGINE_GLOBAL_INDEX, T_INT64, 1, &count, &index);
    out->engine = (int)index;
    int used = snprintf(out->name, sizeof out->name, "eng%d", out->engine);
    desc knob[MAX_KNOBS] = {NULL};
    for (int i = 0; i < MAX_KNOBS; i++) c->create(KNOB_CHOICE, &knob[i]);
    int64_t knobs = 0;
    if (c->get(config, ENGINECFG_KNOB_CHOICES, T_DESC, MAX_KNOBS, &knobs, knob)) knobs = 0;
    for (int64_t i = 0; i < knobs && i < MAX_KNOBS; i++) {
        int type = 0;
        int64_t value = 0;
        c->get(knob[i], KNOB_CHOICE_KNOB_TYPE, T_KNOB_TYPE, 1, &count, &type);
        c->get(knob[i], KNOB_CHOICE_KNOB_VALUE, T_INT64, 1, &count, &value);
        size_t room = (size_t)used < sizeof out->name ? sizeof out->name - (size_t)used : 0;
        used += snprintf(out->name + sizeof out->name - room, room, "_k%d=%lld", type, (long long)value);
    }
    for (int i = 0; i < MAX_KNOBS; i++)
        if (knob[i]) c->destroy(knob[i]);
}

/* Whether this configuration is the one: it passes PyTorch's filter and finalises as a plan. */
static bool try_config(vm_cudnn *c, desc device, desc config, const vm_conv *conv, vm_conv_plan *out) {
    desc engine = NULL, plan = NULL;
    int64_t count = 0;
    if (c->create(ENGINE, &engine) || c->create(EXECUTION_PLAN, &plan)) goto done;
    if (c->get(config, ENGINECFG_ENGINE, T_DESC, 1, &count, &engine) || refused(c, engine, conv)) goto done;
    if (!c->set(plan, EXECUTION_PLAN_ENGINE_CONFIG, T_DESC, 1, &config) &&
        !c->set(plan, EXECUTION_PLAN_DEVICEPROP, T_DESC, 1, &device) && !c->finalize(plan) &&
        !c->get(plan, EXECUTION_PLAN_WORKSPACE_SIZE, T_INT64, 1, &count, &out->bytes)) {
        name_config(c, config, engine, out);
        out->found = true;
    } else if (has_note(c, engine, ENGINE_BEHAVIOR_NOTE, T_BEHAVIOR_NOTE, BEHAVIOR_RUNTIME_COMPILATION)) {
        out->untried++;
    }
done:
    if (plan) c->destroy(plan);
    if (engine) c->destroy(engine);
    return out->found;
}

/* Walks one list of the heuristics. A list that cuDNN refuses to make is an empty one, as it is for PyTorch. */
static void walk(question *q, desc g, desc device, int mode, const vm_conv *conv, vm_conv_plan *out) {
    vm_cudnn *c = q->c;
    desc heuristics = make(q, ENGINEHEUR), config[MAX_CONFIGS] = {NULL};
    set_desc(q, heuristics, ENGINEHEUR_OPERATION_GRAPH, g);
    set_int(q, heuristics, ENGINEHEUR_MODE, T_HEUR_MODE, mode);
    set_desc(q, heuristics, ENGINEHEUR_DEVICEPROP, device);
    if (q->status || c->finalize(heuristics)) return;
    int64_t count = 0;
    if (c->get(heuristics, ENGINEHEUR_RESULTS, T_DESC, 0, &count, NULL)) return;
    if (count > MAX_CONFIGS) count = MAX_CONFIGS;
    for (int64_t i = 0; i < count; i++) c->create(ENGINECFG, &config[i]);
    int64_t got = 0;
    if (c->get(heuristics, ENGINEHEUR_RESULTS, T_DESC, count, &got, config)) got = 0;
    for (int64_t i = 0; i < got && i < count && !out->found; i++)
        if (!try_config(c, device, config[i], conv, out)) out->rank++;
    for (int64_t i = 0; i < count; i++)
        if (config[i]) c->destroy(config[i]);
}

vm_status vm_cudnn_conv(vm_cudnn *cudnn, const char *device_json, const vm_conv *conv, vm_conv_plan *out) {
    memset(out, 0, sizeof *out);
    const int64_t sizes[] = {conv->n, conv->c, conv->h, conv->w, conv->k, conv->r, conv->s, conv->stride};
    bool good = conv->padding >= 0 && conv->padding < MAX_SIZE;
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) good = good && sizes[i] >= 1 && sizes[i] < MAX_SIZE;
    if (!good || conv->h + 2 * conv->padding < conv->r || conv->w + 2 * conv->padding < conv->s)
        return vm_fail(VM_EINVAL,
                       "conv: want sizes of 1 to %d and a filter no larger than the padded input, got "
                       "%lldx%lldx%lldx%lld, filter %lldx%lldx%lld, stride %lld, padding %lld",
                       MAX_SIZE - 1, (long long)conv->n, (long long)conv->c, (long long)conv->h, (long long)conv->w,
                       (long long)conv->k, (long long)conv->r, (long long)conv->s, (long long)conv->stride,
                       (long long)conv->padding);
    pthread_mutex_lock(&cudnn->lock);
    question q = {.c = cudnn};
    desc device = make(&q, DEVICEPROP);
    set(&q, device, DEVICEPROP_JSON_REPRESENTATION, T_CHAR, (int64_t)strlen(device_json) + 1, device_json);
    finalize(&q, device, "device properties");
    desc g = graph(&q, conv);
    if (!q.status) walk(&q, g, device, HEUR_INSTANT, conv, out);
    if (!q.status && !out->found) {
        out->fallback = true;
        walk(&q, g, device, HEUR_FALLBACK, conv, out);
    }
    char text[256] = "";
    if (q.status) cudnn->last_error(text, sizeof text);
    while (q.descs) cudnn->destroy(q.desc[--q.descs]);
    pthread_mutex_unlock(&cudnn->lock);
    if (q.status) {
        memset(out, 0, sizeof *out);
        return vm_fail(VM_EINVAL, "cuDNN %zu: %s: %s: %s", cudnn->version, q.step, cudnn->status_name(q.status), text);
    }
    if (!out->found) *out = (vm_conv_plan){.untried = out->untried};
    return VM_OK;
}
