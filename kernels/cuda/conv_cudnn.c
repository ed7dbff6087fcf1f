/* Convolutions by cuDNN's graph API, with a cache of their plans.
 *
 *   plan: graph (x, w, y, convolution) -> heuristics mode A, then the fallback list -> configurations, best first
 *         skip engines that are inaccurate or not repeatable; the first that finalises within the limit is the plan
 *   run:  variant pack (pointers, workspace) -> execute on the handle's stream */
#include "conv_cudnn.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LEAST_VERSION = 90000, CANDIDATES = 8 };

/* A plan for a key; the cache keeps one of a key's candidates. */
typedef struct plan {
    struct plan *next; /* in the cache */
    vm_conv_key key;
    vm_cudnn_plan made;
    desc config; /* outlives the plan made from it */
    bool tuned, ran;
} plan;

struct vm_cudnn_convs {
    vm_cudnn *c;
    void *handle;
    char *device_json;
    plan *plans;
    vm_conv_watch watch; /* or NULL */
    void *watching;
};

static plan *find(const vm_cudnn_convs *s, const vm_conv_key *key) {
    plan *p = s->plans;
    while (p && !(p->key.limit == key->limit && vm_conv_same(&p->key.conv, &key->conv))) p = p->next;
    return p;
}

static void free_plan(vm_cudnn *c, plan *p) {
    c->destroy(p->made.plan);
    c->destroy(p->config);
    free(p);
}

vm_status vm_cudnn_convs_new(const char *path, const char *device_json, vm_cudnn_convs **out) {
    *out = NULL;
    vm_cudnn_convs *s = calloc(1, sizeof *s);
    if (!s) return vm_fail(VM_ENOMEM, "cuDNN: no memory for its plans");
    vm_status status;
    if ((status = vm_cudnn_open(path, LEAST_VERSION, &s->c))) goto done;
    if (device_json) {
        if (!(s->device_json = strdup(device_json)))
            status = vm_fail(VM_ENOMEM, "cuDNN: no memory for a device's description");
        goto done;
    }
    if (!s->c->create_handle || !s->c->set_stream || !s->c->execute) {
        status = vm_fail(VM_EDEVICE, "cuDNN: expected a library that runs, got one without cudnnBackendExecute");
        goto done;
    }
    const int refused = s->c->create_handle(&s->handle);
    if (refused) {
        s->handle = NULL;
        status = vm_fail(VM_EDEVICE, "cuDNN: making a handle: %s", s->c->status_name(refused));
    }
done:
    if (status)
        vm_cudnn_convs_free(s);
    else
        *out = s;
    return status;
}

void vm_cudnn_convs_free(vm_cudnn_convs *s) {
    if (!s) return;
    for (plan *p = s->plans, *next; p; p = next) {
        next = p->next;
        free_plan(s->c, p);
    }
    if (s->handle) s->c->destroy_handle(s->handle);
    vm_cudnn_close(s->c);
    free(s->device_json);
    free(s);
}

void vm_cudnn_convs_watch(vm_cudnn_convs *s, vm_conv_watch call, void *context) {
    s->watch = call;
    s->watching = context;
}

static vm_status watch(const vm_cudnn_convs *s, bool begin, size_t *free) {
    return s->watch ? s->watch(s->watching, begin, free) : VM_OK;
}

size_t vm_cudnn_convs_version(const vm_cudnn_convs *s) { return s->c->version; }

size_t vm_cudnn_convs_count(const vm_cudnn_convs *s) {
    pthread_mutex_lock(&s->c->lock);
    size_t count = 0;
    for (const plan *p = s->plans; p; p = p->next) count++;
    pthread_mutex_unlock(&s->c->lock);
    return count;
}

const char *vm_cudnn_convs_name(const vm_cudnn_convs *s, const vm_conv_key *key) {
    pthread_mutex_lock(&s->c->lock);
    const plan *p = find(s, key);
    pthread_mutex_unlock(&s->c->lock);
    return p ? p->made.name : NULL;
}

bool vm_cudnn_convs_describe(const vm_cudnn_convs *s, size_t index, char *text, size_t size) {
    pthread_mutex_lock(&s->c->lock);
    const plan *p = s->plans;
    while (p && index--) p = p->next;
    if (p) {
        const vm_conv *v = &p->key.conv;
        snprintf(text, size, "%s%s %lldx%lldx%lld to %lld, %lldx%lld stride %lld: %s, %lld bytes of workspace",
                 vm_dtype_name(v->dtype), v->tf32 ? " tf32" : "", (long long)v->size[1], (long long)v->size[2],
                 (long long)v->c, (long long)v->k, (long long)v->filter[1], (long long)v->filter[2],
                 (long long)v->stride[1], p->made.name, (long long)p->made.bytes);
    }
    pthread_mutex_unlock(&s->c->lock);
    return p;
}

