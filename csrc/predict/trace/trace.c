/* The trace, and the temporaries of CUDA operators.
 *
 * Sources, in PyTorch: native/cuda/group_norm_kernel.cu,
 * native/transformers/cuda/{attention.cu,sdp_utils.cpp,flash_attn, mem_eff_attention},
 * native/transformers/attention.cpp, native/cudnn/Conv_v8.cpp, cuda/{CUDABlas,CublasHandlePool}.cpp. */
#include <stdio.h>
#include <string.h>

#include "trace.h"

/* Makes room for one more item in *array; no kind has more items than there may be steps. */
static vm_status grow(void *array, size_t count, size_t item) {
    if (count == VM_TRACE_STEPS) return vm_fail(VM_EOVERFLOW, VM_EXPECTED("trace", "at most %zu steps", "more"), count);
    return vm_scratch_grow(array, count, item);
}

vm_status vm_trace_new(vm_trace **out) { return vm_scratch_new(1, sizeof **out, out); }

vm_trace *vm_trace_share(vm_trace *t) {
    t->shared++;
    return t;
}

void vm_trace_free(vm_trace *t) {
    if (!t) return;
    if (t->shared) {
        t->shared--;
        return;
    }
    vm_scratch_free(t->step);
    vm_scratch_free(t->conv);
    vm_names_free(&t->names);
    vm_scratch_free(t->stretch);
    vm_scratch_free(t->walk);
    vm_scratch_free(t);
}

/* Copies a growing array of a trace. */
static vm_status copy_items(const void *from, size_t count, size_t item, void *out) {
    const vm_status s = vm_scratch_new(vm_mem_capacity(count), item, out);
    if (!s && count) memcpy(*(void **)out, from, count * item);
    return s;
}

static vm_status copy(const vm_trace *from, vm_trace **out) {
    uint32_t number;
    vm_trace *own;
    vm_status s;
    if ((s = vm_trace_new(&own))) return s;
    if ((s = copy_items(from->step, from->steps, sizeof *own->step, &own->step))) goto done;
    if ((s = copy_items(from->conv, from->convs, sizeof *own->conv, &own->conv))) goto done;
    if ((s = copy_items(from->stretch, from->stretches, sizeof *own->stretch, &own->stretch))) goto done;
    for (size_t i = 0; i < from->names.count; i++)
        if ((s = vm_names_add(&own->names, vm_names_get(&from->names, i), &number))) goto done;
    own->steps = from->steps, own->convs = from->convs, own->stretches = from->stretches;
    own->ids = from->ids, own->kinds = from->kinds;
    own->flops = from->flops, own->attended = from->attended, own->moved = from->moved, own->sent = from->sent;
done:
    if (s)
        vm_trace_free(own);
    else
        *out = own;
    return s;
}

vm_status vm_trace_own(vm_trace **t) {
    vm_trace *own = *t;
    vm_status s = own->shared ? copy(*t, &own) : VM_OK;
    if (s) return s;
    if (own != *t) vm_trace_free(*t);
    vm_scratch_free(own->walk);
    own->walk = NULL;
    *t = own;
    return VM_OK;
}

/* ---- names ---- */

static vm_status intern(vm_trace *t, const char *name, uint32_t *index) {
    const size_t length = strlen(name);
    if (length >= VM_NAME) {
        name += length - (VM_NAME - 1);
        while ((*name & 0xc0) == 0x80) name++; /* the rest of a UTF-8 character without its front */
    }
    return vm_names_add(&t->names, name, index);
}

static const char *end_of(const char *name) {
    const size_t length = strlen(name);
    return length > VM_NAME ? name + (length - VM_NAME) : name;
}

const char *vm_trace_label(char text[VM_TRACE_LABEL], const char *name, const char *what) {
    snprintf(text, VM_TRACE_LABEL, *what ? "%s [%s]" : "%s", end_of(name), end_of(what));
    return text;
}

