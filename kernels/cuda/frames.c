/* A pass over a video on a GPU, stripe by stripe of some rows of all frames (vm_planes in cuda.h):
 *
 *   for each stripe:   x --gather--> planes --cuDNN--> raw --scatter--> y
 *
 *   prepared: scale | shift | turned filters          workspace: cuDNN's
 *   scratch:  factors | planes | raw
 *
 * A move uses its own kernel instead of cuDNN. Our own 3x3x3 convolution (conv_wgmma.cu, conv.cu) reads rows of x
 * and writes rows of y itself; only the user's pixels are gathered, as rows. Attention is within a frame: a frame's
 * queries, keys and values are gathered, and its result is scattered.
 *
 * Most videos are wider than high, and run along their columns (vm_pass.turned): x's rows are columns of the picture.
 * The stored filters are for those. For other videos they are turned before the first stripe. */
#include <assert.h>
#include <math.h>

#include "gpu.h"

enum {
    TILE = 128 * 128, /* assumed numbers of y that cuDNN computes per block */
    WAVES = 2         /* tiles per multiprocessor in a step, so that few wait for its last ones; not measured */
};

/* How a pass is cut; sizes in elements. */
typedef struct shape {
    bool own;         /* our own convolution */
    size_t rows;      /* of y in a stripe */
    vm_planes to;     /* but for the places of its rows */
    size_t channels;  /* of x, padded */
    size_t k, stride; /* of the filter as convolved */
    size_t lines;     /* of raw, in a plane; with the next two */
    size_t width, groups;
    size_t each; /* channels of a group, padded */
    size_t raw_planes;
    size_t factor, in, raw, scratch; /* bytes: offsets in scratch, and its size */
    size_t filters, prepared;        /* likewise, in prepared memory */
    bool turns;                      /* the filters */
} shape;

static bool is_move(const vm_pass *p) { return p->kind == VM_PASS_MOVE; }
static bool is_down(const vm_pass *p) { return p->stride == 2; }

/* Returns: the rows of y that are made together: both of a pair, or all of a square. */
static size_t unit_of(const vm_pass *p) { return !p->up ? 1 : is_move(p) ? p->move.side : 2; }

/* Returns: how many rows of x the filters meet to make `rows` rows of y. */
static size_t rows_in(const vm_pass *p, size_t rows) {
    if (is_move(p)) return p->up ? rows / p->move.side : is_down(p) ? rows * p->move.side : rows;
    return p->up ? rows / 2 + 2 : (rows - 1) * (size_t)p->stride + (size_t)p->ksize;
}
/* Returns: the first row of x that they meet to make row `row` of y; negative above x. */
static ptrdiff_t top_of(const vm_pass *p, size_t row) {
    if (is_move(p)) return (ptrdiff_t)(p->up ? row / p->move.side : is_down(p) ? row * p->move.side : row);
    return (ptrdiff_t)(p->up ? row / 2 : row * (size_t)p->stride) - p->pad;
}

/* ---- our own convolution ---- */

/* Returns: whether the filters are those of our own convolution; if so, it has a tile for the pass. */
static bool is_own(const vm_gpu *g, const vm_pass *p) {
    return p->kind == VM_PASS_CONV && p->ksize == 3 && p->slices == 3 &&
           vm_gpu_blocked(g, 3, 3 * vm_padded(p->x.c), vm_padded(p->y.c));
}

static vm_conv_args own_args(const vm_pass *p) {
    return (vm_conv_args){.x_h = (uint32_t)p->x.f,
                          .x_w = (uint32_t)p->x.w,
                          .in_c = 3 * (uint32_t)vm_padded(p->x.c),
                          .y_h = (uint32_t)p->y.f,
                          .y_w = (uint32_t)p->y.w,
                          .y_c = (uint32_t)p->y.c,
                          .k = 3,
                          .stride = 1,
                          .pad_y = 2 - (uint32_t)p->ahead,
                          .pad_x = 1,
                          .act = p->act,
                          .relu = p->relu,
                          .blocked = true,
                          .x_c = (uint32_t)vm_padded(p->x.c),
                          .x_rows = (uint32_t)p->x.h,
                          .held = p->held,
                          .mirrored = p->mirrored,
                          .format = p->y_format,
                          .clamp = p->clamp,
                          .out_scale = p->out_scale,
                          .out_shift = p->out_shift,
                          .bias_scale = p->y_scale};
}

