/* Runs CUDA blocks on one CPU thread: a fiber a thread, one block after the other, or one pair of blocks.
 *
 * A fiber runs until it comes to a barrier or an operation of its warp. The last one to arrive lets all go on. Which
 * fiber runs next is random, but one warp runs as far as it can before another begins: in that order a missing barrier
 * does most harm. */
#include "block.h"
#include "cuda_on_cpu.h"

#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <functional>
#include <vector>

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace {

enum { WARP = 32, WARPGROUP = 128, MOST_THREADS = 1024, PAIR = 2, STACK = 256 << 10 };

#if defined(__x86_64__) && !defined(VM_UCONTEXT)
extern "C" void vm_switch(void **from, void *to);
asm(".text\n.globl vm_switch\n.hidden vm_switch\n.type vm_switch, @function\nvm_switch:\n"
    "push %rbp\npush %rbx\npush %r12\npush %r13\npush %r14\npush %r15\n"
    "mov %rsp, (%rdi)\nmov %rsi, %rsp\n"
    "pop %r15\npop %r14\npop %r13\npop %r12\npop %rbx\npop %rbp\nret\n"
    ".size vm_switch, . - vm_switch\n");
struct context {
    void *at;
    void make(char *stack, void (*entry)()) {
        void **top = (void **)(stack + STACK);
        *--top = nullptr; /* a return address that entry never uses, and puts the stack as the ABI wants it */
        *--top = (void *)entry;
        at = top - 6;
    }
    void go(context &to) { vm_switch(&at, to.at); }
};
#else
struct context {
    ucontext_t at;
    void make(char *stack, void (*entry)()) {
        getcontext(&at);
        at.uc_stack.ss_sp = stack;
        at.uc_stack.ss_size = STACK;
        at.uc_link = nullptr;
        makecontext(&at, entry, 0);
    }
    void go(context &to) { swapcontext(&at, &to.at); }
};
#endif

struct copy {
    char *to;
    const char *from;
    int group;
};

struct fiber {
    context state;
    uint32_t index; /* among all that run */
    uint32_t rank;  /* of its block in a pair */
    uint3 thread, block;
    bool done;
    const char *meets; /* what it waits for; NULL while it can run */
    vm_place at;
    void *lent;
    void (*act)(void *const[]);
    std::vector<copy> copies;
    int groups;
};

/* The block that runs, or the pair. */
fiber fibers[MOST_THREADS];
fiber *self, *first_arrived[PAIR];
context scheduler;
uint32_t blocks, threads, all; /* blocks that run, threads of each, threads of all */
uint32_t arrived[PAIR], pair_arrived, gone, gone_of[PAIR];
uint32_t ready[MOST_THREADS / WARP], warp_arrived[MOST_THREADS / WARP];
uint32_t group_arrived[MOST_THREADS / WARPGROUP], some_arrived[PAIR][16];

struct bulk {
    std::function<void()> copy;
    uint32_t bytes;
    uint64_t *barrier;
};
std::vector<bulk> bulks; /* that have not arrived */

struct product {
    void (*work)(const void *);
    std::vector<char> what;
    int group;
};
/* Of each warpgroup: products that are still to be done, and how many groups of them were committed. */
std::vector<product> products[MOST_THREADS / WARPGROUP];
int product_groups[MOST_THREADS / WARPGROUP];
char *stacks, *dynamic[PAIR];
size_t dynamic_bytes;
const vm_entry *kernel;
const void *arguments;
uint32_t random_state, random_seed = 1;

sigjmp_buf escape;
volatile sig_atomic_t inside;
char message[1024];

extern "C" char __start_vm_shared[] __attribute__((weak, visibility("hidden")));
extern "C" char __stop_vm_shared[] __attribute__((weak, visibility("hidden")));

uint32_t chance() {
    random_state ^= random_state << 13;
    random_state ^= random_state >> 17;
    return random_state ^= random_state << 5;
}

uint32_t any_bit(uint32_t mask) {
    const uint32_t turn = chance() >> 27;
    return (turn + (uint32_t)__builtin_ctz(mask >> turn | mask << (-turn & 31))) & 31;
}

void describe(char *out, size_t room) {
    size_t n = (size_t)snprintf(out, room, "%s, block (%u, %u, %u)", kernel->name, blockIdx.x, blockIdx.y, blockIdx.z);
    if (self && n < room) snprintf(out + n, room - n, ", thread (%u, %u, %u)", threadIdx.x, threadIdx.y, threadIdx.z);
}

[[noreturn]] void stuck() {
    const fiber *waits = nullptr;
    uint32_t same = 0;
    for (uint32_t i = 0; i < all; i++) {
        if (fibers[i].done) continue;
        if (!waits) waits = &fibers[i];
        same += fibers[i].meets == waits->meets && fibers[i].at.line == waits->at.line;
    }
    self = nullptr;
    vm_fault("%u threads wait at %s (%s:%d) for ever: of %u, %u have exited and %u wait elsewhere", same, waits->meets,
             waits->at.file, waits->at.line, all, gone, all - gone - same);
}

uint32_t ready_warps() {
    uint32_t warps = 0;
    for (uint32_t i = 0; i < (all + WARP - 1) / WARP; i++) warps |= (uint32_t)(ready[i] != 0) << i;
    return warps;
}

void bulk_arrives(uint32_t i);

/* Leaves a fiber that cannot go on for one that can. */
void next(context &from) {
    uint32_t warp = self ? self->index / WARP : 0;
    if (!self || !ready[warp]) {
        uint32_t warps = ready_warps();
        while (!warps && gone < all && !bulks.empty()) { /* who waits may have come before the copy was begun */
            bulk_arrives((uint32_t)(chance() % bulks.size()));
            warps = ready_warps();
        }
        if (!warps) {
            if (gone < all) stuck();
            from.go(scheduler);
        }
        warp = any_bit(warps);
    }
    fiber *const to = &fibers[warp * WARP + any_bit(ready[warp])];
    if (to == self) return;
    self = to;
    threadIdx = to->thread;
    blockIdx = to->block;
    from.go(to->state);
}

void fiber_main() {
    fiber *const me = self;
    kernel->run(arguments);
    me->done = true;
    gone++;
    gone_of[me->rank]++;
    ready[me->index / WARP] &= ~(1u << me->index % WARP);
    next(me->state);
    abort(); /* nobody comes back here */
}

void wait(const char *what, vm_place at) {
    fiber *const me = self;
    me->meets = what;
    me->at = at;
    ready[me->index / WARP] &= ~(1u << me->index % WARP);
    next(me->state);
}

void release(uint32_t first, uint32_t count) {
    for (uint32_t i = first; i < first + count; i++) fibers[i].meets = nullptr;
    for (uint32_t w = first / WARP; w * WARP < first + count; w++)
        ready[w] = first + count - w * WARP >= WARP ? ~0u : (1u << (first + count - w * WARP)) - 1;
}

void check_place(const fiber *other, const char *what, vm_place at) {
    if (other->meets == what && other->at.line == at.line) return;
    vm_fault("at %s (%s:%d) while thread %u of those that run waits at %s (%s:%d)", what, at.file, at.line,
             other->index, other->meets, other->at.file, other->at.line);
}

const char at_barrier[] = "__syncthreads", at_warp[] = "an operation of the warp";
const char at_warpgroup[] = "an operation of the warpgroup", at_some[] = "a barrier of some threads";
const char at_phase[] = "a barrier in shared memory", at_pair[] = "the barrier of a pair";

/* Lets those go on that wait at `what` for `lent`. */
void wake(const char *what, const void *lent) {
    for (uint32_t i = 0; i < all; i++) {
        fiber &f = fibers[i];
        if (f.done || f.meets != what || f.lent != lent) continue;
        f.meets = nullptr;
        ready[i / WARP] |= 1u << i % WARP;
    }
}

__attribute__((no_sanitize("address"))) void fill_static() {
    for (volatile char *p = __start_vm_shared; p < __stop_vm_shared; p++) *p = (char)0xff;
}

void run_blocks(const uint3 &first) {
    self = nullptr;
    memset(arrived, 0, sizeof arrived);
    memset(gone_of, 0, sizeof gone_of);
    pair_arrived = gone = 0;
    fill_static();
    for (uint32_t i = 0; i < blocks && dynamic_bytes; i++) memset(dynamic[i], 0xff, dynamic_bytes);
    for (uint32_t i = 0; i < all; i++) {
        fiber &f = fibers[i];
        const uint32_t at = i % threads;
        f.index = i;
        f.rank = i / threads;
        f.thread = {at % blockDim.x, at / blockDim.x % blockDim.y, at / blockDim.x / blockDim.y};
        f.block = {first.x + f.rank, first.y, first.z};
        f.done = false;
        f.meets = nullptr;
        f.copies.clear();
        f.groups = 0;
        f.state.make(stacks + (size_t)i * (STACK + getpagesize()) + getpagesize(), fiber_main);
    }
    memset(warp_arrived, 0, sizeof warp_arrived);
    memset(group_arrived, 0, sizeof group_arrived);
    memset(some_arrived, 0, sizeof some_arrived);
    for (std::vector<product> &left : products) left.clear();
    memset(product_groups, 0, sizeof product_groups);
    bulks.clear();
    release(0, all);
    next(scheduler);
    self = nullptr;
    for (uint32_t i = 0; i < blocks && dynamic_bytes; i++)
        if (!vm_guarded_whole(dynamic[i], dynamic_bytes, 16))
            vm_fault("wrote beside the %zu bytes of dynamic shared memory", dynamic_bytes);
}

void on_signal(int number, siginfo_t *info, void *) {
    if (!inside) { /* not ours: as if we had not been here */
        signal(number, SIG_DFL);
        return;
    }
    char where[256];
    describe(where, sizeof where);
    snprintf(message, sizeof message, "%s: %s at address %p", where,
             number == SIGFPE ? "division by zero" : "illegal access", info->si_addr);
    siglongjmp(escape, number == SIGFPE ? VM_FAULT : VM_ILLEGAL_ADDRESS);
}

/* While a grid runs, its wrong addresses are faults of the kernel and not the end of the process. */
struct signals {
    static constexpr int numbers[] = {SIGSEGV, SIGBUS, SIGFPE};
    struct sigaction old[3];
    stack_t old_stack;
    std::vector<char> stack = std::vector<char>(64 << 10);
    signals() {
        stack_t mine = {};
        mine.ss_sp = stack.data();
        mine.ss_size = stack.size();
        sigaltstack(&mine, &old_stack);
        struct sigaction action = {};
        action.sa_sigaction = on_signal;
        action.sa_flags = SA_SIGINFO | SA_ONSTACK;
        for (int i = 0; i < 3; i++) sigaction(numbers[i], &action, &old[i]);
    }
    ~signals() {
        for (int i = 0; i < 3; i++) sigaction(numbers[i], &old[i], nullptr);
        sigaltstack(&old_stack, nullptr);
    }
};

vm_outcome refuse(const char *format, ...) {
    va_list list;
    va_start(list, format);
    vsnprintf(message, sizeof message, format, list);
    va_end(list);
    return VM_REFUSED;
}

}  // namespace

