/* A pass on a GPU, or some rows of it, stripe by stripe (cuda.h):
 *
 *   merge: the sums from x's producer -> scale, shift
 *   for each stripe of rows of y:   x --load--> stripe in --cuDNN--> raw stripe --store--> y and its sums
 *
 *   prepared: scale | shift | merge's sums        scratch: factors | stripe in | raw stripe        workspace: cuDNN's
 *
 * A move uses its own kernel instead of cuDNN. A pixel norm has one factor per pixel: pixel_norm makes a stripe's
 * before its load. Our own convolution computes any rows in one kernel; it needs stripes only for factors, and for the
 * user's pixels as rows.
 *
 * If a pass runs whole, its stripes take at most limits.stripe_bytes, so no copy of a tensor is ever stored whole.
 * Otherwise a stripe is a step of a chain. Stripes go down the image in order on one stream. So y may take x's memory
 * if a pixel of y needs only that pixel of x. */
#include <assert.h>
#include <math.h>

#include "gpu.h"

enum {
    PARTS_WANTED = 2048,
    PART_LEAST = 192,
    WAVES = 1,        /* waves of concurrent tiles in a step; 1, 2 and 4 were not compared */
    TILE = 128 * 128, /* assumed numbers of y that cuDNN computes per block */
    LEAST_ROWS = 4    /* least rows of y for cuDNN in a step */
};
static const double stepped_cost = 1.05; /* time of a pass in steps, relative to whole: assumed, not measured */

/* How a convolution is cut; sizes in elements. */
typedef struct shape {
    bool own;
    size_t rows;                     /* of y in a stripe */
    size_t in_w, in_c;               /* of the stripe */
    size_t raw_w, raw_c;             /* of cuDNN's output */
    size_t k, stride, pad;           /* of the filter as convolved */
    size_t factor, in, raw, scratch; /* bytes: offsets in scratch, and its size */
} shape;

/* Returns: elements from pixel to pixel; channels are adjacent. */
static uint32_t pitch_of(const vm_view *v, const vm_shape *s) { return (uint32_t)(v->row / s->w); }

/* Returns: whether it is a convolution after nearest 2x: four of 2x2. */
static bool folds(const vm_pass *p) { return p->up && p->kind == VM_PASS_CONV; }

static size_t in_rows(const vm_pass *p, const shape *s, size_t rows) {
    return p->up ? rows / 2 + (folds(p) ? 2 : 0) : (rows - 1) * s->stride + s->k;
}

/* Returns: the top row in x of a stripe; it may be in the padding above. */
static ptrdiff_t top_of(const vm_pass *p, const shape *s, size_t row0) {
    return (ptrdiff_t)(p->up ? row0 / 2 : row0 * s->stride) - (ptrdiff_t)s->pad;
}

static size_t put_bytes(size_t *end, size_t bytes) { return vm_put_bytes(end, bytes, 256); }

static size_t prepared_bytes(const vm_pass *p) {
    const size_t factors = 2 * vm_padded(p->x.c) * sizeof(float);
    const size_t sums = p->norm == VM_NORM_GROUP ? 3 * VM_MERGE_BLOCKS * p->groups * sizeof(double) : 0;
    return p->norm ? VM_ROUND_UP(factors + sums, 256) : 0;
}

/* Fills in the layout for stripes of `rows`. */
static void lay_out(const vm_pass *p, shape *s, size_t rows, size_t element) {
    const size_t padded = in_rows(p, s, rows), there = VM_MIN(padded, p->x.h);
    const size_t in = !s->own ? padded : p->x_format == VM_ROWS ? 0 : there;
    s->rows = rows;
    s->scratch = 0;
    s->factor = put_bytes(&s->scratch, vm_norm_by_pixel(p->norm) ? there * p->x.w * sizeof(float) : 0);
    s->in = put_bytes(&s->scratch, in * s->in_w * s->in_c * element);
    s->raw = put_bytes(&s->scratch, s->own ? 0 : (folds(p) ? rows / 2 + 1 : rows) * s->raw_w * s->raw_c * element);
}

/* ---- our own convolution ---- */