/* Notes of forbidden engines: they round more than their types require, or sum in another order each time. */
static uint32_t bad_notes(const vm_conv *v) {
    const uint32_t all =
        1u << NOTE_DOWN_CONVERT_INPUTS | 1u << NOTE_REDUCED_PRECISION_REDUCTION | 1u << NOTE_NONDETERMINISTIC;
    if (v->dtype != VM_F32 || v->tf32) return all;
    return all | 1u << NOTE_TENSOR_CORE | 1u << NOTE_FFT | 1u << NOTE_WINOGRAD_TILE_4x4 | 1u << NOTE_WINOGRAD_TILE_6x6 |
           1u << NOTE_WINOGRAD_TILE_13x13;
}

/* The state of a search for plans. */
typedef struct search {
    const vm_cudnn_convs *s;
    const vm_conv_key *key;
    desc device;
    plan *found[CANDIDATES];
    size_t count, wanted;
    int64_t least; /* the least workspace of any plan, in bytes */
} search;

/* Returns: whether a plan was made; it then owns config. */
static bool try_config(search *f, desc config) {
    const vm_cudnn_plan made = vm_cudnn_try(f->s->c, config, bad_notes(&f->key->conv), f->device, f->s->handle);
    if (!made.plan) return false;
    if (f->least < 0 || made.bytes < f->least) f->least = made.bytes;
    plan *p = (size_t)made.bytes <= f->key->limit ? calloc(1, sizeof *p) : NULL;
    if (!p) {
        f->s->c->destroy(made.plan);
        return false;
    }
    *p = (plan){.key = *f->key, .made = made, .config = config};
    f->found[f->count++] = p;
    return true;
}

static void walk(search *f, vm_cudnn_question *q, desc graph, int mode) {
    desc config[MAX_CONFIGS];
    const int64_t count = vm_cudnn_configs(q, graph, f->device, mode, config);
    for (int64_t i = 0; i < count; i++)
        if (f->count == f->wanted || !try_config(f, config[i])) f->s->c->destroy(config[i]);
}

/* Finds up to `wanted` plans, best first. */
static vm_status look(search *f) {
    const vm_conv *v = &f->key->conv;
    vm_status status = vm_cudnn_check(v);
    if (status) return status;
    vm_cudnn_question q = {.c = f->s->c};
    if (f->s->device_json) f->device = vm_cudnn_device(&q, f->s->device_json);
    desc graph = vm_cudnn_graph(&q, v, f->s->handle);
    f->least = -1;
    walk(f, &q, graph, HEUR_A);
    if (!f->count) walk(f, &q, graph, HEUR_FALLBACK);
    status = vm_cudnn_end(&q, VM_EDEVICE);
    if (status || f->count) return status;
    char why[96] = "none at all fits this device";
    if (f->least >= 0) snprintf(why, sizeof why, "the least that one wants is %lld", (long long)f->least);
    return vm_fail(VM_EDEVICE,
                   "cuDNN %zu: expected an engine for %s%s %lldx%lldx%lld, %lld filters %lldx%lld, stride %lld, within "
                   "%zu bytes of "
                   "workspace, got none (%s)",
                   f->s->c->version, vm_dtype_name(v->dtype), v->tf32 ? " tf32" : "", (long long)v->size[1],
                   (long long)v->size[2], (long long)v->c, (long long)v->k, (long long)v->filter[1],
                   (long long)v->filter[2], (long long)v->stride[1], f->key->limit, why);
}

/* Finds or makes the plan. Requires the lock. */
static vm_status plan_of(vm_cudnn_convs *s, const vm_conv_key *key, plan **out) {
    if ((*out = find(s, key))) return VM_OK;
    search f = {.s = s, .key = key, .wanted = 1};
    size_t free = 0;
    vm_status status;
    if ((status = watch(s, true, &free))) return status;
    if ((status = look(&f))) return status;
    *out = f.found[0];
    (*out)->next = s->plans;
    s->plans = *out;
    return watch(s, false, &free);
}

