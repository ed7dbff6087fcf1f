/* The two ends of a tile, for any computation in between. Its input: normalised, activated and zero-padded into a
 * thread's scratch as factors of products. Its output: rounded to the stored type, and measured. */
#include <math.h>
#include <string.h>

#include "cpu.h"

typedef struct layout {
    size_t channels, sums, parts, bytes;
} layout;

static layout make_layout(const vm_pass *pass, const vm_grid *grid, size_t at_once) {
    const size_t channels = VM_BLOCKS(pass->x.c) * VM_BLOCK;
    const size_t sum = pass->stats ? vm_stats_floats(pass->y.c) : 0;
    layout l = {0};
    l.channels = vm_put_bytes(&l.bytes, 2 * channels * sizeof(float), VM_ALIGN);
    l.sums = vm_put_bytes(&l.bytes, sum * sizeof(double), VM_ALIGN);
    l.parts = vm_put_bytes(&l.bytes, VM_PRODUCT(at_once, grid->layers, grid->columns, sum, sizeof(float)), VM_ALIGN);
    return l;
}

size_t vm_work_bytes(const vm_pass *pass, const vm_grid *grid, size_t at_once) {
    return make_layout(pass, grid, at_once).bytes;
}

vm_work vm_work_begin(const vm_cpu *cpu, const vm_pass *pass, const vm_operands *at, const vm_grid *grid, void *to) {
    const layout l = make_layout(pass, grid, at->manner.at_once);
    const size_t padded = VM_BLOCKS(pass->x.c) * VM_BLOCK;
    char *base = to;
    vm_work w = {.cpu = cpu, .pass = pass, .at = *at, .cut = vm_grid_rows(grid)};
    if (pass->stats) {
        w.sums = (double *)(void *)(base + l.sums);
        w.parts = (float *)(void *)(base + l.parts);
    }
    if (!pass->norm && !pass->affine && pass->x_scale == 1) return w;
    float *scale = (float *)(void *)(base + l.channels), *shift = scale + padded;
    w.scale = scale;
    w.shift = shift;
    if (pass->norm)
        vm_norm_scale(scale, shift, pass, at);
    else
        for (size_t i = 0; i < padded; i++) {
            scale[i] = i >= pass->x.c ? 0 : pass->affine ? pass->in_scale : 1 / pass->x_scale;
            shift[i] = i < pass->x.c && pass->affine ? pass->in_shift : 0;
        }
    return w;
}

vm_grid vm_grid_of(const vm_pass *pass, size_t cell_h, size_t cell_w, size_t cell_f) {
    const size_t k = (size_t)pass->ksize, stride = (size_t)pass->stride, step = pass->time == VM_TIME_HALVED ? 2 : 1;
    const size_t frames = pass->time == VM_TIME_DOUBLED ? pass->x.f : pass->y.f; /* doubled: a cell is one of x's */
    return (vm_grid){.cell_h = cell_h,
                     .cell_w = cell_w,
                     .cell_f = cell_f,
                     .step_h = pass->up ? cell_h / 2 : cell_h * stride,
                     .step_w = pass->up ? cell_w / 2 : cell_w * stride,
                     .step_f = cell_f * step,
                     .overlap = k - stride,
                     .pad = (size_t)pass->pad,
                     .overlap_f = pass->slices - step,
                     .pad_f = (size_t)(pass->slices - 1 - pass->ahead),
                     .height = (pass->y.h + cell_h - 1) / cell_h,
                     .width = (pass->y.w + cell_w - 1) / cell_w,
                     .length = (frames + cell_f - 1) / cell_f,
                     .output_h = pass->y.h,
                     .output_w = pass->y.w,
                     .output_f = frames};
}

void vm_grid_cut(vm_grid *g, size_t tile_h, size_t tile_w, size_t tile_f) {
    g->tile_h = VM_MAX(VM_MIN(tile_h, g->height), 1);
    g->tile_w = tile_w;
    g->tile_f = tile_f;
    g->rows = (g->height + g->tile_h - 1) / g->tile_h;
    g->columns = (g->width + tile_w - 1) / tile_w;
    g->layers = (g->length + tile_f - 1) / tile_f;
    g->input_h = g->tile_h * g->step_h + g->overlap;
    g->input_w = g->tile_w * g->step_w + g->overlap;
    g->input_f = g->tile_f * g->step_f + g->overlap_f;
}

