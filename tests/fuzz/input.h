/* What the fuzz targets in C share: an input as bytes from which numbers are taken, and checks that abort. */
#ifndef VM_FUZZ_INPUT_H
#define VM_FUZZ_INPUT_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../../csrc/vm.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define CHECK(condition)                                                                   \
    do {                                                                                   \
        if (!(condition)) {                                                                \
            fprintf(stderr, "%s:%d: does not hold: %s\n", __FILE__, __LINE__, #condition); \
            abort();                                                                       \
        }                                                                                  \
    } while (0)

typedef struct input {
    const uint8_t *at, *end;
} input;

/* The next n bytes as a number; zeros follow the end. */
static inline uint64_t take(input *in, int n) {
    uint64_t value = 0;
    for (int i = 0; i < n && in->at < in->end; i++) value |= (uint64_t)*in->at++ << (8 * i);
    return value;
}

/* A number of any size: small, near a power of two, or any. */
static inline uint64_t number(input *in) {
    const uint64_t kind = take(in, 1);
    if (kind < 96) return kind;
    if (kind < 128) return take(in, 2);
    if (kind < 224) return ((uint64_t)1 << kind % 64) + take(in, 1) - 128;
    return take(in, 8);
}

static inline vm_arch take_arch(input *in) {
    vm_arch a = {.name = "fuzz", .norm_eps = 1e-6f, .scaling_known = true, .scaling_factor = 1};
    const uint64_t flags = take(in, 1);
    a.in_channels = 1 + take(in, 1) % 4;
    a.out_channels = 1 + take(in, 1) % 4;
    a.latent_channels = 1 + take(in, 1);
    a.levels = 1 + take(in, 1) % VM_MAX_LEVELS;
    a.layers_per_block = 1 + take(in, 1) % 3;
    a.norm_num_groups = (size_t)1 << take(in, 1) % 6;
    for (size_t i = 0; i < a.levels; i++) {
        const uint64_t width = take(in, 1);
        a.block_out_channels[i] = a.norm_num_groups * (1 + width % 16) << (width >> 4) % 4;
    }
    const uint64_t kind = flags >> 3 & 3; /* 1: of frames; 2: with residuals that are moved */
    a.family = kind == 3 ? VM_HUNYUAN_IMAGE : kind ? VM_WAN : VM_KL;
    a.slices = kind == 1 || (kind == 2 && flags & 64);
    a.videos = a.slices && flags & 128;
    a.residual = kind == 2;
    a.image_patch = kind == 2 && flags & 32 ? 2 : 0;
    for (size_t i = 0; a.residual && i < a.levels; i++) a.temporal[i] = flags >> (6 + i % 2) & 1;
    if (a.family == VM_WAN) a.norm_num_groups = 0;
    a.use_quant_conv = flags & 1;
    a.use_post_quant_conv = flags & 2;
    a.mid_block_add_attention = flags & 4;
    return a;
}

#endif
