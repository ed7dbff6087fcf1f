/* The interface between the core and its backends.
 *
 * The engine knows one thing, the pass (docs/DESIGN.md):
 *
 *   rows of x -> [normalise + SiLU on load] -> [2x nearest on load] -> conv 3x3 / 1x1
 *             -> [+ bias, + residual on store] -> rows of y, and the sums that the next GroupNorm needs
 *
 * Besides, there are one attention, and moves of channels and pixels without weights. A vm_pass is the geometry of one
 * of these. It has no pointers, so it can be planned and counted without memory. vm_operands are the pointers of one
 * run.
 *
 * Rows. A tensor is h rows; a row is [c/16][w][16] numbers: channels in blocks of VM_BLOCK, the pixels of a block side
 * by side, channels beyond c zero. The view holds the distances between blocks and between rows, so a tensor may occupy
 * the first blocks of a wider one's rows. A row of a video is that row of all its frames, [c/16][f][w][16].
 *
 * This header includes no other header of this project. */
#ifndef VM_KERNELS_H
#define VM_KERNELS_H

#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __CUDACC__
#define VM_ANYWHERE __host__ __device__
#else
#define VM_ANYWHERE
#endif

#define VM_BLOCK 16 /* channels in a block, the same on every CPU */
#define VM_ALIGN 64 /* of every buffer, in bytes */
#define VM_ROUND_UP(n, m) (((n) + (m) - 1) / (m) * (m))
#define VM_BLOCKS(c) (((c) + VM_BLOCK - 1) / VM_BLOCK)
#define VM_MIN(a, b) ((a) < (b) ? (a) : (b))
#define VM_MAX(a, b) ((a) > (b) ? (a) : (b))

typedef enum vm_status {
    VM_OK = 0,
    VM_EINVAL,     /* an argument is wrong */
    VM_ENOMEM,     /* the system, the budget or an injected fault refused memory */
    VM_EOVERFLOW,  /* a byte count does not fit in size_t */
    VM_ECANCELLED, /* the caller's poll stopped the run */
    VM_EDEVICE,    /* a GPU, its driver or its libraries failed */
    VM_ELIMIT      /* no plan keeps within the memory limit */
} vm_status;

enum { VM_SENTENCE = 512 /* bytes kept of a message */ };

/* The format of a refusal by its parts: "argument: place: expected wanted, got got". Each part is a literal. */
#define VM_SPLIT "\x1f"
#define VM_EXPECTED_IN(argument, place, wanted, got) argument VM_SPLIT place VM_SPLIT wanted VM_SPLIT got
#define VM_EXPECTED(argument, wanted, got) VM_EXPECTED_IN(argument, "", wanted, got)

/* status.c: records the message for vm_error(), one per thread. Returns: status. */
vm_status vm_fail(vm_status status, const char *format, ...) __attribute__((format(printf, 2, 3)));
const char *vm_error(void);
/* Returns: the same sentence as VM_EXPECTED_IN's four parts with VM_SPLIT between them, if vm_fail got them so. */
const char *vm_error_parts(void);
/* Removes the last UTF-8 character if a full buffer has cut it. */
void vm_end_whole(char *text);

/* ---- sizes ----
 * An overflow stays SIZE_MAX through every further sum and product, except a product with 0. So sizes can be laid out
 * without a check at each step; plan.c and mem.c refuse them. */

static inline size_t vm_sum(size_t a, size_t b) {
    size_t sum;
    return __builtin_add_overflow(a, b, &sum) ? SIZE_MAX : sum;
}

static inline size_t vm_product_of(const size_t *factor, size_t factors) {
    size_t product = 1;
    for (size_t i = 0; i < factors; i++)
        if (__builtin_mul_overflow(product, factor[i], &product)) return SIZE_MAX;
    return product;
}
#define VM_PRODUCT(...) \
    vm_product_of((const size_t[]){__VA_ARGS__}, sizeof((const size_t[]){__VA_ARGS__}) / sizeof(size_t))

/* Rounds up to a multiple of `align`. */
static inline size_t vm_round_up(size_t bytes, size_t align) {
    return bytes > SIZE_MAX - align ? SIZE_MAX : VM_ROUND_UP(bytes, align);
}

/* Appends `bytes`, rounded up, to a layout that ends at *end. Returns: where they begin. */
static inline size_t vm_put_bytes(size_t *end, size_t bytes, size_t align) {
    const size_t at = *end;
    *end = vm_sum(at, vm_round_up(bytes, align));
    return at;
}

