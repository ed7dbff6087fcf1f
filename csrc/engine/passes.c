/* An architecture as a list of passes, for encode and for decode.
 *
 *   encode  pixels -> conv_in -> { resnet x layers, downsample } x levels -> mid -> norm, conv_out
 *           [-> quant_conv] -> moments
 *   decode  latents [-> post_quant_conv] -> conv_in -> mid -> { resnet x (layers + 1), upsample } x levels
 *           -> norm, conv_out -> pixels
 *   mid     resnet, attention, resnet
 *   resnet  x -> conv1(silu norm1 x) = h;  conv2(silu norm2 h) + x,
 *           x through a 1x1 shortcut if the number of channels changes
 *
 * VM_TINY is conv, { block x layers } x levels, conv; a conv between levels halves or doubles the sides. A block is
 * relu(conv4(relu conv2(relu conv0 x)) + x), whose x may be x + pool3(relu norm pool0 x).
 *
 * VM_WAN is similar. Its convolutions are causal and 3D, unless they are called flat here. An image meets only the last
 * slice of them. In a video some resamplers have a convolution over time, which halves or doubles the frames.
 * Upsamplers halve the channels. A residual model's do not: a level's input is moved to the channels and pixels of its
 * output, and added; and an image may come as patches of 2x2 pixels.
 *
 * VM_LTX has moves between its levels as well, of time too, and neither attention nor shortcuts with weights. An
 * encoder's resampler follows its block, a decoder's comes first.
 *
 * VM_HUNYUAN_IMAGE resamples by moves: a convolution with the pixels of 2x2 as its channels, plus its input, moved
 * likewise and averaged or repeated. The decoder's first convolution, and the encoder's last with its norm, add their
 * input likewise. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../vm.h"

typedef struct builder {
    vm_model *m;
    vm_graph *g;
    vm_status status;
    vm_op op;
    char prefix[48]; /* of the names */
    int level, time; /* of x */
    bool video;
    size_t blocks; /* so far, in a half that numbers blocks across its levels */
} builder;

/* Names of modules, by family. */
static const struct words {
    const char *norm_out, *attention_norm, *projection, *resampler;
} words[] = {[VM_KL] = {"conv_norm_out", "group_norm", "to_out.0", "conv"},
             [VM_WAN] = {"norm_out", "norm", "proj", "resample.1"},
             [VM_HUNYUAN_IMAGE] = {"norm_out", "norm", "proj", "conv"}};

static int add_tensor(builder *b, const char *module, const char *leaf, size_t dims, vm_weight weight) {
    char name[VM_NAME];
    snprintf(name, sizeof name, "%.*s%s.%s", (int)sizeof b->prefix - 1, b->prefix, module, leaf);
    if (b->status) return VM_NONE;
    const vm_tensor *known = b->video ? vm_weights_find(b->m, name) : NULL; /* the image's */
    if (known) return (int)(known - b->m->tensor);
    int index = vm_weights_add(b->m, name, dims, &weight);
    if (index == VM_NONE) b->status = VM_ENOMEM;
    return index;
}

/* Appends a node. Returns: its index. */
static int add_node(builder *b, const vm_node *node) {
    vm_graph *g = b->g;
    if (!b->status) b->status = vm_mem_grow(b->m->host, VM_WEIGHTS, (void **)&g->node, g->nodes, sizeof *g->node);
    if (b->status) return 0;
    g->node[g->nodes] = *node;
    return (int)g->nodes++;
}

/* A convolution of node x's tensor (VM_NONE: the user's pixels), named after its module. */
typedef struct conv {
    const char *module;
    int x, add;
    size_t in, out;
    int k, stride;
    bool up;
    const char *norm; /* module of the norm (with the activation) on load, or NULL */
    bool linear;      /* the file's weight is (out, in) */
    bool flat;        /* no causal 3D convolution, whatever the family uses */
    bool centred;     /* with stride 2: zeros on all sides of x, not only below and behind */
    bool bare;        /* no bias */
    bool relu;        /* on store */
    bool over_time;   /* a filter of 3x1x1 that halves or doubles the frames */
    bool fp8;         /* as in vm_pass */
} conv;