vm_tile vm_grid_tile(const vm_grid *g, size_t task) {
    vm_tile t = {.y0 = task / g->columns / g->layers * g->tile_h,
                 .x0 = task % g->columns * g->tile_w,
                 .f0 = task / g->columns % g->layers * g->tile_f};
    t.h = VM_MIN(g->tile_h, g->height - t.y0);
    t.w = VM_MIN(g->tile_w, g->width - t.x0);
    t.f = VM_MIN(g->tile_f, g->length - t.f0);
    return t;
}

vm_box vm_tile_input(const vm_grid *g, const vm_tile *t) {
    return (vm_box){.top = (ptrdiff_t)(t->y0 * g->step_h) - (ptrdiff_t)g->pad,
                    .left = (ptrdiff_t)(t->x0 * g->step_w) - (ptrdiff_t)g->pad,
                    .first = (ptrdiff_t)(t->f0 * g->step_f) - (ptrdiff_t)g->pad_f,
                    .rows = t->h * g->step_h + g->overlap,
                    .width = t->w * g->step_w + g->overlap,
                    .frames = t->f * g->step_f + g->overlap_f};
}

vm_box vm_tile_output(const vm_grid *g, const vm_tile *t) {
    const size_t top = t->y0 * g->cell_h, left = t->x0 * g->cell_w, first = t->f0 * g->cell_f;
    return (vm_box){.top = (ptrdiff_t)top,
                    .left = (ptrdiff_t)left,
                    .first = (ptrdiff_t)first,
                    .rows = VM_MIN(t->h * g->cell_h, g->output_h - top),
                    .width = VM_MIN(t->w * g->cell_w, g->output_w - left),
                    .frames = VM_MIN(t->f * g->cell_f, g->output_f - first)};
}

vm_cut vm_grid_rows(const vm_grid *g) {
    return (vm_cut){.rows = g->rows,
                    .columns = g->layers * g->columns,
                    .out_rows = g->tile_h * g->cell_h,
                    .in_step = g->tile_h * g->step_h,
                    .in_rows = g->input_h,
                    .pad = g->pad};
}

/* ---- load ---- */

size_t vm_planes(const vm_cpu *cpu, size_t c) {
    return cpu->pairs ? vm_parts(cpu) * ((VM_BLOCKS(c) + 1) / 2) : VM_BLOCKS(c);
}

/* Loads pixels of a channel block into the scratch at x, a plane of such blocks (or of pairs of them). */
static void put(const vm_work *j, float *x, size_t block, size_t plane, const vm_source *from) {
    const vm_cpu *cpu = j->cpu;
    if (!cpu->pairs) {
        cpu->products->load(x + block * plane, NULL, from);
        return;
    }
    uint16_t *pairs = (uint16_t *)(void *)(x + block / 2 * plane) + block % 2 * VM_BLOCK;
    cpu->products->load(pairs, cpu->pairs > 1 ? pairs + vm_planes(cpu, j->pass->x.c) * plane : NULL, from);
}

/* Returns: how to load a block of channels. */
static vm_source how_to_load(const vm_work *j, size_t block) {
    vm_source from = {.act = j->pass->act};
    if (!j->scale) return from;
    from.scale = j->scale + block * VM_BLOCK;
    from.shift = j->shift + block * VM_BLOCK;
    return from;
}

/* Returns: the number at `at`, which may be unaligned, rounded to float. */
static float number_at(const vm_numbers *how, const char *at) {
    union {
        char bytes[16];
        float f;
        double d;
        long double l;
        int8_t i1;
        int16_t i2;
        int32_t i4;
        int64_t i8;
        uint8_t u1;
        uint16_t u2;
        uint32_t u4;
        uint64_t u8;
    } n;
    const size_t size = how->size;
    for (size_t i = 0; i < size; i++) n.bytes[i] = at[how->swapped ? size - 1 - i : i];
    switch (how->kind) {
    case 'b': return vm_element(VM_BF16, &n, 0);
    case 'f': return size == 2 ? vm_element(VM_F16, &n, 0) : size == 4 ? n.f : size == 8 ? (float)n.d : (float)n.l;
    case 'u': return size == 1 ? (float)n.u1 : size == 2 ? (float)n.u2 : size == 4 ? (float)n.u4 : (float)n.u8;
    default: return size == 1 ? (float)n.i1 : size == 2 ? (float)n.i2 : size == 4 ? (float)n.i4 : (float)n.i8;
    }
}

