/* A stand-in for libcudnn.so.9: the backend API for one forward convolution, NHWC, packed, without padding.
 *
 * It is as strict as cuDNN about descriptors, offers engines of which most are not to be taken (below), and convolves
 * on the CPU with float sums, in the order of the stream where the stand-in driver is loaded, else at once. Plans own
 * copies of all that they were made from. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "libcudnn_conv.h"

#define EXPORT __attribute__((visibility("default")))

enum { /* cudnnStatus_t */
       NOT_INITIALIZED = 1001,
       BAD_PARAM = 2000,
       NULL_POINTER = 2002,
       MISALIGNED = 2003,
       NOT_FINALIZED = 2004,
       SHAPE_MISMATCH = 2008,
       WRONG_TYPE = 2010,
       NOT_SUPPORTED = 3000,
       NO_SUCH_DATA_TYPE = 3003,
       NO_SUCH_LAYOUT = 3004,
       NO_COMPILER = 3008,
       NO_HOST_MEMORY = 4003,
       NO_DEVICE_MEMORY = 4004,
       DRIVER_FAILED = 5001
};
enum { /* cudnnBackendDescriptorType_t */
       CONVOLUTION = 1,
       ENGINE = 2,
       ENGINECFG = 3,
       ENGINEHEUR = 4,
       PLAN = 5,
       KNOB = 7,
       FORWARD = 10,
       GRAPH = 15,
       PACK = 16,
       TENSOR = 17,
       DEVICE = 38
};
enum { HANDLE = 0, DATA_TYPE, INT64 = 3, FLOAT, POINTER = 6, CONV_MODE, HEUR_MODE, KNOB_TYPE };
enum { NUMERICAL_NOTE = 11, DESC = 15, BEHAVIOR_NOTE = 19, CHAR = 24 };

/* Every attribute that can be set: whose, its name, type and count (0: any), and whether it may be left out. */
static const struct attribute {
    int owner, name, type, count;
    bool optional;
} attributes[] = {
    {CONVOLUTION, 100, DATA_TYPE, 1, false},
    {CONVOLUTION, 101, CONV_MODE, 1, false},
    {CONVOLUTION, 102, INT64, 2, false},
    {CONVOLUTION, 103, INT64, 2, false},
    {CONVOLUTION, 104, INT64, 2, false},
    {CONVOLUTION, 105, INT64, 2, false},
    {CONVOLUTION, 106, INT64, 1, false},
    {ENGINEHEUR, 200, HEUR_MODE, 1, false},
    {ENGINEHEUR, 201, DESC, 1, false},
    {ENGINEHEUR, 204, DESC, 1, true},
    {PLAN, 400, HANDLE, 1, true},
    {PLAN, 401, DESC, 1, false},
    {PLAN, 407, DESC, 1, true},
    {FORWARD, 700, FLOAT, 1, false},
    {FORWARD, 701, FLOAT, 1, false},
    {FORWARD, 702, DESC, 1, false},
    {FORWARD, 703, DESC, 1, false},
    {FORWARD, 704, DESC, 1, false},
    {FORWARD, 705, DESC, 1, false},
    {GRAPH, 800, HANDLE, 1, true},
    {GRAPH, 801, DESC, 1, false},
    {TENSOR, 900, INT64, 1, false},
    {TENSOR, 901, DATA_TYPE, 1, false},
    {TENSOR, 902, INT64, 4, false},
    {TENSOR, 903, INT64, 4, false},
    {TENSOR, 906, INT64, 1, false},
    {PACK, 1000, INT64, 3, false},
    {PACK, 1001, POINTER, 3, false},
    {PACK, 1003, POINTER, 1, false},
    {DEVICE, 2702, CHAR, 0, false},
};
enum { ATTRIBUTES = sizeof attributes / sizeof *attributes };