static const struct words *words_of(const builder *b) { return &words[b->m->arch.family]; }
static bool is_wan(const builder *b) { return b->m->arch.family == VM_WAN; }
static bool is_hunyuan(const builder *b) { return b->m->arch.family == VM_HUNYUAN_IMAGE; }
static bool is_ltx(const builder *b) { return b->m->arch.family == VM_LTX; }

static vm_node conv_node(builder *b, const conv *c) {
    vm_node n = {
        .pass = {.kind = VM_PASS_CONV,
                 .x.c = c->in,
                 .y.c = c->out,
                 .ksize = c->k,
                 .stride = c->stride ? c->stride : 1,
                 .pad = c->stride == 2 && !c->centred ? 0 : c->k / 2,
                 .up = c->up,
                 .slices = 1,
                 .video = b->video,
                 .add = c->add != VM_NONE,
                 .relu = c->relu,
                 .fp8 = c->fp8,
                 .out_scale = 1,
                 .clamp = {.from = (uint32_t)c->out}},
        .x_level = b->level,
        .x_time = b->time,
        .x = c->x,
        .add = c->add,
        .weight = VM_NONE,
        .bias = VM_NONE,
        .gamma = VM_NONE,
        .beta = VM_NONE,
    };
    b->level += (c->stride == 2) - c->up;
    n.y_level = b->level;
    if (c->over_time) b->time += b->op == VM_ENCODE ? 1 : -1;
    n.y_time = b->time;
    snprintf(n.name, sizeof n.name, "%s%s", b->prefix, c->module);
    return n;
}

/* A vector of c numbers; the file may hold it as (c, 1, ...). */
static int add_vector(builder *b, const char *module, const char *leaf, size_t c, size_t dims) {
    return add_tensor(b, module, leaf, dims, (vm_weight){c, 1, 1, .vector = true});
}

/* of_frames: of a pixel norm: the module is made for several frames, with a gamma of (c, 1, 1, 1). */
static void norm_on_load(builder *b, vm_node *n, const char *module, vm_act act, bool of_frames) {
    const size_t c = n->pass.x.c;
    n->pass.norm = is_wan(b) ? VM_NORM_PIXEL : VM_NORM_GROUP;
    n->pass.act = act;
    n->pass.groups = b->m->arch.norm_num_groups;
    n->pass.eps = b->m->arch.norm_eps;
    if (is_ltx(b)) {
        n->pass.norm = VM_NORM_RMS;
        return;
    }
    if (is_wan(b)) {
        n->gamma = add_vector(b, module, "gamma", c, of_frames ? 4 : 3);
        return;
    }
    n->gamma = add_vector(b, module, "weight", c, 1);
    n->beta = add_vector(b, module, "bias", c, 1);
    if (!b->status) b->g->node[n->x].pass.stats = true;
}

static int add_conv(builder *b, const conv *c) {
    const vm_arch *a = &b->m->arch;
    const bool of_frames = is_ltx(b) || (is_wan(b) && a->slices && !c->flat);
    const bool doubles = c->over_time && b->op == VM_DECODE;
    const size_t past = of_frames && (c->k == 3 || c->over_time) ? 2 : 0, parts = doubles ? 2 : 0,
                 out = c->out << doubles;
    const vm_weight weight = {out,          c->in,          (size_t)c->k,        .up = c->up,
                              .past = past, .parts = parts, .frames = a->videos, .fp8 = c->fp8};
    vm_node n = conv_node(b, c);
    if (b->video)
        n.pass.slices += past;
    else if (a->videos)
        n.pass.skipped = past;
    if (is_ltx(b)) {
        n.pass.held = true;
        n.pass.ahead = !a->half[b->op].causal;
        n.pass.mirrored = a->half[b->op].mirrored;
    }
    if (c->over_time) n.pass.time = doubles ? VM_TIME_DOUBLED : VM_TIME_HALVED;
    if (c->norm) norm_on_load(b, &n, c->norm, b->m->arch.family == VM_TINY ? VM_ACT_RELU : VM_ACT_SILU, true);
    n.weight = add_tensor(b, c->module, "weight", of_frames ? 5 : c->linear ? 2 : 4, weight);
    if (!c->bare) n.bias = add_tensor(b, c->module, "bias", 1, (vm_weight){out, 1, 1, .vector = true, .parts = parts});
    return add_node(b, &n);
}