static float pixel_at(const vm_work *j, size_t c, size_t f, size_t y, size_t x) {
    const vm_numbers *how = j->at.numbers;
    const ptrdiff_t row = (ptrdiff_t)(j->pass->turned ? x : y), pixel = (ptrdiff_t)(j->pass->turned ? y : x);
    const char *at = (const char *)j->at.x_pixels + (ptrdiff_t)c * how->channel + (ptrdiff_t)f * how->frame +
                     row * how->row + pixel * how->pixel;
    float v;
    if (how->kind == 'f' && how->size == sizeof v && !how->swapped)
        memcpy(&v, at, sizeof v);
    else
        v = number_at(how, at);
    return j->pass->x_format == VM_U8_NHWC ? v / 127.5f - 1 : v;
}

/* Loads n of the user's pixels, some at a time. */
static void put_pixels(const vm_work *j, float *to, size_t block, size_t plane, size_t f, size_t y, size_t x,
                       size_t n) {
    enum { SOME = 32 };
    const size_t c0 = block * VM_BLOCK, lanes = VM_MIN(j->pass->x.c - c0, VM_BLOCK);
    float pixels[SOME * VM_BLOCK] = {0};
    vm_source from = how_to_load(j, block);
    from.x = pixels;
    for (size_t done = 0; done < n; done += from.pixels, to += from.pixels * VM_BLOCK) {
        from.pixels = VM_MIN(n - done, SOME);
        for (size_t i = 0; i < from.pixels; i++)
            for (size_t l = 0; l < lanes; l++) pixels[i * VM_BLOCK + l] = pixel_at(j, c0 + l, f, y, x + done + i);
        put(j, to, block, plane, &from);
    }
}

/* x: counted through the frames. factor: of each pixel; NULL: 1. */
static void put_row(const vm_work *j, float *to, size_t block, size_t plane, size_t y, size_t x, size_t n,
                    const float *factor) {
    vm_source from = how_to_load(j, block);
    from.factor = factor;
    from.x = vm_pixel(&j->at.x, y, block, x);
    from.dtype = j->at.x.dtype;
    from.pixels = n;
    put(j, to, block, plane, &from);
}

/* A row of a box: columns of padding, pixels of the image from x on, columns of padding. */
typedef struct span {
    size_t left, x, pixels, right;
} span;

static span span_of(const vm_work *j, const vm_box *box) {
    span s = {.left = box->left < 0 ? (size_t)-box->left : 0};
    s.x = (size_t)(box->left + (ptrdiff_t)s.left);
    s.pixels = VM_MIN(j->pass->x.w - s.x, box->width - s.left);
    s.right = box->width - s.left - s.pixels;
    return s;
}

/* A line of a box: a row of a frame. */
typedef struct line {
    ptrdiff_t frame, y;
    bool inside; /* the image, and a frame that is met */
} line;

/* Returns: the row that stands for row y, which is at most one beyond the first or the last. */
static ptrdiff_t mirrored(ptrdiff_t y, ptrdiff_t rows) {
    const ptrdiff_t at = y < 0 ? -y : y >= rows ? 2 * (rows - 1) - y : y;
    return VM_MAX(at, 0);
}

static line line_of(const vm_work *j, const vm_box *box, size_t i) {
    const vm_pass *p = j->pass;
    const bool copies = p->kind == VM_PASS_CONV && p->time == VM_TIME_DOUBLED; /* the first frame, and no more of it */
    const ptrdiff_t frames = (ptrdiff_t)p->x.f, rows = (ptrdiff_t)p->x.h;
    line l = {box->first + (ptrdiff_t)(i / box->rows), box->top + (ptrdiff_t)(i % box->rows), false};
    if (p->held) l.frame = VM_MAX(VM_MIN(l.frame, frames - 1), 0);
    if (p->mirrored) l.y = mirrored(l.y, rows);
    l.inside = l.y >= 0 && l.y < rows && l.frame >= copies && l.frame < frames;
    return l;
}

static size_t lines_of(const vm_box *box) { return box->frames * box->rows; }

/* Returns: where line i begins. frame, row: floats between frames, and between rows. */
static size_t line_at(const vm_box *box, size_t i, size_t frame, size_t row) {
    return i / box->rows * frame + i % box->rows * row;
}