static vm_conv_args own_args(const vm_gpu *g, const vm_pass *p) {
    return (vm_conv_args){.x_h = (uint32_t)p->x.h,
                          .x_w = (uint32_t)p->x.w,
                          .in_c = (uint32_t)vm_padded(p->x.c),
                          .y_h = (uint32_t)p->y.h,
                          .y_w = (uint32_t)p->y.w,
                          .y_c = (uint32_t)p->y.c,
                          .k = p->up ? 2 : (uint32_t)p->ksize,
                          .stride = (uint32_t)p->stride,
                          .pad_y = (uint32_t)p->pad,
                          .pad_x = (uint32_t)p->pad,
                          .up = p->up,
                          .act = p->act,
                          .relu = p->relu,
                          .blocked = vm_gpu_blocked(g, p->ksize, vm_padded(p->x.c), vm_padded(p->y.c)),
                          .fp8 = vm_gpu_fp8(g, p->fp8, p->ksize, vm_padded(p->x.c), vm_padded(p->y.c)),
                          .lead = vm_wgmma_lead(p->up ? 2 : (uint32_t)p->ksize),
                          .format = p->y_format,
                          .clamp = p->clamp,
                          .out_scale = p->out_scale,
                          .out_shift = p->out_shift,
                          .bias_scale = p->y_scale};
}

/* Returns: the tile; rows 0 if cuDNN runs the pass. A shortcut to fewer channels may have to write in x's place. */
static vm_conv_tile own_tile(const vm_gpu *g, const vm_pass *p) {
    const vm_conv_args a = own_args(g, p);
    const bool narrows = p->ksize == 1 && !p->norm && !p->add && p->y.c < p->x.c;
    if (!g->own_conv || p->kind != VM_PASS_CONV) return (vm_conv_tile){0};
    return vm_conv_choose(g->backend.dtype, &a, narrows && p->x_format == VM_ROWS, (size_t)g->shared_max,
                          (uint32_t)g->multiprocessors);
}

/* Returns: rows of y in a row of its tiles. */
static size_t tile_rows(const vm_pass *p, const vm_conv_tile *t) { return t->rows * (p->up ? 2 : 1); }

/* ---- steps and stripes ---- */

/* A step: enough tiles for the whole device or, if tight, one row of them. */
typedef struct slab {
    size_t rows; /* of y */
    double cost;
} slab;

static slab slab_of(const vm_gpu *g, const vm_pass *p, bool tight) {
    const vm_conv_tile t = own_tile(g, p);
    const vm_conv_args a = own_args(g, p);
    const size_t unit = t.rows ? tile_rows(p, &t) : LEAST_ROWS, units = (p->y.h + unit - 1) / unit;
    const size_t tiles = t.rows ? vm_conv_row_items(&a, t) : VM_MAX(unit * p->y.w * vm_padded(p->y.c) / TILE, 1);
    const size_t wave = WAVES * (size_t)g->multiprocessors * (t.rows ? t.resident : 1);
    const size_t enough = VM_MIN((wave + tiles - 1) / tiles, units), some = tight ? 1 : enough;
    return (slab){VM_MIN(some * unit, p->y.h), stepped_cost * (double)enough / (double)some};
}

/* Returns: the filter, and everything that does not depend on the stripe's height. */
static shape shape_of_pass(const vm_gpu *g, const vm_pass *p) {
    shape s = {.own = own_tile(g, p).rows, .k = folds(p) ? 2 : (size_t)p->ksize, .stride = (size_t)p->stride};
    s.pad = (size_t)p->pad;
    s.in_c = vm_padded(p->x.c);
    s.raw_c = vm_padded(p->y.c) * (folds(p) ? 4 : 1);
    s.raw_w = folds(p) ? p->x.w + 1 : p->y.w;
    s.in_w = s.own ? p->x.w : p->up ? p->x.w + (folds(p) ? 2 : 0) : (p->y.w - 1) * s.stride + s.k;
    return s;
}