/* A move of node x's tensor (VM_NONE: the user's pixels) to `out` channels, at another level or the same, and at b's
 * number of frames. Adds node `add`'s tensor. */
static int add_move(builder *b, const char *module, int x, int add, size_t in, size_t out, int level, vm_move move) {
    if (b->status) return 0;
    const int from = x == VM_NONE ? b->level : b->g->node[x].y_level,
              time = x == VM_NONE ? b->time : b->g->node[x].y_time;
    const bool down = level > from || b->time > time, up = level < from || b->time < time, encode = b->op == VM_ENCODE;
    move.side = 1u << abs(level - from);
    const size_t parts = move.frames * move.side * move.side; /* the encoder averages, the decoder repeats */
    const bool fills = is_ltx(b) && !down && !up;             /* with the last channel */
    if (!fills && (encode ? in * parts % out : out * parts % in)) {
        b->status = vm_fail(VM_EINVAL, "config: %s%s: %zu channels cannot be %s %zu", b->prefix, module, in,
                            encode ? "averaged to" : "repeated for", out);
        return 0;
    }
    vm_node n = conv_node(b, &(conv){module, x, add, in, out, down ? 2 : 1, down ? 2 : 1, .up = up});
    n.x_level = from, n.x_time = time;
    b->level = n.y_level = level;
    n.pass.held = is_ltx(b);
    if (n.x_time != n.y_time) n.pass.time = encode ? VM_TIME_HALVED : VM_TIME_DOUBLED;
    if (n.pass.time == VM_TIME_HALVED) n.pass.slices = 2;
    n.pass.kind = VM_PASS_MOVE;
    n.pass.move = move;
    return add_node(b, &n);
}

static const vm_move plain = {VM_CHANNEL_ROW_COLUMN, .frames = 1}, patches = {VM_CHANNEL_COLUMN_ROW, .frames = 1},
                     shuffle = {VM_ROW_COLUMN_CHANNEL, .frames = 1};

__attribute__((format(printf, 2, 3))) static void enter(builder *b, const char *format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(b->prefix, sizeof b->prefix, format, args);
    va_end(args);
}

/* Enters a level's resnet, or the resampler after the last of them. */
static void enter_layer(builder *b, size_t level, size_t layer, size_t layers) {
    const bool encode = b->op == VM_ENCODE, residual = b->m->arch.residual;
    const char *half = encode ? "encoder.down" : "decoder.up";
    if (is_hunyuan(b) || (is_wan(b) && encode && !residual))
        enter(b, "%s_blocks.%zu.", half, b->blocks++);
    else if (layer < layers)
        enter(b, "%s_blocks.%zu.resnets.%zu.", half, level, layer);
    else
        enter(b, "%s_blocks.%zu.%ssampler%s.", half, level, encode ? "down" : "up", residual ? "" : "s.0");
}

static int resnet(builder *b, int x, size_t in, size_t out) {
    const int h = add_conv(b, &(conv){"conv1", x, VM_NONE, in, out, 3, .norm = "norm1", .fp8 = true});
    const int residual = in == out ? x : add_conv(b, &(conv){"conv_shortcut", x, VM_NONE, in, out, 1});
    return add_conv(b, &(conv){"conv2", h, residual, out, out, 3, .norm = "norm2", .fp8 = true});
}

/* Halves the side, or doubles it. */
static int resample(builder *b, int x, size_t in, size_t out) {
    const bool down = b->op == VM_ENCODE;
    const char *module = words_of(b)->resampler;
    const int level = down ? b->level + 1 : b->level - 1;
    if (!is_hunyuan(b))
        return add_conv(b, &(conv){module, x, VM_NONE, in, out, 3, down ? 2 : 1, .up = !down, .flat = true});
    const size_t made = down ? out / 4 : out * 4;
    if (down && out % 4 && !b->status)
        b->status = vm_fail(VM_EINVAL, VM_EXPECTED_IN("config", "block_out_channels", "multiples of 4", "%zu"), out);
    int y = add_conv(b, &(conv){module, x, VM_NONE, in, made, 3});
    y = add_move(b, "shuffle", y, VM_NONE, made, out, level, shuffle);
    return add_move(b, "shortcut", x, y, in, out, level, shuffle);
}