void vm_invert_lengths(const vm_work *j, const vm_box *box, float *inverse) {
    enum { SOME = 64 /* pixels of all blocks that are added up at a time */ };
    const vm_pass *p = j->pass;
    const bool rms = p->norm == VM_NORM_RMS;
    const float least = rms ? 0 : p->eps * p->x_scale;
    const float under = rms ? p->eps * p->x_scale * p->x_scale * (float)p->x.c : 0;
    const span s = span_of(j, box);
    for (size_t i = 0; i < lines_of(box); i++) {
        const line l = line_of(j, box, i);
        const size_t x = (size_t)l.frame * p->x.w + s.x;
        float *to = inverse + i * box->width + s.left;
        for (size_t done = 0, some; l.inside && done < s.pixels; done += some, to += some) {
            float squares[SOME * VM_BLOCK] = {0};
            some = VM_MIN(s.pixels - done, SOME);
            for (size_t b = 0; b < VM_BLOCKS(p->x.c); b++)
                j->cpu->ops->squares(squares, vm_pixel(&j->at.x, (size_t)l.y, b, x + done), j->at.x.dtype, some);
            for (size_t pixel = 0; pixel < some; pixel++) {
                float sum = 0;
                for (size_t lane = 0; lane < VM_BLOCK; lane++) sum += squares[pixel * VM_BLOCK + lane];
                const float length = sqrtf(sum + under);
                to[pixel] = 1 / (length < least ? least : length); /* NaN stays */
            }
        }
    }
}

/* Zeroes the part of a plane that lies outside the image. */
static void put_padding(const vm_work *j, const vm_box *box, float *x, size_t frame, size_t row) {
    const span s = span_of(j, box);
    for (size_t i = 0; i < lines_of(box); i++) {
        const bool in = line_of(j, box, i).inside;
        float *to = x + line_at(box, i, frame, row);
        memset(to, 0, (in ? s.left : box->width) * VM_BLOCK * sizeof *to);
        if (in) memset(to + (s.left + s.pixels) * VM_BLOCK, 0, s.right * VM_BLOCK * sizeof *to);
    }
}

/* Loads the pixels of a channel block that lie in the image, in line i of the box. */
static void put_image(const vm_work *j, const vm_box *box, size_t i, const float *inverse, float *x, size_t block,
                      size_t plane) {
    const span s = span_of(j, box);
    const line l = line_of(j, box, i);
    const size_t frame = (size_t)l.frame, y = (size_t)l.y;
    float *to = x + s.left * VM_BLOCK;
    if (!l.inside) return;
    if (j->pass->x_format == VM_ROWS)
        put_row(j, to, block, plane, y, frame * j->pass->x.w + s.x, s.pixels,
                inverse ? inverse + i * box->width + s.left : NULL);
    else
        put_pixels(j, to, block, plane, frame, y, s.x, s.pixels);
}

/* Copies a loaded plane's columns next to the first and the last, to beyond these, if the pass mirrors its input. */
static void put_mirrors(const vm_work *j, const vm_box *box, float *x, size_t frame, size_t row) {
    const span s = span_of(j, box);
    for (size_t i = 0; j->pass->mirrored && j->pass->x.w > 1 && i < lines_of(box); i++) {
        float (*first)[VM_BLOCK] = (float (*)[VM_BLOCK])(x + line_at(box, i, frame, row)) + s.left;
        if (s.left) memcpy(first[-1], first[1], sizeof *first);
        if (s.right) memcpy(first[s.pixels], first[s.pixels - 2], sizeof *first);
    }
}

void vm_load_block(const vm_work *j, const vm_box *box, const float *inverse, float *x, size_t block, size_t row) {
    put_padding(j, box, x, box->rows * row, row);
    for (size_t i = 0; i < lines_of(box); i++) put_image(j, box, i, inverse, x + i * row, block, 0);
    put_mirrors(j, box, x, box->rows * row, row);
}

void vm_load_box(const vm_work *j, const vm_box *box, float *inverse, float *x, size_t plane, size_t frame,
                 size_t row) {
    const size_t blocks = VM_BLOCKS(j->pass->x.c), planes = vm_planes(j->cpu, j->pass->x.c),
                 set = planes / vm_parts(j->cpu);
    const bool half = j->cpu->pairs && blocks % 2; /* the last block has no neighbour */
    for (size_t p = 0; p < planes; p++) {
        float *to = x + p * plane;
        if (half && (p + 1) % set == 0) memset(to, 0, plane * sizeof *to);
        put_padding(j, box, to, frame, row);
    }
    if (inverse) vm_invert_lengths(j, box, inverse);
    for (size_t i = 0; i < lines_of(box); i++)
        for (size_t b = 0; b < blocks; b++) put_image(j, box, i, inverse, x + line_at(box, i, frame, row), b, plane);
    for (size_t p = 0; p < planes; p++) put_mirrors(j, box, x + p * plane, frame, row);
}

