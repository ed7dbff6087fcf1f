/* A process's storages and names (process.h).
 *
 *   live   [ storage | storage | - | storage ]   in the order in which they were taken, with holes
 *   place  address -> index into live            open addressing, at most half full
 *   names  [ holder | trace: its names | ... ]   tag -> name, by binary search; holder -> tag by a hash table
 *
 * Who is live at the peak is copied only when that is about to change, so a run of takes costs one copy. */
#include <string.h>

#include "process.h"

typedef struct storage {
    uint64_t address; /* 0: a hole */
    uint64_t bytes;
    uint32_t tag;
} storage;

typedef struct storages {
    storage *at;
    size_t count, room;
} storages;

/* One name of a holder, or all names of a trace. */
typedef struct names {
    uint32_t first; /* tag */
    const vm_trace *trace;
    char *text;
} names;

struct vm_process {
    vm_talloc *talloc;
    vm_process_blas blas;
    uint64_t cublas, cublaslt; /* addresses of what is kept, or 0 */
    storages live;
    size_t holes;
    uint32_t *place; /* index + 1, or 0 */
    size_t places;
    names *name;
    size_t name_count;
    uint32_t tags;
    uint32_t *holder; /* hash table of names that holders have: index + 1, or 0 */
    size_t holders, holder_bins;
    uint64_t peak;                      /* bytes at the most so far */
    bool unsaved;                       /* what is live now was live at the peak and is not copied yet */
    storages outside, within, baseline; /* at the peak: outside of the call that made it, in it; when it was reset */
    uint32_t peak_step;                 /* the tag of the call's step, or VM_PROCESS_NO_TAG */
    bool full;                          /* the last call failed because the simulated device was full, */
    vm_talloc_oom oom;                  /* and these are its figures */
};

static void release(void *array, size_t items, size_t item) {
    vm_mem_free(vm_mem_common, VM_SCRATCH, array, items * item);
}

static vm_status grow(void *array, size_t count, size_t item) {
    return vm_mem_grow(vm_mem_common, VM_SCRATCH, array, count, item);
}

static void forget(storages *s) {
    release(s->at, s->room, sizeof *s->at);
    *s = (storages){0};
}

/* Makes place for so many more. */
static vm_status reserve(storages *s, size_t more) {
    if (s->room - s->count >= more) return VM_OK;
    const size_t room = VM_MAX(VM_MAX(16, 2 * s->room), s->count + more);
    void *wider;
    vm_status status = vm_mem_alloc(vm_mem_common, VM_SCRATCH, room * sizeof *s->at, &wider);
    if (status) return status;
    if (s->count) memcpy(wider, s->at, s->count * sizeof *s->at);
    release(s->at, s->room, sizeof *s->at);
    s->at = wider;
    s->room = room;
    return VM_OK;
}

vm_status vm_process_new(vm_talloc *talloc, const vm_process_blas *blas, vm_process **out) {
    vm_status s = vm_mem_alloc(vm_mem_common, VM_SCRATCH, sizeof **out, (void **)out);
    if (s) return s;
    (*out)->talloc = talloc;
    (*out)->blas = *blas;
    (*out)->peak_step = VM_PROCESS_NO_TAG;
    return VM_OK;
}

void vm_process_free(vm_process *p) {
    if (!p) return;
    for (size_t i = 0; i < p->name_count; i++)
        if (p->name[i].text) release(p->name[i].text, strlen(p->name[i].text) + 1, 1);
    release(p->name, vm_mem_capacity(p->name_count), sizeof *p->name);
    release(p->holder, p->holder_bins, sizeof *p->holder);
    release(p->place, p->places, sizeof *p->place);
    forget(&p->live);
    forget(&p->outside);
    forget(&p->within);
    forget(&p->baseline);
    release(p, 1, sizeof *p);
}

/* ---- names ---- */