/* q, k and v are one convolution: in the file too, or their weights lie side by side, then their biases. */
static int attention(builder *b, int x, size_t c) {
    static const char *const projections[] = {"to_q", "to_k", "to_v"};
    const size_t padded = VM_BLOCKS(c) * VM_BLOCK;
    const bool linear = b->m->arch.family == VM_KL;
    vm_node n = conv_node(b, &(conv){"to_qkv", x, VM_NONE, c, 3 * padded, 1});
    norm_on_load(b, &n, words_of(b)->attention_norm, VM_ACT_NONE, false);
    if (is_wan(b)) {
        n.weight = add_tensor(b, "to_qkv", "weight", 4, (vm_weight){3 * c, c, 1, .parts = 3});
        n.bias = add_tensor(b, "to_qkv", "bias", 1, (vm_weight){3 * c, 1, 1, .vector = true, .parts = 3});
    } else {
        for (int i = 0; i < 3; i++) {
            int t = add_tensor(b, projections[i], "weight", linear ? 2 : 4, (vm_weight){c, c, 1});
            if (i == 0) n.weight = t;
        }
        for (int i = 0; i < 3; i++) {
            int t = add_vector(b, projections[i], "bias", c, 1);
            if (i == 0) n.bias = t;
        }
    }
    vm_node attend = conv_node(b, &(conv){"attention", add_node(b, &n), VM_NONE, 3 * padded, c});
    attend.pass.kind = VM_PASS_ATTENTION;
    attend.pass.scale_channels = c;
    const int attended = add_node(b, &attend);
    return add_conv(b, &(conv){words_of(b)->projection, attended, x, c, c, 1, .linear = linear, .flat = true});
}

static int mid(builder *b, const char *half, int x, size_t c) {
    enter(b, "%s.mid_block.resnets.0.", half);
    x = resnet(b, x, c, c);
    if (b->m->arch.mid_block_add_attention) {
        enter(b, "%s.mid_block.attentions.0.", half);
        x = attention(b, x, c);
    }
    enter(b, "%s.mid_block.resnets.1.", half);
    return resnet(b, x, c, c);
}

/* Halves the number of frames, or doubles it. */
static int add_time_conv(builder *b, int x, size_t c) {
    return add_conv(b, &(conv){"time_conv", x, VM_NONE, c, c, 1, .over_time = true});
}

/* A level: resnets from c channels to `out`, and a resampler to `next` channels unless that is 0. */
static int add_level(builder *b, int x, size_t i, size_t layers, size_t c, size_t out, size_t next) {
    const vm_arch *a = &b->m->arch;
    const int begun = x;
    const size_t from = c, later = b->op == VM_ENCODE ? i : a->levels - 2 - i;
    const uint32_t frames = next && a->temporal[later] ? 2 : 1;
    for (size_t j = 0; j < layers; j++, c = out) {
        enter_layer(b, i, j, layers);
        x = resnet(b, x, c, out);
    }
    if (next) {
        const bool over_time = b->video && vm_arch_is_temporal(a, later), encodes = b->op == VM_ENCODE;
        const size_t made = encodes ? next : out;
        enter_layer(b, i, layers, layers);
        if (over_time && !encodes) x = add_time_conv(b, x, made);
        x = resample(b, x, out, next);
        if (over_time && encodes) x = add_time_conv(b, x, made);
    }
    if (!a->residual || (b->op == VM_DECODE && !next)) return x;
    enter(b, "%s_blocks.%zu.", b->op == VM_ENCODE ? "encoder.down" : "decoder.up", i);
    return add_move(b, "avg_shortcut", begun, x, from, next ? next : out, b->level,
                    (vm_move){VM_CHANNEL_ROW_COLUMN, .frames = frames});
}