/* ---- multiply ---- */

void vm_multiply(const vm_products *products, vm_gemm all) {
    const size_t groups = (all.pixels + products->max_pixels - 1) / products->max_pixels;
    for (size_t row = 0; row < all.rows; row += products->max_rows)
        for (size_t i = 0; i < groups; i++) {
            const size_t first = all.pixels * i / groups;
            const ptrdiff_t y = (ptrdiff_t)row, x = (ptrdiff_t)first;
            vm_gemm g = all;
            g.rows = VM_MIN(all.rows - row, products->max_rows);
            g.pixels = all.pixels * (i + 1) / groups - first;
            g.x += y * g.x_row + x * g.x_pixel;
            g.y += y * g.y_row + x * g.y_pixel;
            if (g.add) g.add += y * g.add_row + x * g.add_pixel;
            products->gemm(&g);
        }
}

/* ---- store ---- */

bool vm_in_place(const vm_cpu *cpu, const vm_pass *pass) {
    return !cpu->pairs && cpu->dtype == VM_F32 && pass->y_format == VM_ROWS;
}

static void store_pixels(const vm_work *j, const float *from, size_t block, size_t f, size_t y, size_t x, size_t n) {
    const vm_shape *s = &j->pass->y;
    const size_t row = j->pass->turned ? 1 : s->w, pixel = j->pass->turned ? s->h : 1;
    const size_t first = f * s->h * s->w + y * row + x * pixel;
    const bool bytes = j->pass->y_format == VM_U8_NHWC;
    bool finite = true;
    for (size_t c = block * VM_BLOCK; c < VM_MIN((block + 1) * VM_BLOCK, s->c); c++)
        for (size_t i = 0; i < n; i++) {
            const float v = from[i * VM_BLOCK + c % VM_BLOCK] * j->pass->out_scale + j->pass->out_shift;
            finite = finite && isfinite(v);
            vm_store_number(bytes, j->at.y_pixels, s, j->pass->clamp, first + i * pixel, c, v);
        }
    if (bytes && !finite) __atomic_store_n(j->at.overflow, true, __ATOMIC_RELAXED); /* bytes hide it */
}

void vm_store_row(const vm_work *j, const float *from, size_t block, size_t frame, size_t y, size_t x, size_t n) {
    if (j->pass->y_format != VM_ROWS) {
        store_pixels(j, from, block, frame, y, x, n);
        return;
    }
    x += frame * j->pass->y.w;
    const void *add = j->pass->add ? vm_pixel(&j->at.add, y, block, x) : NULL;
    const vm_view *v = &j->at.y;
    const bool finite =
        j->cpu->ops->store(vm_pixel(v, y, block, x), v->dtype, from, n, j->pass->y_scale, add, j->pass->relu);
    if (!finite && v->dtype != VM_F32) /* floats show it themselves */
        __atomic_store_n(j->at.overflow, true, __ATOMIC_RELAXED);
}

void vm_activate_box(const vm_work *j, const vm_box *box, size_t block) {
    for (size_t r = 0; j->pass->relu && r < box->rows; r++) {
        float *row = vm_pixel(&j->at.y, (size_t)box->top + r, block, (size_t)box->left);
        j->cpu->ops->store(row, VM_F32, row, box->width, 1, NULL, true);
    }
}

/* ---- measure ---- */

void vm_measure_box(const vm_work *j, const vm_box *box, size_t task, size_t block) {
    const size_t padded = VM_BLOCKS(j->pass->y.c) * VM_BLOCK;
    const vm_view *v = &j->at.y;
    float *part = j->parts + task % (j->at.manner.at_once * j->cut.columns) * vm_stats_floats(j->pass->y.c);
    float *mean = part + VM_BLOCK + block * VM_BLOCK;
    part[0] = (float)(box->rows * box->width);
    j->cpu->ops->stats(mean, mean + padded, vm_pixel(v, (size_t)box->top, block, (size_t)box->left), v->dtype,
                       box->rows, v->row, box->width);
}
