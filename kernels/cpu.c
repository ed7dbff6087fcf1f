/* The CPU backends. The choice follows feature bits and XGETBV of this processor and its operating system. It never
 * follows the model number (it can be masked), nor a timing, which could change bits between processes. */
#include <string.h>

#include "cpu.h"

static char disabled[64];

void vm_cpu_disable(const char *names) { strncpy(disabled, names, sizeof disabled - 1); }

#if defined(VM_HAVE_X86) || defined(VM_HAVE_NEON)
static bool is_disabled(const char *name) {
    const size_t n = strlen(name);
    for (const char *p = disabled; (p = strstr(p, name)); p += n)
        if ((p == disabled || p[-1] == ',') && (p[n] == 0 || p[n] == ',')) return true;
    return false;
}
#endif

#ifdef VM_HAVE_X86
#include <cpuid.h>

static uint64_t xcr0(void) {
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (uint64_t)high << 32 | low;
}

/* Returns: whether the system saves registers between threads. 6: YMM; 0xe6: ZMM and masks; 0x60000: AMX's tiles. */
static bool os_saves(uint64_t state) {
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_OSXSAVE) && (xcr0() & state) == state;
}

/* Every x86-64 has SSE2. */
static bool sse_usable(void) { return !is_disabled("sse"); }

static bool avx2_usable(void) {
    unsigned a, b, c, d;
    if (is_disabled("avx2") || !os_saves(0x6)) return false;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_FMA)) return false;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & bit_AVX2);
}

static bool avx512_usable(void) {
    unsigned a, b, c, d;
    const unsigned want = bit_AVX512F | bit_AVX512VL | bit_AVX512BW | bit_AVX512DQ;
    if (is_disabled("avx512") || !os_saves(0xe6)) return false;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & want) == want;
}

static bool has_avx512bf16(void) {
    enum { AVX512_BF16 = 1 << 5 }; /* a bit of leaf 7, 1, EAX */
    unsigned a, b, c, d;
    return avx512_usable() && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & AVX512_BF16);
}

static bool avx512bf16_usable(void) { return !is_disabled("avx512bf16") && has_avx512bf16(); }

/* Returns: whether vdpbf16ps is faster than the FMA. AMD's (Zen 4, Zen 5) multiplies about twice as many numbers per
 * second, Intel's half as many, with or without AMX. No feature bit tells, so the vendor decides. */
static bool pairs_pay(void) {
    unsigned a, b, c, d;
    return __get_cpuid(0, &a, &b, &c, &d) && b == signature_AMD_ebx && c == signature_AMD_ecx && d == signature_AMD_edx;
}

/* Other operations than products use another set; on the emulator one that more processors have. */
#ifdef VM_EMULATE_AMX
#define VM_AMX_OPS vm_cpu_avx2
static bool amx_usable(void) { return !is_disabled("amx") && avx2_usable(); }
#else
#define VM_AMX_OPS vm_cpu_avx512
static bool amx_usable(void) {
    return !is_disabled("amx") && has_avx512bf16() && os_saves(0x60000) && vm_amx_permitted();
}
#endif
#endif

#ifdef VM_HAVE_NEON
/* Every AArch64 has Advanced SIMD. */
static bool neon_usable(void) { return !is_disabled("neon"); }
#endif

static bool always(void) { return true; }

/* Returns: whether a pass is computed by Winograd's way. It needs a 3x3 convolution of rows with at least 16 channels,
 * and enough pixels to repay transforming its weights; after nearest 2x it always pays. Pairs take two blocks of
 * channels. They round the numbers, so they take this way only where a decode or encode with random weights stays more
 * exact than PyTorch's. Split numbers never do (docs/SPEED.md). */
static bool by_winograd(const vm_cpu *cpu, const vm_pass *p) {
    /* pixels: with fewer, transforming the weights costs more than it saves; over time it saves more (docs/SPEED.md) */
    const size_t worth = p->slices > 1 ? 512 : 1024;
    if (p->ksize != 3 || p->x_format != VM_ROWS || !vm_transforms_of(cpu, p)) return false;
    if (cpu->pairs && (cpu->pairs > 1 || p->x.c % (2 * VM_BLOCK))) return false;
    return p->up || (p->x.c >= VM_BLOCK && p->y.f * p->y.h * p->y.w >= worth);
}