/* ---- steps ---- */

static vm_status add_step(vm_trace *t, vm_trace_step step, const char *name) {
    vm_status s;
    if (name && (s = intern(t, name, &step.name))) return s;
    if ((s = grow(&t->step, t->steps, sizeof *t->step))) return s;
    t->step[t->steps++] = step;
    return VM_OK;
}

static vm_status add(vm_trace *t, vm_trace_op op, uint32_t id, uint64_t bytes, const char *name) {
    return add_step(t, (vm_trace_step){.op = op, .id = id, .bytes = bytes}, name);
}

vm_status vm_trace_take(vm_trace *t, uint64_t bytes, const char *name, uint32_t *id) {
    return vm_trace_take_on(t, 0, bytes, name, id);
}

vm_status vm_trace_take_on(vm_trace *t, uint32_t stream, uint64_t bytes, const char *name, uint32_t *id) {
    if (bytes > VM_TALLOC_LARGEST)
        return vm_fail(VM_EOVERFLOW, VM_EXPECTED("%s", "a storage of at most 2^60 bytes", "more"), name);
    if (stream >= VM_TRACE_STREAMS)
        return vm_fail(VM_EINVAL, VM_EXPECTED("stream", "one below %d", "%u"), VM_TRACE_STREAMS, stream);
    const vm_trace_step step = {.op = VM_TRACE_TAKE, .id = t->ids, .stream = stream, .bytes = bytes};
    vm_status s = add_step(t, step, name);
    if (s) return s;
    *id = t->ids++;
    vm_trace_move(t, 2 * bytes);
    return VM_OK;
}

vm_status vm_trace_give(vm_trace *t, uint32_t id) {
    if (id >= t->ids) return vm_fail(VM_EINVAL, VM_EXPECTED("id", "one below %u", "%u"), t->ids, id);
    return add(t, VM_TRACE_GIVE, id, 0, NULL);
}

/* Returns: whether the steps since `from` free all they allocate, and nothing else. */
static bool is_stretch(const vm_trace *t, size_t from) {
    size_t taken = 0, given = 0;
    uint32_t first = t->ids;
    for (size_t i = from; i < t->steps; i++) {
        if (t->step[i].op == VM_TRACE_EMPTY) return false;
        if (t->step[i].op == VM_TRACE_TAKE && !taken++) first = t->step[i].id;
        if (t->step[i].op != VM_TRACE_GIVE) continue;
        if (t->step[i].id < first) return false;
        given++;
    }
    return taken && taken == given;
}

/* Returns: whether the steps since `from` equal those of a stretch, apart from the numbers of storages. */
static bool is_same_stretch(const vm_trace *t, const vm_trace_stretch *x, size_t from) {
    if (x->until - x->from != t->steps - from) return false;
    const vm_trace_step *a = t->step + x->from, *b = t->step + from;
    uint32_t shift = 0; /* taken from the first step that names a storage */
    for (size_t i = 0; i < t->steps - from; i++, a++, b++) {
        if (a->op != b->op || a->bytes != b->bytes || a->name != b->name || a->stream != b->stream) return false;
        const bool stores = a->op == VM_TRACE_TAKE || a->op == VM_TRACE_GIVE;
        if (stores && !shift) shift = b->id - a->id;
        if (b->id - a->id != (stores ? shift : 0)) return false;
    }
    return true;
}

vm_status vm_trace_note_stretch(vm_trace *t, size_t from) {
    enum { KINDS = 64, LATEST = 8 }; /* the most kinds, and the stretches compared with a new one */
    if (!is_stretch(t, from)) return VM_OK;
    const size_t most = t->stretches;
    uint32_t kind = t->kinds;
    for (size_t i = 0; i < VM_MIN(most, LATEST) && kind == t->kinds; i++)
        if (is_same_stretch(t, &t->stretch[most - 1 - i], from)) kind = t->stretch[most - 1 - i].kind;
    if (kind == KINDS) return VM_OK;
    vm_status s = grow(&t->stretch, most, sizeof *t->stretch);
    if (s) return s;
    t->stretch[t->stretches++] = (vm_trace_stretch){from, t->steps, kind};
    t->kinds = VM_MAX(t->kinds, kind + 1);
    return VM_OK;
}

