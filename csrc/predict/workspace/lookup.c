/* Workspaces from recorded data (lookup.h). */
#include <stdio.h>
#include <string.h>

#include "lookup.h"

/* VM_EOVERFLOW from 2^63 on: overflowed sums and products, and negative numbers. */
static vm_status check_fits(uint64_t value, uint64_t *out) {
    if (value >> 63) return vm_fail(VM_EOVERFLOW, "conv: expected sizes from 0 to 2^63 bytes, got others");
    *out = value;
    return VM_OK;
}

static int first_dim(const vm_conv *c) { return VM_CONV_DIMS - c->dims; }

/* The kind that profiles hold: square, one group, no dilation, not transposed; two dimensions, or as many frames as the
 * filter has, which make one. */
static bool is_square(const vm_conv *c) {
    bool square = c->groups == 1 && !c->transposed && c->dilation[1] == 1 && c->dilation[2] == 1;
    square = square && c->filter[1] == c->filter[2] && c->stride[1] == c->stride[2] && c->padding[1] == c->padding[2];
    const bool frame = c->size[0] == c->filter[0] && c->stride[0] == 1 && !c->padding[0] && c->dilation[0] == 1;
    return square && (c->dims == 2 || frame);
}

/* The kind that rules hold. */
static bool is_plain(const vm_conv *c) { return c->dims == 2 && is_square(c); }

static int64_t out_along(const vm_conv *c, int d) {
    const int64_t reach = c->dilation[d] * (c->filter[d] - 1) + 1;
    if (c->transposed) return (c->size[d] - 1) * c->stride[d] - 2 * c->padding[d] + reach + c->output_padding[d];
    return (c->size[d] + 2 * c->padding[d] - reach) / c->stride[d] + 1;
}

typedef struct elements {
    uint64_t in, out, filter, in_pixels, out_pixels, taps;
} elements;

/* VM_EOVERFLOW if a count does not fit. */
static vm_status count(const vm_conv *c, elements *e) {
    *e = (elements){.out_pixels = 1, .in_pixels = 1, .taps = 1};
    for (int d = first_dim(c); d < VM_CONV_DIMS; d++) {
        e->out_pixels = VM_PRODUCT64(e->out_pixels, (uint64_t)out_along(c, d));
        e->in_pixels = VM_PRODUCT64(e->in_pixels, (uint64_t)c->size[d]);
        e->taps = VM_PRODUCT64(e->taps, (uint64_t)c->filter[d]);
    }
    e->in = VM_PRODUCT64((uint64_t)c->n, (uint64_t)c->c, e->in_pixels);
    e->out = VM_PRODUCT64((uint64_t)c->n, (uint64_t)c->k, e->out_pixels);
    e->filter = VM_PRODUCT64((uint64_t)c->c, (uint64_t)c->k / (uint64_t)c->groups, e->taps);
    const uint64_t most = VM_MAX(VM_MAX(e->in, e->out), e->filter);
    return most == UINT64_MAX ? vm_fail(VM_EOVERFLOW, "conv: expected sizes below 2^63 bytes, got more") : VM_OK;
}

static uint64_t part_of(const vm_conv *c, const elements *e) {
    const uint64_t image = VM_MAX(e->in, e->out) / (uint64_t)c->n, most = (uint64_t)1 << 31;
    return image < most ? VM_MIN((uint64_t)c->n, most / image) : 0;
}

vm_status vm_conv_part(const vm_conv *c, uint64_t *part) {
    elements e;
    const vm_status s = count(c, &e);
    if (!s) *part = part_of(c, &e);
    return s;
}