static shape shape_of(const vm_gpu *g, const vm_pass *p, const vm_limits *limits, vm_manner manner) {
    const size_t element = vm_dtype_bytes(g->backend.dtype);
    shape s = shape_of_pass(g, p);
    if (manner.stepped || s.own) {
        const bool whole = !manner.stepped || (s.own && !vm_norm_by_pixel(p->norm) && p->x_format == VM_ROWS);
        lay_out(p, &s, whole ? p->y.h : slab_of(g, p, manner.tight).rows, element);
        return s;
    }
    /* the most rows that fit, by bisection; then as many stripes of nearly equal height */
    const size_t even = p->up ? 2 : 1;
    size_t low = even, high = p->y.h;
    while (low < high) {
        const size_t rows = VM_ROUND_UP((low + high) / 2 + 1, even);
        lay_out(p, &s, VM_MIN(rows, p->y.h), element);
        if (prepared_bytes(p) + s.scratch > limits->stripe_bytes)
            high = VM_MIN(rows, p->y.h) - even;
        else
            low = VM_MIN(rows, p->y.h);
    }
    const size_t stripes = (p->y.h + low - 1) / low;
    lay_out(p, &s, VM_ROUND_UP((p->y.h + stripes - 1) / stripes, even), element);
    return s;
}

vm_cut vm_gpu_cut(const vm_backend *b, const vm_pass *p, bool tight) {
    if (p->video) return vm_frames_cut(b->self, p, tight);
    if (p->kind == VM_PASS_ATTENTION)
        return (vm_cut){.rows = 1, .columns = 1, .out_rows = p->y.h, .in_rows = p->x.h, .cost = 1};
    const shape s = shape_of_pass(b->self, p);
    const slab step = slab_of(b->self, p, tight);
    return (vm_cut){.rows = (p->y.h + step.rows - 1) / step.rows,
                    .columns = 1,
                    .out_rows = step.rows,
                    .together = 1,
                    .in_step = p->up ? step.rows / 2 : step.rows * s.stride,
                    .in_rows = in_rows(p, &s, step.rows),
                    .pad = s.pad,
                    .cost = step.cost};
}

/* Returns: pixels of one partial sum: enough parts to keep the GPU busy, few enough to store and merge. */
static size_t part_pixels(const vm_pass *p) { return VM_MAX(p->y.h * p->y.w / PARTS_WANTED, PART_LEAST); }

static size_t parts_of(const vm_pass *p, size_t rows) {
    const size_t pixels = part_pixels(p);
    return (rows * p->y.w + pixels - 1) / pixels;
}

static size_t stripe_rows(const vm_pass *p, const shape *s, size_t row0) { return VM_MIN(s->rows, p->y.h - row0); }

/* The key of every stripe: the last one is computed at full height too, so a pass has one engine of cuDNN's. */
static vm_conv_key key_of(const vm_gpu *g, const vm_pass *p, const vm_limits *limits, vm_manner manner,
                          const shape *s) {
    const int64_t x[4] = {1, (int64_t)s->in_c, (int64_t)in_rows(p, s, s->rows), (int64_t)s->in_w};
    vm_conv conv = vm_conv_square(g->backend.dtype, x, (int64_t)s->raw_c, (int64_t)s->k, (int64_t)s->stride, 0);
    conv.tf32 = g->tf32;
    conv.nhwc = true;
    /* On GPUs other than Hopper cuDNN's TF32 engines need tens of megabytes; with less it computes in plain float32. */
    const size_t least = g->tf32 ? 64u << 20 : 1u << 20, copied = manner.stepped ? s->scratch : limits->stripe_bytes;
    const size_t usual = VM_MAX(copied / 5 * 2, least);
    /* cuDNN 9.28's first choice for plain float32 on a described H200 or A100 (engine 1) copies its tensors into
     * another layout: it needs the bytes of x, y and the filters, and some KiB. */
    const size_t copies = s->scratch + s->raw_c * s->k * s->k * s->in_c * sizeof(float) + least;
    const bool copy = !manner.stepped && g->backend.dtype == VM_F32 && !g->tf32;
    return (vm_conv_key){conv, copy ? VM_MAX(usual, copies) : usual};
}