/* ---- what kernels call ---- */

void vm_fault(const char *format, ...) {
    char where[256];
    describe(where, sizeof where);
    int n = snprintf(message, sizeof message, "%s: ", where);
    va_list list;
    va_start(list, format);
    vsnprintf(message + n, sizeof message - (size_t)n, format, list);
    va_end(list);
    siglongjmp(escape, VM_FAULT);
}

void vm_meet_block(vm_place at) {
    const uint32_t rank = self->rank;
    if (arrived[rank]++)
        check_place(first_arrived[rank], at_barrier, at);
    else
        first_arrived[rank] = self;
    if (arrived[rank] < threads) {
        wait(at_barrier, at);
        return;
    }
    arrived[rank] = 0;
    release(rank * threads, threads);
}

void vm_meet_warp(vm_place at, void *mine, void (*act)(void *const[WARP])) {
    const uint32_t warp = self->index / WARP, first = warp * WARP;
    uint32_t &here = warp_arrived[warp];
    self->lent = mine;
    self->act = act;
    if (here) {
        const fiber *const other = &fibers[first + (uint32_t)__builtin_ctz(here)];
        check_place(other, at_warp, at);
        if (other->act != act) vm_fault("two operations of the warp at once (%s:%d)", at.file, at.line);
    }
    here |= 1u << self->index % WARP;
    if (here != ~0u) {
        wait(at_warp, at);
        return;
    }
    void *lanes[WARP];
    for (int i = 0; i < WARP; i++) lanes[i] = fibers[first + (uint32_t)i].lent;
    act(lanes);
    here = 0;
    for (int i = 0; i < WARP; i++) fibers[first + (uint32_t)i].meets = nullptr;
    ready[warp] = ~0u;
}

