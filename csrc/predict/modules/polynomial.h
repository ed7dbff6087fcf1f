/* Sizes of recorded modules: polynomials of their variables, and cases such as "1 n = 1". */
#ifndef VM_POLYNOMIAL_H
#define VM_POLYNOMIAL_H

#include "../../vm.h"

/* A word of a text, up to a space or a semicolon. */
typedef struct vm_word {
    const char *at;
    size_t length;
} vm_word;

/* Variables by name. */
typedef struct vm_scope {
    size_t count;
    const char *const *name;
    const int64_t *value;
} vm_scope;

/* Returns: the next word, past spaces; of length 0 at the text's end or a semicolon. */
vm_word vm_next_word(const char **at);

bool vm_word_is(vm_word w, const char *text);

/* Parses a whole word; false if it is no number or does not fit. */
bool vm_to_number(vm_word w, int64_t *out);

/* Evaluates a whole text, "640 n h w + 5". */
vm_status vm_evaluate(const vm_scope *known, const char *text, int64_t *out);

/* Evaluates the case at *at, "1 n = 1" or "1 n != 1", and moves *at to the text's end or a semicolon. */
vm_status vm_case_holds(const vm_scope *known, const char **at, bool *out);

/* *out: whether all cases of a call hold, "1 n = 1; 1 h != 2 h1". */
vm_status vm_all_hold(const vm_scope *known, const char *cases, bool *out);

#endif