static vm_conv_tile own_tile(const vm_gpu *g, const vm_pass *p) {
    const vm_conv_args a = own_args(p);
    return vm_conv_choose(g->backend.dtype, &a, false, (size_t)g->shared_max, (uint32_t)g->multiprocessors);
}

/* ---- steps and stripes ---- */

/* Fills in what depends on a stripe's height. */
static void lay_out(const vm_gpu *g, const vm_pass *p, shape *s, size_t rows) {
    const size_t element = vm_dtype_bytes(g->backend.dtype), in = rows_in(p, rows), there = VM_MIN(in, p->x.h);
    const bool over_time = p->slices > 1, moves = is_move(p), flat = !moves && p->ksize == 3 && !over_time;
    vm_planes *to = &s->to;
    s->rows = rows;
    to->planes = (uint32_t)(moves ? in : flat ? p->x.f : rows);
    if (s->own) to->planes = (uint32_t)(p->x_format == VM_ROWS ? 0 : there);
    if (flat) to->lines = (uint32_t)in;
    s->raw_planes = flat ? p->y.f : rows;
    if (flat) s->lines = p->up ? rows / 2 + 1 : rows;
    s->scratch = 0;
    const size_t lines = VM_MAX(to->lines, 1); /* the first frame, which is copied, passes through too */
    const size_t numbers = VM_PRODUCT(to->planes, lines, to->width, to->slices, s->channels, element);
    s->factor = vm_put_bytes(&s->scratch,
                             vm_norm_by_pixel(p->norm) ? VM_PRODUCT(there, p->x.f, p->x.w, sizeof(float)) : 0, 256);
    s->in = vm_put_bytes(&s->scratch, numbers, 256);
    s->raw = vm_put_bytes(&s->scratch,
                          s->own ? 0 : VM_PRODUCT(s->raw_planes, s->lines, s->width, s->groups, s->each, element), 256);
}

/* Fills in the rest, for stripes of one unit. */
static shape shape_of_pass(const vm_gpu *g, const vm_pass *p) {
    const bool moves = is_move(p), doubles = p->time == VM_TIME_DOUBLED, halves = p->time == VM_TIME_HALVED;
    const bool wide = !moves && p->ksize == 3; /* has neighbours in its plane */
    shape s = {.own = is_own(g, p),
               .channels = vm_padded(p->x.c),
               .k = wide ? (p->up ? 2 : 3) : 1,
               .stride = wide ? (size_t)p->stride : 1,
               .each = vm_padded(p->y.c),
               .groups = moves     ? 1
                         : p->up   ? 4
                         : doubles ? 2
                                   : 1};
    vm_planes *to = &s.to;
    to->slices = moves || s.own ? 1 : p->slices;
    to->lines = (uint32_t)p->x.f;
    to->width = (uint32_t)p->x.w;
    s.lines = p->y.f, s.width = p->y.w;
    if (moves || s.own) {
        to->row_plane = to->frame_line = 1;
    } else if (wide && p->slices > 1) {
        to->row_plane = to->row_slice = to->frame_line = 1;
        to->lines = (uint32_t)(p->x.f + 2), to->width = (uint32_t)(p->x.w + 2);
        to->frame0 = -(2 - (int32_t)p->ahead), to->left = -1;
    } else if (wide) {
        to->row_line = to->frame_plane = 1;
        to->width = (uint32_t)(p->up ? p->x.w + 2 : (p->y.w - 1) * (size_t)p->stride + 3);
        to->left = -p->pad;
        s.width = p->up ? p->x.w + 1 : p->y.w;
    } else {
        to->row_plane = to->frame_slice = 1;
        to->frame_line = halves ? 2 : 1;
        to->frame0 = doubles ? -1 : 0;
        if (halves || doubles) to->lines = (uint32_t)((halves ? p->y.f : p->x.f) - 1), s.lines = to->lines;
    }
    s.turns = wide && !p->turned;
    if (p->norm) vm_put_bytes(&s.prepared, 2 * s.channels * sizeof(float), 256);
    const size_t taps = (p->up ? 16 : 9) * (size_t)p->slices;
    const size_t filters = s.own ? vm_conv_blocked(1, s.each, 3 * s.channels, 9) : VM_PRODUCT(s.each, taps, s.channels);
    s.filters = vm_put_bytes(&s.prepared, s.turns ? VM_PRODUCT(filters, vm_dtype_bytes(g->backend.dtype)) : 0, 256);
    lay_out(g, p, &s, unit_of(p));
    return s;
}