static size_t hash(const char *text) {
    size_t h = 14695981039346656037u;
    while (*text) h = (h ^ (unsigned char)*text++) * 1099511628211u;
    return h;
}

static uint32_t *find_holder(const vm_process *p, const char *text) {
    size_t i = hash(text) & (p->holder_bins - 1);
    while (p->holder[i] && strcmp(p->name[p->holder[i] - 1].text, text)) i = (i + 1) & (p->holder_bins - 1);
    return &p->holder[i];
}

static vm_status widen_holders(vm_process *p) {
    if (2 * (p->holders + 1) <= p->holder_bins) return VM_OK;
    const size_t bins = p->holder_bins ? 2 * p->holder_bins : 64;
    void *wider;
    vm_status s = vm_mem_alloc(vm_mem_common, VM_SCRATCH, bins * sizeof *p->holder, &wider);
    if (s) return s;
    release(p->holder, p->holder_bins, sizeof *p->holder);
    p->holder = wider;
    p->holder_bins = bins;
    for (size_t i = 0; i < p->name_count; i++)
        if (p->name[i].text) *find_holder(p, p->name[i].text) = (uint32_t)i + 1;
    return VM_OK;
}

static vm_status add_names(vm_process *p, names one, size_t count) {
    if (count > VM_PROCESS_NO_TAG - 1 - p->tags) return vm_fail(VM_EOVERFLOW, "process: want fewer than 2^32 names");
    one.first = p->tags;
    vm_status s = grow(&p->name, p->name_count, sizeof *p->name);
    if (s) return s;
    p->name[p->name_count++] = one;
    p->tags += (uint32_t)count;
    return VM_OK;
}

static vm_status tag_of(vm_process *p, const char *text, uint32_t *tag) {
    vm_status s = widen_holders(p);
    if (s) return s;
    uint32_t *bin = find_holder(p, text);
    if (!*bin) {
        void *copy;
        const size_t bytes = strlen(text) + 1;
        if ((s = vm_mem_alloc(vm_mem_common, VM_SCRATCH, bytes, &copy))) return s;
        memcpy(copy, text, bytes);
        if ((s = add_names(p, (names){.text = copy}, 1))) {
            release(copy, bytes, 1);
            return s;
        }
        p->holders++;
        *bin = (uint32_t)p->name_count;
    }
    *tag = p->name[*bin - 1].first;
    return VM_OK;
}

/* The tag of a trace's first name. */
static vm_status tag_of_trace(vm_process *p, const vm_trace *t, uint32_t *tag) {
    for (size_t i = p->name_count; i-- > 0;)
        if (p->name[i].trace == t) {
            *tag = p->name[i].first;
            return VM_OK;
        }
    *tag = p->tags;
    return t->names ? add_names(p, (names){.trace = t}, t->names) : VM_OK;
}

uint32_t vm_process_tags(const vm_process *p) { return p->tags; }

const char *vm_process_name(const vm_process *p, uint32_t tag) {
    if (tag >= p->tags) return NULL;
    size_t low = 0, high = p->name_count; /* the last that does not begin behind tag */
    while (high - low > 1) {
        const size_t middle = (low + high) / 2;
        if (p->name[middle].first <= tag)
            low = middle;
        else
            high = middle;
    }
    const names *n = &p->name[low];
    return n->trace ? n->trace->name[tag - n->first] : n->text;
}

/* ---- what is live ---- */

static size_t start_of(const vm_process *p, uint64_t address) {
    return (size_t)((address >> 9) * 0x9e3779b97f4a7c15u >> 20) & (p->places - 1);
}

/* Where address stands, or would stand. */
static uint32_t *find_place(const vm_process *p, uint64_t address) {
    size_t i = start_of(p, address);
    while (p->place[i] && p->live.at[p->place[i] - 1].address != address) i = (i + 1) & (p->places - 1);
    return &p->place[i];
}