vm_status vm_conv_sizes(const vm_conv *c, uint64_t size[VM_SIZES]) {
    elements e;
    vm_status s = count(c, &e);
    if (s) return s;
    const uint64_t element = vm_dtype_bytes(c->dtype), n = (uint64_t)c->n, in = (uint64_t)c->c, out = (uint64_t)c->k;
    const uint64_t part = part_of(c, &e), pixels = VM_PRODUCT64(n, e.out_pixels);
    const uint64_t in_pixels = VM_PRODUCT64(part, e.in_pixels), out_pixels = VM_PRODUCT64(part, e.out_pixels);
    const uint64_t wide_in = vm_round_up64(VM_PRODUCT64(in, element), 16);
    const uint64_t wide_out = vm_round_up64(VM_PRODUCT64(out, element), 16);
    const uint64_t value[VM_SIZES] = {[VM_SIZE_i] = vm_round_up64(VM_PRODUCT64(in_pixels, in, element), 16),
                                      [VM_SIZE_o] = vm_round_up64(VM_PRODUCT64(out_pixels, out, element), 16),
                                      [VM_SIZE_f] = vm_round_up64(VM_PRODUCT64(e.filter, element), 16),
                                      [VM_SIZE_I] = VM_PRODUCT64(in_pixels, wide_in),
                                      [VM_SIZE_O] = VM_PRODUCT64(out_pixels, wide_out),
                                      [VM_SIZE_F] = VM_PRODUCT64(wide_out / element, wide_in, e.taps),
                                      [VM_SIZE_P] = pixels,
                                      [VM_SIZE_Q] = e.out_pixels,
                                      [VM_SIZE_h] = (uint64_t)c->size[1],
                                      [VM_SIZE_w] = (uint64_t)c->size[2],
                                      [VM_SIZE_n] = n,
                                      [VM_SIZE_m] = vm_round_up64(pixels, 128) - pixels,
                                      [VM_SIZE_p] = out_pixels};
    for (int i = 0; !s && i < VM_SIZES; i++) s = check_fits(value[i], &size[i]);
    return s;
}

vm_status vm_formula_bytes(const vm_formula *f, const uint64_t size[VM_SIZES], uint64_t *bytes) {
    const uint64_t index = (uint64_t)f->index, tile = (uint64_t)f->tile, p = size[VM_SIZE_p];
    uint64_t total = 0, sum;
    for (int i = 0; i < VM_TENSORS; i++) total = vm_sum64(total, VM_PRODUCT64(f->times[i], size[i]));
    if (f->index > 0) total = vm_sum64(total, VM_PRODUCT64(128, VM_PRODUCT64(index, size[VM_SIZE_Q]) / 128 + 1));
    if (f->tile > 0) total = vm_sum64(total, VM_PRODUCT64((uint64_t)f->per_tile, p / tile + (p % tile > 0)));
    const bool fits = total < UINT64_MAX && !__builtin_add_overflow(total, f->constant, &sum);
    return check_fits(fits ? sum : UINT64_MAX, bytes);
}

vm_status vm_conv_columns(const vm_conv *c, uint64_t *bytes) {
    elements e;
    const vm_status s = count(c, &e);
    if (s) return s;
    bool same = e.taps == 1;
    for (int d = first_dim(c); d < VM_CONV_DIMS; d++) same = same && out_along(c, d) == c->size[d];
    const uint64_t channels = (uint64_t)(c->transposed ? c->k : c->c);
    const uint64_t pixels = same ? 0 : c->transposed ? e.in_pixels : e.out_pixels;
    return check_fits(VM_PRODUCT64(channels, e.taps, pixels, vm_dtype_bytes(c->dtype)), bytes);
}

/* ---- profiles ---- */

/* If size[feature] <= limit, the walk continues with the next node, otherwise with `beyond`. A leaf has a formula. */
typedef struct node {
    uint64_t limit;
    int32_t feature; /* or LEAF */
    int32_t beyond;  /* or the leaf's formula */
} node;

enum { LEAF = -1, NONE = -1 };

typedef struct tree_key {
    uint64_t shape[6]; /* channels of input and output, filter, stride, padding, frames of input and filter or 0 */
    vm_dtype dtype;
    bool strict, nhwc;
} tree_key;

typedef struct tree {
    tree_key key;
    size_t root;
} tree;

enum { NO_FORMULA = -1 }; /* an index */

struct vm_profile {
    bool strict;
    const vm_profile *otherwise;
    vm_rule *rule;
    vm_formula *formula;
    node *node;
    tree *tree; /* sorted by key */
    size_t rules, formulas, nodes, trees;
};