/* A step: enough rows of all frames for the whole device or, if tight, as few as can be. The former are assumed to cost
 * no more than a pass that runs whole; that was not measured. */
static size_t rows_of_step(const vm_gpu *g, const vm_pass *p, bool tight, double *cost) {
    const size_t unit = unit_of(p), units = (p->y.h + unit - 1) / unit;
    const vm_conv_args own = own_args(p);
    const size_t tiles = is_own(g, p) ? vm_conv_items(&own, own_tile(g, p))
                                      : VM_MAX(unit * p->y.f * p->y.w * vm_padded(p->y.c) / TILE, 1);
    const size_t wave = WAVES * (size_t)g->multiprocessors;
    const size_t enough = VM_MIN((wave + tiles - 1) / tiles, units), some = tight ? 1 : enough;
    *cost = (double)enough / (double)some;
    return VM_MIN(some * unit, p->y.h);
}

/* A pass that runs whole has the same stripes, one after another. */
static shape shape_of(const vm_gpu *g, const vm_pass *p, vm_manner manner) {
    shape s = shape_of_pass(g, p);
    double cost;
    lay_out(g, p, &s, rows_of_step(g, p, manner.tight, &cost));
    return s;
}

vm_cut vm_frames_cut(const vm_gpu *g, const vm_pass *p, bool tight) {
    if (p->kind == VM_PASS_ATTENTION)
        return (vm_cut){.rows = 1, .columns = 1, .out_rows = p->y.h, .in_rows = p->x.h, .cost = 1};
    double cost;
    const size_t rows = rows_of_step(g, p, tight, &cost), one = rows_in(p, 2 * unit_of(p)) - rows_in(p, unit_of(p));
    return (vm_cut){.rows = (p->y.h + rows - 1) / rows,
                    .columns = 1,
                    .out_rows = rows,
                    .together = 1,
                    .in_step = rows / unit_of(p) * one,
                    .in_rows = rows_in(p, rows),
                    .pad = (size_t)-top_of(p, 0),
                    .cost = cost};
}

/* Elements of a frame's queries, keys and values. */
static size_t attended(const vm_pass *p) { return p->x.h * p->x.w * p->x.c; }

vm_needs vm_frames_needs(const vm_gpu *g, const vm_pass *p, vm_manner manner) {
    if (p->kind == VM_PASS_ATTENTION)
        return (vm_needs){.scratch = VM_PRODUCT(attended(p), vm_dtype_bytes(g->backend.dtype))};
    const shape s = shape_of(g, p, manner);
    return (vm_needs){.prepared = s.prepared, .scratch = s.scratch};
}

static vm_conv_key key_of(const vm_gpu *g, const shape *s) {
    const vm_planes *to = &s->to;
    const bool rows = s->k == 1; /* a plain product: all planes are one */
    const int64_t x[4] = {rows ? 1 : to->planes, (int64_t)(to->slices * s->channels),
                          rows ? (int64_t)to->planes * to->lines : to->lines, to->width};
    vm_conv conv =
        vm_conv_square(g->backend.dtype, x, (int64_t)(s->groups * s->each), (int64_t)s->k, (int64_t)s->stride, 0);
    conv.tf32 = g->tf32;
    conv.nhwc = true;
    const size_t least = g->tf32 ? 64u << 20 : 1u << 20; /* as in backend.c */
    return (vm_conv_key){conv, VM_MAX(s->scratch / 5 * 2, least)};
}