void vm_meet_warpgroup(vm_place at, void *mine, void (*act)(void *const[WARPGROUP])) {
    const uint32_t group = self->index / WARPGROUP, first = group * WARPGROUP;
    self->lent = mine;
    self->act = act;
    for (uint32_t i = first; group_arrived[group] && i < first + WARPGROUP; i++)
        if (fibers[i].meets == at_warpgroup) {
            check_place(&fibers[i], at_warpgroup, at);
            if (fibers[i].act != act) vm_fault("two operations of the warpgroup at once (%s:%d)", at.file, at.line);
            break;
        }
    if (++group_arrived[group] < WARPGROUP) {
        wait(at_warpgroup, at);
        return;
    }
    void *lanes[WARPGROUP];
    for (int i = 0; i < WARPGROUP; i++) lanes[i] = fibers[first + (uint32_t)i].lent;
    act(lanes);
    group_arrived[group] = 0;
    release(first, WARPGROUP);
}

void vm_meet_count(vm_place at, uint32_t id, uint32_t count) {
    if (id < 1 || id > 15) vm_fault("barrier %u (%s:%d)", id, at.file, at.line);
    uint32_t *const here = &some_arrived[self->rank][id];
    self->lent = here;
    if (++*here < count) {
        wait(at_some, at);
        return;
    }
    *here = 0;
    wake(at_some, here);
}

