/* Any calls on a simulated process: what it says it holds is what was taken, and its peak is no more than the
 * allocator's. An allocation of the core's own may fail at any step. */
#include "../../csrc/predict/process.h"
#include "input.h"

enum { HELD = 64, TRACES = 3 };

/* Bytes of a list, which has each name once. */
static uint64_t sum_of(const vm_process_list *list) {
    uint64_t total = 0;
    for (size_t i = 0; i < list->count; i++) {
        total += list->item[i].bytes;
        for (size_t j = 0; j < i; j++) CHECK(list->item[i].name != list->item[j].name);
    }
    return total;
}

static vm_trace *a_trace(input *in) {
    vm_trace *t;
    CHECK(!vm_trace_new(&t));
    for (uint64_t steps = 1 + take(in, 1) % 12; steps; steps--) {
        const uint64_t op = take(in, 1);
        const char name[2] = {(char)('a' + op / 8 % 4), 0};
        uint32_t id;
        if (op % 4 == 0) vm_trace_blas(t, op & 64 ? VM_TRACE_CUBLAS : VM_TRACE_CUBLASLT, name);
        if (op % 4 == 1 && t->ids) vm_trace_give(t, (uint32_t)(op / 8 % t->ids));
        if (op % 4 == 2) {
            const vm_conv c = vm_conv_square(VM_F16, (int64_t[]){1, 8, 8, 8 + (int64_t)(op / 8)}, 8, 3, 1, 1);
            vm_trace_conv(t, &c, name);
        }
        if (op % 4 == 3) vm_trace_take(t, number(in) % ((uint64_t)1 << 33), name, &id);
    }
    return t;
}

/* steady: a convolution takes the same in every call. */
static void call(vm_process *p, const vm_trace *t, input *in, bool steady, uint64_t held[HELD]) {
    uint64_t *workspace = calloc(t->convs + 1, 8), *next = calloc(t->convs + 1, 8), *address = calloc(t->ids + 1, 8);
    uint64_t *allocated = calloc(t->steps + 1, 8), *reserved = calloc(t->steps + 1, 8);
    for (size_t i = 0; i < t->convs; i++)
        workspace[i] = steady ? (uint64_t)t->conv[i].size[1] * 1234567 : number(in) % ((uint64_t)1 << 33);
    const vm_status s = vm_process_call(p, t, workspace, next, address, allocated, reserved);
    vm_mem_fail_at(0);
    for (size_t i = 0; i < t->ids; i++) {
        CHECK(!address[i] || (!s && vm_process_bytes_at(p, address[i])));
        size_t free_place = 0;
        while (free_place < HELD && held[free_place]) free_place++;
        if (free_place < HELD)
            held[free_place] = address[i];
        else if (address[i])
            CHECK(!vm_process_release(p, address[i]));
    }
    free(workspace);
    free(next);
    free(address);
    free(allocated);
    free(reserved);
}

/* A phase's work is that since the reading before; a reading that fails leaves it for the next one. */
static void read_phase(vm_process *p, const char *name, uint64_t bytes, uint64_t times) {
    const uint64_t half = UINT64_MAX / 2;
    size_t before, count;
    vm_process_readings(p, &before);
    vm_process_times(p, times);
    vm_process_count(p, &(vm_work){bytes, half, half + 1, 0, 1}, bytes);
    vm_process_times(p, 1);
    vm_process_count(p, &(vm_work){1, 1, 1, 1, 1}, 0);
    const vm_status s = vm_process_read(p, name);
    const vm_reading *last = vm_process_readings(p, &count);
    CHECK(count == before + !s);
    if (s) return;
    last += before;
    CHECK(!strcmp(vm_names_get(&vm_process_script(p)->names, last->name), name));
    CHECK(last->outside >= bytes && last->work.flops >= bytes * times + 1 && last->work.host_flops > times);
    if (times >= 2) CHECK(last->work.attended == UINT64_MAX && last->work.moved == UINT64_MAX);
}

enum { ROWS = 3 };

/* The same steps with other workspaces: each row alone says what all say together. */
static void again(vm_process *p, input *in) {
    const vm_trace *script = vm_process_script(p);
    const size_t convs = script->convs;
    const vm_process_span span[2] = {{0, script->steps}, {script->steps / 2, script->steps}};
    uint64_t *row = calloc(ROWS * convs + 1, 8), together[2 * ROWS], alone[2];
    for (size_t i = 0; i < ROWS * convs; i++) row[i] = number(in) % ((uint64_t)1 << 26);
    const bool above = take(in, 1) & 1, played = !vm_process_again(p, span, 2, above, row, ROWS, together);
    vm_mem_fail_at(0);
    for (size_t i = 0; i < ROWS && played; i++) {
        CHECK(!vm_process_again(p, span, 2, above, row + i * convs, 1, alone));
        CHECK(alone[0] == together[2 * i] && alone[1] == together[2 * i + 1]);
    }
    free(row);
}