/* Returns: whether cuDNN has work: not in a video of one frame, which a change of the number of frames passes on. */
static bool convolves(const shape *s) { return s->to.lines > 0 && s->lines > 0; }

bool vm_frames_key(const vm_gpu *g, const vm_pass *p, vm_manner manner, vm_conv_key *key) {
    if (p->kind != VM_PASS_CONV) return false;
    const shape s = shape_of(g, p, manner);
    *key = key_of(g, &s);
    return !s.own && convolves(&s);
}

/* ---- launches ---- */

/* Launches a kernel whose threads have vectors of 8 numbers in turn, which they count in 32 bits. */
static vm_status launch(vm_gpu *g, CUfunction kernel, size_t numbers, void *args) {
    if (numbers / 8 > INT32_MAX)
        return vm_fail(VM_EINVAL,
                       VM_EXPECTED("memory_limit", "one with which a step has less than 2^34 numbers", "%zu"), numbers);
    const size_t blocks = (numbers / 8 + VM_CUDA_THREADS - 1) / VM_CUDA_THREADS;
    const size_t some = VM_MAX(VM_MIN(blocks, (size_t)g->multiprocessors * 32), 1);
    return vm_gpu_launch(g, kernel, some, 1, VM_CUDA_THREADS, 0, args);
}

static void *scratch_at(const vm_operands *at, size_t offset) { return (char *)at->scratch + offset; }

/* The user's video: pixels from one row, column and frame to the next, and numbers from channel to channel. A row
 * may be a column of the picture (vm_pass.turned). */
typedef struct steps {
    int64_t row, column, frame;
    uint64_t plane;
} steps;

static steps steps_of(const vm_pass *p, const vm_shape *s, const vm_numbers *n) {
    const int64_t wide = (int64_t)(p->turned ? s->h : s->w), area = (int64_t)(s->h * s->w);
    const int64_t down = n ? n->row / n->pixel : wide;
    return (steps){.row = p->turned ? 1 : down,
                   .column = p->turned ? down : 1,
                   .frame = n ? n->frame / n->pixel : area,
                   .plane = (uint64_t)(n ? n->channel / n->pixel : area * (int64_t)s->f)};
}

static vm_gather_args gather_args(const vm_pass *p, const vm_operands *at, const shape *s, size_t row) {
    const steps own = steps_of(p, &p->x, p->x_format == VM_ROWS ? NULL : at->numbers);
    const size_t first = (size_t)VM_MAX(top_of(p, row), 0), in_row = p->x.f * p->x.w;
    vm_gather_args a = {.x = p->x_format == VM_ROWS ? at->x.data : at->x_pixels,
                        .out = scratch_at(at, s->in),
                        .scale = p->norm ? at->prepared : NULL,
                        .shift = p->norm ? (float *)at->prepared + s->channels : NULL,
                        .factor = vm_norm_by_pixel(p->norm) ? scratch_at(at, s->factor) : NULL,
                        .x_plane = own.plane,
                        .row_step = own.row,
                        .column_step = own.column,
                        .frame_step = own.frame,
                        .first_factor = first * in_row,
                        .to = s->to,
                        .x_h = (uint32_t)p->x.h,
                        .x_w = (uint32_t)p->x.w,
                        .x_f = (uint32_t)p->x.f,
                        .x_c = (uint32_t)p->x.c,
                        .x_pitch = (uint32_t)(at->x.row / in_row),
                        .channels = (uint32_t)s->channels,
                        .x_ring = vm_gpu_ring(&at->x, first),
                        .format = p->x_format,
                        .act = p->act,
                        .held = p->held,
                        .mirrored = p->mirrored,
                        .frame_least = p->time == VM_TIME_DOUBLED && !is_move(p),
                        .in_scale = p->affine ? p->in_scale : 1,
                        .in_shift = p->affine ? p->in_shift : 0,
                        .multiply = p->norm ? p->y_scale : p->y_scale / p->x_scale};
    a.to.row0 = (int32_t)top_of(p, row);
    return a;
}