static void encode(builder *b) {
    const vm_arch *a = &b->m->arch;
    const size_t *width = vm_arch_widths(a, VM_ENCODE), moments = 2 * a->latent_channels, last = width[a->levels - 1];
    size_t c = a->in_channels;
    int x = VM_NONE, residual = VM_NONE;
    enter(b, "encoder.");
    if (a->image_patch) x = add_move(b, "patches", x, VM_NONE, c, c * 4, 1, patches), c *= 4;
    x = add_conv(b, &(conv){"conv_in", x, VM_NONE, c, width[0], 3});
    c = width[0];
    for (size_t i = 0; i < a->levels; i++) {
        const size_t next = i + 1 == a->levels ? 0 : width[i + is_hunyuan(b)];
        x = add_level(b, x, i, a->layers_per_block, c, width[i], next);
        c = next;
    }
    x = mid(b, "encoder", x, last);
    enter(b, "encoder.");
    if (is_hunyuan(b)) residual = add_move(b, "mean", x, VM_NONE, last, moments, b->level, plain);
    x = add_conv(b, &(conv){"conv_out", x, residual, last, moments, 3, .norm = words_of(b)->norm_out});
    if (is_hunyuan(b)) x = add_move(b, "moments", x, VM_NONE, moments, moments, b->level, plain);
    enter(b, "%s", "");
    if (a->use_quant_conv) x = add_conv(b, &(conv){"quant_conv", x, VM_NONE, moments, moments, 1});
    if (!b->status) b->g->node[x].pass.clamp = (vm_clamp){(uint32_t)a->latent_channels, -30, 20}; /* log-variance */
}

static void decode(builder *b) {
    const vm_arch *a = &b->m->arch;
    const size_t *width = vm_arch_widths(a, VM_DECODE), latent = a->latent_channels;
    b->level = (int)a->levels - (a->image_patch ? 0 : 1);
    b->time = b->video ? (int)vm_arch_halvings(a) : 0;
    size_t c = width[a->levels - 1];
    int x = VM_NONE;
    enter(b, "%s", "");
    if (a->use_post_quant_conv) x = add_conv(b, &(conv){"post_quant_conv", x, VM_NONE, latent, latent, 1});
    enter(b, "decoder.");
    const int residual = is_hunyuan(b) ? add_move(b, "repeated", x, VM_NONE, latent, c, b->level, plain) : VM_NONE;
    x = add_conv(b, &(conv){"conv_in", x, residual, latent, c, 3});
    x = mid(b, "decoder", x, c);
    for (size_t i = 0; i < a->levels; i++) {
        const size_t out = width[a->levels - 1 - i], halves = is_wan(b) && !a->residual ? 2 : 1;
        const size_t next = i + 1 == a->levels ? 0 : is_hunyuan(b) ? width[a->levels - 2 - i] : out / halves;
        x = add_level(b, x, i, a->layers_per_block + 1, c, out, next);
        c = next ? next : out;
    }
    enter(b, "decoder.");
    const size_t patch = a->image_patch ? 4 : 1, out = a->out_channels;
    x = add_conv(b, &(conv){"conv_out", x, VM_NONE, c, out * patch, 3, .norm = words_of(b)->norm_out});
    if (patch > 1) x = add_move(b, "patches", x, VM_NONE, out * patch, out, 0, patches);
    if (is_wan(b) && !b->status) b->g->node[x].pass.clamp = (vm_clamp){0, -1, 1};
}

/* ---- VM_TINY: modules are numbered through a half, including activations and upsamplers ---- */

static int tiny_block(builder *b, vm_op op, size_t number, int x) {
    const vm_arch *a = &b->m->arch;
    const size_t c = vm_arch_widths(a, op)[0];
    enter(b, "%s.layers.%zu.", op == VM_ENCODE ? "encoder" : "decoder", number);
    if (a->norm_num_groups && b->level + 1 == (int)a->levels) {
        const int wide = add_conv(b, &(conv){"pool.0", x, VM_NONE, c, 4 * c, 1, .bare = true});
        x = add_conv(b, &(conv){"pool.3", wide, x, 4 * c, c, 1, .norm = "pool.1", .bare = true});
    }
    int h = add_conv(b, &(conv){"conv.0", x, VM_NONE, c, c, 3, .relu = true});
    h = add_conv(b, &(conv){"conv.2", h, VM_NONE, c, c, 3, .relu = true});
    return add_conv(b, &(conv){"conv.4", h, x, c, c, 3, .relu = true});
}