/* What the heuristics offer, best first. An engine that must not be taken gives NaN, so that taking it is noticed. */
enum { TENSOR_CORE = 1, DOWN_CONVERT = 2, REDUCED = 4, NONDETERMINISTIC = 16, WINOGRAD_4x4 = 64 }; /* 1 << the note */
enum { LIST_A = 3, LIST_FALLBACK = 2, COMPILED = 1, AMPLE = 1025, HUGE = 1 << 20 };
static const struct engine {
    int list, notes, kib;
    enum { PLAIN, POINTWISE /* 1x1 alone */, AT_RUN_TIME /* compiled then, and this library has no compiler */ } kind;
} engines[] = {
    {LIST_A, TENSOR_CORE, 0, POINTWISE},
    {LIST_A, TENSOR_CORE | NONDETERMINISTIC, 1, PLAIN},
    {LIST_A, TENSOR_CORE | DOWN_CONVERT, 1, PLAIN},
    {LIST_A, TENSOR_CORE | REDUCED, 1, PLAIN},
    {LIST_A, TENSOR_CORE, HUGE, PLAIN},
    {LIST_A, TENSOR_CORE, 1, AT_RUN_TIME},
    {LIST_A, TENSOR_CORE, 5, PLAIN},
    {LIST_A, WINOGRAD_4x4, 2, PLAIN},
    {LIST_A, 0, AMPLE, PLAIN},
    {LIST_A, 0, 7, PLAIN},
    {LIST_FALLBACK, 0, 1, PLAIN},
};
enum { ENGINES = sizeof engines / sizeof *engines, FIRST_INDEX = 99 };

typedef struct descriptor {
    int type, mode, engine, list;
    bool final;
    long long code; /* of a plan that has run: bytes of the device */
    void *value[ATTRIBUTES];
    int64_t count[ATTRIBUTES];
    conv conv; /* of graphs and of what is made from them */
} descriptor;

typedef struct handle {
    void *stream;
} handle;

static atomic_size_t calls, live, fail_at;
static atomic_int fail_with;
static _Thread_local char last_error[128];

static int fail(int status, const char *why) {
    snprintf(last_error, sizeof last_error, "stand-in: %s", why);
    return status;
}

static int enter(void) {
    const size_t call = atomic_fetch_add(&calls, 1) + 1;
    return call == atomic_load(&fail_at) ? fail(atomic_load(&fail_with), "as the test wanted") : 0;
}

/* ---- for tests ---- */

/* The nth call from now fails with status; 0: none will. */
EXPORT void emulator_cudnn_fail_at(size_t nth, int status) {
    fail_with = status;
    fail_at = nth ? calls + nth : 0;
}
EXPORT size_t emulator_cudnn_calls(void) { return calls; }
EXPORT size_t emulator_cudnn_live(void) { return live; } /* descriptors and handles */

/* ---- descriptors ---- */

static size_t size_of(int type) {
    if (type == HANDLE || type == POINTER || type == DESC) return sizeof(void *);
    return type == CHAR ? 1 : type == INT64 ? 8 : 4; /* else a float or an enumeration */
}

static const void *value(const descriptor *d, int name) {
    for (int i = 0; i < ATTRIBUTES; i++)
        if (attributes[i].owner == d->type && attributes[i].name == name) return d->value[i];
    return NULL;
}
static const int64_t *ints(const descriptor *d, int name) { return value(d, name); }
static int number(const descriptor *d, int name) { return *(const int *)value(d, name); }
/* NULL unless it is finished and of this type. */
static const descriptor *part(const descriptor *d, int name, int type) {
    const descriptor *const *p = value(d, name);
    return p && *p && (*p)->final && (*p)->type == type ? *p : NULL;
}

EXPORT size_t cudnnGetVersion(void) { return 92800; }
EXPORT const char *cudnnGetErrorString(int status) {
    switch (status / 1000) {
    case 0: return "CUDNN_STATUS_SUCCESS";
    case 1: return "CUDNN_STATUS_NOT_INITIALIZED";
    case 2: return "CUDNN_STATUS_BAD_PARAM";
    case 3: return "CUDNN_STATUS_NOT_SUPPORTED";
    case 4: return "CUDNN_STATUS_INTERNAL_ERROR";
    default: return "CUDNN_STATUS_EXECUTION_FAILED";
    }
}
EXPORT void cudnnGetLastErrorString(char *text, size_t room) { snprintf(text, room, "%s", last_error); }
/* Its presence says that this library needs no cuBLASLt beside it. */
EXPORT int cublasLtCreate(void **out) { return *out = NULL, NOT_INITIALIZED; }

