/* The verdict and the margin (judge.h). */
#include "judge.h"

#include "sizes.h"

const char *const vm_verdict_name[VM_VERDICTS] = {"does not fit", "tight", "fits"};
const char *const vm_reason_name[VM_REASONS] = {"", "guesses", "no room", "marginal", "untried"};

uint64_t vm_judge_bound(uint64_t reserved, uint64_t exact) {
    enum { SEGMENT = 20 << 20, SIXTEENTH = 16 };
    const uint64_t rest = reserved > exact ? reserved - exact : 0, margin = rest / SIXTEENTH + (rest % SIXTEENTH != 0);
    return vm_sum64(vm_sum64(exact, rest), vm_sum64(margin, SEGMENT));
}

static vm_reason why_tight(const vm_card_use *use) {
    if (use->guesses) return VM_REASON_GUESSES;
    if (use->most > use->available) return VM_REASON_NO_ROOM;
    /* one byte more than the card certainly gives */
    const uint64_t sure = use->available > use->kept_more ? use->available - use->kept_more : 0;
    if (use->may_take(use->context, sure + 1)) return VM_REASON_MARGINAL;
    return use->untried ? VM_REASON_UNTRIED : VM_REASON_NONE;
}

vm_verdict vm_judge(const vm_card_use *use, vm_reason *why) {
    *why = use->fits ? why_tight(use) : VM_REASON_NONE;
    if (!use->fits) return VM_DOES_NOT_FIT;
    return *why == VM_REASON_NONE ? VM_FITS : VM_TIGHT;
}

/* Returns: the most bytes of any phase. reserved: [phases], by PyTorch's allocator. */
static uint64_t most_of(const vm_judge_phase *phase, const uint64_t *reserved, size_t phases) {
    uint64_t most = 0;
    for (size_t i = 0; i < phases; i++) most = VM_MAX(most, vm_sum64(reserved[i], phase[i].outside));
    return most;
}

vm_status vm_judge_rows(vm_process *p, const vm_judge_phase *phase, size_t first, size_t phases, bool above,
                        uint64_t *row, size_t rows, size_t likely, vm_takes *out) {
    size_t readings;
    const vm_reading *const reading = vm_process_readings(p, &readings);
    vm_process_span *span = NULL;
    uint64_t *reserved = NULL; /* [rows + 1][phases]; the last row is the run as played, then each phase's most */
    if (first > readings || phases > readings - first)
        return vm_fail(VM_EINVAL, VM_EXPECTED("judge", "a reading for each of %zu phases", "%zu from number %zu on"),
                       phases, readings, first);
    vm_status s = vm_scratch_new(phases, sizeof *span, &span);
    if (!s) s = vm_scratch_new(rows + 1, phases * sizeof *reserved, &reserved);
    for (size_t i = 0; !s && i < phases; i++) {
        const vm_reading *const r = &reading[first + i];
        span[i] = r->span;
        reserved[rows * phases + i] = r->peak_reserved - (above ? r->base_reserved : 0);
    }
    if (!s && rows && phases) s = vm_process_again(p, span, phases, above, row, rows, reserved);
    if (!s) {
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
    }
    vm_scratch_free(reserved);
    vm_scratch_free(span);
    return s;
}