/* ---- pairs of blocks ---- */

uint32_t vm_pair_rank() {
    if (blocks != PAIR) vm_fault("a block that is in no pair");
    return self->rank;
}

void vm_meet_both(vm_place at) {
    vm_pair_rank();
    self->lent = &pair_arrived;
    if (++pair_arrived < all) {
        wait(at_pair, at);
        return;
    }
    pair_arrived = 0;
    wake(at_pair, &pair_arrived);
}

void *vm_there(const void *p, uint32_t rank) {
    if (gone_of[rank] == threads) vm_fault("shared memory of a block that has ended");
    return dynamic[rank] + ((const char *)p - dynamic[vm_pair_rank()]);
}

/* ---- barriers in shared memory, products that are done later ---- */

namespace {
struct phases {
    uint16_t count, left;
    uint32_t parity : 1;
    int32_t bytes : 31; /* that are expected and not there yet; below 0: there and not yet expected */
};
static_assert(sizeof(phases) == sizeof(uint64_t), "one fits in the other");

bool is_dynamic(const char *from, size_t bytes, uint32_t rank) {
    return dynamic_bytes && from >= dynamic[rank] && from + bytes <= dynamic[rank] + dynamic_bytes;
}

phases *phases_of(uint64_t *barrier) {
    bool some = vm_is_shared(barrier, 8);
    for (uint32_t i = 0; i < blocks; i++) some = some || is_dynamic((char *)barrier, 8, i);
    if (!some || (uintptr_t)barrier % 8) vm_fault("a barrier at %p", (void *)barrier);
    phases *const p = (phases *)barrier;
    if (!p->count || p->count > MOST_THREADS) vm_fault("a barrier that nobody has begun");
    return p;
}

void look(uint64_t *barrier) {
    phases *const p = phases_of(barrier);
    if (p->left || p->bytes) return;
    p->left = p->count;
    p->parity ^= 1;
    wake(at_phase, barrier);
}

void copy_bulk(const bulk &one) {
    one.copy();
    phases_of(one.barrier)->bytes -= (int32_t)one.bytes;
    look(one.barrier);
}

/* One that is on its way. */
void bulk_arrives(uint32_t i) {
    const bulk copy = bulks[i];
    bulks.erase(bulks.begin() + (ptrdiff_t)i);
    copy_bulk(copy);
}
}  // namespace

