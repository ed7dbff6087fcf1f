/* Plans of many sizes and thread counts, none of which may be smaller than the tensors that it holds. Built for 32-bit
 * addresses by test_sizes.py, where sums of sizes wrap early if they are not checked. Exit status 1 on a bad plan. */
#include <stdio.h>

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

int main(void) {
    const vm_arch *arch = vm_arch_models()[1];
    const double element = sizeof(float), channels = (double)arch->block_out_channels[0];
    vm_model *m;
    size_t planned = 0, refused = 0, bad = 0;
    if (vm_model_new(arch, VM_DECODER, vm_backend_at(VM_F32, VM_HIGHEST, 0), &m)) return puts(vm_error()), 2;
    for (unsigned threads = 1; threads <= 1024; threads *= 4)
        for (size_t side = 64; side <= (size_t)1 << 20; side *= 2) {
            const vm_request r = {.op = VM_DECODE,
                                  .backend = m->backend,
                                  .limits = {threads, 0},
                                  .height = side,
                                  .width = side,
                                  .batch = 1,
                                  .in = VM_F32_NCHW,
                                  .out = VM_F32_NCHW,
                                  .own_output = true};
            vm_plan *p;
            const vm_status s = vm_plan_new(m, &r, &p);
            const bool ok = s ? s == VM_EOVERFLOW
                              : holds_its_pieces(p) &&
                                    (double)p->arena_bytes >= 2 * channels * element * (double)side * (double)side;
            if (!ok) printf("bad: %zu x %zu, %u threads: %s\n", side, side, threads, s ? vm_error() : "too small");
            bad += !ok;
            *(s ? &refused : &planned) += 1;
            if (!s) vm_plan_free(m, p);
        }
    vm_model_free(m);
    printf("%zu planned, %zu refused, %zu bad\n", planned, refused, bad);
    return bad || !planned || !refused;
}