vm_needs vm_gpu_needs(const vm_backend *b, const vm_pass *p, const vm_limits *limits, vm_manner manner) {
    if (p->video) return vm_frames_needs(b->self, p, manner);
    if (p->kind == VM_PASS_ATTENTION) return (vm_needs){0};
    const vm_conv_tile tile = own_tile(b->self, p);
    const vm_conv_args a = own_args(b->self, p);
    const shape s = shape_of(b->self, p, limits, manner);
    vm_needs n = {.prepared = prepared_bytes(p), .scratch = s.scratch};
    if (p->stats && s.own) n.parts = vm_conv_parts(&a, tile);
    for (size_t row = 0; p->stats && !s.own && row < p->y.h; row += s.rows)
        n.parts += parts_of(p, stripe_rows(p, &s, row));
    return n;
}

vm_status vm_gpu_workspace(const vm_backend *b, const vm_pass *p, const vm_limits *limits, vm_manner manner,
                           size_t *bytes) {
    vm_gpu *g = b->self;
    *bytes = 0;
    vm_conv_key key;
    if (p->kind == VM_PASS_ATTENTION && p->x.c / 3 > VM_ATTENTION_CHANNELS)
        return vm_fail(VM_EINVAL, VM_EXPECTED("attention", "at most %d channels on a GPU", "%zu"),
                       VM_ATTENTION_CHANNELS, p->x.c / 3);
    if (p->video) {
        if (!vm_frames_key(g, p, manner, &key)) return VM_OK;
    } else {
        if (p->kind != VM_PASS_CONV || own_tile(g, p).rows) return VM_OK;
        const shape s = shape_of(g, p, limits, manner);
        key = key_of(g, p, limits, manner, &s);
    }
    if (!g->convs) return vm_fail(VM_EDEVICE, "%s", g->no_cudnn);
    VM_ENTER(g);
    const vm_status status = vm_cudnn_convs_bytes(g->convs, &key, bytes);
    if (g->autotune) *bytes = key.limit; /* tuning picks the plan once there is memory to run them on */
    return status;
}

/* ---- launches ---- */

static float *scale_of(const vm_pass *p, const vm_operands *at) { return p->norm ? at->prepared : NULL; }
static float *shift_of(const vm_pass *p, const vm_operands *at) {
    return p->norm ? (float *)at->prepared + vm_padded(p->x.c) : NULL;
}
static void *scratch_at(const vm_operands *at, size_t offset) { return (char *)at->scratch + offset; }

static vm_status merge(vm_gpu *g, const vm_pass *p, const vm_operands *at) {
    vm_merge_args a = {.stats = at->x_stats,
                       .gamma = at->gamma,
                       .beta = at->beta,
                       .scale = scale_of(p, at),
                       .shift = shift_of(p, at),
                       .sums = (double *)(shift_of(p, at) + vm_padded(p->x.c)),
                       .arrived = g->flags + 1,
                       .parts = (uint32_t)at->x_parts,
                       .c = (uint32_t)p->x.c,
                       .groups = (uint32_t)p->groups,
                       .eps = p->eps * p->x_scale * p->x_scale};
    return vm_gpu_launch(g, g->kernel[VM_KERNEL_MERGE], p->groups, VM_MERGE_BLOCKS, VM_CUDA_THREADS, 0, &a);
}

/* Rows [first, end) of x. */
typedef struct span {
    size_t first, end;
} span;

/* Returns: the rows of x that rows [row, row + rows) of y need. */
static span needed(const vm_pass *p, const shape *s, size_t row, size_t rows) {
    const ptrdiff_t top = top_of(p, s, row);
    return (span){(size_t)VM_MAX(top, 0), VM_MIN((size_t)(top + (ptrdiff_t)in_rows(p, s, rows)), p->x.h)};
}

/* Returns: the factor from x's power of two, or from a normalised x, to y's. */
static float multiplier(const vm_pass *p) { return p->norm ? p->y_scale : p->y_scale / p->x_scale; }