/* ---- numbers ---- */

typedef enum vm_dtype { VM_F32, VM_F16, VM_BF16 } vm_dtype;

static inline const char *vm_dtype_name(vm_dtype dtype) {
    return dtype == VM_F32 ? "float32" : dtype == VM_F16 ? "float16" : "bfloat16";
}

static inline size_t vm_dtype_bytes(vm_dtype dtype) { return dtype == VM_F32 ? 4 : 2; }

/* How float32 products may be rounded, in the terms of torch.set_float32_matmul_precision. */
typedef enum vm_precision { VM_HIGHEST, VM_HIGH, VM_MEDIUM } vm_precision;

static inline const char *vm_precision_name(vm_precision precision) {
    return precision == VM_HIGHEST ? "highest" : precision == VM_HIGH ? "high" : "medium";
}

static inline float vm_float_of_bits(uint32_t bits) {
    const union {
        uint32_t bits;
        float value;
    } u = {bits};
    return u.value;
}

/* Returns: element i of an array of that type, exactly: float covers every type. */
static inline float vm_element(vm_dtype dtype, const void *data, size_t i) {
    if (dtype == VM_F32) return ((const float *)data)[i];
    const uint32_t half = ((const uint16_t *)data)[i], sign = (half & 0x8000) << 16, magnitude = half & 0x7fff;
    if (dtype == VM_BF16) return vm_float_of_bits(half << 16);
    if (magnitude >= 0x7c00) return vm_float_of_bits(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);
    /* the same bits 13 places up have an exponent 112 too small; the product is exact */
    return vm_float_of_bits(sign | magnitude << 13) * 0x1p112f;
}

static inline uint32_t vm_bits_of_float(float value) {
    const union {
        float value;
        uint32_t bits;
    } u = {value};
    return u.bits;
}

