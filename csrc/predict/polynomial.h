/* Polynomials of named whole numbers, as the files of recorded modules write them: "640 n h w + 5". */
#ifndef VM_POLYNOMIAL_H
#define VM_POLYNOMIAL_H

#include "../vm.h"

/* A word of a text, which ends at a space or a semicolon. Borrowed from the text. */
typedef struct vm_word {
    const char *at;
    size_t length;
} vm_word;

/* The next word, past spaces; of length 0 at the text's end or a semicolon. */
vm_word vm_next_word(const char **at);
bool vm_word_is(vm_word w, const char *text);
/* A number with nothing behind it; false where it is none or does not fit. */
bool vm_word_number(vm_word w, int64_t *out);

typedef struct vm_scope {
    size_t count;
    const char *const *name;
    const int64_t *value;
} vm_scope;

/* "640 n h w + 5" with the values of a scope, and whether "1 n = 1" or "1 n != 1" holds. VM_EINVAL: it is none, or has
 * other names. VM_EOVERFLOW: a product or a sum does not fit. */
vm_status vm_polynomial(const vm_scope *scope, const char *text, int64_t *out);
vm_status vm_polynomials_hold(const vm_scope *scope, const char *text, bool *out);
/* The same of the case at *at, which is moved past it, to the text's end or a semicolon. */
vm_status vm_case_holds(const vm_scope *scope, const char **at, bool *out);

#endif
