/* Every tile height from 1 to VM_PIXELS (a tail costs its own size, not a full tile), for the VM_PART vectors of one
 * block that fit a tile's registers and, if they fit, for two blocks; and for pixels one block apart (a) and two (b,
 * stride 2). */
#define VM_WIDE (VM_VECTORS >= 2 * VM_BLOCK / VM_LANES)

#if VM_WIDE
#define VM_PART VM_SUBS
#define VM_TILE(P)                                 \
    VM_GEMM(P, VM_PART, VM_BLOCK, gemm_a1_##P)     \
    VM_GEMM(P, VM_PART, 2 * VM_BLOCK, gemm_b1_##P) \
    VM_GEMM(P, 2 * VM_SUBS, VM_BLOCK, gemm_a2_##P) \
    VM_GEMM(P, 2 * VM_SUBS, 2 * VM_BLOCK, gemm_b2_##P)
#else
#define VM_PART VM_VECTORS
#define VM_TILE(P)                             \
    VM_GEMM(P, VM_PART, VM_BLOCK, gemm_a1_##P) \
    VM_GEMM(P, VM_PART, 2 * VM_BLOCK, gemm_b1_##P)
#endif

VM_TILE(1)
VM_TILE(2)
VM_TILE(3)
VM_TILE(4)
VM_TILE(5)
VM_TILE(6)
#define VM_ROW6(N) gemm_##N##_1, gemm_##N##_2, gemm_##N##_3, gemm_##N##_4, gemm_##N##_5, gemm_##N##_6
#if VM_PIXELS == 14
VM_TILE(7)
VM_TILE(8)
VM_TILE(9)
VM_TILE(10)
VM_TILE(11)
VM_TILE(12)
VM_TILE(13)
VM_TILE(14)
#define VM_ROW(N)                                                              \
    {VM_ROW6(N),    gemm_##N##_7,  gemm_##N##_8,  gemm_##N##_9, gemm_##N##_10, \
     gemm_##N##_11, gemm_##N##_12, gemm_##N##_13, gemm_##N##_14}
#else
#define VM_ROW(N) {VM_ROW6(N)}
#endif

/* [stride 2][blocks - 1][pixels - 1] */
#if VM_WIDE
static void (*const tiles[2][2][VM_PIXELS])(const vm_gemm *) = {{VM_ROW(a1), VM_ROW(a2)}, {VM_ROW(b1), VM_ROW(b2)}};
#else
static void (*const tiles[2][1][VM_PIXELS])(const vm_gemm *) = {{VM_ROW(a1)}, {VM_ROW(b1)}};
#endif
