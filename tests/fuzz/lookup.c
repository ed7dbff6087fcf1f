/* Any profile, rules and convolutions: a walk through a tree ends, sizes that do not fit are an error, and what is
 * remembered is what was told. Rows of a workspace differ from its own answers and from each other. */
#include <string.h>

#include "../../csrc/predict/workspace/plausible.h"
#include "input.h"

static vm_conv a_conv(input *in) {
    const uint64_t how = take(in, 1);
    vm_conv c = vm_conv_square(
        how % 3, (int64_t[]){(int64_t)number(in), (int64_t)number(in), (int64_t)number(in), (int64_t)number(in)},
        (int64_t)number(in), (int64_t)take(in, 1) % 8, (int64_t)take(in, 1) % 4, (int64_t)take(in, 1) % 4);
    c.nhwc = how & 4;
    c.tf32 = true;
    c.transposed = how & 8;
    if (how & 16) c.groups = (int64_t)number(in);
    if (how & 32) c.dims = 3, c.size[0] = (int64_t)number(in), c.filter[0] = c.stride[0] = 1;
    if (how & 64) c.dilation[1] = (int64_t)number(in);
    if (how & 128) c.output_padding[2] = (int64_t)number(in);
    return c;
}

static vm_formula a_formula(input *in) {
    vm_formula f = {.index = (int64_t)(number(in) >> 2), .tile = (int64_t)(number(in) >> 2)};
    for (int i = 0; i < VM_TENSORS; i++) f.times[i] = (uint32_t)take(in, 1) % 4;
    f.per_tile = (int64_t)(number(in) >> 2);
    f.constant = (int64_t)number(in);
    return f;
}

static vm_rule a_rule(input *in, const vm_conv *like) {
    return (vm_rule){.dtypes = (unsigned)take(in, 1) & 7,
                     .r = (int64_t)take(in, 1) % 4,
                     .stride = 1,
                     .least = 1,
                     .most = INT64_MAX,
                     .channels = {{like->c, like->k}},
                     .pairs = take(in, 1) & 1,
                     .formula = a_formula(in)};
}

/* Some nodes in prefix order; now and then one character of them is another. */
static void a_tree(input *in, char *text, size_t size) {
    size_t used = 0;
    for (uint64_t open = 1, nodes = take(in, 1) % 8; open; nodes -= nodes > 0) {
        const uint64_t kind = take(in, 1);
        const bool splits = nodes && kind % 4;
        if (splits) text[used++] = VM_SIZE_NAMES[kind / 4 % VM_SIZES];
        used +=
            (size_t)snprintf(text + used, size - used, "%llu ", (unsigned long long)(splits ? number(in) : kind % 6));
        open = splits ? open + 1 : open - 1;
    }
    text[used - 1] = 0;
    const uint64_t damage = take(in, 1);
    if (damage < 64) text[damage % used] = (char)take(in, 1);
}

static vm_profile *a_profile(input *in, const vm_profile *otherwise, const vm_conv *like) {
    vm_profile *p;
    CHECK(!vm_profile_new(take(in, 1) & 1, otherwise, &p));
    for (uint64_t n = take(in, 1) % 6; n; n--) {
        const vm_formula f = a_formula(in);
        CHECK(!vm_profile_add_formula(p, take(in, 1) & 1 ? &f : NULL));
    }
    for (uint64_t n = take(in, 1) % 4; n; n--) {
        char key[160], tree[256];
        snprintf(key, sizeof key, "%lld,%lld,%lld,%lld,%lld,%d/%s%s%s", (long long)like->c, (long long)like->k,
                 (long long)like->filter[1], (long long)like->stride[1], (long long)like->padding[1],
                 (int)take(in, 1) % 3, vm_dtype_name(like->dtype), take(in, 1) & 1 ? " strict" : "",
                 like->nhwc ? " nhwc" : "");
        a_tree(in, tree, sizeof tree);
        vm_profile_add_tree(p, key, tree);
        const vm_rule rule = a_rule(in, like);
        CHECK(!vm_profile_add_rule(p, &rule));
    }
    return p;
}

/* Two profiles, of which one may fail to load. */
typedef struct loaded {
    const vm_profile *profile[2];
    uint64_t how;
} loaded;

static vm_status load_one(void *context, size_t number, const vm_profile **profile, bool *inferred) {
    const loaded *const l = context;
    if (l->how % 16 == 7 && number == 1) return VM_EINVAL;
    *profile = l->profile[number % 2];
    *inferred = l->how >> number & 1;
    return VM_OK;
}

static vm_card a_card(input *in) {
    static const int sms[] = {70, 75, 86, 89};
    return (vm_card){{(char)('a' + take(in, 1) % 3)}, sms[take(in, 1) % 4], (int)take(in, 1)};
}