/* A convolution between blocks, named by its number. */
static int tiny_conv(builder *b, vm_op op, size_t number, conv c) {
    char module[24];
    snprintf(module, sizeof module, "%zu", number);
    c.module = module;
    enter(b, "%s.layers.", op == VM_ENCODE ? "encoder" : "decoder");
    return add_conv(b, &c);
}

static void tiny(builder *b, vm_op op) {
    const vm_arch *a = &b->m->arch;
    const bool encode = op == VM_ENCODE;
    const size_t c = vm_arch_widths(a, op)[0], latent = a->latent_channels, in = encode ? a->in_channels : latent;
    size_t number = 0;
    b->level = encode ? 0 : (int)a->levels - 1;
    int x = tiny_conv(b, op, number, (conv){NULL, VM_NONE, VM_NONE, in, c, 3, .relu = !encode});
    number += encode ? 1 : 2;
    for (size_t i = 0; i < a->levels; i++) {
        if (encode && i)
            x = tiny_conv(b, op, number++, (conv){NULL, x, VM_NONE, c, c, 3, 2, .centred = true, .bare = true});
        for (size_t j = 0; j < (b->level ? a->layers_per_block : 1); j++) x = tiny_block(b, op, number++, x);
        if (encode || i + 1 == a->levels) continue;
        x = tiny_conv(b, op, number + 1, (conv){NULL, x, VM_NONE, c, c, 3, .up = true, .bare = true});
        number += 2;
    }
    x = tiny_conv(b, op, number, (conv){NULL, x, VM_NONE, c, encode ? latent : a->out_channels, 3});
    if (b->status) return;
    vm_pass *first = &b->g->node[0].pass, *last = &b->g->node[x].pass;
    if (encode) /* images are within [0, 1] there */
        first->affine = true, first->in_scale = first->in_shift = 0.5f;
    else
        first->act = VM_ACT_BOUND, last->out_scale = 2, last->out_shift = -1;
}

/* ---- VM_LTX ---- */

static int ltx_block(builder *b, const char *block, int x, size_t layers, size_t c) {
    for (size_t i = 0; i < layers; i++) {
        enter(b, "%s.resnets.%zu.", block, i);
        const int h = add_conv(b, &(conv){"conv1.conv", x, VM_NONE, c, c, 3, .norm = "norm1"});
        x = add_conv(b, &(conv){"conv2.conv", h, x, c, c, 3, .norm = "norm2"});
    }
    return x;
}

/* A resampler that `what` says, from c channels to `out`. added: its input is added, in channels that are averaged, or
 * taken in turn. */
static int ltx_resampler(builder *b, const char *block, int x, unsigned what, size_t c, size_t out, bool added) {
    const bool encode = b->op == VM_ENCODE;
    const int by = encode ? 1 : -1, level = b->level + (what & VM_SPACE ? by : 0);
    const vm_move move = {VM_CHANNEL_ROW_COLUMN, .frames = what & VM_TIME ? 2 : 1};
    const size_t parts = move.frames * (what & VM_SPACE ? 4 : 1);
    enter(b, "%s.%ssamplers.0.", block, encode ? "down" : "up");
    const size_t made = encode ? out / parts : out * parts;
    int y = add_conv(b, &(conv){"conv.conv", x, VM_NONE, c, made, 3});
    if (what & VM_TIME) b->time += by;
    y = add_move(b, "shuffle", y, VM_NONE, made, out, level, move);
    if (!added) return y;
    vm_move own = move;
    own.in_turn = !encode;
    return add_move(b, "shortcut", x, y, c, out, level, own);
}