/* Makes place for so many more storages in the list and the table, so that adding them cannot fail; takes the holes out
 * of the list where they are most of it. */
static vm_status make_room(vm_process *p, size_t more) {
    const bool sparse = p->holes > 64 && 2 * p->holes > p->live.count;
    if (sparse) {
        size_t count = 0;
        for (size_t i = 0; i < p->live.count; i++)
            if (p->live.at[i].address) p->live.at[count++] = p->live.at[i];
        p->live.count = count;
        p->holes = 0;
    }
    vm_status s = reserve(&p->live, more);
    size_t places = p->places ? p->places : 128;
    while (places < 2 * (p->live.count + more)) places *= 2;
    if (!s && places > p->places) {
        void *wider;
        s = vm_mem_alloc(vm_mem_common, VM_SCRATCH, places * sizeof *p->place, &wider);
        if (!s) {
            release(p->place, p->places, sizeof *p->place);
            p->place = wider;
            p->places = places;
        }
    } else if (!sparse) {
        return s;
    }
    if (p->places) memset(p->place, 0, p->places * sizeof *p->place);
    for (size_t i = 0; i < p->live.count; i++)
        if (p->live.at[i].address) *find_place(p, p->live.at[i].address) = (uint32_t)i + 1;
    return s;
}

/* Behind make_room, so it cannot fail. */
static void add_live(vm_process *p, storage one) {
    *find_place(p, one.address) = (uint32_t)p->live.count + 1;
    p->live.at[p->live.count++] = one;
}

static void remove_live(vm_process *p, uint32_t *bin) {
    p->live.at[*bin - 1].address = 0;
    p->holes++;
    size_t hole = (size_t)(bin - p->place);
    *bin = 0;
    for (size_t i = (hole + 1) & (p->places - 1); p->place[i]; i = (i + 1) & (p->places - 1)) { /* close the gap */
        const size_t wanted = start_of(p, p->live.at[p->place[i] - 1].address);
        if (((i - wanted) & (p->places - 1)) < ((i - hole) & (p->places - 1))) continue;
        p->place[hole] = p->place[i];
        p->place[i] = 0;
        hole = i;
    }
}

uint64_t vm_process_bytes_at(const vm_process *p, uint64_t address) {
    const uint32_t *bin = p->places && address ? find_place(p, address) : NULL;
    return bin && *bin ? p->live.at[*bin - 1].bytes : 0;
}

/* ---- the peak ---- */

static vm_status copy_live(const vm_process *p, storages *out) {
    out->count = 0;
    vm_status s = reserve(out, p->live.count - p->holes);
    for (size_t i = 0; !s && i < p->live.count; i++)
        if (p->live.at[i].address) out->at[out->count++] = p->live.at[i];
    return s;
}

/* Before what is live changes. */
static vm_status save_peak(vm_process *p) {
    if (!p->unsaved) return VM_OK;
    vm_status s = copy_live(p, &p->outside);
    if (!s) p->unsaved = false;
    return s;
}

static uint64_t most_allocated(const vm_process *p) {
    return (uint64_t)vm_talloc_get_stats(p->talloc)->of[VM_TALLOC_ALLOCATED_BYTES][VM_TALLOC_ALL].peak;
}

vm_status vm_process_reset_peak(vm_process *p) {
    vm_status s = copy_live(p, &p->baseline);
    if (s) return s;
    vm_talloc_reset_peak(p->talloc);
    p->peak = most_allocated(p);
    p->peak_step = VM_PROCESS_NO_TAG;
    p->unsaved = true;
    return VM_OK;
}

/* What a call holds in one of its steps, when that holds most. What PyTorch keeps, cuBLAS's workspaces, is there
 * from its first use on, and has no address here. */