static void check(vm_process *p, const vm_talloc *talloc, const uint64_t held[HELD]) {
    const vm_talloc_stat *s = &vm_talloc_get_stats(talloc)->of[VM_TALLOC_ALLOCATED_BYTES][VM_TALLOC_ALL];
    vm_process_list list;
    const vm_trace_step *step;
    uint64_t bytes = 0;
    for (int i = 0; i < HELD; i++) bytes += vm_process_bytes_at(p, held[i]);
    CHECK(bytes <= (uint64_t)s->current);
    CHECK(!vm_process_peak(p, SIZE_MAX, &list, &step) && sum_of(&list) <= (uint64_t)s->peak);
    CHECK(!step || step->name < vm_process_script(p)->names.count);
    vm_scratch_free(list.item);
    CHECK(!vm_process_baseline(p, &list));
    sum_of(&list);
    vm_scratch_free(list.item);
}

/* The same on a device of so many bytes, with every allocation of the core's own failing once in a while; without end
 * and without failures all is as it was. */
static void replay(const vm_process *from, const vm_talloc *talloc, const vm_process_blas *blas, uint64_t total,
                   bool first_only, uint64_t fails, bool same) {
    vm_talloc_config config = *vm_talloc_settings(talloc);
    size_t count, counted;
    vm_talloc *other;
    vm_process *p;
    config.total_memory = total;
    CHECK(!vm_talloc_new(&config, &other) && !vm_process_new(other, blas, &p));
    vm_mem_fail_at(fails);
    const vm_status s = vm_process_replay(p, from, first_only);
    vm_mem_fail_at(0);
    const vm_reading *was = vm_process_readings(from, &count), *is = vm_process_readings(p, &counted);
    CHECK(counted <= count && (s || counted == count));
    if (same) {
        CHECK(!s && vm_process_most_reserved(p) == vm_process_most_reserved(from));
        for (size_t i = 0; i < count; i++)
            CHECK(was[i].peak_allocated == is[i].peak_allocated && was[i].peak_reserved == is[i].peak_reserved &&
                  was[i].base_reserved == is[i].base_reserved);
    }
    for (size_t i = 0; i < counted; i++) {
        CHECK(was[i].name == is[i].name && was[i].outside == is[i].outside);
        CHECK(!memcmp(&was[i].work, &is[i].work, sizeof is[i].work));
    }
    if (total && !s) CHECK(vm_process_most_reserved(p) <= total);
    vm_process_free(p);
    vm_talloc_delete(other);
}

/* The least device is enough, and one that is 2 MiB smaller is not or was not looked at. */
static void least(const vm_process *p, const vm_talloc *talloc, const vm_process_blas *blas, bool first_only) {
    uint64_t bytes;
    if (vm_process_least(p, first_only, 0, vm_process_most_reserved(p), &bytes)) return;
    CHECK(bytes % (2 << 20) == 0);
    if (vm_talloc_is_plain(talloc)) replay(p, talloc, blas, bytes ? bytes : 2 << 20, first_only, 0, false);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    input in = {data, data + size};
    const uint64_t how = take(&in, 1);
    const vm_talloc_config config = {.total_memory = how & 1 ? (uint64_t)1 << (20 + how / 16) : 0};
    const vm_process_blas blas = {number(&in) % (1 << 24), number(&in) % (1 << 24), how / 2 % 3};
    vm_talloc *talloc;
    vm_process *p;
    CHECK(!vm_talloc_new(&config, &talloc) && !vm_process_new(talloc, &blas, &p));
    vm_trace *t[TRACES];
    for (int i = 0; i < TRACES; i++) t[i] = a_trace(&in);
    uint64_t held[HELD] = {0};
    bool is_same = !(how & 1) && how & 64;
    for (int step = 0; step < 100 && in.at < in.end; step++) {
        const uint64_t op = take(&in, 1), which = take(&in, 1) % HELD, fails = op & 128 ? take(&in, 1) : 0;
        const char name[3] = {'w', (char)('a' + op / 8 % 8), 0};
        uint64_t bytes[2] = {number(&in) % ((uint64_t)1 << 33), 513}, address[2];
        size_t copied;
        is_same &= !fails;
        vm_mem_fail_at(fails);
        switch (op % 8) {
        case 0:
        case 1:
            if (!held[which]) vm_process_hold(p, name, name, bytes, 1, &held[which]);
            break;
        case 2:
            if (!held[which] && !vm_process_hold(p, name, name, bytes, 2, address)) {
                vm_mem_fail_at(0);
                held[which] = address[0];
                CHECK(!vm_process_release(p, address[1]));
            }
            break;
        case 3:
            if (which % 8 == 7) read_phase(p, name, bytes[0], op / 8);
            if (held[which]) held[which] = vm_process_release(p, held[which]) ? held[which] : 0;
            break;
        case 4:
            if (held[which]) vm_process_copy(p, "weights", &held[which], bytes, bytes[0] > 0, &copied);
            break;
        case 5:
            if (which % 2)
                again(p, &in);
            else
                vm_process_reset_peak(p);
            break;
        default: call(p, t[which % TRACES], &in, how & 64, held);
        }
        vm_mem_fail_at(0);
        check(p, talloc, held);
    }
    CHECK(vm_process_release(p, 12345) == VM_EINVAL);
    replay(p, talloc, &blas, 0, how & 128, 0, is_same);
    replay(p, talloc, &blas, number(&in) % ((uint64_t)1 << 34), how & 128, take(&in, 1), false);
    least(p, talloc, &blas, how & 128);
    vm_process_free(p);
    for (int i = 0; i < TRACES; i++) vm_trace_free(t[i]);
    vm_talloc_delete(talloc);
    return 0;
}
