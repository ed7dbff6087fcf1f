/* Arguments of our CUDA kernels: plain structures, read by the C compiler and by nvcc.
 *
 * A pass on a GPU runs in stripes of some rows of y:
 *
 *   x --load--> padded stripe --cuDNN--> raw stripe --store--> y, and the sums that the next GroupNorm needs
 *
 * load normalises, activates, converts and pads; the convolution is a plain one without padding; store adds the bias
 * and the residual, converts and measures. Tensors are NHWC: [h][w][pitch] elements of the run's type, channels padded
 * with zeros to a multiple of VM_BLOCK.
 *
 * Every kernel is extern "C", named vm_<op>_<dtype> (f32, f16, bf16), and takes one of these structures by value. */
#ifndef VM_CUDA_H
#define VM_CUDA_H

#include "../kernels.h"

enum { VM_CUDA_THREADS = 256, VM_CUDA_LANES = 64 };

/* Where the rows of a ring lie: row r, if present, at r + shift (modulo 2^32), minus `rows` if that is at least `rows`.
 * Zeros: all rows are present. */
typedef struct vm_ring_rows {
    uint32_t shift, rows;
} vm_ring_rows;

static inline VM_ANYWHERE uint32_t vm_ring_row(vm_ring_rows ring, uint32_t row) {
    row += ring.shift;
    return row >= ring.rows ? row - ring.rows : row;
}

/* vm_load_<dtype>: out[r][q][c] = f(x[top + r][left + q][c]) * multiply, zero outside x and for c >= x_c.
 * f(v) = act(v * factor[pixel] * scale[c] + shift[c]) if scale is given, otherwise act(v * in_scale + in_shift).
 * Any one-dimensional grid of VM_CUDA_THREADS threads. */
typedef struct vm_load_args {
    const void *x; /* [x_h][x_w][x_pitch], or the user's pixels by format */
    void *out;     /* [rows][width][channels] */
    const float *scale, *shift;
    const float *factor; /* of x's pixels from first_factor on, or NULL; only with VM_ROWS */
    uint64_t x_plane;    /* of planes: numbers from channel to channel */
    uint32_t x_h, x_w, x_c, x_pitch;
    uint32_t x_row; /* pixels from row to row: x_w, or more for the user's pixels, which may be part of an image */
    vm_ring_rows x_ring;
    uint32_t first_factor;
    int32_t top, left;
    uint32_t rows, width, channels;
    uint32_t format; /* vm_format of x */
    uint32_t act;    /* vm_act */
    float in_scale, in_shift, multiply;
} vm_load_args;

/* vm_store_<dtype>: y[row0 + r][q][c] = raw + bias[c] * bias_scale + add, at least 0 with relu
 *   for r < rows, q < y_w, c < VM_ROUND_UP(y_c, VM_BLOCK), where raw is
 *     raw[r][q][c]                                                of [rows][y_w][channels], or with up
 *     raw[i + (R & 1)][q / 2 + (q & 1)][phase * channels + c]     of [..][y_w / 2 + 1][4 * channels],
 *     R = row0 + r, i = R / 2 - row0 / 2, phase = 2 * (R & 1) + (q & 1)   (row0 and rows even).
 * These rows of y and of add must be consecutive, except at the end of a ring. Sums are in float. Part p covers pixels
 * [p * part_pixels, ...) of the stripe in row order: count, then per channel mean and sum of squared deviations of the
 * stored (rounded) values, at stats + p * vm_stats_floats(y_c).
 * The user's pixels get only channels c < y_c, times out_scale plus out_shift, clamped; bytes are clamped and rounded.
 * *flags |= 1 if a stored value is not finite.
 * Grid (parts of the stripe, channel vectors of 8 / VM_CUDA_LANES rounded up), VM_CUDA_THREADS threads. */
typedef struct vm_store_args {
    const void *raw;
    const float *bias; /* or NULL */
    const void *add;   /* [y_h][y_w][add_pitch] or NULL; may be y */
    void *y;           /* [y_h][y_w][y_pitch], or the user's pixels by format */
    float *stats;      /* of this stripe's first part, or NULL */
    uint32_t *flags;
    uint32_t y_h, y_w, y_c, y_pitch, add_pitch;
    vm_ring_rows y_ring, add_ring;
    uint32_t row0, rows, channels, part_pixels;
    uint32_t up, relu;
    uint32_t format; /* vm_format of y */
    vm_clamp clamp;  /* of the user's pixels, like the next two */
    float out_scale, out_shift;
    float bias_scale;
} vm_store_args;