vm_status vm_profile_new(bool strict, const vm_profile *otherwise, vm_profile **out) {
    vm_status s = vm_scratch_new(1, sizeof **out, out);
    if (s) return s;
    (*out)->strict = strict;
    (*out)->otherwise = otherwise;
    return VM_OK;
}

void vm_profile_free(vm_profile *p) {
    if (!p) return;
    vm_scratch_free(p->rule);
    vm_scratch_free(p->formula);
    vm_scratch_free(p->node);
    vm_scratch_free(p->tree);
    vm_scratch_free(p);
}

/* cuDNN's strict float32 computes 3x3 convolutions with stride 1 by Winograd's way. Returns: bytes of their transformed
 * filter; 0 for others. */
static uint64_t winograd_filter(const vm_conv *c) {
    const bool is = is_plain(c) && c->filter[1] == 3 && c->stride[1] == 1;
    return is ? VM_PRODUCT64((uint64_t)c->k, vm_sum64(VM_PRODUCT64(100, (uint64_t)c->c), 4)) : 0;
}

static vm_status rule_bytes(const vm_rule *rule, const vm_conv *c, const uint64_t size[VM_SIZES], uint64_t *bytes) {
    const vm_status s = vm_formula_bytes(&rule->formula, size, bytes);
    return s || !rule->winograd ? s : check_fits(vm_sum64(*bytes, winograd_filter(c)), bytes);
}

/* Returns: whether a rule covers a convolution. strict: its float32 may not use TF32; no rule covers that. */
static bool applies(const vm_rule *rule, const vm_conv *c, bool strict) {
    if (c->nhwc || (strict && c->dtype == VM_F32) || !is_plain(c) || !(rule->dtypes >> c->dtype & 1)) return false;
    if (rule->r && (c->filter[1] != rule->r || c->stride[1] != rule->stride)) return false;
    bool known = !rule->pairs;
    for (size_t i = 0; i < rule->pairs; i++)
        known = known || (rule->channels[i][0] == c->c && rule->channels[i][1] == c->k);
    int64_t pixels;
    const bool over = __builtin_mul_overflow(c->size[1], c->size[2], &pixels);
    return known && !over && pixels >= rule->least && pixels <= rule->most;
}

vm_status vm_profile_add_rule(vm_profile *p, const vm_rule *rule) {
    vm_status s = vm_scratch_grow(&p->rule, p->rules, sizeof *p->rule);
    if (!s) p->rule[p->rules++] = *rule;
    return s;
}

vm_status vm_profile_add_formula(vm_profile *p, const vm_formula *formula) {
    vm_status s = vm_scratch_grow(&p->formula, p->formulas, sizeof *p->formula);
    if (!s) p->formula[p->formulas++] = formula ? *formula : (vm_formula){.index = NO_FORMULA};
    return s;
}

/* Reads digits of a number below 2^62. */
static bool read_number(const char **at, uint64_t *out) {
    const char *const start = *at;
    for (*out = 0; **at >= '0' && **at <= '9' && !(*out >> 58); ++*at) *out = 10 * *out + (uint64_t)(**at - '0');
    return *at > start;
}

static bool read_key(const char *text, tree_key *key) {
    static const char *const suffixes[] = {"", " nhwc", " strict", " strict nhwc"};
    int numbers = 0;
    *key = (tree_key){0};
    while (numbers < 6 && read_number(&text, &key->shape[numbers])) {
        numbers++;
        if (*text++ != ',') break;
    }
    if (numbers < 5 || text[-1] != '/') return false;
    for (; key->dtype <= VM_BF16; key->dtype++) {
        const char *const name = vm_dtype_name(key->dtype);
        for (int i = 0; i < 4; i++) {
            key->strict = i & 2;
            key->nhwc = i & 1;
            if (!strncmp(text, name, strlen(name)) && !strcmp(text + strlen(name), suffixes[i])) return true;
        }
    }
    return false;
}