static vm_status hold_within(vm_process *p, const vm_trace *t, const uint64_t *workspace, uint32_t first,
                             const uint32_t kept[2], size_t at) {
    const vm_cublaslt use = p->blas.cublaslt_use;
    const vm_trace_step *last = &t->step[at];
    bool has[2] = {false, false};
    void *block;
    p->within.count = 0;
    vm_status s = reserve(&p->within, at + 4); /* a take a step, two workspaces that are kept, one that is not */
    if (!s) s = vm_mem_alloc(vm_mem_common, VM_SCRATCH, (size_t)t->ids + 1, &block);
    if (s) return s;
    bool *const given = block;
    storage *to = p->within.at;
    for (size_t i = 0; i <= at; i++)
        if (t->step[i].op == VM_TRACE_GIVE) given[t->step[i].id] = true;
    for (size_t i = 0; i <= at; i++) {
        const vm_trace_step *step = &t->step[i];
        const bool lt = step->op == VM_TRACE_CUBLASLT;
        if (step->op == VM_TRACE_TAKE && !given[step->id]) *to++ = (storage){1, step->bytes, first + step->name};
        if ((step->op == VM_TRACE_CUBLAS || (lt && use != VM_CUBLASLT_EACH)) && !has[0])
            *to++ = (storage){0, p->blas.cublas_bytes, kept[0]}, has[0] = true;
        if (lt && use == VM_CUBLASLT_KEPT && !has[1])
            *to++ = (storage){0, p->blas.cublaslt_bytes, kept[1]}, has[1] = true;
    }
    if (last->op == VM_TRACE_CONV) *to++ = (storage){1, workspace[last->id], first + last->name};
    if (last->op == VM_TRACE_CUBLASLT && use == VM_CUBLASLT_EACH)
        *to++ = (storage){1, p->blas.cublaslt_bytes, first + last->name};
    p->within.count = (size_t)(to - p->within.at);
    release(given, (size_t)t->ids + 1, 1);
    return VM_OK;
}

/* ---- taking and giving ---- */

const vm_talloc_oom *vm_process_last_oom(const vm_process *p) { return p->full ? &p->oom : NULL; }

/* The end of every call: whether it failed because the device was full. */
static vm_status done(vm_process *p, vm_status s) {
    const vm_talloc_oom *oom = s == VM_ENOMEM ? vm_talloc_last_oom(p->talloc) : NULL;
    p->full = oom != NULL;
    if (oom) p->oom = *oom;
    return s;
}

/* Behind make_room. */
static vm_status put(vm_process *p, storage one, uint64_t *address) {
    *address = 0;
    vm_status s = vm_talloc_malloc(p->talloc, one.bytes, 0, address);
    if (s || !*address) return s;
    one.address = *address;
    if (most_allocated(p) > p->peak) {
        p->peak = most_allocated(p);
        p->peak_step = VM_PROCESS_NO_TAG;
        p->unsaved = true;
    } else if ((s = save_peak(p))) {
        vm_talloc_free(p->talloc, *address);
        *address = 0;
        return s;
    }
    add_live(p, one);
    return VM_OK;
}

static vm_status give(vm_process *p, uint64_t address) {
    vm_status s = save_peak(p);
    if (!s) s = vm_talloc_free(p->talloc, address);
    if (s) return s;
    uint32_t *bin = p->places ? find_place(p, address) : NULL;
    if (!bin || !*bin)
        return vm_fail(VM_EINVAL, "address: want one of the process's storages, got %#llx",
                       (unsigned long long)address);
    remove_live(p, bin);
    return VM_OK;
}

vm_status vm_process_release(vm_process *p, uint64_t address) { return done(p, give(p, address)); }

/* Takes `count` storages under a name, all or none. */
static vm_status hold_all(vm_process *p, const char *stamp, const char *name, const uint64_t *bytes, size_t count,
                          uint64_t *address) {
    uint32_t shown, tag;
    vm_status s = tag_of(p, stamp, &shown);
    if (!s) s = tag_of(p, name, &tag);
    if (!s) s = make_room(p, count);
    if (s) return done(p, s);
    vm_talloc_tag(p->talloc, shown);
    size_t i = 0;
    while (i < count && !(s = put(p, (storage){0, bytes[i], tag}, &address[i]))) i++;
    done(p, s);
    while (s && i-- > 0)
        if (address[i] && !give(p, address[i])) address[i] = 0;
    return s;
}