void vm_barrier_begin(uint64_t *barrier, uint32_t count) {
    if (!vm_is_shared(barrier, 8)) vm_fault("a barrier at %p", (void *)barrier);
    phases p = {};
    p.count = p.left = (uint16_t)count;
    memcpy(barrier, &p, sizeof p);
}

void vm_barrier_here(uint64_t *barrier, uint32_t bytes) {
    phases *const p = phases_of(barrier);
    if (!p->left) vm_fault("a barrier that more threads come to than it counts");
    p->left--;
    p->bytes += (int32_t)bytes;
    look(barrier);
}

void vm_barrier_until(vm_place at, uint64_t *barrier, uint32_t parity) {
    const phases *const p = phases_of(barrier);
    while (p->parity == parity) {
        size_t i = 0;
        while (i < bulks.size() && bulks[i].barrier != barrier) i++;
        if (i < bulks.size()) {
            bulk_arrives((uint32_t)i);
            continue;
        }
        self->lent = barrier;
        wait(at_phase, at);
    }
}

void vm_bulk_later(std::function<void()> copy, uint32_t bytes, uint64_t *barrier, bool expected) {
    const bulk one = {std::move(copy), bytes, barrier};
    if (expected && phases_of(barrier)->bytes < (int32_t)bytes)
        vm_fault("a bulk copy of %u bytes that nobody expects", bytes);
    if (chance() & 1)
        copy_bulk(one);
    else
        bulks.push_back(one);
}

void vm_product_later(void (*work)(const void *), const void *what, size_t bytes) {
    const uint32_t group = self->index / WARPGROUP;
    if (products[group].empty() && chance() & 1) {
        work(what);
        return;
    }
    products[group].push_back({work, {(const char *)what, (const char *)what + bytes}, product_groups[group]});
}

void vm_product_commit() { product_groups[self->index / WARPGROUP]++; }

void vm_product_finish(int but) {
    const uint32_t group = self->index / WARPGROUP;
    std::vector<product> &left = products[group];
    size_t done = 0;
    for (; done < left.size() && left[done].group + but < product_groups[group]; done++)
        left[done].work(left[done].what.data());
    left.erase(left.begin(), left.begin() + (ptrdiff_t)done);
}

void *vm_dynamic_shared() {
    if (!dynamic_bytes) vm_fault("dynamic shared memory, of which the launch gave none");
    return dynamic[self->rank];
}

bool vm_is_shared(const void *p, size_t bytes) {
    const char *const from = (const char *)p, *const to = from + bytes;
    return is_dynamic(from, bytes, self ? self->rank : 0) || (from >= __start_vm_shared && to <= __stop_vm_shared);
}

static void copy_now(const copy &c) {
    if (c.from)
        memcpy(c.to, c.from, 16);
    else
        memset(c.to, 0, 16);
}

void vm_copy_later(void *shared, const void *global) {
    const copy c = {(char *)shared, (const char *)global, self->groups};
    if (chance() & 1)
        copy_now(c);
    else
        self->copies.push_back(c);
}

void vm_copy_close() { self->groups++; }

void vm_copy_finish(int but) {
    std::vector<copy> &copies = self->copies;
    size_t left = 0;
    for (const copy &c : copies) {
        if (c.group + but < self->groups)
            copy_now(c);
        else
            copies[left++] = c;
    }
    copies.resize(left);
}

/* ---- grids and memory ---- */

const vm_entry *vm_entry::first;

const vm_entry *vm_entry::find(const char *name) {
    const vm_entry *e = first;
    while (e && strcmp(e->name, name)) e = e->next;
    return e;
}

bool vm_grid_fits(const uint32_t grid[3], const uint32_t block[3]) {
    for (int i = 0; i < 3; i++) {
        const uint32_t most_blocks = i ? 65535 : 0x7fffffff, most_threads = i < 2 ? MOST_THREADS : 64;
        if (grid[i] < 1 || grid[i] > most_blocks || block[i] < 1 || block[i] > most_threads) return false;
    }
    return block[0] * block[1] * block[2] <= MOST_THREADS;
}

