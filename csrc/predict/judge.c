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
    /* one byte more than the card surely gives */
    const uint64_t sure = use->available > use->kept_more ? use->available - use->kept_more : 0;
    if (use->may_take(use->context, sure + 1)) return VM_REASON_MARGINAL;
    return use->untried ? VM_REASON_UNTRIED : VM_REASON_NONE;
}

vm_verdict vm_judge(const vm_card_use *use, vm_reason *why) {
    *why = use->fits ? why_tight(use) : VM_REASON_NONE;
    if (!use->fits) return VM_DOES_NOT_FIT;
    return *why == VM_REASON_NONE ? VM_FITS : VM_TIGHT;
}