vm_status vm_process_hold(vm_process *p, const char *name, const uint64_t *bytes, size_t count, uint64_t *address) {
    return hold_all(p, name, name, bytes, count, address);
}

vm_status vm_process_place(vm_process *p, const char *stamp, const char *name, const vm_trace *t, uint64_t *address) {
    void *block;
    vm_status s = vm_mem_alloc(vm_mem_common, VM_SCRATCH, ((size_t)t->ids + 1) * sizeof(uint64_t), &block);
    if (s) return done(p, s);
    uint64_t *const bytes = block;
    for (size_t i = 0; i < t->steps; i++)
        if (t->step[i].op == VM_TRACE_TAKE) bytes[t->step[i].id] = t->step[i].bytes;
    s = hold_all(p, stamp, name, bytes, t->ids, address);
    release(bytes, (size_t)t->ids + 1, sizeof *bytes);
    return s;
}

vm_status vm_process_copy(vm_process *p, const char *stamp, uint64_t *address, const uint64_t *bytes, size_t count,
                          size_t *copied) {
    uint32_t shown;
    *copied = 0;
    vm_status s = tag_of(p, stamp, &shown);
    if (!s) vm_talloc_tag(p->talloc, shown);
    for (; !s && *copied < count; ++*copied) {
        const uint32_t *bin = p->places ? find_place(p, address[*copied]) : NULL;
        if (!bin || !*bin) s = vm_fail(VM_EINVAL, "copy: want storages of the process");
        const storage like = {0, bytes[*copied], s ? 0 : p->live.at[*bin - 1].tag};
        uint64_t copy = 0;
        if (!s) s = make_room(p, 1);
        if (!s) s = put(p, like, &copy);
        if (!s) s = give(p, address[*copied]);
        if (s) break;
        address[*copied] = copy;
    }
    return done(p, s);
}

/* What a call leaves becomes live, in the order in which it was taken. Behind make_room. */
static void add_left(vm_process *p, const vm_trace *t, const uint64_t *address, uint32_t first) {
    for (size_t i = 0; i < t->steps; i++) {
        const vm_trace_step *step = &t->step[i];
        if (step->op == VM_TRACE_TAKE && address[step->id])
            add_live(p, (storage){address[step->id], step->bytes, first + step->name});
    }
}

/* A workspace of cuBLAS's that is kept from now on becomes live. */
static void keep(vm_process *p, uint64_t *kept, uint64_t address, uint64_t bytes, uint32_t tag) {
    if (address && !*kept) add_live(p, (storage){address, bytes, tag});
    *kept = address;
}