/* vm_merge: merges the parts of x's producer into y = x * scale + shift; sums in double. Channels from c up to its
 * padding get 0. Grid (groups, VM_MERGE_BLOCKS), VM_CUDA_THREADS threads. */
enum {
    VM_MERGE_BLOCKS = 4 /* for each group: with 32 groups about as many blocks as a GPU has multiprocessors */
};
typedef struct vm_merge_args {
    const float *stats;
    const float *gamma, *beta;
    float *scale, *shift; /* [VM_ROUND_UP(c, VM_BLOCK)] */
    double *sums;         /* [groups][VM_MERGE_BLOCKS][3], scratch */
    uint32_t *arrived;    /* 0, and 0 again afterwards */
    uint32_t parts, c, groups;
    float eps;
} vm_merge_args;

/* vm_pixel_norm_<dtype>: factor[i] = 1 / max(sqrt(|x[i]|^2 + under), least); |x[i]| is the length of a pixel's c
 * channels, with squares summed in float; NaN stays. Pixels from ring_pixels on wrap around to 0. scale[j] = sqrt(c) *
 * gamma[j], and 0 from c up to its padding; shift[j] = 0. Any one-dimensional grid of VM_CUDA_THREADS threads. */
typedef struct vm_pixel_norm_args {
    const void *x;                                   /* [pixels][x_pitch] */
    const float *gamma;                              /* NULL: ones */
    float *factor;                                   /* [pixels] */
    float *scale, *shift;                            /* [VM_ROUND_UP(c, VM_BLOCK)] */
    uint32_t first, pixels, ring_pixels, c, x_pitch; /* x[first] is the first pixel; ring_pixels 0: no ring */
    float least, under;
} vm_pixel_norm_args;

/* vm_move_<dtype>: out[r][q][c] from x (VM_PASS_MOVE in kernels.h), and 0 from y_c on. Any one-dimensional grid of
 * VM_CUDA_THREADS threads. */
typedef struct vm_move_args {
    const void *x; /* [rows][x_w][x_pitch] */
    void *out;     /* [rows][y_w][channels] */
    uint32_t x_w, x_c, x_pitch, y_w, y_c, rows, channels;
    uint32_t up, down, share; /* share: vm_move_share */
    vm_move move;
} vm_move_args;

/* A video's rows are [h][f][w][pitch]: a row has that row of all frames. For cuDNN a pass becomes 2D convolutions of
 * some planes, [planes][lines][width][slices][channels], whose filters have the slices as channels:
 *
 *   3x3x3   a plane for each row of y, of frames and columns; the slices are the three rows that it meets
 *   3x3     a plane for each frame, of rows and columns
 *   3x1x1   a plane for each row; the slices are the three frames, and the filter is 1x1
 *
 * Element (plane, line, column, slice) is row row0 + plane * row_plane + line * row_line + slice * row_slice of x, the
 * frame likewise, and column left + column. */
typedef struct vm_planes {
    uint32_t planes, lines, width, slices;
    int32_t row0, row_plane, row_line, row_slice, frame0, frame_plane, frame_line, frame_slice, left;
} vm_planes;

/* vm_gather_<dtype>: out[plane][line][column][slice][c] = f(x[..][c]) * multiply, with f as in vm_load; zero outside x,
 * in frames before frame_least, and for c >= x_c. held, mirrored: as in vm_pass. The user's video: pixel (row, frame,
 * column) is the sum of each times its step. Any one-dimensional grid of VM_CUDA_THREADS threads, like the others here.
 */
typedef struct vm_gather_args {
    const void *x; /* [x_h][x_f][x_w][x_pitch], or the user's video by format */
    void *out;
    const float *scale, *shift, *factor; /* factor: of x's pixels from first_factor on */
    uint64_t x_plane; /* of the user's: numbers from channel to channel, and pixels between rows ... */
    int64_t row_step, column_step, frame_step;
    uint64_t first_factor;
    vm_planes to;
    uint32_t x_h, x_w, x_f, x_c, x_pitch, channels;
    vm_ring_rows x_ring;
    uint32_t format, act, held, mirrored, frame_least;
    float in_scale, in_shift, multiply;
} vm_gather_args;