/* Rounds to nearest, ties to even; NaN stays NaN, and overflow becomes Inf. */
static inline uint16_t vm_to_bfloat16(float value) {
    const uint32_t bits = vm_bits_of_float(value);
    return (uint16_t)((value != value ? bits | 0x400000 : bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static inline uint16_t vm_to_float16(float value) {
    const uint32_t bits = vm_bits_of_float(value), sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
    if (size > 0x7f800000) return (uint16_t)(sign | 0x7e00);
    if (size >= 0x47800000) return (uint16_t)(sign | 0x7c00);
    if (size < 0x38800000) /* subnormal: 0.5 has float16's least step in its last place, so the sum rounds right */
        return (uint16_t)(sign | (vm_bits_of_float(vm_float_of_bits(size) + 0.5f) - 0x3f000000));
    return (uint16_t)(sign | (size - 0x38000000 + 0xfff + (size >> 13 & 1)) >> 13);
}

/* To the 8 bits of e4m3: the largest number is 448, and larger ones become it; NaN stays NaN. */
static inline uint8_t vm_to_e4m3(float value) {
    const uint32_t bits = vm_bits_of_float(value), sign = bits >> 24 & 0x80, size = bits & 0x7fffffff;
    if (size > 0x7f800000) return 0x7f;
    if (size >= 0x43e00000) return (uint8_t)(sign | 0x7e);
    if (size < 0x3c800000) /* subnormal, as in vm_to_float16: the least step is 2^-9 */
        return (uint8_t)(sign | (vm_bits_of_float(vm_float_of_bits(size) + 0x1p14f) - 0x46800000));
    return (uint8_t)(sign | (size - 0x3c000000 + 0x7ffff + (size >> 20 & 1)) >> 20);
}

/* Stores value, rounded to the array's type. */
static inline void vm_set_element(vm_dtype dtype, void *data, size_t i, float value) {
    if (dtype == VM_F32)
        ((float *)data)[i] = value;
    else
        ((uint16_t *)data)[i] = dtype == VM_BF16 ? vm_to_bfloat16(value) : vm_to_float16(value);
}

/* A 3x3 convolution after nearest 2x is four 2x2 ones, one for each parity of the output's row and column. Along a line
 * of parity `phase`, tap 0 or 1 of a 2x2 filter is the sum of the 3x3 filter's taps *first to *last. Even outputs: tap
 * 0, then taps 1 and 2. Odd outputs: taps 0 and 1, then tap 2. */
static inline void vm_folded_taps(size_t phase, size_t tap, size_t *first, size_t *last) {
    *first = tap ? phase + 1 : 0;
    *last = tap ? 2 : phase;
}

/* ---- the pass ---- */

typedef enum vm_pass_kind { VM_PASS_CONV, VM_PASS_ATTENTION, VM_PASS_MOVE } vm_pass_kind;

/* The layout of pixels outside the engine, in the user's arrays. */
typedef enum vm_format {
    VM_ROWS,     /* ours, as above */
    VM_F32_NCHW, /* float planes */
    VM_U8_NHWC,  /* bytes, pixels interleaved; v / 127.5 - 1 in, clamped and rounded out */
    VM_F16_NCHW, /* planes of float16 and of bfloat16, only in a GPU's memory */
    VM_BF16_NCHW
} vm_format;

/* Numbers of any type and strides: the user's array, which a CPU reads in place. */
typedef struct vm_numbers {
    const void *data;
    char kind; /* NumPy's: f, i or u; or b for bfloat16 */
    size_t size;
    bool swapped;                               /* not in this machine's byte order */
    ptrdiff_t item, channel, frame, row, pixel; /* strides in bytes */
} vm_numbers;

typedef struct vm_shape {
    size_t c, h, w, f; /* f: frames; an image has one */
} vm_shape;

/* The norm of x on load, before SiLU. */
typedef enum vm_norm {
    VM_NORM_NONE,
    VM_NORM_GROUP, /* GroupNorm: needs the sums that x's producer left */
    VM_NORM_PIXEL, /* each pixel divided by its length: x / max(|x|, eps) * sqrt(channels) * gamma */
    VM_NORM_RMS    /* each pixel divided by its root mean square: x / sqrt(mean of x^2 + eps) */
} vm_norm;

/* Returns: whether the norm is of each pixel by itself. */
static inline bool vm_norm_by_pixel(vm_norm norm) { return norm == VM_NORM_PIXEL || norm == VM_NORM_RMS; }

/* A function of a number. ReLU keeps NaN. */
typedef enum vm_act {
    VM_ACT_NONE,
    VM_ACT_SILU, /* x / (1 + e^-x) */
    VM_ACT_RELU,
    VM_ACT_BOUND /* 3 tanh(x / 3), which is within [-3, 3] */
} vm_act;

/* Clamps the user's channels from `from` on to [low, high]; NaN stays. */
typedef struct vm_clamp {
    uint32_t from;
    float low, high;
} vm_clamp;

static inline VM_ANYWHERE float vm_clamped(vm_clamp clamp, size_t channel, float v) {
    return channel < clamp.from ? v : v < clamp.low ? clamp.low : v > clamp.high ? clamp.high : v;
}

/* VM_PASS_MOVE has no weights: each number of y is one of x, or the mean of several adjacent ones. A square of pixels,
 * of one or two frames, of the larger tensor is one pixel of the smaller. Their numbers are ordered by channel, row and
 * column in one of these ways. Pixel shuffles, patches, and residuals with repeated or averaged channels are moves. */
typedef enum vm_order {
    VM_CHANNEL_ROW_COLUMN, /* the column changes first */
    VM_CHANNEL_COLUMN_ROW,
    VM_ROW_COLUMN_CHANNEL
} vm_order;

typedef struct vm_move {
    vm_order order;
    uint32_t frames; /* each channel has this many frames, 1 or 2; an image is the last of them, others are zeros */
    uint32_t side;   /* of the square of pixels; 1 if the number of pixels stays */
    bool in_turn;    /* of a move to more pixels: channels beyond those of x are these again, one after another */
} vm_move;

/* Returns: how many numbers of the larger tensor, in that order, share one place in the other's pixel. */
static inline VM_ANYWHERE size_t vm_move_share(vm_move m, size_t x_c, size_t y_c, bool up, bool down) {
    const size_t parts = m.frames * m.side * m.side;
    if (up && m.in_turn) return 1;
    return up || (!down && y_c > x_c) ? y_c * parts / x_c : x_c * parts / y_c;
}

/* Returns: the place of a number of one of its frames among those of `channels` channels. */
static inline VM_ANYWHERE size_t vm_move_at(vm_move m, size_t channels, size_t c, size_t frame, size_t row,
                                            size_t column) {
    if (m.order == VM_ROW_COLUMN_CHANNEL) return (row * m.side + column) * channels + c;
    const size_t part = m.order == VM_CHANNEL_ROW_COLUMN ? row * m.side + column : column * m.side + row;
    return (c * m.frames + frame) * m.side * m.side + part;
}

/* The number at that place. Returns: its frame. */
static inline VM_ANYWHERE size_t vm_move_from(vm_move m, size_t channels, size_t at, size_t *c, size_t *row,
                                              size_t *column) {
    const bool last = m.order == VM_ROW_COLUMN_CHANNEL;
    const size_t square = m.side * m.side, part = last ? at / channels : at % square;
    *c = last ? at % channels : at / square / m.frames;
    *row = m.order == VM_CHANNEL_COLUMN_ROW ? part % m.side : part / m.side;
    *column = m.order == VM_CHANNEL_COLUMN_ROW ? part / m.side : part % m.side;
    return last ? m.frames - 1 : at / square % m.frames;
}

/* How a pass changes the number of frames. A convolution passes on the first frame as it is. */
typedef enum vm_time {
    VM_TIME_SAME,
    VM_TIME_HALVED, /* frame j of y meets frames up to 2j of x: a convolution three, a move two */
    /* Frames 2i - 1 and 2i of y are made of frame i of x: by a convolution of frames i - 2 to i, from 1 on, each from a
     * half of its outputs; by a move, each from one of its frames */
    VM_TIME_DOUBLED
} vm_time;

typedef struct vm_pass {
    vm_pass_kind kind;
    vm_shape x, y;     /* of the tensors in memory; for attention's input, c is the sum over q, k and v */
    int ksize, stride; /* 3 or 1; 1 or 2. A move to fewer pixels or frames: 2 and 2 */
    int pad;           /* rows above x, and columns before it; below and after as many as needed */
    bool mirrored;     /* they are x's own, mirrored at its first and last pixels; otherwise zeros */
    bool up;           /* nearest 2x before a 3x3 convolution; or a move to more pixels or frames */
    uint8_t slices;    /* frames of x that a frame of y meets, 1 to 3 */
    uint8_t ahead;     /* of these are later than its own, 0 or 1; the others are earlier */
    bool video;        /* of videos: its filters keep all slices, and its rows may have several frames */
    bool held;         /* frames before the first are copies of it, and those after the last of that; otherwise zeros */
    uint8_t skipped;   /* slices of the stored filter before these: an image meets only the last */
    vm_time time;
    bool turned; /* rows are the picture's columns: filters and the user's pixels are transposed */
    vm_move move;
    vm_norm norm;
    bool affine; /* x * in_scale + in_shift on load, for the user's pixels */
    vm_act act;  /* on load, after these */
    bool add;    /* add a tensor of y's shape on store */
    bool relu;   /* on store, after the addition */
    bool stats;  /* leave the sums that the next GroupNorm needs */
    bool fp8;    /* may multiply e4m3 on a backend opened for fp8: x is normalised on load, and y is no user's array */
    float in_scale, in_shift;
    float out_scale, out_shift; /* y * out_scale + out_shift on store, for the user's pixels */
    vm_format x_format, y_format;
    size_t groups; /* of a GroupNorm on load */
    float eps;
    vm_clamp clamp;         /* of the user's pixels */
    size_t scale_channels;  /* attention: scores are divided by the square root of this */
    float x_scale, y_scale; /* powers of two that tensors stay multiplied by (against float16's overflow) */
} vm_pass;

/* Rows of a tensor. A streamed tensor has only `ring` rows in memory, and row y replaces row y - ring; ring is SIZE_MAX
 * if all are there. */
typedef struct vm_view {
    void *data;
    vm_dtype dtype;    /* of an element */
    size_t block, row; /* elements between channel blocks, and between rows */
    size_t ring;
} vm_view;

static inline void *vm_pixel(const vm_view *v, size_t y, size_t block, size_t x) {
    const size_t row = y < v->ring ? y : y % v->ring;
    return (char *)v->data + (row * v->row + block * v->block + x * VM_BLOCK) * vm_dtype_bytes(v->dtype);
}

/* How the plan computes a pass. */
typedef struct vm_manner {
    size_t at_once; /* most rows of tiles in progress at the same time: all of them, or some steps' */
    bool stepped;   /* rows of tiles may be computed a few at a time; otherwise it runs whole, with ample memory */
    /* Least memory at any cost in time. On a CPU each task transforms the weights that it needs in its scratch;
     * otherwise one transformed copy is kept. On a GPU rows of tiles are low. */
    bool tight;
} vm_manner;

typedef struct vm_operands {
    vm_view x, y, add;    /* rows; add may be y itself; y may be x if each pixel of y depends only on that pixel of x */
    const void *x_pixels; /* when x_format is not VM_ROWS */
    const vm_numbers *numbers; /* their layout; NULL: packed */
    void *y_pixels;            /* when y_format is not VM_ROWS */
    const void *weight;        /* in the device's layout (vm_device.set_weight) */
    const float *bias;         /* [y.c rounded up to 16], or NULL */
    const float *gamma, *beta; /* [x.c rounded up to 16] */
    const float *x_stats;      /* sums from the producer of x */
    float *y_stats;            /* sums of this pass: vm_needs.parts times vm_stats_floats(y.c) floats */
    size_t x_parts;            /* number of partial sums in x_stats */
    void *prepared;            /* vm_needs.prepared bytes, aligned to vm_device.align */
    vm_manner manner;          /* the manner given to vm_needs */
    void *scratch;             /* vm_needs.scratch bytes or more, aligned likewise */
    size_t scratch_each;       /* bytes of it for each thread */
    void *workspace;           /* vm_backend.workspace bytes, aligned likewise */
    bool *overflow;            /* set if a number stored in fewer bits is not finite; a GPU has its own */
} vm_operands;

/* One job of a pass: computes part `task`; `thread` < threads selects the caller's scratch. */
typedef void (*vm_task)(const void *job, size_t task, unsigned thread);

/* Limits of a run. */
typedef struct vm_limits {
    unsigned threads;
    size_t stripe_bytes; /* most bytes for stripe-wise copies of x and y, in a pass that runs whole */
} vm_limits;

/* Threads lent to a backend during a run. each() calls fn for every task in [0, n) on any thread, in any order. It
 * returns when all are done, or VM_ECANCELLED once the run is stopped. rows: rows of progress of the n tasks. */
typedef struct vm_exec {
    vm_limits limits;
    void *pool;
    vm_status (*each)(void *pool, size_t n, size_t rows, vm_task fn, const void *job);
} vm_exec;

/* ---- tiles ---- */

/* A tile of an image (of a batch of them), blended with the tiles above it and to its left as in diffusers. First its
 * top `down` rows, then its left `across` columns are blended with the borders of those tiles: row i with row i of
 * lower, column j with row j of right, which is transposed. Its own rows and columns from `step` on replace those
 * borders, for the tiles below it and to its right. The part before these goes into the image, from (top, left) on. */
typedef struct vm_blend_args {
    const float *tile;    /* [batch][y_c][h][w] */
    float *lower, *right; /* [batch][y_c][border][lower_w] and [batch][y_c][border][right_h] */
    void *y;              /* the image, y_h by y_w, in `format` */
    uint32_t batch, y_c, h, w, step, down, across, border, lower_w, right_h;
    uint32_t y_h, y_w, top, left;
    uint32_t format; /* vm_format of y */
    vm_clamp clamp;  /* as in a pass */
    uint32_t cosine; /* whether the newer tile's share is (1 - cos(pi t)) / 2 instead of t */
    uint32_t patch;  /* rows, and columns, with equal shares: 1, or 2 if patches of an image are blended */
} vm_blend_args;

/* Returns: pixel i of the n that two tiles share. */
static inline VM_ANYWHERE float vm_mix(float older, float newer, uint32_t i, uint32_t n, bool cosine) {
    double t = (double)i / n;
    if (cosine) t = (1 - cos(3.14159265358979323846 * t)) / 2;
    return older * (float)(1 - t) + newer * (float)t;
}

/* Returns: number (i, j) of a channel of an image; plane counts the channels of the whole batch. It overwrites the
 * borders that number (i - step, j), or (i, j - step), was blended with: call those first. */
static inline VM_ANYWHERE float vm_blended(const vm_blend_args *a, size_t plane, uint32_t i, uint32_t j) {
    float v = a->tile[(plane * a->h + i) * a->w + j];
    float *lower = a->lower + plane * a->border * a->lower_w + j,
          *right = a->right + plane * a->border * a->right_h + i;
    if (i < a->down) v = vm_mix(lower[(size_t)i * a->lower_w], v, i - i % a->patch, a->down, a->cosine);
    if (j < a->across) v = vm_mix(right[(size_t)j * a->right_h], v, j - j % a->patch, a->across, a->cosine);
    if (i >= a->step) lower[(size_t)(i - a->step) * a->lower_w] = v;
    if (j >= a->step) right[(size_t)(j - a->step) * a->right_h] = v;
    return v;
}

/* A tensor of weights in a file's layout: (out, in, ksize, ksize), or a vector of `out` numbers. */
typedef struct vm_weight {
    size_t out, in, ksize;
    bool vector, up; /* up: of a convolution after nearest 2x */
    bool frames;     /* keeps all slices; otherwise only the last, which is all that one frame meets */
    uint8_t past;    /* (out, in, past + 1, ksize, ksize): slices for earlier frames, then the last */
    uint8_t parts;   /* 0, or 3 or 2 convolutions, one after another: the channels of each begin a new block */
    bool fp8;        /* as in vm_pass */
} vm_weight;

/* Returns: slices that are kept. */
static inline size_t vm_weight_slices(const vm_weight *w) { return w->frames ? w->past + 1 : 1; }

/* Returns: the place of the file's output channel o among the vm_weight_lanes stored channels. */
static inline size_t vm_weight_lane(const vm_weight *w, size_t o) {
    const size_t each = w->parts ? w->out / w->parts : w->out;
    return o / each * VM_BLOCKS(each) * VM_BLOCK + o % each;
}

static inline size_t vm_weight_lanes(const vm_weight *w) {
    const size_t parts = w->parts ? w->parts : 1;
    return parts * VM_BLOCKS(w->out / parts) * VM_BLOCK;
}

/* How the rows of a pass's output are cut into rows of tiles, which can be computed piece by piece. It depends only on
 * the shape and on vm_manner.tight. */
typedef struct vm_cut {
    size_t rows, columns;         /* of tiles; a tile is a task, counted row by row; a GPU handles a row as one */
    size_t out_rows;              /* of the output, in a full row of tiles */
    size_t together;              /* this many output rows, from a multiple on, are consecutive in a ring too */
    size_t in_step, in_rows, pad; /* row k reads rows [k * in_step - pad, k * in_step - pad + in_rows) of x */
    double cost;                  /* time in steps, relative to a pass that runs whole and not tight */
} vm_cut;

/* A pass's needs besides its tensors: bytes kept from its beginning to its end; bytes used while a task runs (of all
 * threads together, shared by passes in progress); and the number of partial sums for a GroupNorm, each of
 * vm_stats_floats(y.c) floats, or 0. */
typedef struct vm_needs {
    size_t prepared, scratch, parts;
} vm_needs;

typedef struct vm_backend vm_backend;

/* A pass in progress: its task t is fn(job, t, thread). */
typedef struct vm_tasks {
    vm_task fn; /* NULL if tiles are not tasks */
    const void *job;
    /* Called after the tasks of rows [row, row + rows) of tiles, in order: adds up their sums or, if tiles are not
     * tasks, enqueues these rows. NULL: nothing to do. */
    vm_status (*rows)(const struct vm_tasks *tasks, size_t row, size_t rows);
    const vm_backend *backend; /* as given to prepare, for rows */
    const vm_pass *pass;
    const vm_operands *at;
    const vm_exec *exec;
} vm_tasks;

/* Where a backend's memory is, and how it runs work. The host is one device (kernels/host.c), each GPU another. Work is
 * enqueued on one stream in the order of the calls; only fetch and finish wait for it. Pointers are the device's unless
 * called the host's. */
typedef struct vm_device {
    size_t align;       /* of a buffer in the arena, in bytes; a multiple of VM_ALIGN */
    bool channels_last; /* a row is [w][c]; otherwise [c / 16][w][16] */
    bool addressable; /* the host reads and writes this memory: its arrays need no copies, and tests may look inside */
    /* VM_OK with *out NULL if no memory is left; another status for any other failure. */
    vm_status (*take)(const vm_backend *b, size_t bytes, void **out);
    void (*give)(const vm_backend *b, void *block, size_t bytes);
    size_t (*weight_bytes)(const vm_backend *b, const vm_weight *w);
    /* data: the host's, in the file's layout, borrowed for the call. *rounded: whether some number was rounded. */
    vm_status (*set_weight)(const vm_backend *b, const vm_weight *w, void *to, vm_dtype dtype, const void *data,
                            bool *rounded);
    /* Reads the stored weight as float32. VM_EINVAL if the device stores other numbers than were set. */
    vm_status (*get_weight)(const vm_backend *b, const vm_weight *w, const void *from, float *data);
    /* Around a run: `stream` is the caller's, or NULL for the backend's own. With `wait` the run is complete, and its
     * failures known, when finish returns; *overflow: whether a stored number was not finite. */
    vm_status (*start)(const vm_backend *b, void *stream);
    vm_status (*finish)(const vm_backend *b, const vm_exec *exec, bool wait, bool *overflow);
    /* Around the passes of one batch item. key: 0, or a hash of everything that they depend on, to keep them as one
     * graph. *replayed: a kept graph was enqueued instead. end returns so_far, or a later failure. */
    vm_status (*begin)(const vm_backend *b, uint64_t key, bool *replayed);
    vm_status (*end)(const vm_backend *b, uint64_t key, vm_status so_far);
    /* After step i, or SIZE_MAX: within one. If exec is given, and the work is not captured in a graph, waits until the
     * device is only a few of these calls behind, and reports `rows` to exec. */
    vm_status (*step_enqueued)(const vm_backend *b, size_t step, size_t rows, const vm_exec *exec);
    /* After a run that waited: a step's time, if the device knows better than *seconds, the host's measurement. */
    void (*seconds)(const vm_backend *b, size_t step, double *seconds);
    /* Copies the user's pixels between host memory and the arena; fetch waits for the work before end. */
    vm_status (*send)(const vm_backend *b, void *to, const void *from, size_t bytes);
    vm_status (*fetch)(const vm_backend *b, void *to, const void *from, size_t bytes);
    /* Blends a tile and waits for it. `stream` is the caller's or NULL; all pointers are in this device's memory. */
    vm_status (*blend)(const vm_backend *b, void *stream, const vm_blend_args *args);
    const char *(*error)(void); /* the message of this thread's last status */
} vm_device;

struct vm_backend {
    const char *name;
    bool (*usable)(void);
    vm_dtype dtype;         /* of tensors between passes, and of weights */
    vm_precision precision; /* of float32's products */
    vm_cut (*cut)(const vm_backend *b, const vm_pass *pass, bool tight);
    vm_needs (*needs)(const vm_backend *b, const vm_pass *pass, const vm_limits *limits, vm_manner manner);
    /* Bytes that a library needs in addition: only the library knows, and it may refuse the pass. */
    vm_status (*workspace)(const vm_backend *b, const vm_pass *pass, const vm_limits *limits, vm_manner manner,
                           size_t *bytes);
    vm_status (*run)(const vm_backend *b, const vm_pass *pass, const vm_operands *at, const vm_exec *exec);
    /* Prepares a pass to be computed by rows of tiles. *out borrows all arguments. */
    vm_status (*prepare)(const vm_backend *b, const vm_pass *pass, const vm_operands *at, const vm_exec *exec,
                         vm_tasks *out);
    const vm_device *device;
    size_t granularity; /* the device's memory is held in multiples of this; 0: exactly as requested */
    void *self;
};

/* Returns: bytes of the device held for an allocation of `bytes`. */
static inline size_t vm_held(const vm_backend *b, size_t bytes) {
    return b->granularity ? vm_round_up(bytes, b->granularity) : bytes;
}

/* status.c: records the device's message, after the name `about` unless that is NULL. Returns: status. */
vm_status vm_device_fail(const vm_device *device, vm_status status, const char *about);

/* host.c */
extern const vm_device vm_host;

/* Floats of a partial sum: pixel count, then mean and sum of squared deviations of each channel. */
static inline VM_ANYWHERE size_t vm_stats_floats(size_t c) { return VM_BLOCK + 2 * VM_BLOCKS(c) * VM_BLOCK; }

/* cpu.c: this build's backends, best first; NULL beyond the last. All store weights alike. */
const vm_backend *vm_backend_at(vm_dtype dtype, vm_precision precision, size_t i);
/* Comma-separated names of backends not to use (VAEMEM_DISABLE). Unknown ones are ignored; vaemem/__init__.py warns. */
void vm_cpu_disable(const char *names);

#endif