static const vm_method *method_of(const vm_cpu *cpu, const vm_pass *p) {
    if (p->kind == VM_PASS_ATTENTION) return &vm_attention;
    if (p->kind == VM_PASS_MOVE) return &vm_moves;
    return by_winograd(cpu, p) ? &vm_winograd : &vm_direct;
}

static vm_cut cut(const vm_backend *b, const vm_pass *p, bool tight) {
    const double longer = 1.1; /* of a decode that transforms all its weights by task (docs/SPEED.md) */
    vm_cut c = method_of(b->self, p)->cut(b->self, p);
    c.together = VM_MAX(c.out_rows, p->y.f > 1 ? 1 : 2); /* an image's reader may add two rows at once */
    c.cost = tight ? longer : 1;
    return c;
}

static vm_needs needs(const vm_backend *b, const vm_pass *p, const vm_limits *limits, vm_manner manner) {
    vm_needs n = method_of(b->self, p)->needs(b->self, p, manner);
    n.scratch = VM_PRODUCT(limits->threads, n.scratch);
    n.parts = p->stats; /* one: the tiles' sums are merged into it */
    return n;
}

static vm_status workspace(const vm_backend *b, const vm_pass *p, const vm_limits *limits, vm_manner manner,
                           size_t *bytes) {
    (void)b, (void)p, (void)limits, (void)manner;
    *bytes = 0;
    return VM_OK;
}

static vm_status prepare(const vm_backend *b, const vm_pass *p, const vm_operands *at, const vm_exec *exec,
                         vm_tasks *out) {
    return method_of(b->self, p)->prepare(b->self, p, at, exec, out);
}

static vm_status run(const vm_backend *b, const vm_pass *p, const vm_operands *at, const vm_exec *exec) {
    const vm_cut c = cut(b, p, at->manner.tight);
    vm_tasks tasks;
    vm_status s;
    if ((s = prepare(b, p, at, exec, &tasks))) return s;
    if ((s = exec->each(exec->pool, c.rows * c.columns, p->y.h, tasks.fn, tasks.job))) return s;
    return tasks.rows ? tasks.rows(&tasks, 0, c.rows) : VM_OK;
}

/* ---- the list ----
 *
 * For each kind of numbers, every instruction set that can compute them. A set without fast products of pairs widens
 * halves to floats, and computes float32 at any precision as the highest, as PyTorch does. Plain C has products of
 * pairs as documentation of the fast ones. */

#define VM_BACKEND(SET, USABLE, OPS, PRODUCTS, DTYPE, PRECISION, ...)                                      \
    {                                                                                                      \
        .name = SET, .usable = USABLE, .dtype = DTYPE, .precision = PRECISION, .cut = cut, .needs = needs, \
        .workspace = workspace, .run = run, .prepare = prepare, .device = &vm_host, .self = &(vm_cpu) {    \
            &OPS, PRODUCTS, DTYPE, __VA_ARGS__                                                             \
        }                                                                                                  \
    }

/* Kinds of numbers, in the order of the tables below. */
enum { HIGHEST, HIGH, MEDIUM, HALF, BRAIN, KINDS };

static size_t kind_of(vm_dtype dtype, vm_precision precision) {
    return dtype == VM_F16          ? HALF
           : dtype == VM_BF16       ? BRAIN
           : precision == VM_HIGH   ? HIGH
           : precision == VM_MEDIUM ? MEDIUM
                                    : HIGHEST;
}