static vm_status gather(vm_gpu *g, const vm_gather_args *a) {
    return launch(g, g->gather, VM_PRODUCT(a->to.planes, a->to.lines, a->to.width, a->to.slices, a->channels),
                  (void *)a);
}

static vm_scatter_args scatter_args(const vm_gpu *g, const vm_pass *p, const vm_operands *at, const shape *s,
                                    size_t row, size_t rows) {
    const steps own = steps_of(p, &p->y, NULL);
    const bool moves = is_move(p);
    return (vm_scatter_args){.raw = scratch_at(at, s->raw),
                             .bias = at->bias,
                             .add = p->add ? at->add.data : NULL,
                             .y = p->y_format == VM_ROWS ? at->y.data : at->y_pixels,
                             .flags = g->flags,
                             .y_plane = own.plane,
                             .row_step = own.row,
                             .column_step = own.column,
                             .frame_step = own.frame,
                             .y_f = (uint32_t)p->y.f,
                             .y_w = (uint32_t)p->y.w,
                             .y_c = (uint32_t)p->y.c,
                             .y_pitch = (uint32_t)(at->y.row / (p->y.f * p->y.w)),
                             .add_pitch = (uint32_t)(at->add.row / (p->y.f * p->y.w)),
                             .y_ring = vm_gpu_ring(&at->y, row),
                             .add_ring = vm_gpu_ring(&at->add, row),
                             .row0 = (uint32_t)row,
                             .rows = (uint32_t)rows,
                             .frame_first = p->time != VM_TIME_SAME && !moves,
                             .frame_end = (uint32_t)p->y.f,
                             .lines = (uint32_t)s->lines,
                             .width = (uint32_t)s->width,
                             .groups = (uint32_t)s->groups,
                             .channels = (uint32_t)s->each,
                             .by_frame = s->to.frame_plane,
                             .halves = p->time == VM_TIME_DOUBLED && !moves,
                             .up = p->up && !moves,
                             .relu = p->relu,
                             .format = p->y_format,
                             .clamp = p->clamp,
                             .out_scale = p->out_scale,
                             .out_shift = p->out_shift,
                             .bias_scale = p->y_scale};
}

static vm_status scatter(vm_gpu *g, const vm_scatter_args *a) {
    const size_t numbers = VM_PRODUCT(a->rows, a->frame_end - a->frame_first, a->y_w, VM_ROUND_UP(a->y_c, VM_BLOCK));
    return launch(g, g->scatter, numbers, (void *)a);
}

static vm_status move(vm_gpu *g, const vm_pass *p, const vm_operands *at, const shape *s, size_t rows) {
    vm_frames_move_args a = {.x = scratch_at(at, s->in),
                             .out = scratch_at(at, s->raw),
                             .x_f = (uint32_t)p->x.f,
                             .x_w = (uint32_t)p->x.w,
                             .x_c = (uint32_t)p->x.c,
                             .x_pitch = (uint32_t)s->channels,
                             .y_f = (uint32_t)p->y.f,
                             .y_w = (uint32_t)p->y.w,
                             .y_c = (uint32_t)p->y.c,
                             .rows = (uint32_t)rows,
                             .channels = (uint32_t)s->each,
                             .up = p->up,
                             .down = is_down(p),
                             .share = (uint32_t)vm_move_share(p->move, p->x.c, p->y.c, p->up, is_down(p)),
                             .doubles = p->time == VM_TIME_DOUBLED,
                             .halves = p->time == VM_TIME_HALVED,
                             .held = p->held,
                             .move = p->move};
    return launch(g, g->frames_move, VM_PRODUCT(rows, p->y.f, p->y.w, s->each), &a);
}