EXPORT int cudnnCreate(void **out) {
    const int status = enter();
    if (status) return status;
    if (!(*out = calloc(1, sizeof(handle)))) return fail(NO_HOST_MEMORY, "no memory");
    live++;
    return 0;
}
EXPORT int cudnnDestroy(void *h) {
    if (!h) return fail(NULL_POINTER, "no handle");
    free(h);
    live--;
    return 0;
}
EXPORT int cudnnSetStream(void *h, void *stream) {
    const int status = enter();
    if (!status) ((handle *)h)->stream = stream;
    return status;
}

EXPORT int cudnnBackendCreateDescriptor(int type, void **out) {
    static const int known[] = {CONVOLUTION, ENGINE, ENGINECFG, ENGINEHEUR, PLAN,  KNOB,
                                FORWARD,     GRAPH,  PACK,      TENSOR,     DEVICE};
    const int status = enter();
    bool found = false;
    if (status) return status;
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) found |= known[i] == type;
    if (!found) return fail(NOT_SUPPORTED, "no such descriptor");
    descriptor *d = calloc(1, sizeof *d);
    if (!d) return fail(NO_HOST_MEMORY, "no memory");
    d->type = type;
    *out = d;
    live++;
    return 0;
}

/* A function of the stand-in driver's, where that is loaded. */
static void *in_driver(const char *name) { return dlsym(RTLD_DEFAULT, name); }

/* Of the device's memory; whether it was there. */
static bool lose(long long bytes) {
    int (*take)(long long) = NULL;
    void *found = bytes ? in_driver("emulator_lose") : NULL;
    memcpy(&take, &found, sizeof found);
    return !take || !take(bytes);
}

EXPORT int cudnnBackendDestroyDescriptor(void *v) {
    descriptor *d = v;
    if (!d) return fail(NULL_POINTER, "no descriptor");
    lose(-d->code);
    for (int i = 0; i < ATTRIBUTES; i++) free(d->value[i]);
    free(d);
    live--;
    return 0;
}

EXPORT int cudnnBackendSetAttribute(void *v, int name, int type, int64_t count, const void *values) {
    descriptor *d = v;
    const int status = enter();
    if (status) return status;
    if (!d || !values) return fail(NULL_POINTER, "nothing to set");
    if (d->final) return fail(BAD_PARAM, "the descriptor is finalized");
    for (int i = 0; i < ATTRIBUTES; i++) {
        const struct attribute *a = &attributes[i];
        if (a->owner != d->type || a->name != name) continue;
        if (a->type != type) return fail(WRONG_TYPE, "the attribute is of another type");
        if (count < 1 || (a->count && a->count != count)) return fail(BAD_PARAM, "so many values are not wanted");
        void *copy = malloc((size_t)count * size_of(type));
        if (!copy) return fail(NO_HOST_MEMORY, "no memory");
        free(d->value[i]);
        d->value[i] = memcpy(copy, values, (size_t)count * size_of(type));
        d->count[i] = count;
        return 0;
    }
    return fail(BAD_PARAM, "the descriptor has no such attribute");
}

/* dims and strides: of an n c h w tensor that lies n h w c. */
static bool packed(const descriptor *t) {
    const int64_t *d = ints(t, 902), *s = ints(t, 903);
    return s[0] == d[1] * d[2] * d[3] && s[1] == 1 && s[2] == d[3] * d[1] && s[3] == d[1];
}

static int finalize_graph(descriptor *g) {
    const descriptor *op = part(g, 801, FORWARD);
    if (!op) return fail(NOT_FINALIZED, "an operation is not finalized");
    g->conv = op->conv;
    g->conv.on_handle = value(g, 800) != NULL;
    return 0;
}

