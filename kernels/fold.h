/* A 3x3 filter over an image whose pixels were doubled meets every source pixel under several taps. Summing those first
 * gives four 2x2 filters, one for each parity of the output's row and column: the same in real arithmetic, and 16
 * products instead of 36. */
#ifndef VM_FOLD_H
#define VM_FOLD_H

#include <stddef.h>

/* Which of three taps in a row (first to last) fall on tap `a` of parity `phase`: 0 | 1 2 and 0 1 | 2. */
static inline void vm_folded_taps(size_t phase, size_t a, size_t *first, size_t *last) {
    *first = a == 0 ? 0 : phase + 1;
    *last = a == 0 ? phase : 2;
}

#endif