/* vm_scatter_<dtype>: y[row0 + r][frame][q][c] = raw + bias[c] * bias_scale + add, at least 0 with relu, for r < rows
 * and frames [frame_first, frame_end). raw is [plane][lines][width][groups][channels]; the plane is r and the line
 * counts the frames, or by_frame the other way. halves: of two frames each is a group of one line, with its own bias.
 * up: as in vm_store. *flags |= 1 if a stored value is not finite. */
typedef struct vm_scatter_args {
    const void *raw;
    const float *bias; /* or NULL */
    const void *add;   /* or NULL */
    void *y;           /* [y_h][y_f][y_w][y_pitch], or the user's video by format */
    uint32_t *flags;
    uint64_t y_plane;
    int64_t row_step, column_step, frame_step;
    uint32_t y_f, y_w, y_c, y_pitch, add_pitch;
    vm_ring_rows y_ring, add_ring;
    uint32_t row0, rows, frame_first, frame_end, lines, width, groups, channels;
    uint32_t by_frame, halves, up, relu, format;
    vm_clamp clamp;
    float out_scale, out_shift, bias_scale;
} vm_scatter_args;

/* vm_frames_move_<dtype>: as vm_move, out[r][frame][q][c] from x's rows [r][x_f][x_w][x_pitch]. doubles, halves: of the
 * frames; held: as in vm_pass. */
typedef struct vm_frames_move_args {
    const void *x;
    void *out;
    uint32_t x_f, x_w, x_c, x_pitch, y_f, y_w, y_c, rows, channels;
    uint32_t up, down, share, doubles, halves, held;
    vm_move move;
} vm_frames_move_args;

/* vm_turn_<dtype>: to[phase][filter][a][b][c] = from[phase'][filter][b][a][c]; of four phases, (a, b) becomes (b, a).
 * outs: filters are in blocks (vm_conv_filter_at); `filter` is 3 * out + frame, its tap 3 * frame + a, and each b has
 * channels of its own. 0: they are as written here. */
typedef struct vm_turn_args {
    const void *from;
    void *to;
    uint32_t phases, filters, taps, channels, outs;
} vm_turn_args;

/* vm_attention_<dtype>: y[i] = softmax(q[i] k^T * scale) v over n pixels with one head of `channels` (at most
 * VM_ATTENTION_CHANNELS, a multiple of VM_BLOCK). q, k, v lie side by side in a pixel: x + i * pitch + {0, 1, 2} *
 * channels; y may be x's queries. Scores and sums in float. */
typedef struct vm_attention_args {
    const void *x;
    void *y;
    uint32_t n, channels, pitch, y_pitch;
    float scale; /* natural: exp(score * scale) */
} vm_attention_args;
enum { VM_ATTENTION_CHANNELS = 512 };

/* Boxes of a tensor that the GPU copies to shared memory by itself, written by cuTensorMapEncodeTiled. */
typedef struct __attribute__((aligned(64))) vm_tensor_map {
    uint64_t opaque[16];
} vm_tensor_map;

/* vm_attention_<dtype>_pairs: the same on compute capability 9.0, f16 and bf16. Pitches are multiples of 8. map: of x
 * as [n][3][channels], in swizzled boxes of VM_PAIR_BOX_ROWS x 1 x 64 numbers, with zeros outside. */
typedef struct vm_attention_pairs_args {
    vm_tensor_map map;
    vm_attention_args of; /* x: unused */
} vm_attention_pairs_args;
enum {
    VM_PAIR_QUERIES = 64, /* of a block */
    VM_PAIR_KEYS = 128,
    VM_PAIR_BOX_ROWS = 32,
    VM_PAIR_THREADS = 384,
    VM_PAIR_REGISTERS = 168, /* per thread at the kernel's start: nvcc's choice for blocks of VM_PAIR_THREADS */
    VM_PAIR_STAGES = 4,      /* in flight for each of two warpgroups, */
    VM_PAIR_STAGE = 16384,   /* bytes of a stage */
    /* q, the stages, p twice; tops and sums; barriers */
    VM_PAIR_SHARED = VM_PAIR_QUERIES * VM_ATTENTION_CHANNELS * 2 + 2 * VM_PAIR_STAGES * VM_PAIR_STAGE +
        2 * VM_PAIR_QUERIES * VM_PAIR_KEYS * 2 + 2 * VM_PAIR_QUERIES * 4 + (4 * VM_PAIR_STAGES + 1) * 8
};

