/* The verdict and the margin (judge.h). */
#include "judge.h"

#include "sizes.h"

enum { PAGE = 2 << 20 };

const char *const vm_verdict_name[VM_VERDICTS] = {"does not fit", "tight", "fits", ""};
const char *const vm_reason_name[VM_REASONS] = {"", "guesses", "no room", "marginal", "untried"};

uint64_t vm_judge_bound(uint64_t reserved, uint64_t exact) {
    enum { SEGMENT = 20 << 20, SIXTEENTH = 16 };
    const uint64_t rest = reserved > exact ? reserved - exact : 0, margin = rest / SIXTEENTH + (rest % SIXTEENTH != 0);
    return vm_sum64(vm_sum64(exact, rest), vm_sum64(margin, SEGMENT));
}

vm_verdict vm_judge(const vm_card_use *use, vm_reason *why) {
    /* bytes that the card certainly gives */
    const uint64_t sure = use->available > use->kept_more ? use->available - use->kept_more : 0;
    *why = VM_REASON_NONE;
    if (!use->fits) return VM_DOES_NOT_FIT;
    if (use->guesses)
        *why = VM_REASON_GUESSES;
    else if (use->most > use->available)
        *why = VM_REASON_NO_ROOM;
    else if (use->bound > sure)
        *why = VM_REASON_MARGINAL;
    else if (use->is_rough)
        return VM_UNDECIDED;
    else if (use->untried)
        *why = VM_REASON_UNTRIED;
    return *why == VM_REASON_NONE ? VM_FITS : VM_TIGHT;
}

/* Returns: the most bytes of any phase that counts. reserved: [phases], by PyTorch's allocator. */
static uint64_t most_of(const vm_judge_phase *phase, const uint64_t *reserved, size_t phases) {
    uint64_t most = 0;
    for (size_t i = 0; i < phases; i++)
        if (!phase[i].bound_only) most = VM_MAX(most, vm_sum64(reserved[i], phase[i].outside));
    return most;
}

vm_status vm_judge_rows(const vm_play *p, const vm_judge_phase *phase, size_t phases, bool above, uint64_t *row,
                        size_t rows, size_t likely, vm_takes *out) {
    size_t readings;
    const vm_reading *const reading = vm_play_readings(p, &readings);
    vm_span *span = NULL;
    uint64_t *reserved = NULL; /* [rows + 1][phases]; the last row is the run as played, then each phase's most */
    for (size_t i = 0; i < phases; i++)
        if (phase[i].reading >= readings)
            return vm_fail(VM_EINVAL, VM_EXPECTED("judge", "a reading of %zu", "number %zu"), readings,
                           phase[i].reading);
    vm_status s;
    if ((s = vm_scratch_new(phases, sizeof *span, &span))) goto done;
    if ((s = vm_scratch_new(rows + 1, phases * sizeof *reserved, &reserved))) goto done;
    for (size_t i = 0; i < phases; i++) {
        const vm_reading *const r = &reading[phase[i].reading];
        span[i] = r->span;
        reserved[rows * phases + i] = r->peak_reserved - (above ? r->base_reserved : 0);
    }
    if (rows && phases && (s = vm_play_rows(p, span, phases, above, row, rows, reserved))) goto done;
    uint64_t *const most = reserved + rows * phases;
    const uint64_t own = most_of(phase, most, phases);
    *out = (vm_takes){own, own, own, 0};
    for (size_t i = 0; i < rows; i++) {
        const uint64_t total = most_of(phase, reserved + i * phases, phases);
        if (i < likely) out->least = VM_MIN(out->least, total), out->most = VM_MAX(out->most, total);
        for (size_t k = 0; k < phases; k++) most[k] = VM_MAX(most[k], reserved[i * phases + k]);
    }
    for (size_t k = 0; k < phases; k++)
        out->bound = VM_MAX(out->bound, vm_sum64(phase[k].outside, vm_judge_bound(most[k], phase[k].exact)));
done:
    vm_scratch_free(reserved);
    vm_scratch_free(span);
    return s;
}

/* ---- the least device ---- */