/* Appends a tree's nodes. Until its far branch begins, a node's `beyond` links to the node that waited before it. */
static vm_status read_tree(vm_profile *p, const char *at) {
    for (int32_t waiting = NONE;;) {
        const char *const feature = *at ? strchr(VM_SIZE_NAMES, *at) : NULL;
        if (feature) at++;
        node new = {.feature = feature ? (int32_t)(feature - VM_SIZE_NAMES) : LEAF};
        const bool ends = !feature && waiting == NONE;
        if (!read_number(&at, &new.limit) || (!feature && new.limit >= p->formulas) || *at != (ends ? 0 : ' ') ||
            p->nodes >= INT32_MAX)
            return vm_fail(VM_EINVAL,
                           VM_EXPECTED("profile", "a tree of its formulas such as 'P400 h15 0 1 2'", "other text"));
        new.beyond = feature ? waiting : (int32_t)new.limit;
        vm_status s = vm_scratch_grow(&p->node, p->nodes, sizeof *p->node);
        if (s) return s;
        p->node[p->nodes++] = new;
        if (ends) return VM_OK;
        at++;
        if (feature) {
            waiting = (int32_t)p->nodes - 1;
        } else {
            node *const parent = &p->node[waiting];
            waiting = parent->beyond;
            parent->beyond = (int32_t)p->nodes;
        }
    }
}

static int order(const tree_key *a, const tree_key *b) {
    for (int i = 0; i < 6; i++)
        if (a->shape[i] != b->shape[i]) return a->shape[i] < b->shape[i] ? -1 : 1;
    return ((int)a->dtype - (int)b->dtype) * 4 + (a->strict - b->strict) * 2 + (a->nhwc - b->nhwc);
}