/* How attention is launched: vm_attention_<dtype>_<queries>x<keys>, or _pairs, a block of `threads` threads for every
 * `queries`, each with vm_attention_shared bytes of dynamic shared memory (more than 48 KiB: opt in). */
typedef struct vm_attention_shape {
    uint32_t queries, keys; /* per block, and per step of a block; 0: no kernel fits */
    uint32_t ring;          /* bytes of keys and values in flight */
    uint32_t threads;
    bool pairs; /* an even number of blocks, and vm_attention_pairs_args */
} vm_attention_shape;

static inline uint32_t vm_attention_shared(vm_dtype dtype, vm_attention_shape s, uint32_t channels) {
    if (s.pairs) return VM_PAIR_SHARED;
    if (dtype == VM_F32) return s.ring + s.keys * (s.queries + 4) * 4 + 3 * s.queries * 4; /* ring, p, tops and keeps */
    const uint32_t line = 64; /* channels; q, ring, p, tops and keeps */
    return s.queries * VM_ROUND_UP(channels, line) * 2 + s.ring + s.queries * s.keys * 2 + 5 * s.queries * 4;
}

/* Returns: the largest shape that fits a device. largest_shared: the most bytes that a block may opt in to. One always
 * fits from 64 KiB (sm_75) on for f32 and f16, from 99 KiB (sm_86) on for bf16. wgmma: the device and its machine code
 * have attention_wgmma.cu's kernel. */
static inline vm_attention_shape vm_attention_choose(vm_dtype dtype, size_t largest_shared, bool wgmma) {
    static const vm_attention_shape shapes[] = {
        {VM_PAIR_QUERIES, VM_PAIR_KEYS, 2 * VM_PAIR_STAGES * VM_PAIR_STAGE, VM_PAIR_THREADS, true},
        {64, 128, 4 * 16384, VM_CUDA_THREADS, false},
        {64, 64, 3 * 8192, VM_CUDA_THREADS, false},
        {32, 64, 3 * 8192, VM_CUDA_THREADS, false},
        {64, 64, 2 * 16384, VM_CUDA_THREADS, false},
        {0, 0, 0, 0, false}};
    const int first = dtype == VM_F32 ? 4 : wgmma ? 0 : 1, end = dtype == VM_F32 ? 5 : dtype == VM_F16 ? 4 : 3;
    for (int i = first; i < end; i++)
        if (vm_attention_shared(dtype, shapes[i], VM_ATTENTION_CHANNELS) <= largest_shared) return shapes[i];
    return shapes[5];
}
/* Returns: blocks for n queries. */
static inline size_t vm_attention_blocks(vm_attention_shape s, size_t n) {
    const size_t blocks = (n + s.queries - 1) / s.queries;
    return s.pairs ? VM_ROUND_UP(blocks, 2) : blocks;
}