vm_status vm_trace_wants(const vm_trace *t, uint64_t low, uint64_t high, bool segments, uint64_t spare,
                         vm_trace_want out[VM_TRACE_WANTS], size_t *count) {
    uint64_t *held, live = 0, most = 0; /* by id */
    *count = 0;
    vm_status s = vm_scratch_new(t->ids, sizeof *held, &held);
    if (s) return s;
    for (size_t i = 0; i < t->steps; i++) {
        const vm_trace_step *const step = &t->step[i];
        if (step->op == VM_TRACE_GIVE) {
            live -= held[step->id];
            held[step->id] = 0;
        } else if (step->op == VM_TRACE_TAKE) {
            const uint64_t size = VM_ROUND_UP(step->bytes, 512);
            const uint64_t asked = segments ? vm_talloc_segment(size) : step->bytes;
            held[step->id] = size;
            const bool is_full = live + VM_MAX(size - 1, spare) >= most;
            if (is_full && asked >= low && asked <= high && *count < VM_TRACE_WANTS)
                out[(*count)++] = (vm_trace_want){step->name, step->bytes, live};
            live += size;
            most = VM_MAX(most, live);
        }
    }
    vm_scratch_free(held);
    return VM_OK;
}

vm_status vm_trace_blas(vm_trace *t, vm_trace_op op, const char *name) { return add(t, op, 0, 0, name); }

static void raise_by(uint64_t *count, uint64_t by) { *count += VM_MIN(by, UINT64_MAX - *count); }

void vm_trace_count(vm_trace *t, uint64_t flops) { raise_by(&t->flops, flops); }
void vm_trace_move(vm_trace *t, uint64_t bytes) { raise_by(&t->moved, bytes); }

vm_status vm_trace_send(vm_trace *t, uint64_t bytes, bool empties) {
    raise_by(&t->sent, bytes);
    return empties ? add(t, VM_TRACE_EMPTY, 0, 0, "empty_cache") : VM_OK;
}

/* Every number of the filters meets every pixel of the output, or of a transposed convolution's input. It reads input
 * and filters. Adding the bias reads and writes the output once more. */
static void count_conv(vm_trace *t, const vm_conv *c) {
    const uint64_t groups = c->groups > 0 ? (uint64_t)c->groups : 1, in = (uint64_t)c->c, out = (uint64_t)c->k;
    uint64_t numbers = VM_PRODUCT64(c->transposed ? in : in / groups, c->transposed ? out / groups : out), taps = 1;
    uint64_t read = VM_PRODUCT64((uint64_t)c->n, in), made = VM_PRODUCT64((uint64_t)c->n, out), pixels = 1;
    for (int i = 0; i < VM_CONV_DIMS; i++) {
        const uint64_t side = (uint64_t)c->filter[i], stride = c->stride[i] > 0 ? (uint64_t)c->stride[i] : 1;
        const uint64_t reach =
            (uint64_t)c->size[i] + 2 * (uint64_t)c->padding[i] - (uint64_t)c->dilation[i] * (side - 1);
        const uint64_t to = c->transposed ? (uint64_t)c->size[i] : (reach - 1) / stride + 1;
        taps = VM_PRODUCT64(taps, side);
        pixels = VM_PRODUCT64(pixels, to);
        read = VM_PRODUCT64(read, (uint64_t)c->size[i]);
        made = VM_PRODUCT64(made, to);
    }
    vm_trace_count(t, VM_PRODUCT64(2, (uint64_t)c->n, numbers, taps, pixels));
    const uint64_t each = vm_dtype_bytes(c->dtype);
    const uint64_t parts[] = {read, VM_PRODUCT64(numbers, taps), made};
    for (size_t i = 0; i < 3; i++) vm_trace_move(t, VM_PRODUCT64(parts[i], each));
}

