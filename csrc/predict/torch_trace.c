/* The trace itself, and what CUDA operators take besides their outputs.
 *
 * Sources, in PyTorch: native/cuda/group_norm_kernel.cu,
 * native/transformers/cuda/{attention.cu,sdp_utils.cpp,flash_attn, mem_eff_attention},
 * native/transformers/attention.cpp, native/cudnn/Conv_v8.cpp, cuda/{CUDABlas,CublasHandlePool}.cpp. */
#include <stdio.h>
#include <string.h>

#include "torch_trace.h"

/* Makes place for one more item in *array; there are no more of any kind than steps. */
static vm_status grow(void *array, size_t count, size_t item) {
    if (count == VM_TRACE_STEPS) return vm_fail(VM_EOVERFLOW, "trace: want at most %zu steps, got more", count);
    return vm_mem_grow(vm_mem_common, VM_SCRATCH, array, count, item);
}

vm_status vm_trace_new(vm_trace **out) { return vm_mem_alloc(vm_mem_common, VM_SCRATCH, sizeof **out, (void **)out); }

static void release(void *array, size_t items, size_t item) {
    vm_mem_free(vm_mem_common, VM_SCRATCH, array, items * item);
}

void vm_trace_free(vm_trace *t) {
    if (!t) return;
    release(t->step, vm_mem_capacity(t->steps), sizeof *t->step);
    release(t->conv, vm_mem_capacity(t->convs), sizeof *t->conv);
    vm_names_free(&t->names);
    release(t, 1, sizeof *t);
}

/* ---- names ---- */

static vm_status intern(vm_trace *t, const char *name, uint32_t *index) {
    const size_t length = strlen(name);
    if (length >= VM_NAME) {
        name += length - (VM_NAME - 1);
        while ((*name & 0xc0) == 0x80) name++; /* the rest of a character of UTF-8 whose front is lost */
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

static vm_status add(vm_trace *t, vm_trace_op op, uint32_t id, uint64_t bytes, const char *name) {
    uint32_t index = 0;
    vm_status s = name ? intern(t, name, &index) : VM_OK;
    if (!s) s = grow(&t->step, t->steps, sizeof *t->step);
    if (!s) t->step[t->steps++] = (vm_trace_step){.op = op, .id = id, .name = index, .bytes = bytes};
    return s;
}

vm_status vm_trace_take(vm_trace *t, uint64_t bytes, const char *name, uint32_t *id) {
    if (bytes > VM_TALLOC_LARGEST || bytes == SIZE_MAX)
        return vm_fail(VM_EOVERFLOW, "%s: want a storage of at most 2^60 bytes, got more", name);
    vm_status s = add(t, VM_TRACE_TAKE, t->ids, bytes, name);
    if (s) return s;
    *id = t->ids++;
    vm_trace_move(t, 2 * bytes);
    return VM_OK;
}

vm_status vm_trace_give(vm_trace *t, uint32_t id) {
    if (id >= t->ids) return vm_fail(VM_EINVAL, "id: want one below %u, got %u", t->ids, id);
    return add(t, VM_TRACE_GIVE, id, 0, NULL);
}

vm_status vm_trace_wants(const vm_trace *t, uint64_t low, uint64_t high, bool segments,
                         vm_trace_want out[VM_TRACE_WANTS], size_t *count) {
    const size_t room = ((size_t)t->ids + 1) * sizeof(uint64_t);
    uint64_t *held, live = 0, most = 0; /* held: by id */
    *count = 0;
    vm_status s = vm_mem_alloc(vm_mem_common, VM_SCRATCH, room, (void **)&held);
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
            if (live + size > most && asked >= low && asked <= high && *count < VM_TRACE_WANTS)
                out[(*count)++] = (vm_trace_want){step->name, step->bytes, live};
            live += size;
            most = VM_MAX(most, live);
        }
    }
    vm_mem_free(vm_mem_common, VM_SCRATCH, held, room);
    return VM_OK;
}

vm_status vm_trace_blas(vm_trace *t, vm_trace_op op, const char *name) { return add(t, op, 0, 0, name); }