/* vm_conv_<dtype>_<rows>x<outs>_<stride>, f16 and bf16: some rows of tiles of a pass, or all, in one kernel.
 *
 *   y[Y][X][o] = bias[o] * bias_scale + add[Y][X][o] + sum over taps a, b and channels c of
 *                w[o][a][b][c] * f(x[Y * stride + a - pad_y][X * stride + b - pad_x][c])
 *
 * f(v) = act(v * factor[pixel] * scale[c] + shift[c]) (the factors given), SiLU or ReLU, then * multiply, rounded to
 * the type; zero outside x. With relu y is at least 0. k = 3 with pads of 1, 1 without, and 3 with stride 2 and pads
 * of 0 or 1. After nearest 2x (up) k = 2, and w is [4 phases][o][a][b][c]: y[2 i + py][2 j + px] sums over x[i + py +
 * a - 1][j + px + b - 1], phase = 2 * py + px.
 *
 * Sums over all taps and channels are in float, bias and add too. Channels: x has in_c, padded with zeros to a multiple
 * of VM_BLOCK; w has as many, and its filters and bias are padded likewise. y gets all VM_ROUND_UP(y_c, VM_BLOCK); the
 * user's pixels get y_c of them as from vm_store, only from the kernels with 16 outs. Sums for the next GroupNorm are
 * as in vm_store: a part for each tile of rows x VM_CONV_COLUMNS pixels (with up, of x, and then one for each phase).
 * *flags |= 1 if a stored value is not finite. Pitches are multiples of 8.
 *
 * add may be y itself. y may be x if k is 1, vm_conv_choose was called with in_place, and both have the same pitch.
 *
 * vm_conv_<dtype>_e4m3_<outs>: f(v) and w are rounded to e4m3, f(v) without `multiply`. The tensor cores sum every 128
 * channels at a tap with fewer bits (vm_wgmma_e4m3); all other sums are in float. The sum for y[..][o] is multiplied by
 * w_scale[o] * multiply.
 *
 * vm_conv_<dtype>_.._video: a video's 3x3x3 convolution, of x [x_rows][x_h][x_w][x_pitch]. Each row of y is a
 * picture of frames (x_h, y_h) and columns, and filters have the channels of the three rows that they meet: in_c is
 * 3 * x_c. held, mirrored: as in vm_pass. The user's video is written as by vm_scatter. There are no sums. */
typedef struct vm_conv_args {
    const void *x, *w;          /* [x_h][x_w][x_pitch], [y_c padded][k][k][in_c] */
    const float *scale, *shift; /* [in_c], a video's [x_c], or NULL */
    const float *factor;        /* [x_h][x_w], a video's [x_rows][x_h][x_w], from first_factor on, or NULL */
    const float *bias;          /* [y_c padded], or NULL */
    const float *w_scale;       /* [y_c padded], of e4m3 */
    const void *add;            /* [y_h][y_w][add_pitch], or NULL */
    void *y;                    /* [y_h][y_w][y_pitch], or the user's pixels by format */
    float *stats;               /* vm_conv_parts of vm_stats_floats(y_c), or NULL */
    uint32_t *flags;
    uint64_t first_factor; /* the pixel of factor[0] */
    uint32_t x_h, x_w, x_pitch, in_c;
    uint32_t y_h, y_w, y_pitch, y_c, add_pitch;
    uint32_t first_item, items; /* of the pass: a row of tiles has vm_conv_row_items, a video's row vm_conv_items */
    vm_ring_rows x_ring, y_ring, add_ring;
    uint32_t k, stride, pad_y, pad_x, up, act, relu;
    uint32_t blocked; /* w is in blocks (vm_conv_filter_at), not [phase][out][k][k][in_c] */
    uint32_t fp8;     /* w is e4m3, in blocks */
    uint32_t lead;    /* conv_wgmma.cu: taps of a chunk by which a warpgroup is ahead: fewer than the ring has */
    uint32_t x_c, x_rows, held, mirrored; /* of a video; x_rows 0: an image */
    uint64_t y_plane;
    int64_t row_step, column_step, frame_step;
    uint32_t format; /* vm_format of y */
    vm_clamp clamp;  /* of the user's pixels, like the next two */
    float out_scale, out_shift;
    float multiply, bias_scale;
} vm_conv_args;
enum { VM_CONV_COLUMNS = 16, VM_CONV_CHUNK = 64 /* channels of x in shared memory at a time */ };

/* X(rows, outs, stride, warps, across, stages, resident, cost): a block's tile is rows x VM_CONV_COLUMNS pixels by outs
 * channels. Its warps share it, `across` of them across the channels and warps / across down the rows. stages: slots of
 * the ring of filters. resident: blocks per multiprocessor if its memory allows. cost: of a product, relative to the
 * other tiles', estimated from its bytes from shared memory and the L2 cache. Only the choice depends on cost, and on
 * the time to end an item while no other block multiplies: by count, 4400 cycles if 1152 products per number take
 * 29700.
 *
 * Three tiles have warps of 64 pixels x 64 channels. 16x128 reads the least of them. 16x64 is for two blocks of four
 * warps: one adds, stores and measures while the other multiplies, but x is read and transformed twice as often. 8x256
 * transforms half as often, and reads a filter from the L2 cache for only 128 pixels. benchmarks/conv_tiles.py times
 * them. */