vm_status vm_trace_question(vm_trace *t, const vm_conv *conv, uint32_t *number) {
    size_t i = 0;
    while (i < t->convs && !vm_conv_same(&t->conv[i], conv)) i++;
    *number = (uint32_t)i;
    if (i < t->convs) return VM_OK;
    vm_status s = grow(&t->conv, i, sizeof *t->conv);
    if (!s) t->conv[t->convs++] = *conv;
    return s;
}

vm_status vm_trace_conv(vm_trace *t, const vm_conv *conv, const char *name) {
    uint32_t number;
    vm_status s = vm_trace_question(t, conv, &number);
    if (s) return s;
    count_conv(t, conv);
    return add(t, VM_TRACE_CONV, number, 0, name);
}

/* ---- operators ---- */

/* Takes `count` storages and gives them back. */
static vm_status pass_through(vm_trace *t, const uint64_t *bytes, size_t count, const char *name) {
    uint32_t id[4];
    vm_status s = VM_OK;
    for (size_t i = 0; !s && i < count; i++) s = vm_trace_take(t, bytes[i], name, &id[i]);
    for (size_t i = 0; !s && i < count; i++) s = vm_trace_give(t, id[i]);
    return s;
}

vm_status vm_trace_norm(vm_trace *t, vm_dtype dtype, uint64_t n, uint64_t c, uint64_t groups, uint64_t pixels,
                        const char *name, uint32_t stats[2]) {
    const uint64_t bytes = VM_PRODUCT64(n, groups, vm_dtype_bytes(dtype));
    const uint64_t fused = VM_PRODUCT64(4, n, c); /* for any dtype */
    vm_trace_move(t,
                  VM_PRODUCT64(n, c, pixels, vm_dtype_bytes(dtype))); /* reads the input once more for the statistics */
    vm_status s;
    if ((s = vm_trace_take(t, bytes, name, &stats[0]))) return s;
    if ((s = vm_trace_take(t, bytes, name, &stats[1]))) return s;
    return pixels > 1 ? pass_through(t, (uint64_t[]){fused, fused}, 2, name) : VM_OK;
}

/* Returns: parts into which flash attention splits the keys if the queries alone do not fill the device. */
static uint64_t flash_splits(const vm_sdpa *a, const vm_trace_gpu *gpu) {
    const uint64_t depth = a->v.depth, block = depth <= 64 ? 256 : depth <= 128 ? 128 : 64;
    const uint64_t blocks = vm_round_up64(a->k.length, block) / block, slots = 2 * (uint64_t)gpu->multiprocessors;
    const uint64_t work = VM_PRODUCT64(a->q.batch, a->q.heads, vm_round_up64(a->q.length, 64) / 64);
    if ((double)work >= 0.8 * (double)slots) return 1;
    const uint64_t most = VM_MIN(VM_MIN(128, slots), blocks);
    double best = 0, efficiency[129] = {0};
    for (uint64_t n = 1; n <= most; n++) {
        if (n > 1 && (blocks + n - 1) / n == (blocks + n - 2) / (n - 1)) continue; /* no part gets shorter */
        const double waves = (double)(work * n) / (double)slots;
        efficiency[n] = waves / (double)((work * n + slots - 1) / slots);
        best = VM_MAX(best, efficiency[n]);
    }
    for (uint64_t n = 1; n <= most; n++)
        if (efficiency[n] >= 0.85 * best && efficiency[n] > 0) return n;
    return 1;
}