vm_status vm_trace_empty_cache(vm_trace *t) { return add(t, VM_TRACE_EMPTY, 0, 0, "empty_cache"); }

static void raise_by(uint64_t *count, uint64_t by) { *count += VM_MIN(by, UINT64_MAX - *count); }

void vm_trace_count(vm_trace *t, uint64_t flops) { raise_by(&t->flops, flops); }
void vm_trace_move(vm_trace *t, uint64_t bytes) { raise_by(&t->moved, bytes); }

vm_status vm_trace_send(vm_trace *t, uint64_t bytes, const char *name, uint32_t *id) {
    vm_status s = vm_trace_take(t, bytes, name, id);
    if (s) return s;
    raise_by(&t->sent, bytes);
    return vm_trace_empty_cache(t);
}

/* Every number of the filters meets every pixel of the output, or of a transposed convolution's input. It reads input
 * and filters; the output, which was taken, is read and written once more where the bias is added. */
static void count_conv(vm_trace *t, const vm_conv *c) {
    const size_t groups = c->groups > 0 ? (size_t)c->groups : 1, in = (size_t)c->c, out = (size_t)c->k;
    size_t numbers = VM_PRODUCT(c->transposed ? in : in / groups, c->transposed ? out / groups : out), taps = 1;
    size_t read = VM_PRODUCT((size_t)c->n, in), made = VM_PRODUCT((size_t)c->n, out), pixels = 1;
    for (int i = 0; i < VM_CONV_DIMS; i++) {
        const size_t side = (size_t)c->filter[i], stride = c->stride[i] > 0 ? (size_t)c->stride[i] : 1;
        const size_t reach = (size_t)c->size[i] + 2 * (size_t)c->padding[i] - (size_t)c->dilation[i] * (side - 1);
        const size_t to = c->transposed ? (size_t)c->size[i] : (reach - 1) / stride + 1;
        taps = VM_PRODUCT(taps, side);
        pixels = VM_PRODUCT(pixels, to);
        read = VM_PRODUCT(read, (size_t)c->size[i]);
        made = VM_PRODUCT(made, to);
    }
    vm_trace_count(t, VM_PRODUCT(2, (size_t)c->n, numbers, taps, pixels));
    const size_t each = vm_dtype_bytes(c->dtype);
    const size_t parts[] = {read, VM_PRODUCT(numbers, taps), made};
    for (size_t i = 0; i < 3; i++) vm_trace_move(t, VM_PRODUCT(parts[i], each));
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

vm_status vm_trace_norm(vm_trace *t, vm_dtype dtype, size_t n, size_t c, size_t groups, size_t pixels, const char *name,
                        uint32_t stats[2]) {
    const size_t bytes = VM_PRODUCT(n, groups, vm_dtype_bytes(dtype)),
                 fused = VM_PRODUCT(4, n, c); /* whatever the dtype */
    vm_status s = vm_trace_take(t, bytes, name, &stats[0]);
    if (!s) s = vm_trace_take(t, bytes, name, &stats[1]);
    if (!s && pixels > 1) s = pass_through(t, (uint64_t[]){fused, fused}, 2, name);
    vm_trace_move(t, VM_PRODUCT(n, c, pixels, vm_dtype_bytes(dtype))); /* the input, once more for the statistics */
    return s;
}

/* How many parts flash attention cuts the keys into when the queries alone do not fill the device. */
static size_t flash_splits(const vm_trace_sdpa *a, const vm_trace_gpu *gpu) {
    const size_t block = a->depth <= 64 ? 256 : a->depth <= 128 ? 128 : 64;
    const size_t blocks = vm_round_up(a->keys, block) / block, slots = 2 * (size_t)gpu->multiprocessors;
    const size_t work = VM_PRODUCT(a->batch, a->heads, vm_round_up(a->queries, 64) / 64);
    if ((double)work >= 0.8 * (double)slots) return 1;
    const size_t most = VM_MIN(VM_MIN(128, slots), blocks);
    double best = 0, efficiency[129] = {0};
    for (size_t n = 1; n <= most; n++) {
        if (n > 1 && (blocks + n - 1) / n == (blocks + n - 2) / (n - 1)) continue; /* no part gets shorter by it */
        const double waves = (double)(work * n) / (double)slots;
        efficiency[n] = waves / (double)((work * n + slots - 1) / slots);
        best = VM_MAX(best, efficiency[n]);
    }
    for (size_t n = 1; n <= most; n++)
        if (efficiency[n] >= 0.85 * best && efficiency[n] > 0) return n;
    return 1;
}

static vm_status flash(vm_trace *t, const vm_trace_sdpa *a, const vm_trace_gpu *gpu, const char *name, uint32_t *id) {
    const size_t rows = VM_PRODUCT(a->batch, a->heads, a->queries), splits = flash_splits(a, gpu);
    const size_t depth = VM_ROUND_UP(a->depth, 8), rounded = VM_ROUND_UP(a->depth, a->depth <= 128 ? 32 : 64);
    const size_t q = VM_PRODUCT(rows, depth, 2), kv = VM_PRODUCT(a->batch, a->heads, a->keys, depth, 2);
    const bool pads = depth != a->depth;
    uint32_t padded[3] = {0};
    vm_status s = VM_OK;
    for (size_t i = 0; !s && pads && i < 3; i++) s = vm_trace_take(t, i ? kv : q, name, &padded[i]);
    if (!s) s = vm_trace_take(t, q, name, id);
    const uint64_t lse_and_parts[3] = {VM_PRODUCT(4, rows), VM_PRODUCT(4, splits, rows),
                                       VM_PRODUCT(4, splits, rows, rounded)};
    if (!s) s = pass_through(t, lse_and_parts, splits > 1 ? 3 : 1, name);
    for (size_t i = 0; !s && pads && i < 3; i++) s = vm_trace_give(t, padded[i]);
    return s;
}

static vm_status efficient(vm_trace *t, const vm_trace_sdpa *a, const char *name, uint32_t *id) {
    const size_t count = VM_PRODUCT(a->batch, a->heads, a->queries, a->depth);
    const uint64_t sums = VM_PRODUCT(4, count);
    vm_status s = vm_trace_take(t, VM_PRODUCT(count, vm_dtype_bytes(a->dtype)), name, id);
    /* Heads wider than 128 are accumulated in a float tensor in memory instead of registers. */
    if (!s && a->dtype != VM_F32 && a->depth > 128) s = pass_through(t, &sums, 1, name);
    return s;
}

/* The math path: queries, keys and values in float, scaled scores, and a softmax that takes care of rows whose keys are
 * all masked (_safe_softmax). The scores in half precision are made for a caller that does not want them. */
static vm_status math(vm_trace *t, const vm_trace_sdpa *a, const char *name, uint32_t *id) {
    const size_t rows = VM_PRODUCT(a->batch, a->heads, a->queries), q = VM_PRODUCT(4, rows, a->depth);
    const size_t kv = VM_PRODUCT(4, a->batch, a->heads, a->keys, a->depth), scores = VM_PRODUCT(4, rows, a->keys);
    const bool half = a->dtype != VM_F32;
    enum { Q, K, V, SCALED_Q, SCALED_K, RAW, SOFT, LEAST, MASKED, ROWS, ZERO, SAFE, HALF, OUT, COUNT };
    const size_t bytes[COUNT] = {q, kv, kv, q, kv, scores, scores, 4, scores / 4, rows, 4, scores, scores / 2, q};
    /* what is taken and, as ~what, given back, in order */
    static const int8_t plan[] = {SCALED_Q, SCALED_K, RAW,   ~SCALED_K, SOFT,    LEAST,  MASKED, ROWS,
                                  ZERO,     SAFE,     ~ZERO, ~ROWS,     ~MASKED, ~LEAST, ~SOFT,  ~RAW};
    uint32_t ids[COUNT] = {0};
    vm_status s = VM_OK;
    for (int i = Q; !s && half && i <= V; i++) s = vm_trace_take(t, bytes[i], name, &ids[i]);
    for (size_t i = 0; !s && i < sizeof plan; i++) {
        const int what = plan[i];
        s = what < 0 ? vm_trace_give(t, ids[~what]) : vm_trace_take(t, bytes[what], name, &ids[what]);
        if (!s && what == RAW) s = vm_trace_blas(t, VM_TRACE_CUBLAS, name);
    }
    if (!s && half) s = vm_trace_take(t, bytes[HALF], name, &ids[HALF]);
    if (!s) s = vm_trace_take(t, bytes[OUT], name, &ids[OUT]);
    if (!s) s = vm_trace_blas(t, VM_TRACE_CUBLAS, name);
    *id = ids[OUT];
    if (!s && half) s = vm_trace_take(t, q / 2, name, id);
    if (!s && half) s = vm_trace_give(t, ids[OUT]);
    if (!s && half) s = vm_trace_give(t, ids[HALF]);
    if (!s) s = vm_trace_give(t, ids[SAFE]);
    if (!s) s = vm_trace_give(t, ids[SCALED_Q]);
    for (int i = Q; !s && half && i <= V; i++) s = vm_trace_give(t, ids[i]);
    return s;
}

vm_status vm_trace_attention(vm_trace *t, const vm_trace_sdpa *a, const vm_trace_gpu *gpu, const char *name,
                             uint32_t *id) {
    if (gpu->multiprocessors < 1)
        return vm_fail(VM_EINVAL, "multiprocessors: want 1 or more, got %d", gpu->multiprocessors);
    vm_attention_kernel kernel = a->kernel;
    if (kernel == VM_ATTENTION_USUAL) {
        const vm_attention_kernel usual[] = {VM_ATTENTION_FLASH, VM_ATTENTION_EFFICIENT, VM_ATTENTION_MATH};
        const vm_heads q = {4, a->batch, a->heads, a->queries, a->depth, false},
                       kv = {4, a->batch, a->heads, a->keys, a->depth, false};
        vm_sdpa_choose(&(vm_sdpa){.dtype = a->dtype, .q = q, .k = kv, .v = kv}, gpu->sm, usual, 3, &kernel);
    }
    const uint64_t flops = VM_PRODUCT(4, a->batch, a->heads, a->queries, a->keys, a->depth);
    vm_trace_count(t, flops);
    raise_by(&t->attended, flops);
    if (kernel == VM_ATTENTION_FLASH) return flash(t, a, gpu, name, id);
    return kernel == VM_ATTENTION_MATH ? math(t, a, name, id) : efficient(t, a, name, id);
}

vm_status vm_trace_fused(vm_trace *t, const vm_sdpa *call, vm_attention_kernel kernel, const vm_trace_gpu *gpu,
                         const char *name, uint32_t *id) {
    const size_t row = call->mask_row, size = vm_dtype_bytes(call->dtype);
    const bool pads = call->masked && kernel == VM_ATTENTION_EFFICIENT && row % 8,
               copies = call->masked && call->boolean;
    const size_t padded = pads ? VM_PRODUCT(call->mask / row, vm_round_up(row, 8), size) : 0;
    const vm_trace_sdpa shape = {.dtype = call->dtype,
                                 .batch = call->q.batch,
                                 .heads = call->q.heads,
                                 .queries = call->q.length,
                                 .keys = call->k.length,
                                 .depth = call->v.depth,
                                 .kernel = kernel};
    char text[VM_TRACE_LABEL];
    uint32_t copy = 0, wider = 0;
    vm_status s = VM_OK;
    if (copies) s = vm_trace_take(t, VM_PRODUCT(call->mask, size), vm_trace_label(text, name, "mask"), &copy);
    if (!s && pads) s = vm_trace_take(t, padded, vm_trace_label(text, name, "mask, padded"), &wider);
    if (!s && kernel != VM_ATTENTION_CUDNN)
        s = vm_trace_attention(t, &shape, gpu, vm_trace_label(text, name, "attention"), id);
    if (!s && pads) s = vm_trace_give(t, wider);
    if (!s && copies) s = vm_trace_give(t, copy);
    return s;
}