/* Loads for cuDNN with zeros around; for our own convolution without. */
static vm_status load(vm_gpu *g, const vm_pass *p, const vm_operands *at, const shape *s, size_t row0, size_t rows) {
    const span x = needed(p, s, row0, rows);
    const size_t n = s->own ? x.end - x.first : in_rows(p, s, rows);
    const vm_numbers *part = p->x_format == VM_ROWS ? NULL : at->numbers;
    const size_t pixel = part ? (size_t)part->pixel : 1, channel = part ? (size_t)part->channel : 0;
    vm_load_args a = {.x = p->x_format == VM_ROWS ? at->x.data : at->x_pixels,
                      .out = scratch_at(at, s->in),
                      .scale = scale_of(p, at),
                      .shift = shift_of(p, at),
                      .factor = vm_norm_by_pixel(p->norm) ? scratch_at(at, s->factor) : NULL,
                      .first_factor = (uint32_t)(x.first * p->x.w),
                      .x_plane = part ? channel / pixel : p->x.h * p->x.w,
                      .x_h = (uint32_t)p->x.h,
                      .x_w = (uint32_t)p->x.w,
                      .x_c = (uint32_t)p->x.c,
                      .x_pitch = pitch_of(&at->x, &p->x),
                      .x_row = (uint32_t)(part ? (size_t)part->row / pixel : p->x.w),
                      .x_ring = vm_gpu_ring(&at->x, x.first),
                      .top = s->own ? (int32_t)x.first : (int32_t)top_of(p, s, row0),
                      .left = s->own ? 0 : -(int32_t)s->pad,
                      .rows = (uint32_t)n,
                      .width = (uint32_t)s->in_w,
                      .channels = (uint32_t)s->in_c,
                      .format = p->x_format,
                      .act = p->act,
                      .in_scale = p->affine ? p->in_scale : 1,
                      .in_shift = p->affine ? p->in_shift : 0,
                      .multiply = multiplier(p)};
    const size_t vectors = n * s->in_w * s->in_c / 8;
    const size_t a_block = 4 * VM_CUDA_THREADS; /* a thread takes a few vectors at once */
    const size_t blocks = (vectors + a_block - 1) / a_block, most = (size_t)g->multiprocessors * 32;
    return vm_gpu_launch(g, g->kernel[VM_KERNEL_LOAD], VM_MIN(blocks, most), 1, VM_CUDA_THREADS, 0, &a);
}

static vm_status store(vm_gpu *g, const vm_pass *p, const vm_operands *at, const shape *s, size_t row0, size_t rows) {
    const bool own = p->y_format == VM_ROWS;
    const size_t part = row0 / s->rows * parts_of(p, s->rows);
    vm_store_args a = {.raw = scratch_at(at, s->raw),
                       .bias = at->bias,
                       .add = p->add ? at->add.data : NULL,
                       .y = own ? at->y.data : at->y_pixels,
                       .stats = p->stats ? at->y_stats + part * vm_stats_floats(p->y.c) : NULL,
                       .flags = g->flags,
                       .y_h = (uint32_t)p->y.h,
                       .y_w = (uint32_t)p->y.w,
                       .y_c = (uint32_t)p->y.c,
                       .y_pitch = pitch_of(&at->y, &p->y),
                       .add_pitch = pitch_of(&at->add, &p->y),
                       .y_ring = vm_gpu_ring(&at->y, row0),
                       .add_ring = vm_gpu_ring(&at->add, row0),
                       .row0 = (uint32_t)row0,
                       .rows = (uint32_t)rows,
                       .channels = (uint32_t)vm_padded(p->y.c),
                       .part_pixels = (uint32_t)part_pixels(p),
                       .up = folds(p),
                       .relu = p->relu,
                       .format = p->y_format,
                       .clamp = p->clamp,
                       .out_scale = p->out_scale,
                       .out_shift = p->out_shift,
                       .bias_scale = p->y_scale};
    const size_t vectors = vm_padded(p->y.c) / 8;
    return vm_gpu_launch(g, g->kernel[VM_KERNEL_STORE], parts_of(p, rows),
                         (vectors + VM_CUDA_LANES - 1) / VM_CUDA_LANES, VM_CUDA_THREADS, 0, &a);
}