static vm_status flash(vm_trace *t, const vm_sdpa *a, const vm_trace_gpu *gpu, const char *name, uint32_t *id) {
    const uint64_t rows = VM_PRODUCT64(a->q.batch, a->q.heads, a->q.length), splits = flash_splits(a, gpu);
    const uint64_t depth = VM_ROUND_UP(a->v.depth, 8), rounded = VM_ROUND_UP(a->v.depth, a->v.depth <= 128 ? 32 : 64);
    const uint64_t q = VM_PRODUCT64(rows, depth, 2), kv = VM_PRODUCT64(a->k.batch, a->k.heads, a->k.length, depth, 2);
    const bool pads = depth != a->v.depth;
    uint32_t padded[3] = {0};
    vm_status s;
    for (size_t i = 0; pads && i < 3; i++)
        if ((s = vm_trace_take(t, i ? kv : q, name, &padded[i]))) return s;
    if ((s = vm_trace_take(t, q, name, id))) return s;
    const uint64_t lse_and_parts[3] = {VM_PRODUCT64(4, rows), VM_PRODUCT64(4, splits, rows),
                                       VM_PRODUCT64(4, splits, rows, rounded)};
    if ((s = pass_through(t, lse_and_parts, splits > 1 ? 3 : 1, name))) return s;
    for (size_t i = 0; pads && i < 3; i++)
        if ((s = vm_trace_give(t, padded[i]))) return s;
    return VM_OK;
}

static vm_status efficient(vm_trace *t, const vm_sdpa *a, const char *name, uint32_t *id) {
    const uint64_t count = VM_PRODUCT64(a->q.batch, a->q.heads, a->q.length, a->v.depth);
    const uint64_t sums = VM_PRODUCT64(4, count);
    const vm_status s = vm_trace_take(t, VM_PRODUCT64(count, vm_dtype_bytes(a->dtype)), name, id);
    if (s) return s;
    /* Heads wider than 128 are accumulated in a float tensor in memory instead of registers. */
    return a->dtype != VM_F32 && a->v.depth > 128 ? pass_through(t, &sums, 1, name) : VM_OK;
}

/* A seed and an offset for dropout, the output, and 256 bytes of workspace: so on an H200 with cuDNN 9.19, for heads of
 * 40 to 160 channels. Whether other cards need more is not known. */
static vm_status cudnn(vm_trace *t, const vm_sdpa *a, const char *name, uint32_t *id) {
    const uint64_t bytes = VM_PRODUCT64(a->q.batch, a->q.heads, a->q.length, a->v.depth, vm_dtype_bytes(a->dtype));
    const uint64_t workspace = 256;
    uint32_t numbers[2] = {0};
    vm_status s;
    for (size_t i = 0; i < 2; i++)
        if ((s = vm_trace_take(t, 8, name, &numbers[i]))) return s;
    if ((s = vm_trace_take(t, bytes, name, id))) return s;
    if ((s = pass_through(t, &workspace, 1, name))) return s;
    for (size_t i = 0; i < 2; i++)
        if ((s = vm_trace_give(t, numbers[i]))) return s;
    return VM_OK;
}

/* Takes the storages of a composite operator; errors stick. */
typedef struct maker {
    vm_trace *t;
    const char *name;
    vm_status status;
} maker;

enum { NOT_MADE = UINT32_MAX };

static uint32_t make_if(maker *m, bool is_made, uint64_t bytes) {
    uint32_t id = NOT_MADE;
    if (is_made && !m->status) m->status = vm_trace_take(m->t, bytes, m->name, &id);
    return id;
}

static uint32_t make(maker *m, uint64_t bytes) { return make_if(m, true, bytes); }

static void drop(maker *m, const uint32_t *id, size_t count) {
    for (size_t i = 0; !m->status && i < count; i++)
        if (id[i] != NOT_MADE) m->status = vm_trace_give(m->t, id[i]);
}

