/* What one instruction set provides: the few operations that touch every number. The tile loops of conv.c, attention.c
 * and move.c are written once on top of them. Pointers are unaligned unless stated. Nothing here allocates. NaN and Inf
 * pass through every operation.
 *
 * Numbers. Tensors between passes are float32, float16 or bfloat16, which the two ends of a tile convert (tile.c).
 * Products take floats, or pairs of bfloat16: two neighbouring channels in the place of one float, the first in the
 * lower half. So both products walk through memory alike, and pairs do twice the work per step. */
#ifndef VM_CPU_H
#define VM_CPU_H

#include "kernels.h"

/* y[o*y_block + r*y_row + p*y_pixel + l] = bias[o*16 + l] + add[o*add_block + r*add_row + p*add_pixel + l]
 *      + sum over b < batches, k < depth of
 *            x[x_offset[b] + r*x_row + p*x_pixel + k] * w[o*w_block + (b*depth + k)*16 + l]
 * for r < rows <= max_rows, p < pixels <= max_pixels, o < blocks in {1, 2}, l < 16. bias and add may be NULL; add may
 * be y. Every element is summed in the order of b, then k, for any tile.
 * Pairs: x and w point to them. A product is the sum of the upper halves' and the lower halves' products (AMX first
 * adds up those of a batch). Only one of bias and add is given.
 * Split numbers, which only plain C and AMX multiply: after a batch's `depth` rows of w come as many of rests; those of
 * x are x_rest further on. A batch is x times w, then x times w's rests, then x's rests times w. */
typedef struct vm_gemm {
    size_t rows, pixels, blocks, batches, depth;
    const float *x;
    const ptrdiff_t *x_offset;
    ptrdiff_t x_rest;         /* 0: numbers are not split */
    ptrdiff_t x_row, x_pixel; /* x_pixel: 16 or 32 */
    const float *w;
    ptrdiff_t w_block;
    const float *bias;
    const float *add;
    ptrdiff_t add_row, add_pixel, add_block;
    float *y;
    ptrdiff_t y_row, y_pixel, y_block;
} vm_gemm;

/* Winograd's way to a 3x3 convolution: rows*columns numbers f = columns*row + column represent a tile of height*width
 * output pixels.
 * In: one channel block, `tiles` tiles side by side; v[f*v_step + t*16 + l] from x[row*x_row + column*16 + l], tile t's
 * input of rows*columns pixels beginning at column width*t (after nearest 2x t, with stride 2 2*width*t).
 * Weights: n/16 input channels' [9][n] to u[g*u_step + i], i < n, g < u_rows*u_columns. At the end of a line numbers
 * may share the last filter: f has g = u_columns*min(row, u_rows - 1) + min(column, u_columns - 1).
 * Out: from m[f*m_step + t*16 + l] the pixels y[row*y_row + column*16 + l], row < y_rows <= height, column < y_width <=
 * width*tiles, plus bias and add (which may be y) unless these are NULL.
 * Pairs: v and u are rounded to bfloat16. Of a tile's 32 numbers, In writes the first 16 from v + t*16 on; the block's
 * neighbour has the rest. Weights writes n/2 pairs, each of two input channels. */
typedef struct vm_transforms {
    size_t rows, columns, height, width, u_rows, u_columns;
    void (*in)(float *v, size_t v_step, const float *x, size_t x_row, size_t tiles);
    void (*weights)(float *u, size_t u_step, const float *w, size_t n);
    void (*out)(float *y, size_t y_row, const float *m, size_t m_step, size_t y_rows, size_t y_width, const float *bias,
                const float *add, size_t add_row);
} vm_transforms;

enum {
    VM_MANY = 1 << 16, /* no limit */
    VM_STEPS = 128,    /* of a sum in one call: their weights for two blocks (16 KiB) stay in L1 */
    VM_ROWS_FLAT = 2   /* rows of a tile: flat ones keep rings of streamed rows short */
};

/* Pixels of one block: act(x[p][l] * factor[p] * scale[l] + shift[l]); without scale and shift: act(x[p][l]); without
 * factor: factor[p] is 1. */
typedef struct vm_source {
    const void *x;
    vm_dtype dtype;
    size_t pixels;
    const float *scale, *shift, *factor; /* a factor requires a scale */
    vm_act act;
} vm_source;

