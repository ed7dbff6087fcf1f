/* What the core asks of a backend, and what a backend may ask back.
 *
 * The engine knows one thing, the pass (docs/DESIGN.md):
 *
 *   rows of x -> [normalise + SiLU on load] -> [2x nearest on load] -> conv 3x3 / 1x1
 *             -> [+ bias, + residual on store] -> rows of y, and the sums the next GroupNorm needs
 *
 * and beside it one attention, and moves of channels and pixels that multiply nothing. A vm_pass is the geometry of one
 * of them (no pointers, so that it can be planned and counted without memory); vm_operands are the pointers of one run.
 *
 * Rows. A tensor is h rows; a row is [c/16][w][16] numbers: channels in blocks of VM_BLOCK, pixels
 * of one block side by side, channels beyond c zero. The distance between blocks and between
 * rows stands in the view, so a tensor may live in the first blocks of a wider one's rows.
 *
 * This header includes nothing else of ours. */
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
    VM_ECANCELLED, /* the caller's poll asked to stop */
    VM_EDEVICE,    /* a GPU, its driver or its libraries refused */
    VM_ELIMIT      /* no plan keeps within the memory limit */
} vm_status;

enum { VM_SENTENCE = 512 /* bytes that are kept of one */ };

/* status.c: records the sentence for vm_error() (each thread has its own) and returns status. */
vm_status vm_fail(vm_status status, const char *format, ...) __attribute__((format(printf, 2, 3)));
const char *vm_error(void);
/* Removes the last character of a text in UTF-8 if a full buffer has cut it. */
void vm_end_whole(char *text);

/* ---- sizes ----
 * What does not fit stays at SIZE_MAX through every further sum and product (but a product with 0), so that sizes may
 * be laid out without asking at each step; plan.c and mem.c refuse them. */

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

/* To a multiple of `align`. */
static inline size_t vm_round_up(size_t bytes, size_t align) {
    return bytes > SIZE_MAX - align ? SIZE_MAX : VM_ROUND_UP(bytes, align);
}

/* Takes `bytes`, rounded up, at the end of what is being laid out; where they begin. */
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

/* How products of float32 may be rounded, in torch.set_float32_matmul_precision's words. */
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

/* Element i of an array of that type; every type is a part of float's. */
static inline float vm_element(vm_dtype dtype, const void *data, size_t i) {
    if (dtype == VM_F32) return ((const float *)data)[i];
    const uint32_t half = ((const uint16_t *)data)[i], sign = (half & 0x8000) << 16, magnitude = half & 0x7fff;
    if (dtype == VM_BF16) return vm_float_of_bits(half << 16);
    if (magnitude >= 0x7c00) return vm_float_of_bits(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);
    /* a float with the same bits 13 places up has an exponent 112 too small: exact to put right, subnormals too */
    return vm_float_of_bits(sign | magnitude << 13) * 0x1p112f;
}

static inline uint32_t vm_bits_of_float(float value) {
    const union {
        float value;
        uint32_t bits;
    } u = {value};
    return u.bits;
}