#define VM_CONV_TILES(X)          \
    X(16, 128, 1, 8, 2, 4, 1, 40) \
    X(8, 128, 1, 8, 4, 3, 1, 50)  \
    X(16, 64, 1, 4, 1, 3, 2, 42)  \
    X(8, 256, 1, 8, 4, 3, 1, 50)  \
    X(4, 256, 1, 8, 8, 2, 1, 60)  \
    X(4, 64, 1, 8, 4, 3, 2, 80)   \
    X(16, 16, 1, 8, 1, 4, 2, 80)  \
    X(8, 128, 2, 8, 4, 3, 1, 50)  \
    X(4, 64, 2, 8, 4, 2, 1, 80)

#define VM_CONV_ONE(...) +1
enum { VM_CONV_KINDS = VM_CONV_TILES(VM_CONV_ONE) };
#undef VM_CONV_ONE

/* The kernels of conv_wgmma.cu, only for compute capability 9.0: 16 rows of pixels by 128 or 96 channels, which two
 * warpgroups multiply and two prepare. Each of the first two measures its own 8 rows. */
enum { VM_CONV_WGMMA = VM_CONV_KINDS, VM_CONV_WGMMA_96, VM_CONV_ALL_KINDS, VM_WGMMA_STAGES = 8 };
/* Per thread at the kernel's start: nvcc's choice for 512 threads per block. */
enum { VM_WGMMA_REGISTERS = 128 };
/* vm_conv_args.lead for filters of k x k: about half of a chunk, and at most half of the ring. */
static inline uint32_t vm_wgmma_lead(uint32_t k) { return k * k / 2; }

typedef struct vm_conv_tile {
    uint32_t rows, outs, stride; /* 0: no kernel fits */
    uint32_t threads, shared;    /* per block; shared: bytes of dynamic shared memory */
    uint32_t resident, cost;
    uint32_t kind;      /* below VM_CONV_ALL_KINDS */
    uint32_t part_rows; /* of the pixels measured together */
} vm_conv_tile;

/* Two chunks of x with a halo for 3x3, filters in flight, and count, means and deviations of each row of warps. */
#define VM_CONV_SHARED(ROWS, OUTS, STRIDE, DOWN, STAGES)                                              \
    (2 * (((ROWS) - 1) * (STRIDE) + 3) * ((VM_CONV_COLUMNS - 1) * (STRIDE) + 3) * VM_CONV_CHUNK * 2 + \
     (STAGES) * (OUTS) * VM_CONV_CHUNK * 2 + (DOWN) * (2 * (OUTS) + 4) * 4)

/* Filters in blocks, as conv_wgmma.cu copies them to shared memory: [phase][tile of outs][chunk of 64 channels][tap]; a
 * block is [8 planes][outs of the tile][8 channels]. Within each 16 outs, vm_conv_filter_column gives the products'
 * order. */
enum { VM_CONV_FILTERS = 128 /* most outs of a tile */ };

/* Returns: outs of a tile, 128 or 96: with which fewer are padding. */
static inline VM_ANYWHERE uint32_t vm_conv_filters(uint32_t outs) {
    return VM_ROUND_UP(outs, 96) < VM_ROUND_UP(outs, VM_CONV_FILTERS) ? 96 : VM_CONV_FILTERS;
}

/* A product gives a lane two neighbouring columns of each 8. To make these four neighbouring channels of y in memory,
 * filters are read in another order. In each 16, column j of the first 8 is filter 4 * (j / 2) + j % 2; column j of the
 * second 8 is the filter two further. The inverse: */
static inline VM_ANYWHERE uint32_t vm_conv_filter_column(uint32_t filter) {
    return filter / 16 * 16 + filter / 2 % 2 * 8 + filter % 16 / 4 * 2 + filter % 2;
}