vm_status vm_cudnn_convs_bytes(vm_cudnn_convs *s, const vm_conv_key *key, size_t *bytes) {
    plan *p = NULL;
    *bytes = 0;
    pthread_mutex_lock(&s->c->lock);
    const vm_status status = plan_of(s, key, &p);
    if (!status) *bytes = (size_t)p->made.bytes;
    pthread_mutex_unlock(&s->c->lock);
    return status;
}

/* Requires the lock. */
static vm_status execute(const vm_cudnn_convs *s, desc plan, void *stream, const void *x, const void *filters, void *y,
                         void *workspace) {
    const int64_t ids[3] = {'x', 'w', 'y'};
    const void *pointers[3] = {x, filters, y};
    vm_cudnn_question q = {.c = s->c};
    desc pack = vm_cudnn_make(&q, VARIANT_PACK);
    vm_cudnn_set(&q, pack, VARIANT_PACK_DATA_POINTERS, T_VOID_PTR, 3, pointers);
    vm_cudnn_set(&q, pack, VARIANT_PACK_UNIQUE_IDS, T_INT64, 3, ids);
    vm_cudnn_set(&q, pack, VARIANT_PACK_WORKSPACE, T_VOID_PTR, 1, &workspace);
    vm_cudnn_finalize(&q, pack, "variant pack");
    if (!q.status && (q.status = s->c->set_stream(s->handle, stream))) q.step = "stream";
    if (!q.status && (q.status = s->c->execute(s->handle, plan, pack))) q.step = "running a convolution";
    return vm_cudnn_end(&q, q.status == STATUS_DEVICE_ALLOCATION_FAILED ? VM_ENOMEM : VM_EDEVICE);
}

static vm_status no_device(void) {
    return vm_fail(VM_EINVAL, VM_EXPECTED("cuDNN", "a device to run on", "a description of one"));
}

vm_status vm_cudnn_convs_run(vm_cudnn_convs *s, const vm_conv_key *key, void *stream, const void *x,
                             const void *filters, void *y, void *workspace) {
    plan *p;
    if (!s->handle) return no_device();
    pthread_mutex_lock(&s->c->lock);
    vm_status status;
    size_t free = 0;
    if ((status = plan_of(s, key, &p))) goto done;
    if (!p->ran && (status = watch(s, true, &free))) goto done;
    if ((status = execute(s, p->made.plan, stream, x, filters, y, workspace))) goto done;
    if (!p->ran && (status = watch(s, false, &free))) goto done;
    p->ran = true;
done:
    pthread_mutex_unlock(&s->c->lock);
    return status;
}

/* ---- timed choice ---- */

typedef struct attempt {
    const vm_cudnn_convs *s;
    desc plan;
    void *stream, *y, *workspace;
    const void *x, *filters;
} attempt;

static vm_status run_attempt(void *job) {
    const attempt *a = job;
    return execute(a->s, a->plan, a->stream, a->x, a->filters, a->y, a->workspace);
}

vm_status vm_cudnn_convs_tune(vm_cudnn_convs *s, const vm_conv_key *key, void *stream, const void *x,
                              const void *filters, void *y, void *workspace, vm_conv_timer timer, void *context) {
    plan *kept;
    search f = {.s = s, .key = key, .wanted = CANDIDATES};
    if (!s->handle) return no_device();
    pthread_mutex_lock(&s->c->lock);
    vm_status status;
    size_t free = 0, winner = 0;
    double best = -1;
    if ((status = plan_of(s, key, &kept)) || kept->tuned) goto done; /* it keeps its place in the cache */
    if ((status = watch(s, true, &free))) goto done;
    status = look(&f);
    for (size_t i = 0; i < f.count; i++) {
        attempt a = {s, f.found[i]->made.plan, stream, y, workspace, x, filters};
        const double time = timer(context, run_attempt, &a);
        if (time < 0 || (best >= 0 && time >= best)) continue;
        best = time;
        winner = i;
    }
    if (best >= 0) {
        const plan loser = *kept;
        *kept = *f.found[winner];
        kept->next = loser.next;
        *f.found[winner] = loser;
    }
    if (!status) kept->tuned = true; /* if none could be timed, the heuristics' first stays */
    for (size_t i = 0; i < f.count; i++) free_plan(s->c, f.found[i]);
    if (!status && f.count) status = watch(s, false, &free);
done:
    pthread_mutex_unlock(&s->c->lock);
    return status;
}