/* Copies the first frame, which a change of the number of frames passes on. */
static vm_status copy_frame(vm_gpu *g, const vm_pass *p, const vm_operands *at, const shape *s, size_t row,
                            size_t rows) {
    vm_gather_args in = gather_args(p, at, s, row);
    in.to.planes = (uint32_t)rows;
    in.to.lines = in.to.slices = 1;
    in.to.frame0 = in.to.frame_line = 0;
    in.frame_least = 0;
    vm_scatter_args out = scatter_args(g, p, at, s, row, rows);
    out.raw = in.out;
    out.bias = NULL;
    out.frame_first = 0, out.frame_end = 1;
    out.lines = out.groups = 1;
    out.halves = 0;
    const vm_status status = gather(g, &in);
    return status ? status : scatter(g, &out);
}

static vm_status convolve(vm_gpu *g, const vm_pass *p, const vm_operands *at, const shape *s, size_t row, size_t rows) {
    assert(!is_own(g, p)); /* cuDNN needs plain filters */
    const vm_conv_key key = key_of(g, s);
    const void *filters = s->turns ? (char *)at->prepared + s->filters : at->weight;
    void *in = scratch_at(at, s->in), *raw = scratch_at(at, s->raw);
    vm_status status;
    g->launches++;
    if (g->autotune && !g->outside) {
        status = vm_cudnn_convs_tune(g->convs, &key, g->stream, in, filters, raw, at->workspace, vm_gpu_time, g);
        if (status) return status;
    }
    status = vm_cudnn_convs_run(g->convs, &key, g->stream, in, filters, raw, at->workspace);
    const vm_scatter_args out = scatter_args(g, p, at, s, row, rows);
    return status ? status : scatter(g, &out);
}

static vm_status own_conv(vm_gpu *g, const vm_pass *p, const vm_operands *at, const shape *s, size_t row, size_t rows,
                          size_t first) {
    const bool from_rows = p->x_format == VM_ROWS, to_rows = p->y_format == VM_ROWS;
    const steps own = steps_of(p, &p->y, NULL);
    const vm_conv_tile tile = own_tile(g, p);
    vm_conv_args a = own_args(p);
    const uint32_t each = vm_conv_items(&a, tile), pitch = (uint32_t)(at->x.row / (p->x.f * p->x.w));
    a.x = from_rows ? at->x.data : scratch_at(at, s->in);
    a.x_pitch = from_rows ? pitch : (uint32_t)s->channels;
    a.x_ring = from_rows ? vm_gpu_ring(&at->x, first) : (vm_ring_rows){-(uint32_t)first, 0};
    a.w = s->turns ? (char *)at->prepared + s->filters : at->weight;
    if (from_rows && p->norm) a.scale = at->prepared, a.shift = (float *)at->prepared + s->channels;
    a.factor = vm_norm_by_pixel(p->norm) ? scratch_at(at, s->factor) : NULL;
    a.first_factor = first * p->x.f * p->x.w;
    a.bias = at->bias;
    a.add = p->add ? at->add.data : NULL;
    a.add_pitch = (uint32_t)(at->add.row / (p->y.f * p->y.w));
    a.add_ring = vm_gpu_ring(&at->add, row);
    a.y = to_rows ? at->y.data : at->y_pixels;
    a.y_pitch = (uint32_t)(at->y.row / (p->y.f * p->y.w));
    a.y_ring = vm_gpu_ring(&at->y, row);
    a.y_plane = own.plane;
    a.row_step = own.row, a.column_step = own.column, a.frame_step = own.frame;
    a.first_item = (uint32_t)row * each;
    a.items = (uint32_t)rows * each;
    a.flags = g->flags;
    a.multiply = !from_rows ? 1 : p->norm ? p->y_scale : p->y_scale / p->x_scale;
    if (!from_rows) a.act = VM_ACT_NONE; /* gather has done it */
    return vm_gpu_launch(g, g->conv_video[tile.kind], vm_conv_grid(&a, tile, (uint32_t)g->multiprocessors), 1,
                         tile.threads, tile.shared, &a);
}