static void multiply(maker *m, uint64_t rows, uint64_t depth, uint64_t cols) {
    vm_trace_count(m->t, VM_PRODUCT64(2, rows, depth, cols));
    if (!m->status) m->status = vm_trace_blas(m->t, VM_TRACE_CUBLAS, m->name);
}

/* Booleans of a lower triangle, and the mask made from them, 0 or -inf. */
static uint32_t make_causal_mask(maker *m, uint64_t pairs) {
    const uint32_t ones = make(m, pairs), lower = make(m, pairs);
    drop(m, &ones, 1);
    const uint32_t zero = make(m, 4), least = make(m, 4), mask = make(m, VM_PRODUCT64(4, pairs));
    drop(m, (uint32_t[]){lower, zero, least}, 3);
    return mask;
}

/* _safe_softmax, which handles rows with every key masked; gives the scores back. */
static uint32_t make_weights(maker *m, uint32_t scores, uint64_t rows, uint64_t keys) {
    const uint64_t count = VM_PRODUCT64(rows, keys), bytes = VM_PRODUCT64(4, count);
    const uint32_t soft = make(m, bytes), least = make(m, 4), masked = make(m, count), masked_rows = make(m, rows);
    const uint32_t zero = make(m, 4), weights = make(m, bytes);
    drop(m, (uint32_t[]){scores, soft, least, masked, masked_rows, zero}, 6);
    return weights;
}

/* Returns: whether a batched product copies a tensor because its heads are not consecutive. */
static bool is_copied(const vm_heads *h) { return h->by_token && h->batch > 1 && h->heads > 1 && h->length > 1; }

/* The math path, _scaled_dot_product_attention_math: queries, keys and values in float; keys and values repeated for
 * the queries that share them; scaled queries and keys; scores, to which a mask is added in place. In half precision it
 * also converts the weights, unused here. The output lies head by head. */
static vm_status math(vm_trace *t, const vm_sdpa *a, const char *name, uint32_t *id) {
    const vm_heads *const q = &a->q, *const k = &a->k, *const v = &a->v;
    const uint64_t rows = VM_PRODUCT64(q->batch, q->heads, q->length), pairs = VM_PRODUCT64(q->length, k->length);
    const uint64_t own = VM_PRODUCT64(4, k->batch, k->heads, k->length),
                   all = VM_PRODUCT64(4, q->batch, q->heads, k->length);
    const uint64_t queries = VM_PRODUCT64(4, rows, q->depth), keys = VM_PRODUCT64(all, k->depth);
    const uint64_t values = VM_PRODUCT64(all, v->depth), scores = VM_PRODUCT64(4, rows, k->length);
    const uint64_t made = VM_PRODUCT64(rows, v->depth), size = vm_dtype_bytes(a->dtype);
    const bool half = a->dtype != VM_F32, repeats = q->heads != k->heads;
    maker m = {t, name, VM_OK};
    const uint32_t float_q = make_if(&m, half, queries), float_k = make_if(&m, half, VM_PRODUCT64(own, k->depth));
    const uint32_t float_v = make_if(&m, half, VM_PRODUCT64(own, v->depth)), scaled_q = make(&m, queries);
    const uint32_t causal = a->causal ? make_causal_mask(&m, pairs) : NOT_MADE;
    const uint32_t repeated_k = make_if(&m, repeats, keys), repeated_v = make_if(&m, repeats, values);
    const uint32_t scaled_k = make(&m, keys), copied_q = make_if(&m, is_copied(q), queries);
    const uint32_t copied_k = make_if(&m, !repeats && is_copied(k), keys), raw = make(&m, scores);
    multiply(&m, rows, q->depth, k->length);
    drop(&m, (uint32_t[]){scaled_k, copied_q, copied_k}, 3);
    if (a->causal || a->masked) /* scores are read and written, and a mask is read */
        vm_trace_move(t, VM_PRODUCT64(2, scores));
    vm_trace_move(t, a->causal ? VM_PRODUCT64(4, pairs) : a->masked ? VM_PRODUCT64(a->mask, size) : 0);
    const uint32_t weights = make_weights(&m, raw, rows, k->length), half_weights = make_if(&m, half, scores / 2);
    const uint32_t copied_v = make_if(&m, !repeats && is_copied(v), values);
    const uint32_t sums = make(&m, VM_PRODUCT64(4, made));
    multiply(&m, rows, k->length, v->depth);
    drop(&m, &copied_v, 1);
    *id = half ? make(&m, VM_PRODUCT64(2, made)) : sums;
    drop(&m, (uint32_t[]){float_q, float_k, float_v, scaled_q, causal, repeated_k, repeated_v}, 7);
    drop(&m, (uint32_t[]){weights, half_weights, half ? sums : NOT_MADE}, 3);
    return m.status;
}