/* Returns: numbers in all blocks. taps: per filter. */
static inline size_t vm_conv_blocked(size_t phases, size_t outs, size_t in, size_t taps) {
    return phases * VM_ROUND_UP(outs, vm_conv_filters((uint32_t)outs)) * VM_ROUND_UP(in, VM_CONV_CHUNK) * taps;
}
/* Returns: the index of a filter's number in the blocks. */
static inline VM_ANYWHERE size_t vm_conv_filter_at(uint32_t outs, uint32_t in, uint32_t taps, uint32_t phase,
                                                   uint32_t out, uint32_t tap, uint32_t c) {
    const uint32_t each = vm_conv_filters(outs), tiles = (outs + each - 1) / each;
    const uint32_t chunks = (in + VM_CONV_CHUNK - 1) / VM_CONV_CHUNK;
    const size_t block = ((phase * tiles + out / each) * chunks + c / VM_CONV_CHUNK) * taps + tap;
    return block * each * VM_CONV_CHUNK + c % VM_CONV_CHUNK / 8 * each * 8 + vm_conv_filter_column(out % each) * 8 +
           c % 8;
}
/* Filters of e4m3 are in the same blocks as pairs of channels, 16 bits: of in / 2 channels. Their scales follow. */

/* Returns: whether filters are stored in blocks on a device with conv_wgmma.cu's kernel: 3x3 ones, which always have a
 * tile of ours. in, outs: padded to multiples of VM_BLOCK. */
static inline bool vm_conv_is_blocked(size_t k, size_t in, size_t outs) {
    return k == 3 && 16 * in * outs <= UINT32_MAX;
}

/* For conv_wgmma.cu: two chunks of x as eight planes of 18x18 pixels of 16 bytes, 80 bytes between the planes; blocks
 * of filters; sums of both warpgroups; barriers. */
#define VM_WGMMA_PLANE (18 * 18 * 16 + 80)
#define VM_WGMMA_FILTER (VM_CONV_FILTERS * VM_CONV_CHUNK * 2)
#define VM_WGMMA_SHARED                                                                       \
    (2 * 8 * VM_WGMMA_PLANE + VM_WGMMA_STAGES * VM_WGMMA_FILTER + 2 * 4 * (2 * 128 + 4) * 4 + \
     (2 * VM_WGMMA_STAGES + 6) * 8)

/* The cost of ending an item per number, in cost times products: 16x128's, by the count above. */
enum { VM_CONV_END = 40 * 1152 * 44 / 297 };

/* Returns: whether the second of two blocks of four warps on a multiprocessor starts VM_CONV_LEAD nanoseconds later, so
 * that it multiplies while the first ends its item. It needs several items per block, each longer than twice that. By
 * count at 1.8 GHz ending an item takes 2 to 3 microseconds. Its products, while another block multiplies too, take 16
 * for 1152 per number, and more for more. */
enum { VM_CONV_LEAD = 5000 };
static inline VM_ANYWHERE bool vm_conv_apart(uint32_t threads, uint64_t products, uint64_t items_each) {
    return threads < VM_CUDA_THREADS && products >= 1024 && items_each >= 4;
}

/* Returns: the tile of a kind, for blocks that may opt in to largest_shared bytes; resident 0 if it does not fit. A
 * multiprocessor has 1 KiB more than that, and reserves 1 KiB for every block. */
static inline vm_conv_tile vm_conv_tile_at(uint32_t kind, size_t largest_shared) {
#define VM_CONV_TILE(ROWS, OUTS, STRIDE, WARPS, ACROSS, STAGES, RESIDENT, COST)                            \
    {ROWS,     OUTS, STRIDE, (WARPS) * 32, VM_CONV_SHARED(ROWS, OUTS, STRIDE, (WARPS) / (ACROSS), STAGES), \
     RESIDENT, COST, 0,      ROWS},
    static const vm_conv_tile tiles[VM_CONV_ALL_KINDS] = {
        VM_CONV_TILES(VM_CONV_TILE){16, 128, 1, 512, VM_WGMMA_SHARED, 1, 18, 0, 8},
        {16, 96, 1, 512, VM_WGMMA_SHARED, 1, 20, 0, 8}}; /* reads x for fewer products */
#undef VM_CONV_TILE
    vm_conv_tile t = tiles[kind];
    t.kind = kind;
    t.resident = (uint32_t)VM_MIN(t.resident, (largest_shared + 1024) / (t.shared + 1024));
    return t;
}

/* Returns: whether the tile has a kernel for videos, too. */
static inline bool vm_conv_of_videos(vm_conv_tile t) { return t.kind >= VM_CONV_WGMMA || t.outs == VM_BLOCK; }