/* Returns: whether cuDNN may read x itself: nothing to do on load, and a whole stripe of x's pixels is packed. */
static bool reads_x(const vm_pass *p, const vm_operands *at, const shape *s, size_t rows) {
    return rows == s->rows && p->ksize == 1 && !p->norm && !p->affine && !p->act && p->x_format == VM_ROWS &&
           pitch_of(&at->x, &p->x) == s->in_c && p->x_scale == p->y_scale && at->x.ring == SIZE_MAX;
}

/* Moves one stripe. */
static vm_status move(vm_gpu *g, const vm_pass *p, const vm_operands *at, const shape *s, size_t row, size_t rows) {
    const bool down = p->stride == 2;
    vm_move_args a = {.x = scratch_at(at, s->in),
                      .out = scratch_at(at, s->raw),
                      .x_w = (uint32_t)s->in_w,
                      .x_c = (uint32_t)p->x.c,
                      .x_pitch = (uint32_t)s->in_c,
                      .y_w = (uint32_t)p->y.w,
                      .y_c = (uint32_t)p->y.c,
                      .rows = (uint32_t)rows,
                      .channels = (uint32_t)s->raw_c,
                      .up = p->up,
                      .down = down,
                      .share = (uint32_t)vm_move_share(p->move, p->x.c, p->y.c, p->up, down),
                      .move = p->move};
    const size_t blocks = (rows * p->y.w * s->raw_c / 8 + VM_CUDA_THREADS - 1) / VM_CUDA_THREADS;
    const size_t most = (size_t)g->multiprocessors * 32;
    vm_status status;
    if ((status = load(g, p, at, s, row, rows))) return status;
    status = vm_gpu_launch(g, g->kernel[VM_KERNEL_MOVE], VM_MIN(blocks, most), 1, VM_CUDA_THREADS, 0, &a);
    return status ? status : store(g, p, at, s, row, rows);
}

static vm_status conv(vm_gpu *g, const vm_pass *p, const vm_operands *at, const vm_limits *limits, const shape *s,
                      size_t row, size_t rows) {
    assert(!vm_gpu_blocked(g, p->ksize, vm_padded(p->x.c), vm_padded(p->y.c))); /* cuDNN needs plain filters */
    const vm_conv_key key = key_of(g, p, limits, at->manner, s);
    const bool direct = reads_x(p, at, s, rows);
    const char *in =
        direct ? (char *)at->x.data + row * p->x.w * s->in_c * vm_dtype_bytes(g->backend.dtype) : scratch_at(at, s->in);
    char *raw = scratch_at(at, s->raw);
    vm_status status;
    g->launches++;
    if (!direct && (status = load(g, p, at, s, row, s->rows))) return status; /* zeros below the image */
    if (g->autotune && !g->outside) {
        status = vm_cudnn_convs_tune(g->convs, &key, g->stream, in, at->weight, raw, at->workspace, vm_gpu_time, g);
        if (status) return status;
    }
    status = vm_cudnn_convs_run(g->convs, &key, g->stream, in, at->weight, raw, at->workspace);
    return status ? status : store(g, p, at, s, row, rows);
}