static vm_status stripe(vm_gpu *g, const vm_pass *p, const vm_operands *at, const shape *s, size_t row, size_t rows) {
    const ptrdiff_t top = top_of(p, row);
    const size_t first = (size_t)VM_MAX(top, 0), end = VM_MIN((size_t)(top + (ptrdiff_t)rows_in(p, rows)), p->x.h);
    vm_status status;
    if (vm_norm_by_pixel(p->norm) &&
        (status = vm_gpu_pixel_norm(g, p, at, scratch_at(at, s->factor), at->prepared, first, end)))
        return status;
    if (p->time != VM_TIME_SAME && !is_move(p) && (status = copy_frame(g, p, at, s, row, rows))) return status;
    if (!convolves(s)) return VM_OK;
    vm_gather_args in = gather_args(p, at, s, row);
    if (s->own) in.to.planes = (uint32_t)(end - first), in.to.row0 = (int32_t)first;
    if ((!s->own || p->x_format != VM_ROWS) && (status = gather(g, &in))) return status;
    if (s->own) return own_conv(g, p, at, s, row, rows, first);
    if (!is_move(p)) return convolve(g, p, at, s, row, rows);
    const vm_scatter_args out = scatter_args(g, p, at, s, row, rows);
    status = move(g, p, at, s, rows);
    return status ? status : scatter(g, &out);
}

vm_status vm_frames_rows(vm_gpu *g, const vm_pass *p, const vm_operands *at, size_t row, size_t end) {
    const shape s = shape_of(g, p, at->manner);
    vm_status status = VM_OK;
    for (size_t rows; row < end && !status; row += rows) {
        rows = VM_MIN(s.rows, end - row);
        status = stripe(g, p, at, &s, row, rows);
    }
    return status;
}

vm_status vm_frames_begin(vm_gpu *g, const vm_pass *p, const vm_operands *at) {
    const shape s = shape_of_pass(g, p);
    if (p->kind != VM_PASS_CONV || !s.turns) return VM_OK;
    vm_turn_args a = {.from = at->weight,
                      .to = (char *)at->prepared + s.filters,
                      .phases = p->up ? 4 : 1,
                      .filters = (uint32_t)(s.each * p->slices),
                      .taps = p->up ? 2 : 3,
                      .channels = (uint32_t)s.channels,
                      .outs = s.own ? (uint32_t)s.each : 0};
    return launch(g, g->turn, VM_PRODUCT(a.phases, a.filters, a.taps, a.taps, a.channels), &a);
}

vm_status vm_frames_attention(vm_gpu *g, const vm_pass *p, const vm_operands *at) {
    const size_t c = p->x.c / 3;
    vm_pass own = *p; /* of a frame, in scratch */
    own.x.f = own.y.f = 1;
    vm_operands there = *at;
    there.x = there.y = (vm_view){at->scratch, g->backend.dtype, VM_BLOCK, p->x.w * p->x.c, SIZE_MAX};
    shape s = {.channels = p->x.c, .groups = 3, .each = c, .lines = 1, .width = p->x.w};
    s.to = (vm_planes){.planes = (uint32_t)p->x.h, .lines = 1, .width = (uint32_t)p->x.w, .slices = 1, .row_plane = 1};
    vm_status status;
    for (size_t frame = 0; frame < p->x.f; frame++) {
        vm_gather_args in = gather_args(p, at, &s, 0);
        in.to.frame0 = (int32_t)frame;
        in.to.row0 = 0;
        in.multiply = 1;
        if ((status = gather(g, &in))) return status;
        if ((status = vm_gpu_attention(g, &own, &there))) return status;
        vm_scatter_args out = scatter_args(g, p, at, &s, 0, p->y.h);
        out.frame_first = (uint32_t)frame, out.frame_end = (uint32_t)frame + 1;
        if ((status = scatter(g, &out))) return status;
    }
    return VM_OK;
}