/* One way to multiply. */
typedef struct vm_products {
    size_t max_rows, max_pixels; /* of one gemm call */
    size_t rows;  /* of a direct convolution's tiles: more if loading their halo would take as long as multiplying */
    size_t steps; /* best length of a sum in one call: VM_STEPS, or more than any sum has */
    void (*gemm)(const vm_gemm *g);
    /* Makes the factors of a product; a pixel takes 64 bytes of y. Floats: [pixel][16]; y may be from->x if that is
     * float32. Pairs: bfloat16, [pixel][32], 16 of them from this block; rest, unless NULL, likewise receives the
     * rounding errors. */
    void (*load)(void *y, void *rest, const vm_source *from);
    /* Runs `rounds` rounds of independent multiply-adds on registers only: the floor that benchmarks measure against.
     * Returns: the floating-point operations done; *sink keeps the compiler from dropping them. */
    double (*burn)(size_t rounds, float *sink);
    /* Of a 3x3 convolution, after nearest 2x, and with stride 2; NULL if direct products are better. */
    const vm_transforms *winograd, *upsampled, *strided;
} vm_products;

typedef struct vm_cpu_ops {
    vm_products floats;
    /* y = x * factor + add, at least 0 with `relu`, in the given type. add may be y, or NULL; y may be x if float32.
     * Returns: whether all of y is finite. */
    bool (*store)(void *y, vm_dtype dtype, const float *x, size_t pixels, float factor, const void *add, bool relu);
    /* sum[p][l] += x[p][l]^2 */
    void (*squares)(float *sum, const void *x, vm_dtype dtype, size_t pixels);
    /* mean[l] and m2[l] = sum of (x - mean)^2 over rows x pixels of one block; x_row numbers apart. */
    void (*stats)(float *mean, float *m2, const void *x, vm_dtype dtype, size_t rows, size_t x_row, size_t pixels);
    /* Online softmax over `keys` rows of 16 queries: s[k][l] becomes exp(s*scale - top), with top[l] = max(top[l],
     * max_k s*scale). sum[l] is rescaled and increased; keep[l] rescales older sums. */
    void (*softmax)(float *s, size_t keys, float scale, float *top, float *sum, float *keep);
    /* x[p][l] *= keep[l] */
    void (*rescale)(float *x, size_t rows, const float *keep);
    /* y[l][r] = x[r][l], 16 by 16 numbers of 4 bytes, copied bit by bit. y is not x. */
    void (*transpose)(float *y, const float *x);
    /* Packed halves to floats: y[2*s][l] and y[2*s + 1][l] from x[s][l][0] and x[s][l][1], s < steps. */
    void (*unpack)(float *y, vm_dtype dtype, const uint16_t *x, size_t steps);
} vm_cpu_ops;

/* Defines a vm_transforms by a folder's tiles_in, filters_in and tiles_out: to floats or to pairs (VM_BF16), by the
 * matrices down and across, in tiles of these sizes. */