/* Returns: whether the tile fits, with enough warps to hide latency. */
static inline bool vm_conv_tile_fits(vm_conv_tile t) { return t.resident * t.threads >= VM_CUDA_THREADS; }

static inline uint32_t vm_conv_parts(const vm_conv_args *a, vm_conv_tile t) {
    const uint32_t h = a->up ? a->x_h : a->y_h, w = a->up ? a->x_w : a->y_w;
    return (h + t.part_rows - 1) / t.part_rows * ((w + VM_CONV_COLUMNS - 1) / VM_CONV_COLUMNS) * (a->up ? 4 : 1);
}

/* Rows of tiles, and the tiles of pixels and channels in each: the items that a grid's blocks share. */
static inline uint32_t vm_conv_tile_rows(const vm_conv_args *a, vm_conv_tile t) {
    return ((a->up ? a->x_h : a->y_h) + t.rows - 1) / t.rows;
}
static inline uint32_t vm_conv_row_items(const vm_conv_args *a, vm_conv_tile t) {
    const uint32_t columns = ((a->up ? a->x_w : a->y_w) + VM_CONV_COLUMNS - 1) / VM_CONV_COLUMNS;
    return columns * (a->up ? 4 : 1) * ((VM_ROUND_UP(a->y_c, VM_BLOCK) + t.outs - 1) / t.outs);
}
static inline uint32_t vm_conv_items(const vm_conv_args *a, vm_conv_tile t) {
    return vm_conv_tile_rows(a, t) * vm_conv_row_items(a, t);
}

/* Any grid works; this one fills the device. A block has t.threads threads. */
static inline uint32_t vm_conv_grid(const vm_conv_args *a, vm_conv_tile t, uint32_t multiprocessors) {
    const uint32_t most = multiprocessors * t.resident;
    return VM_MIN(a->items, most);
}

/* Returns: the tile expected to be fastest among those that fit. largest_shared: the most bytes that a block may opt in
 * to (64 KiB suffice for some with stride 1, 99 KiB for all that passes need). in_place: y is x. Only the geometry of
 * `a` counts, not its pointers. */
static inline vm_conv_tile vm_conv_choose(vm_dtype dtype, const vm_conv_args *a, bool in_place, size_t largest_shared,
                                          uint32_t multiprocessors) {
    vm_conv_tile best = {0, 0, 0, 0, 0, 0, 0, 0, 0};
    uint64_t least = UINT64_MAX;
    const uint64_t products = (uint64_t)a->in_c * a->k * a->k; /* for each number of y */
    const uint64_t filters = (uint64_t)(a->up ? 4 : 1) * VM_ROUND_UP(a->y_c, VM_BLOCK) * a->k * a->k;
    if (filters > UINT32_MAX / VM_MAX(a->in_c, 1)) return best; /* the kernels count filters' numbers in 32 bits */
    if (dtype == VM_F32 || (a->up ? a->k != 2 || a->stride != 1 : a->k != 1 && a->k != 3) || (in_place && a->k != 1))
        return best;
    for (uint32_t kind = 0; kind < VM_CONV_ALL_KINDS; kind++) {
        const vm_conv_tile t = vm_conv_tile_at(kind, largest_shared);
        const bool wgmma = kind >= VM_CONV_WGMMA;
        if (!wgmma && a->fp8) continue;
        if (wgmma && (!a->blocked || t.outs != vm_conv_filters(VM_ROUND_UP(a->y_c, VM_BLOCK)))) continue;
        if (a->x_rows && !vm_conv_of_videos(t)) continue;
        if (t.stride != a->stride || !vm_conv_tile_fits(t) || (in_place && t.outs < a->y_c)) continue;
        if (a->format != VM_ROWS && t.outs != VM_BLOCK) continue;
        const uint64_t wave = (uint64_t)multiprocessors * t.resident,
                       items = (uint64_t)vm_conv_items(a, t) * VM_MAX(a->x_rows, 1);
        const uint64_t waves = (items + wave - 1) / wave;
        const uint64_t end = vm_conv_apart(t.threads, products, items / wave) ? 0 : VM_CONV_END;
        const uint64_t cost = waves * t.resident * t.rows * t.outs * (t.cost * products + end);
        if (cost < least) least = cost, best = t;
    }
    return best;
}

#endif