/* Returns: how many trees sort before key. */
static size_t before(const vm_profile *p, const tree_key *key) {
    size_t low = 0, high = p->trees;
    while (low < high) {
        const size_t middle = (low + high) / 2;
        if (order(&p->tree[middle].key, key) < 0)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

vm_status vm_profile_add_tree(vm_profile *p, const char *key_text, const char *tree_text) {
    tree_key key;
    const size_t root = p->nodes;
    if (!read_key(key_text, &key))
        return vm_fail(VM_EINVAL, VM_EXPECTED("profile", "keys such as '128,128,3,1,1/float16'", "'%.40s'"), key_text);
    vm_status s;
    if ((s = vm_scratch_grow(&p->tree, p->trees, sizeof *p->tree))) return s;
    if ((s = read_tree(p, tree_text))) {
        p->nodes = root;
        return s;
    }
    const size_t at = before(p, &key);
    memmove(&p->tree[at + 1], &p->tree[at], (p->trees - at) * sizeof *p->tree);
    p->tree[at] = (tree){key, root};
    p->trees++;
    return VM_OK;
}

/* Returns: the formula of a convolution's tree; NULL if there is no tree. */
static const vm_formula *formula_of(const vm_profile *p, const vm_conv *c, bool strict, const uint64_t *size) {
    const tree_key key = {.shape = {(uint64_t)c->c, (uint64_t)c->k, (uint64_t)c->filter[1], (uint64_t)c->stride[1],
                                    (uint64_t)c->padding[1], c->dims == 3 ? (uint64_t)c->filter[0] : 0},
                          .dtype = c->dtype,
                          .strict = strict && c->dtype == VM_F32,
                          .nhwc = c->nhwc};
    const size_t at = before(p, &key);
    if (at == p->trees || order(&p->tree[at].key, &key)) return NULL;
    const node *n = &p->node[p->tree[at].root];
    while (n->feature != LEAF) n = size[n->feature] <= n->limit ? n + 1 : &p->node[n->beyond];
    return &p->formula[n->beyond];
}

/* *ends: the profile has a tree, but nothing was recorded at this size. */
static vm_status answer_here(const vm_profile *p, const vm_conv *c, bool strict, bool *found, uint64_t *bytes,
                             int *rule, bool *ends) {
    uint64_t size[VM_SIZES];
    const vm_status s = vm_conv_sizes(c, size);
    for (size_t i = 0; !s && i < p->rules; i++)
        if (applies(&p->rule[i], c, strict))
            return *rule = (int)i, *found = true, rule_bytes(&p->rule[i], c, size, bytes);
    const vm_formula *const formula = s ? NULL : formula_of(p, c, strict, size);
    *ends = formula && formula->index == NO_FORMULA;
    *found = formula && !*ends;
    return s || !*found ? s : vm_formula_bytes(formula, size, bytes);
}

vm_status vm_profile_conv(const vm_profile *p, const vm_conv *c, bool tf32, bool *found, uint64_t *bytes,
                          vm_profile_how *how) {
    uint64_t part = 0;
    vm_status s = vm_conv_part(c, &part);
    *how = (vm_profile_how){0, part ? VM_HOW_TREE : VM_HOW_LARGE};
    *found = !s && !part;
    *bytes = 0;
    bool ends = !is_square(c);
    for (; !s && !*found && !ends && p; p = p->otherwise) {
        s = answer_here(p, c, p->strict && !tf32, found, bytes, &how->rule, &ends);
        how->steps += !*found;
    }
    return s;
}

/* ---- PyTorch's choice ---- */

static int64_t most_of(const vm_conv *c, const int64_t extents[VM_CONV_DIMS]) {
    int64_t most = 0;
    for (int d = first_dim(c); d < VM_CONV_DIMS; d++) most = VM_MAX(most, extents[d]);
    return most;
}

/* Returns: whether PyTorch expects cuDNN to be faster than its own depthwise kernel, in NCHW
 * (check_cudnn_depthwise_workload_with_filter in Convolution.cpp). */
static bool cudnn_is_faster(const vm_conv *c) {
    const int64_t stride = c->stride[2], side = c->filter[1];
    if (c->dtype != VM_F16 || c->dims == 3 || c->c < 32 || most_of(c, c->dilation) > 1) return false;
    if (c->stride[1] != stride && c->size[1] != 1) return false;
    if (c->size[1] == 1 && stride == 1) return true;
    if (side != c->filter[2] || (side != 1 && side != 3 && side != 5) || c->size[2] < 7 || stride > 2) return false;
    if (stride == 1) return true;
    if (c->n == 1) return side > 1 || c->size[2] <= 28;
    if (side == 1) return c->n <= 16 && c->c >= 128 && c->size[2] <= 7;
    return c->c >= 512 || (c->c >= 256 && c->size[2] >= 28);
}

static bool is_depthwise(const vm_conv *c) {
    return !c->transposed && c->c == c->groups && c->groups > 1 && c->k % c->c == 0;
}

/* Follows use_cudnn, needs_64bit_indexing_no_split and use_cudnn_depthwise in Convolution.cpp. */
static vm_own_conv why_own(const vm_lookup_torch *t, const vm_conv *c, const elements *e) {
    const bool large = VM_MAX(e->in, e->out) / (uint64_t)c->n >= (uint64_t)1 << 31;
    if (t->is_off) return is_depthwise(c) ? VM_OWN_DEPTHWISE : VM_OWN_OFF;
    if (c->dtype == VM_BF16 && t->sm < 80) return VM_OWN_BFLOAT16;
    if (c->dims == 3 && !c->nhwc && c->dtype != VM_F32 && most_of(c, c->filter) > 1 && t->release >= 209) {
        const bool avoided = t->cudnn >= 90800 && t->cudnn < 91500; /* pytorch/pytorch#166643 */
        if (avoided || t->is_290) return VM_OWN_CONV3D;
    }
    if (t->cudnn && t->cudnn < 90300 && large) return VM_OWN_LARGE;
    return is_depthwise(c) && !c->nhwc && !large && !cudnn_is_faster(c) ? VM_OWN_DEPTHWISE : VM_OWN_NONE;
}

/* Why PyTorch runs a convolution with its own code, and that code's memory besides the output. Depthwise ones need none
 * (DepthwiseConv2d.cu, DepthwiseConv3d.cu). The others unfold the input into columns, one item of the batch at a time;
 * a plain 1x1 in two dimensions needs none (ConvolutionMM2d.cu; NaiveDilatedConvolution.cu with dilation or depth;
 * NaiveConvolutionTranspose2d.cu and 3d). Groups run one after another: each copies its part of the input and of the
 * filter, and all outputs exist before they are joined (_convolution in Convolution.cpp). */
static vm_status own_bytes(const vm_lookup_torch *t, const vm_conv *c, vm_own_conv *why, uint64_t *bytes) {
    elements e;
    *why = VM_OWN_NONE;
    *bytes = 0;
    vm_status s = count(c, &e);
    if (!s) *why = why_own(t, c, &e);
    if (*why == VM_OWN_NONE || is_depthwise(c)) return s;
    const uint64_t element = vm_dtype_bytes(c->dtype), groups = (uint64_t)c->groups;
    const uint64_t channels = (uint64_t)(c->transposed ? c->k : c->c) / groups;
    uint64_t columns = VM_PRODUCT64(channels, e.taps, c->transposed ? e.in_pixels : e.out_pixels, element);
    if (is_plain(c) && c->filter[1] == 1 && c->stride[1] == 1 && !c->padding[1]) columns = 0;
    const uint64_t parts = vm_sum64(VM_PRODUCT64(vm_sum64(e.in / groups, e.filter / groups), element), columns);
    return check_fits(groups == 1 ? columns : VM_MAX(parts, VM_PRODUCT64(e.out, element)), bytes);
}

/* ---- guesses ---- */

/* The usual workspace of large convolutions: NCHW tensors are copied to NHWC for the tensor cores and back.
 *
 * Among the recorded 3x3 convolutions with 128 channels or more, at 256 to 1024 pixels a side, at least 70% are within
 * 1% in half precision, and half of them in float32, on every GPU and version (tests/test_workspace.py counts them). A
 * 1x1 filter is the same in both layouts and is not copied: in half precision more than half of those are within 1%
 * from compute capability 8.0 on. All this is NCHW with TF32 allowed; the other cases follow 3x3 convolutions of 128
 * channels in cuDNN 9.10.2. 1d, 3d, grouped, dilated, rectangular and transposed ones were recorded from cuDNN 9.10.2
 * and 9.28 for RTX 4090 and H100 (docs/PREDICTION.md): grouped and transposed ones copy the float32 output too. */
static vm_formula usual_rule(const vm_lookup_torch *t, bool tf32, const vm_conv *c, const char **why) {
    const bool single = c->dtype == VM_F32, strict = single && (!tf32 || t->sm < 80);
    const bool copies_all = t->sm == 90 || t->sm == 100;
    const vm_formula none = {0}, both = {.times = {1, 0, 1}}, all = {.times = {1, 1, 1}};
    if (c->nhwc && strict) return *why = "input + output + filter, strict float32 in channels_last", all;
    if (c->nhwc && single && !copies_all) return *why = "input + filter, TF32", both;
    if (c->nhwc) return *why = "nothing to transpose in channels_last", none;
    if (t->sm < 75 && t->guessed >= 91100) return *why = "none for Volta since cuDNN 9.11", none;
    const uint64_t filter = winograd_filter(c);
    if (strict && filter && t->sm < 90) {
        *why = "Winograd's transformed filter, strict float32";
        return (vm_formula){.constant = (int64_t)VM_MIN(filter, INT64_MAX)};
    }
    if (strict) return *why = "none in strict float32", none;
    if (single && !copies_all && c->groups == 1 && !c->transposed) return *why = "input + filter, TF32", both;
    if (is_plain(c) && c->filter[1] == 1) return *why = "input + output", (vm_formula){.times = {1, 1}};
    return *why = "input + output + filter", all;
}

static vm_status guess_bytes(const vm_lookup_torch *t, bool tf32, vm_guess guess, const vm_conv *c, const char **why,
                             uint64_t *bytes) {
    uint64_t size[VM_SIZES];
    vm_formula formula = {0};
    if (guess == VM_GUESS_COLUMNS) return *why = "im2col's columns", vm_conv_columns(c, bytes);
    if (guess == VM_GUESS_LEAST) return *why = "the least there can be", *bytes = 0, VM_OK;
    const vm_status s = vm_conv_sizes(c, size);
    if (s) return s;
    if (guess == VM_GUESS_MOST) {
        *why = "the most that large convolutions were seen to take";
        formula = (vm_formula){.times = {1, 3, 1}};
    } else if (!size[VM_SIZE_i]) {
        *why = "none for an image of 2^31 elements or more";
    } else {
        formula = usual_rule(t, tf32, c, why);
    }
    return vm_formula_bytes(&formula, size, bytes);
}

/* ---- lookups ---- */

typedef struct entry {
    bool has_rule;
    vm_rule rule;
    const vm_profile *profile;
} entry;

struct vm_lookup {
    vm_lookup_torch torch;
    bool tf32;
    vm_guess guess;
    entry *entry;
    vm_known *known;
    vm_source *source;
    uint32_t *bin; /* hash table of known convolutions: index + 1, or 0 */
    size_t entries, knowns, sources, bins;
};

vm_status vm_lookup_new(const vm_lookup_torch *torch, bool tf32, vm_guess guess, vm_lookup **out) {
    vm_status s = vm_scratch_new(1, sizeof **out, out);
    if (s) return s;
    (*out)->torch = *torch;
    (*out)->tf32 = tf32;
    (*out)->guess = guess;
    return VM_OK;
}

void vm_lookup_free(vm_lookup *l) {
    if (!l) return;
    vm_scratch_free(l->entry);
    vm_scratch_free(l->known);
    vm_scratch_free(l->source);
    vm_scratch_free(l->bin);
    vm_scratch_free(l);
}

vm_status vm_lookup_add(vm_lookup *l, const vm_rule *rule, const vm_profile *profile) {
    vm_status s = vm_scratch_grow(&l->entry, l->entries, sizeof *l->entry);
    if (s) return s;
    l->entry[l->entries++] = (entry){.has_rule = rule != NULL, .rule = rule ? *rule : (vm_rule){0}, .profile = profile};
    return VM_OK;
}

/* Writes the last dimensions as "3x3". */
static void write_extents(const vm_conv *c, const int64_t extents[VM_CONV_DIMS], char text[64]) {
    size_t used = 0;
    for (int d = first_dim(c); d < VM_CONV_DIMS; d++)
        used += (size_t)snprintf(text + used, 64 - used, "%s%lld", used ? "x" : "", (long long)extents[d]);
}

static vm_status check_conv(const vm_conv *c) {
    bool is = c->n > 0 && c->c > 0 && c->k > 0 && c->groups > 0 && (c->dims == 2 || c->dims == 3);
    is = is && (c->n | c->c | c->k) >> 31 == 0;
    for (int d = is ? first_dim(c) : VM_CONV_DIMS; d < VM_CONV_DIMS; d++)
        is = is && c->size[d] > 0 && c->filter[d] > 0 && c->stride[d] > 0 && c->dilation[d] > 0 && c->padding[d] >= 0 &&
             c->output_padding[d] >= 0 &&
             (c->size[d] | c->filter[d] | c->stride[d] | c->dilation[d] | c->padding[d] | c->output_padding[d]) >> 31 ==
                 0;
    if (!is) return vm_fail(VM_EINVAL, VM_EXPECTED("conv", "sizes below 2^31", "others"));
    if (c->c % c->groups || c->k % c->groups)
        return vm_fail(VM_EINVAL, VM_EXPECTED("conv", "channels that fall into %lld groups", "%lld and %lld"),
                       (long long)c->groups, (long long)c->c, (long long)c->k);
    for (int d = first_dim(c); d < VM_CONV_DIMS; d++)
        if (out_along(c, d) < 1) {
            char filter[64], size[64], padding[64];
            write_extents(c, c->filter, filter);
            write_extents(c, c->size, size);
            write_extents(c, c->padding, padding);
            return vm_fail(VM_EINVAL, VM_EXPECTED("conv", "a %s filter within the padded input", "%s and padding %s"),
                           filter, size, padding);
        }
    return VM_OK;
}

static vm_status answer(const vm_lookup *l, const vm_conv *c, vm_source *source, uint64_t *bytes) {
    *source = (vm_source){.entry = -1, .how = {0, VM_HOW_TREE}};
    vm_status s;
    if ((s = check_conv(c))) return s;
    if ((s = own_bytes(&l->torch, c, &source->own, bytes))) return s;
    bool found = source->own != VM_OWN_NONE;
    for (size_t i = 0; !s && !found && i < l->entries; i++) {
        const entry *e = &l->entry[i];
        if (e->has_rule && !applies(&e->rule, c, !l->tf32)) continue;
        uint64_t size[VM_SIZES];
        vm_profile_how how = {0, VM_HOW_TREE};
        found = !e->profile;
        if (e->profile)
            s = vm_profile_conv(e->profile, c, e->has_rule || l->tf32, &found, bytes, &how);
        else if (!(s = vm_conv_sizes(c, size)))
            s = rule_bytes(&e->rule, c, size, bytes);
        if (found) source->entry = (int)i, source->how = how;
    }
    if (s || found) return s;
    source->form = !is_plain(c) ? VM_FORM_OTHER : c->nhwc ? VM_FORM_NHWC : VM_FORM_NCHW;
    return guess_bytes(&l->torch, l->tf32, l->guess, c, &source->why, bytes);
}

static size_t hash(const vm_conv *c) {
    const int64_t part[] = {c->dtype,     c->tf32,      c->nhwc,      c->transposed, c->dims,    c->n,
                            c->c,         c->k,         c->groups,    c->size[0],    c->size[1], c->size[2],
                            c->filter[1], c->filter[2], c->stride[2], c->padding[2]};
    uint64_t h = 14695981039346656037u;
    for (size_t i = 0; i < sizeof part / sizeof *part; i++)
        h = (h ^ (uint64_t)part[i]) * 0x9e3779b97f4a7c15u, h ^= h >> 29;
    return (size_t)h;
}

static uint32_t *find(const vm_lookup *l, const vm_conv *conv) {
    size_t i = hash(conv) & (l->bins - 1);
    while (l->bin[i] && !vm_conv_same(&l->known[l->bin[i] - 1].conv, conv)) i = (i + 1) & (l->bins - 1);
    return &l->bin[i];
}

static vm_status remember(vm_lookup *l, const vm_known *known) {
    vm_status s;
    if ((s = vm_scratch_grow(&l->known, l->knowns, sizeof *l->known))) return s;
    if (2 * (l->knowns + 1) > l->bins) {
        const size_t bins = l->bins ? 2 * l->bins : 64;
        uint32_t *wider;
        if ((s = vm_scratch_new(bins, sizeof *wider, &wider))) return s;
        vm_scratch_free(l->bin);
        l->bin = wider;
        l->bins = bins;
        for (size_t i = 0; i < l->knowns; i++) *find(l, &l->known[i].conv) = (uint32_t)i + 1;
    }
    l->known[l->knowns++] = *known;
    *find(l, &known->conv) = (uint32_t)l->knowns;
    return VM_OK;
}

static bool same_source(const vm_source *a, const vm_source *b) {
    return a->own == b->own && a->entry == b->entry && a->how.steps == b->how.steps && a->how.rule == b->how.rule &&
           a->why == b->why && a->form == b->form;
}

/* Finds or adds a source: *number. */
static vm_status number_source(vm_lookup *l, const vm_source *source, uint32_t *number) {
    size_t i = 0;
    while (i < l->sources && !same_source(&l->source[i], source)) i++;
    *number = (uint32_t)i;
    if (i < l->sources) return VM_OK;
    vm_status s = vm_scratch_grow(&l->source, l->sources, sizeof *l->source);
    if (!s) l->source[l->sources++] = *source;
    return s;
}

vm_status vm_lookup_conv(vm_lookup *l, const vm_conv *conv, vm_known *out) {
    const uint32_t *const bin = l->bins ? find(l, conv) : NULL;
    if (bin && *bin) {
        *out = l->known[*bin - 1];
        return VM_OK;
    }
    vm_source source;
    *out = (vm_known){.conv = *conv};
    vm_status s;
    if ((s = answer(l, conv, &source, &out->bytes))) return s;
    if ((s = number_source(l, &source, &out->source))) return s;
    out->own = source.own != VM_OWN_NONE;
    out->next = out->own ? out->bytes : 0;
    return remember(l, out);
}

const vm_known *vm_lookup_known(const vm_lookup *l, size_t *count) {
    *count = l->knowns;
    return l->known;
}

const vm_source *vm_lookup_sources(const vm_lookup *l, size_t *count) {
    *count = l->sources;
    return l->source;
}