/* To the nearest, to even of two; NaN stays NaN, and what is too large becomes Inf. */
static inline uint16_t vm_to_bfloat16(float value) {
    const uint32_t bits = vm_bits_of_float(value);
    return (uint16_t)((value != value ? bits | 0x400000 : bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static inline uint16_t vm_to_float16(float value) {
    const uint32_t bits = vm_bits_of_float(value), sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
    if (size > 0x7f800000) return (uint16_t)(sign | 0x7e00);
    if (size >= 0x47800000) return (uint16_t)(sign | 0x7c00);
    if (size <
        0x38800000) /* subnormal: 0.5 has float16's least step in its last place, so the sum rounds as it should */
        return (uint16_t)(sign | (vm_bits_of_float(vm_float_of_bits(size) + 0.5f) - 0x3f000000));
    return (uint16_t)(sign | (size - 0x38000000 + 0xfff + (size >> 13 & 1)) >> 13);
}

/* The other way: value, rounded to the array's type. */
static inline void vm_set_element(vm_dtype dtype, void *data, size_t i, float value) {
    if (dtype == VM_F32)
        ((float *)data)[i] = value;
    else
        ((uint16_t *)data)[i] = dtype == VM_BF16 ? vm_to_bfloat16(value) : vm_to_float16(value);
}

/* A 3x3 convolution after nearest 2x is four 2x2 ones, one for each parity of the output's row and column. Along a line
 * of parity `phase`, tap 0 or 1 of a 2x2 filter is the sum of the 3x3 filter's taps *first to *last: of 0, and of 1 and
 * 2, for even outputs; of 0 and 1, and of 2, for odd ones. */
static inline void vm_folded_taps(size_t phase, size_t tap, size_t *first, size_t *last) {
    *first = tap ? phase + 1 : 0;
    *last = tap ? 2 : phase;
}

/* ---- the pass ---- */

typedef enum vm_pass_kind { VM_PASS_CONV, VM_PASS_ATTENTION, VM_PASS_MOVE } vm_pass_kind;

/* How the pixels outside the engine lie: the user's own arrays. */
typedef enum vm_format {
    VM_ROWS,     /* ours, as above */
    VM_F32_NCHW, /* float planes */
    VM_U8_NHWC,  /* bytes, pixels interleaved; v / 127.5 - 1 in, clamped and rounded out */
    VM_F16_NCHW, /* planes of half and of bfloat16: in a GPU's memory only */
    VM_BF16_NCHW
} vm_format;

/* Numbers of any type at any distance from each other: the user's array, as a CPU reads it where it lies. */
typedef struct vm_numbers {
    const void *data;
    char kind; /* NumPy's: f, i or u; or b for bfloat16 */
    size_t size;
    bool swapped;                        /* not in this machine's byte order */
    ptrdiff_t item, channel, row, pixel; /* bytes from each to the next */
} vm_numbers;

typedef struct vm_shape {
    size_t c, h, w;
} vm_shape;

/* What is done to x on load, before SiLU. */
typedef enum vm_norm {
    VM_NORM_NONE,
    VM_NORM_GROUP, /* GroupNorm: needs the sums that x's producer left */
    VM_NORM_PIXEL  /* each pixel over its length: x / max(|x|, eps) * sqrt(channels) * gamma */
} vm_norm;

/* What is done to a number. ReLU keeps NaN. */
typedef enum vm_act {
    VM_ACT_NONE,
    VM_ACT_SILU, /* x / (1 + e^-x) */
    VM_ACT_RELU,
    VM_ACT_BOUND /* 3 tanh(x / 3), which stays within [-3, 3] */
} vm_act;

/* The user's channels from `from` on are kept within [low, high]; NaN stays. */
typedef struct vm_clamp {
    uint32_t from;
    float low, high;
} vm_clamp;

static inline VM_ANYWHERE float vm_clamped(vm_clamp clamp, size_t channel, float v) {
    return channel < clamp.from ? v : v < clamp.low ? clamp.low : v > clamp.high ? clamp.high : v;
}

/* VM_PASS_MOVE multiplies by no weights: each number of y is one of x, or the mean of several that stand side by side.
 * Four pixels of the larger tensor (2 x 2) are one of the smaller, and their numbers stand in an order, channel by
 * channel, row by row and column by column in one of these ways. That is what pixel shuffles do, and patches, and
 * residuals whose channels are repeated or averaged. */
typedef enum vm_order {
    VM_CHANNEL_ROW_COLUMN, /* the column changes first */
    VM_CHANNEL_COLUMN_ROW,
    VM_ROW_COLUMN_CHANNEL
} vm_order;

typedef struct vm_move {
    vm_order order;
    uint32_t frames; /* each channel has so many frames, of which all but the last are zeros: 1, or 2 */
} vm_move;

/* How many numbers of the tensor with more of them, in that order, share one place in the other's pixel. */
static inline VM_ANYWHERE size_t vm_move_share(vm_move m, size_t x_c, size_t y_c, bool up, bool down) {
    const size_t parts = m.frames * (up || down ? 4 : 1);
    return up || (!down && y_c > x_c) ? y_c * parts / x_c : x_c * parts / y_c;
}

/* Where a number of the last frame stands among those of `channels` channels. */
static inline VM_ANYWHERE size_t vm_move_at(vm_move m, size_t channels, size_t c, size_t row, size_t column) {
    if (m.order == VM_ROW_COLUMN_CHANNEL) return (row * 2 + column) * channels + c;
    const size_t part = m.order == VM_CHANNEL_ROW_COLUMN ? row * 2 + column : column * 2 + row;
    return (c * m.frames + m.frames - 1) * 4 + part;
}

/* The number that stands there; false: it is of another frame, and zero. */
static inline VM_ANYWHERE bool vm_move_from(vm_move m, size_t channels, size_t at, size_t *c, size_t *row,
                                            size_t *column) {
    const bool last = m.order == VM_ROW_COLUMN_CHANNEL;
    const size_t part = last ? at / channels : at % 4;
    *c = last ? at % channels : at / 4 / m.frames;
    *row = m.order == VM_CHANNEL_COLUMN_ROW ? part % 2 : part / 2;
    *column = m.order == VM_CHANNEL_COLUMN_ROW ? part / 2 : part % 2;
    return last || at / 4 % m.frames + 1 == m.frames;
}

typedef struct vm_pass {
    vm_pass_kind kind;
    vm_shape x, y;     /* of the tensors in memory; c is the sum over q, k and v for attention's input */
    int ksize, stride; /* 3 or 1; 1 or 2. A move to fewer pixels: 2 and 2 */
    int pad;           /* rows of zeros above x, and columns before it; below and behind as many as are needed */
    bool up;           /* nearest 2x before a 3x3 convolution; or a move to more pixels */
    vm_move move;
    vm_norm norm;
    bool affine; /* x * in_scale + in_shift on load, of the user's pixels */
    vm_act act;  /* on load, after these */
    bool add;    /* add a tensor of y's shape on store */
    bool relu;   /* on store, after that */
    bool stats;  /* leave the sums that the next GroupNorm needs */
    float in_scale, in_shift;
    float out_scale, out_shift; /* y * out_scale + out_shift on store, of the user's pixels */
    vm_format x_format, y_format;
    size_t groups; /* of a GroupNorm on load */
    float eps;
    vm_clamp clamp;         /* of the user's pixels */
    size_t scale_channels;  /* attention: scores are divided by its square root */
    float x_scale, y_scale; /* tensors are kept multiplied by these powers of two (against float16's overflow) */
} vm_pass;

/* Rows of a tensor. Of a streamed one only `ring` rows are there, each in the place of the one that many rows before
 * it; ring is SIZE_MAX where all are. */
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

/* How the plan has a pass computed. */
typedef struct vm_manner {
    size_t at_once; /* rows of tiles that are at work at the same time, at most: all of them, or a step's */
    bool stepped;   /* some rows of tiles may be asked for at a time; else it runs whole, and memory is ample */
    /* As little memory as can be, whatever the time. On a CPU each task transforms the weights that it needs, in its
     * scratch, which else are kept, done once. On a GPU rows of tiles are low. */
    bool tight;
} vm_manner;

typedef struct vm_operands {
    vm_view x, y, add;         /* rows; add may be y itself, y may be x where the pass is local to a pixel */
    const void *x_pixels;      /* when x_format is not VM_ROWS */
    const vm_numbers *numbers; /* how these lie; NULL: packed */
    void *y_pixels;            /* when y_format is not VM_ROWS */
    const void *weight;        /* as the device keeps it (vm_device.set_weight) */
    const float *bias;         /* [y.c rounded up to 16], or NULL */
    const float *gamma, *beta; /* [x.c rounded up to 16] */
    const float *x_stats;      /* what the producer of x left */
    float *y_stats;            /* what this pass leaves: vm_needs.parts times vm_stats_floats(y.c) floats */
    size_t x_parts;            /* number of partial sums in x_stats */
    void *prepared;            /* vm_needs.prepared bytes, aligned as vm_device.align says */
    vm_manner manner;          /* as vm_needs were asked for */
    void *scratch;             /* vm_needs.scratch bytes or more, likewise */
    size_t scratch_each;       /* of them, each thread's own */
    void *workspace;           /* vm_backend.workspace bytes, likewise */
    bool *overflow;            /* set where a number that is stored in fewer bits is not finite; a GPU keeps its own */
} vm_operands;

/* One job of a pass: compute part `task`; `thread` < threads names the caller's own scratch. */
typedef void (*vm_task)(const void *job, size_t task, unsigned thread);

/* What a run may use. */
typedef struct vm_limits {
    unsigned threads;
    size_t stripe_bytes; /* what copies of x and y may take where a pass runs whole and makes some, stripe by stripe */
} vm_limits;

/* Threads lent to a backend for the length of a run. each() calls fn for every task in [0, n)
 * on any thread, in any order, and returns when all are done, or VM_ECANCELLED once the run is
 * asked to stop; `rows` is how many rows of progress the n tasks stand for. */
typedef struct vm_exec {
    vm_limits limits;
    void *pool;
    vm_status (*each)(void *pool, size_t n, size_t rows, vm_task fn, const void *job);
} vm_exec;

/* ---- tiles ---- */

/* A tile of an image (of a batch of them), blended with the tiles above it and to its left as diffusers does it. Its
 * first `down` rows and then its first `across` columns are blended with what those have left: row i with row i of
 * lower, column j with row j of right, which is transposed. Its own rows and columns from `step` on take their place,
 * for the tiles below it and to its right. What lies before these goes into the image, from (top, left) on. */
typedef struct vm_blend_args {
    const float *tile;    /* [batch][y_c][h][w] */
    float *lower, *right; /* [batch][y_c][border][lower_w] and [batch][y_c][border][right_h] */
    void *y;              /* the image, of y_h by y_w, by format */
    uint32_t batch, y_c, h, w, step, down, across, border, lower_w, right_h;
    uint32_t y_h, y_w, top, left;
    uint32_t format; /* vm_format of y */
    vm_clamp clamp;  /* as a pass has it */
    uint32_t cosine; /* whether the newer tile's share is (1 - cos(pi t)) / 2 and not t */
    uint32_t patch;  /* rows, and columns, that have the same share: 1, or 2 where patches of an image are blended */
} vm_blend_args;

/* Pixel i of the n that two tiles share. */
static inline VM_ANYWHERE float vm_mix(float older, float newer, uint32_t i, uint32_t n, bool cosine) {
    double t = (double)i / n;
    if (cosine) t = (1 - cos(3.14159265358979323846 * t)) / 2;
    return older * (float)(1 - t) + newer * (float)t;
}

/* Number (i, j) of a channel of an image; plane counts the channels of the whole batch. What it leaves takes the place
 * of what number (i - step, j), or (i, j - step), was blended with: these must come first. */
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

/* A tensor of weights as files lay it out: (out, in, ksize, ksize), or a vector of `out` numbers. */
typedef struct vm_weight {
    size_t out, in, ksize;
    bool vector, up; /* up: of a convolution after nearest 2x */
    size_t past;     /* (out, in, past + 1, ksize, ksize): one frame meets the last alone, and only that is kept */
    bool qkv;        /* three convolutions, one after the other: the channels of each begin a block of their own */
} vm_weight;

/* Where output channel o of the file stands among the channels that are kept, and how many of these there are. */
static inline size_t vm_weight_lane(const vm_weight *w, size_t o) {
    const size_t each = w->qkv ? w->out / 3 : w->out;
    return o / each * VM_BLOCKS(each) * VM_BLOCK + o % each;
}

static inline size_t vm_weight_lanes(const vm_weight *w) {
    return w->qkv ? 3 * VM_BLOCKS(w->out / 3) * VM_BLOCK : VM_BLOCKS(w->out) * VM_BLOCK;
}

/* How the rows of a pass's output are cut into rows of tiles: what can be computed piece by piece. It follows from the
 * shape and vm_manner.tight alone. */
typedef struct vm_cut {
    size_t rows, columns;         /* of tiles; a tile is a task, counted row by row; a GPU takes a row as one */
    size_t out_rows;              /* of the output in a full row of tiles */
    size_t together;              /* as many of these, from a multiple on, lie one after another in a ring too */
    size_t in_step, in_rows, pad; /* row k reads rows [k * in_step - pad, k * in_step - pad + in_rows) of x */
    double cost;                  /* time in steps, relative to a pass that runs whole and need not be tight */
} vm_cut;

/* What a pass needs beside its tensors: bytes that are kept from its beginning to its end, and bytes that are in use
 * while a task runs (of all threads together, so that passes at work at the same time share them). And how many partial
 * sums, each of vm_stats_floats(y.c) floats, it leaves for a GroupNorm; 0 where none wants them. */
typedef struct vm_needs {
    size_t prepared, scratch, parts;
} vm_needs;

typedef struct vm_backend vm_backend;

/* A pass at work: task t of it is fn(job, t, thread). */
typedef struct vm_tasks {
    vm_task fn; /* NULL where tiles are no tasks */
    const void *job;
    /* After the tasks of rows [row, row + rows) of tiles, in their order: adds up what they left, or, where tiles are
     * no tasks, enqueues these rows. NULL where there is nothing to do. */
    vm_status (*rows)(const struct vm_tasks *tasks, size_t row, size_t rows);
    const vm_backend *backend; /* what prepare was given, for rows */
    const vm_pass *pass;
    const vm_operands *at;
    const vm_exec *exec;
} vm_tasks;

/* Where the memory of a backend is, and how work gets done there. The host is one (kernels/host.c), each GPU another.
 * Work is enqueued on one stream in the order of the calls; only fetch and finish wait for it. Pointers are the
 * device's unless they are said to be the host's. */
typedef struct vm_device {
    size_t align;       /* of a buffer in the arena, in bytes; a multiple of VM_ALIGN */
    bool channels_last; /* a row is [w][c]; else [c / 16][w][16] */
    bool addressable;   /* the host reads and writes this memory: its arrays need no copies, tests may look inside */
    /* VM_OK with *out NULL where there is no memory left; another status where the device refused otherwise. */
    vm_status (*take)(const vm_backend *b, size_t bytes, void **out);
    void (*give)(const vm_backend *b, void *block, size_t bytes);
    size_t (*weight_bytes)(const vm_backend *b, const vm_weight *w);
    /* data: the host's, in the file's layout; free to go when set_weight returns. *rounded: some number had to be. */
    vm_status (*set_weight)(const vm_backend *b, const vm_weight *w, void *to, vm_dtype dtype, const void *data,
                            bool *rounded);
    /* What is kept, in float32. VM_EINVAL where the device keeps other numbers than were set. */
    vm_status (*get_weight)(const vm_backend *b, const vm_weight *w, const void *from, float *data);
    /* Around a run: `stream` is the caller's or NULL for the backend's own. A run that waits is done, and its failures
     * are known, when finish returns; *overflow then says whether a stored number was not finite. */
    vm_status (*start)(const vm_backend *b, void *stream);
    vm_status (*finish)(const vm_backend *b, const vm_exec *exec, bool wait, bool *overflow);
    /* Around the passes of one batch item. key: 0, or a name of all that they depend on, under which they are kept as
     * one graph. *replayed: they have been enqueued whole. end returns so_far, or what went wrong since. */
    vm_status (*begin)(const vm_backend *b, uint64_t key, bool *replayed);
    vm_status (*end)(const vm_backend *b, uint64_t key, vm_status so_far);
    /* After step i, or SIZE_MAX: within one. Where exec is given, and what is enqueued is not kept as a graph, waits
     * until the device is a few of these calls behind and tells exec of `rows`. */
    vm_status (*step_enqueued)(const vm_backend *b, size_t step, size_t rows, const vm_exec *exec);
    /* After a run that waited: what a step took, where the device knows better than *seconds, which the host saw. */
    void (*seconds)(const vm_backend *b, size_t step, double *seconds);
    /* The user's pixels between host memory and the arena; fetch waits for what end had enqueued. */
    vm_status (*send)(const vm_backend *b, void *to, const void *from, size_t bytes);
    vm_status (*fetch)(const vm_backend *b, void *to, const void *from, size_t bytes);
    /* Blends a tile and waits for it. `stream` is the caller's or NULL; all else lies in this memory. */
    vm_status (*blend)(const vm_backend *b, void *stream, const vm_blend_args *args);
    const char *(*error)(void); /* the sentence behind the last status of this thread */
} vm_device;

struct vm_backend {
    const char *name;
    bool (*usable)(void);
    vm_dtype dtype;         /* of tensors between passes, and of weights */
    vm_precision precision; /* of float32's products */
    vm_cut (*cut)(const vm_backend *b, const vm_pass *pass, bool tight);
    vm_needs (*needs)(const vm_backend *b, const vm_pass *pass, const vm_limits *limits, vm_manner manner);
    /* Bytes that a library needs besides: only the library knows, and it may refuse the pass. */
    vm_status (*workspace)(const vm_backend *b, const vm_pass *pass, const vm_limits *limits, vm_manner manner,
                           size_t *bytes);
    vm_status (*run)(const vm_backend *b, const vm_pass *pass, const vm_operands *at, const vm_exec *exec);
    /* Makes a pass ready to be computed, row of tiles by row of tiles. *out borrows all that is given. */
    vm_status (*prepare)(const vm_backend *b, const vm_pass *pass, const vm_operands *at, const vm_exec *exec,
                         vm_tasks *out);
    const vm_device *device;
    size_t granularity; /* the device's memory is held in multiples of so many bytes; 0: as it is asked for */
    void *self;
};

/* What is held of the device for so many bytes. */
static inline size_t vm_held(const vm_backend *b, size_t bytes) {
    return b->granularity ? vm_round_up(bytes, b->granularity) : bytes;
}

/* status.c: records the device's sentence, after the name `about` unless that is NULL, and returns status. */
vm_status vm_said(const vm_device *device, vm_status status, const char *about);

/* host.c */
extern const vm_device vm_host;

/* A partial sum: pixel count, then mean and sum of squared deviations of each channel. */
static inline VM_ANYWHERE size_t vm_stats_floats(size_t c) { return VM_BLOCK + 2 * VM_BLOCKS(c) * VM_BLOCK; }

/* cpu.c: this build's backends for such numbers, best first; NULL beyond the last. All keep a model's weights alike. */
const vm_backend *vm_backend_at(vm_dtype dtype, vm_precision precision, size_t i);
/* Comma-separated names that must not be used (VAEMEM_DISABLE). Unknown ones are ignored; vaemem/__init__.py warns. */
void vm_cpu_disable(const char *names);

#endif
