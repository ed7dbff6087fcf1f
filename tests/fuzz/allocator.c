/* Any calls on the simulated allocator: after each, its blocks, its figures and what was handed out agree. */
#include "../../csrc/predict/allocator/allocator.h"
#include "input.h"

enum { HANDLES = 16 };

typedef struct handle {
    uint64_t address, bytes;
} handle;

static int64_t figure(const vm_talloc *a, vm_talloc_kind kind) {
    const vm_talloc_stat *s = vm_talloc_get_stats(a)->of[kind];
    CHECK(s[0].current == s[1].current + s[2].current && s[0].current >= 0 && s[0].peak >= s[0].current);
    return s[0].current;
}

static void check(const vm_talloc *a, const handle *held) {
    const size_t n = vm_talloc_blocks(a, NULL);
    vm_talloc_block *block = calloc(n + 1, sizeof *block);
    vm_talloc_blocks(a, block);
    int64_t reserved = 0, active = 0, allocated = 0, live = 0, requested = 0;
    for (size_t i = 0; i < n; i++) {
        const vm_talloc_block *b = &block[i];
        CHECK(b->size && b->size % 512 == 0 && b->address % 512 == 0);
        CHECK(!i || block[i - 1].address + block[i - 1].size <= b->address);
        reserved += (int64_t)b->size;
        if (b->state == VM_TALLOC_FREE_BLOCK) continue;
        CHECK(b->requested <= b->size);
        active += (int64_t)b->size;
        requested += (int64_t)b->requested;
        if (b->state == VM_TALLOC_LIVE) allocated += (int64_t)b->size, live++;
    }
    if (vm_talloc_settings(a)->driver_pool) /* it keeps no free blocks, and holds pages of 2 MiB */
        CHECK(reserved == active && figure(a, VM_TALLOC_RESERVED_BYTES) >= active &&
              figure(a, VM_TALLOC_RESERVED_BYTES) % (2 << 20) == 0);
    else
        CHECK(figure(a, VM_TALLOC_RESERVED_BYTES) == reserved);
    CHECK(figure(a, VM_TALLOC_ACTIVE_BYTES) == active);
    CHECK(figure(a, VM_TALLOC_ALLOCATED_BYTES) == allocated);
    CHECK(figure(a, VM_TALLOC_ALLOCATION) == live);
    CHECK(figure(a, VM_TALLOC_REQUESTED_BYTES) == requested);
    for (int i = 0; i < HANDLES; i++) {
        size_t found = 0;
        for (size_t j = 0; j < n; j++)
            found += block[j].address == held[i].address && block[j].requested == held[i].bytes &&
                     block[j].state == VM_TALLOC_LIVE;
        CHECK(!held[i].address || found == 1);
    }
    free(block);
}

static void restore(vm_talloc *a, input *in) {
    const uint64_t at = number(in) * 512;
    vm_talloc_block s = {.address = at, .size = number(in) * 512, .stream = take(in, 1) % 3, .small = take(in, 1) & 1};
    vm_talloc_block b[2] = {0};
    for (int i = 0; i < 2; i++) {
        b[i].address = at + number(in) * 512;
        b[i].size = number(in) * 512;
        b[i].requested = number(in);
        b[i].state = take(in, 1) % 3;
    }
    vm_talloc_restore(a, &s, b, take(in, 1) % 3);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    input in = {data, data + size};
    vm_talloc_config config = {0};
    const uint64_t flags = take(&in, 1);
    if (flags & 1) config.total_memory = number(&in) << 12;
    if (flags & 2) config.allowed_memory = number(&in) << 12, config.gc_threshold = (double)take(&in, 1) / 256;
    if (flags & 4) config.max_split_size = number(&in) << 20;
    if (flags & 8) config.max_non_split_rounding = number(&in);
    if (flags & 16) config.reservation = number(&in);
    config.expandable_segments = flags & 32;
    config.history = flags & 64;
    config.driver_pool = (flags & 112) == 112;
    for (int i = 0; i < VM_TALLOC_INTERVALS && flags & 128; i++) config.roundup_divisions[i] = 1u << take(&in, 1) % 32;
    vm_talloc *a;
    if (vm_talloc_new(&config, &a)) return 0;
    handle held[HANDLES] = {0};
    for (int step = 0; step < 200 && in.at < in.end; step++) {
        const uint64_t op = take(&in, 1);
        handle *h = &held[op / 16];
        switch (op % 16) {
        default:
            if (h->address) CHECK(!vm_talloc_free(a, h->address));
            h->bytes = number(&in) << (op % 16 < 3 ? 0 : 12);
            if (vm_talloc_malloc(a, h->bytes, op % 16 == 1, &h->address)) h->address = 0;
            break;
        case 8:
            if (h->address) CHECK(!vm_talloc_free(a, h->address));
            h->address = 0;
            break;
        case 9: /* another stream still uses it: it completes here, or when the cache is emptied */
            if (h->address) CHECK(!vm_talloc_free_request(a, h->address));
            if (h->address && take(&in, 1) & 1) CHECK(!vm_talloc_free(a, h->address));
            h->address = 0;
            break;
        case 10: vm_talloc_empty_cache(a); break;
        case 11: vm_talloc_place(a, number(&in) * 512); break;
        case 12:
            vm_talloc_release(a, h->address);
            vm_talloc_release(a, number(&in) * 512);
            break;
        case 13: restore(a, &in); break;
        case 14:
            vm_talloc_reset_peak(a);
            CHECK(!vm_talloc_has_whole_segment(a) || vm_talloc_blocks(a, NULL));
            break;
        case 15: CHECK(vm_talloc_free(a, 1 + number(&in) * 2)); /* odd: nothing lies there */
        }
        check(a, held);
    }
    vm_talloc_delete(a);
    return 0;
}