#define VM_TRANSFORMS(NAME, DTYPE, DOWN, ACROSS, ...)                                                            \
    static void NAME##_in(float *v, size_t v_step, const float *x, size_t x_row, size_t tiles) {                 \
        tiles_in(DTYPE, DOWN, ACROSS, v, v_step, x, x_row, tiles);                                               \
    }                                                                                                            \
    static void NAME##_weights(float *u, size_t u_step, const float *w, size_t n) {                              \
        filters_in(DTYPE, DOWN, ACROSS, u, u_step, w, n);                                                        \
    }                                                                                                            \
    static void NAME##_out(float *y, size_t y_row, const float *m, size_t m_step, size_t y_rows, size_t y_width, \
                           const float *bias, const float *add, size_t add_row) {                                \
        tiles_out(DOWN, ACROSS, y, y_row, m, m_step, y_rows, y_width, bias, add, add_row);                       \
    }                                                                                                            \
    static const vm_transforms NAME = {__VA_ARGS__, NAME##_in, NAME##_weights, NAME##_out};

#define VM_TWO_FOUR \
    4, 6, 2, 4, 4, 6 /* F(2x4, 3x3): rows, columns, height and width of a tile, filters down and across */
#define VM_TWO_TWO 4, 4, 2, 2, 4, 4 /* F(2x2, 3x3) */
#define VM_UPSAMPLED 3, 3, 2, 2, 3, 3
#define VM_STRIDED 5, 5, 2, 2, 4, 4

/* A folder's operations, by their common names. */
#define VM_CPU_OPS(MAX_PIXELS)                                                                            \
    .floats = {1, MAX_PIXELS, VM_ROWS_FLAT, VM_STEPS, gemm, load, burn, &winograd, &upsampled, &strided}, \
    .store = store_rows, .squares = squares, .stats = stats, .softmax = softmax, .rescale = rescale,      \
    .transpose = transpose, .unpack = unpack

extern const vm_cpu_ops vm_cpu_ref;
extern const vm_products vm_pairs_ref;
void vm_load_pairs_ref(void *y, void *rest, const vm_source *from);
#ifdef VM_HAVE_X86
extern const vm_cpu_ops vm_cpu_sse, vm_cpu_avx2, vm_cpu_avx512;
extern const vm_products vm_pairs_avx512bf16, vm_pairs_amx;
void vm_load_pairs_avx512bf16(void *y, void *rest, const vm_source *from);
/* amx.c. Returns: whether this processor has AMX and the kernel lets this process use its tiles. */
bool vm_amx_permitted(void);
#endif
#ifdef VM_HAVE_NEON
extern const vm_cpu_ops vm_cpu_neon;
#endif

/* A backend's `self`: how it stores and multiplies numbers. */
typedef struct vm_cpu {
    const vm_cpu_ops *ops;
    const vm_products *products;
    vm_dtype dtype;
    unsigned pairs; /* products of pairs per product of numbers: 1; 3 if split into two bfloat16; 0: floats */
} vm_cpu;

/* Returns: the same, but loading and multiplying floats. */
static inline vm_cpu vm_with_floats(const vm_cpu *cpu) { return (vm_cpu){cpu->ops, &cpu->ops->floats, cpu->dtype, 0}; }

/* Returns: how products compute a 3x3 convolution by Winograd's way; NULL: not at all. */
static inline const vm_transforms *vm_transforms_of(const vm_cpu *cpu, const vm_pass *pass) {
    const vm_products *p = cpu->products;
    return pass->up ? p->upsampled : pass->stride == 2 ? p->strided : p->winograd;
}

/* ---- tile.c: a pass is computed in tiles of its output, each a task ---- */

/* Shared by all tiles of a pass in progress. */
typedef struct vm_work {
    const vm_cpu *cpu;
    const vm_pass *pass;
    vm_operands at;
    const float *scale, *shift; /* of the norm on load, or of scaled latents; NULL: load only copies */
    vm_cut cut;
    double *sums; /* of y's rows so far, laid out as a partial sum; or NULL */
    float *parts; /* partial sums of the tiles in progress */
} vm_work;

/* The output in cells: its pixels, or boxes of them that a method computes at once. */
typedef struct vm_grid {
    size_t cell_h, cell_w, cell_f;       /* output pixels of a cell, and frames */
    size_t step_h, step_w, step_f;       /* input pixels from cell to cell, and frames */
    size_t overlap, pad;                 /* input pixels beyond the last cell's, and above the first's */
    size_t overlap_f, pad_f;             /* the same of frames */
    size_t height, width, length;        /* of the output */
    size_t tile_h, tile_w, tile_f;       /* of a full tile */
    size_t rows, columns, layers;        /* of tiles; a row of tiles is [layer][column] */
    size_t input_h, input_w, input_f;    /* pixels and frames of the input of a full tile */
    size_t output_h, output_w, output_f; /* of the output; the last cells may reach beyond it */
} vm_grid;

typedef struct vm_tile {
    size_t y0, x0, f0, h, w, f; /* in cells */
} vm_tile;

typedef struct vm_box {
    ptrdiff_t top, left, first; /* pixels and frames; may lie in the padding */
    size_t rows, width, frames;
} vm_box;

/* A grid without tiles; vm_grid_cut sets them. */
vm_grid vm_grid_of(const vm_pass *pass, size_t cell_h, size_t cell_w, size_t cell_f);
void vm_grid_cut(vm_grid *grid, size_t tile_h, size_t tile_w, size_t tile_f);
vm_tile vm_grid_tile(const vm_grid *grid, size_t task);
vm_box vm_tile_input(const vm_grid *grid, const vm_tile *tile);
vm_box vm_tile_output(const vm_grid *grid, const vm_tile *tile);
vm_cut vm_grid_rows(const vm_grid *grid);

/* Returns: bytes that vm_work_begin lays out from `to` on: everything except the vm_work itself. */
size_t vm_work_bytes(const vm_pass *pass, const vm_grid *grid, size_t at_once);
vm_work vm_work_begin(const vm_cpu *cpu, const vm_pass *pass, const vm_operands *at, const vm_grid *grid, void *to);

/* Returns: parts of a number in products: itself, or two bfloat16. */
static inline size_t vm_parts(const vm_cpu *cpu) { return cpu->pairs > 1 ? 2 : 1; }

/* Pixels of the input, normalised and activated, and zero outside the image, and in frames that are not met.
 * vm_load_box: x has planes of [frames][rows][width][16] floats, one for 16 channels, `plane` floats apart, with frames
 * `frame` and rows `row` floats apart; or planes of pairs, one for 32 channels. If numbers are split, a second set of
 * planes holds the rests.
 * vm_load_block: one block of channels as floats.
 * inverse: [frames][rows][width] floats, 1 over the length of each pixel. vm_invert_lengths makes them, adding in the
 * order of the blocks and then of the lanes; vm_load_box calls it. NULL if pixels are not normalised by themselves. */
size_t vm_planes(const vm_cpu *cpu, size_t channels);
void vm_invert_lengths(const vm_work *work, const vm_box *box, float *inverse);
void vm_load_box(const vm_work *work, const vm_box *box, float *inverse, float *x, size_t plane, size_t frame,
                 size_t row);
void vm_load_block(const vm_work *work, const vm_box *box, const float *inverse, float *x, size_t block, size_t row);
/* Returns: bytes of the inverse lengths of a tile's input. */
static inline size_t vm_inverse_bytes(const vm_pass *pass, const vm_grid *grid) {
    return vm_norm_by_pixel(pass->norm) ? VM_PRODUCT(grid->input_f, grid->input_h, grid->input_w, sizeof(float)) : 0;
}
/* gemm for any number of pixels: in as few groups as possible, of nearly equal size. */
void vm_multiply(const vm_products *products, vm_gemm all);
/* Returns: whether results are written to their final place. Otherwise vm_store_row moves them there from floats: n
 * pixels of one block, with the residual added, into y or the user's pixels. */
bool vm_in_place(const vm_cpu *cpu, const vm_pass *pass);
void vm_store_row(const vm_work *work, const float *from, size_t block, size_t frame, size_t y, size_t x, size_t n);
/* Completes results written in place: ReLU. */
void vm_activate_box(const vm_work *work, const vm_box *box, size_t block);
/* Stores one number into the user's image of shape s, as bytes or as planes of floats. */
static inline void vm_store_number(bool bytes, void *image, const vm_shape *s, vm_clamp clamp, size_t pixel, size_t c,
                                   float v) {
    v = vm_clamped(clamp, c, v);
    const float byte = (v + 1) * 127.5f;
    if (bytes) /* NaN becomes 0 */
        ((uint8_t *)image)[pixel * s->c + c] = !(byte > 0) ? 0 : byte >= 255 ? 255 : (uint8_t)lrintf(byte);
    else
        ((float *)image)[c * s->f * s->h * s->w + pixel] = v;
}
/* Measures one channel block of a task's output: a partial sum. */
void vm_measure_box(const vm_work *work, const vm_box *box, size_t task, size_t block);

/* ---- the methods: ways to compute a pass with the operations above; cpu.c chooses ---- */

typedef struct vm_method {
    vm_cut (*cut)(const vm_cpu *cpu, const vm_pass *pass);
    /* scratch: of one thread, a multiple of VM_ALIGN. */
    vm_needs (*needs)(const vm_cpu *cpu, const vm_pass *pass, vm_manner manner);
    vm_status (*prepare)(const vm_cpu *cpu, const vm_pass *pass, const vm_operands *at, const vm_exec *exec,
                         vm_tasks *out);
} vm_method;

extern const vm_method vm_direct, vm_winograd, vm_attention, vm_moves;

/* ---- filters.c: weights, from a file's layout to the packed one, and from that to factors of products ---- */

size_t vm_packed_bytes(vm_dtype dtype, const vm_weight *w);
/* *rounded: some number differs from the file's. VM_EINVAL if one is too large for the type. */
vm_status vm_pack(vm_dtype dtype, const vm_weight *w, void *to, vm_dtype from, const void *data, bool *rounded);
void vm_unpack(vm_dtype dtype, const vm_weight *w, const void *from, float *data);

/* A packed filter. */
typedef struct vm_filter {
    const void *weight;
    vm_dtype dtype;
    size_t in, taps, slices;
} vm_filter;

/* The filter of a pass. Its first slice to use is pass->skipped. */
vm_filter vm_filter_of(const vm_work *work);
/* 16 output channels' weights of input channel i at one tap; zero if there is no such channel. */
void vm_filter_row(float row[VM_BLOCK], const vm_filter *f, size_t block, size_t slice, size_t i, size_t tap);
/* Those of 16 input channels, or all if fewer: [tap][input channel][16]. Returns: where they are packed or, for halves,
 * `to`, which needs room for them and one more row. */
const float *vm_filter_block(float *to, const vm_cpu_ops *ops, const vm_filter *f, size_t block, size_t slice,
                             size_t x_block);

/* ---- norm.c ---- */

/* vm_tasks.rows of a job that begins with its vm_work: adds the tiles' partial sums to the last. */
vm_status vm_merge_rows(const vm_tasks *tasks, size_t row, size_t rows);
/* Computes scale and shift of y = x*scale + shift from the sums of x's producer. */
void vm_norm_scale(float *scale, float *shift, const vm_pass *pass, const vm_operands *at);

#endif