static vm_status own_conv(vm_gpu *g, const vm_pass *p, const vm_operands *at, const shape *s, size_t row, size_t rows) {
    const bool from_rows = p->x_format == VM_ROWS, to_rows = p->y_format == VM_ROWS;
    const vm_conv_tile tile = own_tile(g, p);
    const size_t height = tile_rows(p, &tile);
    const span x = needed(p, s, row, rows);
    vm_status status = from_rows ? VM_OK : load(g, p, at, s, row, rows);
    if (status) return status;
    vm_conv_args a = own_args(g, p);
    a.x = from_rows ? at->x.data : scratch_at(at, s->in);
    a.x_pitch = from_rows ? pitch_of(&at->x, &p->x) : (uint32_t)s->in_c;
    a.x_ring = from_rows ? vm_gpu_ring(&at->x, x.first) : (vm_ring_rows){-(uint32_t)x.first, 0};
    a.w = at->weight;
    if (a.fp8) a.w_scale = (const float *)((const char *)a.w + vm_gpu_fp8_bytes(vm_padded(p->y.c), a.in_c, 9));
    a.scale = scale_of(p, at);
    a.shift = shift_of(p, at);
    a.factor = vm_norm_by_pixel(p->norm) ? scratch_at(at, s->factor) : NULL;
    a.first_factor = x.first * p->x.w;
    a.bias = at->bias;
    a.add = p->add ? at->add.data : NULL;
    a.add_pitch = pitch_of(&at->add, &p->y);
    a.add_ring = vm_gpu_ring(&at->add, row);
    a.y = to_rows ? at->y.data : at->y_pixels;
    a.y_pitch = pitch_of(&at->y, &p->y);
    a.y_ring = vm_gpu_ring(&at->y, row);
    a.first_item = (uint32_t)(row / height) * vm_conv_row_items(&a, tile);
    a.items = (uint32_t)((rows + height - 1) / height) * vm_conv_row_items(&a, tile);
    a.stats = p->stats ? at->y_stats : NULL;
    a.flags = g->flags;
    a.multiply = !from_rows ? 1 : multiplier(p);
    if (!from_rows) a.act = VM_ACT_NONE; /* load has done it */
    return vm_gpu_launch(g, (a.fp8 ? g->conv_fp8 : g->conv)[tile.kind],
                         vm_conv_grid(&a, tile, (uint32_t)g->multiprocessors), 1, tile.threads, tile.shared, &a);
}

/* Rows [row, end) of y; the first begins a step. */
static vm_status convolve(vm_gpu *g, const vm_pass *p, const vm_operands *at, const vm_limits *limits, size_t row,
                          size_t end) {
    const shape s = shape_of(g, p, limits, at->manner);
    vm_status status;
    for (size_t rows; row < end; row += rows) {
        rows = VM_MIN(s.rows, end - row);
        const span x = needed(p, &s, row, rows);
        if (vm_norm_by_pixel(p->norm) &&
            (status = vm_gpu_pixel_norm(g, p, at, scratch_at(at, s.factor), scale_of(p, at), x.first, x.end)))
            return status;
        status = p->kind == VM_PASS_MOVE ? move(g, p, at, &s, row, rows)
                 : s.own                 ? own_conv(g, p, at, &s, row, rows)
                                         : conv(g, p, at, limits, &s, row, rows);
        if (status) return status;
    }
    return VM_OK;
}

static vm_status step(const vm_tasks *t, size_t row, size_t rows) {
    const size_t height = vm_gpu_cut(t->backend, t->pass, t->at->manner.tight).out_rows;
    vm_gpu *g = t->backend->self;
    VM_ENTER(g);
    row *= height, rows = VM_MIN(rows * height, t->pass->y.h - row);
    return t->pass->video ? vm_frames_rows(g, t->pass, t->at, row, row + rows)
                          : convolve(g, t->pass, t->at, &t->exec->limits, row, row + rows);
}

vm_status vm_gpu_prepare(const vm_backend *b, const vm_pass *p, const vm_operands *at, const vm_exec *exec,
                         vm_tasks *out) {
    vm_gpu *g = b->self;
    *out = (vm_tasks){.rows = step, .backend = b, .pass = p, .at = at, .exec = exec};
    VM_ENTER(g);
    if (p->video) return vm_frames_begin(g, p, at);
    return p->norm == VM_NORM_GROUP ? merge(g, p, at) : VM_OK;
}

vm_status vm_gpu_run(const vm_backend *b, const vm_pass *p, const vm_operands *at, const vm_exec *exec) {
    vm_gpu *g = b->self;
    VM_ENTER(g);
    if (p->kind == VM_PASS_ATTENTION) return (p->video ? vm_frames_attention : vm_gpu_attention)(g, p, at);
    if (p->video) {
        const vm_status begun = vm_frames_begin(g, p, at);
        return begun ? begun : vm_frames_rows(g, p, at, 0, p->y.h);
    }
    const vm_status status = p->norm == VM_NORM_GROUP ? merge(g, p, at) : VM_OK;
    return status ? status : convolve(g, p, at, &exec->limits, 0, p->y.h);
}
