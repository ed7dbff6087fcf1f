/* Writes and plays any script. Storages that the script has are allocated, and no list of live storages exceeds the
 * allocator's peak. An allocation of the core's own may fail at any step. */
#include "../../csrc/predict/judge.h"
#include "input.h"

enum { HELD = 64, TRACES = 3 };
#define NOTHING UINT32_MAX

/* Bytes of a list, which has each name once. */
static uint64_t sum_of(const vm_live_list *list) {
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
static void call(vm_play *p, vm_script *script, vm_trace *t, input *in, bool steady, uint32_t held[HELD]) {
    uint64_t *workspace = calloc(t->convs + 1, 8), *next = calloc(t->convs + 1, 8);
    const vm_event *e;
    for (size_t i = 0; i < t->convs; i++)
        workspace[i] = steady ? (uint64_t)t->conv[i].size[1] * 1234567 : number(in) % ((uint64_t)1 << 33);
    if (!vm_script_call(script, t, &e)) {
        const vm_event event = *e;
        vm_status s = vm_play_answer_call(p, &script->call[event.of], workspace, next);
        if (s) vm_script_failed(script, 0);
        if (!s) s = vm_play_follow(p, script);
        vm_mem_fail_at(0);
        for (uint32_t i = 0; i < event.count; i++) {
            const uint32_t id = event.first + i;
            CHECK(vm_play_has(p, id) == !s && script->storage[id].is_there == !s);
            size_t free_place = 0;
            while (free_place < HELD && held[free_place] != NOTHING) free_place++;
            if (!s && free_place < HELD)
                held[free_place] = id;
            else if (!s)
                CHECK(!vm_script_give(script, &id, 1) && !vm_play_follow(p, script));
        }
    }
    vm_mem_fail_at(0);
    free(workspace);
    free(next);
}

/* A phase's work is that since the phase before; one that fails leaves it for the next one. */
static void read_phase(vm_play *p, vm_script *script, const char *name, uint64_t bytes, uint64_t times) {
    const uint64_t half = UINT64_MAX / 2;
    size_t before, count;
    vm_play_readings(p, &before);
    vm_script_times(script, times);
    vm_script_count(script, &(vm_work){bytes, half, half + 1, 0, 1}, bytes);
    vm_script_times(script, 1);
    vm_script_count(script, &(vm_work){1, 1, 1, 1, 1}, 0);
    vm_status s = vm_script_read(script, name);
    if (!s) s = vm_play_follow(p, script);
    vm_play_readings(p, &count);
    CHECK(count == before + !s && script->phases == count);
    if (s) return;
    const vm_phase *const last = &script->phase[before];
    CHECK(!strcmp(vm_names_get(&script->names, last->name), name));
    CHECK(last->outside >= bytes && last->work.flops >= bytes * times + 1 && last->work.host_flops > times);
    if (times >= 2) CHECK(last->work.attended == UINT64_MAX && last->work.moved == UINT64_MAX);
}

enum { ROWS = 3 };

/* The same events with other workspaces: each row alone says what all say together. */
static void play_rows(const vm_play *p, const vm_script *script, input *in) {
    const size_t convs = script->convs;
    const vm_span span[2] = {{0, script->events}, {script->events / 2, script->events}};
    uint64_t *row = calloc(ROWS * convs + 1, 8), together[2 * ROWS], alone[2];
    for (size_t i = 0; i < ROWS * convs; i++) row[i] = number(in) % ((uint64_t)1 << 26);
    const bool above = take(in, 1) & 1, played = !vm_play_rows(p, span, 2, above, row, ROWS, together);
    vm_mem_fail_at(0);
    for (size_t i = 0; i < ROWS && played; i++) {
        CHECK(!vm_play_rows(p, span, 2, above, row + i * convs, 1, alone));
        CHECK(alone[0] == together[2 * i] && alone[1] == together[2 * i + 1]);
    }
    free(row);
}

static void check(const vm_play *p, const vm_script *script, const uint32_t held[HELD]) {
    const vm_talloc_stat *s = &vm_talloc_get_stats(vm_play_device(p))->of[VM_TALLOC_ALLOCATED_BYTES][VM_TALLOC_ALL];
    vm_live_list list;
    uint32_t step;
    uint64_t bytes = 0;
    for (int i = 0; i < HELD; i++) {
        CHECK(held[i] == NOTHING || script->storage[held[i]].is_there);
        if (held[i] != NOTHING) bytes += script->storage[held[i]].bytes;
    }
    CHECK(bytes <= (uint64_t)s->current);
    CHECK(!vm_play_peak(p, SIZE_MAX, &list, &step) && sum_of(&list) <= (uint64_t)s->peak);
    CHECK(step == VM_NO_NAME || step < script->names.count);
    vm_scratch_free(list.item);
    CHECK(!vm_play_baseline(p, &list));
    sum_of(&list);
    vm_scratch_free(list.item);
}

/* Plays the script on a device of `total` bytes. The allocation number `fails` of the core fails. same: expect equal
 * readings, because the device is unlimited and nothing fails. */
static void elsewhere(const vm_play *from, uint64_t total, bool first_only, uint64_t fails, bool same) {
    size_t count, counted, taken;
    vm_play *p;
    CHECK(!vm_play_elsewhere(from, NULL, total, first_only, &p));
    vm_mem_fail_at(fails);
    const vm_status s = vm_play_run(p, &taken);
    vm_mem_fail_at(0);
    const vm_reading *was = vm_play_readings(from, &count), *is = vm_play_readings(p, &counted);
    CHECK(counted <= count && (s || counted == count));
    if (same) {
        CHECK(!s && vm_play_most_reserved(p) == vm_play_most_reserved(from));
        for (size_t i = 0; i < count; i++) CHECK(!memcmp(&was[i], &is[i], sizeof was[i]));
    }
    if (total && !s) CHECK(vm_play_most_reserved(p) <= total);
    vm_play_free(p);
}

/* The least device is enough, and one that is 2 MiB smaller is not or was not looked at. */
static void least(const vm_play *p, bool first_only) {
    uint64_t bytes;
    if (vm_judge_least(p, first_only, 0, vm_play_most_reserved(p), &bytes)) return;
    CHECK(bytes % (2 << 20) == 0);
    if (vm_talloc_is_plain(vm_play_device(p))) elsewhere(p, bytes ? bytes : 2 << 20, first_only, 0, false);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    input in = {data, data + size};
    const uint64_t how = take(&in, 1);
    const vm_talloc_config config = {.total_memory = how & 1 ? (uint64_t)1 << (20 + how / 16) : 0};
    const vm_blas blas = {number(&in) % (1 << 24), number(&in) % (1 << 24), how / 2 % 3};
    vm_script *script;
    vm_talloc *talloc;
    vm_play *p;
    CHECK(!vm_talloc_new(&config, &talloc) && !vm_script_new(&script));
    CHECK(!vm_play_new(script, talloc, &blas, config.total_memory, &p));
    vm_trace *t[TRACES];
    for (int i = 0; i < TRACES; i++) t[i] = a_trace(&in);
    uint32_t held[HELD];
    for (int i = 0; i < HELD; i++) held[i] = NOTHING;
    bool is_same = !(how & 1) && how & 64;
    for (int step = 0; step < 100 && in.at < in.end; step++) {
        const uint64_t op = take(&in, 1), which = take(&in, 1) % HELD, fails = op & 128 ? take(&in, 1) : 0;
        const char name[3] = {'w', (char)('a' + op / 8 % 8), 0};
        const uint64_t bytes[2] = {number(&in) % ((uint64_t)1 << 33), 513};
        uint32_t first, *const one = &held[which];
        is_same &= !fails;
        vm_mem_fail_at(fails);
        switch (op % 8) {
        case 0:
        case 1:
            if (*one == NOTHING && !vm_script_take(script, name, name, bytes, 1, &first) && !vm_play_follow(p, script))
                *one = first;
            break;
        case 2:
            if (*one != NOTHING || vm_script_take(script, name, name, bytes, 2, &first) || vm_play_follow(p, script))
                break;
            vm_mem_fail_at(0);
            *one = first++;
            CHECK(!vm_script_give(script, &first, 1) && !vm_play_follow(p, script));
            break;
        case 3:
            if (which % 8 == 7) read_phase(p, script, name, bytes[0], op / 8);
            if (*one != NOTHING && !vm_script_give(script, one, 1) && !vm_play_follow(p, script)) *one = NOTHING;
            break;
        case 4:
            first = *one;
            if (first != NOTHING && !vm_script_replace(script, "weights", &first, bytes, 1) &&
                !vm_play_follow(p, script))
                *one = first;
            break;
        case 5:
            if (which % 2)
                play_rows(p, script, &in);
            else if (!vm_script_reset_peak(script))
                vm_play_follow(p, script);
            break;
        default: call(p, script, t[which % TRACES], &in, how & 64, held);
        }
        vm_mem_fail_at(0);
        check(p, script, held);
    }
    CHECK(vm_script_give(script, &(uint32_t){NOTHING}, 1) == VM_EINVAL);
    elsewhere(p, 0, how & 128, 0, is_same);
    elsewhere(p, number(&in) % ((uint64_t)1 << 34), how & 128, take(&in, 1), false);
    least(p, how & 128);
    vm_play_free(p);
    vm_script_free(script);
    for (int i = 0; i < TRACES; i++) vm_trace_free(t[i]);
    vm_talloc_delete(talloc);
    return 0;
}
