/* Sizes of recorded modules, which stay text: they are short, and evaluated once per call. */
#include "polynomial.h"

#include <string.h>

vm_word vm_next_word(const char **at) {
    while (**at == ' ') ++*at;
    const vm_word w = {*at, strcspn(*at, " ;")};
    *at += w.length;
    return w;
}

bool vm_word_is(vm_word w, const char *text) { return strlen(text) == w.length && !memcmp(w.at, text, w.length); }

bool vm_to_number(vm_word w, int64_t *out) {
    const bool negative = w.length && *w.at == '-';
    *out = 0;
    for (size_t i = negative; i < w.length; i++) {
        const int digit = w.at[i] - '0';
        if (digit < 0 || digit > 9 || __builtin_mul_overflow(*out, 10, out) || __builtin_add_overflow(*out, digit, out))
            return false;
    }
    *out = negative ? -*out : *out;
    return w.length > negative;
}

static vm_status wrong(const char *text) {
    return vm_fail(VM_EINVAL, VM_EXPECTED("polynomial", "terms such as \"640 n h + 5\" of its variables", "\"%.60s\""),
                   text);
}

/* Evaluates the polynomial at *at, and moves *at to the end of its text or of its side of an equation. */
static vm_status evaluate(const vm_scope *known, const char **at, int64_t *out) {
    const char *text = *at;
    int64_t total = 0, term = 0;
    bool over = false, has_term = false;
    for (;;) {
        const vm_word w = vm_next_word(at);
        const bool ends = !w.length || vm_word_is(w, "=") || vm_word_is(w, "!=");
        if (ends || vm_word_is(w, "+")) {
            if (!has_term) return wrong(text);
            over |= __builtin_add_overflow(total, term, &total);
            has_term = false;
            if (ends) break;
        } else if (!has_term) {
            if (!vm_to_number(w, &term)) return wrong(text);
            has_term = true;
        } else {
            size_t i = 0;
            while (i < known->count && !vm_word_is(w, known->name[i])) i++;
            if (i == known->count) return wrong(text);
            over |= __builtin_mul_overflow(term, known->value[i], &term);
        }
    }
    if (over) return vm_fail(VM_EOVERFLOW, "polynomial: expected a value below 2^63, got more of \"%.60s\"", text);
    *out = total;
    return VM_OK;
}

vm_status vm_evaluate(const vm_scope *known, const char *text, int64_t *out) {
    const char *at = text;
    vm_status s = evaluate(known, &at, out);
    return s || (!*at && at[-1] != '=') ? s : wrong(text);
}

vm_status vm_case_holds(const vm_scope *known, const char **at, bool *out) {
    const char *text = *at;
    int64_t left, right;
    *out = false;
    vm_status s = evaluate(known, at, &left);
    if (s) return s;
    if (*at == text || (*at)[-1] != '=') return wrong(text);
    const bool equal = (*at)[-2] != '!';
    s = evaluate(known, at, &right);
    *out = !s && (left == right) == equal;
    return s || (*at)[-1] != '=' ? s : wrong(text);
}

vm_status vm_all_hold(const vm_scope *known, const char *cases, bool *out) {
    vm_status s = VM_OK;
    bool held;
    *out = true;
    for (const char *at = cases; !s && *at; at += *at == ';') {
        s = vm_case_holds(known, &at, &held);
        *out = *out && held;
    }
    return s;
}