/* Floats, for any numbers. */
#define VM_FLOATS(SET, USABLE, OPS)                                    \
    {VM_BACKEND(SET, USABLE, OPS, &OPS.floats, VM_F32, VM_HIGHEST, 0), \
     VM_BACKEND(SET, USABLE, OPS, &OPS.floats, VM_F32, VM_HIGH, 0),    \
     VM_BACKEND(SET, USABLE, OPS, &OPS.floats, VM_F32, VM_MEDIUM, 0),  \
     VM_BACKEND(SET, USABLE, OPS, &OPS.floats, VM_F16, VM_HIGHEST, 0), \
     VM_BACKEND(SET, USABLE, OPS, &OPS.floats, VM_BF16, VM_HIGHEST, 0)}

/* Pairs, if suitable. */
#define VM_PAIRS(SET, USABLE, OPS, PAIRS)                              \
    {VM_BACKEND(SET, USABLE, OPS, &OPS.floats, VM_F32, VM_HIGHEST, 0), \
     VM_BACKEND(SET, USABLE, OPS, &PAIRS, VM_F32, VM_HIGH, 3),         \
     VM_BACKEND(SET, USABLE, OPS, &PAIRS, VM_F32, VM_MEDIUM, 1),       \
     VM_BACKEND(SET, USABLE, OPS, &PAIRS, VM_F16, VM_HIGHEST, 3),      \
     VM_BACKEND(SET, USABLE, OPS, &PAIRS, VM_BF16, VM_HIGHEST, 1)}

static const vm_backend ref[KINDS] = VM_PAIRS("ref", always, vm_cpu_ref, vm_pairs_ref);
#ifdef VM_HAVE_X86
static const vm_backend sse[KINDS] = VM_FLOATS("sse", sse_usable, vm_cpu_sse);
static const vm_backend avx2[KINDS] = VM_FLOATS("avx2", avx2_usable, vm_cpu_avx2);
static const vm_backend avx512[KINDS] = VM_FLOATS("avx512", avx512_usable, vm_cpu_avx512);
/* These tables have no floats of their own. An entry exists if products of pairs (one, or three, for each product of
 * numbers) are faster than floats somewhere. AVX512_BF16's are about 2x as fast on Zen 4 and 5, AMX's 16x. */
static const vm_backend avx512bf16[KINDS] = {
    [MEDIUM] = VM_BACKEND("avx512bf16", avx512bf16_usable, vm_cpu_avx512, &vm_pairs_avx512bf16, VM_F32, VM_MEDIUM, 1),
    [BRAIN] = VM_BACKEND("avx512bf16", avx512bf16_usable, vm_cpu_avx512, &vm_pairs_avx512bf16, VM_BF16, VM_HIGHEST, 1)};
static const vm_backend amx[KINDS] = {
    [HIGH] = VM_BACKEND("amx", amx_usable, VM_AMX_OPS, &vm_pairs_amx, VM_F32, VM_HIGH, 3),
    [MEDIUM] = VM_BACKEND("amx", amx_usable, VM_AMX_OPS, &vm_pairs_amx, VM_F32, VM_MEDIUM, 1),
    [HALF] = VM_BACKEND("amx", amx_usable, VM_AMX_OPS, &vm_pairs_amx, VM_F16, VM_HIGHEST, 3),
    [BRAIN] = VM_BACKEND("amx", amx_usable, VM_AMX_OPS, &vm_pairs_amx, VM_BF16, VM_HIGHEST, 1)};
#endif
#ifdef VM_HAVE_NEON
static const vm_backend neon[KINDS] = VM_FLOATS("neon", neon_usable, vm_cpu_neon);
#endif

const vm_backend *vm_backend_at(vm_dtype dtype, vm_precision precision, size_t i) {
#ifdef VM_HAVE_X86
    const bool pairs = pairs_pay();
#endif
    const vm_backend *const sets[] = {
#ifdef VM_HAVE_X86
        amx,  pairs ? avx512bf16 : avx512, pairs ? avx512 : avx512bf16, avx2, sse,
#endif
#ifdef VM_HAVE_NEON
        neon,
#endif
        ref,
    };
    for (size_t set = 0; set < sizeof sets / sizeof *sets; set++) {
        const vm_backend *b = &sets[set][kind_of(dtype, precision)];
        if (b->name && !i--) return b;
    }
    return NULL;
}