static int finalize_operation(descriptor *op) {
    const descriptor *t[3] = {part(op, 704, TENSOR), part(op, 703, TENSOR), part(op, 705, TENSOR)};
    const descriptor *v = part(op, 702, CONVOLUTION);
    if (!t[0] || !t[1] || !t[2] || !v) return fail(NOT_FINALIZED, "a part of the operation is not finalized");
    const int64_t *x = ints(t[0], 902), *w = ints(t[1], 902), *y = ints(t[2], 902), *stride = ints(v, 103);
    const float alpha = *(const float *)value(op, 700), beta = *(const float *)value(op, 701);
    conv *c = &op->conv;
    *c = (conv){.type = number(t[0], 901), .n = x[0], .h = x[2], .w = x[3], .c = x[1], .k = w[0], .r = w[2], .s = w[3]};
    for (int i = 0; i < 3; i++) {
        if (number(t[i], 901) != c->type) return fail(NO_SUCH_DATA_TYPE, "tensors of several types");
        if (!packed(t[i])) return fail(NO_SUCH_LAYOUT, "a tensor is not packed as n h w c");
        c->id[i] = *ints(t[i], 906);
        c->alignment[i] = *ints(t[i], 900);
    }
    c->stride = stride[0];
    c->oh = (c->h - c->r) / c->stride + 1;
    c->ow = (c->w - c->s) / c->stride + 1;
    if (x[0] < 1 || y[0] != x[0] || w[1] != c->c || y[1] != c->k || y[2] != c->oh || y[3] != c->ow)
        return fail(SHAPE_MISMATCH, "x, w and y do not fit together");
    if (number(v, 100) != F32 || number(v, 101) != 1 || *ints(v, 106) != 2 || stride[0] != stride[1] || alpha != 1 ||
        beta)
        return fail(NOT_SUPPORTED, "not a plain convolution with float sums");
    for (int i = 0; i < 2; i++)
        if (ints(v, 102)[i] != 1 || ints(v, 104)[i] || ints(v, 105)[i])
            return fail(NOT_SUPPORTED, "padding or dilation");
    return 0;
}

static int finalize_heuristics(descriptor *u) {
    const descriptor *g = part(u, 201, GRAPH), *device = part(u, 204, DEVICE);
    const char *json = device ? value(device, 2702) : "";
    if (!g || (!g->conv.on_handle && !device)) return fail(NOT_FINALIZED, "want a graph, and a handle or a device");
    if (g->conv.type == BF16 && strstr(json, "\"deviceVer\": 750")) return fail(NO_SUCH_DATA_TYPE, "no bfloat16 here");
    u->conv = g->conv;
    u->list = number(u, 200);
    return 0;
}

static int finalize_plan(descriptor *p) {
    const descriptor *config = part(p, 401, ENGINECFG);
    if (!config || (!value(p, 400) && !part(p, 407, DEVICE)))
        return fail(NOT_FINALIZED, "want a configuration and where");
    if (value(p, 400) && !config->conv.on_handle) return fail(BAD_PARAM, "the graph knows no handle");
    if (engines[config->engine].kind == AT_RUN_TIME) return fail(NO_COMPILER, "no run-time compiler");
    p->engine = config->engine;
    p->conv = config->conv;
    return 0;
}

EXPORT int cudnnBackendFinalize(void *v) {
    descriptor *d = v;
    int status = enter();
    if (status) return status;
    if (!d || d->final) return fail(BAD_PARAM, "finalized twice");
    for (int i = 0; i < ATTRIBUTES; i++)
        if (attributes[i].owner == d->type && !attributes[i].optional && !d->value[i])
            return fail(BAD_PARAM, "an attribute is missing");
    if (d->type == FORWARD) status = finalize_operation(d);
    if (d->type == GRAPH) status = finalize_graph(d);
    if (d->type == ENGINEHEUR) status = finalize_heuristics(d);
    if (d->type == PLAN) status = finalize_plan(d);
    if (d->type == ENGINE || d->type == ENGINECFG || d->type == KNOB) status = fail(NOT_SUPPORTED, "not made by hand");
    if (d->type == DEVICE && !memchr(value(d, 2702), '{', 1)) status = fail(BAD_PARAM, "not a device's description");
    d->final = !status;
    return status;
}

static int64_t kib(const descriptor *p) {
    const int64_t most = engines[p->engine].kib;
    return most + (most && most < HUGE ? p->conv.h % 3 : 0);
}

static void notes_of(int bits, int64_t room, int64_t *count, int *out) {
    for (int i = 0; bits >> i; i++)
        if (bits >> i & 1 && (*count)++ < room) *out++ = i;
}

