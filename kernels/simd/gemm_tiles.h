/* Every tile height from 1 to VM_PIXELS, for one and (where the registers reach) two blocks, and
 * for both steps through x: a tail costs its own size and not a full tile. */
#define VM_TILE(P)                                                                                                     \
    VM_GEMM(P, VM_SUBS, 1, gemm_1_1_##P)                                                                               \
    VM_GEMM(P, VM_SUBS, VM_BLOCK, gemm_16_1_##P)                                                                       \
    VM_TILE2(P)
#if VM_VECTORS >= 2 * VM_BLOCK / VM_LANES
#define VM_TILE2(P)                                                                                                    \
    VM_GEMM(P, 2 * VM_SUBS, 1, gemm_1_2_##P)                                                                           \
    VM_GEMM(P, 2 * VM_SUBS, VM_BLOCK, gemm_16_2_##P)
#else
#define VM_TILE2(P)
#endif

VM_TILE(1)
VM_TILE(2)
VM_TILE(3)
VM_TILE(4)
VM_TILE(5)
VM_TILE(6)
#define VM_ROW6(S, B) gemm_##S##_##B##_1, gemm_##S##_##B##_2, gemm_##S##_##B##_3, gemm_##S##_##B##_4, gemm_##S##_##B##_5, gemm_##S##_##B##_6
#if VM_PIXELS == 14
VM_TILE(7)
VM_TILE(8)
VM_TILE(9)
VM_TILE(10)
VM_TILE(11)
VM_TILE(12)
VM_TILE(13)
VM_TILE(14)
#define VM_ROW(S, B) {VM_ROW6(S, B), gemm_##S##_##B##_7, gemm_##S##_##B##_8, gemm_##S##_##B##_9, gemm_##S##_##B##_10, gemm_##S##_##B##_11, gemm_##S##_##B##_12, gemm_##S##_##B##_13, gemm_##S##_##B##_14}
#else
#define VM_ROW(S, B) {VM_ROW6(S, B)}
#endif

/* [x_step is 16][blocks - 1][pixels - 1] */
#if VM_VECTORS >= 2 * VM_BLOCK / VM_LANES
static void (*const tiles[2][2][VM_PIXELS])(const vm_gemm *) = {{VM_ROW(1, 1), VM_ROW(1, 2)}, {VM_ROW(16, 1), VM_ROW(16, 2)}};
#else
static void (*const tiles[2][1][VM_PIXELS])(const vm_gemm *) = {{VM_ROW(1, 1)}, {VM_ROW(16, 1)}};
#endif