static vm_card_rule a_card_rule(input *in, const vm_conv *like) {
    return (vm_card_rule){.rule = a_rule(in, like),
                          .as = take(in, 1) & 1 ? 90000 + (int)take(in, 1) % 8 : 0,
                          .since = take(in, 1) & 1 ? 90000 + (int)take(in, 1) % 8 : 0,
                          .before = take(in, 1) & 1 ? 90000 + (int)take(in, 1) % 8 : 0,
                          .capability = {a_card(in).sm},
                          .capabilities = take(in, 1) & 1,
                          .standing = (vm_standing)(take(in, 1) % VM_STANDINGS)};
}

static void check_rows(input *in, loaded *l, const vm_conv *conv, size_t convs, const vm_workspace_for *of) {
    vm_catalogue *c;
    vm_workspace *w;
    CHECK(!vm_catalogue_new(load_one, l, &c));
    for (uint64_t n = take(in, 1) % 6; n; n--) {
        const vm_card card[2] = {a_card(in), a_card(in)};
        const vm_card_rule rule = a_card_rule(in, conv);
        CHECK(!vm_catalogue_add(c, card[0].sm, 90000 + (int)take(in, 1) % 8, card, take(in, 1) % 3));
        CHECK(!vm_catalogue_add_rule(c, &rule) && !vm_catalogue_add_sample(c, &card[1]));
    }
    const vm_card_rule own = a_card_rule(in, conv);
    const vm_status s = vm_workspace_new(c, of, &own, take(in, 1) & 1, &w);
    CHECK(!s || s == VM_EINVAL);
    for (int every = 0; !s && every < 2; every++) {
        uint64_t *row, mine[8];
        size_t count;
        vm_known known;
        if (vm_workspace_rows(w, every, conv, convs, &row, &count)) continue;
        for (size_t i = 0; i < convs; i++) {
            CHECK(!vm_lookup_conv(vm_workspace_lookup(w), &conv[i], &known));
            mine[i] = known.bytes;
        }
        for (size_t i = 0; i < count; i++) {
            CHECK(memcmp(row + i * convs, mine, convs * sizeof *mine));
            for (size_t k = 0; k < i; k++) CHECK(memcmp(row + i * convs, row + k * convs, convs * sizeof *row));
        }
        vm_scratch_free(row);
    }
    vm_workspace_free(w);
    vm_catalogue_free(c);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    input in = {data, data + size};
    const uint64_t how = take(&in, 1);
    const vm_conv like = a_conv(&in);
    vm_profile *const last = a_profile(&in, NULL, &like), *const first = a_profile(&in, last, &like);
    const vm_lookup_torch torch = {.sm = (int)take(&in, 1),
                                   .cudnn = (int)take(&in, 3),
                                   .guessed = 91002,
                                   .release = (int)take(&in, 1) * 2,
                                   .is_290 = how & 1};
    vm_lookup *l;
    CHECK(!vm_lookup_new(&torch, how & 2, (vm_guess)(how >> 3 & 3), &l));
    const vm_rule rule = a_rule(&in, &like);
    CHECK(!vm_lookup_add(l, &rule, how & 4 ? first : NULL) && !vm_lookup_add(l, NULL, first));
    for (int i = 0; i < 20 && (!i || in.at < in.end); i++) {
        const vm_conv c = i ? a_conv(&in) : like;
        vm_known once, twice;
        size_t count;
        const vm_status s = vm_lookup_conv(l, &c, &once);
        CHECK(!s || s == VM_EINVAL || s == VM_EOVERFLOW);
        if (s) continue;
        CHECK(vm_conv_same(&once.conv, &c) && !vm_lookup_conv(l, &c, &twice));
        CHECK(once.bytes == twice.bytes && once.source == twice.source);
        const vm_source *const source = &vm_lookup_sources(l, &count)[once.source];
        CHECK(once.source < count && source->entry < 2 && source->how.steps >= 0 && source->how.steps < 2);
        CHECK((source->own != VM_OWN_NONE) + (source->entry >= 0) + (source->why != NULL) == 1);
    }
    vm_conv some[8] = {like};
    size_t convs = 1;
    while (convs < 8 && in.at < in.end && take(&in, 1) & 1) some[convs++] = a_conv(&in);
    loaded files = {{first, last}, take(&in, 1)};
    const vm_workspace_for of = {.card = a_card(&in),
                                 .coarse = how & 32,
                                 .torch = torch,
                                 .shipped = 90000 + (int)take(&in, 1) % 8,
                                 .tf32 = how & 2,
                                 .guess = (vm_guess)(how >> 3 & 3)};
    check_rows(&in, &files, some, convs, &of);
    vm_lookup_free(l);
    vm_profile_free(first);
    vm_profile_free(last);
    return 0;
}