EXPORT int cudnnBackendGetAttribute(void *v, int name, int type, int64_t room, int64_t *count, void *values) {
    const descriptor *d = v;
    descriptor *const *into = values;
    const int status = enter();
    if (status) return status;
    if (!d || !d->final || !count) return fail(NOT_FINALIZED, "nothing to read");
    *count = 0;
    const struct {
        int owner, name, type;
    } known[] = {{ENGINEHEUR, 202, DESC}, {ENGINECFG, 300, DESC},         {ENGINECFG, 302, DESC},
                 {PLAN, 402, INT64},      {KNOB, 600, KNOB_TYPE},         {KNOB, 601, INT64},
                 {ENGINE, 1301, INT64},   {ENGINE, 1303, NUMERICAL_NOTE}, {ENGINE, 1305, BEHAVIOR_NOTE}};
    bool found = false;
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        found |= known[i].owner == d->type && known[i].name == name && known[i].type == type;
    if (!found) return fail(BAD_PARAM, "the descriptor has no such attribute");
    if (name == 202) {
        for (int i = 0; i < ENGINES; i++) {
            if (engines[i].list != d->list || (engines[i].kind == POINTWISE && d->conv.r > 1)) continue;
            if (*count < room) {
                if (!into[*count] || into[*count]->type != ENGINECFG)
                    return fail(BAD_PARAM, "want ENGINECFG descriptors");
                into[*count]->engine = i;
                into[*count]->conv = d->conv;
                into[*count]->final = true;
            }
            ++*count;
        }
        return 0;
    }
    if (name == 1303) return notes_of(engines[d->engine].notes, room, count, values), 0;
    if (name == 1305) return notes_of(engines[d->engine].kind == AT_RUN_TIME ? COMPILED : 0, room, count, values), 0;
    *count = 1;
    if (room < 1) return 0;
    if (name == 300 || name == 302) {
        if (!into[0] || into[0]->type != (name == 300 ? ENGINE : KNOB))
            return fail(BAD_PARAM, "want another descriptor");
        into[0]->engine = d->engine;
        into[0]->final = true;
    }
    if (name == 402) *(int64_t *)values = 1024 * kib(d);
    if (name == 600) *(int *)values = 2;
    if (name == 601) *(int64_t *)values = d->engine;
    if (name == 1301) *(int64_t *)values = FIRST_INDEX + d->engine;
    return 0;
}

/* ---- running ---- */

EXPORT int cudnnBackendExecute(void *h, void *plan, void *pack) {
    descriptor *p = plan;
    const descriptor *v = pack;
    const int status = enter();
    if (status) return status;
    if (!h || !p || !v || p->type != PLAN || v->type != PACK || !p->final || !v->final || !value(p, 400))
        return fail(BAD_PARAM, "want a handle, a plan made for one, and a variant pack");
    void *at[3] = {NULL}, *workspace = *(void *const *)value(v, 1003);
    for (int i = 0; i < 3; i++) {
        for (int n = 0; n < 3; n++)
            if (ints(v, 1000)[n] == p->conv.id[i]) at[i] = ((void *const *)value(v, 1001))[n];
        if (!at[i]) return fail(NULL_POINTER, "a tensor of the graph has no memory");
        if ((uintptr_t)at[i] % (uintptr_t)p->conv.alignment[i]) return fail(MISALIGNED, "a tensor is not aligned");
    }
    if (!workspace && kib(p)) return fail(NULL_POINTER, "no workspace");
    if ((uintptr_t)workspace % 16) return fail(MISALIGNED, "the workspace is not aligned");
    const char *code = getenv("VAEMEM_EMULATED_CUDNN");
    if (code && !p->code) {
        if (!lose(atoll(code))) return fail(NO_DEVICE_MEMORY, "no room for a kernel");
        p->code = atoll(code);
    }
    const int notes = engines[p->engine].notes;
    job *j = malloc(sizeof *j);
    if (!j) return fail(NO_HOST_MEMORY, "no memory");
    *j = (job){.conv = p->conv,
               .round = p->conv.type == F32 && notes & TENSOR_CORE,
               .spoil = notes & (DOWN_CONVERT | REDUCED | NONDETERMINISTIC),
               .x = at[0],
               .w = at[1],
               .y = at[2],
               .workspace = workspace,
               .bytes = 1024 * (size_t)kib(p)};
    int (*enqueue)(void *, void (*)(void *), void *, void (*)(void *)) = NULL;
    void *found = in_driver("emulator_enqueue");
    memcpy(&enqueue, &found, sizeof found);
    if (enqueue)
        return enqueue(((handle *)h)->stream, convolve_job, j, free) ? fail(DRIVER_FAILED, "the driver refused") : 0;
    convolve_job(j);
    free(j);
    return 0;
}