/* The outcome of a play, the same on every device from `most` on and below `refused`. */
typedef struct tried {
    uint64_t most, refused;
    bool full;
    uint64_t with_outside; /* peak of PyTorch's memory plus the memory outside it; 0 if none is outside */
} tried;

typedef struct search {
    const vm_play *p;
    /* Another play of p's script, if a device that is no larger than needed changes nothing; otherwise NULL. It stops
     * at the first event for which `low` bytes are too few, and every try goes on from there. */
    vm_play *begun;
    uint64_t low;
    bool first_only;
    tried *tried;
    size_t count;
} search;

static tried outcome(const vm_play *p) {
    size_t count;
    const vm_reading *reading = vm_play_readings(p, &count);
    const vm_phase *const phase = vm_play_script(p)->phase;
    tried t = {.most = vm_play_most_reserved(p),
               .refused = vm_talloc_get_stats(vm_play_device(p))->least_refused,
               .full = vm_play_oom(p)};
    for (size_t i = 0; i < count; i++)
        if (phase[i].outside) t.with_outside = VM_MAX(t.with_outside, reading[i].peak_reserved + phase[i].outside);
    return t;
}

static vm_status try(const search *s, uint64_t capacity, tried *out) {
    size_t taken;
    vm_play *p = NULL;
    vm_status status;
    if (s->begun) {
        if ((status = vm_play_up_to(s->begun, s->p, s->low))) return status;
        status = vm_play_branch(s->begun, capacity, &p);
    } else {
        status = vm_play_elsewhere(s->p, NULL, capacity, s->first_only, &p);
    }
    if (status) return status;
    status = vm_play_run(p, &taken);
    if (!status || vm_play_oom(p)) {
        *out = outcome(p);
        status = VM_OK;
    }
    vm_play_free(p);
    return status;
}

static vm_status fits(search *s, uint64_t capacity, bool *out) {
    const tried *found = NULL;
    for (size_t i = 0; i < s->count && s->begun && !found; i++) {
        const tried *t = &s->tried[i];
        if (t->most <= capacity && (!t->refused || capacity < t->refused)) found = t;
    }
    if (!found) {
        vm_status status;
        if ((status = vm_scratch_grow(&s->tried, s->count, sizeof *s->tried))) return status;
        if ((status = try(s, VM_MAX(capacity, PAGE), &s->tried[s->count]))) return status;
        found = &s->tried[s->count++];
    }
    *out = !found->full && found->with_outside <= capacity;
    return VM_OK;
}

vm_status vm_judge_least(const vm_play *p, bool first_only, uint64_t low, uint64_t high, uint64_t *least) {
    search s = {.p = p, .first_only = first_only};
    uint64_t little = low < high ? low / PAGE : 0, enough = high / PAGE; /* in pages */
    bool is = false;
    vm_status status;
    if ((status = vm_scratch_grow(&s.tried, 0, sizeof *s.tried))) goto done;
    if (vm_talloc_is_plain(vm_play_device(p)) && !vm_play_walked(p) &&
        (status = vm_play_elsewhere(p, NULL, 0, first_only, &s.begun)))
        goto done;
    s.tried[s.count++] = outcome(p); /* the device with enough room */
    if ((status = fits(&s, enough * PAGE, &is))) goto done;
    while (!is) { /* `high` may be too little: with more room A1111 splits its attention less */
        little = enough;
        enough = VM_MAX(2 * enough, 1);
        if (enough > VM_TALLOC_LARGEST / PAGE) {
            status = vm_fail(VM_EOVERFLOW, "least: no device is large enough");
            goto done;
        }
        if ((status = fits(&s, enough * PAGE, &is))) goto done;
    }
    while (!status && enough - little > 1) {
        const uint64_t middle = (little + enough) / 2;
        s.low = little * PAGE;
        status = fits(&s, middle * PAGE, &is);
        if (is)
            enough = middle;
        else
            little = middle;
    }
done:
    *least = enough * PAGE;
    vm_play_free(s.begun);
    vm_scratch_free(s.tried);
    return status;
}