/* Takes the temporaries of an attention kernel. */
static vm_status run_kernel(vm_trace *t, const vm_sdpa *a, vm_attention_kernel kernel, const vm_trace_gpu *gpu,
                            const char *name, uint32_t *id) {
    if (kernel == VM_ATTENTION_MATH) return math(t, a, name, id);
    const uint64_t flops = VM_PRODUCT64(4, a->q.batch, a->q.heads, a->q.length, a->k.length, a->v.depth);
    vm_trace_count(t, flops);
    raise_by(&t->attended, flops);
    if (kernel == VM_ATTENTION_CUDNN) return cudnn(t, a, name, id);
    return kernel == VM_ATTENTION_FLASH ? flash(t, a, gpu, name, id) : efficient(t, a, name, id);
}

vm_status vm_trace_attention(vm_trace *t, const vm_sdpa *call, vm_attention_kernel kernel, const vm_trace_gpu *gpu,
                             const char *name, uint32_t *id) {
    static const vm_attention_kernel usual[] = {VM_ATTENTION_CUDNN, VM_ATTENTION_FLASH, VM_ATTENTION_EFFICIENT,
                                                VM_ATTENTION_MATH};
    const size_t first = gpu->cudnn ? 0 : 1;
    if (gpu->multiprocessors < 1)
        return vm_fail(VM_EINVAL, VM_EXPECTED("multiprocessors", "1 or more", "%d"), gpu->multiprocessors);
    vm_status s;
    if (kernel == VM_ATTENTION_USUAL && (s = vm_sdpa_choose(call, gpu, usual + first, 4 - first, &kernel))) return s;
    const uint64_t row = call->mask_row, size = vm_dtype_bytes(call->dtype);
    const bool pads = call->masked && kernel == VM_ATTENTION_EFFICIENT && row % 8,
               copies = call->masked && call->boolean;
    const uint64_t padded = pads ? VM_PRODUCT64(call->mask / row, vm_round_up64(row, 8), size) : 0;
    char text[VM_TRACE_LABEL];
    uint32_t copy = 0, wider = 0;
    if (copies && (s = vm_trace_take(t, VM_PRODUCT64(call->mask, size), vm_trace_label(text, name, "mask"), &copy)))
        return s;
    if (pads && (s = vm_trace_take(t, padded, vm_trace_label(text, name, "mask, padded"), &wider))) return s;
    if ((s = run_kernel(t, call, kernel, gpu, vm_trace_label(text, name, "attention"), id))) return s;
    if (pads && (s = vm_trace_give(t, wider))) return s;
    if (copies && (s = vm_trace_give(t, copy))) return s;
    const bool by_head = kernel == VM_ATTENTION_MATH || (kernel == VM_ATTENTION_CUDNN && !call->q.by_token);
    if (!by_head || call->q.heads == 1 || call->q.length == 1) return VM_OK;
    const uint32_t written = *id;
    s = vm_trace_take(t, VM_PRODUCT64(call->q.batch, call->q.heads, call->q.length, call->v.depth, size), text, id);
    return s ? s : vm_trace_give(t, written);
}