vm_status vm_process_call(vm_process *p, const vm_trace *t, uint64_t *workspace, const uint64_t *next,
                          uint64_t *address, uint64_t *allocated, uint64_t *reserved) {
    const vm_process_blas *blas = &p->blas;
    uint32_t first, kept[2];
    vm_status s = tag_of_trace(p, t, &first);
    if (!s) s = tag_of(p, "cublas [workspace]", &kept[0]);
    if (!s) s = tag_of(p, "cublaslt [workspace]", &kept[1]);
    if (!s) s = save_peak(p);
    if (!s) s = make_room(p, (size_t)t->ids + 2);
    if (s) return done(p, s);
    vm_trace_process run = {.talloc = p->talloc,
                            .workspace = workspace,
                            .next = next,
                            .cublas_bytes = blas->cublas_bytes,
                            .cublaslt_bytes = blas->cublaslt_bytes,
                            .cublaslt_use = blas->cublaslt_use,
                            .cublas = p->cublas,
                            .cublaslt = p->cublaslt,
                            .tag = first};
    s = vm_trace_run(t, &run, address, allocated, reserved);
    p->full = run.full;
    p->oom = run.oom;
    if (!s && t->steps && most_allocated(p) > p->peak) {
        size_t most = 0;
        for (size_t i = 1; i < t->steps; i++)
            if (allocated[i] > allocated[most]) most = i;
        vm_status copied = copy_live(p, &p->outside);
        if (!copied) copied = hold_within(p, t, workspace, first, kept, most);
        if (copied) s = copied;
        p->peak = most_allocated(p);
        p->peak_step = first + t->step[most].name;
    }
    keep(p, &p->cublas, run.cublas, blas->cublas_bytes, kept[0]);
    keep(p, &p->cublaslt, run.cublaslt, blas->cublaslt_bytes, kept[1]);
    if (!s) {
        add_left(p, t, address, first);
        return VM_OK;
    }
    for (size_t id = 0; id < t->ids; id++) /* where the run itself failed, nothing is left */
        if (address[id] && vm_talloc_free(p->talloc, address[id]) == VM_OK) address[id] = 0;
    return s;
}

/* ---- what happened ---- */

void vm_process_list_free(vm_process_list *list) {
    release(list->item, list->room, sizeof *list->item);
    *list = (vm_process_list){0};
}

/* Adds storages to a list by name; bin is a hash table of the list's names: index + 1, or 0. Names that the list has
 * had from its first `had` entries on are not given what has no address: cuBLAS's workspaces are there already. */
static void sum(const vm_process *p, const storages *of, vm_process_list *list, uint32_t *bin, size_t bins,
                size_t had) {
    vm_process_named *to = NULL;
    uint32_t last = VM_PROCESS_NO_TAG;
    for (size_t i = 0; i < of->count; i++) {
        const storage *one = &of->at[i];
        if (!to || one->tag != last || !one->address) {
            const char *const text = vm_process_name(p, one->tag);
            size_t b = hash(text) & (bins - 1);
            while (bin[b] && strcmp(vm_process_name(p, list->item[bin[b] - 1].tag), text)) b = (b + 1) & (bins - 1);
            if (!one->address && bin[b] && bin[b] <= had) continue;
            if (!bin[b]) {
                list->item[list->count++] = (vm_process_named){.tag = one->tag};
                bin[b] = (uint32_t)list->count;
            }
            to = &list->item[bin[b] - 1];
            last = one->tag;
        }
        to->bytes += one->bytes;
    }
}

static vm_status list_of(const vm_process *p, const storages *outside, const storages *within, vm_process_list *out) {
    const size_t count = outside->count + (within ? within->count : 0);
    size_t bins = 16;
    while (bins < 2 * count) bins *= 2;
    void *bin = NULL, *item = NULL;
    *out = (vm_process_list){0};
    vm_status s = vm_mem_alloc(vm_mem_common, VM_SCRATCH, bins * sizeof(uint32_t), &bin);
    if (!s) s = vm_mem_alloc(vm_mem_common, VM_SCRATCH, (count + 1) * sizeof *out->item, &item);
    if (!s) {
        out->item = item;
        out->room = count + 1;
        sum(p, outside, out, bin, bins, 0);
        if (within) sum(p, within, out, bin, bins, out->count);
    }
    release(bin, bins, sizeof(uint32_t));
    return s;
}

vm_status vm_process_peak(vm_process *p, vm_process_list *out, uint32_t *step) {
    vm_status s = save_peak(p);
    if (s) return s;
    *step = p->peak_step;
    return list_of(p, &p->outside, p->peak_step == VM_PROCESS_NO_TAG ? NULL : &p->within, out);
}

vm_status vm_process_baseline(vm_process *p, vm_process_list *out) { return list_of(p, &p->baseline, NULL, out); }