static void ltx_encode(builder *b) {
    const vm_arch *a = &b->m->arch;
    const struct vm_half *half = &a->half[VM_ENCODE];
    const size_t levels = vm_arch_levels(a, VM_ENCODE), latent = a->latent_channels, *width = a->block_out_channels;
    size_t c = latent;
    enter(b, "encoder.");
    int x = add_move(b, "patches", VM_NONE, VM_NONE, a->in_channels, a->in_channels * 16, 2, patches);
    x = add_conv(b, &(conv){"conv_in.conv", x, VM_NONE, a->in_channels * 16, c, 3});
    for (size_t i = 0; i < levels; c = width[i++]) {
        char block[48];
        snprintf(block, sizeof block, "encoder.down_blocks.%zu", i);
        x = ltx_block(b, block, x, half->layers[i], c);
        if (half->resamplers[i]) x = ltx_resampler(b, block, x, half->resamplers[i], c, width[i], true);
    }
    x = ltx_block(b, "encoder.mid_block", x, half->layers[levels], c);
    enter(b, "encoder.");
    x = add_conv(b, &(conv){"conv_out.conv", x, VM_NONE, c, latent + 1, 3, .norm = "norm_out"});
    x = add_move(b, "moments", x, VM_NONE, latent + 1, 2 * latent, b->level, plain); /* one variance for all */
    if (!b->status) b->g->node[x].pass.clamp = (vm_clamp){(uint32_t)latent, -30, 20};
}

static void ltx_decode(builder *b) {
    const vm_arch *a = &b->m->arch;
    const struct vm_half *half = &a->half[VM_DECODE];
    const size_t levels = vm_arch_levels(a, VM_DECODE), *width = vm_arch_widths(a, VM_DECODE), out = a->out_channels;
    size_t c = width[levels - 1];
    b->time = (int)vm_arch_halvings(a);
    for (size_t factor = vm_arch_factor(a); factor > 1; factor /= 2) b->level++;
    enter(b, "decoder.");
    int x = add_conv(b, &(conv){"conv_in.conv", VM_NONE, VM_NONE, a->latent_channels, c, 3});
    x = ltx_block(b, "decoder.mid_block", x, half->layers[levels], c);
    for (size_t i = 0; i < levels; i++) {
        const size_t at = levels - 1 - i, next = width[at] / half->factor[at];
        char block[48];
        snprintf(block, sizeof block, "decoder.up_blocks.%zu", i);
        if (half->resamplers[i]) x = ltx_resampler(b, block, x, half->resamplers[i], c, next, half->added[at]);
        x = ltx_block(b, block, x, half->layers[at], next);
        c = next;
    }
    enter(b, "decoder.");
    x = add_conv(b, &(conv){"conv_out.conv", x, VM_NONE, c, out * 16, 3, .norm = "norm_out"});
    add_move(b, "patches", x, VM_NONE, out * 16, out, 0, patches);
}

vm_status vm_passes_build(vm_model *model, vm_op op, bool video) {
    builder b = {.m = model, .g = video ? &model->video[op] : &model->graph[op], .op = op, .video = video};
    if (model->arch.family == VM_TINY)
        tiny(&b, op);
    else if (model->arch.family == VM_LTX)
        (op == VM_ENCODE ? ltx_encode : ltx_decode)(&b);
    else
        (op == VM_ENCODE ? encode : decode)(&b);
    return b.status;
}

bool vm_passes_are_of_videos(const vm_model *m) {
    return m->arch.family == VM_LTX || (m->arch.videos && !m->backend->device->addressable);
}

const vm_graph *vm_passes_of(const vm_model *m, vm_op op, size_t frames) {
    return frames > 1 || vm_passes_are_of_videos(m) ? &m->video[op] : &m->graph[op];
}

double vm_pass_flops(const vm_pass *p) {
    const double x = (double)p->x.h * (double)p->x.w, y = (double)p->y.h * (double)p->y.w, frames = (double)p->y.f;
    if (p->kind == VM_PASS_ATTENTION) return 4 * x * x * (double)p->scale_channels * frames;
    if (p->kind == VM_PASS_MOVE) return VM_MAX(x * (double)p->x.c, y * (double)p->y.c) * frames;
    return 2 * (double)p->x.c * (double)p->y.c * y * frames * (double)p->slices * (p->up ? 4 : p->ksize * p->ksize);
}
