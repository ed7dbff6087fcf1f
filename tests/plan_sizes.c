/* Plans of many sizes and thread counts, none of which may be smaller than the tensors that it holds. Built for 32-bit
 * addresses by test_sizes.py, where sums of sizes wrap early if they are not checked. Exit status 1 on a bad plan. */
#include <stdio.h>
#include <stdlib.h>

#include "../csrc/vm.h"

static bool holds_its_pieces(const vm_plan *p) {
    const double arena = (double)p->arena_bytes;
    for (size_t i = 0; i < p->chains; i++) {
        double live = 0;
        for (size_t j = 0; j < p->pieces; j++) {
            const vm_piece *q = &p->piece[j];
            if (q->first <= (int)i && (int)i <= q->last)
                live += (double)(q->bytes - (q->first == (int)i ? q->shared : 0));
        }
        if (live > arena) return false;
    }
    return (double)p->reserved >= arena + (double)p->own_bytes;
}

static size_t planned, refused, bad;

/* Squares, and images of one latent's width, which have the most rows. */
static void plan_sizes(const vm_arch *arch) {
    const double element = sizeof(float), channels = (double)arch->block_out_channels[0];
    const size_t narrow = vm_arch_factor(arch);
    vm_model *m;
    if (vm_model_new(arch, VM_DECODER, vm_backend_at(VM_F32, VM_HIGHEST, 0), &m)) puts(vm_error()), exit(2);
    for (unsigned threads = 1; threads <= 1024; threads *= 4)
        for (size_t side = 64, width = side; side <= VM_MAX_SIDE; width = width > narrow ? narrow : (side *= 2)) {
            const vm_request r = {.op = VM_DECODE,
                                  .backend = m->backend,
                                  .limits = {threads, 0},
                                  .height = side,
                                  .width = width,
                                  .batch = 1,
                                  .in = VM_F32_NCHW,
                                  .out = VM_F32_NCHW,
                                  .own_output = true};
            vm_plan *p;
            const vm_status s = vm_plan_new(m, &r, &p);
            const bool ok = s ? s == VM_EOVERFLOW
                              : holds_its_pieces(p) &&
                                    (double)p->arena_bytes >= 2 * channels * element * (double)side * (double)width;
            if (!ok) printf("bad: %zu x %zu, %u threads: %s\n", side, width, threads, s ? vm_error() : "too small");
            bad += !ok;
            *(s ? &refused : &planned) += 1;
            if (!s) vm_plan_free(m, p);
        }
    vm_model_free(m);
}

int main(void) {
    vm_arch small = *vm_arch_models()[1];
    small.levels = 1, small.block_out_channels[0] = 16, small.norm_num_groups = 8;
    plan_sizes(vm_arch_models()[1]);
    plan_sizes(&small);
    printf("%zu planned, %zu refused, %zu bad\n", planned, refused, bad);
    return bad || !planned || !refused;
}