vm_outcome vm_run_grid(const vm_entry *entry, const uint32_t grid[3], const uint32_t block[3], size_t shared_bytes,
                       const void *args) {
    if (!vm_grid_fits(grid, block))
        return refuse("%s: no grid (%u, %u, %u) of blocks (%u, %u, %u)", entry->name, grid[0], grid[1], grid[2],
                      block[0], block[1], block[2]);
    blocks = entry->pairs ? PAIR : 1;
    threads = block[0] * block[1] * block[2];
    all = blocks * threads;
    if (entry->pairs && (grid[0] % PAIR || threads % WARPGROUP || all > MOST_THREADS))
        return refuse("%s: no pairs of %u blocks of %u threads", entry->name, grid[0], threads);
    if (!stacks) {
        const size_t page = (size_t)getpagesize(), bytes = MOST_THREADS * (STACK + page);
        stacks =
            (char *)mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (stacks == MAP_FAILED) abort();
        for (size_t i = 0; i < MOST_THREADS; i++) mprotect(stacks + i * (STACK + page), page, PROT_NONE);
    }
    kernel = entry;
    arguments = args;
    gridDim = {grid[0], grid[1], grid[2]};
    blockDim = {block[0], block[1], block[2]};
    blockIdx = {0, 0, 0};
    random_state = random_seed;
    dynamic_bytes = shared_bytes;
    for (uint32_t i = 0; i < blocks && shared_bytes; i++) dynamic[i] = (char *)vm_guarded_take(shared_bytes, 16);
    signals caught;
    vm_outcome outcome = (vm_outcome)sigsetjmp(escape, 1);
    if (outcome == VM_RAN) {
        inside = 1;
        for (uint32_t z = 0; z < grid[2]; z++)
            for (uint32_t y = 0; y < grid[1]; y++)
                for (uint32_t x = 0; x < grid[0]; x += blocks) {
                    blockIdx = {x, y, z};
                    run_blocks(blockIdx);
                }
    }
    inside = 0;
    for (uint32_t i = 0; i < blocks && shared_bytes; i++) vm_guarded_give(dynamic[i], shared_bytes, 16);
    return outcome;
}

namespace {
struct guarded {
    size_t page = (size_t)getpagesize(), whole, before, after;
    guarded(size_t bytes, size_t align) {
        after = -bytes & (align - 1);
        whole = (bytes + after + page - 1) / page * page + 2 * page;
        before = whole - page - after - bytes;
    }
};
enum { BESIDE = 0xa5 };
}  // namespace

void *vm_guarded_take(size_t bytes, size_t align) {
    const guarded g(bytes, align);
    char *const base =
        (char *)mmap(nullptr, g.whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) return nullptr;
    mprotect(base, g.page, PROT_NONE);
    mprotect(base + g.whole - g.page, g.page, PROT_NONE);
    memset(base + g.page, BESIDE, g.before - g.page);
    memset(base + g.before, 0xff, bytes);
    memset(base + g.before + bytes, BESIDE, g.after);
    return base + g.before;
}

bool vm_guarded_whole(const void *p, size_t bytes, size_t align) {
    const guarded g(bytes, align);
    const unsigned char *const at = (const unsigned char *)p;
    for (size_t i = 1; i <= g.before - g.page; i++)
        if (at[-(ptrdiff_t)i] != BESIDE) return false;
    for (size_t i = 0; i < g.after; i++)
        if (at[bytes + i] != BESIDE) return false;
    return true;
}

void vm_guarded_give(void *p, size_t bytes, size_t align) {
    const guarded g(bytes, align);
    munmap((char *)p - g.before, g.whole);
}

extern "C" {
const char *emulator_error() { return message; }
/* Another order of threads and copies. */
void emulator_seed(uint32_t seed) { random_seed = seed ? seed : 1; }

/* 0, or what emulator_error() then explains. */
int emulator_launch(const char *name, const uint32_t grid[3], const uint32_t block[3], size_t shared_bytes,
                    const void *args, size_t args_bytes) {
    const vm_entry *const entry = vm_entry::find(name);
    if (!entry) return refuse("no kernel is called %s", name);
    if (entry->args_bytes != args_bytes)
        return refuse("%s wants %zu bytes of arguments, got %zu", name, entry->args_bytes, args_bytes);
    return vm_run_grid(entry, grid, block, shared_bytes, args);
}
}
