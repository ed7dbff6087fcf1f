/* Any profile, rules and convolutions: a walk through a tree ends, sizes that do not fit are an error, and what is
 * remembered is what was told. */
#include "../../csrc/predict/lookup.h"
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

static vm_profile *a_profile(input *in, const vm_profile *otherwise, const vm_conv *like) {
    vm_profile *p;
    CHECK(!vm_profile_new(take(in, 1) & 1, otherwise, &p));
    for (uint64_t n = take(in, 1) % 6; n; n--) {
        const vm_formula f = a_formula(in);
        CHECK(!vm_profile_add_formula(p, take(in, 1) & 1 ? &f : NULL));
    }
    for (uint64_t n = take(in, 1) % 12; n; n--) {
        int32_t node;
        vm_profile_add_node(p, (int)take(in, 1) - 1, number(in), (int8_t)take(in, 1), (int8_t)take(in, 1), &node);
    }
    for (uint64_t n = take(in, 1) % 4; n; n--) {
        const vm_profile_key key = {like->c,          like->k,         like->filter[1], like->stride[1],
                                    like->padding[1], take(in, 1) % 3, take(in, 1) & 1, take(in, 1) & 1};
        vm_profile_add_tree(p, &key, (int8_t)take(in, 1));
        const vm_rule rule = a_rule(in, like);
        CHECK(!vm_profile_add_rule(p, &rule));
    }
    return p;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    input in = {data, data + size};
    const uint64_t how = take(&in, 1);
    const vm_conv like = a_conv(&in);
    vm_profile *const last = a_profile(&in, NULL, &like), *const first = a_profile(&in, last, &like);
    const vm_lookup_torch torch = {
        .sm = (int)take(&in, 1), .cudnn = (int)take(&in, 3), .release = (int)take(&in, 1) * 2, .is_290 = how & 1};
    vm_lookup *l;
    CHECK(!vm_lookup_new(&torch, how & 2, &l));
    const vm_rule rule = a_rule(&in, &like);
    CHECK(!vm_lookup_add(l, &rule, how & 4 ? first : NULL) && !vm_lookup_add(l, NULL, first));
    for (int i = 0; i < 20 && (!i || in.at < in.end); i++) {
        const vm_conv c = i ? a_conv(&in) : like;
        vm_lookup_answer a;
        const vm_status s = vm_lookup_conv(l, &c, &a);
        CHECK(!s || s == VM_EINVAL || s == VM_EOVERFLOW);
        CHECK(a.entry < 2 && a.how.steps >= 0 && a.how.steps < 2 && (a.entry < 0 || a.own == VM_OWN_NONE));
        const vm_known known = {c, a.bytes, (uint32_t)i, a.own != VM_OWN_NONE};
        CHECK(!vm_lookup_remember(l, &known));
        const vm_known *const kept = vm_lookup_known(l, &c);
        CHECK(kept && vm_conv_same(&kept->conv, &c) && kept->source <= (uint32_t)i);
    }
    vm_lookup_free(l);
    vm_profile_free(first);
    vm_profile_free(last);
    return 0;
}
